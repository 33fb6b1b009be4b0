"""One background save per engine: which thread runs it, when it is over, and waiting for that.

DCP does not inform a storage writer when a save fails elsewhere. Two things end for certain: the
thread that DCP's executors start for each ``async_save``, and the staged state that the save
references. A save is over when either is gone. Every wait has a limit: a save that does not end in
time is named in an error, and continues.
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
"""How much later it is noticed that a staged state was freed while its thread is alive."""

_CAUSE_CHARS_MAX = 2000
_REMEMBERED_MAX = 8
"""Failed saves that the next one reports: with each kept cause, a message that can be read."""

_EXECUTOR_THREADS = "AsyncCheckpointExecutor"
"""How DCP names the threads of its thread executor, which serve one save each."""
_ANY_EXECUTOR_THREADS = (_EXECUTOR_THREADS, "ThreadPoolExecutor")
"""Those of its process executor have the standard library's name."""


class BackgroundSave:
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

    def watch(self, staged: object) -> None:
        """Record that the save references ``staged`` as long as it runs."""
        self._staged = weakref.ref(staged, lambda _: self._changed.set())
        self._threads_before = threading.enumerate()

    def run_here(self) -> None:
        """Record that this thread runs the save from now on."""
        self._thread = threading.current_thread()
        self._changed.set()
        self._changed.clear()

    @property
    def is_mine(self) -> bool:
        """Whether this thread runs it."""
        return threading.current_thread() in (self._thread, self.helper)

    @property
    def over(self) -> bool:
        """Whether no thread can continue it."""
        if self._staged is not None and self._staged() is None:
            return True
        if self._thread is not None:
            return not self._thread.is_alive()
        return self._staged is None

    def is_done_with_slot(self) -> bool:
        """Whether no thread will write or read its staged data any more."""
        return self.over or self.superseded

    @property
    def never_began(self) -> bool:
        """Whether it was staged, and there is no thread that would continue it.

        A save that fails before it reaches the writer is in this state; its error may keep the
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


class BackgroundSaves:
    """The unfinished background saves of one engine. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: list[BackgroundSave] = []
        self._unfinished: deque[BackgroundSave] = deque(maxlen=_REMEMBERED_MAX)

    def begin(self, what: str, step: int | None = None) -> BackgroundSave:
        """Enter a save; it counts from now on, and until it is over."""
        save = BackgroundSave(what, step)
        with self._lock:
            self._saves.append(save)
        return save

    def supersede(self, by: BackgroundSave | None) -> None:
        """Forbid staged saves that never began to begin, as save ``by`` begins now."""
        for save in self.others(by):
            save.superseded = save.superseded or save.never_began

    def others(self, before: BackgroundSave | None = None) -> list[BackgroundSave]:
        """The saves that are not over (begun before that one), without those of this thread."""
        with self._lock:
            self._saves = [each for each in self._saves if each is before or not each.over]
            found = self._saves
            if before in found:
                found = found[: found.index(before)]
            # A thread does one thing at a time: the save that it ran before is over.
            return [each for each in found if each is not before and not each.is_mine]

    def wait_idle(self, timeout_s: float, *, before: BackgroundSave | None = None) -> None:
        """Wait until all other saves are over.

        Args:
            timeout_s: The limit.
            before: Wait only for saves that began before this one; two never wait for each other.

        Raises:
            WaitError: It takes longer, with ``reason="timeout"``; the other save continues.
        """
        until_s = time.monotonic() + timeout_s
        for save in self.others(before):
            if save.wait(until_s):
                continue
            raise WaitError(
                f"the save of {save.what} is still under way in the background, "
                f"{time.monotonic() - save.begun_s:.0f} s after it began, and was waited for "
                f"{timeout_s:g} s (save.wait_timeout): save less often, or raise that limit; if it "
                "never ends, look at the other ranks",
                reason="timeout",
            )

    def wait_step(self, step: int, timeout_s: float) -> None:
        """Wait until no save of that step is under way, at most so long."""
        until_s = time.monotonic() + timeout_s
        for save in self.others():
            if save.step in (step, None):
                save.wait(until_s)

    # --- failures that were not reported to the script yet ---------------------------------------

    def enter_here(self, save: BackgroundSave) -> None:
        """Run that save in this thread; a script may never ask for its outcome.

        Raises:
            WaitError: Another save has superseded it, ``reason="superseded"``.
        """
        save.run_here()
        with self._lock:
            if save not in self._saves:
                self._saves.append(save)
            self._unfinished.append(save)
        if save.superseded:
            raise WaitError(
                f"the save of {save.what} was staged, but another one began before it did",
                reason="superseded",
            )

    @contextlib.contextmanager
    def recording_cause(self) -> Iterator[None]:
        """Record an exception that is raised inside as the cause why this thread's save failed."""
        try:
            yield
        except Exception as error:
            with self._lock:
                for save in self._unfinished:
                    if save.is_mine and not save.cause:
                        save.cause = f"{type(error).__name__}: {error}"[:_CAUSE_CHARS_MAX]
                        # The script may end before it looks at the future or saves again.
                        log.exception("the save of %s in the background failed", save.what)
            raise

    def finished(self) -> None:
        """Forget this thread's save: it succeeded, or another rank will report its failure."""
        with self._lock:
            for save in [each for each in self._unfinished if each.is_mine]:
                self._unfinished.remove(save)

    def mark_reported(self, save: BackgroundSave) -> None:
        """Record that the script knows how this save ended."""
        with self._lock:
            if save in self._unfinished:
                self._unfinished.remove(save)

    def pop_missed(self) -> BackgroundSaveError | None:
        """The saves that ended without having finished, in one error; each is reported once."""
        with self._lock:
            missed = [each for each in self._unfinished if each.over and not each.is_mine]
            for save in missed:
                self._unfinished.remove(save)
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


def in_process_executor_thread() -> bool:
    """Whether this can be a thread of DCP's process executor, made for one save."""
    return threading.current_thread().name.startswith(_ANY_EXECUTOR_THREADS[1])


def in_executor_thread() -> bool:
    """Whether this is a thread of DCP's thread executor, made for one save."""
    return threading.current_thread().name.startswith(_EXECUTOR_THREADS)
