"""The files of an export while they are filled, and the step that makes them visible.

A file gets its final size first. Then it is mapped, and the tensors of the export are in the
mapping. Verified blocks in scratch memory are written to the file at the place of their tensor: a
copy into the mapping took five times as long, for its page faults (0.6 s and 0.1 s for 512 MiB).
So the export needs little memory of its own for the data, and the page cache of the file is emptied
as soon as the disk has it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from tieredckpt.dcp.load.casting import put_unchanged
from tieredckpt.dcp.load.tensors import memory_of
from tieredckpt.errors import UsageError
from tieredckpt.export.selection import TensorKey
from tieredckpt.storage.memory.mapping import madvise


def check_free(out: Path, *, folder: bool) -> None:
    """Raise UsageError unless ``out`` can become the export: it is missing, or an empty folder."""
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent} is no folder: make it first")
    if not os.path.lexists(out):
        return
    if not (folder and not out.is_symlink() and out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} exists: name one that does not exist yet")


class Files:
    """The files below one folder, which is renamed once they are complete.

    Attributes:
        folder: Where to make them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fds: list[int] = []
        self._failure: OSError | None = None
        self._regions: list[list[int]] = []
        self._mappings: list[_Mapping] = []

    def reserve(self, path: Path, size: int = 0) -> int:
        """Make a file as long as ``size``, or leave a longer one, and reserve its space.

        A page of a mapped file for which the disk has no space would end the process by SIGBUS.

        Returns:
            A descriptor, which stays open until :meth:`close`.

        Raises:
            OSError: There is not enough space.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._fds.append(fd)
        size = max(size, os.fstat(fd).st_size)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} ({size} bytes)", str(path)) from error
        return fd

    def map(self, path: Path, size: int = 0) -> mmap.mmap:
        """Reserve a file and map it, shared. Raises as :meth:`reserve`."""
        return mmap.mmap(self.reserve(path, size), 0)

    def expect(self, tensors: Iterable[torch.Tensor]) -> None:
        """Know which memory is filled: not empty tensors, all in mapped files of this object."""
        page = mmap.PAGESIZE
        for start, size in sorted((each.data_ptr(), each.nbytes) for each in tensors):
            first, stop = start // page * page, -(-(start + size) // page) * page
            if self._regions and first <= self._regions[-1][1]:
                self._regions[-1][1] = max(stop, self._regions[-1][1])
            else:
                self._regions.append([first, stop])
        self._mappings = _mappings_of(self._fds)
        for first, stop in self._regions:  # what is read into any other memory would be lost
            while first < stop:
                first = self._mapping_at(first).stop

    def _mapping_at(self, address: int) -> _Mapping:
        for each in self._mappings:
            if each.start <= address < each.stop:
                return each
        raise AssertionError("not in a file")

    def put(self, key: str, target: torch.Tensor, stored: torch.Tensor) -> None:
        """Write what is ``stored`` to the file in whose mapping ``target`` is. From any thread.

        Raises:
            UsageError: A value does not survive the cast to the target's type.
            OSError: The disk refused.
        """
        same = target.dtype == stored.dtype
        if not (same and target.is_contiguous() and stored.is_contiguous()):
            put_unchanged(key, target, stored)
            return
        at, data = target.data_ptr(), memory_of(stored)
        while data:
            found = self._mapping_at(at)
            part = data[: found.stop - at]
            done = os.pwrite(found.fd, part, found.offset + at - found.start)
            at, data = at + done, data[done:]

    def write_back(self) -> None:
        """Have the disk write what is there so far, and free its memory. From any thread.

        Without it a large export pushes everything else out of the page cache; and it is faster, as
        the same pages are used again.
        """
        for fd in self._fds:
            try:
                os.fdatasync(fd)
            except OSError as error:
                # The kernel reports a failed write once: the fsync at the end would succeed.
                self._failure = error
        for first, stop in self._regions:
            madvise(first, stop - first, mmap.MADV_DONTNEED)  # of a shared mapping: loses nothing
        for fd in self._fds:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        """Make the contents durable. Raises OSError: the disk did not take all of them."""
        for fd in self._fds:
            os.fsync(fd)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Close all descriptors. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())


class _Mapping(NamedTuple):
    """Addresses from ``start`` to ``stop``, where a file is mapped from ``offset`` on."""

    start: int
    stop: int
    offset: int
    fd: int


def _mappings_of(fds: Iterable[int]) -> list[_Mapping]:
    """The shared mappings of these files in this process."""
    by_path = {os.readlink(f"/proc/self/fd/{fd}"): fd for fd in fds}
    found: list[_Mapping] = []
    for row in Path("/proc/self/maps").read_text().splitlines():
        addresses, flags, offset, _, _, path = [*row.split(maxsplit=5), ""][:6]
        if flags.endswith("s") and (fd := by_path.get(path)) is not None:
            start, _, stop = addresses.partition("-")
            found.append(_Mapping(int(start, 16), int(stop, 16), int(offset, 16), fd))
    return found


@contextmanager
def appearing(out: Path, *, folder: bool) -> Iterator[Files]:
    """Yield the files to make; ``out`` appears at the end, complete, or not at all.

    Args:
        out: The folder, or with ``folder=False`` the only file, to be named like it.

    Raises:
        UsageError: ``out`` exists.
        OSError: The disk refused.
    """
    check_free(out, folder=folder)
    made = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    made.mkdir()
    files = Files(made)
    try:
        yield files
        files.finish()
        check_free(out, folder=folder)
        sync_folder(made)  # the names in it must not be lost after the rename
        (made if folder else made / out.name).rename(out)
        sync_folder(out.parent)
    finally:
        files.close()
        with suppress(FileNotFoundError):
            shutil.rmtree(made)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def tensor_in(memory: mmap.mmap | memoryview, offset: int, key: TensorKey) -> torch.Tensor:
    """The tensor of ``key`` in memory that is mapped, which lives as long as the tensor does.

    ``offset`` is in bytes, and aligned to the tensor's type.
    """
    if not key.size_bytes:
        return torch.empty(key.shape, dtype=key.dtype)
    data = torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=key.size_bytes)
    return data.view(key.dtype).view(key.shape)


def nowhere(size: int) -> mmap.mmap:
    """Memory of ``size`` bytes that costs nothing until it is touched, of any size."""
    fd = os.memfd_create("tieredckpt-export", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, max(size, 1))
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)
