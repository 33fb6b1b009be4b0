"""The plan: what the structure of the state fixes, shared by many checkpoints.

Which tensors and bytes objects there are, in which pieces, and which item of which segment holds
each. Columnar, because at a million pieces it is hundreds of times larger than everything else:
numpy columns in memory, byte strings on disk. Identified by the digest of its payload.
docs/format/plan.md is normative. DCP's own extras (planner data and the like) are opaque here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tieredckpt.errors import IntegrityError
from tieredckpt.format import plan_columns
from tieredckpt.format.digest import DIGEST_BYTES
from tieredckpt.format.packing import unpack_struct
from tieredckpt.format.plain import encode_plain
from tieredckpt.format.plan_columns import STRUCTURE_BYTES, Column, Properties
from tieredckpt.format.plan_record import encoded_plan_id, open_plan, payload_id, seal_plan
from tieredckpt.format.segment import Footer, structure_digest

DEFAULT_LAYOUT = "strided"
DEFAULT_MEMORY_FORMAT = "contiguous_format"


class Chunk(NamedTuple):
    """One piece of a tensor, and where it is: ``item`` of the ``segment``-th segment."""

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
    """One bytes object; its length stands in the segment's own index."""

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
    """Structure digest per segment ordinal: what a segment must have to serve this plan."""
    planner_data: bytes
    extras: bytes
    metadata_version: str | None
    storage_meta: bytes | None

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
    per_tensor: tuple[list[int], list[int], list[int]] = ([], [], [])
    shapes: list[int] = []
    offsets: list[int] = []
    sizes: list[int] = []
    placed: tuple[list[int], list[int]] = ([], [])
    blobs: tuple[list[int], list[int]] = ([], [])
    for entry in entries:
        names.append(entry.name)
        is_bytes.append(isinstance(entry, BytesEntry))
        if isinstance(entry, BytesEntry):
            blobs[0].append(entry.segment)
            blobs[1].append(entry.item)
            continue
        rank = len(entry.shape)
        per_tensor[0].append(properties.setdefault(_properties_of(entry), len(properties)))
        per_tensor[1].append(rank)
        per_tensor[2].append(len(entry.chunks))
        shapes += entry.shape
        for chunk_offsets, chunk_sizes, segment, item in entry.chunks:
            if len(chunk_offsets) != rank or len(chunk_sizes) != rank:
                raise ValueError(f"{entry.name!r}: a chunk has another rank than its tensor")
            offsets += chunk_offsets
            sizes += chunk_sizes
            placed[0].append(segment)
            placed[1].append(item)
    plan = Plan(
        names=tuple(names),
        is_bytes=np.array(is_bytes, np.bool_),
        properties=tuple(properties),
        property_of=_column(per_tensor[0]),
        num_dims=_column(per_tensor[1]),
        shapes=_column(shapes),
        num_chunks=_column(per_tensor[2]),
        chunk_offsets=_column(offsets),
        chunk_sizes=_column(sizes),
        chunk_segments=_column(placed[0]),
        chunk_items=_column(placed[1]),
        bytes_segments=_column(blobs[0]),
        bytes_items=_column(blobs[1]),
        structures=tuple(structures),
        planner_data=encode_plain(None) if planner_data is None else planner_data,
        extras=encode_plain({}) if extras is None else extras,
        metadata_version=metadata_version,
        storage_meta=storage_meta,
    )
    plan_columns.check(plan)
    return plan


def _properties_of(entry: TensorEntry) -> Properties:
    return Properties(
        entry.dtype, entry.layout, entry.requires_grad, entry.memory_format, entry.pin_memory
    )


def _column(values: list[int]) -> Column:
    try:
        return np.array(values, np.int64)
    except OverflowError as error:
        raise ValueError("a size or offset is over 2**63 - 1") from error


def encode_plan(plan: Plan) -> bytes:
    """The plan as bytes, compressed. Raises ValueError if it is over the limit of 512 MiB."""
    return seal_plan(plan_columns.to_payload(plan))


def decode_plan(data: bytes) -> Plan:
    """The plan in ``data``.

    Raises:
        IntegrityError: Damaged, or a plan that :func:`build_plan` would not make.
        FormatVersionError: Of a newer version.
    """
    columns = unpack_struct(plan_columns.decoder, open_plan(data), "plan")
    try:
        plan = Plan(
            **plan_columns.lists(columns),
            **plan_columns.arrays(columns),
            planner_data=columns.planner_data,
            extras=columns.extras,
            metadata_version=columns.metadata_version,
            storage_meta=columns.storage_meta,
        )
        plan_columns.check(plan)
    except ValueError as error:
        raise IntegrityError(f"plan: {error}") from error
    return plan


def plan_id(plan: Plan | bytes) -> str:
    """The id of a plan, or of an encoded one: 32 hex digits of the payload's digest.

    The same entries, structures and extras give the same id on every machine and release of zstd.

    Raises:
        IntegrityError: ``plan`` is bytes, and damaged or no plan.
    """
    if isinstance(plan, Plan):
        return payload_id(plan_columns.to_payload(plan))
    return encoded_plan_id(plan)


def rebuild_plan(footers: Sequence[Footer]) -> Plan:
    """The plan from the segments alone, in the order of ``footers``.

    What segments do not hold is lost: the original order of the names (here the order of first
    appearance), planner data, extras, and the tensors' other properties, which get defaults.

    Raises:
        IntegrityError: The segments contradict each other, so they are not of one checkpoint.
    """
    tensors: dict[str, tuple[str, tuple[int, ...], list[Chunk]]] = {}
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
                item.name, (item.dtype, item.global_shape, [])
            )
            if (dtype, shape) != (item.dtype, item.global_shape):
                raise IntegrityError(f"segments disagree on dtype or shape of {item.name!r}")
            chunks.append(Chunk(item.chunk_offsets, item.chunk_sizes, segment, number))
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
    name: str, dtype: str, shape: tuple[int, ...], chunks: list[Chunk]
) -> TensorEntry:
    return TensorEntry(
        name, dtype, DEFAULT_LAYOUT, False, DEFAULT_MEMORY_FORMAT, False, shape, tuple(chunks)
    )


assert STRUCTURE_BYTES == DIGEST_BYTES
