"""The copy-and-digest pass: tensors into a slot, each block digested while it is in the cache.

The digest is computed of the slot's bytes, not of the tensor's, so the sealed bytes match it even
if a tensor changes while it is copied. Contiguous CPU tensors are copied as bytes, block by block,
by all threads of a :class:`CopyPool`. Others (strided, conjugate views, other devices) are copied
by torch beforehand, item by item, and then only digested.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from tieredckpt import failpoints
from tieredckpt.dcp.state.items import check_storage, dtype_name
from tieredckpt.errors import UsageError
from tieredckpt.format.digest import DIGEST_BYTES, BlockDigests
from tieredckpt.format.segment import encode_footer
from tieredckpt.storage.file_io import CopyPool
from tieredckpt.storage.memory.mapping import (
    SMALL_COPY_BYTES,
    address_of,
    copy_large,
    copy_small,
    fill_small,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tieredckpt.dcp.slots.slot_ring import WritableSlot
    from tieredckpt.format.segment import Item, SegmentLayout

PIECE_BYTES = 512 << 10
"""Copied, then digested: must fit a core's L2 cache (1 MiB here). Measured on the 2-core EPYC,
one thread, GB/s: 128 KiB 8.9, 256 KiB 9.1, 512 KiB 9.5, 1 MiB 9.6 with outliers; memcpy 14.3."""

UNIT_BYTES = 4 << 20
"""A thread copies this many bytes at once, of any number of blocks."""

COPY_THREADS_MAX = 4
"""More threads only fight for memory bandwidth."""

_IN_PLACE = -1
_ZEROS = -2
_Run = tuple[int, int, int]
"""Start and stop in the segment, and the source: an address, or one of the two constants."""

# Of the same size, and torch can copy them whatever their strides; it cannot copy each float8.
_PLAIN_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def default_copy_threads(local_world_size: int) -> int:
    """Threads for one of ``local_world_size`` ranks that share this host's cores."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(COPY_THREADS_MAX, cores // max(1, local_world_size)))


def write_segment(
    slot: WritableSlot,
    layout: SegmentLayout,
    tensors: Sequence[torch.Tensor],
    blobs: Sequence[Buffer],
    pool: CopyPool,
) -> bytes:
    """Fill ``slot``: all items, the padding between them, the footer. Blocks; uses all of ``pool``.

    Args:
        slot: Locked by the caller; afterwards its first ``layout.segment_bytes`` bytes are the
            segment ``slot.segment_id``.
        layout: Offset of each item.
        tensors: One per tensor item, in order: any device, strides, subclass. They must not be
            changed meanwhile: the segment would be intact, but torn. A tensor in the slot must
            have exactly the address of its item (see :func:`outside`).
        blobs: One per bytes item, in order.
        pool: Threads to use.

    Returns:
        The root digest, 16 bytes.

    Raises:
        UsageError: The segment does not fit the slot, or a tensor does not match its item
            (size, dtype, a layout that has no bytes). The slot's contents are undefined.
    """
    if layout.segment_bytes > slot.capacity_bytes:
        raise UsageError(
            f"a segment of {layout.segment_bytes} bytes does not fit its slot of "
            f"{slot.capacity_bytes}"
        )
    sources: list[int] = []
    kept: list[object] = []  # owners of the memory at these addresses
    by_torch: list[tuple[Item, torch.Tensor]] = []
    values: list[torch.Tensor | Buffer] = [*tensors, *blobs]
    for item, value in zip(layout.items, values, strict=True):
        if isinstance(value, torch.Tensor):
            tensor = _checked(item, value)
            if not goes_by_bytes(tensor):
                sources.append(_IN_PLACE)
                by_torch.append((item, tensor))
            elif tensor.data_ptr() == slot.address + item.offset:
                sources.append(_IN_PLACE)  # it was staged there
            else:
                sources.append(tensor.data_ptr())
                kept.append(tensor)
        else:
            blob = memoryview(value).cast("B")
            _check_size(item, blob.nbytes)
            sources.append(address_of(blob))
            kept.append(blob)
    if by_torch:
        _copy_by_torch(slot, by_torch)
    digests = _fill(slot, _runs(layout, sources), layout, pool)
    footer = encode_footer(layout, digests, bytes.fromhex(slot.segment_id))
    slot.view[layout.data_bytes : layout.data_bytes + len(footer)] = footer
    return footer[-DIGEST_BYTES:]


