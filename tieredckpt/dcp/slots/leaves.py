"""The tensors of a state in a fixed order, and copies of the state that plan as it does.

A staged state must have the same plan as its original, and each of its write items must be in the
copied memory. DCP plans a plain tensor by its shape, and a DTensor by its placements: those the
copy keeps. Any other plan comes from hooks of a tensor, its class or its local tensor, or from the
attributes of a ``CheckpointableTensor``. Hooks are closures and methods that may return the
original, so none is copied: a :class:`Pieces` has the write items that they gave, and copies of
the pieces that these items name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tieredckpt.dcp.state.items import check_kind, check_storage
from tieredckpt.dcp.state.wrappers import CLASS_ERRORS, flatten, is_wrapper, unflatten
from tieredckpt.errors import TierUnavailableError, UsageError

_HOOKS = ("__create_write_items__", "__get_tensor_shard__")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OF_TORCH = frozenset(("_is_param", "_is_buffer", "persistent"))
"""Attributes that torch.nn sets; no plan depends on them."""
_Path = tuple[object, ...]


@dataclass(slots=True, eq=False)
class Leaf:
    """One tensor of a state whose local bytes can be put elsewhere.

    Attributes:
        signature: Equal for two saves if the tensor's place in the state, its kind, dtype, shapes,
            placements and hooks' plan are. Begins with its path, its name inside a wrapper, its
            shape and that of the whole tensor.
        local: The local tensor, strided, on any device.
        item: For a piece of a tensor that DCP plans by hooks, its write item.
    """

    signature: tuple[Any, ...]
    local: torch.Tensor
    item: WriteItem | None = None


def find_leaves(state: Mapping[str, Any]) -> list[Leaf]:
    """The leaves of ``state``, in a fixed order.

    Raises:
        UsageError: A tensor's storage was freed, or its kind or its plan cannot be saved.
    """
    leaves: list[Leaf] = []

    def visit(path: _Path, tensor: torch.Tensor) -> torch.Tensor:
        name, plain = _name(path), is_plain(tensor)
        if not plain and has_own_plan(tensor):
            for item, piece in _pieces_of(name, tensor):
                check_storage(name, piece)
                leaves.append(Leaf((path, "", *_facts(item)), piece.detach(), item))
            return tensor
        if not plain:  # else it is checked as its own local tensor
            check_kind(name, tensor)
        local = _local_of(tensor)
        if local is not None:
            placements = tensor.placements if isinstance(tensor, DTensor) else None
            kind = None if plain else (type(tensor), type(local), *vars(tensor))
            for inner, part in _parts_of(name, local).items():
                check_storage(f"{name} ({inner})" if inner else name, part)
                shapes = (tuple(part.shape), tuple(tensor.shape))
                leaves.append(Leaf((path, inner, *shapes, placements, kind, part.dtype), part))
        return tensor

    _walk(state, (), visit, copying=False)
    return leaves


def rebuild(
    state: Mapping[str, Any], leaves: Sequence[Leaf], locals_: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """A copy of ``state`` that has ``locals_`` instead of the local tensors of its ``leaves``.

    Tensors that are no leaves (sharded ones) are cloned, and everything else is deep-copied; an
    exception of a value's own copying is passed on.
    """
    placed = _by_path(leaves, locals_)

    def visit(path: _Path, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, ShardedTensor):
            return _cloned(tensor)
        return _copy_of(path, tensor, placed.get(path, []))

    copied = _walk(state, (), visit, copying=True)
    return dict(copied)


def check_plans(state: Mapping[str, Any], leaves: Sequence[Leaf]) -> None:
    """Make sure that a copy of ``state`` would have its plan.

    Plain tensors are copied with all that their plan depends on. Other classes, and tensors with
    attributes, may have more than is known here: they are compared. Nothing is copied.

    Raises:
        UsageError: The copy of a tensor would have another plan; the message names it.
    """
    # As copies are: a copy of a subclass's bytes is a plain tensor.
    placed = _by_path(leaves, [each.local.as_subclass(torch.Tensor) for each in leaves])

    def visit(path: _Path, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, ShardedTensor) or is_plain(tensor):
            return tensor
        name = _name(path)
        try:
            items = planned(name, tensor)
        except CLASS_ERRORS:
            return tensor  # it has no plan; the planner's own error is the one to show
        again = planned(name, _copy_of(path, tensor, placed.get(path, [])))
        if [*map(_facts, items)] != [*map(_facts, again)]:
            raise _not_copied(name, tensor, "its copy would have another plan")
        return tensor

    _walk(state, (), visit, copying=False)


def _not_copied(name: str, tensor: torch.Tensor, why: str) -> UsageError:
    text = f"{name!r}, a {type(tensor).__qualname__}, cannot be saved in the background: {why}. "
    return UsageError(f"{text}Save it with dcp.save, or give its parts", state_key=name)


# --- plans ----------------------------------------------------------------------------------------


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its plan follows from its shape, or from its placements, in any release of torch."""
    if type(tensor) is DTensor:
        return vars(tensor).keys() <= _OF_TORCH and is_plain(tensor._local_tensor)
    return type(tensor) in _PLAIN and (not vars(tensor) or vars(tensor).keys() <= _OF_TORCH)


