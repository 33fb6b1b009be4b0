"""One thread per tier and namespace that copies committed checkpoints from memory into the tier.

At most one checkpoint is being copied, the others wait in the order of their age (queue.py).
None is passed over because newer ones came: all hosts copy the same. A tier that fails is retried
with growing pauses, and slows down nothing but itself. The thread also attaches the tier: reads
what it holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from tieredckpt.agent.tiers.host_retention import HostRetention, lacking
from tieredckpt.agent.tiers.interface import ON_ITS_WAY, Outcome, SpillCounts, SpillHost
from tieredckpt.agent.tiers.place import TierPlace
from tieredckpt.agent.tiers.pruner import SharedSide
from tieredckpt.agent.tiers.queue import SpillQueue
from tieredckpt.agent.tiers.scanner import TierLook
from tieredckpt.agent.tiers.source import DamagedSourceError, copy_checkpoint
from tieredckpt.config.units import Every
from tieredckpt.errors import (
    CapacityError,
    NamespaceInUseError,
    TieredCkptError,
    TierUnavailableError,
)
from tieredckpt.format.manifest import AttemptRecord, Manifest
from tieredckpt.policy.schedule import lag_alarm, lag_of
from tieredckpt.rpc.messages.agent import TierSpec, TierStatus, TierTrouble
from tieredckpt.storage.base import Scope, Tier
from tieredckpt.storage.catalog import Catalog
from tieredckpt.storage.object.supplied import Handed

BACKOFF_S = 1.0
BACKOFF_S_MAX = 60.0
"""The first and the longest pause after a failure."""
NUDGE_S = 1.0
"""A tier that failed is not tried more often, whoever asks for it."""
ATTACH_WAIT_S = 20.0
"""Longest wait for a tier's first answer before it counts as unavailable."""
STOP_WAIT_S = 10.0
HISTORY_MAX = 1024
SOURCE_POLL_S = 1.0
"""How often it is looked whether the tier above has what waits; that wakes it, too."""
_RETRIED = (TierUnavailableError, CapacityError, NamespaceInUseError, OSError)
UNEXPECTED = "unexpected failure, see the agent's log"
MEMORY = "memory"
TOLD_AFTER_S = 3.0
"""Training is not told of failures that are over sooner."""
UNREAD_AFTER_S = 30.0
"""Nor of a tier that is read for the first time."""
WHEN_FULL = {
    "keep": "saves wait and are skipped (on_pressure: keep)",
    "drop_oldest_queued": "the oldest waiting ones are shed (on_pressure)",
}

log = logging.getLogger(__name__)


