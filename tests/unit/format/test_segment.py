"""Layout, footer and trailer of a segment."""

from __future__ import annotations

import itertools
import random
import struct

import msgspec
import pytest

from tests.format.samples import (
    fill,
    gaps,
    hex_id,
    make_segment,
    many_specs,
    read_segment,
    small_specs,
)
from tieredckpt.errors import FormatVersionError, IntegrityError
from tieredckpt.format.digest import DIGEST_BYTES, Hasher, digest
from tieredckpt.format.segment import (
    BLOCK_BYTES,
    DTYPE_BYTES,
    LARGE_ALIGN,
    LARGE_BYTES,
    MAX_BLOCK_BYTES,
    PAGE_BYTES,
    SMALL_ALIGN,
    TRAILER_BYTES,
    ItemSpec,
    decode_footer,
    decode_trailer,
    encode_footer,
    lay_out,
    slot_capacity,
    structure_digest,
)


def tensor(name: str, size: int, **changes: object) -> ItemSpec:
    spec = ItemSpec(name, "tensor", size, "uint8", (size,), (0,), (size,))
    return msgspec.structs.replace(spec, **changes)


def test_digest_is_the_canonical_form():
    # The value that the xxHash project publishes for the empty input.
    assert digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert Hasher(b"ab").digest() == digest(memoryview(b"ab"))
    assert len(digest(b"x")) == DIGEST_BYTES


def test_alignment():
    specs = [tensor("a", 3), tensor("b", LARGE_BYTES), tensor("c", LARGE_BYTES - 1), tensor("d", 1)]
    layout = lay_out(specs)
    assert [item.offset for item in layout.items] == [
        0,
        LARGE_ALIGN,
        LARGE_ALIGN + LARGE_BYTES,
        LARGE_ALIGN + 2 * LARGE_BYTES,
    ]
    assert layout.data_bytes == LARGE_ALIGN + 2 * LARGE_BYTES + SMALL_ALIGN


def test_gaps_and_items_cover_the_data():
    layout = lay_out(small_specs())
    covered = [(i.offset, i.offset + i.size_bytes) for i in layout.items if i.size_bytes]
    pieces = sorted(covered + gaps(layout))
    assert pieces[0][0] == 0
    assert pieces[-1][1] == layout.data_bytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))


def test_bytes_items_never_shift_tensors():
    tensors = [spec for spec in small_specs() if spec.kind == "tensor"]
    short = lay_out([*tensors, ItemSpec("rng", "bytes", 1)])
    long = lay_out([*tensors, ItemSpec("rng", "bytes", 1 << 20)])
    assert short.items[: len(tensors)] == long.items[: len(tensors)]
    assert structure_digest(short.items) == structure_digest(long.items)
    with pytest.raises(ValueError, match="tensors come first"):
        lay_out([ItemSpec("rng", "bytes", 1), *tensors])


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"dtype": "int8"},
        {"global_shape": (20,)},
        {"global_shape": (20,), "chunk_offsets": (4,)},
        {"chunk_sizes": (8,), "size_bytes": 8},
    ],
)
def test_structure_digest_notices(changes: dict[str, object]):
    base = tensor("w", 9)
    changed = msgspec.structs.replace(base, **changes)
    assert structure_digest(lay_out([base]).items) != structure_digest(lay_out([changed]).items)


@pytest.mark.parametrize(
    "spec",
    [
        tensor("w", 8, chunk_offsets=(1,)),
        tensor("w", 8, chunk_offsets=(-1,)),
        tensor("w", 8, chunk_sizes=(7,)),
        tensor("w", 8, size_bytes=-1),
        tensor("w", 8, size_bytes=7),
        tensor("w", 8, dtype=""),
        tensor("w", 8, dtype="d" * 65),
        tensor("w", 8, global_shape=(8, 1)),
        tensor("w", 8, global_shape=(1 << 63,)),
        tensor("w", 0, global_shape=(0,) * 65, chunk_offsets=(0,) * 65, chunk_sizes=(0,) * 65),
        tensor("\ud800", 8),
        tensor("n" * 65_537, 8),
        ItemSpec("b", "bytes", 3, "uint8"),
        ItemSpec("b", "bytes", 3, global_shape=(3,)),
        tensor("w", 8, dtype="later", size_bytes=1 << 48),
    ],
)
def test_lay_out_refuses(spec: ItemSpec):
    with pytest.raises(ValueError):
        lay_out([spec])


