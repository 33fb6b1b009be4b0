"""The file tier: what a crash leaves at each point, full and failing disks, hostile folders."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tieredckpt import failpoints
from tieredckpt.errors import (
    CapacityError,
    ConfigError,
    IntegrityError,
    NotFoundError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.segment import BLOCK_BYTES
from tieredckpt.storage import folder as folder_module
from tieredckpt.storage.backends.file import FileTier, folder_of_url
from tieredckpt.storage.base import Scope
from tieredckpt.storage.file_io import aligned_buffer, denied
from tieredckpt.testing.tier_suite import SampleSource, sample_segment, segment_name

PLAN = "plans/" + "ab" * 16
SEGMENT = f"segments/{segment_name(1)}"
POINTS = ("tier.file.write", "tier.file.fsync", "tier.file.link", "tier.file.publish")


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    failpoints.arm("")


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FileTier]:
    tier = FileTier("disk", tmp_path / "store", "run")
    yield tier
    tier.close()


def source(blocks: int = 3, number: int = 1) -> SampleSource:
    return SampleSource(sample_segment(segment_name(number), blocks * BLOCK_BYTES, seed=number))


def visible(tier: FileTier) -> list[str]:
    return [i.key for prefix in ("plans/", "segments/") for i in tier.list(prefix)]


def unpublished(tier: FileTier) -> list[str]:
    return os.listdir(tier.root / "tmp")


# --- crashes --------------------------------------------------------------------------------------

CRASHING = """
import sys
from pathlib import Path
from tieredckpt import failpoints
from tieredckpt.format.segment import BLOCK_BYTES
from tieredckpt.testing.tier_suite import *
from tieredckpt.storage.backends.file import FileTier
kind, root, point = sys.argv[1:]
tier = FileTier("disk", Path(root), "run")
failpoints.arm(point)
if kind == "small":
    tier.put("plans/" + "ab" * 16, b"plan" * 1000)
else:
    tier.put_from(f"segments/{segment_name(1)}",
                  SampleSource(sample_segment(segment_name(1), 3 * BLOCK_BYTES, seed=1)))
"""


@pytest.mark.parametrize("point", [*POINTS, "tier.file.write@3"])
@pytest.mark.parametrize("kind", ["small", "large"])
def test_killed_at_each_point(tmp_path: Path, kind: str, point: str):
    if kind == "small" and "@" in point:
        point = "tier.file.write@1"
    name, _, nth = point.partition("@")
    armed = f"{name}=kill" + (f"@{nth}" if nth else "")
    died = subprocess.run(
        [sys.executable, "-c", CRASHING, kind, str(tmp_path), armed], timeout=60, check=False
    )
    assert died.returncode == -signal.SIGKILL
    key = PLAN if kind == "small" else SEGMENT
    wanted = b"plan" * 1000 if kind == "small" else source().data
    looking = FileTier("disk", tmp_path, "run", read_only=True)
    if point == "tier.file.publish":
        assert looking.get(key, limit=len(wanted)) == wanted, "named: then it is whole"
    else:
        assert visible(looking) == []
        assert len(unpublished(looking)) == 1
    tier = FileTier("disk", tmp_path, "run")
    assert unpublished(tier) == []
    if kind == "small":
        tier.put(key, wanted)
    else:
        tier.put_from(key, source())
    assert tier.get(key, limit=len(wanted)) == wanted
    tier.close()


@pytest.mark.parametrize("kind", ["small", "large"])
def test_order_of_steps(tier: FileTier, monkeypatch: pytest.MonkeyPatch, kind: str):
    """Bytes are synced before the name exists, the name after it; a crash may come in between."""
    tier.put("plans/" + "00" * 16, b"so that folders exist")
    tier.put_from(f"segments/{segment_name(9)}", source(1, 9))
    steps: list[str] = []
    fsync, link, pwrite, write = os.fsync, os.link, os.pwrite, os.write

    def what(fd: int) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tier.root).split("/")[0]

    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append(f"sync {what(fd)}"), fsync(fd))[1])
    monkeypatch.setattr(os, "link", lambda a, b, **k: (steps.append("link"), link(a, b, **k))[1])
    monkeypatch.setattr(os, "pwrite", lambda *a: (steps.append("write"), pwrite(*a))[1])
    monkeypatch.setattr(os, "write", lambda *a: (steps.append("write"), write(*a))[1])
    if kind == "small":
        tier.put(PLAN, b"x")
    else:
        tier.put_from(SEGMENT, source())
    monkeypatch.undo()
    place = "plans" if kind == "small" else "segments"
    assert list(dict.fromkeys(steps)) == ["write", "sync tmp", "link", f"sync {place}"]
    steps.clear()


def test_new_folders_are_synced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1]
    )
    tier = FileTier("disk", tmp_path / "a", "run")
    tier.put("manifests/default/" + "ab" * 16, b"x")
    root = str(tier.root)
    for folder in (str(tmp_path / "a"), root, f"{root}/manifests", f"{root}/manifests/default"):
        assert folder in synced
    tier.close()


def test_put_again_makes_durable_what_a_crash_left_visible(
    tier: FileTier, monkeypatch: pytest.MonkeyPatch
):
    failpoints.arm("tier.file.publish=eio")
    with pytest.raises(TierUnavailableError) as caught:
        tier.put(PLAN, b"x")
    assert caught.value.outcome == "unknown"
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1]
    )
    tier.put(PLAN, b"x")
    assert f"{tier.root}/plans" in synced


def test_delete_is_durable(tier: FileTier, monkeypatch: pytest.MonkeyPatch):
    tier.put(PLAN, b"x")
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1]
    )
    tier.delete(PLAN)
    assert synced == [f"{tier.root}/plans"]
    tier.delete(PLAN)
    assert len(synced) == 2, "an earlier delete may have died before its sync"


# --- full and failing disks -----------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS[:3])
@pytest.mark.parametrize("kind", ["small", "large"])
@pytest.mark.parametrize("code", ["enospc", "eio"])
def test_failing_disk(tier: FileTier, point: str, kind: str, code: str):
    failpoints.arm(f"{point}={code}")
    error = CapacityError if code == "enospc" else TierUnavailableError
    key = PLAN if kind == "small" else SEGMENT

    def put() -> None:
        if kind == "small":
            tier.put(key, b"plan")
        else:
            tier.put_from(key, source())

    with pytest.raises(error) as caught:
        put()
    if code == "eio":
        assert caught.value.outcome == "not_applied"
    else:
        assert "keep.last" in str(caught.value)
    assert visible(tier) == []
    assert unpublished(tier) == []
    put()
    assert visible(tier) == [key]


@pytest.fixture
def unlinking(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What is in it (a whole path, or "" for all) cannot be unlinked."""
    real, stuck = os.unlink, set[str]()

    def unlink(path: str | os.PathLike[str], **where: int) -> None:
        if stuck & {"", os.fspath(path)}:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(path, **where)

    monkeypatch.setattr(os, "unlink", unlink)
    return stuck


