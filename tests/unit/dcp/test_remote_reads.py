"""Tensors of any kind filled from other hosts: what one rank reads of one segment, over TCP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.donors import Donors, donors_of
from tieredckpt.dcp.load.tensors import Region, SegmentReads, memory_of
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import SegmentRef
from tieredckpt.format.segment import (
    TRAILER_BYTES,
    ItemSpec,
    decode_trailer,
    encode_footer,
    lay_out,
)

BLOCK = 64 << 10
SHAPE = (300, 401)
STORED = torch.arange(300 * 401, dtype=torch.float32).reshape(SHAPE) / 7
SMALL = [torch.arange(n, dtype=torch.float32) + n for n in range(1, 60)]


def segment_of(tensors: list[torch.Tensor]) -> tuple[SegmentRef, bytes, list[int]]:
    """A segment that holds these tensors' bytes, and where each begins."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    specs = [ItemSpec(f"t{n}", "bytes", s, "", (), (), ()) for n, s in enumerate(sizes)]
    layout = lay_out(specs, BLOCK)
    data = bytearray(layout.data_bytes)
    offsets = [item.offset for item in layout.items]
    for offset, size, tensor in zip(offsets, sizes, tensors, strict=True):
        data[offset : offset + size] = bytes(memory_of(tensor.contiguous()))
    digests = b"".join(digest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
    segment_id = bytes(range(16))
    segment = bytes(data) + encode_footer(layout, digests, segment_id)
    root = decode_trailer(segment[-TRAILER_BYTES:]).root.hex()
    return SegmentRef(segment_id.hex(), len(segment), root, "b"), segment, offsets


REF, SEGMENT, OFFSETS = segment_of([STORED, *SMALL])


@pytest.fixture
def world() -> Iterator[Donors]:
    with donors_of(REF, SEGMENT) as found:
        for host in "bc":
            found.add(host).flip(REF.id, OFFSETS[0] + (3 if host == "b" else 5) * BLOCK)
        yield found


def read(world: Donors, region: Region, target: torch.Tensor) -> None:
    done = []
    with world.fetcher() as fetcher:
        reads = SegmentReads(fetcher)
        reads.add_tensor(OFFSETS[0], region, torch.float32, target, lambda: done.append(1))
        reads.run()
    assert done == [1]


WHOLE = Region(SHAPE, (0, 0), SHAPE, 4)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(torch.zeros(SHAPE), id="straight into the tensor"),
        pytest.param(torch.zeros(SHAPE, dtype=torch.float64), id="another dtype"),
        pytest.param(torch.zeros(401, 300).t(), id="strides"),
        pytest.param(torch.zeros(600, 802)[::2, 1::2], id="a view with gaps"),
    ],
)
def test_destinations(world: Donors, target: torch.Tensor):
    read(world, WHOLE, target)
    assert torch.equal(target, STORED.to(target.dtype))


@pytest.mark.parametrize(
    ("starts", "lengths"),
    [
        ((0, 0), (300, 401)),
        ((17, 0), (211, 401)),
        ((0, 3), (300, 1)),
        ((5, 7), (290, 300)),
        ((299, 400), (1, 1)),
        ((10, 10), (0, 5)),
    ],
)
def test_slices(world: Donors, starts: tuple[int, int], lengths: tuple[int, int]):
    target = torch.zeros(lengths)
    read(world, Region(SHAPE, starts, lengths, 4), target)
    rows, columns = (slice(s, s + n) for s, n in zip(starts, lengths, strict=True))
    assert torch.equal(target, STORED[rows, columns])


def test_many_small_tensors(world: Donors):
    """More of them in a block than are received one by one."""
    targets = [torch.zeros_like(tensor) for tensor in SMALL]
    blob = bytearray(STORED.numel() * 4)
    done: list[int] = []
    with world.fetcher() as fetcher:
        reads = SegmentReads(fetcher)
        for number, (target, offset) in enumerate(zip(targets, OFFSETS[1:], strict=True)):
            region = Region(tuple(target.shape), (0,), tuple(target.shape), 4)
            reads.add_tensor(
                offset, region, torch.float32, target, lambda number=number: done.append(number)
            )
        reads.add_bytes(OFFSETS[0], blob, lambda: done.append(-1))
        reads.run()
        assert sum(fetcher.report.bytes_by_place.values()) >= len(blob)
    assert all(torch.equal(a, b) for a, b in zip(targets, SMALL, strict=True))
    assert bytes(blob) == bytes(memory_of(STORED))
    assert done == [*range(len(SMALL)), -1]
