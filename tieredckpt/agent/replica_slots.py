"""Slots for copies of other hosts' segments: they belong to no session, and are bounded.

They count in ``memory.capacity``, but come after the training's own ring: what that still needs is
never taken, and a free slot of ours is given back where it needs the room.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tieredckpt.agent.drafts import Drafts
from tieredckpt.agent.slot_owners import SlotOwners
from tieredckpt.errors import CapacityError, NotFoundError
from tieredckpt.format.manifest import SegmentRef
from tieredckpt.format.segment import slot_capacity
from tieredckpt.tiers.headroom import format_mib, headroom_of
from tieredckpt.tiers.pool import SlotPool
from tieredckpt.tiers.slot import (
    LABEL_BYTES,
    REPLICA_ID,
    Label,
    Reservation,
    SlotInfo,
    claim_reserved,
)

SLACK = 4
"""A free slot may be larger than needed by one part in so many; else the quota counts waste."""


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
            claimed = claim_reserved(fd, slot.capacity, ref.id)
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
                f"all {len(mine)} slots for copies are taken: {busy} hold some, the others are "
                "being read; it goes on when one is free",
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
