"""Maps wanted ranges to blocks, and reads blocks into their destinations.

Only digests are computed here: the caller compares them with the expected ones.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieredckpt.errors import IntegrityError
from tieredckpt.format.digest import DIGEST_BYTES, BlockDigests, digest
from tieredckpt.format.segment import MAX_BLOCK_BYTES, PAGE_BYTES, round_up
from tieredckpt.storage.memory.mapping import (
    SMALL_COPY_BYTES,
    address_of,
    advise_huge_pages,
    copy_large,
    copy_small,
)

if TYPE_CHECKING:
    from tieredckpt.format.segment import Footer

UNIT_BYTES = 4 << 20
"""Neighbouring blocks are read and received together up to this size: smaller reads cost more disk
requests and more work in this interpreter."""

PIECE_BYTES = 512 << 10
"""Bytes that are copied, read or received, then digested while they are in a core's cache."""

STRAIGHT_PARTS_MAX = 4
"""Blocks of more parts are read as a whole and then spread, with fewer system calls."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [start, stop) of a segment's data, and their destination.

    ``dest`` is writable and C-contiguous, of any item format, and has ``stop - start`` bytes.
    """

    start: int
    stop: int
    dest: memoryview


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a range within some blocks. The range's ``dest`` keeps the address alive."""

    start: int
    stop: int
    dest: memoryview
    address: int

    def cut(self, start: int, stop: int) -> Part:
        """The part within [start, stop)."""
        if start <= self.start and self.stop <= stop:
            return self
        begin, end = max(start, self.start), min(stop, self.stop)
        offset = begin - self.start
        return Part(begin, end, self.dest[offset : offset + end - begin], self.address + offset)


