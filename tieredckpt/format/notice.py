"""Notice and verdict: how a tier that hosts share lets go of committed checkpoints.

Whoever is about to delete some gives notice first, then looks for what speaks against it, then
creates the verdict. Whoever has said something against it creates the other verdict. A key is
created once, so one of them wins, and both know which. docs/format/manifest.md is normative.
"""

from __future__ import annotations

import msgspec

from tieredckpt.format.envelope import open_record, seal_record
from tieredckpt.format.manifest import check_host, check_id, check_name
from tieredckpt.format.packing import unpack_struct

SAVES_MAX = 64
"""Checkpoints that one notice names."""
DELETIONS_MAX = 1_000_000
"""Of one checkpoint, each but the last one taken back."""
NOTICE_LIMIT_BYTES = 1 << 16

_NOTICE = b"TCKNOTCE"
_VERDICT = b"TCKVERDT"
_VERSION = 1


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


_encode = msgspec.msgpack.Encoder().encode
_notices = msgspec.msgpack.Decoder(Notice)
_verdicts = msgspec.msgpack.Decoder(Verdict)


def encode_notice(notice: Notice) -> bytes:
    """The notice as bytes. Raises ValueError if it is not a valid one."""
    _check_notice(notice)
    return seal_record(_NOTICE, _VERSION, _encode(notice), compress=False)


def decode_notice(data: bytes) -> Notice:
    """The notice in ``data``. Raises IntegrityError: damaged or not valid; FormatVersionError."""
    payload = open_record(data, _NOTICE, max_version=_VERSION, limit_bytes=NOTICE_LIMIT_BYTES)
    return unpack_struct(_notices, payload, "notice", _check_notice)


def encode_verdict(verdict: Verdict) -> bytes:
    """The verdict as bytes. Raises ValueError if it is not a valid one."""
    check_name(verdict.notice, "notice")
    return seal_record(_VERDICT, _VERSION, _encode(verdict), compress=False)


def decode_verdict(data: bytes) -> Verdict:
    """The verdict in ``data``. Raises as :func:`decode_notice`."""
    payload = open_record(data, _VERDICT, max_version=_VERSION, limit_bytes=NOTICE_LIMIT_BYTES)
    return unpack_struct(
        _verdicts, payload, "verdict", lambda found: check_name(found.notice, "notice")
    )


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
