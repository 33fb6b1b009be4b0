"""The item index of a segment: which item lies where, columnar.

Import what is public here from :mod:`tieredckpt.format.segment`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from tieredckpt.errors import IntegrityError
from tieredckpt.format.digest import digest
from tieredckpt.format.envelope import CODEC_RAW, compress_bytes, decompress_bytes
from tieredckpt.format.packing import (
    INT_MAX,
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

DTYPE_BYTES: dict[str, int] = {
    "bfloat16": 2,
    "bits16": 2,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    "bits8": 1,
    "bool": 1,
    "complex128": 16,
    "complex32": 4,
    "complex64": 8,
    "float16": 2,
    "float32": 4,
    "float4_e2m1fn_x2": 1,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "int8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "uint8": 1,
}
"""Bytes per element of each dtype that tensors are saved in, by its name without ``torch.``.

A dtype that is not here is stored too; then its size is not checked against its shape.
"""
DTYPE_BYTES.update({f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)})


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
    """What the structure of the state fixes. Columns as in format/packing.py."""

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
        items.append(
            Item(
                spec.name,
                spec.kind,
                size,
                spec.dtype,
                spec.global_shape,
                spec.chunk_offsets,
                spec.chunk_sizes,
                offset=start,
            )
        )
    return tuple(items), end


def problem_of(spec: ItemSpec) -> str | None:
    """Why no segment may hold such an item, or None."""
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
    """The part that the structure fixes, and the bytes items, whose sizes it does not."""
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
    """Digest of all that the structure of the state fixes in a segment.

    That is everything but the sizes and offsets of bytes items (of which the names count), so a
    segment whose bytes items changed in length still has the structure that its plan names.
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
        raise IntegrityError("segment index: an item lies outside of the data")
