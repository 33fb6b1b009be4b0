"""Runs scenarios one after another, each isolated: what fails is recorded, and the rest go on."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks import engines
from benchmarks.machine import Machine, MemoryWatch, available_bytes, free_bytes
from benchmarks.measure import Row
from benchmarks.processes import Setup, Spawner
from benchmarks.registry import Scenario
from benchmarks.shapes import GIB, Shape

FORMAT_VERSION = 1
DISK_STATES = 4
"""Disk that a scenario needs, in sizes of the state."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one scenario."""

    name: str
    title: str
    seconds: float
    peak_bytes: int
    """Most memory in use at once, by all processes and tmpfs, beyond what was at its start."""
    rows: list[Row]
    error: str | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run, as it is written to the JSON file."""

    format_version: int
    date: str
    machine: Machine
    state_bytes: int
    state_tensors: int
    quick: bool
    repeat: int
    outcomes: list[Outcome]

    @property
    def failed(self) -> list[Outcome]:
        """Scenarios that did not end well."""
        return [outcome for outcome in self.outcomes if outcome.error is not None]

    @property
    def rows(self) -> list[Row]:
        """All rows of all scenarios."""
        return [row for outcome in self.outcomes for row in outcome.rows]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be run, and where."""

    shape: Shape
    repeat: int
    repeat_slow: int
    shm: str
    disk: str


class NoRoomError(RuntimeError):
    """The machine lacks memory or disk for a scenario of this size."""


def run_all(
    scenarios: Sequence[Scenario],
    plan: Plan,
    *,
    on_start: Callable[[Scenario], None],
    on_progress: Callable[[str, int, int], None],
    on_end: Callable[[Outcome], None],
) -> list[Outcome]:
    """Run all; never raises for a scenario's sake."""
    outcomes = []
    for scenario in scenarios:
        on_start(scenario)
        outcome = _run_one(scenario, plan, on_progress)
        outcomes.append(outcome)
        on_end(outcome)
    return outcomes


def _run_one(
    scenario: Scenario, plan: Plan, on_progress: Callable[[str, int, int], None]
) -> Outcome:
    setup = Setup(
        shape=plan.shape,
        shm=str(Path(plan.shm) / scenario.name),
        disk=str(Path(plan.disk) / scenario.name),
        repeat=plan.repeat,
        repeat_slow=plan.repeat_slow,
    )
    rows: list[Row] = []
    error: str | None = None
    start_s = time.monotonic()
    with MemoryWatch() as watch:
        try:
            for folder in (setup.shm, setup.disk):
                Path(folder).mkdir(mode=0o700)
            _check_room(scenario, setup)
            spawner = Spawner(setup=setup, timeout_s=scenario.timeout_s, report=on_progress)
            rows = scenario.run(spawner)
        except Exception as failure:  # noqa: BLE001  one scenario's failure must not end the others
            error = f"{type(failure).__name__}: {failure}"
        finally:
            engines.stop_agents(Path(setup.shm))
            for folder in (setup.shm, setup.disk):
                shutil.rmtree(folder, ignore_errors=True)
    return Outcome(
        name=scenario.name,
        title=scenario.title,
        seconds=round(time.monotonic() - start_s, 2),
        peak_bytes=watch.peak_bytes,
        rows=rows,
        error=error,
    )


def _check_room(scenario: Scenario, setup: Setup) -> None:
    """Refuse before anything is allocated: the OOM killer would not say which scenario it was."""
    needed = int(scenario.memory_states * setup.work_bytes)
    for what, wanted, there in (
        ("memory", needed + GIB // 2, available_bytes()),
        (f"space in {setup.shm}", needed, free_bytes(Path(setup.shm))),
        (f"space in {setup.disk}", DISK_STATES * setup.work_bytes, free_bytes(Path(setup.disk))),
    ):
        if there < wanted:
            raise NoRoomError(
                f"needs {wanted / GIB:.1f} GiB of {what}, there are {there / GIB:.1f}: "
                "free some, choose another folder, or use --quick"
            )
