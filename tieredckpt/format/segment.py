"""A segment: the bytes of one rank in one checkpoint, the same in every tier.

    items, each aligned, padded with zeros | item index | digest table | zeros | trailer (128)

The data is divided into blocks on a fixed grid, one digest each; the digests are the table. The
trailer holds the digest of index and table, and ends in its own digest, the *root*: a reader that
knows the root can verify every byte. The item index (the items and their offsets) is columnar.
docs/reference/format/segment.md is normative. Nothing here knows torch, tiers or files.

The block size is decided when a segment is laid out, and recorded in its trailer. A reader of a
part of a tensor reads whole blocks: on average half a block more at each end of the part. Large
blocks are therefore expensive if many tensors are cut. Small blocks cost digests: 16 bytes and a
call each.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from tieredckpt.errors import FormatVersionError, IntegrityError
from tieredckpt.format.digest import DIGEST_BYTES, digest
from tieredckpt.format.envelope import (
    CODEC_RAW,
    CODEC_ZSTD,
    INT_MAX,
    compress_bytes,
    decompress_bytes,
    pack_column,
    pack_names,
    unpack_column,
    unpack_names,
    unpack_struct,
)

SMALL_ALIGN = 64
"""Alignment of items: a cache line, and enough for every dtype."""

LARGE_ALIGN = 4096
"""Alignment of items of LARGE_BYTES and more: a page, so that they can be read directly."""

LARGE_BYTES = 1 << 20
MAX_ITEMS = 1 << 21
MAX_DIMS = 64
MAX_NAME_BYTES = 1 << 16
MAX_INDEX_BYTES = 256 << 20
"""Largest index, before compression."""

_COMPRESS_BYTES = 4096  # below, zstd saves less than a page and costs more than the rest
_MAX_DTYPES = 256
_MAX_DTYPE_BYTES = 64
_MAX_DIMS_IN_ALL = 3 * 8 * MAX_ITEMS  # eight dimensions for each of the most items there can be

_DTYPES = {
    1: (
        "bits1x8", "bits2x4", "bits4x2", "bits8", "bool", "float4_e2m1fn_x2", "float8_e4m3fn",
        "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "int8", "uint8",
    ),
    2: ("bfloat16", "bits16", "float16", "int16", "uint16"),
    4: ("bcomplex32", "complex32", "float32", "int32", "uint32"),
    8: ("complex64", "float64", "int64", "uint64"),
    16: ("complex128",),
}  # fmt: skip
"""By bytes per element."""
DTYPE_BYTES = {name: size for size, names in _DTYPES.items() for name in names}
"""Bytes per element of each dtype that tensors are saved in, by its name without ``torch.``.

A dtype that is not here is stored too; then its size is not checked against its shape.
"""
DTYPE_BYTES.update({f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)})

BLOCK_BYTES = 4 << 20
"""Largest size of a block that is chosen, and the default: see :mod:`tieredckpt.format.segment`."""

PAGE_BYTES = 4096
"""Segments are padded to a multiple of it, so that direct I/O needs no special end."""

TRAILER_BYTES = 128
SEGMENT_ID_BYTES = 16
MAX_BLOCK_BYTES = 1 << 30
MAX_SEGMENT_BYTES = 1 << 48
MAX_TABLE_BYTES = 256 << 20
MAX_FOOTER_BYTES = MAX_INDEX_BYTES + MAX_TABLE_BYTES + PAGE_BYTES
"""No valid footer is longer, so no reader needs more than this from the end of a segment."""

VERSION = 1
_MAGIC = b"TCKSEGMT"
# magic, version, codec of the index, block, data, index offset, index size, table offset,
# table size, segment, raw index, segment id, digest of index + table, reserved; then the root.
_TRAILER = struct.Struct("<8sHHIQQQQQQQ16s16s8s")
_TRAILER_AND_ROOT = struct.Struct(f"{_TRAILER.format}{DIGEST_BYTES}s")
_ROOT_OFFSET = TRAILER_BYTES - DIGEST_BYTES
assert _TRAILER.size == _ROOT_OFFSET

_MIN_SLOT_BYTES = 1 << 20


class ItemSpec(msgspec.Struct, frozen=True):
    """One piece of one tensor, or one bytes object, as the writer resolved it.

    For kind "bytes" ``dtype`` is "" and the three tuples are empty. Several pieces of one tensor
    in one segment have the same name and different ``chunk_offsets``.
    """

    name: str
    kind: Literal["tensor", "bytes"]
    size_bytes: int
    dtype: str = ""
    global_shape: tuple[int, ...] = ()
    chunk_offsets: tuple[int, ...] = ()
    chunk_sizes: tuple[int, ...] = ()


class Item(ItemSpec, frozen=True, kw_only=True):
    """An item and its place: ``offset`` in bytes from the segment's start."""

    offset: int


