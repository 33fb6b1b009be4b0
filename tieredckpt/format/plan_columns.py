"""The columns of a plan as byte strings, and the check that they fit each other.

Part of :mod:`tieredckpt.format.plan`; the encoding of a column is that of format/packing.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from tieredckpt.format.index import MAX_DIMS, MAX_ITEMS
from tieredckpt.format.packing import column_width, pack_names, unpack_names, width_for
from tieredckpt.format.plain import decode_plain, encode_plain

if TYPE_CHECKING:
    from tieredckpt.format.plan import Plan

Column = npt.NDArray[np.int64]

MAX_NAMES = 1 << 23
MAX_CHUNKS = 1 << 23
MAX_VALUES = 1 << 25
"""Values in any one column."""

MAX_SEGMENTS = 1 << 17
MAX_PROPERTIES = 1 << 16
PROPERTIES_LIMIT_BYTES = 16 << 20
STRUCTURE_BYTES = 16


class Properties(NamedTuple):
    """What most tensors of a model have in common."""

    dtype: str
    layout: str
    requires_grad: bool
    memory_format: str
    pin_memory: bool


class Columns(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The payload of a plan, in this order; see docs/format/plan.md."""

    name_lengths: bytes
    names: bytes
    kinds: bytes
    """A byte per name: 0 a tensor, 1 bytes."""
    properties: bytes
    """Plain data: a list of (dtype, layout, requires_grad, memory_format, pin_memory)."""
    property_of: bytes
    num_dims: bytes
    shapes: bytes
    num_chunks: bytes
    chunk_offsets: bytes
    chunk_sizes: bytes
    chunk_segments: bytes
    chunk_items: bytes
    bytes_segments: bytes
    bytes_items: bytes
    structures: bytes
    planner_data: bytes
    extras: bytes
    metadata_version: str | None
    storage_meta: bytes | None


class Arrays(TypedDict):
    """Fields of a Plan that are columns of numbers."""

    property_of: Column
    num_dims: Column
    shapes: Column
    num_chunks: Column
    chunk_offsets: Column
    chunk_sizes: Column
    chunk_segments: Column
    chunk_items: Column
    bytes_segments: Column
    bytes_items: Column


class Lists(TypedDict):
    """The other fields of a Plan that need decoding."""

    names: tuple[str, ...]
    is_bytes: npt.NDArray[np.bool_]
    properties: tuple[Properties, ...]
    structures: tuple[bytes, ...]


decoder = msgspec.msgpack.Decoder(Columns)
_encode = msgspec.msgpack.Encoder().encode


def to_payload(plan: Plan) -> bytes:
    """The payload of ``plan``: the same bytes for the same content. Raises ValueError."""
    name_lengths, names = pack_names(plan.names)
    return _encode(
        Columns(
            name_lengths=name_lengths,
            names=names,
            kinds=plan.is_bytes.astype(np.uint8).tobytes(),
            properties=encode_plain(
                [tuple(each) for each in plan.properties], limit=PROPERTIES_LIMIT_BYTES
            ),
            property_of=_pack(plan.property_of),
            num_dims=_pack(plan.num_dims),
            shapes=_pack(plan.shapes),
            num_chunks=_pack(plan.num_chunks),
            chunk_offsets=_pack(plan.chunk_offsets),
            chunk_sizes=_pack(plan.chunk_sizes),
            chunk_segments=_pack(plan.chunk_segments),
            chunk_items=_pack(plan.chunk_items),
            bytes_segments=_pack(plan.bytes_segments),
            bytes_items=_pack(plan.bytes_items),
            structures=b"".join(plan.structures),
            planner_data=plan.planner_data,
            extras=plan.extras,
            metadata_version=plan.metadata_version,
            storage_meta=plan.storage_meta,
        )
    )


def arrays(columns: Columns) -> Arrays:
    """The columns of numbers. Raises IntegrityError, or ValueError as :func:`check`."""
    return Arrays(
        property_of=_unpack(columns.property_of),
        num_dims=_unpack(columns.num_dims),
        shapes=_unpack(columns.shapes),
        num_chunks=_unpack(columns.num_chunks),
        chunk_offsets=_unpack(columns.chunk_offsets),
        chunk_sizes=_unpack(columns.chunk_sizes),
        chunk_segments=_unpack(columns.chunk_segments),
        chunk_items=_unpack(columns.chunk_items),
        bytes_segments=_unpack(columns.bytes_segments),
        bytes_items=_unpack(columns.bytes_items),
    )


def lists(columns: Columns) -> Lists:
    """The other decoded fields. Raises IntegrityError or ValueError."""
    kinds = np.frombuffer(columns.kinds, np.uint8)
    if kinds.max(initial=0) > 1 or len(columns.structures) % STRUCTURE_BYTES:
        raise ValueError("a kind or a structure digest is malformed")
    return Lists(
        names=tuple(unpack_names(columns.name_lengths, columns.names, MAX_NAMES, "plan")),
        is_bytes=kinds.astype(np.bool_),
        properties=_properties(columns.properties),
        structures=tuple(
            columns.structures[at : at + STRUCTURE_BYTES]
            for at in range(0, len(columns.structures), STRUCTURE_BYTES)
        ),
    )