@pytest.mark.parametrize("how", ["put", "same again", "delete"])
def test_what_an_abandoned_put_left_goes_when_the_disk_works_again(
    tier: FileTier, unlinking: set[str], how: str
):
    tier.put(PLAN, b"plan")
    (tier.root / "tmp" / "of-another-writer").touch()
    failpoints.arm("tier.file.write=eio")
    unlinking.add("")
    with pytest.raises(TierUnavailableError):
        tier.put_from(SEGMENT, source())
    assert len(unpublished(tier)) == 2
    unlinking.clear()
    if how == "put":
        tier.put_from(SEGMENT, source())
    elif how == "same again":
        tier.put(PLAN, b"plan")
    else:
        tier.delete(PLAN)
    assert unpublished(tier) == ["of-another-writer"]


def test_a_name_that_could_not_be_removed_once_goes_with_the_same_put(
    tier: FileTier, monkeypatch: pytest.MonkeyPatch
):
    real, failed = os.unlink, []

    def unlink(path: str | os.PathLike[str], **where: int) -> None:
        if not failed:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path, **where)

    monkeypatch.setattr(os, "unlink", unlink)
    tier.put_from(SEGMENT, source())
    assert failed
    assert unpublished(tier) == []


def test_a_disk_from_which_nothing_can_be_removed_does_not_fill_up(
    tier: FileTier, unlinking: set[str]
):
    unlinking.add("")
    for _ in range(folder_module.LEFT_MAX + 5):
        failpoints.arm("tier.file.write=eio")
        with pytest.raises(TierUnavailableError):
            tier.put_from(SEGMENT, source(1))
    failpoints.arm("")
    with pytest.raises(TierUnavailableError, match="Read-only"):
        tier.put_from(SEGMENT, source(1))
    left = unpublished(tier)
    assert len(left) == folder_module.LEFT_MAX
    assert visible(tier) == []
    # One that stays for ever keeps no other one there, and nothing out.
    unlinking.clear()
    unlinking.add(str(tier.root / "tmp" / left[0]))
    tier.put_from(SEGMENT, source(1))
    assert unpublished(tier) == [left[0]]
    assert visible(tier) == [SEGMENT]


