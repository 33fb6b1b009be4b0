"""The memory formula."""

from __future__ import annotations

from tieredckpt.format.segment import slot_capacity
from tieredckpt.policy.memory import memory_need

GIB = 1 << 30


def test_worked_example_of_the_docs() -> None:
    need = memory_need(10 * GIB, ranks=8, keep_last=2, num_tiers=1)
    assert need.ring_slots == 4
    assert need.slot_bytes == 10 * GIB + 4096
    assert need.total_bytes == 8 * 4 * (10 * GIB + 4096)
    assert need.lines == (
        "segment  10 GiB per rank",
        "slot     10 GiB (the segment's size class, and a label page)",
        "ring     4 slots per rank = 2 kept + 1 in flight + 1 spill source",
        "total    320 GiB on this host = 8 ranks x 4 slots x 10 GiB",
    )


def test_size_class_and_singular() -> None:
    need = memory_need(1, ranks=1, keep_last=1, num_tiers=0)
    assert need.slot_bytes == slot_capacity(1) + 4096 == (1 << 20) + 4096
    assert need.ring_slots == 2
    assert need.lines[2] == "ring     2 slots per rank = 1 kept + 1 in flight + 0 spill sources"
    assert "1 rank x 2 slots" in need.lines[3]
