"""Which hosts keep copies of whose segments: facts in, a frozen placement out. Pure.

With ``replicas`` copies the hosts are divided into groups of ``1 + replicas`` whose members keep
copies of each other (GEMINI, SOSP 2023). Each host's data then lies on few others, and data is lost
only if all members of one group are lost together: there are fewest such sets, so most combinations
of simultaneous losses are survived. Hosts that are left over form one ring with a last
group. docs/operate/placement.md has the rules and what they are worth.

Laws (tests/property/policy/test_placement.py): never on the own host; in another failure domain,
the widest first, as far as the load permits; nobody keeps copies of more than ``replicas + 1``
hosts; when hosts come and go few owners change their holders; the order of the arguments decides
nothing.

Hosts are put in the order of their failure domains, so that every domain is a span of positions,
and the question "who holds the least outside of these domains" is one about gaps between spans.

Under DDP and HSDP the same pieces lie on several hosts, and DCP lets one rank write each. A host on
which some rank has the tensors that another host's rank writes need not fetch them: its rank writes
a *draft* of that segment (docs/design/003-peers.md, "Copies that exist anyway"). Items are compared
by digests of :data:`DIGEST_BYTES`, so that what is held is one string of bytes per rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tieredckpt.format.manifest import MAX_REPLICAS

Span = tuple[int, int]

DIGEST_BYTES = 8
"""Of an item's digest. Two that collide give a draft that differs, and is no copy then."""

_SLACK = 1
"""Copies beyond the mean that a host may be given for the sake of failure domains."""

_PASSES_MAX = 16
"""Each pass makes the placement better or ends; this only bounds what nobody has thought of."""

