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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
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


class Renaming(DefaultSavePlanner):
    """Stores under other names, as the tutorials of DCP do it: in the state itself."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        renamed = {f"new.{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


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


@pytest.mark.parametrize("planner", [Renaming, RenamingItems, RenamingLate])
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


class Half(DefaultSavePlanner):
    """Casts what it writes, and plans what it casts."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=list(map(self._half, plan.items)))

    @staticmethod
    def _half(item: WriteItem) -> WriteItem:
        data = item.tensor_data
        if data is None or not data.properties.dtype.is_floating_point:
            return item
        properties = dataclasses.replace(data.properties, dtype=torch.float16)
        return dataclasses.replace(
            item, tensor_data=dataclasses.replace(data, properties=properties)
        )

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = super().resolve_data(write_item)
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.half() if floats else value


class CastOnly(DefaultSavePlanner):
    """As in some tutorials: casts, and plans what was there before."""

    def transform_object(self, write_item: WriteItem, value: Any) -> Any:
        value = super().transform_object(write_item, value)
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.half() if floats else value


def casting(rank: int, runtime_dir: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    content = torch.randn(9, 3, generator=torch.Generator().manual_seed(1))
    state = {
        "sharded": distribute_tensor(content, mesh, [Shard(0)]),
        "plain": content + 1,
        "ints": torch.arange(4),
        "name": "x",
    }
    with opened(runtime_dir) as engine:
        engine.load({})
        error = failure_of(lambda: save(engine, 1, state, planner=CastOnly()))
        assert isinstance(error, UsageError)
        assert "must plan what it writes" in str(error)
        assert engine.checkpoints() == []
        for step in (1, 2):
            save(engine, step, state, planner=Half(enable_plan_caching=step == 2))
            for dtype in (torch.float16, torch.float32):
                zeros = torch.zeros(9, 3, dtype=dtype)
                back = {
                    "sharded": distribute_tensor(zeros, mesh, [Shard(0)]),
                    "plain": zeros.clone(),
                    "ints": torch.zeros(4, dtype=torch.int64),
                    "name": "",
                }
                assert engine.load(back) == step
                assert torch.equal(back["sharded"].full_tensor(), content.half().to(dtype))
                assert torch.equal(back["plain"], (content + 1).half().to(dtype))
                assert torch.equal(back["ints"], torch.arange(4))
        # Ranks cannot compare the values of names that are gone from the plan; they save.
        save(engine, 3, {"n": {"x": rank}, "plain": content}, planner=RenamingLate())
        back = {"new": {"n": {"x": None}, "plain": torch.zeros(9, 3)}}
        assert engine.load(back) == 3
        assert torch.equal(back["new"]["plain"], content)
        save(engine, 4, state, planner=Half())
        stored = engine.reader().read_metadata().state_dict_metadata
        assert stored["sharded"].properties.dtype == torch.float16  # type: ignore[union-attr]


def test_casting_planners(runtime_dir: Path):
    run_ranks(casting, 2, str(runtime_dir))


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
        for step in (1, 2, 3):
            planner = Megatron(flatten_state_dict=False)
            planner.subclass = step == 3
            save(engine, step, state, planner=planner)
            metadata = engine.reader(step=step).read_metadata()
            assert vars(metadata)["mcore_data"]["weight"] == {
                "nd_reformulated_orig_global_shape": (7, 2),
                "rank": 0,
            }
            assert metadata.planner_data is None
            assert vars(metadata).get("declared") == ({"world": 2} if step == 3 else None)
            back: dict[str, Any] = {
                "weight": distribute_tensor(torch.zeros(7, 2), mesh, [Shard(0)]),
                f"rng/shard_{rank}_2": io.BytesIO(),
            }
            load(back, engine.reader(step=step), planner=MegatronLoad(flatten_state_dict=False))
            assert torch.equal(back["weight"].full_tensor(), weight)
            assert back[f"rng/shard_{rank}_2"].getvalue() == packed(rank)
            # Ours reads what was packed, as values, and safely.
            back[f"rng/shard_{rank}_2"] = None
            assert (
                engine.load(back, planner=tieredckpt.SafeLoadPlanner(flatten_state_dict=False))
                == step
            )
            assert torch.equal(back[f"rng/shard_{rank}_2"]["rng"], torch.arange(rank + 3))
        if rank == 0:  # the planner's class and its metadata are the same: one plan
            assert engine._session.plans["default"].builds == 2


def test_plans_and_metadata_with_attributes_of_their_own(runtime_dir: Path):
    run_ranks(megatron, 2, str(runtime_dir))


# --- flattening, parts of the state, and loading without one --------------------------------------


def test_flatten_on_and_off(engine: Engine):
    state = small()
    for step, flatten in enumerate((True, False, True)):
        save(engine, step, state, planner=DefaultSavePlanner(flatten_state_dict=flatten))
        back = blank(state)
        planner = tieredckpt.SafeLoadPlanner(flatten_state_dict=flatten)
        assert engine.load(back, planner=planner) == step
        assert same(back, state)
        back = blank(state)
        load(back, engine.reader(), planner=tieredckpt.SafeLoadPlanner(flatten_state_dict=flatten))
        assert same(back, state)
        # Read as it was not saved: keys are missing, nothing is guessed.
        planner = tieredckpt.SafeLoadPlanner(flatten_state_dict=not flatten)
        with pytest.raises(CheckpointException, match="Missing key"):
            engine.load(blank(state), planner=planner)


def test_dcps_own_planner_forgets_values_without_flattening(engine: Engine):
    """So that we notice when torch mends it: docs/use/dcp.md warns of it."""
    save(engine, 1, {"x": 5}, planner=DefaultSavePlanner(flatten_state_dict=False))
    state = {"x": 0}
    load(state, engine.reader(), planner=DefaultLoadPlanner(flatten_state_dict=False))
    assert state == {"x": 0}


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


def test_dcps_own_planner_warns_once_that_it_unpickles(runtime_dir: Path):
    (found,) = run_ranks(warned, 1, str(runtime_dir))
    safely, first, *later = found
    assert safely == []
    assert len(first) == 1
    assert "planner=tieredckpt.SafeLoadPlanner()" in first[0]
    assert later == [[], []]


def test_values_below_keys_that_are_numbers(engine: Engine):
    """As in ``optimizer.state_dict()``: DCP's paths have the text of a key."""
    step = {0: {"step": 5, "m": torch.ones(2)}, 1: {"step": 6, "m": torch.ones(2), (2, 3): "x"}}
    state = {"optimizer": {"state": step, "groups": [{"n": {3: 0.1}}, torch.ones(1)]}, "w": {4: 7}}
    save(engine, 1, state)
    for read in (
        engine.load,
        lambda back: load(back, engine.reader(), planner=tieredckpt.SafeLoadPlanner()),
    ):
        back = blank(state)
        kept = back["optimizer"]["state"][0]
        read(back)
        assert same(back, state)
        assert back["optimizer"]["state"][0] is kept


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
    assert state["a"]["seen"] == range(3)
    assert state["a"]["new"] == range(5)


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
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_torch_cannot_copy_are_named(engine: Engine, kind: str):
    make, says = KINDS[kind]
    says = rf"tensor 'model\.w'.*{says}"

    def state(value: float = 0.0) -> dict[str, Any]:
        return {"model": {"a": torch.full((9000,), value), "w": make()}}

    with pytest.raises(CheckpointException, match=says):
        engine.async_save(state(), 1).result(60)
    if kind == "subclass":  # which torch can copy into
        return
    if kind == "sparse":  # DCP's own planner fails at the others, before it calls the writer
        error = failure_of(lambda: save(engine, 2, state()))
        assert isinstance(error, UsageError)
        assert error.state_key == "model.w"
        assert engine.checkpoints() == []
    shape = (4,) if kind in ("lazy", "jagged", "nested") else make().shape
    save(engine, 3, {"model": {**state(1.0)["model"], "w": torch.ones(shape)}})
    back = state()
    with pytest.raises(UsageError, match=says):
        engine.load(back)
    assert not back["model"]["a"].any()
    if kind != "nested":  # where DCP's own planner fails by itself
        with pytest.raises(CheckpointException, match=r"model\.w"):
            load(back, engine.reader())


def test_parts_of_a_state(engine: Engine):
    state = small()
    save(engine, 1, state)
    part: dict[str, Any] = {"model": {"b": torch.zeros(7)}}
    load(part, engine.reader())  # as DCP does it
    assert torch.equal(part["model"]["b"], state["model"]["b"])
    with pytest.raises(UsageError, match="strict=False"):
        engine.load(part)
    part = {"model": {"b": torch.zeros(7)}}
    with pytest.warns(UserWarning, match="no rank asked for"):
        assert engine.load(part, strict=False) == 1
    assert torch.equal(part["model"]["b"], state["model"]["b"])
    more = {**blank(state), "new": {"w": torch.ones(2), "n": 3}}
    with pytest.raises(CheckpointException, match="Missing key"):
        engine.load(more)
    more = {**blank(state), "new": {"w": torch.ones(2), "n": 3}}
    with pytest.warns(UserWarning, match=r"2 key.*'new.w', 'new.n'"):
        assert engine.load(more, strict=False) == 1
    assert same(more, {**state, "new": {"w": torch.ones(2), "n": 3}})
    for planner in (DefaultLoadPlanner, tieredckpt.SafeLoadPlanner):
        more = {**blank(state), "new": torch.ones(2)}
        load(more, engine.reader(), planner=planner(allow_partial_load=True))
        assert same(more, {**state, "new": torch.ones(2)})


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


def test_a_tensor_of_another_shape_is_dcps_error(engine: Engine):
    save(engine, 1, {"w": torch.ones(4)})
    with pytest.raises(CheckpointException, match="Size mismatch"):
        engine.load({"w": torch.zeros(5)})


def test_from_keys(engine: Engine):
    state = small()
    save(engine, 1, state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        everything = _load_state_dict_from_keys(storage_reader=engine.reader())
        assert same(everything, state)
        for keys, expected in (
            ("lr", {"lr": state["lr"]}),
            ({"model"}, {"model": state["model"]}),
            ({"model.w"}, {"model": {"w": state["model"]["w"]}}),
            ({"model.b", "lr"}, {"model": {"b": state["model"]["b"]}, "lr": state["lr"]}),
        ):
            assert same(_load_state_dict_from_keys(keys, storage_reader=engine.reader()), expected)
        assert _load_state_dict_from_keys({"nothing"}, storage_reader=engine.reader()) == {}


def test_in_place(engine: Engine):
    """Tensors of the state are filled where they are; the same objects stay in it."""
    state = small()
    save(engine, 1, state)
    back = blank(state)
    inner, weight = back["model"], back["model"]["w"]
    pointer = weight.data_ptr()
    assert engine.load(back) == 1
    assert back["model"] is inner
    assert inner["w"] is weight
    assert weight.data_ptr() == pointer
    assert torch.equal(weight, state["model"]["w"])
    module = nn.Linear(7, 30)
    with torch.no_grad():
        module.weight.zero_()
    load({"model": {"w": module.weight}}, engine.reader())  # a parameter that requires grad
    assert torch.equal(module.weight, state["model"]["w"])


class App:
    """The Stateful of DCP's tutorial."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


# --- models and optimizers ------------------------------------------------------------------------


def build(seed: int | None, *, device: str = "cpu", shard: bool = True, **more: Any) -> nn.Module:
    """A small model, sharded with FSDP2; without content on the meta device."""
    if seed is not None:
        torch.manual_seed(seed)
    with torch.device(device):
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 7, bias=False))
    if shard:
        for layer in model:
            fully_shard(layer, **more)
        fully_shard(model, **more)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1, "name": "decayed"}, {"params": others}], lr=0.01
    )


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(8, 6, generator=generator)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All of it, whole, for comparison."""
    options = StateDictOptions(full_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    return {
        "model": {key: value.clone() for key, value in model_state.items()},
        "optim": {
            key: {name: torch.as_tensor(value).clone() for name, value in state.items()}
            for key, state in optimizer_state["state"].items()
        },
        "groups": [dict(group) for group in optimizer_state["param_groups"]],
    }


OPTIONS: dict[str, StateDictOptions] = {
    "plain": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "offloaded": StateDictOptions(cpu_offload=True),
    "full": StateDictOptions(full_state_dict=True),
    "rank 0": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "no frozen": StateDictOptions(ignore_frozen_params=True, strict=False),
}


def models(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir) as engine:
        model = build(1)
        optimizer = optimizer_of(model)
        step_of(model, optimizer, 5)
        expected = everything(model, optimizer)
        for name, options in OPTIONS.items():
            stream = name.replace(" ", "-")
            engine.load({}, stream=stream)
            saved, saved_optim = get_state_dict(model, optimizer, options=options)
            save(engine, 1, {"model": saved, "optim": saved_optim}, stream=stream)

            fresh = build(2)
            fresh_optimizer = optimizer_of(fresh)
            found, found_optim = get_state_dict(fresh, fresh_optimizer, options=options)
            state = {"model": found, "optim": found_optim}
            assert engine.load(state, stream=stream) == 1
            # What only rank 0 has, it must spread; set_state_dict hangs where a rank has nothing.
            if name == "rank 0":
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(fresh, state["model"], options=options)
            set_optimizer_state_dict(fresh, fresh_optimizer, state["optim"], options=options)
            assert same(everything(fresh, fresh_optimizer), expected), name
            step_of(fresh, fresh_optimizer, 6)
        step_of(model, optimizer, 6)
        assert same(everything(fresh, fresh_optimizer), everything(model, optimizer))

        # The Stateful of the tutorial; what DCP's own storage restores from it, too.
        expected = everything(model, optimizer)
        engine.load({}, stream="app")
        save(engine, 1, {"app": App(model, optimizer)}, stream="app")
        fresh = build(3)
        app = App(fresh, optimizer_of(fresh))
        assert engine.load({"app": app}, stream="app") == 1
        assert same(everything(fresh, app.optimizer), expected)
        fresh = build(4)
        app = App(fresh, optimizer_of(fresh))
        load({"app": app}, engine.reader(stream="app"))
        assert same(everything(fresh, app.optimizer), expected)
        # A model alone, of a checkpoint that holds more.
        fresh = build(5)
        state = {"app": {"model": get_model_state_dict(fresh)}}
        load(state, engine.reader(stream="app"))
        set_model_state_dict(fresh, state["app"]["model"])
        assert same(everything(fresh, optimizer_of(fresh))["model"], expected["model"])


def test_models_and_optimizers(runtime_dir: Path):
    run_ranks(models, 2, str(runtime_dir))


def meta(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir) as engine:
        engine.load({})
        model = build(1)
        step_of(model, optimizer_of(model), 5)
        expected = {k: v.full_tensor() if isinstance(v, DTensor) else v.clone()
                    for k, v in model.state_dict().items()}  # fmt: skip
        save(engine, 1, {"model": model.state_dict()})

        def check(loaded: nn.Module) -> None:
            for key, value in loaded.state_dict().items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                assert torch.equal(whole, expected[key]), key

        # Memory first, content after: the usual way.
        lazy = build(None, device="meta")
        lazy.to_empty(device="cpu")
        state = {"model": get_model_state_dict(lazy)}
        assert engine.load(state) == 1
        set_model_state_dict(lazy, state["model"])
        check(lazy)
        # The state of a meta model: DCP makes the memory while it loads.
        for bare in (False, True):
            lazy = build(None, device="meta")
            state = {"model": lazy.state_dict()}
            if bare:
                load(state, engine.reader())
            else:
                assert engine.load(state) == 1
            assert not any(value.is_meta for value in state["model"].values())
            lazy.load_state_dict(state["model"], assign=True)
            check(lazy)
        # What is still on the meta device cannot be saved.
        error = failure_of(
            lambda: save(engine, 2, {"model": build(None, device="meta").state_dict()})
        )
        assert isinstance(error, UsageError)
        assert "meta device" in str(error)


def test_meta_models(runtime_dir: Path):
    run_ranks(meta, 2, str(runtime_dir))


def test_meta_model_alone(engine: Engine):
    model = build(1, shard=False)
    save(engine, 1, {"model": model.state_dict()})
    lazy = build(None, device="meta", shard=False)
    lazy.to_empty(device="cpu")
    state = {"model": lazy.state_dict()}
    assert engine.load(state) == 1
    lazy.load_state_dict(state["model"])
    assert same(dict(lazy.state_dict()), dict(model.state_dict()))
    lazy = build(None, device="meta", shard=False)
    state = {"model": dict(lazy.state_dict())}
    with pytest.raises(UsageError, match="to_empty"):  # DCP asks the group where to put it
        engine.load(state)


def offloaded(rank: int, runtime_dir: str) -> None:
    policy = CPUOffloadPolicy(pin_memory=False)
    with opened(runtime_dir) as engine:
        engine.load({})
        model = build(1, offload_policy=policy)
        optimizer = optimizer_of(model)
        step_of(model, optimizer, 5)
        expected = everything(model, optimizer)
        save(engine, 1, {"app": App(model, optimizer)})
        for options in ({"offload_policy": policy}, {}):
            fresh = build(2, **options)
            app = App(fresh, optimizer_of(fresh))
            assert engine.load({"app": app}) == 1
            assert same(everything(fresh, app.optimizer), expected)


def test_cpu_offloaded_models_and_optimizers(runtime_dir: Path):
    run_ranks(offloaded, 2, str(runtime_dir))


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
