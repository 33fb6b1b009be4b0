"""One slot as a trainer holds it: a descriptor, a mapping, and how far that is populated."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tieredckpt.errors import IntegrityError
from tieredckpt.tiers.mapping import Mapping
from tieredckpt.tiers.slot import check_slot, unlock

PREFAULT_BYTES = 64 << 20
"""Populated per call: what stopping may have to wait for (0.1 s), and what helpers share."""

HOLD_POLL_S = 0.05
"""How soon a prefault that is held notices that it is to stop."""


class Prefault:
    """Populates one mapping, piece by piece; any number of threads may help."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self._starts = itertools.count(0, PREFAULT_BYTES)
        self._left = -(-mapping.capacity_bytes // PREFAULT_BYTES)
        self._lock = threading.Lock()
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether all of the slot is populated."""
        return self._done.is_set()

    def help(
        self, stop: threading.Event | None = None, may_run: threading.Event | None = None
    ) -> None:
        """Populate pieces until none is left to begin. Raises OSError if the slot is damaged.

        Args:
            stop: Once set, no further piece is begun.
            may_run: While it is not set, no piece is begun.
        """
        size = self._mapping.capacity_bytes
        while stop is None or not stop.is_set():
            if may_run is not None and not may_run.wait(HOLD_POLL_S):
                continue  # asked to stop meanwhile?
            if (start := next(self._starts)) >= size:
                break
            try:
                self._mapping.populate(start, min(start + PREFAULT_BYTES, size))
            finally:
                with self._lock:
                    self._left -= 1
                    if not self._left:
                        self._done.set()

    def wait(self, timeout_s: float) -> None:
        """Wait for pieces that other threads are populating."""
        self._done.wait(timeout_s)


class MappedSlot:
    """A slot of ours: one mapping, and the descriptor that it is locked by."""

    def __init__(self, slot_id: str, fd: int, capacity_bytes: int) -> None:
        self.slot_id = slot_id
        self.fd = fd
        self.mapping = Mapping(fd, capacity_bytes)
        self.prefault = Prefault(self.mapping)

    @property
    def capacity_bytes(self) -> int:
        """Usable bytes, without the label page."""
        return self.mapping.capacity_bytes

    def is_gone(self) -> bool:
        """Whether the file was deleted, or changed its size under us."""
        try:
            check_slot(self.fd, self.capacity_bytes)
        except IntegrityError:
            return True
        return os.fstat(self.fd).st_nlink == 0

    def close(self) -> None:
        """Give up lock and descriptor; the mapping goes with its last view."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            # By hand: the mapping shares the open file description and would keep the lock.
            with contextlib.suppress(OSError):
                unlock(fd)
            os.close(fd)


@dataclass(slots=True, eq=False)
class WritableSlot:
    """A slot granted for one segment, locked and mapped; ours from acquire to seal or abandon."""

    segment_id: str
    """32 hex digits, minted by the agent."""
    slot_id: str
    capacity_bytes: int
    view: memoryview
    """The slot's usable bytes, writable."""
    address: int
    """Where they lie; valid as long as ``view`` is alive."""
    cold: bool
    """The slot was not prefaulted when the save asked for it."""


class Behind:
    """Work in a background thread that can be asked to stop.

    Args:
        work: Is given the event that asks it to stop.
        before: Work that is stopped, and has ended before this one begins.
    """

    def __init__(self, work: Callable[[threading.Event], None], before: Behind | None) -> None:
        self.stop = threading.Event()

        def run() -> None:
            if before is not None:
                before.stop.set()
                before.thread.join()
            if not self.stop.is_set():
                work(self.stop)

        self.thread = threading.Thread(target=run, name="tieredckpt-prefault", daemon=True)
        self.thread.start()
