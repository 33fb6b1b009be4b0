"""What other hosts' agents and trainers say to an agent over TCP: msgspec structs as msgpack.

HTTP/1.1 under ``/p1/``; ``rpc/peer_server.py`` answers, ``rpc/peer_client.py`` asks,
``rpc/auth.py`` proves that the caller knows the namespace's secret. A new request is a
:class:`.base.PeerRequest` here, and the method of the agent's node that has the same name.
Bulk data is no message: ``GET /p1/ns/{ns}/segments/{id}?tier=`` with a byte range.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from tieredckpt.rpc.messages.agent import DAMAGED_BLOCKS_MAX, HostEntry, OpenAttempt
from tieredckpt.rpc.messages.base import (
    IDS_BYTES_MAX,
    MAX_BODY_BYTES,
    HexId,
    Message,
    PeerRequest,
    StreamName,
    resolve,
)

TierName = StreamName

PEER_API_VERSION = 3
"""Raised with every incompatible change; both sides must agree exactly."""

HELLO = "/p1/hello"
PROBE_BYTES_MAX = 4 << 20
"""Most that a probe returns."""

RECORDS_MAX = 1 << 16
"""Manifests, records or attempts in one message."""


class PeerHello(Message, frozen=True):
    """GET /p1/hello, the only request without proof of the secret."""

    api: int
    version: str
    nonce: str
    """Of this connection: every later request on it is signed with it (32 hex digits)."""


class Identify(PeerRequest[HostEntry], frozen=True):
    """Ask who answers, and say who asks (learnt by the other side)."""

    caller: HostEntry | None


class AskHoldings(PeerRequest[bytes], frozen=True):
    """Ask for encoded Holdings, in which manifests that the caller has are their digest alone."""

    body_bytes_max: ClassVar[int] = IDS_BYTES_MAX
    reply_bytes_max: ClassVar[int] = MAX_BODY_BYTES

    manifests: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=RECORDS_MAX)]
    """XXH3-128 digests of encoded manifests."""


class AskPlan(PeerRequest[bytes], frozen=True):
    """Ask for an encoded plan as one tier holds it."""

    reply_bytes_max: ClassVar[int] = MAX_BODY_BYTES
    plan_id: HexId
    tier: TierName


class Probe(PeerRequest[bytes], frozen=True):
    """Ask for so many bytes, to find out how fast a link is."""

    reply_bytes_max: ClassVar[int] = 2 * PROBE_BYTES_MAX
    size: Annotated[int, msgspec.Meta(ge=0, le=PROBE_BYTES_MAX)]


class BadBlocks(PeerRequest[None], frozen=True):
    """Tell a host of bad blocks in a copy that it sent; see :class:`.messages.ReportDamage`."""

    tier: str
    segment_id: str
    blocks: Annotated[tuple[int, ...], msgspec.Meta(max_length=DAMAGED_BLOCKS_MAX)]
    reason: str


class Waits(Message, frozen=True):
    """One checkpoint that waits to be copied into a tier, and its age."""

    save_id: HexId
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    seq: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Pressure(Message, frozen=True):
    """A host has no room where one tier is filled from: what waits there for it, oldest first."""

    tier: TierName
    stream: StreamName
    waiting: Annotated[tuple[Waits, ...], msgspec.Meta(max_length=1 << 10)]


INVENTORY_MAX = 256
"""Checkpoints that one host vouches for; of older ones nothing is decided."""


class Vouch(Message, frozen=True):
    """What a host holds in a tier of its own, and keeps until it was told of something newer."""

    host: str
    tier: TierName
    stream: StreamName
    saves: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=INVENTORY_MAX)]
    """In the order of ``policy.host_disks.spared``."""
    lacking: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=INVENTORY_MAX)] = ()
    """What was given up before this host had it."""
    coming: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=INVENTORY_MAX)] | None = None
    """What it is about to copy; None: that is not known."""
    upto: tuple[int, int] = (0, 0)
    """Age of the newest that it knows of."""


class WholeReply(Message, frozen=True):
    """Of what one host vouched for."""

    newest: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")] = ""
    """The first one that is whole: each of its hosts vouches for it. Empty: none is known."""
    never: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=INVENTORY_MAX)] = ()
    """Those that a host has given up: they will not be whole."""
    missing: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=INVENTORY_MAX)] = ()
    """Those that a host does not hold now."""


class Pushed(Message, frozen=True):
    """Reply to Push."""

    need_plans: tuple[HexId, ...] = ()
    """Manifests were not taken over for want of these plans: push again with them."""
    refused: tuple[tuple[str, str], ...] = ()
    """(save id, why its manifest was not taken over)."""
    records: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=RECORDS_MAX)] = ()
    """What was decided about ``pressure``."""
    whole: Annotated[tuple[WholeReply, ...], msgspec.Meta(max_length=1 << 10)] = ()
    """Of ``vouched``, one for each."""


class Push(PeerRequest[Pushed], frozen=True):
    """Have a host take these over, and pass them on.

    Idempotent. What is not acceptable (damaged, or retention would delete it at once) is left out.
    """

    body_bytes_max: ClassVar[int] = MAX_BODY_BYTES
    reply_bytes_max: ClassVar[int] = MAX_BODY_BYTES
    manifests: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=RECORDS_MAX)] = ()
    plans: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=64)] = ()
    records: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=RECORDS_MAX)] = ()
    attempts: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=RECORDS_MAX)] = ()
    failed_segments: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=RECORDS_MAX)] = ()
    """Sealed for a save that was not committed: never to be a checkpoint."""
    forward: Annotated[tuple[str, ...], msgspec.Meta(max_length=RECORDS_MAX)] = ()
    """Host ids that the receiver is to reach with the same, by ``policy.replication.split``."""
    pressure: Annotated[tuple[Pressure, ...], msgspec.Meta(max_length=1 << 10)] = ()
    """For the leader alone: it may give up waiting spills, and answers with the records."""
    vouched: Annotated[tuple[Vouch, ...], msgspec.Meta(max_length=1 << 10)] = ()
    """For the leader alone: it says what is whole."""


class SyncReply(Message, frozen=True):
    """What the caller lacks, and the ids of what it should push."""

    push: Push
    wanted_manifests: tuple[HexId, ...]
    wanted_records: tuple[HexId, ...]
    wanted_attempts: tuple[HexId, ...]


class Sync(PeerRequest[SyncReply], frozen=True):
    """Compare catalogues (anti-entropy)."""

    body_bytes_max: ClassVar[int] = MAX_BODY_BYTES
    reply_bytes_max: ClassVar[int] = MAX_BODY_BYTES
    manifests: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=RECORDS_MAX)]
    """Save ids that the caller has."""
    records: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=RECORDS_MAX)]
    attempts: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=RECORDS_MAX)]


class ForwardAttempt(PeerRequest[bytes], frozen=True):
    """Have the run's leader open an attempt, as it opens all; the reply is the encoded record."""

    body_bytes_max: ClassVar[int] = MAX_BODY_BYTES
    reply_bytes_max: ClassVar[int] = IDS_BYTES_MAX
    request: OpenAttempt


resolve(globals().values())
