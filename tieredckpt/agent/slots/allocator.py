"""Which slots a session writes into: its ring, reservations, provisional grants, and taking back.

A slot belongs to the session that was given it last, as long as that session lives; then it is
spare, and goes to whoever needs one of its size. All tables are guarded by the node's lock, which
is never held while pages are allocated. Slots that hold a committed segment are never touched
here: retention frees them.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass

from tieredckpt import failpoints
from tieredckpt.agent.host.sessions import Session, Tickets
from tieredckpt.agent.slots.owners import SlotOwners
from tieredckpt.agent.slots.replicas import Drafts, ReplicaSlots
from tieredckpt.errors import CapacityError, IntegrityError, NotFoundError, UsageError
from tieredckpt.format.segment import MAX_SEGMENT_BYTES, PAGE_BYTES, slot_capacity
from tieredckpt.policy.capacity import ring_slots
from tieredckpt.rpc.messages.agent import Grant, NamespaceSpec, Reserve, SlotHandle
from tieredckpt.storage.headroom import format_mib, headroom_of
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.memory.slot import LABEL_BYTES, REPLICA_ID, Label, SlotInfo

UNCLAIMED_S = 10.0
"""A reservation that nobody holds the lock of for this long is taken back."""
POLL_S = 0.02
"""How often a waiting reserve looks again: readers let go of slots without telling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingShape:
    """What decides how many slots a session needs for what it writes itself: its ring."""

    namespace: str
    spec: NamespaceSpec
    num_streams: int
    replicas: int = 0
    """Copies that other hosts keep of what is written here; 0: there are none to keep them."""

    @property
    def slots(self) -> int:
        """What is kept of each stream, one in flight, one source of a spill per tier.

        With replicas also the newest replicated checkpoint of each stream, and the one of all
        streams that is being replicated.
        """
        streams = max(1, self.num_streams)
        slots = ring_slots(self.spec.keep_last * streams, self.sources, self.replicas)
        return slots + (streams - 1 if self.replicas else 0)

    @property
    def slots_min(self) -> int:
        """What one stream needs: less than this can never work."""
        return ring_slots(self.spec.keep_last, self.sources, self.replicas)

    @property
    def sources(self) -> int:
        """Tiers that are filled from memory; the others are filled from what those hold."""
        return sum(tier.source == "memory" for tier in self.spec.tiers)

    @property
    def parts(self) -> str:
        """The smallest ring in words."""
        replicas = ", 2 for replication" if self.replicas else ""
        return f"{self.spec.keep_last} kept, 1 in flight, {self.sources} for spills{replicas}"


