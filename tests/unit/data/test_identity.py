"""What identifies a loader: what differs has another digest, what is equal in processes has not."""

from __future__ import annotations

import ast
import logging
import random
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, TensorDataset

from tieredckpt.data.identity import identify as look


def identify(thing: Any) -> bytes:
    """The digest of what can be seen as a whole."""
    found = look(thing)
    assert not found.unseen
    return found.digest


class Rows(Dataset[int]):
    """Attributes of all kinds."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index

    def batch(self, step: int, start: int, stop: int) -> torch.Tensor:
        return torch.arange(start, stop) + step


class Slots:
    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class Text(str):
    def __new__(cls, text: str, _number: int) -> Text:
        return super().__new__(cls, text)

    def __init__(self, _text: str, number: int) -> None:
        self.number = number


class Private:
    __slots__ = ("__x",)

    def __init__(self, x: int) -> None:
        self.__x = x


def drawn() -> torch.Generator:
    generator = torch.Generator()
    torch.rand(2, generator=generator)
    return generator


def scaled(batch: list[int], scale: int = 1) -> torch.Tensor:
    return torch.tensor(batch) * scale


def closure(scale: int) -> Callable[[list[int]], torch.Tensor]:
    return lambda batch: torch.tensor(batch) * scale


def loader(dataset: Any = None, seed: int = 1, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(dataset or Rows(), batch_size=4, generator=generator, **options)


def sampled(seed: int) -> DataLoader[Any]:
    data = Rows()
    return loader(data, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(seed)))


def of_tensor(value: float, at: int = 0, size: int = 8) -> Dataset[Any]:
    content = torch.zeros(size)
    content[at] = value
    return TensorDataset(content)


BIG = 2 << 20
"""Values of a tensor of 8 MiB, of which samples count."""
PAIRS: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
    ("class", Rows, lambda: Slots("x")),
    ("number", lambda: Rows(scale=1), lambda: Rows(scale=2)),
    ("type of a number", lambda: Rows(scale=1), lambda: Rows(scale=1.0)),
    ("private", lambda: Rows(_scale=1), lambda: Rows(_scale=2)),
    ("path", lambda: Rows(root=Path("a")), lambda: Rows(root=Path("b"))),
    ("nested", lambda: Rows(x={"y": [Slots("1")]}), lambda: Rows(x={"y": [Slots("2")]})),
    ("keys", lambda: Rows(x={"y": Slots("")}), lambda: Rows(x={"z": Slots("")})),
    ("order", lambda: Rows(files=["a", "b"]), lambda: Rows(files=["b", "a"])),
    ("text", lambda: Rows(text="x" * 99), lambda: Rows(text="x" * 98 + "y")),
    ("set", lambda: Rows(x={"a", "b"}), lambda: Rows(x={"a", "c"})),
    ("dtype", lambda: Rows(x=torch.float16), lambda: Rows(x=torch.bfloat16)),
    ("numpy scalar", lambda: Rows(x=np.float32(1)), lambda: Rows(x=np.float32(2))),
    ("numpy array", lambda: Rows(x=np.arange(9)), lambda: Rows(x=np.arange(9) + 1)),
    ("columns", lambda: Rows(x=np.arange(99).reshape(9, 11)[:, 1]), lambda: Rows(x=np.arange(9))),
    ("tensor", lambda: of_tensor(1), lambda: of_tensor(2)),
    ("end of a tensor", lambda: of_tensor(1, 7), lambda: of_tensor(2, 7)),
    ("shape", lambda: Rows(x=torch.zeros(2, 3)), lambda: Rows(x=torch.zeros(3, 2))),
    ("large tensor", lambda: of_tensor(1, 0, BIG), lambda: of_tensor(2, 0, BIG)),
    ("subset", lambda: Subset(Rows(), range(10)), lambda: Subset(Rows(), range(10, 20))),
    ("list", lambda: Subset(Rows(), [1, 2] * 99), lambda: Subset(Rows(), [1, 3] * 99)),
    ("subset's data", lambda: Subset(Rows(x=1), [1]), lambda: Subset(Rows(x=2), [1])),
    ("seed", loader, lambda: loader(seed=2)),
    ("sampler's seed", lambda: sampled(1), lambda: sampled(2)),
    ("random", lambda: Rows(x=random.Random(1)), lambda: Rows(x=random.Random(2))),
    ("numpy's", lambda: Rows(x=np.random.default_rng(1)), lambda: Rows(x=np.random.default_rng(2))),
    ("collate", loader, lambda: loader(collate_fn=scaled)),
    ("partial", lambda: partial(scaled, scale=1), lambda: partial(scaled, scale=2)),
    ("closure", lambda: closure(1), lambda: closure(2)),
    ("code", lambda: lambda x: x + 1, lambda: lambda x: x - 1),
    ("constant", lambda: lambda x: x + 1, lambda: lambda x: x + 2),
    ("default", lambda: lambda x, y=1: x, lambda: lambda x, y=2: x),
    ("inner", lambda: lambda x: [y + 1 for y in x], lambda: lambda x: [y + 2 for y in x]),
    ("bound", lambda: Rows(x=1).batch, lambda: Rows(x=2).batch),
    ("built in", lambda: [1, 2].__getitem__, lambda: [1, 3].__getitem__),
    ("objects", lambda: np.array(["1", 2], object), lambda: np.array(["1", 3], object)),
    ("numpy's old", lambda: np.random.RandomState(1), lambda: np.random.RandomState(2)),
    ("a drawn generator", lambda: torch.Generator(), drawn),
    ("time", lambda: Rows(x=timedelta(1)), lambda: Rows(x=timedelta(2))),
    ("pattern", lambda: Rows(x=re.compile("a")), lambda: Rows(x=re.compile("b"))),
    ("text with attributes", lambda: Text("a", 1), lambda: Text("a", 2)),
    ("private slot", lambda: Private(1), lambda: Private(2)),
    ("iterator", lambda: map(str, iter([1])), lambda: map(str, iter([2]))),
    ("tuples", lambda: Rows(x=[("a", n) for n in range(50_000)]),
     lambda: Rows(x=[("a", n) for n in range(49_999)] + [("b", 49_999)])),
    ("bytes", lambda: Rows(x=bytearray(b"1")), lambda: Rows(x=bytearray(b"2"))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second"), [pair[1:] for pair in PAIRS], ids=[p[0] for p in PAIRS]
)
def test_what_differs_has_another_digest(first: Any, second: Any):
    assert identify(first()) != identify(second())
    assert identify(first()) == identify(first())
    assert identify(second()) == identify(second())


def test_methods_count():
    def other(self: Rows, index: int) -> int:
        return -index

    before = identify(Rows())
    kind = type("Rows", (Rows,), {"__getitem__": other})
    kind.__module__, kind.__qualname__ = Rows.__module__, Rows.__qualname__
    assert identify(kind()) != before


def test_equal_loaders_of_two_processes_have_equal_digests():
    """Whatever the seed of Python's hashes is, and wherever objects lie in memory."""
    program = (
        "from tests.unit.data.test_identity import PAIRS, identify\n"
        "print([identify(make()).hex() for pair in PAIRS for make in pair[1:]])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONHASHSEED": "7"}, check=True,
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert ast.literal_eval(found) == [
        identify(make()).hex() for pair in PAIRS for make in pair[1:]
    ]


