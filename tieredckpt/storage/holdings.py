"""Facts about a host's copies: reported by the agent, and the input of the recovery plan.

Plain values, encoded as msgpack on the wire. An error is a sentence for the operator; a copy with
an error was found to be unusable as a whole.

:func:`gather` collects these facts from one tier.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from tieredckpt.config.tiers import TierSpec
from tieredckpt.errors import (
    IntegrityError,
    NotFoundError,
    RemoteProtocolError,
    TierUnavailableError,
)
from tieredckpt.format.digest import digest
from tieredckpt.format.envelope import MALFORMED
from tieredckpt.format.manifest import encode_manifest
from tieredckpt.format.segment import TRAILER_BYTES, decode_trailer
from tieredckpt.storage.base import Tier, segment_key
from tieredckpt.storage.catalog import Catalog
from tieredckpt.storage.quarantine import QuarantineMarks

TierKind = Literal["memory", "file", "object"]
"""How a tier is read: a slot, a file by its descriptor, or ranges of an object in a store."""


def kind_of(spec: TierSpec | None) -> TierKind:
    """How a configured tier is read; None: memory."""
    return "memory" if spec is None else "file" if spec.is_file else "object"


class Fact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all facts."""


class SegmentFact(Fact, frozen=True, kw_only=True, gc=False):
    """One copy of one segment in one tier."""

    id: str
    size: int
    """Bytes that can be read; less than in the manifest if the copy was truncated."""
    root: str | None
    """Root digest in the copy's own trailer, 32 hex digits; None if there is no valid trailer."""
    error: str | None
    """The reason why the copy as a whole is unusable; single blocks of it may still be good."""
    bad_blocks: tuple[int, ...] = ()
    """Quarantined blocks: a reader found that they do not match their digests."""
    listed: bool = False
    """Only its name and size are known: trailers in stores are not read, or that of a file could
    not be read. The reader checks the trailer first. ``root`` is None then."""
    block_bytes: int | None = None
    """Size of the blocks, if there is a valid trailer."""


class ManifestFact(Fact, frozen=True, kw_only=True, gc=False):
    """One manifest in one tier: its bytes, or their digest, or why it is unusable."""

    stream: str
    save_id: str
    manifest: bytes | None
    error: str | None
    digest: str | None = None
    """XXH3-128 of the encoded manifest, 32 hex digits: another fact has the same bytes."""


class TierFacts(Fact, frozen=True, kw_only=True):
    """The objects of one namespace in one tier, as this host sees them."""

    tier: str
    scope: Literal["host", "shared"]
    kind: TierKind
    available: bool
    error: str | None
    manifests: tuple[ManifestFact, ...] = ()
    plans: tuple[str, ...] = ()
    segments: tuple[SegmentFact, ...] = ()


class Holdings(Fact, frozen=True, kw_only=True):
    """One host's copies in one namespace; tiers in the order of their cost, memory first."""

    host_id: str
    namespace: str
    attempts: tuple[bytes, ...]
    """Encoded attempt records, from all tiers, each once."""
    tiers: tuple[TierFacts, ...]
    records: tuple[bytes, ...] = ()
    """Encoded save records that a restart needs: marks, assignments, and this host's own acks."""
    saved: tuple[str, ...] = ()
    """Ids of the attempts with saves that this host knows of, and of their parents. They count even
    if their checkpoints are lost."""


MAX_HOLDINGS_BYTES = 256 << 20
"""Largest encoded Holdings that a reader accepts: manifests of 10,000 checkpoints."""

_decoder = msgspec.msgpack.Decoder(Holdings)


def encode_holdings(holdings: Holdings) -> bytes:
    """Msgpack of ``holdings``."""
    return msgspec.msgpack.encode(holdings)


def decode_holdings(data: bytes) -> Holdings:
    """Inverse of :func:`encode_holdings`. Raises RemoteProtocolError if oversized or malformed."""
    if len(data) > MAX_HOLDINGS_BYTES:
        raise RemoteProtocolError(f"holdings of {len(data)} bytes, over {MAX_HOLDINGS_BYTES}")
    try:
        return _decoder.decode(data)
    except MALFORMED as error:
        raise RemoteProtocolError(f"malformed holdings: {error}") from error


def manifest_digest(data: bytes) -> str:
    """The digest that replaces a manifest's bytes in :class:`ManifestFact` and in requests."""
    return digest(data).hex()


