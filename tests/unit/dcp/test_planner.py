"""The safe load planner: what it reads, what it refuses, and that it leaves torch as it was."""

from __future__ import annotations

import datetime
import io
import pathlib
import random
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tieredckpt.dcp.state.planner import SafeLoadPlanner, safe_loads, warn_if_refused
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
    "big_endian": np.arange(3, dtype=">i4"),
    "timedelta64": np.array([1, 2], dtype="m8[25us]"),
    "no_unit": np.timedelta64(5),
    "void": np.void(b"abc"),
    "record": np.zeros(2, dtype=[("a", "i4"), ("b", "U3")])[1],
    "aligned": np.zeros(2, dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "longdouble": np.longdouble(1) / 3,
    "no_text": np.str_(""),
    "no_dimensions": np.array(7),
    "dtype": np.dtype("f4"),
    "frozenset": frozenset({1, 2}),
    "set": {1, 2},
    "complex": 1j,
    "bytes": b"abc",
    "bytearray": bytearray(b"x"),
    "slice": slice(1, 2),
    "range": range(3),
    "datetime": datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=datetime.timezone.utc),  # noqa: UP017 pickles
    "date": datetime.date(2026, 12, 31),
    "time": datetime.time(23, 59, 58, 999999),
    "zone": datetime.timezone(datetime.timedelta(hours=-3, microseconds=1), "here"),
    "type": float,
    "ordered": OrderedDict(b=1, a=OrderedDict()),
    "counter": Counter("abca"),
    "text_of_all_widths": "a\xe9\u20ac\U0001f600\ud800",
    "ints": [0, 255, 256, 65536, -1, 1 << 31, -(1 << 63), 1 << 64, 1 << 2000, True, False],
    "floats": [0.1, -0.0, float("inf"), 5e-324],
    "empty_containers": [(), [], {}, set(), frozenset(), b"", "", bytearray()],
    "device": torch.device("cuda", 3),
    "layout": torch.strided,
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
    assert repr(got) == repr(value)
    if isinstance(value, np.ndarray):
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(got, value)
    elif isinstance(value, torch.Tensor):
        assert torch.equal(got, value)
    elif name == "numpy_random":
        np.testing.assert_array_equal(got[1], value[1])
    else:
        assert got == value


@pytest.mark.parametrize("code", [*"?bhilqBHILQefdgFDG", "S3", "U3", "V3", "M8[ns]", "m8[D]"])
@pytest.mark.parametrize("order", "CF")
def test_arrays_and_scalars_of_all_plain_types(code: str, order: Any):
    size = np.dtype(code).itemsize * 6
    value = np.frombuffer((b"\1\0\0\0" * size)[:size], code).reshape(2, 3).copy(order)
    scalar = value[1, 2]
    got = saved_and_loaded([value, scalar, value.dtype, value[:, 0]])
    assert type(got[0]) is type(got[3]) is np.ndarray
    assert isinstance(got[1], np.generic)
    assert got[0].flags.fnc == value.flags.fnc
    assert got[0].flags.writeable
    assert got[0].dtype == got[2] == got[3].dtype == value.dtype
    assert got[1].dtype == scalar.dtype
    assert got[0].tobytes() == value.tobytes()
    assert got[1].tobytes() == scalar.tobytes()
    assert got[3].tobytes() == value[:, 0].tobytes()


DTYPES = [
    dtype
    for name, dtype in sorted(vars(torch).items())
    if isinstance(dtype, torch.dtype) and name == str(dtype)[6:]
    if not name.startswith(("q", "bits", "int", "uint")) or name in ("int8", "int64", "uint16")
    if name not in ("bcomplex32", "complex32")  # torch warns of them, and warnings are errors here
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors(dtype: torch.dtype):
    whole = (
        torch.arange(48, dtype=torch.uint8).remainder(2).view(dtype) if dtype.itemsize <= 16 else 0
    )
    assert isinstance(whole, torch.Tensor)
    got = saved_and_loaded({"whole": whole, "part": whole[1:], "none": whole[:0], "dtype": dtype})
    assert got["dtype"] is dtype
    for name, value in (("whole", whole), ("part", whole[1:]), ("none", whole[:0])):
        assert got[name].dtype == dtype
        assert got[name].view(torch.uint8).tolist() == value.view(torch.uint8).tolist()
    assert got["whole"].data_ptr() + dtype.itemsize == got["part"].data_ptr()  # one storage


def test_views_parameters_and_states_of_models():
    grid = torch.arange(24.0).view(2, 3, 4)
    views = [grid.permute(2, 0, 1), grid[:, ::2, 1:], grid[1, 1, 1], torch.ones(1).expand(4)]
    for got, value in zip(saved_and_loaded(views), views, strict=True):
        assert (got.stride(), got.storage_offset()) == (value.stride(), value.storage_offset())
        assert torch.equal(got, value)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    got = saved_and_loaded({"state": model.state_dict(), "weight": model[0].weight})
    assert type(got["weight"]) is torch.nn.Parameter
    assert got["weight"].requires_grad
    assert got["state"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
    model.load_state_dict(got["state"])
    assert torch.equal(got["weight"], model[0].weight)
    got["weight"].detach().resize_(100)  # as any tensor's


def test_one_object_in_two_places_stays_one():
    shared, itself = [1], [2]
    itself.append(itself)  # type: ignore[arg-type]
    array = np.arange(3)
    got = saved_and_loaded({"a": shared, "b": (shared, array), "c": array, "d": itself})
    assert got["a"] is got["b"][0]
    assert got["c"] is got["b"][1]
    assert got["d"][1] is got["d"]


@pytest.mark.parametrize(
    "value",
    [np.array([1, None], dtype=object), np.zeros(2, dtype=[("a", "f4", (3,))]), 1 << 3000,
     torch.ones(2).to_sparse(), torch._neg_view(torch.ones(2).to(torch.float8_e4m3fn))],
    ids=["objects", "sub-arrays", "a huge int", "sparse", "negated, which torch cannot"],
)  # fmt: skip
def test_what_is_refused_warns_at_the_save(value: Any):
    stream = io.BytesIO()
    torch.save(value, stream)
    with pytest.raises(UsageError, match=r"'k'.*unsafe_pickle=True"):
        safe_loads("k", stream)
    with pytest.warns(UserWarning, match=r"'k'.*unsafe_pickle=True"):
        warn_if_refused("k", stream.getbuffer())


def saved_and_loaded(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    return safe_loads("k", stream)


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


def test_torchs_own_allow_list_is_neither_used_nor_changed(tmp_path: pathlib.Path):
    """Any library may add to it, for the whole process."""
    before = set(torch.serialization.get_safe_globals())
    torch.serialization.add_safe_globals([Mine])
    try:
        assert isinstance(failure(saved(tmp_path, Mine()), SafeLoadPlanner()), UsageError)
        load(saved(tmp_path / "numpy", VALUES["numpy_random"]), SafeLoadPlanner())
        assert set(torch.serialization.get_safe_globals()) == before | {Mine}
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(list(before))


def test_all_refused_types_are_named():
    stream = io.BytesIO()
    torch.save({"a": (Mine(), [1]), "b": [Evil()], "c": {pathlib.Path: Mine}}, stream)
    with pytest.raises(
        UsageError, match=r"builtins\.exec, pathlib(\._local)?\.Path, tests\..*Mine"
    ):
        safe_loads("k", stream)


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
