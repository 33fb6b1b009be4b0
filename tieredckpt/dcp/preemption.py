"""Preemption: a signal arrives, the agent is asked to flush, the ranks agree on a step to leave at.

A signal handler may interrupt code that has any lock, the logger's and the client's among them. So
the handler takes none: it records the time and wakes a thread, started beforehand, that sends the
request to the agent. Python runs handlers between two instructions of the main thread only. If no
other code uses the interpreter's wake-up descriptor, it wakes the thread at once, also while the
main thread hangs in a collective.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tieredckpt.errors import RankError, TieredCkptError, UsageError
from tieredckpt.recovery.flush import check_deadline
from tieredckpt.rpc.messages.agent import Flush, Flushed

if TYPE_CHECKING:
    from tieredckpt.dcp.job.session import Session

CLOSE_WAIT_S = 10.0
"""How long an engine's close waits for the agent to receive a notice that came just before."""
SAME_NOTICE_S = 5.0
"""A SIGTERM that follows another one so soon may be the launcher's copy of it."""
_BY_CALL = 0
"""Stands for :meth:`Leaving.ask` among the signals; no signal has this number."""
_END = 255
"""Makes the thread end; no signal has this number either."""
_NOBODY = 2**62
_NO_LIMIT = _NOBODY - 1

log = logging.getLogger(__name__)


