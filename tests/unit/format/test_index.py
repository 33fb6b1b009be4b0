"""What a segment's index may say, and columns and names on their own."""

from __future__ import annotations

import msgspec
import pytest

from tests.format.samples import many_specs, small_specs
from tieredckpt.errors import IntegrityError
from tieredckpt.format.envelope import pack_column, pack_names, unpack_column, unpack_names
from tieredckpt.format.segment import Item, decode_index, encode_index, place

replace = msgspec.structs.replace
WEIGHT = Item("w", "tensor", 8, "float32", (9,), (3,), (2,), offset=64)
BLOB = Item("b", "bytes", 70, offset=128)
END = 256


def decoded(*items: Item, data_bytes: int = END) -> tuple[Item, ...]:
    codec, raw_bytes, stored = encode_index(items)
    return decode_index(stored, codec=codec, raw_bytes=raw_bytes, data_bytes=data_bytes)


def test_encoder_and_decoder_agree():
    assert decoded(WEIGHT, BLOB) == (WEIGHT, BLOB)
    assert decoded() == ()
    for specs in (small_specs(), many_specs()):
        items, end = place(specs)
        assert decoded(*items, data_bytes=end) == items


@pytest.mark.parametrize(
    "items",
    [
        (WEIGHT, replace(BLOB, offset=64)),
        (WEIGHT, replace(BLOB, offset=0)),
        (replace(WEIGHT, offset=192), replace(BLOB, offset=128)),
        (BLOB, replace(BLOB, offset=192)),
        (replace(WEIGHT, offset=68),),
        (replace(BLOB, offset=192),),
        (replace(BLOB, size_bytes=129),),
        (replace(BLOB, offset=256),),
        (replace(BLOB, offset=1 << 62),),
        (Item("large", "bytes", 1 << 20, offset=64),),
    ],
    ids=[
        *("same place", "before", "order", "overlap", "unaligned", "end", "too long"),
        *("behind the end", "far away", "large unaligned"),
    ],
)
def test_items_out_of_place(items: tuple[Item, ...]):
    with pytest.raises(IntegrityError):
        decoded(*items, data_bytes=(2 << 20) if items[0].name == "large" else END)


@pytest.mark.parametrize(
    "changes",
    [
        {"size_bytes": 7},
        {"dtype": "float64"},
        {"dtype": ""},
        {"dtype": "ü"},
        {"chunk_sizes": (3,)},
        {"chunk_offsets": (8,)},
        {"global_shape": (4,)},
        {"name": "n" * 65_537},
    ],
    ids=lambda changes: f"{next(iter(changes))}={next(iter(changes.values()))!r:.9}",
)
def test_impossible_items(changes: dict[str, object]):
    with pytest.raises(IntegrityError):
        decoded(replace(WEIGHT, **changes))


def test_sums_of_huge_numbers_do_not_wrap():
    huge = (1 << 63) - 1
    shape = (huge,) * 64
    item = replace(WEIGHT, global_shape=shape, chunk_offsets=shape, chunk_sizes=shape)
    with pytest.raises(IntegrityError):
        decoded(item)


@pytest.mark.parametrize("column", [b"", b"\0", b"\x03abc", b"\x02a", b"\x10" + bytes(16)])
def test_not_a_column(column: bytes):
    with pytest.raises(IntegrityError, match="not a column"):
        unpack_column(column, 10, "test")


def test_column_limits():
    assert unpack_column(pack_column([1, 2, 3]), 3, "test") == [1, 2, 3]
    with pytest.raises(IntegrityError, match="more than 2"):
        unpack_column(pack_column([1, 2, 3]), 2, "test")
    with pytest.raises(IntegrityError, match="over"):
        unpack_column(b"\x08" + (1 << 63).to_bytes(8, "little"), 1, "test")
    for bad in (-1, 1 << 63):
        with pytest.raises(ValueError):
            pack_column([bad])


def test_names():
    lengths, text = pack_names(["", "größe", "a"])
    assert unpack_names(lengths, text, 3, "test") == ["", "größe", "a"]
    for bad in (text[:-1], text + b"x", b"", text.replace("ö".encode(), b"\xff\xff")):
        with pytest.raises(IntegrityError):
            unpack_names(lengths, bad, 3, "test")
    with pytest.raises(IntegrityError):  # a length that splits a character
        unpack_names(pack_column([1, 1]), "ö".encode(), 3, "test")
