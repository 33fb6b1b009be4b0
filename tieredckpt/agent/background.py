"""A thread that does one thing whenever it is woken, or a time that it named has come."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

STOP_WAIT_S = 10.0
AFTER_BUG_S = 5.0
"""Pause after an unexpected failure, so that it does not fill the log."""

log = logging.getLogger(__name__)


class Background:
    """See the module. Thread-safe.

    Args:
        name: Of the thread.
        step: What to do; returns the seconds until it is to be done again, None: when woken.
    """

    def __init__(self, name: str, step: Callable[[], float | None]) -> None:
        self._name = name
        self._step = step
        self._cond = threading.Condition()
        self._woken = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, if it has not begun or was stopped."""
        with self._cond:
            if self._thread is not None or self._stopping:
                return
            self._woken = True
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """There is something to do. Never waits."""
        with self._cond:
            self._woken = True
            self._cond.notify_all()

    def stop(self) -> None:
        """End after the current step. Idempotent; it cannot begin again."""
        with self._cond:
            self._stopping = True
            self._cond.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_WAIT_S)

    def _run(self) -> None:
        while True:
            with self._cond:
                self._woken = False
                if self._stopping:
                    return
            try:
                wait_s = self._step()
            except Exception:  # the top of a daemon task: a bug must not end all of it
                log.exception("%s: unexpected", self._name)
                wait_s = AFTER_BUG_S
            with self._cond:
                self._cond.wait_for(lambda: self._stopping or self._woken, wait_s)
