"""DCP's ``Metadata`` as a plan, and back.

The plan holds everything that the structure of the state fixes; nothing here varies from save to
save. ``Metadata.storage_data`` is not kept: it belongs to the storage layer, and the plan has
locations of its own.

The plan of a stream's last save is reused as long as the structure is unchanged. Equal structure
digests mean that every piece has the same place; equal metadata means that the rest of the plan is
equal, too. The comparison is stricter than ``==``, which ignores extra attributes of DCP's
data classes and takes 1 for True.
"""

from __future__ import annotations

import copy
import itertools
import operator
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tieredckpt.dcp.state.items import dtype_name
from tieredckpt.errors import IntegrityError, UsageError
from tieredckpt.format.cover import check_cover
from tieredckpt.format.parts import MARK, Pieces, join_parts, parse_part
from tieredckpt.format.plain import decode_plain, encode_plain
from tieredckpt.format.plan import BytesEntry, Chunk, Plan, TensorEntry, build_plan, encode_plan
from tieredckpt.format.plan_record import encoded_plan_id
from tieredckpt.format.segment import Item

_Constant = TypeVar("_Constant")

MAX_PLAIN_BYTES = 256 << 20
"""Largest planner data or extra attributes that a reader decodes."""

_METADATA_FIELDS = frozenset(
    ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
)
_PROPERTIES = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
_KNOWN_FIELDS: dict[type, frozenset[str]] = {
    TensorStorageMetadata: frozenset(("properties", "size", "chunks")),
    BytesStorageMetadata: frozenset(),
    # Strides (since torch 2.15) are those of one rank's piece, and are not kept.
    TensorProperties: frozenset((*_PROPERTIES, "strides")),
    ChunkStorageMetadata: frozenset(("offsets", "sizes")),
}

