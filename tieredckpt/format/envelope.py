"""The envelope of every small record: magic, version, codec, sizes, payload, digest.

Manifest, plan, attempt record and slot label are payloads in this envelope. Its own layout is
frozen: a reader of any release can check the digest of a record of any later one, so that
damage is never mistaken for a newer version. Integers are little-endian:

    magic 8 | version u16 | codec u16 | reserved u32 = 0 | raw bytes u64 | stored bytes u64
    stored payload | digest (16) of all before it

The fields of a payload are *columns*: a list of numbers or names as one byte string. No count is
ever trusted. A column's length follows from the bytes that are there, so a hostile column cannot
make a decoder allocate more than a small multiple of its input. No numpy here: the agent
reads segment footers, and must stay small.

* numbers, 0 to 2**63 - 1: one byte with the width w (1, 2, 4 or 8), then little-endian values.
  The encoder takes the smallest width that fits; an empty column is the byte 1.
* names: a column of byte lengths, and the UTF-8 bytes of all of them.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final, Generic, TypeVar

import msgspec
import zstandard

from tieredckpt.errors import FormatVersionError, IntegrityError
from tieredckpt.format.digest import DIGEST_BYTES, Hasher, digest

INT_MAX = (1 << 63) - 1
"""Largest number in any column: what a signed 64-bit integer holds."""

_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
_BIG_ENDIAN = sys.byteorder == "big"


MALFORMED: Final = (ValueError, RecursionError)
"""What msgspec raises for bytes that it cannot decode: ValueError for malformed data and text that
is not UTF-8, RecursionError for data that is nested too deeply."""


def width_for(largest: int) -> int:
    """Bytes per value of a column whose largest value is ``largest``."""
    return 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4 if largest < 1 << 32 else 8


def pack_column(values: Sequence[int]) -> bytes:
    """``values`` as one byte string. Raises ValueError if one is not in 0 .. 2**63 - 1."""
    largest = max(values, default=0)
    if largest > INT_MAX or min(values, default=0) < 0:
        raise ValueError("a size, offset or count is negative or over 2**63 - 1")
    width = width_for(largest)
    column = array(_CODES[width], values)
    if _BIG_ENDIAN:
        column.byteswap()
    return bytes((width,)) + column.tobytes()


def column_width(column: bytes, limit: int, what: str) -> int:
    """Bytes per value of ``column``, its shape checked.

    Raises IntegrityError if it is no column or has more than ``limit`` values.
    """
    width = column[0] if column else 0
    if width not in _CODES or (len(column) - 1) % width:
        raise IntegrityError(f"{what}: not a column")
    if (len(column) - 1) // width > limit:
        raise IntegrityError(f"{what}: more than {limit} values")
    return width


def unpack_column(column: bytes, limit: int, what: str) -> list[int]:
    """The values of ``column``; the inverse of :func:`pack_column`.

    Raises:
        IntegrityError: No column, more than ``limit`` values, or one is over 2**63 - 1.
    """
    width = column_width(column, limit, what)
    values = array(_CODES[width])
    values.frombytes(memoryview(column)[1:])
    if _BIG_ENDIAN:
        values.byteswap()
    numbers = values.tolist()
    if width == 8 and max(numbers, default=0) > INT_MAX:
        raise IntegrityError(f"{what}: a value is over 2**63 - 1")
    return numbers


def pack_names(names: Sequence[str]) -> tuple[bytes, bytes]:
    """``names`` as (column of byte lengths, UTF-8 bytes).

    Raises ValueError (UnicodeEncodeError) for a lone surrogate, which UTF-8 cannot express.
    """
    encoded = [name.encode() for name in names]
    return pack_column([len(name) for name in encoded]), b"".join(encoded)


def unpack_names(lengths: bytes, text: bytes, limit: int, what: str) -> list[str]:
    """The names; the inverse of :func:`pack_names`. Raises IntegrityError."""
    names: list[str] = []
    position = 0
    try:
        for length in unpack_column(lengths, limit, what):
            names.append(str(text[position : position + length], "utf-8"))
            position += length
    except UnicodeDecodeError as error:
        raise IntegrityError(f"{what}: a name is not UTF-8") from error
    if position != len(text):
        raise IntegrityError(f"{what}: the lengths of the names do not fit their bytes")
    return names


def unpack_struct(
    decoder: msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T],
    payload: bytes,
    what: str,
    check: Callable[[T], object] = lambda value: None,
) -> T:
    """``payload`` decoded, with its types checked, and accepted by ``check``.

    Raises IntegrityError, also in place of a ValueError of ``check``.
    """
    try:
        value = decoder.decode(payload)
    except MALFORMED as error:
        raise IntegrityError(f"{what} is malformed: {error}") from error
    try:
        check(value)
    except ValueError as error:
        raise IntegrityError(f"{what}: {error}") from error
    return value


T = TypeVar("T")

CODEC_RAW = 0
CODEC_ZSTD = 1

MAGIC_BYTES = 8

_HEADER = struct.Struct("<8sHHIQQ")
ENVELOPE_BYTES = _HEADER.size + DIGEST_BYTES
"""Size of the envelope around a stored payload: 48 bytes."""

_WINDOW_BYTES_MAX = 8 << 20
"""The window that every decoder of zstd must support (RFC 8878); level 3 needs 2 MiB."""
_AT_ONCE_BYTES_MAX = 1 << 20
"""If only the digest of a larger payload is wanted, it is digested while it is decompressed."""
_PIECE_BYTES = 256
"""Compressed bytes per call of zstd. A block has at least 4 bytes and at most 128 KiB of raw data,
so one call returns at most 8 MiB."""

_COMPRESS_BYTES = 4096
"""Smaller records of text are mostly digests and ids, which do not compress."""

_TEXTS_MAX = 1 << 20
"""Most strings in one record of text: twice as many as in the largest manifest."""
_TEXT_HEADS = bytes([*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB])
"""First bytes of a string in msgpack."""

_encode = msgspec.msgpack.Encoder().encode
_ZSTD_LEVEL = 3  # 5 to 7 took 3 times longer for 6% less, on a plan of a million pieces


def compress_bytes(raw: bytes) -> tuple[int, bytes]:
    """``raw`` as (codec, stored bytes): zstd if that is smaller, else as it is.

    The same input gives the same output only with the same zstd library, so nothing is ever
    identified by the digest of compressed bytes.
    """
    stored = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(raw)
    return (CODEC_ZSTD, stored) if len(stored) < len(raw) else (CODEC_RAW, raw)


def decompress_bytes(codec: int, stored: bytes | memoryview, raw_bytes: int, what: str) -> bytes:
    """The payload of ``raw_bytes`` that was stored with ``codec``.

    The caller has checked ``raw_bytes`` against its limit; no more than that is allocated.

    Raises:
        IntegrityError: ``stored`` is not one zstd frame of exactly ``raw_bytes``.
        FormatVersionError: The codec is unknown.
    """
    if codec == CODEC_RAW:
        if len(stored) != raw_bytes:
            raise IntegrityError(f"{what}: stored and raw size of an uncompressed payload differ")
        return bytes(stored)
    if codec != CODEC_ZSTD:
        raise FormatVersionError(f"{what}: codec {codec} is unknown to this release")
    try:
        # The library allocates what the frame's header states, so the header is checked first.
        _check_frame(stored, raw_bytes, what)
        raw = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{what}: the compressed payload is damaged: {error}") from error
    if len(raw) != raw_bytes:
        raise IntegrityError(f"{what}: the payload is shorter than stated")
    return raw


def _check_frame(stored: bytes | memoryview, raw_bytes: int, what: str) -> None:
    frame = zstandard.get_frame_parameters(stored)
    if frame.content_size != raw_bytes or frame.dict_id:
        raise IntegrityError(f"{what}: the compressed payload states another size")


def _digest_large(stored: memoryview, raw_bytes: int, what: str) -> bytes:
    """The digest of the content of one zstd frame, decompressed a few MiB at a time."""
    hasher, size = Hasher(), 0
    try:
        _check_frame(stored, raw_bytes, what)
        zstd = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX).decompressobj()
        for offset in range(0, len(stored), _PIECE_BYTES):
            raw = b"" if zstd.eof else zstd.decompress(stored[offset : offset + _PIECE_BYTES])
            if (zstd.eof and offset + _PIECE_BYTES < len(stored)) or zstd.unused_data:
                raise IntegrityError(f"{what}: something follows the compressed payload")
            hasher.update(raw)
            size += len(raw)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{what}: the compressed payload is damaged: {error}") from error
    if size != raw_bytes or not zstd.eof:
        raise IntegrityError(f"{what}: the payload is shorter than stated")
    return hasher.digest()


def seal_record(kind: bytes, version: int, payload: bytes, *, compress: bool) -> bytes:
    """``payload`` in its envelope.

    Args:
        kind: Magic of 8 bytes.
        version: Version of the payload, 1 to 65535.
        payload: Any bytes.
        compress: Try zstd; the payload is stored as it is if that does not make it smaller.
    """
    assert len(kind) == MAGIC_BYTES
    assert 0 < version < 1 << 16
    codec, stored = compress_bytes(payload) if compress else (CODEC_RAW, payload)
    body = _HEADER.pack(kind, version, codec, 0, len(payload), len(stored)) + stored
    return body + digest(body)


def record_version(data: bytes) -> int:
    """The payload's version, of a record that :func:`open_record` has opened."""
    version: int = _HEADER.unpack_from(data)[1]
    return version


