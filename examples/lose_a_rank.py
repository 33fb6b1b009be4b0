"""Ranks, then hosts fail in mid-training, and the other ranks keep their processes and state.

    make demo-live

Trains the GPT of ``train_live.py`` on four ranks (HSDP, two shards with two replicas each) under
``tieredckpt run`` with two standbys. Rank 3 is killed, then rank 0; rank 1 raises; rank 2 hangs; at
last both replicas of one shard are killed, for which the newest checkpoint in memory is loaded.
Then the same training runs on two hosts and a standby host (``lose_live_hosts.py``): one host is
destroyed, then the one that leads. At the end the loss of each step is compared, as bits, with an
undisturbed run.

The exit status is 0 only if every loss is identical.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import lose_live_hosts
from rich.console import Console
from rich.live import Live
from rich.table import Table
from starts import Start, compare

HERE = Path(__file__).parent
FAULTS = ("12:3:kill", "20:0:kill", "28:1:raise", "36:2:hang", "44:0:kill", "44:2:kill")
NAMES = {
    "12:3:kill": "rank 3 is killed",
    "20:0:kill": "rank 0 is killed",
    "28:1:raise": "rank 1 raises",
    "36:2:hang": "rank 2 hangs",
    "44:0:kill": "both replicas of a shard are killed",
}
DEADLINE_S = 240.0
CONFIG = """\
namespace: lose-a-rank
memory: {{capacity: 512MiB, keep: {{last: 2}}}}
agent: {{runtime_dir: {runtime}, idle_timeout: 2 min}}
"""

_ENDED = re.compile(r"generation (\d+) ended: (.*)")
_RESUMED = re.compile(r"generation (\d+): resumed at step (\d+) from the (.*), (.*) lost \((.*)\)")
_UPDATE = re.compile(r"first update after the fault: step (\d+), ([\d.]+) s")


@dataclass
class Recovery:
    """One fault, as the supervisor reports it."""

    cause: str
    step: str = ""
    source: str = ""
    lost: str = ""
    stages: str = ""
    seconds: str = ""


def supervised(folder: Path, steps: int, faults: tuple[str, ...]) -> subprocess.Popen[str]:
    """Start ``tieredckpt run``; its output is in ``folder/output``."""
    folder.mkdir()
    (folder / "tieredckpt.yaml").write_text(CONFIG.format(runtime=folder / "rt"))
    command = [
        sys.executable, "-m", "tieredckpt", "run", "--nproc-per-node", "4",
        "--standby", "2" if faults else "0", "--max-restarts", "10", "--hang", "5",
        "--unwind", "3", str(HERE / "train_live.py"), "--config", str(folder / "tieredckpt.yaml"),
        "--journal", str(folder / "journal"), "--steps", str(steps),
    ]  # fmt: skip
    for fault in faults:
        command += ["--fault", fault]
    with (folder / "output").open("w") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)


def recoveries(output: str) -> list[Recovery]:
    """What the supervisor has reported so far."""
    found: list[Recovery] = []
    for line in output.splitlines():
        if not line.startswith("[tieredckpt]"):
            continue
        if (match := _ENDED.search(line)) is not None:
            found.append(Recovery(match[2]))
        elif found and (match := _RESUMED.search(line)) is not None:
            last = found[-1]
            last.step, last.source, last.lost, last.stages = match[2], match[3], match[4], match[5]
        elif found and (match := _UPDATE.search(line)) is not None:
            found[-1].seconds = match[2]
    return found


def recoveries_of_hosts(outputs: list[str]) -> list[Recovery]:
    """The same of several hosts: each reports the end, the host of rank 0 what follows."""
    found: dict[str, Recovery] = {}
    for output in outputs:
        for each in recoveries(output):
            known = found.setdefault(each.cause, each)
            if each.seconds:
                found[known.cause] = each
    return list(found.values())


def table_of(found: list[Recovery]) -> Table:
    """One row per fault."""
    table = Table(title="Recoveries (seconds from the fault to the first new update)")
    for column in ("fault", "resumed from", "at step", "lost", "seconds", "stages"):
        table.add_column(column, justify="right" if column == "seconds" else "left")
    for each in found:
        table.add_row(each.cause, each.source, each.step, each.lost, each.seconds, each.stages)
    return table


def follow(process: subprocess.Popen[str], folder: Path, console: Console) -> int:
    """Show recoveries until the training ends; its exit code."""
    until_s = time.monotonic() + DEADLINE_S
    with Live(console=console, refresh_per_second=4) as live:
        while process.poll() is None:
            if time.monotonic() > until_s:
                process.terminate()
                process.wait(60)
                raise RuntimeError(f"not done within {DEADLINE_S:g} s")
            live.update(table_of(recoveries((folder / "output").read_text())))
            time.sleep(0.2)
        live.update(table_of(recoveries((folder / "output").read_text())))
    return process.returncode


def lose_hosts(folder: Path, steps: int, console: Console) -> Start:
    """Show recoveries while hosts are destroyed; the journal."""
    console.print("training on two hosts and a standby host, hosts are lost ...")
    with Live(console=console, refresh_per_second=4) as live:
        start, hosts = lose_live_hosts.train(
            folder, steps, lambda outputs: live.update(table_of(recoveries_of_hosts(outputs)))
        )
    console.print(f"(hosts: {hosts})")
    return start


def plot(path: Path, reference: Start, *starts: Start) -> bool:
    """Step and loss over time; False without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (steps, losses) = plt.subplots(2, 1, figsize=(9, 7), layout="constrained")
    styles = (("0.8", 6.0), ("tab:blue", 1.6), ("tab:orange", 1.6))
    for each, (colour, width) in zip((reference, *starts), styles, strict=True):
        events = each.of("step")
        first_s = events[0]["at_s"]
        times = [event["at_s"] - first_s for event in events]
        steps.plot(times, [event["step"] for event in events], color=colour, linewidth=width)
        numbers = [event["step"] for event in events]
        losses.plot(numbers, [e["loss_approx"] for e in events], color=colour, linewidth=width)
    steps.set(
        xlabel="seconds since the first step", ylabel="step", title="Eight faults, no restart"
    )
    losses.set(xlabel="step", ylabel="loss (nats per byte)")
    names = ["undisturbed", "ranks fail", "hosts are lost"]
    figure.legend(names, loc="outside lower center", ncols=3)
    figure.savefig(path)
    return True


