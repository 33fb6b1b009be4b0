"""How fast an object tier may go: its own limit of bytes, and what a throttling store asks for."""

from __future__ import annotations

import random
import threading
import time

from tieredckpt.errors import TierUnavailableError

_FIRST_S = 0.1
_FIRST_THROTTLED_S = 0.5
_LONGEST_S = 20.0
_RETRY_AFTER_MAX_S = 60.0


class Pace:
    """Shared by all requests of one tier. Thread-safe.

    Args:
        bytes_per_s: Most that is uploaded; None: no limit.
        chance: Where jitter comes from.
    """

    def __init__(self, bytes_per_s: int | None, chance: random.Random) -> None:
        self._bytes_per_s = bytes_per_s
        self._chance = chance
        self._lock = threading.Lock()
        self._free_s = 0.0
        self._not_before_s = 0.0

    def send(self, size: int, stopped: threading.Event) -> None:
        """Wait until ``size`` more bytes may leave. Raises TierUnavailableError if stopped."""
        if self._bytes_per_s:
            with self._lock:
                now_s = time.monotonic()
                due_s = max(now_s, self._free_s)
                self._free_s = due_s + size / self._bytes_per_s
            _wait(due_s - now_s, stopped)

    def begin(self, stopped: threading.Event) -> None:
        """Wait until the store may be asked at all: after SlowDown nobody asks for a while."""
        with self._lock:
            wait_s = self._not_before_s - time.monotonic()
        _wait(wait_s, stopped)

    def back_off(
        self,
        attempt: int,
        *,
        until_s: float,
        throttled: bool,
        retry_after_s: float,
        stopped: threading.Event,
    ) -> bool:
        """Wait before attempt number ``attempt`` (the first retry is 1); False: no time is left.

        The wait is drawn between nothing and a bound that doubles, so that clients that were
        refused together do not come back together.
        """
        bound_s = (_FIRST_THROTTLED_S if throttled else _FIRST_S) * 2.0 ** min(attempt - 1, 10)
        wait_s = self._chance.uniform(0.0, min(bound_s, _LONGEST_S))
        wait_s = max(wait_s, min(retry_after_s, _RETRY_AFTER_MAX_S))
        now_s = time.monotonic()
        if now_s + wait_s >= until_s:
            return False
        if throttled:
            with self._lock:
                self._not_before_s = max(self._not_before_s, now_s + wait_s)
        _wait(wait_s, stopped)
        return True


def _wait(wait_s: float, stopped: threading.Event) -> None:
    if (wait_s > 0 and stopped.wait(wait_s)) or stopped.is_set():
        raise TierUnavailableError("the transfer was given up", outcome="unknown", stopping=True)
