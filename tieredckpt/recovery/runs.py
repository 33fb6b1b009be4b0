"""Decides which donor sends which blocks: all donors share a queue of runs of consecutive blocks.

A fast donor gets more runs than a slow one. When the queue is empty, an idle donor gets half of
the blocks that another one has not begun yet, and all blocks of a stalled one. So nothing is
decided beforehand, and nothing waits for the slowest. No sockets here, and no bytes.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tieredckpt.recovery.blocks import BlockTask
from tieredckpt.recovery.copies import CopyError

RUN_BYTES_MAX = 64 << 20
RUN_BYTES_LEAST = 8 << 20
RUNS_PER_STREAM = 8
"""So many runs for each stream, unless they were too short: the last ones end together."""

STEAL_TASKS_LEAST = 4
"""Fewer tasks (each up to 4 MiB) are not worth the connection that is lost with the rest."""

SLOW_LEAST_S = 2.0
SLOW_FACTOR = 16.0
"""A task that lasts so many times the mean, and at least SLOW_LEAST_S, goes to an idle donor."""

STRIKES_MAX = 3
"""A donor is not asked any more after so many connections in a row that broke without a block."""

IDLE_WAIT_S = 0.1


@dataclass(eq=False, slots=True)
class Run:
    """The tasks of one request. Only :class:`Runs` changes it, under its lock."""

    tasks: list[BlockTask]
    """Those that were not begun, in ascending order."""
    refused: frozenset[int] = frozenset()
    """Donors that do not have these blocks."""
    donor: int = -1
    task: BlockTask | None = None
    begun_s: float = 0.0
    cut: Callable[[], None] | None = field(default=None, repr=False)
    """Ends the transfer, from any thread."""
    was_cut: bool = False

    @property
    def start_byte(self) -> int:
        """Where the request begins."""
        return self.tasks[0].start

    @property
    def stop_byte(self) -> int:
        """Where it ends."""
        return self.tasks[-1].stop


class Runs:
    """The queue of one fetch. Thread-safe.

    Args:
        tasks: The wanted blocks, in ascending order.
        donors: Number of donors.
        refused: By block, the donors that do not have it.
        streams: Number of workers.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        tasks: Sequence[BlockTask],
        donors: int,
        refused: Callable[[BlockTask], frozenset[int]],
        streams: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures: dict[int, dict[int, CopyError]] = {}
        """By block and donor, why the donor did not provide it."""
        self.out: dict[int, CopyError] = {}
        """By donor, why it is not asked any more."""
        self._changed = threading.Condition()
        self._active: set[Run] = set()
        self._strikes = [0] * donors
        self._clock = clock
        self._landed = 0
        self._landed_s = 0.0
        total = sum(task.stop - task.start for task in tasks)
        size = min(RUN_BYTES_MAX, max(RUN_BYTES_LEAST, total // (RUNS_PER_STREAM * streams)))
        self._queue = _cut_up(tasks, refused, size)

    # --- a worker's side --------------------------------------------------------------------------

    def next_run(self, donor: int) -> Run | None:
        """The next run for ``donor``; None: there is no more. Waits while others may return theirs.

        The wait ends with the other workers' deadlines: each is in a read that has one.
        """
        with self._changed:
            while donor not in self.out:
                run = self._next_queued(donor) or self._steal(donor)
                if run is not None:
                    run.donor, run.begun_s = donor, self._clock()
                    self._active.add(run)
                    return run
                if not self._active:
                    return None
                self._cut_slow(donor)
                self._changed.wait(IDLE_WAIT_S)
        return None

    def connected(self, run: Run, cut: Callable[[], None]) -> None:
        """Record that the request was sent; ``cut`` ends it."""
        with self._changed:
            run.cut = cut

    def next_task(self, run: Run) -> BlockTask | None:
        """The run's next blocks, for this worker alone; None: there are no more."""
        with self._changed:
            if run.was_cut or not run.tasks:
                return None
            run.task = run.tasks.pop(0)
            run.begun_s = self._clock()
            return run.task

    def landed(self, run: Run) -> None:
        """Record that the task was received, and is good."""
        with self._changed:
            self._landed += 1
            self._landed_s += self._clock() - run.begun_s
            self._strikes[run.donor] = 0
            run.task = None

    def bad(self, run: Run, found: Sequence[tuple[BlockTask, CopyError]]) -> None:
        """Record that the task was received with these bad blocks; other donors get them."""
        with self._changed:
            for task, failure in found:
                self.failures.setdefault(task.block, {})[run.donor] = failure
            tasks, refused = tuple(task for task, _ in found), run.refused | {run.donor}
            self._queue += _cut_up(tasks, lambda _: refused, RUN_BYTES_MAX)
            run.task = None
            self._changed.notify_all()

    def incomplete(self, run: Run, failure: CopyError) -> None:
        """The donor does not have all of the run: try its halves, and at last single blocks."""
        with self._changed:
            self._active.discard(run)
            tasks = run.tasks if len(run.tasks) > 1 else run.tasks[0].split()
            if len(tasks) == 1:
                self.bad(run, [(tasks[0], failure)])
                return
            middle = len(tasks) // 2
            halves = tasks[:middle], tasks[middle:]
            self._queue[:0] = [Run(half, run.refused) for half in halves]
            self._changed.notify_all()

    def failed(self, run: Run, failure: CopyError, *, final: bool) -> None:
        """The connection broke: requeue the rest. ``final``: do not ask this donor again."""
        with self._changed:
            if run.was_cut:
                failure = CopyError(
                    "too slow: other copies were faster", damaged=False, may_answer=True
                )
            if run.task is not None:
                run.tasks.insert(0, run.task)
                run.task = None
            self._strikes[run.donor] += 1
            if final or self._strikes[run.donor] >= STRIKES_MAX:
                self.out.setdefault(run.donor, failure)
            self.done(run)

    def done(self, run: Run) -> None:
        """The worker has ended the run; requeue the rest. Idempotent."""
        with self._changed:
            if run in self._active:
                self._active.remove(run)
                if run.tasks:
                    self._queue.append(Run(run.tasks, run.refused))
                self._changed.notify_all()

    def left(self) -> list[BlockTask]:
        """When all workers are done: the blocks that no donor provided, in ascending order."""
        with self._changed:
            assert not self._active, "a worker still has a run"
            found = [(task, run.refused) for run in self._queue for task in run.tasks]
            for task, refused in found:
                out = [each for each in self.out.items() if each[0] not in refused]
                for block, (donor, failure) in itertools.product(task.blocks, out):
                    self.failures.setdefault(block, {}).setdefault(donor, failure)
            return sorted((task for task, _ in found), key=lambda task: task.block)

    # --- under the lock ---------------------------------------------------------------------------

    def _next_queued(self, donor: int) -> Run | None:
        for number, run in enumerate(self._queue):
            if donor not in run.refused:
                return self._queue.pop(number)
        return None

    def _steal(self, donor: int) -> Run | None:
        able = [r for r in self._active if r.donor != donor and donor not in r.refused]
        run = max(able, key=lambda r: len(r.tasks), default=None)
        if run is None or len(run.tasks) < STEAL_TASKS_LEAST:
            return None
        middle = len(run.tasks) // 2
        stolen = Run(run.tasks[middle:], run.refused)
        del run.tasks[middle:]
        return stolen

    def _cut_slow(self, donor: int) -> None:
        mean_s = self._landed_s / self._landed if self._landed else 0.0
        limit_s = max(SLOW_LEAST_S, SLOW_FACTOR * mean_s)
        now_s = self._clock()
        for run in self._active:
            slow = now_s - run.begun_s > limit_s
            if slow and run.donor != donor and donor not in run.refused and run.cut is not None:
                # The current task is requeued when the owner's read fails; until then the owner
                # may write to its destination.
                run.was_cut = True
                run.cut()
                run.cut = None


def _cut_up(
    tasks: Sequence[BlockTask], refused: Callable[[BlockTask], frozenset[int]], size: int
) -> list[Run]:
    runs: list[Run] = []
    for task in tasks:
        donors = refused(task)
        if (
            runs
            and runs[-1].stop_byte == task.start
            and runs[-1].refused == donors
            and task.stop - runs[-1].start_byte <= size
        ):
            runs[-1].tasks.append(task)
        else:
            runs.append(Run([task], donors))
    return runs
