"""Roll-backs, takeovers and trainers that were superseded, over restarts."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.faults import Site, Trainer, eventually
from tieredckpt.errors import NoRecoverableCheckpointError, NotFoundError, StaleAttemptError

pytestmark = pytest.mark.full


def test_roll_back_new_saves_and_a_restart(runtime_dir: Path, tmp_path: Path):
    """Memory is lost each time; the disk tells what was rolled back."""
    site = Site(runtime_dir, tmp_path / "disk", keep=8, disk_keep=20)
    with site.opened() as first:
        ids = {step: first.save(step) for step in (80, 90, 100)}
        first.wait(100, "disk")
    site.lose_memory()
    with site.opened() as second:
        loaded = second.load(step=80, abandon_newer=True)
        assert (loaded.step, loaded.wrong) == (80, [])
        second.save(85)
        ids[95] = second.save(95)
        second.wait(95, "disk")
    site.lose_memory()
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
    site.lose_memory()
    with site.opened() as fourth:
        loaded = fourth.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (105, [], ())


def test_a_zombie_that_stood_still_in_its_first_load(runtime_dir: Path):
    """It may not take over from who went on meanwhile, nor abandon what that one saved."""
    site = Site(runtime_dir, None)
    with site.opened() as old, site.opened() as new:
        with site.opened() as first:
            first.save(1)
        old.arm("load.attempt.before=stop")
        old.start("load")
        eventually(lambda: Path(f"/proc/{old.pid}/stat").read_text().split()[2] == "T")
        assert new.load().step == 1
        new.save(2)
        old.signal(signal.SIGCONT)
        assert old.result().step == 1  # to look does no harm
        with pytest.raises(StaleAttemptError, match="while this one loaded"):
            old.save(3)
        new.save(3)
        assert [step for step, _, _ in new.checkpoints()] == [3, 2]
        assert old.load().wrong == []  # asked again, it takes over


@pytest.mark.parametrize("stage", ["save.attempt.after", "agent.attempt.before_record"])
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
