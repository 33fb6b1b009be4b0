"""An agent that is killed or stopped at any instant of a reservation, seal, commit or spill."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.faults import (
    Site,
    Trainer,
    eventually,
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


@pytest.mark.full
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
