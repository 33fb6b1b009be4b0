"""One thread per tier and namespace that copies committed checkpoints from memory into the tier.

At most one checkpoint is being copied, the others wait in the order of their age (spill_queue.py).
None is passed over because newer ones came: all hosts copy the same. A tier that fails is retried
with growing pauses, and slows down nothing but itself. The thread also attaches the tier: reads
what it holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from tieredckpt.agent.look import TierLook
from tieredckpt.agent.shared_side import SharedSide, open_catalog
from tieredckpt.agent.source import DamagedSourceError
from tieredckpt.agent.spill_copy import copy_checkpoint
from tieredckpt.agent.spill_host import Outcome, SpillHost
from tieredckpt.agent.spill_line import SpillLine
from tieredckpt.agent.spill_status import Memory, tier_status
from tieredckpt.agent.tier_place import TierPlace
from tieredckpt.agent.tier_retention import HostRetention, lacking
from tieredckpt.errors import (
    CapacityError,
    IntegrityError,
    NamespaceInUseError,
    NotFoundError,
    TieredCkptError,
    TierUnavailableError,
)
from tieredckpt.format.manifest import Manifest
from tieredckpt.tiers.base import Scope
from tieredckpt.tiers.catalog import Catalog
from tieredckpt.transport.messages import TierSpec, TierStatus

BACKOFF_S_MAX = 60.0
NUDGE_S = 1.0
"""A tier that failed is not tried more often, whoever asks for it."""
ATTACH_WAIT_S = 20.0
"""Longest wait for a tier's first answer before it counts as unavailable."""
STOP_WAIT_S = 10.0
SOURCE_POLL_S = 1.0
"""How often it is looked whether the tier above has what waits; that wakes it, too."""
_RETRIED = (TierUnavailableError, CapacityError, NamespaceInUseError, OSError)
UNEXPECTED = "unexpected failure, see the agent's log"

log = logging.getLogger(__name__)


