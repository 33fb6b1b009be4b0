"""A host is destroyed with its memory and its disk, and training continues from its peers' memory.

    make demo-hosts

Trains the GPT of ``train_gpt.py`` on four hosts with one rank each (FSDP2, torchrun --nnodes=4;
``--hosts`` sets another number).
Every host keeps copies of another host's checkpoints in its memory. In the middle of the training
one host is destroyed: its link is cut, all its processes are killed, its memory and its disk are
removed. The job restarts on the three remaining hosts and a fresh one. At the end the loss of each
step is compared, as bits, with an undisturbed run.

The hosts are network namespaces with links and addresses of their own where this machine lets root
make them (Linux, the command `ip`), else loopback addresses. The exit status is 0 only if every
loss is identical and the lost host's part came from the memory of another one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from starts import Start, children_of, compare, kill, processes_naming

from tieredckpt.errors import AgentError
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.testing import netns

HERE = Path(__file__).parent
NAMESPACE = "lose-a-host"
HOSTS_MAX = 8
POLL_S = 0.05
PHASE_DEADLINE_S = 180.0
"""Longest that one start of training may take; on two quiet cores the longest takes 25 s."""

CONFIG = """\
namespace: {namespace}
memory: {{capacity: 512MiB, keep: {{last: 2}}, replicas: {replicas}}}
tiers:
  - {{name: disk, url: "file://{disk}", every: {every} steps, keep: {{last: 2}}}}
agent: {{runtime_dir: {runtime}, idle_timeout: 5 min}}
recovery: {{wait: 5s}}
{network}
"""


# --- hosts ----------------------------------------------------------------------------------------


@dataclass
class Host:
    """One host: a place in memory, a disk, an address, and what runs there."""

    name: str
    address: str
    runtime: Path
    disk: Path
    namespace: str | None
    config: Path
    torchrun: subprocess.Popen[bytes] | None = None

    def command(self, *arguments: str) -> list[str]:
        """``arguments`` as they are run on this host."""
        return [*(["ip", "netns", "exec", self.namespace] if self.namespace else []), *arguments]

    def kill_ranks(self) -> None:
        """SIGKILL to torchrun and its rank."""
        if self.torchrun is not None:
            # Its ranks first: they are its children as long as it lives, so the ids are sure.
            for pid in children_of(self.torchrun.pid):
                kill(pid)
            self.torchrun.kill()
            self.torchrun.wait()
            self.torchrun = None

    def tool(self, *arguments: str) -> Any:
        """What ``tieredckpt ... --json`` says here."""
        done = subprocess.run(
            self.command(sys.executable, "-m", "tieredckpt", *arguments, "--json"),
            env={**os.environ, "TIEREDCKPT_CONFIG": str(self.config)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"tieredckpt {' '.join(arguments)}: {done.stderr}")
        return json.loads(done.stdout)

    def replicated_step(self) -> int | None:
        """The newest step of which every copy on other hosts is there, says this host's agent."""
        try:
            with contextlib.closing(AgentClient(self.runtime, deadline_s=10)) as client:
                found = [s for s in client.status().namespaces if s.name == NAMESPACE]
        except AgentError:
            return None
        replication = found[0].replication if found else None
        return replication.newest_replicated_step if replication is not None else None


