"""Copies of states: each plans as its original does, and has no byte of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.plan_hooks import hook
from tieredckpt.dcp.slots.leaves import Pieces, check_plans, find_leaves, rebuild
from tieredckpt.dcp.state.wrappers import plain_parts
from tieredckpt.errors import UsageError
from tieredckpt.live import torch_private

RANK, RANKS = 1, 4
ROWS, COLUMNS = 10, 6

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Of four ranks, of which this process is the second."""
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2, 2))
    finally:
        dist.destroy_process_group()


def rows(count: int) -> torch.Tensor:
    return torch.rand(count, COLUMNS)


# --- hooks ----------------------------------------------------------------------------------------


def two_pieces(local: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return [(7, local[:1]), (2, local[1:])]


def hooked_plain(_: DeviceMesh) -> torch.Tensor:
    made = rows(4)
    hook(made, two_pieces(made), torch.Size((ROWS, COLUMNS)))
    return made


def hooked_local(mesh: DeviceMesh) -> torch.Tensor:
    made = sharded(mesh, [Replicate(), Shard(0)])
    hook(made._local_tensor, two_pieces(made._local_tensor), made.shape)
    return made


def hooked_parameter(mesh: DeviceMesh) -> torch.Tensor:
    made = torch.nn.Parameter(sharded(mesh, [Replicate(), Shard(0)]))
    local: Any = made._local_tensor
    local.__create_write_items__ = lambda fqn, whole: [
        planner_helpers._create_write_items_for_dtensor(fqn, whole)
    ]
    return made


def hooked_dtensor(mesh: DeviceMesh) -> torch.Tensor:
    made = sharded(mesh, [Replicate(), Shard(0)])
    hook(made, two_pieces(made._local_tensor), made.shape)
    return made


def hooked_without_pieces(_: DeviceMesh) -> torch.Tensor:
    made = rows(2)
    hook(made, [], torch.Size((ROWS, COLUMNS)))
    return made


def shards_of_a_class(_: DeviceMesh) -> torch.Tensor:
    return LocalShardsWrapper([rows(4), rows(4)], [(0, 0), (0, COLUMNS)])


def shards_in_a_dtensor(mesh: DeviceMesh) -> torch.Tensor:
    local: Any = LocalShardsWrapper([rows(3)], [(7, 0)])
    shape = torch.Size((ROWS, COLUMNS))
    return DTensor.from_local(
        local, mesh, [Replicate(), Shard(0)], run_check=False, shape=shape, stride=(COLUMNS, 1)
    )


def empty_shards(_: DeviceMesh) -> torch.Tensor:
    return LocalShardsWrapper([rows(0), rows(0)], [(0, 0), (0, 0)])


def by_attributes(_: DeviceMesh) -> torch.Tensor:
    """A CheckpointableTensor where torch knows it, with padding; elsewhere a plain tensor."""
    made: Any = rows(5)
    made.global_shape, made.global_offsets = (ROWS, COLUMNS), ((3, 0), (8, 0))
    made.local_offsets, made.local_sizes = ((0, 0), (3, 0)), ((2, COLUMNS), (1, COLUMNS))
    return made


# --- other kinds ----------------------------------------------------------------------------------


def sharded(mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    shape = torch.Size((ROWS, COLUMNS))
    sizes, _ = torch.distributed.tensor._utils.compute_local_shape_and_global_offset(
        shape, mesh, placements
    )
    return DTensor.from_local(
        torch.rand(sizes), mesh, placements, run_check=False, shape=shape, stride=(COLUMNS, 1)
    )


def with_an_attribute(_: DeviceMesh) -> torch.Tensor:
    made: Any = rows(3)
    made.sequence_parallel = True
    return made


class Named(torch.Tensor):
    """A plain subclass, with an attribute that only the original has."""


def subclass_with_an_attribute(_: DeviceMesh) -> torch.Tensor:
    made: Any = rows(3).as_subclass(Named)
    made.unit = "metre"
    return made


class Copies(TwoTensor):
    """Makes copies of the tensors that it is put around."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Copies(inner["a"].clone(), inner["b"].clone())


class Checks(TwoTensor):
    """Has positive values only."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        if not (inner["a"] > 0).all():
            raise ValueError("not positive")
        return Checks(inner["a"], inner["b"])


def wrapper_that_copies(_: DeviceMesh) -> torch.Tensor:
    return Copies(rows(2), rows(2))


def wrapper_that_checks(_: DeviceMesh) -> torch.Tensor:
    return Checks(rows(2) + 1, rows(2))


def dtensor_of_a_wrapper(mesh: DeviceMesh) -> torch.Tensor:
    local = TwoTensor(rows(5), rows(5))
    return DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)


KINDS: dict[str, Callable[[DeviceMesh], Any]] = {
    "plain": lambda _: rows(3),
    "scalar": lambda _: torch.tensor(2.5),
    "empty": lambda _: rows(0),
    "strided": lambda _: rows(8)[::2].t(),
    "parameter": lambda _: torch.nn.Parameter(rows(2)),
    "buffer": lambda _: torch.nn.Buffer(rows(2)),
    "value": lambda _: [1, {"deep": "text"}],
    "wrapper": lambda _: TwoTensor(rows(2), rows(2)),
    **{
        f"dtensor {first} {second}": lambda mesh, both=(first, second): sharded(mesh, list(both))
        for first in (Replicate(), Shard(0), Shard(1))
        for second in (Replicate(), Shard(0), Shard(1))
    },
    **{
        made.__name__: made
        for made in (
            hooked_plain, hooked_local, hooked_parameter, hooked_dtensor, hooked_without_pieces,
            shards_of_a_class, shards_in_a_dtensor, empty_shards, by_attributes, with_an_attribute,
            subclass_with_an_attribute, dtensor_of_a_wrapper, wrapper_that_copies,
            wrapper_that_checks,
        )
    },
}  # fmt: skip


def facts(item: WriteItem) -> tuple[object, ...]:
    data = item.tensor_data
    known = () if data is None else (data.chunk, data.size, data.properties.dtype)
    return (item.index, item.type, *known)


def planner_of(state: dict[str, Any]) -> tuple[DefaultSavePlanner, list[WriteItem]]:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return planner, planner.create_local_plan().items


def resolved(planner: DefaultSavePlanner, items: list[WriteItem]) -> list[list[bytes]]:
    found = []
    for item in items:
        with torch.no_grad():
            value = planner.resolve_data(item)
        if isinstance(value, torch.Tensor):
            parts = [each.detach().contiguous().reshape(-1) for each in plain_parts(value)]
            found.append([each.view(torch.uint8).numpy().tobytes() for each in parts])
        else:
            found.append([value.getvalue()])
    return found


def change(tensor: torch.Tensor) -> None:
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    local = getattr(local, "_local_shards", None) or plain_parts(local)
    for each in local:
        each.detach().fill_(-1)


@given(kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6))
def test_a_copy_has_the_plan_and_no_byte_of_its_original(mesh: DeviceMesh, kinds: list[str]):
    state = {f"{number} {kind}": KINDS[kind](mesh) for number, kind in enumerate(kinds)}
    planner, items = planner_of(state)
    before = resolved(planner, items)
    leaves = find_leaves(state)
    check_plans(state, leaves)
    copied = rebuild(state, leaves, [each.local.clone() for each in leaves])
    for value in state.values():
        if isinstance(value, torch.Tensor):
            change(value)
    planner, again = planner_of(copied)
    assert [*map(facts, again)] == [*map(facts, items)]
    assert resolved(planner, again) == before
    assert [each.signature for each in find_leaves(state)] == [each.signature for each in leaves]
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    kept = torch_private.parts({key: copied[key] for key in tensors})
    assert kept == torch_private.parts(tensors)  # what a survivor offers
    if "by_attributes" in kinds and hasattr(planner_helpers, "_is_checkpointable_tensor"):
        assert any(isinstance(each, Pieces) for each in copied.values())


