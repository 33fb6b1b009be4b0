"""Reads of one rank from one segment, into tensors of any kind.

If the destination is plain host memory in C order, the fetcher reads directly into it. Others (a
view with strides, another dtype, a CUDA tensor, a slice in slivers) are read through scratch memory
of a limited size.

A piece is stored in C order. A box of it is a number of runs, each contiguous in the piece and one
after the other in a C-ordered copy of the box.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from tieredckpt.dcp.slots.copy import goes_by_bytes
from tieredckpt.recovery.blocks import Range
from tieredckpt.recovery.fetch import SegmentFetcher
from tieredckpt.storage.file_io import aligned_buffer

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """The elements from ``starts`` on, ``lengths`` many per dimension, of a piece of ``shape``."""

    shape: Shape
    starts: Shape
    lengths: Shape
    item_bytes: int

    @property
    def strides(self) -> Shape:
        """Distance of neighbours in the piece, per dimension, in elements."""
        strides = [1] * len(self.shape)
        for dim in range(len(self.shape) - 2, -1, -1):
            strides[dim] = strides[dim + 1] * self.shape[dim + 1]
        return tuple(strides)

    @property
    def size_bytes(self) -> int:
        """Of a contiguous copy of the box."""
        return math.prod(self.lengths) * self.item_bytes

    @property
    def first_byte(self) -> int:
        """Offset of the box's first element in the piece."""
        return sum(map(int.__mul__, self.starts, self.strides)) * self.item_bytes

    @property
    def span_bytes(self) -> int:
        """From the box's first element to the end of its last one, in the piece."""
        if not self.size_bytes:
            return 0
        last = sum((n - 1) * stride for n, stride in zip(self.lengths, self.strides, strict=True))
        return (last + 1) * self.item_bytes

    @property
    def _outer_dims(self) -> int:
        """Dimensions that one run does not cover."""
        dims = len(self.shape)
        while dims and self.lengths[dims - 1] == self.shape[dims - 1]:
            dims -= 1
        return max(0, dims - 1)

    @property
    def run_bytes(self) -> int:
        """Size of each run."""
        return math.prod(self.lengths[self._outer_dims :]) * self.item_bytes

    @property
    def num_runs(self) -> int:
        """How many runs :meth:`runs` gives."""
        return math.prod(self.lengths[: self._outer_dims]) if self.size_bytes else 0

    def runs(self) -> Iterator[tuple[int, int]]:
        """(start, stop) byte offsets in the piece of each run, in the order of the box."""
        if not self.size_bytes:
            return
        outer, strides = self._outer_dims, self.strides
        first, size = self.first_byte, self.run_bytes
        for index in itertools.product(*map(range, self.lengths[:outer])):
            start = first + sum(map(int.__mul__, index, strides)) * self.item_bytes
            yield start, start + size

    def split(self, limit_bytes: int) -> Iterator[tuple[Shape, Region]]:
        """Boxes with a span of at most ``limit_bytes`` that make up this one, each with its
        offset in it; a single row of the last dimension may be longer.
        """
        dim = next((d for d, n in enumerate(self.lengths) if n > 1), None)
        if self.span_bytes <= limit_bytes or dim is None:
            yield (0,) * len(self.shape), self
            return
        row = replace(self, lengths=_with(self.lengths, dim, 1)).span_bytes
        step_bytes = self.strides[dim] * self.item_bytes
        rows = max(1, (limit_bytes - row) // step_bytes + 1)
        for begin in range(0, self.lengths[dim], rows):
            count = min(rows, self.lengths[dim] - begin)
            part = replace(
                self,
                starts=_with(self.starts, dim, self.starts[dim] + begin),
                lengths=_with(self.lengths, dim, count),
            )
            for offset, piece in part.split(limit_bytes):
                yield _with(offset, dim, offset[dim] + begin), piece


def _with(shape: Shape, dim: int, value: int) -> Shape:
    return (*shape[:dim], value, *shape[dim + 1 :])


SCRATCH_BYTES = 64 << 20
"""Scratch memory per fetch unless the caller wants less; a longer single row of a tensor gets what
it needs."""

SLIVER_BYTES = 4096
"""Runs shorter than this are not read one by one: the span around them is read whole."""

SLIVER_STEP_BYTES = 4 << 20
"""Unless the runs are further apart than a block, which then need not be read at all."""


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, which lives as long as the view does."""
    size = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory)


Put = Callable[[torch.Tensor, torch.Tensor], object]
"""Copies the stored data (second tensor) into the target (first); their types may differ."""

_Job = tuple[Region, int, torch.dtype, torch.Tensor, Put]


@dataclass(slots=True)
class SegmentReads:
    """Collects reads of one segment, then executes them."""

    fetcher: SegmentFetcher
    scratch_bytes: int = SCRATCH_BYTES
    straight: bool = True
    """Read into targets themselves where that is possible; else ``put`` copies all."""
    _ranges: list[Range] = field(default_factory=list)
    _scratch: list[_Job] = field(default_factory=list)
    _done: list[Callable[[], None]] = field(default_factory=list)
    _memory: torch.Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.uint8))

    def add_bytes(self, offset: int, into: bytearray, done: Callable[[], None]) -> None:
        """Read ``len(into)`` bytes from ``offset``; ``done`` is called once all reads succeeded."""
        if into:
            self._ranges.append(Range(offset, offset + len(into), memoryview(into)))
        self._done.append(done)

    def add_tensor(
        self,
        offset: int,
        region: Region,
        dtype: torch.dtype,
        target: torch.Tensor,
        done: Callable[[], None],
        put: Put = torch.Tensor.copy_,
    ) -> None:
        """Read a region of the piece at ``offset`` into ``target``, which has its shape.

        Where it cannot be read straight there ``put`` copies, part by part.
        """
        self._done.append(done)
        if not region.size_bytes:
            return
        slivers = (
            region.num_runs > 1
            and region.run_bytes < SLIVER_BYTES
            and region.span_bytes // region.num_runs < SLIVER_STEP_BYTES
        )
        if self.straight and target.dtype == dtype and goes_by_bytes(target) and not slivers:
            self._ranges.extend(_ranges(offset, region, memory_of(target)))
            return
        for start, piece in region.split(self.scratch_bytes):
            box = target
            for dim, (begin, length) in enumerate(zip(start, piece.lengths, strict=True)):
                box = box.narrow(dim, begin, length)
            self._scratch.append((piece, offset, dtype, box, put))

    def run(self) -> None:
        """Read everything. Raises IntegrityError; then all targets are undefined."""
        # With the first batch: a block that holds something of both is read once.
        straight = self._ranges
        for batch in self._batches():
            self._read_batch(batch, straight)
            straight = []
        for done in self._done:
            done()

    def _batches(self) -> Iterator[list[_Job]]:
        batch: list[_Job] = []
        size = 0
        for job in self._scratch:
            if batch and size + job[0].span_bytes > self.scratch_bytes:
                yield batch
                batch, size = [], 0
            batch.append(job)
            size += _aligned(job[0].span_bytes)
        yield batch

    def _read_batch(
        self,
        batch: list[_Job],
        straight: list[Range],
    ) -> None:
        size = sum(_aligned(region.span_bytes) for region, *_ in batch)
        if size > self._memory.numel():
            # Kept for the next batches, and not of malloc, which holds on to what is freed.
            self._memory = torch.frombuffer(aligned_buffer(size), dtype=torch.uint8)
        scratch = self._memory
        memory = memory_of(scratch)
        ranges = list(straight)
        copies: list[tuple[Put, torch.Tensor, torch.Tensor]] = []
        at = 0
        for region, offset, dtype, target, put in batch:
            slivers = region.run_bytes < SLIVER_BYTES and region.num_runs > 1
            size = region.span_bytes if slivers else region.size_bytes
            stored = scratch[at : at + size].view(dtype)
            if slivers:
                start = offset + region.first_byte
                ranges.append(Range(start, start + size, memory[at : at + size]))
                stored = stored.as_strided(region.lengths, region.strides)
            else:
                ranges.extend(_ranges(offset, region, memory[at : at + size]))
                stored = stored.view(region.lengths)
            copies.append((put, target, stored))
            at += _aligned(region.span_bytes)
        self.fetcher.fetch(ranges)
        with torch.no_grad():
            for put, target, stored in copies:
                put(target, stored)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def _ranges(offset: int, region: Region, memory: memoryview) -> Iterator[Range]:
    at = 0
    for start, stop in region.runs():
        yield Range(offset + start, offset + stop, memory[at : at + stop - start])
        at += stop - start
