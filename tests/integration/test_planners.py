"""The ways in which DCP is used: custom planners, flattening, partial loads, and models.

Each is bit-exact, or refused by an error of ours that says what to do.
"""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tieredckpt
from tests.support.ranks import run_ranks
from tests.support.states import blank, config, load, same, save
from tieredckpt.engine import Engine
from tieredckpt.errors import UsageError

pytestmark = pytest.mark.usefixtures("served")


@pytest.fixture
def engine(runtime_dir: Path) -> Iterator[Engine]:
    with Engine.open(config(runtime_dir)) as opened:
        opened.load({})
        yield opened


def opened(runtime_dir: str) -> Engine:
    return Engine.open(config(Path(runtime_dir)))


def failure_of(call: Any) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        call()
    return next(iter(caught.value.failures.values()))[0]


def small(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "w": torch.randn(30, 7, generator=generator),
            "b": torch.randn(7, generator=generator),
        },
        "lr": 0.1 + seed,
        "tags": ["x", {"y": torch.arange(3) + seed}],
    }


# --- planners that change what is saved -----------------------------------------------------------


def new(item: WriteItem) -> str:
    return "new." + item.index.fqn


class RenamingItems(DefaultSavePlanner):
    """Stores under other names, in the plan; resolves by the old ones."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [
            dataclasses.replace(
                item, index=dataclasses.replace(item.index, fqn="new." + item.index.fqn)
            )
            for item in plan.items
        ]
        return dataclasses.replace(plan, items=items)

    def lookup_object(self, index: Any) -> Any:
        return super().lookup_object(dataclasses.replace(index, fqn=index.fqn.removeprefix("new.")))


class RenamingLate(DefaultSavePlanner):
    """Renames in the global plan, so that local plans have names nobody resolves in the end."""

    def create_global_plan(self, all_plans: Any) -> Any:
        renamed = []
        for plan in all_plans:
            items = [
                dataclasses.replace(item, index=dataclasses.replace(item.index, fqn=new(item)))
                for item in plan.items
            ]
            renamed.append(dataclasses.replace(plan, items=items))
        return super().create_global_plan(renamed)

    def lookup_object(self, index: Any) -> Any:
        assert index.fqn.startswith("new.")
        return super().lookup_object(dataclasses.replace(index, fqn=index.fqn.removeprefix("new.")))


class RenamingLoad(DefaultLoadPlanner):
    """Reads what was stored under other names into the state as it is."""

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        self.wanted = state_dict
        super().set_up_planner(
            {f"new.{k}": v for k, v in state_dict.items()}, metadata, is_coordinator
        )

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        super().load_bytes(read_item, value)
        for key in self.wanted:
            self.wanted[key] = self.original_state_dict[f"new.{key}"]


@pytest.mark.parametrize("planner", [RenamingItems, RenamingLate])
def test_renaming_planners(engine: Engine, planner: Any):
    save(engine, 1, small(), planner=planner())
    back = {"new": blank(small())}
    assert engine.load(back) == 1
    assert same(back["new"], small())
    with pytest.raises(CheckpointException, match="Missing key"):
        engine.load(blank(small()))
    back = blank(small())
    assert engine.load(back, planner=RenamingLoad()) == 1
    assert same(back, small())


# --- as Megatron-Core does it ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PlanWithMore(SavePlan):
    """A plan with a field of its own."""

    more: dict[str, Any] | None = None


@dataclasses.dataclass
class MetadataWithMore(Metadata):
    """A subclass of ``Metadata`` with a field of its own."""

    declared: Any = None


class Megatron(DefaultSavePlanner):
    """Own plan class, pre-packed BytesIO objects on each rank, own attributes of the metadata."""

    subclass = False

    def create_local_plan(self) -> SavePlan:
        plan = create_default_local_save_plan(self.state_dict, self.is_coordinator)
        known = {item.index.fqn for item in plan.items}
        for fqn, value in self.state_dict.items():
            if isinstance(value, io.BytesIO) and fqn not in known:
                plan.items.extend(_create_write_items(fqn, value))
        more = {
            key: {"nd_reformulated_orig_global_shape": tuple(value.shape), "rank": dist.get_rank()}
            for key, value in self.state_dict.items()
            if isinstance(value, DTensor)
        }
        self.plan = PlanWithMore(items=plan.items, planner_data=self.mappings, more=more)
        return self.plan

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        assert all(isinstance(plan, PlanWithMore) for plan in plans)
        if self.subclass:
            metadata = MetadataWithMore(**vars(metadata), declared={"world": len(all_plans)})
        vars(metadata)["mcore_data"] = dict(ChainMap(*(plan.more for plan in all_plans)))
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        assert isinstance(new_plan, PlanWithMore)
        assert new_plan.more is not None
        return super().finish_plan(new_plan)

    def transform_object(self, write_item: WriteItem, value: Any) -> Any:
        return value  # packed already


class MegatronLoad(DefaultLoadPlanner):
    """Checks shapes by the attribute, and leaves packed objects packed."""

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        for key, more in metadata.mcore_data.items():
            assert tuple(state_dict[key].shape) == more["nd_reformulated_orig_global_shape"]
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value


def packed(rank: int) -> bytes:
    stream = io.BytesIO()
    torch.save({"rng": torch.arange(rank + 3)}, stream)
    return stream.getvalue()


def megatron(rank: int, runtime_dir: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = torch.randn(7, 2, generator=torch.Generator().manual_seed(2))
    state: dict[str, Any] = {
        "weight": distribute_tensor(weight, mesh, [Shard(0)]),
        f"rng/shard_{rank}_2": io.BytesIO(packed(rank)),
    }
    with opened(runtime_dir) as engine:
        engine.load({})
        for step in (1, 2):
            planner = Megatron(flatten_state_dict=False)
            planner.subclass = step == 2
            save(engine, step, state, planner=planner)
            metadata = engine.reader(step=step).read_metadata()
            assert vars(metadata)["mcore_data"]["weight"] == {
                "nd_reformulated_orig_global_shape": (7, 2),
                "rank": 0,
            }
            assert metadata.planner_data is None
            assert vars(metadata).get("declared") == ({"world": 2} if step == 2 else None)
            back: dict[str, Any] = {
                "weight": distribute_tensor(torch.zeros(7, 2), mesh, [Shard(0)]),
                f"rng/shard_{rank}_2": io.BytesIO(),
            }
            load(back, engine.reader(step=step), planner=MegatronLoad(flatten_state_dict=False))
            assert torch.equal(back["weight"].full_tensor(), weight)
            assert back[f"rng/shard_{rank}_2"].getvalue() == packed(rank)
            # Ours reads what was packed, as values, and safely.
            back[f"rng/shard_{rank}_2"] = None
            safe = tieredckpt.SafeLoadPlanner(flatten_state_dict=False)
            assert engine.load(back, planner=safe) == step
            assert torch.equal(back[f"rng/shard_{rank}_2"]["rng"], torch.arange(rank + 3))


def test_plans_and_metadata_with_attributes_of_their_own(runtime_dir: Path):
    run_ranks(megatron, 2, str(runtime_dir))


# --- flattening, parts of the state, and loading without one --------------------------------------


def warned(rank: int, runtime_dir: str) -> list[list[str]]:
    found = []
    with opened(runtime_dir) as engine:
        engine.load({})
        save(engine, 1, small())
        for planner in (tieredckpt.SafeLoadPlanner(), None, DefaultLoadPlanner(), None):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                tensors: dict[str, Any] = {"model": blank(small())["model"]}
                load(tensors, engine.reader())  # nothing in it is unpickled
                load(blank(small()), engine.reader(), planner=planner)
            found.append([str(each.message) for each in caught if "unpickles" in str(each.message)])
    return found


@pytest.mark.full
def test_dcps_own_planner_warns_once_that_it_unpickles(runtime_dir: Path):
    (found,) = run_ranks(warned, 1, str(runtime_dir))
    safely, first, *later = found
    assert safely == []
    assert len(first) == 1
    assert "planner=tieredckpt.SafeLoadPlanner()" in first[0]
    assert later == [[], []]


@pytest.mark.parametrize(("saved", "asked"), [(5, torch.zeros(2)), (torch.ones(2), 5)])
def test_a_tensor_where_the_other_side_has_a_plain_value(engine: Engine, saved: Any, asked: Any):
    save(engine, 1, {"a": {"step": saved, "w": torch.ones(2)}})
    kinds = ["a plain value", "a tensor"]
    there, here = kinds if isinstance(saved, int) else reversed(kinds)
    says = f"'a.step' is {there} in the checkpoint and {here} in the state"
    state = {"a": {"step": asked, "w": torch.zeros(2)}}
    for strict in (True, False):
        with pytest.raises(UsageError, match=says):
            engine.load(state, strict=strict)
    error = failure_of(lambda: load(state, engine.reader(), planner=tieredckpt.SafeLoadPlanner()))
    assert isinstance(error, UsageError)
    assert state["a"]["step"] is asked
    assert not state["a"]["w"].any()


def test_values_that_the_checkpoint_lacks_stay_whatever_their_type(engine: Engine):
    save(engine, 1, {"a": {"w": torch.ones(2), "seen": range(3)}})
    state: dict[str, Any] = {"a": {"w": torch.zeros(2), "seen": range(0), "new": range(5)}}
    with pytest.raises(CheckpointException, match="Missing key"):
        engine.load(state)
    assert state["a"]["seen"] == range(0)
    with pytest.warns(UserWarning, match=r"'a\.new'"):
        engine.load(state, strict=False)
    assert (state["a"]["seen"], state["a"]["new"]) == (range(3), range(5))


class Uncopied(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach:
            raise NotImplementedError("no detach")
        return super().__torch_function__(func, types, args, kwargs)


def jagged(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


KINDS: dict[str, tuple[Any, str]] = {
    "sub-byte": (lambda: torch.ones(4, dtype=torch.uint8).view(torch.uint4), "torch.uint4"),
    "lazy": (torch.nn.parameter.UninitializedParameter, "no shape yet"),
    "jagged": (lambda: jagged(torch.jagged), "torch.jagged"),
    "nested": (lambda: jagged(torch.strided), "nested"),
    "mkldnn": (lambda: torch.ones(4, 4).to_mkldnn(), "torch._mkldnn"),
    "sparse": (lambda: torch.ones(4, 4).to_sparse(), "torch.sparse_coo"),
    "subclass": (lambda: torch.ones(4).as_subclass(Uncopied), "no detach"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_torch_cannot_copy_are_named(engine: Engine):
    for number, kind in enumerate(KINDS):
        cannot_be_copied(engine, 10 * number, kind)


def cannot_be_copied(engine: Engine, step: int, kind: str) -> None:
    make, says = KINDS[kind]
    says = rf"tensor 'model\.w'.*{says}"

    def state(value: float = 0.0) -> dict[str, Any]:
        return {"model": {"a": torch.full((9000,), value), "w": make()}}

    with pytest.raises(CheckpointException, match=says):
        engine.async_save(state(), step).result(60)
    if kind == "subclass":  # which torch can copy into
        return
    if kind == "sparse":  # DCP's own planner fails at the others, before it calls the writer
        error = failure_of(lambda: save(engine, step + 1, state()))
        assert isinstance(error, UsageError)
        assert error.state_key == "model.w"
    shape = (4,) if kind in ("lazy", "jagged", "nested") else make().shape
    save(engine, step + 2, {"model": {**state(1.0)["model"], "w": torch.ones(shape)}})
    back = state()
    with pytest.raises(UsageError, match=says):
        engine.load(back)
    assert not back["model"]["a"].any()
    if kind != "nested":  # where DCP's own planner fails by itself
        with pytest.raises(CheckpointException, match=r"model\.w"):
            load(back, engine.reader())


def test_a_model_on_the_meta_device(engine: Engine):
    def model(device: str) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5, device=device), nn.BatchNorm1d(5, device=device))

    content = model("cpu").state_dict()
    save(engine, 1, {"model": content})
    lazy = model("meta")
    error = failure_of(lambda: save(engine, 2, {"model": lazy.state_dict()}))
    assert isinstance(error, UsageError)
    assert "meta device" in str(error)
    with pytest.raises(UsageError, match="to_empty"):  # DCP asks the group where to put it
        engine.load({"model": dict(lazy.state_dict())})
    lazy.to_empty(device="cpu")
    assert engine.load({"model": lazy.state_dict()}) == 1
    assert same(dict(lazy.state_dict()), dict(content))


def test_a_new_optimizer_has_nothing_to_load_into(engine: Engine):
    """The error names what makes it: strict=False alone would lose the moments."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    save(engine, 1, {"model": model, "optimizer": optimizer})
    new = torch.optim.AdamW(model.parameters())
    with pytest.raises(UsageError, match=r"optimizer\.state\.0.* get_state_dict of torch"):
        engine.load({"model": model, "optimizer": new})


