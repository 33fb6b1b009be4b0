"""The copies that this host keeps for others: which are whole, which are missing, pulling those."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from tieredckpt import failpoints
from tieredckpt.agent.cluster.members import Peers
from tieredckpt.agent.copies.pull import (
    OwnTiers,
    PullStoppedError,
    RateLimit,
    SegmentPull,
    TiersHere,
    donors_of,
)
from tieredckpt.agent.copies.state import KnownSaves
from tieredckpt.agent.slots.allocator import RingShape, SlotLedger
from tieredckpt.agent.slots.replicas import ReplicaRoom
from tieredckpt.config.tiers import TierSpec
from tieredckpt.errors import CapacityError, IntegrityError, TieredCkptError
from tieredckpt.format.manifest import Manifest, SegmentRef
from tieredckpt.policy.capacity import replica_slots
from tieredckpt.policy.replication import Pull, jobs_of, placement_of
from tieredckpt.policy.retention import pin_reason
from tieredckpt.storage.base import unavailable
from tieredckpt.storage.memory.pool import TIER, SlotPool
from tieredckpt.storage.memory.slot import REPLICA_ID, Reservation
from tieredckpt.storage.quarantine import QuarantineMarks

_ANY = ""
"""No incarnation: nothing was acknowledged in it, so all jobs are listed."""


class CopiesHere:
    """Of one namespace. One thread pulls at a time.

    Args:
        saves: What is known.
        peers: Where to pull from.
        pool: The host's slots.
        ledger: Who has which slot.
        marks: Of the memory tier: what readers found to be bad.
        ring: Of a session at this moment; None while none has said.
        here: This host's own tiers.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        saves: KnownSaves,
        peers: Peers,
        pool: SlotPool,
        ledger: SlotLedger,
        marks: QuarantineMarks,
        ring: Callable[[], RingShape | None],
        here: TiersHere,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._saves = saves
        self._peers = peers
        self._pool = pool
        self._ledger = ledger
        self._slots = ledger.replicas
        self._marks = marks
        self._ring = ring
        self._own = OwnTiers(here)
        self._clock = clock
        self.limit = RateLimit(clock)
        self.stopping = threading.Event()
        """Set for the pull under way: it is abandoned."""
        self._stopped = False
        self._counting = threading.Lock()
        self.pulled_bytes = 0
        self.pull_seconds = 0.0

    def stop(self) -> None:
        """Abandon what is being pulled, and pull nothing any more."""
        self._stopped = True
        self.stopping.set()

    # --- what is here -----------------------------------------------------------------------------

    def holds(self, ref: SegmentRef) -> bool:
        """Whether this host's memory has the segment, whole as far as anybody knows."""
        slot = self._pool.find(ref.id)
        if slot is None or slot.error or slot.label.state != "sealed":
            return False
        if (slot.label.root, slot.label.segment_bytes) != (ref.root, ref.size):
            return False
        return self._marks.get(TIER, ref.id) is None

    def can_make(self, ref: SegmentRef) -> bool:
        """Whether a copy in a slot for copies is, or may be, this host's copy of the segment."""
        slot = self._pool.find(ref.id)
        return slot is None or slot.label.session_id == REPLICA_ID

    def unsaid(self, manifest: Manifest) -> list[SegmentRef]:
        """Segments of an ordered checkpoint that are here, told or not, and not acknowledged."""
        here = {slot.label.segment_id for slot in self._pool.slots()}
        for record in self._saves.own_acks(manifest):
            here.difference_update(record.segments)
        return [ref for ref in manifest.segments if ref.id in here and self.holds(ref)]

    def settle_drafts(self, manifests: Iterable[Manifest]) -> None:
        """Before it is looked at what is missing of these."""
        for manifest in manifests:
            self._slots.drafts.settle(manifest, self._peers.host_id)

    def assigned(self, manifest: Manifest) -> tuple[Pull, ...]:
        """All segments of an ordered checkpoint that this host is to have, in the order to pull."""
        about = self._saves.about(manifest)
        jobs = jobs_of(self._peers.host_id, _ANY, manifest, about, self._peers.lost())
        # What the host's own ranks need, and began: whoever is to keep copies, it is completed.
        have = {each.ref.id for each in jobs}
        begun = [ref for ref in self._slots.drafts.parts_of(manifest) if ref.id not in have]
        told = placement_of(manifest, about)
        return (*jobs, *(self._unasked(ref, told[ref.host]) for ref in begun))

    def _unasked(self, ref: SegmentRef, holders: Sequence[str]) -> Pull:
        lost = self._peers.lost()
        sources = [host for host in (ref.host, *holders) if host != self._peers.host_id]
        return Pull(ref=ref, sources=tuple(sorted(sources, key=lost.__contains__)))

    # --- pulling ----------------------------------------------------------------------------------

    def pull(self, pull: Pull, tiers: Sequence[TierSpec]) -> None:
        """Have a verified copy of the segment here when this returns.

        From the memory of a host that has it; else from one of ``tiers``, of this host or another.

        Raises:
            CapacityError: There is no room for it now.
            TierUnavailableError: Who should have it does not answer, or the pull was abandoned.
            NotFoundError, IntegrityError: Nobody has it (intact).
        """
        ref = pull.ref
        if self.holds(ref):
            return
        self.stopping.clear()
        if self._stopped:
            raise PullStoppedError("the agent stops", outcome="not_applied")
        own = (self._peers.host_id, self._own)
        donors = donors_of(pull, tiers, self._peers.client, own)
        if not donors:
            whose = ", ".join(pull.sources) or "any host that has it"
            raise unavailable(TIER, f"no address is known of {whose}")
        filling = SegmentPull(
            ref, donors, limit=self.limit, stopping=self.stopping, landed=self._landed
        )
        if self._is_damaged(ref):
            # Made anew, but not before another one is certain to exist: its other blocks may serve.
            try:
                filling.find()
            except PullStoppedError:
                raise
            except TieredCkptError as error:
                text = f"the copy of segment {ref.id} here is damaged, and no other host has one"
                raise unavailable(TIER, f"{text}: {error}") from error
            self._slots.discard(ref)
            self._marks.forget(TIER, ref.id)
        began_s = self._clock()
        reservation, resumed = self._reserve(ref)
        slot_id = reservation.slot.slot_id
        failpoints.reach("agent.replica.reserved")
        try:
            filling.run(reservation.fd, resume=resumed)
            failpoints.reach("agent.replica.before_seal")
            self._pool.seal(slot_id, segment_id=ref.id, segment_bytes=ref.size, root=ref.root)
        except OSError as error:
            raise unavailable(TIER, f"a copy cannot be written: {error}") from error
        except IntegrityError:
            if (slot := self._pool.find(ref.id)) is not None and slot.error:
                self._pool.remove(slot_id, even_if_locked=True)  # held by us
                text = f"slot {slot_id} was damaged while a copy was written into it"
                raise unavailable(TIER, text) from None
            raise
        finally:
            os.close(reservation.fd)
            with self._counting:
                self.pull_seconds += self._clock() - began_s

    def _is_damaged(self, ref: SegmentRef) -> bool:
        slot = self._pool.find(ref.id)
        if slot is None or slot.label.session_id != REPLICA_ID:
            return False
        return bool(slot.error) or self._marks.get(TIER, ref.id) is not None

    def _landed(self, size: int) -> None:
        with self._counting:
            self.pulled_bytes += size

    # --- room -------------------------------------------------------------------------------------

    def _reserve(self, ref: SegmentRef) -> tuple[Reservation, bool]:
        room = self.room()
        while True:
            try:
                return self._slots.reserve(room, ref)
            except CapacityError:
                if not self._evict():
                    raise

    def room(self) -> ReplicaRoom:
        """How much memory copies may take now. Raises CapacityError if nobody has said."""
        ring = self._ring()
        if ring is None:
            raise CapacityError(
                "how much memory copies may take is not known before a session is opened",
                needed_bytes=0,
                available_bytes=0,
                limit="memory.capacity",
            )
        drafts = self._slots.drafts.slots_max(self._saves.namespace, ring.slots)
        return ReplicaRoom(
            namespace=self._saves.namespace,
            capacity_bytes=ring.spec.capacity_bytes,
            ring_bytes=self._ledger.ring_missing(ring),
            slots_max=replica_slots(ring.spec.keep_last) * self._copied_segments() + drafts,
        )

    def _copied_segments(self) -> int:
        """Segments of others that one checkpoint of each stream has this host keep, at most."""
        count = 0
        for line in self._saves.lines().values():
            count += max((self._num_copied(manifest) for manifest in line), default=0)
        return max(1, count)

    def _num_copied(self, manifest: Manifest) -> int:
        # What it wrote itself lies in its ranks' rings, unless it has lost it.
        return sum(self.can_make(each.ref) for each in self.assigned(manifest))

    def _evict(self) -> bool:
        """Give up one copy that replication does not need to keep, of the oldest checkpoint.

        First of what was left behind: nobody goes on from it unless a person says so. The copies of
        what another side saved stay, for that side may go on.
        """
        for stream, line in self._saves.lines().items():
            stay = self._saves.must_stay(stream)
            for manifest in (*reversed(self._saves.left_behind(stream)), *reversed(line)):
                pinned = pin_reason(self._saves.about(manifest)) is not None
                if manifest.save_id in stay or (pinned and manifest not in line):
                    continue
                for ref in manifest.segments:
                    slot = self._pool.find(ref.id)
                    if slot is None or slot.label.session_id != REPLICA_ID:
                        continue
                    self._slots.discard(ref)
                    if self._pool.find(ref.id) is None:
                        return True  # else it is being read
        return False

    def drop_unwanted(self, manifests: Iterable[Manifest]) -> None:
        """Take back unfinished copies of what none of these checkpoints has this host keep."""
        wanted = {each.ref.id for manifest in manifests for each in self.assigned(manifest)}
        self._slots.release_unwanted(self._saves.namespace, wanted.__contains__)

    def held_bytes(self) -> int:
        """Bytes of other hosts' segments."""
        return self._slots.held_bytes(self._saves.namespace)
