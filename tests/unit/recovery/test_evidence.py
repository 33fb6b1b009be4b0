"""Whether copies together have everything, where blocks are small."""

from __future__ import annotations

import pytest

from tieredckpt.format.manifest import SegmentRef
from tieredckpt.recovery.evidence import Place, SegmentCopy, missing_of
from tieredckpt.storage.holdings import SegmentFact, TierFacts

BLOCK = 256 << 10
SIZE = 200 * BLOCK + 4096
REF = SegmentRef("ab" * 16, SIZE, "cd" * 16, "host")


def copy_of(*bad: int, size: int = SIZE, listed: bool = False) -> SegmentCopy:
    """Whole, or without its end and so without a trailer."""
    whole = size == SIZE
    fact = SegmentFact(
        id=REF.id,
        size=size,
        root=REF.root if whole and not listed else None,
        error=None if whole else "short",
        bad_blocks=bad,
        listed=listed,
        block_bytes=BLOCK if whole and not listed else None,
    )
    tier = TierFacts(tier="t", scope="host", kind="file", available=True, error=None)
    return SegmentCopy(Place("host", tier, (0, 0, 0)), fact, REF)


@pytest.mark.parametrize("first", [True, False])
def test_a_truncated_copy_gives_the_small_blocks_that_it_still_has(first: bool):
    for blocks, missing in ((101, None), (100, "no good copy of blocks 100"), (0, "blocks 100")):
        copies = [copy_of(100), copy_of(size=blocks * BLOCK + 7)]
        found = missing_of(copies if first else copies[::-1])
        assert (found is None) == (missing is None)
        assert missing is None or missing in str(found)


def test_without_a_trailer_the_smallest_blocks_are_assumed():
    """Nothing that may be restorable is refused; who reads it finds out."""
    assert missing_of([copy_of(100, listed=True), copy_of(size=101 * BLOCK)]) is None
    assert missing_of([copy_of(100, listed=True), copy_of(size=BLOCK)]) is not None


def test_copies_whose_bad_blocks_differ():
    assert missing_of([copy_of(1, 2), copy_of(3)]) is None
    assert missing_of([copy_of(1, 2), copy_of(2, 3)]) == "no good copy of blocks 2"
