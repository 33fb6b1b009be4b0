"""What replication never says and never lets go of, whatever records there are."""

from __future__ import annotations

from collections.abc import Mapping, Set

from hypothesis import event, given
from hypothesis import strategies as st

from tests.simulation.cluster_leader import scarce
from tests.support.saves import ack, made, manifest_of, order, record
from tieredckpt.format.manifest import Holders, Manifest
from tieredckpt.format.records import SaveRecord
from tieredckpt.policy.placement import PlacementHost, place
from tieredckpt.policy.replication import (
    can_complete,
    given_up,
    is_replicated,
    jobs_of,
    must_stay,
    newest_replicated,
    next_of_streams,
    next_order,
    ordered_and_open,
    placement_of,
    progress,
    repair,
    said_anew,
    vouchers,
    was_replicated,
)

HOSTS = [f"h{n}" for n in range(6)]
NAMES = st.sampled_from([*HOSTS, "stranger"])
PLACEMENTS = st.lists(
    st.builds(Holders, NAMES, st.lists(NAMES, max_size=4).map(tuple)),
    max_size=4,
    unique_by=lambda holders: holders.host,
).map(tuple)
LIVES = st.dictionaries(st.sampled_from(HOSTS), st.sampled_from([made("life", 0), made("life", 1)]))


@st.composite
def manifests(draw, seq: int = 0, stream: str = "default"):
    owners = draw(st.lists(st.sampled_from(HOSTS), min_size=1, max_size=6))
    return manifest_of(seq, owners, draw(PLACEMENTS), stream=stream)


@st.composite
def records_of(draw, *manifests_):
    """Any records: by anybody, of any life, contradictory."""
    found = []
    for _ in range(draw(st.integers(0, 12))):
        manifest = draw(st.sampled_from(manifests_))
        segments = [ref.id for ref in manifest.segments] + [made("segment", 99, 99)]
        kind = draw(
            st.sampled_from(["order", "ack", "ack", "ack", "replicated", "bad", "restored"])
        )
        found.append(
            record(
                manifest,
                kind,
                host=draw(NAMES),
                incarnation=made("life", draw(st.integers(0, 1))),
                segments=tuple(draw(st.sets(st.sampled_from(segments)))) if kind == "ack" else (),
                placement=draw(PLACEMENTS) if kind == "order" else (),
                stream=draw(st.sampled_from([manifest.stream] * 5 + ["other"])),
            )
        )
    return found


def acks_of(manifest: Manifest, holdings: Mapping[str, Set[str]]) -> list[SaveRecord]:
    """What hosts say that hold these segments, all in their first life."""
    life = made("life", 0)
    return [
        record(manifest, "ack", host=host, incarnation=life, segments=tuple(sorted(held)))
        for host, held in holdings.items()
    ]


@given(st.data(), manifests(), LIVES)
def test_complete_means_that_enough_live_hosts_said_so(data, manifest, lives) -> None:
    records = data.draw(records_of(manifest))
    copies = progress(manifest, records, lives)
    for ref in manifest.segments:
        said = {
            r.host
            for r in records
            if r.kind == "ack" and ref.id in r.segments and lives.get(r.host) == r.incarnation
            and r.stream == manifest.stream
        }  # fmt: skip
        wanted = [len(set(h.holders) - {h.host}) for h in manifest.replicas if h.host == ref.host]
        if copies.complete:
            assert len(said) >= 1 + max([1, *wanted])
            event("complete")
        missing = [holder for segment, _, holder in copies.missing if segment == ref.id]
        assert not {holder for holder in missing if holder} & said
    assert copies.complete == (copies.done == copies.wanted)
    assert copies.done < copies.wanted or not copies.missing
    assert copies.complete or copies.missing


