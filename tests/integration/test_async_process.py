"""``dcp.async_save`` and ``engine.async_save`` with DCP's process executor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from tests.integration.test_async_save import (
    WAIT_S,
    async_save,
    check_ranks,
    mixed,
    opened,
    plain,
    scribble,
    sharded,
)
from tests.support.ranks import run_ranks
from tests.support.states import config, manifest_of, save
from tieredckpt.engine import Engine

PROCESS = AsyncCheckpointerType.PROCESS


class Broken(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        raise ValueError("no data today")


def alone(rank: int, runtime_dir: str) -> None:
    """One rank: all kinds of values, several saves, and the numbers on the time line."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    with opened(runtime_dir) as engine:
        staged = []
        for step in range(1, 5):
            state = mixed(step)
            wanted = plain(state)
            future = engine.async_save(state, step, executor="process")
            scribble(state, future)
            future.result(WAIT_S)
            check_ranks(engine, step, wanted)
            report = engine.last_save
            assert report is not None
            assert report.step == step
            assert report.save_id == manifest_of(engine, step).save_id
            staged.append(engine._session.stager._layouts["default"].places)
        assert staged[1] == staged[3]
        assert [manifest_of(engine, step).seq for step in (2, 3, 4)] == [1, 2, 3]


def test_one_rank(runtime_dir: Path):
    run_ranks(alone, 1, str(runtime_dir))


def mixes(rank: int, runtime_dir: str) -> None:
    """Two ranks: process, thread and plain saves in turn are one time line."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    stager = DefaultStager(StagingOptions(False, False, False, False))
    with opened(runtime_dir) as engine:
        group = engine.background_group()
        kinds = ("process", "process", "thread", "plain", "process", "default", "thread", "process")
        parent = None
        for step, kind in enumerate(kinds):
            state = sharded(step)
            wanted = plain(state)
            if kind == "plain":
                save(engine, step, state)
            else:
                if kind == "default":
                    options = {"async_checkpointer_type": PROCESS, "async_stager": stager}
                    future = async_save(engine, step, state, process_group=group, **options)
                    future = getattr(future, "upload_completion", future)
                else:
                    future = engine.async_save(state, step, executor=kind)
                scribble(state, future)
                future.result(WAIT_S)
            check_ranks(engine, step, wanted)
            manifest = manifest_of(engine, step)
            assert (manifest.seq, manifest.parent) == (step, parent), kind
            parent = manifest.save_id
            report = engine.last_save
            assert report is not None
            assert report.step == step
            assert report.save_id == (parent if rank == 0 else None)
        fails(engine, rank)


def fails(engine: Engine, rank: int) -> None:
    """A failure reaches every rank's future; then saves of all kinds work."""
    planner = Broken() if rank == 1 else DefaultSavePlanner()
    failed = engine.async_save(sharded(9), 9, planner=planner, executor="process")
    with pytest.raises(CheckpointException, match="no data today"):
        failed.result(WAIT_S)
    before = manifest_of(engine, 7)
    for step, executor in ((10, "process"), (11, "thread")):
        state = sharded(step)
        wanted = plain(state)
        engine.async_save(state, step, executor=executor).result(WAIT_S)  # type: ignore[arg-type]
        check_ranks(engine, step, wanted)
    assert manifest_of(engine, 10).parent == before.save_id


def goes_on(rank: int, runtime_dir: str) -> None:
    with Engine.open(config(Path(runtime_dir))) as engine:
        state = sharded(0)
        assert engine.load(state) == 11
        wanted = sharded(11)
        assert torch.equal(state["large"].to_local(), wanted["large"].to_local())
        engine.async_save(state, 12).result(WAIT_S)
        assert manifest_of(engine, 12).parent == manifest_of(engine, 11).save_id


def test_mixed_with_other_saves(runtime_dir: Path):
    run_ranks(mixes, 2, str(runtime_dir))
    run_ranks(goes_on, 2, str(runtime_dir))