def has_own_plan(tensor: torch.Tensor) -> bool:
    """Whether DCP plans it by hooks or attributes, and not by its shape or placements."""
    if is_plain(tensor):
        return False
    if isinstance(tensor, DTensor):
        local, kind = tensor._local_tensor, type(tensor)
        return any(
            hasattr(local, each) or each in vars(tensor)
            or getattr(kind, each) is not getattr(DTensor, each)
            for each in _HOOKS
        )  # fmt: skip
    by_attributes = getattr(planner_helpers, "_is_checkpointable_tensor", None)  # of torch 2.14
    hooked = any(hasattr(tensor, each) for each in _HOOKS)
    return hooked or (by_attributes is not None and bool(by_attributes(tensor)))


def planned(name: str, tensor: torch.Tensor) -> list[WriteItem]:
    """The write items that DCP plans for a tensor on this rank.

    Raises:
        CLASS_ERRORS: DCP, or a hook, does not support the tensor.
    """
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return []
    items: list[WriteItem] = planner_helpers._create_write_items(name, tensor)
    return items


def _facts(item: WriteItem) -> tuple[object, ...]:
    """What must not differ between the write item of a tensor and that of its copy."""
    data = item.tensor_data
    if data is None:
        return (item.type, item.index.offset)
    kind, chunk = data.properties, data.chunk
    shapes = (chunk.sizes, data.size, chunk.offsets)
    return (*shapes, item.type, item.index.offset, kind.dtype, kind.layout, kind.requires_grad)


def _name(path: _Path) -> str:
    """As DCP names a tensor at ``path``."""
    return ".".join(map(str, path))


def _pieces_of(name: str, tensor: torch.Tensor) -> list[tuple[WriteItem, torch.Tensor]]:
    """The write items of hooks, each with its piece of the original.

    Raises:
        UsageError: The hooks failed, or their plan and their pieces do not agree.
    """
    try:
        items = planned(name, tensor)
        with torch.no_grad():
            found = [(item, find_tensor_shard(tensor, item.index)) for item in items]
    except (*CLASS_ERRORS, StopIteration) as error:  # a hook is the caller's code
        raise _not_copied(name, tensor, f"its hooks for DCP failed ({error!r})") from error
    for item, piece in found:
        data, shape = item.tensor_data, tuple(piece.shape)
        if data is None or item.index.fqn != name or is_traceable_wrapper_subclass(piece):
            raise _not_copied(name, tensor, "its hooks for DCP plan more than its plain pieces")
        if (shape, piece.dtype) != (tuple(data.chunk.sizes), data.properties.dtype):
            raise _not_copied(name, tensor, "its hooks for DCP give other shapes than they plan")
    places = [item.index.offset for item, piece in found if piece.numel()]
    if len(set(places)) < len(places):
        raise _not_copied(name, tensor, "its hooks for DCP plan two pieces at one place")
    return found


class Pieces(torch.Tensor):
    """Stands for a staged tensor that DCP plans by hooks; on the meta device.

    Attributes:
        key: In the state, for messages.
        items: The write items of the original.
        pieces: A copy of the piece of each.
    """

    key: str
    items: list[WriteItem]
    pieces: list[torch.Tensor]

    def __create_write_items__(self, fqn: str, _tensor: object) -> list[WriteItem]:
        return [replace(each, index=replace(each.index, fqn=fqn)) for each in self.items]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        pairs = zip(self.items, self.pieces, strict=True)
        found = [piece for item, piece in pairs if item.index.offset == index.offset]
        return max(
            found, key=torch.Tensor.numel
        )  # beside one with elements there may be empty ones

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"{self.key!r} is planned by hooks of DCP, and is inside of a value or goes to another "
            "process: use the thread executor and flatten_state_dict=True, or dcp.save",
            state_key=self.key,
        )


# --- copies ---------------------------------------------------------------------------------------

_Placed = Sequence[tuple[Leaf, torch.Tensor]]
"""The leaves of one tensor, each with the copy of its local tensor."""


