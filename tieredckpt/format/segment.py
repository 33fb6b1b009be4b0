"""A segment: the bytes that one rank contributes to one checkpoint, the same in every tier.

    items, each aligned, padded with zeros | item index | digest table | zeros | trailer (128)

The data is divided into blocks on a fixed grid, one digest each; the digests are the table. The
trailer holds the digest of index and table, and ends in its own digest, the *root*: who knows the
root can verify every byte. docs/format/segment.md is normative. The bytes <-> index part is in
:mod:`tieredckpt.format.index`. Nothing here knows torch, tiers or files.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from tieredckpt.errors import FormatVersionError, IntegrityError
from tieredckpt.format.digest import DIGEST_BYTES, digest
from tieredckpt.format.envelope import CODEC_RAW, CODEC_ZSTD
from tieredckpt.format.index import (
    DTYPE_BYTES,
    LARGE_ALIGN,
    LARGE_BYTES,
    MAX_INDEX_BYTES,
    MAX_ITEMS,
    SMALL_ALIGN,
    Item,
    ItemSpec,
    decode_index,
    encode_index,
    place,
    structure_digest,
)

__all__ = [
    "BLOCK_BYTES",
    "DTYPE_BYTES",
    "LARGE_ALIGN",
    "LARGE_BYTES",
    "MAX_BLOCK_BYTES",
    "MAX_FOOTER_BYTES",
    "MAX_INDEX_BYTES",
    "MAX_ITEMS",
    "PAGE_BYTES",
    "SEGMENT_ID_BYTES",
    "SMALL_ALIGN",
    "TRAILER_BYTES",
    "Footer",
    "Item",
    "ItemSpec",
    "SegmentLayout",
    "Trailer",
    "decode_footer",
    "decode_trailer",
    "encode_footer",
    "lay_out",
    "retitled",
    "slot_capacity",
    "structure_digest",
]

BLOCK_BYTES = 4 << 20
"""Largest size of a block that is chosen, and the default: see :mod:`tieredckpt.format.blocks`."""

PAGE_BYTES = 4096
"""Segments are padded to a multiple of it, so that direct I/O needs no special end."""

TRAILER_BYTES = 128
SEGMENT_ID_BYTES = 16
MAX_BLOCK_BYTES = 1 << 30
MAX_SEGMENT_BYTES = 1 << 48
MAX_TABLE_BYTES = 256 << 20
MAX_FOOTER_BYTES = MAX_INDEX_BYTES + MAX_TABLE_BYTES + PAGE_BYTES
"""No valid footer is longer, so nobody needs to read more than this at the end of a segment."""

VERSION = 1
_MAGIC = b"TCKSEGMT"
# magic, version, codec of the index, block, data, index offset, index size, table offset,
# table size, segment, raw index, segment id, digest of index + table, reserved; then the root.
_TRAILER = struct.Struct("<8sHHIQQQQQQQ16s16s8s")
_ROOT_OFFSET = TRAILER_BYTES - DIGEST_BYTES
assert _TRAILER.size == _ROOT_OFFSET

_MIN_SLOT_BYTES = 1 << 20


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def slot_capacity(segment_bytes: int) -> int:
    """Usable bytes of the slot for a segment of ``segment_bytes``, without the label page.

    Size classes of an eighth of the power of two below, at least 1 MiB: a segment whose bytes
    items grow a little still fits the slot it had, for at most 12.5 % of slack.
    """
    size = max(segment_bytes, _MIN_SLOT_BYTES)
    return round_up(size, 1 << (size.bit_length() - 1) >> 3)


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Where each item of a segment goes. Made by :func:`lay_out`.

    ``data_bytes`` is a multiple of 64; blocks of ``block_bytes`` cover exactly ``[0, data_bytes)``.
    """

    items: tuple[Item, ...]
    data_bytes: int
    index_codec: int
    index_raw_bytes: int
    index: bytes
    block_bytes: int

    @property
    def footer_offset(self) -> int:
        """Where the bytes of :func:`encode_footer` go."""
        return self.data_bytes

    @property
    def num_blocks(self) -> int:
        """Number of blocks, and of digests in the table."""
        return -(-self.data_bytes // self.block_bytes)

    @property
    def segment_bytes(self) -> int:
        """Exact size of the finished segment, a multiple of 4096."""
        table = self.num_blocks * DIGEST_BYTES
        return round_up(self.data_bytes + len(self.index) + table + TRAILER_BYTES, PAGE_BYTES)

    def gaps(self) -> list[tuple[int, int]]:
        """The byte ranges (start, stop) of the data that no item fills: they must be zeros."""
        found = []
        end = 0
        for item in self.items:
            if item.offset > end:
                found.append((end, item.offset))
            end = item.offset + item.size_bytes
        if self.data_bytes > end:
            found.append((end, self.data_bytes))
        return found


def lay_out(specs: Sequence[ItemSpec], block_bytes: int = BLOCK_BYTES) -> SegmentLayout:
    """Give each item its place, in the order given.

    Args:
        specs: The items.
        block_bytes: Size of the blocks: a multiple of 4096, at most 1 GiB.

    Raises:
        ValueError: A bytes item before a tensor item, negative or inconsistent sizes, a chunk
            outside of its tensor, a name that UTF-8 cannot express, or too many items.
    """
    assert block_bytes % PAGE_BYTES == 0
    assert 0 < block_bytes <= MAX_BLOCK_BYTES
    items, end = place(specs)
    if end > MAX_SEGMENT_BYTES - MAX_FOOTER_BYTES:
        raise ValueError(f"{end} bytes of items in one segment; the limit is 2**48")
    index_codec, index_raw_bytes, index = encode_index(items)
    data_bytes = round_up(end, SMALL_ALIGN)
    return SegmentLayout(items, data_bytes, index_codec, index_raw_bytes, index, block_bytes)


def encode_footer(layout: SegmentLayout, block_digests: bytes, segment_id: bytes) -> bytes:
    """Everything from ``layout.footer_offset`` to the end of the segment; its last 16 bytes are
    the root.

    Args:
        layout: Of the data that is in place.
        block_digests: The digests of all blocks, concatenated.
        segment_id: 16 bytes, minted by the agent.
    """
    assert len(block_digests) == layout.num_blocks * DIGEST_BYTES
    assert len(segment_id) == SEGMENT_ID_BYTES
    body = layout.index + block_digests
    table_offset = layout.footer_offset + len(layout.index)
    segment_bytes = layout.segment_bytes
    trailer = _TRAILER.pack(
        _MAGIC,
        VERSION,
        layout.index_codec,
        layout.block_bytes,
        layout.data_bytes,
        layout.footer_offset,
        len(layout.index),
        table_offset,
        len(block_digests),
        segment_bytes,
        layout.index_raw_bytes,
        segment_id,
        digest(body),
        bytes(8),
    )
    pad = segment_bytes - TRAILER_BYTES - table_offset - len(block_digests)
    return b"".join((body, bytes(pad), trailer, digest(trailer)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trailer:
    """The last 128 bytes of a segment, decoded; offsets are from the segment's start."""

    version: int
    block_bytes: int
    data_bytes: int
    index_offset: int
    index_bytes: int
    table_offset: int
    table_bytes: int
    segment_bytes: int
    segment_id: bytes
    footer_digest: bytes
    root: bytes
    """Digest of the trailer up to here; vouches for the whole segment."""
    index_codec: int
    index_raw_bytes: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks, and of digests in the table."""
        return -(-self.data_bytes // self.block_bytes)

    @property
    def footer_bytes(self) -> int:
        """From ``index_offset`` to the segment's end: what :func:`decode_footer` wants."""
        return self.segment_bytes - self.index_offset


def decode_trailer(data: bytes) -> Trailer:
    """The trailer in ``data``, the last 128 bytes of a segment.

    All fields are checked against each other and against the limits of this module; the caller
    compares ``root``, ``segment_id`` and ``segment_bytes`` with what it expects.

    Raises:
        IntegrityError: Not 128 bytes, or not an intact trailer.
        FormatVersionError: An intact trailer of a newer version.
    """
    if len(data) != TRAILER_BYTES:
        raise IntegrityError(f"a segment's trailer has {TRAILER_BYTES} bytes, not {len(data)}")
    fields = _TRAILER.unpack_from(data)
    magic, version, codec, block, size, index_offset, index_bytes = fields[:7]
    table_offset, table_bytes, segment_bytes, index_raw, segment_id, footer, reserved = fields[7:]
    if magic != _MAGIC:
        raise IntegrityError(f"no segment: its trailer begins with {magic!r}")
    root, actual = bytes(data[_ROOT_OFFSET:]), digest(memoryview(data)[:_ROOT_OFFSET])
    if root != actual:
        raise IntegrityError(
            f"the segment's trailer is damaged: digest {actual.hex()}, expected {root.hex()}",
            expected=root.hex(),
            actual=actual.hex(),
        )
    # Magic, version, and the root as the last 16 of 128 bytes stay where they are in any version.
    if version > VERSION:
        raise FormatVersionError(
            f"segment version {version}, this release reads up to {VERSION}: upgrade",
            expected=VERSION,
            actual=version,
        )
    sound = (
        version > 0
        and codec in (CODEC_RAW, CODEC_ZSTD)
        and reserved == bytes(8)
        and block % PAGE_BYTES == 0
        and 0 < block <= MAX_BLOCK_BYTES
        and size % SMALL_ALIGN == 0
        and index_offset == size
        and 0 < index_bytes <= index_raw <= MAX_INDEX_BYTES
        and (codec == CODEC_ZSTD or index_bytes == index_raw)
        and table_offset == index_offset + index_bytes
        and table_bytes == -(-size // block) * DIGEST_BYTES <= MAX_TABLE_BYTES
        and segment_bytes == round_up(table_offset + table_bytes + TRAILER_BYTES, PAGE_BYTES)
        and segment_bytes <= MAX_SEGMENT_BYTES
    )
    if not sound:
        raise IntegrityError("the fields of the segment's trailer contradict each other")
    return Trailer(
        version=version,
        block_bytes=block,
        data_bytes=size,
        index_offset=index_offset,
        index_bytes=index_bytes,
        table_offset=table_offset,
        table_bytes=table_bytes,
        segment_bytes=segment_bytes,
        segment_id=segment_id,
        footer_digest=footer,
        root=root,
        index_codec=codec,
        index_raw_bytes=index_raw,
    )


def retitled(trailer: bytes, segment_id: bytes) -> bytes:
    """The trailer of a segment of the same contents and another id; its last 16 bytes are the root.

    So whoever has the root of a segment can tell whether another one has the same contents.
    """
    assert len(trailer) == TRAILER_BYTES
    assert len(segment_id) == SEGMENT_ID_BYTES
    fields = list(_TRAILER.unpack_from(trailer))
    fields[11] = segment_id
    renamed = _TRAILER.pack(*fields)
    return renamed + digest(renamed)


@dataclass(frozen=True, slots=True)
class Footer:
    """What is needed to find and verify everything in a segment. Made by :func:`decode_footer`."""

    trailer: Trailer
    items: tuple[Item, ...]
    block_digests: bytes

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.trailer.num_blocks

    def block_digest(self, block: int) -> bytes:
        """The digest that the bytes of ``block`` must have. Raises IndexError."""
        return self.digests_of(block, 1)

    def digests_of(self, first: int, count: int) -> bytes:
        """The digests of ``count`` blocks from ``first`` on, concatenated. Raises IndexError."""
        if not 0 <= first < first + count <= self.num_blocks:
            raise IndexError(f"blocks {first} to {first + count - 1} of {self.num_blocks}")
        return self.block_digests[first * DIGEST_BYTES : (first + count) * DIGEST_BYTES]

    def block_range(self, block: int) -> tuple[int, int]:
        """The bytes (start, stop) that ``block`` covers (the last may be short), or IndexError."""
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block {block} of {self.num_blocks}")
        start = block * self.trailer.block_bytes
        return start, min(start + self.trailer.block_bytes, self.trailer.data_bytes)


def decode_footer(trailer: Trailer, data: bytes) -> Footer:
    """The footer in ``data``, the bytes from ``trailer.index_offset`` to the segment's end.

    Raises:
        IntegrityError: Damaged, not the footer of this trailer, or one that no encoder makes:
            items that overlap, leave the data, or whose size does not fit dtype and shape.
    """
    if len(data) != trailer.footer_bytes:
        raise IntegrityError(
            f"a footer of {len(data)} bytes, its trailer says {trailer.footer_bytes}"
        )
    body_bytes = trailer.index_bytes + trailer.table_bytes
    if data[-DIGEST_BYTES:] != trailer.root:
        raise IntegrityError("the footer does not end in the trailer that was given")
    actual = digest(memoryview(data)[:body_bytes])
    if actual != trailer.footer_digest:
        raise IntegrityError(
            f"the segment's footer is damaged: digest {actual.hex()}, "
            f"expected {trailer.footer_digest.hex()}",
            expected=trailer.footer_digest.hex(),
            actual=actual.hex(),
        )
    if any(data[body_bytes:-TRAILER_BYTES]):
        raise IntegrityError("the padding before the segment's trailer is not zero")
    items = decode_index(
        bytes(data[: trailer.index_bytes]),
        codec=trailer.index_codec,
        raw_bytes=trailer.index_raw_bytes,
        data_bytes=trailer.data_bytes,
    )
    return Footer(trailer, items, bytes(data[trailer.index_bytes : body_bytes]))
