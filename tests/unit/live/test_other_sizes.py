"""Which size the next world has when processes are missing, or more are there than have ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace as replace_policy
from typing import Any

import pytest
from msgspec.structs import replace

from tieredckpt.live import decide as d
from tieredckpt.live import messages as m
from tieredckpt.policy.ranks import Member

TWO_TO_FOUR = d.Policy(
    per_host=2, hosts=4, hosts_min=2, group=2, standby=0, wait_s=100.0, stable_s=5.0
)
HOSTS = ("a", "b", "c", "d")
STARTS = {host: f"start of {host}" for host in HOSTS}


def process(pid: int, where: m.Where, known: m.Decision, **facts: Any) -> m.ProcessFacts:
    began = known.began if where == "in" else m.NEVER
    return m.ProcessFacts(pid=pid, where=where, began=began, **facts)


def view(known: m.Decision, *where: m.Where, to_start: int = 0, **facts: Any) -> m.View:
    """Of a host whose processes are there; those that are in the generation have made updates."""
    found = [
        process(pid, each, known, version=10 if each == "ready" else None)
        for pid, each in enumerate(where)
    ]
    facts = {"updates": 5, "updated": 10, **facts}
    return m.View(place=known.place, processes=tuple(found), to_start=to_start, began=known.began,
                  **facts)  # fmt: skip


def out_of(known: m.Decision, before: m.View) -> m.View:
    """The view after all ranks have saved together, and left."""
    found = [
        replace(each, where="ready", version=None, began=known.began) for each in before.processes
    ]
    return replace(before, place=known.place, began=known.began, processes=tuple(found))


def begun(*hosts: str, **fields: Any) -> m.Decision:
    """A generation with two ranks on each host."""
    place = (1, hosts[0], "run"), 1
    members = tuple(Member(host, pid, pid) for host in hosts for pid in range(2))
    fields = {"voters": STARTS, **fields}
    return m.Decision(term=place[0], number=1, run="run", generation=1, began=place,
                      members=members, **fields)  # fmt: skip


def next_of(
    known: m.Decision, views: dict[str, m.View], policy: d.Policy = TWO_TO_FOUR, **facts: Any
) -> m.Decision | None:
    leader = min(views)
    views = {host: replace(each, start=each.start or STARTS[host]) for host, each in views.items()}
    facts = {"term": known.term, **facts}
    now = d.Situation(leader=leader, known=known, views=views, **facts)
    assert d.may_lead(policy, now)
    return d.decide(policy, now)


def lost(known: m.Decision, *hosts: str, to_start: int = 0) -> m.Decision | None:
    """What follows once the ranks of all other hosts are out."""
    ended = replace(known, ended="a host is lost")
    views = {host: view(ended, "ready", "ready") for host in HOSTS if host not in hosts}
    views["a"] = replace(views["a"], to_start=to_start)
    return next_of(ended, views)


def test_a_lost_host_that_none_replaces_shrinks_the_world():
    found = lost(begun(*HOSTS), "d")
    assert found is not None
    assert (found.size, found.saves_only, found.wanted, found.shrunk) == (6, False, 6, 1)
    assert not TWO_TO_FOUR.is_changing(found)


def test_what_is_started_again_is_waited_for():
    """All that live save meanwhile, in a world of their own."""
    found = lost(begun(*HOSTS), "d", to_start=2)
    assert found is not None
    assert (found.size, found.saves_only, found.wanted) == (6, True, 0)


def test_fewer_hosts_than_may_be_wait_and_then_end_the_job():
    policy = d.Policy(per_host=2, hosts=4, hosts_min=4, group=2, wait_s=100.0)
    voters = {host: STARTS[host] for host in HOSTS[:3]}
    known = begun(*HOSTS, ended="a host is lost", voters=voters)
    views = {host: view(known, "starting", "starting") for host in HOSTS[:3]}
    assert next_of(known, views, policy, waited_s=99.0) is None
    found = next_of(known, views, policy, waited_s=101.0)
    assert found is not None
    assert found.exit == d.EXIT_RESTART_HOST
    assert found.reason == "6 of 8 processes are left, and no restarts"


@pytest.mark.parametrize(("group", "size"), [(1, 7), (2, 6), (4, 4)])
def test_a_smaller_world_is_a_multiple_of_the_sharding_group(group: int, size: int):
    policy = d.Policy(per_host=2, hosts=4, hosts_min=2, group=group)
    known = begun(*HOSTS, ended="a rank died")
    views = {host: view(known, "ready", "ready") for host in HOSTS[:3]}
    views["d"] = view(known, "ready")
    found = next_of(known, views, policy)
    assert found is not None
    # Of more processes with state than ranks, all save it first.
    assert (found.size, found.saves_only) == (7, size < 7)
    if found.saves_only:
        found = next_of(found, {host: out_of(found, each) for host, each in views.items()}, policy)
    assert found is not None
    assert (found.size, found.saves_only) == (size, False)


def grown(stable_s: float, **fields: Any) -> m.Decision | None:
    """What follows while three hosts train, and a fourth one is ready."""
    known = begun(*HOSTS[:3], wanted=6, **fields)
    views = {host: view(known, "in", "in") for host in HOSTS[:3]}
    views["d"] = view(known, "ready", "ready", updates=0)
    return next_of(known, views, stable_s=stable_s)


def test_a_host_that_arrives_lets_the_world_grow_once_it_has_settled():
    assert grown(4.9) is None
    found = grown(5.0)
    assert found is not None
    assert TWO_TO_FOUR.size_after(found) == 8
    assert TWO_TO_FOUR.is_changing(found)
    assert found.generation == 1


def test_each_world_that_soon_lost_processes_doubles_the_wait():
    assert grown(19.9, shrunk=2) is None
    assert grown(20.0, shrunk=2) is not None
    assert lost(begun(*HOSTS, shrunk=2), "d").shrunk == 3  # type: ignore[union-attr]
    long = begun(*HOSTS, shrunk=2, updated=10 - d.REFILL_UPDATES)
    assert lost(long, "d").shrunk == 0  # type: ignore[union-attr]
    most_s = 5.0 * 2**d.SHRUNK_MAX
    assert grown(most_s - 1, shrunk=1000) is None
    assert grown(most_s, shrunk=1000) is not None


def test_no_world_grows_beyond_what_a_user_ordered():
    assert grown(1e6, order=m.Order(at_ns=1, size=6)) is None


def test_a_host_that_leaves_takes_its_ranks_along():
    known = begun(*HOSTS)
    views = {host: view(known, "in", "in") for host in HOSTS}
    views["d"] = replace(views["d"], left_s=30.0)
    found = next_of(known, views)
    assert found is not None
    assert (found.leaving, found.left_s) == (("d",), 30.0)
    assert TWO_TO_FOUR.size_after(found) == 6
    after = next_of(found, {host: out_of(found, each) for host, each in views.items()})
    assert after is not None
    assert (after.size, after.saves_only, after.shrunk) == (6, False, 0)
    assert {each.host for each in after.members} == {"a", "b", "c"}


@pytest.mark.parametrize("standby", [0, 1])
def test_more_than_half_of_the_largest_number_of_hosts_begin_the_job(standby: int):
    """And none begins while as many train as may be left elsewhere."""
    policy = replace_policy(TWO_TO_FOUR, standby=standby)
    for least, most, begin in ((2, 4, 3), (3, 4, 3), (1, 3, 3), (2, 8, 7), (5, 8, 5)):
        assert d.Policy(per_host=1, hosts=most, hosts_min=least).hosts_to_begin == begin
    known, where = m.Decision(), ["ready"] * (2 + standby)
    views = {host: view(known, *where, updates=0) for host in HOSTS[:3]}
    now = d.Situation(leader="a", known=known, views=views, waited_s=d.LISTED_S - 1)
    assert d.may_lead(policy, now)
    assert d.decide(policy, now) is None  # the fourth one may come
    found = next_of(known, views, policy, waited_s=d.LISTED_S)
    assert found is not None
    assert (found.size, found.wanted) == (6, 6)
    assert Counter(each.host for each in found.members) == {"a": 2, "b": 2, "c": 2}
    assert found.voters == {host: STARTS[host] for host in HOSTS[:3]}
    del views["c"]
    assert not d.may_lead(policy, d.Situation(leader="a", known=known, views=views))


# --- voters ---------------------------------------------------------------------------------------


def training(known: m.Decision, *standbys: str) -> dict[str, m.View]:
    """The views of all hosts of a world that trains, and of some whose processes stand by."""
    hosts = {each.host for each in known.members}
    inside = {host: view(known, "in", "in") for host in sorted(hosts)}
    return {**inside, **{host: view(known, "ready", "ready", updates=0) for host in standbys}}


def test_voters_follow_the_hosts_once_most_of_both_have_adopted_the_change():
    known = begun("a", "b", "c", wanted=6)
    views = training(known)
    first = next_of(known, views)
    assert first is not None
    assert first.voters == {host: STARTS[host] for host in "abc"}
    assert first.old_voters == STARTS
    views = {host: replace(each, place=first.place) for host, each in views.items()}
    behind = {**views, "b": replace(views["b"], place=known.place)}
    assert next_of(first, behind) is None  # two of the old four
    second = next_of(first, views)
    assert second is not None
    assert (second.voters, second.old_voters) == (first.voters, {})
    views = {host: replace(each, place=second.place) for host, each in views.items()}
    assert next_of(second, views) is None


def test_one_of_two_voters_does_not_go_on_alone():
    alone = begun("a", "b", voters={host: STARTS[host] for host in "ab"}, ended="host b is lost")
    views = {"a": view(alone, "ready", "ready")}
    assert not d.may_lead(TWO_TO_FOUR, d.Situation(leader="a", known=alone, views=views))


def test_while_voters_change_both_sides_have_to_agree():
    three = {host: STARTS[host] for host in "abc"}
    known = begun("a", "b", "c", voters=three, old_voters=STARTS, ended="a host is lost")
    for hosts in ("ab", "acd", "abc"):
        views = {h: replace(view(known, "ready", "ready"), start=STARTS[h]) for h in hosts}
        now = d.Situation(leader="a", known=known, views=views, term=known.term)
        assert d.may_lead(TWO_TO_FOUR, now) == (hosts != "ab")


def test_a_user_may_order_a_world_of_few_hosts_and_they_vote_alone():
    """The order counts once the hosts that it leaves are the voters, and they stay so."""
    policy = d.Policy(per_host=2, hosts=4)
    known = begun(*HOSTS)
    views = training(known)
    views["a"] = replace(views["a"], order=m.Order(at_ns=1, size=1))
    assert next_of(known, views) is None  # two hosts at least are to train: --nnodes 2:4
    first = next_of(known, views, policy)
    assert first is not None
    assert (first.order, first.voters) == (m.Order(), {"a": STARTS["a"]})
    views = {host: replace(each, place=first.place) for host, each in views.items()}
    second = next_of(first, views, policy)
    assert second is not None
    views = {host: replace(each, place=second.place) for host, each in views.items()}
    third = next_of(second, views, policy)
    assert third is not None
    assert third.order == m.Order(at_ns=1, size=1, before=8)
    views = {host: replace(each, place=third.place) for host, each in views.items()}
    assert next_of(third, views, policy) is None


def test_most_voters_know_whether_the_world_that_is_goes_on():
    """A majority of hosts that all are new would not: at least half of the voters have ranks."""
    known = begun("a", voters={"a": STARTS["a"]}, order=m.Order(at_ns=1, size=2))
    views = training(known, "b", "c", "d")
    views["a"] = replace(views["a"], left_s=30.0)
    assert next_of(known, views) is None  # then the host ends without


def test_a_host_that_was_started_anew_has_forgotten_what_it_acknowledged():
    known = begun("a", "b", "c", voters={host: STARTS[host] for host in "abc"}, ended="lost")
    views = {host: replace(view(known, "ready"), start="another") for host in "ab"}
    views["a"] = replace(views["a"], start=STARTS["a"])
    now = d.Situation(leader="a", known=known, views=views, term=known.term)
    assert not d.may_lead(TWO_TO_FOUR, now)  # the third one may know of other voters
    views["c"] = replace(views["b"])
    found = next_of(known, views)
    assert found is not None
    assert found.exit == d.EXIT_RESTART_HOST
    assert found.reason == "too many hosts were started anew at a time"
    # Of two hosts, the one that is left knows all that both have adopted.
    known = begun("a", "b", voters={host: STARTS[host] for host in "ab"}, ended="lost")
    del views["c"]
    assert d.may_lead(TWO_TO_FOUR, d.Situation(leader="a", known=known, views=views))


def test_a_new_leader_repeats_the_newest_decision_in_its_own_term():
    known = begun(*HOSTS)
    found = next_of(known, training(known), term=(2, "b", "run"))
    assert found is not None
    assert found == replace(known, term=(2, "b", "run"), number=2)