@given(st.data(), manifests(), LIVES, st.randoms(use_true_random=False))
def test_the_order_of_records_decides_nothing(data, manifest, lives, random) -> None:
    records = data.draw(records_of(manifest))
    mixed = [*records, *records[:3]]
    random.shuffle(mixed)
    assert placement_of(manifest, records) == placement_of(manifest, mixed)
    assert progress(manifest, records, lives) == progress(manifest, mixed, lives)
    assert must_stay([manifest], records) == must_stay([manifest], mixed)
    assert next_order([manifest], records) == next_order([manifest], mixed)
    for host in HOSTS:
        jobs = jobs_of(host, made("life", 0), manifest, records)
        assert jobs == jobs_of(host, made("life", 0), manifest, mixed)


@given(st.data(), manifests(), LIVES)
def test_acknowledgements_only_ever_help_and_losses_never_do(data, manifest, lives) -> None:
    records = data.draw(records_of(manifest))
    more = [*records, *(r for r in data.draw(records_of(manifest)) if r.kind == "ack")]
    assert progress(manifest, more, lives).done >= progress(manifest, records, lives).done
    for gone in lives:
        rest = {host: life for host, life in lives.items() if host != gone}
        if progress(manifest, records, rest).complete:
            assert progress(manifest, records, lives).complete


@given(st.data(), manifests())
def test_jobs_are_what_was_ordered_and_not_done(data, manifest) -> None:
    records = data.draw(records_of(manifest))
    placement = placement_of(manifest, records)
    lost = data.draw(st.frozensets(NAMES))
    for host in (*HOSTS, "stranger"):
        jobs = jobs_of(host, made("life", 1), manifest, records, lost)
        done = {
            s for r in records if r.kind == "ack" and r.host == host and r.stream == "default"
            and r.incarnation == made("life", 1) for s in r.segments
        }  # fmt: skip
        ordered = any(r.kind == "order" and r.stream == "default" for r in records)
        expected = {
            ref.id for ref in manifest.segments
            if ordered and host in (ref.host, *placement[ref.host]) and ref.id not in done
        }  # fmt: skip
        assert {job.ref.id for job in jobs} == expected
        assert len(jobs) == len(expected)
        for job in jobs:
            assert host not in job.sources
            assert job.own == (job.ref.host == host)
            assert job.own or job.ref.host in job.sources
            assert len(set(job.sources)) == len(job.sources)
            states = [source in lost for source in job.sources]
            assert states == sorted(states), "lost hosts are asked last"


@given(st.data(), st.integers(1, 6))
def test_orders(data, count) -> None:
    """What is ordered next, and what must stay, over one line."""
    line = [data.draw(manifests(seq)) for seq in reversed(range(count))]
    records = data.draw(records_of(*line))
    lives = data.draw(st.none() | LIVES)
    ids = [manifest.save_id for manifest in line]
    newest = newest_replicated(line, records)
    stay = must_stay(line, records)
    if newest is not None:
        assert newest.save_id in stay
        assert was_replicated(newest, records)
        assert all(ids.index(each) <= ids.index(newest.save_id) for each in stay)
    active = ordered_and_open(line, records, lives)
    assert {manifest.save_id for manifest in active} <= stay
    chosen = next_order(line, records, lives)
    if active:
        assert chosen is None, "one is replicated at a time"
    if chosen is not None:
        event("something is ordered")
        assert newest is None or ids.index(chosen) < ids.index(newest.save_id)
        assert not any(r.kind == "order" and r.save_id == chosen and r.stream == "default"
                       for r in records)  # fmt: skip
        free = [m.save_id for m in line if m.replicas
                and (lives is None or can_complete(m, records, lives))]  # fmt: skip
        ordered = {r.save_id for r in records if r.kind == "order" and r.stream == "default"}
        assert chosen == next(each for each in free if each not in ordered)
    without_replicas = [m for m in line if not m.replicas]
    assert next_order(without_replicas, [], lives) is None


# --- the word "replicated" ------------------------------------------------------------------------


def life(host: str, number: int = 0) -> str:
    """An incarnation of this host alone."""
    return made("life of", host, number)


