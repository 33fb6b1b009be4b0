"""What one tier holds, as facts for the recovery plan."""

from __future__ import annotations

from typing import Literal

import msgspec

from tieredckpt.errors import IntegrityError, NotFoundError, TierUnavailableError
from tieredckpt.format.manifest import encode_manifest
from tieredckpt.format.segment import TRAILER_BYTES, decode_trailer
from tieredckpt.tiers.base import Tier
from tieredckpt.tiers.catalog import Catalog
from tieredckpt.tiers.facts import ManifestFact, SegmentFact, TierFacts, TierKind
from tieredckpt.tiers.keys import segment_key
from tieredckpt.tiers.quarantine import QuarantineMarks


def gather(catalog: Catalog, *, kind: TierKind, marks: QuarantineMarks | None = None) -> TierFacts:
    """Facts about one tier, read anew: each manifest's bytes, each segment's size and trailer.

    Of an object store's segments only the listing is looked at: thousands of requests for trailers
    would hold up every restart, and the reader checks the trailer first of all.

    Does not raise for what a tier does: an unavailable tier is a fact. Only trailers are read; that
    blocks match their digests is found out when they are.
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
    """What one copy, listed with this size, says of itself; None if it was deleted meanwhile."""
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
        # One copy that cannot be read does not make the tier unavailable, nor is it damaged: its
        # reader finds out. (A slot in memory that cannot be opened has a writer.)
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
