"""Looking at what a tier holds, with a deadline: one thread per tier, however many ask.

A file system that hangs lets nobody go who asked it, and cannot be interrupted. So it is asked by
a thread of its own, which may be lost to it, and never by one that serves requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tieredckpt.storage.holdings import TierFacts

LOOK_WAIT_S = 30.0
"""A tier that has not said within this time what it holds counts as unavailable."""
STUCK_WAIT_S = 1.0
"""How much longer one waits for a look that has taken :data:`LOOK_WAIT_S` already."""


class TierLook:
    """Who asks at the same time shares one look that began after all of them asked. Thread-safe.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._cond = threading.Condition()
        self._asked = 0
        self._answered = 0
        """Everybody up to this number has an answer; it is the newest one."""
        self._facts: TierFacts | None = None
        self._began_s: float | None = None
        """When the look that runs now began."""

    def ask(self, look: Callable[[], TierFacts]) -> int:
        """Begin to look, or as soon as the look that runs now is over; what to give ``wait``."""
        with self._cond:
            self._asked += 1
            self._begin(look)
            return self._asked

    def wait(self, number: int, look: Callable[[], TierFacts], until_s: float) -> TierFacts | None:
        """The answer; None: there is none at ``until_s``, or looking failed with a bug."""
        with self._cond:
            while self._answered < number:
                self._begin(look)
                now_s = time.monotonic()
                if self._began_s is not None and now_s - self._began_s > LOOK_WAIT_S:
                    until_s = min(until_s, now_s + STUCK_WAIT_S)
                if now_s >= until_s:
                    return None
                self._cond.wait(until_s - now_s)
            return self._facts

    def _begin(self, look: Callable[[], TierFacts]) -> None:
        if self._began_s is None:
            threading.Thread(
                target=self._run, args=(look, self._asked), name=self._name, daemon=True
            ).start()
            self._began_s = time.monotonic()

    def _run(self, look: Callable[[], TierFacts], number: int) -> None:
        facts = None
        try:
            facts = look()
        finally:
            with self._cond:
                self._facts, self._answered, self._began_s = facts, number, None
                self._cond.notify_all()