Box = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A chunk: name of its tensor, offsets, sizes."""
Place = tuple[int, int]
"""Segment ordinal and item ordinal inside the segment."""


@dataclass(frozen=True, slots=True)
class Places:
    """The place of each chunk and each bytes item, and the dtype of the stored chunk.

    Of a plan that was read: also the pieces of wrappers, and the parts of these by name.
    """

    chunks: Mapping[Box, tuple[Place, str]]
    blobs: Mapping[str, Place]
    pieces: Pieces = field(default_factory=dict)
    parts: Mapping[str, TensorStorageMetadata] = field(default_factory=dict)

    @classmethod
    def of_segments(cls, segments: Sequence[Sequence[Item]]) -> Places:
        """From the items of each segment, in order. A chunk stored twice is taken once."""
        chunks: dict[Box, tuple[Place, str]] = {}
        blobs: dict[str, Place] = {}
        for ordinal, items in enumerate(segments):
            for number, item in enumerate(items):
                if item.kind == "bytes":
                    blobs.setdefault(item.name, (ordinal, number))
                else:
                    box = (item.name, item.chunk_offsets, item.chunk_sizes)
                    chunks.setdefault(box, ((ordinal, number), item.dtype))
        return cls(chunks, blobs)


def torch_constant(name: str, kind: type[_Constant]) -> _Constant:
    """The dtype, layout or memory format ``torch.name``. Raises IntegrityError if there is none."""
    value = vars(torch).get(name)  # an attribute might import something
    if not isinstance(value, kind):
        raise IntegrityError(
            f"the checkpoint names torch.{name}, which torch {torch.__version__} does not know as "
            f"a {kind.__name__}",
        )
    return value


def to_plan(
    metadata: Metadata, places: Places, structures: Sequence[bytes], *, partial: bool = False
) -> Plan:
    """The plan of a save: all of ``metadata``, and the places of its pieces.

    If all stored pieces of a tensor have one dtype that is not the planned one, the plan has the
    stored one.

    Args:
        metadata: As DCP's planner made it.
        places: Of the pieces.
        structures: Structure digest of each segment.
        partial: It is one rank's part, of tensors that others have further pieces of.

    Raises:
        UsageError: A piece is planned but nobody wrote it, or was written but not planned, the
            pieces of a tensor overlap, leave holes or differ in dtype, or an attribute is not plain
            data.
    """
    entries: list[TensorEntry | BytesEntry] = []
    num_chunks = num_blobs = 0
    for name, stored in _with_parts(metadata, places):
        if isinstance(stored, TensorStorageMetadata):
            entries.append(_tensor_entry(name, stored, places))
            num_chunks += len(stored.chunks)
        else:
            place = places.blobs.get(name)
            if place is None:
                raise UsageError(f"{name!r} was planned, but no rank wrote it", state_key=name)
            entries.append(BytesEntry(name, *place))
            num_blobs += 1
    if num_chunks < len(places.chunks) or num_blobs < len(places.blobs):
        raise UsageError(
            f"written but not in the planner's metadata: {_unplanned(metadata, places)}"
        )
    meta = metadata.storage_meta
    plan = build_plan(
        entries,
        structures=tuple(structures),
        planner_data=_plain("planner_data", metadata.planner_data),
        extras=_plain_extras(_extras(metadata)),
        metadata_version=metadata.version,
        storage_meta=None if meta is None else _plain("storage_meta", dict(vars(meta))),
    )
    if not partial:
        check_cover(plan)
    return plan


def _with_parts(
    metadata: Metadata, places: Places
) -> Iterator[tuple[str, TensorStorageMetadata | BytesStorageMetadata]]:
    """What was planned, but of each piece of a wrapper the parts that were written of it."""
    parts: dict[tuple[str, tuple[int, ...]], list[tuple[Box, str]]] = {}
    for box, (_, dtype) in places.chunks.items():
        if (part := parse_part(box[0])) is not None:
            parts.setdefault((part.key, part.offsets), []).append((box, dtype))
    for name, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            yield name, stored
            continue
        written = [parts.get((name, tuple(chunk.offsets)), []) for chunk in stored.chunks]
        for (part_name, offsets, sizes), dtype in itertools.chain(*written):
            properties = TensorProperties(torch_constant(dtype, torch.dtype))
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            yield part_name, TensorStorageMetadata(properties, torch.Size(sizes), [chunk])
        if not written or not all(written):
            pairs = zip(stored.chunks, written, strict=True)
            yield name, replace(stored, chunks=[chunk for chunk, found in pairs if not found])


def _tensor_entry(name: str, stored: TensorStorageMetadata, places: Places) -> TensorEntry:
    props = stored.properties
    chunks = []
    dtypes = set()
    for chunk in stored.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        found = places.chunks.get((name, offsets, sizes))
        if found is None:
            raise UsageError(
                f"the piece of {name!r} at {list(offsets)} of size {list(sizes)} was planned, but "
                "no rank wrote it",
                state_key=name,
            )
        (segment, item), dtype = found
        dtypes.add(dtype)
        chunks.append(Chunk(offsets, sizes, segment, item))
    planned = dtype_name(props.dtype)
    if len(dtypes) > 1:
        raise UsageError(
            f"{name!r} was planned as {planned}, but its pieces were written as "
            f"{', '.join(sorted(dtypes))}",
            state_key=name, planned=planned, actual=sorted(dtypes),
        )  # fmt: skip
    return TensorEntry(
        name=name,
        dtype=dtypes.pop() if dtypes else planned,
        layout=str(props.layout).removeprefix("torch."),
        requires_grad=props.requires_grad,
        memory_format=str(props.memory_format).removeprefix("torch."),
        pin_memory=props.pin_memory,
        shape=tuple(stored.size),
        chunks=tuple(chunks),
    )


def _unplanned(metadata: Metadata, places: Places) -> str:
    known = {
        (name, tuple(chunk.offsets), tuple(chunk.sizes))
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
        for chunk in stored.chunks
    }
    names = [f"{box[0]!r} at {list(box[1])}" for box in places.chunks if box not in known]
    names += [repr(name) for name in places.blobs if name not in metadata.state_dict_metadata]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# --- attributes that are plain data ----------------------------------------------------------


def _to_tagged(value: object) -> tuple[str, Any] | None:
    if isinstance(value, torch.Size):
        return "size", tuple(value)
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return type(value).__name__, str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return "device", str(value)
    if isinstance(value, pathlib.PurePath):
        return "path", str(value)
    return None


def _from_tagged(tag: str, value: Any) -> object:
    if tag == "size":
        return torch.Size(value)
    if tag == "device":
        return torch.device(value)
    if tag == "path":
        return pathlib.Path(value)
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        if tag == kind.__name__:
            return torch_constant(value, kind)
    raise IntegrityError(f"the plan holds a value of unknown kind {tag!r}")


def _plain(attribute: str, value: object) -> bytes:
    try:
        return encode_plain(value, _to_tagged, MAX_PLAIN_BYTES)
    except UsageError as error:
        raise UsageError(
            f"Metadata.{attribute} cannot be saved: {error}", attribute=attribute, **error.fields
        ) from error


def _plain_extras(extras: dict[Any, Any]) -> bytes:
    for path, attributes in extras.items():
        for name, value in attributes.items():
            where = "".join(f"[{part!r}]" for part in path)
            _plain(f"state_dict_metadata{where}.{name}" if path else name, value)
    return _plain("attributes", extras)


def _unplain(data: bytes) -> Any:
    try:
        return decode_plain(data, MAX_PLAIN_BYTES, _from_tagged)
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise IntegrityError(f"the plan holds a value that cannot be rebuilt: {error}") from error


def _parts(metadata: Metadata) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every object inside ``metadata`` that could carry extra attributes, and its path."""
    for name, stored in metadata.state_dict_metadata.items():
        yield (name,), stored
        if isinstance(stored, TensorStorageMetadata):
            yield (name, "properties"), stored.properties
            for number, chunk in enumerate(stored.chunks):
                yield (name, number), chunk


