"""The manifest, which makes a checkpoint exist, and the attempt record.

Both are msgpack maps in the envelope of :mod:`tieredckpt.format.envelope`; the normative page is
docs/reference/format/manifest.md. Values can be made freely; they are checked when they are encoded
(ValueError: our bug or the caller's) and when they are decoded (IntegrityError: hostile bytes).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
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
_VERSION_CHAIN = 2
"""Of an attempt record, which since then names what it followed."""
_VERSION_SILENCE = 3
"""Of one that passed over something in silence; another one is written as version 2."""


def _most(count: int) -> msgspec.Meta:
    return msgspec.Meta(max_length=count)


class AttemptId(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One run of training that saved: a random id (32 hex digits), and a number for people."""

    number: int
    id: str


class Ancestor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Saves of this earlier attempt (in the same stream) with ``seq <= last_seq`` are ancestors."""

    number: int
    id: str
    last_seq: int


class SegmentRef(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """One segment of a checkpoint; its position in the manifest is the plan's segment ordinal."""

    id: str
    size: int
    root: str
    host: str
    """The host that wrote it: where to ask first."""


class Holders(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The hosts that are to keep copies, in memory, of all segments that ``host`` wrote."""

    host: str
    holders: Annotated[tuple[str, ...], _most(MAX_REPLICAS)]


# Lengths are checked before anything is allocated for what they announce.
_Lineage = Annotated[tuple[Ancestor, ...], _most(MAX_LINEAGE)]
Placement = Annotated[tuple[Holders, ...], _most(MAX_SEGMENTS)]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What makes one checkpoint of one stream exist in a tier."""

    save_id: str
    namespace: str
    stream: str
    step: int
    attempt: AttemptId
    seq: int
    """Number of this save within (attempt, stream), from 0."""
    parent: str | None
    """Save id that training went on from; for people, lineage decides."""
    lineage: _Lineage
    plan: str
    tiers: Annotated[tuple[str, ...], _most(MAX_TIERS)]
    """The tiers that it is destined for, besides memory; decided once, by the coordinator."""
    segments: Annotated[tuple[SegmentRef, ...], _most(MAX_SEGMENTS)]
    world_size: int
    """Informative: nothing is addressed by it."""
    tags: Annotated[dict[str, str], _most(MAX_TAGS)]
    created_at_s: float
    """Seconds since 1970 by the coordinator's clock. Informative: decides nothing."""
    replicas: Placement = ()
    """Who was to keep copies of whom when it was committed; decided once, by the coordinator."""


class StreamBase(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where an attempt takes one stream up. Without a parent the stream begins anew."""

    stream: str
    parent: str | None
    parent_step: int | None
    lineage: _Lineage
    abandons: _Lineage = ()
    """What was on the line until then: of these saves, those not on ``lineage`` are abandoned."""


class Followed(AttemptId, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An attempt that a newer one knew of when it was opened."""

    saved: bool = True
    """Whether any checkpoint of it was known then: if not, those that turn up make a fork."""


class AttemptRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """That an attempt was opened, and from where; streams without a base go on as they were."""

    namespace: str
    number: int
    id: str
    run: str
    """Whose attempt it is: the process group that opened its engines together (32 hex digits)."""
    bases: Annotated[tuple[StreamBase, ...], _most(MAX_STREAMS)]
    created_at_s: float
    followed: Annotated[tuple[Followed, ...], _most(MAX_PARENTS)] = ()
    """The attempt that it goes on from, and then those that it knew of and left aside; () began
    the namespace."""
    in_silence: Annotated[tuple[str, ...], _most(MAX_STREAMS)] = ()
    """Streams whose base was chosen while somebody did not answer, and nobody agreed to that: what
    the base says is abandoned there is only left behind."""


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
    """Read the footer of a copy of ``ref``, proven by its root; also as the bytes that it is.

    Args:
        ref: The segment, of a manifest that was decoded.
        read: The bytes of the copy from a start to a stop, which are all there or it raises.
        tail_bytes: How much of the end is read at first.

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
            f"{trailer.root.hex()}, the manifest says {ref.root}"
        )
    if trailer.segment_bytes != ref.size:
        raise IntegrityError(f"its trailer says {trailer.segment_bytes} bytes")
    first = trailer.index_offset // PAGE_BYTES * PAGE_BYTES
    if first < start:
        start, tail = first, read(first, start) + tail
    data = tail[trailer.index_offset - start :]
    return decode_footer(trailer, data), data


def _version_of(manifest: Manifest) -> int:
    return _VERSION_REPLICAS if manifest.replicas else _VERSION


def encode_attempt(record: AttemptRecord) -> bytes:
    """The attempt record as bytes. Raises ValueError if it is not a valid one."""
    return _attempts.encode(record, _VERSION_SILENCE if record.in_silence else _VERSION_CHAIN)


def _check_manifest(m: Manifest) -> None:
    check_id(m.save_id, "save id")
    check_name(m.namespace, "namespace")
    check_name(m.stream, "stream")
    _check_range(m.step, "step")
    _check_range(m.seq, "seq")
    _check_range(m.attempt.number, "attempt number")
    check_id(m.attempt.id, "attempt id")
    if m.parent is not None:
        check_id(m.parent, "parent")
    _check_lineage(m.lineage)
    check_id(m.plan, "plan id")
    _check_count(m.tiers, MAX_TIERS, "tiers")
    for tier in m.tiers:
        check_name(tier, "tier")
    check_unique(m.tiers, "tier")
    _check_count(m.segments, MAX_SEGMENTS, "segments")
    for ref in m.segments:
        _check_segment(ref)
    check_unique((ref.id for ref in m.segments), "segment id")
    _check_range(m.world_size, "world size", least=1)
    check_tags(m.tags)
    _check_time(m.created_at_s)
    check_placement(m.replicas)


def check_tags(tags: dict[str, str]) -> None:
    """Raise ValueError unless there are at most 256 of them, with short keys and values."""
    _check_count(tags, MAX_TAGS, "tags")
    for key, value in tags.items():
        if not 0 < len(key) <= MAX_TAG_KEY_CHARS or len(value) > MAX_TAG_VALUE_CHARS:
            raise ValueError(
                f"tag {key[:200]!r}: keys have 1 to {MAX_TAG_KEY_CHARS} characters, "
                f"values up to {MAX_TAG_VALUE_CHARS}"
            )


def check_placement(placement: tuple[Holders, ...]) -> None:
    """Raise ValueError unless each host is there once, with at most 64 holders, each once."""
    _check_count(placement, MAX_SEGMENTS, "hosts with replicas")
    check_unique((each.host for each in placement), "host with replicas")
    for each in placement:
        check_host(each.host, "a host with replicas")
        _check_count(each.holders, MAX_REPLICAS, "holders of one host")
        check_unique(each.holders, "holder")
        for holder in each.holders:
            check_host(holder, "a holder")


def check_host(value: str, what: str) -> str:
    """``value``, if it can name a host. Raises ValueError, which names ``what``."""
    if not 0 < len(value) <= MAX_HOST_CHARS or not value.isprintable():
        raise ValueError(f"{what} is named {value[:200]!r}")
    return value


def _check_segment(ref: SegmentRef) -> None:
    check_id(ref.id, "segment id")
    check_id(ref.root, "root")
    if ref.size % PAGE_BYTES or not 0 < ref.size <= MAX_SEGMENT_BYTES:
        raise ValueError(f"segment {ref.id} has impossible size {ref.size}")
    check_host(ref.host, f"the host of segment {ref.id}")


def _check_attempt(record: AttemptRecord) -> None:
    check_name(record.namespace, "namespace")
    _check_range(record.number, "attempt number")
    check_id(record.id, "attempt id")
    check_id(record.run, "run")
    _check_count(record.bases, MAX_STREAMS, "streams")
    for base in record.bases:
        check_name(base.stream, "stream")
        if (base.parent is None) != (base.parent_step is None):
            raise ValueError(f"stream {base.stream}: a parent without its step, or the reverse")
        if base.parent is not None and base.parent_step is not None:
            check_id(base.parent, "parent")
            _check_range(base.parent_step, "parent step")
        _check_lineage(base.lineage)
        _check_lineage(base.abandons)
    _check_count(record.followed, MAX_PARENTS, "attempts followed")
    for each in record.followed:
        _check_range(each.number, "number of an attempt followed")
        check_id(each.id, "id of an attempt followed")
    check_unique((record.id, *(each.id for each in record.followed)), "attempt")
    check_unique((base.stream for base in record.bases), "stream")
    if not {base.stream for base in record.bases}.issuperset(record.in_silence):
        raise ValueError("what was chosen in silence is of a stream without a base")
    _check_time(record.created_at_s)


def _check_lineage(lineage: tuple[Ancestor, ...]) -> None:
    _check_count(lineage, MAX_LINEAGE, "lineage")
    for ancestor in lineage:
        _check_range(ancestor.number, "ancestor's number")
        check_id(ancestor.id, "ancestor's id")
        _check_range(ancestor.last_seq, "ancestor's last seq")
    check_unique((ancestor.id for ancestor in lineage), "ancestor")


def _check_range(value: int, what: str, *, least: int = 0) -> None:
    if not least <= value <= INT_MAX:
        raise ValueError(f"{what} {value} is not in {least} .. 2**63 - 1")


def _check_count(values: Iterable[object], most: int, what: str) -> None:
    count = len(tuple(values))
    if count > most:
        raise ValueError(f"{count} {what}; the limit is {most}")


def check_unique(values: Iterable[str], what: str) -> None:
    """Raise ValueError, which names ``what``, if a value occurs twice."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{what} {value[:200]!r} occurs twice")
        seen.add(value)


def _check_time(created_at_s: float) -> None:
    if not math.isfinite(created_at_s) or created_at_s < 0:
        raise ValueError(f"created at {created_at_s}")


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
    version=_VERSION_SILENCE,
    texts=True,
)

decode_attempt = _attempts.decode
"""The attempt record in some bytes. Raises as :func:`decode_manifest`."""
