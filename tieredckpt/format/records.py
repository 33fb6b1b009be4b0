"""Records about one checkpoint, and how a tier that hosts share lets go of one.

What is known of a checkpoint beside its manifest (who holds copies, that it was restored, that an
operator marked or pinned it) grows after the commit, on any host. So each fact is a record of its
own under a random id, said once and never changed; who has missed one takes it over from whoever
has it, in any order.

The tombstone lies in a manifest's place where a checkpoint of a shared tier was deleted. It is
found under the manifest's own key, so that whoever is late to commit the checkpoint, or to delete
it, meets it there. It holds the manifest, and so the names of all that is to be cleaned up.

Whoever is about to delete some gives notice first, then looks for what speaks against it, then
creates the verdict. Whoever has said something against it creates the other verdict. A key is
created once, so one of them wins, and both know which. docs/reference/format/manifest.md is
normative.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from tieredckpt.format.envelope import RecordCodec
from tieredckpt.format.manifest import (
    MANIFEST_LIMIT_BYTES,
    MAX_SEGMENTS,
    MAX_TAG_VALUE_CHARS,
    Placement,
    check_host,
    check_id,
    check_name,
    check_placement,
    decode_manifest,
)

RECORD_LIMIT_BYTES = 16 << 20

RecordKind = Literal[
    "order", "ack", "replicated", "restored", "bad", "pin", "unpin", "failed", "dropped", "spill",
    "good",
]  # fmt: skip
_ABOUT_TIERS = ("dropped", "spill")

_KINDS = get_args(RecordKind)
TOMBSTONE_LIMIT_BYTES = MANIFEST_LIMIT_BYTES + (1 << 16)
SAVES_MAX = 64
"""Checkpoints that one notice names."""
DELETIONS_MAX = 1_000_000
"""Of one checkpoint, each but the last one taken back."""
INTENT_LIMIT_BYTES = 1 << 16

Cause = Literal["retention", "unfinished", "emptied"]

_CAUSES = get_args(Cause)
_TOMBSTONE = b"TCKTOMBS"


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


class Tombstone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """That one checkpoint was deleted from a tier, or will never be finished there."""

    namespace: str
    stream: str
    save_id: str
    cause: Cause
    """retention: it was committed, and is not kept. unfinished: it was never committed in time.
    emptied: after a deletion by retention, its segments go; nobody can take it back any more."""
    host: str
    """Who deleted it. Informative."""
    manifest: bytes = b""
    """Encoded; empty if what was to become the manifest could not be read."""


class DeletionIntent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """That committed checkpoints are about to be deleted from a tier."""

    saves: tuple[tuple[str, str], ...]
    """Stream and save id of each."""
    host: str
    """Who wants to. Informative."""
    deletions: tuple[int, ...] = ()
    """How often each was deleted and taken back before; empty: none of them ever."""


class DeletionDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What became of a notice."""

    notice: str
    """The last part of its key."""
    goes: bool
    """All that the notice names is deleted; False: nothing is, because of it."""


def is_tombstone(data: bytes) -> bool:
    """Whether ``data`` claims to be a tombstone; it may be a damaged one."""
    return data.startswith(_TOMBSTONE)


def _check_save(record: SaveRecord) -> None:
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


def _check_tombstone(tombstone: Tombstone) -> None:
    check_name(tombstone.namespace, "namespace")
    check_name(tombstone.stream, "stream")
    check_id(tombstone.save_id, "save id")
    check_host(tombstone.host, "the host of a tombstone")
    if tombstone.cause not in _CAUSES:
        raise ValueError(f"nothing is deleted because of {tombstone.cause[:200]!r}")
    if tombstone.manifest:
        manifest = decode_manifest(tombstone.manifest)
        if (manifest.stream, manifest.save_id) != (tombstone.stream, tombstone.save_id):
            raise ValueError("the manifest in it is that of another checkpoint")


def _check_notice(notice: DeletionIntent) -> None:
    check_host(notice.host, "the host of a notice")
    if not 0 < len(notice.saves) <= SAVES_MAX:
        raise ValueError(f"{len(notice.saves)} checkpoints; 1 to {SAVES_MAX} are possible")
    if notice.deletions and len(notice.deletions) != len(notice.saves):
        raise ValueError("not one number of deletions for each checkpoint")
    if any(not 0 <= each < DELETIONS_MAX for each in notice.deletions):
        raise ValueError("an impossible number of deletions")
    for stream, save_id in notice.saves:
        check_name(stream, "stream")
        check_id(save_id, "save id")


_records = RecordCodec(
    b"TCKRECRD",
    SaveRecord,
    "save record",
    _check_save,
    limit_bytes=RECORD_LIMIT_BYTES,
    texts=True,
)
# As it is: what is large in it is compressed already, and so a tombstone is always longer than the
# manifest that it replaces, and a listing shows the difference.
_tombstones = RecordCodec(
    _TOMBSTONE, Tombstone, "tombstone", _check_tombstone, limit_bytes=TOMBSTONE_LIMIT_BYTES
)
_notices = RecordCodec(
    b"TCKNOTCE", DeletionIntent, "notice", _check_notice, limit_bytes=INTENT_LIMIT_BYTES
)
_verdicts = RecordCodec(
    b"TCKVERDT",
    DeletionDecision,
    "verdict",
    lambda verdict: check_name(verdict.notice, "notice"),
    limit_bytes=INTENT_LIMIT_BYTES,
)

encode_save_record = _records.encode
"""The record as bytes. Raises ValueError if it is not a valid one."""

decode_save_record = _records.decode
"""The record in some bytes.

Raises:
    IntegrityError: Damaged, or not a valid record.
    FormatVersionError: Of a newer version.
"""

encode_tombstone = _tombstones.encode
"""The tombstone as bytes. Raises ValueError if it is not a valid one."""

decode_tombstone = _tombstones.decode
"""The tombstone in some bytes. Raises as :func:`decode_save_record`."""

encode_intent = _notices.encode
"""The notice as bytes. Raises ValueError if it is not a valid one."""

decode_intent = _notices.decode
"""The notice in some bytes. Raises as :func:`decode_save_record`."""

encode_decision = _verdicts.encode
"""The verdict as bytes. Raises ValueError if it is not a valid one."""

decode_decision = _verdicts.decode
"""The verdict in some bytes. Raises as :func:`decode_save_record`."""
