"""The simulated file system under the names by which the product reaches the real one.

The seam is the names ``os``, ``fcntl``, ``Path``, ``secrets`` (and a few constants and threads) in
the modules that make system calls: they are replaced once per process, so the product has no
parameter for tests and pays nothing. What goes past the seam fails at once, since simulated
descriptors are no real ones and ``/sim`` does not exist; and a test compares :data:`MODULES` with
what the modules import.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl as real_fcntl
import functools
import importlib
import os as real_os
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from random import Random
from types import SimpleNamespace

from tests.simulation.filesystem import FileSystem, OpenStream, Stat
from tieredckpt.storage.headroom import Headroom

BLOCK = 4096
"""Blocks of simulated segments: small, so that one has several."""


class _Current:
    """The file system of the case that runs now, and its random numbers."""

    fs: FileSystem
    ids: Random

    def set(self, fs: FileSystem, ids: Random) -> None:
        self.fs, self.ids = fs, ids
        for name in _CALLS:
            setattr(sim_os, name, getattr(fs, name))
        sim_fcntl.flock, sim_fcntl.fcntl = fs.flock, fs.fcntl


current = _Current()

_CALLS = (
    "open", "close", "dup", "link", "unlink", "rename", "replace", "listdir", "scandir", "stat",
    "statvfs", "fstat", "fsync", "write", "pwrite", "posix_fallocate", "ftruncate", "pread",
    "preadv", "fdopen",
)  # fmt: skip


class SimPath(str):
    """As much of :class:`pathlib.Path` as the agent uses; absolute, and a string, which is fast."""

    __slots__ = ()

    def joinpath(self, *names: str) -> SimPath:
        return SimPath("/".join((self, *names)))

    def __truediv__(self, name: str) -> SimPath:
        return SimPath(f"{self}/{name}")

    def glob(self, _: str) -> list[SimPath]:
        return []  # the data cache has no entries

    @property
    def name(self) -> str:
        return self.rpartition("/")[2]

    @property
    def parent(self) -> SimPath:
        return SimPath(self.rpartition("/")[0])

    @property
    def parents(self) -> list[SimPath]:
        above = self.split("/")[:-1]
        return [SimPath("/".join(above[:count]) or "/") for count in range(len(above), 0, -1)]

    def with_name(self, name: str) -> SimPath:
        return self.parent / name

    def with_suffix(self, suffix: str) -> SimPath:
        return self.with_name(str(PurePosixPath(self.name).with_suffix(suffix)))

    def mkdir(self, mode: int = 0o777, *, parents: bool = False, exist_ok: bool = False) -> None:
        try:
            current.fs.mkdir(self)
        except OSError as error:
            if error.errno == errno.ENOENT and parents:
                self.parent.mkdir(parents=True, exist_ok=True)
                self.mkdir(mode, exist_ok=exist_ok)
            elif error.errno != errno.EEXIST or not exist_ok:
                raise

    def exists(self) -> bool:
        try:
            current.fs.stat(self)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return False
            raise
        return True

    def stat(self) -> Stat:
        return current.fs.stat(self)

    def iterdir(self) -> Iterator[SimPath]:
        return iter([self / name for name in current.fs.listdir(self)])

    def unlink(self, *, missing_ok: bool = False) -> None:
        with contextlib.suppress(*[FileNotFoundError] if missing_ok else []):
            current.fs.unlink(self)

    def open(self, mode: str) -> OpenStream:
        return current.fs.fdopen(current.fs.open(self, real_os.O_RDONLY), mode)

    def read_bytes(self) -> bytes:
        with self.open("rb") as file:
            return b"".join(iter(lambda: file.read(1 << 20), b""))

    def write_bytes(self, data: bytes) -> int:
        flags = real_os.O_WRONLY | real_os.O_CREAT
        fd = current.fs.open(self, flags)
        try:
            current.fs.ftruncate(fd, 0)
            left = memoryview(data)
            while left:
                left = left[current.fs.write(fd, left) :]
        finally:
            current.fs.close(fd)
        return len(data)


def _isdir(path: object) -> bool:
    try:
        return current.fs.find(real_os.fspath(path)).folder  # type: ignore[call-overload]
    except OSError:
        return False


sim_os = SimpleNamespace(
    **{name: getattr(real_os, name) for name in dir(real_os) if name.startswith("O_")},
    strerror=real_os.strerror,
    getpid=real_os.getpid,
    fspath=real_os.fspath,
    path=SimpleNamespace(isdir=_isdir, samestat=real_os.path.samestat),
)
sim_fcntl = SimpleNamespace(
    **{name: getattr(real_fcntl, name) for name in dir(real_fcntl) if name[:2] in ("F_", "LO")},
)
sim_secrets = SimpleNamespace(token_hex=lambda size: current.ids.randbytes(size).hex())


class InlineExecutor:
    """Runs what is submitted at once, in the caller's thread."""

    def __init__(self, threads: int, name: str) -> None:
        pass

    def submit(self, call: Callable[..., None], *args: object) -> SimpleNamespace:
        failure: Exception | None = None
        try:
            call(*args)
        except Exception as error:
            failure = error

        def result() -> None:
            if failure is not None:
                raise failure

        return SimpleNamespace(result=result, cancel=lambda: False)

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class InlineCopyPool:
    """A copy pool without threads."""

    def __init__(self, threads: int) -> None:
        pass

    def run(self, work: Callable[[int], None], count: int) -> None:
        for number in range(count):
            work(number)

    def close(self) -> None:
        pass


