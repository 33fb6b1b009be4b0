"""A recovery plan over many hosts: digests for manifests, silent hosts, marks, and how it grows."""

from __future__ import annotations

import msgspec

from benchmarks.hosts import encoded_holdings
from tests.support.lines import lines_run
from tieredckpt.format.manifest import Holders, Manifest, decode_manifest, encode_manifest
from tieredckpt.format.records import RecordKind, SaveRecord, encode_save_record
from tieredckpt.recovery.evidence import SourceRef, known_manifests, nearest_first
from tieredckpt.recovery.plan import REASONS_MAX, plan_recovery
from tieredckpt.storage.holdings import (
    Holdings,
    TierFacts,
    decode_holdings,
    encode_holdings,
    manifest_digest,
    slimmed,
)

RATIO_MAX = 4.4
"""Of the lines run for 128 hosts to those for 32: 4 if it is linear, 16 if it is quadratic."""


def cluster(hosts: int = 4, ranks: int = 2, checkpoints: int = 3) -> list[Holdings]:
    """Each host holds its own segments and those of the host before it."""
    return [decode_holdings(data) for data in encoded_holdings(hosts, ranks, checkpoints)]


def manifest_of(holdings: list[Holdings], number: int = -1) -> Manifest:
    data = holdings[0].tiers[0].manifests[number].manifest
    assert data is not None
    return decode_manifest(data)


def record(manifest: Manifest, kind: RecordKind, **fields: object) -> bytes:
    values = {
        "namespace": "run", "stream": "default", "save_id": manifest.save_id, "kind": kind,
        "id": f"{len(fields):032x}", "host": "host-00000", "incarnation": "c" * 32,
    }  # fmt: skip
    return encode_save_record(SaveRecord(**{**values, **fields}))  # type: ignore[arg-type]


def lines(holdings: list[Holdings]) -> int:
    return lines_run(lambda: plan_recovery(holdings, unreachable={}))


def test_a_plan_is_linear_in_the_number_of_hosts():
    small, large = cluster(32, 8, 3), cluster(128, 8, 3)
    assert plan_recovery(large, unreachable={}).chosen is not None
    assert lines(large) <= RATIO_MAX * lines(small)


def test_lost_segments_make_no_endless_text():
    holdings = cluster(60, 8, 2)[:20]
    plan = plan_recovery(holdings, unreachable={f"host-{n:05d}": "is away" for n in range(20, 60)})
    assert plan.chosen is None
    for refusal in plan.refused:
        assert refusal.reason.count("segment") == REASONS_MAX + 1
        assert len(refusal.reason) < 4000
        assert "not asked: host host-00020: is away" in refusal.reason
    assert len(plan.incomplete) == 40


# --- manifests that come as digests ---------------------------------------------------------------


def test_manifests_come_once_and_count_everywhere():
    holdings = cluster()
    assert all(fact.manifest is not None for fact in holdings[0].tiers[0].manifests)
    for each in holdings[1:]:
        assert all(fact.manifest is None and fact.digest for fact in each.tiers[0].manifests)
    plan = plan_recovery(holdings)
    assert [c.manifest.step for c in plan.candidates] == [2, 1, 0]
    assert plan.refused == ()
    # Whoever has the bytes, in whatever place.
    assert plan_recovery(holdings[::-1]).refused == ()


def test_slimming_keeps_what_the_receiver_lacks():
    first = cluster()[0]
    names = [manifest_digest(f.manifest) for f in first.tiers[0].manifests if f.manifest]
    twice = msgspec.structs.replace(
        first,
        tiers=(first.tiers[0], msgspec.structs.replace(first.tiers[0], tier="nvme", kind="file")),
    )
    slim = slimmed(twice, names[:1])
    assert [f.manifest is not None for f in slim.tiers[0].manifests] == [False, True, True]
    assert [f.manifest for f in slim.tiers[1].manifests] == [None] * 3
    assert [f.digest for f in slim.tiers[1].manifests] == names
    assert decode_holdings(encode_holdings(slim)) == slim
    # The receiver has the first one, and so nothing is lost.
    assert [refusal.step for refusal in plan_recovery([first, slim]).refused] == [2, 1, 0]
    missing = plan_recovery([slim])
    assert (missing.refused[0].save_id, missing.refused[0].step) == (f"{0:032x}", None)
    assert "not delivered" in missing.refused[0].reason


def test_a_digest_cannot_rename_a_manifest():
    """What a host says of the bytes that it sends is not believed."""
    holdings = cluster()
    tier = holdings[0].tiers[0]
    forged = encode_manifest(msgspec.structs.replace(manifest_of(holdings), step=99))
    facts = (msgspec.structs.replace(tier.manifests[-1], manifest=forged),)
    liar = msgspec.structs.replace(
        holdings[1], tiers=(msgspec.structs.replace(holdings[1].tiers[0], manifests=facts),)
    )
    plan = plan_recovery([liar, holdings[0], *holdings[2:]])
    assert all(c.manifest.step != 99 for c in plan.candidates)
    assert "two different manifests" in plan.refused[0].reason


def test_a_digest_of_another_checkpoint_is_refused():
    first, second = cluster(2)
    tier = second.tiers[0]
    fact = msgspec.structs.replace(tier.manifests[0], save_id="a" * 32)
    second = msgspec.structs.replace(
        second, tiers=(msgspec.structs.replace(tier, manifests=(fact,)),)
    )
    plan = plan_recovery([first, second])
    assert [c.manifest.step for c in plan.candidates] == [2, 1, 0]
    assert [refusal.save_id for refusal in plan.refused] == ["a" * 32]
    assert "it is that of" in plan.refused[0].reason