class Leaving:
    """The preemption of one rank; ``engine.leave_on`` returns it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pid = os.getpid()
        self._is_forwarded = dist.is_torchelastic_launched()
        """torchrun, or ``tieredckpt run``, forwards its own notice to this rank."""
        self._previous: dict[int, Any] = {}
        self._deadlines: dict[int, float | None] = {}
        self._until_s: dict[int, float] = {}
        """By signal that came, its deadline on the monotonic clock."""
        self._woken_until_s: dict[int, float] = {}
        """The same for signals that woke the thread, perhaps before their handler has run."""
        self._came_s: dict[int, float] = {}
        """By signal, when it came first."""
        self._agreed_until_s: float | None = None
        self._wake: socket.socket | None = None
        self._woken: socket.socket | None = None
        """The other end of ``_wake``, from which the thread reads."""
        self._has_wakeup = False
        """The interpreter writes the number of each signal that it gets into ``_wake``."""
        self._thread: threading.Thread | None = None
        self._closed = False
        self.flushed: Flushed | None = None
        """The agent's last answer: the tiers that it fills, and an estimate of the time that it
        needs. None: it was not asked, or has not answered yet."""
        self.error: TieredCkptError | OSError | None = None
        """Why the agent could not be asked, or cannot flush."""

    # --- the notice ------------------------------------------------------------------------------

    def on(self, numbers: tuple[int, ...], deadline_s: float | None) -> Leaving:
        """See ``Engine.leave_on``."""
        check_deadline(deadline_s)
        numbers = tuple(dict.fromkeys(numbers))
        if numbers and threading.current_thread() is not threading.main_thread():
            raise UsageError("Python handles signals in the main thread only: call leave_on there")
        before = {number: self._handler_of(number) for number in numbers}
        if self._thread is None:
            self._start()
        if numbers:
            self._session.handles_signals = True
            self._install_wakeup()
        for number, previous in before.items():
            self._previous[number] = previous  # first, so that the handler finds it
            self._deadlines[number] = deadline_s
            try:
                signal.signal(number, self._handle)
            except OSError as error:  # SIGKILL and SIGSTOP
                for each in before.keys() & self._previous.keys():
                    if signal.getsignal(each) == self._handle:
                        signal.signal(each, before[each])
                    del self._previous[each], self._deadlines[each]
                raise UsageError(f"{_name(number)} cannot be handled: {error}") from error
        return self

    def _handler_of(self, number: int) -> Any:
        if number in self._previous:
            raise UsageError(f"this engine leaves on {_name(number)} already")
        try:
            found = signal.getsignal(number)
        except ValueError as error:
            raise UsageError(f"{number!r} is no signal") from error
        if found is None:
            raise UsageError(
                f"{_name(number)} has a handler that is not Python's and cannot be chained to"
            )
        return found

    def ask(self, deadline_s: float | None = None) -> None:
        """Act as on a signal, for a notice that is none. From any thread; does not block.

        Args:
            deadline_s: How many seconds are left; None: not known. The earliest of several
                deadlines counts.

        Raises UsageError: The deadline is not valid, or this process was forked off the engine's.
        """
        check_deadline(deadline_s)
        if os.getpid() != self._pid:
            raise UsageError("call ask in the process that opened the engine")
        self._record(_BY_CALL, deadline_s)

    def _record(self, number: int, deadline_s: float | None) -> None:
        until_s = time.monotonic() + (math.inf if deadline_s is None else deadline_s)
        known_s = (self._until_s.get(number, math.inf), self._woken_until_s.get(number, math.inf))
        self._came_s.setdefault(number, time.monotonic())
        self._until_s[number] = min(until_s, *known_s)
        self._wake_thread(number)

    def _wake_thread(self, number: int) -> None:
        if self._wake is not None:
            with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
                self._wake.send(bytes((number,)))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = _live(self._previous[number], number)
        # A forked child (a data loader's worker) inherits handler and socket; it does not leave.
        if self._closed or os.getpid() != self._pid or number in self._until_s:
            if not self._is_same_notice(number):
                _as_before(previous, number, frame)
            return
        self._record(number, self._deadlines[number])
        # Python's own for SIGINT would raise KeyboardInterrupt: the second signal does that.
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _is_same_notice(self, number: int) -> bool:
        """Whether this SIGTERM may be a notice that came: the scheduler signals each process, and
        the launcher forwards what it got itself.
        """
        may_come = number == signal.SIGTERM and self._is_forwarded and os.getpid() == self._pid
        return may_come and time.monotonic() - self._came_s.get(number, -math.inf) < SAME_NOTICE_S

    # --- the agent -------------------------------------------------------------------------------

    def _start(self) -> None:
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._thread = threading.Thread(
            target=self._listen, args=(self._woken,), name="tieredckpt-leaving", daemon=True
        )
        self._thread.start()

    def _install_wakeup(self) -> None:
        """Have the interpreter wake the thread, unless other code (asyncio) uses its wake-up."""
        if self._has_wakeup or self._wake is None:
            return
        before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._has_wakeup = before == -1
        if self._has_wakeup:
            _waking.add(self)
        else:
            signal.set_wakeup_fd(before)

    def _restore_wakeup(self) -> None:
        if self._has_wakeup and self._wake is not None:
            found = signal.set_wakeup_fd(-1)
            if found not in (-1, self._wake.fileno()):
                signal.set_wakeup_fd(found)  # other code installed its own since
        self._has_wakeup = False

    def _listen(self, woken: socket.socket) -> None:
        while numbers := woken.recv(64):
            new = {each for each in numbers if self._is_news(each)}
            for number in new & self._deadlines.keys():
                deadline_s = self._deadlines[number]
                left_s = math.inf if deadline_s is None else deadline_s
                self._woken_until_s[number] = time.monotonic() + left_s
            if new:
                self._flush()
            if _END in numbers:
                return

    def _is_news(self, number: int) -> bool:
        """Whether the thread was not woken for this one before, and the engine handles it."""
        if number == _BY_CALL:
            return True
        return number in self._deadlines and number not in self._woken_until_s

    def _flush(self) -> None:
        untils_s = (*tuple(self._until_s.values()), *self._woken_until_s.values())
        left_s = _left(min(untils_s, default=math.inf))
        try:
            self.flushed = self._session.client.call(Flush(left_s=left_s), within_s=left_s)
        except (TieredCkptError, OSError) as error:
            self.error = error
            log.warning("leaving, but nothing is flushed: %s", error)
            return
        self.error = None
        steps = ", ".join(f"{each.stream} {each.step}" for each in self.flushed.saves)
        estimate_s = self.flushed.estimate_s
        log.warning(
            "leaving%s: the agent copies %s to %s now (%s)",
            "" if left_s is None else f" in {left_s:.0f} s",
            steps,
            ", ".join(self.flushed.tiers),
            "its speed is not known" if estimate_s is None else f"about {estimate_s:.1f} s",
        )

    # --- the ranks -------------------------------------------------------------------------------

    @property
    def asked(self) -> bool:
        """Whether this rank received a notice."""
        return bool(self._until_s)

    @property
    def left_s(self) -> float | None:
        """Seconds until the first deadline of any rank, as far as known; None: there is none."""
        agreed_s = math.inf if self._agreed_until_s is None else self._agreed_until_s
        return _left(min(*tuple(self._until_s.values()), agreed_s, math.inf))

    def agree(self) -> bool:
        """See ``Engine.should_leave``. Collective."""
        ranks = self._session.ranks
        if self._agreed_until_s is not None:
            return True
        ranks.check_group()
        if ranks.world_size == 1:
            return self.asked
        mine = _NOBODY
        if self.asked:
            left_s = self.left_s
            mine = _NO_LIMIT if left_s is None else min(int(left_s * 1000), _NO_LIMIT)
        soonest = torch.tensor([mine], dtype=torch.int64)
        try:
            dist.all_reduce(soonest, dist.ReduceOp.MIN, group=ranks.group)
        except RuntimeError as error:  # what torch raises for a lost peer and for its time-out
            raise RankError(
                f"the ranks cannot agree on leaving, one is gone or did not ask: {error}", rank=None
            ) from error
        found = int(soonest.item())
        if found == _NOBODY:
            return False
        limit_s = math.inf if found == _NO_LIMIT else found / 1000
        self._agreed_until_s = time.monotonic() + limit_s
        return True

    def close(self) -> None:
        """Put the handlers back, unless others were installed since. Idempotent.

        The launcher's copy of a notice may still come; it is ignored.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True  # a handler that cannot be removed only chains from now on
        if threading.current_thread() is threading.main_thread():
            for number, previous in self._previous.items():
                if signal.getsignal(number) == self._handle:
                    handler = _live(previous, number)
                    if self._is_same_notice(number):
                        handler = _AfterNotice(handler, self._came_s[number])
                    signal.signal(number, handler)
            self._restore_wakeup()
        self._wake_thread(_END)
        if self._thread is not None:
            self._thread.join(CLOSE_WAIT_S)
        if self._wake is None or self._woken is None:
            return
        if self._has_wakeup:  # only the main thread could have restored it
            _written_to.append((self._wake, self._woken))
            return
        self._wake.close()
        if self._thread is not None and not self._thread.is_alive():
            self._woken.close()


