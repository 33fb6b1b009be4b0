"""The memory formula."""

from __future__ import annotations

from tieredckpt.format.segment import slot_capacity
from tieredckpt.policy.capacity import memory_need, replica_slots, ring_slots

GIB = 1 << 30


def test_worked_example_of_the_docs() -> None:
    need = memory_need(10 * GIB, ranks=8, keep_last=2, num_tiers=1)
    assert (need.ring_slots, need.replica_slots, need.replica_bytes) == (4, 0, 0)
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


def test_worked_example_with_a_replica() -> None:
    need = memory_need(10 * GIB, ranks=8, keep_last=2, num_tiers=1, replicas=1)
    assert (need.ring_slots, need.replica_slots) == (6, 3)
    assert need.replica_bytes == 8 * 3 * (10 * GIB + 4096)
    assert need.total_bytes == (8 * 6 + 8 * 3) * (10 * GIB + 4096)
    assert need.lines[2:] == (
        "ring     6 slots per rank = 2 kept + 1 in flight + 1 spill source + 2 for replication",
        "own      480 GiB = 8 ranks x 6 slots x 10 GiB",
        "copies   240 GiB = 8 segments of other hosts (1 replica) x 3 slots x 10 GiB",
        "total    720 GiB on this host = own + copies",
    )


def test_copies_grow_with_the_replicas_and_the_ring_does_not() -> None:
    one, two = (memory_need(5, ranks=2, keep_last=1, num_tiers=0, replicas=n) for n in (1, 2))
    assert two.ring_slots == one.ring_slots == 4
    assert two.replica_bytes == 2 * one.replica_bytes == 4 * 2 * one.slot_bytes
    assert "4 segments of other hosts (2 replicas) x 2 slots" in two.lines[4]


def test_slots() -> None:
    assert [ring_slots(3, 2, replicas) for replicas in (0, 1, 64)] == [6, 8, 8]
    assert ring_slots(3, 2) == 6
    assert [replica_slots(keep_last) for keep_last in (1, 2, 3)] == [2, 3, 4]
