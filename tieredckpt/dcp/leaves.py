"""The tensors in a state dict, in a fixed order, and the same state with other tensors in it.

What a rank would write of a tensor is its *local* tensor: itself, or its shard of a DTensor. A copy
of a state keeps the structure, the types of its containers and each tensor's distribution, so that
a planner makes the same plan of it. What holds no tensor is deep-copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tieredckpt.dcp.copying import check_storage


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a state whose local bytes can be put elsewhere.

    Attributes:
        signature: Equal for two saves if the tensor's place in the state, its kind, dtype and
            shapes are.
        local: The local tensor, plain and strided, on any device.
    """

    signature: tuple[object, ...]
    local: torch.Tensor


def find_leaves(state: Mapping[str, Any]) -> list[Leaf]:
    """The leaves of ``state`` in the order of :func:`rebuild`.

    Raises:
        UsageError: A tensor's storage was freed.
    """
    leaves: list[Leaf] = []

    def visit(path: tuple[object, ...], tensor: torch.Tensor) -> torch.Tensor:
        local = _local_of(tensor)
        if local is not None:
            check_storage(".".join(map(str, path)), local)
            shapes = (tuple(local.shape), tuple(tensor.shape))
            signature = (path, isinstance(tensor, DTensor), local.dtype, *shapes)
            leaves.append(Leaf(signature, local))
        return tensor

    _walk(state, (), visit, copying=False)
    return leaves


def rebuild(state: Mapping[str, Any], locals_: list[torch.Tensor]) -> dict[str, Any]:
    """A copy of ``state`` that has ``locals_`` instead of its leaves' local tensors.

    Tensors that are no leaves (sharded, sparse, quantized ones) are cloned, and everything else is
    deep-copied. What cannot be copied raises what its own copying raises.
    """
    left = iter(locals_)

    def visit(_path: tuple[object, ...], tensor: torch.Tensor) -> torch.Tensor:
        if _local_of(tensor) is None:
            return _cloned(tensor)
        local = next(left)
        if isinstance(tensor, DTensor):
            make: Callable[..., torch.Tensor] = DTensor
            return make(local, tensor._spec, requires_grad=tensor.requires_grad)
        return local.requires_grad_(tensor.requires_grad)

    copied = _walk(state, (), visit, copying=True)
    return dict(copied)


def _local_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What this rank would write of it, if that is a plain tensor with bytes."""
    if isinstance(tensor, ShardedTensor):
        return None
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if hasattr(local, "trigger_wait"):
            local = local.trigger_wait()  # FSDP's way to say that the data is still on its way
        local = local.detach()
    wrapped: bool = is_traceable_wrapper_subclass(local)
    if wrapped or local.layout != torch.strided or local.is_meta or local.is_quantized:
        return None
    return local


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, ShardedTensor):
        return tensor if tensor.is_meta else tensor.detach().clone()
    shards = tensor.local_shards()
    if any(not shard.tensor.is_cpu for shard in shards):
        return tensor.cpu()
    copies = [Shard(shard.tensor.detach().clone(), shard.metadata) for shard in shards]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        copies,
        sharded_tensor_metadata=tensor.metadata(),
        process_group=tensor._process_group,
    )


_Visit = Callable[[tuple[object, ...], torch.Tensor], torch.Tensor]


def _walk(value: Any, path: tuple[object, ...], visit: _Visit, *, copying: bool) -> Any:
    """Visit each tensor in mappings, lists and tuples; if ``copying``, returns the copy."""
    if isinstance(value, torch.Tensor):
        return visit(path, value)
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
