"""What waits for one tier, what is being copied there, and what became of it: for many threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tieredckpt.agent.shared_side import SharedSide
from tieredckpt.agent.spill_host import ON_ITS_WAY, History, Outcome, SpillHost
from tieredckpt.agent.spill_queue import SpillQueue
from tieredckpt.format.manifest import Manifest
from tieredckpt.tiers.catalog import Catalog
from tieredckpt.transport.messages import TierSpec, TierTrouble

MEMORY = "memory"
TOLD_AFTER_S = 30.0
"""Training is not told of failures that are over sooner."""
WHEN_FULL = {
    "keep": "saves wait and are skipped (on_pressure: keep)",
    "drop_oldest_queued": "the oldest waiting ones are given up (on_pressure)",
}

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SpillCounts:
    """Since the agent started."""

    bytes: int = 0
    seconds: float = 0.0
    dropped: int = 0
    """Checkpoints that were given up, or deleted from memory before their turn."""


class SpillLine:
    """Of one tier of one namespace. Thread-safe.

    Args:
        spec: The tier.
        namespace: Name of the namespace.
        host: See :class:`SpillHost`. Its answers may need the line of the tier above; a line is
            never asked by one above it, so that these locks have an order.
        clock: Monotonic seconds.
    """

    def __init__(
        self, spec: TierSpec, namespace: str, host: SpillHost, clock: Callable[[], float]
    ) -> None:
        self.spec = spec
        self._clock = clock
        self._made_at_s = clock()
        self._namespace = namespace
        self.error: str | None = None
        self._failing: tuple[float, float, str] | None = None
        """Since when it takes nothing that it is to take, when it failed last, and why."""
        self.counts = SpillCounts()
        self._host = host
        self._cond = threading.Condition()
        self._catalog: Catalog | None = None
        self._shared: SharedSide | None = None
        self._queue = SpillQueue()
        self._unsure: set[str] = set()
        """Of those that wait: what the tier may hold already, until it is attached."""
        self._woken = True
        self._nudged = False
        """Somebody wants the tier since the last pause after a failure."""
        self._active: Manifest | None = None
        self._history = History()
        self._retaining = False
        self._stopping = False
        self._pressed = False
        """There has been no room since something began to wait."""

    @property
    def catalog(self) -> Catalog | None:
        """What the tier holds, once it was attached."""
        with self._cond:
            return self._catalog

    def enqueue(self, manifest: Manifest, *, urgent: bool = False, sure: bool = True) -> None:
        """Let ``manifest`` be copied; ``urgent``: before all others; ``sure``: it is not there."""
        with self._cond:
            save_id = manifest.save_id
            if self._active is not None and self._active.save_id == save_id:
                return
            if not self._queue.add(manifest, urgent=urgent):
                self._history.note(manifest, Outcome("failed", "too many wait for this tier"))
                return
            if sure:
                self._unsure.discard(save_id)
            else:
                self._unsure.add(save_id)
            self._nudged = True
            self._wake()

    def wake(self) -> None:
        """What waits may be ready now."""
        with self._cond:
            self._wake()

    def _wake(self) -> None:
        self._woken = True
        self._cond.notify_all()

    def hurry(self) -> None:
        """Somebody waits for the tier: its pause after a failure ends now."""
        with self._cond:
            self._nudged = True
            self._cond.notify_all()

    def drop(self, save_id: str) -> None:
        """Memory has let go of a checkpoint that waits; it may be in the tier above."""
        if not self._host.is_in(self.spec.source, save_id):
            self._forget(save_id, Outcome("superseded", "it was deleted from memory before"))

    def note_pressure(self, place: str = MEMORY) -> None:
        """``place`` has no room for what waits; said once, until nothing waits any more."""
        with self._cond:
            if self._pressed:
                return
            self._pressed, count = True, self._num_waiting()
        what = WHEN_FULL[self.spec.on_pressure]
        log.warning(
            "tier %s of %s is slower than the saves: %d checkpoints wait for it and %s has no "
            "room for more, %s", self.spec.name, self._namespace, count, place, what,
        )  # fmt: skip

    def _num_waiting(self) -> int:
        return len(self._queue) + (self._active is not None)

    def trouble(self) -> TierTrouble | None:
        """What training should know of the tier, if it lasts."""
        with self._cond:
            failing, pressed, count = self._failing, self._pressed, self._num_waiting()
            is_unread = self._catalog is None and failing is None
        silent_s = self._clock() - self._made_at_s
        if is_unread and silent_s >= TOLD_AFTER_S:
            text = f"it has not said for {silent_s:.0f} s what it holds; until then it gets nothing"
            return TierTrouble(kind="failing", text=text)
        why = "it is slower than the saves"
        if failing is not None:
            first_s, last_s, error = failing
            why = f"it takes nothing now ({error})"
            # Not until now: what failed once and is copied for minutes since then goes well.
            if last_s - first_s >= TOLD_AFTER_S:
                text = (
                    f"it has failed for {self._clock() - first_s:.0f} s and is tried again and "
                    f"again, while training and the other tiers go on: {error}"
                )
                return TierTrouble(kind="failing", text=text)
        if pressed and count:
            text = f"{why}, {count} wait and there is no room for more; "
            return TierTrouble(kind="full", text=text + WHEN_FULL[self.spec.on_pressure])
        return None

    def give_up(self, save_id: str) -> bool:
        """A record says that it goes to this tier no more.

        True: it waited, nothing of it is there, and nothing will be.
        """
        why = "it was given up on all hosts, to make room (on_pressure)"
        return self._forget(save_id, Outcome("superseded", why))

    def _forget(self, save_id: str, outcome: Outcome) -> bool:
        with self._cond:
            manifest = self._queue.remove(save_id)
            lacking = manifest is not None and save_id not in self._unsure
            if self._shared is not None:
                manifest = manifest or self._shared.uploads.forget(save_id)
            self._unsure.discard(save_id)
            if manifest is not None:
                self._history.note(manifest, outcome)
                if outcome.level == "superseded":
                    self.counts.dropped += 1
            return lacking

    def active_save(self) -> str | None:
        """The checkpoint that is being copied from memory: its segments must stay."""
        with self._cond:
            save_id = self._active.save_id if self._active is not None else None
        return save_id if save_id is not None and self._from_memory(save_id) else None

    def active_manifest(self) -> Manifest | None:
        """What is being copied."""
        with self._cond:
            return self._active

    def _from_memory(self, save_id: str) -> bool:
        return not self._host.is_in(self.spec.source, save_id)

    def waiting(self) -> tuple[list[Manifest], frozenset[str]]:
        """What waits in memory to be copied, oldest first; and which of them the tier may hold."""
        found, unsure = self.queued()
        return [each for each in found if self._from_memory(each.save_id)], unsure

    def queued(self) -> tuple[list[Manifest], frozenset[str]]:
        """The same of all that waits, in memory or in the tier above."""
        with self._cond:
            return self._queue.by_age(), frozenset(self._unsure)

    def coming(self, stream: str) -> tuple[tuple[str, ...] | None, tuple[int, int]]:
        """What waits or is being copied of ``stream``, and the age of the newest that is known of.

        None: the tier was not read.
        """
        with self._cond:
            active = [self._active] if self._active is not None else []
            found = [m for m in (*active, *self._queue.manifests()) if m.stream == stream]
            catalog = self._catalog
        held = catalog.manifests() if catalog is not None else ()
        known = [*found, *(m for m in held if m.stream == stream)]
        newest = max(((m.attempt.number, m.seq) for m in known), default=(0, 0))
        return tuple(m.save_id for m in found) if catalog is not None else None, newest

    def waiting_saves(self) -> frozenset[str]:
        """The checkpoints that wait, for a copy or for other hosts."""
        with self._cond:
            found = {each.save_id for each in self._queue.manifests()}
            return frozenset(found | self._awaited().keys())

    def awaited(self) -> frozenset[str]:
        """Of which other hosts' parts are not there."""
        with self._cond:
            return frozenset(self._awaited())

    def _awaited(self) -> dict[str, Manifest]:
        """Whose other hosts' parts are not there."""
        return self._shared.uploads.waiting() if self._shared is not None else {}

    def is_idle(self) -> bool:
        """Whether nothing is copied, waits or is being deleted."""
        with self._cond:
            busy = len(self._queue) or self._retaining or self._awaited()
            return self._active is None and not busy

    def outcome(self, save_id: str) -> Outcome:
        """How far a checkpoint has come here."""
        with self._cond:
            if self._active is not None and self._active.save_id == save_id:
                return Outcome("active")
            if save_id in self._queue:
                return Outcome("waiting", self.error) if self.error else Outcome("queued")
            if self._shared is not None and save_id in self._awaited():
                return Outcome("waiting", self.error or self._shared.uploads.missing(save_id))
            known = self._history.get(save_id)
            catalog = self._catalog
        # Whatever was noted: it may have been committed by another host, or at the same moment.
        if catalog is not None and catalog.get(save_id) is not None:
            return Outcome("done")
        if known is not None and known.level != "done":
            return known
        return Outcome("waiting", self.error) if catalog is None else Outcome("not_scheduled")

    # --- the thread's turns -----------------------------------------------------------------------

    def _next_job(self) -> Manifest | None:
        """The next checkpoint, marked as active; None if none is ready."""
        with self._cond:
            self._woken = False
            if self._stopping or not self._host.ruling.fills(self.spec):
                return None
            self._active = self._queue.take(self._is_ready)
            self._woken = self._active is not None
            if not self._woken and not len(self._queue):
                self._pressed = False
            return self._active

    def _source_of(self, manifest: Manifest) -> str:
        """Which copy is read: that of the tier above, if it has one."""
        return MEMORY if self._from_memory(manifest.save_id) else self.spec.source

    def _is_ready(self, manifest: Manifest) -> bool:
        """Whether it can be copied: the tier above has it, or will not get it."""
        source = self.spec.source
        if source == MEMORY or self._host.is_in(source, manifest.save_id):
            return True
        return self._host.level_in(source, manifest.save_id) not in ON_ITS_WAY

    def _settle(self, job: Manifest, outcome: Outcome, retry: str | None) -> None:
        """``job`` is not active any more: it came to its ``outcome``, or is to be tried again."""
        destined = retry is None or self._host.is_destined(job, self.spec.name)
        with self._cond:
            self._active = None
            # In the same moment: nobody may see the tier idle between a spill and its deletes.
            self._retaining = retry is None and outcome.level == "done"
            if retry is None:
                self._failing = None
                if outcome.level != "waiting":  # else it is in others' hands now
                    self._history.note(job, outcome)
                self._queue.settled(job.save_id)
                self._recovered()
            elif destined:
                self._queue.back(job)
            else:
                self._history.note(job, Outcome("superseded", "it was given up on all hosts"))

    def _recovered(self) -> None:
        """The tier works (again). The lock is held."""
        self.error = None
        # Else it answered, and did not take yet what waits for it, and not for the tier above.
        if not any(self._is_ready(each) for each in self._queue.manifests()):
            self._failing = None
