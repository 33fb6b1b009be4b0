"""Messages of saves without collectives, between ranks and agents and between agents.

If the ranks are on several hosts, the agent of the group's rank 0 coordinates the save. The other
hosts' agents forward their ranks' parts to it (``agent/no_collectives/participant.py``).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from tieredckpt.format.manifest import HexId, Name
from tieredckpt.rpc.messages.base import (
    IDS_BYTES_MAX,
    MAX_BODY_BYTES,
    Count,
    ErrorReply,
    Message,
    NodeRequest,
    PeerRequest,
    resolve,
)

WORLD_SIZE_MAX = 1 << 16
RANK_VALUES_MAX = 10_000
HOSTS_MAX = 1 << 16

Rank = Annotated[int, msgspec.Meta(ge=0, lt=WORLD_SIZE_MAX)]
WorldSize = Annotated[int, msgspec.Meta(ge=1, le=WORLD_SIZE_MAX)]


class GatheringKey(Message, frozen=True):
    """Identifies a save without collectives: all its ranks send the same key."""

    stream: Name
    epoch: HexId
    """Agreed by the ranks when they opened their engines, and anew at each load."""
    ordinal: Count
    """Number of such saves of this stream in this epoch; each rank counts by itself."""


class SealedPart(Message, frozen=True):
    """A rank's segment; the agent knows the slot."""

    segment_id: HexId
    size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    root: HexId


class RankValue(Message, frozen=True):
    """A bytes item that other ranks may have under the same name; only one of them is stored."""

    name: str
    digest: bytes
    """Of the value: equal for equal values."""
    must_agree: bool
    """Whether different values fail the save; otherwise they are only reported."""


SHOWN_MAX = 128
"""Largest number of differing values, and of ranks, that are reported."""
RanksAlike = Annotated[
    list[Annotated[list[int], msgspec.Meta(max_length=SHOWN_MAX)]],
    msgspec.Meta(max_length=SHOWN_MAX),
]


class Gathered(Message, frozen=True):
    """The state of a save without collectives."""

    state: Literal["open", "committed", "failed", "unknown"]
    """"unknown": this agent does not have the caller's part: post it again."""
    save_id: str | None = None
    missing: tuple[int, ...] = ()
    """If it is open: the first of the ranks that have not posted their part."""
    error: ErrorReply | None = None
    differing: Annotated[dict[str, RanksAlike], msgspec.Meta(max_length=SHOWN_MAX)] = msgspec.field(
        default_factory=dict
    )
    """If it was committed: names of differing values, and the ranks that have equal ones."""


class Contribute(NodeRequest[Gathered], frozen=True):
    """Post one rank's part of a save without collectives. Idempotent by key, rank, segment.

    The agent commits when it has all parts.
    """

    packed: ClassVar[bool] = True
    body_bytes_max: ClassVar[int] = MAX_BODY_BYTES

    session_id: str
    run: HexId
    key: GatheringKey
    step: Count
    world_size: WorldSize
    members: HexId
    """Digest of the group's members, so that parts of two groups are never combined."""
    rank: Rank
    part: SealedPart | None
    """None: the rank had nothing to write, or failed."""
    values: Annotated[tuple[RankValue, ...], msgspec.Meta(max_length=RANK_VALUES_MAX)]
    plan: bytes
    """The encoded plan of this rank's part alone, whose segment is number 0."""
    draft: bytes | None
    """Rank 0's: the encoded manifest, without segments and plan."""
    error: ErrorReply | None
    """Why this rank has no part: the save fails then, for all ranks."""
    attempt: bytes = b""
    """Rank 0's: as in Commit."""
    decider: str = ""
    """The host of the group's rank 0, whose agent commits; "": all ranks are on one host."""
    here: Count = 0
    """With ``decider``: number of the group's ranks on this rank's host."""
    hosts: Annotated[tuple[str, ...], msgspec.Meta(max_length=HOSTS_MAX)] = ()
    """With ``decider``, rank 0's: all hosts of the group. A lost one fails the save."""


class AskGathering(NodeRequest[Gathered], frozen=True):
    """Ask for the state of a save without collectives, or fail it if it is open."""

    slow: ClassVar[bool] = False

    session_id: str
    key: GatheringKey
    rank: Rank | None
    """The rank that waits with a part of its own; None: the caller has none."""
    give_up: ErrorReply | None
    """Not None: if the save is open it fails now, for all ranks and with this error."""


class RankSegment(Message, frozen=True):
    """The segment that a rank has posted."""

    rank: Rank
    segment_id: HexId | None
    """None: it had nothing to write."""


class Taken(Message, frozen=True):
    """Reply to HandOver."""

    outcome: Gathered
    wanted: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=WORLD_SIZE_MAX)]
    """Ranks of ``have`` whose parts are to be forwarded (again)."""


class HandOver(PeerRequest[Taken], frozen=True):
    """Forward the parts that one host's ranks have posted to the coordinator. Idempotent.

    Without parts the request only asks for the state.
    """

    body_bytes_max: ClassVar[int] = MAX_BODY_BYTES
    reply_bytes_max: ClassVar[int] = IDS_BYTES_MAX

    host: str
    """The sender."""
    key: GatheringKey
    step: Count
    world_size: WorldSize
    members: HexId
    have: Annotated[tuple[RankSegment, ...], msgspec.Meta(max_length=WORLD_SIZE_MAX)]
    """Of all ranks of the host that have posted their part."""
    parts: Annotated[tuple[Contribute, ...], msgspec.Meta(max_length=WORLD_SIZE_MAX)]
    """The parts of ``have`` that the receiver may not have yet."""
    give_up: ErrorReply | None
    """Not None: if the save is open it fails now, for all ranks and with this error."""


class Confirmed(Message, frozen=True):
    """Reply to ConfirmParts."""

    state: Literal["yes", "unknown", "no"]
    """"unknown": it does not have (all of) these parts, and forwards them when its ranks post them
    again. "no": one of its ranks has left the save, or has ended."""
    error: ErrorReply | None = None
    """The reason of "no"."""


class ConfirmParts(PeerRequest[Confirmed], frozen=True):
    """Ask a host whether it is prepared: all parts are complete and about to be committed.

    After "yes" a host does not abort the save by itself any more.
    """

    body_bytes_max: ClassVar[int] = IDS_BYTES_MAX
    host: str
    """The coordinator."""
    key: GatheringKey
    have: Annotated[tuple[RankSegment, ...], msgspec.Meta(max_length=WORLD_SIZE_MAX)]
    """The segments that the receiver has forwarded."""


resolve(globals().values())
