"""The rest of DCP's interface: what is asked for, by which planner, into which destination."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.tensor import Shard

from tieredckpt.testing.dcp import oracle
from tieredckpt.testing.dcp.job import Job
from tieredckpt.testing.dcp.scenario import scenario
from tieredckpt.testing.dcp.scenarios.sharding import cut, mesh_of
from tieredckpt.testing.dcp.scenarios.values import plain


@scenario(2)
def subset_of_the_keys(job: Job) -> None:
    """A load of some of the saved keys"""
    state: dict[str, Any] = {"a": torch.zeros(5), "b": {"c": torch.zeros(6), "d": 1}}
    job.save_filled(state, 1)
    job.restart()
    job.load_checked({"b": {"c": torch.zeros(6)}}, 1)


@scenario(2)
def different_keys_on_each_rank(job: Job) -> None:
    """Each rank loads other keys of one checkpoint, one of them none at all"""
    job.save_filled({"a": torch.zeros(5), "b": torch.zeros(6)}, 1)
    job.restart()
    if job.rank:
        job.load_checked({"b": torch.zeros(6)}, 1)
        job.load({}, 1)
    else:
        job.load({}, 1)
        job.load_checked({"a": torch.zeros(5)}, 1)


@scenario(2)
def missing_key(job: Job) -> None:
    """A key that was never saved: an error on all ranks, whoever asks; then a load that works"""
    job.save_filled(plain(), 1)
    job.restart()
    job.all_raise(lambda: job.load({**plain(), "new": torch.zeros(2)}, 1))
    extra = {"new": torch.zeros(2)} if job.rank == 1 else {}
    job.all_raise(lambda: job.load({**plain(), **extra}, 1))
    job.load_checked(plain(), 1)


@scenario(2)
def missing_key_allowed(job: Job) -> None:
    """allow_partial_load leaves alone what was never saved, and loads the rest"""
    job.save_filled(plain(), 1)
    job.restart()
    new = torch.full((2,), 7.0)
    got: dict[str, Any] = {**plain(), "new": new, "other": 5}
    job.load(got, 1, planner=DefaultLoadPlanner(allow_partial_load=True))
    oracle.check({key: got[key] for key in plain()}, 1)
    assert got["other"] == 5
    assert bool((got["new"] == 7.0).all())


@scenario(2)
def other_shape(job: Job) -> None:
    """A destination of another shape: an error on all ranks; then a load that works"""
    job.save_filled(plain(), 1)
    job.restart()
    for shape in ((33, 6), (32, 5), (165,)):
        job.all_raise(partial(job.load, {"weight": torch.zeros(shape)}, 1))
    wrong = {"weight": torch.zeros(4, 4)} if job.rank else {"weight": torch.zeros(33, 5)}
    job.all_raise(lambda: job.load(wrong, 1))
    job.load_checked(plain(), 1)


@scenario(2)
def other_dtype(job: Job) -> None:
    """A destination of another dtype gets the values converted, as copy_ does"""
    saved = {"x": oracle.tame("x", 1, (9, 4)), "y": oracle.tame("y", 1, (5,), torch.bfloat16)}
    job.save(saved, 1)
    job.restart()
    got = {"x": torch.zeros(9, 4, dtype=torch.float16), "y": torch.zeros(5, dtype=torch.float64)}
    job.load(got, 1)
    oracle.assert_same("x", got["x"], oracle.tame("x", 1, (9, 4), torch.float16))
    oracle.assert_same("y", got["y"], oracle.tame("y", 1, (5,), torch.float64))


class _Counter:
    """A Stateful object."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        """As DCP asks for it."""
        content: dict[str, Any] = {"tensor": torch.zeros(6), "step": self.step}
        oracle.fill({"counter": {"tensor": content["tensor"]}}, self.step)
        return content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As DCP hands it back."""
        oracle.check({"counter": {"tensor": state["tensor"]}}, state["step"])
        self.step = state["step"]
        self.loads += 1


@scenario(2)
def stateful_objects(job: Job) -> None:
    """Objects with state_dict and load_state_dict"""
    job.save({"counter": _Counter(3), "x": 1}, 3)
    job.restart()
    got = _Counter(0)
    job.load({"counter": got, "x": 0}, 3)
    assert (got.step, got.loads) == (3, 1)


