"""``tieredckpt run``: starts the ranks of this host, and replaces those that fail."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from tieredckpt.cli.sources import CONFIG_VARIABLE, DEFAULT_CONFIG, Place
from tieredckpt.format.manifest import NAME_PATTERN
from tieredckpt.live.control import FOLDER_PREFIX, folders_of_sockets
from tieredckpt.live.decide import Policy
from tieredckpt.live.job import joiner
from tieredckpt.live.processes import spawner
from tieredckpt.live.supervisor import Supervisor

_NO_SERVER = "there is no rendezvous server: leave it out (hosts are found by `discovery`)"
JOB_CHARS_MAX = 64
HOSTS_MAX = 1024
TORCHRUN_ONLY = {
    "--node-rank": "hosts get their numbers from the supervisors: leave it out",
    "--standalone": _NO_SERVER,
    "--rdzv-backend": _NO_SERVER,
    "--rdzv-endpoint": _NO_SERVER,
    "--rdzv-conf": _NO_SERVER,
    "--master-addr": _NO_SERVER,
    "--master-port": _NO_SERVER,
    "--monitor-interval": "the death of a rank is noticed at once: leave it out",
    "--start-method": "ranks are started as commands: leave it out",
}


class _Run(click.Command):
    """Names the reason for flags of torchrun that do not exist here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            reason = TORCHRUN_ONLY.get(error.option_name)
            if reason is None:
                raise
            raise click.UsageError(f"{error.option_name} of torchrun: {reason}", ctx) from None


def _hang(_: click.Context, __: click.Parameter, value: str) -> float | None:
    if value == "auto":
        return None
    try:
        found = float(value.removesuffix("s"))
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise click.BadParameter(f"{value!r} is neither auto nor seconds (0: never)")
    return found


def _nodes(_: click.Context, __: click.Parameter, value: str) -> tuple[int, int]:
    """The least number of hosts, 0 if it is not less, and the largest one."""
    least, colon, most = value.rpartition(":")
    try:
        found = int(least if colon else most), int(most)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= found[1] <= HOSTS_MAX:
        raise click.BadParameter(f"{value!r} is neither N nor MIN:MAX, from 1 to {HOSTS_MAX}")
    return (0 if found[0] == found[1] else found[0]), found[1]


@click.command(
    cls=_Run,
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),  # as torchrun's flags
    },
)
@click.option(
    "--nproc-per-node",
    "size",
    type=click.IntRange(1, 4096),
    required=True,
    help="Ranks on this host.",
)
@click.option(
    "--nnodes",
    default="1",
    show_default=True,
    callback=_nodes,
    metavar="N|MIN:MAX",
    help="Hosts with ranks; the same command runs on each. MIN:MAX: the job goes on with fewer "
    "ranks once processes are lost that none replaces, and with more when hosts arrive.",
)
@click.option(
    "--sharding-group",
    "group",
    type=click.IntRange(1, 4096),
    help="Ranks that hold one whole state together, of which a smaller world has a multiple; with "
    "--nnodes MIN:MAX. [default: --nproc-per-node]",
)
@click.option("--rdzv-id", "job", help="Name of the job, the same on all hosts.")
@click.option(
    "--standby-host",
    "is_standby",
    is_flag=True,
    help="This host has no ranks until it replaces a lost one.",
)
@click.option(
    "--rdzv-timeout",
    "wait",
    type=click.FloatRange(1.0),
    default=600.0,
    show_default=True,
    help="Seconds to wait for hosts that are missing, before exit 3.",
)
@click.option(
    "--allow-split",
    is_flag=True,
    help="Go on with half of the hosts or fewer, though the others may do so, too.",
)
@click.option(
    "--standby",
    type=click.IntRange(0, 64),
    default=1,
    show_default=True,
    help="Further processes that have imported everything, to replace a dead rank.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="Processes started in place of others; 100 updates in a row refill it.",
)
@click.option(
    "--hang",
    default="auto",
    show_default=True,
    callback=_hang,
    metavar="auto|SECONDS",
    help="Time without progress that is a hang; auto: 5 median steps, at least 60 s.",
)
@click.option(
    "--unwind",
    type=click.FloatRange(0.1),
    default=30.0,
    show_default=True,
    help="Seconds that a rank has to leave an ended generation before it is killed.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds between SIGTERM or SIGINT, which are forwarded, and SIGKILL.",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also write output to rank0.log, rank1.log, ... and tieredckpt.log in this folder.",
)
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is a module's name.")
@click.option("--no-python", is_flag=True, help="SCRIPT is a program.")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help=f"The script's, if --nnodes is 2 or more; else ${CONFIG_VARIABLE}, else "
    f"./{DEFAULT_CONFIG}.",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    size: int,
    nnodes: tuple[int, int],
    group: int | None,
    job: str | None,
    is_standby: bool,
    wait: float,
    allow_split: bool,
    config_file: Path | None,
    standby: int,
    max_restarts: int,
    hang: float | None,
    unwind: float,
    grace: float,
    log_dir: Path | None,
    is_module: bool,
    no_python: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Train with live recovery: a rank that dies is replaced, the others keep their processes.

    In place of torchrun on each host. SCRIPT calls tieredckpt.live.run(train, config).

    \b
    Exit codes: 0 training is done; 3 start again (no restarts are left, or too few hosts answer);
    130, 143 after SIGINT, SIGTERM; else the code of the rank that failed at once three times.

    \b
    Examples:
      tieredckpt run --nproc-per-node 4 --standby 1 train.py --steps 1000
      tieredckpt run --nnodes 2 --rdzv-id job-7 --nproc-per-node 8 train.py
    """
    if is_module and no_python:
        raise click.UsageError("--module and --no-python exclude each other")
    python = [] if no_python else [sys.executable, "-m"] if is_module else [sys.executable]
    hosts_min, hosts = nnodes
    if group is not None and not hosts_min:
        raise click.UsageError("--sharding-group needs --nnodes MIN:MAX")
    policy = Policy(
        per_host=size,
        hosts=hosts,
        hosts_min=hosts_min,
        group=group or size,
        standby=standby,
        hang_s=hang,
        unwind_s=unwind,
        wait_s=wait if hosts > 1 else 0.0,
        allow_split=allow_split,
    )
    join = None
    if hosts > 1:
        if not NAME_PATTERN.fullmatch(job or "") or len(job or "") > JOB_CHARS_MAX:
            raise click.UsageError(
                "--nnodes needs --rdzv-id, the same on all hosts of this job alone: at most "
                f"{JOB_CHARS_MAX} letters, digits, '.', '_' and '-'"
            )
        place = Place.find(config_file, None)
        join = joiner(policy, place.config, place.runtime_dir, job or "", is_standby=is_standby)
    elif job or is_standby or allow_split or config_file:
        raise click.UsageError(
            "--rdzv-id, --standby-host, --allow-split and --config need --nnodes 2 or more"
        )
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=folders_of_sockets()[0]) as folder:
        supervisor = Supervisor(
            policy,
            spawner([*python, script, *args]),
            Path(folder),
            max_restarts=max_restarts,
            grace_s=grace,
            write=_writer(log_dir),
            join=join,
        )
        code = supervisor.run()
    raise click.exceptions.Exit(code)


def _writer(log_dir: Path | None) -> Callable[[str], None]:
    """Writes each line; a reader that has gone, or a full disk, does not end the training."""
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)

    def write(line: str) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            click.echo(line)
        if log_dir is not None:
            name, _, text = line[1:].partition("]")
            path = log_dir / f"{name}.log"
            with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
                file.write(text.removeprefix(":").removeprefix(" ") + "\n")

    return write