@st.composite
def acknowledged(draw, manifest):
    """Orders, and acknowledgements of hosts in one of two incarnations."""
    found = [order(manifest, draw(PLACEMENTS)) for _ in range(draw(st.integers(1, 2)))]
    ids = [ref.id for ref in manifest.segments]
    for host in HOSTS:
        number = draw(st.sampled_from([0, 0, 0, 1]))
        segments = tuple(each for each in ids if draw(st.integers(0, 9)))
        said = record(manifest, "ack", host=host, incarnation=life(host, number), segments=segments)
        found.append(said)
    return found


@given(st.data(), manifests(), st.sets(st.sampled_from(HOSTS), min_size=4))
def test_a_word_holds_as_long_as_the_memories_that_it_rests_on(data, manifest, alive) -> None:
    records = data.draw(acknowledged(manifest))
    lives = {host: life(host) for host in alive}
    memories = vouchers(manifest, records, lives)
    assert bool(memories) == progress(manifest, records, lives).complete
    assert set(memories) <= set(lives.values())
    if not memories:
        return
    event("complete")
    said = [*records, record(manifest, "replicated", segments=memories)]
    assert is_replicated(manifest, said, lives)
    assert is_replicated(manifest, [*said, *data.draw(records_of(manifest))], lives)
    more = {**lives, "another": life("another")}
    assert is_replicated(manifest, said, more)
    for host in alive:
        for changed in (
            {h: each for h, each in lives.items() if h != host},
            {**lives, host: life(host, 2)},
        ):
            counts = life(host) not in memories
            assert is_replicated(manifest, said, changed) == counts
            assert was_replicated(manifest, said)
            if counts:
                assert progress(manifest, records, changed).complete, "what it rests on is there"
            # It is said anew if the copies are there all the same, or again.
            anew = said_anew([manifest], said, changed)
            complete = progress(manifest, records, changed).complete
            assert (anew is not None) == (complete and not counts)
            if anew is not None:
                word = record(manifest, "replicated", segments=vouchers(manifest, said, changed))
                assert is_replicated(manifest, [*said, word], changed)
                assert said_anew([manifest], [*said, word], changed) is None


def test_a_word_of_nobody_and_one_without_an_order_hold_nothing() -> None:
    manifest = manifest_of(0, ["h0"], (Holders("h0", ("h1",)),))
    lives = {"h0": life("h0"), "h1": life("h1")}
    both = tuple(lives.values())
    assert not is_replicated(manifest, [order(manifest), record(manifest, "replicated")], lives)
    assert not is_replicated(manifest, [record(manifest, "replicated", segments=both)], lives)
    word = record(manifest, "replicated", segments=both)
    assert is_replicated(manifest, [order(manifest), word], lives)


@given(st.data(), st.integers(1, 5), st.sets(st.sampled_from(HOSTS)))
def test_what_must_stay_after_a_loss(data, count, alive) -> None:
    """As before it, and the newest one that has all its copies still."""
    line = [data.draw(manifests(seq)) for seq in reversed(range(count))]
    records = []
    for manifest in line:
        of = data.draw(acknowledged(manifest))
        before = {host: life(host) for host in HOSTS}
        if data.draw(st.booleans()) and (memories := vouchers(manifest, of, before)):
            of.append(record(manifest, "replicated", segments=memories))
        records += of
    lives = {host: life(host) for host in alive}
    stay = must_stay(line, records, incarnations=lives)
    assert stay >= must_stay(line, records)
    whole = newest_replicated(line, records, lives)
    assert stay - must_stay(line, records) <= ({whole.save_id} if whole is not None else set())
    if whole is not None:
        event("one is whole")
        assert whole.save_id in stay
        assert progress(whole, records, lives).complete


