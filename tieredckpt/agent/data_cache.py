"""The data cache of this host: the agent counts its files and deletes them, ranks write them.

Nothing but the files is needed, so an agent that starts again goes on at once.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tieredckpt.rpc.messages.agent import ReserveData

_NAME = re.compile(r"(\d{1,15})(?:\.([0-9a-f]{32}))?", re.ASCII)


class _File(NamedTuple):
    mtime_ns: int
    path: Path
    step: int
    size_bytes: int


class DataCache:
    """See the module. Thread-safe.

    Args:
        folder: ``data`` in the runtime folder; one folder per namespace, in it one per stream.
        is_live: Whether a session's process still holds its lease.
    """

    def __init__(self, folder: Path, is_live: Callable[[str], bool]) -> None:
        self._folder, self._is_live = folder, is_live
        self._lock = threading.Lock()
        self._streams: dict[Path, tuple[str, range]] = {}
        """By a stream's folder, the session that wrote last, and the steps that it needs."""

    def reserve(self, namespace: str, request: ReserveData) -> bool:
        """See :class:`ReserveData`."""
        folder = self._folder / namespace / request.stream
        with self._lock:
            self._streams = {k: v for k, v in self._streams.items() if self._is_live(v[0])}
            needed = range(request.position, request.position + request.ahead + 1)
            self._streams[folder] = request.session_id, needed
            files = self._files("*")
            left_bytes = request.capacity_bytes - request.size_bytes
            left_bytes -= sum(file.size_bytes for file in files)
            for file in files:
                is_own = file.path.parent == folder
                is_old = is_own and file.step <= request.position - request.behind
                if is_old or (left_bytes < 0 and self._is_spare(file)):
                    file.path.unlink(missing_ok=True)
                    left_bytes += file.size_bytes
            if left_bytes >= 0:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                path = folder / f"{request.step}.{request.session_id}"
                path.unlink(missing_ok=True)  # a thread that was given up may still write to it
                with path.open("xb") as made:
                    made.truncate(request.size_bytes)
            return left_bytes >= 0

    def _is_spare(self, file: _File) -> bool:
        """Whether its stream does not need its step, or no process uses the stream any more."""
        session_id, needed = self._streams.get(file.path.parent, ("", range(0)))
        return file.step not in needed or not self._is_live(session_id)

    def count(self, namespace: str) -> int:
        """Bytes of all files; those that processes did not finish before they ended are deleted."""
        with self._lock:
            return sum(file.size_bytes for file in self._files(namespace))

    def purge(self, namespace: str) -> None:
        """Delete all entries of a namespace."""
        with self._lock:
            shutil.rmtree(self._folder / namespace, ignore_errors=True)

    def _files(self, namespace: str) -> list[_File]:
        """Of a namespace, or of all: "*". The oldest first."""
        found = []
        for path in self._folder.glob(f"{namespace}/*/*"):
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            if match[2] and not self._is_live(match[2]):
                path.unlink(missing_ok=True)
                continue
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                info = path.lstat()
                found.append(_File(info.st_mtime_ns, path, int(match[1]), info.st_size))
        return sorted(found)
