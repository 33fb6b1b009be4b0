"""Running scenarios against one storage: folders, stages, and what came of them."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tieredckpt.testing.dcp.scenarios  # noqa: F401  (enters the scenarios into the list)
from tieredckpt.testing.dcp.crews import SHARED, Answer, Crews, Task
from tieredckpt.testing.dcp.scenario import SCENARIOS, Scenario
from tieredckpt.testing.dcp.storage import hooks_of

SHM = Path("/dev/shm")  # noqa: S108  (a folder of its own is made in it)


SUBJECTS = (
    "values", "sharding", "parallel", "groups", "calls", "asynchronous", "failures", "deaths"
)  # fmt: skip
"""The order of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one scenario."""

    scenario: Scenario
    passed: bool
    reason: str = ""
    """The first thing that went wrong, in one line."""
    details: str = ""
    """What each rank said."""
    seconds: float = 0.0


class Suite:
    """The scenarios on one plug-in; use it as a context manager.

    Args:
        found: A subclass of ``Storage``, or a factory; both must be importable in another process.
        root: Folder under which each scenario gets its own; by default one in tmpfs, or else where
            temporary files are. Nothing of it is left behind.
    """

    def __init__(self, found: Any, root: Path | None = None) -> None:
        self._found = found
        self._hooks = hooks_of(found)
        self._parent = root or (SHM if SHM.is_dir() else None)
        self._root = Path()
        self._crews: Crews = SHARED
        self._numbers = itertools.count()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Suite:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._crews.held())
            self._root = Path(tempfile.mkdtemp(prefix="dcp-suite-", dir=self._parent))
            stack.callback(shutil.rmtree, self._root, ignore_errors=True)
            self._hooks.start(self._root)
            stack.callback(self._hooks.stop, self._root)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def run(self, name: str, deadline_s: float | None = None) -> Outcome:
        """Run one scenario.

        Args:
            name: Which one.
            deadline_s: For each of its stages, instead of the scenario's own.
        """
        wanted = SCENARIOS[name]
        began_s = time.monotonic()
        number = next(self._numbers)
        folder = self._root / f"{number}-{name}"
        folder.mkdir()
        reason = details = ""
        try:
            for stage in range(len(wanted.stages)):
                meeting = self._root / f"{number}-meeting-{stage}"
                task = Task(
                    scenario=name,
                    stage=stage,
                    found=self._found,
                    folder=folder,
                    meeting=meeting,
                    deadline_s=deadline_s or wanted.deadline_s,
                )
                reason, details = self._stage(wanted, task)
                meeting.unlink(missing_ok=True)
                if reason:
                    break
                if stage + 1 < len(wanted.stages):
                    self._hooks.restarted(folder)
        finally:
            self._hooks.discard(folder)
            shutil.rmtree(folder, ignore_errors=True)
        return Outcome(
            scenario=wanted,
            passed=not reason,
            reason=reason,
            details=details,
            seconds=time.monotonic() - began_s,
        )

    def _stage(self, wanted: Scenario, task: Task) -> tuple[str, str]:
        size = wanted.stages[task.stage]
        killed = wanted.killed.get(task.stage, frozenset())
        answers = self._crews.of(size).run(task, killed)
        if any(answer.outcome != "done" for answer in answers):
            self._crews.replace(size)
        problems = list(_problems(answers, killed))
        if not problems:
            return "", ""
        ranks = "\n".join(
            f"--- stage {task.stage}, rank {rank} of {len(answers)}: {answer.outcome} ---\n"
            f"{answer.text}"
            for rank, answer in enumerate(answers)
        )
        where = f"stage {task.stage}: " if len(wanted.stages) > 1 else ""
        return where + problems[0], ranks


def _problems(answers: list[Answer], killed: frozenset[int]) -> Iterator[str]:
    # The cause before what comes of it: the others of a dead rank raise, those of one that raised
    # hang.
    order = ("died", "raised", "hangs", "done")
    # Who sees its peer die raises, and may be heard before a launcher would have ended it.
    as_told = bool(killed) and all(answers[rank].outcome == "died" for rank in killed)
    for rank, answer in sorted(enumerate(answers), key=lambda pair: order.index(pair[1].outcome)):
        if rank in killed:
            if answer.outcome != "died":
                yield f"rank {rank} should have died at a certain point, and did not come to it"
        elif answer.outcome == "raised" and not as_told:
            lines = [line for line in answer.text.splitlines() if line.strip()]
            yield f"rank {rank}: {_last_error(lines)}"
        elif answer.outcome in ("died", "hangs") and not killed:
            yield f"rank {rank} {answer.outcome}"


def _last_error(lines: list[str]) -> str:
    """The line of a traceback that names the error, which may be followed by others of its text."""
    starts = [
        line for line in lines if line[:1].strip() and not line.startswith(("Traceback", "During"))
    ]
    return (starts or lines or ["no traceback"])[-1][:300]


def select(pattern: str | None = None) -> list[str]:
    """Names of the scenarios, in their order.

    Args:
        pattern: Only those that contain it in ``subject/name``, or any of its parts between
            `` or ``.
    """
    parts = (pattern or "").split(" or ")
    found = [
        each
        for each in SCENARIOS.values()
        if any(part.strip() in f"{each.subject}/{each.name}" for part in parts)
    ]
    return [each.name for each in sorted(found, key=lambda each: SUBJECTS.index(each.subject))]
