"""Reads into wrapper subclasses: part by part, into the inner tensors that the state has.

A piece in the layout of the save is read part by part. Otherwise the class itself decides which
region of an inner tensor belongs to a region of the wrapper: wrappers without data, of the state's
class and of the shapes in the checkpoint and in the state, are sliced. What the class does not
slice, or not as a box of its inner tensors, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from tieredckpt.dcp.state.items import dtype_name
from tieredckpt.dcp.state.wrappers import (
    CLASS_ERRORS,
    Parts,
    Tree,
    flatten,
    is_wrapper,
    unflatten,
)
from tieredckpt.errors import IntegrityError, UsageError
from tieredckpt.format.parts import Kind, PartName, Piece, Pieces

Shape = tuple[int, ...]

_FAR = 1 << 40
"""Offset of the inner tensors without data: an offset below it is not that of a view of them."""

_SHOWN = 400


class PartRead(NamedTuple):
    """One part's region, and where it is read."""

    request: ReadItem
    target: torch.Tensor


class Wrapped(NamedTuple):
    """A wrapper that is loaded: what its planner was asked for, what it gave, and the reads."""

    request: ReadItem
    target: torch.Tensor
    reads: list[PartRead]


def wrapped_reads(
    items: Sequence[ReadItem],
    planner: LoadPlanner,
    pieces: Pieces,
    stored: Mapping[str, TensorStorageMetadata],
) -> list[Wrapped]:
    """The reads of those items that ask for pieces of wrappers.

    Args:
        items: All of this rank's.
        planner: Gives the tensors of the state.
        pieces: Of the checkpoint.
        stored: The parts of the checkpoint, by name.

    Raises:
        UsageError: The tensor in the state cannot take such a piece.
        IntegrityError: The plan does not have all parts.
    """
    found: dict[MetadataIndex, Wrapped] = {}
    ends: dict[MetadataIndex, Shape] = {}
    for item in items:
        if item.type != LoadItemType.BYTE_IO:  # a checkpoint has all of a tensor, and DCP asks
            end = tuple(map(int.__add__, item.dest_offsets, item.lengths))
            known = ends.get(item.dest_index, end)
            ends[item.dest_index] = tuple(map(max, known, end))
    for item in items:
        piece = piece_of(item, pieces)
        if piece is None:
            continue
        if item.dest_index not in found:
            # Not narrowed: its inner tensors must be those of the state.
            sizes = torch.Size(ends[item.dest_index])
            whole = replace(item, dest_offsets=torch.Size([0] * len(sizes)), lengths=sizes)
            with torch.no_grad():
                target = planner.resolve_tensor(whole)
            found[item.dest_index] = Wrapped(whole, target, [])
        wrapped = found[item.dest_index]
        wrapped.reads.extend(_reads(item, wrapped, piece, stored))
    return [*found.values()]


def piece_of(item: ReadItem, pieces: Pieces) -> Piece | None:
    """The piece of a wrapper that ``item`` asks for a region of; None: it asks for another one."""
    index = item.storage_index
    at = None if index.offset is None else tuple(index.offset)
    return pieces.get((index.fqn, at)) if at is not None else None


