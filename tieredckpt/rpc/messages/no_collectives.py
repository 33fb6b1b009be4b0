"""What ranks say that save without collectives.

Over several hosts one agent decides, that of the group's rank 0; what the others' agents say to it
is here, too (``agent/no_collectives/participant.py``).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from tieredckpt.rpc.messages.base import (
    IDS_BYTES_MAX,
    MAX_BODY_BYTES,
    Count,
    ErrorReply,
    HexId,
    Message,
    NodeRequest,
    PeerRequest,
    StreamName,
    resolve,
)

WORLD_SIZE_MAX = 1 << 16
RANK_VALUES_MAX = 10_000
HOSTS_MAX = 1 << 16

Rank = Annotated[int, msgspec.Meta(ge=0, lt=WORLD_SIZE_MAX)]
WorldSize = Annotated[int, msgspec.Meta(ge=1, le=WORLD_SIZE_MAX)]


class GatheringKey(Message, frozen=True):
    """Which save without collectives: ranks that name the same one contribute to it."""

    stream: StreamName
    epoch: HexId
    """Agreed by the ranks when they opened their engines, and anew at each load."""
    ordinal: Count
    """Number of such saves of this stream in this epoch, by each rank's own count."""


class SealedPart(Message, frozen=True):
    """A rank's segment; the agent knows the slot."""

    segment_id: HexId
    size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    root: HexId


class RankValue(Message, frozen=True):
    """A bytes item that other ranks may have under the same name, where one of them is kept."""

    name: str
    digest: bytes
    """Of the value: equal for equal values."""
    must_agree: bool
    """Another value on another rank fails the save; else it is only reported."""


SHOWN_MAX = 128
"""More values, or ranks, are not shown to anybody."""
RanksAlike = Annotated[
    list[Annotated[list[int], msgspec.Meta(max_length=SHOWN_MAX)]],
    msgspec.Meta(max_length=SHOWN_MAX),
]


class Gathered(Message, frozen=True):
    """What has become of a save without collectives."""

    state: Literal["open", "committed", "failed", "unknown"]
    """"unknown": this agent does not have the part of the rank that asks: contribute again."""
    save_id: str | None = None
    missing: tuple[int, ...] = ()
    """If it is open: ranks that have not contributed, the first of them."""
    error: ErrorReply | None = None
    differing: Annotated[dict[str, RanksAlike], msgspec.Meta(max_length=SHOWN_MAX)] = msgspec.field(
        default_factory=dict
    )
    """If it was committed: names of differing values, and the ranks that agree with each other."""


class Contribute(NodeRequest[Gathered], frozen=True):
    """Contribute one rank's part of a save without collectives. Idempotent by key, rank, segment.

    The agent commits when it has all of them.
    """

    packed: ClassVar[bool] = True
    body_bytes_max: ClassVar[int] = MAX_BODY_BYTES

    session_id: str
    run: HexId
    key: GatheringKey
    step: Count
    world_size: WorldSize
    members: HexId
    """Digest of the group's members: parts of two groups never become one checkpoint."""
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
    """With the draft: as in Commit."""
    decider: str = ""
    """The host of the group's rank 0, whose agent commits; "": all ranks are on one host."""
    here: Count = 0
    """With ``decider``: how many ranks of the group are on this rank's host."""
    hosts: Annotated[tuple[str, ...], msgspec.Meta(max_length=HOSTS_MAX)] = ()
    """Likewise, and rank 0 says it: all hosts of the group. One that is lost fails the save."""


class AskGathering(NodeRequest[Gathered], frozen=True):
    """Ask what has become of a save without collectives, or fail it if it is open."""

    slow: ClassVar[bool] = False

    session_id: str
    key: GatheringKey
    rank: Rank | None
    """Who waits for it with a part of its own; None: somebody who only looks."""
    give_up: ErrorReply | None
    """Not None: if it is still open it fails now, for all ranks and for this reason."""


class RankSegment(Message, frozen=True):
    """What a rank has contributed."""

    rank: Rank
    segment_id: HexId | None
    """None: it had nothing to write."""


class Taken(Message, frozen=True):
    """Reply to HandOver."""

    outcome: Gathered
    wanted: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=WORLD_SIZE_MAX)]
    """Ranks of ``have`` whose parts are to be handed over (again)."""


class HandOver(PeerRequest[Taken], frozen=True):
    """Hand over what one host's ranks have contributed to the host that decides. Idempotent.

    Without parts it only asks.
    """

    body_bytes_max: ClassVar[int] = MAX_BODY_BYTES
    reply_bytes_max: ClassVar[int] = IDS_BYTES_MAX

    host: str
    """Who says it."""
    key: GatheringKey
    step: Count
    world_size: WorldSize
    members: HexId
    have: Annotated[tuple[RankSegment, ...], msgspec.Meta(max_length=WORLD_SIZE_MAX)]
    """Of all ranks of the host that have contributed."""
    parts: Annotated[tuple[Contribute, ...], msgspec.Meta(max_length=WORLD_SIZE_MAX)]
    """Of these, the ones that the other side may lack."""
    give_up: ErrorReply | None
    """Not None: if it is still open it fails now, for all ranks and for this reason."""


class Confirmed(Message, frozen=True):
    """Reply to ConfirmParts."""

    state: Literal["yes", "unknown", "no"]
    """"unknown": it has not (all of) these parts, and hands over what its ranks contribute anew.
    "no": one of its ranks has left the save, or has ended."""
    error: ErrorReply | None = None
    """Why, if it says no."""


class ConfirmParts(PeerRequest[Confirmed], frozen=True):
    """Ask a host whether it stands by its parts: all are together, and about to be committed.

    A host that says yes gives the save up no more by itself.
    """

    body_bytes_max: ClassVar[int] = IDS_BYTES_MAX
    host: str
    """Who decides."""
    key: GatheringKey
    have: Annotated[tuple[RankSegment, ...], msgspec.Meta(max_length=WORLD_SIZE_MAX)]
    """What the host asked has handed over."""


resolve(globals().values())