class _Structure(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The part of an index that the structure of the state determines; columns of envelope.py."""

    name_lengths: bytes
    names: bytes
    num_tensors: int
    tensor_sizes: bytes
    tensor_offsets: bytes
    dtype_lengths: bytes
    dtypes: bytes
    dtype_of: bytes
    num_dims: bytes
    dims: bytes
    """Per tensor: global shape, chunk offsets, chunk sizes."""


class _Index(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    structure: _Structure
    bytes_sizes: bytes
    bytes_offsets: bytes


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Index)


def place(specs: Sequence[ItemSpec]) -> tuple[tuple[Item, ...], int]:
    """The items with their offsets, and the end of the last one. Raises ValueError."""
    if len(specs) > MAX_ITEMS:
        raise ValueError(f"{len(specs)} items in one segment; the limit is {MAX_ITEMS}")
    items = []
    end = 0
    bytes_seen = False
    for spec in specs:
        size = spec.size_bytes
        if spec.kind == "bytes":
            bytes_seen = True
        elif bytes_seen:
            raise ValueError(f"tensor {spec.name!r} after a bytes item; tensors come first")
        problem = problem_of(spec)
        if problem:
            raise ValueError(f"item {spec.name!r}: {problem}")
        align = LARGE_ALIGN if size >= LARGE_BYTES else SMALL_ALIGN
        start = -(-end // align) * align
        end = start + size
        items.append(Item(*msgspec.structs.astuple(spec), offset=start))
    return tuple(items), end


def problem_of(spec: ItemSpec) -> str | None:
    """The reason why no segment may hold such an item, or None."""
    if not 0 <= spec.size_bytes <= INT_MAX:
        return f"size {spec.size_bytes}"
    if len(spec.name) > MAX_NAME_BYTES // 4 and len(spec.name.encode()) > MAX_NAME_BYTES:
        return f"a name of more than {MAX_NAME_BYTES} bytes"
    if spec.kind == "bytes":
        if spec.dtype or spec.global_shape or spec.chunk_offsets or spec.chunk_sizes:
            return "a bytes item has neither dtype nor shape"
        return None
    if not spec.dtype or len(spec.dtype) > _MAX_DTYPE_BYTES or not spec.dtype.isascii():
        return f"dtype {spec.dtype!r}"
    shape, offsets, sizes = spec.global_shape, spec.chunk_offsets, spec.chunk_sizes
    if not len(shape) == len(offsets) == len(sizes) <= MAX_DIMS:
        return f"shape {shape}, chunk offsets {offsets} and chunk sizes {sizes} differ in rank"
    for whole, start, size in zip(shape, offsets, sizes, strict=True):
        if start < 0 or size < 0 or start + size > whole or whole > INT_MAX:
            return f"chunk {sizes} at {offsets} is not inside of {shape}"
    itemsize = DTYPE_BYTES.get(spec.dtype)
    if itemsize is not None and itemsize * math.prod(sizes) != spec.size_bytes:
        return f"{spec.size_bytes} bytes do not fit {spec.dtype} {sizes}"
    return None


def _structure_of(items: Sequence[Item]) -> tuple[_Structure, Sequence[Item]]:
    """The part that the structure determines, and the bytes items, whose sizes may change."""
    num_tensors = sum(1 for item in items if item.kind == "tensor")
    tensors = items[:num_tensors]
    dtype_numbers: dict[str, int] = {}
    dtype_of, num_dims = [], []
    dims: list[int] = []
    for item in tensors:
        dtype_of.append(dtype_numbers.setdefault(item.dtype, len(dtype_numbers)))
        num_dims.append(len(item.global_shape))
        dims += item.global_shape
        dims += item.chunk_offsets
        dims += item.chunk_sizes
    name_lengths, names = pack_names([item.name for item in items])
    dtype_lengths, dtypes = pack_names(list(dtype_numbers))
    structure = _Structure(
        name_lengths,
        names,
        num_tensors,
        pack_column([item.size_bytes for item in tensors]),
        pack_column([item.offset for item in tensors]),
        dtype_lengths,
        dtypes,
        pack_column(dtype_of),
        pack_column(num_dims),
        pack_column(dims),
    )
    return structure, items[num_tensors:]


def structure_digest(items: Sequence[Item]) -> bytes:
    """Digest of everything in an index except the sizes and offsets of bytes items.

    So a segment whose bytes items changed in length still has the structure that its plan names.
    """
    return digest(_encode(_structure_of(items)[0]))


def encode_index(items: Sequence[Item]) -> tuple[int, int, bytes]:
    """The index as (codec, raw bytes, stored bytes). Raises ValueError if it is too large."""
    structure, bytes_items = _structure_of(items)
    raw = _encode(
        _Index(
            structure,
            pack_column([item.size_bytes for item in bytes_items]),
            pack_column([item.offset for item in bytes_items]),
        )
    )
    if len(raw) > MAX_INDEX_BYTES:
        raise ValueError(f"an index of {len(raw)} bytes; the limit is {MAX_INDEX_BYTES}")
    codec, stored = compress_bytes(raw) if len(raw) > _COMPRESS_BYTES else (CODEC_RAW, raw)
    return codec, len(raw), stored


def decode_index(stored: bytes, *, codec: int, raw_bytes: int, data_bytes: int) -> tuple[Item, ...]:
    """The items of an index; the inverse of :func:`encode_index`.

    Raises:
        IntegrityError: Malformed, or an item that no encoder writes.
    """
    what = "segment index"
    index = unpack_struct(_decoder, decompress_bytes(codec, stored, raw_bytes, what), what)
    fixed = index.structure
    names = unpack_names(fixed.name_lengths, fixed.names, MAX_ITEMS, what)
    dtypes = unpack_names(fixed.dtype_lengths, fixed.dtypes, _MAX_DTYPES, what)
    sizes = unpack_column(fixed.tensor_sizes, MAX_ITEMS, what)
    offsets = unpack_column(fixed.tensor_offsets, MAX_ITEMS, what)
    dtype_of = unpack_column(fixed.dtype_of, MAX_ITEMS, what)
    num_dims = unpack_column(fixed.num_dims, MAX_ITEMS, what)
    dims = tuple(unpack_column(fixed.dims, _MAX_DIMS_IN_ALL, what))
    num = fixed.num_tensors
    if not num == len(sizes) == len(offsets) == len(dtype_of) == len(num_dims) <= len(names):
        raise IntegrityError(f"{what}: columns of different length")
    if 3 * sum(num_dims) != len(dims) or any(d >= len(dtypes) for d in dtype_of):
        raise IntegrityError(f"{what}: columns that do not fit each other")
    items = []
    at = 0
    for name, size, offset, d, rank in zip(names, sizes, offsets, dtype_of, num_dims, strict=False):
        mid, end = at + rank, at + 2 * rank
        shape, start, chunk = dims[at:mid], dims[mid:end], dims[end : end + rank]
        at = end + rank
        items.append(Item(name, "tensor", size, dtypes[d], shape, start, chunk, offset=offset))
    sizes = unpack_column(index.bytes_sizes, MAX_ITEMS, what)
    offsets = unpack_column(index.bytes_offsets, MAX_ITEMS, what)
    if not len(sizes) == len(offsets) == len(names) - num:
        raise IntegrityError(f"{what}: columns of different length")
    for name, size, offset in zip(names[num:], sizes, offsets, strict=True):
        items.append(Item(name, "bytes", size, offset=offset))
    _check_items(items, data_bytes)
    return tuple(items)


def _check_items(items: Sequence[Item], data_bytes: int) -> None:
    """Raise IntegrityError if an item is impossible, overlaps another or leaves the data."""
    end = 0
    for item in items:
        problem = problem_of(item)
        if problem:
            raise IntegrityError(f"segment index: item {item.name[:100]!r}: {problem}")
        align = LARGE_ALIGN if item.size_bytes >= LARGE_BYTES else SMALL_ALIGN
        if item.offset < end or item.offset % align:
            raise IntegrityError(f"segment index: item {item.name[:100]!r} is out of place")
        end = item.offset + item.size_bytes
    if end > data_bytes:
        raise IntegrityError("segment index: an item is outside of the data")


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def slot_capacity(segment_bytes: int) -> int:
    """Usable bytes of the slot for a segment of ``segment_bytes``, without the label page.

    Size classes of an eighth of the power of two below, at least 1 MiB: a segment whose bytes
    items grow a little still fits the slot it had, for at most 12.5 % of slack.
    """
    size = max(segment_bytes, _MIN_SLOT_BYTES)
    return round_up(size, 1 << (size.bit_length() - 1) >> 3)


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """The place of each item in a segment. Made by :func:`lay_out`.

    ``data_bytes`` is a multiple of 64; blocks of ``block_bytes`` cover exactly ``[0, data_bytes)``,
    and the footer begins at ``data_bytes``.
    """

    items: tuple[Item, ...]
    data_bytes: int
    index_codec: int
    index_raw_bytes: int
    index: bytes
    block_bytes: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks, and of digests in the table."""
        return -(-self.data_bytes // self.block_bytes)

    @property
    def segment_bytes(self) -> int:
        """Exact size of the finished segment, a multiple of 4096."""
        table = self.num_blocks * DIGEST_BYTES
        return round_up(self.data_bytes + len(self.index) + table + TRAILER_BYTES, PAGE_BYTES)


def lay_out(specs: Sequence[ItemSpec], block_bytes: int = BLOCK_BYTES) -> SegmentLayout:
    """Give each item its place, in the order given.

    Args:
        specs: The items.
        block_bytes: Size of the blocks: a multiple of 4096, at most 1 GiB.

    Raises:
        ValueError: A bytes item before a tensor item, negative or inconsistent sizes, a chunk
            outside of its tensor, a name that UTF-8 cannot express, or too many items.
    """
    assert block_bytes % PAGE_BYTES == 0
    assert 0 < block_bytes <= MAX_BLOCK_BYTES
    items, end = place(specs)
    if end > MAX_SEGMENT_BYTES - MAX_FOOTER_BYTES:
        raise ValueError(f"{end} bytes of items in one segment; the limit is 2**48")
    index_codec, index_raw_bytes, index = encode_index(items)
    data_bytes = round_up(end, SMALL_ALIGN)
    return SegmentLayout(items, data_bytes, index_codec, index_raw_bytes, index, block_bytes)


def encode_footer(layout: SegmentLayout, block_digests: bytes, segment_id: bytes) -> bytes:
    """The bytes from ``layout.data_bytes`` to the end of the segment; the last 16 are the root.

    Args:
        layout: Of the data that is in place.
        block_digests: The digests of all blocks, concatenated.
        segment_id: 16 bytes, minted by the agent.
    """
    assert len(block_digests) == layout.num_blocks * DIGEST_BYTES
    assert len(segment_id) == SEGMENT_ID_BYTES
    body = layout.index + block_digests
    table_offset = layout.data_bytes + len(layout.index)
    segment_bytes = layout.segment_bytes
    trailer = _TRAILER.pack(
        _MAGIC,
        VERSION,
        layout.index_codec,
        layout.block_bytes,
        layout.data_bytes,
        layout.data_bytes,
        len(layout.index),
        table_offset,
        len(block_digests),
        segment_bytes,
        layout.index_raw_bytes,
        segment_id,
        digest(body),
        bytes(8),
    )
    pad = segment_bytes - TRAILER_BYTES - table_offset - len(block_digests)
    return b"".join((body, bytes(pad), trailer, digest(trailer)))


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last 128 bytes of a segment, decoded; offsets are from the segment's start.

    The fields are in the order in which they are stored, between magic and root.
    """

    version: int
    index_codec: int
    block_bytes: int
    data_bytes: int
    index_offset: int
    index_bytes: int
    table_offset: int
    table_bytes: int
    segment_bytes: int
    index_raw_bytes: int
    segment_id: bytes
    footer_digest: bytes
    reserved: bytes
    root: bytes
    """Digest of the trailer up to here, which verifies the whole segment."""

    @property
    def is_sound(self) -> bool:
        """Whether the fields fit each other and the limits of this module."""
        return (
            self.version > 0
            and self.index_codec in (CODEC_RAW, CODEC_ZSTD)
            and self.reserved == bytes(8)
            and self.block_bytes % PAGE_BYTES == 0
            and 0 < self.block_bytes <= MAX_BLOCK_BYTES
            and self.data_bytes % SMALL_ALIGN == 0
            and self.index_offset == self.data_bytes
            and 0 < self.index_bytes <= self.index_raw_bytes <= MAX_INDEX_BYTES
            and (self.index_codec == CODEC_ZSTD or self.index_bytes == self.index_raw_bytes)
            and self.table_offset == self.index_offset + self.index_bytes
            and self.table_bytes == self.num_blocks * DIGEST_BYTES <= MAX_TABLE_BYTES
            and self.segment_bytes
            == round_up(self.table_offset + self.table_bytes + TRAILER_BYTES, PAGE_BYTES)
            and self.segment_bytes <= MAX_SEGMENT_BYTES
        )

    @property
    def num_blocks(self) -> int:
        """Number of blocks, and of digests in the table."""
        return -(-self.data_bytes // self.block_bytes)

    @property
    def footer_bytes(self) -> int:
        """Bytes from ``index_offset`` to the segment's end, as :func:`decode_footer` takes them."""
        return self.segment_bytes - self.index_offset


def decode_trailer(data: bytes) -> Trailer:
    """The trailer in ``data``, the last 128 bytes of a segment.

    All fields are checked against each other and against the limits of this module; the caller
    compares ``root``, ``segment_id`` and ``segment_bytes`` with what it expects.

    Raises:
        IntegrityError: Not 128 bytes, or not an intact trailer.
        FormatVersionError: An intact trailer of a newer version.
    """
    if len(data) != TRAILER_BYTES:
        raise IntegrityError(f"a segment's trailer has {TRAILER_BYTES} bytes, not {len(data)}")
    magic, *fields = _TRAILER_AND_ROOT.unpack(data)
    if magic != _MAGIC:
        raise IntegrityError(f"no segment: its trailer begins with {magic!r}")
    trailer = Trailer(*fields)
    root, actual = trailer.root, digest(memoryview(data)[:_ROOT_OFFSET])
    if root != actual:
        raise IntegrityError(
            f"the segment's trailer is damaged: digest {actual.hex()}, expected {root.hex()}",
            expected=root.hex(),
            actual=actual.hex(),
        )
    # Magic, version, and the root as the last 16 of 128 bytes have the same place in any version.
    if trailer.version > VERSION:
        raise FormatVersionError(
            f"segment version {trailer.version}, this release reads up to {VERSION}: upgrade",
            expected=VERSION,
            actual=trailer.version,
        )
    if not trailer.is_sound:
        raise IntegrityError("the fields of the segment's trailer contradict each other")
    return trailer


def retitled(trailer: bytes, segment_id: bytes) -> bytes:
    """The trailer of a segment of the same contents and another id; its last 16 bytes are the root.

    Comparing that root with a segment's shows whether the segment has the same contents.
    """
    assert len(trailer) == TRAILER_BYTES
    assert len(segment_id) == SEGMENT_ID_BYTES
    fields = list(_TRAILER.unpack_from(trailer))
    fields[11] = segment_id
    renamed = _TRAILER.pack(*fields)
    return renamed + digest(renamed)


@dataclass(frozen=True, slots=True)
class Footer:
    """The index and the block digests of a segment. Made by :func:`decode_footer`."""

    trailer: Trailer
    items: tuple[Item, ...]
    block_digests: bytes

    def block_digest(self, block: int) -> bytes:
        """The digest that the bytes of ``block`` must have. Raises IndexError."""
        return self.digests_of(block, 1)

    def digests_of(self, first: int, count: int) -> bytes:
        """The digests of ``count`` blocks from ``first`` on, concatenated. Raises IndexError."""
        if not 0 <= first < first + count <= self.trailer.num_blocks:
            raise IndexError(f"blocks {first} to {first + count - 1} of {self.trailer.num_blocks}")
        return self.block_digests[first * DIGEST_BYTES : (first + count) * DIGEST_BYTES]

    def block_range(self, block: int) -> tuple[int, int]:
        """The bytes (start, stop) that ``block`` covers (the last may be short), or IndexError."""
        if not 0 <= block < self.trailer.num_blocks:
            raise IndexError(f"block {block} of {self.trailer.num_blocks}")
        start = block * self.trailer.block_bytes
        return start, min(start + self.trailer.block_bytes, self.trailer.data_bytes)


def decode_footer(trailer: Trailer, data: bytes) -> Footer:
    """The footer in ``data``, the bytes from ``trailer.index_offset`` to the segment's end.

    Raises:
        IntegrityError: Damaged, not the footer of this trailer, or one that no encoder makes:
            items that overlap, leave the data, or whose size does not fit dtype and shape.
    """
    if len(data) != trailer.footer_bytes:
        raise IntegrityError(
            f"a footer of {len(data)} bytes, its trailer states {trailer.footer_bytes}"
        )
    body_bytes = trailer.index_bytes + trailer.table_bytes
    if data[-DIGEST_BYTES:] != trailer.root:
        raise IntegrityError("the footer does not end in the trailer that was given")
    actual = digest(memoryview(data)[:body_bytes])
    if actual != trailer.footer_digest:
        raise IntegrityError(
            f"the segment's footer is damaged: digest {actual.hex()}, "
            f"expected {trailer.footer_digest.hex()}",
            expected=trailer.footer_digest.hex(),
            actual=actual.hex(),
        )
    if any(data[body_bytes:-TRAILER_BYTES]):
        raise IntegrityError("the padding before the segment's trailer is not zero")
    items = decode_index(
        bytes(data[: trailer.index_bytes]),
        codec=trailer.index_codec,
        raw_bytes=trailer.index_raw_bytes,
        data_bytes=trailer.data_bytes,
    )
    return Footer(trailer, items, bytes(data[trailer.index_bytes : body_bytes]))


BLOCK_BYTES_LEAST = 128 << 10
"""Smallest block size that is chosen. A save takes 1 to 2 % more processor time with it than with
4 MiB; from 256 KiB on there is no difference."""

BLOCKS_MAX = 1 << 20
"""Keeps a table of digests below 16 MiB."""

SHARDS = 8
EXTRA = 0.2
"""Reading one of SHARDS shards along dim 0 of every tensor may read this fraction more than the
shard's bytes, on average over the shards."""

SMALL_BYTES = 256 << 10
"""Neighbours that are smaller are read together and as a whole, with one block or two."""

MEAN_BYTES_LEAST = 2 << 20
"""If tensors are smaller on average, one request per tensor takes longer than reading all bytes, so
large blocks are chosen, with which a reader reads all bytes."""


def choose_block_bytes(items: Iterable[ItemSpec]) -> int:
    """The size of the blocks of a segment with these items, in this order; a power of two.

    Bytes items do not count: their length changes, and mirrors of a segment may be without them.
    Ranks that write the same tensors must choose the same size.
    """
    total = cut = places = 0
    last_small = False
    for item in items:
        if item.kind != "tensor" or not item.size_bytes:
            continue
        small = item.size_bytes < SMALL_BYTES
        total += item.size_bytes
        cut += 0 if small else item.size_bytes
        places += not (small and last_small)
        last_small = small
    if cut < max(1, places) * MEAN_BYTES_LEAST:
        return BLOCK_BYTES
    # All shards of a tensor together read it once, plus one block per cut, plus one for its ends.
    allowed = int(EXTRA * cut) // (places * (SHARDS + 1))
    block_bytes = BLOCK_BYTES_LEAST
    while block_bytes < BLOCK_BYTES and (
        2 * block_bytes <= allowed or total > block_bytes * BLOCKS_MAX
    ):
        block_bytes *= 2
    return block_bytes
