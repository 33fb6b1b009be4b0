"""Messages from other hosts' agents and trainers to an agent over TCP: msgspec structs as msgpack.

HTTP/1.1 under ``/p1/`` between ``rpc/peer_client.py`` and ``rpc/peer_server.py``; ``rpc/auth.py``
proves that the caller knows the namespace's secret. A new request is a :class:`.base.PeerRequest`
here, and a method ``peer_<verb>`` of the agent's node. Bulk data is no message:
``GET /p1/ns/{ns}/segments/{id}?tier=`` with a byte range.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from tieredckpt.format.manifest import HexId, Name
from tieredckpt.rpc.messages.agent import DAMAGED_BLOCKS_MAX, HostEntry, OpenAttempt
from tieredckpt.rpc.messages.base import (
    IDS_BYTES_MAX,
    MAX_BODY_BYTES,
    Message,
    PeerRequest,
    resolve,
)

PEER_API_VERSION = 4
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
    """32 hex digits, with which every later request of this connection is signed."""


class Identify(PeerRequest[HostEntry], frozen=True):
    """Ask for the host's identity; the host records ``caller``."""

    caller: HostEntry | None


class AskHoldings(PeerRequest[bytes], frozen=True):
    """Ask for encoded Holdings, with the digest alone of manifests that the caller has."""

    body_bytes_max: ClassVar[int] = IDS_BYTES_MAX
    reply_bytes_max: ClassVar[int] = MAX_BODY_BYTES

    manifests: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=RECORDS_MAX)]
    """XXH3-128 digests of the encoded manifests that the caller has."""


class AskPlan(PeerRequest[bytes], frozen=True):
    """Ask for an encoded plan as one tier holds it."""

    reply_bytes_max: ClassVar[int] = MAX_BODY_BYTES
    plan_id: HexId
    tier: Name


class Probe(PeerRequest[bytes], frozen=True):
    """Ask for so many bytes, to measure the speed of a link."""

    reply_bytes_max: ClassVar[int] = 2 * PROBE_BYTES_MAX
    size: Annotated[int, msgspec.Meta(ge=0, le=PROBE_BYTES_MAX)]


class BadBlocks(PeerRequest[None], frozen=True):
    """Report bad blocks in a copy that the host sent; see :class:`.agent.ReportDamage`."""

    tier: str
    segment_id: str
    blocks: Annotated[tuple[int, ...], msgspec.Meta(max_length=DAMAGED_BLOCKS_MAX)]
    reason: str


class Waits(Message, frozen=True):
    """One checkpoint that waits to be copied to a tier, and its position on the timeline."""

    save_id: HexId
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    seq: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Pressure(Message, frozen=True):
    """The checkpoints that wait for a tier on a host whose source of it is full, oldest first."""

    tier: Name
    stream: Name
    waiting: Annotated[tuple[Waits, ...], msgspec.Meta(max_length=1 << 10)]


INVENTORY_MAX = 256
"""Checkpoints that one host reports; no decision is made about older ones."""


class Vouch(Message, frozen=True):
    """A host's inventory of a tier of its own; it keeps these until a newer one is complete."""

    host: str
    tier: Name
    stream: Name
    saves: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=INVENTORY_MAX)]
    """In the order of ``policy.host_disks.spared``."""
    lacking: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=INVENTORY_MAX)] = ()
    """Checkpoints that were shed before this host had them."""
    coming: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=INVENTORY_MAX)] | None = None
    """Checkpoints that the host is about to copy; None: not known."""
    upto: tuple[int, int] = (0, 0)
    """Position of the newest checkpoint that the host knows."""


class WholeReply(Message, frozen=True):
    """Reply to one :class:`Vouch`."""

    newest: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")] = ""
    """The first complete checkpoint: each of its hosts has its part. Empty: none is known."""
    never: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=INVENTORY_MAX)] = ()
    """Checkpoints that a host has shed: they will never be complete."""
    missing: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=INVENTORY_MAX)] = ()
    """Checkpoints of which a host does not have its part now."""


class Pushed(Message, frozen=True):
    """Reply to Push."""

    need_plans: tuple[HexId, ...] = ()
    """Manifests were not merged because these plans are missing: push again with them."""
    refused: tuple[tuple[str, str], ...] = ()
    """(save id, why its manifest was not merged)."""
    records: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=RECORDS_MAX)] = ()
    """The decisions about ``pressure``."""
    whole: Annotated[tuple[WholeReply, ...], msgspec.Meta(max_length=1 << 10)] = ()
    """One reply for each of ``vouched``."""


class Push(PeerRequest[Pushed], frozen=True):
    """Have a host merge these, and forward them. Idempotent.

    The host leaves out manifests that are damaged, or that retention would delete at once.
    """

    body_bytes_max: ClassVar[int] = MAX_BODY_BYTES
    reply_bytes_max: ClassVar[int] = MAX_BODY_BYTES
    manifests: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=RECORDS_MAX)] = ()
    plans: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=64)] = ()
    records: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=RECORDS_MAX)] = ()
    attempts: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=RECORDS_MAX)] = ()
    failed_segments: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=RECORDS_MAX)] = ()
    """Segments sealed for a save that will never be committed."""
    forward: Annotated[tuple[str, ...], msgspec.Meta(max_length=RECORDS_MAX)] = ()
    """Host ids to which the receiver forwards this, by ``policy.replication.split``."""
    pressure: Annotated[tuple[Pressure, ...], msgspec.Meta(max_length=1 << 10)] = ()
    """For the leader alone: it may shed waiting spills, and answers with the records."""
    vouched: Annotated[tuple[Vouch, ...], msgspec.Meta(max_length=1 << 10)] = ()
    """For the leader alone: it answers which checkpoints are complete."""


class SyncReply(Message, frozen=True):
    """The objects that the caller does not have, and the ids of those that it should push."""

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
    """Have the run's leader open an attempt; the reply is the encoded record."""

    body_bytes_max: ClassVar[int] = MAX_BODY_BYTES
    reply_bytes_max: ClassVar[int] = IDS_BYTES_MAX
    request: OpenAttempt


resolve(globals().values())
