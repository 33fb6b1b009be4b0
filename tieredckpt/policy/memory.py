"""How much host memory a configuration needs, and why, before anything is copied."""

from __future__ import annotations

from dataclasses import dataclass

from tieredckpt.format.segment import PAGE_BYTES, slot_capacity
from tieredckpt.policy.units import approximate_size

IN_FLIGHT = 1
"""Slots per rank for the save that is being written while all kept ones stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """The memory tier's need on one host."""

    ring_slots: int
    """Slots per rank."""
    slot_bytes: int
    """File size of one slot: size class of the segment, and its label page."""
    total_bytes: int
    """``ranks * ring_slots * slot_bytes``: what ``memory.capacity`` must be at least."""
    lines: tuple[str, ...]
    """The calculation, for people."""


def ring_slots(keep_last: int, num_tiers: int) -> int:
    """Slots per rank: those kept, the one in flight, and one spill source per tier."""
    return keep_last + IN_FLIGHT + num_tiers


def memory_need(
    segment_bytes_per_rank: int, ranks: int, keep_last: int, num_tiers: int
) -> MemoryNeed:
    """The need of ``ranks`` ranks on one host, of one stream.

    A tier's spill pins the checkpoint that it copies, which may by then be older than the kept
    ones: hence one slot per tier. Without it a slow disk would make a save wait.

    Args:
        segment_bytes_per_rank: The largest segment of a rank; at least 1.
        ranks: Ranks on this host; at least 1.
        keep_last: ``memory.keep.last``.
        num_tiers: Number of ``tiers``.
    """
    assert segment_bytes_per_rank >= 1
    assert ranks >= 1
    ring = ring_slots(keep_last, num_tiers)
    slot_bytes = slot_capacity(segment_bytes_per_rank) + PAGE_BYTES
    total_bytes = ranks * ring * slot_bytes
    sources = "spill source" if num_tiers == 1 else "spill sources"
    lines = (
        f"segment  {approximate_size(segment_bytes_per_rank)} per rank",
        f"slot     {approximate_size(slot_bytes)} (the segment's size class, and a label page)",
        f"ring     {ring} slots per rank = {keep_last} kept + {IN_FLIGHT} in flight "
        f"+ {num_tiers} {sources}",
        f"total    {approximate_size(total_bytes)} on this host = {ranks} "
        f"{'rank' if ranks == 1 else 'ranks'} x {ring} slots x {approximate_size(slot_bytes)}",
    )
    return MemoryNeed(ring_slots=ring, slot_bytes=slot_bytes, total_bytes=total_bytes, lines=lines)
