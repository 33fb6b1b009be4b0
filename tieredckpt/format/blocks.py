"""How large the blocks of a segment are: decided when it is laid out, recorded in its trailer.

Whoever wants a part of a tensor reads whole blocks: at each end of the part half of one more, on
average. Large blocks are therefore dear where many tensors are cut, and small ones cost digests:
16 bytes and a call each.
"""

from __future__ import annotations

from collections.abc import Iterable

from tieredckpt.format.segment import BLOCK_BYTES, ItemSpec

BLOCK_BYTES_LEAST = 128 << 10
"""Smallest that is chosen: a save's pass takes 1 to 2 % more processor time with it, and as much
as with 4 MiB from 256 KiB on (ARCHITECTURE.md)."""

BLOCKS_MAX = 1 << 20
"""A table of digests is to stay below 16 MiB."""

SHARDS = 8
EXTRA = 0.2
"""One of SHARDS shards along dim 0 of every tensor is to cost this much more than its bytes, on
average over the shards."""

SMALL_BYTES = 256 << 10
"""Neighbours that are smaller are read together and as a whole, with one block or two."""

MEAN_BYTES_LEAST = 2 << 20
"""Where tensors are smaller on average, a request for each one's part would take longer than to
read everything, as large blocks make a reader do."""


def choose_block_bytes(items: Iterable[ItemSpec]) -> int:
    """The size of the blocks of a segment with these items, in this order; a power of two.

    Bytes items do not count: their length changes, and a draft may lack them (who writes the same
    tensors must choose the same size).
    """
    total = cut = places = 0
    last_small = False
    for item in items:
        if item.kind != "tensor" or not item.size_bytes:
            continue
        small = item.size_bytes < SMALL_BYTES
        total += item.size_bytes
        cut += 0 if small else item.size_bytes
        places += not (small and last_small)
        last_small = small
    if cut < max(1, places) * MEAN_BYTES_LEAST:
        return BLOCK_BYTES
    # All shards of a tensor together read it once, one more block at each cut, and one at its ends.
    allowed = int(EXTRA * cut) // (places * (SHARDS + 1))
    block_bytes = BLOCK_BYTES_LEAST
    while block_bytes < BLOCK_BYTES and (
        2 * block_bytes <= allowed or total > block_bytes * BLOCKS_MAX
    ):
        block_bytes *= 2
    return block_bytes
