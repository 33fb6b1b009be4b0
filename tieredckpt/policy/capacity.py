"""How much host memory a configuration needs, and what of ended runs may make room for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tieredckpt.config.units import approximate_size
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.segment import PAGE_BYTES, slot_capacity

IN_FLIGHT = 1
"""Slots per rank for the save that is being written while all kept ones stay."""
REPLICATING = 2
"""Slots per rank for the newest replicated checkpoint and the one that is being replicated."""
REPLICA_SLOTS_MIN = 2
"""Slots per copied segment: a complete copy stays until the next one is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """The memory tier's need on one host."""

    ring_slots: int
    """Slots per rank."""
    slot_bytes: int
    """File size of one slot: size class of the segment, and its label page."""
    replica_slots: int
    """Slots per segment of other hosts that this host keeps a copy of; 0: it keeps none."""
    replica_bytes: int
    """All of those; part of the total."""
    total_bytes: int
    """What ``memory.capacity`` must be at least."""
    lines: tuple[str, ...]
    """The calculation, for people."""


def ring_slots(keep_last: int, num_tiers: int, replicas: int = 0) -> int:
    """Slots per rank for what it writes itself.

    Those kept, the one in flight, one spill source per tier, and with replicas two more: the newest
    replicated checkpoint and the one that is being replicated may both be older than the kept ones.
    """
    return keep_last + IN_FLIGHT + num_tiers + (REPLICATING if replicas else 0)


def replica_slots(keep_last: int) -> int:
    """Slots per segment of another host that is copied here.

    One more than are kept, since the newest complete copy stays while the next one is pulled.
    """
    return max(REPLICA_SLOTS_MIN, keep_last + 1)


def memory_need(
    segment_bytes_per_rank: int, ranks: int, keep_last: int, num_tiers: int, replicas: int = 0
) -> MemoryNeed:
    """The need of ``ranks`` ranks on one host, of one stream.

    A tier's spill pins the checkpoint that it copies, which may by then be older than the kept
    ones: hence one slot per tier. Without it a slow disk would make a save wait. The same holds for
    what other hosts are still copying. Each host is assumed to copy ``replicas`` times as much of
    others as it writes itself, which is what placement gives to hosts that write equally much.

    Args:
        segment_bytes_per_rank: The largest segment of a rank; at least 1.
        ranks: Ranks on this host; at least 1.
        keep_last: ``memory.keep.last``.
        num_tiers: Number of ``tiers``.
        replicas: Copies of each segment on other hosts.
    """
    assert segment_bytes_per_rank >= 1
    assert ranks >= 1
    assert replicas >= 0
    ring = ring_slots(keep_last, num_tiers, replicas)
    slot_bytes = slot_capacity(segment_bytes_per_rank) + PAGE_BYTES
    own_bytes = ranks * ring * slot_bytes
    copied = replicas * ranks
    per_copy = replica_slots(keep_last) if copied else 0
    replica_bytes = copied * per_copy * slot_bytes
    slot, own = approximate_size(slot_bytes), approximate_size(own_bytes)
    product = f"{_count(ranks, 'rank')} x {ring} slots x {slot}"
    ring_line = (
        f"ring     {ring} slots per rank = {keep_last} kept + {IN_FLIGHT} in flight "
        f"+ {_count(num_tiers, 'spill source')}"
    )
    lines = [
        f"segment  {approximate_size(segment_bytes_per_rank)} per rank",
        f"slot     {slot} (the segment's size class, and a label page)",
    ]
    if copied:
        total = approximate_size(own_bytes + replica_bytes)
        lines += [
            f"{ring_line} + {REPLICATING} for replication",
            f"own      {own} = {product}",
            f"copies   {approximate_size(replica_bytes)} = {_count(copied, 'segment')} of other "
            f"hosts ({_count(replicas, 'replica')}) x {per_copy} slots x {slot}",
            f"total    {total} on this host = own + copies",
        ]
    else:
        lines += [ring_line, f"total    {own} on this host = {product}"]
    return MemoryNeed(
        ring_slots=ring,
        slot_bytes=slot_bytes,
        replica_slots=per_copy,
        replica_bytes=replica_bytes,
        total_bytes=own_bytes + replica_bytes,
        lines=tuple(lines),
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


ENDED_AFTER_S = 60.0
"""A run without processes counts as ended after this time: until then it may be restarting."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a tier below memory holds of a run, as it was read just now."""

    saves: frozenset[str]
    """Save ids of the readable manifests."""
    plans: frozenset[str]
    segments: Mapping[str, tuple[int, str | None]]
    """By id, size and root digest of the undamaged copies; None: the digest was not read."""

    def is_complete(self, manifest: Manifest) -> bool:
        """Whether all of a checkpoint is there."""
        return (
            manifest.save_id in self.saves
            and manifest.plan in self.plans
            and all(
                self.segments.get(ref.id) in ((ref.size, ref.root), (ref.size, None))
                for ref in manifest.segments
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleRun:
    """What one host's memory holds of a namespace without a process that holds a lease here."""

    idle_s: float
    """Since the last one ended, or since the agent's start if that is later."""
    other_hosts: bool
    """Other hosts belong to the job, or did: their processes may go on, and count on copies here.
    They cannot be asked while a network is cut."""
    unreadable: bool
    """Something of it could not be read, so that what it needs is not known."""
    saves: tuple[Manifest, ...]
    needed: frozenset[str]
    """Save ids of those that are pinned, being read, or still to be copied from memory."""


def can_go(run: IdleRun, stored: Iterable[Stored]) -> list[Manifest]:
    """The checkpoints that may leave memory to make room for another run, the oldest first.

    Each is complete in a tier below memory, as far as names and sizes show. Blocks there may be
    damaged, so the newest checkpoint of each stream stays.
    """
    if run.idle_s < ENDED_AFTER_S or run.other_hosts or run.unreadable:
        return []
    tiers = tuple(stored)

    def age(manifest: Manifest) -> tuple[int, int, str]:
        return manifest.attempt.number, manifest.seq, manifest.save_id

    newest = {each.stream: each.save_id for each in sorted(run.saves, key=age)}
    found = [
        each
        for each in run.saves
        if each.save_id not in run.needed
        and each.save_id != newest[each.stream]
        and any(tier.is_complete(each) for tier in tiers)
    ]
    return sorted(found, key=age)
