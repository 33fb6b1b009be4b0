"""The manifest, which makes a checkpoint exist, and the attempt record.

Both are msgpack maps in the envelope of :mod:`tieredckpt.format.envelope`; the normative page is
docs/reference/format/manifest.md. Values can be made freely; they are checked when they are encoded
(ValueError: our bug or the caller's) and when they are decoded (IntegrityError: hostile bytes).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated

import msgspec

from tieredckpt.errors import IntegrityError
from tieredckpt.format.envelope import INT_MAX, RecordCodec, record_version
from tieredckpt.format.segment import (
    MAX_SEGMENT_BYTES,
    PAGE_BYTES,
    TRAILER_BYTES,
    Footer,
    decode_footer,
    decode_trailer,
)

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
"""Namespaces, streams and tiers: safe as one component of a path, an object key and a URL."""

ID_PATTERN = re.compile(r"[0-9a-f]{32}", re.ASCII)
"""Save, segment, attempt and plan ids, and root digests: 16 bytes in lower-case hex."""

MANIFEST_LIMIT_BYTES = 16 << 20
ATTEMPT_LIMIT_BYTES = 4 << 20
MAX_SEGMENTS = 1 << 17
MAX_LINEAGE = 1 << 14
MAX_TIERS = 64
MAX_TAGS = 256
MAX_TAG_KEY_CHARS = 128
MAX_TAG_VALUE_CHARS = 4096
MAX_STREAMS = 1 << 10
MAX_PARENTS = 1 << 10
MAX_HOST_CHARS = 255
MAX_REPLICAS = 64
"""Hosts that keep copies of one host's segments."""

_VERSION = 1
_VERSION_REPLICAS = 2
"""Of a manifest that names the holders of replicas; one without is written as version 1."""
_VERSION_PARENTS = 2
"""Of an attempt record; since this version it names its parents."""
_VERSION_SKIPPED = 3
"""Of an attempt record whose base skipped a checkpoint (``in_silence``); others have version 2."""


HexId = Annotated[str, msgspec.Meta(pattern=rf"^{ID_PATTERN.pattern}\Z")]
Name = Annotated[str, msgspec.Meta(pattern=rf"^{NAME_PATTERN.pattern}\Z")]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TAG_VALUE_CHARS)]
_TagKey = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TAG_KEY_CHARS)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=INT_MAX)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
"""Finite."""


def _most(count: int) -> msgspec.Meta:
    return msgspec.Meta(max_length=count)