class SlotLedger:
    """Hands out the slots of ``pool``; shared by all namespaces of a node. Thread-safe.

    Args:
        pool: The slots.
        tickets: Where descriptors are offered.
        lock: The node's lock.
        sessions: The live sessions by id; the node's table.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        pool: SlotPool,
        tickets: Tickets,
        lock: threading.RLock,
        sessions: dict[str, Session],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._tickets = tickets
        self._lock = lock
        self._freed = threading.Condition(lock)
        self._sessions = sessions
        self._clock = clock
        self._owners = SlotOwners(pool, lock, sessions)
        self.drafts = Drafts(pool, sessions.__contains__, clock=clock)
        self.replicas = ReplicaSlots(pool, self._owners, lock, self._make_room, self.drafts)
        self.bytes_of = self._owners.bytes_of
        self.of_namespace = self._owners.of_namespace
        self.sealed_of = self._owners.sealed_of

    # --- room -------------------------------------------------------------------------------------

    def _check_quota(self, session: Session, shape: RingShape, capacity: int) -> None:
        """Refuse before the first copy what can never fit; see policy/capacity.py for the sum."""
        file_bytes = capacity + LABEL_BYTES
        others = [
            each
            for each in self._sessions.values()
            if each.namespace == session.namespace and each is not session and each.slot_capacity
        ]
        taken = sum(shape.slots_min * (each.slot_capacity + LABEL_BYTES) for each in others)
        needed = taken + shape.slots_min * file_bytes
        if needed > shape.spec.capacity_bytes:
            spec = shape.spec
            raise CapacityError(
                f"namespace {shape.namespace} needs {format_mib(needed)} of memory: "
                f"{shape.slots_min} slots ({shape.parts}) of {format_mib(file_bytes)} for this "
                f"rank, and {format_mib(taken)} for {len(others)} other live ranks; "
                f"memory.capacity is {format_mib(spec.capacity_bytes)}: raise it, or lower "
                "memory.keep.last",
                needed_bytes=needed,
                available_bytes=shape.spec.capacity_bytes,
                limit="memory.capacity",
            )
        if not self._owners.owned(session, 0):
            self._owners.check_room(shape.namespace, needed)

    def _make_room(self, namespace: str, size: int, quota_bytes: int) -> None:
        """Remove free slots that nobody could use, if the quota or the tmpfs needs it."""

        def fits() -> bool:
            quota = self._owners.bytes_of(namespace) + size <= quota_bytes
            return quota and headroom_of(self._pool.folder).available_bytes >= size

        for slot in self._pool.slots():
            if fits():
                return
            owner = self._owners.of(slot)
            useless = owner is None or slot.capacity < owner.slot_capacity  # its segments grew
            # One without a label may hold a checkpoint; the reaper finds out.
            if useless and slot.label.state == "free" and not slot.label_lost:
                self._pool.remove(slot.slot_id)
                self._owners.drop(slot.slot_id)

    def _plan_new(self, shape: RingShape, capacity: int, count: int) -> int:
        """How many of ``count`` new slots the quota has room for now; their bytes are booked."""
        file_bytes = capacity + LABEL_BYTES
        self._make_room(shape.namespace, count * file_bytes, shape.spec.capacity_bytes)
        left = shape.spec.capacity_bytes - self._owners.bytes_of(shape.namespace)
        count = max(0, min(count, left // file_bytes))
        wanted = f"{count} slots of {format_mib(file_bytes)} are needed"
        headroom_of(self._pool.folder).check(count * file_bytes, wanted)
        self._owners.book(shape.namespace, count * file_bytes)
        return count

    def _create(self, session: Session, capacity: int, count: int) -> list[SlotInfo]:
        """Allocate ``count`` booked slots; holds no lock meanwhile."""
        namespace, session_id = session.namespace, session.session_id
        try:
            return [
                self._pool.create(capacity, namespace=namespace, session_id=session_id)
                for _ in range(count)
            ]
        finally:
            with self._lock:
                self._owners.book(namespace, -count * (capacity + LABEL_BYTES))

    def ring_missing(self, shape: RingShape) -> int:
        """Bytes of the slots that the rings of a namespace's live sessions still lack."""
        with self._lock:
            return sum(
                max(0, shape.slots - len(self._owners.owned(each, each.slot_capacity)))
                * (each.slot_capacity + LABEL_BYTES)
                for each in self._sessions.values()
                if each.namespace == shape.namespace and each.slot_capacity
            )

    # --- requests ---------------------------------------------------------------------------------

    def prepare(self, session: Session, shape: RingShape, segment_bytes: int) -> list[SlotHandle]:
        """Make the session's ring; see :class:`tieredckpt.rpc.messages.agent.Prepare`.

        Fewer slots than the ring are returned while checkpoints of an earlier run take the room;
        the rest are made when those are gone.
        """
        capacity = slot_capacity(_checked(segment_bytes))
        with self._lock:
            self._check_quota(session, shape, capacity)
            session.slot_capacity = capacity
            mine = self._owners.owned(session, capacity)
            if len(mine) < shape.slots:
                mine += self._owners.adopt_spare(session, capacity, shape.slots - len(mine))
            count = self._plan_new(shape, capacity, shape.slots - len(mine))
            session.slots_coming += count
        try:
            mine += self._create(session, capacity, count)
        finally:
            with self._lock:
                session.slots_coming -= count
        handles = []
        for slot in mine:
            # One that somebody deleted or damaged is no reason to fail: a reserve makes another.
            with contextlib.suppress(NotFoundError, IntegrityError):
                ticket = self._tickets.offer(self._pool.open_slot(slot.slot_id))
                handles.append(
                    SlotHandle(slot_id=slot.slot_id, capacity_bytes=slot.capacity, ticket=ticket)
                )
        return handles

    def reserve(
        self,
        session: Session,
        shape: RingShape,
        request: Reserve,
        kept: Callable[[], Set[str]],
        evict: Callable[[Callable[[str], bool]], bool],
        more: Callable[[CapacityError, float], bool],
    ) -> Grant:
        """A locked slot for writing; waits up to ``wait_s`` for one to become free.

        Args:
            session: Who asks.
            shape: What its ring is.
            request: Its request.
            kept: Ids of the segments that must stay.
            evict: Deletes a checkpoint whose segments all satisfy the predicate, if it can.
            more: Makes room in the host, which had none, if it can in so many seconds.

        Raises:
            AgentError: The session asked again meanwhile: this request was given up.
            CapacityError: None became free and none may be made.
        """
        segment_bytes = request.segment_bytes
        capacity = slot_capacity(_checked(segment_bytes))
        until_s = self._clock() + shape.spec.wait_s
        with self._lock:
            session.asks(request.asked_at_ns)
            self._check_quota(session, shape, max(capacity, session.slot_capacity))
            session.slot_capacity = max(capacity, session.slot_capacity)
            self.take_back(session, kept())
        while True:
            count, refused = 0, None
            with self._lock:
                session.asks(request.asked_at_ns)
                grant = self._try_reserve(session, segment_bytes)
                if grant is not None:
                    return grant
                try:
                    # While its ring is being made a save waits for that, and makes it no larger.
                    if not session.slots_coming:
                        count = self._plan_new(shape, session.slot_capacity, 1)
                except CapacityError as error:  # room in the host comes and goes
                    refused = error
                if not count and not session.slots_coming and evict(self._is_spare):
                    continue
            if count:
                try:
                    self._create(session, session.slot_capacity, 1)
                    continue
                except CapacityError as error:
                    refused = error
            if refused is not None and more(refused, max(0.0, until_s - self._clock())):
                continue
            with self._freed:
                left_s = until_s - self._clock()
                if left_s <= 0:
                    raise refused or self._full(session, shape, segment_bytes)
                self._freed.wait(min(left_s, POLL_S))

    def _is_spare(self, segment_id: str) -> bool:
        slot = self._pool.find(segment_id)
        return slot is None or self._owners.of(slot) is None

    def _try_reserve(self, session: Session, segment_bytes: int) -> Grant | None:
        mine = self._owners.owned(session, segment_bytes)
        if not any(slot.label.state == "free" for slot in mine):
            mine += self._owners.adopt_spare(session, slot_capacity(segment_bytes), 1)
        segment_id = secrets.token_hex(16)
        label = _label(session, segment_id, segment_bytes)
        reservation = self._pool.reserve(label, [slot.slot_id for slot in mine])
        if reservation is None:
            return None
        failpoints.reach("agent.reserve.after_label")
        session.grant_ticket = self._tickets.offer(reservation.fd)
        return Grant(
            segment_id=segment_id,
            slot_id=reservation.slot.slot_id,
            capacity_bytes=reservation.slot.capacity,
            ticket=session.grant_ticket,
        )

    def _full(self, session: Session, shape: RingShape, segment_bytes: int) -> CapacityError:
        mine = self._owners.owned(session, 0)
        busy = sum(slot.label.state != "free" for slot in mine)
        held = sum(
            slot.label.state == "free" and self._pool.is_locked(slot.slot_id) for slot in mine
        )
        used = self._owners.bytes_of(shape.namespace)
        return CapacityError(
            f"no slot for a segment of {format_mib(segment_bytes)} became free within "
            f"{shape.spec.wait_s:g} s (memory.wait): {busy} of this rank's {len(mine)} slots hold "
            f"checkpoints, {held} are still being read; namespace {shape.namespace} uses "
            f"{format_mib(used)} of {format_mib(shape.spec.capacity_bytes)} (memory.capacity). "
            "A slow tier holds slots until its spill ends; raise memory.capacity, or lower "
            "memory.keep.last",
            needed_bytes=segment_bytes,
            available_bytes=max(0, shape.spec.capacity_bytes - used),
            limit="memory.capacity",
        )

    # --- provisional grants -----------------------------------------------------------------------

    def promise(
        self, session: Session, segment_bytes: int, predict: Callable[[Session], str | None]
    ) -> Grant | None:
        """The grant for the session's next save: of a free slot, else of the predicted one."""
        if session.next is not None:
            return session.next
        segment_id = secrets.token_hex(16)
        session.promised = False
        for slot in self._owners.owned(session, segment_bytes):
            label = _label(session, segment_id, segment_bytes)
            if slot.label.state == "free" and self._pool.grant(slot.slot_id, label):
                return self._note(session, slot, segment_id, segment_bytes)
        slot_id = predict(session)
        if slot_id is None:
            return None
        session.promised = True
        return self._note(session, self._pool.slot(slot_id), segment_id, segment_bytes)

    def _note(self, session: Session, slot: SlotInfo, segment_id: str, size: int) -> Grant:
        session.next_bytes = size
        session.next = Grant(
            segment_id=segment_id,
            slot_id=slot.slot_id,
            capacity_bytes=slot.capacity,
            ticket=None,
        )
        return session.next

    def fulfil(self, namespace: str) -> None:
        """After a commit: the slots that it freed become those that were promised."""
        with self._freed:
            for session in self._sessions.values():
                if session.namespace != namespace or not session.promised or session.next is None:
                    continue
                slot = next(
                    (s for s in self._pool.slots() if s.slot_id == session.next.slot_id), None
                )
                if slot is not None and slot.label.state == "free":
                    session.promised = False
                    # If a reader still holds it, the client finds no lock and asks with Reserve.
                    label = _label(session, session.next.segment_id, session.next_bytes)
                    self._pool.grant(slot.slot_id, label)
            self._freed.notify_all()

    # --- taking back ------------------------------------------------------------------------------

    def take_back(self, session: Session, kept: Set[str]) -> None:
        """Free what a session reserved, or sealed and never committed, and is not writing now."""
        if session.grant_ticket:
            self._tickets.revoke(session.grant_ticket)
            session.grant_ticket = ""
        session.next = None
        session.promised = False
        for slot in self._pool.slots():
            if slot.label.session_id != session.session_id:
                continue
            if slot.label.state == "reserved":
                self._pool.release(slot.slot_id)
            elif slot.label.state == "sealed" and slot.label.segment_id not in kept:
                self._pool.free(slot.slot_id)

    def drop_unfinished(
        self, session: Session, sealed: str, num_checkpoints: int, kept: Callable[[], Set[str]]
    ) -> None:
        """After a seal: free what the session sealed before and never committed.

        Each checkpoint has at most one segment of a session, so it is only worth looking if there
        are more sealed slots than ``num_checkpoints`` and the new one.
        """
        with self._lock:
            mine = [
                slot
                for slot in self._pool.slots()
                if slot.label.session_id == session.session_id
                and slot.label.state == "sealed"
                and slot.label.segment_id != sealed
            ]
            if len(mine) <= num_checkpoints:
                return
            needed = kept()
            for slot in mine:
                if slot.label.segment_id not in needed:
                    self._pool.free(slot.slot_id)

    def forget(self, session: Session) -> None:
        """A session ended: its slots are spare."""
        with self._freed:
            self._owners.forget(session)
            self._freed.notify_all()

    def reap(self, kept: Set[str], unknown: Set[str] = frozenset()) -> int:
        """Take back what no living session accounts for; returns how many slots were freed.

        ``kept``: ids of all segments that a manifest refers to or a commit is looking at;
        ``unknown``: ids of slots without a label that may hold one of those.
        """
        freed = 0
        with self._freed:
            provisional = {s.next.segment_id for s in self._sessions.values() if s.next}
            for slot in self._pool.slots():
                label, alive = slot.label, slot.label.session_id in self._sessions
                if slot.slot_id in unknown:
                    continue
                if slot.error and label.segment_id not in kept:
                    freed += self._pool.remove(slot.slot_id)
                elif label.state == "reserved" and label.session_id == REPLICA_ID:
                    # A copy that was interrupted goes on from what is there.
                    freed += label.segment_id not in kept and self._pool.release(slot.slot_id)
                elif label.state == "reserved":
                    young = self._clock() - slot.since_s < UNCLAIMED_S
                    if not alive or not (young or label.segment_id in provisional):
                        freed += self._pool.release(slot.slot_id)
                elif label.state == "sealed" and not alive and label.segment_id not in kept:
                    freed += self._pool.free(slot.slot_id)
            if freed:
                self._freed.notify_all()
        return freed


def _label(session: Session, segment_id: str, segment_bytes: int) -> Label:
    """What a slot says that ``session`` is to write into."""
    return Label(
        state="reserved",
        namespace=session.namespace,
        segment_id=segment_id,
        session_id=session.session_id,
        segment_bytes=segment_bytes,
    )


def _checked(segment_bytes: int) -> int:
    if segment_bytes % PAGE_BYTES or not 0 < segment_bytes <= MAX_SEGMENT_BYTES:
        raise UsageError(f"{segment_bytes} bytes is no size of a segment (multiples of 4096)")
    return segment_bytes
