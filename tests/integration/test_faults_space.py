"""Full disks, full tmpfs, failing disks: training and memory go on, the rest catches up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.faults import (
    MIB,
    Site,
    Trainer,
    eventually,
    new_runtime_dir,
    remove_runtime_dir,
    small_tmpfs,
)
from tieredckpt.errors import CapacityError, NoRecoverableCheckpointError

OPTIONS = {"seed": 5, "mib": 4.0}


def tier_of(trainer: Trainer):
    return trainer.status().tiers[0]


def check_disk_alone(disk: Path, step: int, **options: float) -> None:
    """A host that has nothing but this disk restores ``step`` from it."""
    runtime_dir = new_runtime_dir()
    try:
        with Site(runtime_dir, disk).opened(**options) as trainer:
            loaded = trainer.load()
            assert (loaded.step, loaded.wrong, loaded.refused) == (step, [], ())
            for number, save_id, _ in trainer.checkpoints():
                assert trainer.load_save(save_id, number).wrong == []
    finally:
        remove_runtime_dir(runtime_dir)


def fill(folder: Path, *, leave: int = 0) -> Path:
    """A file that takes all space of a file system but ``leave`` bytes."""
    ballast = folder / "ballast"
    with ballast.open("wb") as file:
        space = os.statvfs(folder)
        os.posix_fallocate(file.fileno(), 0, max(4096, space.f_bavail * space.f_frsize - leave))
    return ballast


@contextmanager
def mounted(folder: Path, size_bytes: int) -> Iterator[Path]:
    try:
        with small_tmpfs(folder, size_bytes) as place:
            yield place
    except PermissionError as error:
        pytest.skip(f"cannot mount a small tmpfs here: {error}")


# --- the file tier -------------------------------------------------------------------------------


def test_a_full_disk(runtime_dir: Path, tmp_path: Path):
    """Saves go on in memory, status shows the lag and why; once there is space, it catches up."""
    with mounted(tmp_path / "disk", 20 * MIB) as disk:  # what is kept fits, and one more
        site = Site(runtime_dir, disk)
        with site.opened(**OPTIONS) as trainer:
            ballast = fill(disk, leave=7 * MIB)
            trainer.save(1)
            trainer.wait(1, "disk")
            for step in (2, 3, 4):
                trainer.save(step)
                loaded = trainer.load()
                assert (loaded.step, loaded.wrong, loaded.refused) == (step, [], ())

            def shown() -> None:
                tier = tier_of(trainer)
                assert tier.error
                assert "space" in tier.error.lower()
                assert (tier.newest_step, tier.lag_steps) == (1, 3)

            eventually(shown)
            # A failed write gives back what it took: no half checkpoint fills the disk.
            eventually(lambda: list((disk / "run" / "tmp").iterdir()) == [])
            assert len(list((disk / "run" / "segments").iterdir())) == 1
            ballast.unlink()
            trainer.wait(4, "disk")
            tier = tier_of(trainer)
            assert (tier.error, tier.newest_step, tier.lag_steps) == (None, 4, 0)
        site.kill_agent()
        check_disk_alone(disk, 4, **OPTIONS)


def test_a_failing_disk_spoils_no_other(runtime_dir: Path, tmp_path: Path):
    """Two tiers, one of them full: the other one is up to date."""
    with mounted(tmp_path / "full", 14 * MIB) as full:
        site = Site(runtime_dir, tmp_path / "disk")
        site.config["tiers"].insert(
            0, {"name": "full", "url": f"file://{full}", "every": "save", "keep": {"last": 2}}
        )
        with site.opened(**OPTIONS) as trainer:
            trainer.save(1)
            trainer.wait(1, "full")
            ballast = fill(full)
            for step in (2, 3, 4, 5):
                trainer.save(step)
                trainer.wait(step, "disk")
            first, second = trainer.status().tiers
            assert (first.name, first.newest_step, first.lag_steps) == ("full", 1, 4)
            assert first.error
            assert (second.newest_step, second.lag_steps, second.error) == (5, 0, None)
            ballast.unlink()
            trainer.wait(5, "full")
        site.kill_agent()
        check_disk_alone(tmp_path / "disk", 5, **OPTIONS)


@pytest.mark.full
def test_a_disk_that_disappears_and_comes_back(runtime_dir: Path, tmp_path: Path):
    """The tier's folder is replaced by a file: unavailable, shown, and found again."""
    disk = tmp_path / "disk"
    site = Site(runtime_dir, disk)
    with site.opened(**OPTIONS) as trainer:
        trainer.save(1)
        trainer.wait(1, "disk")
        disk.rename(tmp_path / "away")
        disk.write_bytes(b"no folder")
        trainer.save(2)
        eventually(lambda: tier_of(trainer).error is not None)
        loaded = trainer.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (2, [], ())
    site.kill_agent()
    with site.opened(**OPTIONS) as trainer:
        loaded = trainer.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (2, [], ())
        trainer.save(3)
        disk.unlink()
        (tmp_path / "away").rename(disk)
        trainer.save(4)
        trainer.wait(4, "disk")
    site.kill_agent()
    check_disk_alone(disk, 4, **OPTIONS)


