"""Objects in files: opened for reading, and written with direct I/O while their source is read.

A large object is written through a few buffers in turn: the source fills them in the caller's
thread (which reads and digests), and one worker thread writes them; both release the GIL. Direct
I/O is used because buffered writing plus fsync reached a tenth of the disk's speed, and because a
spill must not push training's pages out of the cache.

:class:`CopyPool` provides the threads for saves and loads of a trainer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import stat
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tieredckpt import failpoints
from tieredckpt.errors import IntegrityError
from tieredckpt.storage.base import ByteSource, RangedObject, unavailable


def denied(error: OSError) -> str:
    """If access to a path was denied, whose it is, to be added to a message; else "".

    An error without a path gives "", too. Names the nearest folder or file that can be looked at.
    """
    path = error.filename if isinstance(error, PermissionError) else None
    for each in (Path(path), *Path(path).parents) if isinstance(path, str | Path) else ():
        with contextlib.suppress(OSError):
            info = os.lstat(each)
            owner = f"user {info.st_uid} (mode {stat.S_IMODE(info.st_mode):04o})"
            return f"; {each} belongs to {owner}, this is user {os.geteuid()}: change owner or mode"
    return ""


class CopyPool:
    """``threads - 1`` persistent threads; the one that calls :meth:`run` is the last.

    Args:
        threads: At least 1. Threads start when they are first needed.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._executor = ThreadPoolExecutor(threads - 1, "tieredckpt-copy") if threads > 1 else None

    def run(self, work: Callable[[int], None], count: int) -> None:
        """Call ``work(0)`` to ``work(count - 1)``, each once, spread over the threads.

        Returns when no thread executes ``work`` any more. If one call raises, no further ones
        begin, and the first exception is raised here.
        """
        numbers = itertools.count()  # next() is one bytecode of C: each number is drawn once
        stopped = False

        def drain() -> None:
            nonlocal stopped
            try:
                while not stopped and (number := next(numbers)) < count:
                    work(number)
            except BaseException:
                stopped = True
                raise

        helpers: list[Future[None]] = []
        if self._executor is not None:
            # RuntimeError: the pool was closed, or the interpreter is ending. Scripts may end while
            # a save runs in the background; Python waits for it, and this thread can do it alone.
            with contextlib.suppress(RuntimeError):
                for _ in range(min(self.threads, count) - 1):
                    helpers.append(self._executor.submit(drain))  # noqa: PERF401
        try:
            drain()
        finally:
            # Without a deadline: a helper only copies memory, and returning earlier would pass on a
            # slot that it still writes to.
            failures = [e for e in (each.exception() for each in helpers) if e is not None]
        if failures:
            raise failures[0]

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)


ALIGN_BYTES = 4096
"""Alignment of direct I/O; no device in use needs more."""

RUN_BYTES = 4 << 20
"""Bytes per write, and per call of the source: one block. Larger ones measured no faster."""

NUM_BUFFERS = 4
"""Two would do if reading and writing took the same time for every run; they do not."""

_SCRATCH_BYTES = 1 << 20


