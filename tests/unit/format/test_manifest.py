"""Manifests and attempt records."""

from __future__ import annotations

import msgspec
import pytest

from tests.format.samples import (
    hex_id,
    large_manifest,
    large_replicated_manifest,
    replicated_manifest,
    small_attempt,
    small_manifest,
)
from tieredckpt.errors import FormatVersionError, IntegrityError
from tieredckpt.format import manifest as m
from tieredckpt.format.envelope import record_version, seal_record

replace = msgspec.structs.replace
REF = m.SegmentRef(hex_id(1), 4096, hex_id(2), "node-1")
BASE = m.StreamBase("default", hex_id(3), 80, ())


def test_round_trip():
    for value in (
        small_manifest(), large_manifest(), replicated_manifest(), large_replicated_manifest(),
    ):  # fmt: skip
        assert m.decode_manifest(m.encode_manifest(value)) == value
    assert m.decode_attempt(m.encode_attempt(small_attempt())) == small_attempt()


def test_few_kilobytes_for_a_thousand_ranks():
    # 32 of these 45 bytes are an id and a root, which do not compress.
    assert len(m.encode_manifest(large_manifest(1000))) < 50_000


BAD_MANIFESTS: list[dict[str, object]] = [
    {"save_id": "0" * 31},
    {"save_id": "0" * 31 + "G"},
    {"save_id": "A" * 32},
    {"save_id": "0" * 32 + "\n"},
    {"namespace": ""},
    {"namespace": ".."},
    {"namespace": "a/b"},
    {"namespace": "a" * 129},
    {"namespace": "ü"},
    {"namespace": "run\n"},
    {"stream": "-x"},
    {"step": -1},
    {"step": 1 << 63},
    {"attempt": m.AttemptId(-1, hex_id(1))},
    {"attempt": m.AttemptId(1, "x")},
    {"seq": -1},
    {"parent": ""},
    {"lineage": (m.Ancestor(1, "x", 0),)},
    {"lineage": (m.Ancestor(1, hex_id(1), -1),)},
    {"lineage": (m.Ancestor(1, hex_id(1), 0), m.Ancestor(2, hex_id(1), 0))},
    {"plan": "../../etc/passwd"},
    {"tiers": ("nvme", "nvme")},
    {"tiers": ("a b",)},
    {"tiers": tuple(f"t{i}" for i in range(65))},
    {"segments": (REF, REF)},
    {"segments": (replace(REF, id="x"),)},
    {"segments": (replace(REF, root="x"),)},
    {"segments": (replace(REF, size=0),)},
    {"segments": (replace(REF, size=4097),)},
    {"segments": (replace(REF, size=1 << 60),)},
    {"segments": (replace(REF, host=""),)},
    {"segments": (replace(REF, host="a\nb"),)},
    {"segments": (replace(REF, host="h" * 256),)},
    {"world_size": 0},
    {"tags": {"": "x"}},
    {"tags": {"k": "v" * 4097}},
    {"tags": {str(i): "" for i in range(257)}},
    {"created_at_s": float("nan")},
    {"created_at_s": float("inf")},
    {"created_at_s": -1.0},
]


@pytest.mark.parametrize("changes", BAD_MANIFESTS)
def test_bad_manifest_is_refused_in_both_directions(changes: dict[str, object]):
    bad = replace(small_manifest(), **changes)
    with pytest.raises(ValueError):
        m.encode_manifest(bad)
    data = seal_record(b"TCKMANIF", 1, msgspec.msgpack.encode(bad), compress=False)
    with pytest.raises(IntegrityError):
        m.decode_manifest(data)


def test_version_2_is_for_replicas_alone():
    """A run without replicas stays readable by the release that knew none."""
    plain, replicated = (m.encode_manifest(v) for v in (small_manifest(), replicated_manifest()))
    assert (record_version(plain), record_version(replicated)) == (1, 2)
    for data, wrong in ((plain, 2), (replicated, 1)):
        payload = data[32:-16]
        with pytest.raises(IntegrityError, match="version 2"):
            m.decode_manifest(seal_record(b"TCKMANIF", wrong, payload, compress=False))
    with pytest.raises(FormatVersionError):
        m.decode_manifest(seal_record(b"TCKMANIF", 3, replicated[32:-16], compress=False))


HOLDERS = m.Holders("node-1", ("node-2",))
BAD_PLACEMENTS: list[tuple[m.Holders, ...]] = [
    (HOLDERS, HOLDERS),
    (m.Holders("", ()),),
    (m.Holders("a\nb", ()),),
    (m.Holders("h" * 256, ()),),
    (m.Holders("a", ("",)),),
    (m.Holders("a", ("b\x00",)),),
    (m.Holders("a", ("b", "b")),),
    (m.Holders("a", tuple(f"h{i}" for i in range(65))),),
]