def _extras(metadata: Metadata) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    own = {key: value for key, value in vars(metadata).items() if key not in _METADATA_FIELDS}
    if own:
        found[()] = own
    for path, part in _parts(metadata):
        known = _KNOWN_FIELDS.get(type(part))
        if known is None:
            raise UsageError(
                f"Metadata holds a {type(part).__module__}.{type(part).__qualname__} for "
                f"{path[0]!r}, which cannot be saved",
                state_key=path[0],
            )
        attributes = vars(part)
        if not attributes.keys() <= known:
            found[path] = {key: value for key, value in attributes.items() if key not in known}
    return found


# --- back ---------------------------------------------------------------------------------------


def to_metadata(plan: Plan) -> tuple[Metadata, Places]:
    """The metadata of DCP's planner, rebuilt, and the places of the pieces.

    Raises:
        IntegrityError: The pieces of a tensor do not make it up, or the plan names a dtype or
            constant that this torch does not know.
    """
    try:
        check_cover(plan)
    except UsageError as error:
        raise IntegrityError(f"the plan is damaged: {error.message}", **error.fields) from error
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    parts: dict[str, TensorStorageMetadata] = {}
    chunks: dict[Box, tuple[Place, str]] = {}
    blobs: dict[str, Place] = {}
    entries = [*plan.entries()]
    for entry in entries:
        if isinstance(entry, BytesEntry):
            blobs[entry.name] = (entry.segment, entry.item)
            continue
        for offsets, sizes, segment, item in entry.chunks:
            box = (entry.name, tuple(offsets), tuple(sizes))
            chunks.setdefault(box, ((segment, item), entry.dtype))
        if MARK in entry.name:
            parts[entry.name] = _stored_tensor(entry)
    entries, pieces = join_parts(entries)
    for entry in entries:
        if isinstance(entry, BytesEntry):
            stored[entry.name] = BytesStorageMetadata()
            continue
        stored[entry.name] = _stored_tensor(entry)
    metadata = Metadata(
        state_dict_metadata=stored,
        planner_data=_unplain(plan.planner_data),
        version=plan.metadata_version,
    )
    if plan.storage_meta is not None:
        metadata.storage_meta = StorageMeta()
        vars(metadata.storage_meta).update(_string_keys(_unplain(plan.storage_meta)))
    _put_extras(metadata, _unplain(plan.extras))
    return metadata, Places(chunks, blobs, pieces, parts)


def _stored_tensor(entry: TensorEntry) -> TensorStorageMetadata:
    properties = TensorProperties(
        dtype=torch_constant(entry.dtype, torch.dtype),
        layout=torch_constant(entry.layout, torch.layout),
        requires_grad=entry.requires_grad,
        memory_format=torch_constant(entry.memory_format, torch.memory_format),
        pin_memory=entry.pin_memory,
    )
    boxes = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes, _, _ in entry.chunks
    ]
    return TensorStorageMetadata(properties, torch.Size(entry.shape), boxes)


def _put_extras(metadata: Metadata, extras: Any) -> None:
    if not isinstance(extras, dict):
        raise IntegrityError("the plan's extra attributes are not a table")
    for path, attributes in extras.items():
        part: Any = metadata
        try:
            if path:
                part = metadata.state_dict_metadata[path[0]]
            if len(path) > 1:
                part = part.properties if path[1] == "properties" else part.chunks[path[1]]
        except (LookupError, TypeError, AttributeError) as error:
            raise IntegrityError(f"the plan has extra attributes for {path!r:.200}") from error
        # What was checked stays as it is.
        if not _KNOWN_FIELDS.get(type(part), _METADATA_FIELDS).isdisjoint(_string_keys(attributes)):
            raise IntegrityError(f"an extra attribute of {path!r:.200} has the name of another one")
        vars(part).update(attributes)


