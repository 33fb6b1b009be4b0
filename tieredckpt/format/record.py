"""Records about one checkpoint: said once, never changed, merged by union between hosts.

What is known of a checkpoint beside its manifest (who holds copies, that it was restored, that an
operator marked or pinned it) grows after the commit, on any host. So each fact is a record of its
own under a random id; who has missed one takes it over from whoever has it, in any order.
docs/format/manifest.md is normative.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from tieredckpt.format.envelope import RecordCodec
from tieredckpt.format.manifest import (
    MAX_SEGMENTS,
    MAX_TAG_VALUE_CHARS,
    Placement,
    check_host,
    check_id,
    check_name,
    check_placement,
)

RECORD_LIMIT_BYTES = 16 << 20

RecordKind = Literal[
    "order", "ack", "replicated", "restored", "bad", "pin", "unpin", "failed", "dropped", "spill",
    "good",
]  # fmt: skip
_ABOUT_TIERS = ("dropped", "spill")

_KINDS = get_args(RecordKind)


class SaveRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fact about one checkpoint."""

    namespace: str
    stream: str
    save_id: str
    kind: RecordKind
    id: str
    """Unique; 32 hex digits."""
    host: str
    """Who says it."""
    incarnation: str
    """Of that host's memory: what it held before a reboot counts no more (32 hex digits)."""
    segments: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_SEGMENTS)] = ()
    """ack: ids of the segments that ``host`` holds. unpin, good: ids of the pins that end, and of
    the marks that are taken back. spill: ids of the ``dropped`` records that it overrules.
    replicated: the incarnations of the memories that the copies are in."""
    placement: Placement = ()
    """order: who is to keep copies of whom, from now on too."""
    text: str = ""
    """failed, bad, good, pin: why. restored: the attempt that went on from it. dropped, spill:
    which tier."""


def encode_save_record(record: SaveRecord) -> bytes:
    """The record as bytes. Raises ValueError if it is not a valid one."""
    return _records.encode(record)


def decode_save_record(data: bytes) -> SaveRecord:
    """The record in ``data``.

    Raises:
        IntegrityError: Damaged, or not a valid record.
        FormatVersionError: Of a newer version.
    """
    return _records.decode(data)


def _check(record: SaveRecord) -> None:
    check_name(record.namespace, "namespace")
    check_name(record.stream, "stream")
    check_id(record.save_id, "save id")
    check_id(record.id, "record id")
    check_host(record.host, "the host of a record")
    check_id(record.incarnation, "incarnation")
    if record.kind not in _KINDS:
        raise ValueError(f"there are no records of kind {record.kind[:200]!r}")
    if len(record.segments) > MAX_SEGMENTS:
        raise ValueError(f"{len(record.segments)} segments; the limit is {MAX_SEGMENTS}")
    for segment_id in record.segments:
        check_id(segment_id, "segment id")
    check_placement(record.placement)
    if record.kind in _ABOUT_TIERS:
        check_name(record.text, "tier")
    if len(record.text) > MAX_TAG_VALUE_CHARS:
        raise ValueError(
            f"a text of {len(record.text)} characters; the limit is {MAX_TAG_VALUE_CHARS}"
        )


_records = RecordCodec(
    b"TCKRECRD", SaveRecord, "save record", _check, limit_bytes=RECORD_LIMIT_BYTES, texts=True
)