def test_a_lost_disk_is_no_reason_to_start_afresh(runtime_dir: Path, tmp_path: Path):
    """Memory is empty and the disk does not answer: nobody may say that there is nothing."""
    disk = tmp_path / "disk"
    site = Site(runtime_dir, disk)
    with site.opened(**OPTIONS) as trainer:
        trainer.save(1)
        trainer.wait(1, "disk")
    site.lose_memory()
    disk.rename(tmp_path / "away")
    disk.write_bytes(b"no folder")
    with site.opened(**OPTIONS) as trainer:
        with pytest.raises(NoRecoverableCheckpointError, match="disk"):
            trainer.load()
        disk.unlink()
        (tmp_path / "away").rename(disk)
        loaded: list[int | None] = []

        def found() -> bool:
            try:
                loaded.append(trainer.load().step)
            except NoRecoverableCheckpointError:
                return False
            return True

        eventually(found)
        assert loaded == [1]


# --- memory --------------------------------------------------------------------------------------


def test_capacity_too_small(runtime_dir: Path, tmp_path: Path):
    """Refused with numbers before a byte is copied; a state that fits is saved as before."""
    site = Site(runtime_dir, tmp_path / "disk", capacity="24MiB")
    with site.opened(seed=5, mib=1.0) as trainer:
        trainer.save(1)
        trainer.wait(1, "disk")
        trainer.close()
    with site.opened(seed=5, mib=16.0) as trainer:
        # The structure differs, so nothing is loaded; this stream begins anew.
        for _ in range(3):
            with pytest.raises(CapacityError, match="capacity") as caught:
                trainer.save(2, stream="large")
            assert caught.value.needed_bytes > caught.value.available_bytes
    with site.opened(seed=5, mib=1.0) as trainer:
        loaded = trainer.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (1, [], ())
        trainer.save(2)
        trainer.wait(2, "disk")


@pytest.mark.full
def test_a_tmpfs_that_is_too_small(tmp_path: Path):
    """As containers have it: CapacityError that says what to do, never SIGBUS."""
    with mounted(tmp_path / "shm", 16 * MIB) as shm:
        (runtime_dir := shm / "run").mkdir(mode=0o700)
        site = Site(runtime_dir, tmp_path / "disk")
        with site.opened(seed=5, mib=8.0) as trainer:
            for _ in range(2):
                with pytest.raises(CapacityError, match="shm"):
                    trainer.save(1)
            assert trainer.load().step is None
            assert os.statvfs(shm).f_bavail * os.statvfs(shm).f_frsize > 14 * MIB
        with site.opened(seed=5, mib=1.0) as trainer:
            for step in (1, 2, 3, 4):
                trainer.save(step)
            trainer.wait(4, "disk")
            assert trainer.load().wrong == []