def _by_path(
    leaves: Sequence[Leaf], locals_: Sequence[torch.Tensor]
) -> dict[_Path, list[tuple[Leaf, torch.Tensor]]]:
    placed: dict[_Path, list[tuple[Leaf, torch.Tensor]]] = {}
    for leaf, local in zip(leaves, locals_, strict=True):
        placed.setdefault(leaf.signature[0], []).append((leaf, local))
    return placed


def _copy_of(path: _Path, tensor: torch.Tensor, placed: _Placed) -> torch.Tensor:
    """A tensor that plans as ``tensor`` does, around copies of its leaves."""
    if has_own_plan(tensor):
        copied = without_data(tensor).as_subclass(Pieces)
        copied.key = _name(path)
        copied.items = [leaf.item for leaf, _ in placed if leaf.item is not None]
        copied.pieces = [local for _, local in placed]
        return copied
    original = _local_of(tensor)
    if is_wrapper(original):
        local = _wrapped(original, {leaf.signature[1]: local for leaf, local in placed})
    else:
        local = placed[0][1]
    if isinstance(tensor, DTensor):
        make: Callable[..., torch.Tensor] = DTensor
        return make(local, tensor._spec, requires_grad=tensor.requires_grad)
    return local.requires_grad_(tensor.requires_grad)


def _parts_of(name: str, local: torch.Tensor) -> dict[str, torch.Tensor]:
    """Its tensors with bytes: the inner ones of a wrapper by path, or itself under ""."""
    return flatten(name, local)[0] if is_wrapper(local) else {"": local.detach()}


def _wrapped(original: Any, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """A wrapper like ``original`` around copies of its inner tensors."""
    if any(isinstance(part, WithoutData) for part in parts.values()):
        parts = {inner: without_data(part) for inner, part in parts.items()}  # all on one device
    made: torch.Tensor = unflatten(original, parts)
    return made


def _local_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that this rank would write of it; None if that is in several shards."""
    if isinstance(tensor, ShardedTensor):
        return None
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if hasattr(local, "trigger_wait"):
            local = local.trigger_wait()  # FSDP: the data is still being transferred
    return local


def _cloned(tensor: ShardedTensor) -> torch.Tensor:
    shards = tensor.local_shards()
    if any(not shard.tensor.is_cpu for shard in shards):
        return tensor.cpu()
    copies = [Shard(shard.tensor.detach().clone(), shard.metadata) for shard in shards]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        copies,
        sharded_tensor_metadata=tensor.metadata(),
        process_group=tensor._process_group,
    )


_Visit = Callable[[_Path, torch.Tensor], torch.Tensor]


def _walk(value: Any, path: _Path, visit: _Visit, *, copying: bool) -> Any:
    """Visit each tensor in mappings, lists and tuples; if ``copying``, returns the copy."""
    if isinstance(value, torch.Tensor):
        try:
            return visit(path, value)
        except (AttributeError, RuntimeError, TypeError) as error:
            name, kind = _name(path), type(value).__qualname__
            text = f"tensor {name!r}, a {kind}, cannot be staged ({error}): save its parts"
            raise UsageError(text, state_key=name) from error
    if isinstance(value, Mapping):
        found = {
            key: _walk(each, (*path, key), visit, copying=copying) for key, each in value.items()
        }
        if not copying or type(value) is dict or not isinstance(value, dict):
            return found
        same: Any = copy.copy(value)  # keeps its type and attributes (OrderedDict, _metadata)
        for key, each in found.items():
            same[key] = each
        return same
    if isinstance(value, list | tuple):
        items = [
            _walk(each, (*path, number), visit, copying=copying)
            for number, each in enumerate(value)
        ]
        if not copying or type(value) is list:
            return items
        if isinstance(value, list):
            same = copy.copy(value)
            same[:] = items
            return same
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return copy.deepcopy(value) if copying else value


class WithoutData(torch.Tensor):
    """A tensor that was left to another rank: on the meta device, and it cannot be pickled.

    Attributes:
        sample: If the tensor is compared with that of other ranks, the digest of its sample.
    """

    sample: bytes | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TierUnavailableError(
            "a tensor that another rank wrote last time is now inside of a value that this one "
            "writes: nothing was committed; the next save stages everything",
            outcome="not_applied",
        )


def without_data(local: torch.Tensor) -> torch.Tensor:
    """The stand-in that is staged for ``local`` if another rank writes it."""
    empty = torch.empty(local.shape, dtype=local.dtype, device="meta")
    made: torch.Tensor = empty.as_subclass(WithoutData)
    return made
