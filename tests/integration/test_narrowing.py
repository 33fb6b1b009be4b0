"""Loading into tensors of a type that cannot hold every value of the stored one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.states import config, load, save
from tieredckpt.engine import Engine
from tieredckpt.errors import UsageError

pytestmark = pytest.mark.usefixtures("served")

INF, NAN = float("inf"), float("nan")

# Stored values, the type they are loaded into, and whether they survive it.
CASES: dict[str, tuple[torch.Tensor, torch.dtype, bool]] = {
    "rounding": (torch.tensor([0.1, 1e-30, INF, NAN]), torch.float16, True),
    "overflow": (torch.tensor([1.0, 70000.0]), torch.float16, False),
    "saturated": (torch.tensor([1.0, 1000.0]), torch.float8_e4m3fn, False),
    "no infinity": (torch.tensor([1.0, INF]), torch.float8_e4m3fn, False),
    "wide complex": (torch.tensor([1 + 1e60j], dtype=torch.complex128), torch.complex64, False),
    "complex": (torch.tensor([0.1 + 0.1j], dtype=torch.complex128), torch.complex64, True),
    "imaginary": (torch.tensor([1 + 1j]), torch.float32, False),
    "whole": (torch.tensor([-128.0, 127.0]), torch.int8, True),
    "fraction": (torch.tensor([1.5]), torch.int8, False),
    "too large": (torch.tensor([128.0]), torch.int8, False),
    "not a number": (torch.tensor([NAN]), torch.int64, False),
    "small integers": (torch.tensor([2048, -7]), torch.float16, True),
    "2049": (torch.tensor([2049]), torch.float16, False),
    "2**53 + 1": (torch.tensor([2**53 + 1]), torch.float64, False),
    "wrapped": (torch.tensor([300]), torch.uint8, False),
    "negative": (torch.tensor([-1], dtype=torch.int8), torch.uint8, False),
    "unsigned": (torch.tensor([2**63], dtype=torch.uint64), torch.int64, False),
    "truth": (torch.tensor([0, 1]), torch.bool, True),
    "number": (torch.tensor([2]), torch.bool, False),
}


@pytest.fixture
def engine(runtime_dir: Path) -> Iterator[Engine]:
    with Engine.open(config(runtime_dir)) as opened:
        opened.load({})
        yield opened


def test_values_that_do_not_survive_a_cast_raise_under_strict(engine: Engine):
    save(engine, 1, {name: stored for name, (stored, _, _) in CASES.items()})
    for name, (stored, dtype, survives) in CASES.items():
        target = torch.zeros(stored.shape, dtype=dtype)
        back: dict[str, Any] = {key: value.clone() for key, (value, _, _) in CASES.items()}
        back[name] = target
        types = f"'{name}' ({stored.dtype} to {dtype})".replace("torch.", "")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if survives:
                assert engine.load(back) == 1
            else:
                with pytest.raises(UsageError, match=f"(?s){stored.dtype}.*{dtype}") as refused:
                    engine.load(back)
                assert refused.value.state_key == name
        assert any("1 key(s)" in str(w.message) and types in str(w.message) for w in caught), name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert engine.load({name: target}, strict=False) == 1
            expected = stored.to(dtype)
        assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8)), name


def test_narrowing_warns_once_and_widening_does_not(engine: Engine):
    save(engine, 1, {f"w{number}": torch.ones(3) for number in range(20)})
    with pytest.warns(UserWarning, match="20 key") as caught:
        load({f"w{n}": torch.ones(3, dtype=torch.bfloat16) for n in range(20)}, engine.reader())
    assert [str(each.message).count("float32 to bfloat16") for each in caught] == [10]
    engine.load({f"w{number}": torch.ones(3, dtype=torch.float64) for number in range(20)})
    save(
        engine, 2, {"i": torch.ones(3, dtype=torch.int8), "f": torch.ones(3).to(torch.float8_e5m2)}
    )
    engine.load({"i": torch.zeros(3), "f": torch.zeros(3)})  # exact, so nothing is warned of