@scenario(2)
def from_keys(job: Job) -> None:
    """_load_state_dict_from_keys: a new state of the keys that are named, or of all"""
    mesh = mesh_of(2)
    job.save_filled({"a": {"x": cut(mesh, (7, 2), Shard(0)), "y": torch.zeros(3)}, "b": 4}, 1)
    job.restart()
    part = _load_state_dict_from_keys("a", storage_reader=job.storage.reader(1))
    oracle.assert_same("a.x", part["a"]["x"], oracle.whole("a.x", 1, (7, 2)))
    everything = _load_state_dict_from_keys(storage_reader=job.storage.reader(1))
    assert set(everything) == {"a", "b"}
    assert everything["b"] == 4
    oracle.assert_same("a.y", everything["a"]["y"], oracle.whole("a.y", 1, (3,)))


@scenario(2)
def meta_initialised_model(job: Job) -> None:
    """A model that was made on the meta device, loaded after to_empty"""
    job.save_filled(torch.nn.Linear(7, 3).state_dict(), 1)
    job.restart()
    with torch.device("meta"):
        model = torch.nn.Linear(7, 3)
    model.to_empty(device="cpu")
    job.load_checked(model.state_dict(), 1)
    oracle.check({"weight": model.weight, "bias": model.bias}, 1)


def _nested() -> dict[str, Any]:
    return {"x": torch.zeros(5), "inner": {"list": [1, 2], "deep": {"n": None}}}


@scenario(2)
def not_flattened(job: Job) -> None:
    """flatten_state_dict=False: nested values are one bytes item for each top-level key"""
    saving = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    job.save_filled(_nested(), 1, planner=saving)
    job.restart()
    got: dict[str, Any] = {"x": torch.zeros(5), "inner": {}}
    loading = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    job.load_checked(got, 1, planner=loading)
    assert got["inner"] == _nested()["inner"], f"{got['inner']} was loaded"


@scenario(2)
def only_sharded_tensors_flattened(job: Job) -> None:
    """flatten_state_dict=False with everything else by default, into the caller's dict"""
    job.save_filled(_nested(), 1, planner=DefaultSavePlanner(flatten_state_dict=False))
    job.restart()
    got: dict[str, Any] = {"x": torch.zeros(5), "inner": {}}
    job.load_checked(got, 1, planner=DefaultLoadPlanner(flatten_state_dict=False))
    assert got["inner"] == _nested()["inner"], (
        f"{got['inner']} was loaded, the value not handed over"
    )


class _Halves(DefaultSavePlanner):
    """Saves float32 tensors as float16."""

    def create_local_plan(self) -> SavePlan:
        self.state_dict = {
            key: value.half() if isinstance(value, torch.Tensor) else value
            for key, value in self.state_dict.items()
        }
        return super().create_local_plan()


class _Renames(DefaultSavePlanner):
    """Saves every key under another name."""

    def create_local_plan(self) -> SavePlan:
        self.state_dict = {f"new.{key}": value for key, value in self.state_dict.items()}
        self.mappings = {f"new.{key}": path for key, path in self.mappings.items()}
        return super().create_local_plan()


@scenario(2)
def casting_planner(job: Job) -> None:
    """A planner that saves in half precision"""
    job.save({"x": oracle.tame("x", 1, (8, 3))}, 1, planner=_Halves())
    job.restart()
    for dtype in (torch.float16, torch.float32):
        got = {"x": torch.zeros(8, 3, dtype=dtype)}
        job.load(got, 1)
        oracle.assert_same("x", got["x"], oracle.tame("x", 1, (8, 3), dtype))


@scenario(2)
def renaming_planner(job: Job) -> None:
    """A planner that saves under other names"""
    state = {"new": plain()}
    oracle.fill(state, 1)
    job.save(state["new"], 1, planner=_Renames())
    job.restart()
    got = {f"new.{key}": torch.zeros_like(value) for key, value in plain().items()}
    job.load_checked(got, 1)


