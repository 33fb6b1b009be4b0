"""The memory tier of one namespace: segments are sealed slots, small objects are tmpfs files.

It exists as long as its tmpfs. Nothing here is synced: a tmpfs has no medium to sync to, and it
must survive only the death of processes, for which the order of system calls suffices.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tieredckpt.errors import IntegrityError, NotFoundError, TierUnavailableError, UsageError
from tieredckpt.format.manifest import ID_PATTERN, check_name
from tieredckpt.format.segment import TRAILER_BYTES, decode_trailer, slot_capacity
from tieredckpt.storage.base import ByteSource, ObjectInfo, OpenObject, Scope, Tier, unavailable
from tieredckpt.storage.file_io import RUN_BYTES, aligned_buffer
from tieredckpt.storage.folder import ObjectFolder, medium
from tieredckpt.storage.memory.pool import TIER, SlotPool
from tieredckpt.storage.memory.slot import NO_ID, Label, Reservation, SlotInfo

SEGMENTS = "segments/"


class MemoryTier(ObjectFolder):
    """Segments are sealed slots of ``pool``, small objects are files below ``folder``.

    Args:
        pool: The host's slots, of which only those of ``namespace`` are used.
        folder: ``<runtime dir>/ns/<namespace>``; made if missing.
        namespace: Name of the namespace.
        read_only: Creates and sweeps nothing (while an agent runs).

    Raises:
        TierUnavailableError, CapacityError: The folder cannot be made.
        ValueError: ``namespace`` is not a name.
    """

    def __init__(
        self, pool: SlotPool, folder: Path, namespace: str, *, read_only: bool = False
    ) -> None:
        self.namespace = check_name(namespace, "namespace")
        self.pool = pool
        super().__init__(
            TIER,
            Scope.HOST,
            folder,
            durable=False,
            advice="the tmpfs is full: enlarge it (docker run --shm-size=...), or keep less "
            "(memory.keep)",
            read_only=read_only,
        )
        if not read_only:
            self.make()
            self.sweep()  # only the agent of this runtime folder writes here

    def path(self, key: str) -> Path:
        if _segment_of(key) is not None:
            raise UsageError(f"{key} is a segment: use put_from, and it is never replaced", key=key)
        return super().path(key)

    def put_from(self, key: str, source: ByteSource) -> None:
        """Store a segment in a slot that belongs to no session, or a new one.

        Raises as :meth:`Tier.put_from`, and IntegrityError if the source's bytes do not end in the
        trailer of this segment.
        """
        self._check_writable()
        segment_id = _segment_of(key)
        if segment_id is None:
            raise UsageError(f"{key} is not a segment: use put", key=key)
        if (slot := self.pool.find(segment_id)) is not None:
            self._check_same(slot, source.size)
            return
        reserved = self._reserve(segment_id, source.size)
        try:
            with medium(TIER, f"write {key}"):
                root = _fill(reserved.fd, source, segment_id)
            self.pool.seal(
                reserved.slot.slot_id, segment_id=segment_id, segment_bytes=source.size, root=root
            )
        finally:
            os.close(reserved.fd)
            with contextlib.suppress(TierUnavailableError):  # the agent's reaper frees it later
                self.pool.release(reserved.slot.slot_id)  # does nothing once it is sealed

    def _check_same(self, slot: SlotInfo, size: int) -> None:
        if slot.label.state == "reserved":
            raise unavailable(TIER, f"segment {slot.label.segment_id} is being written")
        if slot.error or slot.label.segment_bytes != size:
            raise UsageError(
                f"segment {slot.label.segment_id} exists in memory, damaged or with another size: "
                "delete it first",
                key=slot.label.segment_id,
            )

    def _reserve(self, segment_id: str, size: int) -> Reservation:
        label = Label(
            state="reserved", namespace=self.namespace, segment_id=segment_id, segment_bytes=size
        )
        for _ in range(3):  # another thread may reserve the slot that was just made
            # Slots of a session are mapped there and belong to its ring.
            unowned = [s.slot_id for s in self.pool.slots() if s.label.session_id == NO_ID]
            if (reserved := self.pool.reserve(label, unowned)) is not None:
                return reserved
            self.pool.create(slot_capacity(size), namespace=self.namespace)
        raise unavailable(TIER, "other writers reserved all slots: try again")

    def get(self, key: str, *, limit: int) -> bytes:
        if _segment_of(key) is None:
            return super().get(key, limit=limit)
        return Tier.get(self, key, limit=limit)

    def open(self, key: str) -> OpenObject:
        segment_id = _segment_of(key)
        if segment_id is None:
            return super().open(key)
        self._stored(key, segment_id)
        return self.pool.open_segment(segment_id)

    def info(self, key: str) -> ObjectInfo:
        segment_id = _segment_of(key)
        if segment_id is None:
            return super().info(key)
        slot = self._stored(key, segment_id)
        with medium(TIER, f"look at {key}", missing_key=key):  # the file may have been deleted
            os.stat(self.pool.folder / slot.slot_id, follow_symlinks=False)
        return ObjectInfo(key, slot.label.segment_bytes)

    def _stored(self, key: str, segment_id: str) -> SlotInfo:
        slot = self.pool.find(segment_id)
        if slot is None or not self._is_mine(slot):
            raise NotFoundError(f"memory has no {key}", key=key)
        return slot

    def _is_mine(self, slot: SlotInfo) -> bool:
        return slot.label.state == "sealed" and slot.label.namespace == self.namespace

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """As :meth:`Tier.list`; a segment in a damaged slot is listed with the size it had."""
        if prefix != SEGMENTS:
            yield from super().list(prefix)
            return
        for slot in self.pool.slots():
            if self._is_mine(slot):
                yield ObjectInfo(SEGMENTS + slot.label.segment_id, slot.label.segment_bytes)

    def delete(self, key: str) -> None:
        """As :meth:`Tier.delete`; the slot of a segment becomes free, a damaged one is unlinked."""
        segment_id = _segment_of(key)
        if segment_id is None:
            super().delete(key)
            return
        self._check_writable()
        slot = self.pool.find(segment_id)
        # A segment that is still being written does not exist yet.
        if slot is not None and self._is_mine(slot) and not self.pool.free(slot.slot_id):
            self.pool.remove(slot.slot_id, even_if_locked=True)


def _segment_of(key: str) -> str | None:
    """The segment id if ``key`` is a segment's. Raises UsageError if it cannot be one."""
    if not key.startswith(SEGMENTS):
        return None
    segment_id = key[len(SEGMENTS) :]
    if not ID_PATTERN.fullmatch(segment_id):
        raise UsageError(f"{key[:200]!r} is not a key of the memory tier", key=key[:200])
    return segment_id


def _fill(fd: int, source: ByteSource, segment_id: str) -> str:
    """Copy ``source`` into a slot; return the root in its trailer."""
    buffer = aligned_buffer(RUN_BYTES)
    run = buffer[:0]
    for offset in range(0, source.size, RUN_BYTES):
        run = buffer[: min(RUN_BYTES, source.size - offset)]
        source.read_into(offset, run)
        done = 0
        while done < len(run):
            done += os.pwrite(fd, run[done:], offset + done)
    if source.size < TRAILER_BYTES:
        raise IntegrityError(f"{source.size} bytes are no segment", tier=TIER, key=segment_id)
    trailer = os.pread(fd, TRAILER_BYTES, source.size - TRAILER_BYTES)
    return decode_trailer(trailer).root.hex()
