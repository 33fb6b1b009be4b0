"""How fast this host may pull: one budget of bytes per second for all connections together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_S = 0.05
"""What may come at once after a pause, in seconds of the budget: short, so that a link that is
shared with the training sees no bursts, and longer than a thread sleeps by mistake."""


class RateLimit:
    """A token bucket that says how long to wait. Thread-safe.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bytes_per_s = 0
        self._paid_until_s = 0.0
        """When everything that was taken so far is paid for."""

    @property
    def bytes_per_s(self) -> int:
        """The limit; 0: none."""
        return self._bytes_per_s

    def set(self, bytes_per_s: int) -> None:
        """Another limit from now on; 0: none."""
        with self._lock:
            self._bytes_per_s = bytes_per_s
            self._paid_until_s = 0.0

    def take(self, size: int) -> float:
        """Book ``size`` bytes; the seconds that the caller must wait before it moves them."""
        with self._lock:
            if not self._bytes_per_s:
                return 0.0
            now_s = self._clock()
            begin_s = max(self._paid_until_s, now_s - BURST_S)
            self._paid_until_s = begin_s + size / self._bytes_per_s
            return max(0.0, self._paid_until_s - now_s)
