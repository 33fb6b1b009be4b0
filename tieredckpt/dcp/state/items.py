"""From DCP's write items to a segment's items, with a check of values against their plan."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tieredckpt.dcp.state.wrappers import CLASS_ERRORS, flatten, is_wrapper
from tieredckpt.errors import TieredCkptError, TierUnavailableError, UsageError
from tieredckpt.format.parts import MARK, Kind, PartName
from tieredckpt.format.segment import (
    ItemSpec,
    SegmentLayout,
    choose_block_bytes,
    lay_out,
    structure_digest,
)

_TEXT_CHARS_MAX = 500  # of a message that may quote a key

_BELOW_A_BYTE = {
    each
    for name, each in vars(torch).items()
    if isinstance(each, torch.dtype) and re.fullmatch(r"u?int[1-7]|bits\w+", name)
}


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name of ``dtype`` without the ``torch.``, as in the format."""
    return str(dtype).removeprefix("torch.")


def check_kind(name: str, tensor: torch.Tensor) -> None:
    """Make sure that a tensor is of a kind that can be saved or loaded into.

    Torch's own error would not name the tensor.

    Raises:
        UsageError: It is not; the message names it, and the remedy.
    """
    why = ""
    if isinstance(tensor, ShardedTensor):
        return  # it has none of the attributes below
    if is_lazy(tensor):
        why = "has no shape yet: run the lazy module that it belongs to once before"
    elif tensor.is_meta:
        why = "is on the meta device: it has no data"
    elif tensor.is_nested or tensor.layout is not torch.strided:
        why = f"is nested or not dense (its layout is {tensor.layout}): give its parts"
    elif tensor.is_quantized or tensor.dtype in _BELOW_A_BYTE:
        why = f"is of {tensor.dtype}, which torch cannot copy: give its integers, or its bytes"
    if why:
        raise UsageError(f"tensor {name!r} {why}", state_key=name)


def check_storage(name: str, tensor: torch.Tensor) -> None:
    """Make sure that a tensor can be saved, and that its storage has all of its elements.

    FSDP1 and ZeRO free a parameter by resizing its storage to nothing, but keep shape and strides;
    a read would access foreign memory.

    Raises:
        UsageError: It has not, or as :func:`check_kind`.
    """
    check_kind(name, tensor)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel():
        return
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize
    there = tensor.untyped_storage().nbytes()
    if needed > there:
        raise UsageError(
            f"tensor {name!r} needs {needed} bytes of storage and has {there}: it was freed or "
            "resized (as FSDP1 and ZeRO do between uses); gather it, or leave it out of the state",
            state_key=name,
        )


def tensors_first(items: Sequence[WriteItem]) -> tuple[list[WriteItem], list[WriteItem]]:
    """Tensor items and bytes items, each in their order: that of the items in the segment."""
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    blobs = [item for item in items if item.type == WriteItemType.BYTE_IO]
    return tensors, blobs


def tensor_spec(item: WriteItem) -> ItemSpec:
    """The planned spec of a tensor's piece. Raises UsageError if the plan has no shape for it."""
    data = item.tensor_data
    name = item.index.fqn
    if data is None or data.chunk is None:
        raise UsageError(f"the planner gave no shape for {name!r}", state_key=name)
    dtype = data.properties.dtype
    sizes = tuple(data.chunk.sizes)
    return ItemSpec(
        name,
        "tensor",
        math.prod(sizes) * dtype.itemsize,
        dtype_name(dtype),
        tuple(data.size),
        tuple(data.chunk.offsets),
        sizes,
    )


def blob_spec(item: WriteItem, size_bytes: int) -> ItemSpec:
    """The spec of a bytes item."""
    return ItemSpec(item.index.fqn, "bytes", size_bytes, "", (), (), ())


def planned_layout(items: Sequence[WriteItem]) -> SegmentLayout:
    """How a rank lays out these items, bytes items taken as empty: same structure digest."""
    tensors, blobs = tensors_first(items)
    return checked_layout([*map(tensor_spec, tensors), *(blob_spec(item, 0) for item in blobs)])


class LayoutCache:
    """The layout of a stream's last segment, reused while its items are unchanged."""

    def __init__(self) -> None:
        self._specs: Sequence[ItemSpec] = ()
        self._known: tuple[SegmentLayout, bytes] | None = None

    def lay_out(self, specs: Sequence[ItemSpec]) -> tuple[SegmentLayout, bytes]:
        """The layout and its structure digest. Raises UsageError as :func:`checked_layout`."""
        if self._known is None or specs != self._specs:
            layout = checked_layout(specs)
            self._known = layout, structure_digest(layout.items)
            self._specs = specs
        return self._known


def checked_layout(specs: Sequence[ItemSpec]) -> SegmentLayout:
    """Lay out ``specs``. Raises UsageError if the format does not allow them."""
    try:
        return lay_out(specs, choose_block_bytes(specs))
    except ValueError as error:
        raise UsageError(f"this state cannot be saved: {str(error)[:_TEXT_CHARS_MAX]}") from error


