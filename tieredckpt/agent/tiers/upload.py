"""What one agent does to bring checkpoints into a tier that several hosts share.

For each: its attempt's claim, the pending manifest, its own segments; then, when it is its turn, a
look whether all hosts' segments are there, and the manifest. Who misses some for long uploads those
that it holds copies of. Each step may be repeated at any time, by anybody; what must come before
what, and why, is in docs/design/004-durable-tiers.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from tieredckpt import failpoints
from tieredckpt.agent.tiers.interface import Count, Outcome, SpillHost, Stopping
from tieredckpt.agent.tiers.source import MEMORY, DamagedSourceError, SpillSource, VerifiedSource
from tieredckpt.errors import (
    CapacityError,
    NamespaceInUseError,
    NotFoundError,
    TieredCkptError,
    TierUnavailableError,
)
from tieredckpt.format.manifest import (
    AttemptRecord,
    Manifest,
    SegmentRef,
    encode_attempt,
    encode_manifest,
)
from tieredckpt.policy.history import Chain
from tieredckpt.policy.shared_tier import SharedTimes, look_after_s, position, takeover_s
from tieredckpt.storage.base import segment_key, unavailable
from tieredckpt.storage.shared.catalog import SharedCatalog

PLAN_PUTTERS = 2
"""So many hosts bring the plan with their part; the committer sees to it in any case."""

CHECKERS = 2
"""So many hosts look who has claimed before they put their part, and so no checkpoint of a job that
another one took over from becomes complete."""
CHECK_EVERY_S = 900.0
"""The others look that often. Before a manifest it is always looked."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Upload:
    """A checkpoint of which this host's part is in the tier."""

    manifest: Manifest
    data: bytes
    began_s: float
    place: int
    due_s: float
    takeover_at_s: float
    looks: int = 0
    seen: set[str] = field(default_factory=set)
    """Segments that are known to be there."""
    bad: dict[str, str] = field(default_factory=dict)
    """Segments of this host that others have to bring, and why."""
    missing: str | None = None


def attempts_of(catalog: SharedCatalog, host: SpillHost) -> tuple[AttemptRecord, ...]:
    """The job's attempts: what memory knows, or the tier of checkpoints that are to go there.

    Memory may be lost under a job that goes on (somebody deleted the agent's folder): what it saves
    from then on names the attempt, and the tier has its record from before.
    """
    if known := host.known_attempts():
        return known
    saved = host.wanted_by(catalog.tier.name)
    named = {(each.attempt.number, each.attempt.id) for each in saved}
    return tuple(each for each in catalog.attempts() if (each.number, each.id) in named)


def check_claim(catalog: SharedCatalog, host: SpillHost) -> None:
    """Hold the claim of the newest attempt of the job, and put the attempt records.

    Raises:
        NamespaceInUseError: Another run has taken over.
        TierUnavailableError: As the tier; or no attempt is known.
        CapacityError: As the tier.
    """
    known = attempts_of(catalog, host)
    if not known:
        raise unavailable(
            catalog.tier.name,
            "neither memory nor the tier knows the attempt of the job's checkpoints, as if the "
            "agent's folder had been deleted: restart the job, so that it calls engine.load",
        )
    _claim(catalog, known, known)


def check_term(catalog: SharedCatalog, host: SpillHost) -> None:
    """Hold the claim of the newest attempt of the run in whose name this agent deletes.

    Raises:
        NamespaceInUseError: That run is over, or another one has claimed a later attempt.
        TierUnavailableError, CapacityError: As the tier.
    """
    term = host.ruling.term()
    known = attempts_of(catalog, host)
    own = tuple(each for each in known if each.run == term)
    if not own:
        raise NamespaceInUseError(
            f"the run whose configuration host {host.host_id} enforces is over, or its attempts "
            f"are lost: nothing is deleted from tier {catalog.tier.name} before a run saves here"
        )
    _claim(catalog, own, known)


def _claim(
    catalog: SharedCatalog, own: Collection[AttemptRecord], known: Iterable[AttemptRecord]
) -> None:
    heads = {each.id for each in Chain((), own).heads}
    mine = max(own, key=lambda each: (each.id in heads, each.number, each.id))
    # What an attempt followed followed others, whose claims may still be there.
    chain = Chain((), (*catalog.attempts(), *known))
    catalog.claim(mine, chain.ancestors([mine.id]))
    for record in own:
        if not catalog.has_attempt(record):  # claims are deleted some day
            catalog.put_attempt(encode_attempt(record))


def put_pins(catalog: SharedCatalog, host: SpillHost, save_id: str) -> None:
    """What was said of a checkpoint on any host goes where it goes. Raises as the tier."""
    for data in host.keeping.pins_of(save_id):
        catalog.put_record(data)