@pytest.mark.parametrize("placement", BAD_PLACEMENTS)
def test_bad_replicas_are_refused_in_both_directions(placement: tuple[m.Holders, ...]):
    bad = replace(small_manifest(), replicas=placement)
    with pytest.raises(ValueError):
        m.encode_manifest(bad)
    data = seal_record(b"TCKMANIF", 2, msgspec.msgpack.encode(bad), compress=False)
    with pytest.raises(IntegrityError):
        m.decode_manifest(data)


def test_replicas_of_many_hosts_fit():
    """A thousand hosts of eight ranks, with the longest names that hosts have of themselves."""
    hosts = [f"{i:08x}-0000-4000-8000-000000000000" for i in range(1000)]
    value = replace(
        large_manifest(8000),
        replicas=tuple(
            m.Holders(host, (hosts[(i + 1) % 1000], hosts[(i + 2) % 1000]))
            for i, host in enumerate(hosts)
        ),
    )
    data = m.encode_manifest(value)
    assert m.decode_manifest(data) == value
    without = m.encode_manifest(replace(value, replicas=()))
    assert len(data) - len(without) < 30 * len(hosts)


BAD_ATTEMPTS: list[dict[str, object]] = [
    {"namespace": "a b"},
    {"number": -1},
    {"id": ""},
    {"bases": (BASE, BASE)},
    {"bases": (replace(BASE, stream="/"),)},
    {"bases": (replace(BASE, parent=None),)},
    {"bases": (replace(BASE, parent_step=None),)},
    {"bases": (replace(BASE, parent="x"),)},
    {"bases": (replace(BASE, parent_step=-1),)},
    {"bases": (replace(BASE, lineage=(m.Ancestor(1, "x", 0),)),)},
    {"created_at_s": float("nan")},
]


@pytest.mark.parametrize("changes", BAD_ATTEMPTS)
def test_bad_attempt_is_refused_in_both_directions(changes: dict[str, object]):
    bad = replace(small_attempt(), **changes)
    with pytest.raises(ValueError):
        m.encode_attempt(bad)
    data = seal_record(b"TCKATTMT", 1, msgspec.msgpack.encode(bad), compress=False)
    with pytest.raises(IntegrityError):
        m.decode_attempt(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.pop("step"),
        lambda f: f.update(step="12"),
        lambda f: f.update(step=True),
        lambda f: f.update(step=1.0),
        lambda f: f.update(unknown=1),
        lambda f: f["attempt"].append(1),
        lambda f: f.update(segments=[[]]),
        lambda f: f.update(tags={1: "x"}),
        lambda f: f.update(tags=None),
    ],
    ids=[
        *("missing", "str for int", "bool for int", "float for int", "unknown field"),
        *("long attempt", "empty segment", "int key in tags", "no tags"),
    ],
)
def test_types_are_checked(change: object):
    fields = msgspec.to_builtins(small_manifest())
    assert callable(change)
    change(fields)
    data = seal_record(b"TCKMANIF", 1, msgspec.msgpack.encode(fields), compress=False)
    with pytest.raises(IntegrityError):
        m.decode_manifest(data)


def test_records_are_not_taken_for_each_other():
    with pytest.raises(IntegrityError):
        m.decode_manifest(m.encode_attempt(small_attempt()))
    with pytest.raises(IntegrityError):
        m.decode_attempt(m.encode_manifest(small_manifest()))


def test_limits_on_the_way_out():
    tags = {str(i): "v" * 4000 for i in range(256)}
    assert m.decode_manifest(m.encode_manifest(replace(small_manifest(), tags=tags))).tags == tags
    lineage = tuple(m.Ancestor(i, hex_id(i), 1) for i in range(m.MAX_LINEAGE + 1))
    with pytest.raises(ValueError, match="lineage"):
        m.encode_manifest(replace(small_manifest(), lineage=lineage))


def test_checks_say_what_is_wrong():
    assert m.check_name("a.b_c-9", "tier") == "a.b_c-9"
    assert m.check_id(hex_id(1), "save id") == hex_id(1)
    with pytest.raises(ValueError, match="stream 'a/b' is not a valid name"):
        m.check_name("a/b", "stream")
    with pytest.raises(ValueError, match="plan 'x' is not 32"):
        m.check_id("x", "plan")
