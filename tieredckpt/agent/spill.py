"""One thread per tier and namespace that copies committed checkpoints from memory into the tier.

At most one checkpoint is being copied and, per stream, one waits; a newer one takes the place of a
waiting one ("superseded"), never of an active one. A tier that fails is retried with growing
pauses, and slows down nothing but itself. The thread also attaches the tier: reads what it holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tieredckpt import failpoints
from tieredckpt.agent.look import TierLook
from tieredckpt.agent.source import DamagedSourceError, VerifiedSource
from tieredckpt.agent.spill_host import Outcome, SpillHost
from tieredckpt.agent.tier_retention import retain_in_tier
from tieredckpt.errors import (
    CapacityError,
    IntegrityError,
    NotFoundError,
    TieredCkptError,
    TierUnavailableError,
)
from tieredckpt.format.manifest import Manifest, encode_attempt
from tieredckpt.tiers.base import Scope
from tieredckpt.tiers.catalog import Catalog, segment_key
from tieredckpt.tiers.file import FileTier, device_of, folder_of_url
from tieredckpt.transport.messages import TierSpec, TierStatus

BACKOFF_S_MAX = 60.0
ATTACH_WAIT_S = 20.0
"""Longest wait for a tier's first answer before it counts as unavailable."""
HISTORY_MAX = 1024
"""Checkpoints whose outcome in this tier is remembered."""
STOP_WAIT_S = 10.0
UNEXPECTED = "unexpected failure, see the agent's log"

log = logging.getLogger(__name__)


