"""Making slot files: every page allocated before the slot has a name, or nothing is left behind.

Allocation takes long (about 0.3 s per GiB) and holds no lock. Creations that run at once count each
other's pages that are still to come, and the limits are asked again between two steps, because a
tmpfs that runs into the memory cgroup's limit ends in the OOM killer, not in ENOSPC.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from tieredckpt.errors import CapacityError
from tieredckpt.tiers.headroom import Headroom
from tieredckpt.tiers.medium import medium
from tieredckpt.tiers.slot import LABEL_BYTES, Label, write_label

ALLOCATE_STEP_BYTES = 256 << 20
"""Pages allocated per system call: between two, the limits are asked again."""

UNFINISHED = "new-"
"""Prefix of a slot's file name until it is complete."""


class SlotAllocator:
    """Makes slot files in ``folder``; thread-safe.

    Args:
        folder: The slot folder.
        headroom: What limits new pages there.
        tier: The tier's name, for errors.
    """

    def __init__(self, folder: Path, headroom: Callable[[Path], Headroom], tier: str) -> None:
        self._folder = folder
        self._headroom = headroom
        self._tier = tier
        self._lock = threading.Lock()
        self._unallocated = 0
        self._creating = 0

    @property
    def creating_bytes(self) -> int:
        """File bytes of the slots that are being made at this moment."""
        return self._creating

    def make(self, slot_id: str, capacity: int, label: Label) -> None:
        """Make the file of one slot, labelled, with no holes.

        Raises:
            ValueError: ``capacity`` is not a positive multiple of 4096.
            CapacityError: No room; nothing is left behind; the text says what to do.
            TierUnavailableError: The folder cannot be written; nothing is left behind.
        """
        if capacity <= 0 or capacity % LABEL_BYTES:
            raise ValueError(f"a slot of {capacity} bytes: want a multiple of {LABEL_BYTES}")
        left = size = capacity + LABEL_BYTES
        with self._lock:
            self._check_room(self._unallocated + size)
            self._unallocated += size
            self._creating += size
        unfinished = self._folder / (UNFINISHED + slot_id)
        try:
            with medium(
                self._tier, f"make a slot of {size} bytes", needed_bytes=size, advice=_ADVICE
            ):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                fd = os.open(unfinished, flags, 0o600)
                try:
                    while left:
                        step = min(left, ALLOCATE_STEP_BYTES)
                        self._check_room(left)
                        os.posix_fallocate(fd, size - left, step)
                        with self._lock:
                            self._unallocated -= step
                        left -= step
                    write_label(fd, capacity, label)
                finally:
                    os.close(fd)
                # The name comes last: whoever adopts the folder sees complete slots only.
                os.rename(unfinished, self._folder / slot_id)
        finally:
            with self._lock:
                self._unallocated -= left
                self._creating -= size
            with contextlib.suppress(OSError):  # after success there is nothing to remove
                os.unlink(unfinished)

    def _check_room(self, wanted: int) -> None:
        with medium(self._tier, "ask for free memory"):
            room = self._headroom(self._folder)
        if wanted > room.available_bytes:
            raise CapacityError(
                f"no room for a slot: {wanted} bytes are wanted, the {room.limit} allows "
                f"{room.available_bytes}; {room.advice}",
                tier=self._tier,
                needed_bytes=wanted,
                available_bytes=room.available_bytes,
                limit=room.limit,
            )


_ADVICE = (
    "the tmpfs is full: enlarge it (docker run --shm-size=..., mount -o remount,size=...), or keep "
    "less (memory.capacity, memory.keep)"
)
