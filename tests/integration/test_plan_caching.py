"""DCP's plan caching: every save is what was given to it, whoever else fills DCP's caches.

With ``enable_plan_caching`` DCP sends no plans while they are equal to the cached ones, and keeps
all of them under the name of the planner's class, for the whole process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.ranks import run_ranks
from tests.support.states import config, load, save
from tieredckpt.engine import Engine
from tieredckpt.errors import UsageError

pytestmark = pytest.mark.usefixtures("served")


def opened(runtime_dir: str) -> Engine:
    return Engine.open(config(Path(runtime_dir)))


def failures_of(call: Any) -> dict[int, BaseException]:
    with pytest.raises(CheckpointException) as caught:
        call()
    return {rank: failure[0] for rank, failure in caught.value.failures.items()}


def caching(**more: Any) -> DefaultSavePlanner:
    return DefaultSavePlanner(enable_plan_caching=True, **more)


def values(step: int, names: str = "abcdef") -> dict[str, Any]:
    """What all ranks have, sharded or not; DCP spreads the latter over them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Any] = {"nested": {f"{name}.n": [step, name] for name in names}}
    for number, name in enumerate(names):
        content = torch.arange(10.0) + 100 * step + 10 * number
        found[name] = content
        found[f"{name}.sharded"] = distribute_tensor(content + 0.5, mesh, [Shard(0)])
    return found


def replicated(step: int) -> dict[str, Any]:
    return {key: value for key, value in values(step).items() if not isinstance(value, DTensor)}


def empty(value: Any) -> Any:
    if isinstance(value, DTensor):
        # Not zeros_like: torch remembers its result's mesh, with the rank that this process had in
        # an earlier group, and the tensor then takes itself for another shard.
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return distribute_tensor(torch.zeros(value.shape), mesh, value.placements)
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else dict.fromkeys(value)


def check(engine: Engine, step: int, expected: dict[str, Any], stream: str = "default") -> None:
    got = {key: empty(value) for key, value in expected.items()}
    load(got, engine.reader(step=step, stream=stream))
    for key, value in expected.items():
        if isinstance(value, DTensor):
            assert torch.equal(got[key].full_tensor(), value.full_tensor()), key
        else:
            assert torch.equal(got[key], value) if key != "nested" else got[key] == value, key


# --- one process after the other uses the caches --------------------------------------------------


def alternating(rank: int, runtime_dir: str, folder: str) -> None:
    with opened(runtime_dir) as engine:
        engine.load({})
        kinds = {"wide": "abcdef", "long": "xyz"}
        # One class of planners, two states: in a stream each, then both in one, and in between
        # somebody saves elsewhere, also under that class's name.
        for step in range(1, 5):
            for kind, names in kinds.items():
                state = values(step, names)
                stream = kind if step < 3 else "default"
                number = step if step < 3 else 2 * step + (kind == "long")
                save(engine, number, state, stream=stream, planner=caching())
                check(engine, number, state, stream)
            if step in (1, 3):
                elsewhere = os.path.join(folder, f"stock-{step}")
                dcp.save(values(step, "ab"), checkpoint_id=elsewhere, planner=caching())
                got = {key: empty(value) for key, value in values(0, "ab").items()}
                dcp.load(got, checkpoint_id=elsewhere)
                assert torch.equal(got["b"], values(step, "ab")["b"])
        if rank == 0:  # a plan is built once per stream while nothing changes
            assert [engine._session.plans[kind].builds for kind in kinds] == [1, 1]
        # Another class of planner in the same stream, and other options of the first one.
        lowest = caching(dedup_save_to_lowest_rank=True)
        other = [Other(enable_plan_caching=True) for _ in range(2)]
        for step, planner in enumerate((other[0], lowest, other[1], caching())):
            save(engine, 100 + step, values(step), planner=planner)
            check(engine, 100 + step, values(step))
        # Changed structure: on all ranks, and on one of them only.
        for step, names in enumerate(("ab", "abc", "ab")):
            save(engine, 200 + step, values(step, names), planner=caching())
            check(engine, 200 + step, values(step, names))
        for step in range(3):
            own = {f"of-{rank}-{i}": torch.full((3,), float(i)) for i in range(1 + (rank == step))}
            save(engine, 300 + step, {**values(step), **own}, planner=caching())
            check(engine, 300 + step, {**values(step), **own})


