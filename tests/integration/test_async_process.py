"""``dcp.async_save`` and ``engine.async_save`` with DCP's process executor.

It starts a new interpreter for each rank, and does here where one rank saves and where the trainer
is killed; elsewhere it is given a fork.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor
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
from tests.support.faults import eventually
from tests.support.preloaded import context, fork_for_dcp
from tests.support.ranks import run_ranks
from tests.support.states import config, manifest_of, save
from tieredckpt import failpoints
from tieredckpt.engine import Engine
from tieredckpt.testing.dcp.process_executor import meet_on_loopback

PROCESS = AsyncCheckpointerType.PROCESS


class Broken(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        raise ValueError("no data today")


def alone(rank: int, runtime_dir: str) -> None:
    """One rank: all kinds of values, several saves, and the numbers on the time line."""
    meet_on_loopback()
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
        process = _async_process_executor._CHECKPOINT_PROCESS
        assert process is not None
        pid = process._save_process.pid
        assert os.getpgid(pid) == os.getpgrp()
        engine.leave_on(signal.SIGUSR2)
        engine.async_save(mixed(5), 5, executor="process").result(WAIT_S)
        assert os.getpgid(pid) == pid  # torchrun and Slurm signal the trainer's whole group


@pytest.mark.full
def test_one_rank(runtime_dir: Path):
    run_ranks(alone, 1, str(runtime_dir))


def mixes(rank: int, runtime_dir: str) -> None:
    """Two ranks: process, thread and plain saves in turn are one time line."""
    fork_for_dcp()
    meet_on_loopback()
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
    if rank == 0:
        failpoints.arm("save.commit.before=eio")  # here, for the process commits nothing
    failed = engine.async_save(sharded(9), 9, executor="process")
    with pytest.raises(CheckpointException, match="nothing was committed"):
        failed.result(WAIT_S)
    failpoints.arm("")
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


def loses_its_process(rank: int, runtime_dir: str) -> None:
    """DCP never starts another process, but nothing else is affected."""
    fork_for_dcp()
    meet_on_loopback()
    os.environ["TIEREDCKPT_FAILPOINTS"] = "save.seal.before=kill@3"  # only a new process reads it
    with opened(runtime_dir) as engine:
        for step in (1, 2):
            engine.async_save(sharded(step), step, executor="process").result(WAIT_S)
        for step in (3, 4):
            with pytest.raises(BaseException, match=r"dead|Broken pipe|reset"):
                engine.async_save(sharded(step), step, executor="process").result(WAIT_S)
            check_ranks(engine, 2, sharded(2))
        save(engine, 5, sharded(5))
        check_ranks(engine, 5, sharded(5))
        for step in range(6, 10):  # all slots of the ring are there
            state = sharded(step)
            if step % 2:
                save(engine, step, state)
            else:
                engine.async_save(state, step).result(WAIT_S)
            check_ranks(engine, step, sharded(step))
        assert manifest_of(engine, 9).parent == manifest_of(engine, 8).save_id
        # Two commits might have been under way on the time line: no number is used twice.
        assert manifest_of(engine, 9).seq >= 6
        assert manifest_of(engine, 9).seq == manifest_of(engine, 7).seq + 2


@pytest.mark.full
def test_the_process_is_killed(runtime_dir: Path):
    run_ranks(loses_its_process, 2, str(runtime_dir))


def caches_plans(rank: int, runtime_dir: str) -> None:
    """The process keeps DCP's plans from save to save; the structure changes; the agent dies."""
    fork_for_dcp()
    meet_on_loopback()
    with opened(runtime_dir) as engine:
        for step in range(1, 9):
            state = sharded(step)
            if step in (4, 5):
                state["more"] = torch.full((50 + step,), float(step))
            planner = DefaultSavePlanner(enable_plan_caching=True)
            wanted = plain(state)
            if step == 7:
                pid = engine.status().health.pid
                dist.barrier()
                if rank == 0:
                    os.kill(pid, signal.SIGKILL)
                dist.barrier()
            future = engine.async_save(state, step, planner=planner, executor="process")
            scribble(state, future)
            future.result(WAIT_S)
            check_ranks(engine, step, wanted)
        assert [each.step for each in engine.checkpoints()][:3] == [8, 7, 6]


@pytest.mark.full
def test_cached_plans_and_a_new_agent(runtime_dir: Path):
    run_ranks(caches_plans, 2, str(runtime_dir))


def skips(rank: int, runtime_dir: str) -> None:
    fork_for_dcp()
    meet_on_loopback()
    if rank == 1:  # only the new process reads it
        os.environ["TIEREDCKPT_FAILPOINTS"] = "save.seal.before=eio@2"
    with Engine.open(config(Path(runtime_dir), save={"on_error": "skip"})) as engine:
        engine.load({})
        for step in range(1, 6):
            engine.async_save(sharded(step), step, executor="process").result(WAIT_S)
            report = engine.last_save
            assert report is not None
            assert report.step == step
            assert (report.skipped is not None) == (step == 2)
            check_ranks(engine, 1 if step == 2 else step, sharded(1 if step == 2 else step))
        assert engine.skipped_saves == 1
        assert [each.step for each in engine.checkpoints()] == [5, 4, 3]


@pytest.mark.full
def test_a_rank_that_cannot_write(runtime_dir: Path):
    run_ranks(skips, 2, str(runtime_dir))


def saves_and_is_killed(runtime_dir: str, pipe: Any) -> None:
    meet_on_loopback()
    os.environ["TIEREDCKPT_FAILPOINTS"] = "save.seal.before=stop@3"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = opened(runtime_dir)
    for step in (1, 2):
        engine.async_save(mixed(step), step, executor="process").result(WAIT_S)
    engine.async_save(mixed(3), 3, executor="process")
    process = _async_process_executor._CHECKPOINT_PROCESS
    assert process is not None
    pipe.send(process._save_process.pid)
    signal.pause()


def test_the_trainer_is_killed(runtime_dir: Path):
    """What is left of it commits nothing into the next run, and gives its slot back."""
    mine, theirs = context.Pipe(duplex=False)
    trainer = context.Process(target=saves_and_is_killed, args=(str(runtime_dir), theirs))
    trainer.start()
    theirs.close()
    assert mine.poll(WAIT_S)
    orphan = os.pidfd_open(mine.recv())
    try:
        eventually(lambda: _is_stopped(orphan), deadline_s=WAIT_S)
        trainer.kill()
        trainer.join(WAIT_S)
        with Engine.open(config(runtime_dir)) as engine:
            state = mixed(0)
            assert engine.load(state) == 2
            save(engine, 4, mixed(4))
            signal.pidfd_send_signal(orphan, signal.SIGCONT)
            assert select.select([orphan], [], [], WAIT_S)[0], "it did not end"
            for step in range(5, 9):  # its slot is no longer in the way
                save(engine, step, mixed(step))
            assert [each.step for each in engine.checkpoints()][:3] == [8, 7, 6]
            check_ranks(engine, 8, plain(mixed(8)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(orphan, signal.SIGKILL)
        os.close(orphan)


def _is_stopped(process: int) -> bool:
    facts = Path(f"/proc/self/fdinfo/{process}").read_text()
    pid = next(line.split()[1] for line in facts.splitlines() if line.startswith("Pid:"))
    return "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()