_waking: weakref.WeakSet[Leaving] = weakref.WeakSet()
_written_to: list[tuple[socket.socket, socket.socket]] = []
"""Kept open: the interpreter writes to their numbers, whichever file has them."""


def _detach_child() -> None:
    """A signal to a forked child must not wake the parent, with which it shares the socket."""
    for each in list(_waking):
        each._restore_wakeup()


os.register_at_fork(after_in_child=_detach_child)


def _live(handler: Any, number: int) -> Any:
    """``handler``; if it is that of an engine that was closed, the one before it."""
    while getattr(handler, "__func__", None) is Leaving._handle and handler.__self__._closed:
        handler = handler.__self__._previous[number]
    return handler


class _AfterNotice:
    """A handler that ignores the launcher's copy of a notice, and then acts as the one before."""

    def __init__(self, stands_for: Any, came_s: float) -> None:
        self.stands_for = stands_for
        self._came_s, self._pid = came_s, os.getpid()

    def is_same_notice(self) -> bool:
        late_s = time.monotonic() - self._came_s
        return late_s < SAME_NOTICE_S and os.getpid() == self._pid

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.is_same_notice():
            _as_before(self.stands_for, number, frame)


def _as_before(
    previous: Callable[[int, FrameType | None], Any] | int, number: int, frame: FrameType | None
) -> None:
    if callable(previous):
        previous(number, frame)
    elif previous == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _left(until_s: float) -> float | None:
    return None if until_s == math.inf else max(0.0, until_s - time.monotonic())


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
