"""Slots for copies of other hosts' segments: they belong to no session, and are bounded.

They count in ``memory.capacity``, but come after the training's own ring: what that still needs is
never taken, and a free slot of ours is given back where it needs the room.

A *draft* is what this host's ranks wrote a second time of what other hosts' ranks write: a slot for
copies that a trainer has filled (:mod:`tieredckpt.dcp.save.mirrors`), sealed by it under an id of
its own and labelled ``reserved`` still, so that it counts as nothing. When the manifest of its save
comes, its trailer with the owner's id tells by the root whether it is the owner's segment. If so it
becomes that, without a byte sent: the label names the owner's segment, still reserved; the trailer
is written; the label says sealed. An agent that dies in between leaves what an interrupted pull
leaves. A draft that is not equal stays until that segment is pulled, and then the blocks that are
equal need not come.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tieredckpt import failpoints
from tieredckpt.agent.slots.owners import SlotOwners
from tieredckpt.errors import CapacityError, NotFoundError, TieredCkptError
from tieredckpt.format.manifest import Manifest, SegmentRef
from tieredckpt.format.segment import TRAILER_BYTES, decode_trailer, retitled, slot_capacity
from tieredckpt.rpc.messages.agent import ReserveDraft, SealDraft
from tieredckpt.storage.headroom import format_mib, headroom_of
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.memory.slot import (
    LABEL_BYTES,
    REPLICA_ID,
    Label,
    Reservation,
    SlotInfo,
    lock_reserved,
)
from tieredckpt.storage.memory.slot_file import checked_trailer

MIRRORS_MAX = 1 << 14
"""Remembered at once; a draft beyond is not taken."""
DRAFT_WAIT_S = 60.0
"""How long a draft waits for its manifest once the session that wrote it has ended."""
SAVES_WAITING = 2
"""Saves of one session whose manifest may be on its way."""
SLACK = 4
"""A free slot may be larger than needed by one part in so many; else the quota counts waste."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRoom:
    """How much of a namespace's memory copies may take."""

    namespace: str
    capacity_bytes: int
    """``memory.capacity``."""
    ring_bytes: int
    """What the live sessions' rings need beyond the slots that they have."""
    slots_max: int
    """Slots with copies at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    slot_id: str
    namespace: str
    session_id: str
    save: tuple[str, int]
    """Stream and step."""
    ordinal: int
    """Which of the manifest's segments it is meant to be."""
    since_s: float
    trailer: bytes = b""
    """Once it is sealed."""
    ref: SegmentRef | None = None
    """Once the manifest came and it was not equal: what it may be a part of."""


