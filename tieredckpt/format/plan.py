"""The plan: the structure of a state, shared by many checkpoints.

It names the tensors and bytes objects, their pieces, and the item of a segment that holds each. It
is columnar, because a plan of a million pieces is hundreds of times larger than all other records:
numpy columns in memory, byte strings on disk. Its id is the digest of its payload. DCP's own extras
(such as planner data) are opaque here. docs/reference/format/plan.md is normative.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tieredckpt.errors import IntegrityError
from tieredckpt.format.digest import DIGEST_BYTES
from tieredckpt.format.envelope import (
    column_width,
    pack_names,
    record_version,
    unpack_names,
    unpack_struct,
    width_for,
)
from tieredckpt.format.manifest import check_unique
from tieredckpt.format.plain import decode_plain, encode_plain
from tieredckpt.format.plan_record import VERSION, open_plan, seal_plan
from tieredckpt.format.segment import (
    MAX_DIMS,
    MAX_ITEMS,
    MAX_NAME_BYTES,
    Footer,
    structure_digest,
)

Column = npt.NDArray[np.int64]

MAX_NAMES = 1 << 23
MAX_CHUNKS = 1 << 23
MAX_VALUES = 1 << 25
"""Values in any one column."""

MAX_SEGMENTS = 1 << 17
MAX_PROPERTIES = 1 << 16
PROPERTIES_LIMIT_BYTES = 16 << 20

DEFAULT_LAYOUT = "strided"
DEFAULT_MEMORY_FORMAT = "contiguous_format"


class Properties(NamedTuple):
    """Properties that most tensors of a model have in common."""

    dtype: str
    layout: str
    requires_grad: bool
    memory_format: str
    pin_memory: bool


class Columns(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The payload of a plan, in this order; see docs/reference/format/plan.md."""

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
    nested: bytes = b""
    """In version 2 only, where it is not empty."""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Columns)


class Chunk(NamedTuple):
    """One piece of a tensor, stored as ``item`` of the ``segment``-th segment."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    segment: int
    item: int


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor. Dtype, layout and memory format are torch's names, without ``torch.``."""

    name: str
    dtype: str
    layout: str
    requires_grad: bool
    memory_format: str
    pin_memory: bool
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class BytesEntry(msgspec.Struct, frozen=True):
    """One bytes object; its length is in the segment's index."""

    name: str
    segment: int
    item: int


Entry = TensorEntry | BytesEntry


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Plan:
    """The columns. Use :func:`build_plan` to make one and :meth:`entries` to read it.

    Flat columns hold the values of one tensor (or chunk) after those of the one before;
    a chunk has as many offsets and sizes as its tensor has dimensions.
    """

    names: tuple[str, ...]
    is_bytes: npt.NDArray[np.bool_]
    properties: tuple[Properties, ...]
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
    structures: tuple[bytes, ...]
    """By segment ordinal, the structure digest that a segment of this plan must have."""
    planner_data: bytes
    extras: bytes
    metadata_version: str | None
    storage_meta: bytes | None
    nested: bytes
    """The table of keys that are no text (format/nested.py); empty: there is none."""

    def __len__(self) -> int:
        return len(self.names)

    def entries(self) -> Iterator[Entry]:
        """All entries, in the order in which they were given to :func:`build_plan`."""
        chunks = self._chunks()
        shapes = self.shapes.tolist()
        properties = [self.properties[i] for i in self.property_of.tolist()]
        tensors = zip(properties, self.num_dims.tolist(), self.num_chunks.tolist(), strict=True)
        blobs = zip(self.bytes_segments.tolist(), self.bytes_items.tolist(), strict=True)
        at = 0
        for name, is_bytes in zip(self.names, self.is_bytes.tolist(), strict=True):
            if is_bytes:
                yield BytesEntry(name, *next(blobs))
                continue
            prop, rank, count = next(tensors)
            shape = tuple(shapes[at : at + rank])
            at += rank
            own = tuple(next(chunks) for _ in range(count))
            yield TensorEntry(name, prop[0], prop[1], prop[2], prop[3], prop[4], shape, own)

    def _chunks(self) -> Iterator[Chunk]:
        offsets, sizes = self.chunk_offsets.tolist(), self.chunk_sizes.tolist()
        ranks = np.repeat(self.num_dims, self.num_chunks).tolist()
        at = 0
        for rank, segment, item in zip(
            ranks, self.chunk_segments.tolist(), self.chunk_items.tolist(), strict=True
        ):
            end = at + rank
            yield Chunk(tuple(offsets[at:end]), tuple(sizes[at:end]), segment, item)
            at = end


