"""Runs scenarios one after another, each isolated: what fails is recorded, and the rest go on."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks import buckets, engines
from benchmarks.machine import Machine, MemoryWatch, available_bytes, free_bytes
from benchmarks.measure import Row, summary
from benchmarks.object_limits import At, empty
from benchmarks.processes import Setup, Spawner
from benchmarks.registry import Scenario
from benchmarks.shapes import GIB, Shape
from tieredckpt.testing import s3_server

FORMAT_VERSION = 1
DISK_STATES = 4
"""Disk that a scenario needs, in sizes of the state."""
S3_STATES = 8
"""Disk that the S3 server needs, where temporary files go."""


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
    forked: bool = False
    """See :class:`benchmarks.processes.Spawner`."""


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
    with _Server() as server:
        for scenario in scenarios:
            on_start(scenario)
            outcome = _run_one(scenario, plan, on_progress, server)
            outcomes.append(outcome)
            on_end(outcome)
    return outcomes


def _run_one(
    scenario: Scenario,
    plan: Plan,
    on_progress: Callable[[str, int, int], None],
    server: _Server,
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
            why = scenario.missing() or (server.missing() if scenario.s3 else None)
            if why is not None:
                rows = [_not_run(scenario, why)]
            else:
                _check_room(scenario, setup)
                bucket = server.bucket(scenario, setup) if scenario.s3 else ""
                spawner = Spawner(
                    setup=setup,
                    timeout_s=scenario.timeout_s,
                    report=on_progress,
                    forked=plan.forked,
                    bucket=bucket,
                )
                rows = scenario.run(spawner)
        except Exception as failure:  # noqa: BLE001  one scenario's failure must not end the others
            error = f"{type(failure).__name__}: {failure}"
        finally:
            engines.stop_agents(Path(setup.shm))
            server.empty()
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
    ):
        _check(what, wanted, there)
    _check_space(Path(setup.disk), DISK_STATES * setup.work_bytes)


def _check_space(folder: Path, wanted: int) -> None:
    _check(f"space in {folder}", wanted, free_bytes(folder))


def _check(what: str, wanted: int, there: int) -> None:
    if there < wanted:
        raise NoRoomError(
            f"needs {wanted / GIB:.1f} GiB of {what}, there are {there / GIB:.1f}: "
            "free some, choose another folder, or use --quick"
        )


def _not_run(scenario: Scenario, why: str) -> Row:
    return Row(
        scenario=scenario.name,
        what=f"{scenario.title}: not run",
        kind="report",
        value=0.0,
        unit="",
        ours=summary([0.0]),
        note=why,
    )


class _Server:
    """The S3 server of a run, started by the first scenario that needs it, emptied after each.

    Its folder is one that its own user may enter, which those of a scenario are not.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._server: s3_server.S3Server | None = None
        self._used: buckets.Bucket | None = None

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def missing(self) -> str | None:
        """Why there can be none."""
        for package in ("obstore", "botocore"):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed (extra s3)"
        return s3_server.missing()

    def bucket(self, scenario: Scenario, setup: Setup) -> str:
        """The place of a scenario, for its children."""
        if self._server is None:
            folder = self._stack.enter_context(
                tempfile.TemporaryDirectory(prefix="tck-bench-s3-", ignore_cleanup_errors=True)
            )
            Path(folder).chmod(0o711)
            _check_space(Path(folder), S3_STATES * setup.work_bytes)
            self._server = self._stack.enter_context(s3_server.S3Server(Path(folder)))
        self._used = buckets.Bucket(
            endpoint=self._server.endpoint,
            prefix=scenario.name,
            vacuum_url=self._server.vacuum_url,
            size=setup.work_bytes,
        )
        return msgspec.json.encode(self._used).decode()

    def empty(self) -> None:
        """Free what the last scenario has left there."""
        used, self._used = self._used, None
        if used is not None:
            # What is left takes room in the server's folder, and no more, until the run ends.
            with contextlib.suppress(Exception):
                empty(At(endpoint=used.endpoint, key=used.prefix))
                used.vacuum()