class TierWorker(SpillLine):
    """The spill thread of one tier of one namespace. Public methods are thread-safe.

    Args:
        spec: The tier.
        namespace: Name of the namespace.
        host: See :class:`SpillHost`; called without the worker's lock held.
        clock: Monotonic seconds.
        backoff_s: First pause after a failure.
    """

    def __init__(
        self,
        spec: TierSpec,
        namespace: str,
        host: SpillHost,
        *,
        clock: Callable[[], float] = time.monotonic,
        backoff_s: float = 1.0,
    ) -> None:
        super().__init__(spec, namespace, host, clock)
        self._backoff_first_s = backoff_s
        self._backoff_s = backoff_s
        self.look = TierLook(f"tck-look-{spec.name}")
        self._place = TierPlace(spec, namespace)
        self._tried_at_s = 0.0
        """When the last step began; only the thread uses it."""
        self._moved_at_s = 0.0
        """When bytes were copied last; likewise."""
        self._failures = 0
        self._tries = 0
        """How often attaching was tried to the end."""
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
            tries = self._tries
            if self._catalog is None and tries:
                self._nudged = True
                self._cond.notify_all()
            self._cond.wait_for(
                lambda: self._catalog is not None or self._tries > tries or self._stopping,
                timeout_s,
            )
            return self._catalog

    def retry(self, timeout_s: float) -> None:
        """Have a tier that failed tried now, and wait until it works, copies or fails again."""
        with self._cond:
            if self.error is None:
                return
            failures, self._nudged = self._failures, True
            self._cond.notify_all()
            self._cond.wait_for(
                lambda: (
                    self.error is None
                    or self._active is not None
                    or self._failures > failures
                    or self._stopping
                ),
                timeout_s,
            )

    @property
    def answers(self) -> bool:
        """Whether the tier is attached, and works as far as is known or is being tried."""
        with self._cond:
            tried = self.error is None or self._active is not None
            return self._catalog is not None and tried

    def poke(self) -> None:
        """What it failed for, or could not delete, may go now: it is tried again."""
        with self._cond:
            self._nudged = self._poked = True
            self._wake()

    def status(self, memory: Memory, quarantined: int) -> TierStatus:
        """The tier for ``tieredckpt status``."""
        with self._cond:
            catalog, active = self._catalog, self._active
            queued, error, awaited = self._queue.manifests(), self.error, len(self._awaited())
        return tier_status(
            self.spec, catalog, memory, self._host.own_segments, error=error, queued=queued,
            awaited=awaited, active=active, retaining=self._retaining,
            counts=self.counts, quarantined=quarantined,
            full=self._pressed,
        )  # fmt: skip

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            # Here and not by who stops it: he does not wait for a disk that hangs, and while this
            # thread may still write, nobody else may have the folder.
            self._place.close()

    def _loop(self) -> None:
        while not self._stopping:
            self.step()
            self._rest()

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
        except Exception:  # the top of a daemon task: a bug must not end all spilling
            log.exception("tier %s of %s: unexpected", self.spec.name, self._namespace)
            self._failed(UNEXPECTED)
            with self._cond:
                self._tries += self._catalog is None
                self._cond.notify_all()

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
        try:
            tier = self._place.open()
            catalog, shared = open_catalog(
                tier, self._shared, self._namespace, self.spec, self._host, self._clock
            )
            self._host.keeping.attached(self.spec.name, catalog)
            wanted = self._host.wanted_by(self.spec.name)
            self._unswept = tier.scope is Scope.HOST
            self._sweep_left(catalog, wanted)
        except TieredCkptError as error:
            self._failed(str(error))  # first: who asks from now on cuts the pause short
            with self._cond:
                self._tries += 1
                self._cond.notify_all()
            return
        # An unreadable one is no copy: it is written again.
        held = {each.save_id for each in catalog.manifests()}
        missing = lacking(
            catalog, self.spec, [m for m in wanted if m.save_id not in held], self._host
        )
        self._place.found()
        with self._cond:
            self._catalog, self._shared = catalog, shared
            self._tries += 1
            considered = {each.save_id for each in wanted} & self._unsure
            for save_id in (held | considered) - {each.save_id for each in missing}:
                self._queue.remove(save_id)
            self._unsure.clear()
            for manifest in missing:
                self._queue.add(manifest)
            self._recovered()
            self._wake()
        self._host.attached(self.spec.name)
        log.info(
            "tier %s of %s: attached, %d checkpoints", self.spec.name, self._namespace, len(held)
        )

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
                "tier %s of %s: removed %d segments and %d plans of unfinished spills",
                self.spec.name, self._namespace, len(swept.segments), len(swept.plans),
            )  # fmt: skip

    def _work(self, catalog: Catalog, job: Manifest) -> None:
        retry: str | None = UNEXPECTED
        outcome = Outcome("done")
        try:
            self._retain_all(catalog)  # what a failure left; it may be the room that is needed
            began_s = self._clock()
            outcome = self._copy_with_room(catalog, job)
            self.counts.seconds += self._clock() - began_s
            if self._shared is None:
                self._retention.note(job.stream)
            retry = None
        except DamagedSourceError as error:
            outcome, retry = Outcome("failed", str(error)), None
            self._host.quarantine(error.tier, error.segment_id, error.blocks, error.message)
        except _RETRIED as error:
            retry = str(error)
        except (NotFoundError, IntegrityError, TieredCkptError) as error:
            outcome, retry = Outcome("failed", str(error)), None
        finally:
            if (retry or outcome.error) and self._is_gone():
                retry = f"{retry or outcome.error} (its folders are gone, it is attached anew)"
            # Also after a bug: what is active pins its slots, and is waited for.
            self._settle(job, outcome, retry)
            # Memory is freed and waiters are told before old files go: that takes the file system
            # 0.14 s per GiB, half as long as writing them.
            self._host.spilled()
        if retry is None and outcome.level == "done":
            log.info(
                "tier %s of %s: holds step %d of stream %s (%s)",
                self.spec.name, self._namespace, job.step, job.stream, job.save_id,
            )  # fmt: skip
            try:
                self._retain_all(catalog)
            except _RETRIED as error:
                retry = str(error)
        elif retry is None and outcome.level == "failed":
            log.error("tier %s: step %d: %s", self.spec.name, job.step, outcome.error)
        if retry is not None and not self._stopping:
            self._failed(retry)

    def _is_gone(self) -> bool:
        """Whether the tier's folders were deleted or unmounted; then it is given up."""
        if not self._place.is_gone():
            return False
        with self._cond:
            self._catalog = None
        return True

    def _recovered(self) -> None:
        super()._recovered()
        self._backoff_s = self._backoff_first_s
        self._cond.notify_all()

    def _copy(self, catalog: Catalog, job: Manifest) -> Outcome:
        if self._shared is None:
            source = self._source_of(job)
            copy_checkpoint(catalog, job, self._host, source, lambda: self._stopping, self._count)
            return Outcome("done")
        self._shared.uploads.source = self._source_of(job)
        settled = self._shared.put_part(job, lambda: self._stopping, self._count)
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
        try:
            settled = shared.step(lambda: self._stopping, self._count)
        except _RETRIED as error:
            self._is_gone()
            self._failed(str(error))
            return
        with self._cond:
            self._recovered()
            for manifest, outcome in settled:
                self._history.note(manifest, outcome)
        if settled:
            self._host.spilled()

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
        try:
            self._retain_all(catalog)
        except _RETRIED as error:
            self._is_gone()
            self._failed(str(error))
            return
        with self._cond:
            self._recovered()

    def _failed(self, error: str) -> None:
        """The thread rests before it tries again."""
        with self._cond:
            if self.error != error:
                log.warning("tier %s of %s: %s", self.spec.name, self._namespace, error)
            self.error = error
            # A store is asked for minutes before it counts as failed: nothing has gone there since.
            began_s = max(self._tried_at_s, self._moved_at_s)
            first_s = self._failing[0] if self._failing else began_s
            self._failing = (first_s, self._clock(), error)
            self._must_rest = True
            self._failures += 1
            self._cond.notify_all()
