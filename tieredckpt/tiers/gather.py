"""What one tier holds, as facts for the recovery plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tieredckpt.errors import IntegrityError, NotFoundError, TierUnavailableError
from tieredckpt.format.segment import TRAILER_BYTES, decode_trailer
from tieredckpt.tiers.base import Tier
from tieredckpt.tiers.facts import ManifestFact, SegmentFact, TierFacts
from tieredckpt.tiers.keys import segment_key
from tieredckpt.tiers.quarantine import QuarantineMarks

if TYPE_CHECKING:
    from tieredckpt.tiers.catalog import Catalog


def gather(
    catalog: Catalog, *, kind: Literal["memory", "file"], marks: QuarantineMarks | None = None
) -> TierFacts:
    """Facts about one tier, read anew: each manifest's bytes, each segment's size and trailer.

    Does not raise for what a tier does: an unavailable tier is a fact. Only trailers are read; that
    blocks match their digests is found out when they are.
    """
    tier = catalog.tier
    scope: Literal["host", "shared"] = "host" if tier.scope.value == "host" else "shared"
    try:
        found = catalog.load()
        segments = [_segment_fact(tier, name, marks) for name in found.segments]
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
                manifest=each.data if each.manifest is not None else None,
                error=each.error,
            )
            for each in found.manifests
        ),
        plans=tuple(sorted(found.plans)),
        segments=tuple(each for each in segments if each is not None),
    )


def _segment_fact(tier: Tier, segment_id: str, marks: QuarantineMarks | None) -> SegmentFact | None:
    """What one copy says of itself; None if it was deleted meanwhile."""
    size, root, error = 0, None, None
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
            root = trailer.root.hex()
    except NotFoundError:
        return None
    except (IntegrityError, TierUnavailableError) as failure:
        # One copy that cannot be read does not make the tier unavailable.
        error = str(failure)
    mark = marks.get(tier.name, segment_id) if marks is not None else None
    if mark is not None and mark.whole:
        error = error or f"quarantined: {mark.reason}"
    return SegmentFact(
        id=segment_id,
        size=size,
        root=root,
        error=error,
        bad_blocks=mark.blocks if mark is not None else (),
    )
