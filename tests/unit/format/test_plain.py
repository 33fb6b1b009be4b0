"""Plain data: exact round trips, refusals that say where, limits."""

from __future__ import annotations

import enum
import math
import pickle
import time
from collections import OrderedDict, namedtuple

import pytest

from tests.format.samples import plain_value
from tieredckpt.errors import IntegrityError, UsageError
from tieredckpt.format.plain import MAX_DEPTH, NotPlainError, decode_plain, encode_plain


class Size(tuple):
    """Stands for torch.Size, a tuple that must not come back as one."""


class Level(enum.IntEnum):
    LOW = 1


Point = namedtuple("Point", "x y")


def test_sample():
    assert decode_plain(encode_plain(plain_value())) == plain_value()


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, 127, 128, 255, -32, -33, -128, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64),
        *(-(2**63), -(2**63) - 1, -(2**64), 10**1000, -(10**1000)),
    ],
    ids=lambda value: f"{'-' * (value < 0)}{value.bit_length()}bits{value % 1000}",
)
def test_ints(value: int):
    got = decode_plain(encode_plain(value))
    assert got == value
    assert type(got) is int


@pytest.mark.parametrize("size", [0, 1, 14, 15, 16, 31, 32, 255, 256, 65_535, 65_536])
def test_lengths(size: int):
    for value in (
        "x" * size,
        b"x" * size,
        list(range(size)),
        dict.fromkeys(range(size)),
        {*range(size)},
    ):
        assert decode_plain(encode_plain(value)) == value


@pytest.mark.parametrize("value", [{}, {1}, set(), {"a": 1}, {1: {}}, {"id": None}, [{"a": {1}}]])
def test_many_small_values(value: object):
    """As rows of a batch. Python needs most for them per byte."""
    rows = [value] * 20_000
    assert decode_plain(encode_plain(rows)) == rows


def test_floats_bit_by_bit():
    assert math.copysign(1, decode_plain(encode_plain(-0.0))) == -1
    assert math.isnan(decode_plain(encode_plain(float("nan"))))
    assert repr(decode_plain(encode_plain(complex(-0.0, float("inf"))))) == "(-0+infj)"


def test_types_and_order_are_kept():
    value = {"b": True, "a": 1, 1.5: (1, [2], {3}), (): frozenset({b""}), None: 1.0}
    got = decode_plain(encode_plain(value))
    assert list(got) == list(value)
    assert repr(got) == repr(value)


def test_sets_are_encoded_in_one_order():
    names = [f"name {i}" for i in range(100)]
    assert encode_plain(set(names)) == encode_plain({*names[50:], *names[:50]})


@pytest.mark.parametrize(
    ("value", "where", "kind"),
    [
        (object(), "the value", "builtins.object"),
        ({"a": [1, {"b": range(3)}]}, "['a'][1]['b']", "builtins.range"),
        ([Size((1,))], "[0]", f"{__name__}.Size"),
        ({"x": OrderedDict()}, "['x']", "collections.OrderedDict"),
        ({"x": Point(1, 2)}, "['x']", f"{__name__}.Point"),
        ((Level.LOW,), "[0]", f"{__name__}.Level"),
        ({range(2): 1}, "[<range>]", "builtins.range"),
        ([{1, Size()}], "[0]{<Size>}", f"{__name__}.Size"),
        (bytearray(b""), "the value", "builtins.bytearray"),
        (["\ud800"], "[0]", "str"),
    ],
)
def test_what_is_not_plain_is_named(value: object, where: str, kind: str):
    with pytest.raises(NotPlainError) as caught:
        encode_plain(value)
    error = caught.value
    assert str(error).startswith(where + " is a")
    assert error.type == kind
    assert isinstance(error, TypeError)
    # DCP ships errors to other ranks pickled.
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.fields) == (str(error), error.fields)


def pack(value: object) -> tuple[str, object] | None:
    return ("size", tuple(value)) if type(value) is Size else None


def unpack(tag: str, content: object) -> object:
    if tag != "size" or not isinstance(content, tuple):
        raise ValueError(f"unknown {tag}")
    return Size(content)