@dataclass(frozen=True, slots=True)
class BlockTask:
    """Consecutive blocks that are read together, and all parts that are wanted of them.

    Parts are in ascending order. Each block is verified by itself; small blocks are read together
    to save disk requests and work per block.
    """

    block: int
    """The first one."""
    start: int
    stop: int
    parts: tuple[Part, ...]
    block_bytes: int = MAX_BLOCK_BYTES

    @property
    def count(self) -> int:
        """Number of blocks."""
        return -(-(self.stop - self.start) // self.block_bytes)

    @property
    def blocks(self) -> range:
        """Numbers of the blocks."""
        return range(self.block, self.block + self.count)

    def overlaps(self) -> bool:
        """Whether some byte has more than one destination; never with several blocks."""
        return any(a.stop > b.start for a, b in itertools.pairwise(self.parts))

    def pieces(self) -> Iterator[tuple[int, int, Part | None]]:
        """All bytes, in order: parts, and the gaps between them (None)."""
        at = self.start
        for part in self.parts:
            if part.start > at:
                yield at, part.start, None
            yield part.start, part.stop, part
            at = part.stop
        if at < self.stop:
            yield at, self.stop, None

    def split(self) -> list[BlockTask]:
        """A task for each block."""
        if self.count == 1:
            return [self]
        found = []
        for block in self.blocks:
            start = block * self.block_bytes
            stop = min(start + self.block_bytes, self.stop)
            wanted = (part for part in self.parts if part.start < stop and start < part.stop)
            parts = tuple(part.cut(start, stop) for part in wanted)
            found.append(BlockTask(block, start, stop, parts, self.block_bytes))
        return found

    def compared(
        self, actual: bytes, expected: bytes
    ) -> tuple[list[BlockTask], list[tuple[BlockTask, str]]]:
        """Compare digests of all blocks: the good blocks, and the bad ones, each with a message."""
        if actual == expected:
            return [self], []
        good, bad = [], []
        for number, task in enumerate(self.split()):
            here = slice(number * DIGEST_BYTES, (number + 1) * DIGEST_BYTES)
            if actual[here] == expected[here]:
                good.append(task)
            else:
                text = f"digest is {actual[here].hex()}, expected {expected[here].hex()}"
                bad.append((task, text))
        return good, bad


def tasks_of(
    footer: Footer, ranges: Sequence[Range], apart: Callable[[BlockTask], bool] | None = None
) -> list[BlockTask]:
    """The ranges as tasks of up to :data:`UNIT_BYTES`, in ascending order.

    Args:
        footer: Of the segment.
        ranges: What is wanted.
        apart: Whether a task is to be split, as some copies are not asked for all of its blocks.
    """
    trailer = footer.trailer
    block_bytes, data_bytes = trailer.block_bytes, trailer.data_bytes
    unit_bytes = block_bytes * max(1, UNIT_BYTES // block_bytes)
    by_unit: dict[int, list[Part]] = {}
    for each in ranges:
        assert each.dest.nbytes == each.stop - each.start, "a destination has another size"
        assert not each.dest.readonly, "a destination is read-only"
        if not 0 <= each.start <= each.stop <= data_bytes:
            raise IntegrityError(
                f"bytes {each.start} to {each.stop} are wanted of a segment with "
                f"{data_bytes} bytes of data"
            )
        if each.start == each.stop:
            continue
        dest = each.dest.cast("B")
        entire = Part(each.start, each.stop, dest, address_of(dest))
        for unit in range(each.start // unit_bytes, -(-each.stop // unit_bytes)):
            part = entire.cut(unit * unit_bytes, (unit + 1) * unit_bytes)
            by_unit.setdefault(unit, []).append(part)
    found: list[BlockTask] = []
    for _, parts in sorted(by_unit.items()):
        parts.sort(key=lambda part: part.start)
        for together in _stretches(parts, block_bytes):
            first = together[0].start // block_bytes
            stop = round_up(max(part.stop for part in together), block_bytes)
            task = BlockTask(
                first, first * block_bytes, min(stop, data_bytes), tuple(together), block_bytes
            )
            split = task.overlaps() or (apart is not None and apart(task))
            found += task.split() if split else [task]
    return found


def _stretches(parts: Sequence[Part], block_bytes: int) -> list[list[Part]]:
    """The parts of each run of consecutive wanted blocks."""
    found: list[list[Part]] = []
    behind = -1
    for part in parts:
        if part.start // block_bytes > behind:
            found.append([])
        found[-1].append(part)
        behind = max(behind, -(-part.stop // block_bytes))
    return found


def spread(task: BlockTask, image: memoryview, image_start: int, expected: bytes) -> bytes:
    """Copy blocks out of memory; returns the digests of the copies, concatenated.

    Args:
        task: The blocks.
        image: Memory that holds them.
        image_start: The offset of ``image`` in the segment, in bytes.
        expected: The blocks' digests.
    """
    address = address_of(image)
    if task.overlaps():
        # Bytes with several destinations are digested once, before they are copied.
        actual = digest(image[task.start - image_start : task.stop - image_start])
        if actual == expected:
            for part in task.parts:
                source = address + part.start - image_start
                copy_large(part.address, source, part.stop - part.start)
        return actual
    digests = BlockDigests(task.block_bytes)
    for start, stop, wanted in task.pieces():
        if wanted is None:
            digests.update(image[start - image_start : stop - image_start])
            continue
        for at in range(start, stop, PIECE_BYTES):
            size = min(PIECE_BYTES, stop - at)
            copy = copy_small if size < SMALL_COPY_BYTES else copy_large
            copy(wanted.address + at - start, address + at - image_start, size)
            digests.update(wanted.dest[at - start : at - start + size])
    return digests.finish()


def land(
    task: BlockTask,
    read: Callable[[int, memoryview], None],
    expected: bytes,
    scratch: ScratchPool,
    *,
    pages: bool = False,
) -> bytes:
    """Read blocks into their destinations; returns the digests of the bytes there, concatenated.

    Args:
        task: The blocks.
        read: Fills memory with the bytes from an offset of the segment. It is called in ascending
            order, for all bytes of the blocks.
        expected: The blocks' digests.
        scratch: Buffers for bytes that are not wanted, or scattered.
        pages: Only whole pages can be read, into page-aligned memory: ``read`` is called once for
            all blocks and the rest of the last one's page.
    """
    scattered = pages or len(task.parts) > STRAIGHT_PARTS_MAX or task.overlaps()
    size = task.stop - task.start
    # A block starts on a page, and the footer fills the page in which the last one ends.
    read_bytes = round_up(size, PAGE_BYTES) if pages else size
    buffer = scratch.acquire(read_bytes if scattered else PIECE_BYTES)
    try:
        with memoryview(buffer) as memory:
            if scattered:
                with memory[:read_bytes] as into:
                    read(task.start, into)
                return spread(task, memory, task.start, expected)
            digests = BlockDigests(task.block_bytes)
            for start, stop, part in task.pieces():
                for at in range(start, stop, PIECE_BYTES):
                    count = min(PIECE_BYTES, stop - at)
                    if part is None:
                        into = memory[:count]
                    else:
                        into = part.dest[at - start : at - start + count]
                    with into:
                        read(at, into)
                        digests.update(into)
            return digests.finish()
    finally:
        scratch.release(buffer)


class ScratchPool:
    """Page-aligned buffers that threads share, so that pages are touched once and reused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []

    def acquire(self, size_bytes: int) -> mmap.mmap:
        """A buffer of at least ``size_bytes``, until :meth:`release`."""
        with self._lock:
            for number, buffer in enumerate(self._free):
                if len(buffer) >= size_bytes:
                    return self._free.pop(number)
        size = round_up(max(size_bytes, 1), PAGE_BYTES)
        buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with memoryview(buffer) as memory:
            advise_huge_pages(address_of(memory), size)
        return buffer

    def release(self, buffer: mmap.mmap) -> None:
        """Return a buffer."""
        with self._lock:
            self._free.append(buffer)