def open_record(data: bytes, kind: bytes, *, max_version: int, limit_bytes: int) -> bytes:
    """The payload of the record in ``data``, verified.

    Args:
        data: Exactly one record.
        kind: The magic that it must have.
        max_version: The newest version that the caller can read.
        limit_bytes: Largest accepted payload, checked before anything is decompressed.

    Raises:
        IntegrityError: Damaged, truncated, oversized, or a record of another kind.
        FormatVersionError: Intact, but of a newer version or with an unknown codec.
    """
    what, codec, stored, raw_bytes = _open(data, kind, max_version, limit_bytes)
    return decompress_bytes(codec, stored, raw_bytes, what)


def payload_digest(data: bytes, kind: bytes, *, max_version: int, limit_bytes: int) -> bytes:
    """The digest of the payload, without holding a large one in memory. Raises as
    :func:`open_record`.
    """
    what, codec, stored, raw_bytes = _open(data, kind, max_version, limit_bytes)
    if codec == CODEC_ZSTD and raw_bytes > _AT_ONCE_BYTES_MAX:
        return _digest_large(stored, raw_bytes, what)
    return digest(decompress_bytes(codec, stored, raw_bytes, what))


def _open(
    data: bytes, kind: bytes, max_version: int, limit_bytes: int
) -> tuple[str, int, memoryview, int]:
    """Name, codec, stored bytes and raw size of a record, after its envelope was verified."""
    what = kind.decode("ascii", "replace").strip()
    if not ENVELOPE_BYTES <= len(data) <= limit_bytes + ENVELOPE_BYTES:
        raise IntegrityError(
            f"{what} record of {len(data)} bytes; {ENVELOPE_BYTES} to "
            f"{limit_bytes + ENVELOPE_BYTES} are possible"
        )
    magic, version, codec, reserved, raw_bytes, stored_bytes = _HEADER.unpack_from(data)
    if magic != kind:
        raise IntegrityError(f"not a {what} record: it begins with {magic!r}")
    if stored_bytes != len(data) - ENVELOPE_BYTES:
        raise IntegrityError(
            f"{what} record is {len(data)} bytes long, its header states "
            f"{stored_bytes + ENVELOPE_BYTES}"
        )
    expected, actual = bytes(data[-DIGEST_BYTES:]), digest(memoryview(data)[:-DIGEST_BYTES])
    if expected != actual:
        raise IntegrityError(
            f"{what} record is damaged: digest {actual.hex()}, expected {expected.hex()}",
            expected=expected.hex(),
            actual=actual.hex(),
        )
    if version > max_version:
        raise FormatVersionError(
            f"{what} record has version {version}, this release reads up to {max_version}: upgrade",
            expected=max_version,
            actual=version,
        )
    if version == 0 or reserved != 0:
        raise IntegrityError(f"{what} record has an impossible header")
    if raw_bytes > limit_bytes:
        raise IntegrityError(f"{what} payload of {raw_bytes} bytes is over {limit_bytes}")
    return f"{what} record", codec, memoryview(data)[_HEADER.size : -DIGEST_BYTES], raw_bytes


