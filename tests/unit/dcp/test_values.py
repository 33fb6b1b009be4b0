"""Values that nobody saved: forged bytes neither run nor reach memory nor take more than theirs."""

from __future__ import annotations

import enum
import io
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.forged_values import (
    NONE,
    archive,
    array,
    call,
    dtype,
    group,
    listed,
    mapped,
    named,
    number,
    numbers,
    overlapping,
    raw,
    storage,
    tensor,
    text,
)
from tieredckpt.dcp.state.metadata import torch_constant
from tieredckpt.dcp.state.planner import safe_loads
from tieredckpt.errors import IntegrityError, UsageError

SLACK_BYTES = 1 << 20
I8, HUGE = dtype("i8"), 1 << 31


def changed_later() -> bytes:
    """An array over raw bytes; then its type is said to have been one of objects all along."""
    kind = dtype("V8", "|") + b"q\x00"
    objects = mapped(text("a"), group(dtype("O8", "|"), number(0)))
    names = group(text("a"))
    again = group(number(3), text("|"), NONE, names, objects, number(8), number(1), number(63))
    return group(
        kind, array(b"h\x00", numbers(1), raw(b"\x10" + bytes(7))), b"h\x00" + again + b"b"
    )


def squared(make: bytes, count: int = 2000) -> bytes:
    """A long text once, and then ``make`` of it many times."""
    return listed(text("x" * 4000) + b"q\x00", *[make] * count)


LATIN = group(b"h\x00", text("latin1"))
FORGED: dict[str, bytes] = {
    # What the allow-list of types let through.
    "objects over bytes": archive(changed_later()),
    "type of objects": archive(array(dtype("O8", "|"), numbers(1), raw(bytes(8)))),
    "type of objects by class": archive(call("numpy.dtypes.ObjectDType")),
    "object scalar": archive(
        call("numpy._core.multiarray.scalar", dtype("O8", "|"), raw(bytes(8)))
    ),
    "array of a size": archive(call("numpy.ndarray", numbers(3 << 28))),
    "bytes of a size": archive(call("builtins.bytearray", number(3 << 30))),
    "list of a range": archive(
        call("builtins.frozenset", call("builtins.range", number(0), number(1 << 26), number(1)))
    ),
    "storage of a size": archive(call("torch.FloatStorage", number(3 << 28))),
    "tensor of a size": archive(call("torch.Tensor", number(3 << 28))),
    "tensor beyond its storage": archive(
        tensor(storage("0", 2), 0, numbers(3 << 28), numbers(1)), {"data/0": bytes(8)}
    ),
    "tensor before its storage": archive(
        tensor(storage("0", 2), -4, numbers(1), numbers(1)), {"data/0": bytes(8)}
    ),
    "tensor of negative strides": archive(
        tensor(storage("0", 2), 1, numbers(9), numbers(-1)), {"data/0": bytes(8)}
    ),
    "tensor that repeats its storage": archive(
        tensor(storage("0", 2), 0, numbers(1 << 40), numbers(0)), {"data/0": bytes(8)}
    ),
    **{
        f"tensor with {name}": archive(
            tensor(storage("0", 2), 0, numbers(2), numbers(1), bits), {"data/0": bytes(8)}
        )
        for name, bits in {
            "a list": listed(),
            "a bit of complex ones": mapped(text("conj"), b"\x88"),
            "a bit that is off": mapped(text("neg"), b"\x89"),
            "another bit": mapped(text("other"), b"\x88"),
        }.items()
    },
    "bool that is negated": archive(
        tensor(
            storage("0", 2, "torch.BoolStorage"),
            0,
            numbers(2),
            numbers(1),
            mapped(text("neg"), b"\x88"),
        ),
        {"data/0": bytes(2)},
    ),
    "storage beyond its entry": archive(
        tensor(storage("0", 1 << 20), 0, numbers(1 << 20), numbers(1)), {"data/0": bytes(8)}
    ),
    "sparse tensor": archive(
        call("torch._utils._rebuild_sparse_tensor", NONE, group(NONE, NONE, numbers(1 << 40)))
    ),
    "quantized tensor": archive(call("torch._utils._rebuild_qtensor", numbers(1 << 31))),
    "tensor that is nowhere": archive(
        tensor(storage("0", 2, where="meta"), 0, numbers(2), numbers(1)), {"data/0": bytes(8)}
    ),
    "bool that is 2": archive(array(dtype("b1", "|"), numbers(2), raw(b"\1\2"))),
    "bool tensor that is 2": archive(
        tensor(storage("0", 2, "torch.BoolStorage"), 0, numbers(2), numbers(1)),
        {"data/0": b"\1\2"},
    ),
    "character beyond all": archive(array(dtype("U1"), numbers(1), raw(b"\0\0\x11\0"))),
    "array without its bytes": archive(array(I8, numbers(1 << 28), raw(bytes(8)))),
    "array of nothing, very often": archive(array(dtype("V0", "|"), numbers(1 << 60), raw(b""))),
    "type of another size": archive(
        array(dtype("U3").replace(number(12), number(8)), numbers(1), raw(bytes(12)))
    ),
    "storage of two types": archive(
        listed(
            tensor(storage("0", 2), 0, numbers(2), numbers(1)),
            tensor(storage("0", 2, "torch.IntStorage"), 0, numbers(2), numbers(1)),
        ),
        {"data/0": bytes(8)},
    ),
    "array of a huge type": archive(array(dtype("V999999999", "|"), numbers(2), raw(bytes(8)))),
    "array that is unfinished": archive(
        call("numpy._core.multiarray._reconstruct", named("numpy.ndarray"), numbers(0), raw(b"b"))
    ),
    "array inside itself": archive(
        call("numpy._core.multiarray._reconstruct", named("numpy.ndarray"), numbers(0), raw(b"b"))
        + b"q\x00"
        + listed(b"h\x00")
    ),
    # What multiplies.
    "many bytes of one text": archive(squared(named("_codecs.encode") + LATIN + b"R")),
    "many paths of one text": archive(squared(call("pathlib.PurePosixPath", b"h\x00"))),
    "sets of one list": archive(
        listed(
            listed(*[number(n) for n in range(1000)]) + b"q\x00",
            *[named("builtins.set") + group(b"h\x00") + b"R"] * 1000,
        )
    ),
    "storages of one entry": overlapping(
        listed(*[tensor(storage(str(n), 1000), 0, numbers(1), numbers(1)) for n in range(50)]),
        bytes(4000),
        50,
    ),
    "lists only": archive(b"]" * 50_000),
    "marks only": archive(b"(" * 50_000),
    # What takes for ever, or ends the process.
    "key that unfolds": archive(
        b"}" + numbers(1, 2) + b"".join(b"q%ch%c\x86" % (n, n) for n in range(100)) + b"Ns"
    ),
    "key that is deep": archive(b"}" + b"N" + b"\x85" * 200_000 + b"Ns"),
    "keys of one hash": archive(
        mapped(*[number(n * ((1 << 61) - 1) << 61) + NONE for n in range(1, 2000)])
    ),
    "slices in slices": archive(
        call("builtins.slice", call("builtins.slice", NONE, NONE, NONE), NONE, NONE)
    ),
    # What is not what it seems.
    "code": archive(call("builtins.exec", text("raise SystemExit"))),
    "a method of a type": archive(call("builtins.str.format", text("{}"))),
    "an attribute of a type": archive(
        call("builtins.getattr", named("builtins.str"), text("format"))
    ),
    "a function as a value": archive(listed(named("numpy._core.multiarray._reconstruct"))),
    "a storage as a value": archive(listed(storage("0", 2)), {"data/0": bytes(8)}),
    "an attribute over a method": archive(
        call("collections.OrderedDict") + mapped(text("items"), number(1)) + b"b"
    ),
    "compressed": archive(listed(text("x" * 20_000)), compressed=True),
    "another byte order": archive(number(1), {}).replace(b"little", b"big\0\0\0"),
    "no end": archive(number(1)).replace(b".PK", b"NPK"),
    "nothing": b"",
    "text": b"no archive at all",
}