# --- hosts that do not answer ---------------------------------------------------------------------


def test_what_one_host_held_is_held_by_its_neighbour():
    holdings = cluster()
    plan = plan_recovery([holdings[0], *holdings[2:]], unreachable={"host-00001": "no answer"})
    assert plan.chosen is not None
    assert plan.chosen.manifest.step == 2
    assert plan.incomplete == ("host host-00001: no answer",)


def test_two_neighbours_are_too_many_and_the_reason_names_them():
    holdings = cluster()
    silent = {"host-00001": "refused", "host-00002": "host host-00002 (a:1) timed out"}
    plan = plan_recovery([holdings[0], holdings[3]], unreachable=silent)
    assert plan.chosen is None
    assert plan.incomplete == ("host host-00001: refused", "host host-00002 (a:1) timed out")
    for refusal in plan.refused:
        assert "not asked: host host-00001: refused" in refusal.reason
        assert "not asked: host host-00002 (a:1) timed out" in refusal.reason


def test_hosts_that_are_only_named():
    holdings = cluster()
    manifest = manifest_of(holdings)
    assert plan_recovery(holdings, unreachable={}).incomplete == ()
    some = plan_recovery(holdings[:2], unreachable={}).incomplete
    assert [each.split(":")[0] for each in some] == ["host host-00002", "host host-00003"]
    records = (
        record(manifest, "ack", host="host-late", segments=(manifest.segments[0].id,)),
        record(manifest, "order", id="d" * 32, placement=(Holders("host-00000", ("new",)),)),
        record(manifest, "replicated", id="e" * 32, host="leader"),
    )
    told = [msgspec.structs.replace(holdings[0], records=records), *holdings[1:]]
    plan = plan_recovery(told, unreachable={})
    assert [each.split(":")[0] for each in plan.incomplete] == ["host host-late", "host new"]
    # One host alone, as ever: who else there was does not matter.
    assert plan_recovery(told).incomplete == ()
    # Who may have it says so in the reason.
    alone = plan_recovery([told[3]], unreachable={})
    assert alone.chosen is None


# --- marks ----------------------------------------------------------------------------------------


def test_a_mark_passes_over_a_checkpoint_unless_it_is_named():
    holdings = cluster()
    marked = manifest_of(holdings)
    mark = record(marked, "bad", text="the loss is NaN", host="host-00003")
    of_another = record(marked, "bad", id="f" * 32, namespace="other")
    told = [*holdings[:3], msgspec.structs.replace(holdings[3], records=(mark, of_another, b"?"))]
    plan = plan_recovery(told)
    assert plan.chosen is not None
    assert plan.chosen.manifest.step == 1
    (refusal,) = plan.refused
    assert (refusal.step, refusal.reason) == (2, "marked bad by host-00003: the loss is NaN")
    assert plan.warnings[0] == "a save record on host-00003 is of other"
    assert "a save record on host-00003 is unreadable" in plan.warnings[1]
    named = plan_recovery(told, save_id=marked.save_id)
    assert named.chosen is not None
    assert named.chosen.manifest == marked
    assert plan_recovery(told, step=2).chosen is None


# --- which copies are near ------------------------------------------------------------------------


def source(host: str, tier: str, *, shared: bool = False, **changes: object) -> SourceRef:
    found = SourceRef(
        host=host, tier=tier, segment_id="a" * 32, size=4096, intact=True, shared=shared,
        kind="memory" if tier == "memory" else "file",
    )  # fmt: skip
    return msgspec.structs.replace(found, **changes)


def test_nearest_first():
    sources = [
        source("b", "nvme"),
        source("a", "nvme"),
        source("c", "s3", shared=True),
        source("b", "memory"),
        source("a", "memory"),
        source("a", "old", intact=False, bad_blocks=(1,)),
    ]
    names = [(s.host, s.tier) for s in nearest_first(sources, "a")]
    assert names[:2] == [("a", "memory"), ("b", "memory")]
    assert set(names[2:4]) == {("a", "nvme"), ("c", "s3")}
    assert names[4:] == [("b", "nvme"), ("a", "old")]
    assert nearest_first(sources, "b")[0].host == "b"


def test_equally_near_donors_are_spread_over_the_readers():
    sources = [source(host, "memory") for host in "abcd"]
    first = [nearest_first(sources, f"reader-{n}")[0].host for n in range(400)]
    counts = [first.count(host) for host in "abcd"]
    assert min(counts) > 50
    assert nearest_first(sources, "reader-7") == nearest_first(sources[::-1], "reader-7")


def test_known_manifests_are_the_readable_ones():
    holdings = cluster(2)
    broken = msgspec.structs.replace(
        holdings[0].tiers[0].manifests[0], manifest=b"no manifest", save_id="b" * 32
    )
    tier = TierFacts(tier="nvme", scope="host", kind="file", available=True, error=None,
                     manifests=(broken,))  # fmt: skip
    told = msgspec.structs.replace(holdings[0], tiers=(*holdings[0].tiers, tier))
    assert sorted(m.step for m in known_manifests([told]).values()) == [0, 1, 2]