class Other(DefaultSavePlanner):
    """Has a cache of its own."""


def test_alternating_states_streams_and_planners(runtime_dir: Path, tmp_path: Path):
    run_ranks(alternating, 2, str(runtime_dir), str(tmp_path))


class Breaks(DefaultSavePlanner):
    """Fails on one rank at one place."""

    where = ""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        if self.where == "local" and dist.get_rank() == 1:
            raise OSError("planned to fail")
        return plan

    def create_global_plan(self, all_plans: Any) -> Any:
        plans = super().create_global_plan(all_plans)
        if self.where == "global":
            raise OSError("planned to fail")
        return plans

    def resolve_data(self, write_item: Any) -> Any:
        if self.where == "write" and dist.get_rank() == 1:
            raise OSError("planned to fail")
        return super().resolve_data(write_item)


def failing(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir) as engine:
        engine.load({})
        step = 0
        for names in ("abc", "abcd"):
            for where in ("local", "global", "write"):
                planner = Breaks(enable_plan_caching=True)
                planner.where = where
                step += 1
                state = values(step, names)
                failures_of(lambda s=step, v=state, p=planner: save(engine, s, v, planner=p))
                step += 1
                save(engine, step, values(step, names), planner=Breaks(enable_plan_caching=True))
                check(engine, step, values(step, names))
        # DCP compares plans without their dtypes.
        changed = {
            key: value.to(torch.bfloat16) if isinstance(value, torch.Tensor) else value
            for key, value in values(step, "abcd").items()
        }
        found = failures_of(
            lambda: save(engine, 99, changed, planner=Breaks(enable_plan_caching=True))
        )
        assert all(isinstance(error, UsageError) for error in found.values())
        assert "was planned as float32" in str(found[0])
        assert "use a planner without it" in str(found[0])
        save(engine, 99, changed)
        check(engine, 99, changed)


def test_failed_saves_leave_no_false_plan(runtime_dir: Path):
    run_ranks(failing, 2, str(runtime_dir))


# --- an elastic restart inside of the processes ---------------------------------------------------


def clear_caches() -> None:
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(SavePlanner, f"_cached_{name}").clear()


@contextmanager
def group_of(ranks: list[int], me: int, store: str) -> Iterator[bool]:
    """A new default group of those ranks, in that order; False for a rank that is not in it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if me not in ranks:
        yield False
        return
    rank, size = ranks.index(me), len(ranks)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        yield True
    finally:
        dist.barrier()
        dist.destroy_process_group()


def save_replicated(engine: Engine, step: int) -> None:
    """What all ranks have: rank 0's plan is the same with any number of ranks."""
    save(engine, step, replicated(step), stream="all", planner=caching())
    check(engine, step, replicated(step), "all")


def elastic(me: int, runtime_dir: str, folder: str) -> None:
    step = 0
    for number, (ranks, fresh) in enumerate(
        [([0, 1, 2], []), ([0, 1], []), ([1, 0, 2], [2]), ([1], []), ([0, 1, 2], [0])]
    ):
        with group_of(ranks, me, f"{folder}/{number}") as inside:
            if me in fresh:
                clear_caches()  # a new process knows nothing
            if not inside:
                step += 2
                continue
            with opened(runtime_dir) as engine:
                state = values(0)
                assert engine.load(replicated(0), stream="all") == (2 * step + 1 if step else None)
                assert engine.load(state) == (step or None)
                # The last plan of the group before, and the first of this one.
                save_replicated(engine, 2 * step + 2)
                if step:
                    check(engine, step, values(step))
                    assert torch.equal(state["c"], values(step)["c"])
                for _ in range(2):
                    step += 1
                    save(engine, step, values(step), planner=caching())
                    check(engine, step, values(step))
                save_replicated(engine, 2 * step + 1)
    # What run_ranks ends with.
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/end", 3), rank=me, world_size=3)


def test_across_a_restart_inside_of_the_processes(runtime_dir: Path, tmp_path: Path):
    """With DCP's own storage the second group's checkpoints lack what rank 2 wrote before.

    They cannot be loaded then: "CheckpointException: KeyError" for what is replicated.
    """
    run_ranks(elastic, 3, str(runtime_dir), str(tmp_path))
