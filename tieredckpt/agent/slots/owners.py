"""Which slot is whose: its owner is the session that was given it last, while that lives."""

from __future__ import annotations

import threading

from tieredckpt.agent.host.sessions import Session
from tieredckpt.storage.headroom import format_mib, headroom_of
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.memory.slot import REPLICA_ID, SlotInfo


class SlotOwners:
    """See the module. Thread-safe.

    Args:
        pool: The slots.
        lock: The node's lock.
        sessions: The live sessions by id; the node's table.
    """

    def __init__(self, pool: SlotPool, lock: threading.RLock, sessions: dict[str, Session]) -> None:
        self._pool = pool
        self._lock = lock
        self._sessions = sessions
        self._given: dict[str, str] = {}
        """Slots given to a session while their label still names another one."""
        self._creating: dict[str, int] = {}
        """Bytes being allocated, by namespace."""

    def of(self, slot: SlotInfo) -> Session | None:
        """The living session that a slot belongs to; None: it is spare."""
        named = self._sessions.get(self._given.get(slot.slot_id, ""))
        return named or self._sessions.get(slot.label.session_id)

    def _namespace(self, slot: SlotInfo) -> str:
        # What a slot holds decides who pays for it; an empty one is its owner's.
        owner = self.of(slot)
        if owner is not None and slot.label.state == "free":
            return owner.namespace
        return slot.label.namespace

    def of_namespace(self, namespace: str) -> list[SlotInfo]:
        """The slots that ``namespace`` pays for."""
        with self._lock:
            return [slot for slot in self._pool.slots() if self._namespace(slot) == namespace]

    def bytes_of(self, namespace: str) -> int:
        """Bytes of tmpfs that ``namespace`` pays for, those being allocated included."""
        with self._lock:
            slots = sum(slot.file_bytes for slot in self.of_namespace(namespace))
            return slots + self._creating.get(namespace, 0)

    def check_room(self, namespace: str, needed: int) -> None:
        """Make sure that the host has room for ``needed`` bytes of slots of ``namespace``.

        Those that exist count: they are reused, or removed for better ones.

        Raises:
            CapacityError: It has not, so a later save would fail for certain.
        """
        missing = needed - self.bytes_of(namespace)
        headroom_of(self._pool.folder).check(
            missing,
            f"the slots of namespace {namespace} will take {format_mib(needed)}, of which "
            f"{format_mib(missing)} are still to be allocated",
        )

    def owned(self, session: Session, capacity: int) -> list[SlotInfo]:
        """The session's undamaged slots of at least ``capacity`` usable bytes."""
        return [
            slot
            for slot in self._pool.slots()
            if self.of(slot) is session and not slot.error and slot.capacity >= capacity
        ]

    def sealed_of(self, session: Session) -> dict[str, str]:
        """Slots by the segment that they hold, of those that are the session's."""
        with self._lock:
            return {
                slot.label.segment_id: slot.slot_id
                for slot in self.owned(session, 0)
                if slot.label.state == "sealed"
            }

    def adopt_spare(self, session: Session, capacity: int, count: int) -> list[SlotInfo]:
        """Give up to ``count`` spare slots of fitting size to ``session``."""
        spare = [
            slot
            for slot in self._pool.slots()
            if self.of(slot) is None
            and not slot.error
            and slot.label.session_id != REPLICA_ID
            # A much larger one would waste memory that the quota counts.
            and capacity <= slot.capacity <= capacity + capacity // 4
            and (slot.label.state == "free" or slot.label.namespace == session.namespace)
            and slot.label.state != "reserved"
        ]
        spare.sort(key=lambda s: (s.label.state != "free", s.label.namespace != session.namespace))
        for slot in spare[:count]:
            self._given[slot.slot_id] = session.session_id
        return spare[:count]

    def book(self, namespace: str, size: int) -> None:
        """Count bytes that are about to be allocated (negative: they are slots now, or not)."""
        self._creating[namespace] = self._creating.get(namespace, 0) + size

    def drop(self, slot_id: str) -> None:
        """The slot was removed."""
        self._given.pop(slot_id, None)

    def forget(self, session: Session) -> None:
        """The session ended: its slots are spare."""
        for slot_id in [k for k, v in self._given.items() if v == session.session_id]:
            del self._given[slot_id]
