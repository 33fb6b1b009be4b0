"""Mapped memory of a trainer: slots are mapped once and populated ahead of time.

Page faults make a save slow, not copies: a first touch runs at 0.3-1.4 GB/s, a warm copy at 14-20.
So mappings can be populated beforehand, in pieces, with the GIL released. Only trainers map slots;
the agent reads them by descriptor.

:mod:`mmap` of the standard library is not used: it keeps a duplicate of the descriptor that no
at-fork handler can close, so a forked data loader would keep a slot's lock after its trainer has
died.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

import numpy as np

from tieredckpt.storage.memory.slot import check_slot

MADV_POPULATE_WRITE = 23
"""Since Linux 5.14; returns EFAULT where a plain touch would be SIGBUS."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
# Both are the C library's memmove; calls through a PyDLL keep the GIL.
_libc_with_gil = ctypes.PyDLL(None)
copy_small = _libc_with_gil.memmove
"""``copy_small(to_address, from_address, size_bytes)``."""
copy_large = _libc.memmove
"""The same with the GIL released: for :data:`SMALL_COPY_BYTES` and more."""
fill_small = _libc_with_gil.memset
"""``fill_small(address, byte, size_bytes)``."""
copy_small.restype = copy_large.restype = fill_small.restype = None
copy_small.argtypes = copy_large.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
fill_small.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)

SMALL_COPY_BYTES = 32 << 10
"""Below this, releasing and re-taking the GIL costs more than the copy."""

_MAP_FAILED = ctypes.c_void_p(-1).value


def address_of(buffer: memoryview | bytes | bytearray) -> int:
    """The address of a contiguous buffer, which the caller keeps alive while it uses it."""
    if not memoryview(buffer).nbytes:
        return 0
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


class Mapping:
    """The usable bytes of one slot, mapped shared and writable.

    The memory is unmapped after the last view of :attr:`view`, so dropping the mapping while a
    tensor uses the memory is safe. Forked children do not inherit it.

    Args:
        fd: The slot file; may be closed afterwards. A lock on its open file description then
            lives as long as the mapping, unless it is released explicitly.
        capacity_bytes: Usable bytes; the file must have exactly these and a label.

    Raises:
        IntegrityError: The file is not a fully allocated slot of this capacity.
        OSError: The kernel refuses to map it.
    """

    __slots__ = ("_file", "_prefers_populate", "address", "capacity_bytes", "view")

    def __init__(self, fd: int, capacity_bytes: int) -> None:
        check_slot(fd, capacity_bytes)
        self._file = _identity(fd)
        self.capacity_bytes = capacity_bytes
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, capacity_bytes, protection, mmap.MAP_SHARED, fd, 0)
        if address is None or address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map a slot of {capacity_bytes} bytes: {os.strerror(code)}")
        self.address: int = address
        pages = (ctypes.c_ubyte * capacity_bytes).from_address(address)
        # The finalizer belongs to the object that all views keep alive, not to this one. At exit
        # the kernel unmaps; an explicit unmap would take the memory away from live tensors.
        weakref.finalize(pages, _unmap, address, capacity_bytes, os.getpid()).atexit = False
        self.view = memoryview(pages).cast("B")
        self._prefers_populate = True
        _libc.madvise(address, capacity_bytes, mmap.MADV_DONTFORK)

    def is_of(self, fd: int) -> bool:
        """Whether ``fd`` is open on the mapped file."""
        return _identity(fd) == self._file

    def populate(self, start: int, stop: int) -> None:
        """Populate the pages of [start, stop) without changing them. Releases the GIL.

        ``start`` is a multiple of the page size.

        Raises:
            OSError: EFAULT if the file was truncated meanwhile, ENOMEM; some pages are missing.
        """
        if self._prefers_populate:
            code = madvise(self.address + start, stop - start, MADV_POPULATE_WRITE)
            if code == 0:
                return
            if code != errno.EINVAL:
                raise OSError(code, f"cannot populate a slot's mapping: {os.strerror(code)}")
            self._prefers_populate = False  # a kernel before 5.14
        # Reading is enough: tmpfs never writes pages back, so a shared page is mapped writable at
        # once, and a write here could change a segment that is being read.
        np.frombuffer(self.view[start:stop], np.uint8)[:: mmap.PAGESIZE].max()


def _identity(fd: int) -> tuple[int, int]:
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino


def _unmap(address: int, length: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has something else at this address
        _libc.munmap(address, length)


def madvise(address: int, length: int, advice: int) -> int:
    """``madvise(2)`` with the GIL released; returns 0 or the errno."""
    if _libc.madvise(address, length, advice) == 0:
        return 0
    return ctypes.get_errno()


def advise_huge_pages(address: int, length: int) -> None:
    """Advise the kernel to use huge pages for untouched pages of [address, address + length).

    A restart's destination is often memory that was allocated and never touched: with pages of
    2 MiB its first touch is 3 times as fast (3.4 -> 9 GB/s with two threads here).
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + length) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        madvise(first, last - first, mmap.MADV_HUGEPAGE)