def open_regular(path: Path, flags: int, what: str) -> int:
    """A fresh descriptor of a file, without following links or waiting for anything.

    Raises:
        IntegrityError: It is not a regular file; ``what`` begins the error's text.
        OSError: It cannot be opened.
    """
    try:
        # NONBLOCK: opening a pipe in its place must not wait for the other end.
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise IntegrityError(f"{what} is not a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise IntegrityError(f"{what} is not a regular file")
    return fd


def aligned_buffer(size: int) -> memoryview:
    """``size`` bytes of anonymous, page-aligned, resident memory; freed with the last view of it.

    Populated at once: a first touch page by page is ten times slower than a disk.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return memoryview(mmap.mmap(-1, size, flags=flags))


def is_aligned(offset: int, into: memoryview) -> bool:
    """Whether direct I/O can read from ``offset`` straight into ``into`` (not empty, writable)."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(into))
    return not (offset | len(into) | address) & (ALIGN_BYTES - 1)


def set_direct(fd: int) -> bool:
    """Switch ``fd``'s open file description to direct I/O; False if its file system refuses.

    A file system may agree here and refuse the first transfer all the same.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    return True


def clear_direct(fd: int) -> None:
    """Switch ``fd``'s open file description back to buffered I/O."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


class OpenFile(RangedObject):
    """Ranged reads from a descriptor, which this object owns.

    Args:
        fd: Open for reading; a lock on it is the lease. Closed by :meth:`close`.
        size: Bytes that can be read.
        tier: Name of the tier, for errors.
        key: Key of the object, for errors.
        direct: Whether ``fd`` has O_DIRECT set. Unaligned reads then use a buffer of 1 MiB, one
            read at a time.
    """

    def __init__(self, fd: int, size: int, *, tier: str, key: str, direct: bool = False) -> None:
        super().__init__(tier, key, size)
        self._fd = fd
        self._direct = direct
        self._lock = threading.Lock()
        self._scratch: memoryview | None = None

    def _read(self, offset: int, into: memoryview) -> None:
        if self._direct and not is_aligned(offset, into):
            self._read_detour(offset, into)
        else:
            self._fill(offset, into, len(into))

    def _read_detour(self, offset: int, into: memoryview) -> None:
        with self._lock:
            if self._scratch is None:
                self._scratch = aligned_buffer(_SCRATCH_BYTES)
            done = 0
            while done < len(into):
                at = offset + done
                skip = at % ALIGN_BYTES
                count = min(len(into) - done, _SCRATCH_BYTES - skip)
                pages = -(-(skip + count) // ALIGN_BYTES) * ALIGN_BYTES
                # The last page may end beyond the file: only `skip + count` bytes must be there.
                self._fill(at - skip, self._scratch[:pages], skip + count)
                into[done : done + count] = self._scratch[skip : skip + count]
                done += count

    def _fill(self, offset: int, into: memoryview, needed: int) -> None:
        done = 0
        while done < needed:
            try:
                count = os.preadv(self.fileno(), [into[done:]], offset + done)
            except OSError as error:
                if self._direct and error.errno == errno.EINVAL:
                    clear_direct(self.fileno())
                    self._direct = False
                    continue
                message = f"cannot read {self._key} from tier {self._tier}: {error.strerror}"
                raise unavailable(self._tier, message, key=self._key) from error
            if count == 0:
                at = offset + done
                raise self._damaged(f"was truncated at {at} bytes", expected=self.size, actual=at)
            done += count

    def fileno(self) -> int:
        if self._fd < 0:
            raise self._is_closed()
        return self._fd

    @property
    def direct(self) -> bool:
        return self._direct

    def close(self) -> None:
        super().close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Output:
    """A file that is written in runs, with direct I/O until the file system refuses it.

    Args:
        fd: Open for writing; owned by the caller.
        direct: Whether it has O_DIRECT set.
    """

    def __init__(self, fd: int, *, direct: bool) -> None:
        self._fd = fd
        self.direct = direct
        self.refused = False
        """Whether the file system refused a direct write with EINVAL."""

    def write(self, offset: int, run: memoryview) -> None:
        """Write all of ``run`` at ``offset``. Raises OSError; how much was written is unknown."""
        while len(run):
            if self.direct and (offset | len(run)) % ALIGN_BYTES:
                self._go_buffered()  # the last bytes of an object that does not end on a page
            failpoints.reach("tier.file.write")
            try:
                count = os.pwrite(self._fd, run, offset)
            except OSError as error:
                if not self.direct or error.errno != errno.EINVAL:
                    raise
                self.refused = True
                self._go_buffered()
                continue
            if count == 0:
                raise OSError(errno.EIO, "the file system wrote nothing")
            run, offset = run[count:], offset + count

    def _go_buffered(self) -> None:
        clear_direct(self._fd)
        self.direct = False


def write_from(source: ByteSource, output: Output, buffers: list[memoryview]) -> None:
    """Copy all of ``source`` to ``output``; reading is ahead of writing.

    ``buffers`` are aligned, of :data:`RUN_BYTES` each; missing ones are added when needed, up to
    :data:`NUM_BUFFERS`. Nothing is synced. No write is in progress when this returns or raises.

    Raises:
        OSError: A write failed.
        TieredCkptError: What the source raised.
    """
    with ThreadPoolExecutor(1, "tieredckpt-write") as worker:
        writing: deque[Future[None]] = deque()
        try:
            for number, offset in enumerate(range(0, source.size, RUN_BYTES)):
                if len(writing) == NUM_BUFFERS:
                    writing.popleft().result()  # its buffer is the next one
                place = number % NUM_BUFFERS
                if place == len(buffers):
                    buffers.append(aligned_buffer(RUN_BYTES))
                run = buffers[place][: min(RUN_BYTES, source.size - offset)]
                source.read_into(offset, run)
                writing.append(worker.submit(output.write, offset, run))
            while writing:
                writing.popleft().result()
        finally:
            for each in writing:
                each.cancel()  # after a failure nothing more is written
