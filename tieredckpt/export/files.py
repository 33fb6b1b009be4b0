"""The files of an export while they are filled, and the step that makes them visible.

A file gets its final size first. Then it is mapped, and verified blocks are read straight into the
mapping, as into the tensors of a load. So the export needs no memory of its own for the data: its
pages are the page cache of the file.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from tieredckpt.errors import UsageError
from tieredckpt.export.selection import TensorKey


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

    def write_back(self) -> None:
        """Have the disk write what is there so far, while the rest is read. From any thread."""
        for fd in self._fds:
            try:
                os.fdatasync(fd)
            except OSError as error:
                # The kernel reports a failed write once: the fsync at the end would succeed.
                self._failure = error

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