def test_failure_of_a_write_in_the_background_is_not_lost(tier: FileTier):
    for nth in (1, 2, 3, 4):
        failpoints.arm(f"tier.file.write=eio@{nth}")
        with pytest.raises(TierUnavailableError):
            tier.put_from(SEGMENT, source())
        assert unpublished(tier) == []
        assert visible(tier) == []


def test_more_than_the_disk_has(tier: FileTier):
    class Huge(SampleSource):
        def __init__(self) -> None:
            super().__init__(b"")
            self.size = 1 << 60

    with pytest.raises(CapacityError) as caught:
        tier.put_from(SEGMENT, Huge())
    assert caught.value.needed_bytes == 1 << 60
    assert 0 < caught.value.available_bytes < 1 << 60


@pytest.mark.parametrize("trusting", [False, True])
@pytest.mark.parametrize("kind", ["small_disk", "small_tmpfs"])
def test_disk_full(
    request: pytest.FixtureRequest, kind: str, trusting: bool, monkeypatch: pytest.MonkeyPatch
):
    """A real file system of a few MiB; what is there stays whole, and space comes back."""
    tier = FileTier("disk", request.getfixturevalue(kind), "run")
    if trusting:  # as if others had filled it between the check and the writes
        monkeypatch.setattr(FileTier, "_check_space", lambda *_: None)

    def fill_up() -> None:
        for number in range(20):
            tier.put_from(f"segments/{segment_name(number)}", source(1, number))

    with pytest.raises(CapacityError):
        fill_up()
    stored = len(visible(tier))
    assert 0 < stored < 20
    assert unpublished(tier) == []
    for number in range(stored):
        wanted = source(1, number).data
        assert tier.get(f"segments/{segment_name(number)}", limit=len(wanted)) == wanted
    tier.delete(f"segments/{segment_name(0)}")
    tier.put_from(f"segments/{segment_name(50)}", source(1, 50))
    tier.close()


def test_io_errors_while_reading(tier: FileTier, monkeypatch: pytest.MonkeyPatch):
    tier.put_from(SEGMENT, source(1))
    with tier.open(SEGMENT) as opened:

        def fail(*_: object) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(TierUnavailableError):
            opened.read_into(0, memoryview(bytearray(10)))


# --- direct I/O -----------------------------------------------------------------------------------


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def test_direct_where_it_works(tier: FileTier, monkeypatch: pytest.MonkeyPatch):
    modes: list[bool] = []
    pwrite = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, *a: (modes.append(is_direct(fd)), pwrite(fd, *a))[1]
    )
    tier.put_from(SEGMENT, source(2))
    if not any(modes):
        pytest.skip("no direct I/O on this file system")
    assert all(modes)
    with tier.open(SEGMENT) as opened:
        assert opened.direct
        assert is_direct(opened.fileno())
        buffer = aligned_buffer(opened.size)
        opened.read_into(0, buffer)
        assert bytes(buffer) == source(2).data


def test_an_object_that_does_not_end_on_a_page(tier: FileTier):
    data = bytes(range(256)) * 40000 + b"tail"
    tier.put_from(SEGMENT, SampleSource(data))
    assert tier.get(SEGMENT, limit=len(data)) == data


def test_truncated_segments_open_with_what_is_left(tier: FileTier):
    tier.put_from(SEGMENT, source(2))
    for size in (BLOCK_BYTES + 5, 4096, 0):
        os.truncate(tier.root / SEGMENT, size)
        with tier.open(SEGMENT) as opened:
            assert opened.size == size
            data = bytearray(size)
            opened.read_into(0, memoryview(data))
            assert data == source(2).data[:size]
            with pytest.raises(IntegrityError):
                opened.read_into(size, memoryview(bytearray(1)))


def test_truncated_while_open(tier: FileTier):
    tier.put_from(SEGMENT, source(2))
    with tier.open(SEGMENT) as opened:
        os.truncate(tier.root / SEGMENT, 4096)
        with pytest.raises(IntegrityError, match="truncated"):
            opened.read_into(0, memoryview(bytearray(9000)))
        with pytest.raises(IntegrityError, match="truncated"):
            opened.read_into(0, aligned_buffer(8192))


# --- the folder -----------------------------------------------------------------------------------


def test_one_agent_per_folder(tier: FileTier, tmp_path: Path):
    with pytest.raises(TierUnavailableError, match="another agent"):
        FileTier("disk", tmp_path / "store", "run")
    FileTier("disk", tmp_path / "store", "another").close()
    shared = FileTier("disk", tmp_path / "store", "run", scope=Scope.SHARED)
    (tmp_path / "store" / "run" / "tmp" / "of-another-host").write_text("x")
    shared.close()
    assert unpublished(tier) == ["of-another-host"], "a shared tier's tmp is not ours to sweep"
    tier.close()
    tier.close()
    again = FileTier("disk", tmp_path / "store", "run")
    assert unpublished(again) == []
    again.close()


