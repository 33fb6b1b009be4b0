"""The shipped suite on what fsspec reaches: files that are moved, and objects that appear whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec
import pytest

from tieredckpt.errors import ConfigError, TierUnavailableError
from tieredckpt.format.segment import BLOCK_BYTES
from tieredckpt.storage.backends.file import FileTier
from tieredckpt.storage.backends.open import open_store
from tieredckpt.storage.base import Scope, Tier
from tieredckpt.storage.object import fsspec as fsspec_tier
from tieredckpt.storage.object.client import complaints
from tieredckpt.storage.object.errors import ObjectSettings
from tieredckpt.storage.object.fsspec import FsspecTier, why_refused
from tieredckpt.testing.tier_suite import TierSuite

SIZES = (1, 4096, BLOCK_BYTES, 2 * BLOCK_BYTES + 12345)


class TestFsspecFiles(TierSuite):
    sizes = SIZES

    def make_tier(self, folder: Path) -> Tier:
        return FsspecTier("files", f"file://{folder}", ObjectSettings())


@pytest.mark.full
class TestFsspecMemory(TierSuite):
    sizes = SIZES

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Iterator[Path]:
        from fsspec.implementations.memory import MemoryFileSystem

        yield tmp_path
        with suppress(FileNotFoundError):
            MemoryFileSystem().rm(str(tmp_path), recursive=True)

    def make_tier(self, folder: Path) -> Tier:
        return FsspecTier("memory", f"memory:/{folder}", ObjectSettings())


def test_what_a_dead_writer_left_is_swept(tmp_path: Path):
    tier = FsspecTier("files", f"file://{tmp_path}", ObjectSettings())
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
    key, other = "manifests/default/x", FsspecTier("b", f"file://{tmp_path}", ObjectSettings())

    class Sleeper(FsspecTier):
        """It is stopped when it has the claim, until another one has taken it for dead."""

        @contextmanager
        def _written(self, *args):
            other.put(key, b"manifest")
            with super()._written(*args) as file:
                yield file

    tier = Sleeper("a", f"file://{tmp_path}", ObjectSettings())
    with pytest.raises(TierUnavailableError, match="took longer"):
        tier.put(key, b"tombstone")
    assert other.get(key, limit=100) == b"manifest"
    assert [each.name for each in (tmp_path / "tmp").iterdir()] == []


class Forgetful(FsspecTier):
    """As of a file system that does not know exclusive creation."""

    def __init__(self, *args):
        super().__init__(*args)
        made = self._fs.open
        self._fs.open = lambda path, mode, **more: made(path, mode.replace("x", "w"), **more)


def test_a_file_system_that_replaces_what_exists_is_refused_before_the_first_put(tmp_path: Path):
    tier = Forgetful("a", f"file://{tmp_path}", ObjectSettings())
    for _ in range(2):
        with pytest.raises(TierUnavailableError, match="instead of refusing a second one"):
            tier.put("manifests/default/x", b"manifest")
    assert [each.name for each in tmp_path.rglob("*")] == ["tmp"]


def test_a_failure_is_no_missing_file(tmp_path: Path):
    """fsspec's ``exists`` is False after any error, and clients raise KeyError for bad answers."""
    tier = FsspecTier("a", f"file://{tmp_path}", ObjectSettings())
    key = "manifests/default/x"
    tier.put(key, b"manifest")

    def broken(*args, **more):
        raise KeyError("size")

    info, ls, remove = tier._fs.info, tier._fs.ls, tier._fs.rm_file
    tier._fs.info = tier._fs.ls = tier._fs.rm_file = broken
    for call in (
        lambda: tier.delete(key),
        lambda: tier.put(key, b"tombstone"),
        lambda: tier.info(key),
        lambda: list(tier.list("manifests/")),
    ):
        with pytest.raises(TierUnavailableError, match="KeyError"):
            call()
    tier._fs.info, tier._fs.ls, tier._fs.rm_file = info, ls, remove
    assert tier.get(key, limit=100) == b"manifest"


@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"endpoint": "https://minio"}, "endpoint"),
        ({"bandwidth_bytes_per_s": 1 << 20}, "bandwidth"),
        ({"sse_type": "kms", "sse_key": "x"}, "sse"),
    ],
)
def test_an_option_that_fsspec_would_ignore_is_refused(
    tmp_path: Path, more: dict[str, object], key: str
):
    settings = ObjectSettings(**more)
    with pytest.raises(ConfigError, match=f"{key}: fsspec does not read it"):
        FsspecTier("a", f"file://{tmp_path}", settings)
    assert [each.key for each in complaints("a", "sftp://host/a", settings)][-1] == key


class OfAnother(fsspec.AbstractFileSystem):
    """As one of a package that is installed here: only a base takes the file system below."""

    def __init__(self, fo: object = None, **more: object):
        raise AssertionError("made")


class Derived(OfAnother):
    def __init__(self, **more: object):
        super().__init__(**more)


BELOW, HERE = "is built from another file system", "is a folder of this host"


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        *((each, BELOW) for each in ("reference", "dir", "generic", "zip", "filecache", "derived")),
        *((each, HERE) for each in ("file", "local")),
        ("c", "neither this package nor fsspec knows it"),  # fsspec's own: a drive of Windows
    ],
)
def test_a_file_system_of_another_one_or_of_this_host_is_refused(
    scheme: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fsspec.register_implementation("derived", Derived, clobber=True)
    monkeypatch.setattr(
        "fsspec.core.url_to_fs", lambda *args, **more: pytest.fail("it has the URL")
    )
    url = f"fsspec+{scheme}://{tmp_path}"
    with pytest.raises(ConfigError, match=f"^tier a: .*{scheme}://.*{why}") as error:
        open_store("a", url, "ns", ObjectSettings())
    assert error.value.key == "url"
    (found,) = complaints("a", url, ObjectSettings())
    assert (found.key, found.fatal, why in found.message) == ("url", True, True)
    assert not [*tmp_path.iterdir()]


def test_file_systems_elsewhere_are_not_refused():
    for scheme in ("hdfs", "fsspec+s3", "ftp", "webhdfs"):
        assert why_refused(f"{scheme}://host/a") is None


def test_without_fsspec_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match=r"^tier a: it needs the extra fsspec") as error:
        open_store("a", "sftp://host/a", "ns", ObjectSettings())
    assert error.value.key == "url"
