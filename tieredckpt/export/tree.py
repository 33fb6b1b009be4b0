"""What is in a checkpoint: names, shapes, types, bytes, and which copies hold each piece."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch

from tieredckpt.config.schema import Config
from tieredckpt.dcp.load.sources import fetcher_of, find_plan
from tieredckpt.dcp.state.metadata import torch_constant
from tieredckpt.errors import IntegrityError
from tieredckpt.export.selection import Path, recorded_path
from tieredckpt.export.source import Source, Which, opened
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.parts import join_parts, parse_part
from tieredckpt.format.plan import BytesEntry, TensorEntry


@dataclass(frozen=True, slots=True)
class Leaf:
    """One key. ``dtype`` and ``shape`` are None for a value that is no tensor.

    ``wrapper`` is the class of a tensor that was saved as its inner tensors, else None; then
    ``bytes`` are theirs. ``segments`` are the ordinals of the segments that hold its pieces;
    ``path`` is its place in the nested state.
    """

    name: str
    path: Path
    dtype: str | None
    shape: tuple[int, ...] | None
    wrapper: str | None
    bytes: int
    segments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint's keys in their order.

    ``places`` has for each segment the copies that there are, the nearest first.
    """

    manifest: Manifest
    leaves: tuple[Leaf, ...]
    places: tuple[tuple[str, ...], ...]


def contents(config: Config, which: Which) -> Contents:
    """What is in a checkpoint. Reads plan and indexes alone, and changes nothing.

    Raises:
        NotFoundError, NoRecoverableCheckpointError: There is no such checkpoint.
        IntegrityError, TierUnavailableError: No copy of its plan or of an index can be read.
    """
    with opened(config, which) as source:
        plan = find_plan(source.session, source.candidate)
        sizes = _sizes_of_values(source, {int(each) for each in plan.bytes_segments})
        segments_of: dict[str, set[int]] = {}
        size: Counter[str] = Counter()
        for entry in plan.entries():
            part = parse_part(entry.name)
            name = entry.name if part is None else part.key
            if isinstance(entry, BytesEntry):
                segments_of[name] = {entry.segment}
                if (entry.segment, entry.item) not in sizes:
                    raise IntegrityError(f"no segment has the value of {name[:200]!r}")
                size[name] = sizes[entry.segment, entry.item]
            else:
                segments_of.setdefault(name, set()).update(chunk.segment for chunk in entry.chunks)
                size[name] += stored_bytes(entry)
        entries, pieces = join_parts(plan.entries())
        wrappers = {key: piece.kind.tree[0] for (key, _), piece in pieces.items()}
        leaves = []
        for entry in entries:
            name, segments = entry.name, tuple(sorted(segments_of[entry.name]))
            path = recorded_path(name, source.metadata.planner_data)
            dtype, shape = (
                (None, None) if isinstance(entry, BytesEntry) else (entry.dtype, entry.shape)
            )
            of = wrappers.get(name)
            leaves.append(Leaf(name, path, dtype, shape, of, size[name], segments))
        places = tuple(
            tuple(each.place if each.intact else f"{each.place} (damaged)" for each in sources)
            for sources in source.candidate.sources
        )
        return Contents(source.manifest, tuple(leaves), places)


def stored_bytes(entry: TensorEntry) -> int:
    """The bytes of the pieces of a tensor, of several copies of a piece those of one.

    The pieces need not be the whole: the others of a wrapper are parts, with entries of their own.
    """
    pieces = {(chunk.offsets, chunk.sizes) for chunk in entry.chunks}
    count = sum(math.prod(sizes) for _, sizes in pieces)
    return count * torch_constant(entry.dtype, torch.dtype).itemsize


def _sizes_of_values(source: Source, segments: set[int]) -> dict[tuple[int, int], int]:
    """By segment and item, the sizes of values, which only the segments' indexes have."""
    found: dict[tuple[int, int], int] = {}
    for ordinal in segments:
        ref = source.manifest.segments[ordinal]
        with fetcher_of(source.session, ref, source.candidate.sources[ordinal]) as fetcher:
            for number, item in enumerate(fetcher.footer().items):
                found[ordinal, number] = item.size_bytes
    return found
