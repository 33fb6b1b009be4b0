"""Scenario ``resize``: from the last step of one world to the first step of one of another size.

Under torchrun the ranks save to a disk and end by themselves, and a start with the other number of
ranks loads: a manager that knows of it at once. Its save, end, start and load count.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import engines
from benchmarks.live.bench import Bench
from benchmarks.live.journal import Event, events_of
from benchmarks.live.runs import TAIL_CHARS, Job, RunError, environment
from benchmarks.processes import ROOT
from tieredckpt.live.control import CONTROL, FOLDER_PREFIX, Request, ask

SIZES = (4, 2, 4)
STEPS = 12
"""Of each world, about."""
SLEEP_S = 0.05
ROUNDS = 3
UNTIL_S = 120.0
POLL_S = 0.02
LIVE, TORCHRUN = "live", "torchrun, disk"


def resize(bench: Bench) -> None:
    """4 to 2 and 2 to 4 ranks; the runs take turns."""
    found: dict[tuple[str, str], list[float]] = {}
    rows = []
    rounds = 1 if bench.quick else ROUNDS
    for number in range(rounds):
        for name, run in ((LIVE, _live), (TORCHRUN, _torchrun)):
            bench.report(name, number, rounds)
            events = run(bench.shm / f"{name}-{number}", bench.disk / f"{name}-{number}")
            for change, seconds in pauses(events).items():
                found.setdefault((name, change), []).append(seconds)
                rows.append([name, change, f"{seconds:.2f}"])
    for change in ("4 to 2", "2 to 4"):
        bench.ratio(
            f"last step to first step, {change} ranks", found[LIVE, change],
            found[TORCHRUN, change], target=0.25,
            limit_name="save to a disk by stock DCP, torchrun restart of all, load",
        )  # fmt: skip
    bench.table("Seconds from the last step to the first one", ("run", "ranks", "seconds"), rows)


def pauses(events: Sequence[Event]) -> dict[str, float]:
    """By change of the size, the seconds between the last ranks' updates of two steps.

    Raises RunError: A step was made twice, or left out.
    """
    updates = [each for each in events if each["kind"] == "update"]
    ranks = Counter(each["step"] for each in updates)
    ended = {step: max(e["at"] for e in updates if e["step"] == step) for step in ranks}
    if sorted(ranks) != list(range(1, len(ranks) + 1)) or not set(ranks.values()) <= set(SIZES):
        raise RunError(f"ranks by step: {dict(ranks)}")
    return {
        f"{ranks[step - 1]} to {ranks[step]}": ended[step] - ended[step - 1]
        for step in range(2, len(ranks) + 1)
        if ranks[step] != ranks[step - 1]
    }


class _Started:
    """One start, whose journal others may continue."""

    def __init__(self, job: Job, folder: Path, disk: Path) -> None:
        self._folder = folder
        with (folder / "output").open("a") as output:
            self.process = subprocess.Popen(
                job.command(folder, disk), cwd=ROOT, env=environment(folder),
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    def events(self) -> list[Event]:
        journal = self._folder / "journal"
        return events_of(journal.read_text()) if journal.exists() else []

    def step(self) -> int:
        return max((each["step"] for each in self.events() if each["kind"] == "update"), default=0)

    def wait(self, until: Callable[[], bool]) -> None:
        limit_s = time.monotonic() + UNTIL_S
        while not until():
            if self.process.poll() or time.monotonic() > limit_s:
                tail = (self._folder / "output").read_text()[-TAIL_CHARS:]
                raise RunError(f"exit code {self.process.poll()}\n{tail}")
            time.sleep(POLL_S)


def _live(folder: Path, disk: Path) -> list[Event]:
    steps = STEPS * len(SIZES)
    job = Job(loop="live", steps=steps, sleep_s=SLEEP_S, wait_started=SIZES[0])
    folder.mkdir(mode=0o700)
    started = _Started(job, folder, disk)
    try:
        for number, size in enumerate(SIZES[1:], start=1):
            started.wait(lambda at=number * STEPS: started.step() >= at)  # type: ignore[misc]
            (control,) = folder.glob(f"{FOLDER_PREFIX}*/{CONTROL}")
            ask(control, Request(size=size), UNTIL_S)
        started.wait(lambda: started.process.poll() == 0)
        return started.events()
    finally:
        started.process.kill()
        started.process.wait()
        engines.stop_agents(folder)


def _torchrun(folder: Path, disk: Path) -> list[Event]:
    folder.mkdir(mode=0o700)
    disk.mkdir()
    events: list[Event] = []
    for number, size in enumerate(SIZES, start=1):
        job = Job(loop="dcp", ranks=size, steps=number * STEPS, save_every=STEPS, sleep_s=SLEEP_S)
        started = _Started(job, folder, disk)
        try:
            started.wait(lambda: started.process.poll() == 0)  # noqa: B023
        finally:
            started.process.kill()
            started.process.wait()
        events = started.events()
    return events