def main() -> int:
    """Run both trainings, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=52)
    parser.add_argument("--out", type=Path, default=Path("demo-live.png"), help="the plot")
    args = parser.parse_args()
    console = Console()
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="tck-demo-live-", dir=base))
    starts = []
    try:
        for name, faults in (("undisturbed", ()), ("with faults", FAULTS)):
            console.print(f"training {name} ...")
            here = folder / name.replace(" ", "-")
            code = follow(supervised(here, args.steps, faults), here, console)
            stop_agent(here / "rt")
            if code:
                console.print((here / "output").read_text()[-6000:], markup=False)
                return 1
            starts.append(Start(name, here / "journal"))
            starts[-1].refresh()
        starts.append(lose_hosts(folder / "hosts", args.steps, console))
        count, differing = compare(starts[0], starts[1:])
        total = sum(len(each.of("step")) for each in starts[1:])
        verdict = f"{total} losses of {count} steps, every one bit-identical"
        if differing:
            verdict = f"{len(differing)} of {count} losses differ: {differing[:5]}"
        console.print(verdict, style="bold red" if differing else "bold green")
        if plot(args.out, *starts):
            console.print(f"plot: {args.out}")
        return 1 if differing or count != 2 * args.steps else 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def stop_agent(runtime: Path) -> None:
    """Stop the agent that the training has started."""
    command = [sys.executable, "-m", "tieredckpt", "agent", "stop", "--runtime-dir", str(runtime)]
    subprocess.run(command, capture_output=True, timeout=60, check=False)


if __name__ == "__main__":
    sys.exit(main())
