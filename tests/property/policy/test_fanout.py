"""The laws of the tree by which a message reaches all hosts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.policy.replication import DEGREE, promote, split


def depth(count: int, degree: int = DEGREE) -> int:
    """How many hops the farthest of ``count`` hosts is away."""
    hops = 0
    while count > 0:
        count = -(-count // degree) - 1
        hops += 1
    return hops


def send(hosts, degree, dead=frozenset(), hop=1):
    """(receiver, hops, who was sent to at the same time) of each host that the tree reaches."""
    branches = split(hosts, degree)
    assert len(branches) <= degree
    for branch in branches:
        while branch is not None and branch[0] in dead:
            branch = promote(branch)
        if branch is not None:
            yield branch[0], hop
            yield from send(branch[1], degree, dead, hop + 1)


@given(st.integers(0, 400), st.integers(1, 10))
def test_every_host_is_reached_once_and_soon(count, degree) -> None:
    hosts = [str(number) for number in range(count)]
    reached = list(send(hosts, degree))
    assert sorted(host for host, _ in reached) == sorted(hosts)
    assert max((hop for _, hop in reached), default=0) <= depth(count, degree)
    sizes = [1 + len(rest) for _, rest in split(hosts, degree)]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


@given(st.integers(0, 200), st.integers(1, 10), st.data())
def test_a_dead_host_costs_itself_alone(count, degree, data) -> None:
    hosts = [str(number) for number in range(count)]
    dead = data.draw(st.frozensets(st.sampled_from(hosts))) if hosts else frozenset()
    reached = Counter(host for host, _ in send(hosts, degree, dead))
    assert reached == Counter(set(hosts) - dead)


@pytest.mark.parametrize(
    ("count", "hops"), [(1, 1), (8, 1), (9, 2), (72, 2), (1000, 4), (10_000, 5)]
)
def test_depth_is_logarithmic(count: int, hops: int):
    assert depth(count) == hops
    assert max(hop for _, hop in send([str(n) for n in range(count)], DEGREE)) == hops
