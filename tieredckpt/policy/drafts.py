"""Which rank writes which other rank's segment a second time, as a copy on its own host. Pure.

Under DDP and HSDP the same pieces lie on several hosts, and DCP lets one rank write each. A host on
which some rank has the tensors that another host's rank writes need not fetch them: its rank writes
a *draft* of that segment (docs/design/003-peers.md, "Copies that exist anyway"). Items are compared
by digests of :data:`DIGEST_BYTES`, so that what is held is one string of bytes per rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tieredckpt.policy.placement import PlacementHost, Sites

DIGEST_BYTES = 8
"""Of an item's digest. Two that collide give a draft that differs, and is no copy then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankItems:
    """One rank of a save."""

    host: str
    held: bytes
    """Digests of all items that it has, joined; "" if it writes no drafts."""
    needed: bytes
    """Digests of what somebody else must have to write a draft of its segment, joined; "": there is
    nothing of which a draft would be worth it."""
    size: int
    """About how many bytes it writes."""


def digests_of(joined: bytes) -> Iterator[bytes]:
    """The digests that ``joined`` is made of."""
    for start in range(0, len(joined), DIGEST_BYTES):
        yield joined[start : start + DIGEST_BYTES]


def assign_drafts(ranks: Sequence[RankItems]) -> tuple[tuple[int, ...], ...]:
    """For each rank, the ranks of whose segments it writes drafts, in order.

    Each host gets a draft of every other host's segment if one of its ranks has all that is needed,
    once; its ranks share the work. About linear in the items of all ranks and in the drafts.
    """
    holders = _holders(ranks)
    loads = [0] * len(ranks)
    found: list[list[int]] = [[] for _ in ranks]
    for owner, each in enumerate(ranks):
        local: dict[str, int] = {}
        for rank in holders.get(each.needed, ()):
            host = ranks[rank].host
            if host == each.host:
                continue
            before = local.get(host)
            if before is None or loads[rank] < loads[before]:
                local[host] = rank
        for rank in local.values():
            loads[rank] += each.size
            found[rank].append(owner)
    return tuple(map(tuple, found))


def _holders(ranks: Sequence[RankItems]) -> dict[bytes, list[int]]:
    """By what is needed for a draft, the ranks that have all of it."""
    # Ranks that hold the same (all, under DDP) are looked at once; and only those are compared that
    # have the first item, so that without any replication nothing is.
    groups: dict[bytes, list[int]] = defaultdict(list)
    for rank, each in enumerate(ranks):
        if each.held:
            groups[each.held].append(rank)
    firsts = {each.needed[:DIGEST_BYTES] for each in ranks if each.needed}
    having: dict[bytes, list[tuple[frozenset[bytes], list[int]]]] = defaultdict(list)
    for held, members in groups.items():
        items = frozenset(digests_of(held))
        for first in firsts & items:
            having[first].append((items, members))
    found: dict[bytes, list[int]] = {}
    for each in ranks:
        if each.needed and each.needed not in found:
            wanted = list(digests_of(each.needed))
            found[each.needed] = [
                rank
                for items, members in having[wanted[0]]
                if items.issuperset(wanted)
                for rank in members
            ]
    return found


def holders_with_drafts(
    owner: str,
    placed: Sequence[str],
    drafted: Sequence[str],
    labels: Mapping[str, tuple[tuple[str, str], ...]],
) -> tuple[str, ...]:
    """Who is to keep copies of ``owner``: as many hosts as were placed.

    The fewest shared failure domains count first, then whether the host has drafts of all that the
    owner writes (that copy costs nothing), then the placement.

    Args:
        owner: A host.
        placed: Its holders by placement.
        drafted: Hosts that have a draft of each of its segments.
        labels: Failure domains of all of them, the widest first.
    """
    known = list(dict.fromkeys((*placed, *sorted(drafted))))
    if owner in known:
        known.remove(owner)
    sites = Sites(PlacementHost(host, labels.get(host, ())) for host in (owner, *known))
    mine, having = sites.position[owner], set(drafted)
    known.sort(key=lambda host: (sites.shared(mine, sites.position[host]), host not in having))
    return tuple(known[: len(placed)])