def test_read_only_changes_nothing(tier: FileTier, tmp_path: Path):
    tier.put(PLAN, b"x")
    (tier.root / "tmp" / "half").write_text("x")
    looking = FileTier("disk", tmp_path / "store", "run", read_only=True)
    assert looking.get(PLAN, limit=1) == b"x"
    assert unpublished(tier) == ["half"]
    for change in (
        lambda: looking.put(PLAN, b"y"),
        lambda: looking.put_from(SEGMENT, source()),
        lambda: looking.delete(PLAN),
    ):
        with pytest.raises(UsageError):
            change()
    nowhere = FileTier("disk", tmp_path / "missing", "run", read_only=True)
    assert list(nowhere.list("plans/")) == []
    with pytest.raises(NotFoundError):
        nowhere.get(PLAN, limit=1)
    assert not (tmp_path / "missing").exists()


def test_hostile_things_in_the_folder(tier: FileTier):
    tier.put(PLAN, b"x")
    plans = tier.root / "plans"
    os.mkfifo(plans / ("0" * 32))
    (plans / ("1" * 32)).symlink_to("/etc/passwd")
    (plans / ("2" * 32)).mkdir()
    (plans / ".hidden").write_text("x")
    (plans / "white space").write_text("x")
    assert visible(tier) == [PLAN]
    for number in "012":
        key = "plans/" + number * 32
        for ask in (tier.open, tier.info, lambda key: tier.get(key, limit=10)):
            with pytest.raises(IntegrityError):
                ask(key)
        with pytest.raises(UsageError):
            tier.put(key, b"x")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_folder_without_permission(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(TierUnavailableError):
        FileTier("disk", tmp_path / "store", "run")


def test_a_file_where_the_folder_should_be(tmp_path: Path):
    (tmp_path / "store").write_text("x")
    with pytest.raises(TierUnavailableError):
        FileTier("disk", tmp_path / "store", "run")
    with pytest.raises(ValueError):
        FileTier("disk", tmp_path, "../x")


def test_the_folder_vanishes(tier: FileTier):
    tier.put(PLAN, b"x")
    (tier.root / "plans").rename(tier.root / "moved")
    (tier.root / "tmp").rmdir()
    with pytest.raises(TierUnavailableError):
        tier.put("plans/" + "00" * 16, b"x")
    with pytest.raises(NotFoundError):
        tier.get(PLAN, limit=1)
    tier.delete(PLAN)


def test_urls():
    assert folder_of_url("file:///mnt/nvme/ck%20pt#1") == Path("/mnt/nvme/ck%20pt#1")
    for url in (
        "/mnt/nvme",
        "file://host/x",
        "file:x",
        "s3://bucket/x",
        "file:///a\0b",
    ):
        with pytest.raises(ConfigError):
            folder_of_url(url)


def test_files_are_private(tier: FileTier):
    tier.put(PLAN, b"x")
    assert (tier.root / PLAN).stat().st_mode & 0o777 == 0o600
    assert tier.root.stat().st_mode & 0o777 == 0o700


def test_file_systems_that_cannot_sync_a_folder(tier: FileTier, monkeypatch: pytest.MonkeyPatch):
    fsync = os.fsync

    def refuse(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(22, "Invalid argument")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    tier.put(PLAN, b"x")
    assert folder_module.key_parts(PLAN) == ["plans", "ab" * 16]


def test_a_tier_that_fails_to_open_does_not_keep_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails(self: folder_module.ObjectFolder) -> int:
        raise TierUnavailableError("the disk does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(folder_module.ObjectFolder, "sweep", fails)
        with pytest.raises(TierUnavailableError, match="does not answer"):
            FileTier("disk", tmp_path, "run")
    FileTier("disk", tmp_path, "run").close()


def test_whose_a_folder_is_that_may_not_be_read(tmp_path: Path):
    tmp_path.chmod(0o700)
    whose = rf"; {tmp_path} belongs to user {os.geteuid()} \(mode 0700\)"
    with (
        pytest.raises(TierUnavailableError, match=whose),
        folder_module.medium("disk", "list a folder"),
    ):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "no" / "file"))
    assert denied(PermissionError(errno.EPERM, "of a descriptor")) == ""
    assert denied(FileNotFoundError(errno.ENOENT, "not there", str(tmp_path))) == ""
