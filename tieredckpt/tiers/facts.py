"""Facts about what a host holds: what the agent reports and the recovery plan is made from.

Plain values, encoded as msgpack on the wire. An error is a sentence for the operator, and its
presence means: this copy does not vouch for itself.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tieredckpt.errors import RemoteProtocolError


class Fact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all facts."""


class SegmentFact(Fact, frozen=True, kw_only=True):
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


class ManifestFact(Fact, frozen=True, kw_only=True):
    """One manifest in one tier: its bytes, or why it cannot be used."""

    stream: str
    save_id: str
    manifest: bytes | None
    error: str | None


class TierFacts(Fact, frozen=True, kw_only=True):
    """What one tier of one namespace holds, as far as this host sees it."""

    tier: str
    scope: Literal["host", "shared"]
    kind: Literal["memory", "file"]
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


MAX_HOLDINGS_BYTES = 256 << 20
"""Largest encoded Holdings that a reader accepts: manifests of 10,000 checkpoints."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Holdings)


def encode_holdings(holdings: Holdings) -> bytes:
    """Msgpack of ``holdings``."""
    return _encoder.encode(holdings)


def decode_holdings(data: bytes) -> Holdings:
    """Inverse of :func:`encode_holdings`. Raises RemoteProtocolError if oversized or malformed."""
    if len(data) > MAX_HOLDINGS_BYTES:
        raise RemoteProtocolError(f"holdings of {len(data)} bytes, over {MAX_HOLDINGS_BYTES}")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed holdings: {error}") from error