class Hosts:
    """All hosts; a context manager that ends and removes everything.

    Args:
        folder: For disks, configurations, journals and logs.
        every: Steps between two checkpoints on disk.
        loopback: Addresses of this machine even where it can make network namespaces.
    """

    def __init__(self, folder: Path, *, every: int, loopback: bool) -> None:
        self.folder, self.every = folder, every
        self.memory = Path(f"/dev/shm/tieredckpt-hosts-{os.getpid()}")
        self.alive: list[Host] = []
        self.why_not = "asked for" if loopback else netns.missing()
        self.network: netns.Network | None = None
        self._numbers = itertools.count(1)

    def __enter__(self) -> Hosts:
        self.memory.mkdir(mode=0o700)
        if self.why_not is None:
            netns.sweep()
            self.network = netns.Network(subnets=1)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop the cleaning
        for host in self.alive:
            host.kill_ranks()
        for pid in processes_naming(self.memory):  # agents
            kill(pid)
        if self.network is not None:
            self.network.close()
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.folder / "disks", ignore_errors=True)

    def describe(self) -> str:
        """What a host is here."""
        if self.network is not None:
            return "network namespaces, with a link and an address of its own each"
        return f"loopback addresses (no network namespaces: {self.why_not})"

    def add(self, name: str = "", *, replicas: int = 1) -> Host:
        """A fresh host: nothing in its memory, nothing on its disk."""
        number = next(self._numbers)
        name = name or f"host{number}"
        if self.network is not None:
            namespace: str | None = self.network.add(name, number)
            address = self.network.address(name)
            network = "network: {interface: eth0}"
        else:
            namespace, address = None, f"127.77.0.{number}"
            network = f"network: {{cidr: {address}/32}}"
        host = Host(
            name, address, self.memory / name, self.folder / "disks" / name, namespace,
            self.folder / f"{name}.yaml",
        )  # fmt: skip
        host.runtime.mkdir(mode=0o700)
        host.disk.mkdir(parents=True)
        text = CONFIG.format(
            namespace=NAMESPACE, replicas=replicas, disk=host.disk, every=self.every,
            runtime=host.runtime, network=network,
        )  # fmt: skip
        host.config.write_text(text)
        self.alive.append(host)
        return host

    def lose(self, host: Host) -> None:
        """Destroy a host: nobody is told, and nothing is left."""
        if self.network is not None:
            self.network.cut(host.name)
        host.kill_ranks()
        for pid in processes_naming(host.runtime):
            kill(pid)
        if self.network is not None:
            self.network.remove(host.name)
        shutil.rmtree(host.runtime)
        shutil.rmtree(host.disk)
        self.alive.remove(host)


# --- training -------------------------------------------------------------------------------------


class Job:
    """Starts of one training, and the progress bar.

    Args:
        args: The command line.
        folder: For journals and logs.
    """

    def __init__(self, args: argparse.Namespace, folder: Path, console: Console) -> None:
        self.args, self.folder, self.console = args, folder, console
        columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn())
        self.bar = Progress(*columns, TextColumn("steps"), TimeElapsedColumn(), console=console)
        self.task = self.bar.add_task("", total=2 * args.steps)
        self.done_steps = 0
        self._ports = itertools.count(29500)

    def train(
        self,
        name: str,
        hosts: list[Host],
        *,
        until: Callable[[Start], bool] | None = None,
    ) -> Start:
        """Start training on ``hosts`` and follow its journal to the end, or until told to stop.

        Raises RuntimeError with the end of its output: it failed, or took too long.
        """
        start = Start(name, self.folder / f"{name.replace(' ', '-')}.jsonl")
        with socket.socket() as held:
            port = next(self._ports) if hosts[0].namespace else hold_port(held)
            logs = [self.folder / f"{name.replace(' ', '-')}-{host.name}.log" for host in hosts]
            for rank, (host, log) in enumerate(zip(hosts, logs, strict=True)):
                self._launch(host, rank, hosts, port, start.journal, log)
            until_s = time.monotonic() + PHASE_DEADLINE_S
            while True:
                codes = [host.torchrun.poll() for host in hosts if host.torchrun is not None]
                start.refresh()
                steps = self.done_steps + len(start.losses)
                self.bar.update(self.task, description=name, completed=steps)
                if until is not None and until(start):
                    break
                if any(codes) or time.monotonic() > until_s:
                    what = "failed" if any(codes) else f"took more than {PHASE_DEADLINE_S:g} s"
                    texts = [
                        f"--- {log}\n{log.read_text(errors='replace')[-2000:]}" for log in logs
                    ]
                    raise RuntimeError("\n".join([f"{name} {what}", *texts]))
                if all(code == 0 for code in codes):
                    break
                time.sleep(POLL_S)
        self.done_steps += len(start.losses)
        return start

    def _launch(
        self, host: Host, rank: int, hosts: list[Host], port: int, journal: Path, log: Path
    ) -> None:
        args = self.args
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += [f"--nnodes={len(hosts)}", f"--node-rank={rank}"]
        command += [f"--nproc-per-node={args.hosts // len(hosts)}"]
        command += [f"--master-addr={hosts[0].address}", f"--master-port={port}"]
        command += [str(HERE / "train_gpt.py"), f"--config={host.config}", f"--journal={journal}"]
        command += [f"--steps={args.steps}", f"--save-every={args.save_every}", "--batch=1"]
        command += [f"--layers={args.layers}", f"--width={args.width}", f"--context={args.context}"]
        with log.open("wb") as output:
            host.torchrun = subprocess.Popen(
                host.command(*command),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us alone
                env={
                    **os.environ,
                    "TIEREDCKPT_NODE_NAME": host.name,
                    "GLOO_SOCKET_IFNAME": "eth0" if host.namespace else "lo",
                    "OMP_NUM_THREADS": "1",
                },
            )

    def say(self, text: str) -> None:
        """One line above the bar."""
        self.bar.console.print(text, highlight=False)


