"""What happens below a job unnoticed: its memory is lost, another job takes over."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.conftest import stop_processes_of
from tieredckpt.engine import Engine
from tieredckpt.errors import WaitError

DEADLINE_S = 120.0


def settings_of(runtime_dir: Path, folder: Path) -> dict[str, Any]:
    return {
        "namespace": "run",
        "memory": {"capacity": "64MiB"},
        "agent": {"runtime_dir": str(runtime_dir)},
        "tiers": [{"name": "bucket", "url": f"file://{folder}/bucket", "scope": "shared"}],
    }


@pytest.mark.full
@pytest.mark.usefixtures("starts_agent")
def test_a_shared_tier_goes_on_without_what_memory_knew(runtime_dir: Path, tmp_path: Path):
    """The tier itself knows the attempt, from before."""
    settings = settings_of(runtime_dir, tmp_path)
    state = {"w": torch.zeros(1000)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        with Engine.open(settings) as engine:
            assert engine.load(state) is None
            for step in (1, 2, 3, 4):
                if step == 3:
                    stop_processes_of(runtime_dir)
                    shutil.rmtree(runtime_dir)
                state["w"].fill_(step)
                dcp.save(state, storage_writer=engine.writer(step))
                engine.wait(step, "bucket", DEADLINE_S)
        stop_processes_of(runtime_dir)
        shutil.rmtree(runtime_dir)
        with Engine.open(settings) as engine:
            assert engine.load(state) == 4
            assert torch.equal(state["w"], torch.full((1000,), 4.0))


@pytest.mark.usefixtures("starts_agent")
def test_an_older_step_is_not_settled_for_without_a_word(
    runtime_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Memory is lost and the tier with the newest does not answer: training's log says so."""
    often, seldom = tmp_path / "often", tmp_path / "seldom"
    settings = settings_of(runtime_dir, tmp_path) | {
        "recovery": {"wait": "0s"},
        "close": {"flush": "0 s"},  # the last step stays where it is due
        "tiers": [
            {"name": "seldom", "url": f"file://{seldom}", "every": "2 steps"},
            {"name": "often", "url": f"file://{often}"},
        ],
    }
    state = {"w": torch.zeros(1000)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        with Engine.open(settings) as engine:
            assert engine.load(state) is None
            for step in (2, 3):
                dcp.save(state, storage_writer=engine.writer(step))
                engine.wait(step, "often", DEADLINE_S)
            engine.wait(2, "seldom", DEADLINE_S)
            assert engine.load(state) == 3
        assert not [each for each in caplog.records if "newer" in each.message]
        stop_processes_of(runtime_dir)
        shutil.rmtree(runtime_dir)
        often.rename(tmp_path / "away")
        often.write_text("in the way")
        with Engine.open(settings) as engine:
            assert engine.load(state) == 2
        (said,) = [each.message for each in caplog.records if "newer" in each.message]
        for word in ("step 2", "often on", "recovery.wait"):
            assert word in said
        caplog.clear()
        with Engine.open(settings) as engine:
            assert engine.load(state, step=2) == 2  # its own wish, which needs no newer one
        assert not [each for each in caplog.records if "newer" in each.message]


@pytest.mark.full
@pytest.mark.usefixtures("starts_agent")
def test_another_jobs_checkpoint_of_the_step_is_not_waited_for(runtime_dir: Path, tmp_path: Path):
    """It took the namespace over, from a host that cannot tell this one."""
    state = {"w": torch.zeros(1000)}
    here, there = runtime_dir / "a", runtime_dir / "b"
    for each in (here, there):
        each.mkdir(mode=0o700)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        with (
            Engine.open(settings_of(here, tmp_path)) as older,
            Engine.open(settings_of(there, tmp_path)) as newer,
        ):
            older.load(state)
            dcp.save(state, storage_writer=older.writer(1))
            older.wait(1, "bucket", DEADLINE_S)
            assert newer.load(state) == 1
            dcp.save(state, storage_writer=newer.writer(2))
            newer.wait(2, "bucket", DEADLINE_S)
            dcp.save(state, storage_writer=older.writer(2))
            with pytest.raises(WaitError):
                older.wait(2, "bucket", 2.0)
            newer.wait(2, "bucket", DEADLINE_S)