def test_a_host_that_was_lost_and_its_successor() -> None:
    """Replicated, not any more, and again once another host has the copy."""
    older, manifest = (manifest_of(n, ["h0"], (Holders("h0", ("h1",)),)) for n in (0, 1))
    line = (manifest, older)
    lives = {host: life(host) for host in HOSTS}
    records = []
    for each in line:
        records += [order(each), *(
            record(each, "ack", host=host, incarnation=life(host),
                   segments=(each.segments[0].id,)) for host in ("h0", "h1")
        )]  # fmt: skip
        records.append(record(each, "replicated", segments=vouchers(each, records, lives)))
    assert must_stay(line, records, incarnations=lives) == {manifest.save_id}
    rebooted = {**lives, "h1": life("h1", 1)}
    assert newest_replicated(line, records, rebooted) is None
    assert must_stay(line, records, incarnations=rebooted) == {manifest.save_id}
    assert next_order(line, records, rebooted) is None, "it is repaired, not ordered"
    records.append(record(manifest, "ack", host="h1", incarnation=life("h1", 1),
                          segments=(manifest.segments[0].id,)))  # fmt: skip
    assert said_anew(line, records, rebooted) == manifest
    assert said_anew(line, records, lives) is None


def test_while_one_is_replicated_nothing_else_is_ordered_then_the_newest():
    owners, replicas = ["h0", "h1"], (Holders("h0", ("h1",)), Holders("h1", ("h0",)))
    line = [manifest_of(seq, owners, replicas) for seq in (3, 2, 1, 0)]
    first = order(line[3])
    assert next_order(line[3:], []) == line[3].save_id
    assert next_order(line, [first]) is None
    done = record(line[3], "replicated")
    assert must_stay(line, [first]) == {line[3].save_id}
    assert next_order(line, [first, done]) == line[0].save_id, "1 and 2 are overtaken"
    second = order(line[0])
    assert must_stay(line, [first, done, second]) == {line[0].save_id, line[3].save_id}
    assert must_stay(line, [first, done, second, record(line[0], "replicated")]) == {
        line[0].save_id
    }
    assert must_stay(line, [first, done], "other") == set()


def test_an_order_that_cannot_be_completed_holds_up_nothing():
    """Its owner is lost before anybody had a copy; or there are fewer hosts than copies."""
    owners, replicas = ["h0", "h1"], (Holders("h0", ("h1", "h2")), Holders("h1", ("h0", "h2")))
    line = [manifest_of(seq, owners, replicas) for seq in (1, 0)]
    lives = {host: made("life", 0) for host in HOSTS}
    records = [order(line[1])]
    assert can_complete(line[1], records, lives)
    gone = {host: life for host, life in lives.items() if host != "h0"}
    assert not can_complete(line[1], records, gone)
    assert next_order(line, records, gone) is None, "the newer one cannot be completed either"
    rest = {host: life for host, life in lives.items() if host != "h5"}
    newer = [manifest_of(2, ["h1"], (Holders("h1", ("h2",)),)), *line]
    assert next_order(newer, records, gone) == newer[0].save_id
    assert next_order(newer, records, rest) is None
    records.append(ack(line[1], "h1", "h0"))
    assert can_complete(line[1], records, gone)
    assert next_order(line, records, gone) is None
    assert not can_complete(line[1], records, {"h1": made("life", 0), "h2": made("life", 0)})
    assert can_complete(line[1], records, {host: made("life", 0) for host in ("h0", "h1", "h2")})


def test_an_order_is_given_up_for_a_newer_one_only():
    """While nothing newer can be copied the host that is waited for may come back."""
    three, two = (Holders("h0", ("h1", "h2")),), (Holders("h0", ("h1",)),)
    older, newer = manifest_of(0, ["h0"], three), manifest_of(1, ["h0"], two)
    lives = {host: made("life", 0) for host in ("h0", "h1")}
    records = [order(older)]
    assert given_up((older,), records, lives) == ()
    assert given_up((newer, older), records, lives) == (older,)
    assert given_up((newer, older), records, {**lives, "h2": made("life", 0)}) == ()
    ordered = [*records, order(newer)]
    assert given_up((newer, older), ordered, lives) == (older,), "also once that is under way"
    records.append(record(older, "failed"))
    assert given_up((newer, older), records, lives) == ()
    assert next_order((newer, older), records, lives) == newer.save_id


