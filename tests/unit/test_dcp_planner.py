"""The safe load planner: what it reads, what it refuses, and that it leaves torch as it was."""

from __future__ import annotations

import datetime
import io
import pathlib
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tieredckpt.dcp.planner import SafeLoadPlanner, safe_loads
from tieredckpt.errors import UsageError

VALUES: dict[str, Any] = {
    "python_random": random.getstate(),
    "numpy_random": np.random.get_state(),
    "generator": np.random.default_rng(1).bit_generator.state,
    "torch_random": torch.get_rng_state(),
    "float64": np.float64(2.5),
    "bool_": np.bool_(True),
    "datetime64": np.datetime64("2026-01-01"),
    "text": np.array(["a", "bc"]),
    "records": np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
    "fortran": np.asfortranarray(np.ones((2, 3))),
    "empty": np.zeros(0),
    "objects": np.array([1, "a", None], dtype=object),
    "dtype": np.dtype("f4"),
    "frozenset": frozenset({1, 2}),
    "set": {1, 2},
    "complex": 1j,
    "bytes": b"abc",
    "bytearray": bytearray(b"x"),
    "slice": slice(1, 2),
    "range": range(3),
    "date": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),  # noqa: UP017 pickles
    "path": pathlib.PurePosixPath("/x/y"),
    "size": torch.Size([1, 2]),
    "torch_dtype": torch.bfloat16,
    "nested": {"a": [1, (2.0, None)], 3: True, "big": 1 << 99},
}


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code of the checkpoint was run')",)


class Mine:
    def __init__(self) -> None:
        self.value = 5


def saved(tmp_path: pathlib.Path, value: Any) -> pathlib.Path:
    dcp.save({"v": {"x": value}}, checkpoint_id=tmp_path)
    return tmp_path


def load(path: pathlib.Path, planner: SafeLoadPlanner) -> Any:
    state: dict[str, Any] = {"v": {"x": 0}}
    dcp.load(state, checkpoint_id=path, planner=planner)
    return state["v"]["x"]


@pytest.mark.parametrize("name", VALUES)
def test_plain_values(name: str):
    value = VALUES[name]
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    got = safe_loads(name, stream)
    assert type(got) is type(value)
    if isinstance(value, np.ndarray):
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(got, value)
    elif isinstance(value, torch.Tensor):
        assert torch.equal(got, value)
    elif name == "numpy_random":
        np.testing.assert_array_equal(got[1], value[1])
    else:
        assert got == value


def failure(path: pathlib.Path, planner: SafeLoadPlanner) -> BaseException:
    with pytest.raises(dcp.api.CheckpointException) as caught:
        load(path, planner)
    return caught.value.failures[0][0]


def test_code_is_not_run(tmp_path: pathlib.Path):
    error = failure(saved(tmp_path, Evil()), SafeLoadPlanner())
    assert isinstance(error, UsageError)
    assert "'v.x'" in str(error)
    assert "builtins.exec" in str(error)
    assert "unsafe_pickle=True" in str(error)


def test_ways_out(tmp_path: pathlib.Path):
    path = saved(tmp_path, Mine())
    assert isinstance(failure(path, SafeLoadPlanner()), UsageError)
    assert load(path, SafeLoadPlanner(allow=[Mine])).value == 5
    assert load(path, SafeLoadPlanner(unsafe_pickle=True)).value == 5


def test_the_users_own_allow_list_stays(tmp_path: pathlib.Path):
    path = saved(tmp_path, VALUES["numpy_random"])
    before = set(torch.serialization.get_safe_globals())
    torch.serialization.add_safe_globals([np.ndarray])
    try:
        load(path, SafeLoadPlanner())
        assert set(torch.serialization.get_safe_globals()) == before | {np.ndarray}
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(list(before))


def test_missing_keys_are_known(tmp_path: pathlib.Path):
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path)
    state = {"a": torch.zeros(2), "b": torch.zeros(2), "c": {"d": 1}}
    planner = SafeLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=tmp_path, planner=planner)
    assert planner.missing_keys == ("b", "c.d")
    assert torch.equal(state["a"], torch.ones(2))


def test_not_flattened(tmp_path: pathlib.Path):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"a": {"b": 7}}, checkpoint_id=tmp_path, planner=planner)
    state = {"a": {"b": 0}}
    loader = SafeLoadPlanner(flatten_state_dict=False)
    dcp.load(state, checkpoint_id=tmp_path, planner=loader)
    assert loader.state_dict == {"a": {"b": 7}}


def test_bytes_that_are_no_pickle_are_our_error():
    with pytest.raises(UsageError, match="'k'"):
        safe_loads("k", io.BytesIO(b"\x80\x02not a pickle"))
