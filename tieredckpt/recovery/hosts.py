"""What hosts mean for a recovery: who may hold what, and whose copies are near. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.record import SaveRecord
from tieredckpt.recovery.evidence import KIND_COST, SourceRef

NAMED_ONLY = "named as a holder, but nobody knows where it is"


def named_holders(manifests: Iterable[Manifest], records: Iterable[SaveRecord]) -> set[str]:
    """All hosts that hold, or were to hold, segments of some checkpoint in memory."""
    named: set[str] = set()
    for manifest in manifests:
        named.update({ref.host for ref in manifest.segments})
        for each in manifest.replicas:
            named.update(each.holders)
    for record in records:
        if record.kind == "ack":
            named.add(record.host)
        elif record.kind == "order":
            for each in record.placement:
                named.update(each.holders)
    return named


def holders_of(manifest: Manifest, records: Iterable[SaveRecord]) -> Mapping[str, frozenset[str]]:
    """By the host that wrote them, which hosts may hold its segments of this checkpoint."""
    found = {ref.host: {ref.host} for ref in manifest.segments}
    placements = list(manifest.replicas)
    owner_of = {ref.id: ref.host for ref in manifest.segments}
    for record in records:
        if record.save_id != manifest.save_id:
            continue
        if record.kind == "order":
            placements += record.placement
        elif record.kind == "ack":
            for owner in {owner_of[name] for name in record.segments if name in owner_of}:
                found[owner].add(record.host)
    for each in placements:
        if each.host in found:
            found[each.host].update(each.holders)
    return {owner: frozenset(hosts) for owner, hosts in found.items()}


def nearest_first(sources: Sequence[SourceRef], host_id: str) -> tuple[SourceRef, ...]:
    """The copies in the order in which ``host_id`` tries them.

    Intact ones before damaged ones, then own memory, other hosts' memory, own disk (and shared
    file systems), other hosts' disks, object stores. Equally near hosts come in another order for
    each reader and segment, so that a thousand restarting hosts do not all begin with the same one.
    """

    def cost(source: SourceRef) -> tuple[tuple[bool, bool, int, bool], bytes]:
        far = distance(source, host_id)
        turn = digest(f"{host_id} {source.host} {source.segment_id}".encode()) if far[-1] else b""
        return far, turn

    return tuple(sorted(sources, key=cost))


def distance(source: SourceRef, host_id: str) -> tuple[bool, bool, int, bool]:
    """Equal for copies that are equally good for ``host_id``; smaller is better."""
    own = source.shared or source.host == host_id
    return (not source.intact, source.error is not None, KIND_COST[source.kind], not own)
