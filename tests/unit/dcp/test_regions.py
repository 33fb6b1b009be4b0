"""Boxes of stored pieces: NumPy is the oracle."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.dcp.load import tensors
from tieredckpt.dcp.load.tensors import Region, SegmentReads, memory_of


@st.composite
def regions(draw: Any) -> Region:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    starts = tuple(draw(st.integers(0, n)) for n in shape)
    lengths = tuple(draw(st.integers(0, n - s)) for n, s in zip(shape, starts, strict=True))
    return Region(shape, starts, lengths, draw(st.sampled_from([1, 2, 8])))


def box_of(region: Region, data: np.ndarray) -> np.ndarray:
    piece = data.reshape(*region.shape, region.item_bytes)
    return piece[tuple(slice(s, s + n) for s, n in zip(region.starts, region.lengths, strict=True))]


def piece_of(region: Region) -> np.ndarray:
    size = int(np.prod(region.shape, dtype=int)) * region.item_bytes
    return np.random.default_rng(0).integers(0, 256, size, np.uint8)


@given(regions())
def test_runs_are_the_box(region: Region):
    data = piece_of(region)
    runs = list(region.runs())
    got = b"".join(data[start:stop].tobytes() for start, stop in runs)
    assert got == box_of(region, data).tobytes()
    assert len(runs) == region.num_runs
    assert all(stop - start == region.run_bytes for start, stop in runs)
    assert region.size_bytes == len(got)
    if runs:
        assert runs[0][0] == region.first_byte
        assert runs[-1][1] == region.first_byte + region.span_bytes


@given(regions(), st.integers(1, 64))
def test_split_covers_the_box_once(region: Region, limit: int):
    seen = np.zeros(region.lengths, int)
    for offset, part in region.split(limit):
        box = tuple(slice(o, o + n) for o, n in zip(offset, part.lengths, strict=True))
        seen[box] += 1
        assert part.starts == tuple(s + o for s, o in zip(region.starts, offset, strict=True))
        assert part.span_bytes <= limit or sum(n > 1 for n in part.lengths) <= 1
    assert (seen == 1).all()


class Fetcher:
    """Stands for a segment whose bytes are in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.largest = 0
        self.fetches = 0

    def fetch(self, ranges: Any) -> None:
        self.fetches += 1
        self.largest = max(self.largest, sum(r.stop - r.start for r in ranges))
        for each in ranges:
            each.dest.cast("B")[:] = self.data[each.start : each.stop]


@given(regions(), st.sampled_from(["plain", "strided", "cast"]), st.integers(1, 200))
def test_reads_land_in_any_destination(region: Region, kind: str, scratch: int):
    dtype = {1: torch.uint8, 2: torch.int16, 8: torch.int64}[region.item_bytes]
    data = piece_of(region)
    expected = torch.from_numpy(
        np.ascontiguousarray(box_of(region, data)).view(f"i{region.item_bytes}")[..., 0]
        if region.item_bytes > 1
        else np.ascontiguousarray(box_of(region, data))[..., 0]
    ).view(dtype)
    if kind == "strided":
        target = torch.zeros((*region.lengths, 3), dtype=dtype)[..., 1]
    elif kind == "cast":
        target = torch.zeros(region.lengths, dtype=torch.float64)
    else:
        target = torch.zeros(region.lengths, dtype=dtype)
    fetcher = Fetcher(bytes(40) + data.tobytes())
    reads = SegmentReads(fetcher)  # type: ignore[arg-type]
    before = tensors.SCRATCH_BYTES
    tensors.SCRATCH_BYTES = scratch
    try:
        done: list[int] = []
        reads.add_tensor(40, region, dtype, target, lambda: done.append(1))
        reads.run()
    finally:
        tensors.SCRATCH_BYTES = before
    assert done == [1]
    assert torch.equal(target, expected.to(target.dtype))


def test_long_slivers_are_read_whole_and_far_ones_are_not():
    region = Region((64, 1024), (0, 3), (64, 5), 1)
    fetcher = Fetcher(bytes(64 * 1024))
    reads = SegmentReads(fetcher)  # type: ignore[arg-type]
    reads.add_tensor(0, region, torch.uint8, torch.zeros(64, 5, dtype=torch.uint8), lambda: None)
    reads.run()
    assert fetcher.largest == region.span_bytes
    wide = Region((2, 8 << 20), (0, 3), (2, 5), 1)
    fetcher = Fetcher(bytes(16 << 20))
    reads = SegmentReads(fetcher)  # type: ignore[arg-type]
    reads.add_tensor(0, wide, torch.uint8, torch.zeros(2, 5, dtype=torch.uint8), lambda: None)
    reads.run()
    assert fetcher.largest == wide.size_bytes


def test_what_goes_straight_and_what_goes_through_scratch_is_one_fetch():
    """Blocks that hold something of both would else be read twice."""
    data = bytes(range(256)) * 256
    fetcher = Fetcher(data)
    reads = SegmentReads(fetcher)  # type: ignore[arg-type]
    straight = torch.zeros(40, dtype=torch.uint8)
    columns = torch.zeros(64, 5, dtype=torch.uint8)
    whole, some = Region((40,), (0,), (40,), 1), Region((64, 256), (0, 3), (64, 5), 1)
    reads.add_tensor(100, whole, torch.uint8, straight, lambda: None)
    reads.add_tensor(256, some, torch.uint8, columns, lambda: None)
    reads.run()
    assert fetcher.fetches == 1
    assert bytes(straight.tolist()) == data[100:140]
    assert columns.tolist() == [[3, 4, 5, 6, 7]] * 64


def test_memory_keeps_its_tensor_alive():
    tensor = torch.zeros(1 << 20)
    alive = weakref.ref(tensor)
    view = memory_of(tensor)[4:8]
    del tensor
    assert alive() is not None
    view.release()


def test_memory_of_every_dtype():
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int64):
        tensor = torch.zeros(3, 2).to(dtype)
        assert memory_of(tensor).nbytes == 6 * dtype.itemsize
    assert memory_of(torch.tensor(1.0)).nbytes == 4
