"""An agent that is killed or stopped at any instant of a reservation, seal, commit or spill."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.faults import (
    ForkedAgent,
    Site,
    Trainer,
    death,
    eventually,
    new_runtime_dir,
    remove_runtime_dir,
    state_of,
)
from tieredckpt.errors import AgentError, TierUnavailableError


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


def test_arming_an_agent_that_reaches_it_before_it_answers(runtime_dir: Path):
    """This is about the tests' own way to arm one: nobody waits, no answer is another one's."""
    agent = ForkedAgent(runtime_dir)
    try:
        agent.arm("agent.seal.before_label=stop")
        agent.signal(signal.SIGSTOP)
        eventually(lambda: state_of(agent.pid) == "T")
        for point in ("agent.seal.before_label", "agent.seal.after_label"):
            agent.arm(f"{point}=stop")
        agent.signal(signal.SIGCONT)
        assert agent.call("failed_calls") == 0
        agent.signal(signal.SIGSTOP)
        eventually(lambda: state_of(agent.pid) == "T")
        agent.arm("")
    finally:
        agent.kill()


def test_an_agent_that_dies_again_and_again_is_a_clear_error(runtime_dir: Path):
    """Each new agent dies in the same commit: the save says so in time, and nothing is lost."""
    site = Site(runtime_dir, None, timeout="4s")
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
        assert time.monotonic() - begun_s < 60
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


@pytest.mark.parametrize("point", ["agent.spill.segment", "agent.spill.before_manifest"])
def test_a_spill_is_completed_by_the_next_agent_without_new_saves(
    runtime_dir: Path, tmp_path: Path, point: str
):
    site = Site(runtime_dir, tmp_path / "disk")
    with Trainer(mib=4.0) as trainer:
        agent = trainer.open(site.config, f"{point}=kill")
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
    site = Site(runtime_dir, tmp_path / "disk", timeout="3s")
    with site.opened(mib=2.0) as trainer:
        for step in (1, 2):
            trainer.save(step)
        begun_s = time.monotonic()
        with stopped(site.agent()):
            with pytest.raises(AgentError, match="agent"):
                trainer.save(3)
            assert time.monotonic() - begun_s < 60
        for step in (4, 5):
            trainer.save(step)
        loaded = trainer.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (5, [], ())
        trainer.wait(5, "disk")
    check_committed(site, [1, 2, 4, 5], [3], mib=2.0)


def test_loading_and_opening_with_a_stopped_agent(runtime_dir: Path):
    site = Site(runtime_dir, None, timeout="3s", more={})
    impatient = {**site.config, "agent": {**site.config["agent"], "start_timeout": "3s"}}
    with site.opened() as trainer, Trainer() as late:
        trainer.save(1)
        with stopped(site.agent()):
            late.start("open", impatient)
            with pytest.raises(AgentError, match="agent"):
                trainer.load()
            with pytest.raises(AgentError, match="agent"):
                late.result()
        loaded = trainer.load()
        assert (loaded.step, loaded.wrong) == (1, [])
        late.open(site.config)
        assert late.load().step == 1