@pytest.mark.gpu
def test_optimizer_on_the_host_of_a_model_on_the_device(engine: Engine):
    """Parameters on the device, optimizer state on the host, as offloading optimizers have it."""
    weight = torch.randn(300, 70, device="cuda")
    moments = {"exp_avg": torch.randn(300, 70), "step": torch.tensor(3.0)}
    pinned = torch.randn(500).pin_memory()
    state = {"model": {"w": weight}, "optim": moments, "pinned": pinned}
    save(engine, 1, state)
    back = {
        "model": {"w": torch.zeros(300, 70, device="cuda")},
        "optim": {"exp_avg": torch.zeros(300, 70), "step": torch.tensor(0.0)},
        "pinned": torch.zeros(500).pin_memory(),
    }
    assert engine.load(back) == 1
    assert back["model"]["w"].is_cuda
    assert back["pinned"].is_pinned()
    assert torch.equal(back["model"]["w"], weight)
    assert same(back["optim"], moments)
    assert torch.equal(back["pinned"], pinned)
    crossed = {**back, "model": {"w": torch.zeros(300, 70)}}
    crossed["optim"] = {"exp_avg": torch.zeros(300, 70, device="cuda"), "step": torch.tensor(0.0)}
    assert engine.load(crossed) == 1
    assert torch.equal(crossed["model"]["w"], weight.cpu())
    assert torch.equal(crossed["optim"]["exp_avg"].cpu(), moments["exp_avg"])
