"""Hostile bytes: every decoder returns or raises IntegrityError, quickly and within memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.format import fuzz
from tests.format.samples import Target, mutate, save_record, targets
from tieredckpt.errors import IntegrityError
from tieredckpt.format import plain, plan, plan_record, segment
from tieredckpt.format.digest import digest
from tieredckpt.format.envelope import pack_column, seal_record
from tieredckpt.format.manifest import decode_attempt, decode_manifest
from tieredckpt.format.records import decode_save_record

TARGETS = targets()
BEHIND_DIGEST = [
    t
    for t in TARGETS
    if t.name in ("manifest", "manifest v2", "record", "attempt", "plan", "plan id", "trailer")
]

by_target = pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)


def accepts(target: Target, data: bytes) -> bool:
    try:
        target.decode(data)
    except IntegrityError:
        return False
    return True


@by_target
def test_every_truncation(target: Target):
    for sample in target.samples:
        step = max(1, len(sample) // 500)
        for size in range(0, len(sample), step):
            accepts(target, sample[:size])


@pytest.mark.parametrize("target", BEHIND_DIGEST, ids=lambda t: t.name)
@given(seed=st.integers(0, 2**64 - 1))
def test_nothing_changed_gets_past_a_digest(target: Target, seed: int):
    rng = random.Random(seed)
    sample = target.samples[0]
    for _ in range(10):
        bad = mutate(sample, b"", rng)
        assert bad == sample or not accepts(target, bad)


@pytest.mark.parametrize("target", BEHIND_DIGEST, ids=lambda t: t.name)
def test_every_flipped_bit(target: Target):
    sample = target.samples[0]
    for bit in range(8 * len(sample)):
        bad = bytearray(sample)
        bad[bit // 8] ^= 1 << bit % 8
        assert not accepts(target, bytes(bad))


def peak_of(decode: Callable[[bytes], object], data: bytes) -> int:
    """Most memory that the call took; it must raise IntegrityError or return."""
    tracemalloc.start()
    try:
        decode(data)
    except IntegrityError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def bomb(kind: bytes, raw_bytes: int) -> bytes:
    """An intact record of zeros, a thousandth of its size compressed."""
    stored = zstandard.compress(bytes(raw_bytes))
    body = struct.pack("<8sHHIQQ", kind, 1, 1, 0, raw_bytes, len(stored)) + stored
    return body + digest(body)


@pytest.mark.parametrize(
    ("kind", "decode", "limit"),
    [
        (b"TCKMANIF", decode_manifest, 16 << 20),
        (b"TCKATTMT", decode_attempt, 4 << 20),
        (b"TCKRECRD", decode_save_record, 16 << 20),
    ],
    ids=["manifest", "attempt", "record"],
)
def test_zip_bomb(kind: bytes, decode: Callable[[bytes], object], limit: int):
    assert peak_of(decode, bomb(kind, limit)) < 3 * limit
    assert peak_of(decode, bomb(kind, 4 * limit)) < limit // 4


def test_zip_bomb_plan(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan_record, "PLAN_LIMIT_BYTES", 8 << 20)
    assert peak_of(plan.decode_plan, bomb(b"TCKPPLAN", 8 << 20)) < 24 << 20
    assert peak_of(plan.decode_plan, bomb(b"TCKPPLAN", 64 << 20)) < 1 << 20
    assert peak_of(plan_record.encoded_plan_id, bomb(b"TCKPPLAN", 64 << 20)) < 1 << 20


def test_the_id_of_a_plan_takes_little_memory():
    """What an agent asks of every plan that is pushed to it; tracemalloc does not see zstd's."""
    data = bomb(b"TCKPPLAN", 256 << 20)
    assert len(data) < 33_000
    assert peak_of(plan_record.encoded_plan_id, data) < 20 << 20
    assert plan_record.encoded_plan_id(data) == digest(bytes(256 << 20)).hex()


def test_zip_bomb_index():
    stored = zstandard.compress(bytes(64 << 20))
    for raw_bytes in (0, 1 << 10, 1 << 20):
        peak = peak_of(
            lambda data, raw=raw_bytes: segment.decode_index(
                data, codec=1, raw_bytes=raw, data_bytes=64
            ),
            stored,
        )
        assert peak < 1 << 20


