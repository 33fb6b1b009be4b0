"""Laws of who writes drafts of whose segments."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.policy.placement import (
    DIGEST_BYTES,
    RankItems,
    assign_drafts,
    digests_of,
    holders_with_drafts,
)


def digest(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()[:DIGEST_BYTES]


def joined(names: list[int]) -> bytes:
    return b"".join(map(digest, names))


@st.composite
def jobs(draw: st.DrawFn) -> list[RankItems]:
    """Ranks on hosts; each item is written by one of those that hold it, as DCP does it."""
    count = draw(st.integers(1, 8))
    hosts = draw(st.lists(st.sampled_from("abcd"), min_size=count, max_size=count))
    held = [draw(st.lists(st.integers(0, 9), unique=True, max_size=10)) for _ in hosts]
    written: list[list[int]] = [[] for _ in hosts]
    for item in sorted(set().union(*held)):
        having = [rank for rank, items in enumerate(held) if item in items]
        written[draw(st.sampled_from(having))].append(item)
    return [
        RankItems(host=host, held=joined(mine), needed=joined(final), size=len(final))
        for host, mine, final in zip(hosts, held, written, strict=True)
    ]


@given(jobs())
def test_each_host_drafts_what_one_of_its_ranks_has_and_once(job: list[RankItems]):
    found = assign_drafts(job)
    assert len(found) == len(job)
    for host in {each.host for each in job}:
        local = [rank for rank, each in enumerate(job) if each.host == host]
        drafted = [owner for rank in local for owner in found[rank]]
        assert len(drafted) == len(set(drafted))
        wanted = {
            owner
            for owner, each in enumerate(job)
            if each.host != host
            and each.needed
            and any(set(digests_of(each.needed)) <= set(digests_of(job[r].held)) for r in local)
        }
        assert set(drafted) == wanted
        for rank in local:
            for owner in found[rank]:
                assert set(digests_of(job[owner].needed)) <= set(digests_of(job[rank].held))


def test_ranks_of_a_host_share_the_work():
    everything = joined(list(range(8)))
    job = [
        RankItems(host=host, held=everything, needed=joined([rank]), size=10)
        for rank, host in enumerate("aaaabbbb")
    ]
    assert sorted(map(len, assign_drafts(job))) == [1] * 8


def test_without_replication_there_are_no_drafts():
    job = [
        RankItems(host=f"host{rank}", held=joined([rank]), needed=joined([rank]), size=1)
        for rank in range(50)
    ]
    assert assign_drafts(job) == ((),) * 50


LABELS = {host: (("rack", rack),) for host, rack in zip("abcdef", "112233", strict=True)}


def test_holders_are_those_with_drafts_in_other_domains():
    assert holders_with_drafts("a", ("c",), ("b", "d"), LABELS) == ("d",)
    assert holders_with_drafts("a", ("c", "e"), ("d",), LABELS) == ("d", "c")
    assert holders_with_drafts("a", ("c",), ("c", "d", "e"), LABELS) == ("c",)


def test_a_copy_in_another_domain_is_worth_its_transfer():
    assert holders_with_drafts("a", ("c",), ("b",), LABELS) == ("c",)
    assert holders_with_drafts("a", ("b",), ("c",), {}) == ("c",)


def test_nobody_is_named_who_was_not_asked_for():
    assert holders_with_drafts("a", (), ("b", "c"), LABELS) == ()


@given(st.permutations(list("bcdef")), st.integers(0, 5), st.sets(st.sampled_from("abcdef")))
def test_as_many_holders_as_were_placed_and_never_the_owner(
    order: list[str], count: int, drafted: set[str]
):
    found = holders_with_drafts("a", order[:count], sorted(drafted), LABELS)
    assert len(found) == len(set(found)) == count
    assert "a" not in found