@pytest.mark.parametrize("block_bytes", [PAGE_BYTES, 1 << 20, BLOCK_BYTES])
@pytest.mark.parametrize("specs", [[], small_specs(), many_specs()], ids=["empty", "small", "many"])
def test_round_trip(specs: list[ItemSpec], block_bytes: int):
    layout = lay_out(specs, block_bytes)
    data = make_segment(specs, block_bytes)
    assert len(data) == layout.segment_bytes
    assert len(data) % PAGE_BYTES == 0
    footer = read_segment(data)
    assert footer.items == layout.items
    assert footer.trailer.num_blocks == layout.num_blocks
    assert footer.trailer.root == data[-16:] == digest(data[-TRAILER_BYTES:-16])
    ranges = [footer.block_range(i) for i in range(footer.trailer.num_blocks)]
    assert b"".join(data[a:b] for a, b in ranges) == fill(layout)
    assert all(footer.block_digest(i) == digest(data[a:b]) for i, (a, b) in enumerate(ranges))
    for block in (-1, footer.trailer.num_blocks):
        with pytest.raises(IndexError):
            footer.block_range(block)
        with pytest.raises(IndexError):
            footer.block_digest(block)


def test_every_flipped_bit_after_the_data_is_found():
    data = make_segment(small_specs())
    start = read_segment(data).trailer.index_offset
    for at in range(start, len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        with pytest.raises(IntegrityError):
            read_segment(bytes(bad))


def test_truncated_and_foreign_footers():
    data = make_segment(small_specs())
    trailer = decode_trailer(data[-TRAILER_BYTES:])
    footer = data[trailer.index_offset :]
    for bad in (footer[1:], footer[:-1], b"", footer + b"\0"):
        with pytest.raises(IntegrityError):
            decode_footer(trailer, bad)
    other = make_segment([*small_specs(), ItemSpec("more", "bytes", 1)])
    other_trailer = decode_trailer(other[-TRAILER_BYTES:])
    with pytest.raises(IntegrityError):
        decode_footer(other_trailer, footer[: other_trailer.footer_bytes])
    with pytest.raises(IntegrityError, match="128 bytes"):
        decode_trailer(b"")


def resealed(trailer: bytes, at: int, value: bytes) -> bytes:
    changed = bytearray(trailer[:-16])
    changed[at : at + len(value)] = value
    return bytes(changed) + digest(changed)


def test_newer_version_is_told_from_damage():
    trailer = make_segment(small_specs())[-TRAILER_BYTES:]
    with pytest.raises(FormatVersionError, match="upgrade"):
        decode_trailer(resealed(trailer, 8, b"\x02\x00"))
    damaged = bytearray(trailer)
    damaged[8] = 2
    with pytest.raises(IntegrityError) as caught:
        decode_trailer(bytes(damaged))
    assert not isinstance(caught.value, FormatVersionError)


def test_trailer_fields_that_contradict_each_other():
    trailer = make_segment(small_specs())[-TRAILER_BYTES:]
    rng = random.Random(1)
    for at in [*range(8, 72), *range(104, 112)]:
        for _ in range(4):
            bad = resealed(trailer, at, bytes([trailer[at] ^ rng.randrange(1, 256)]))
            with pytest.raises(IntegrityError):
                decode_trailer(bad)
    huge = struct.pack("<Q", 1 << 60)
    for at in range(16, 72, 8):
        with pytest.raises(IntegrityError):
            decode_trailer(resealed(trailer, at, huge))


def test_slot_capacity():
    mib = 1 << 20
    assert slot_capacity(0) == slot_capacity(1) == slot_capacity(mib) == mib
    assert slot_capacity(mib + 1) == mib + mib // 8
    assert slot_capacity(9 * mib) == 9 * mib
    assert slot_capacity((2 << 30) + 1) == (2 << 30) + (256 << 20)
    for size in (1, mib - 1, 3 * mib + 5, 123_456_789, 1 << 40):
        capacity = slot_capacity(size)
        assert capacity >= size
        assert capacity % PAGE_BYTES == 0
        assert capacity <= max(mib, size * 1.125 + PAGE_BYTES)
        assert slot_capacity(capacity) == capacity


def test_dtype_table_agrees_with_torch():
    torch = pytest.importorskip("torch")
    known = {
        str(v).removeprefix("torch."): v for v in vars(torch).values() if type(v) is torch.dtype
    }
    plain = {name: dtype for name, dtype in known.items() if not name.startswith(("q", "quint"))}
    assert {name: dtype.itemsize for name, dtype in plain.items()}.items() <= DTYPE_BYTES.items()


def test_segment_id_and_digest_count_are_ours_to_get_right():
    layout = lay_out(small_specs(), PAGE_BYTES)
    with pytest.raises(AssertionError):
        encode_footer(layout, b"", bytes.fromhex(hex_id(1)))
    for block_bytes in (0, -PAGE_BYTES, PAGE_BYTES + 1, MAX_BLOCK_BYTES + PAGE_BYTES):
        with pytest.raises(AssertionError):
            lay_out(small_specs(), block_bytes)