def test_extra_types():
    value = {"s": Size((1, 2)), Size(): [Size((Size((3,)),))]}
    data = encode_plain(value, pack)
    got = decode_plain(data, extra=unpack)
    assert got == value
    assert type(got["s"]) is Size
    assert type(got[()][0][0]) is Size
    with pytest.raises(IntegrityError, match="unknown tag 'size'"):
        decode_plain(data)
    for tag, content in (("other", ()), ("size", 1)):
        bad = encode_plain(Size(), lambda _, made=(tag, content): made)
        with pytest.raises(IntegrityError):
            decode_plain(bad, extra=unpack)


def nested(depth: int, leaf: object) -> object:
    for _ in range(depth):
        leaf = (leaf,)
    return leaf


@pytest.mark.parametrize("leaf", [1, "s", 2**70, 1j, ()])
def test_depth(leaf: object):
    depth = MAX_DEPTH - (leaf == ())
    assert decode_plain(encode_plain(nested(depth, leaf))) == nested(depth, leaf)
    with pytest.raises(UsageError, match="nested deeper"):
        encode_plain(nested(MAX_DEPTH + 1, leaf))


def test_deep_bytes_do_not_exhaust_the_stack():
    for data in (
        b"\x92\x01" * 100_000,
        b"\x81" * 100_000,
        b"\x93\x07\xa0" * 100_000,
        b"\x91" * 9999,
    ):
        with pytest.raises(IntegrityError):
            decode_plain(data)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "c1",  # never used by msgpack
        "c7",  # an extension
        "ca00000000",  # 32-bit float: our encoder never makes it
        "a1",
        "a1ff",
        "c4ff00",
        "dbffffffff",
        "ddffffffff01",
        "dfffffffff",
        "cf00",
        "c0c0",  # something follows
        "90",  # no code
        "91a0",
        "9100",
        "9108",
        "9106",
        "930601cb0000000000000000",
        "9205c400",  # a big int that is small
        "9205a0",
        "9307c0c0",
        "8201c001c0",  # a key twice
        "82c200" + "0000",  # False and 0 are one key
        "930301" + "01",  # an element twice
        "819101c0",  # a list as a key
        "920380",  # a dict in a set
    ],
)
def test_malformed(bad: str):
    with pytest.raises(IntegrityError):
        decode_plain(bytes.fromhex(bad))


def test_limits():
    assert decode_plain(encode_plain(b"x" * 98), 100) == b"x" * 98
    with pytest.raises(IntegrityError, match="over the limit"):
        decode_plain(encode_plain(b"x" * 99), 100)
    with pytest.raises(UsageError, match="larger than"):
        encode_plain(b"x" * 99, limit=100)


def test_what_encodes_within_a_limit_decodes_within_it():
    # Two bytes each, 64 and more in memory: too much for 16 times the limit on both sides.
    empty = [[] for _ in range(100_000)]
    limit = len(encode_plain(empty))
    with pytest.raises(UsageError):
        encode_plain(empty, limit=limit)
    with pytest.raises(IntegrityError, match="memory"):
        decode_plain(encode_plain(empty), limit)
    assert decode_plain(encode_plain(empty)) == empty


def test_colliding_keys_do_not_hang():
    # All multiples of the hash's modulus have hash 0, so each is compared with all before.
    prime = 2**61 - 1
    keys = [prime * (2**64 + i) for i in range(60_000)]
    head = b"\x92\x05\xc4"
    parts = []
    for key in keys:
        size = key.bit_length() // 8 + 1
        parts.append(head + bytes([size]) + key.to_bytes(size, "big", signed=True) + b"\xc0")
    bomb = b"\xdf" + len(parts).to_bytes(4, "big") + b"".join(parts)
    start_s = time.process_time()
    with pytest.raises(IntegrityError, match="rare types"):
        decode_plain(bomb)
    assert time.process_time() - start_s < 20
    with pytest.raises(UsageError, match="neither str"):
        encode_plain([{(i, "a long key of a dict"): None} for i in range(30_000)])


def test_ten_thousand_tuple_keys_are_fine():
    value = {(i, "k"): i for i in range(10_000)}
    assert decode_plain(encode_plain(value)) == value
