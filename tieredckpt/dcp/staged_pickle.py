"""A staged state as bytes for another process of this host, its tensors by reference.

Torch's own way sends each storage by a descriptor of its own, and copies into shared memory what
does not lie there yet, by which tensors in a slot would cease to lie in the slot. Here a tensor in
the slot is sent as its place, and all others together in one piece of shared memory. What is not
plain memory (sparse tensors, accelerators, empty ones) goes torch's way.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Collection
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch

from tieredckpt.dcp.copying import goes_by_bytes
from tieredckpt.dcp.stager import WithoutData, without_data
from tieredckpt.dcp.staging import WritableSlot
from tieredckpt.errors import ProtocolError, TieredCkptError

_ALIGNMENT = 64

_Ref = tuple[str, int, torch.dtype, torch.Size, bool]
"""Where it lies: "slot", "shared" or "nowhere"; offset, dtype, shape, whether it requires grad."""

Shared = tuple[Any, int]
"""Shared memory on its way: a descriptor, to be detached, and the size."""


class _Pickler(ForkingPickler):
    def __init__(self, file: io.BytesIO, slot: WritableSlot | None) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._slot = slot
        self.shared: list[tuple[int, torch.Tensor]] = []
        """What goes into shared memory, and where; this also keeps ids from being used again."""
        self.shared_bytes = 0
        self._refs: dict[int, _Ref] = {}

    def persistent_id(self, obj: Any) -> _Ref | None:
        if type(obj) is WithoutData:
            return ("nowhere", 0, obj.dtype, obj.shape, False)
        if type(obj) is not torch.Tensor:
            return None
        known = self._refs.get(id(obj))
        if known is not None or not (goes_by_bytes(obj) and obj.numel()) or obj.is_quantized:
            return known
        where, offset = "slot", self._offset_in_slot(obj)
        if offset is None:
            where, offset = "shared", self.shared_bytes
            self.shared.append((offset, obj))
            self.shared_bytes += -(-obj.nbytes // _ALIGNMENT) * _ALIGNMENT
            self._refs[id(obj)] = (where, offset, obj.dtype, obj.shape, obj.requires_grad)
        return (where, offset, obj.dtype, obj.shape, obj.requires_grad)

    def _offset_in_slot(self, tensor: torch.Tensor) -> int | None:
        if self._slot is None:
            return None
        offset = tensor.data_ptr() - self._slot.address
        return offset if 0 <= offset <= self._slot.capacity_bytes - tensor.nbytes else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, memories: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._memories = memories

    def persistent_load(self, ref: _Ref) -> torch.Tensor:
        where, offset, dtype, shape, requires_grad = ref
        if where == "nowhere":
            return without_data(torch.empty(shape, dtype=dtype, device="meta"))
        memory = self._memories[where]
        if memory is None:
            raise ProtocolError(f"a tensor lies in {where}, which was not sent")
        size = shape.numel() * dtype.itemsize
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
        return flat.view(dtype).view(shape).requires_grad_(requires_grad)


def dumps(
    value: Any, slot: WritableSlot | None, expendable: Collection[torch.Tensor]
) -> tuple[bytes, Shared | None]:
    """``value`` for :func:`loads`.

    Args:
        value: Anything that pickles. The slot must stay as it is until it is used no more.
        slot: Where some of its tensors lie.
        expendable: Tensors in it whose memory is freed as soon as it is copied.

    Returns:
        The bytes, and the shared memory; None: there is none.

    Raises:
        OSError: There is no room for the shared memory.
        Exception: What pickling raises.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, slot)
    pickler.dump(value)
    if not pickler.shared_bytes:
        return file.getvalue(), None
    mine = {id(each) for each in expendable}
    fd = os.memfd_create("tieredckpt-staged", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, pickler.shared_bytes)  # or writing to it could be SIGBUS
        memory = mmap.mmap(fd, pickler.shared_bytes)
        for offset, tensor in pickler.shared:
            target = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.nbytes, offset=offset)
            with torch.no_grad():
                target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            if id(tensor) in mine:
                tensor.untyped_storage().resize_(0)
        return file.getvalue(), (DupFd(fd), pickler.shared_bytes)
    finally:
        os.close(fd)


def map_shared(shared: Shared | None) -> mmap.mmap | None:
    """The shared memory of :func:`dumps` in another process."""
    if shared is None:
        return None
    fd = shared[0].detach()
    try:
        return mmap.mmap(fd, shared[1])
    finally:
        os.close(fd)


def loads(data: bytes, slot: WritableSlot | None, shared: mmap.mmap | None) -> Any:
    """The value of :func:`dumps` in another process; its tensors lie where they lay there.

    Args:
        data: From a process that is trusted: it is unpickled.
        slot: The same slot, as it is mapped here.
        shared: Of :func:`map_shared`.
    """
    memories = {"slot": slot.view if slot is not None else None, "shared": shared}
    return _Unpickler(data, memories).load()


def portable(error: Exception) -> Exception:
    """``error``, or its text if another process could not unpickle it."""
    if isinstance(error, TieredCkptError) or type(error).__module__ == "builtins":
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301  (what was pickled just now)
        except (pickle.PickleError, TypeError, AttributeError):
            pass
        else:
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")
