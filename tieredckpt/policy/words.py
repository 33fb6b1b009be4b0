"""What records say of one checkpoint: part of ``policy/replication.py``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tieredckpt.format.manifest import MAX_REPLICAS, Holders, Manifest
from tieredckpt.format.record import SaveRecord


def placement_of(manifest: Manifest, records: Iterable[SaveRecord]) -> dict[str, tuple[str, ...]]:
    """By owner, the hosts that are to keep copies of its segments: those of the manifest first.

    Only hosts that wrote segments are in it, and none is its own holder. No holders at all: ().
    """
    found: dict[str, dict[str, None]] = {ref.host: {} for ref in manifest.segments}
    orders = sorted(
        (record for record in about(manifest, records) if record.kind == "order"),
        key=lambda record: record.id,  # the same on every host, whatever came first
    )
    for holders in (manifest.replicas, *(order.placement for order in orders)):
        for each in holders:
            if each.host in found:
                found[each.host] |= dict.fromkeys(each.holders)
    for owner, holders_of in found.items():
        holders_of.pop(owner, None)
    return {owner: tuple(them)[: 2 * MAX_REPLICAS] for owner, them in found.items()}


def is_ordered(manifest: Manifest, records: Iterable[SaveRecord]) -> bool:
    """Whether it was decided that this checkpoint is replicated."""
    return any(record.kind == "order" for record in about(manifest, records))


def was_replicated(manifest: Manifest, records: Iterable[SaveRecord]) -> bool:
    """Whether the leader has said, at some time, that all copies are there.

    Only of what was ordered: a word without an order is somebody's mistake, and to believe it would
    release the copies of the checkpoint before.
    """
    kinds = {record.kind for record in about(manifest, records)}
    return {"order", "replicated"} <= kinds


def is_replicated(
    manifest: Manifest, records: Iterable[SaveRecord], incarnations: Mapping[str, str]
) -> bool:
    """Whether all copies are there: the leader has said so, and each memory that it counted is
    still the one that it was.

    Args:
        manifest: Of the checkpoint.
        records: Those of this checkpoint; others are passed over.
        incarnations: By host, the present one. A host that is not in it is lost.
    """
    records = tuple(about(manifest, records))
    present = set(incarnations.values())
    return is_ordered(manifest, records) and any(
        record.segments and present.issuperset(record.segments)
        for record in records
        if record.kind == "replicated"
    )


def is_failed(manifest: Manifest, records: Iterable[SaveRecord]) -> bool:
    """Whether a holder, or the leader, has said that what was ordered cannot be completed.

    It holds up nothing from then on, and nobody needs to keep anything for it.
    """
    return any(record.kind == "failed" for record in about(manifest, records))


def copies_wanted(manifest: Manifest, records: Iterable[SaveRecord]) -> dict[str, int]:
    """By owner, how many holders were to keep a copy; at least 1, or it would be "replicated" with
    none.
    """
    found: dict[str, int] = {}
    for record in records:
        for each in record.placement if record.kind == "order" else ():
            found[each.host] = max(found.get(each.host, 1), _others(each))
    # What the coordinator decided stands, if it did: orders after a loss name replacements only.
    return found | {each.host: count for each in manifest.replicas if (count := _others(each))}


def _others(each: Holders) -> int:
    return len(set(each.holders) - {each.host})


def acknowledged(
    records: Iterable[SaveRecord], incarnations: Mapping[str, str]
) -> dict[str, set[str]]:
    """By segment, the hosts that have acknowledged it since they live."""
    found: dict[str, set[str]] = {}
    for record in records:
        if record.kind == "ack" and incarnations.get(record.host) == record.incarnation:
            for segment_id in record.segments:
                found.setdefault(segment_id, set()).add(record.host)
    return found


def about(manifest: Manifest, records: Iterable[SaveRecord]) -> Iterator[SaveRecord]:
    """The records of this checkpoint. One that names another stream for it is not of it."""
    for record in records:
        if (
            record.save_id == manifest.save_id
            and record.stream == manifest.stream
            and record.namespace == manifest.namespace
        ):
            yield record


def by_save(records: Iterable[SaveRecord]) -> dict[str, list[SaveRecord]]:
    """By save id."""
    found: dict[str, list[SaveRecord]] = {}
    for record in records:
        found.setdefault(record.save_id, []).append(record)
    return found
