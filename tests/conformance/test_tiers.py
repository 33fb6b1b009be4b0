"""The shipped suite on each tier that we ship."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tieredckpt.storage import file_io, folder
from tieredckpt.storage.backends.file import FileTier
from tieredckpt.storage.base import Tier
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.memory.tier import MemoryTier
from tieredckpt.testing.tier_suite import TierSuite


class TestMemoryTier(TierSuite):
    @pytest.fixture
    def folder(self, runtime_dir: Path) -> Path:
        return runtime_dir

    def make_tier(self, folder: Path) -> Tier:
        pool = SlotPool(folder / "slots")
        pool.scan()
        return MemoryTier(pool, folder / "ns" / "run", "run")


class TestFileTierDirect(TierSuite):
    def make_tier(self, folder: Path) -> Tier:
        return FileTier("disk", folder, "run")


@pytest.mark.full
class TestFileTierBuffered(TierSuite):
    def make_tier(self, folder: Path) -> Tier:
        return FileTier("disk", folder, "run", direct=False)


@pytest.mark.full
class TestFileTierDirectRefused(TierSuite):
    """A file system that takes the flag and refuses each transfer, as some network ones do."""

    @pytest.fixture(autouse=True)
    def _refuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import fcntl

        pwrite, preadv = os.pwrite, os.preadv

        def check(fd: int) -> None:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        def refusing_pwrite(fd: int, data: memoryview, offset: int) -> int:
            check(fd)
            return pwrite(fd, data, offset)

        def refusing_preadv(fd: int, into: list[memoryview], offset: int) -> int:
            check(fd)
            return preadv(fd, into, offset)

        monkeypatch.setattr(os, "pwrite", refusing_pwrite)
        monkeypatch.setattr(os, "preadv", refusing_preadv)

    def make_tier(self, folder: Path) -> Tier:
        return FileTier("disk", folder, "run")


@pytest.mark.full
class TestFileTierWithoutLinks(TierSuite):
    """A file system that has no hard links: names are given by rename."""

    @pytest.fixture(autouse=True)
    def _no_links(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        def refuse(*args: object, **kwargs: object) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refuse)
        return

    def make_tier(self, folder: Path) -> Tier:
        return FileTier("disk", folder, "run")


def test_module_names_are_the_ones_patched() -> None:
    assert file_io.os is os
    assert folder.os is os
