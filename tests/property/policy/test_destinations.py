"""Where a checkpoint is to go: the same for all who know the same records."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.support.saves import made, manifest_of, record
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import SaveRecord
from tieredckpt.policy.schedule import destinations

TIERS = ("nvme", "s3", "far")
OTHER = manifest_of(2, ["h0"])


def destined(*tiers: str) -> Manifest:
    return msgspec.structs.replace(manifest_of(1, ["h0"]), tiers=tiers)


def said(manifest: Manifest, kind: str, tier: str, number: int, *overruled: int) -> SaveRecord:
    return msgspec.structs.replace(
        record(manifest, "pin"),
        kind=kind,
        id=made("said", number),
        text=tier,
        segments=tuple(made("said", n) for n in overruled),
    )


@st.composite
def histories(draw: st.DrawFn) -> list[SaveRecord]:
    """Records with ids 0, 1, ...; a spill overrules any of them, also unknown ones."""
    found = []
    for number in range(draw(st.integers(0, 7))):
        kind = draw(st.sampled_from(["dropped", "spill", "pin"]))
        about = OTHER if draw(st.integers(0, 5)) == 0 else destined()
        old = draw(st.lists(st.integers(0, 8), max_size=4)) if kind == "spill" else []
        found.append(said(about, kind, draw(st.sampled_from(TIERS)), number, *old))
    return found


manifests = st.lists(st.sampled_from(TIERS), unique=True).map(lambda tiers: destined(*tiers))
parts = st.lists(st.integers(0, 2), min_size=8, max_size=8)


@given(manifests, histories(), parts, st.randoms())
def test_unions_in_any_order(manifest, history, split, random) -> None:
    hosts: list[list[SaveRecord]] = [[], [], []]
    for each, host in zip(history, split, strict=False):
        hosts[host].append(each)
    expected = destinations(manifest, history)
    for order in itertools.permutations(hosts):
        assert destinations(manifest, itertools.chain(*order)) == expected, "in any order"
    assert destinations(manifest, [*history, *hosts[0], *history]) == expected, "said twice"
    random.shuffle(history)
    assert destinations(manifest, history) == expected
    assert destinations(manifest, iter(history)) == expected
    assert len(set(expected)) == len(expected)


@given(manifests, histories(), st.sampled_from(TIERS))
def test_a_drop_counts_until_it_is_overruled(manifest, history, tier) -> None:
    dropped = said(manifest, "dropped", tier, 100)
    assert tier not in destinations(manifest, [*history, dropped])
    every_drop = [*range(8), 100]
    again = said(manifest, "spill", tier, 101, *every_drop)
    assert tier in destinations(manifest, [*history, dropped, again])
    assert tier not in destinations(
        manifest, [*history, again, said(manifest, "dropped", tier, 102)]
    )
    elsewhere = said(manifest, "spill", "elsewhere", 103, *every_drop)
    assert tier not in destinations(manifest, [*history, dropped, elsewhere])


def test_what_a_manifest_says() -> None:
    manifest = destined("s3", "nvme")
    assert destinations(manifest, []) == ("s3", "nvme")
    assert destinations(manifest, [said(manifest, "spill", "far", 1)]) == ("s3", "nvme", "far")
    assert destinations(manifest, [said(manifest, "dropped", "s3", 1)]) == ("nvme",)
    assert destinations(manifest, [said(OTHER, "dropped", "s3", 1)]) == ("s3", "nvme")
