"""Merges the plans that the ranks made without collectives, each for its own part of the state.

Pure. The result is the plan that the ranks would have made together, except for replicated items:
each rank wrote its own copy, and the plan names the lowest rank's.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tieredckpt.errors import UsageError
from tieredckpt.format.cover import NAME_CHARS_MAX, check_cover
from tieredckpt.format.nested import merge_nested
from tieredckpt.format.plain import decode_plain, encode_plain
from tieredckpt.format.plan import BytesEntry, Chunk, Plan, TensorEntry, build_plan

MAX_PLAIN_BYTES = 256 << 20
"""Largest planner data or extra attributes of one plan that are decoded here."""

_ALIKE = ("shape", "dtype", "layout", "requires_grad", "memory_format", "pin_memory")


@dataclass(frozen=True, slots=True)
class _Tagged:
    """A value of a class that is not known here, kept as its tag and content."""

    tag: str
    value: Any


def _to_tagged(value: object) -> tuple[str, Any] | None:
    return (value.tag, value.value) if isinstance(value, _Tagged) else None


def merge_plans(parts: Sequence[Plan]) -> Plan:
    """The plan of all ranks from the partial plans of each, in rank order.

    Args:
        parts: Each with one segment, or none if that rank wrote nothing. The result has these
            segments, in the same order.

    Returns:
        Names in the order in which the lowest ranks have them. A piece or a bytes object that
        several ranks wrote is taken from the lowest of them.

    Raises:
        UsageError: The ranks contradict each other (a tensor of two shapes, dtypes or other
            properties, different attributes), or the pieces of a tensor overlap or leave holes;
            field ``state_key`` names it.
        IntegrityError: A part's planner data, extra attributes or wrappers are malformed.
    """
    merged = _Entries()
    for rank, part in enumerate(parts):
        merged.add(rank, part)
    entries = [merged.tensors.get(name) or merged.blobs[name] for name in merged.order]
    versions = {part.metadata_version for part in parts}
    storage = {part.storage_meta for part in parts}
    if len(versions) > 1 or len(storage) > 1:
        raise UsageError(
            "the ranks' Metadata differ in version or storage_meta: use the same release of torch "
            "and the same planner on all ranks"
        )
    try:
        plan = build_plan(
            entries,
            structures=[each for part in parts for each in part.structures],
            planner_data=_planner_data(parts),
            extras=encode_plain(merged.extras, _to_tagged, MAX_PLAIN_BYTES),
            metadata_version=next(iter(versions), None),
            storage_meta=next(iter(storage), None),
        )
    except ValueError as error:
        raise UsageError(f"the ranks' plans do not fit together: {error}") from error
    check_cover(plan)
    return replace(plan, nested=merge_nested(part.nested for part in parts))


class _Entries:
    """The entries that were merged so far."""

    def __init__(self) -> None:
        self.order: dict[str, None] = {}
        self.tensors: dict[str, TensorEntry] = {}
        self.blobs: dict[str, BytesEntry] = {}
        self.extras: dict[Any, Any] = {}
        self._encoded: dict[tuple[Any, str], bytes] = {}
        """Encoded extra attributes, by path and name."""
        self._numbers: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
        """Number of each piece among the chunks of its tensor."""
        self._segments = 0

    def add(self, rank: int, part: Plan) -> None:
        if len(part.structures) > 1:
            raise UsageError(f"rank {rank} has {len(part.structures)} segments; 1 is possible")
        numbers: dict[tuple[str, int], int] = {}
        for entry in part.entries():
            self.order[entry.name] = None
            if isinstance(entry, BytesEntry):
                if entry.name in self.tensors:
                    raise _differ(rank, entry.name, "a tensor on one and bytes on the other")
                if entry.name not in self.blobs:
                    placed = BytesEntry(entry.name, self._segments, entry.item)
                    self.blobs[entry.name] = placed
                continue
            if entry.name in self.blobs:
                raise _differ(rank, entry.name, "bytes on one and a tensor on the other")
            self._add_tensor(rank, entry, numbers)
        self._add_extras(rank, part, numbers)
        self._segments += len(part.structures)

    def _add_tensor(
        self, rank: int, entry: TensorEntry, numbers: dict[tuple[str, int], int]
    ) -> None:
        name, known = entry.name, self.tensors.get(entry.name)
        if known is not None:
            for what in _ALIKE:
                one, other = getattr(known, what), getattr(entry, what)
                if one != other:
                    raise _differ(rank, name, f"{what} {one} on a lower rank, {other} on this one")
        chunks = list(known.chunks) if known is not None else []
        for number, (offsets, sizes, _, item) in enumerate(entry.chunks):
            box = (name, offsets, sizes)
            if box not in self._numbers:
                self._numbers[box] = len(chunks)
                chunks.append(Chunk(offsets, sizes, self._segments, item))
            numbers[name, number] = self._numbers[box]
        self.tensors[name] = msgspec.structs.replace(entry, chunks=tuple(chunks))

    def _add_extras(self, rank: int, part: Plan, numbers: dict[tuple[str, int], int]) -> None:
        for path, attributes in _table(part.extras, "extra attributes").items():
            if type(path) is not tuple or not isinstance(attributes, Mapping):
                raise UsageError(f"rank {rank}: the plan's extra attributes are not a table")
            if len(path) == 2 and isinstance(path[1], int):  # of a chunk, by its number
                path = (path[0], numbers.get((path[0], path[1]), path[1]))
            for name, value in attributes.items():
                encoded = encode_plain(value, _to_tagged, MAX_PLAIN_BYTES)
                if self._encoded.setdefault((path, name), encoded) != encoded:
                    where = path[0] if path else "Metadata"
                    raise _differ(rank, where, f"the attribute {name!r} has two values")
                self.extras.setdefault(path, {})[name] = value


def _differ(rank: int, name: str, how: str) -> UsageError:
    shown = name[:NAME_CHARS_MAX]
    return UsageError(
        f"the ranks do not save the same {shown!r}: rank {rank} and a lower one differ ({how})",
        state_key=shown,
    )


def _table(data: bytes, what: str) -> Mapping[Any, Any]:
    value = decode_plain(data, MAX_PLAIN_BYTES, _Tagged)
    if not isinstance(value, Mapping):
        raise UsageError(f"the plan's {what} are not a table")
    return value


def _planner_data(parts: Sequence[Plan]) -> bytes:
    """As DCP's planner merges its mappings: by key, the lowest rank's value."""
    different = {part.planner_data for part in parts}
    if len(different) == 1:
        return different.pop()
    tables = [_table(part.planner_data, "planner data") for part in parts]
    return encode_plain(dict(ChainMap(*map(dict, tables))), _to_tagged, MAX_PLAIN_BYTES)
