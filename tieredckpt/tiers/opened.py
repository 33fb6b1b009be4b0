"""An object that lies in a file, opened for reading: by the memory tier and by the file tier."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading

from tieredckpt.tiers.base import RangedObject, unavailable

ALIGN_BYTES = 4096
"""What direct I/O is aligned to; no device in use asks for more."""

_SCRATCH_BYTES = 1 << 20


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
        direct: Whether ``fd`` has O_DIRECT set. Reads that are not aligned take a detour through
            a buffer of 1 MiB, one at a time.
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
                take = min(len(into) - done, _SCRATCH_BYTES - skip)
                whole = -(-(skip + take) // ALIGN_BYTES) * ALIGN_BYTES
                # The last page may end beyond the file: only `skip + take` bytes must be there.
                self._fill(at - skip, self._scratch[:whole], skip + take)
                into[done : done + take] = self._scratch[skip : skip + take]
                done += take

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