NUMBERS = tuple(each.name for each in fields(Plan) if each.type == "Column")
"""The columns of numbers: a plan and its payload have them under the same names."""


def build_plan(
    entries: Iterable[Entry],
    *,
    structures: Sequence[bytes],
    planner_data: bytes | None = None,
    extras: bytes | None = None,
    metadata_version: str | None = None,
    storage_meta: bytes | None = None,
) -> Plan:
    """A plan of ``entries``, whose order is kept.

    Args:
        entries: Each name once.
        structures: :func:`structure_digest` of each segment, by ordinal.
        planner_data: DCP's, as plain data (format/plain.py); None is the plain None.
        extras: Further attributes of DCP's Metadata, as plain data; None is the plain empty dict.
        metadata_version: DCP's ``Metadata.version``.
        storage_meta: DCP's ``Metadata.storage_meta``, as plain data.

    Raises:
        ValueError: A name twice, a chunk outside of its tensor or of another rank, a segment
            ordinal without a structure, a negative number, or over a limit.
    """
    names: list[str] = []
    is_bytes: list[bool] = []
    properties: dict[Properties, int] = {}
    columns: dict[str, list[int]] = {name: [] for name in NUMBERS}
    offsets, sizes = columns["chunk_offsets"], columns["chunk_sizes"]
    segments, items = columns["chunk_segments"], columns["chunk_items"]
    for entry in entries:
        names.append(entry.name)
        is_bytes.append(isinstance(entry, BytesEntry))
        if isinstance(entry, BytesEntry):
            columns["bytes_segments"].append(entry.segment)
            columns["bytes_items"].append(entry.item)
            continue
        rank = len(entry.shape)
        prop = Properties(
            entry.dtype, entry.layout, entry.requires_grad, entry.memory_format, entry.pin_memory
        )
        number = properties.setdefault(prop, len(properties))
        columns["property_of"].append(number)
        columns["num_dims"].append(rank)
        columns["num_chunks"].append(len(entry.chunks))
        columns["shapes"] += entry.shape
        for chunk_offsets, chunk_sizes, segment, item in entry.chunks:
            if len(chunk_offsets) != rank or len(chunk_sizes) != rank:
                raise ValueError(f"{entry.name!r}: a chunk has another rank than its tensor")
            offsets += chunk_offsets
            sizes += chunk_sizes
            segments.append(segment)
            items.append(item)
    plan = Plan(
        names=tuple(names),
        is_bytes=np.array(is_bytes, np.bool_),
        properties=tuple(properties),
        **{name: _column(values) for name, values in columns.items()},
        structures=tuple(structures),
        planner_data=encode_plain(None) if planner_data is None else planner_data,
        extras=encode_plain({}) if extras is None else extras,
        metadata_version=metadata_version,
        storage_meta=storage_meta,
        nested=b"",
    )
    _check(plan)
    return plan


def _column(values: list[int]) -> Column:
    try:
        return np.array(values, np.int64)
    except OverflowError as error:
        raise ValueError("a size or offset is over 2**63 - 1") from error


def encode_plan(plan: Plan) -> bytes:
    """The plan as bytes, compressed. Raises ValueError if it is over the limit of 512 MiB.

    The same entries, structures and extras give the same payload on every machine and release of
    zstd, and so the same :func:`tieredckpt.format.plan_record.encoded_plan_id`.
    """
    name_lengths, names = pack_names(plan.names)
    columns = Columns(
        name_lengths=name_lengths,
        names=names,
        kinds=plan.is_bytes.astype(np.uint8).tobytes(),
        properties=encode_plain(
            [tuple(each) for each in plan.properties], limit=PROPERTIES_LIMIT_BYTES
        ),
        **{name: _pack(getattr(plan, name)) for name in NUMBERS},
        structures=b"".join(plan.structures),
        planner_data=plan.planner_data,
        extras=plan.extras,
        metadata_version=plan.metadata_version,
        storage_meta=plan.storage_meta,
        nested=plan.nested,
    )
    fields = msgspec.structs.astuple(columns)
    if plan.nested:
        return seal_plan(_encode(fields), VERSION)
    return seal_plan(_encode(fields[:-1]))


