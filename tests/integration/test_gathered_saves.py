"""``dcp.save(use_collectives=False)``: one checkpoint of all ranks or none, and all know which."""

from __future__ import annotations

import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from msgspec.structs import replace
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import tieredckpt
from tests.integration.test_failed_saves import Warnings, eio_on, steps
from tests.integration.test_ranks import assert_is, sharded_state
from tests.support.faults import eventually
from tests.support.ranks import RankFailed, run_ranks
from tests.support.states import blank, config, load, manifest_of, same, save
from tieredckpt import failpoints
from tieredckpt.engine import Engine
from tieredckpt.errors import RankError, TierUnavailableError, UsageError
from tieredckpt.rpc.messages import agent as m

pytestmark = pytest.mark.usefixtures("served")


def opened(runtime_dir: str, *, timeout: str = "60s", **save_keys: Any) -> Engine:
    keys = {"on_error": "skip", "timeout": timeout, **save_keys}
    return Engine.open(config(Path(runtime_dir), save=keys))


def impatient(engine: Engine) -> None:
    """Wait for other ranks for a short time only, but for the agent as long as ever."""
    session = engine._session
    session.config = replace(session.config, save=replace(session.config.save, timeout_s=3.0))


def put(engine: Engine, step: int, state: dict[str, Any], **options: Any) -> None:
    save(engine, step, state, use_collectives=False, **options)


def own(step: int) -> dict[str, Any]:
    """A state of which each rank has keys of its own, too."""
    rank = dist.get_rank()
    return {**sharded_state(step), f"rng{rank}": torch.full((9,), step * 10 + rank)}


def assert_whole(engine: Engine, step: int) -> None:
    """There is one checkpoint of the step, of all ranks, bit for bit."""
    state = {**sharded_state(-1, content=False), f"rng{dist.get_rank()}": torch.zeros(9).long()}
    load(state, engine.reader(step=step))
    assert_is({k: v for k, v in state.items() if not k.startswith("rng")}, step)
    assert torch.equal(state[f"rng{dist.get_rank()}"], own(step)[f"rng{dist.get_rank()}"])
    manifest = manifest_of(engine, step)
    assert manifest.world_size == dist.get_world_size()


def others_wait(engine: Engine, ordinal: int, *missing: int, stream: str = "default") -> None:
    """Until exactly these ranks have not handed in their part."""
    gathered = engine._session.no_collectives
    key = gathered.next_key(stream)
    gathered._ordinals[stream] = key.ordinal
    assert key.ordinal == ordinal
    eventually(
        lambda: engine._session.client.poll_save(key) == m.Gathered(state="open", missing=missing),
        deadline_s=60,
    )


# --- what is stored -------------------------------------------------------------------------------


def together(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir) as engine:
        engine.load({})
        for step in range(4):
            state = own(step)
            if step % 3 == rank:  # each time another rank is the last one
                others_wait(engine, step, rank)
            put(engine, step, state, planner=DefaultSavePlanner(enable_plan_caching=step > 1))
            engine.wait(step, "memory")
            report = engine.last_save
            assert report is not None
            assert (report.step, report.skipped) == (step, None)
            known: list[Any] = [None] * 3
            dist.all_gather_object(known, report.save_id)
            assert set(known) == {engine.checkpoints()[0].save_id}
            assert_whole(engine, step)
            dist.barrier()
        manifest = manifest_of(engine, 3)
        assert len(manifest.segments) == 3
        assert manifest.parent == manifest_of(engine, 2).save_id
        # Saves with collectives and without go on from one another.
        save(engine, 4, own(4))
        put(engine, 5, own(5))
        assert manifest_of(engine, 5).parent == manifest_of(engine, 4).save_id
        assert steps(engine) == [5, 4, 3]
        # The structure is merged and stored once.
        plans = {manifest_of(engine, step).plan for step in (3, 5)}
        assert len(plans) == 1
        assert manifest_of(engine, 4).plan not in plans
        blanks = {**sharded_state(-1, content=False), f"rng{rank}": torch.zeros(9).long()}
        assert engine.load(blanks) == 5
        assert_is({k: v for k, v in blanks.items() if not k.startswith("rng")}, 5)
        put(engine, 6, own(6))
        assert_whole(engine, 6)
        of_each_rank(engine, rank)


