"""What ``tieredckpt show`` counts."""

from __future__ import annotations

from tieredckpt.export.tree import stored_bytes
from tieredckpt.format.plan import Chunk, TensorEntry


def entry(*chunks: Chunk) -> TensorEntry:
    return TensorEntry("w", "float32", "strided", False, "", False, (8, 3), chunks)


def test_bytes_are_those_of_the_pieces():
    upper, lower = Chunk((0, 0), (4, 3), 0, 0), Chunk((4, 0), (4, 3), 1, 0)
    assert stored_bytes(entry(upper, lower)) == 96
    assert stored_bytes(entry(lower)) == 48, "the upper half is a wrapper's, in parts"
    assert stored_bytes(entry(lower, Chunk((4, 0), (4, 3), 0, 7))) == 48, "a copy"
