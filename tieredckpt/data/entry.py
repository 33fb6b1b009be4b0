"""An entry of the data cache: one batch and the loader's state after it, as a segment.

Its items are the tensors, named by their numbers, and one bytes item: all else as plain data, with
tags that refer to tensors. No pickle. docs/design/010-data-cache.md has the reasons.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tieredckpt import failpoints
from tieredckpt.dcp.state.items import check_kind, checked_layout, dtype_name
from tieredckpt.errors import IntegrityError, UsageError
from tieredckpt.format.digest import BlockDigests, digest
from tieredckpt.format.plain import decode_plain, encode_plain
from tieredckpt.format.segment import (
    TRAILER_BYTES,
    ItemSpec,
    SegmentLayout,
    decode_footer,
    decode_trailer,
    encode_footer,
)
from tieredckpt.storage.file_io import open_regular

VERSION = 1
_BUFFER_BYTES = 1 << 20


class Entry(NamedTuple):
    """One step.

    Attributes:
        before, after: Marks of the loader's state before and after the batch.
        state: That state after it.
        batch: What the loader returned.
    """

    before: bytes
    after: bytes
    state: Any
    batch: Any


def mark_of(state: Any) -> bytes:
    """Identifies the state of a loader.

    Raises:
        UsageError: It holds other things than plain data and tensors; the message names them.
    """

    def content(value: Any) -> tuple[str, Any] | None:
        return (str(value.dtype), value.tolist()) if type(value) is torch.Tensor else None

    return digest(encode_plain({"state": state}, content))


class Encoded(NamedTuple):
    """The items of an entry's segment."""

    layout: SegmentLayout
    tensors: Sequence[torch.Tensor]
    rest: bytes


def encode(entry: Entry) -> Encoded:
    """Lay out an entry.

    Raises:
        UsageError: The batch holds other things than CPU tensors and plain data; the message names
            the type and its place.
    """
    tensors: list[torch.Tensor] = []

    def reference(value: Any) -> tuple[str, Any] | None:
        if type(value) is not torch.Tensor:
            return None
        check_kind("of a batch", value)
        if value.device.type != "cpu" or value.requires_grad:
            raise UsageError(
                "a batch with a tensor on a device, or that requires gradients, cannot be cached: "
                "move batches to the device in the training loop"
            )
        # Contiguous: a rank that reads it again must compute the same bits.
        tensors.append(value.resolve_conj().resolve_neg().contiguous())
        return "tensor", len(tensors) - 1

    rest = encode_plain({"version": VERSION, **entry._asdict()}, reference)
    specs = []
    for number, each in enumerate(tensors):
        shape, dtype = tuple(each.shape), dtype_name(each.dtype)
        start = (0,) * len(shape)
        specs.append(ItemSpec(str(number), "tensor", each.nbytes, dtype, shape, start, shape))
    return Encoded(checked_layout([*specs, ItemSpec("", "bytes", len(rest))]), tensors, rest)


def decode(rest: bytes, tensors: Sequence[torch.Tensor]) -> Entry:
    """The entry with these items. Raises IntegrityError."""
    match decode_plain(rest, extra=lambda _tag, number: tensors[number]):
        case {"version": 1, "before": bytes(before), "after": bytes(after), "state": state,
              "batch": batch}:  # fmt: skip
            return Entry(before, after, state, batch)
    raise IntegrityError("no entry of the data cache that this release can read")


def write(fd: int, encoded: Encoded, segment_id: bytes) -> None:
    """Write the segment to a file, and close it. Raises OSError, as if memory is full."""
    layout = encoded.layout
    flat = [each.reshape(-1).view(torch.uint8).numpy().data for each in encoded.tensors]
    digests, at = BlockDigests(layout.block_bytes), 0
    with open(fd, "wb", buffering=_BUFFER_BYTES) as file:

        def put(piece: memoryview) -> None:
            digests.update(piece)
            file.write(piece)

        for item, source in zip(layout.items, [*flat, memoryview(encoded.rest)], strict=True):
            put(memoryview(bytes(item.offset - at)))
            put(source)
            at = item.offset + item.size_bytes
            failpoints.reach("data.write")
        put(memoryview(bytes(layout.data_bytes - at)))
        file.write(encode_footer(layout, digests.finish(), segment_id))


def read(path: Path, segment_id: bytes) -> Entry:
    """The entry in a file, every block verified.

    Its tensors are the file's pages, mapped privately: they outlive the file's name, and a change
    of them is seen by no other process.

    Raises:
        IntegrityError: Not the segment of this id, or not as it was written.
        OSError: There is no such file, or it cannot be mapped.
    """
    with open(open_regular(path, os.O_RDONLY, "entry"), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size < TRAILER_BYTES:
            raise IntegrityError(f"an entry of {size} bytes")
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        pages = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, protection)
    view = memoryview(pages)
    trailer = decode_trailer(bytes(view[-TRAILER_BYTES:]))
    if (trailer.segment_id, trailer.segment_bytes) != (segment_id, size):
        raise IntegrityError("the segment of another step, or one that is cut off")
    footer = decode_footer(trailer, bytes(view[trailer.index_offset :]))
    for block in range(trailer.num_blocks):
        start, stop = footer.block_range(block)
        if digest(view[start:stop]) != footer.block_digest(block):
            raise IntegrityError(f"block {block} is damaged")
    tensors, rest = [], b""
    for item in footer.items:
        if item.kind == "bytes":
            rest = bytes(view[item.offset : item.offset + item.size_bytes])
            continue
        dtype = getattr(torch, item.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise IntegrityError(f"a tensor of {item.dtype}")
        flat = torch.empty(0, dtype=dtype)
        if count := item.size_bytes // dtype.itemsize:
            flat = torch.frombuffer(pages, dtype=dtype, count=count, offset=item.offset)
        tensors.append(flat.view(item.chunk_sizes))
    return decode(rest, tensors)