def _checked(item: Item, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    check_storage(item.name, tensor)
    _check_size(item, tensor.nbytes)
    if dtype_name(tensor.dtype) != item.dtype:
        raise UsageError(f"tensor {item.name!r} is {tensor.dtype} and its item {item.dtype}")
    return tensor


def _check_size(item: Item, size_bytes: int) -> None:
    if size_bytes != item.size_bytes:
        raise UsageError(
            f"{item.kind} item {item.name!r} was laid out with {item.size_bytes} bytes and now "
            f"has {size_bytes}"
        )


def goes_by_bytes(tensor: torch.Tensor) -> bool:
    """Whether its bytes are its elements in C order, in this process's memory."""
    # A subclass may have no memory of its own, or not in this order: torch copies those.
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def place_tensors(
    slot: WritableSlot, placed: Sequence[tuple[int, torch.Tensor]], pool: CopyPool
) -> list[torch.Tensor]:
    """Copy tensors to their offsets in ``slot``; nothing is digested. Uses all of ``pool``.

    Args:
        slot: Locked by the caller, and large enough.
        placed: Pairs of an offset and a tensor, of any device and strides.
        pool: Threads to use.

    Returns:
        The copies, in the slot's memory; each has a storage of its own, which keeps the slot
        mapped.
    """
    copies: list[torch.Tensor] = []
    runs: list[tuple[int, int, int]] = []
    for offset, tensor in placed:
        if not tensor.numel():
            copies.append(torch.empty(tensor.shape, dtype=tensor.dtype))
            continue
        size = tensor.nbytes
        flat = torch.frombuffer(slot.view, dtype=torch.uint8, count=size, offset=offset)
        copies.append(flat.view(tensor.dtype).view(tensor.shape))
        if not goes_by_bytes(tensor):
            with torch.no_grad():
                copies[-1].copy_(tensor)
            continue
        source, target = tensor.data_ptr(), slot.address + offset
        runs += [
            (target + start, source + start, min(UNIT_BYTES, size - start))
            for start in range(0, size, UNIT_BYTES)
        ]

    batches = _batches(runs)

    def copy(number: int) -> None:
        failpoints.reach("save.stage.copy")
        for target, source, size in batches[number]:
            (copy_small if size < SMALL_COPY_BYTES else copy_large)(target, source, size)

    pool.run(copy, len(batches))
    return copies


def _batches(runs: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Runs in order, together of about a unit each: a call per small tensor would cost more."""
    batches: list[list[tuple[int, int, int]]] = []
    left = 0
    for run in runs:
        if run[2] > left:
            batches.append([])
            left = UNIT_BYTES
        batches[-1].append(run)
        left -= run[2]
    return batches


def outside(
    slot: WritableSlot, items: Sequence[Item] | None, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Copy those of ``tensors`` whose memory is in ``slot``, but not at their item's offset.

    Data that is written into a slot must not be read from another place in it, which may be
    overwritten before.

    Args:
        slot: May have some of them.
        items: Their items in it, one per tensor and maybe more; None: they are written elsewhere.
        tensors: In the order of the items.
    """
    found = list(tensors)
    for number, tensor in enumerate(tensors):
        if not tensor.numel() or not tensor.is_cpu:
            continue
        storage = tensor.untyped_storage()
        offset = storage.data_ptr() - slot.address
        if not -storage.nbytes() < offset < slot.capacity_bytes:
            continue
        place = slot.address + items[number].offset if items is not None else -1
        if not goes_by_bytes(tensor) or tensor.data_ptr() != place:
            found[number] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return found


def _copy_by_torch(slot: WritableSlot, copied: list[tuple[Item, torch.Tensor]]) -> None:
    memory = torch.frombuffer(slot.view, dtype=torch.uint8)
    with torch.no_grad():
        for item, tensor in copied:
            if not item.size_bytes:
                continue
            flat = memory[item.offset : item.offset + item.size_bytes]
            plain = _PLAIN_DTYPES.get(tensor.dtype.itemsize)
            source = tensor.detach()
            if type(source) is torch.Tensor and plain and not (source.is_conj() or source.is_neg()):
                source = source.view(plain)
            flat.view(source.dtype).view(source.shape).copy_(source)


def _runs(layout: SegmentLayout, sources: list[int]) -> list[_Run]:
    """The data without a gap: items, and zeros between them."""
    runs: list[_Run] = []
    end = 0
    for item, source in zip(layout.items, sources, strict=True):
        size = item.size_bytes
        if not size:
            continue
        start = item.offset
        if start > end:
            runs.append((end, start, _ZEROS))
        end = start + size
        runs.append((start, end, source))
    if layout.data_bytes > end:
        runs.append((end, layout.data_bytes, _ZEROS))
    return runs


def _fill(slot: WritableSlot, runs: list[_Run], layout: SegmentLayout, pool: CopyPool) -> bytes:
    """One pass over the slot; the digest table. Blocks are independent: any thread fills any."""
    view, address = slot.view, slot.address
    data_bytes, block_bytes = layout.data_bytes, layout.block_bytes
    starts = [run[0] for run in runs]
    unit_bytes = block_bytes * max(1, UNIT_BYTES // block_bytes)
    found = [b""] * -(-data_bytes // unit_bytes)

    def fill(unit: int) -> None:
        failpoints.reach("save.copy")
        at = unit * unit_bytes
        unit_stop = min(at + unit_bytes, data_bytes)
        digested = at
        digests = BlockDigests(block_bytes)
        number = bisect_right(starts, at) - 1
        while at < unit_stop:
            run_start, run_stop, source = runs[number]
            number += 1
            stop = min(run_stop, unit_stop)
            while at < stop:
                # Never more than a piece between copy and digest: it must still be in the cache.
                size = min(stop, digested + PIECE_BYTES) - at
                if source > _IN_PLACE:
                    copy = copy_small if size < SMALL_COPY_BYTES else copy_large
                    copy(address + at, source + at - run_start, size)
                elif source == _ZEROS:
                    fill_small(address + at, 0, size)
                at += size
                if at - digested == PIECE_BYTES:
                    digests.update(view[digested:at])
                    digested = at
        if at > digested:
            digests.update(view[digested:at])
        found[unit] = digests.finish()

    pool.run(fill, len(found))
    return b"".join(found)
