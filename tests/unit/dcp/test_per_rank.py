"""Per-rank values: whose they are, how they are read back, and that nothing else is handed out."""

from __future__ import annotations

import copy
import io
import pathlib
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

import tieredckpt
from tieredckpt.dcp.state.consistency import value_digest
from tieredckpt.dcp.state.per_rank_keys import Coordinate, Found, parse_key, read_leaf, saved_places
from tieredckpt.errors import IntegrityError, UsageError

TWO = Coordinate("dp", 1, 2)


class Box:
    """Holds a value."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def at(index: int, size: int, value: Any = None, kind: str = "dp", **more: Any) -> Any:
    return tieredckpt.per_rank(Box(value), coordinate=(kind, index, size), **more)


def test_round_trip_is_one_leaf():
    one = at(1, 3, {"a": [torch.ones(2), (1, 2)], "b": np.arange(3)})
    assert isinstance(one, Stateful)
    state = one.state_dict()
    assert list(state) == ["per_rank:dp:1"]
    assert type(state["per_rank:dp:1"]) is bytes
    other = at(1, 3)
    other.load_state_dict(state)
    assert torch.equal(other.obj.value["a"][0], torch.ones(2))
    assert other.obj.value["a"][1] == (1, 2)
    np.testing.assert_array_equal(other.obj.value["b"], np.arange(3))


def test_the_stored_form_is_what_it_was():
    """Written by hand: a leaf on disk must stay readable."""
    stream = io.BytesIO()
    torch.save({"value": 5}, stream)
    leaf = b"tieredckpt.per_rank 1 dp 1 3\n" + stream.getvalue()
    one = at(1, 3)
    one.load_state_dict({"per_rank:dp:1": leaf})
    assert one.obj.value == 5
    one.obj.value = 5
    assert read_leaf(one.state_dict()["per_rank:dp:1"])[0] == read_leaf(leaf)[0]  # type: ignore[index]


@pytest.mark.parametrize(
    "leaf",
    [
        b"",
        b"tieredckpt.per_rank",
        b"tieredckpt.per_rank 2 dp 0 2\n",
        b"tieredckpt.per_rank 1 dp 2 2\n",
        b"tieredckpt.per_rank 1 dp 0 99999999\n",
        b"tieredckpt.per_rank 1 d.p 0 2\n",
        b"tieredckpt.per_rank 1 dp 0 2",
        b"tieredckpt.per_rank 1 " + b"d" * 1000 + b" 0 2\n",
        "tieredckpt.per_rank 1 dp 0 2\n",
        None,
    ],
)
def test_what_is_no_leaf(leaf: Any):
    assert read_leaf(leaf) is None
    if leaf is not None:
        with pytest.raises(IntegrityError):
            at(0, 2).load_state_dict({"per_rank:dp:0": leaf})


def test_a_leaf_under_another_ranks_key_is_refused():
    leaf = next(iter(at(0, 2, 7).state_dict().values()))
    with pytest.raises(IntegrityError):
        at(1, 2).load_state_dict({"per_rank:dp:1": leaf})


def test_another_size_raises_and_says_how():
    four = [at(index, 4, index).state_dict() for index in range(4)]
    two = at(1, 2, "mine")
    with pytest.raises(UsageError, match=r"dp 1 of 4.*dp 1 of 2.*SafeLoadPlanner"):
        two.load_state_dict(four[1])
    with pytest.raises(UsageError, match="no value for dp 1 of 2"):
        two.load_state_dict(four[0])
    everything = Found(TWO, {key: leaf for state in four for key, leaf in state.items()})
    with pytest.raises(UsageError, match="reshard="):
        two.load_state_dict({"per_rank:dp:1": everything})
    incomplete = Found(TWO, {"per_rank:dp:0": four[0]["per_rank:dp:0"]})
    with pytest.raises(UsageError, match="not have all"):
        at(0, 1, reshard=lambda saved: saved[0]).load_state_dict({"per_rank:dp:0": incomplete})
    assert two.obj.value == "mine"


def test_reshard_gets_all_in_order():
    states = [at(index, 12, index).state_dict() for index in range(12)]
    random.shuffle(states)
    everything = Found(TWO, {key: leaf for state in states for key, leaf in state.items()})
    got: list[Any] = []

    def reshard(saved: list[Any]) -> Any:
        got.append([state["value"] for state in saved])
        return {"value": sum(state["value"] for state in saved)}

    one = at(0, 1, reshard=reshard)
    one.load_state_dict({"per_rank:dp:0": everything})
    assert got == [list(range(12))]
    assert one.obj.value == 66
    kept = at(0, 1, "mine", reshard=lambda saved: None)
    kept.load_state_dict({"per_rank:dp:0": everything})
    assert kept.obj.value == "mine"


class Odd:
    """A type that is not loaded unless it is allowed."""


def test_types_that_are_not_plain():
    with pytest.warns(UserWarning, match=r"per_rank, dp 0 of 1.*Odd"):
        state = at(0, 1, Odd()).state_dict()
    with pytest.raises(UsageError, match="Odd"):
        at(0, 1).load_state_dict(state)
    one = at(0, 1, Odd(), allow=[Odd])
    state = one.state_dict()  # no warning: warnings are errors here
    one.load_state_dict(state)
    assert isinstance(one.obj.value, Odd)
    for found in (Found(TWO, dict(state), (Odd,)), Found(TWO, dict(state), unsafe_pickle=True)):
        other = at(0, 1)
        other.load_state_dict({"per_rank:dp:0": found})
        assert isinstance(other.obj.value, Odd)


@pytest.mark.parametrize(
    "coordinate",
    [("dp", 2, 2), ("dp", -1, 2), ("d.p", 0, 2), ("", 0, 1), ("dp", 0.0, 2), ("dp", 0), "dp", 3,
     ("dp", True, 2)],
)  # fmt: skip
def test_coordinates_that_are_none(coordinate: Any):
    with pytest.raises(UsageError, match="coordinate="):
        tieredckpt.per_rank(Box(), coordinate=coordinate)


def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UsageError, match=r"state_dict\(\)"):
        tieredckpt.per_rank({"a": 1})  # type: ignore[type-var]
    with pytest.raises(UsageError, match="reshard"):
        tieredckpt.per_rank(Box(), reshard=[])  # type: ignore[arg-type]
    assert str(tieredckpt.per_rank(Box()).coordinate) == "rank 0 of 1"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="init_process_group"):
        tieredckpt.per_rank(Box()).state_dict()


def test_nested_objects_are_not_pickled():
    """DCP expands Stateful objects of the top level only."""
    for call in (lambda o: torch.save(o, io.BytesIO()), copy.deepcopy):
        with pytest.raises(UsageError, match="top level"):
            call({"nested": at(0, 1)})


def test_keys():
    assert parse_key("a.b.per_rank:dp:3") == ("a.b", "dp", 3)
    assert parse_key("per_rank:dp:3") == ("", "dp", 3)
    assert parse_key("a\nb.per_rank:x-y_1:0") == ("a\nb", "x-y_1", 0)
    for name in ("a.per_rank:dp:", "a.per_rank:d p:1", "aper_rank:dp:1", "a.per_rank:dp:1.b"):
        assert parse_key(name) is None
    places = saved_places(["x", "a.per_rank:dp:0", "a.per_rank:dp:1", "per_rank:dp:0"])
    assert places["a"]["dp"] == {0: "a.per_rank:dp:0", 1: "a.per_rank:dp:1"}


# --- with DCP's own storage: a planner is all that is needed --------------------------------------


def saved(folder: pathlib.Path, size: int, kind: str = "dp") -> pathlib.Path:
    parts = {}
    for index in range(size):
        parts |= at(index, size, index * 10, kind).state_dict()
    dcp.save({"rng": parts, "x": torch.ones(2)}, checkpoint_id=folder)
    return folder


def load(folder: pathlib.Path, one: Any, **more: Any) -> None:
    planner = tieredckpt.SafeLoadPlanner(**more)
    dcp.load({"rng": one, "x": torch.zeros(2)}, checkpoint_id=folder, planner=planner)
    assert planner.missing_keys == ()


def test_planner_asks_for_what_is_needed(tmp_path: pathlib.Path):
    folder = saved(tmp_path, 3)
    same = at(2, 3)
    load(folder, same)
    assert same.obj.value == 20
    for index, size in ((0, 1), (3, 4), (0, 4)):
        other = at(index, size, reshard=lambda saved: {"value": [s["value"] for s in saved]})
        load(folder, other)
        assert other.obj.value == [0, 10, 20]
        with pytest.raises(UsageError, match="reshard="):
            load(folder, at(index, size))
        with pytest.raises(UsageError, match="reshard="):
            load(folder, at(index, size), allow_partial_load=True)
    with pytest.raises(CheckpointException) as caught:
        load(folder, at(0, 3, kind="rank"))
    assert "'rank'" in str(caught.value.failures[0][0])
    assert "'dp'" in str(caught.value.failures[0][0])


def test_dcps_own_planner_never_hands_out_anothers(tmp_path: pathlib.Path):
    folder = saved(tmp_path, 3)
    same = at(2, 3)
    dcp.load({"rng": same}, checkpoint_id=folder)
    assert same.obj.value == 20
    shrunk, grown = at(1, 2), at(3, 4)
    with pytest.raises(UsageError, match=r"SafeLoadPlanner\(\)"):
        dcp.load({"rng": shrunk}, checkpoint_id=folder)
    with pytest.raises(CheckpointException, match="per_rank:dp:3"):
        dcp.load({"rng": grown}, checkpoint_id=folder)
    assert shrunk.obj.value is grown.obj.value is None


def test_partial_load_of_a_checkpoint_without(tmp_path: pathlib.Path):
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path)
    planner = tieredckpt.SafeLoadPlanner(allow_partial_load=True)
    one = at(0, 2, "mine")
    dcp.load({"rng": one, "x": torch.zeros(2)}, checkpoint_id=tmp_path, planner=planner)
    assert planner.missing_keys == ("rng.per_rank:dp:0",)
    assert one.obj.value == "mine"


def test_planner_allows_types_inside(tmp_path: pathlib.Path):
    with pytest.warns(UserWarning, match="Odd"):
        dcp.save({"rng": at(0, 1, Odd())}, checkpoint_id=tmp_path)
    one = at(0, 1)
    dcp.load({"rng": one}, checkpoint_id=tmp_path, planner=tieredckpt.SafeLoadPlanner(allow=[Odd]))
    assert isinstance(one.obj.value, Odd)


def test_inspecting_without_the_object(tmp_path: pathlib.Path):
    folder = saved(tmp_path, 2)
    state: dict[str, Any] = {"rng": {"per_rank:dp:1": None}}
    dcp.load(state, checkpoint_id=folder, planner=tieredckpt.SafeLoadPlanner())
    assert read_leaf(state["rng"]["per_rank:dp:1"]) is not None


# --- random states --------------------------------------------------------------------------------


def draw() -> list[Any]:
    return [
        random.random(), random.gauss(0, 1), np.random.rand(3).tolist(), np.random.randn(),
        torch.rand(3).tolist(), torch.randperm(5).tolist(),
    ]  # fmt: skip


def test_random_state_continues_bit_exact():
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()  # leaves Python's and NumPy's spare normal numbers behind
    state = tieredckpt.per_rank(tieredckpt.RandomState()).state_dict()
    expected = [draw() for _ in range(3)]
    tieredckpt.per_rank(tieredckpt.RandomState()).load_state_dict(state)
    assert [draw() for _ in range(3)] == expected


def test_random_state_needs_cuda_for_cuda(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state = tieredckpt.RandomState().state_dict() | {"cuda": torch.zeros(16, dtype=torch.uint8)}
    with pytest.raises(UsageError, match="cuda=False"):
        tieredckpt.RandomState().load_state_dict(state)
    tieredckpt.RandomState(cuda=False).load_state_dict(state)


@pytest.mark.gpu
def test_random_state_of_cuda():
    torch.cuda.manual_seed(5)
    torch.rand(3, device="cuda")
    state = tieredckpt.per_rank(tieredckpt.RandomState()).state_dict()
    expected = torch.rand(100, device="cuda").tolist()
    tieredckpt.per_rank(tieredckpt.RandomState()).load_state_dict(state)
    assert torch.rand(100, device="cuda").tolist() == expected


# --- digests of values ----------------------------------------------------------------------------


def digest(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return value_digest(stream.getbuffer())


def test_equal_values_have_equal_digests():
    text = "".join(["a", "b"])
    for one, other in (
        ([text, text], ["ab", "".join(["a", "b"])]),
        (set("abcdef"), set("fedcba")),
        (torch.arange(6).reshape(2, 3), torch.arange(6).reshape(2, 3).t().contiguous().t()),
        (at(0, 2, [text, text]).state_dict(), at(0, 2, [text, "".join(["a", "b"])]).state_dict()),
    ):
        assert digest(one) == digest(other), one
    cycle: list[Any] = []
    cycle.append(cycle)
    assert digest(cycle) == digest(cycle)


def test_different_values_have_different_digests():
    with pytest.warns(UserWarning, match="Odd"):
        odd = at(0, 1, Odd()).state_dict()
    values = [
        None, 0, False, 0.0, -0.0, "0", b"0", bytearray(b"0"), [0], (0,), {0}, {0: 0}, {"0": 0},
        [[0], 0], [0, [0]], 1j, float("nan"), "\ud800", torch.float32, slice(1), range(3),
        torch.tensor(0), torch.tensor(0.0), torch.tensor([0]), torch.zeros(2, 3), torch.zeros(3, 2),
        torch.zeros(0), np.zeros(1), np.zeros(1, dtype="f4"), np.float64(0), np.array(["0"]),
        np.array([0, None], dtype=object), at(0, 2, 1).state_dict(), at(0, 2, 2).state_dict(),
        at(0, 3, 1).state_dict(), odd, torch.eye(2).to_sparse(),
    ]  # fmt: skip
    digests = [digest(value) for value in values]
    same = [
        (values[i], values[j])
        for i in range(len(values))
        for j in range(i)
        if digests[i] == digests[j]
    ]
    assert not same
