"""One save in flight per engine: who runs it, when it is over, and waiting for that.

DCP tells a storage writer nothing about the end of a save that failed elsewhere. What ends for
certain is the thread that DCP's executors make for each ``async_save``, and the staged state that
the save holds on to; a save is over when either is gone. Nobody waits without a limit: a save that
does not end in time is named in an error, and goes on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from tieredckpt.errors import BackgroundSaveError, WaitError

log = logging.getLogger(__name__)

POLL_S = 0.02
"""A staged state that dies beside a thread that lives on is noticed this much later."""

_CAUSE_CHARS_MAX = 2000
_REMEMBERED_MAX = 8
"""Failed saves that the next one tells of: with each kept cause, a message that can be read."""

_EXECUTOR_THREADS = "AsyncCheckpointExecutor"
"""How DCP names the threads of its thread executor, which serve one save each."""
_ANY_EXECUTOR_THREADS = (_EXECUTOR_THREADS, "ThreadPoolExecutor")
"""Those of its process executor have the standard library's name."""


class Flight:
    """One save in the background, from its staging to its end.

    Args:
        what: For messages: "step 100".
        step: The step, None if it is not known yet.
    """

    def __init__(self, what: str, step: int | None = None) -> None:
        self.what = what
        self.step = step
        self.begun_s = time.monotonic()
        self._thread: threading.Thread | None = None
        self.helper: threading.Thread | None = None
        """Runs parts of it, for a save in DCP's process executor."""
        self._staged: weakref.ref[Any] | None = None
        self._changed = threading.Event()
        self._threads_before: list[threading.Thread] = []
        self.cause = ""
        """Why it failed on this rank, if it did in our code."""
        self.superseded = False
        """It was staged, and another save began before this one did: its slot is gone."""

    def carries(self, staged: object) -> None:
        """The save holds ``staged`` as long as it runs."""
        self._staged = weakref.ref(staged, lambda _: self._changed.set())
        self._threads_before = threading.enumerate()

    def taken_up(self) -> None:
        """This thread runs the save now."""
        self._thread = threading.current_thread()
        self._changed.set()
        self._changed.clear()

    @property
    def is_mine(self) -> bool:
        """Whether this thread runs it."""
        return threading.current_thread() in (self._thread, self.helper)

    @property
    def over(self) -> bool:
        """Whether nobody can go on with it."""
        if self._staged is not None and self._staged() is None:
            return True
        if self._thread is not None:
            return not self._thread.is_alive()
        return self._staged is None

    def leaves_its_slot(self) -> bool:
        """Whether nobody will write or read any more what was staged for it."""
        return self.over or self.superseded

    @property
    def never_began(self) -> bool:
        """Whether it was staged, and there is no thread that would go on with it.

        A save that fails before it reaches the writer leaves such a one; its error may keep the
        staged state alive. Only the thread that staged it knows for certain: a moment after it
        DCP starts the thread.
        """
        if self._thread is not None or self.over:
            return False
        return not any(
            thread.name.startswith(_ANY_EXECUTOR_THREADS) and thread not in self._threads_before
            for thread in threading.enumerate()
        )

    def wait(self, until_s: float) -> bool:
        """Wait until it is over, or until that monotonic time; whether it is."""
        while not (self.over or self.superseded or self.never_began):
            left_s = min(until_s - time.monotonic(), POLL_S)
            if left_s <= 0:
                return False
            if self._thread is not None:
                self._thread.join(left_s)
            else:
                self._changed.wait(left_s)
        return True


