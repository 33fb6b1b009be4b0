"""The supervisor's decisions: a pure function of what it knows about its processes.

A generation is one world of ranks. It ends when a rank dies, raises, makes no progress, or when all
are done. The next one begins as soon as enough processes are ready. Laws
(tests/property/live/test_decide.py): a generation begins only when no process is in one; a process
that keeps state keeps its rank if another rank does not need it more; every fault leads to a new
generation or to an exit; restarts never exceed the budget.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FRUITLESS_MAX = 3
"""Generations in a row without an update after which the script is considered broken."""
REFILL_UPDATES = 100
"""Updates in a row that refill the budget of restarts."""
ARMED_AFTER = 3
"""Updates of a generation before its hangs are detected: compilation and cold files come first."""
HANG_FACTOR = 5.0
HANG_S_MIN = 60.0
EXIT_RESTART_HOST = 3
"""Exit code of a supervisor that cannot go on: its host should start it again."""

Where = Literal["starting", "ready", "in", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """One process.

    Attributes:
        pid: Its process.
        where: "starting": not in ``live.run`` yet; "ready": in no generation; "in": in one;
            "done": its ``train`` returned.
        rank: In the generation that runs, or ran last; None: it had none.
        version: The last update of the state that it keeps; None: it keeps none.
    """

    pid: int
    where: Where
    rank: int | None = None
    version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The options of the command line.

    Attributes:
        size: Ranks of a generation.
        standby: Processes beyond them.
        hang_s: Seconds without progress that are a hang; None: derived from the steps; 0: never.
        unwind_s: Time that a rank has to leave ``train`` before it is killed.
    """

    size: int
    standby: int
    hang_s: float | None
    unwind_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that a decision depends on; times are of one monotonic clock.

    Attributes:
        processes: The living ones.
        lost: Ranks of the generation whose process died.
        budget: Processes that may still be started in place of others.
        running: Whether a generation runs.
        stopping_since_s: When it was ended; None: it was not.
        quiet_until_s: No progress need be expected before.
        progress_s: When a rank last made progress.
        intervals_s: Between the last updates of this generation.
        begun: Whether there was a generation.
        fruitless: Generations in a row that ended without an update.
        code: Exit code of the last failure; 1: an exception.
    """

    now_s: float
    processes: tuple[ProcessFacts, ...]
    lost: frozenset[int] = frozenset()
    budget: int = 0
    running: bool = False
    stopping_since_s: float | None = None
    quiet_until_s: float = 0.0
    progress_s: float = 0.0
    intervals_s: tuple[float, ...] = ()
    begun: bool = False
    fruitless: int = 0
    code: int = 1


@dataclass(frozen=True, slots=True)
class Start:
    """Start so many processes."""

    count: int


@dataclass(frozen=True, slots=True)
class StopAll:
    """End the generation."""

    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill processes that did not leave ``train`` in time."""

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EndGeneration:
    """All its processes are out, but not all were done."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin a generation; the pid of each rank."""

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exit:
    """Training is over."""

    code: int
    reason: str


Action = Start | StopAll | Kill | EndGeneration | Begin | Exit | None


def hang_s(policy: Policy, intervals_s: Sequence[float]) -> float | None:
    """Seconds without progress that are a hang; None: hangs are not detected now."""
    if len(intervals_s) + 1 < ARMED_AFTER or policy.hang_s == 0:
        return None
    if policy.hang_s is not None:
        return policy.hang_s
    return max(HANG_S_MIN, HANG_FACTOR * statistics.median(intervals_s))


def assign(processes: Sequence[ProcessFacts], size: int) -> tuple[int, ...]:
    """The pid of each rank. Processes that keep the newest state keep their ranks first.

    A process that changes its rank recompiles, so ranks change only where they must.
    """
    newest_first = sorted(
        processes,
        key=lambda each: (-1 if each.version is None else each.version, each.rank is not None),
        reverse=True,
    )[:size]
    ranks: dict[int, int] = {}
    others = []
    for each in newest_first:
        if each.rank is not None and each.rank < size and each.rank not in ranks:
            ranks[each.rank] = each.pid
        else:
            others.append(each.pid)
    return tuple(ranks[rank] if rank in ranks else others.pop(0) for rank in range(size))


def decide(policy: Policy, now: Situation) -> Action:
    """The next thing to do; None: wait."""
    if now.running:
        return _while_running(policy, now)
    if now.fruitless >= FRUITLESS_MAX:
        reason = f"{now.fruitless} generations in a row ended without an update"
        return Exit(now.code, reason)
    missing = policy.size + policy.standby - len(now.processes)
    if missing > 0 and now.budget > 0:
        return Start(min(missing, now.budget))
    ready = [each for each in now.processes if each.where == "ready"]
    if len(ready) >= policy.size:
        return Begin(assign(ready, policy.size))
    if len(now.processes) < policy.size:
        reason = f"{len(now.processes)} of {policy.size} processes are left, and no restarts"
        return Exit(EXIT_RESTART_HOST if now.begun else now.code, reason)
    return None


def _while_running(policy: Policy, now: Situation) -> Action:
    members = [each for each in now.processes if each.rank is not None]
    inside = [each for each in members if each.where == "in"]
    if not inside and (now.lost or members):
        if not now.lost and all(each.where == "done" for each in members):
            return Exit(0, "training is done")
        return EndGeneration()
    if now.stopping_since_s is not None:
        if now.now_s - now.stopping_since_s >= policy.unwind_s:
            return Kill(tuple(each.pid for each in inside))
        return None
    if now.lost:
        return StopAll(f"rank {min(now.lost)} died")
    limit_s = hang_s(policy, now.intervals_s)
    waits_until_s = max(now.quiet_until_s, now.progress_s + (limit_s or 0.0))
    if limit_s is not None and now.now_s >= waits_until_s:
        return StopAll(f"no rank made progress for {now.now_s - now.progress_s:.0f} s")
    missing = policy.size + policy.standby - len(now.processes)
    if missing > 0 and now.budget > 0:
        return Start(min(missing, now.budget))
    return None
