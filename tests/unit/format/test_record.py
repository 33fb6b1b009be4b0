"""Records about one checkpoint."""

from __future__ import annotations

import msgspec
import pytest

from tests.format.samples import (
    KINDS,
    hex_id,
    large_save_record,
    save_record,
    small_attempt,
    small_manifest,
)
from tests.unit.format.test_manifest import BAD_PLACEMENTS
from tieredckpt.errors import FormatVersionError, IntegrityError
from tieredckpt.format.envelope import seal_record
from tieredckpt.format.manifest import MAX_SEGMENTS, Holders, encode_attempt, encode_manifest
from tieredckpt.format.records import (
    RECORD_LIMIT_BYTES,
    RecordKind,
    SaveRecord,
    decode_save_record,
    encode_save_record,
)

replace = msgspec.structs.replace


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: RecordKind):
    assert decode_save_record(encode_save_record(save_record(kind))) == save_record(kind)


def test_many_hosts():
    value = large_save_record(5000)
    data = encode_save_record(value)
    assert decode_save_record(data) == value
    assert len(data) < 10 * 5000


def test_empty_fields_are_left_out():
    fields = msgspec.msgpack.decode(encode_save_record(save_record("replicated"))[32:-16])
    assert fields.keys().isdisjoint({"segments", "placement", "text"})


BAD_RECORDS: list[dict[str, object]] = [
    {"namespace": "a/b"},
    {"stream": ""},
    {"save_id": "0" * 31},
    {"save_id": "G" * 32},
    {"kind": "delete"},
    {"kind": ""},
    {"id": "x"},
    {"id": hex_id(1) + "\n"},
    {"host": ""},
    {"host": "a\tb"},
    {"host": "h" * 256},
    {"incarnation": ""},
    {"incarnation": "A" * 32},
    {"segments": ("../x",)},
    {"segments": (hex_id(1), "")},
    {"segments": (hex_id(1),) * (MAX_SEGMENTS + 1)},
    {"text": "x" * 4097},
    {"kind": "dropped", "text": ""},
    {"kind": "spill", "text": "../s3"},
    *({"placement": placement} for placement in BAD_PLACEMENTS),
    {"placement": tuple(Holders(str(i), ()) for i in range(MAX_SEGMENTS + 1))},
]


@pytest.mark.parametrize("changes", BAD_RECORDS)
def test_bad_record_is_refused_in_both_directions(changes: dict[str, object]):
    bad = replace(save_record("ack"), **changes)
    with pytest.raises(ValueError):
        encode_save_record(bad)
    data = seal_record(b"TCKRECRD", 1, msgspec.msgpack.encode(bad), compress=True)
    with pytest.raises(IntegrityError):
        decode_save_record(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.pop("incarnation"),
        lambda f: f.update(kind=1),
        lambda f: f.update(unknown=1),
        lambda f: f.update(segments=None),
        lambda f: f.update(segments=[1]),
        lambda f: f.update(placement=[["a"]]),
        lambda f: f.update(placement=[["a", ["b"], 1]]),
        lambda f: f.update(placement=[["a", "b"]]),
        lambda f: f.update(text=b"x"),
        lambda f: f.update(host=None),
    ],
    ids=[
        *("missing", "int for kind", "unknown field", "no segments", "int for id"),
        *("short holders", "long holders", "str for list", "bytes for str", "no host"),
    ],
)
def test_types_are_checked(change: object):
    fields = msgspec.to_builtins(save_record("ack"))
    assert callable(change)
    change(fields)
    data = seal_record(b"TCKRECRD", 1, msgspec.msgpack.encode(fields), compress=False)
    with pytest.raises(IntegrityError):
        decode_save_record(data)


def test_records_are_not_taken_for_each_other():
    record = encode_save_record(save_record("pin"))
    for other in (encode_manifest(small_manifest()), encode_attempt(small_attempt())):
        with pytest.raises(IntegrityError):
            decode_save_record(other)
    renamed = seal_record(b"TCKMANIF", 1, record[32:-16], compress=False)
    with pytest.raises(IntegrityError):
        decode_save_record(renamed)


def test_a_newer_version_is_not_damage():
    payload = encode_save_record(save_record("pin"))[32:-16]
    with pytest.raises(FormatVersionError):
        decode_save_record(seal_record(b"TCKRECRD", 2, payload, compress=False))


def test_limit_on_the_way_out():
    hosts = [f"{i:05}" + "h" * 250 for i in range(1200)]
    placement = tuple(Holders(host, tuple(hosts[:64])) for host in hosts)
    value: SaveRecord = replace(save_record("order"), placement=placement)
    with pytest.raises(ValueError, match=f"the limit is {RECORD_LIMIT_BYTES}"):
        encode_save_record(value)