def test_a_lost_holder_counts_through_its_replacement():
    manifest = manifest_of(0, ["h0"], (Holders("h0", ("h1", "h2")),))
    lives = {host: made("life", 0) for host in HOSTS}
    records = [order(manifest), *(ack(manifest, host, "h0") for host in ("h0", "h1", "h3"))]
    copies = progress(manifest, records, lives)
    assert not copies.complete, "h3 was not told to"
    assert copies.missing == ((manifest.segments[0].id, "h0", "h2"),)
    records.append(order(manifest, (Holders("h0", ("h3",)),)))
    assert progress(manifest, records, lives).complete
    del lives["h1"]
    copies = progress(manifest, records, lives)
    assert (copies.done, copies.wanted) == (1, 2)
    assert [holder for *_, holder in copies.missing] == ["h2"]
    lives["h1"] = made("life", 1)
    assert not progress(manifest, records, lives).complete, "rebooted: what it held is gone"


def test_the_owner_counts_if_it_says_so():
    manifest = manifest_of(0, ["h0"], (Holders("h0", ("h1",)),))
    lives = {host: made("life", 0) for host in HOSTS}
    records = [order(manifest), ack(manifest, "h1", "h0")]
    copies = progress(manifest, records, lives)
    assert (copies.done, copies.wanted) == (0, 1)
    assert copies.missing == ((manifest.segments[0].id, "h0", "h0"),)
    (job,) = jobs_of("h0", made("life", 0), manifest, records)
    assert job.own
    assert job.sources == ("h1",), "if it has lost it, it pulls it back"
    assert progress(manifest, [*records, ack(manifest, "h0", "h0")], lives).complete
    del lives["h0"]
    assert not progress(manifest, [*records, ack(manifest, "h0", "h0")], lives).complete
    records += [order(manifest, (Holders("h0", ("h2",)),)), ack(manifest, "h2", "h0")]
    assert progress(manifest, records, lives).complete, "two copies, as was decided"


def test_streams_take_turns():
    replicas = (Holders("h0", ("h1",)),)
    lines = {name: [manifest_of(0, ["h0"], replicas, stream=name)] for name in ("a", "b", "c")}
    records: list = []
    last, seen = None, []
    for seq in range(1, 7):
        chosen = next_of_streams(lines, records, last)
        (last,) = [name for name, line in lines.items() if line[0].save_id == chosen]
        seen.append(last)
        manifest = lines[last][0]
        records.append(order(manifest))
        assert next_of_streams(lines, records, last) is None
        records.append(record(manifest, "replicated"))
        lines[last].insert(0, manifest_of(seq, ["h0"], replicas, stream=last))
    assert "".join(seen) == "abcabc"
    del lines["b"]
    assert next_of_streams(lines, records, "a") == lines["c"][0].save_id