class Endless:
    def __iter__(self) -> Any:
        raise AssertionError("it would be consumed")

    __next__ = __iter__


class Broken:
    def __len__(self) -> int:
        raise TypeError("unknown")

    def __repr__(self) -> str:
        raise ValueError("unknown")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: (n for n in [1]), "it is a builtins.generator"),
        (
            lambda: Rows(x=[Slots(""), zip([1], (n for n in [2]), strict=False)]),
            r"x\.1\.reduced\.1\.1 is a .*gen",
        ),
        (lambda: loader(collate_fn=(n for n in [1]).send), "collate_fn.state.1 is a .*generator"),
        (lambda: Rows(x=memoryview(b"1")), "x is a builtins.memoryview"),
        (lambda: Rows(x=torch.eye(2).to_sparse()), "x is a torch.Tensor"),
        (lambda: Rows(x=random.SystemRandom()), "x is a random.SystemRandom"),
        (lambda: Rows(x=[Slots(str(n)) for n in range(30_000)]), "more than 20000 objects"),
    ],
)
def test_what_cannot_be_seen_is_named(make: Any, text: str):
    assert re.search(text, look(make()).unseen)


def test_settings_count_beside_more_than_can_be_seen():
    rows = Rows(x=[Slots(str(n)) for n in range(30_000)])
    assert look(loader(rows, seed=1)).digest != look(loader(rows, seed=2)).digest
    assert look(loader(rows)).digest != look(loader(rows, collate_fn=scaled)).digest


def test_what_holds_no_data_makes_no_difference():
    def make() -> Rows:
        log = logging.getLogger("tests.identity")
        log.setLevel(random.randrange(1, 50))
        parts = [threading.Lock(), threading.Event(), object(), Broken(), weakref.ref(Rows)]
        return Rows(log=log, parts=parts, module=random)

    assert identify(make()) == identify(make())


def test_nothing_is_consumed():
    generator, iterator = (n for n in [1, 2]), iter([1, 2])
    look([Endless(), generator, iterator])
    assert (list(generator), list(iterator)) == ([1, 2], [1, 2])


SCALE = 1


def scaled_globally(batch: list[int]) -> torch.Tensor:
    return inner(batch)


def inner(batch: list[int]) -> torch.Tensor:
    return torch.tensor(batch) * SCALE


class Indirect(Rows):
    factor = 1

    def __getitem__(self, index: int) -> int:
        return self.helper(index)

    def helper(self, index: int) -> int:
        return index * self.factor

    @property
    def size(self) -> int:
        return 3

    @staticmethod
    def plain() -> int:
        return 4


def test_what_functions_and_methods_use_counts(monkeypatch: pytest.MonkeyPatch):
    before = [identify(scaled_globally), identify(Indirect())]
    assert [identify(scaled_globally), identify(Indirect())] == before
    monkeypatch.setitem(globals(), "SCALE", 2)
    assert identify(scaled_globally) != before[0]
    for name, value in (
        ("factor", 2),
        ("helper", lambda self, index: -index),
        ("size", property(lambda self: 4)),
        ("plain", staticmethod(lambda: 5)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Indirect, name, value)
            assert identify(Indirect()) != before[1], name


class Own(DataLoader[Any]):
    def __init__(self, scale: int) -> None:
        super().__init__(Rows(), generator=torch.Generator())
        self.scale = scale


def test_a_loader_of_the_script_counts_as_a_whole():
    assert identify(Own(1)) != identify(Own(2))
    used = Own(1)
    next(iter(used))
    used.generator.manual_seed(torch.Generator().initial_seed())
    assert identify(used) == identify(Own(1)), "and not what changes as it is used"


def test_a_cycle_ends():
    data = Rows()
    data.self = data
    assert identify(data) == identify(data)
