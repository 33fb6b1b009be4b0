"""What the machine can do: each function measures one raw limit, and says why it is the fair one.

No limit checks digests, keeps a catalog or survives anything: a ratio near 1.0 says that
tieredckpt's guarantees are nearly free, not that it is fast compared with a slow method. Every
function returns seconds. Nothing here imports torch or tieredckpt, so that a fresh process
measures the kernel and not an import.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from benchmarks.shapes import MIB

Octets = np.ndarray[tuple[int], np.dtype[np.uint8]]
PAGE_BYTES = 4096
MADV_POPULATE_WRITE = 23  # linux/mman.h since 5.14; Python's mmap module does not name it
CYCLED_BYTES = 64 * MIB
"""Memory that direct I/O moves to and from, over and over: far larger than any cache."""

Jobs = Sequence[tuple[int, mmap.mmap]]
"""Offsets in a slot, with the memory that the bytes there go to."""

_libc = ctypes.CDLL(None, use_errno=True)


def memcpy(sources: Sequence[Octets], targets: Sequence[Octets]) -> float:
    """One thread copies every source to its target, all pages resident.

    The fair limit of a save (and of a load in a warm process), because a state that survives
    its process must be copied at least once, and no copy is faster than a warm memcpy to
    private memory. ``numpy.copyto`` of bytes is libc's ``memmove`` without the GIL.
    """
    start_s = time.perf_counter()
    for source, target in zip(sources, targets, strict=True):
        np.copyto(target, source)
    return time.perf_counter() - start_s


# --- reading a slot in a fresh process ------------------------------------------------------------


def back_free_memory(size: int) -> None:
    """Touch ``size`` bytes and free them: what is faulted in next is not also fetched by a host.

    A hypervisor takes back what a guest has freed (free page reporting, within seconds), and
    returns it 15 times slower than the guest's own page fault is (0.5 against 8 GB/s with huge
    pages here). Which sample meets such pages is chance, so neither ours nor the limit shall.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, np.uint8)[::PAGE_BYTES] = 1
    memory.close()


def cold_targets(sizes: Sequence[int]) -> list[mmap.mmap]:
    """Private anonymous memory per tensor, not touched, as ``torch.empty`` makes large ones."""
    return [mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for size in sizes]


def raw_read(path: str, sizes: Sequence[int], method: str, threads: int) -> float:
    """Read a slot's bytes into cold memory by one of :data:`READ_METHODS`, without verifying them.

    To be called once per process. The fair limit of a recovery from memory: a restarted trainer
    has neither mapped the slot nor touched its tensors, so page faults dominate, and which system
    calls take the fewest differs between kernels. All methods are tried and the best counts.
    Populating and mapping are inside the measured time.
    """
    targets = cold_targets(sizes)
    offsets = [0, *np.cumsum(sizes)[:-1].tolist()]
    jobs = list(zip(offsets, targets, strict=True))
    shares = _shares(jobs, threads)
    read = READ_METHODS[method]
    fd = os.open(path, os.O_RDONLY)
    try:
        start_s = time.perf_counter()
        with _source(fd, sum(sizes), method) as source:
            _run_all([partial(read, fd, source, share) for share in shares])
        return time.perf_counter() - start_s
    finally:
        os.close(fd)


@contextlib.contextmanager
def _source(fd: int, size: int, method: str) -> Iterator[mmap.mmap | None]:
    """The mapping that a method reads through; None for those that use ``pread``."""
    if not method.startswith("mmap"):
        yield None
        return
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if "populated" in method else 0)
    with mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ) as mapping:
        yield mapping


def _copy(_fd: int, source: mmap.mmap | None, jobs: Jobs) -> None:
    assert source is not None
    octets = np.frombuffer(source, np.uint8)
    for offset, target in jobs:
        np.copyto(np.frombuffer(target, np.uint8), octets[offset : offset + len(target)])


def _pread(fd: int, _source: mmap.mmap | None, jobs: Jobs) -> None:
    for offset, target in jobs:
        with memoryview(target) as view:
            done = 0
            while done < len(view):
                count = os.preadv(fd, [view[done:]], offset + done)
                assert count > 0, "the slot is shorter than the state"
                done += count


def _copy_to_populated(fd: int, source: mmap.mmap | None, jobs: Jobs) -> None:
    for job in jobs:
        _populate(job[1])
        _copy(fd, source, [job])


def _pread_to_populated(fd: int, source: mmap.mmap | None, jobs: Jobs) -> None:
    for job in jobs:
        _populate(job[1])
        _pread(fd, source, [job])


