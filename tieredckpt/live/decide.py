"""The supervisor's decisions: a pure function of what it knows about its processes.

A generation is one world of ranks. It ends when a rank dies, raises, makes no progress, or when all
are done. The next one begins as soon as enough processes are ready. Laws
(tests/property/live/test_decide.py): a generation begins only when no process is in one; a process
that keeps state keeps its rank if another rank does not need it more; every fault leads to a new
generation or to an exit; restarts never exceed the budget.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FAILURES_MAX = 3
"""Failures of a script at one step after which it is considered broken."""
REFILL_UPDATES = 100
"""Updates in a row that refill the budget of restarts."""
ARMED_AFTER = 3
"""Updates of a generation before its hangs are detected: compilation and cold files come first."""
UPDATES_KEPT = 20
START_S_MAX = 1800.0
"""Longest time for a process to reach ``live.run`` while others wait for it."""
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
        version: The last update of the state that it keeps, or of its ``train``; None: it keeps
            none.
        begun: The last update before the step that it began last; None: it began none.
        started_s: When it was started.
    """

    pid: int
    where: Where
    rank: int | None = None
    version: int | None = None
    begun: int | None = None
    started_s: float = 0.0


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


@dataclass(slots=True, kw_only=True)
class Generation:
    """One world of ranks while it runs; times are of one monotonic clock.

    Attributes:
        number: Of the generation, from 1.
        saves_only: Its ranks are survivors that save what they keep, and then wait for others.
        progress_s: When a rank last made progress; at first when it began.
        quiet_until_s: By pid, no progress need be expected before.
        updates_s: When rank 0 made its last updates.
        lost: Ranks whose process died.
        death: The first death, unless the supervisor killed it.
        by_signal: Whether a signal from outside killed a rank, so that the script is not to blame.
        faults: Why it ends, in the order in which reasons were found.
        stopping_since_s: When it was ended; None: it was not.
    """

    number: int
    progress_s: float
    saves_only: bool = False
    quiet_until_s: dict[int, float] = field(default_factory=dict)
    updates_s: deque[float] = field(default_factory=lambda: deque(maxlen=UPDATES_KEPT))
    lost: set[int] = field(default_factory=set)
    death: str = ""
    by_signal: bool = False
    faults: list[str] = field(default_factory=list)
    stopping_since_s: float | None = None

    @property
    def reason(self) -> str:
        """Why it ended. The error of a rank whose peer died often arrives before the death."""
        return self.death or (self.faults or ["a rank was done before the others"])[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that a decision depends on.

    Attributes:
        processes: The living ones.
        generation: The one that runs; None: none does.
        budget: Processes that may still be started in place of others.
        begun: Whether there was a generation.
        failures: Generations in a row that the script ended after the same update.
        code: Exit code of the last failure; 1: an exception.
        is_final: That failure would come again.
    """

    now_s: float
    processes: tuple[ProcessFacts, ...]
    generation: Generation | None = None
    budget: int = 0
    begun: bool = False
    failures: int = 0
    code: int = 1
    is_final: bool = False


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
    """Kill processes that did not leave ``train``, or reach ``live.run``, in time."""

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EndGeneration:
    """All its processes are out, but not all were done."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin a generation; the pid of each rank. ``saves_only``: see :class:`Generation`."""

    pids: tuple[int, ...]
    saves_only: bool = False


@dataclass(frozen=True, slots=True)
class Exit:
    """Training is over."""

    code: int
    reason: str


Action = Start | StopAll | Kill | EndGeneration | Begin | Exit | None


def hang_s(policy: Policy, updates_s: Sequence[float]) -> float | None:
    """Seconds without progress that are a hang; None: hangs are not detected now."""
    if policy.hang_s == 0 or len(updates_s) < ARMED_AFTER:
        return None
    if policy.hang_s is not None:
        return policy.hang_s
    intervals_s = [after - before for before, after in itertools.pairwise(updates_s)]
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
    if now.generation is not None:
        return _while_running(policy, now, now.generation)
    if now.is_final:
        return Exit(now.code, "another generation would fail, too")
    if now.failures >= FAILURES_MAX:
        return Exit(now.code, f"the script failed {now.failures} times at the same step")
    if (start := _replacements(policy, now)) is not None:
        return start
    ready = [each for each in now.processes if each.where == "ready"]
    if len(ready) >= policy.size:
        return Begin(assign(ready, policy.size))
    # Others still start, or none will: until then the state is in these processes only.
    if with_state := [each for each in ready if each.version is not None]:
        return Begin(assign(with_state, len(with_state)), saves_only=True)
    if len(now.processes) < policy.size:
        reason = f"{len(now.processes)} of {policy.size} processes are left, and no restarts"
        return Exit(EXIT_RESTART_HOST if now.begun else now.code, reason)
    late = [
        each.pid
        for each in now.processes
        if each.where == "starting" and now.now_s - each.started_s >= START_S_MAX
    ]
    return Kill(tuple(late)) if late else None


def _replacements(policy: Policy, now: Situation) -> Start | None:
    missing = policy.size + policy.standby - len(now.processes)
    return Start(min(missing, now.budget)) if missing > 0 and now.budget > 0 else None


def _while_running(policy: Policy, now: Situation, generation: Generation) -> Action:
    members = [each for each in now.processes if each.rank is not None]
    inside = [each for each in members if each.where == "in"]
    done = [each for each in members if each.where == "done"]
    if not inside:
        all_done = not generation.lost and len(done) == len(members)
        return Exit(0, "training is done") if all_done else EndGeneration()
    if generation.stopping_since_s is not None:
        if now.now_s - generation.stopping_since_s >= policy.unwind_s:
            return Kill(tuple(each.pid for each in inside))
        return None
    if generation.lost:
        return StopAll(f"rank {min(generation.lost)} died")
    for each in done:
        last = each.version or 0
        if any(other.begun is not None and other.begun >= last for other in inside):
            return StopAll(f"rank {each.rank} returned from train after step {last}")
    limit_s = hang_s(policy, generation.updates_s)
    quiet_until_s = max(generation.quiet_until_s.values(), default=0.0)
    if limit_s is not None and now.now_s >= max(quiet_until_s, generation.progress_s + limit_s):
        idle_s = now.now_s - generation.progress_s
        return StopAll(f"no rank made progress for {idle_s:.0f} s")
    return _replacements(policy, now)