def headroom(folder: object) -> Headroom:
    full = current.fs.find(real_os.fspath(folder)).mount.full  # type: ignore[call-overload]
    return Headroom(available_bytes=0 if full else 1 << 30, limit="tmpfs", advice="none")


MODULES: dict[str, tuple[str, ...]] = {
    "tieredckpt.agent.node": ("os", "secrets"),
    "tieredckpt.agent.copies.holder": ("os",),
    "tieredckpt.agent.leader.holds": ("secrets",),
    "tieredckpt.agent.copies.state": ("secrets",),
    "tieredckpt.agent.copies.pull": ("os",),
    "tieredckpt.agent.slots.replicas": ("os",),
    "tieredckpt.agent.host.sessions": ("os",),
    "tieredckpt.agent.slots.allocator": ("secrets",),
    "tieredckpt.agent.cluster.authority": ("os",),
    "tieredckpt.dcp.job.history": ("secrets",),
    "tieredckpt.recovery.copies": ("os", "fcntl"),
    "tieredckpt.storage.backends.file": ("os", "fcntl"),
    "tieredckpt.storage.folder": ("os", "secrets"),
    "tieredckpt.storage.memory.tier": ("os",),
    "tieredckpt.storage.file_io": ("os", "fcntl"),
    "tieredckpt.storage.memory.pool": ("os", "secrets"),
    "tieredckpt.storage.shared.catalog": ("secrets",),
    "tieredckpt.storage.memory.slot": ("os", "fcntl"),
    "tieredckpt.storage.memory.slot_file": ("os",),
}
"""Every module that a case runs and that reaches the system, and by which names."""

_NAMES = {"os": sim_os, "fcntl": sim_fcntl, "secrets": sim_secrets}


def _replacements() -> dict[tuple[str, str], object]:
    found: dict[tuple[str, str], object] = {
        (module, name): _NAMES[name] for module, names in MODULES.items() for name in names
    }
    pool = importlib.import_module("tieredckpt.storage.memory.pool").SlotPool
    worker = importlib.import_module("tests.simulation.worker").SimWorker
    return found | {
        ("tieredckpt.storage.backends.file", "Path"): SimPath,
        ("tieredckpt.storage.file_io", "ThreadPoolExecutor"): InlineExecutor,
        ("tieredckpt.storage.file_io", "RUN_BYTES"): 2 * BLOCK,
        ("tieredckpt.storage.memory.tier", "RUN_BYTES"): 2 * BLOCK,
        ("tieredckpt.agent.tiers.source", "RUN_BYTES"): BLOCK,
        ("tieredckpt.storage.file_io", "_SCRATCH_BYTES"): 4 * BLOCK,
        ("tieredckpt.recovery.blocks", "UNIT_BYTES"): 2 * BLOCK,
        ("tieredckpt.recovery.fetch", "CopyPool"): InlineCopyPool,
        ("tieredckpt.format.segment", "_MIN_SLOT_BYTES"): BLOCK,
        ("tieredckpt.agent.node", "SlotPool"): functools.partial(pool, headroom=headroom),
        ("tieredckpt.agent.slots.allocator", "headroom_of"): headroom,
        ("tieredckpt.agent.slots.replicas", "headroom_of"): headroom,
        ("tieredckpt.agent.slots.owners", "headroom_of"): headroom,
        ("tieredckpt.agent.namespace", "TierWorker"): worker,
    }


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """The product runs on :data:`current` in here."""
    old: list[tuple[object, str, object]] = []
    for (name, attribute), value in _replacements().items():
        module = importlib.import_module(name)
        old.append((module, attribute, getattr(module, attribute)))
        setattr(module, attribute, value)
    try:
        yield
    finally:
        for module, attribute, value in old:
            setattr(module, attribute, value)