class SharedUploads:
    """The checkpoints that wait for other hosts, in one tier. For one thread.

    Args:
        catalog: Of the tier.
        host: Where checkpoints come from.
        times: How long things take.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        catalog: SharedCatalog,
        host: SpillHost,
        times: SharedTimes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = catalog
        self._host = host
        self._times = times
        self._clock = clock
        self._open: dict[str, Upload] = {}
        self._checked: tuple[AttemptRecord | None, float] | None = None
        """The attempt whose claim was held when it was last looked, and when that was."""
        self.source = MEMORY
        """Where this host's own segments of the checkpoint are read that comes next."""

    def waiting(self) -> dict[str, Manifest]:
        """What is not settled, by save id, oldest first."""
        return {each.manifest.save_id: each.manifest for each in list(self._open.values())}

    def missing(self, save_id: str) -> str | None:
        """What an upload waits for, for people."""
        found = self._open.get(save_id)
        return found.missing if found is not None else None

    def forget(self, save_id: str) -> Manifest | None:
        """It was given up: from any thread. What it was; what is there of it is swept later."""
        found = self._open.pop(save_id, None)
        return found.manifest if found is not None else None

    def due_s(self) -> float | None:
        """When :meth:`step` has something to do; None: not before another part is put."""
        return min((each.due_s for each in list(self._open.values())), default=None)

    # --- this host's part -------------------------------------------------------------------------

    def put_part(self, job: Manifest, stopping: Stopping, count: Count) -> Outcome | None:
        """Put what this host has to put of ``job``; how it is settled, or None: others' turn.

        Raises:
            DamagedSourceError: A copy here is bad, and no other host was to keep one.
            NamespaceInUseError: Another run has taken over.
            TierUnavailableError, CapacityError, NotFoundError, IntegrityError: As the tier.
        """
        began_s = self._clock()
        # Attempts first: a manifest whose attempt is unknown could not be placed on the time line.
        hosts = {ref.host for ref in job.segments}
        own = self._host.own_segments(job)
        others = len(own) < len(job.segments)
        place = position(job.save_id, self._host.host_id, hosts) if others else 0
        self._check_claim(always=place < CHECKERS)
        if (settled := self._settled(job)) is not None:
            return settled
        data = self._encoded(job)
        # From here on nobody takes the segments for orphans.
        self._catalog.put_pending(data)
        failpoints.reach("agent.shared.after_pending")
        bad: dict[str, str] = {}
        there = {ref.id for ref in own if self._put_own(job, ref, bad, stopping, count)}
        if place < PLAN_PUTTERS:
            self._ensure_plan(job)
        failpoints.reach("agent.shared.after_part")
        now_s = self._clock()
        upload = Upload(
            manifest=job,
            data=data,
            began_s=began_s,
            place=place,
            due_s=now_s + look_after_s(place, 0, self._times.turn_s),
            takeover_at_s=now_s + takeover_s(place, self._times),
            seen=there,
            bad=bad,
            missing=next(iter(bad.values()), None),
        )
        self._open[job.save_id] = upload
        return self._try(upload, stopping, count) if place == 0 else None

    def _check_claim(self, *, always: bool) -> None:
        """So that not only who commits learns that another run has taken over."""
        newest = max(self._host.known_attempts(), key=lambda each: each.number, default=None)
        checked, now_s = self._checked, self._clock()
        if always or checked is None or checked[0] != newest or now_s - checked[1] > CHECK_EVERY_S:
            check_claim(self._catalog, self._host)
            self._checked = newest, now_s

    def _encoded(self, job: Manifest) -> bytes:
        try:
            return self._host.read_manifest(job)
        except NotFoundError:  # memory let go of it; what it said, others may still complete
            return encode_manifest(job)

    def _put_own(
        self,
        job: Manifest,
        ref: SegmentRef,
        bad: dict[str, str],
        stopping: Stopping,
        count: Count,
    ) -> bool:
        """Whether a segment of this host is there now; memory may have been lost since the save.

        If the copies here are ``bad``, another host's is waited for, where there is to be one.
        """
        try:
            with SpillSource(self._host, self.source, ref, stopping) as source:
                self._catalog.tier.put_from(segment_key(ref.id), source)
        except NotFoundError:
            return self._catalog.has_segment(ref.id, ref.size)
        except DamagedSourceError as error:
            if not any(each.host == ref.host and each.holders for each in job.replicas):
                raise
            self._host.quarantine(error.tier, error.segment_id, error.blocks, error.message)
            bad[ref.id] = f"waits for a host that has another copy: {error.message}"
            return self._catalog.has_segment(ref.id, ref.size)
        count(ref.size)
        return True

    def _ensure_plan(self, job: Manifest) -> None:
        plans, fresh_s = self._catalog.plan_copies, self._times.fresh_s
        plans.ensure(job.plan, lambda: self._host.read_plan(job.plan), fresh_s)

    def _settled(self, job: Manifest) -> Outcome | None:
        state = self._catalog.state_of(job)
        if state == "committed":
            return Outcome("done")
        if state == "buried":
            return Outcome("failed", "it was deleted or abandoned in the tier")
        return None

    # --- turns ------------------------------------------------------------------------------------

    def step(self, stopping: Stopping, count: Count) -> list[tuple[Manifest, Outcome]]:
        """Look at what is due, commit what is complete, take over what is late; what is settled.

        Raises:
            NamespaceInUseError: Another run has taken over.
            TierUnavailableError, CapacityError: To be tried again; nothing is forgotten.
        """
        settled = []
        now_s = self._clock()
        for upload in [each for each in self._open.values() if each.due_s <= now_s]:
            outcome = self._try(upload, stopping, count)
            if outcome is not None:
                settled.append((upload.manifest, outcome))
        return settled

    def _try(self, upload: Upload, stopping: Stopping, count: Count) -> Outcome | None:
        upload.looks += 1
        wait_s = look_after_s(upload.place, upload.looks, self._times.turn_s)
        upload.due_s = self._clock() + wait_s
        try:
            outcome = self._look(upload, stopping, count)
        except (TierUnavailableError, CapacityError, NamespaceInUseError):
            raise
        except TieredCkptError as error:
            outcome = Outcome("failed", str(error))
        if outcome is not None:
            self._open.pop(upload.manifest.save_id, None)
        return outcome

    def _look(self, upload: Upload, stopping: Stopping, count: Count) -> Outcome | None:
        job = upload.manifest
        if (settled := self._settled(job)) is not None:
            return settled
        now_s = self._clock()
        late = now_s >= upload.takeover_at_s
        for ref in job.segments:
            if ref.id in upload.seen:
                continue
            there = self._catalog.has_segment(ref.id, ref.size)
            if not there and late and ref.id not in upload.bad:
                there = self._take_over(ref, stopping, count)
            if there:
                upload.seen.add(ref.id)
                continue
            waits = f"waits for host {ref.host} to upload segment {ref.id}"
            upload.missing = upload.bad.get(ref.id, waits)
            if not late:
                break  # one is enough to know that it is too early
        if len(upload.seen) < len(job.segments):
            if now_s - upload.began_s > self._times.fresh_s:
                return Outcome("failed", f"abandoned: it {upload.missing}")
            return None
        if now_s - upload.began_s > self._times.fresh_s:
            # What was seen so long ago may be gone: the pending one may have been given up.
            return self._begin_anew(upload, stopping, count)
        return self._commit(upload)

    def _begin_anew(self, upload: Upload, stopping: Stopping, count: Count) -> Outcome | None:
        self._open.pop(upload.manifest.save_id, None)
        return self.put_part(upload.manifest, stopping, count)

    def _commit(self, upload: Upload) -> Outcome:
        job = upload.manifest
        check_claim(self._catalog, self._host)
        # After the pending one was put, or it could be one that is being deleted.
        self._ensure_plan(job)
        # Before it is visible: whoever prunes finds them as soon as he finds the checkpoint.
        put_pins(self._catalog, self._host, job.save_id)
        failpoints.reach("agent.shared.before_manifest")
        if self._catalog.put_manifest(upload.data) == "buried":
            return Outcome("failed", "it was abandoned in the tier before it was complete")
        failpoints.reach("agent.shared.after_manifest")
        try:
            put_pins(self._catalog, self._host, job.save_id)  # that were said meanwhile
            self._catalog.drop_pending(job.stream, job.save_id)
        except (TierUnavailableError, CapacityError) as error:
            # It is committed. The pruner drops what is pending; pins come at the next attach.
            log.info("after the commit of %s: %s", job.save_id, error)
        return Outcome("done")

    def _take_over(self, ref: SegmentRef, stopping: Stopping, count: Count) -> bool:
        """Upload the copy of another host's segment that is here, if one is."""
        try:
            with self._host.open_memory(ref.id) as opened:
                source = VerifiedSource(opened, ref, stopping)
                self._catalog.tier.put_from(segment_key(ref.id), source)
        except NotFoundError:
            return False
        except DamagedSourceError as error:
            self._host.quarantine("memory", error.segment_id, error.blocks, error.message)
            return False
        log.info("uploaded segment %s in place of host %s", ref.id, ref.host)
        count(ref.size)
        return True
