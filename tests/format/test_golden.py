"""Files that were written once must stay readable for ever, and encoders must not drift."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import pytest
import xxhash
import zstandard

from tests.format import regenerate as regenerate_module
from tests.format import samples
from tests.format.regenerate import ZSTD_VERSION_FILE, golden_path, regenerate, zstd_version
from tieredckpt.agent.cluster.authority import RULES
from tieredckpt.agent.host.sessions import LEASES
from tieredckpt.format import manifest, nested, plain, plan, records, segment
from tieredckpt.format.envelope import record_version

MAGICS = (b"TCKMANIF", b"TCKATTMT", b"TCKPPLAN", b"TCKRECRD", b"TCKTOMBS", b"TCKRULES", b"TCKLEASE")


PLAN_ID = "46cf73a6a2a5fea77b46c7dd38c4b8cf"
STRUCTURE_DIGEST = "2b8d4119afb5a47d93bae2b3e3e85d2c"


def golden(name: str) -> bytes:
    return golden_path(name).read_bytes()


def without_compression(data: bytes) -> bytes:
    """What of a golden file does not depend on the version of zstd, by its own means."""
    if data[:8] in MAGICS:
        magic, version, codec, _, raw_bytes, _ = struct.unpack_from("<8sHHIQQ", data)
        body = data[32:-16]
        payload = zstandard.decompress(body) if codec == 1 else body
        assert len(payload) == raw_bytes
        return magic + bytes([version]) + payload
    if data[-128:-120] == b"TCKSEGMT":
        (codec,) = struct.unpack_from("<H", data, len(data) - 118)
        size, start, index_bytes = struct.unpack_from("<QQQ", data, len(data) - 112)
        stored = data[start : start + index_bytes]
        payload = zstandard.decompress(stored) if codec == 1 else stored
        return data[:size] + payload + data[start + index_bytes : -128]
    return data


@pytest.mark.parametrize("name", samples.GOLDEN)
def test_encoder_reproduces_golden(name: str):
    made, stored = samples.GOLDEN[name](), golden(name)
    if zstd_version() == ZSTD_VERSION_FILE.read_text().strip():
        assert made == stored
    assert without_compression(made).rstrip(b"\0") == without_compression(stored).rstrip(b"\0")


def test_every_golden_file_is_known():
    """Those of other packages, such as the slot label, are named otherwise and tested there."""
    names = {path.name for path in golden_path("x").parent.glob("*.v*.bin")}
    older = {golden_path(*each).name for each in samples.NOT_WRITTEN_ANY_MORE.items()}
    assert names == {golden_path(name).name for name in samples.GOLDEN} | older


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("segment-small", samples.small_specs()),
        ("segment-blocks-4mib", samples.small_specs()),
        ("segment-blocks-128kib", samples.small_specs()),
        ("segment-many", samples.many_specs()),
        ("segment-empty", []),
    ],
)
def test_segment(name: str, specs: list[segment.ItemSpec]):
    data = golden(name)
    footer = samples.read_segment(data)
    layout = segment.lay_out(specs)
    assert footer.items == layout.items
    assert footer.trailer.segment_bytes == len(data)
    assert footer.trailer.segment_id == bytes(range(16))
    assert data[: layout.data_bytes] == samples.fill(layout)
    for block in range(footer.trailer.num_blocks):
        start, stop = footer.block_range(block)
        assert xxhash.xxh3_128_digest(data[start:stop]) == footer.block_digest(block)


def test_records():
    assert manifest.decode_manifest(golden("manifest-small")) == samples.small_manifest()
    assert manifest.decode_manifest(golden("manifest-large")) == samples.large_manifest()
    assert manifest.decode_attempt(golden("attempt")) == samples.chained_attempt()


def test_attempt_record_of_version_1():
    """Of the first release: it follows nothing that it says, and abandons nothing."""
    data = golden_path("attempt", 1).read_bytes()
    assert struct.unpack_from("<8sH", data) == (b"TCKATTMT", 1)
    found = manifest.decode_attempt(data)
    assert found == samples.small_attempt()
    assert found.followed == ()
    assert all(base.abandons == () for base in found.bases)
    again = manifest.encode_attempt(found)
    assert manifest.decode_attempt(again) == found, "and may be written anew, as version 2"


def test_manifests_with_replicas():
    small, large = golden("manifest-replicas"), golden("manifest-replicas-large")
    assert manifest.decode_manifest(small) == samples.replicated_manifest()
    assert manifest.decode_manifest(large) == samples.large_replicated_manifest()


@pytest.mark.parametrize("kind", samples.KINDS)
def test_save_records(kind: records.RecordKind):
    found = records.decode_save_record(golden(f"record-{kind}"))
    assert found == samples.save_record(kind)
    assert found.kind == kind


def test_large_save_record():
    assert records.decode_save_record(golden("record-large")) == samples.large_save_record()


def test_configuration_and_lease():
    """In the present form, and as JSON, which earlier releases wrote."""
    for codec, name, expected in (
        (RULES, "configuration", samples.configuration()),
        (LEASES, "lease", samples.lease()),
    ):
        assert codec.decode_either(golden(name)) == (expected, False)
        old = golden_path("x").with_name(f"{name}.json").read_bytes()
        assert codec.decode_either(old) == (expected, True)


def test_plan():
    decoded = plan.decode_plan(golden("plan"))
    expected = samples.small_plan()
    assert list(decoded.entries()) == list(expected.entries())
    assert decoded.structures == expected.structures
    assert decoded.planner_data == expected.planner_data
    assert decoded.extras == expected.extras
    assert decoded.metadata_version == "1.0.0"
    assert decoded.storage_meta == expected.storage_meta
    assert samples.plan_id(golden("plan")) == PLAN_ID == samples.plan_id(expected)


def test_plan_with_nested_keys():
    """In a field of its own, in version 2; all else is as in version 1."""
    made, older = plan.decode_plan(golden("plan-nested")), plan.decode_plan(golden("plan"))
    assert (record_version(golden("plan-nested")), record_version(golden("plan"))) == (2, 1)
    assert nested.decode_nested(made.nested) == {
        ("optim", "state"): {},
        ("optim", "param_groups", 1): {},
        ("schedule", "milestones"): True,
        ("by",): {"None": None, "True": True, "0.5": 0.5, "('a', 7)": ("a", 7)},
        ("layers",): {"0": "0", "1": "1"},
    }
    assert older.nested == b""
    assert list(made.entries()) == list(older.entries())


def test_structure_digest():
    """Plans on disk name it, so it must never come out differently."""
    items = samples.read_segment(golden("segment-small")).items
    assert segment.structure_digest(items).hex() == STRUCTURE_DIGEST


def test_plain():
    value = plain.decode_plain(golden("plain"))
    assert value == samples.plain_value()
    # == takes True for 1 and (1,) for (1,) of a subclass; the repr of this sample does not,
    # but for its sets, whose order is not fixed.
    expected = samples.plain_value()
    assert isinstance(value, dict)
    assert isinstance(expected, dict)
    value.pop("sets")
    expected.pop("sets")
    assert repr(value) == repr(expected)


def column(data: bytes) -> list[int]:
    """A column as the page describes it."""
    width, count = data[0], (len(data) - 1) // data[0]
    return list(struct.unpack(f"<{count}{ {1: 'B', 2: 'H', 4: 'I', 8: 'Q'}[width] }", data[1:]))


def names(lengths: bytes, text: bytes) -> list[str]:
    found = []
    for length in column(lengths):
        found.append(text[:length].decode())
        text = text[length:]
    return found


def test_segment_by_the_page_alone():
    """Read with nothing of ours but docs/reference/format/segment.md."""
    data = golden("segment-small")
    trailer = data[-128:]
    magic, version, codec, block = struct.unpack_from("<8sHHI", trailer)
    size, index_at, index_bytes, table_at, table_bytes, total, raw = struct.unpack_from(
        "<7Q", trailer, 16
    )
    assert (magic, version, codec, block) == (b"TCKSEGMT", 1, 0, 4096)
    assert (index_at, raw, total) == (size, index_bytes, len(data))
    assert xxhash.xxh3_128_digest(trailer[:112]) == trailer[112:]
    assert xxhash.xxh3_128_digest(data[index_at : table_at + table_bytes]) == trailer[88:104]
    structure, bytes_sizes, bytes_offsets = msgspec.msgpack.decode(data[index_at:table_at])
    assert names(structure[0], structure[1])[:2] == ["layers.0.weight", "scale"]
    assert structure[2] == 5
    assert column(structure[3]) == [840, 2, 0, 3000, 5]
    assert column(structure[4]) == [0, 896, 960, 960, 3968]
    assert names(structure[5], structure[6])[:2] == ["float32", "bfloat16"]
    assert column(structure[7]) == [0, 1, 2, 3, 4]
    assert column(structure[8]) == [2, 0, 2, 1, 1]
    assert column(structure[9])[:6] == [60, 7, 30, 0, 30, 7]
    assert column(bytes_sizes) == [100, 0]
    assert column(bytes_offsets) == [4032, 4160]


def test_manifest_by_the_page_alone():
    data = golden("manifest-small")
    assert xxhash.xxh3_128_digest(data[:-16]) == data[-16:]
    fields = msgspec.msgpack.decode(data[32:-16])
    assert fields["attempt"] == [3, samples.hex_id(2)]
    assert fields["lineage"][0] == [1, samples.hex_id(4), 80]
    assert fields["segments"][0] == [samples.hex_id(7), 8192, samples.hex_id(8), "d5f1c9b0-boot"]
    assert fields["step"] == 1200


def test_manifest_with_replicas_by_the_page_alone():
    data = golden("manifest-replicas")
    assert struct.unpack_from("<8sHHI", data) == (b"TCKMANIF", 2, 0, 0)
    fields = msgspec.msgpack.decode(data[32:-16])
    assert fields["replicas"] == [
        ["d5f1c9b0-boot", ["node-2", "größe 3"]],
        ["node-2", ["d5f1c9b0-boot"]],
        ["node-4", []],
    ]
    version_1 = msgspec.msgpack.decode(golden("manifest-small")[32:-16])
    assert fields == version_1 | {"replicas": fields["replicas"]}


def test_attempt_record_by_the_page_alone():
    data = golden("attempt")
    assert struct.unpack_from("<8sHHI", data) == (b"TCKATTMT", 2, 0, 0)
    assert xxhash.xxh3_128_digest(data[:-16]) == data[-16:]
    fields = msgspec.msgpack.decode(data[32:-16])
    assert set(fields) == {
        "namespace", "number", "id", "run", "bases", "created_at_s", "followed"
    }  # fmt: skip
    assert fields["followed"] == [[2, samples.hex_id(5), True], [2, samples.hex_id(12), False]]
    first, parent = samples.hex_id(4), samples.hex_id(3)
    assert fields["bases"] == [
        ["default", parent, 60, [[1, first, 60]], [[1, first, 80]]],
        ["critic", None, None, [], [[1, first, 80]]],
    ]


def test_save_records_by_the_page_alone():
    always = {"namespace", "stream", "save_id", "kind", "id", "host", "incarnation"}
    said = {
        "order": {"placement"}, "ack": {"segments"}, "replicated": set(), "restored": {"text"},
        "bad": {"text"}, "pin": {"text"}, "unpin": {"segments"}, "failed": {"text"},
        "good": {"text", "segments"}, "dropped": {"text"}, "spill": {"text", "segments"},
    }  # fmt: skip
    for kind in samples.KINDS:
        data = golden(f"record-{kind}")
        assert struct.unpack_from("<8sHHI", data) == (b"TCKRECRD", 1, 0, 0)
        assert xxhash.xxh3_128_digest(data[:-16]) == data[-16:]
        fields = msgspec.msgpack.decode(data[32:-16])
        assert set(fields) == always | said[kind]
        assert (fields["kind"], fields["host"]) == (kind, "node-2")
        assert fields["incarnation"] == samples.hex_id(30)
    placement = msgspec.msgpack.decode(golden("record-order")[32:-16])["placement"]
    assert placement[0] == ["node-0", ["node-1", "node-2"]]


def test_regenerate_refuses_to_overwrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(regenerate_module, "FOLDER", tmp_path)
    monkeypatch.setattr(regenerate_module, "ZSTD_VERSION_FILE", tmp_path / "zstd-version.txt")
    assert regenerate(overwrite=False) == 0
    victim = regenerate_module.golden_path("plain")
    good = victim.read_bytes()
    victim.write_bytes(b"of an older release")
    assert regenerate(overwrite=False) == 1
    assert victim.read_bytes() == b"of an older release"
    assert regenerate(overwrite=True) == 0
    assert victim.read_bytes() == good