class Value:
    """For tieredckpt.per_rank."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def of_each_rank(engine: Engine, rank: int) -> None:
    put(engine, 7, {"mine": tieredckpt.per_rank(Value(rank)), "w": torch.ones(3)})
    found = Value(-1)
    assert engine.load({"mine": tieredckpt.per_rank(found), "w": torch.zeros(3)}) == 7
    assert found.value == rank
    # Ranks that say they are one: nobody may get the other's value.
    wrong = tieredckpt.per_rank(Value(rank), coordinate=("stage", 0, 1))
    with pytest.raises(UsageError, match="one per-rank coordinate have different values"):
        put(engine, 8, {"mine": wrong})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        put(engine, 9, {"note": f"of rank {rank}"})
    told = [str(each.message) for each in caught if "one name: 'note'" in str(each.message)]
    assert len(told) == (rank == 0)
    # Ranks with nothing to write, the coordinator among them, hold nobody up.
    put(engine, 10, {"a": torch.arange(5)} if rank == 1 else {})
    assert len(manifest_of(engine, 10).segments) == 1
    back = {"a": torch.zeros(5).long()}
    load(back, engine.reader(step=10))
    assert back["a"].tolist() == [0, 1, 2, 3, 4]


def test_ranks_that_seal_alone_make_one_checkpoint(runtime_dir: Path):
    run_ranks(together, 3, str(runtime_dir))


def groups(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir) as engine:
        engine.load({})
        pair = dist.new_group([1, 2])
        state = {f"own{rank}": torch.full((3,), rank), "both": torch.arange(7)}
        if rank:
            engine.load({}, stream="critic", process_group=pair)
            writer = engine.writer(5, "critic")
            with pytest.raises(UsageError, match="name the ranks that save"):
                dcp.save(state, storage_writer=writer, process_group=pair, use_collectives=False)
            writer = engine.writer(5, "critic", group=pair)
            dcp.save(state, storage_writer=writer, process_group=pair, use_collectives=False)
            back = blank(state)
            assert engine.load(back, stream="critic", process_group=pair) == 5
            assert same(back, state)
            assert manifest_of(engine, 5, "critic").world_size == 2
        dist.barrier()
        put(engine, 6, own(6))
        assert_whole(engine, 6)
        for wrong in ([], [rank, rank], [rank + 1]):
            with pytest.raises(UsageError, match="process group or its ranks"):
                engine.writer(7, group=wrong)


@pytest.mark.full
def test_sub_groups_name_their_ranks(runtime_dir: Path):
    run_ranks(groups, 3, str(runtime_dir))


def two_groups(rank: int, runtime_dir: str) -> str:
    with opened(runtime_dir) as engine:
        engine.load({})
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = pairs[rank // 2]
        outcome = "saved"
        try:
            dcp.save(
                {f"part{rank % 2}": torch.full((4,), rank)},
                storage_writer=engine.writer(1, group=group),
                process_group=group,
                use_collectives=False,
            )
        except UsageError as error:
            outcome = str(error)
        dist.barrier()
        for info in engine.checkpoints():
            back = {"part0": torch.zeros(4).long(), "part1": torch.zeros(4).long()}
            load(back, engine.reader(save_id=info.save_id), no_dist=True)
            assert back["part1"][0] == back["part0"][0] + 1
        return outcome


def test_parts_of_two_groups_never_become_one_checkpoint(runtime_dir: Path):
    outcomes = run_ranks(two_groups, 4, str(runtime_dir))
    assert outcomes[0] == outcomes[1]
    assert outcomes[2] == outcomes[3]
    assert any("two groups of ranks" in outcome for outcome in outcomes)


# --- failures -------------------------------------------------------------------------------------


class Broken(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("the planner's own trouble")
        return super().resolve_data(write_item)


def failing(rank: int, runtime_dir: str) -> None:
    heard = Warnings()
    with opened(runtime_dir, max_skipped=2) as engine:
        engine.load({})
        # Nobody is left in DCP's barrier: an error on one rank is the same error on all.
        with eio_on(1), pytest.raises(TierUnavailableError, match="no save of stream 'default'"):
            put(engine, 0, own(0))
        put(engine, 1, own(1))
        for step in (2, 3):
            with eio_on(1 + step % 2):
                put(engine, step, own(step))
            assert engine.last_save is not None
            assert (engine.last_save.save_id, engine.last_save.step) == (None, step)
            assert f"rank {1 + step % 2}: TierUnav" in str(engine.last_save.skipped)
            assert_whole(engine, 1)
        assert engine.skipped_saves == 2
        assert len(heard.texts) == (2 if rank == 0 else 0)
        with eio_on(0), pytest.raises(TierUnavailableError, match="max_skipped is 2"):
            put(engine, 4, own(4))
        with pytest.raises(ZeroDivisionError if rank == 1 else RankError, match="own trouble"):
            put(engine, 4, own(4), planner=Broken())
        with pytest.raises(UsageError, match="the ranks save different things"):
            put(engine, 4 + rank // 2, own(4))
        before = engine.status().namespaces[0]
        assert before.skipped_saves == 2
        put(engine, 5, own(5))
        assert_whole(engine, 5)
        assert steps(engine) == [5, 1]
    with opened(runtime_dir, max_skipped=2) as newer:  # another start: it has loaded nothing
        with pytest.raises(UsageError, match="holds 2 checkpoint"):
            put(newer, 6, own(6))
        assert newer.load({}, strict=False) == 5
        put(newer, 6, own(6))
        assert_whole(newer, 6)
        after_a_failure_in_the_background(newer)


def after_a_failure_in_the_background(engine: Engine) -> None:
    future = dcp.async_save(
        own(7),
        storage_writer=engine.writer(7),
        planner=Broken(),
        process_group=engine.background_group(),
    )
    with pytest.raises(CheckpointException):
        future.result(60)
    eventually(lambda: not engine._session.background_saves.others())
    # Nobody looked at step 7 as far as the engine knows, and only the coordinator remembers
    # it: to raise there would leave the other ranks in DCP's barrier.
    put(engine, 8, own(8))
    assert_whole(engine, 8)


def test_failures_reach_all_ranks(runtime_dir: Path):
    run_ranks(failing, 3, str(runtime_dir))


def leaking(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir, max_skipped=100) as engine:
        engine.load({})
        for step in range(3):
            put(engine, step, own(step))
        dist.barrier()
        slots = engine.status().namespaces[0].slots
        for step in range(3, 11):
            with eio_on(step % 2):
                put(engine, step, own(step))
        dist.barrier()
        assert engine.status().namespaces[0].slots == slots
        put(engine, 50, own(50))
        assert_whole(engine, 50)


@pytest.mark.full
def test_skipped_saves_leave_no_slot_behind(runtime_dir: Path):
    run_ranks(leaking, 2, str(runtime_dir))


def late(rank: int, runtime_dir: str) -> None:
    """A rank that comes too late: the others have given up, and it learns that."""
    with opened(runtime_dir) as engine:
        engine.load({})
        put(engine, 1, own(1))
        patient = engine._session.config.save
        impatient(engine)
        writer = engine._session.no_collectives
        state = own(2)
        if rank == 1:
            others_wait(engine, 1, 1)
            key = writer.next_key("default")
            writer._ordinals["default"] = key.ordinal
            ask = engine._session.client.poll_save
            eventually(lambda: ask(key).state == "failed", deadline_s=60)
        put(engine, 2, state)
        assert engine.last_save is not None
        assert "rank(s) 1 of 2 have not sealed" in str(engine.last_save.skipped)
        assert_whole(engine, 1)
        session = engine._session
        session.config = replace(session.config, save=patient)
        put(engine, 3, own(3))
        assert_whole(engine, 3)
        assert steps(engine) == [3, 1]


@pytest.mark.full
def test_a_rank_that_comes_too_late(runtime_dir: Path):
    run_ranks(late, 2, str(runtime_dir))


def agent_dies(rank: int, runtime_dir: str) -> None:
    """The parts that it had are lost with it; ranks that wait hand them in again."""
    with opened(runtime_dir) as engine:
        engine.load({})
        put(engine, 1, own(1))
        state = own(2)
        if rank == 1:
            others_wait(engine, 1, 1)
            os.kill(engine.status().health.pid, signal.SIGKILL)
        put(engine, 2, state)
        assert engine.last_save is not None
        assert engine.last_save.skipped is None
        assert_whole(engine, 2)
        put(engine, 3, own(3))
        assert_whole(engine, 3)
        assert steps(engine) == [3, 2, 1]


def test_an_agent_that_dies_between_two_parts(runtime_dir: Path):
    run_ranks(agent_dies, 2, str(runtime_dir))


def dies(rank: int, runtime_dir: str, folder: str, where: str) -> None:
    """Rank 1 dies in the save of step 2; ranks 0 and 2 say what they saw."""
    failpoints.arm("")
    with opened(runtime_dir) as engine:
        engine.load({})
        put(engine, 1, own(1))
        impatient(engine)
        state = own(2)
        if rank == 1:
            failpoints.arm(f"{where}=kill")
        if rank == 2 and where == "save.contribute.after":
            # Rank 1 dies as soon as it has handed its part in.
            eventually(lambda: engine.status().namespaces[0].sessions <= 2, deadline_s=60)
        with pytest.raises(RuntimeError):  # DCP's barrier misses the dead rank
            put(engine, 2, state)
        assert engine.last_save is not None
        found = {"skipped": engine.last_save.skipped, "steps": steps(engine)}
        Path(folder, str(rank)).write_text(json.dumps(found))


@pytest.mark.parametrize(
    "where", ["save.seal.after", pytest.param("save.contribute.after", marks=pytest.mark.full)]
)
def test_a_rank_that_dies(runtime_dir: Path, tmp_path: Path, where: str):
    with pytest.raises(RankFailed, match="died without an answer"):
        run_ranks(dies, 3, str(runtime_dir), str(tmp_path), where)
    for rank in (0, 2):
        found = json.loads((tmp_path / str(rank)).read_text())
        if where == "save.seal.after":
            assert "rank(s) 1 of 3 have not sealed" in found["skipped"]
        else:
            assert found["skipped"] is not None
        assert found["steps"] == [1]
    run_ranks(after_a_death, 2, str(runtime_dir))


def after_a_death(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir) as engine:
        state = sharded_state(0, content=False)
        assert engine.load(state, strict=False) == 1
        assert_is(state, 1)
        put(engine, 2, sharded_state(2))
        state = sharded_state(0, content=False)
        load(state, engine.reader())
        assert_is(state, 2)