def slimmed(holdings: Holdings, have: Collection[str] = ()) -> Holdings:
    """The same facts, with each manifest's bytes once at most, and not at all if in ``have``.

    Args:
        holdings: Of one host.
        have: Digests (:func:`manifest_digest`) of manifests that the receiver has already.
    """
    sent = set(have)
    tiers = []
    for tier in holdings.tiers:
        facts = []
        for fact in tier.manifests:
            if fact.manifest is not None:
                name = manifest_digest(fact.manifest)
                kept = None if name in sent else fact.manifest
                sent.add(name)
                fact = msgspec.structs.replace(fact, manifest=kept, digest=name)
            facts.append(fact)
        tiers.append(msgspec.structs.replace(tier, manifests=tuple(facts)))
    return msgspec.structs.replace(holdings, tiers=tuple(tiers))


def gather(catalog: Catalog, *, kind: TierKind, marks: QuarantineMarks | None = None) -> TierFacts:
    """Facts about one tier, read anew: each manifest's bytes, each segment's size and trailer.

    An object store's segments are only listed: thousands of requests for trailers would delay every
    restart, and the reader checks the trailer first. Blocks are not read here; their digests are
    checked when a load reads them.

    Never raises because of a tier: that a tier is unavailable is a fact.
    """
    tier = catalog.tier
    scope: Literal["host", "shared"] = "host" if tier.scope.value == "host" else "shared"
    try:
        found = catalog.load()
        segments: list[SegmentFact | None]
        if kind == "object":
            segments = [_listed(tier, name, size, marks) for name, size in found.segments.items()]
        else:
            segments = [_segment_fact(tier, *each, kind, marks) for each in found.segments.items()]
    except TierUnavailableError as error:
        return TierFacts(tier=tier.name, scope=scope, kind=kind, available=False, error=str(error))
    return TierFacts(
        tier=tier.name,
        scope=scope,
        kind=kind,
        available=True,
        error=None,
        manifests=tuple(
            ManifestFact(
                stream=each.stream,
                save_id=each.save_id,
                manifest=(each.data or encode_manifest(each.manifest)) if each.manifest else None,
                error=each.error,
            )
            for each in found.manifests
        ),
        plans=tuple(sorted(found.plans)),
        segments=tuple(each for each in segments if each is not None),
    )


def _segment_fact(
    tier: Tier, segment_id: str, listed: int, kind: TierKind, marks: QuarantineMarks | None
) -> SegmentFact | None:
    """The facts in the trailer of one listed copy; None if it was deleted meanwhile."""
    size, root, error, block_bytes = 0, None, None, None
    try:
        with tier.open(segment_key(segment_id)) as opened:
            size = opened.size
            if size < TRAILER_BYTES:
                raise IntegrityError(f"only {size} bytes are left of it")
            last = bytearray(TRAILER_BYTES)
            opened.read_into(size - TRAILER_BYTES, memoryview(last))
            trailer = decode_trailer(bytes(last))
            if trailer.segment_id.hex() != segment_id or trailer.segment_bytes != size:
                raise IntegrityError("it holds another segment")
            root, block_bytes = trailer.root.hex(), trailer.block_bytes
    except NotFoundError:
        return None
    except (IntegrityError, TierUnavailableError) as failure:
        # An unreadable copy makes neither the tier unavailable nor the copy damaged: a load will
        # find out. (A slot in memory that cannot be opened has a writer.)
        if isinstance(failure, TierUnavailableError) and kind != "memory":
            return _listed(tier, segment_id, listed, marks)
        error = str(failure)
    fact = SegmentFact(id=segment_id, size=size, root=root, error=error, block_bytes=block_bytes)
    return _marked(fact, tier, marks)


def _listed(tier: Tier, segment_id: str, size: int, marks: QuarantineMarks | None) -> SegmentFact:
    fact = SegmentFact(id=segment_id, size=size, root=None, error=None, listed=True)
    return _marked(fact, tier, marks)


def _marked(fact: SegmentFact, tier: Tier, marks: QuarantineMarks | None) -> SegmentFact:
    mark = marks.get(tier.name, fact.id) if marks is not None else None
    if mark is None:
        return fact
    error = fact.error or (f"quarantined: {mark.reason}" if mark.whole else None)
    return msgspec.structs.replace(fact, error=error, bad_blocks=mark.blocks)