def _pread_to_huge(fd: int, source: mmap.mmap | None, jobs: Jobs) -> None:
    for job in jobs:
        job[1].madvise(mmap.MADV_HUGEPAGE)
        _pread(fd, source, [job])


def _copy_to_huge(fd: int, source: mmap.mmap | None, jobs: Jobs) -> None:
    for job in jobs:
        job[1].madvise(mmap.MADV_HUGEPAGE)
        _copy(fd, source, [job])


READ_METHODS: dict[str, Callable[[int, mmap.mmap | None, Jobs], None]] = {
    "mmap": _copy,
    "mmap populated": _copy,
    "mmap populated, target populated": _copy_to_populated,
    "mmap populated, target huge pages": _copy_to_huge,
    "pread": _pread,
    "pread, target populated": _pread_to_populated,
    "pread, target huge pages": _pread_to_huge,
}


def _populate(target: mmap.mmap) -> None:
    """Make all pages of ``target`` writable with one call."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(target)), MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "MADV_POPULATE_WRITE")


# --- direct I/O -----------------------------------------------------------------------------------

DIRECT_VARIANTS: dict[str, tuple[int, int]] = {
    "1 thread, 4 MiB": (1, 4 * MIB),
    "1 thread, 16 MiB": (1, 16 * MIB),
    "2 threads, 8 MiB": (2, 8 * MIB),
}
"""Threads and bytes per call; the fastest of them on this disk is the limit."""


def direct_write(path: str, size: int, *, threads: int, piece_bytes: int) -> float:
    """Write a new file of ``size`` bytes with O_DIRECT, fsync included; the file is left there.

    The fair limit of a spill: the page cache is out of it, so these are the disk's own bytes per
    second, and the same promise (on the disk, not in a cache) holds at its end. The bytes come
    from warm, aligned memory, and nobody computes a digest.
    """
    buffer = _aligned(CYCLED_BYTES)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    try:
        start_s = time.perf_counter()

        def work(first: int) -> None:
            for offset in range(first * piece_bytes, size, threads * piece_bytes):
                here = offset % CYCLED_BYTES
                count = min(piece_bytes, size - offset)
                written = os.pwrite(fd, buffer[here : here + count], offset)
                assert written == count, "short direct write"

        _run_all([partial(work, first) for first in range(threads)])
        os.fsync(fd)
        return time.perf_counter() - start_s
    finally:
        os.close(fd)


def direct_read(path: str, size: int, *, threads: int, piece_bytes: int) -> float:
    """Read the first ``size`` bytes of a file with O_DIRECT into memory that is already there.

    The fair limit of a load from disk: no page cache, no page faults, nothing looks at the bytes.
    """
    buffer = _aligned(CYCLED_BYTES)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        start_s = time.perf_counter()

        def work(first: int) -> None:
            for offset in range(first * piece_bytes, size, threads * piece_bytes):
                here = offset % CYCLED_BYTES
                count = min(piece_bytes, size - offset)
                read = os.preadv(fd, [buffer[here : here + count]], offset)
                assert read == count, "short direct read"

        _run_all([partial(work, first) for first in range(threads)])
        return time.perf_counter() - start_s
    finally:
        os.close(fd)


_buffers: dict[int, memoryview] = {}


def _aligned(size: int) -> memoryview:
    """Page-aligned memory full of noise, made once per process (a disk may skip zeros)."""
    if size not in _buffers:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        noise = np.random.default_rng(1).integers(0, 256, MIB, dtype=np.uint8)
        np.copyto(np.frombuffer(memory, np.uint8).reshape(-1, MIB), noise)
        _buffers[size] = memoryview(memory)
    return _buffers[size]


# --- threads --------------------------------------------------------------------------------------


def _shares(jobs: Jobs, threads: int) -> list[Jobs]:
    """Divide jobs over threads, the largest first to whoever has least."""
    shares: list[list[tuple[int, mmap.mmap]]] = [[] for _ in range(threads)]
    for job in sorted(jobs, key=lambda job: -len(job[1])):
        min(shares, key=lambda share: sum(len(target) for _, target in share)).append(job)
    return list(shares)


def _run_all(actions: Sequence[Callable[[], object]]) -> None:
    """Run all at once, the last one here; the first error of any of them is raised."""
    errors: list[BaseException] = []

    def guarded(action: Callable[[], object]) -> None:
        try:
            action()
        except (OSError, AssertionError) as error:
            errors.append(error)

    others = [threading.Thread(target=guarded, args=(action,)) for action in actions[:-1]]
    for thread in others:
        thread.start()
    guarded(actions[-1])
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