def load(data: bytes) -> Any:
    return safe_loads("k", io.BytesIO(data))


OF_OBJECTS = ("lists only", "marks only", "key that is deep")
"""Python's own objects need more than their bytes: at most 64 times, which is refused beyond."""


def peak_of(data: bytes) -> int:
    tracemalloc.start()
    try:
        load(data)
    except UsageError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("name", FORGED)
def test_what_nobody_saved_is_refused(name: str):
    data = FORGED[name]
    with pytest.raises(UsageError, match="'k'"):
        load(data)
    factor = 64 if name in OF_OBJECTS else 4
    assert peak_of(data) < factor * len(data) + SLACK_BYTES


@pytest.mark.parametrize(
    "value",
    [np.ones(4 << 20, np.uint8), np.full(4 << 20, 200, np.uint8), "x" * (4 << 20),
     "\xe9" * (4 << 20), "\u20ac" * (2 << 20), b"\xff" * (4 << 20), bytearray(4 << 20)],
    ids=["array", "array of high bytes", "text", "latin", "wide", "bytes", "bytearray"],
)  # fmt: skip
def test_large_values_take_at_most_four_times_their_item(value: Any):
    stream = io.BytesIO()
    torch.save([value, torch.zeros(100)], stream)
    data = stream.getvalue()
    assert type(load(data)[0]) is type(value)
    assert peak_of(data) < 5 * len(data) + SLACK_BYTES  # of which one is the item itself


