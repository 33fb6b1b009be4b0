"""One thread per tier and namespace that copies committed checkpoints from memory into the tier.

At most one checkpoint is being copied and, per stream, one waits; a newer one takes the place of a
waiting one ("superseded"), never of an active one. A tier that fails is retried with growing
pauses, and slows down nothing but itself. The thread also attaches the tier: reads what it holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tieredckpt import failpoints
from tieredckpt.agent.source import DamagedSourceError, VerifiedSource
from tieredckpt.errors import (
    CapacityError,
    IntegrityError,
    NotFoundError,
    TieredCkptError,
    TierUnavailableError,
)
from tieredckpt.format.manifest import AttemptRecord, Manifest, encode_attempt
from tieredckpt.policy.retention import Keep, retain
from tieredckpt.policy.timeline import abandoned, candidates
from tieredckpt.tiers.base import OpenObject, Scope
from tieredckpt.tiers.catalog import Catalog, segment_key
from tieredckpt.tiers.file import FileTier, folder_of_url
from tieredckpt.transport.messages import Level, TierSpec, TierStatus

BACKOFF_S_MAX = 60.0
ATTACH_WAIT_S = 20.0
"""Longest wait for a tier's first answer before it counts as unavailable."""
HISTORY_MAX = 1024
"""Checkpoints whose outcome in this tier is remembered."""
STOP_WAIT_S = 10.0

log = logging.getLogger(__name__)


class SpillHost(Protocol):
    """What a worker needs of its namespace. All methods block and are thread-safe."""

    def open_memory(self, segment_id: str) -> OpenObject:
        """Open a segment in memory under a lease. Raises NotFoundError."""

    def read_plan(self, plan_id: str) -> bytes:
        """A plan in memory. Raises NotFoundError."""

    def read_manifest(self, manifest: Manifest) -> bytes:
        """The encoded manifest. Raises NotFoundError."""

    def known_attempts(self) -> tuple[AttemptRecord, ...]:
        """Attempt records that memory holds."""

    def wanted_by(self, tier: str) -> tuple[Manifest, ...]:
        """Newest candidate of each stream in memory that is destined for ``tier``."""

    def quarantine(self, tier: str, segment_id: str, blocks: Sequence[int], reason: str) -> None:
        """Remember a bad copy."""

    def forget(self, tier: str, segment_ids: Sequence[str]) -> None:
        """These copies are deleted: their marks go too."""

    def spilled(self) -> None:
        """A spill ended: memory may be freed that it held."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a checkpoint has come in a tier, and why not further."""

    level: Level
    error: str | None = None


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
        self._tier: FileTier | None = None
        self._catalog: Catalog | None = None
        self._tries = 0
        """How often attaching was tried to the end."""
        self._waiting: dict[str, Manifest] = {}
        self._active: Manifest | None = None
        self._history: dict[str, Outcome] = {}
        self._nudged = False
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
        if self._tier is not None and not self._thread.is_alive():
            self._tier.close()

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
        """Whether nothing is copied or waits."""
        with self._cond:
            return self._active is None and not self._waiting

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
            newest_step=newest,
            lag_steps=lag,
            spilled_bytes_total=self._bytes_total,
            spill_seconds_total=self._seconds_total,
            quarantined=quarantined,
        )

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                if self._catalog is None:
                    self._attach()
                    continue
                job = self._next_job()
                if job is not None:
                    self._work(self._catalog, job)
            except Exception:  # the top of a daemon task: a bug must not end all spilling
                log.exception("tier %s of %s: unexpected", self.spec.name, self._namespace)
                self._pause("unexpected failure, see the agent's log")

    def _attach(self) -> None:
        try:
            tier = self._tier or FileTier(
                self.spec.name,
                folder_of_url(self.spec.url),
                self._namespace,
                scope=Scope(self.spec.scope),
            )
            self._tier = tier
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
            with self._cond:
                self._tries += 1
                self._cond.notify_all()
            self._pause(str(error))
            return
        held = {each.save_id for each in contents.manifests}
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

    def _next_job(self) -> Manifest | None:
        """The next checkpoint, marked as active; waits for one. None if the worker stops."""
        with self._cond:
            self._cond.wait_for(lambda: self._stopping or self._waiting)
            if self._stopping:
                return None
            stream = next(iter(self._waiting))
            self._active = self._waiting.pop(stream)
            return self._active

    def _work(self, catalog: Catalog, job: Manifest) -> None:
        retry: str | None = None
        began_s = self._clock()
        outcome = Outcome("done")
        try:
            self._copy(catalog, job)
            self._retain(catalog, job.stream)
        except DamagedSourceError as error:
            self._host.quarantine("memory", error.segment_id, error.blocks, error.message)
            outcome = Outcome("failed", str(error))
        except (TierUnavailableError, CapacityError, OSError) as error:
            retry = str(error)
        except (NotFoundError, IntegrityError, TieredCkptError) as error:
            outcome = Outcome("failed", str(error))
        with self._cond:
            self._active = None
            if retry is None:
                self._note(job, outcome)
                self.error = None
                self._backoff_s = self._backoff_first_s
            elif job.stream in self._waiting:
                self._note(job, Outcome("superseded", f"failed ({retry}); a newer one waits"))
            else:
                self._waiting[job.stream] = job
            self._seconds_total += self._clock() - began_s
        if retry is None and outcome.level == "done":
            log.info(
                "tier %s of %s: holds step %d of stream %s (%s)",
                self.spec.name, self._namespace, job.step, job.stream, job.save_id,
            )  # fmt: skip
        elif retry is None:
            log.error("tier %s: step %d: %s", self.spec.name, job.step, outcome.error)
        self._host.spilled()
        if retry is not None and not self._stopping:
            self._pause(retry)

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
        catalog.put_plan(job.plan, self._host.read_plan(job.plan))
        failpoints.reach("agent.spill.before_manifest")
        catalog.commit(self._host.read_manifest(job))
        failpoints.reach("agent.spill.after_manifest")

    def _retain(self, catalog: Catalog, stream: str) -> None:
        manifests, attempts = catalog.manifests(), catalog.attempts()
        plan = retain(
            candidates(manifests, attempts, stream),
            abandoned(manifests, attempts, stream),
            Keep(last=self.spec.keep_last),
            frozenset(),
        )
        by_id = {manifest.save_id: manifest for manifest in manifests}
        for save_id in plan.delete:
            manifest = by_id[save_id]
            swept = catalog.remove(manifest)
            self._host.forget(self.spec.name, swept.segments)

    def _pause(self, error: str) -> None:
        """Wait out the back-off, or less if somebody asks for the tier or the worker stops."""
        with self._cond:
            if self.error != error:
                log.warning("tier %s of %s: %s", self.spec.name, self._namespace, error)
            self.error = error
            self._nudged = False
            self._cond.wait_for(lambda: self._stopping or self._nudged, self._backoff_s)
            self._backoff_s = min(self._backoff_s * 2, BACKOFF_S_MAX)

    def _note(self, manifest: Manifest, outcome: Outcome) -> None:
        self._history.pop(manifest.save_id, None)
        self._history[manifest.save_id] = outcome
        while len(self._history) > HISTORY_MAX:
            del self._history[next(iter(self._history))]
