"""A trainer that is killed, stopped or superseded at any instant of a save."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import (
    Site,
    Trainer,
    eventually,
    new_runtime_dir,
    remove_runtime_dir,
)
from tieredckpt.errors import (
    NoRecoverableCheckpointError,
    NotFoundError,
    StaleAttemptError,
)

STAGES = [
    "save.reserve.before",
    "save.reserve.after",
    "save.copy",
    "save.copy@2",
    "save.seal.before",
    "save.seal.after",
    "save.commit.before",
    "save.commit.after",
]

NIGHTLY = [pytest.mark.nightly]


@pytest.fixture(scope="module")
def host() -> Iterator[Path]:
    """One agent for many runs, each in a namespace of its own, as on a real host."""
    folder = new_runtime_dir()
    try:
        yield folder
    finally:
        remove_runtime_dir(folder)


def kill_at(stage: str) -> str:
    name, _, nth = stage.partition("@")
    return f"{name}=kill" + (f"@{nth}" if nth else "")


def slots_in_use(trainer: Trainer) -> int:
    status = trainer.status()
    return int(status.slots - status.free_slots)


def test_killed_by_its_environment_in_its_very_first_save(host: Path):
    site = Site(host, None, namespace="first")
    with Trainer() as first:
        first.open(site.config, "save.copy=kill", again=True)
        first.start("save", 1)
        first.dies()
    with site.opened() as second:
        assert second.load().step is None
        second.save(1)
        assert second.load().wrong == []


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_killed_again_and_again(host: Path, seed: int):
    """Nine lives, each of which ends somewhere else."""
    chance = random.Random(seed)
    site = Site(host, None, namespace=f"again-{seed}")
    newest = 0
    for _ in range(9):
        with site.opened(seed=seed, mib=2.0) as trainer:
            loaded = trainer.load()
            assert (loaded.step, loaded.wrong) == (newest or None, [])
            for _ in range(chance.randrange(4)):
                newest += 1
                trainer.save(newest)
            stage = chance.choice(STAGES[:3] + STAGES[4:])
            trainer.arm(kill_at(stage))
            trainer.start("save", newest + 1)
            trainer.dies()
            newest += stage == "save.commit.after"
    with site.opened(seed=seed, mib=2.0) as trainer:
        eventually(lambda: slots_in_use(trainer) == min(newest, site.keep))


# --- roll-backs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wipe", [False, True], ids=["memory", "disk"])
def test_roll_back_new_saves_and_a_restart(runtime_dir: Path, tmp_path: Path, wipe: bool):
    site = Site(runtime_dir, tmp_path / "disk", keep=8, disk_keep=20)

    def forget() -> None:
        if wipe:
            site.lose_memory()

    with site.opened() as first:
        ids = {step: first.save(step) for step in (80, 90, 100)}
        first.wait(100, "disk")
    forget()
    with site.opened() as second:
        loaded = second.load(step=80, abandon_newer=True)
        assert (loaded.step, loaded.wrong) == (80, [])
        second.save(85)
        ids[95] = second.save(95)
        second.wait(95, "disk")
    forget()
    with site.opened() as third:
        assert [step for step, _, _ in third.checkpoints()] == [95, 85, 80]
        loaded = third.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (95, [], ())
        assert loaded.save_id == ids[95]
        with pytest.raises((NotFoundError, NoRecoverableCheckpointError)):
            third.load(step=100)
        assert third.load_save(ids[100], 100).wrong == []
        third.save(105)
        assert [step for step, _, _ in third.checkpoints()] == [105, 95, 85, 80]
        third.wait(105, "disk")
    forget()
    with site.opened() as fourth:
        loaded = fourth.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (105, [], ())


@pytest.mark.parametrize("agent_dies", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_restart_directly_after_a_roll_back(
    runtime_dir: Path, tmp_path: Path, saved: bool, agent_dies: bool
):
    """A roll-back counts with the first save, and then for every restart."""
    site = Site(runtime_dir, tmp_path / "disk", keep=8, disk_keep=20)
    with site.opened() as first:
        for step in (80, 90, 100):
            first.save(step)
        first.wait(100, "disk")
    with site.opened() as second:
        assert second.load(step=80, abandon_newer=True).step == 80
        if saved:
            second.save(81)
        second.kill()
    if agent_dies:
        site.kill_agent()
    line = [81, 80] if saved else [100, 90, 80]
    with site.opened() as third:
        assert [step for step, _, _ in third.checkpoints()] == line
        loaded = third.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (line[0], [], ())
        third.save(101)
        assert [step for step, _, _ in third.checkpoints()] == [101, *line]


@pytest.mark.parametrize("back", [0, 2])
def test_an_agent_that_cannot_note_that_an_attempt_begins(runtime_dir: Path, back: int):
    """Its checkpoints tell of it; the saves that follow are the newest ones of a restart."""
    site = Site(runtime_dir, None, keep=9)
    with site.opened() as trainer:
        for step in (1, 2, 3):
            trainer.save(step)
        records = runtime_dir / "ns" / "run" / "attempts"
        records.rename(runtime_dir / "ns" / "run" / "away")
        records.write_bytes(b"no folder")
        trainer.load(**({"step": back, "abandon_newer": True} if back else {}))
        trainer.save(4)
        records.unlink()
        (runtime_dir / "ns" / "run" / "away").rename(records)
        trainer.save(5)
        assert [step for step, _, _ in trainer.checkpoints()][:2] == [5, 4]
    with site.opened() as trainer:
        loaded = trainer.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (5, [], ())


# --- zombies -------------------------------------------------------------------------------------


def test_a_zombie_that_opened_before_anything_was_saved(runtime_dir: Path):
    """Two trainers start; the one that saves second has a newer attempt, the first is stale."""
    site = Site(runtime_dir, None)
    with site.opened() as old, site.opened() as new:
        old.save(1)
        assert new.load().step == 1
        new.save(2)
        with pytest.raises(StaleAttemptError):
            old.save(2)
        assert [step for step, _, _ in new.checkpoints()] == [2, 1]


@pytest.mark.parametrize("saved", [0, 1])
def test_a_zombie_that_stood_still_in_its_first_load(runtime_dir: Path, saved: int):
    """It may not take over from who went on meanwhile, nor abandon what that one saved."""
    site = Site(runtime_dir, None)
    with site.opened() as old, site.opened() as new:
        if saved:
            with site.opened() as first:
                first.save(1)
        old.arm("load.attempt.before=stop" if saved else "load.choose=stop")
        old.start("load")
        eventually(lambda: Path(f"/proc/{old.pid}/stat").read_text().split()[2] == "T")
        assert new.load().step == (saved or None)
        new.save(2)
        old.signal(signal.SIGCONT)
        if saved:
            assert old.result().step == saved  # to look does no harm
            with pytest.raises(StaleAttemptError, match="while this one loaded"):
                old.save(3)
            new.save(3)
            assert [step for step, _, _ in new.checkpoints()] == [3, 2]
        else:
            assert old.result().step == 2  # it had not chosen yet
        assert old.load().wrong == []  # asked again, it takes over


@pytest.mark.parametrize(
    "stage",
    ["save.attempt.before", "save.attempt.after", "agent.attempt.before_record",
     "agent.attempt.after_record"],
)  # fmt: skip
def test_killed_while_a_run_takes_over(runtime_dir: Path, stage: str):
    """Whoever dies in a run's first save leaves one line, and nobody who has to choose."""
    site = Site(runtime_dir, None, keep=8)
    with site.opened(seed=1) as first:
        first.save(1)
    agent = stage.startswith("agent.")
    with Trainer(seed=2) as second:
        site.kill_agent()
        second.open(site.config, stage + "=kill")
        assert second.load(seeds={1: 1}).step == 1
        if agent:
            second.save(2)  # the next agent has it again, or still
        else:
            second.start("save", 2)
            second.dies()
    with site.opened(seed=3) as third:
        loaded = third.load(seeds={1: 1, 2: 2})
        assert (loaded.step, loaded.wrong) == (2 if agent else 1, [])
        third.save(3)
        assert [step for step, _, _ in third.checkpoints()] == ([3, 2, 1] if agent else [3, 1])


def test_a_zombie_after_memory_was_lost(runtime_dir: Path, tmp_path: Path):
    """The disk alone tells the next agent that somebody has taken over."""
    site = Site(runtime_dir, tmp_path / "disk")
    with site.opened(seed=1) as old:
        old.save(1)
        old.wait(1, "disk")
        with site.opened(seed=2) as new:
            assert new.load().step == 1
            new.save(2)
            new.wait(2, "disk")
        site.lose_memory()
        for step in (2, 3):
            with pytest.raises(StaleAttemptError):
                old.save(step)
        with site.opened(seed=2) as last:
            assert [step for step, _, _ in last.checkpoints()] == [2, 1]
            loaded = last.load()
            assert (loaded.step, loaded.wrong, loaded.refused) == (2, [], ())
