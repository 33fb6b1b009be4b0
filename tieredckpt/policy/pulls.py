"""What a host has to fetch of a checkpoint; part of ``policy/replication.py``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeVar

from tieredckpt.format.manifest import Manifest, SegmentRef
from tieredckpt.format.record import SaveRecord
from tieredckpt.policy.words import about, is_ordered, placement_of

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """One segment that a host has to fetch."""

    ref: SegmentRef
    sources: tuple[str, ...]
    """Hosts that should have it, in the order to try; never the host that pulls."""
    own: bool = False
    """The host wrote it itself: nearly always it is there, and only has to be acknowledged."""


def jobs_of(
    host_id: str,
    incarnation: str,
    manifest: Manifest,
    records: Iterable[SaveRecord],
    lost: AbstractSet[str] = frozenset(),
) -> tuple[Pull, ...]:
    """What ``host_id`` has to have of this checkpoint, in the order to pull what it has not.

    Its own segments first: it acknowledges them, or pulls them back if it has lost them. Nothing
    unless it was ordered; nothing that it has acknowledged in this incarnation. The owner is asked
    first, then hosts that have acknowledged a copy, then others that were told to keep one; those
    that are ``lost`` last. Holders of one owner begin at different segments and ask different
    hosts, so that they do not all wait for the same one.
    """
    records = tuple(about(manifest, records))
    if not is_ordered(manifest, records):
        return ()
    placement = placement_of(manifest, records)
    mine = {owner: them.index(host_id) for owner, them in placement.items() if host_id in them}
    if host_id in placement:
        mine[host_id] = 0
    if not mine:
        return ()
    has: set[str] = set()
    others: dict[str, set[str]] = {}
    for record in records:
        if record.kind == "ack" and record.host == host_id and record.incarnation == incarnation:
            has |= set(record.segments)
        elif record.kind == "ack" and record.host != host_id:
            for segment_id in record.segments:
                others.setdefault(segment_id, set()).add(record.host)
    by_owner: dict[str, list[Pull]] = {owner: [] for owner in mine}
    for ref in manifest.segments:
        if ref.host in mine and ref.id not in has:
            having = sorted(others.get(ref.id, set()) - {ref.host})
            # Acknowledgements may not have come here, and a holder may have it without one.
            hoping = [h for h in placement[ref.host] if h != host_id and h not in having]
            turn = mine[ref.host]
            asked = (ref.host, *_rotated(having, turn), *_rotated(hoping, turn))
            sources = sorted((h for h in asked if h != host_id), key=lost.__contains__)
            own = ref.host == host_id
            by_owner[ref.host].append(Pull(ref=ref, sources=tuple(sources), own=own))
    # Owners after the host's own place in the order of ids: not everybody begins with the first.
    owners = sorted(by_owner, key=lambda owner: (owner < host_id, owner))
    jobs: list[Pull] = []
    for owner in owners:
        pulls = by_owner[owner]
        begin = mine[owner] * len(pulls) // max(len(placement[owner]), 1)
        jobs += _rotated(pulls, begin)
    return tuple(jobs)


def _rotated(values: Sequence[_T], by: int) -> Sequence[_T]:
    by = by % len(values) if values else 0
    return (*values[by:], *values[:by])