def hold_port(held: socket.socket) -> int:
    """A port of the loopback device that nobody else gets while ``held`` is open.

    That is bound to it and does not listen, so that torch's store, which starts seconds later, can.
    """
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return int(held.getsockname()[1])


# --- the story ------------------------------------------------------------------------------------


@dataclass
class Result:
    """What came out."""

    hosts: str
    lost: str = ""
    lost_after_step: int = 0
    replicated_step: int | None = None
    restored_step: int | None = None
    segments: list[dict[str, Any]] = field(default_factory=list)
    bytes_by_source: dict[str, int] = field(default_factory=dict)
    losses_compared: int = 0
    losses_different: list[tuple[str, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run_story(job: Job, hosts: Hosts) -> Result:
    """All starts of training, and the loss in between."""
    result = Result(hosts.describe())
    steps, count, number = job.args.steps, job.args.hosts, job.args.lose - 1
    job.say(f"[bold]hosts[/]         {result.hosts}")
    job.say(f"[bold]reference[/]     {steps} steps, {count} ranks on one host, undisturbed")
    calm = hosts.add("calm", replicas=0)
    reference = job.train("reference", [calm])
    hosts.lose(calm)
    job.say(f"              final loss {reference.of('step')[-1]['loss_approx']:.3f}")

    used = [hosts.add(f"host{i + 1}") for i in range(count)]
    victim = used[number]
    job.say(f"[bold]first start[/]   {places_of(used)}")
    first = job.train("first start", used, until=ripe(used[0], steps, job.args.save_every))
    result.replicated_step = used[0].replicated_step()
    hosts.lose(victim)
    for host in hosts.alive:
        host.kill_ranks()  # what a scheduler does: a rank is gone, so the job is
    first.refresh()
    result.lost, result.lost_after_step = victim.name, first.last_step
    job.say(
        f"              [red]{victim.name} is destroyed[/] after step {first.last_step}, with its "
        f"memory and its disk; the copies of step {result.replicated_step} were complete"
    )
    owners = owners_of(hosts.alive[0])

    fresh = used[number] = hosts.add(f"host{count + 1}")
    job.say(f"[bold]second start[/]  {places_of(used)}")
    second = job.train("second start", used)
    report(job, second, result, owners)
    result.losses_compared, result.losses_different = compare(reference, [first, second])
    judge(result, reference, [first, second], number)
    job.bar.update(job.task, description="done", total=job.done_steps, completed=job.done_steps)
    job.say(f"              {fresh.name} has taken {victim.name}'s place")
    return result


def places_of(hosts: list[Host]) -> str:
    """Which rank is where."""
    return ", ".join(f"rank {rank} on {host.name}" for rank, host in enumerate(hosts))


def owners_of(host: Host) -> dict[str, str]:
    """Of each segment that is known on ``host``, which host wrote it."""
    listed = host.tool("ls")["checkpoints"]
    return {each["id"]: each["host"] for found in listed for each in found["segments"]}


def ripe(leader: Host, steps: int, every: int) -> Callable[[Start], bool]:
    """A test: half of the training is done, between two saves, and some step has its copies."""

    def reached(start: Start) -> bool:
        at = start.last_step
        if at >= steps:
            raise RuntimeError("the training ended before any checkpoint had its copies")
        return at > steps // 2 and at % every != 0 and leader.replicated_step() is not None

    return reached


def report(job: Job, start: Start, result: Result, owners: dict[str, str]) -> None:
    """Where each segment of the restored checkpoint came from."""
    event = start.of("start")[0]
    result.restored_step, result.bytes_by_source = event["step"], event["bytes_by_source"]
    result.segments = [
        {"written_on": owners.get(each["id"], "?"), **each} for each in event["segments"]
    ]
    job.say(f"              restored step {event['step']} in {event['seconds']:.2f} s:")
    table = Table("segment", "written on", "from", "MiB", "read by", box=None, header_style="bold")
    found: dict[tuple[str, str, str], dict[int, int]] = {}
    for each in result.segments:
        for place, count in each["bytes_by_source"].items():
            readers = found.setdefault((each["id"][:8], each["written_on"], place), {})
            readers[each["reader"]] = count
    for row, readers in sorted(found.items(), key=lambda item: (item[0][1], item[0][2])):
        ranks = ", ".join(map(str, readers))
        table.add_row(*row, f"{sum(readers.values()) / 2**20:.1f}", f"rank {ranks}")
    job.bar.console.print(table)


def judge(result: Result, reference: Start, starts: list[Start], number: int) -> None:
    """Fill in ``problems``. ``number``: the rank that was on the lost host."""
    problems, wrong = result.problems, result.losses_different
    if wrong:
        problems.append(f"{len(wrong)} of {result.losses_compared} losses differ: {wrong[:5]}")
    missing = reference.losses.keys() - set().union(*(start.losses for start in starts))
    if missing:
        problems.append(f"steps without a loss: {sorted(missing)[:5]}")
    if result.restored_step is None or result.replicated_step is None:
        problems.append("nothing was restored")
        return
    if result.restored_step < result.replicated_step:
        problems.append(
            f"step {result.restored_step} was restored, older than {result.replicated_step}, of "
            "which all copies were there"
        )
    if others := [place for place in result.bytes_by_source if not place.startswith("memory on")]:
        problems.append(f"not everything came from memory: {others}")
    if not any(each["written_on"] == result.lost for each in result.segments):
        problems.append(f"nothing was read of what {result.lost} had written")
    if not any(each["reader"] == number for each in result.segments):
        problems.append(f"the fresh host read nothing (rank {number})")


def main() -> int:
    """Run the demo; see the exit status above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=60, help="steps of a whole run (default 60)")
    add(
        "--save-every", type=int, default=4, metavar="STEPS", help="steps between saves (default 4)"
    )
    numbers = range(2, HOSTS_MAX + 1)
    add("--hosts", type=int, default=4, choices=numbers, help="number of hosts (default 4)")
    add(
        "--lose", type=int, metavar="NUMBER", help="the host to destroy (default: the last but one)"
    )
    add("--loopback", action="store_true", help="use no network namespaces")
    add("--keep", type=Path, metavar="FOLDER", help="keep journals and logs here")
    add("--json", action="store_true", help="print the result as JSON on standard output")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=192)
    add("--context", type=int, default=96)
    args = parser.parse_args()
    args.lose = args.hosts - 1 if args.lose is None else args.lose
    if not 1 <= args.lose <= args.hosts:
        parser.error(f"--lose: hosts have the numbers 1 to {args.hosts}")
    console = Console(width=None if sys.stdout.isatty() else 120, stderr=args.json)
    began_s = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    with contextlib.ExitStack() as stack:
        if args.keep:
            folder = args.keep.absolute()
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tck-hosts-")))
        hosts = stack.enter_context(
            Hosts(folder, every=5 * args.save_every, loopback=args.loopback)
        )
        job = Job(args, folder, console)
        stack.enter_context(job.bar)
        try:
            result = run_story(job, hosts)
        except KeyboardInterrupt:
            job.say("interrupted; all started processes are ended")
            return 130
        except (RuntimeError, OSError) as error:
            job.say(f"[red bold]failed:[/] {error}")
            return 1
    result.seconds = time.monotonic() - began_s
    conclude(console, result)
    if args.json:
        print(json.dumps({**vars(result), "ok": not result.problems}, indent=1))
    return 1 if result.problems else 0


def conclude(console: Console, result: Result) -> None:
    """The verdict."""
    for each in result.problems:
        console.print(f"[red bold]{each}[/]")
    if not result.problems:
        console.print(
            f"[green bold]{result.losses_compared} losses, every one bit-identical to the "
            f"undisturbed run; lost: {result.lost_after_step - (result.restored_step or 0)} steps "
            f"of work[/]   ({result.seconds:.0f} s)"
        )


if __name__ == "__main__":
    sys.exit(main())
