"""Four ranks become two and four again while they train, from memory, with a death in between.

    make demo-elastic

Trains the GPT of ``train_elastic.py`` under ``tieredckpt run``, whose size ``tieredckpt live
resize`` changes. The second change meets a rank that is killed while it enters the new world. At
the end every row of data must have been seen exactly once, the losses must be those of four ranks,
and nothing may have been read from anywhere but memory. The picture shows loss, world size and
throughput.

The exit status is 0 only if all of it holds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lose_a_rank import stop_agent
from rich.console import Console
from rich.table import Table
from starts import Start

from tieredckpt import live

HERE = Path(__file__).parent
OFFERS = ((14, 2), (28, 4))
"""At which step which number of ranks is offered."""
DEATH = "enter-3-2"
"""Rank 2 of generation 3, which is to have four ranks again."""
CLOSE = 1e-5
DEADLINE_S = 120.0
CONFIG = """\
namespace: change-size
memory: {{capacity: 512MiB, keep: {{last: 2}}}}
agent: {{runtime_dir: {runtime}, idle_timeout: 2 min}}
"""


class Training:
    """One run of four ranks and a standby process."""

    def __init__(self, folder: Path, steps: int, *options: str) -> None:
        self.folder, self.steps = folder, steps
        self.start = Start(folder.name, folder / "journal")
        folder.mkdir()
        (folder / "tieredckpt.yaml").write_text(CONFIG.format(runtime=folder / "rt"))
        command = [
            sys.executable, "-m", "tieredckpt", "run", "--nproc-per-node", "4",
            str(HERE / "train_elastic.py"), "--config", str(folder / "tieredckpt.yaml"),
            "--journal", str(folder / "journal"), "--steps", str(steps), *options,
        ]  # fmt: skip
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    @property
    def output(self) -> Path:
        """What the supervisor and the ranks write."""
        return self.folder / "output"

    def wait(self, step: int) -> bool:
        """Wait for a step; False if the training has ended."""
        until_s = time.monotonic() + DEADLINE_S
        while self.start.last_step < step:
            if self.process.poll() is not None:
                return False
            if time.monotonic() > until_s:
                raise RuntimeError(f"step {step} is not there within {DEADLINE_S:g} s")
            time.sleep(0.05)
            self.start.refresh()
        return True

    def resize(self, size: int) -> str:
        """What the command prints."""
        command = [sys.executable, "-m", "tieredckpt", "live", "resize", str(size)]
        command += ["--pid", str(self.process.pid)]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90)
        return found.stdout.strip()

    def end(self) -> int:
        """Wait for the end; the exit code."""
        try:
            return self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
            stop_agent(self.folder / "rt")
            self.start.refresh()


def problems(fixed: Start, elastic: Start, steps: int) -> list[str]:
    """What is not as promised."""
    found = []
    newest = {event["step"]: event for event in elastic.of("step")}
    expected = {event["step"]: event for event in fixed.of("step")}
    if sorted(newest) != list(range(1, steps + 1)):
        found.append(f"steps {sorted(newest)}")
    if len(elastic.of("step")) != len(newest):
        found.append(f"{len(elastic.of('step')) - len(newest)} steps were done twice")
    for step, event in newest.items():
        if event["ids"] != expected[step]["ids"]:
            found.append(f"step {step} saw other rows")
        loss, other = float.fromhex(event["loss"]), float.fromhex(expected[step]["loss"])
        if abs(loss - other) > CLOSE * abs(other):
            found.append(f"step {step}: loss {loss} instead of {other}")
    places = {place for event in elastic.of("world") for place in event["source"]}
    found += [f"read from {each}" for each in places if not each.startswith("memory")]
    return found


def table_of(elastic: Start) -> Table:
    """One row per world."""
    table = Table(title="Worlds")
    for column in ("ranks", "from step", "read from", "seconds without an update"):
        table.add_column(column, justify="left" if column == "read from" else "right")
    steps = elastic.of("step")
    for event in elastic.of("world"):
        before = [each["at_s"] for each in steps if each["at_s"] < event["at_s"]]
        after = [each["at_s"] for each in steps if each["at_s"] > event["at_s"]]
        pause = f"{after[0] - before[-1]:.2f}" if before and after else ""
        source = " + ".join(event["source"]) or "nothing: it begins"
        table.add_row(str(event["size"]), str(event["step"] + 1), source, pause)
    return table


def plot(path: Path, fixed: Start, elastic: Start) -> bool:
    """Loss, world size and throughput over time; False without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (losses, sizes, speeds) = plt.subplots(
        3, 1, figsize=(9, 8), sharex=True, height_ratios=(2, 1, 1), layout="constrained"
    )
    events = elastic.of("step")
    numbers = [event["step"] for event in events]
    reference = fixed.of("step")
    losses.plot(
        [e["step"] for e in reference], [e["loss_approx"] for e in reference], color="0.8",
        linewidth=6, label="four ranks",
    )  # fmt: skip
    losses.plot(numbers, [e["loss_approx"] for e in events], color="tab:blue", label="elastic")
    losses.set(ylabel="loss (nats per byte)", title="Every row of data was seen exactly once")
    losses.legend()
    sizes.step(numbers, [e["size"] for e in events], where="mid", color="tab:orange")
    sizes.set(ylabel="ranks", ylim=(0, 5))
    speeds.plot(numbers[1:], _speeds(events), color="tab:green")
    speeds.set(ylabel="rows per second", xlabel="step", ylim=(0, None))
    figure.savefig(path)
    return True


def _speeds(events: list[dict[str, Any]]) -> list[float]:
    pairs = itertools.pairwise(events)
    return [len(after["ids"]) / (after["at_s"] - before["at_s"]) for before, after in pairs]


def main() -> int:
    """Run both trainings, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=72)
    parser.add_argument("--out", type=Path, default=Path("demo-elastic.png"), help="the plot")
    args = parser.parse_args()
    console = Console()
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="tck-demo-elastic-", dir=base))
    try:
        console.print("training on four ranks ...")
        fixed = Training(folder / "fixed", args.steps)
        failed = fixed.end()
        console.print("training while the number of ranks changes ...")
        elastic = Training(folder / "elastic", args.steps, "--die", DEATH)
        try:
            for step, size in OFFERS:
                if elastic.wait(step):
                    console.print(f"step {step}: {size} ranks are offered")
                    console.print(f"  {elastic.resize(size)}")
        finally:
            failed = elastic.end() or failed
        found = problems(fixed.start, elastic.start, args.steps)
        if failed:
            console.print(elastic.output.read_text()[-6000:], markup=False)
            return 1
        console.print(table_of(elastic.start))
        rows = len(live.rows(1, 10)) * args.steps
        verdict = f"{rows} rows, every one seen exactly once, from memory"
        console.print("; ".join(found) or verdict, style="bold red" if found else "bold green")
        if plot(args.out, fixed.start, elastic.start):
            console.print(f"plot: {args.out}")
        return 1 if found else 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