def _string_keys(attributes: Any) -> dict[str, Any]:
    if not isinstance(attributes, dict) or not all(isinstance(key, str) for key in attributes):
        raise IntegrityError("the plan holds attributes without a name")
    return attributes


# --- the last plan --------------------------------------------------------------------------------


_NOT_OURS = ("storage_data", "state_dict_metadata")


@dataclass(frozen=True, slots=True)
class EncodedPlan:
    """A plan as it is committed: its id (32 hex digits) and its bytes."""

    id: str
    data: bytes


def same_plain(one: object, other: object) -> bool:
    """Whether two values are equal in value and type all the way down. False if in doubt."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        assert isinstance(other, dict)
        return len(one) == len(other) and all(
            same_plain(a, b) for a, b in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple):
        assert isinstance(other, list | tuple)
        return len(one) == len(other) and all(map(same_plain, one, other))
    if isinstance(one, _COMPARABLE):
        return bool(one == other)
    return one is None


_COMPARABLE = (str, bytes, int, float, complex, torch.dtype, torch.layout, torch.memory_format)


_properties_of = operator.attrgetter(*_PROPERTIES)


def _same_tensor(one: TensorStorageMetadata, other: TensorStorageMetadata) -> bool:
    # By their dicts: several times faster than the dataclasses' own ==, and extra attributes show.
    mine, theirs = one.properties, other.properties
    return (
        one.size == other.size
        and _properties_of(mine) == _properties_of(theirs)
        and len(one.chunks) == len(other.chunks)
        and all(vars(a) == vars(b) for a, b in zip(one.chunks, other.chunks, strict=True))
        and len(vars(one)) == len(vars(other)) == 3
        and vars(mine).keys() <= _KNOWN_FIELDS[TensorProperties]
        and vars(theirs).keys() <= _KNOWN_FIELDS[TensorProperties]
        and all(len(vars(chunk)) == 2 for chunk in one.chunks)
    )


class _Snapshot:
    """The content of a metadata object when it was encoded; later changes have no effect."""

    def __init__(self, metadata: Metadata) -> None:
        self._stored = dict(metadata.state_dict_metadata)
        self._rest = copy.deepcopy(self._attributes(metadata))

    @staticmethod
    def _attributes(metadata: Metadata) -> dict[str, Any]:
        found = {key: value for key, value in vars(metadata).items() if key not in _NOT_OURS}
        if metadata.storage_meta is not None:
            found["storage_meta"] = dict(vars(metadata.storage_meta))
        return found

    def matches(self, metadata: Metadata) -> bool:
        stored = metadata.state_dict_metadata
        if len(stored) != len(self._stored):
            return False
        for (name, one), (name_before, other) in zip(
            stored.items(), self._stored.items(), strict=True
        ):
            if name != name_before or type(one) is not type(other):
                return False
            if isinstance(one, TensorStorageMetadata):
                assert isinstance(other, TensorStorageMetadata)
                if one is not other and not _same_tensor(one, other):
                    return False
            elif vars(one) or vars(other):
                return False
        return same_plain(self._attributes(metadata), self._rest)


class PlanCache:
    """The last plan of one stream."""

    def __init__(self) -> None:
        self._last: tuple[tuple[bytes, ...], bytes, _Snapshot, EncodedPlan] | None = None
        self.builds = 0
        """How often a plan was built and encoded."""

    def plan_for(
        self,
        metadata: Metadata,
        structures: Sequence[bytes],
        places: Callable[[], Places],
        *,
        partial: bool = False,
        nested: bytes = b"",
    ) -> EncodedPlan:
        """The plan of a save.

        Args:
            metadata: As DCP's planner made it.
            structures: Structure digest of each segment, in order.
            places: Finds the places of the pieces; called only if the plan must be built.
            partial: It is one rank's part only, see :func:`to_plan`.
            nested: The table of the state's keys that are no text (format/nested.py).

        Raises:
            UsageError: As :func:`to_plan`; the cache is unchanged.
        """
        if self._last is not None:
            *known, snapshot, encoded = self._last
            if known == [tuple(structures), nested] and snapshot.matches(metadata):
                return encoded
        plan = to_plan(metadata, places(), structures, partial=partial)
        data = encode_plan(replace(plan, nested=nested))
        encoded = EncodedPlan(encoded_plan_id(data), data)
        self._last = tuple(structures), nested, _Snapshot(metadata), encoded
        self.builds += 1
        return encoded