class TierWorker:
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
        self.spec = spec
        self.error: str | None = None
        self._namespace = namespace
        self._host = host
        self._clock = clock
        self._backoff_first_s = backoff_s
        self._backoff_s = backoff_s
        self._cond = threading.Condition()
        self.look = TierLook(f"tck-look-{spec.name}")
        self._tier: FileTier | None = None
        self._device: int | None = None
        """The file system on which the tier was found first."""
        self._catalog: Catalog | None = None
        self._tries = 0
        """How often attaching was tried to the end."""
        self._waiting: dict[str, Manifest] = {}
        self._active: Manifest | None = None
        self._history: dict[str, Outcome] = {}
        self._crowded: set[str] = set()
        """Streams that may hold more than retention leaves; only the thread uses it."""
        self._retaining = False
        self._nudged = False
        self._failing = False
        """The last step failed, and the thread has not rested since."""
        self._stopping = False
        self._bytes_total = 0
        self._seconds_total = 0.0
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
        if self._thread.is_alive():
            self._thread.join(STOP_WAIT_S)

    @property
    def catalog(self) -> Catalog | None:
        """What the tier holds, once it was attached."""
        with self._cond:
            return self._catalog

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

    def enqueue(self, manifest: Manifest) -> None:
        """Let ``manifest`` be copied; the one of its stream that waits is superseded."""
        with self._cond:
            old = self._waiting.get(manifest.stream)
            if old is not None and old.save_id != manifest.save_id:
                self._note(old, Outcome("superseded", f"step {manifest.step} came before its turn"))
            self._waiting[manifest.stream] = manifest
            self._cond.notify_all()

    def drop(self, save_id: str) -> None:
        """Memory needs the room of a waiting checkpoint: it is superseded."""
        with self._cond:
            for stream, manifest in list(self._waiting.items()):
                if manifest.save_id == save_id:
                    del self._waiting[stream]
                    self._note(
                        manifest,
                        Outcome("superseded", "its room in memory was needed before its turn"),
                    )

    def active_save(self) -> str | None:
        """The checkpoint that is being copied: its segments must stay."""
        with self._cond:
            return self._active.save_id if self._active is not None else None

    def waiting_saves(self) -> frozenset[str]:
        """The checkpoints that wait."""
        with self._cond:
            return frozenset(manifest.save_id for manifest in self._waiting.values())

    def is_idle(self) -> bool:
        """Whether nothing is copied, waits or is being deleted."""
        with self._cond:
            return self._active is None and not self._waiting and not self._retaining

    def outcome(self, save_id: str) -> Outcome:
        """How far a checkpoint has come here."""
        with self._cond:
            if self._active is not None and self._active.save_id == save_id:
                return Outcome("active")
            if any(m.save_id == save_id for m in self._waiting.values()):
                return Outcome("waiting", self.error) if self.error else Outcome("queued")
            known = self._history.get(save_id)
            catalog = self._catalog
        if known is not None and known.level != "done":
            return known
        if catalog is not None and any(m.save_id == save_id for m in catalog.manifests()):
            return Outcome("done")
        return Outcome("waiting", self.error) if catalog is None else Outcome("not_scheduled")

    def status(self, newest_step: int | None, quarantined: int) -> TierStatus:
        """The tier for ``tieredckpt status``; ``newest_step`` is memory's."""
        with self._cond:
            catalog, active = self._catalog, self._active
            queued, error = len(self._waiting), self.error
        manifests = catalog.manifests() if catalog is not None else ()
        newest = max((m.step for m in manifests), default=None)
        lag = None
        if newest_step is not None and newest is not None:
            lag = max(0, newest_step - newest)
        return TierStatus(
            name=self.spec.name,
            url=self.spec.url,
            scope=self.spec.scope,
            available=catalog is not None and error is None,
            error=error,
            checkpoints=len(manifests),
            stored_bytes=sum(ref.size for m in manifests for ref in m.segments),
            queued=queued,
            active_save_id=active.save_id if active is not None else None,
            retaining=self._retaining,
            newest_step=newest,
            lag_steps=lag,
            spilled_bytes_total=self._bytes_total,
            spill_seconds_total=self._seconds_total,
            quarantined=quarantined,
        )

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            # Here and not by who stops it: he does not wait for a disk that hangs, and while this
            # thread may still write, nobody else may have the folder.
            if self._tier is not None:
                self._tier.close()

    def _loop(self) -> None:
        while not self._stopping:
            self.step()
            self._rest()

    def step(self) -> None:
        """Attach the tier, or copy the next waiting checkpoint and delete what is too much.

        What the thread does over and over; it waits for nothing. A failure is in ``error``. Where
        the thread was not started, whoever calls this is the thread.
        """
        try:
            if self._catalog is None:
                self._attach()
            elif (job := self._next_job()) is not None:
                self._work(self._catalog, job)
        except Exception:  # the top of a daemon task: a bug must not end all spilling
            log.exception("tier %s of %s: unexpected", self.spec.name, self._namespace)
            self._failed(UNEXPECTED)
            with self._cond:
                self._tries += self._catalog is None
                self._cond.notify_all()

    def _rest(self) -> None:
        """Wait for a job; after a failure, for the back-off or until somebody asks for the tier."""
        with self._cond:
            if self._failing:
                self._failing = False
                self._cond.wait_for(lambda: self._stopping or self._nudged, self._backoff_s)
                self._backoff_s = min(self._backoff_s * 2, BACKOFF_S_MAX)
            elif self._catalog is not None:
                self._cond.wait_for(lambda: self._stopping or self._waiting)

    def _attach(self) -> None:
        try:
            tier = self._open_tier()
            catalog = Catalog(tier)
            contents = catalog.load()
            wanted = self._host.wanted_by(self.spec.name)
            if tier.scope is Scope.HOST:
                # Left by a crash between segments and manifest; what is about to go on is kept.
                swept = catalog.sweep_orphans(keep=wanted)
                if swept.segments or swept.plans:
                    log.info(
                        "tier %s of %s: removed %d segments and %d plans of unfinished spills",
                        self.spec.name, self._namespace, len(swept.segments), len(swept.plans),
                    )  # fmt: skip
        except TieredCkptError as error:
            self._failed(str(error))  # first: who asks from now on cuts the pause short
            with self._cond:
                self._tries += 1
                self._cond.notify_all()
            return
        # An unreadable one is no copy: it is written again.
        held = {each.save_id for each in contents.manifests if each.manifest is not None}
        self._device = device_of(tier.root)
        with self._cond:
            self._catalog = catalog
            self._tries += 1
            self.error = None
            self._backoff_s = self._backoff_first_s
            for manifest in wanted:
                if manifest.save_id not in held:
                    self._waiting.setdefault(manifest.stream, manifest)
            self._cond.notify_all()
        log.info(
            "tier %s of %s: attached, %d checkpoints", self.spec.name, self._namespace, len(held)
        )

    def _open_tier(self) -> FileTier:
        """The tier, made anew if its folders are gone; never on another file system than before."""
        folder = folder_of_url(self.spec.url)
        if self._tier is not None and not self._tier.is_whole():
            self._tier.close()
            self._tier = None
        if self._tier is None:
            if self._device not in (None, device_of(folder)):
                raise TierUnavailableError(
                    f"{folder} is on another file system than before: is the disk mounted?",
                    tier=self.spec.name,
                    outcome="not_applied",
                )
            scope = Scope(self.spec.scope)
            self._tier = FileTier(self.spec.name, folder, self._namespace, scope=scope)
        return self._tier

    def _next_job(self) -> Manifest | None:
        """The next checkpoint, marked as active; None if none waits."""
        with self._cond:
            if self._stopping or not self._waiting:
                return None
            stream = next(iter(self._waiting))
            self._active = self._waiting.pop(stream)
            return self._active

    def _work(self, catalog: Catalog, job: Manifest) -> None:
        retry: str | None = UNEXPECTED
        outcome = Outcome("done")
        try:
            self._retain_all(catalog)  # what a failure left; it may be the room that is needed
            began_s = self._clock()
            self._copy(catalog, job)
            self._seconds_total += self._clock() - began_s
            self._crowded.add(job.stream)
            retry = None
        except DamagedSourceError as error:
            outcome, retry = Outcome("failed", str(error)), None
            self._host.quarantine("memory", error.segment_id, error.blocks, error.message)
        except (TierUnavailableError, CapacityError, OSError) as error:
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
            except (TierUnavailableError, CapacityError, OSError) as error:
                retry = str(error)
        elif retry is None:
            log.error("tier %s: step %d: %s", self.spec.name, job.step, outcome.error)
        if retry is not None and not self._stopping:
            self._failed(retry)

    def _is_gone(self) -> bool:
        """Whether the tier's folders were deleted or unmounted; then it is given up."""
        if self._tier is None or self._tier.is_whole():
            return False
        with self._cond:
            self._catalog = None
        return True

    def _settle(self, job: Manifest, outcome: Outcome, retry: str | None) -> None:
        """``job`` is not active any more: it came to its ``outcome``, or is to be tried again."""
        with self._cond:
            self._active = None
            # In the same moment: nobody may see the tier idle between a spill and its deletes.
            self._retaining = retry is None and outcome.level == "done"
            if retry is None:
                self._note(job, outcome)
                self.error = None
                self._backoff_s = self._backoff_first_s
            elif job.stream in self._waiting:
                self._note(job, Outcome("superseded", f"failed ({retry}); a newer one waits"))
            else:
                self._waiting[job.stream] = job

    def _copy(self, catalog: Catalog, job: Manifest) -> None:
        # Attempts first: a manifest whose attempt is unknown could not be placed on the time line.
        there = {(record.number, record.id) for record in catalog.attempts()}
        for record in self._host.known_attempts():
            if (record.number, record.id) not in there:
                catalog.put_attempt(encode_attempt(record))
        for ref in job.segments:
            with self._host.open_memory(ref.id) as opened:
                source = VerifiedSource(opened, ref, lambda: self._stopping)
                catalog.tier.put_from(segment_key(ref.id), source)
            with self._cond:
                self._bytes_total += ref.size
        failpoints.reach("agent.spill.before_plan")
        if not catalog.has_plan(job.plan):
            catalog.put_plan(job.plan, self._host.read_plan(job.plan))
        failpoints.reach("agent.spill.before_manifest")
        catalog.commit(self._host.read_manifest(job))
        failpoints.reach("agent.spill.after_manifest")

    def _retain_all(self, catalog: Catalog) -> None:
        """Delete what is too much in streams that got a checkpoint since this last succeeded."""
        try:
            for stream in sorted(self._crowded):
                retain_in_tier(catalog, self.spec, stream, self._host)
                self._crowded.discard(stream)
        finally:
            self._retaining = False

    def _failed(self, error: str) -> None:
        """The thread rests before it tries again."""
        with self._cond:
            if self.error != error:
                log.warning("tier %s of %s: %s", self.spec.name, self._namespace, error)
            self.error = error
            self._failing = True
            self._nudged = False

    def _note(self, manifest: Manifest, outcome: Outcome) -> None:
        self._history.pop(manifest.save_id, None)
        self._history[manifest.save_id] = outcome
        while len(self._history) > HISTORY_MAX:
            del self._history[next(iter(self._history))]