def test_what_a_survivor_keeps_of_rows_in_another_order(mesh: DeviceMesh):
    _, boxes = torch_private.parts({"w": hooked_local(mesh)})["w"]
    assert boxes == {((7, 0), (1, COLUMNS)), ((2, 0), (4, COLUMNS))}


def test_another_plan_of_the_hooks_has_another_signature():
    made, other = rows(4), rows(4)
    hook(made, [(0, made[:2]), (2, made[2:])], torch.Size((ROWS, COLUMNS)))
    hook(other, [(0, other[:2]), (5, other[2:])], torch.Size((ROWS, COLUMNS)))
    first, second = ([each.signature for each in find_leaves({"w": one})] for one in (made, other))
    assert first != second


def test_another_class_has_another_signature():
    plain, other = rows(4), rows(4).as_subclass(Switches)
    first, second = ([each.signature for each in find_leaves({"w": one})] for one in (plain, other))
    assert first != second


def copy_plan(state: dict[str, Any]) -> None:
    check_plans(state, find_leaves(state))


class Switches(torch.Tensor):
    """Of a class from which DCP takes a plan that no copy of its bytes has."""

    def size(self, *dims: int) -> Any:  # type: ignore[override]
        return torch.Size((20, COLUMNS)) if not dims else super().size(*dims)