class Drafts:
    """Of all namespaces of a node. Thread-safe.

    Args:
        pool: The host's slots.
        is_live: Whether a session lives.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        pool: SlotPool,
        is_live: Callable[[str], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._is_live = is_live
        self._clock = clock
        self._lock = threading.Lock()
        self._settling = threading.Lock()  # two that adopt one draft would free each other's
        self._drafts: dict[str, _Draft] = {}
        self._begun: dict[str, str] = {}
        """Drafts by the id of the segment that they may be a part of."""
        self._per_save: dict[str, tuple[str, int]] = {}
        """By session, its namespace and how many drafts it writes of each save."""
        self._now: dict[str, tuple[tuple[str, int], ReplicaRoom]] = {}
        """By session, the save that it writes now, and the room for its drafts."""

    # --- what a session writes --------------------------------------------------------------------

    def begin(
        self, namespace: str, request: ReserveDraft, room: Callable[[], ReplicaRoom]
    ) -> ReplicaRoom:
        """A session writes a draft; how much room there is. Looked at once per save.

        Raises:
            CapacityError: Nobody has said how much memory copies may take.
        """
        save = (request.stream, request.step)
        with self._lock:
            known = self._now.get(request.session_id)
        if known is not None and known[0] == save:
            return known[1]
        self._drop_late(request)
        with self._lock:
            self._per_save[request.session_id] = (namespace, request.drafts)
        found = room()
        with self._lock:
            self._now[request.session_id] = (save, found)
        return found

    def _drop_late(self, request: ReserveDraft) -> None:
        """Drafts of saves long before have no use."""
        with self._lock:
            mine = [
                (draft_id, each.save)
                for draft_id, each in self._drafts.items()
                if each.session_id == request.session_id
            ]
        saves = list(dict.fromkeys(save for _, save in mine))
        saves = [save for save in saves if save != (request.stream, request.step)]
        late = set(saves[: max(0, len(saves) - SAVES_WAITING + 1)])
        self._drop([draft_id for draft_id, save in mine if save in late])

    def seal(self, namespace: str, request: SealDraft) -> None:
        """The draft is whole. Idempotent.

        Raises:
            NotFoundError: The slot is not reserved for it (any more).
            IntegrityError: Its trailer does not say what the request says.
        """
        slot = self._pool.slot(request.slot_id)
        label = slot.label
        if (
            slot.error
            or (label.segment_id, label.session_id) != (request.segment_id, REPLICA_ID)
            or (label.state, label.namespace) != ("reserved", namespace)
            or request.segment_bytes > slot.capacity
        ):
            raise NotFoundError(
                f"no slot is reserved for draft {request.segment_id}", key=request.segment_id
            )
        label = replace(label, segment_bytes=request.segment_bytes, root=request.root)
        fd = self._pool.open_slot(slot.slot_id)
        try:
            trailer = checked_trailer(fd, slot.capacity, label)
        finally:
            os.close(fd)
        draft = _Draft(
            slot_id=slot.slot_id,
            namespace=namespace,
            session_id=request.session_id,
            save=(request.stream, request.step),
            ordinal=request.ordinal,
            since_s=self._clock(),
            trailer=trailer,
        )
        with self._lock:
            if len(self._drafts) < MIRRORS_MAX:
                self._drafts[request.segment_id] = draft

    # --- what becomes of them ---------------------------------------------------------------------

    def settle(self, manifest: Manifest, host_id: str) -> None:
        """A manifest came: its drafts become copies, wait to be completed, or are given back.

        Idempotent: who is to pull a segment calls it, too, for the thread that took the manifest
        over may not have come here yet, and a pull without the draft would fetch all of it.
        """
        with self._settling:
            self._settle(manifest, host_id)

    def _settle(self, manifest: Manifest, host_id: str) -> None:
        save = (manifest.stream, manifest.step)
        with self._lock:
            waiting = {
                draft_id: each
                for draft_id, each in self._drafts.items()
                if each.namespace == manifest.namespace and each.save == save and each.ref is None
            }
        if not waiting:
            return
        useless = []
        here = {s.label.segment_id for s in self._pool.slots() if s.label.state != "free"}
        for draft_id, draft in waiting.items():
            ref = (
                manifest.segments[draft.ordinal] if draft.ordinal < len(manifest.segments) else None
            )
            if ref is None or ref.host == host_id or ref.id in here:
                useless.append(draft_id)
                continue
            try:
                adopted = self._adopt(draft, ref)
            except (TieredCkptError, OSError) as error:
                log.warning("draft of segment %s: %s", ref.id, error)
                useless.append(draft_id)
                continue
            here.add(ref.id)
            with self._lock:
                if adopted:
                    self._drafts.pop(draft_id, None)
                elif draft_id in self._drafts:
                    self._drafts[draft_id] = replace(draft, ref=ref)
                    self._begun[ref.id] = draft_id
        self._drop(useless)

    def _adopt(self, draft: _Draft, ref: SegmentRef) -> bool:
        """Make the draft the segment if it is equal to it; else False."""
        trailer = retitled(draft.trailer, bytes.fromhex(ref.id))
        decoded = decode_trailer(trailer)
        if (decoded.root.hex(), decoded.segment_bytes) != (ref.root, ref.size):
            return False
        taken = self._pool.reassign(draft.slot_id, ref.id, ref.size)
        if taken is None:
            raise NotFoundError(f"slot {draft.slot_id} is in use or deleted", key=ref.id)
        try:
            failpoints.reach("agent.draft.labelled")
            os.pwrite(taken.fd, trailer, ref.size - TRAILER_BYTES)
            failpoints.reach("agent.draft.trailer")
            self._pool.seal(draft.slot_id, segment_id=ref.id, segment_bytes=ref.size, root=ref.root)
        finally:
            os.close(taken.fd)
        return True

    def take_up(self, ref: SegmentRef) -> Reservation | None:
        """The slot of a draft that may be a part of ``ref``, locked and labelled as that."""
        with self._lock:
            draft = self._drafts.pop(self._begun.pop(ref.id, ""), None)
        if draft is None:
            return None
        return self._pool.reassign(draft.slot_id, ref.id, ref.size)

    def parts_of(self, manifest: Manifest) -> Sequence[SegmentRef]:
        """Segments of other hosts of which a draft here is a part."""
        with self._lock:
            if not self._begun:
                return ()
            return [ref for ref in manifest.segments if ref.id in self._begun]

    def ids(self, namespace: str | None = None) -> set[str]:
        """What the slots of waiting drafts are labelled with; those of no use are given back."""
        now_s = self._clock()
        with self._lock:
            old = [
                draft_id
                for draft_id, each in self._drafts.items()
                if now_s - each.since_s > DRAFT_WAIT_S and not self._is_live(each.session_id)
            ]
        self._drop(old)
        with self._lock:
            return {i for i, each in self._drafts.items() if namespace in (None, each.namespace)}

    def slots_max(self, namespace: str, ring_slots: int) -> int:
        """The most slots that drafts, and copies that came of them, may take."""
        with self._lock:
            for session_id in [each for each in self._per_save if not self._is_live(each)]:
                del self._per_save[session_id]
                self._now.pop(session_id, None)
            return sum(
                count * ring_slots for name, count in self._per_save.values() if name == namespace
            )

    def _drop(self, draft_ids: Sequence[str]) -> None:
        for draft_id in draft_ids:
            with self._lock:
                draft = self._drafts.pop(draft_id, None)
                if draft is not None and draft.ref is not None:
                    self._begun.pop(draft.ref.id, None)
            if draft is None:
                continue
            try:
                self._pool.release(draft.slot_id)
            except TieredCkptError as error:  # the reaper tries again
                log.info("draft %s: %s", draft_id, error)


class ReplicaSlots:
    """See the module. Thread-safe.

    Args:
        pool: The host's slots.
        owners: Who has which.
        lock: The node's lock.
        make_room: Removes spare free slots until so many bytes more fit into this capacity of this
            namespace, or none is left.
        drafts: What was written here of other hosts' segments; in slots for copies.
    """

    def __init__(
        self,
        pool: SlotPool,
        owners: SlotOwners,
        lock: threading.RLock,
        make_room: Callable[[str, int, int], None],
        drafts: Drafts,
    ) -> None:
        self._pool = pool
        self._owners = owners
        self._lock = lock
        self._make_room = make_room
        self.drafts = drafts

    def of(self, namespace: str) -> list[SlotInfo]:
        """The slots for copies, in any state."""
        return [
            slot
            for slot in self._pool.slots()
            if slot.label.session_id == REPLICA_ID and slot.label.namespace == namespace
        ]

    def held_bytes(self, namespace: str) -> int:
        """Bytes of the copies that are whole."""
        held = [slot.label for slot in self.of(namespace) if slot.label.state == "sealed"]
        return sum(label.segment_bytes for label in held)

    def reserve(self, room: ReplicaRoom, ref: SegmentRef) -> tuple[Reservation, bool]:
        """A locked slot for a copy of ``ref``, and whether it may hold part of it already.

        Raises:
            CapacityError: There is no room now; the text says why.
            TierUnavailableError: The slots cannot be written.
        """
        earlier = self._take_up(ref)
        if earlier is not None:
            return earlier, True
        for _ in range(3):  # somebody may be faster for the slot that was just made
            with self._lock:
                found = self._reserve_free(room, ref)
                if found is not None:
                    return found, False
                self._book_new(room, ref)
            file_bytes = slot_capacity(ref.size) + LABEL_BYTES
            try:
                self._pool.create(
                    file_bytes - LABEL_BYTES, namespace=room.namespace, session_id=REPLICA_ID
                )
            finally:
                with self._lock:
                    self._owners.book(room.namespace, -file_bytes)
        raise CapacityError(
            "no slot for a copy could be locked",
            needed_bytes=ref.size,
            available_bytes=0,
            limit="memory.capacity",
        )

    def _take_up(self, ref: SegmentRef) -> Reservation | None:
        """The slot of an earlier try that was interrupted, if nobody else writes it."""
        if (drafted := self.drafts.take_up(ref)) is not None:
            return drafted
        slot = self._pool.find(ref.id)
        if slot is None or slot.label.state != "reserved" or slot.error:
            return None
        if slot.label.session_id != REPLICA_ID or slot.label.segment_bytes != ref.size:
            return None
        try:
            fd = self._pool.open_slot(slot.slot_id)
        except NotFoundError:
            return None
        claimed = False
        try:
            claimed = lock_reserved(fd, slot.capacity, ref.id)
        finally:
            if not claimed:
                os.close(fd)
        return Reservation(slot=slot, fd=fd) if claimed else None

    def _reserve_free(self, room: ReplicaRoom, ref: SegmentRef) -> Reservation | None:
        capacity = slot_capacity(ref.size)
        free = [each for each in self.of(room.namespace) if each.label.state == "free"]
        fitting = [
            each for each in free if capacity <= each.capacity <= capacity + capacity // SLACK
        ]
        label = Label(
            state="reserved",
            namespace=room.namespace,
            segment_id=ref.id,
            session_id=REPLICA_ID,
            segment_bytes=ref.size,
        )
        found = self._pool.reserve(label, [each.slot_id for each in fitting])
        if found is None:
            for each in free:  # of another size: they only take up the bound
                if each not in fitting:
                    self._remove(each)
        return found

    def _book_new(self, room: ReplicaRoom, ref: SegmentRef) -> None:
        """Count the bytes of one more slot, or raise CapacityError."""
        size = slot_capacity(ref.size) + LABEL_BYTES
        mine = self.of(room.namespace)
        if len(mine) >= room.slots_max:
            busy = sum(each.label.state != "free" for each in mine)
            raise CapacityError(
                f"all {len(mine)} slots for copies are in use: {busy} hold copies, the others are "
                "being read; copying continues when one is free",
                needed_bytes=size,
                available_bytes=0,
                limit="replica slots",
            )
        self._make_room(room.namespace, size + room.ring_bytes, room.capacity_bytes)
        used = self._owners.bytes_of(room.namespace)
        left = room.capacity_bytes - used - room.ring_bytes
        if left < size:
            raise CapacityError(
                f"a copy needs a slot of {size >> 20} MiB; of memory.capacity "
                f"({room.capacity_bytes >> 20} MiB) {used >> 20} MiB are in use and "
                f"{room.ring_bytes >> 20} MiB are for this host's own saves: raise it, or lower "
                "memory.keep.last or memory.replicas",
                needed_bytes=size,
                available_bytes=max(0, left),
                limit="memory.capacity",
            )
        headroom_of(self._pool.folder).check(
            size + room.ring_bytes, f"a copy needs a slot of {format_mib(size)}"
        )
        self._owners.book(room.namespace, size)

    def release_unwanted(self, namespace: str, wanted: Callable[[str], bool]) -> int:
        """Take back unfinished copies of segments that are not wanted; how many there were."""
        with self._lock:
            drafts = self.drafts.ids(namespace)
            return sum(
                self._pool.release(each.slot_id)
                for each in self.of(namespace)
                if each.label.state == "reserved"
                and each.label.segment_id not in drafts
                and not wanted(each.label.segment_id)
            )

    def discard(self, ref: SegmentRef) -> None:
        """A copy is bad or not needed: its slot is free, or gone if it is damaged."""
        with self._lock:
            slot = self._pool.find(ref.id)
            if slot is None or slot.label.session_id != REPLICA_ID:
                return
            if slot.error:
                self._remove(slot)
            elif slot.label.state == "reserved":
                self._pool.release(slot.slot_id)
            else:
                self._pool.free(slot.slot_id)

    def _remove(self, slot: SlotInfo) -> None:
        if self._pool.remove(slot.slot_id):
            self._owners.drop(slot.slot_id)
