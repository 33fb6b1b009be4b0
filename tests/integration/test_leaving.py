"""One of two ranks is told to leave: the agent flushes, both leave at one step, a restart loads."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from tests.support.faults import ForkedAgent
from tests.support.ranks import run_ranks
from tests.support.states import config, save
from tieredckpt.engine import Engine
from tieredckpt.errors import RankError

LONG_S = 120.0
STEPS = 100_000
"""More than a rank ever gets to before the signal has come."""


def settings(runtime_dir: Path, folder: Path) -> dict[str, Any]:
    """With a tier that a training of this length would not reach again after its first save."""
    disk = {"name": "disk", "url": f"file://{folder / 'disk'}", "every": f"{STEPS} steps"}
    return config(runtime_dir, tiers=[disk], close={"flush": "0 s"})


def state(rank: int, step: int) -> dict[str, Any]:
    return {"w": torch.full((3000,), step), f"own-{rank}": torch.full((50,), step + rank)}


def trained_until_told(rank: int, settings: dict[str, Any]) -> tuple[int, bool, list[int], float]:
    """Where this rank left, whether it was signalled, what the agent flushes, the time left."""
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    with Engine.open(settings) as engine:
        leaving = engine.leave_on(signal.SIGTERM, deadline_s=600)
        assert engine.load(state(rank, 0)) is None
        for step in range(1, STEPS):
            if step % 3 == 0:
                save(engine, step, state(rank, step))
            if (rank, step) == (0, 8):
                os.kill(pids[1], signal.SIGTERM)
            if engine.should_leave():
                break
        left_s = leaving.left_s
    steps = [] if leaving.flushed is None else [each.step for each in leaving.flushed.saves]
    assert left_s is not None
    return step, leaving.asked, steps, left_s


def flushed(rank: int, settings: dict[str, Any], step: int) -> None:
    with Engine.open(settings) as engine:
        engine.wait(step, "disk", LONG_S)


def restarted(rank: int, settings: dict[str, Any]) -> int | None:
    with Engine.open(settings) as engine:
        found = state(rank, 0)
        step = engine.load(found)
        assert step is not None
        for name, value in state(rank, step).items():
            assert torch.equal(found[name], value), name
        return step


def test_one_is_told_and_both_leave_at_one_step(runtime_dir: Path, tmp_path: Path):
    before, after = runtime_dir / "before", runtime_dir / "after"
    for folder in (before, after):
        folder.mkdir(mode=0o700)
    agent = ForkedAgent(before)
    try:
        first, second = run_ranks(trained_until_told, 2, settings(before, tmp_path))
        assert first[0] == second[0] >= 8
        assert (first[1], second[1]) == (False, True)
        assert first[2] == []  # who got no signal asks nothing
        (step,) = second[2]
        assert step % 3 == 0
        assert 6 <= step <= first[0]
        assert 0 < first[3] <= 600  # the time that is left is agreed, too
        run_ranks(flushed, 1, settings(before, tmp_path), step)
    finally:
        agent.kill()
    agent = ForkedAgent(after)  # the memory is gone; the disk is left
    try:
        assert run_ranks(restarted, 2, settings(after, tmp_path)) == [step, step]
    finally:
        agent.kill()


def alone_at_the_boundary(rank: int, settings: dict[str, Any]) -> None:
    group = dist.new_group(backend="gloo")
    with Engine.open(settings, process_group=group) as engine:
        assert not engine.should_leave()
        if rank == 0:
            # Only now: to come together may take two ranks longer than this on a busy machine.
            _set_pg_timeout(timedelta(seconds=1), group)
            with pytest.raises(RankError, match="one is gone or did not ask"):
                engine.should_leave()
        dist.barrier()


@pytest.mark.full
@pytest.mark.usefixtures("served")
def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_group_says(
    runtime_dir: Path, tmp_path: Path
):
    run_ranks(alone_at_the_boundary, 2, settings(runtime_dir, tmp_path))