_NOTHING: Mapping[str, tuple[str, ...]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PlacementHost:
    """A host and where it stands."""

    host_id: str
    domains: tuple[tuple[str, str], ...] = ()
    """Failure domains as (name, value), the widest first: ``(("zone", "a"), ("rack", "r1"))``.
    A narrower one counts within the wider ones: rack r1 of zone a is not rack r1 of zone b."""


WIDEST_FIRST = ("region", "zone", "row", "rack", "host")
"""Names of failure domains whose order is known; others are narrower, in the order of the alphabet.
The order must be the same on all hosts, and a mapping's own order says nothing."""


def domains_of(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The labels of a host, as :class:`PlacementHost` wants them."""
    known = [name for name in WIDEST_FIRST if name in labels]
    others = sorted(labels.keys() - set(WIDEST_FIRST))
    return tuple((name, labels[name]) for name in (*known, *others))


class Sites:
    """Hosts in the order of their domains, so that each domain is a span of positions."""

    def __init__(self, hosts: Iterable[PlacementHost]) -> None:
        # The last part is the host itself: what lacks labels is a domain of its own.
        paths = sorted(
            ((*host.domains, (host.host_id,)), host.host_id) for host in hosts
        )  # parts are tuples of strings, so they compare
        self.ids = [host_id for _, host_id in paths]
        self.position = {host_id: number for number, host_id in enumerate(self.ids)}
        bounds: dict[tuple[tuple[str, ...], ...], list[int]] = {}
        for number, (path, _) in enumerate(paths):
            for depth in range(1, len(path) + 1):
                bounds.setdefault(path[:depth], [number, number])[1] = number + 1
        self.spans: list[tuple[Span, ...]] = []
        """By position: the spans of its domains, the widest first; the last is itself."""
        for path, _ in paths:
            found = (bounds[path[:depth]] for depth in range(1, len(path) + 1))
            self.spans.append(tuple((start, stop) for start, stop in found))

    def span(self, site: int, level: int) -> Span:
        """The domain of ``site`` at this level, itself if there is no such level."""
        spans = self.spans[site]
        return spans[min(level, len(spans) - 1)]

    def shared(self, one: int, other: int) -> int:
        """How many domains they share; 0 is best."""
        count = 0
        for start, stop in self.spans[one]:
            if not start <= other < stop:
                break
            count += 1
        return count


class Loads:
    """Of how many hosts each one keeps copies; finds the least loaded one outside of some spans.

    A binary tree of minima, so that each question costs the logarithm of the number of hosts.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._size = 1 << (count - 1).bit_length()
        # A value is load * count + position: one comparison for both.
        nothing = [1 << 62] * (self._size - count)
        self._tree = [0] * self._size + list(range(count)) + nothing
        for node in range(self._size - 1, 0, -1):
            self._tree[node] = min(self._tree[2 * node], self._tree[2 * node + 1])

    def __getitem__(self, site: int) -> int:
        return self._tree[self._size + site] // self.count

    def add(self, site: int, number: int) -> None:
        """One host holds ``number`` more."""
        tree, node = self._tree, self._size + site
        tree[node] += number * self.count
        node >>= 1
        while node:
            left, right = tree[2 * node], tree[2 * node + 1]
            tree[node] = left if left < right else right  # noqa: FURB136  twice as fast as min()
            node >>= 1

    def least(self, without: Iterable[Span], most: int) -> int | None:
        """The first of the least loaded outside of ``without``; None if all have over ``most``."""
        best = (most + 1) * self.count
        for start, stop in _gaps(without, self.count):
            best = min(best, self._least_in(start, stop))
        return best % self.count if best < (most + 1) * self.count else None

    def _least_in(self, start: int, stop: int) -> int:
        tree, best = self._tree, 1 << 62
        start, stop = start + self._size, stop + self._size
        while start < stop:
            if start & 1:
                best = min(best, tree[start])
                start += 1
            if stop & 1:
                stop -= 1
                best = min(best, tree[stop])
            start >>= 1
            stop >>= 1
        return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Who keeps copies of whom."""

    holders: Mapping[str, tuple[str, ...]]
    """By host, in the order of their ids: those who keep copies of what it writes."""
    possible: int
    """Copies that each host has on others: what was asked for, or one less than there are hosts."""
    warnings: tuple[str, ...] = ()


def place(
    hosts: Sequence[PlacementHost],
    replicas: int,
    previous: Mapping[str, tuple[str, ...]] = _NOTHING,
) -> Placement:
    """Decide who keeps copies of whom.

    Args:
        hosts: The members, in any order. Of two with the same id the first one counts.
        replicas: Copies wanted on other hosts, 0 to 64.
        previous: The holders so far. Hosts that stay keep theirs unless a law forbids it.
    """
    assert 0 <= replicas <= MAX_REPLICAS
    members = {host.host_id: host for host in reversed(hosts)}
    possible = min(replicas, max(len(members) - 1, 0))
    warnings: tuple[str, ...] = ()
    if possible < replicas:
        are = "is 1 host" if len(members) == 1 else f"are {len(members)} hosts"
        warnings = (
            f"there {are}: {possible} of {replicas} replicas are possible, each on another host",
        )
    if possible:
        found = _Placer(Sites(members.values()), possible).run(previous)
    else:
        found = dict.fromkeys(sorted(members), ())
    return Placement(holders=MappingProxyType(found), possible=possible, warnings=warnings)


class _Placer:
    """The state while one placement is made."""

    def __init__(self, sites: Sites, replicas: int) -> None:
        self._sites = sites
        self._replicas = replicas
        self._most = replicas + _SLACK
        count = len(sites.ids)
        self._loads = Loads(count)
        self._held: list[list[int]] = [[] for _ in range(count)]
        self._owners: list[set[int]] = [set() for _ in range(count)]

    def run(self, previous: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        self._keep(previous)
        self._group([s for s, held in enumerate(self._held) if not held and not self._owners[s]])
        for owner, held in enumerate(self._held):
            while len(held) < self._replicas:
                holder = self._pick(owner, held, self._most)
                if holder is None:  # few hosts, many replicas: _level takes the excess away
                    holder = self._pick(owner, held, len(self._held))
                assert holder is not None
                self._add(owner, holder)
        for _ in range(_PASSES_MAX):
            if not self._widen() | self._level():
                break
        ids = self._sites.ids
        found = {ids[owner]: tuple(ids[h] for h in held) for owner, held in enumerate(self._held)}
        return dict(sorted(found.items()))

    def _keep(self, previous: Mapping[str, tuple[str, ...]]) -> None:
        position = self._sites.position
        for owner, host_id in enumerate(self._sites.ids):
            for holder_id in previous.get(host_id, ()):
                holder = position.get(holder_id)
                held = self._held[owner]
                if holder is None or holder == owner or holder in held:
                    continue
                if len(held) < self._replicas:
                    self._add(owner, holder)

    def _group(self, fresh: list[int]) -> None:
        """Divide hosts that have no holders and hold nothing into groups.

        ``fresh`` is in the order of domains. A group takes one host from each of as many stretches
        of it as it has members, so no domain that is smaller than a stretch is in it twice.
        """
        size = self._replicas + 1
        if len(fresh) < size:
            return
        ring: list[int] = []
        if rest := len(fresh) % size:
            taken = [len(fresh) * j // (size + rest) for j in range(size + rest)]
            ring = [fresh[index] for index in taken]
            gone = set(taken)
            fresh = [site for index, site in enumerate(fresh) if index not in gone]
        count = len(fresh) // size
        for members in (ring, *(fresh[number::count] for number in range(count))):
            for index, owner in enumerate(members):
                for step in range(1, size):
                    self._add(owner, members[(index + step) % len(members)])

    def _widen(self) -> bool:
        """Move copies out of their owner's domains, the widest first, where the load permits."""
        changed = False
        for owner, held in enumerate(self._held):
            for holder in tuple(held):
                shared = self._sites.shared(owner, holder)
                if not shared:
                    continue
                others = [each for each in held if each != holder]
                better = self._pick(owner, others, self._most - 1, levels=shared)
                if better is not None:
                    self._move(owner, holder, better)
                    changed = True
        return changed

    def _level(self) -> bool:
        """Move copies from hosts with more than the mean to hosts with less.

        Not into a domain that is nearer to the owner, except from a host that has too many.
        """
        changed = False
        for holder in range(len(self._held)):
            while self._loads[holder] > self._replicas and self._relieve(holder):
                changed = True
        return changed

    def _relieve(self, holder: int) -> bool:
        load = self._loads[holder]
        for levels_kept in (True, False) if load > self._most else (True,):
            for owner in sorted(self._owners[holder]):
                others = [each for each in self._held[owner] if each != holder]
                levels = self._sites.shared(owner, holder) + 1 if levels_kept else None
                better = self._pick(owner, others, load - 2, levels=levels)
                if better is not None and better != holder:
                    self._move(owner, holder, better)
                    return True
        return False

    def _pick(
        self, owner: int, others: list[int], most: int, levels: int | None = None
    ) -> int | None:
        """The best further holder: fewest domains shared with the owner, then with the other
        holders, then least loaded. None if there is none with a load up to ``most`` that shares
        less than ``levels`` domains with the owner.
        """
        spans = self._sites.spans[owner]
        span = self._sites.span
        levels = len(spans) if levels is None else min(levels, len(spans))
        itself = [span(each, len(self._sites.spans[each])) for each in others]
        if self._loads.least([spans[levels - 1], *itself], most) is None:
            return None
        deepest = max((len(self._sites.spans[each]) for each in others), default=1)
        for level in range(levels):
            for apart in range(min(level, deepest - 1), deepest):
                without = [spans[level], *(span(each, apart) for each in others)]
                found = self._loads.least(without, most)
                if found is not None:
                    return found
        return None

    def _add(self, owner: int, holder: int) -> None:
        self._held[owner].append(holder)
        self._owners[holder].add(owner)
        self._loads.add(holder, 1)

    def _move(self, owner: int, holder: int, better: int) -> None:
        held = self._held[owner]
        held[held.index(holder)] = better
        self._owners[holder].discard(owner)
        self._owners[better].add(owner)
        self._loads.add(holder, -1)
        self._loads.add(better, 1)


def _gaps(spans: Iterable[Span], count: int) -> Iterator[Span]:
    begin = 0
    for start, stop in sorted(spans):
        if begin < start:
            yield begin, start
        begin = max(begin, stop)
    if begin < count:
        yield begin, count


# --- drafts ---------------------------------------------------------------------------------------


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