def _reads(
    item: ReadItem, wrapped: Wrapped, piece: Piece, stored: Mapping[str, TensorStorageMetadata]
) -> list[PartRead]:
    key, target, kind = item.dest_index.fqn, wrapped.target, piece.kind
    saved = kind.tree[0]
    if not is_wrapper(target) or tuple(target.shape) != tuple(wrapped.request.lengths):
        raise UsageError(
            f"{key!r} is a {saved} in the checkpoint, saved as its inner tensors "
            f"{', '.join(piece.names)}, and a {type(target).__qualname__} in the state: load into "
            f"a {saved}, then convert it",
            state_key=key,
        )
    parts, tree = flatten(key, target, kind.tree)
    mine = kind._replace(dtype=dtype_name(target.dtype), tree=tree)
    if mine.encode() != kind.encode():
        raise UsageError(
            f"{key!r} is another {saved} in the state than in the checkpoint (class, context, "
            f"dtype or inner tensors): {_text(mine)}, not {_text(kind)}; make it as at the save",
            state_key=key,
        )
    if parts.keys() != piece.names.keys() or not stored.keys() >= set(piece.names.values()):
        raise IntegrityError(f"the plan does not have all parts of {key!r}")
    theirs = {path: stored[name] for path, name in piece.names.items()}
    shapes = {path: tuple(each.size) for path, each in theirs.items()}
    asked = tuple(item.lengths)
    sizes = zip(asked, kind.sizes, target.shape, strict=True)
    dims = [dim for dim, (n, one, other) in enumerate(sizes) if n < max(one, other)]
    mine_at, after = _boxes(key, target, parts, None, item.dest_offsets, asked, dims)
    from_parts = {
        path: torch.empty(shapes[path], dtype=theirs[path].properties.dtype, device="meta")
        for path in parts
    }
    theirs_at, also = _boxes(key, target, from_parts, tree, item.storage_offsets, asked, dims)
    reads = []
    for path, part in parts.items():
        (begin, lengths), (at, same) = mine_at[path], theirs_at[path]
        if lengths != same or part.dtype != from_parts[path].dtype or after != also:
            raise UsageError(
                f"the inner tensor {path!r} of {key!r} is {part.dtype} {list(lengths)} in the "
                f"state and {from_parts[path].dtype} {list(same)} in the checkpoint: make the "
                f"{saved} as at the save (the size of blocks, for example)",
                state_key=key,
            )
        own = str(PartName(key, path, tuple(item.dest_index.offset or ())))
        request = ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(own),
            dest_offsets=torch.Size(begin),
            storage_index=MetadataIndex(piece.names[path], torch.Size([0] * len(at))),
            storage_offsets=torch.Size(at),
            lengths=torch.Size(lengths),
        )
        box = part.detach()
        for dim, (start, length) in enumerate(zip(begin, lengths, strict=True)):
            box = box.narrow(dim, start, length)
        reads.append(PartRead(request, box))
    return reads


def _text(kind: Kind) -> str:
    return str((kind.dtype, *kind.tree))[:_SHOWN]


def _boxes(
    key: str,
    tensor: torch.Tensor,
    parts: Parts,
    like: Tree | None,
    starts: Sequence[int],
    lengths: Sequence[int],
    dims: Sequence[int],
) -> tuple[dict[str, tuple[Shape, Shape]], Tree | None]:
    """Where a region of a wrapper is in its inner tensors: start and lengths by path.

    Args:
        key: For messages.
        tensor: The wrapper of the state.
        parts: The inner tensors; only their shapes and dtypes count.
        like: Tree with the shapes of the wrapper to be sliced; None: those of ``tensor``.
        starts, lengths: The region.
        dims: The dimensions to be sliced; none: the region is the whole.

    Returns:
        Also the tree of the slice.

    Raises:
        UsageError: The class does not slice it, or the result is no box of the inner tensors.
    """
    if not dims:
        whole = {path: tuple(part.shape) for path, part in parts.items()}
        return {path: ((0,) * len(shape), shape) for path, shape in whole.items()}, None
    empty = {}
    for path, part in parts.items():
        memory = torch.empty(_FAR + part.numel(), dtype=part.dtype, device="meta")
        empty[path] = memory[_FAR:].view(part.shape)
    try:
        with torch.no_grad():
            sliced = unflatten(tensor, empty, like)
            for dim in dims:
                sliced = sliced.narrow(dim, starts[dim], lengths[dim])
        found, tree = flatten(key, sliced)
        return {path: _box(path, empty[path], found[path]) for path in empty}, tree
    except CLASS_ERRORS as error:
        raise UsageError(
            f"{key!r} was saved in other pieces than the state has, and a "
            f"{type(tensor).__qualname__} cannot be cut from {list(starts)} on, "
            f"{list(lengths)} elements ({error}): load with the number of ranks and the layout of "
            "the save",
            state_key=key,
        ) from error


def _box(path: str, whole: torch.Tensor, part: torch.Tensor) -> tuple[Shape, Shape]:
    """Start and lengths of ``part`` in the inner tensor ``whole`` that it was cut from.

    One that has the shape of the whole is the whole, though it may be a copy: the class does not
    cut it.
    """
    lengths, left = tuple(part.shape), part.storage_offset() - _FAR
    if lengths == tuple(whole.shape):
        return (0,) * len(lengths), lengths
    start = []
    if left < 0 or part.stride() != whole.stride():
        raise ValueError(f"its inner tensor {path!r} is not cut to a part of itself")
    for stride in whole.stride():
        start.append(left // stride)
        left %= stride
    ends = zip(start, lengths, whole.shape, strict=True)
    if left or any(begin + length > size for begin, length, size in ends):
        raise ValueError(f"its inner tensor {path!r} is not cut to a box of itself")
    return tuple(start), lengths
