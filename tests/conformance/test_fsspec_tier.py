"""The shipped suite on what fsspec reaches: files that are moved, and objects that appear whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.s3 import object_settings
from tieredckpt.errors import TierUnavailableError
from tieredckpt.format.segment import BLOCK_BYTES
from tieredckpt.storage.backends.file import FileTier
from tieredckpt.storage.base import Scope, Tier
from tieredckpt.storage.object import fsspec as fsspec_tier
from tieredckpt.storage.object.fsspec import FsspecTier
from tieredckpt.testing.tier_suite import TierSuite

SIZES = (1, 4096, BLOCK_BYTES, 2 * BLOCK_BYTES + 12345)


class TestFsspecFiles(TierSuite):
    sizes = SIZES

    def make_tier(self, folder: Path) -> Tier:
        return FsspecTier("files", f"file://{folder}", object_settings(""))


class TestFsspecMemory(TierSuite):
    sizes = SIZES

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Iterator[Path]:
        from fsspec.implementations.memory import MemoryFileSystem

        yield tmp_path
        with suppress(FileNotFoundError):
            MemoryFileSystem().rm(str(tmp_path), recursive=True)

    def make_tier(self, folder: Path) -> Tier:
        return FsspecTier("memory", f"memory:/{folder}", object_settings(""))


def test_what_a_dead_writer_left_is_swept(tmp_path: Path):
    tier = FsspecTier("files", f"file://{tmp_path}", object_settings(""))
    tier.put("plans/" + "ab" * 16, b"x")
    for name in ("0123", "claim-plans-x"):
        (tmp_path / "tmp" / name).write_bytes(b"half")
    assert tier.sweep_unfinished(3600) == 0
    assert tier.sweep_unfinished(-1) == 2
    assert [each.name for each in (tmp_path / "tmp").iterdir()] == []


def test_what_a_dead_host_left_in_a_shared_folder_is_swept(tmp_path: Path):
    tier = FileTier("files", tmp_path, "run", scope=Scope.SHARED)
    left = tmp_path / "run" / "tmp" / "0123"
    left.write_bytes(b"half")
    assert tier.sweep_unfinished(3600) == 0
    os.utime(left, (0, 0))
    assert tier.sweep_unfinished(3600) == 1
    assert not left.exists()


def test_a_writer_that_slept_does_not_replace_what_came_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fsspec_tier, "LEASE_S", 0.5)
    key, other = "manifests/default/x", FsspecTier("b", f"file://{tmp_path}", object_settings(""))

    class Sleeper(FsspecTier):
        """It is stopped when it has the claim, until another one has taken it for dead."""

        @contextmanager
        def _written(self, *args):
            other.put(key, b"manifest")
            with super()._written(*args) as file:
                yield file

    tier = Sleeper("a", f"file://{tmp_path}", object_settings(""))
    with pytest.raises(TierUnavailableError, match="took longer"):
        tier.put(key, b"tombstone")
    assert other.get(key, limit=100) == b"manifest"
    assert [each.name for each in (tmp_path / "tmp").iterdir()] == []
