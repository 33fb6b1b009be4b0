"""Named places where tests make a process die, stop or fail.

``TIEREDCKPT_FAILPOINTS="agent.commit.before_manifest=kill,save.copy=stop@2"`` arms points by
name: the action happens when the point is reached for the n-th time (1 unless given). Without
the variable a point costs one test of an empty dict. Actions: ``kill`` (SIGKILL to this
process), ``stop`` (SIGSTOP), ``slow`` (sleep :data:`SLOW_S`), ``enospc`` and ``eio`` (raise that
OSError).
"""

from __future__ import annotations

import errno
import os
import signal
import time

SLOW_S = 0.2
"""How long ``slow`` takes: much longer than any request, much shorter than any deadline."""

_ACTIONS = ("kill", "stop", "slow", "enospc", "eio")

_armed: dict[str, tuple[str, int]] = {}
_reached: dict[str, int] = {}


def arm(spec: str) -> None:
    """Arm the points of ``spec``; replaces what was armed. Raises ValueError if malformed."""
    _armed.clear()
    _reached.clear()
    for part in filter(None, spec.split(",")):
        name, sep, action = part.partition("=")
        action, _, nth = action.partition("@")
        if not sep or action not in _ACTIONS:
            raise ValueError(f"malformed failpoint {part!r}: want NAME={'|'.join(_ACTIONS)}[@N]")
        _armed[name] = (action, int(nth or "1"))


def reach(name: str) -> None:
    """Carry out the action armed for ``name``, if any."""
    if not _armed or name not in _armed:
        return
    action, nth = _armed[name]
    _reached[name] = _reached.get(name, 0) + 1
    if _reached[name] != nth:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "slow":
        time.sleep(SLOW_S)
    else:
        code = errno.ENOSPC if action == "enospc" else errno.EIO
        raise OSError(code, os.strerror(code), f"failpoint {name}")


arm(os.environ.get("TIEREDCKPT_FAILPOINTS", ""))