@given(st.data(), st.integers(1, 8), st.integers(0, 3))
def test_repair_makes_enough_copies_and_no_more(data, count, replicas) -> None:
    racks = data.draw(st.integers(1, 4))
    hosts = [PlacementHost(f"h{n}", (("rack", f"r{n % racks}"),)) for n in range(count)]
    owners = [host.host_id for host in hosts for _ in range(2)]
    holders = place(hosts, replicas).holders
    manifest = manifest_of(0, owners, tuple(Holders(o, held) for o, held in holders.items()))
    ids = [ref.id for ref in manifest.segments]
    lost = data.draw(st.sets(st.sampled_from(hosts), max_size=3))
    members = [host for host in hosts if host not in lost]
    members += [PlacementHost(f"n{n}") for n in range(data.draw(st.integers(0, 3)))]
    holdings = {
        host.host_id: {
            ref.id for ref in manifest.segments
            if host.host_id == ref.host or host.host_id in holders[ref.host]
        }
        for host in hosts
    }  # fmt: skip
    for host in holdings:
        holdings[host] -= data.draw(st.sets(st.sampled_from(ids), max_size=1))
    acks = acks_of(manifest, holdings)
    lives = {host.host_id: made("life", 0) for host in members}
    added = repair(manifest, [*acks, order(manifest)], members, replicas, lives)
    alive = {host.host_id for host in members}
    for each in added:
        assert each.host not in each.holders
        assert len(set(each.holders)) == len(each.holders)
        assert set(each.holders) <= alive
        assert not set(each.holders) & set(holders[each.host])
    told = {host: set(held) & alive for host, held in holders.items()}
    for each in added:
        told[each.host] |= set(each.holders)
    for ref in manifest.segments:
        if not any(ref.id in holdings.get(host, ()) for host in alive):
            continue
        assert len(told[ref.host] | ({ref.host} & alive)) >= min(1 + replicas, len(alive))
    if not lost:
        assert len(added) <= count
    again = [*acks, record(manifest, "order", placement=added)]
    assert repair(manifest, again, members, replicas, lives) == (), "asked twice, told once"
    # The holders pull what they were told to: then nothing is scarce any more, if it is anywhere.
    for ref in manifest.segments:
        if any(ref.id in holdings.get(host, ()) for host in alive):
            for holder in told[ref.host] | ({ref.host} & alive):
                holdings.setdefault(holder, set()).add(ref.id)
    if len(members) > 1 + replicas:
        gone = {i for i in ids if not any(i in holdings.get(host, ()) for host in alive)}
        assert set(scarce(manifest, holdings, alive, replicas)) == gone


def test_repair_spreads_what_a_lost_host_held():
    hosts = [PlacementHost(f"h{n:02}") for n in range(20)]
    holders = place(hosts, 2).holders
    manifest = manifest_of(
        0, [h.host_id for h in hosts], tuple(map(Holders, *zip(*holders.items(), strict=True)))
    )
    holdings = {
        host.host_id: {
            ref.id for ref in manifest.segments
            if host.host_id in (ref.host, *holders[ref.host])
        }
        for host in hosts
    }  # fmt: skip
    acks = acks_of(manifest, holdings)
    lives = {host.host_id: made("life", 0) for host in hosts[1:]}
    added = repair(manifest, acks, hosts[1:], 2, lives)
    assert {each.host for each in added} == {"h00", *(o for o in holders if "h00" in holders[o])}
    assert len({each.holders for each in added}) == 3, "three owners, three different hosts"


def test_repair_goes_to_another_rack():
    hosts = [PlacementHost(f"h{n}", (("rack", f"r{n % 3}"),)) for n in range(9)]
    manifest = manifest_of(0, ["h0"], (Holders("h0", ("h1",)),))
    has = {"h1": {manifest.segments[0].id}}
    assert scarce(manifest, has, HOSTS, 1) == (manifest.segments[0].id,)
    lives = {host.host_id: made("life", 0) for host in hosts[1:]}
    ((owner, (holder,)),) = [
        (h.host, h.holders) for h in repair(manifest, acks_of(manifest, has), hosts[1:], 1, lives)
    ]
    assert owner == "h0"
    assert int(holder[1:]) % 3 != 1, "h1, which has it, is in r1"


def test_a_failed_order_holds_up_nothing_and_keeps_nothing() -> None:
    older = manifest_of(0, ["h0"], (Holders("h0", ("h1",)),))
    newer = manifest_of(1, ["h0"], (Holders("h0", ("h1",)),))
    ordered = [order(older)]
    assert next_order((newer, older), ordered) is None
    assert must_stay((newer, older), ordered) == {older.save_id}
    failed = [*ordered, record(older, "failed", host="h1", incarnation=made("life", 0))]
    assert next_order((newer, older), failed) == newer.save_id
    assert must_stay((newer, older), failed) == set()
    assert next_order((older,), failed) is None, "it is not ordered again"
