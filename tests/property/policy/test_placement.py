"""The laws of the placement of replicas, whatever the hosts are."""

from __future__ import annotations

from collections import Counter

from hypothesis import event, given
from hypothesis import strategies as st

from tests.support.lines import lines_run
from tieredckpt.policy.placement import Placement, PlacementHost, domains_of, place


@st.composite
def hosts(draw, most: int = 24):
    """Hosts with no, one or two levels of labels, some without."""
    zones, racks = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    levels = draw(st.integers(0, 2))
    found = []
    for number in range(draw(st.integers(1, most))):
        zone, rack = draw(st.integers(0, zones - 1)), draw(st.integers(0, racks - 1))
        labels = (("zone", f"z{zone}"), ("rack", f"r{rack}"))[:levels]
        if draw(st.integers(0, 9)) == 0:
            labels = ()
        found.append(PlacementHost(f"h{number:03}", labels))
    return found


replicas = st.integers(0, 4)


def path(host: PlacementHost) -> tuple[tuple[str, ...], ...]:
    return (*host.domains, (host.host_id,))


def shared(one: PlacementHost, other: PlacementHost) -> int:
    count = 0
    for a, b in zip(path(one), path(other), strict=False):
        if a != b:
            break
        count += 1
    return count


def loads(placement: Placement) -> Counter[str]:
    return Counter(h for held in placement.holders.values() for h in held)


def check(members: list[PlacementHost], wanted: int, placement: Placement) -> None:
    by_id = {host.host_id: host for host in members}
    count = len(by_id)
    possible = min(wanted, count - 1)
    assert placement.possible == possible
    assert len(placement.warnings) == (possible < wanted)
    assert list(placement.holders) == sorted(by_id)
    for owner, held in placement.holders.items():
        assert owner not in held
        assert len(set(held)) == len(held) == possible
        assert set(held) <= by_id.keys()
    load = loads(placement)
    assert max(load.values(), default=0) <= possible + 1
    for owner, held in placement.holders.items():
        for holder in held:
            levels = shared(by_id[owner], by_id[holder])
            for other, host in by_id.items():
                if other in held or other == owner:
                    continue
                # No other host with room is in a wider domain than this holder.
                if shared(by_id[owner], host) < levels:
                    assert load[other] >= possible + 1, (owner, holder, other)
    sizes: Counter[tuple[tuple[str, ...], ...]] = Counter()
    for host in by_id.values():
        sizes.update(path(host)[: depth + 1] for depth in range(len(path(host))))
    for owner, held in placement.holders.items():
        if possible and sizes[path(by_id[owner])[:1]] * (possible + 1) <= count:
            event("its widest domain is small enough: all its copies are outside")
            assert not any(shared(by_id[owner], by_id[holder]) for holder in held)


@given(hosts(), replicas)
def test_laws(members, wanted) -> None:
    check(members, wanted, place(members, wanted))


@given(hosts(), replicas, st.randoms(use_true_random=False))
def test_the_order_of_the_arguments_decides_nothing(members, wanted, random) -> None:
    mixed = list(members)
    random.shuffle(mixed)
    assert place(members, wanted) == place(mixed, wanted)


@given(hosts(), replicas, st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=12))
def test_laws_hold_while_hosts_come_and_go(members, wanted, changes) -> None:
    placement = place(members, wanted)
    number = 100
    for joins, which in changes:
        if joins:
            like = members[which % len(members)]
            members = [*members, PlacementHost(f"h{(number := number + 1)}", like.domains)]
        elif len(members) > 1:
            gone = members[which % len(members)]
            members = [host for host in members if host != gone]
        placement = place(members, wanted, placement.holders)
        check(members, wanted, placement)
        assert place(members, wanted, placement.holders) == placement, "a second time moves nothing"


