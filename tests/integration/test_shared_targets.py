"""Loading into tensors that share memory: the values for it are equal, or nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.ranks import run_ranks
from tests.support.states import config, load, same, save
from tieredckpt.engine import Engine
from tieredckpt.errors import TieredCkptError, UsageError

pytestmark = pytest.mark.usefixtures("served")

State = dict[str, torch.Tensor]


@pytest.fixture
def engine(runtime_dir: Path) -> Iterator[Engine]:
    with Engine.open(config(runtime_dir)) as opened:
        opened.load({})
        yield opened


def content(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tied(memory: torch.Tensor) -> State:
    return {"embedding": memory, "head": memory}


def embedded(memory: torch.Tensor) -> State:
    return {"flat": memory.view(-1), "part": memory[2:5, 3:]}


def shifted(memory: torch.Tensor) -> State:
    return {"lower": memory[:5], "upper": memory[3:]}


def as_another_type(memory: torch.Tensor) -> State:
    return {"w": memory, "bytes": memory.view(torch.uint8)}


@pytest.mark.parametrize("targets", [tied, embedded, shifted, as_another_type])
def test_equal_values_load_and_others_raise_before_anything_is_written(
    engine: Engine, targets: Callable[[torch.Tensor], State]
):
    saved = content(9, 7)
    save(engine, 1, {**targets(saved), "first": torch.ones(3)})
    memory = torch.zeros(9, 7)
    back = {**targets(memory), "first": torch.zeros(3)}
    assert engine.load(back) == 1
    assert same(back, {**targets(saved), "first": torch.ones(3)})

    apart = {key: value.clone() for key, value in targets(saved).items()}
    list(apart.values())[-1].view(-1)[-1] = 2
    list(apart.values())[-1].view(-1)[4] = 3
    save(engine, 2, {**apart, "first": torch.ones(3)})
    memory = content(9, 7, seed=1)
    before = memory.clone()
    back = {**targets(memory), "first": torch.zeros(3)}
    with pytest.raises(UsageError) as caught:
        engine.load(back)
    for key in targets(memory):
        assert repr(key) in caught.value.message
    assert "undefined" not in caught.value.message
    with pytest.raises(CheckpointException) as from_dcp:
        load(back, engine.reader(step=2))
    assert isinstance(from_dcp.value.failures[0][0], UsageError)
    assert torch.equal(memory, before)
    assert torch.equal(back["first"], torch.zeros(3))


@pytest.mark.filterwarnings("ignore:not loaded")
@pytest.mark.parametrize("place", ["before the other", "behind the other", "alone"])
def test_a_target_whose_own_elements_share_memory_is_refused(engine: Engine, place: str):
    save(engine, 1, {"first": torch.ones(6), "windows": torch.ones(4, 3)})
    memory = torch.zeros(12)
    first, own = (memory[6:], memory[:6]) if place == "before the other" else memory.split(6)
    for windows in (own.as_strided((4, 3), (1, 1)), own[:3].expand(4, 3)):
        back = {"windows": windows} if place == "alone" else {"windows": windows, "first": first}
        with pytest.raises(UsageError, match="elements of 'windows' share memory"):
            engine.load(back, strict=False)
    assert not memory.any()


def test_interleaved_views_without_a_common_element_load(engine: Engine):
    saved = content(6, 12)
    columns = {"q": saved[:, :4].clone(), "k": saved[:, 4:8].clone(), "v": saved[:, 8:].clone()}
    save(engine, 1, columns)
    memory = torch.zeros(6, 12)
    engine.load({"q": memory[:, :4], "k": memory[:, 4:8], "v": memory[:, 8:]})
    assert torch.equal(memory, saved)


def test_a_plain_tensor_is_not_loaded_into_a_wrapper(engine: Engine):
    save(engine, 1, {"a": torch.ones(3)})
    wrapper = TwoTensor(torch.zeros(3), torch.zeros(3))
    for strict in (True, False):
        with pytest.raises(UsageError, match=r"'a' is a plain tensor in the .* and a TwoTensor"):
            engine.load({"a": wrapper}, strict=strict)
    assert not wrapper.a.any()


def test_tied_wrappers_load_if_their_inner_tensors_are_equal(engine: Engine):
    wrapper = TwoTensor(content(3), content(3, seed=1))
    save(engine, 1, {"a": wrapper, "b": wrapper, "c": wrapper.a})
    back = TwoTensor(torch.zeros(3), torch.zeros(3))
    assert engine.load({"a": back, "b": back, "c": back.a}) == 1
    assert same({"a": back.a, "b": back.b}, {"a": wrapper.a, "b": wrapper.b})
    save(engine, 2, {"a": wrapper, "b": TwoTensor(wrapper.a, content(3, seed=2)), "c": wrapper.a})
    back = TwoTensor(torch.zeros(3), torch.zeros(3))
    with pytest.raises(UsageError, match=r"'a \(b\)' and 'b \(b\)' share memory"):
        engine.load({"a": back, "b": back, "c": back.a})
    assert not back.a.any()
    assert not back.b.any()


def test_streams_that_are_loaded_together_share_no_memory(engine: Engine):
    assert engine.load({}, stream=["model", "ema"]) is None
    for stream in ("model", "ema"):
        save(engine, 1, {"w": torch.full((3,), float(len(stream)))}, stream=stream)
    memory = torch.zeros(3)
    with pytest.raises(UsageError, match="'model' and 'ema' share memory"):
        engine.load({"model": {"w": memory}, "ema": {"w": memory}}, stream=["model", "ema"])
    assert not memory.any()
    lazy = {"w": torch.nn.parameter.UninitializedParameter()}
    with pytest.raises(UsageError, match="'w' has no shape yet"):
        engine.load({"model": lazy, "ema": {"w": memory}}, stream=["model", "ema"])
    apart = {"model": {"w": memory}, "ema": {"w": torch.zeros(3)}}
    assert engine.load(apart, stream=["model", "ema"]) == 1
    assert memory[0] == 5


def on_one_rank(rank: int, runtime_dir: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    with Engine.open(config(Path(runtime_dir))) as engine:
        engine.load({})
        whole = {"a": content(8, 3), "b": content(8, 3, seed=1)}
        save(engine, 1, {k: distribute_tensor(v, mesh, [Shard(0)]) for k, v in whole.items()})
        local = torch.zeros(4, 3)
        other = local if rank == 1 else torch.zeros(4, 3)
        back = {
            "a": DTensor.from_local(local, mesh, [Shard(0)]),
            "b": DTensor.from_local(other, mesh, [Shard(0)]),
        }
        with pytest.raises(TieredCkptError, match=r"'a' and 'b'.*rank 1"):
            engine.load(back)
        if rank == 1:
            assert not local.any()
        dist.barrier()
        # Resharding reads several pieces of one key; none of them share an element.
        columns = distribute_tensor(torch.zeros(8, 3), mesh, [Shard(1)])
        assert engine.load({"a": columns}, strict=False) == 1
        assert torch.equal(columns.full_tensor(), whole["a"])


def test_shards_that_share_memory_on_one_rank_fail_on_all(runtime_dir: Path):
    run_ranks(on_one_rank, 2, str(runtime_dir))