class InFlight:
    """The saves of one engine that are under way in the background. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: list[Flight] = []
        self._unfinished: deque[Flight] = deque(maxlen=_REMEMBERED_MAX)

    def begin(self, what: str, step: int | None = None) -> Flight:
        """Enter a save; it counts from now on, and until it is over."""
        flight = Flight(what, step)
        with self._lock:
            self._flights.append(flight)
        return flight

    def supersede(self, by: Flight | None) -> None:
        """A save begins, after waiting: what was staged before and never began must not begin."""
        for flight in self.others(by):
            flight.superseded = flight.superseded or flight.never_began

    def others(self, before: Flight | None = None) -> list[Flight]:
        """What is under way (begun before that one), except for what this thread runs itself."""
        with self._lock:
            self._flights = [each for each in self._flights if each is before or not each.over]
            found = self._flights
            if before in found:
                found = found[: found.index(before)]
            # A thread does one thing at a time: what it ran before is over.
            return [each for each in found if each is not before and not each.is_mine]

    def wait_idle(self, timeout_s: float, *, before: Flight | None = None) -> None:
        """Wait until nothing of that is under way.

        Args:
            timeout_s: The limit.
            before: Wait only for what was begun before this one; two never wait for each other.

        Raises:
            WaitError: It takes longer, with ``reason="timeout"``; what is under way goes on.
        """
        until_s = time.monotonic() + timeout_s
        for flight in self.others(before):
            if flight.wait(until_s):
                continue
            raise WaitError(
                f"the save of {flight.what} is still under way in the background, "
                f"{time.monotonic() - flight.begun_s:.0f} s after it began, and was waited for "
                f"{timeout_s:g} s (save.wait_timeout): save less often, or raise that limit; if it "
                "never ends, look at the other ranks",
                reason="timeout",
            )

    def wait_step(self, step: int, timeout_s: float) -> None:
        """Wait until no save of that step is under way, at most so long."""
        until_s = time.monotonic() + timeout_s
        for flight in self.others():
            if flight.step in (step, None):
                flight.wait(until_s)

    # --- failures that nobody was told of ---------------------------------------------------------

    def take_up(self, flight: Flight) -> None:
        """This thread runs that save in the background; nobody may ever look at its outcome."""
        flight.taken_up()
        with self._lock:
            if flight not in self._flights:
                self._flights.append(flight)
            self._unfinished.append(flight)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Keep what is raised inside as the reason why this thread's save failed."""
        try:
            yield
        except Exception as error:
            with self._lock:
                for flight in self._unfinished:
                    if flight.is_mine and not flight.cause:
                        flight.cause = f"{type(error).__name__}: {error}"[:_CAUSE_CHARS_MAX]
                        # The script may end before anybody looks at the future or saves again.
                        log.exception("the save of %s in the background failed", flight.what)
            raise

    def finished(self) -> None:
        """This thread's save succeeded, or another rank is the one to tell of its failure."""
        with self._lock:
            for flight in [each for each in self._unfinished if each.is_mine]:
                self._unfinished.remove(flight)

    def told(self, flight: Flight) -> None:
        """Somebody was told how this one ended."""
        with self._lock:
            if flight in self._unfinished:
                self._unfinished.remove(flight)

    def take_missed(self) -> BackgroundSaveError | None:
        """The saves that ended without having finished, in one error; each is told once."""
        with self._lock:
            missed = [each for each in self._unfinished if each.over and not each.is_mine]
            for flight in missed:
                self._unfinished.remove(flight)
        if not missed:
            return None
        return BackgroundSaveError(
            "; ".join(
                f"the save of {each.what} in the background failed, and was not committed: "
                f"{each.cause or 'its future has the reason'}"
                for each in missed
            ),
            what=[each.what for each in missed],
            cause=[each.cause for each in missed],
        )


def superseded(flight: Flight) -> WaitError:
    """What such a save fails with."""
    return WaitError(
        f"the save of {flight.what} was staged, but another one began before it did",
        reason="superseded",
    )


def in_process_executor_thread() -> bool:
    """Whether this can be a thread of DCP's process executor, made for one save."""
    return threading.current_thread().name.startswith(_ANY_EXECUTOR_THREADS[1])


def in_executor_thread() -> bool:
    """Whether this is a thread of DCP's thread executor, made for one save."""
    return threading.current_thread().name.startswith(_EXECUTOR_THREADS)