def hook_that_switches(tensor: Any) -> None:
    hook(tensor, [(0, tensor)], torch.Size((ROWS, COLUMNS)))
    first = tensor.__create_write_items__
    calls: list[None] = []

    def items(fqn: str, local: object) -> list[WriteItem]:
        calls.append(None)
        found = first(fqn, local)
        if len(calls) > 1:
            index = MetadataIndex(fqn, torch.Size((1, 0)))
            found = [replace(found[0], index=index)]
        return list(found)

    tensor.__create_write_items__ = items
    tensor.__get_tensor_shard__ = lambda index: tensor


def other_shapes(tensor: torch.Tensor) -> None:
    hook(tensor, [(0, tensor[:2])], torch.Size((ROWS, COLUMNS)))
    hooked: Any = tensor
    hooked.__get_tensor_shard__ = lambda index: tensor[:1]


def one_place(tensor: torch.Tensor) -> None:
    hook(tensor, [(0, tensor[:2]), (0, tensor[2:])], torch.Size((ROWS, COLUMNS)))


def fails(tensor: torch.Tensor) -> None:
    hook(tensor, [(0, tensor)], torch.Size((ROWS, COLUMNS)))
    hooked: Any = tensor
    hooked.__get_tensor_shard__ = lambda index: 1 // 0


@pytest.mark.parametrize("spoil", [hook_that_switches, other_shapes, one_place, fails])
def test_a_plan_that_no_copy_can_have_is_refused_by_key(spoil: Callable[[torch.Tensor], None]):
    made = rows(4)
    spoil(made)
    state = {"layers": {"w": made}}
    with pytest.raises(UsageError, match=r"'layers\.w'.*cannot be saved in the background") as told:
        copy_plan(state)
    assert told.value.fields["state_key"] == "layers.w"


def test_a_class_with_an_unknown_plan_is_refused_by_key():
    state = {"w": rows(4).as_subclass(Switches)}
    with pytest.raises(UsageError, match="'w', a Switches, cannot be saved in the background"):
        copy_plan(state)


def test_a_tensor_with_hooks_is_not_put_into_a_value_or_sent_to_another_process():
    made = rows(4)
    hook(made, [(0, made)], made.shape)
    leaves = find_leaves({"w": made})
    copied = rebuild({"w": made}, leaves, [each.local for each in leaves])
    with pytest.raises(UsageError, match="'w' is planned by hooks of DCP"):
        pickle.dumps(copied)