def _properties(data: bytes) -> tuple[Properties, ...]:
    table = decode_plain(data, PROPERTIES_LIMIT_BYTES)
    kinds = (str, str, bool, str, bool)
    if type(table) is not list or not all(
        type(row) is tuple and tuple(type(field) for field in row) == kinds for row in table
    ):
        raise ValueError("the table of tensor properties is malformed")
    return tuple(Properties(*row) for row in table)


def _pack(values: Column) -> bytes:
    width = width_for(int(values.max(initial=0)))
    return bytes((width,)) + values.astype(f"<u{width}").tobytes()


def _unpack(column: bytes) -> Column:
    width = column_width(column, MAX_VALUES, "plan")
    values = np.frombuffer(column, f"<u{width}", offset=1).astype(np.int64)
    if values.min(initial=0) < 0:
        raise ValueError("a value is over 2**63 - 1")
    return values


def check(plan: Plan) -> None:
    """Raise ValueError unless the columns fit each other and the limits.

    Sums of unchecked numbers are safe: counts are bounded before they are added up.
    """
    _check_counts(plan)
    tensors = len(plan.num_dims)
    _expect(tensors == len(plan.property_of) == len(plan.num_chunks), "a column per tensor")
    _expect(tensors == len(plan) - int(plan.is_bytes.sum()), "the number of tensors")
    _expect(len(plan.bytes_segments) == len(plan.bytes_items) == len(plan) - tensors, "bytes")
    _expect(_within(plan.num_dims, MAX_DIMS + 1), "the number of dimensions")
    _expect(_within(plan.num_chunks, MAX_CHUNKS + 1), "the number of chunks")
    _expect(_within(plan.property_of, len(plan.properties)), "the properties of a tensor")
    _expect(len(plan.shapes) == int(plan.num_dims.sum()), "the shapes")
    chunks = int(plan.num_chunks.sum())
    _expect(chunks <= MAX_CHUNKS, "the number of chunks")
    _expect(chunks == len(plan.chunk_segments) == len(plan.chunk_items), "a column per chunk")
    values = int((plan.num_dims * plan.num_chunks).sum())
    _expect(values <= MAX_VALUES, "the number of chunk offsets")
    _expect(values == len(plan.chunk_offsets) == len(plan.chunk_sizes), "the chunks' dimensions")
    _expect(_within(plan.chunk_segments, len(plan.structures)), "a segment ordinal")
    _expect(_within(plan.bytes_segments, len(plan.structures)), "a segment ordinal")
    _expect(_within(plan.chunk_items, MAX_ITEMS), "an item ordinal")
    _expect(_within(plan.bytes_items, MAX_ITEMS), "an item ordinal")
    _expect(int(plan.shapes.min(initial=0)) >= 0, "a shape")
    _check_bounds(plan)


def _check_counts(plan: Plan) -> None:
    if len(plan.names) > MAX_NAMES or len(plan.structures) > MAX_SEGMENTS:
        raise ValueError(f"more than {MAX_NAMES} names or {MAX_SEGMENTS} segments")
    _expect(len(plan.properties) <= MAX_PROPERTIES, "the number of different properties")
    _expect(len(plan.is_bytes) == len(plan.names), "a kind per name")
    _expect(all(len(each) == STRUCTURE_BYTES for each in plan.structures), "a structure digest")
    seen: set[str] = set()
    for name in plan.names:
        if name in seen:
            raise ValueError(f"the name {name[:200]!r} occurs twice")
        seen.add(name)


def _check_bounds(plan: Plan) -> None:
    """Each chunk lies inside of its tensor."""
    # Row t of a chunk's shape is its tensor's: spread the flat shapes over the chunks.
    starts = np.cumsum(plan.num_dims) - plan.num_dims
    ranks = np.repeat(plan.num_dims, plan.num_chunks)
    firsts = np.repeat(starts, plan.num_chunks)
    chunk_starts = np.cumsum(ranks) - ranks
    within = np.arange(len(plan.chunk_offsets)) - np.repeat(chunk_starts, ranks)
    shapes = plan.shapes[np.repeat(firsts, ranks) + within]
    offsets, sizes = plan.chunk_offsets, plan.chunk_sizes
    inside = (offsets >= 0) & (sizes >= 0) & (sizes <= shapes) & (offsets <= shapes - sizes)
    _expect(bool(inside.all()), "a chunk lies outside of its tensor")


def _within(values: Column, end: int) -> bool:
    """Whether all are in 0 .. end - 1."""
    return int(values.min(initial=0)) >= 0 and int(values.max(initial=-1)) < end


def _expect(sound: bool, what: str) -> None:
    if not sound:
        raise ValueError(f"columns that do not fit each other: {what}")
