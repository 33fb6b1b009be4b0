"""Facts about what a host holds: what the agent reports and the recovery plan is made from.

Plain values, encoded as msgpack on the wire. An error is a sentence for the operator, and its
presence means: this copy does not vouch for itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from tieredckpt.errors import RemoteProtocolError
from tieredckpt.format.digest import digest
from tieredckpt.format.packing import MALFORMED

TierKind = Literal["memory", "file", "object"]
"""How a tier is read: a slot, a file by its descriptor, or ranges of an object in a store."""


class Fact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all facts."""


class SegmentFact(Fact, frozen=True, kw_only=True, gc=False):
    """One copy of one segment in one tier."""

    id: str
    size: int
    """Bytes that can be read; less than the manifest says if the copy was truncated."""
    root: str | None
    """Root digest in the copy's own trailer, 32 hex digits; None if there is no valid trailer."""
    error: str | None
    """Why this copy does not vouch as a whole; single blocks of it may still be good."""
    bad_blocks: tuple[int, ...] = ()
    """Quarantined blocks: a reader found that they do not match their digests."""
    listed: bool = False
    """Only its name and size are known: a store is not asked for the end of each object, or that of
    a file could not be read. Whoever reads it checks its trailer first. ``root`` is None then."""
    block_bytes: int | None = None
    """Size of the blocks, if there is a valid trailer."""


class ManifestFact(Fact, frozen=True, kw_only=True, gc=False):
    """One manifest in one tier: its bytes, or their digest, or why it cannot be used."""

    stream: str
    save_id: str
    manifest: bytes | None
    error: str | None
    digest: str | None = None
    """XXH3-128 of the encoded manifest, 32 hex digits: another fact has the same bytes."""


class TierFacts(Fact, frozen=True, kw_only=True):
    """What one tier of one namespace holds, as far as this host sees it."""

    tier: str
    scope: Literal["host", "shared"]
    kind: TierKind
    available: bool
    error: str | None
    manifests: tuple[ManifestFact, ...] = ()
    plans: tuple[str, ...] = ()
    segments: tuple[SegmentFact, ...] = ()


class Holdings(Fact, frozen=True, kw_only=True):
    """What one host holds of one namespace; tiers in the order of their cost, memory first."""

    host_id: str
    namespace: str
    attempts: tuple[bytes, ...]
    """Encoded attempt records, from all tiers, each once."""
    tiers: tuple[TierFacts, ...]
    records: tuple[bytes, ...] = ()
    """Encoded save records that a restart needs: marks, orders, and this host's own acks."""
    saved: tuple[str, ...] = ()
    """Ids of attempts that have saved, or that such a one followed, as this host has stored: they
    count also when their checkpoints are lost."""


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
    """What stands for a manifest's bytes in :class:`ManifestFact` and in a request."""
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