def test_densest_index():
    """Three bytes per item are the fewest that pass; an item in memory is some hundred."""
    count = 100_000
    zeros = pack_column([0] * count)
    empty = pack_column([])
    structure = [zeros, b"", 0, empty, empty, empty, b"", empty, empty, empty]
    data = msgspec.msgpack.encode([structure, zeros, zeros])
    peak = peak_of(
        lambda d: segment.decode_index(d, codec=0, raw_bytes=len(d), data_bytes=64), data
    )
    assert peak < 80 * len(data)


def test_densest_save_record():
    """An id of 34 bytes is the least that a segment takes, a host of 4 the least of a placement."""
    fields = msgspec.to_builtins(save_record("ack"))
    letters = [letter for letter in map(chr, range(0x100, 0x400)) if letter.isprintable()][:160]
    names = [first + second for first in letters for second in letters][:20_000]
    segments = [digest(b"%d" % i).hex() for i in range(20_000)]
    for name, value in (("segments", segments), ("placement", [[each, []] for each in names])):
        payload = msgspec.msgpack.encode(fields | {name: value})
        data = seal_record(b"TCKRECRD", 1, payload, compress=False)
        assert len(getattr(decode_save_record(data), name)) == len(value)
        assert peak_of(decode_save_record, data) < 40 * len(payload)


def test_densest_plan():
    count = 200_000
    one, none = pack_column([0]), pack_column([])
    zeros = pack_column([0] * count)
    columns = plan.Columns(
        name_lengths=pack_column([1]),
        names=b"w",
        kinds=b"\0",
        properties=plain.encode_plain([("float32", "strided", False, "contiguous_format", False)]),
        property_of=one,
        num_dims=one,
        shapes=none,
        num_chunks=pack_column([count]),
        chunk_offsets=none,
        chunk_sizes=none,
        chunk_segments=zeros,
        chunk_items=zeros,
        bytes_segments=none,
        bytes_items=none,
        structures=bytes(16),
        planner_data=b"",
        extras=b"",
        metadata_version=None,
        storage_meta=None,
    )
    payload = msgspec.msgpack.encode(columns)
    decoded = plan.decode_plan(plan_record.seal_plan(payload))
    assert len(decoded.chunk_items) == count
    assert peak_of(plan.decode_plan, plan_record.seal_plan(payload)) < 40 * len(payload)


@pytest.mark.parametrize(
    "piece",
    [
        *(b"\x91\x01", b"\x91\x02", b"\x91\x03", b"\x80", b"\xa2ab", b"\xcb" + bytes(8)),
        b"\x92\x05\xc4\x09" + b"\x01" * 9,
    ],
    ids=["list", "tuple", "set", "dict", "str", "float", "big int"],
)
def test_densest_plain_data(piece: bytes):
    count = 20_000
    data = b"\xdd" + struct.pack(">I", count + 1) + b"\x01" + piece * count
    assert peak_of(lambda d: plain.decode_plain(d, len(d)), data) < 18 * len(data) + (1 << 17)


def test_fuzz_runner_finds_nothing():
    report = fuzz.run(1000, seed=7)
    assert not report.findings, report.findings[0]
    assert set(report.calls) == {target.name for target in TARGETS}


def test_fuzz_runner_would_find_something():
    def crash(_: bytes) -> object:
        raise KeyError("x")

    def hoard(_: bytes) -> object:
        return bytes(4 << 20)

    report = fuzz.Report()
    fuzz.feed(Target("crash", (), crash), b"x", report, measure=False)
    fuzz.feed(Target("hoard", (), hoard), b"x", report, measure=True)
    assert [name for name, _, _ in report.findings] == ["crash", "hoard"]


@pytest.mark.nightly
def test_fuzz_for_long():
    report = fuzz.run(180_000, seed=(seed := random.SystemRandom().randrange(2**32)))
    assert not report.findings, f"seed {seed}: {report.findings[0]}"
