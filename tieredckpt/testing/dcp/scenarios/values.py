"""What a state may hold: tensors of every kind, plain values, keys of every shape."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tieredckpt.testing.dcp import oracle
from tieredckpt.testing.dcp.job import Job
from tieredckpt.testing.dcp.scenario import ALONE, scenario

DTYPES = tuple(
    getattr(torch, name)
    for name in (
        "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool", "uint8",
        "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float8_e4m3fn",
        "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    )
    if hasattr(torch, name)
)  # fmt: skip


@dataclasses.dataclass
class Setting:
    """An object of the user's own."""

    name: str
    sizes: list[int]


def plain(step: int = 0) -> dict[str, torch.Tensor]:
    """A few tensors that all ranks have."""
    return {
        "weight": torch.empty(33, 5),
        "count": torch.empty((), dtype=torch.int64),
        "half": torch.empty(7, dtype=torch.bfloat16),
    }


@scenario(ALONE)
def one_process(job: Job) -> None:
    """One process without a process group saves, restarts and loads"""
    job.save_filled(plain(), 1)
    job.restart()
    job.load_checked(plain(), 1)


@scenario(2)
def replicated_tensors(job: Job) -> None:
    """Equal tensors on two ranks, loaded at once and after a restart"""
    job.save_filled(plain(), 1)
    job.load_checked(plain(), 1)
    job.restart()
    job.load_checked(plain(), 1)


@scenario(2)
def every_dtype(job: Job) -> None:
    """bf16, fp16, fp8, complex, bool, signed and unsigned integers, with arbitrary bits"""

    def state() -> dict[str, torch.Tensor]:
        return {str(dtype): torch.zeros(3, 67, dtype=torch.uint8).to(dtype) for dtype in DTYPES}

    job.save_filled(state(), 1)
    job.restart()
    job.load_checked(state(), 1)


@scenario(2)
def zero_dimensional_tensors(job: Job) -> None:
    """Tensors without dimensions, as optimizers keep their step counts"""

    def state() -> dict[str, torch.Tensor]:
        return {str(dtype): torch.zeros((), dtype=torch.uint8).to(dtype) for dtype in DTYPES}

    job.save_filled(state(), 1)
    job.restart()
    job.load_checked(state(), 1)


@scenario(2)
def empty_tensors(job: Job) -> None:
    """Tensors without elements, beside others"""

    def state() -> dict[str, torch.Tensor]:
        return {
            "none": torch.empty(0),
            "rows": torch.empty(0, 5),
            "columns": torch.empty(5, 0, 3),
            "some": torch.empty(3),
        }

    job.save_filled(state(), 1)
    job.restart()
    got = state()
    job.load_checked(got, 1)
    assert [tuple(t.shape) for t in got.values()] == [(0,), (0, 5), (5, 0, 3), (3,)]


def _strided() -> dict[str, torch.Tensor]:
    return {
        "transposed": torch.empty(7, 11).t(),
        "every_other": torch.empty(40, 6)[::2, ::3],
        "permuted": torch.empty(3, 4, 5).permute(2, 0, 1),
        "channels_last": torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "offset": torch.empty(100)[37:60],
    }


def _packed() -> dict[str, torch.Tensor]:
    return {name: torch.empty(tuple(tensor.shape)) for name, tensor in _strided().items()}


@scenario(2)
def non_contiguous_tensors(job: Job) -> None:
    """Transposed, strided and permuted views, saved from and loaded into"""
    job.save_filled(_strided(), 1)
    job.restart()
    job.load_checked(_strided(), 1)
    job.load_checked(_packed(), 1)
    job.save_filled(_packed(), 2)
    job.load_checked(_strided(), 2)


@scenario(2)
def loads_leave_the_rest_alone(job: Job) -> None:
    """What lies between the elements of a strided destination is not touched"""
    job.save_filled({"x": torch.empty(20, 2)}, 1)
    base = torch.full((40, 6), 7.0)
    job.load_checked({"x": base[::2, ::3]}, 1)
    base[::2, ::3] = 7.0
    assert bool((base == 7.0).all())


@scenario(2)
def tied_weights(job: Job) -> None:
    """Two keys of one tensor, and views of one storage"""

    def state() -> dict[str, torch.Tensor]:
        shared = torch.empty(9, 9)
        return {"embedding": shared, "head": shared, "row": shared[3], "other": torch.empty(2)}

    first = state()
    oracle.fill({"other": first["other"]}, 1)
    expected = oracle.whole("shared", 1, (9, 9))
    first["embedding"].copy_(expected)
    job.save(first, 1)
    job.restart()
    got = state()
    job.load(got, 1)
    assert got["embedding"].data_ptr() == got["head"].data_ptr(), "no longer tied"
    oracle.assert_same("head", got["head"], expected)
    oracle.assert_same("row", got["row"], expected[3])
    oracle.check({"other": got["other"]}, 1)