def resolve_all(
    planner: SavePlanner, items: Sequence[WriteItem], *, left_out: bool = False
) -> tuple[list[ItemSpec], list[torch.Tensor], list[memoryview]]:
    """Resolve all items of a segment, in its order: tensors, then bytes. A wrapper is its parts.

    Args:
        planner: Gives the values.
        items: Of the plan.
        left_out: Some tensors were staged without data, since other ranks wrote them last time.

    Returns:
        The specs of all, the tensors, and the bytes items.

    Raises:
        TierUnavailableError, UsageError: As :func:`resolve_tensor` and :func:`resolve_blob`.
    """
    for name in (item.index.fqn for item in items):
        if MARK in name:
            text = f"the key {name!r} has {MARK!r} in it, which is kept for parts of wrappers"
            raise UsageError(text, state_key=name)
    tensor_items, blob_items = tensors_first(items)
    specs, tensors = [], []
    for item in tensor_items:
        for spec, value in _planned(planner, item):
            specs.append(spec)
            tensors.append(resolve_tensor(value, spec, left_out=left_out))
    blobs = [resolve_blob(planner, item) for item in blob_items]
    specs += [blob_spec(item, len(blob)) for item, blob in zip(blob_items, blobs, strict=True)]
    return specs, tensors, blobs


def _planned(planner: SavePlanner, item: WriteItem) -> list[tuple[ItemSpec, torch.Tensor]]:
    """The planner's tensor for ``item`` with its spec; of a wrapper its parts, with theirs.

    Raises:
        UsageError: It is no tensor, or a wrapper that cannot be described.
    """
    spec, name = tensor_spec(item), item.index.fqn
    with torch.no_grad():  # or a DTensor gives a view of its tensor, which may lose its dtype
        value = planner.resolve_data(item)
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{name!r} was planned as a tensor, but is a {type(value).__name__}")
    if hasattr(value, "trigger_wait"):
        # An AsyncCollectiveTensor of FSDP: the data is still being transferred.
        value = value.trigger_wait()
    if not is_wrapper(value):
        return [(spec, value)]
    try:
        parts, tree = flatten(name, value)
    except CLASS_ERRORS as error:
        if isinstance(error, TieredCkptError):
            raise
        text = f"{name!r}, a {type(value).__qualname__}, cannot be flattened: {error}"
        raise UsageError(text, state_key=name) from error
    if tree[1] != spec.chunk_sizes:
        raise _other_than_planned(spec, value)
    kind = Kind(dtype_name(value.dtype), spec.global_shape, tree).encode()
    found: list[tuple[ItemSpec, torch.Tensor]] = []
    for path, part in parts.items():
        own = str(PartName(name, path, spec.chunk_offsets, b"" if found else kind))
        shape = tuple(part.shape)
        zeros = (0,) * len(shape)
        dtype = dtype_name(part.dtype)
        found.append((ItemSpec(own, "tensor", part.nbytes, dtype, shape, zeros, shape), part))
    return found


def resolve_tensor(value: torch.Tensor, spec: ItemSpec, *, left_out: bool = False) -> torch.Tensor:
    """The tensor to write for ``spec``: plain, strided, of the planned dtype and shape.

    ``left_out``: some tensors were staged without data, since other ranks wrote them last time.

    Raises:
        TierUnavailableError: It is one of those that were left out.
        UsageError: It is anything else; the message has its name, the plan and the value.
    """
    name, tensor = spec.name, value.detach()
    if type(tensor) is not torch.Tensor:
        tensor = _plain_tensor(tensor, name)
    if dtype_name(tensor.dtype) != spec.dtype or tuple(tensor.shape) != spec.chunk_sizes:
        raise _other_than_planned(spec, tensor)
    if tensor.is_meta and left_out:
        raise TierUnavailableError(
            f"{name!r} was not staged on this rank, because the last save's plan gave it to "
            "another one, and this plan does not (the state has changed on some rank): nothing "
            "was committed; the next save stages everything",
            outcome="not_applied",
        )
    check_kind(name, tensor)
    return tensor


def _other_than_planned(spec: ItemSpec, tensor: torch.Tensor) -> UsageError:
    actual = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
    planned = f"{spec.dtype} {list(spec.chunk_sizes)}"
    return UsageError(
        f"{spec.name!r} was planned as {planned}, but is {actual}: DCP's plan caching does not "
        "detect a changed dtype (use a planner without it after a change), and a planner that "
        "casts must plan what it writes",
        state_key=spec.name,
        planned=planned,
        actual=actual,
    )


def _plain_tensor(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if is_traceable_wrapper_subclass(tensor):
        raise UsageError(
            f"{name!r} is a {type(tensor).__qualname__}, whose bytes are in other tensors: save "
            "those (its flattened parts), or use a planner that does",
            state_key=name,
        )
    return tensor.as_subclass(torch.Tensor)


def resolve_blob(planner: SavePlanner, item: WriteItem) -> memoryview:
    """The bytes to write for ``item``. Raises UsageError if the planner gives anything else."""
    value = planner.resolve_data(item)
    if not hasattr(value, "getvalue"):
        raise UsageError(
            f"{item.index.fqn!r} was planned as bytes, but is a {type(value).__name__}",
            state_key=item.index.fqn,
        )
    return memoryview(value.getvalue())  # whose views may outlive the stream, in an error
