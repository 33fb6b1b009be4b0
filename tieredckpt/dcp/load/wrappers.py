"""Reads into wrapper subclasses: part by part, into the inner tensors that the state has.

A piece in the layout of the save is read part by part. Otherwise the class itself decides which
region of an inner tensor belongs to a region of the wrapper: wrappers without data, of the state's
class and of the shapes in the checkpoint and in the state, are sliced. What the class does not
slice, or not to views of its inner tensors that are boxes of them, is refused. A copy of a whole
inner tensor counts as the tensor: the class does not cut that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem
from torch.utils._python_dispatch import TorchDispatchMode

from tieredckpt.dcp.state.items import dtype_name
from tieredckpt.dcp.state.wrappers import CLASS_ERRORS, Parts, flatten, is_wrapper, unflatten
from tieredckpt.errors import IntegrityError, UsageError
from tieredckpt.format.parts import PartName, Piece, Pieces, Tree

Shape = tuple[int, ...]
Read = tuple[ReadItem, torch.Tensor]
"""What is asked for, and the tensor of the state that it is read into."""

_FIELDS = ("dtype", "class", "shape", "context", "inner tensors")


def wrapped_reads(
    items: Sequence[ReadItem],
    planner: LoadPlanner,
    pieces: Pieces,
    stored: Mapping[str, TensorStorageMetadata],
) -> tuple[list[Read], list[Read]]:
    """The reads for those items that ask for pieces of wrappers.

    Args:
        items: All of this rank's.
        planner: Gives the tensors of the state.
        pieces: Of the checkpoint.
        stored: The parts of the checkpoint, by name.

    Returns:
        The reads of parts, and the wrappers that have them with the planner's request for each.

    Raises:
        UsageError: The tensor in the state cannot take such a piece.
        IntegrityError: The plan does not have all parts.
    """
    reads: list[Read] = []
    wholes: dict[MetadataIndex, Read] = {}
    ends: dict[MetadataIndex, Shape] = {}
    for item in items:
        if item.type != LoadItemType.BYTE_IO:  # DCP asks for all that this rank has of a tensor
            end = tuple(map(int.__add__, item.dest_offsets, item.lengths))
            known = ends.get(item.dest_index, end)
            ends[item.dest_index] = tuple(map(max, known, end))
    filled: dict[MetadataIndex, Read] = {}
    for item in items:
        index, piece = item.dest_index, piece_of(item, pieces)
        if item.type == LoadItemType.BYTE_IO:
            continue
        if piece is None and ends[index] == tuple(item.lengths):
            continue  # the planner gives the whole of it
        if index not in wholes:
            # Not narrowed: a class may give copies of inner tensors then, or a plain tensor.
            sizes = torch.Size(ends[index])
            whole = replace(item, dest_offsets=torch.Size([0] * len(sizes)), lengths=sizes)
            with torch.no_grad():
                wholes[index] = whole, planner.resolve_tensor(whole)
        if piece is None:
            check_plain(index.fqn, wholes[index][1])
            continue
        filled[index] = wholes[index]
        reads += _reads(item, *wholes[index], piece, stored)
    return reads, [*filled.values()]


def check_plain(key: str, target: torch.Tensor) -> None:
    """Raises UsageError: a wrapper cannot take a plain tensor of the checkpoint."""
    if is_wrapper(target):
        text = f"{key!r} is a plain tensor in the checkpoint and a {type(target).__qualname__}"
        raise UsageError(
            f"{text} in the state: load into a plain tensor, then convert it", state_key=key
        )


def piece_of(item: ReadItem, pieces: Pieces) -> Piece | None:
    """The piece of a wrapper that ``item`` asks for a region of; None: it asks for another one."""
    index = item.storage_index
    return None if index.offset is None else pieces.get((index.fqn, tuple(index.offset)))


def _reads(
    item: ReadItem,
    whole: ReadItem,
    target: torch.Tensor,
    piece: Piece,
    stored: Mapping[str, TensorStorageMetadata],
) -> list[Read]:
    key, kind, saved = item.dest_index.fqn, piece.kind, piece.kind.tree[0]

    def refusal(text: str) -> UsageError:
        return UsageError(f"{key!r} is a {saved} in the checkpoint, and {text}", state_key=key)

    if not is_wrapper(target) or target.shape != whole.lengths:
        raise refusal(
            f"a {type(target).__qualname__} in the state: load into a {saved}, then convert it"
        )
    mine, tree = flatten(key, target, kind.tree)
    expected = kind._replace(dtype=dtype_name(target.dtype), tree=tree)
    if expected.encode() != kind.encode():
        pairs = zip(_FIELDS, (kind.dtype, *kind.tree), (expected.dtype, *tree), strict=True)
        differing = [
            f"{what} {a!r:.200}, not {b!r:.200}" for what, a, b in pairs if repr(a) != repr(b)
        ]
        raise refusal(f"another one in the state: make it as at the save, {'; '.join(differing)}")
    if mine.keys() != piece.names.keys():
        raise IntegrityError(f"the plan does not have all parts of {key!r}")
    sizes = zip(item.lengths, kind.sizes, target.shape, strict=True)
    dims = [dim for dim, (length, *each) in enumerate(sizes) if length < max(each)]
    try:
        theirs = {path: _empty(stored[name]) for path, name in piece.names.items()}
        into, after = _boxes(target, mine, None, item.dest_offsets, item.lengths, dims)
        at, also = _boxes(target, theirs, kind.tree, item.storage_offsets, item.lengths, dims)
    except CLASS_ERRORS as error:
        raise refusal(
            "was saved in other pieces than the state has, into which its class does not cut it "
            f"({error}): load with the number of ranks and the layout of the save"
        ) from error
    reads = []
    for path, part in mine.items():
        (begin, lengths), (start, same) = into[path], at[path]
        if lengths != same or part.dtype != theirs[path].dtype or after != also:
            raise refusal(
                f"its inner tensor {path!r} is {theirs[path].dtype} {list(same)} there and "
                f"{part.dtype} {list(lengths)} in the state: make the {saved} as at the save (the "
                "size of blocks, for example)"
            )
        request = ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex(str(PartName(key, path, tuple(item.dest_index.offset or ())))),
            torch.Size(begin),
            MetadataIndex(piece.names[path], torch.Size([0] * len(start))),
            torch.Size(start),
            torch.Size(lengths),
        )
        box = part.detach()
        for dim, (first, length) in enumerate(zip(begin, lengths, strict=True)):
            box = box.narrow(dim, first, length)
        reads.append((request, box))
    return reads


def _empty(stored: TensorStorageMetadata) -> torch.Tensor:
    return torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")


def _boxes(
    tensor: torch.Tensor,
    parts: Parts,
    like: Tree | None,
    starts: Sequence[int],
    lengths: Sequence[int],
    dims: Sequence[int],
) -> tuple[dict[str, tuple[Shape, Shape]], Tree | None]:
    """Where a region of a wrapper is in its inner tensors.

    Args:
        tensor: The wrapper of the state.
        parts: Inner tensors, of which only shapes and dtypes count.
        like: Tree with the shapes of the wrapper to be cut; None: those of ``tensor``.
        starts, lengths: The region.
        dims: The dimensions to be cut; none: the region is the whole.

    Returns:
        By path the start and the lengths of a box, and the tree of what was cut out.

    Raises:
        CLASS_ERRORS: The class does not cut it, or not to boxes of the inner tensors.
    """
    empty = {
        path: torch.empty(part.shape, dtype=part.dtype, device="meta")
        for path, part in parts.items()
    }
    if not dims:
        return {path: _box(path, part, part) for path, part in empty.items()}, None
    with torch.no_grad(), _Copies(empty.values()) as copies:
        piece = unflatten(tensor, empty, like)
        if type(piece) is not type(tensor):
            raise TypeError(f"it makes a {type(piece).__qualname__} of its parts")
        whole = tuple(piece.shape) == tuple(lengths)
        for dim in dims:
            piece = piece.narrow(dim, starts[dim], lengths[dim])
        found, tree = flatten("", piece)
    if not whole and all(found[path].shape == part.shape for path, part in empty.items()):
        raise ValueError("none of its inner tensors is cut")
    for path, part in empty.items():
        if copies.origin(found[path]) != _memory(part):
            raise ValueError(f"the inner tensor {path!r} is not cut, but made anew")
    return {path: _box(path, empty[path], found[path]) for path in empty}, tree


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, finds the copies that a class makes of whole tensors.

    Data that a class packs anew may have the shape of the whole. So what a tensor shows is known by
    the operations that made it: views share its memory, and of the others only a copy counts.

    Args:
        wholes: Contiguous, without data.
    """

    def __init__(self, wholes: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wholes = {_memory(each): each for each in wholes}
        self._copies: dict[int, tuple[int, torch.Tensor]] = {}  # kept: memory would be used again

    def origin(self, tensor: torch.Tensor) -> int:
        """The memory that ``tensor`` is a view of, or a view of a copy of, element by element."""
        memory = _memory(tensor)
        return self._copies[memory][0] if memory in self._copies else memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # the class's own method, which calls operations on its parts
        if func._schema.is_mutable:
            raise ValueError(f"it writes to tensors ({func}) when it is cut")
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            whole = self._wholes.get(self.origin(args[0]))
            if whole is not None and _alike(whole, args[0]) and _alike(whole, made):
                self._copies[_memory(made)] = _memory(whole), made
        return made


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether their elements lie alike in their memory."""
    return (one.dtype, one.shape, one.stride(), one.storage_offset()) == (
        other.dtype, other.shape, other.stride(), other.storage_offset(),
    )  # fmt: skip


def _box(path: str, whole: torch.Tensor, part: torch.Tensor) -> tuple[Shape, Shape]:
    """Start and lengths of ``part`` in the inner tensor ``whole`` that it was cut from.

    Args:
        path: For messages.
        whole: Contiguous, from the beginning of its memory.
        part: A view of it, or of a copy that lies alike.

    Raises:
        ValueError: It is no box.
    """
    lengths, left = tuple(part.shape), part.storage_offset()
    start = []
    for stride in whole.stride():
        start.append(left // stride)
        left %= stride
    ends = zip(start, lengths, whole.shape, strict=False)
    if (
        (part.dtype, part.stride()) != (whole.dtype, whole.stride())
        or left
        or part.is_conj()
        or part.is_neg()
        or any(begin + length > size for begin, length, size in ends)
    ):
        raise ValueError(f"the inner tensor {path!r} is not cut to a box of itself")
    return tuple(start), lengths
