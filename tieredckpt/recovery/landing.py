"""Reading blocks of a copy on this host to where they are wanted, each way as fast as it goes.

Nothing is compared here: the caller has the digests that the blocks must have.
"""

from __future__ import annotations

from tieredckpt.format.digest import BlockDigests
from tieredckpt.format.segment import PAGE_BYTES
from tieredckpt.recovery.blocks import BlockTask, spread
from tieredckpt.recovery.copies import Copy, ScratchPool
from tieredckpt.tiers.mapping import address_of

READ_PIECE_BYTES = 512 << 10
"""Read into the destination, then digested."""

STRAIGHT_PIECES_MAX = 4
"""Blocks that are scattered further are read as a whole and then spread: fewer system calls."""


def land(copy: Copy, task: BlockTask, expected: bytes, scratch: ScratchPool) -> bytes:
    """Bring blocks to where they are wanted; returns the digests of what is there, concatenated.

    Raises CopyError: they cannot be read.
    """
    opened = copy.open()
    # Bytes wanted in several places are digested before they are copied, so not where another
    # process could change them in between.
    if copy.address is not None and opened.view is not None and not task.overlaps():
        copy.check_size(task.stop)
        return spread(task, opened.view, copy.address, 0, expected)
    if not (opened.direct or len(task.parts) > STRAIGHT_PIECES_MAX or task.overlaps()):
        return _read_straight(copy, task, scratch)
    size = task.stop - task.start
    # A block starts on a page, and the footer fills the page in which the last one ends.
    padded = -(-size // PAGE_BYTES) * PAGE_BYTES
    buffer = scratch.take(padded)
    try:
        with memoryview(buffer) as memory:
            with memory[:padded] as into:
                copy.read_into(task.start, into, needed=size)
            return spread(task, memory, address_of(memory), task.start, expected)
    finally:
        scratch.give(buffer)


def _read_straight(copy: Copy, task: BlockTask, scratch: ScratchPool) -> bytes:
    digests = BlockDigests(task.block_bytes)
    buffer = scratch.take(READ_PIECE_BYTES)
    try:
        with memoryview(buffer) as memory:
            for start, stop, part in task.pieces():
                for at in range(start, stop, READ_PIECE_BYTES):
                    size = min(READ_PIECE_BYTES, stop - at)
                    if part is None:
                        into = memory[:size]
                    else:
                        into = part.dest[at - start : at - start + size]
                    with into:
                        copy.read_into(at, into)
                        digests.update(into)
    finally:
        scratch.give(buffer)
    return digests.finish()