class AttemptId(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One run of training that saved: a random id (32 hex digits), and a number for people."""

    number: _Number
    id: HexId


class Ancestor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Saves of this earlier attempt (in the same stream) with ``seq <= last_seq`` are ancestors."""

    number: _Number
    id: HexId
    last_seq: _Number


class SegmentRef(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """One segment of a checkpoint; its position in the manifest is the plan's segment ordinal."""

    id: HexId
    size: Annotated[int, msgspec.Meta(gt=0, le=MAX_SEGMENT_BYTES, multiple_of=PAGE_BYTES)]
    root: HexId
    host: str
    """The host that wrote it, and the first one to ask for it."""


class Holders(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The hosts that must keep copies, in memory, of all segments that ``host`` wrote."""

    host: str
    holders: Annotated[tuple[str, ...], _most(MAX_REPLICAS)]


# Lengths are checked before memory is allocated for the elements.
_Lineage = Annotated[tuple[Ancestor, ...], _most(MAX_LINEAGE)]
Placement = Annotated[tuple[Holders, ...], _most(MAX_SEGMENTS)]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The record that makes one checkpoint of one stream exist in a tier."""

    save_id: HexId
    namespace: Name
    stream: Name
    step: _Number
    attempt: AttemptId
    seq: _Number
    """Number of this save within (attempt, stream), from 0."""
    parent: HexId | None
    """Save id of the checkpoint that training resumed at. Informative: ``lineage`` decides."""
    lineage: _Lineage
    plan: HexId
    tiers: Annotated[tuple[Name, ...], _most(MAX_TIERS)]
    """The tiers it will be copied to, besides memory; decided once, by the coordinator."""
    segments: Annotated[tuple[SegmentRef, ...], _most(MAX_SEGMENTS)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=INT_MAX)]
    """Number of ranks. Informative: nothing is addressed by it."""
    tags: Annotated[dict[_TagKey, Text], _most(MAX_TAGS)]
    created_at_s: _Time
    """Seconds since 1970 by the coordinator's clock. Informative: decides nothing."""
    replicas: Placement = ()
    """Placement of replicas at the commit; decided once, by the coordinator."""


class StreamBase(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The checkpoint at which an attempt resumes one stream. No parent: the stream starts anew."""

    stream: Name
    parent: HexId | None
    parent_step: _Number | None
    lineage: _Lineage
    abandons: _Lineage = ()
    """The timeline until then; its saves that are not on ``lineage`` are abandoned."""


class Followed(AttemptId, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An attempt that a newer attempt knew when it was opened."""

    saved: bool = True
    """Whether a checkpoint of it was known then. If not, one that turns up later is a fork."""


class AttemptRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An opened attempt and where its streams resume; a stream without a base simply continues."""

    namespace: Name
    number: _Number
    id: HexId
    run: HexId
    """Id of the process group that opened its engines together (32 hex digits)."""
    bases: Annotated[tuple[StreamBase, ...], _most(MAX_STREAMS)]
    created_at_s: _Time
    followed: Annotated[tuple[Followed, ...], _most(MAX_PARENTS)] = ()
    """Its parents: first the attempt that it continues, then others that it knew and does not
    continue. Empty for the first attempt of a namespace."""
    in_silence: Annotated[tuple[str, ...], _most(MAX_STREAMS)] = ()
    """Streams whose base was chosen while a host or tier was unreachable, without the operator's
    consent: the checkpoints in ``abandons`` of that base are skipped, not abandoned."""


def check_name(value: str, what: str) -> str:
    """``value``, if it is a valid name. Raises ValueError, which names ``what``."""
    if not NAME_PATTERN.fullmatch(value):
        raise ValueError(
            f"{what} {value[:200]!r} is not a valid name: a letter or digit, then up to 127 "
            "letters, digits, '.', '_' or '-'"
        )
    return value


def check_id(value: str, what: str) -> str:
    """``value``, if it is 32 lower-case hex digits. Raises ValueError, which names ``what``."""
    if not ID_PATTERN.fullmatch(value):
        raise ValueError(f"{what} {value[:200]!r} is not 32 lower-case hex digits")
    return value


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as bytes. Raises ValueError if it is not a valid one."""
    return _manifests.encode(manifest, _version_of(manifest))


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in ``data``.

    Raises:
        IntegrityError: Damaged, or not a valid manifest.
        FormatVersionError: Of a newer version.
    """
    manifest = _manifests.decode(data)
    if record_version(data) != _version_of(manifest):
        raise IntegrityError("manifest: replicas belong in version 2, and only there")
    return manifest


def read_footer(
    ref: SegmentRef, read: Callable[[int, int], bytes], tail_bytes: int = PAGE_BYTES
) -> tuple[Footer, bytes]:
    """Read the footer of a copy of ``ref``, verified by its root; return it decoded and encoded.

    Args:
        ref: The segment, of a manifest that was decoded.
        read: Returns all bytes of the copy from a start to a stop, or raises.
        tail_bytes: Bytes at the end that are read first.

    Raises:
        IntegrityError: It is another segment's, or damaged.
        FormatVersionError: Of a newer version.
    """
    start = max(0, ref.size - tail_bytes)
    tail = read(start, ref.size)
    trailer = decode_trailer(tail[-TRAILER_BYTES:])
    if trailer.root.hex() != ref.root or trailer.segment_id.hex() != ref.id:
        raise IntegrityError(
            f"its trailer is another segment's: that of {trailer.segment_id.hex()} with root "
            f"{trailer.root.hex()}; the manifest has root {ref.root}"
        )
    if trailer.segment_bytes != ref.size:
        raise IntegrityError(f"its trailer states {trailer.segment_bytes} bytes")
    first = trailer.index_offset // PAGE_BYTES * PAGE_BYTES
    if first < start:
        start, tail = first, read(first, start) + tail
    data = tail[trailer.index_offset - start :]
    return decode_footer(trailer, data), data


def _version_of(manifest: Manifest) -> int:
    return _VERSION_REPLICAS if manifest.replicas else _VERSION


def encode_attempt(record: AttemptRecord) -> bytes:
    """The attempt record as bytes. Raises ValueError if it is not a valid one."""
    return _attempts.encode(record, _VERSION_SKIPPED if record.in_silence else _VERSION_PARENTS)


def _check_manifest(m: Manifest) -> None:
    _check_lineage(m.lineage)
    check_unique(m.tiers, "tier")
    check_unique((ref.id for ref in m.segments), "segment id")
    for ref in m.segments:
        check_host(ref.host, f"the host of segment {ref.id}")
    check_placement(m.replicas)


LIVE_TAGS = {"origin": "live"}
"""Tags of a capture: a checkpoint that live recovery saves of what surviving ranks kept."""


def is_capture(tags: Mapping[str, str]) -> bool:
    """Whether live recovery made it, to bridge a change of the world: no rule counts it."""
    return tags == LIVE_TAGS


def check_tags(tags: dict[str, str]) -> None:
    """Raise ValueError unless there are at most 256 of them, with short keys and values."""
    if len(tags) > MAX_TAGS:
        raise ValueError(f"{len(tags)} tags; the limit is {MAX_TAGS}")
    for key, value in tags.items():
        if not 0 < len(key) <= MAX_TAG_KEY_CHARS or len(value) > MAX_TAG_VALUE_CHARS:
            raise ValueError(
                f"tag {key[:200]!r}: keys have 1 to {MAX_TAG_KEY_CHARS} characters, "
                f"values up to {MAX_TAG_VALUE_CHARS}"
            )


def check_placement(placement: tuple[Holders, ...]) -> None:
    """Raise ValueError unless each host is there once, and each of its holders."""
    check_unique((each.host for each in placement), "host with replicas")
    for each in placement:
        check_host(each.host, "a host with replicas")
        check_unique(each.holders, "holder")
        for holder in each.holders:
            check_host(holder, "a holder")


def check_host(value: str, what: str) -> str:
    """``value``, if it can name a host. Raises ValueError, which names ``what``."""
    if not 0 < len(value) <= MAX_HOST_CHARS or not value.isprintable():
        raise ValueError(f"{what} is named {value[:200]!r}")
    return value


def _check_attempt(record: AttemptRecord) -> None:
    for resumed in record.bases:
        if (resumed.parent is None) != (resumed.parent_step is None):
            raise ValueError(f"stream {resumed.stream}: a parent without its step, or the reverse")
        _check_lineage(resumed.lineage)
        _check_lineage(resumed.abandons)
    check_unique((record.id, *(each.id for each in record.followed)), "attempt")
    streams = [resumed.stream for resumed in record.bases]
    check_unique(streams, "stream")
    if not set(streams).issuperset(record.in_silence):
        raise ValueError("in_silence names a stream without a base")


def _check_lineage(lineage: tuple[Ancestor, ...]) -> None:
    check_unique((ancestor.id for ancestor in lineage), "ancestor")


def check_unique(values: Iterable[str], what: str) -> None:
    """Raise ValueError, which names ``what``, if a value occurs twice."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{what} {value[:200]!r} occurs twice")
        seen.add(value)


_manifests = RecordCodec(
    b"TCKMANIF",
    Manifest,
    "manifest",
    _check_manifest,
    limit_bytes=MANIFEST_LIMIT_BYTES,
    version=_VERSION_REPLICAS,
    texts=True,
)
_attempts = RecordCodec(
    b"TCKATTMT",
    AttemptRecord,
    "attempt record",
    _check_attempt,
    limit_bytes=ATTEMPT_LIMIT_BYTES,
    version=_VERSION_SKIPPED,
    texts=True,
)

decode_attempt = _attempts.decode
"""The attempt record in some bytes. Raises as :func:`decode_manifest`."""
