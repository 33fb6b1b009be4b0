"""An agent for the slot ring, in this process: real slot files in tmpfs, real locks, no socket."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from tieredckpt.dcp.slots.slot_ring import SlotRing
from tieredckpt.errors import CapacityError
from tieredckpt.format.segment import TRAILER_BYTES, decode_trailer, slot_capacity
from tieredckpt.rpc.messages.agent import Grant, Prepared, Sealed, SlotHandle
from tieredckpt.storage.memory.slot import (
    LABEL_BYTES,
    Label,
    read_label,
    slot_capacity_of,
    try_lock_exclusive,
    write_label,
)


def is_warm(ring: SlotRing, timeout_s: float = 60.0) -> bool:
    """Wait until the ring is mapped and populated; False if it is not by then."""
    if (task := ring._task) is not None:
        task.thread.join(timeout_s)
    return task is None or not task.thread.is_alive()


class FakeAgent:
    """Grants slots of ``folder`` in turn, oldest seal first; remembers what it was asked."""

    def __init__(self, folder: Path, *, ring: int = 3) -> None:
        self.folder = folder
        self.ring = ring
        self.calls: list[str] = []
        self.grants_ahead = True
        self.order: list[str] = []
        self.sealed: dict[str, str] = {}
        self.tickets: dict[str, int] = {}

    def path(self, slot_id: str) -> Path:
        return self.folder / slot_id

    def _make(self, segment_bytes: int) -> str:
        slot_id = secrets.token_hex(16)
        capacity = slot_capacity(segment_bytes)
        fd = os.open(self.path(slot_id), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.posix_fallocate(fd, 0, capacity + LABEL_BYTES)
        write_label(fd, capacity, Label(state="free"))
        os.close(fd)
        self.order.append(slot_id)
        return slot_id

    def _large_enough(self, segment_bytes: int) -> list[str]:
        size = segment_bytes + LABEL_BYTES
        return [slot_id for slot_id in self.order if self.path(slot_id).stat().st_size >= size]

    def _ticket(self, fd: int) -> str:
        ticket = secrets.token_hex(16)
        self.tickets[ticket] = fd
        return ticket

    def _open(self, slot_id: str) -> int:
        return os.open(self.path(slot_id), os.O_RDWR | os.O_CLOEXEC)

    def _reserve(self, slot_id: str, segment_bytes: int) -> tuple[int, str] | None:
        fd = self._open(slot_id)
        if not try_lock_exclusive(fd):
            os.close(fd)
            return None
        capacity = slot_capacity_of(fd)
        segment_id = secrets.token_hex(16)
        label = Label(state="reserved", segment_id=segment_id, segment_bytes=segment_bytes)
        write_label(fd, capacity, label)
        self.order.remove(slot_id)
        self.order.append(slot_id)
        return fd, segment_id

    def prepare(self, segment_bytes: int) -> Prepared:
        self.calls.append("prepare")
        while len(self.order) < self.ring:
            self._make(segment_bytes)
        slots = []
        for slot_id in self.order:
            fd = self._open(slot_id)
            slots.append(
                SlotHandle(
                    slot_id=slot_id, capacity_bytes=slot_capacity_of(fd), ticket=self._ticket(fd)
                )
            )
        return Prepared(slots=tuple(slots))

    def reserve(self, segment_bytes: int) -> Grant:
        self.calls.append("reserve")
        if not self.order:
            self._make(segment_bytes)
        for slot_id in self._large_enough(segment_bytes):
            reserved = self._reserve(slot_id, segment_bytes)
            if reserved is not None:
                fd, segment_id = reserved
                return Grant(
                    segment_id=segment_id,
                    slot_id=slot_id,
                    capacity_bytes=slot_capacity_of(fd),
                    ticket=self._ticket(fd),
                )
        if len(self.order) < self.ring:
            self._make(segment_bytes)
            return self.reserve(segment_bytes)
        raise CapacityError("no slot is free", needed_bytes=segment_bytes)

    def seal(self, segment_id: str, slot_id: str, segment_bytes: int, root: str) -> Sealed:
        self.calls.append("seal")
        fd = self._open(slot_id)
        capacity = slot_capacity_of(fd)
        label = read_label(fd, capacity)
        assert (label.state, label.segment_id) == ("reserved", segment_id)
        end = os.pread(fd, TRAILER_BYTES, segment_bytes - TRAILER_BYTES)
        trailer = decode_trailer(end)
        assert (trailer.root.hex(), trailer.segment_id.hex()) == (root, segment_id)
        write_label(
            fd,
            capacity,
            Label(state="sealed", segment_id=segment_id, segment_bytes=segment_bytes, root=root),
        )
        os.close(fd)
        self.sealed[segment_id] = slot_id
        return Sealed(next=self._provisional(segment_bytes) if self.grants_ahead else None)

    def _provisional(self, segment_bytes: int) -> Grant | None:
        """As after the commit: the oldest slot, labelled already, not locked by us."""
        for slot_id in self._large_enough(segment_bytes):
            reserved = self._reserve(slot_id, segment_bytes)
            if reserved is not None:
                fd, segment_id = reserved
                capacity = slot_capacity_of(fd)
                os.close(fd)
                return Grant(
                    segment_id=segment_id, slot_id=slot_id, capacity_bytes=capacity, ticket=None
                )
        return None

    def redeem(self, ticket: str) -> int:
        self.calls.append("redeem")
        return self.tickets.pop(ticket)

    def close(self) -> None:
        for fd in self.tickets.values():
            os.close(fd)
        self.tickets.clear()
