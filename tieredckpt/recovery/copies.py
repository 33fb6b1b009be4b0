"""One copy of a segment on this host, opened at its first use and read in the fastest way.

Nothing is verified here. A copy may be truncated, unreadable or gone at any time; every failure
is a :class:`CopyError`, after which the caller reads another copy. Bytes are read by descriptor,
since access to a mapping of a file that shrinks is SIGBUS. A mapping is used only if the caller
has a populated one, and after the file's size was checked.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieredckpt.errors import AgentError, IntegrityError, NotFoundError, TierUnavailableError
from tieredckpt.format.segment import PAGE_BYTES
from tieredckpt.recovery.blocks import BlockTask, ScratchPool, land, spread

if TYPE_CHECKING:
    from tieredckpt.recovery.plan import SourceRef

READ_ERRORS_MAX = 16
"""After so many failed reads a copy is not read any more: a dying disk takes seconds for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSource:
    """One copy, opened for reading. Its receiver closes ``fd``, which ends its lease.

    ``direct``: ``fd`` has O_DIRECT set. ``view`` is a populated mapping of the same file that
    begins at the segment's start, or None.
    """

    fd: int
    direct: bool
    view: memoryview | None = None


class CopyError(Exception):
    """This copy cannot provide these bytes; ``reason`` explains why."""

    def __init__(self, reason: str, *, damaged: bool, may_answer: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.damaged = damaged
        """The copy is bad, and not just unreachable."""
        self.may_answer = may_answer
        """Another attempt may succeed."""


class Copy:
    """A copy of a segment. Thread-safe.

    Args:
        source: The copy.
        size_bytes: The segment's size.
        open_source: Opens the copy; called at most once.
    """

    tail_bytes = PAGE_BYTES
    """Size of the first read at the end, where the trailer is."""

    def __init__(
        self, source: SourceRef, size_bytes: int, open_source: Callable[[SourceRef], OpenedSource]
    ) -> None:
        self.source = source
        self._size_bytes = size_bytes
        self._open_source = open_source
        self._lock = threading.Lock()
        self._opened: OpenedSource | None = None
        self._failure: CopyError | None = None
        self._read_errors = 0
        self._closed = False

    def open(self) -> OpenedSource:
        """The opened copy. Raises CopyError: at once, if an earlier failure is permanent."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._opened is None:
                assert not self._closed, "a closed copy was used"
                try:
                    self._opened = self._open_source(self.source)
                except AgentError:
                    raise  # not about this copy: the reader must not use a worse one
                except (NotFoundError, TierUnavailableError, OSError, IntegrityError) as error:
                    damaged = isinstance(error, IntegrityError)
                    self._failure = CopyError(f"cannot be opened: {error}", damaged=damaged)
                    raise self._failure from error
            return self._opened

    def check_size(self, stop: int) -> None:
        """Raise CopyError unless bytes up to ``stop`` exist now."""
        try:
            size = os.fstat(self.open().fd).st_size
        except OSError as error:
            raise self._unreadable(error) from error
        if size < stop:
            raise CopyError(
                f"truncated: {size} of {self._size_bytes} bytes are there", damaged=True
            )

    def read_into(self, start: int, into: memoryview, *, needed: int | None = None) -> None:
        """Fill ``into`` from ``start``, by descriptor. Raises CopyError.

        For a copy that is open with O_DIRECT, offset, size and memory must be page-aligned. Then
        ``needed`` is the number of bytes that must exist.
        """
        opened = self.open()
        wanted = len(into) if needed is None else needed
        done = 0
        while done < wanted:
            try:
                count = os.preadv(opened.fd, [into[done:]], start + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self._clear_direct(opened.fd):
                    continue
                raise self._unreadable(error) from error
            if count == 0:
                raise CopyError(
                    f"truncated: it ends at byte {start + done} of {self._size_bytes}",
                    damaged=True,
                )
            done += count
            if done < wanted and opened.direct and done % PAGE_BYTES:
                # A read returns part of a page only at the end of the file.
                raise CopyError(f"truncated: it ends at byte {start + done}", damaged=True)

    def land(self, task: BlockTask, expected: bytes, scratch: ScratchPool) -> bytes:
        """Read blocks into their destinations in the fastest way; returns their digests.

        Raises CopyError: they cannot be read.
        """
        opened = self.open()
        view = opened.view
        # Bytes with several destinations are digested before they are copied. That must not happen
        # in memory where another process could change them in between.
        if view is not None and view.nbytes >= self._size_bytes and not task.overlaps():
            self.check_size(task.stop)
            return spread(task, view, 0, expected)

        def read(start: int, into: memoryview) -> None:
            self.read_into(start, into, needed=min(len(into), task.stop - start))

        return land(task, read, expected, scratch, pages=opened.direct)

    def _clear_direct(self, fd: int) -> bool:
        """Use the page cache: some file systems let O_DIRECT be set and refuse the read."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if not flags & os.O_DIRECT:
            return False
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return True

    def _unreadable(self, error: OSError) -> CopyError:
        # Unreachable, not damaged: a medium that fails now may answer later, and a quarantine mark
        # on the only copy would be permanent.
        failure = CopyError(f"cannot be read: {error.strerror or error}", damaged=False)
        with self._lock:
            self._read_errors += 1
            if self._read_errors >= READ_ERRORS_MAX:
                self._failure = CopyError(
                    f"not read any more after {READ_ERRORS_MAX} failed reads: {failure.reason}",
                    damaged=False,
                )
        return failure

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            opened, self._opened = self._opened, None
            self._closed = True
        if opened is not None:
            os.close(opened.fd)