def test_views_that_are_conjugated_or_negated_are_what_was_saved():
    """A lazy bit is beside the bytes in the stream."""
    conjugate = torch.randn(3, 2, dtype=torch.complex64).conj()
    saved = [
        conjugate, conjugate.clone().conj().imag, torch._neg_view(conjugate),
        torch._neg_view(torch.arange(3)), torch.randn(2),
    ]  # fmt: skip
    stream = io.BytesIO()
    torch.save(saved, stream)
    bits = [(each.is_conj(), each.is_neg()) for each in saved]
    assert bits == [(True, False), (False, True), (True, True), (False, True), (False, False)]
    for found, wanted in zip(load(stream.getvalue()), saved, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("order", ["C", "F"])
def test_what_lies_between_fields_is_what_was_saved(order: Any):
    """And not what this process had in memory there."""
    kind = np.dtype(
        {"names": ["a", "b"], "formats": ["i4", "U2"], "offsets": [4, 16], "itemsize": 32}
    )
    content = np.frombuffer(bytes(range(32)) * 6, np.uint8).copy()
    saved = content.view(kind).reshape((2, 3), order=order)
    saved["b"] = "xy"
    stream = io.BytesIO()
    torch.save([saved, saved[0, 0], saved[:0]], stream)
    loaded, one, none = load(stream.getvalue())
    assert (loaded.dtype, loaded.shape, loaded.flags.fnc) == (kind, (2, 3), order == "F")
    assert loaded.ravel("K").view(np.uint8).tobytes() == content.tobytes()
    assert (one, none.shape) == (saved[0, 0], (0, 3))
    loaded["a"] = 7  # it is its own memory, and may be written to
    assert int(loaded["a"].sum()) == 42


class ForgedType:
    """A NumPy type, but for its state."""

    def __init__(self, name: str, *state: Any) -> None:
        self.name, self.state = name, (3, *state)

    def __reduce__(self) -> Any:
        return np.dtype, (self.name, False, True), self.state


class Scalar:
    def __init__(self, kind: ForgedType, content: bytes) -> None:
        self.args = kind, content

    def __reduce__(self) -> Any:
        return np.float64(0).__reduce__()[0], self.args


FIELD = {"a": (np.dtype("<i4"), 0)}


@pytest.mark.parametrize(
    ("right", "forged"),
    [
        # NumPy takes the bytes for pointers, divides by the alignment, and follows the other field.
        (("f8", "<", None, None, None, -1, -1, 0), ("f8", "<", None, None, None, -1, -1, 4)),
        (("f8", "<", None, None, None, -1, -1, 0), ("f8", "<", None, None, None, -1, -1, 0x1C)),
        (("U2", "<", None, None, None, 8, 4, 8), ("U2", "<", None, None, None, 8, 0, 8)),
        (("U2", "<", None, None, None, 8, 4, 8), ("U2", "<", None, None, None, -1, 4, 8)),
        (("S8", "|", None, None, None, 8, 1, 0), ("S8", "|", None, None, None, -1, 1, 0)),
        (("f8", "<", None, None, None, -1, -1, 0), ("f8", "<", None, None, None, 8, -1, 0)),
        (("U2", "<", None, None, None, 8, 4, 8), ("U2", "<", None, None, None, 8, 1 << 40, 8)),
        (
            ("V8", "|", None, ("a",), FIELD, 8, 1, 16),
            ("V8", "|", None, ("a",), {**FIELD, "b": (torch.float16, 4)}, 8, 1, 16),
        ),
    ],
)
def test_the_state_of_a_type_is_what_a_writer_makes(right: Any, forged: Any):
    def saved(kind: Any) -> bytes:
        stream = io.BytesIO()
        torch.save([Scalar(ForgedType(*kind), bytes(8))], stream)
        return stream.getvalue()

    assert load(saved(right))[0] == load(saved(right))[0]
    with pytest.raises(UsageError, match="that no writer makes"):
        load(saved(forged))


class Mode(enum.Enum):
    FAST = 1

    @staticmethod
    def run() -> None:
        raise AssertionError


def test_an_enum_as_early_releases_of_python_3_11_pickle_it():
    name = f"{Mode.__module__}.Mode"

    def loaded(member: str, *allow: Any) -> Any:
        data = archive(call("builtins.getattr", named(name), text(member)))
        return safe_loads("k", io.BytesIO(data), allow)

    assert loaded("FAST", Mode) is Mode.FAST
    with pytest.raises(UsageError, match=name):
        loaded("FAST")
    for other in ("run", "__members__", "mro"):
        with pytest.raises(UsageError, match="a member of an enum that no writer makes"):
            loaded(other, Mode)


def test_a_name_imports_nothing(monkeypatch: pytest.MonkeyPatch):
    """Torch imports some of its parts when they are asked for."""
    asked: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    with pytest.raises(UsageError):
        load(archive(call("torch.serialization._get_layout", text("torch._dynamic_part"))))
    with pytest.raises(UsageError):
        load(archive(named("torch._dynamic_part")))
    with pytest.raises(IntegrityError):
        torch_constant("_dynamic_part", torch.dtype)
    assert asked == []
