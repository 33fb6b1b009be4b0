"""Tombstone, notice and verdict: how a tier that hosts share lets go of committed checkpoints.

The tombstone lies in a manifest's place where a checkpoint of a shared tier was deleted. It is
found under the manifest's own key, so that whoever is late to commit the checkpoint, or to delete
it, meets it there. It holds the manifest, and so the names of all that is to be cleaned up.

Whoever is about to delete some gives notice first, then looks for what speaks against it, then
creates the verdict. Whoever has said something against it creates the other verdict. A key is
created once, so one of them wins, and both know which. docs/format/manifest.md is normative.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from tieredckpt.format.envelope import RecordCodec
from tieredckpt.format.manifest import (
    MANIFEST_LIMIT_BYTES,
    check_host,
    check_id,
    check_name,
    decode_manifest,
)

TOMBSTONE_LIMIT_BYTES = MANIFEST_LIMIT_BYTES + (1 << 16)
SAVES_MAX = 64
"""Checkpoints that one notice names."""
DELETIONS_MAX = 1_000_000
"""Of one checkpoint, each but the last one taken back."""
NOTICE_LIMIT_BYTES = 1 << 16

Cause = Literal["retention", "unfinished", "emptied"]

_CAUSES = get_args(Cause)
_TOMBSTONE = b"TCKTOMBS"


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


class Notice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """That committed checkpoints are about to be deleted from a tier."""

    saves: tuple[tuple[str, str], ...]
    """Stream and save id of each."""
    host: str
    """Who wants to. Informative."""
    deletions: tuple[int, ...] = ()
    """How often each was deleted and taken back before; empty: none of them ever."""


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What became of a notice."""

    notice: str
    """The last part of its key."""
    goes: bool
    """All that the notice names is deleted; False: nothing is, because of it."""


def is_tombstone(data: bytes) -> bool:
    """Whether ``data`` claims to be a tombstone; it may be a damaged one."""
    return data.startswith(_TOMBSTONE)


def encode_tombstone(tombstone: Tombstone) -> bytes:
    """The tombstone as bytes. Raises ValueError if it is not a valid one."""
    return _tombstones.encode(tombstone)


def decode_tombstone(data: bytes) -> Tombstone:
    """The tombstone in ``data``.

    Raises:
        IntegrityError: Damaged, or not a valid tombstone.
        FormatVersionError: Of a newer version.
    """
    return _tombstones.decode(data)


def encode_notice(notice: Notice) -> bytes:
    """The notice as bytes. Raises ValueError if it is not a valid one."""
    return _notices.encode(notice)


def decode_notice(data: bytes) -> Notice:
    """The notice in ``data``. Raises IntegrityError: damaged or not valid; FormatVersionError."""
    return _notices.decode(data)


def encode_verdict(verdict: Verdict) -> bytes:
    """The verdict as bytes. Raises ValueError if it is not a valid one."""
    return _verdicts.encode(verdict)


def decode_verdict(data: bytes) -> Verdict:
    """The verdict in ``data``. Raises as :func:`decode_notice`."""
    return _verdicts.decode(data)


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


def _check_notice(notice: Notice) -> None:
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


# As it is: what is large in it is compressed already, and so a tombstone is always longer than the
# manifest that it replaces, and a listing shows the difference.
_tombstones = RecordCodec(
    _TOMBSTONE, Tombstone, "tombstone", _check_tombstone, limit_bytes=TOMBSTONE_LIMIT_BYTES
)
_notices = RecordCodec(b"TCKNOTCE", Notice, "notice", _check_notice, limit_bytes=NOTICE_LIMIT_BYTES)
_verdicts = RecordCodec(
    b"TCKVERDT",
    Verdict,
    "verdict",
    lambda verdict: check_name(verdict.notice, "notice"),
    limit_bytes=NOTICE_LIMIT_BYTES,
)