def decode_plan(data: bytes) -> Plan:
    """The plan in ``data``.

    Raises:
        IntegrityError: Damaged, or a plan that :func:`build_plan` would not make.
        FormatVersionError: Of a newer version.
    """
    columns = unpack_struct(_decoder, open_plan(data), "plan")
    try:
        kinds = np.frombuffer(columns.kinds, np.uint8)
        if record_version(data) != (VERSION if columns.nested else 1):
            raise ValueError("the table of nested keys is not of this version")
        if kinds.max(initial=0) > 1 or len(columns.structures) % DIGEST_BYTES:
            raise ValueError("a kind or a structure digest is malformed")
        plan = Plan(
            names=tuple(unpack_names(columns.name_lengths, columns.names, MAX_NAMES, "plan")),
            is_bytes=kinds.astype(np.bool_),
            properties=_properties(columns.properties),
            **{name: _unpack(getattr(columns, name)) for name in NUMBERS},
            structures=tuple(
                columns.structures[at : at + DIGEST_BYTES]
                for at in range(0, len(columns.structures), DIGEST_BYTES)
            ),
            planner_data=columns.planner_data,
            extras=columns.extras,
            metadata_version=columns.metadata_version,
            storage_meta=columns.storage_meta,
            nested=columns.nested,
        )
        _check(plan)
    except ValueError as error:
        raise IntegrityError(f"plan: {error}") from error
    return plan


def rebuild_plan(footers: Sequence[Footer]) -> Plan:
    """The plan from the segments alone, in the order of ``footers``.

    Segments do not contain the order of the names (here the order of first appearance), planner
    data, extras, and the tensors' other properties, which get defaults.

    Raises:
        IntegrityError: The segments contradict each other, so they are not of one checkpoint.
    """
    tensors: dict[str, tuple[str, tuple[int, ...], dict[object, Chunk]]] = {}
    blobs: dict[str, BytesEntry] = {}
    order: dict[str, None] = {}
    for segment, footer in enumerate(footers):
        for number, item in enumerate(footer.items):
            order[item.name] = None
            if item.kind == "bytes":
                if item.name in blobs:
                    raise IntegrityError(f"two segments hold the bytes item {item.name!r}")
                blobs[item.name] = BytesEntry(item.name, segment, number)
                continue
            dtype, shape, chunks = tensors.setdefault(
                item.name, (item.dtype, item.global_shape, {})
            )
            if (dtype, shape) != (item.dtype, item.global_shape):
                raise IntegrityError(f"segments disagree on dtype or shape of {item.name!r}")
            chunk = Chunk(item.chunk_offsets, item.chunk_sizes, segment, number)
            chunks.setdefault(chunk[:2], chunk)  # without collectives each rank wrote its copy
    both = tensors.keys() & blobs.keys()
    if both:
        raise IntegrityError(f"{min(both)!r} is a tensor in one segment and bytes in another")
    entries = [
        blobs[name] if name in blobs else _default_entry(name, *tensors[name]) for name in order
    ]
    try:
        return build_plan(entries, structures=[structure_digest(f.items) for f in footers])
    except ValueError as error:
        raise IntegrityError(f"segments of no one checkpoint: {error}") from error


def _default_entry(
    name: str, dtype: str, shape: tuple[int, ...], chunks: dict[object, Chunk]
) -> TensorEntry:
    own = tuple(chunks.values())
    return TensorEntry(name, dtype, DEFAULT_LAYOUT, False, DEFAULT_MEMORY_FORMAT, False, shape, own)


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


def _check(plan: Plan) -> None:
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
    _expect(max(map(len, plan.names), default=0) <= MAX_NAME_BYTES, "the length of a name")
    _expect(len(plan.properties) <= MAX_PROPERTIES, "the number of different properties")
    _expect(len(plan.is_bytes) == len(plan.names), "a kind per name")
    _expect(all(len(each) == DIGEST_BYTES for each in plan.structures), "a structure digest")
    check_unique(plan.names, "the name")


def _check_bounds(plan: Plan) -> None:
    """Raise ValueError unless each chunk is inside of its tensor."""
    # Row t of a chunk's shape is its tensor's: spread the flat shapes over the chunks.
    starts = np.cumsum(plan.num_dims) - plan.num_dims
    ranks = np.repeat(plan.num_dims, plan.num_chunks)
    firsts = np.repeat(starts, plan.num_chunks)
    chunk_starts = np.cumsum(ranks) - ranks
    within = np.arange(len(plan.chunk_offsets)) - np.repeat(chunk_starts, ranks)
    shapes = plan.shapes[np.repeat(firsts, ranks) + within]
    offsets, sizes = plan.chunk_offsets, plan.chunk_sizes
    inside = (offsets >= 0) & (sizes >= 0) & (sizes <= shapes) & (offsets <= shapes - sizes)
    _expect(bool(inside.all()), "a chunk is outside of its tensor")


def _within(values: Column, end: int) -> bool:
    """Whether all are in 0 .. end - 1."""
    return int(values.min(initial=0)) >= 0 and int(values.max(initial=-1)) < end


def _expect(sound: bool, what: str) -> None:
    if not sound:
        raise ValueError(f"columns that do not fit each other: {what}")
