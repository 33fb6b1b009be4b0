"""Which hosts make up for copies that were lost; part of ``policy/replication.py``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from tieredckpt.format.manifest import Holders, Manifest
from tieredckpt.policy.domains import Loads, PlacementHost, Sites

_ANY_LOAD = 1 << 40


def repair(
    manifest: Manifest,
    holdings_by_host: Mapping[str, AbstractSet[str]],
    members: Sequence[PlacementHost],
    replicas: int,
    ordered: Mapping[str, tuple[str, ...]],
) -> tuple[Holders, ...]:
    """The holders to add, so that every segment is on ``1 + replicas`` members again.

    What counts is the owner, if it lives, and the holders that live and were told to keep it: they
    have it, or will pull it. A host that has it without having been told (it was restored
    with it) is told first: that costs nothing. Then come hosts in other failure domains than those
    that have it, as far as there are any, the least loaded first. A segment that no member
    has is passed over: nobody can copy it.

    Args:
        manifest: The newest replicated checkpoint, or the one that was loaded.
        holdings_by_host: By host, the ids of the segments that are in its memory now.
        members: The hosts that live.
        replicas: Copies wanted beside the first.
        ordered: By owner, who was told to hold copies: :func:`placement_of` over all records, the
            orders that came of earlier repairs included, else everything is ordered again.
    """
    choice = _Repair(members, holdings_by_host)
    by_owner: dict[str, list[str]] = {}
    for ref in manifest.segments:
        by_owner.setdefault(ref.host, []).append(ref.id)
    added = []
    for owner, segments in sorted(by_owner.items()):
        found = choice.holders_for(owner, segments, replicas, ordered.get(owner, ()))
        if found:
            added.append(Holders(owner, found))
    return tuple(added)


def scarce(
    manifest: Manifest,
    holdings_by_host: Mapping[str, AbstractSet[str]],
    members: Iterable[str],
    replicas: int,
) -> tuple[str, ...]:
    """The segments that less than ``1 + replicas`` members have now; () when all is repaired."""
    count = dict.fromkeys((ref.id for ref in manifest.segments), 0)
    for member in members:
        for segment_id in holdings_by_host.get(member, frozenset()):
            if segment_id in count:
                count[segment_id] += 1
    return tuple(segment_id for segment_id, copies in count.items() if copies <= replicas)


class _Repair:
    """Chooses further holders; remembers whom it has given how much."""

    def __init__(
        self, members: Sequence[PlacementHost], holdings: Mapping[str, AbstractSet[str]]
    ) -> None:
        self._sites = Sites({member.host_id: member for member in members}.values())
        self._loads = Loads(len(self._sites.ids))
        self._where: dict[str, set[int]] = {}
        for host_id, site in self._sites.position.items():
            held = holdings.get(host_id, frozenset())
            self._loads.add(site, len(held))
            for segment_id in held:
                self._where.setdefault(segment_id, set()).add(site)

    def holders_for(
        self, owner: str, segments: Sequence[str], replicas: int, ordered: Iterable[str]
    ) -> tuple[str, ...]:
        position = self._sites.position
        itself = {position[owner]} if owner in position else set()
        told = {position[holder] for holder in ordered if holder in position} | itself
        alive = [where for each in segments if (where := self._where.get(each))]
        added: list[str] = []
        while alive and len(told) <= replicas:
            having = set.union(*alive) - told
            best = min(having) if having else self._apart(set.union(*alive) | told)
            if best is None:
                break
            added.append(self._sites.ids[best])
            told.add(best)
            self._loads.add(best, sum(best not in where for where in alive))
        return tuple(added)

    def _apart(self, near: AbstractSet[int]) -> int | None:
        """The host that shares the fewest domains with ``near``, then the least loaded."""
        levels = max((len(self._sites.spans[site]) for site in near), default=1)
        for level in range(levels):
            found = self._loads.least([self._sites.span(site, level) for site in near], _ANY_LOAD)
            if found is not None:
                return found
        return None
