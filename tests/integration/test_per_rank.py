"""Per-rank values on real ranks: own values back, resharded ones, and what must not pass unseen."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tieredckpt
from tests.support.ranks import run_ranks
from tests.support.states import config, flip, load, manifest_of, save, slot_of
from tieredckpt.engine import Engine
from tieredckpt.errors import RankError, UsageError

pytestmark = pytest.mark.usefixtures("served")


def opened(runtime_dir: str) -> Engine:
    return Engine.open(config(Path(runtime_dir)))


def failures_of(call: Any) -> dict[int, BaseException]:
    with pytest.raises(CheckpointException) as caught:
        call()
    return {rank: failure[0] for rank, failure in caught.value.failures.items()}


class Box:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def model() -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.arange(24.0), mesh, [Shard(0)])


def draw() -> list[Any]:
    return [random.gauss(0, 1), np.random.rand(2).tolist(), torch.rand(3).tolist()]


# --- over the life of a run -----------------------------------------------------------------------


def first(rank: int, runtime_dir: str) -> list[Any]:
    with opened(runtime_dir) as engine:
        engine.load({})
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(rank)
        state = {
            "model": model(),
            "position": tieredckpt.per_rank(Box({"rank": rank, "seen": [rank] * rank})),
            "rng": tieredckpt.per_rank(tieredckpt.RandomState()),
        }
        save(engine, 1, state)
        return draw()


def again(rank: int, runtime_dir: str) -> list[Any]:
    with opened(runtime_dir) as engine:
        box = Box()
        rng = tieredckpt.per_rank(tieredckpt.RandomState())
        state = {"model": model(), "position": tieredckpt.per_rank(box), "rng": rng}
        assert engine.load(state) == 1
        assert box.value == {"rank": rank, "seen": [rank] * rank}
        after_load = draw()
        bare = Box()
        load({"position": tieredckpt.per_rank(bare)}, engine.reader())  # DCP's own planner
        assert bare.value == box.value
        return after_load


def other_size(rank: int, runtime_dir: str) -> None:
    size = dist.get_world_size()
    with opened(runtime_dir) as engine:
        box = Box("mine")

        def state(reshard: Any = None, **more: Any) -> dict[str, Any]:
            position = tieredckpt.per_rank(box, reshard=reshard)
            rng = tieredckpt.per_rank(tieredckpt.RandomState(), reshard=lambda saved: None)
            return {"model": torch.zeros(24), "position": position, "rng": rng} | more

        for strict in (True, False):
            with pytest.raises(UsageError, match=r"^state\['position'\]: .*has 3 of .*reshard="):
                engine.load(state(), strict=strict)
        # DCP's planner asks for the own value alone, which must not be taken for one of today's.
        if size < 3:
            with pytest.raises(UsageError, match=r"no rank asked for.*SafeLoadPlanner"):
                engine.load(state(), planner=DefaultLoadPlanner())
            with pytest.raises(UsageError, match=r"SafeLoadPlanner\(\)"):
                load({"position": tieredckpt.per_rank(box)}, engine.reader())
        else:
            found = failures_of(
                lambda: load({"position": tieredckpt.per_rank(box)}, engine.reader())
            )
            assert list(found) == [3]
            assert "position.per_rank:rank:3" in str(found[3])
        assert box.value == "mine"

        def reshard(saved: list[Any]) -> Any:
            assert [each["value"]["rank"] for each in saved] == [0, 1, 2]
            return {"value": [sum(len(each["value"]["seen"]) for each in saved), rank]}

        loaded = state(reshard)
        assert engine.load(loaded) == 1
        assert box.value == [3, rank]
        assert torch.equal(loaded["model"], torch.arange(24.0))
        box.value = None
        load(state(reshard), engine.reader(), planner=tieredckpt.SafeLoadPlanner())
        assert box.value == [3, rank]

        # A function that fails on one rank fails on all.
        def fails(saved: list[Any]) -> Any:
            raise ZeroDivisionError("of rank 0") if rank == 0 else AssertionError(saved)

        with pytest.raises(ZeroDivisionError if rank == 0 else (RankError, AssertionError)):
            engine.load(state(fails))


def test_own_values_or_resharded_ones(runtime_dir: Path):
    expected = run_ranks(first, 3, str(runtime_dir))
    assert run_ranks(again, 3, str(runtime_dir)) == expected
    for size in (2, 4):
        run_ranks(other_size, size, str(runtime_dir))


def two_steps(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir) as engine:
        engine.load({})
        for step in (1, 2):
            state = {"model": model(), "own": tieredckpt.per_rank(Box([step, rank]))}
            save(engine, step, state)
        refs = manifest_of(engine, 2).segments
        dist.barrier()
        if rank == 0:  # what is read last of step 2
            flip(slot_of(Path(runtime_dir), refs[1].id), 64)


def walk_back(rank: int, runtime_dir: str, size: int) -> None:
    with opened(runtime_dir) as engine:
        box = Box()

        def reshard(saved: list[Any]) -> Any:
            return {"value": [each["value"] for each in saved]}

        state = {
            "model": model(),
            "own": tieredckpt.per_rank(box, reshard=reshard if size != 2 else None),
        }
        assert engine.load(state) == 1
        assert box.value == ([1, rank] if size == 2 else [[1, 0], [1, 1]])


def test_walking_back_begins_anew(runtime_dir: Path):
    """The values of a checkpoint that turned out to be damaged do not stay in the state."""
    run_ranks(two_steps, 2, str(runtime_dir))
    for size in (2, 1):
        run_ranks(walk_back, size, str(runtime_dir), size)


# --- coordinates other than the rank --------------------------------------------------------------


def grid(rank: int, runtime_dir: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    of_dp, of_stage = Box(rank // 2), Box(rank)
    state: dict[str, Any] = {
        "loader": tieredckpt.per_rank(of_dp, coordinate=mesh["dp"]),
        "stage": tieredckpt.per_rank(of_stage, coordinate=("stage", rank, 4)),
        "both": tieredckpt.per_rank(Box(rank), coordinate=mesh),
    }
    with opened(runtime_dir) as engine:
        engine.load({})
        for caching in (False, True):  # with caching the second save sends no plans
            planner = DefaultSavePlanner(enable_plan_caching=caching)
            save(engine, 1 + 10 * caching, state, planner=planner)
            of_dp.value = of_stage.value = None
            assert engine.load(state) == 1 + 10 * caching
            assert (of_dp.value, of_stage.value) == (rank // 2, rank)
            planner = DefaultSavePlanner(enable_plan_caching=caching)
            save(engine, 2 + 10 * caching, state, planner=planner)
            # From now on the ranks of a coordinate differ: one would get the other's value.
            of_dp.value = rank
            planner = DefaultSavePlanner(enable_plan_caching=caching)
            found = failures_of(
                lambda p=planner, c=caching: save(engine, 3 + 10 * c, state, planner=p)
            )
            assert isinstance(found[0], UsageError)
            assert "'loader.per_rank:dp:0' (ranks 0 differ from 1)" in str(found[0])
            assert "'loader.per_rank:dp:1' (ranks 2 differ from 3)" in str(found[0])
            assert "stage" not in str(found[0])
            of_dp.value = rank // 2
        assert engine.checkpoints()[0].step == 12
        save(engine, 20, state)


def test_coordinates_of_a_mesh(runtime_dir: Path):
    run_ranks(grid, 4, str(runtime_dir))


# --- what ranks save under one name ---------------------------------------------------------------


def names(rank: int, runtime_dir: str) -> None:
    def warned(step: int, state: dict[str, Any], **options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            save(engine, step, state, **options)
        return [str(each.message) for each in caught if "different values" in str(each.message)]

    equal = {
        "text": "".join(["a", "b"]),
        "set": set("abcdef"),
        "model": model(),
        "n": {"x": (1, 2)},
    }
    with opened(runtime_dir) as engine:
        engine.load({})
        assert warned(1, equal) == []
        differing = {**equal, "lr": 0.1 * rank, "rng": {"x": [rank // 2]}}
        found = warned(2, differing)
        if rank == 0:
            assert len(found) == 1
            assert "'lr' (ranks 0 differ from 1 differ from 2)" in found[0]
            assert "'rng.x' (ranks 0, 1 differ from 2)" in found[0]
            assert "tieredckpt.per_rank" in found[0]
            assert "text" not in found[0]
        else:
            assert found == []
        assert warned(3, differing) == []  # once per name
        lowest = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        found = warned(4, {**differing, "more": rank}, planner=lowest)
        assert (rank == 0) == (len(found) == 1)
        if rank == 0:
            assert "'more'" in found[0]
            assert "'lr'" not in found[0]
        # All ranks' values in one: DCP would keep those of one rank.
        state = {"model": model(), "rng": tieredckpt.per_rank(tieredckpt.RandomState())}
        flat = DefaultSavePlanner(flatten_state_dict=False)
        for _ in range(2):
            found_errors = failures_of(lambda: save(engine, 5, state, planner=flat))
            assert sorted(found_errors) == [0, 1, 2]
            assert "flatten_state_dict=True" in str(found_errors[0])
        nested = {"model": model(), "a": {"rng": state["rng"]}}
        found_errors = failures_of(lambda: save(engine, 6, nested))
        assert sorted(found_errors) == [0, 1, 2]
        assert "top level" in str(found_errors[0])
        assert engine.checkpoints()[0].step == 4


def test_different_values_under_one_name(runtime_dir: Path):
    run_ranks(names, 3, str(runtime_dir))


def tensors_of_one_name(rank: int, runtime_dir: str) -> None:
    def state(changed: float = 0.0) -> dict[str, Any]:
        changes = torch.zeros(300, 400)  # more than a sample
        changes += changed * rank
        replicated = distribute_tensor(torch.ones(400), mesh, [Replicate()])
        replicated._local_tensor.add_(changed * rank)
        return {"same": torch.arange(9), "changes": changes, "model": {"norm": replicated}}

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with opened(runtime_dir) as engine, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def warned() -> list[str]:
            found = [str(each.message) for each in caught]
            caught.clear()
            return [each for each in found if "different values under one name" in each]

        engine.load({})
        for step in range(3):
            engine.async_save(state(), step).result()
        assert warned() == []
        # A structure that is known, and only one rank copies it: of the others there is a sample.
        engine.async_save(state(changed=1.0), 3).result()
        found = warned()
        assert len(found) == (rank == 0)
        if rank == 0:
            assert "'changes' (ranks 0 differ from 1 differ from 2)" in found[0]
            assert "'model.norm' (ranks 0 differ from 1 differ from 2)" in found[0]
            assert "per_rank" in found[0]
            assert "dedup_save_to_lowest_rank=True" in found[0]
            assert "same" not in found[0]
        engine.async_save(state(changed=2.0), 4).result()
        assert warned() == []  # once per name
        generator = {"generator": torch.Generator().manual_seed(rank).get_state()}
        lowest = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        save(engine, 5, generator, planner=lowest)
        assert warned() == []  # rank 0's is meant
        save(engine, 6, generator)
        assert len(warned()) == (rank == 0)


def test_different_tensors_under_one_name(runtime_dir: Path):
    run_ranks(tensors_of_one_name, 3, str(runtime_dir))


# --- torchdata ------------------------------------------------------------------------------------


class Noisy(torch.utils.data.Dataset[Any]):
    """Items with noise from the global generators, as augmentation has it."""

    def __init__(self, rank: int, *, noise: bool) -> None:
        self.rank = rank
        self.noise = noise

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        noise = [float(torch.rand(1)), random.random()] if self.noise else []
        return torch.tensor([self.rank, index, *noise], dtype=torch.float64)


def loader(rank: int, workers: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchdata.stateful_dataloader import StatefulDataLoader
    return StatefulDataLoader(
        Noisy(rank, noise=not workers),
        batch_size=3,
        shuffle=True,
        num_workers=workers,
        # Its own: else each new iterator draws a seed from the global one.
        generator=torch.Generator().manual_seed(100 + rank),
    )


def train(rank: int, runtime_dir: str, workers: int) -> list[Any]:
    torch.manual_seed(rank)
    random.seed(rank)
    data = loader(rank, workers)
    batches = iter(data)
    for _ in range(4):
        next(batches)
    state = {
        "data": tieredckpt.per_rank(data),
        "rng": tieredckpt.per_rank(tieredckpt.RandomState()),
    }
    with opened(runtime_dir) as engine:
        engine.load({}, stream=f"w{workers}")
        save(engine, 4, state, stream=f"w{workers}")
        return [batch.tolist() for batch in batches]


def resume(rank: int, runtime_dir: str, workers: int) -> list[Any]:
    data = loader(rank, workers)
    state = {
        "data": tieredckpt.per_rank(data),
        "rng": tieredckpt.per_rank(tieredckpt.RandomState()),
    }
    with opened(runtime_dir) as engine:
        assert engine.load(state, stream=f"w{workers}") == 4
        return [batch.tolist() for batch in data]


@pytest.mark.parametrize(("workers", "ranks"), [(0, 2), pytest.param(2, 1, marks=pytest.mark.full)])
def test_stateful_data_loader_goes_on_where_it_was(runtime_dir: Path, workers: int, ranks: int):
    expected = run_ranks(train, ranks, str(runtime_dir), workers)
    assert len(expected[0]) == 10
    assert expected[0] != expected[-1] or ranks == 1
    assert run_ranks(resume, ranks, str(runtime_dir), workers) == expected


def test_alone(runtime_dir: Path):
    """Without a process group, also under flatten_state_dict=False."""
    with Engine.open(config(runtime_dir)) as engine:
        engine.load({})
        for step, flatten in ((1, True), (2, False)):
            state = {"x": tieredckpt.per_rank(Box(step))}
            save(engine, step, state, planner=DefaultSavePlanner(flatten_state_dict=flatten))
            box = Box()
            planner = tieredckpt.SafeLoadPlanner(flatten_state_dict=flatten)
            assert engine.load({"x": tieredckpt.per_rank(box)}, planner=planner) == step
            assert box.value == step
            box = Box()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                planner = tieredckpt.SafeLoadPlanner(flatten_state_dict=flatten)
                state = {"x": tieredckpt.per_rank(box)}
                dcp.load(state, storage_reader=engine.reader(), planner=planner)
            assert box.value == step