@dataclass(eq=False)
class RecordCodec(Generic[T]):
    """Values of one msgspec struct as records, checked on their way out and in."""

    kind: bytes
    """Magic of 8 bytes."""
    struct: type[T]
    """What the payload is decoded to."""
    what: str
    """What a value is called, for messages."""
    check: Callable[[T], object] = lambda value: None
    """Raises ValueError for values that the fields' types allow but the format does not."""
    _: KW_ONLY
    limit_bytes: int
    """Largest payload."""
    version: int = 1
    """The newest version that is read; also the one that is written by default."""
    texts: bool = False
    """Payloads are mostly text: large ones are compressed, and strings are counted before they are
    decoded."""

    def __post_init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(self.struct)

    def encode(self, value: T, version: int | None = None) -> bytes:
        """``value`` as a record. Raises ValueError if it is invalid or too large."""
        try:
            payload = _encode(value)
            unpack_struct(self._decoder, payload, self.what, self.check)
        except (IntegrityError, OverflowError) as error:
            raise ValueError(f"this {self.what} cannot be stored: {error}") from error
        if len(payload) > self.limit_bytes:
            raise ValueError(
                f"a {self.what} of {len(payload)} bytes; the limit is {self.limit_bytes}"
            )
        compress = self.texts and len(payload) > _COMPRESS_BYTES
        return seal_record(self.kind, version or self.version, payload, compress=compress)

    def decode(self, data: bytes) -> T:
        """The value in ``data``.

        Raises:
            IntegrityError: Damaged, or not a valid one.
            FormatVersionError: Of a newer version.
        """
        payload = open_record(
            data, self.kind, max_version=self.version, limit_bytes=self.limit_bytes
        )
        # A string of two letters takes 3 bytes encoded and 70 decoded. Strings are counted first:
        # each begins with a byte that ASCII text does not contain. (Other text may be refused.)
        if self.texts and len(payload) - len(payload.translate(None, _TEXT_HEADS)) > _TEXTS_MAX:
            raise IntegrityError(f"{self.what}: more than {_TEXTS_MAX} strings")
        return unpack_struct(self._decoder, payload, self.what, self.check)

    def decode_either(self, data: bytes) -> tuple[T, bool]:
        """The value in ``data``, and whether that is JSON without a digest, the former form.

        Raises as :meth:`decode`.
        """
        if not data.startswith(b"{"):
            return self.decode(data), False
        try:
            value = msgspec.json.decode(data, type=self.struct)
            self.check(value)
        except MALFORMED as error:
            raise IntegrityError(f"{self.what} is damaged: {error}") from error
        return value, True
