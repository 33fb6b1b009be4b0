"""Load targets that share memory: found before a load, and compared before anything is written.

Blocks arrive in any order, so targets that share elements would end as a mixture of their values in
the checkpoint. These values are first read into separate memory.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.checkpoint.planner import ReadItem
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tieredckpt.dcp.load.tensors import Put, memory_of
from tieredckpt.errors import UsageError
from tieredckpt.format.digest import digest
from tieredckpt.format.parts import parse_part


@dataclass(eq=False, slots=True)
class Piece:
    """The data that one ReadItem asks for."""

    request: ReadItem
    segment: int
    item: int
    target: torch.Tensor
    """The planner's tensor for it; an empty one for a value that is no tensor."""
    into: torch.Tensor
    """Where it is read: the target, or a host tensor in C order if others share its memory."""
    put: Put = torch.Tensor.copy_
    """Copies into it data that is stored in another type."""
    is_part: bool = False
    """Whether the target is an inner tensor of a wrapper."""

    def read_aside(self) -> None:
        """Have it read into separate memory."""
        aside = torch.empty(self.target.shape, dtype=self.target.dtype)
        # With the target's flags: so the bytes are those of the target's memory later.
        aside = aside.conj() if self.target.is_conj() else aside
        self.into = aside._neg_view() if self.target.is_neg() else aside

    @property
    def stop(self) -> int:
        """Address behind the last element of the target.

        Raises:
            UsageError: Elements of the target share memory, as those of an expanded tensor do.
        """
        extent = 1
        for stride, count in sorted(zip(self.target.stride(), self.target.shape, strict=True)):
            if count > 1 and stride < extent:
                raise _refusal(self)
            extent += stride * (count - 1)
        return self.target.data_ptr() + extent * self.target.itemsize

    def elements(self, move: int = 0) -> np.ndarray:
        """The target's elements without their type, as if they were ``move`` bytes further."""
        size, start = self.target.itemsize, self.target.data_ptr()
        memory = (ctypes.c_char * (self.stop - start)).from_address(start + move)
        strides = [stride * size for stride in self.target.stride()]
        return np.ndarray(self.target.shape, f"V{size}", memoryview(memory), 0, strides)


def sharing(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Groups of pieces, each of which has elements of its target in common with another one.

    Raises:
        UsageError: Elements of a single target share memory.
    """
    groups: list[dict[Piece, None]] = []
    active: list[tuple[int, Piece]] = []
    plain = [piece for piece in pieces if _is_plain(piece.target)]
    for piece in sorted(plain, key=lambda p: (str(p.target.device), p.target.data_ptr())):
        device, start = piece.target.device, piece.target.data_ptr()
        active = [each for each in active if each[1].target.device == device and each[0] > start]
        if not active:
            groups.append({})
        for _, other in active:
            if _overlap(piece, other):
                groups[-1] |= {other: None, piece: None}
        active.append((piece.stop, piece))
    return [list(group) for group in groups if group]


def _overlap(one: Piece, other: Piece) -> bool:
    """Whether the targets have elements in common; columns of one matrix, interleaved, do not."""
    if one.request.dest_index == other.request.dest_index:  # boxes of one tensor
        first, second = one.request, other.request
        edges = zip(first.dest_offsets, second.dest_offsets, first.lengths, second.lengths,
                    strict=True)  # fmt: skip
        return all(a < b + size and b < a + own for a, b, own, size in edges)
    return np.shares_memory(one.elements(), other.elements())


def storages_of(value: object) -> set[int]:
    """Addresses of the storages that a tensor's elements are in; of a wrapper's parts if it is one.

    Empty for anything but a dense tensor.
    """
    if not isinstance(value, torch.Tensor) or is_lazy(value):
        return set()
    if is_traceable_wrapper_subclass(value):
        return set().union(*(storages_of(getattr(value, n)) for n in value.__tensor_flatten__()[0]))
    return {value.untyped_storage().data_ptr()} if _is_plain(value) else set()


def _is_plain(tensor: torch.Tensor) -> bool:
    # A wrapper subclass or another layout has no memory of its own, an empty tensor needs none.
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return plain and tensor.layout is torch.strided and bool(tensor.numel() and tensor.data_ptr())


def agreed(group: Sequence[Piece]) -> list[Piece]:
    """The pieces of a group, which was read aside; of pieces with the same target only one.

    Raises:
        UsageError: The checkpoint has different values for memory that their targets share.
    """
    found: dict[object, Piece] = {}
    for piece in group:
        tensor = piece.target
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.itemsize)
        same = found.setdefault(place, piece)
        if digest(memory_of(same.into)) != digest(memory_of(piece.into)):
            raise _refusal(same, piece)
    pieces = list(found.values())
    if len(pieces) == 1:  # tied weights
        return pieces
    low = min(each.target.data_ptr() for each in pieces)
    image = np.empty(max(each.stop for each in pieces) - low, np.uint8)
    views = {each: each.elements(image.ctypes.data - low) for each in pieces}

    def put(*given: Piece) -> None:
        for each in given:
            view = views[each]
            view[...] = np.ndarray(view.shape, view.dtype, memory_of(each.into))

    def spoilt(piece: Piece) -> bool:
        return digest(np.ascontiguousarray(views[piece]).data) != digest(memory_of(piece.into))

    put(*pieces)
    for one, other in itertools.product(filter(spoilt, pieces), pieces):
        put(one, other)
        if spoilt(one):
            raise _refusal(one, other)
    return pieces


def _refusal(*pieces: Piece) -> UsageError:
    names = {piece.request.dest_index.fqn for piece in pieces}
    parts = [(name, parse_part(name)) for name in names]
    keys = sorted(f"{part.key} ({part.path})" if part else name for name, part in parts)
    if len(names) == 1 and (part := parts[0][1]) is not None:
        return UsageError(
            f"{part.key!r} was saved in several pieces, whose inner tensors {part.path!r} differ: "
            "the state has one for all of them, so load with the number of ranks and the layout of "
            "the save",
            state_key=part.key,
        )
    return UsageError(
        f"elements of {' and '.join(map(repr, keys))} share memory, and the checkpoint has a value "
        "for each of them: give every tensor memory of its own (weights that are tied now were not "
        "tied at the save; an expanded tensor needs a clone)",
        keys=keys,
    )
