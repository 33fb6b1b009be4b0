"""Hosts, the failure domains that they stand in, and which of them has the least to hold. Pure.

Hosts are put in the order of their domains, so that every domain is a span of positions, and the
question "who holds the least outside of these domains" is one about gaps between spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

Span = tuple[int, int]


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


def _gaps(spans: Iterable[Span], count: int) -> Iterator[Span]:
    begin = 0
    for start, stop in sorted(spans):
        if begin < start:
            yield begin, start
        begin = max(begin, stop)
    if begin < count:
        yield begin, count