@given(
    st.integers(2, 80), st.integers(1, 4), st.integers(0, 3), st.lists(st.booleans(), max_size=8)
)
def test_few_owners_change_their_holders(count, wanted, racks, joins) -> None:
    """Racks of equal size (or none): domains forbid nothing that would need more moves."""
    racks = racks and (wanted + 1) * 2
    label = (lambda n: (("rack", f"r{n % racks}"),)) if racks else (lambda n: ())
    members = [PlacementHost(f"h{n:03}", label(n)) for n in range(max(count, racks * 2))]
    before = place(members, wanted)
    for number, join in enumerate(joins):
        if join:
            members = [*members, PlacementHost(f"n{number}", label(number))]
        elif len(members) > wanted + 2:
            members = members[1:]
        after = place(members, wanted, before.holders)
        stayed = before.holders.keys() & after.holders.keys()
        moved = [host for host in stayed if before.holders[host] != after.holders[host]]
        if len(before.holders[next(iter(stayed))]) == after.possible:
            assert len(moved) <= 3 * (wanted + 1), moved
            if not racks:
                load = loads(after)
                assert max(load.values()) - min(load[host] for host in after.holders) <= 1
        before = after


@given(st.integers(1, 60), st.integers(1, 4))
def test_without_labels_hosts_are_grouped(count, wanted) -> None:
    placement = place([PlacementHost(f"h{n}") for n in range(count)], wanted)
    size = placement.possible + 1
    groups = Counter(frozenset((o, *held)) for o, held in placement.holders.items())
    whole = sum(number == size for number in groups.values())
    if count >= size:
        assert whole >= count // size - (1 if count % size else 0)
    assert all(number == placement.possible for number in loads(placement).values())


@given(hosts(), replicas, st.data())
def test_any_previous_placement_is_mended(members, wanted, data) -> None:
    ids = st.sampled_from([*(host.host_id for host in members), "gone", ""])
    previous = data.draw(st.dictionaries(ids, st.lists(ids, max_size=5).map(tuple)))
    check(members, wanted, place(members, wanted, previous))


def test_zones_before_racks():
    """Two zones of two racks: a copy is in the other zone; within one zone in the other rack."""
    label = [(("zone", z), ("rack", r)) for z in "ab" for r in "12"]
    members = [PlacementHost(f"h{n}", label[n % 4]) for n in range(16)]
    at = {host.host_id: host.domains for host in members}
    for owner, (holder,) in place(members, 1).holders.items():
        assert at[owner][0] != at[holder][0]
    one_zone = [host for host in members if host.domains[0] == ("zone", "a")]
    for owner, (holder,) in place(one_zone, 1).holders.items():
        assert at[owner] != at[holder]


def test_a_zone_that_cannot_hold_all_is_filled_and_no_more():
    members = [PlacementHost(f"a{n}", (("zone", "a"),)) for n in range(9)]
    members.append(PlacementHost("b", (("zone", "b"),)))
    placement = place(members, 1)
    assert loads(placement)["b"] == 2


def test_a_replaced_host_takes_the_place_of_the_lost_one():
    members = [PlacementHost(f"h{n}") for n in range(12)]
    before = place(members, 2).holders
    after = place([*members[1:], PlacementHost("new")], 2, before).holders
    changed = {host for host in after if host != "new" and after[host] != before[host]}
    assert changed == set(before["h0"])
    assert set(after["new"]) == changed


def test_labels_are_ordered_widest_first():
    labels = {"rack": "r1", "power": "p", "zone": "z", "chassis": "c"}
    assert domains_of(labels) == (
        ("zone", "z"), ("rack", "r1"), ("chassis", "c"), ("power", "p"),
    )  # fmt: skip


def test_ten_thousand_hosts():
    members = [
        PlacementHost(f"h{n}", (("zone", f"z{n % 3}"), ("rack", f"r{n % 300}")))
        for n in range(10_000)
    ]
    small = lines_run(lambda: place(members[:1000], 2))
    large = lines_run(lambda: place(members, 2))
    assert large < 20 * small, "ten times the hosts must not cost their square"
