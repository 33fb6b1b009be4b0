"""The envelope around small records."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
import zstandard

from tieredckpt.errors import FormatVersionError, IntegrityError
from tieredckpt.format.digest import digest
from tieredckpt.format.envelope import ENVELOPE_BYTES, open_record, seal_record

KIND = b"TCKTEST!"


def opened(data: bytes, limit: int = 1 << 20) -> bytes:
    return open_record(data, KIND, max_version=3, limit_bytes=limit)


def made(
    payload: bytes,
    *,
    raw: int | None = None,
    stored: int | None = None,
    codec: int = 0,
    version: int = 1,
    reserved: int = 0,
) -> bytes:
    body = struct.pack(
        "<8sHHIQQ",
        KIND,
        version,
        codec,
        reserved,
        len(payload) if raw is None else raw,
        len(payload) if stored is None else stored,
    )
    return body + payload + digest(body + payload)


@pytest.mark.parametrize("payload", [b"", b"x", bytes(100_000), bytes(range(256))])
@pytest.mark.parametrize("compress", [False, True])
def test_round_trip(payload: bytes, compress: bool):
    data = seal_record(KIND, 3, payload, compress=compress)
    assert opened(data) == payload
    assert len(data) <= len(payload) + ENVELOPE_BYTES


def test_limit_is_exact():
    data = seal_record(KIND, 1, bytes(1000), compress=False)
    assert opened(data, 1000) == bytes(1000)
    with pytest.raises(IntegrityError):
        opened(data, 999)
    with pytest.raises(IntegrityError, match="over 999"):
        opened(seal_record(KIND, 1, bytes(1000), compress=True), 999)


def test_every_flipped_bit_and_every_length_is_found():
    data = seal_record(KIND, 1, b"payload", compress=False)
    for bit in range(8 * len(data)):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError) as caught:
            opened(bytes(bad))
        # A flipped version must not send anybody looking for an upgrade.
        assert not isinstance(caught.value, FormatVersionError)
    for size in range(len(data)):
        with pytest.raises(IntegrityError):
            opened(data[:size])
    with pytest.raises(IntegrityError):
        opened(data + b"\0")


def test_newer_version_and_codec():
    with pytest.raises(FormatVersionError) as caught:
        opened(made(b"x", version=4))
    assert (caught.value.expected, caught.value.actual) == (3, 4)
    with pytest.raises(FormatVersionError, match="codec 7"):
        opened(made(b"x", codec=7))


@pytest.mark.parametrize(
    "bad",
    [
        made(b"x", version=0),
        made(b"x", reserved=1),
        made(b"x", raw=2),
        made(b"x", stored=0),
        made(b"x", stored=1 << 60),
        made(b"x", raw=1 << 60),
        made(b"not zstd", codec=1),
        made(zstandard.compress(bytes(100)), codec=1, raw=99),
        made(zstandard.compress(bytes(100)) + b"junk", codec=1, raw=100),
        made(zstandard.compress(bytes(100)) * 2, codec=1, raw=100),
        made(zstandard.compress(bytes(100))[:-2], codec=1, raw=100),
        made(zstandard.ZstdCompressor(write_content_size=False).compress(b"a"), codec=1, raw=1),
        made(b"", codec=1),
        b"",
        b"\0" * 4096,
    ],
)
def test_intact_digest_around_nonsense(bad: bytes):
    with pytest.raises(IntegrityError):
        opened(bad)


def test_foreign_kind():
    with pytest.raises(IntegrityError, match="not a"):
        open_record(made(b"x"), b"TCKOTHER", max_version=1, limit_bytes=10)


def test_bomb_is_refused_before_it_goes_off():
    bomb = zstandard.compress(bytes(64 << 20))
    # A frame's header may claim any size, and the library would allocate it.
    claims = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(1 << 20)))
    frame = zstandard.get_frame_parameters(bytes(claims))
    assert frame.content_size == 1 << 20
    for bad in (
        made(bomb, codec=1, raw=64 << 20),
        made(bomb, codec=1, raw=1 << 20),
        made(
            claims.replace(struct.pack("<I", 1 << 20), struct.pack("<I", 1 << 31), 1),
            codec=1,
            raw=1 << 20,
        ),
    ):
        tracemalloc.start()
        with pytest.raises(IntegrityError):
            opened(bad)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3 << 20
