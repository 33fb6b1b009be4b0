"""What live recovery saves is one run's, due in no tier, and takes no other checkpoint's place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support.live import stopped_agent
from tests.support.preloaded import context
from tieredckpt import Engine, StaleAttemptError
from tieredckpt.format.manifest import LIVE_TAGS

GENERATIONS = 15
RECORD_BYTES_MAX = 200  # of each generation: 1,000 of them have 200 KB


def worlds(folder: str) -> None:
    """Worlds of one run, which save what survivors kept and every fifth step."""
    config = {
        "namespace": "live",
        # Room for what is kept, for two captures and for the save in flight.
        "memory": {"capacity": "16MiB", "keep": {"last": 2}},
        "agent": {"runtime_dir": f"{folder}/rt", "idle_timeout": "10 s"},
        "close": {"flush": "0 s"},  # as a world closes its engine
        "tiers": [
            {"name": "disk", "url": f"file://{folder}/disk", "scope": "host", "every": "10 steps",
             "keep": {"last": 100}},
        ],
    }  # fmt: skip
    store = dist.FileStore(f"{folder}/store", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    state: dict[str, Any] = {"x": torch.zeros(100), "step": 0}
    step, saved, captured = 0, [0], [0]
    for _ in range(GENERATIONS):
        with Engine.open(config, run_id="ab" * 16) as engine:
            engine.resume_newest()
            if step > saved[-1]:
                dcp.save(state, storage_writer=engine.writer(step, tags=LIVE_TAGS))
                captured.append(step)
            assert (engine.load(state) or 0) == state["step"] == step
            for _ in range(3):
                step += 1
                state["x"] += 1
                state["step"] = step
                if step % 5 == 0:
                    dcp.save(state, storage_writer=engine.writer(step))
                    saved.append(step)
            here = [each for each in engine.checkpoints() if "memory" in each.tiers]
            steps = [each.step for each in here if each.tags != LIVE_TAGS]
            assert set(steps) >= set(saved[-2:]) - {0}
            captures = [each.step for each in here if each.tags == LIVE_TAGS]
            newest = sorted((*saved, *captured), reverse=True)[:2]
            assert set(captures) <= set(newest), "it goes when two newer checkpoints exist"
            if saved[-1] % 10 == 0 and saved[-1]:
                engine.wait(saved[-1], "disk", 30)
            disk = [each for each in engine.checkpoints() if "disk" in each.tiers]
            assert {each.step for each in disk} <= set(saved)


def crowded(folder: str) -> None:
    """Memory has room for what is kept and one save in flight, and for no capture besides."""
    config = {
        "namespace": "live",
        "memory": {"capacity": "2.2MiB", "keep": {"last": 1}, "wait": "5 s"},
        "agent": {"runtime_dir": f"{folder}/rt", "idle_timeout": "10 s"},
    }
    state = {"x": torch.zeros(100)}
    with Engine.open(config) as engine:
        for step, tags in ((1, None), (2, LIVE_TAGS), (3, LIVE_TAGS), (4, None), (5, LIVE_TAGS)):
            dcp.save(state, storage_writer=engine.writer(step, tags=tags))
            assert engine.checkpoints()[0].step == step


def two_runs(folder: str) -> None:
    """The second run has saved; the first one, whose state began before that, must stop."""
    config = {
        "namespace": "live",
        "memory": {"capacity": "16MiB", "keep": {"last": 2}},
        "agent": {"runtime_dir": f"{folder}/rt", "idle_timeout": "10 s"},
    }
    state = {"x": torch.zeros(100)}
    with Engine.open(config, run_id="aa" * 16) as first:
        dcp.save(state, storage_writer=first.writer(1))
        loaded = first.checkpoints()[0].save_id
    with Engine.open(config, run_id="bb" * 16) as second:
        second.resume_newest(loaded=loaded)  # as what it has loaded
        dcp.save(state, storage_writer=second.writer(2))
        second.resume_newest(loaded=loaded)  # as its own
    with (
        Engine.open(config, run_id="aa" * 16) as first,
        pytest.raises(StaleAttemptError, match=r"step 2 .* was saved by another run meanwhile"),
    ):
        first.resume_newest(loaded=loaded)


def test_a_run_that_another_has_superseded_does_not_resume(runtime_dir: Path):
    with stopped_agent(runtime_dir):
        process = context.Process(target=two_runs, args=(str(runtime_dir),))
        process.start()
        process.join(120)
        assert process.exitcode == 0


def test_a_thousand_worlds_of_one_run_leave_200_kilobytes_of_records(runtime_dir: Path):
    with stopped_agent(runtime_dir):
        process = context.Process(target=worlds, args=(str(runtime_dir),))
        process.start()
        process.join(120)
        assert process.exitcode == 0
        for place in (runtime_dir / "rt/ns/live/attempts", runtime_dir / "disk/live/attempts"):
            size = sum(os.path.getsize(place / name) for name in os.listdir(place))
            assert 0 < size <= GENERATIONS * RECORD_BYTES_MAX


def test_captures_give_way_to_a_save_that_waits_for_their_room(runtime_dir: Path):
    with stopped_agent(runtime_dir):
        process = context.Process(target=crowded, args=(str(runtime_dir),))
        process.start()
        process.join(120)
        assert process.exitcode == 0
