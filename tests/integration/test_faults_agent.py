"""An agent that is killed or stopped at any instant of a reservation, seal, commit or spill."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.faults import (
    Site,
    Trainer,
    death,
    eventually,
    new_runtime_dir,
    on_all,
    ranks,
    remove_runtime_dir,
)
from tieredckpt.errors import AgentError, TieredCkptError, TierUnavailableError

REQUESTS = [
    "agent.reserve.after_label",
    "agent.seal.before_label",
    "agent.seal.after_label",
    "agent.commit.before_plan",
    "agent.commit.before_manifest",
    "agent.commit.after_manifest",
]
# Point, which time, and the step in whose spill that certainly is (0: it shows).
NIGHTLY = [pytest.mark.nightly]
SPILL = [
    pytest.param("agent.spill.segment", 1, 0, marks=NIGHTLY),
    ("agent.spill.segment", 5, 0),
    ("agent.spill.before_plan", 1, 0),
    pytest.param("agent.spill.before_manifest", 1, 0, marks=NIGHTLY),
    ("agent.spill.before_manifest", 2, 0),
    pytest.param("agent.spill.after_manifest", 1, 1, marks=NIGHTLY),
    ("agent.spill.after_manifest", 2, 2),
    ("agent.retention.after_manifest_delete", 1, 3),
    *(
        pytest.param(f"tier.file.{name}", nth, 0, marks=[] if nth == quick else NIGHTLY)
        for name, quick in (("write", 3), ("fsync", 2), ("link", 3), ("publish", 1))
        for nth in range(1, 10)
    ),
]


def armed(point: str, action: str = "kill", nth: int = 1) -> str:
    return f"{point}={action}@{nth}"


def check_committed(site: Site, done: list[int], unknown: list[int], **options: float) -> None:
    """After a restart: all that was committed, perhaps what was unknown, and new saves work."""
    with site.opened(**options) as trainer:
        steps = [step for step, _, _ in trainer.checkpoints()]
        loaded = trainer.load()
        assert (loaded.wrong, loaded.refused) == ([], ())
        assert loaded.step in (done[-1:] or [None]) + unknown
        assert set(steps) <= set(done + unknown)
        assert steps == sorted(steps, reverse=True)
        newest = max(done + unknown)
        for step in (newest + 1, newest + 2):
            trainer.save(step)
        if site.disk:
            trainer.wait(newest + 2, "disk")
        trainer.close()
    with site.opened(**options) as trainer:
        eventually(lambda: (status := trainer.status()).slots - status.free_slots == site.keep)
        assert trainer.load().step == newest + 2


@pytest.mark.parametrize(
    ("point", "nth"),
    [(point, 3) for point in REQUESTS]
    + [pytest.param(point, 1, marks=[] if n % 2 else NIGHTLY) for n, point in enumerate(REQUESTS)],
)
def test_killed_inside_a_request(runtime_dir: Path, tmp_path: Path, point: str, nth: int):
    """The trainer goes on with a new agent, or hears of it and goes on at its next save."""
    site = Site(runtime_dir, tmp_path / "disk" if nth > 1 else None)
    done: list[int] = []
    unknown: list[int] = []
    texts: list[str] = []
    again = nth > 1 and "reserve" in point  # in steady use a slot is granted with the last seal
    with Trainer(seed=nth, mib=2.0) as trainer:
        agent = trainer.open(site.config, armed(point, nth=2 if again else nth))
        with death(agent):
            for step in range(1, 7):
                if again and step == 4:
                    trainer.close()
                    trainer.open(site.config)
                    assert trainer.load().step == 3
                try:
                    trainer.save(step)
                except TierUnavailableError as error:
                    unknown.append(step)
                    texts.append(str(error))
                else:
                    done.append(step)
        assert len(unknown) <= 1
        assert all("agent" in text for text in texts)
        assert done[-1] == 6
        loaded = trainer.load()
        assert (loaded.step, loaded.wrong) == (6, [])
    check_committed(site, done, unknown, seed=nth, mib=2.0)


@pytest.mark.parametrize("point", ["agent.seal.before_label", "agent.commit.before_manifest"])
def test_killed_with_its_trainer(runtime_dir: Path, tmp_path: Path, point: str):
    """Nobody is left: what was committed is there, what was not leaves nothing behind."""
    site = Site(runtime_dir, tmp_path / "disk")
    with Trainer(mib=2.0) as trainer:
        agent = trainer.open(site.config, armed(point, nth=3))
        for step in (1, 2):
            trainer.save(step)
        with death(agent):
            trainer.start("save", 3)
        trainer.kill()
    with site.opened(mib=2.0) as trainer:
        found = trainer.load()
        assert (found.step, found.wrong, found.refused) in [(2, [], ()), (3, [], ())]
        trainer.wait(2, "disk")
        held = min(found.step, site.keep)
        eventually(lambda: (status := trainer.status()).slots - status.free_slots == held)
    check_committed(site, [1, 2], [3], mib=2.0)


def test_an_agent_that_dies_again_and_again_is_a_clear_error(runtime_dir: Path):
    """Each new agent dies in the same commit: the save says so in time, and nothing is lost."""
    site = Site(runtime_dir, None, timeout="2s")
    with Trainer() as trainer:
        trainer.open(site.config)
        for step in (1, 2):
            trainer.save(step)
        site.kill_agent()
        trainer.close()
    with Trainer() as trainer:
        trainer.open(site.config, "agent.commit.before_manifest=kill", again=True)
        assert trainer.load().step == 2
        begun_s = time.monotonic()
        with pytest.raises(TierUnavailableError, match="agent"):
            trainer.save(3)
        assert time.monotonic() - begun_s < 30
    site.kill_agent()
    check_committed(site, [1, 2], [3])


@contextmanager
def only_this_disk(disk: Path, **more: int):
    """A host that has nothing but a disk."""
    runtime_dir = new_runtime_dir()
    try:
        yield Site(runtime_dir, disk, **more)
    finally:
        remove_runtime_dir(runtime_dir)


@pytest.mark.parametrize(("point", "nth", "last"), SPILL)
def test_killed_inside_a_spill(runtime_dir: Path, tmp_path: Path, point: str, nth: int, last: int):
    """The disk has whole checkpoints at that instant, and all of them once a new agent came."""
    # Memory keeps more, so that the first to be deleted is one on the disk.
    site = Site(runtime_dir, tmp_path / "disk", keep=4, disk_keep=2)
    options = {"seed": nth, "mib": 8.0}
    with Trainer(**options) as starter, Trainer(**options) as trainer:
        agent = starter.open(site.config, armed(point, nth=nth))
        starter.kill()
        # It starts no agent when this one dies, so the disk stays as it was.
        trainer.open({**site.config, "agent": {**site.config["agent"], "start": "never"}})
        spilled = []
        with death(agent):
            for step in range(1, 9):
                try:
                    trainer.save(step)
                    if step == last:
                        break
                    trainer.wait(step, "disk")
                except TierUnavailableError:
                    break
                spilled.append(step)
    assert site.agents() == []
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "disk", half)
    with site.opened(**options) as trainer:
        assert trainer.load().step in ({step, step - 1} if step > 1 else {1, None})
        trainer.save(step + 1)
        trainer.wait(step + 1, "disk")
        assert trainer.load().step == step + 1
    # What lay on the disk at that instant, on a host that has nothing else.
    with only_this_disk(half, disk_keep=2) as lone, lone.opened(**options) as trainer:
        found = trainer.checkpoints()
        steps = {number for number, _, _ in found}
        assert steps == set(spilled[-2:]) or set(spilled[-1:]) < steps <= {*spilled[-2:], step}
        loaded = trainer.load()
        assert (loaded.wrong, loaded.refused) == ([], ())
        assert loaded.step == (found[0][0] if found else None)
        for number, save_id, _ in found:
            assert trainer.load_save(save_id, number).wrong == []
    # What lies there now, likewise: the spill was taken up again, and nothing was left behind.
    site.kill_agent()
    disk = tmp_path / "disk"
    with only_this_disk(disk, disk_keep=2) as lone, lone.opened(**options) as trainer:
        loaded = trainer.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (step + 1, [], ())
        assert len(trainer.checkpoints()) == 2
        assert len(list((disk / "run" / "segments").iterdir())) == 2
        assert list((disk / "run" / "tmp").iterdir()) == []


@pytest.mark.parametrize("point", ["agent.spill.segment", "agent.spill.before_manifest"])
def test_a_spill_is_completed_by_the_next_agent_without_new_saves(
    runtime_dir: Path, tmp_path: Path, point: str
):
    site = Site(runtime_dir, tmp_path / "disk")
    with Trainer(mib=4.0) as trainer:
        agent = trainer.open(site.config, armed(point))
        with death(agent):
            trainer.save(1)
        trainer.kill()
    with site.opened(mib=4.0) as trainer:
        trainer.wait(1, "disk")
        assert trainer.checkpoints()[0][2] == ("memory", "disk")
    site.kill_agent()
    with only_this_disk(tmp_path / "disk") as lone, lone.opened(mib=4.0) as trainer:
        loaded = trainer.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (1, [], ())
        assert set(loaded.bytes_by_tier) == {"disk"}


@pytest.mark.parametrize("point", ["agent.seal.after_label", "agent.commit.before_manifest"])
def test_killed_under_two_ranks(runtime_dir: Path, tmp_path: Path, point: str):
    site = Site(runtime_dir, tmp_path / "disk")
    done, unknown = [], []
    with ranks(2, mib=3.0) as group:
        agent = on_all(group, lambda rank: ("open", site.config, armed(point, nth=3)))[0]
        with death(agent):
            for step in range(1, 6):
                for each in group:
                    each.start("save", step)
                failed = []
                for each in group:
                    try:
                        each.result()
                    except TieredCkptError as error:
                        failed.append(error)
                assert len(failed) in (0, 2), failed
                assert all("agent" in str(error) for error in failed)
                (unknown if failed else done).append(step)
        assert len(unknown) <= 1
        assert done[-1] == 5
        for loaded in on_all(group, lambda rank: ("load",)):
            assert (loaded.step, loaded.wrong, loaded.refused) == (5, [], ())
        group[0].wait(5, "disk")


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(30))
def test_killed_at_any_time(runtime_dir: Path, tmp_path: Path, seed: int):
    """Agents die after a random time, several times; trainers go on, the disk stays whole."""
    chance = random.Random(seed)
    site = Site(runtime_dir, tmp_path / "disk")
    saved, unknown = [], []
    with site.opened(seed=seed, mib=4.0) as trainer:
        for step in range(1, 40):
            trainer.start("save", step)
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.05)  # not to wait for anything: a random instant
                site.kill_agent()
            try:
                trainer.result()
                saved.append(step)
            except TierUnavailableError:
                unknown.append(step)
        assert len(unknown) < 10
        loaded = trainer.load()
        assert loaded.wrong == []
        assert loaded.step == max(saved) or loaded.step in unknown
    check_committed(site, saved, unknown, seed=seed, mib=4.0)


# --- an agent that stands still ------------------------------------------------------------------


@contextmanager
def stopped(pid: int):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_stopped_during_saves(runtime_dir: Path, tmp_path: Path):
    """A deadline, a clear error, and after SIGCONT all goes on as if nothing had been."""
    site = Site(runtime_dir, tmp_path / "disk", timeout="1s")
    with site.opened(mib=2.0) as trainer:
        for step in (1, 2):
            trainer.save(step)
        begun_s = time.monotonic()
        with stopped(site.agent()):
            with pytest.raises(AgentError, match="agent"):
                trainer.save(3)
            assert time.monotonic() - begun_s < 20
        for step in (4, 5):
            trainer.save(step)
        loaded = trainer.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (5, [], ())
        trainer.wait(5, "disk")
    check_committed(site, [1, 2, 4, 5], [3], mib=2.0)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("agent.reserve.after_label", marks=pytest.mark.nightly),
        pytest.param("agent.seal.before_label", marks=pytest.mark.nightly),
        "agent.seal.after_label",
        pytest.param("agent.commit.before_manifest", marks=pytest.mark.nightly),
        "agent.commit.after_manifest",
    ],
)
def test_stopped_inside_a_request(runtime_dir: Path, point: str):
    """The outcome is unknown to the trainer; whatever it was, it is whole."""
    site = Site(runtime_dir, None, timeout="1s")
    with Trainer(mib=2.0) as trainer:
        agent = trainer.open(site.config, armed(point, "stop", nth=3))
        failed = []
        for step in range(1, 8):
            try:
                trainer.save(step)
            except AgentError:
                failed.append(step)
                os.kill(agent, signal.SIGCONT)
        assert len(failed) == 1
        done = [step for step in range(1, 8) if step not in failed]
        loaded = trainer.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (7, [], ())
    check_committed(site, done, failed, mib=2.0)


def test_loading_and_opening_with_a_stopped_agent(runtime_dir: Path):
    site = Site(runtime_dir, None, timeout="1s", more={})
    site.config["agent"]["start_timeout"] = "1s"
    with site.opened() as trainer, Trainer() as late:
        trainer.save(1)
        with stopped(site.agent()):
            late.start("open", site.config)
            with pytest.raises(AgentError, match="agent"):
                trainer.load()
            with pytest.raises(AgentError, match="agent"):
                late.result()
        loaded = trainer.load()
        assert (loaded.step, loaded.wrong) == (1, [])
        late.open(site.config)
        assert late.load().step == 1
