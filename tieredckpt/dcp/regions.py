"""A box inside a stored piece of a tensor, as byte ranges of the piece. Pure arithmetic.

A piece lies in memory in C order. A box of it is a number of runs, each contiguous in the piece and
one after the other in a C-ordered copy of the box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

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
        outer, strides, first, size = (
            self._outer_dims,
            self.strides,
            self.first_byte,
            self.run_bytes,
        )
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
        row = Region(
            self.shape, self.starts, _with(self.lengths, dim, 1), self.item_bytes
        ).span_bytes
        step_bytes = self.strides[dim] * self.item_bytes
        rows = max(1, (limit_bytes - row) // step_bytes + 1)
        for begin in range(0, self.lengths[dim], rows):
            count = min(rows, self.lengths[dim] - begin)
            part = Region(
                self.shape,
                _with(self.starts, dim, self.starts[dim] + begin),
                _with(self.lengths, dim, count),
                self.item_bytes,
            )
            for offset, piece in part.split(limit_bytes):
                yield _with(offset, dim, offset[dim] + begin), piece


def _with(shape: Shape, dim: int, value: int) -> Shape:
    return (*shape[:dim], value, *shape[dim + 1 :])