class _Appends(DefaultSavePlanner):
    """Changes what was resolved, without a word in the plan."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return data + 1 if isinstance(data, torch.Tensor) else data


@scenario(2)
def resolving_planner(job: Job) -> None:
    """A planner whose resolve_data computes what is saved"""
    job.save({"x": oracle.tame("x", 1, (8, 3))}, 1, planner=_Appends())
    job.restart()
    got = {"x": torch.zeros(8, 3)}
    job.load(got, 1)
    oracle.assert_same("x", got["x"], oracle.tame("x", 1, (8, 3)) + 1)


@scenario(2)
def plan_caching(job: Job) -> None:
    """enable_plan_caching over five saves of one structure, loaded at every step"""
    mesh = mesh_of(2)

    def state() -> dict[str, Any]:
        return {"x": cut(mesh, (7, 3), Shard(0)), "y": torch.zeros(4), "text": ""}

    for step in range(1, 6):
        content = {**state(), "text": "t" * step}
        job.save_filled(content, step, planner=DefaultSavePlanner(enable_plan_caching=True))
        got = state()
        job.load_checked(got, step)
        assert got["text"] == "t" * step
    job.restart()
    job.load_checked(state(), 5)


@scenario(2)
def plan_caching_of_two_states(job: Job) -> None:
    """enable_plan_caching with two alternating states: planners of a class share the cache"""
    mesh = mesh_of(2)

    def state(kind: str) -> dict[str, Any]:
        if kind == "a":
            return {"a": cut(mesh, (7, 3), Shard(0)), "both": torch.zeros(4)}
        return {"b": torch.zeros(9), "both": torch.zeros(5), "c": cut(mesh, (4,), Shard(0))}

    for step, kind in enumerate("aabbabab", start=1):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        job.save_filled(state(kind), step, stream=kind, planner=planner)
        job.load_checked(state(kind), step, stream=kind)


@scenario(2)
def reused_planner(job: Job) -> None:
    """One planner object for several saves, and one for several loads"""
    saving, loading = DefaultSavePlanner(), DefaultLoadPlanner()
    for step in (1, 2, 3):
        job.save_filled(plain(), step, planner=saving)
        job.load_checked(plain(), step, planner=loading)


@scenario(2)
def saved_twice(job: Job) -> None:
    """The same step saved again: the second one is loaded, now and after a restart"""
    mesh = mesh_of(2)

    def state() -> dict[str, Any]:
        return {"x": cut(mesh, (7, 3), Shard(0)), "text": ""}

    for content in (11, 12):
        first = state()
        oracle.fill(first, content)
        first["text"] = str(content)
        job.save(first, 1)
        job.meet()
    for _ in range(2):
        got = state()
        job.load(got, 1)
        oracle.check(got, 12)
        assert got["text"] == "12"
        job.restart()


@scenario(2)
def many_saves(job: Job) -> None:
    """Ten saves in a row; the last two can be loaded, after a restart too"""
    for step in range(1, 11):
        job.save_filled(plain(), step)
    for step in (10, 9):
        job.load_checked(plain(), step)
    job.restart()
    for step in (10, 9):
        job.load_checked(plain(), step)


@scenario(2)
def state_changes_after_a_save(job: Job) -> None:
    """What the trainer does to its tensors after dcp.save returned is not in the checkpoint"""
    state: dict[str, Any] = {**plain(), "list": [1]}
    oracle.fill(state, 1)
    job.save(state, 1)
    oracle.fill(state, 99)
    state["list"].append(2)
    got: dict[str, Any] = {**plain(), "list": [0]}
    job.load_checked(got, 1)
    assert got["list"] == [1]


@scenario(2)
def metadata_round_trip(job: Job) -> None:
    """read_metadata: names, shapes, dtypes, pieces, and the planner's own data"""
    mesh = mesh_of(2)
    job.save_filled(
        {
            "x": cut(mesh, (7, 3), Shard(0), dtype=torch.bfloat16),
            "n": {"y": torch.zeros(4), "z": 1},
        },
        1,
    )
    job.restart()
    metadata = job.storage.reader(1).read_metadata()
    found = metadata.state_dict_metadata
    assert set(found) == {"x", "n.y", "n.z"}, set(found)
    x, y = found["x"], found["n.y"]
    assert isinstance(x, TensorStorageMetadata)
    assert isinstance(y, TensorStorageMetadata)
    assert isinstance(found["n.z"], BytesStorageMetadata)
    assert (x.properties.dtype, tuple(x.size)) == (torch.bfloat16, (7, 3))
    pieces = sorted((tuple(c.offsets), tuple(c.sizes)) for c in x.chunks)
    assert pieces == [((0, 0), (4, 3)), ((4, 0), (3, 3))], pieces
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in y.chunks] == [((0,), (4,))]
    assert metadata.planner_data == {"x": ("x",), "n.y": ("n", "y"), "n.z": ("n", "z")}


@scenario(2)
def no_such_checkpoint(job: Job) -> None:
    """A step that was never saved: an error on all ranks, before and after there are others"""
    job.not_visible(plain(), 7)
    job.save_filled(plain(), 1)
    job.not_visible(plain(), 7)
    job.load_checked(plain(), 1)
