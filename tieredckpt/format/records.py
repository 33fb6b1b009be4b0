"""Records about one checkpoint, and the objects by which a shared tier deletes checkpoints.

Facts about a checkpoint (its copies, restores, pins, quarantine marks) are added after the commit,
on any host. Each fact is an immutable record with a random id. Hosts merge records by union, in any
order.

A tombstone replaces the manifest of a deleted checkpoint in a shared tier. It has the manifest's
key, so that a host that commits or deletes the checkpoint late finds it. It contains the manifest,
and with it the keys of everything to be deleted.

A host that is about to delete checkpoints stores a *deletion intent*, then looks for vetoes, then
creates the *decision*. A host with a veto creates the opposite decision. The key of a decision can
be created only once, so both hosts see which one won. In a tier the two are stored under
``notices/`` and ``verdicts/``. docs/reference/format/manifest.md is normative.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tieredckpt.format.envelope import RecordCodec
from tieredckpt.format.manifest import (
    MANIFEST_LIMIT_BYTES,
    MAX_SEGMENTS,
    HexId,
    Name,
    Placement,
    Text,
    check_host,
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
TOMBSTONE_LIMIT_BYTES = MANIFEST_LIMIT_BYTES + (1 << 16)
SAVES_MAX = 64
"""Most checkpoints in one deletion intent."""
DELETIONS_MAX = 1_000_000
"""Deletions of one checkpoint, each but the last one undone."""
INTENT_LIMIT_BYTES = 1 << 16

Cause = Literal["retention", "unfinished", "emptied"]
_TOMBSTONE = b"TCKTOMBS"


class SaveRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fact about one checkpoint."""

    namespace: Name
    stream: Name
    save_id: HexId
    kind: RecordKind
    id: HexId
    """Unique; 32 hex digits."""
    host: str
    """The host that made the record."""
    incarnation: HexId
    """Id of one life of that host's memory, which a reboot ends (32 hex digits)."""
    segments: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=MAX_SEGMENTS)] = ()
    """ack: ids of the segments that ``host`` holds. unpin, good: ids of the pins and marks that
    end. spill: ids of the ``dropped`` records that it overrules. replicated: incarnations of the
    memories that hold the copies."""
    placement: Placement = ()
    """order: the hosts that hold copies from now on, by owner."""
    text: Text = ""
    """failed, bad, good, pin: the reason. restored: the attempt that resumed at it. dropped, spill:
    the tier."""


class Tombstone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Replaces the manifest of a checkpoint that a tier deleted or never completed."""

    namespace: Name
    stream: Name
    save_id: HexId
    cause: Cause
    """retention: it was committed, and is not kept. unfinished: it was not committed in time.
    emptied: its segments are being deleted after a deletion by retention, which is now final."""
    host: str
    """The host that deleted it. Informative."""
    manifest: bytes = b""
    """Encoded; empty if the pending manifest could not be read."""


class DeletionIntent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Committed checkpoints that are about to be deleted from a tier."""

    saves: Annotated[
        tuple[tuple[Name, HexId], ...], msgspec.Meta(min_length=1, max_length=SAVES_MAX)
    ]
    """Stream and save id of each."""
    host: str
    """The host that deletes them. Informative."""
    deletions: tuple[Annotated[int, msgspec.Meta(ge=0, lt=DELETIONS_MAX)], ...] = ()
    """Number of earlier deletions of each, all undone; empty: none of them had one."""


class DeletionDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The outcome of a deletion intent."""

    notice: Name
    """The last part of the intent's key."""
    goes: bool
    """True: all checkpoints of the intent are deleted; False: the intent deletes none."""


def is_tombstone(data: bytes) -> bool:
    """Whether ``data`` begins as a tombstone; it may be damaged."""
    return data.startswith(_TOMBSTONE)


def _check_save(record: SaveRecord) -> None:
    check_host(record.host, "the host of a record")
    check_placement(record.placement)
    if record.kind in _ABOUT_TIERS:
        check_name(record.text, "tier")


def _check_tombstone(tombstone: Tombstone) -> None:
    check_host(tombstone.host, "the host of a tombstone")
    if tombstone.manifest:
        manifest = decode_manifest(tombstone.manifest)
        if (manifest.stream, manifest.save_id) != (tombstone.stream, tombstone.save_id):
            raise ValueError("the manifest in it is that of another checkpoint")


def _check_intent(intent: DeletionIntent) -> None:
    check_host(intent.host, "the host of a deletion intent")
    if intent.deletions and len(intent.deletions) != len(intent.saves):
        raise ValueError("not one number of deletions for each checkpoint")


_records = RecordCodec(
    b"TCKRECRD",
    SaveRecord,
    "save record",
    _check_save,
    limit_bytes=RECORD_LIMIT_BYTES,
    texts=True,
)
# Not compressed: the manifest in it is compressed already. So a tombstone is always longer than the
# manifest that it replaces, and a listing shows the difference.
_tombstones = RecordCodec(
    _TOMBSTONE, Tombstone, "tombstone", _check_tombstone, limit_bytes=TOMBSTONE_LIMIT_BYTES
)
_intents = RecordCodec(
    b"TCKNOTCE", DeletionIntent, "deletion intent", _check_intent, limit_bytes=INTENT_LIMIT_BYTES
)
_decisions = RecordCodec(
    b"TCKVERDT", DeletionDecision, "deletion decision", limit_bytes=INTENT_LIMIT_BYTES
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

encode_intent = _intents.encode
"""The deletion intent as bytes. Raises ValueError if it is not a valid one."""

decode_intent = _intents.decode
"""The deletion intent in some bytes. Raises as :func:`decode_save_record`."""

encode_decision = _decisions.encode
"""The decision as bytes. Raises ValueError if it is not a valid one."""

decode_decision = _decisions.decode
"""The decision in some bytes. Raises as :func:`decode_save_record`."""
