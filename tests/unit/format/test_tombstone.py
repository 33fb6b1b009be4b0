"""What lies where a manifest of a shared tier was."""

from __future__ import annotations

import msgspec
import pytest

from tests.format.samples import (
    bare_tombstone,
    emptied_tombstone,
    hex_id,
    small_manifest,
    small_tombstone,
)
from tieredckpt.errors import FormatVersionError, IntegrityError
from tieredckpt.format.envelope import seal_record
from tieredckpt.format.manifest import decode_manifest, encode_manifest
from tieredckpt.format.records import decode_tombstone, encode_tombstone, is_tombstone

replace = msgspec.structs.replace


def test_round_trip():
    for made in (small_tombstone(), bare_tombstone(), emptied_tombstone()):
        assert decode_tombstone(encode_tombstone(made)) == made
    assert decode_manifest(small_tombstone().manifest) == small_manifest()


def test_it_is_told_from_a_manifest_and_is_longer():
    manifest, data = encode_manifest(small_manifest()), encode_tombstone(small_tombstone())
    assert is_tombstone(data)
    assert not is_tombstone(manifest)
    assert len(data) > len(manifest)
    with pytest.raises(IntegrityError):
        decode_manifest(data)
    with pytest.raises(IntegrityError):
        decode_tombstone(manifest)


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": "a/b"}, {"stream": ""}, {"save_id": "x"}, {"cause": "why not"}, {"host": ""},
        {"manifest": b"x"}, {"save_id": hex_id(99)}, {"stream": "another"},
    ],
)  # fmt: skip
def test_bad_values_are_refused_both_ways(change: dict[str, object]):
    bad = replace(small_tombstone(), **change)
    with pytest.raises((ValueError, IntegrityError)):
        encode_tombstone(bad)
    payload = msgspec.msgpack.encode(bad)
    with pytest.raises(IntegrityError):
        decode_tombstone(seal_record(b"TCKTOMBS", 1, payload, compress=False))


def test_a_later_version_is_told_from_damage():
    payload = msgspec.msgpack.encode(small_tombstone())
    with pytest.raises(FormatVersionError):
        decode_tombstone(seal_record(b"TCKTOMBS", 2, payload, compress=False))
