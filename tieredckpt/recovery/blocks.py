"""What is wanted of each block, and spreading a block that lies in memory to where it is wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieredckpt.errors import IntegrityError
from tieredckpt.format.digest import Hasher, digest
from tieredckpt.tiers.mapping import SMALL_COPY_BYTES, address_of, copy_large, copy_small

if TYPE_CHECKING:
    from tieredckpt.format.segment import Footer

COPY_PIECE_BYTES = 512 << 10
"""Copied from memory, then digested, while it is in a core's cache."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [start, stop) of a segment's data, and where they go.

    ``dest`` is writable and C-contiguous, of any item format, and has ``stop - start`` bytes.
    """

    start: int
    stop: int
    dest: memoryview


@dataclass(frozen=True, slots=True)
class Part:
    """What one range wants of one block. The range's ``dest`` keeps the address alive."""

    start: int
    stop: int
    dest: memoryview
    address: int


@dataclass(frozen=True, slots=True)
class BlockTask:
    """One block, and everything that is wanted of it, in ascending order."""

    block: int
    start: int
    stop: int
    parts: tuple[Part, ...]

    def overlaps(self) -> bool:
        """Whether some byte is wanted in more than one place."""
        return any(a.stop > b.start for a, b in zip(self.parts, self.parts[1:], strict=False))

    def pieces(self) -> Iterator[tuple[int, int, Part | None]]:
        """The whole block, in order: parts, and the gaps between them (None)."""
        at = self.start
        for part in self.parts:
            if part.start > at:
                yield at, part.start, None
            yield part.start, part.stop, part
            at = part.stop
        if at < self.stop:
            yield at, self.stop, None


def tasks_of(footer: Footer, ranges: Sequence[Range]) -> list[BlockTask]:
    """The ranges cut at block boundaries, by block."""
    block_bytes = footer.trailer.block_bytes
    by_block: dict[int, list[Part]] = {}
    for each in ranges:
        assert each.dest.nbytes == each.stop - each.start, "a destination has another size"
        assert not each.dest.readonly, "a destination is read-only"
        if not 0 <= each.start <= each.stop <= footer.trailer.data_bytes:
            raise IntegrityError(
                f"bytes {each.start} to {each.stop} are wanted of a segment with "
                f"{footer.trailer.data_bytes} bytes of data"
            )
        if each.start == each.stop:
            continue
        dest = each.dest.cast("B")
        address = address_of(dest)
        at = each.start
        while at < each.stop:
            block = at // block_bytes
            stop = min(each.stop, (block + 1) * block_bytes)
            offset = at - each.start
            part = Part(at, stop, dest[offset : offset + stop - at], address + offset)
            by_block.setdefault(block, []).append(part)
            at = stop
    return [
        BlockTask(block, *footer.block_range(block), tuple(sorted(parts, key=lambda p: p.start)))
        for block, parts in sorted(by_block.items())
    ]


def spread(task: BlockTask, image: memoryview, address: int, base: int, expected: bytes) -> bytes:
    """Copy a block out of memory; returns the digest of where it went.

    Args:
        task: The block.
        image: Memory that holds it; byte ``base`` of the segment is its first.
        address: Where ``image`` lies.
        base: See ``image``.
        expected: The block's digest.
    """
    if task.overlaps():
        # Bytes that go to several places are digested once, before they are copied.
        actual = digest(image[task.start - base : task.stop - base])
        if actual == expected:
            for part in task.parts:
                copy_large(part.address, address + part.start - base, part.stop - part.start)
        return actual
    hasher = Hasher()
    for start, stop, wanted in task.pieces():
        if wanted is None:
            hasher.update(image[start - base : stop - base])
            continue
        for at in range(start, stop, COPY_PIECE_BYTES):
            size = min(COPY_PIECE_BYTES, stop - at)
            copy = copy_small if size < SMALL_COPY_BYTES else copy_large
            copy(wanted.address + at - start, address + at - base, size)
            hasher.update(wanted.dest[at - start : at - start + size])
    return hasher.digest()