@scenario(2)
def parameters(job: Job) -> None:
    """Parameters that require gradients, loaded in place"""
    model = torch.nn.Linear(5, 3)
    job.save_filled(dict(model.named_parameters()), 1)
    job.restart()
    fresh = torch.nn.Linear(5, 3)
    job.load_checked(dict(fresh.named_parameters()), 1)
    oracle.check({"weight": fresh.weight, "bias": fresh.bias}, 1)


@scenario(2)
def plain_values(job: Job) -> None:
    """Nested dicts, lists, tuples, None, numbers, text and bytes"""
    job.save({"values": oracle.value("values", 1), "epoch": 1, "none": None}, 1)
    job.restart()
    got: dict[str, Any] = {"values": oracle.value("values", 0), "epoch": 0, "none": 3}
    job.load(got, 1)
    expected = {"values": oracle.value("values", 1), "epoch": 1, "none": None}
    assert got == expected, f"{got} instead of {expected}"
    assert type(got["values"]["tuple"]) is tuple


@scenario(2)
def own_objects(job: Job) -> None:
    """Objects of the user's own class, which DCP pickles"""
    job.save({"setting": Setting("a", [1, 2]), "kind": torch.float16}, 1)
    job.restart()
    got: dict[str, Any] = {"setting": Setting("", []), "kind": torch.int8}
    job.load(got, 1)
    assert got == {"setting": Setting("a", [1, 2]), "kind": torch.float16}, got


@scenario(2)
def values_that_grow(job: Job) -> None:
    """A text that is longer or shorter at each save, between tensors"""
    for step, size in enumerate((1, 90_000, 10), start=1):
        state: dict[str, Any] = {"a": torch.empty(17), "text": "x" * size, "z": torch.empty(5)}
        oracle.fill(state, step)
        job.save(state, step)
        got: dict[str, Any] = {"a": torch.empty(17), "text": "", "z": torch.empty(5)}
        job.load_checked(got, step)
        assert got["text"] == "x" * size


@scenario(2)
def odd_keys(job: Job) -> None:
    """Unicode, blanks, dots, slashes, newlines and 4,000 characters in keys"""

    def state() -> dict[str, Any]:
        names = (
            "größe.数据", "with blank", "a/b/../c", "..", "tab\tnew\nline", "", "k" * 4000,
            "model.layers.0.weight", "'quoted\"", "\U0001f600", "%s{}\\",
        )  # fmt: skip
        return {
            "tensors": {name: torch.empty(number + 1) for number, name in enumerate(names)},
            "values": {name: number for number, name in enumerate(names)},
        }

    job.save_filled(state(), 1)
    job.restart()
    got = state()
    got["values"] = dict.fromkeys(got["values"], -1)
    job.load_checked(got, 1)
    assert got["values"] == state()["values"]


@scenario(2)
def integer_keys(job: Job) -> None:
    """Dicts with integer keys inside, as ``optimizer.state_dict()`` has them"""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    job.save_filled({"optimizer": optimizer.state_dict()}, 1)
    job.restart()
    got = {"optimizer": optimizer.state_dict()}
    got["optimizer"]["param_groups"][0]["lr"] = 0.5
    job.load_checked(got, 1)
    assert got["optimizer"]["param_groups"][0]["lr"] == 0.25


@scenario(2)
def hundreds_of_keys(job: Job) -> None:
    """600 tensors of different sizes in one state"""

    def state() -> dict[str, Any]:
        return {f"layers.{number}": torch.empty(number % 37, 3) for number in range(600)}

    job.save_filled(state(), 1)
    job.restart()
    job.load_checked(state(), 1)


@scenario(2)
def large_tensors(job: Job) -> None:
    """Tensors over several blocks of any plausible size, loaded whole and in part"""

    def state() -> dict[str, Any]:
        return {"odd": torch.empty(9_000_001, dtype=torch.uint8), "big": torch.empty(1100, 1003)}

    job.save_filled(state(), 1)
    job.restart()
    job.load_checked(state(), 1)


@scenario(2)
def only_values(job: Job) -> None:
    """A state without any tensor"""
    job.save({"epoch": 3, "names": ["a", "b"]}, 1)
    job.restart()
    got: dict[str, Any] = {"epoch": 0, "names": ["", ""]}
    job.load(got, 1)
    assert got == {"epoch": 3, "names": ["a", "b"]}


@scenario(2)
def empty_state(job: Job) -> None:
    """A state without anything"""
    job.save({}, 1)
    job.restart()
    job.load({}, 1)
