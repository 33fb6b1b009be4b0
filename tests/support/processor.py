"""Processor seconds of a test process and of all that it starts, forked or not, ended or not.

``resource.getrusage`` counts only children that were waited for, and an agent has no parent that
waits. A control group (version 2) counts all; ``cpu.stat`` is in each, whatever its controllers.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NAME = "tck-test-"


def own_group() -> Path | None:
    """The control group that this process is in; None: this machine has none of version 2."""
    lines = [line.split() for line in Path("/proc/self/mounts").read_text("utf-8").splitlines()]
    roots = [Path(where) for _, where, kind, *_ in lines if kind == "cgroup2"]
    inside = [
        line.removeprefix("0::").lstrip("/")
        for line in Path("/proc/self/cgroup").read_text("utf-8").splitlines()
        if line.startswith("0::")
    ]
    return roots[0] / inside[0] if roots and inside else None


def remove_groups() -> None:
    """Those of test processes that have ended; the kernel keeps any that is in use."""
    group = own_group()
    # The deepest first: a run inside of a test has its groups inside of that test's.
    for left in sorted(group.rglob(f"{_NAME}*"), reverse=True) if group is not None else ():
        with contextlib.suppress(OSError):
            left.rmdir()


class Processor:
    """Counts from now on, until it is closed."""

    def __init__(self) -> None:
        self._group: Path | None = None
        parent = own_group()
        if parent is not None:
            with contextlib.suppress(OSError):  # only root may, as a rule
                group = parent / f"{_NAME}{os.getpid()}"
                group.mkdir()
                (group / "cgroup.procs").write_text(str(os.getpid()))
                self._group = group

    def seconds(self) -> float | None:
        """Of user and system together; None: this machine does not let us count."""
        if self._group is None:
            return None
        try:
            lines = (self._group / "cpu.stat").read_text("utf-8").splitlines()
        except OSError:  # somebody has moved this process, and removed the group
            return None
        return int(lines[0].removeprefix("usage_usec ")) / 1e6

    def close(self) -> None:
        """Back to where it was, so that the group can go; it stays while others are in it."""
        if self._group is not None:
            with contextlib.suppress(OSError):
                (self._group.parent / "cgroup.procs").write_text(str(os.getpid()))
                self._group.rmdir()
