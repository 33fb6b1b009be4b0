"""A layer between a process and its operating system that fails on demand, and a clock that jumps.

Installed in an agent or a trainer that the tests forked, it makes the system calls of Python's
``os`` below one folder raise a certain error, once or until :func:`mend_os`. What is under test
does not know of it.
"""

from __future__ import annotations

import errno
import functools
import os
import time
from collections.abc import Callable
from typing import Any

_WRITE = ("write", "pwrite", "posix_fallocate", "ftruncate")
_NAME = ("link", "mkdir", "rename", "replace")
# Which calls a medium in that state refuses.
CALLS = {
    "enospc": ("create", *_WRITE, *_NAME),
    "eio": ("open", "create", *_WRITE, *_NAME, "unlink", "fsync", "pread", "preadv", "scandir"),
    "erofs": ("create", "unlink", *_NAME),
    "emfile": ("open", "create", "scandir"),
}
_BY_FD = frozenset((*_WRITE, "fsync", "pread", "preadv"))
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_real: dict[str, Any] = {}


class _Rule:
    def __init__(self, folders: list[str], fault: str, nth: int, lasting: bool) -> None:
        self.folders, self.fault, self.nth, self.lasting = tuple(folders), fault, nth, lasting
        self.met = self.failed = 0

    def look(self, name: str, args: tuple[Any, ...]) -> None:
        """Raise if this call is one of those that fail."""
        if name == "open" and len(args) > 1 and args[1] & _WRITES:
            name = "create"
        if name not in CALLS[self.fault]:
            return
        place = args[0] if args else ""
        if name in _BY_FD:
            place = os.readlink(f"/proc/self/fd/{place}")
        elif isinstance(place, int):
            return
        if not os.fspath(place).startswith(self.folders):
            return
        self.met += 1
        if self.met == self.nth or (self.lasting and self.met > self.nth):
            self.failed += 1
            code = getattr(errno, self.fault.upper())
            raise OSError(code, os.strerror(code), f"faulty os: {name}")


_rule: _Rule | None = None


def break_os(folders: list[str], fault: str, nth: int, lasting: bool) -> None:
    """From the ``nth`` fitting call below ``folders`` on, or only then, raise ``fault``."""
    global _rule
    names = {name for calls in CALLS.values() for name in calls} - {"create"}
    for name in names if not _real else ():
        _real[name] = getattr(os, name)
        setattr(os, name, _watched(name, _real[name]))
    _rule = _Rule(folders, fault, nth, lasting)


def _watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(*args: Any, **options: Any) -> Any:
        if _rule is not None:
            _rule.look(name, args)
        return real(*args, **options)

    return call


def failed_calls() -> int:
    """How many calls have failed since :func:`break_os`."""
    return _rule.failed if _rule is not None else 0


def mend_os() -> None:
    """Nothing fails any more."""
    global _rule
    _rule = None


def jump_clock(seconds: float) -> None:
    """Set this process's wall clock forward or back; the monotonic one goes on."""
    from tieredckpt.agent.peering.attempts import Attempts

    now = time.time
    time.time = lambda: now() + seconds
    defaults = Attempts.__init__.__kwdefaults__
    if defaults is not None and "now_s" in defaults:
        defaults["now_s"] = time.time


def limit_fds(spare: int) -> tuple[int, int]:
    """Leave this process ``spare`` free file descriptors; returns the limits from before."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1 + spare, before[1]))
    return before


def unlimit_fds(before: tuple[int, int]) -> None:
    """Take back :func:`limit_fds`."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, before)