class TierWorker:
    """The spill thread of one tier of one namespace. Public methods are thread-safe.

    Args:
        spec: The tier.
        namespace: Name of the namespace.
        host: See :class:`SpillHost`; called without the worker's lock held, but for what is in or
            comes to the tier above: a worker is never asked by one above it, so that these locks
            have an order.
        script: Credentials of the training script.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        spec: TierSpec,
        namespace: str,
        host: SpillHost,
        *,
        script: Handed | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self._clock = clock
        self._made_at_s = clock()
        self._namespace = namespace
        self._name = f"tier {spec.name} of {namespace}"
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
        self._history: dict[str, Outcome] = {}
        """By save id, of the last :data:`HISTORY_MAX` checkpoints: what became of them here."""
        self._held: tuple[Manifest, ...] = ()
        """What the tier held when it was read last, as far as it held anything."""
        self._missed: dict[str, Manifest] = {}
        """By stream, the earliest that did not get there since another one did."""
        self._retaining = False
        self._stopping = False
        self._pressed = False
        """There has been no room since something began to wait."""
        self._backoff_s = BACKOFF_S
        self.look = TierLook(f"tck-look-{spec.name}")
        self._place = TierPlace(spec, namespace, script)
        self._tried_at_s = 0.0
        """When the last step began; only the thread uses it."""
        self._moved_at_s = 0.0
        """When bytes were copied, or read to be copied, last; likewise."""
        self._failures = 0
        self._retention = HostRetention(spec, host, clock)
        self._unswept = False
        """Of a tier of this host; only the thread uses it."""
        self._owes_turns = False
        """Something was copied since turns were taken; only the thread uses it."""
        self._poked = False
        """Somebody who needed what is here may not any more."""
        self._must_rest = False
        """The last step failed, and the thread has not rested since."""
        self._thread = threading.Thread(
            target=self._run, name=f"tck-spill-{spec.name}", daemon=True
        )

    # --- what others call -------------------------------------------------------------------------

    def start(self) -> None:
        """Begin: attach the tier, take up what is missing there."""
        self._thread.start()

    def stop(self) -> None:
        """Abandon the current transfer between two blocks and give the tier up. Idempotent."""
        with self._cond:
            self._stopping = True
            self._cond.notify_all()
        self._place.abandon()
        if self._thread.is_alive():
            self._thread.join(STOP_WAIT_S)

    def attach(self, timeout_s: float) -> Catalog | None:
        """Wait until the tier answered at least once; tries again now if it failed before."""
        with self._cond:
            if self._catalog is None:
                failures = self._failures
                self._nudged = self._nudged or failures > 0
                self._cond.notify_all()
                self._cond.wait_for(
                    lambda: self._catalog or self._failures > failures or self._stopping, timeout_s
                )
            return self._catalog

    def poke(self) -> None:
        """What it failed for, or could not delete, may go now, or somebody waits for the tier: it
        is tried again, and its pause after a failure ends.
        """
        with self._cond:
            self._nudged = self._poked = True
            self.wake()

    def status(
        self, heads: Sequence[Manifest], attempts: Sequence[AttemptRecord], quarantined: int
    ) -> TierStatus:
        """The tier for ``tieredckpt status``, as far as it is known.

        Args:
            heads: The newest candidate in memory of each stream, with which it is compared.
            attempts: All that are known.
            quarantined: Bad copies in the tier.
        """
        with self._cond:
            catalog, active = self._catalog, self._active
            queued, error, awaited = self._queue.manifests(), self.why(), len(self._awaited())
            known, missed = self._held, tuple(self._missed.values())
        manifests = catalog.manifests() if catalog is not None else known
        moving = [*queued, active] if active is not None else queued
        spec = self.spec
        limit = spec.lag_alarm or Every()
        own = self._host.own_segments
        lag = lag_of(heads, manifests or known, moving, attempts, own, missed=missed)
        return TierStatus(
            name=spec.name,
            url=spec.url,
            scope=spec.scope,
            available=catalog is not None and error is None,
            error=error,
            checkpoints=len(manifests),
            stored_bytes=sum(ref.size for m in manifests for ref in m.segments),
            queued=len(queued),
            awaited=awaited,
            active_save_id=active.save_id if active is not None else None,
            retaining=self._retaining,
            newest_step=max((m.step for m in manifests), default=None),
            lag_steps=lag.steps,
            lag_s=lag.seconds,
            lag_bytes=lag.bytes,
            alarm=lag_alarm(lag, steps=limit.steps, seconds=limit.seconds),
            memory_full=self._pressed,
            dropped_total=self.counts.dropped,
            spilled_bytes_total=self.counts.bytes,
            spill_seconds_total=self.counts.seconds,
            quarantined=quarantined,
        )

    def why(self) -> str | None:
        """Why nothing gets there now: what the last step failed for, or why the one that is under
        way repeats its requests. None: it works, as far as is known.
        """
        failing = self._failing
        if self.error is None or failing is None:
            return self.error or self._place.retrying()
        since = time.localtime(time.time() - (self._clock() - failing[0]))
        return f"{self.spec.url} since {time.strftime('%Y-%m-%d %H:%M:%S', since)}: {self.error}"

    def quiet_s(self) -> float | None:
        """Seconds since bytes were copied last; None: it fails at this moment."""
        return None if self.why() is not None else self._clock() - self._moved_at_s

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
                self._note(manifest, Outcome("failed", "too many wait for this tier"))
                return
            if sure:
                self._unsure.discard(save_id)
            else:
                self._unsure.add(save_id)
            self._nudged = True
            self.wake()

    def wake(self) -> None:
        """What waits may be ready now."""
        with self._cond:
            self._woken = True
            self._cond.notify_all()

    def drop(self, save_id: str) -> None:
        """Memory has let go of a checkpoint that waits; it may be in the tier above."""
        if not self._host.is_in(self.spec.source, save_id):
            self._forget(save_id, "it was deleted from memory before")

    def note_pressure(self, place: str = MEMORY) -> None:
        """``place`` has no room for what waits; said once, until nothing waits any more."""
        with self._cond:
            if self._pressed:
                return
            self._pressed, count = True, self._num_waiting()
        what = WHEN_FULL[self.spec.on_pressure]
        log.warning(
            "%s is slower than the saves: %d checkpoints wait for it and %s has no space for more; "
            "%s", self._name, count, place, what,
        )  # fmt: skip

    def _num_waiting(self) -> int:
        return len(self._queue) + (self._active is not None)

    def trouble(self) -> TierTrouble | None:
        """What training should know of the tier, if it lasts."""
        with self._cond:
            failing, pressed, count = self._failing, self._pressed, self._num_waiting()
            is_unread = self._catalog is None and failing is None
        if failing is None and (error := self._place.retrying()) is not None:
            return TierTrouble(kind="failing", text=f"its requests fail and are retried: {error}")
        silent_s = self._clock() - self._made_at_s
        if is_unread and silent_s >= UNREAD_AFTER_S:
            text = f"it could not be read for {silent_s:.0f} s; nothing is copied to it until then"
            return TierTrouble(kind="failing", text=text)
        why = "it is slower than the saves"
        if failing is not None:
            first_s, last_s, error = failing
            why = f"it accepts nothing now ({error})"
            # Not until now: what failed once and is copied for minutes since then goes well.
            if last_s - first_s >= TOLD_AFTER_S:
                text = (
                    f"it has failed for {self._clock() - first_s:.0f} s and is retried; training "
                    f"and the other tiers continue: {error}"
                )
                return TierTrouble(kind="failing", text=text, since_s=first_s)
        if pressed and count:
            text = f"{why}, {count} wait and there is no space for more; "
            return TierTrouble(kind="full", text=text + WHEN_FULL[self.spec.on_pressure])
        return None

    def give_up(self, save_id: str) -> bool:
        """A record says that it goes to this tier no more.

        True: it waited, nothing of it is there, and nothing will be.
        """
        return self._forget(save_id, "it was shed on all hosts, to free space (on_pressure)")

    def _forget(self, save_id: str, why: str) -> bool:
        with self._cond:
            manifest = self._queue.remove(save_id)
            lacking = manifest is not None and save_id not in self._unsure
            if self._shared is not None:
                manifest = manifest or self._shared.uploads.forget(save_id)
            self._unsure.discard(save_id)
            if manifest is not None:
                self._note(manifest, Outcome("superseded", why))
                self.counts.dropped += 1
            return lacking

    def _note(self, manifest: Manifest, outcome: Outcome) -> None:
        """``manifest`` came to ``outcome``. The lock is held."""
        earliest = self._missed.pop(manifest.stream, manifest)
        if outcome.level != "done":
            self._missed[manifest.stream] = min(earliest, manifest, key=lambda each: each.step)
        self._history.pop(manifest.save_id, None)
        self._history[manifest.save_id] = outcome
        while len(self._history) > HISTORY_MAX:
            del self._history[next(iter(self._history))]

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
                return Outcome("active", self._place.retrying())
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

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.step()
                self._rest()
        finally:
            # Here and not by who stops it: he does not wait for a disk that hangs, and while this
            # thread may still write, nobody else may have the folder.
            self._place.close()

    def step(self) -> None:
        """Attach the tier, or copy the next waiting checkpoint and delete what is too much.

        What the thread does over and over; it waits for nothing. A failure is in ``error``. Where
        the thread was not started, whoever calls this is the thread.
        """
        self._tried_at_s = self._clock()
        try:
            if self._catalog is None:
                self._attach()
            elif self._shared is not None and self._owes_turns and self._shared.rest_s() <= 0:
                # After each copy: else a queue that never empties would leave all that is waiting
                # for other hosts uncommitted, and the tier unpruned.
                self._take_turns(self._shared)
            elif (job := self._next_job()) is not None:
                self._owes_turns = True
                self._work(self._catalog, job)
            elif self._shared is not None:
                self._take_turns(self._shared)
            elif self._poked or self._retention.rest_s() == 0:
                self._catch_up(self._catalog)
        except Exception as error:  # the top of a daemon task: a bug must not end all spilling
            why = str(error)
            if not isinstance(error, TieredCkptError | OSError):
                log.exception("%s: unexpected", self._name)
                why = UNEXPECTED
            if self._is_gone():
                why += " (its folders are gone, it is attached anew)"
            if not self._stopping:
                self._failed(why)

    def _rest(self) -> None:
        """Wait for a job; after a failure, for the back-off or until somebody asks for the tier."""
        with self._cond:
            if self._must_rest:
                self._must_rest = False
                least_s = max(0.0, NUDGE_S - (self._clock() - self._tried_at_s))
                least_s = min(least_s, self._backoff_s)
                self._cond.wait_for(lambda: self._stopping, least_s)
                left_s = self._backoff_s - least_s
                self._cond.wait_for(lambda: self._stopping or self._nudged, left_s)
                self._nudged = False
                self._backoff_s = min(self._backoff_s * 2, BACKOFF_S_MAX)
            elif self._catalog is not None:
                rest_s = (self._shared or self._retention).rest_s()
                if len(self._queue):  # for the tier above
                    rest_s = min(rest_s or SOURCE_POLL_S, SOURCE_POLL_S)
                self._cond.wait_for(lambda: self._stopping or self._woken, rest_s)

    def _attach(self) -> None:
        tier = self._place.open()
        catalog, shared = self._open_catalog(tier)
        self._host.keeping.attached(self.spec.name, catalog)
        wanted = self._host.wanted_by(self.spec.name)
        self._unswept = tier.scope is Scope.HOST
        self._sweep_left(catalog, wanted)
        held = {each.save_id for each in catalog.manifests()}
        missing = lacking(catalog, self.spec, wanted, self._host)
        self._place.found()
        with self._cond:
            self._catalog, self._shared = catalog, shared
            considered = {each.save_id for each in wanted} & self._unsure
            for save_id in (held | considered) - {each.save_id for each in missing}:
                self._queue.remove(save_id)
            self._unsure.clear()
            for manifest in missing:
                self._queue.add(manifest)
            self._recovered()
            self.wake()
        self._host.attached(self.spec.name)
        log.info("%s: attached, %d checkpoints", self._name, len(held))

    def _open_catalog(self, tier: Tier) -> tuple[Catalog, SharedSide | None]:
        """Read the catalog of ``tier`` anew; with the worker's part of it if hosts share the tier.

        Raises TierUnavailableError: It does not answer.
        """
        if tier.scope is Scope.HOST:
            catalog = Catalog(tier)
            catalog.load()
            catalog.load_records()
            return catalog, None
        shared = self._shared  # of before: its caches are used again
        if shared is None or shared.catalog.tier is not tier:
            shared = SharedSide(tier, self._namespace, self.spec, self._host, self._clock)
        else:
            shared.catalog.refresh_commits()
        shared.catalog.plan_copies.refresh()
        shared.catalog.load_records()
        return shared.catalog, shared

    def _sweep_left(self, catalog: Catalog, wanted: Sequence[Manifest]) -> None:
        """Remove what a crash left between segments and manifest, once this tier is pruned here;
        what is about to go on is kept.
        """
        if not self._unswept or not self._host.ruling.prunes(self.spec):
            return
        swept = catalog.sweep_orphans(keep=wanted)
        self._unswept = False
        if swept.segments or swept.plans:
            log.info(
                "%s: removed %d segments and %d plans of unfinished spills",
                self._name, len(swept.segments), len(swept.plans),
            )  # fmt: skip

    def _work(self, catalog: Catalog, job: Manifest) -> None:
        """Copy ``job``. Raises what it is to be tried again for."""
        outcome: Outcome | None = None
        try:
            self._retain_all(catalog)  # what a failure left; it may be the room that is needed
            began_s = self._clock()
            outcome = self._copy_with_room(catalog, job)
            self.counts.seconds += self._clock() - began_s
            if self._shared is None:
                self._retention.note(job.stream)
        except (TieredCkptError, OSError) as error:
            if isinstance(error, DamagedSourceError):
                self._host.quarantine(error.tier, error.segment_id, error.blocks, error.message)
            if self._is_gone() or isinstance(error, _RETRIED):
                raise
            outcome = Outcome("failed", str(error))
        finally:
            # Also after a bug: what is active pins its slots, and is waited for.
            self._settle(job, outcome)
            # Memory is freed and waiters are told before old files go: that takes the file system
            # 0.14 s per GiB, half as long as writing them.
            self._host.spilled()
        if outcome.level == "done":
            save_id, stream = job.save_id, job.stream
            log.info("%s: holds step %d of stream %s (%s)", self._name, job.step, stream, save_id)
            self._retain_all(catalog)
        elif outcome.level == "failed":
            log.error("tier %s: step %d: %s", self.spec.name, job.step, outcome.error)

    def _is_gone(self) -> bool:
        """Whether the tier's folders were deleted or unmounted; then it is given up."""
        if not self._place.is_gone():
            return False
        with self._cond:
            if self._catalog is not None:
                self._held = self._catalog.manifests() or self._held
            self._catalog = None
        return True

    def _copy(self, catalog: Catalog, job: Manifest) -> Outcome:
        if self._shared is None:
            source = self._source_of(job)
            copy_checkpoint(catalog, job, self._host, source, self._ends, self._count)
            return Outcome("done")
        self._shared.uploads.source = self._source_of(job)
        settled = self._shared.put_part(job, self._ends, self._count)
        return settled or Outcome("waiting")

    def _copy_with_room(self, catalog: Catalog, job: Manifest) -> Outcome:
        while True:
            try:
                return self._copy(catalog, job)
            except CapacityError as error:
                # Each turn deletes at least one checkpoint. The pruner of a tier that hosts share
                # deletes when it is its turn.
                if self._shared is not None or self._stopping:
                    raise
                if not self._retention.make_room(catalog, job):
                    text = f"{error.message}{self._retention.why_full}"
                    raise CapacityError(text, **error.fields) from error

    def _take_turns(self, shared: SharedSide) -> None:
        """Look at what waits for other hosts, and prune."""
        self._owes_turns = False
        settled = shared.step(self._ends, self._count)
        with self._cond:
            self._recovered()
            for manifest, outcome in settled:
                self._note(manifest, outcome)
        if settled:
            self._host.spilled()

    def _ends(self) -> bool:
        """Whether the copy is to be abandoned: asked for each run of blocks that was read."""
        self._moved_at_s = self._clock()
        return self._stopping

    def _count(self, size: int) -> None:
        self._moved_at_s = self._clock()
        with self._cond:
            self.counts.bytes += size

    def _retain_all(self, catalog: Catalog) -> None:
        """Delete what is too much, in a tier of this host."""
        try:
            self._sweep_left(catalog, self._host.wanted_by(self.spec.name))
            if self._retention.rest_s() is not None:
                self._retention.apply(catalog)
        finally:
            self._retaining = False

    def _catch_up(self, catalog: Catalog) -> None:
        """Nothing is to be copied, and something was not deleted when it was its turn."""
        self._poked = False
        self._retain_all(catalog)
        with self._cond:
            self._recovered()

    def _failed(self, error: str) -> None:
        """The thread rests before it tries again."""
        with self._cond:
            # A store is asked for minutes before it counts as failed: nothing has gone there since.
            began_s = max(self._tried_at_s, self._moved_at_s)
            first_s = self._failing[0] if self._failing else began_s
            self._failing = (first_s, self._clock(), error)
            if error != self.error:
                log.warning("%s: %s", self._name, error)
            self.error = error
            self._must_rest = True
            self._failures += 1
            self._cond.notify_all()

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

    def _settle(self, job: Manifest, outcome: Outcome | None) -> None:
        """``job`` is not active any more: it came to ``outcome``; None: it is to be tried again."""
        destined = outcome is not None or self._host.is_destined(job, self.spec.name)
        with self._cond:
            self._active = None
            # In the same moment: nobody may see the tier idle between a spill and its deletes.
            self._retaining = outcome is not None and outcome.level == "done"
            if outcome is not None:
                self._failing = None
                if outcome.level != "waiting":  # else it is in others' hands now
                    self._note(job, outcome)
                self._queue.settled(job.save_id)
                self._recovered()
            elif destined:
                self._queue.back(job)
            else:
                self._note(job, Outcome("superseded", "it was shed on all hosts"))

    def _recovered(self) -> None:
        """The tier works (again). The lock is held."""
        self.error = None
        # Else it answered, and did not take yet what waits for it, and not for the tier above.
        if not any(self._is_ready(each) for each in self._queue.manifests()):
            self._failing = None
        self._backoff_s = BACKOFF_S
        self._cond.notify_all()
