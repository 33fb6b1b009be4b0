"""What the demos share: one start of training as its journal tells it, and ending processes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Start:
    """One start of training, as its journal tells it."""

    name: str
    journal: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    ended: str = "finished"
    _read: int = 0

    def refresh(self) -> None:
        """Read what was written since the last time; an unfinished last line waits."""
        if not self.journal.exists():
            return
        with self.journal.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        self.events += [json.loads(line) for line in whole.splitlines()]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """All events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def losses(self) -> dict[int, str]:
        """Loss by step, as exact hexadecimal."""
        return {event["step"]: event["loss"] for event in self.of("step")}

    @property
    def last_step(self) -> int:
        """The newest step that was finished."""
        steps = self.of("step")
        return int(steps[-1]["step"]) if steps else 0


def compare(reference: Start, others: list[Start]) -> tuple[int, list[tuple[str, int]]]:
    """Number of losses compared, and (start, step) of those that differ in any bit."""
    expected = reference.losses
    compared = [(start.name, step, loss) for start in others for step, loss in start.losses.items()]
    return len(compared), [(name, step) for name, step, loss in compared if loss != expected[step]]


def children_of(pid: int) -> list[int]:
    """Process ids of the children of ``pid``."""
    found = []
    for each in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in each.read_text().split()]
    return found


def processes_naming(folder: Path) -> list[int]:
    """Process ids, other than ours, that have ``folder`` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it ended meanwhile
                if os.fsencode(folder) in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def kill(pid: int) -> None:
    """SIGKILL, and wait until the process is gone; nothing if it is."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        wait_for_end(handle)
    finally:
        os.close(handle)


def wait_for_end(pidfd: int) -> None:
    """Until the process of a pidfd has ended; at most 10 s."""
    if not select.select([pidfd], [], [], 10)[0]:
        raise RuntimeError("a process outlived SIGKILL for 10 s")
