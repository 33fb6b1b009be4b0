"""What goes over the agent's socket: msgspec structs, encoded as JSON unless said otherwise.

The agent listens on ``<runtime dir>/agent.sock`` (HTTP/1.1) and hands out file descriptors on
``<runtime dir>/fds.sock``: the client connects, sends a 32-character ticket that an HTTP reply
named, and receives one status byte (``b"\\x00"``) with the descriptor in SCM_RIGHTS, or another
byte and no descriptor. A ticket works once, for the user who got it, for 30 s.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

API_VERSION = 1
"""Raised with every incompatible change; client and agent must agree exactly."""

WAIT_S_MAX = 3600.0
"""Longest wait for a slot that a namespace may ask for: it keeps a thread of the agent."""

SEGMENTS_MAX = 1 << 14
"""Segments that one request may name: the ranks of one host, with room to spare."""

WORLD_SIZE_MAX = 1 << 16
RANK_VALUES_MAX = 10_000

MAX_BODY_BYTES = 256 << 20
"""Largest accepted request body: a plan of a few million pieces."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Health(Message, frozen=True):
    """GET /v1/health."""

    api: int
    version: str
    pid: int
    host_id: str
    uptime_s: float


class ErrorReply(Message, frozen=True):
    """The body of every reply with status >= 400: one of our errors, by class name."""

    error: str
    message: str
    fields: dict[str, str | int | float | bool | None | list[str]] = {}


class TierSpec(Message, frozen=True):
    """The part of a tier's configuration that the agent acts on."""

    name: str
    url: str
    scope: Literal["host", "shared"]
    keep_last: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class NamespaceSpec(Message, frozen=True):
    """What an agent is told of a namespace; a second session must name the same."""

    capacity_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    keep_last: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=WAIT_S_MAX)]
    tiers: Annotated[tuple[TierSpec, ...], msgspec.Meta(max_length=16)]


class OpenSession(Message, frozen=True):
    """POST /v1/sessions. Idempotent by ``session_id`` (32 hex digits, made by the client)."""

    api: int
    version: str
    session_id: str
    namespace: str
    spec: NamespaceSpec
    local_rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    local_world_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class SessionOpened(Message, frozen=True):
    """Reply to OpenSession."""

    host_id: str
    lease_ticket: str
    """Descriptor of the session's lock file, locked; the client keeps it open until it ends."""
    expected_segment_bytes: int
    """This rank's segment in the newest checkpoint in memory, or the largest one; 0 if none."""


class Grant(Message, frozen=True):
    """A slot reserved for writing one segment. The client holds LOCK_EX on it while it writes."""

    segment_id: str
    slot_id: str
    capacity_bytes: int
    """Usable bytes; the slot file has one more page of 4096 bytes, the label."""
    ticket: str | None
    """Descriptor of the slot, already locked; None for a provisional grant (see Sealed.next)."""


class SlotHandle(Message, frozen=True):
    """A slot to be mapped and prefaulted, not yet to be written."""

    slot_id: str
    capacity_bytes: int
    ticket: str


class Prepare(Message, frozen=True):
    """POST /v1/namespaces/{ns}/prepare: make this session's whole ring, so it can be prefaulted."""

    session_id: str
    segment_bytes: int


class Prepared(Message, frozen=True):
    """Reply to Prepare: the slots that this session will be granted in turn."""

    slots: tuple[SlotHandle, ...]


class Reserve(Message, frozen=True):
    """POST /v1/namespaces/{ns}/reserve -> Grant."""

    session_id: str
    segment_bytes: int


class Seal(Message, frozen=True):
    """POST /v1/namespaces/{ns}/seal. Idempotent by ``segment_id``."""

    session_id: str
    segment_id: str
    slot_id: str
    segment_bytes: int
    root: str
    """Root digest, 32 hex digits."""


class Sealed(Message, frozen=True):
    """Reply to Seal."""

    next: Grant | None
    """Provisional grant of the slot that becomes free when this save commits, if it is known.

    The client locks its own descriptor of that slot (LOCK_EX, non-blocking), then checks that
    the label says RESERVED for this segment id; else it asks with Reserve.
    """


class Commit(Message, frozen=True):
    """POST /v1/namespaces/{ns}/commit, as msgpack. Idempotent by the manifest's save id."""

    session_id: str
    run: str
    """The caller's run: the ranks whose engines were opened together (32 hex digits)."""
    manifest: bytes
    plan: bytes | None
    """The encoded plan, or None if the client believes that the agent has it."""


class Committed(Message, frozen=True):
    """Reply to Commit."""

    need_plan: bool
    """True: nothing was committed; the agent lacks the plan, send Commit again with it."""


HexId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
StreamName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


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


class Contribute(Message, frozen=True):
    """POST /v1/namespaces/{ns}/contribute -> Gathered, as msgpack.

    One rank's part of a save without collectives; the agent commits when it has all of them.
    Idempotent by key, rank and segment.
    """

    session_id: str
    run: HexId
    key: GatheringKey
    step: Count
    world_size: Annotated[int, msgspec.Meta(ge=1, le=WORLD_SIZE_MAX)]
    members: HexId
    """Digest of the group's members: parts of two groups never become one checkpoint."""
    rank: Annotated[int, msgspec.Meta(ge=0, lt=WORLD_SIZE_MAX)]
    part: SealedPart | None
    """None: the rank had nothing to write, or failed."""
    values: Annotated[tuple[RankValue, ...], msgspec.Meta(max_length=RANK_VALUES_MAX)]
    plan: bytes
    """The encoded plan of this rank's part alone, whose segment is number 0."""
    draft: bytes | None
    """Rank 0's: the encoded manifest, without segments and plan."""
    error: ErrorReply | None
    """Why this rank has no part: the save fails then, for all ranks."""


class AskGathering(Message, frozen=True):
    """POST /v1/namespaces/{ns}/gathering -> Gathered."""

    session_id: str
    key: GatheringKey
    rank: Annotated[int, msgspec.Meta(ge=0, lt=WORLD_SIZE_MAX)] | None
    """Who waits for it with a part of its own; None: somebody who only looks."""
    give_up: ErrorReply | None
    """Not None: if it is still open it fails now, for all ranks and for this reason."""


class Gathered(Message, frozen=True):
    """What has become of a save without collectives."""

    state: Literal["open", "committed", "failed", "unknown"]
    """"unknown": this agent does not have the part of the rank that asks: contribute again."""
    save_id: str | None = None
    missing: tuple[int, ...] = ()
    """If it is open: ranks that have not contributed, the first of them."""
    error: ErrorReply | None = None
    differing: dict[str, list[list[int]]] = {}
    """If it was committed: names of differing values, and the ranks that agree with each other."""


class SaveFailed(Message, frozen=True):
    """POST /v1/namespaces/{ns}/failed: a save that will not be committed. Idempotent."""

    session_id: str
    segments: Annotated[tuple[str, ...], msgspec.Meta(max_length=SEGMENTS_MAX)]
    """What ranks sealed for it; what a manifest refers to is left alone."""
    skipped: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """Saves that this session's process has skipped so far, this one included."""


class BaseSpec(Message, frozen=True):
    """Where a stream goes on from."""

    stream: str
    save_id: str | None
    """The checkpoint that was loaded; None: the stream begins anew."""


class OpenAttempt(Message, frozen=True):
    """POST /v1/namespaces/{ns}/attempts -> the encoded AttemptRecord. Idempotent by ``attempt_id``.

    Streams that are not named go on as the newest attempt left them.
    """

    session_id: str
    attempt_id: str
    run: str
    """The caller's run, as in Commit. A run that another one has taken over from is refused."""
    known: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """Number of the newest attempt of its run that the caller knows of; 0: none."""
    cause: Literal["load", "save"]
    """A load may take a stream over from the session that saved into it last, a save may not."""
    bases: tuple[BaseSpec, ...]
    seen: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    """Number of the newest attempt of all when the caller chose what to load: a newer one of
    another run has gone on from there meanwhile, and is not abandoned. None: it chose nothing."""


class OpenSegment(Message, frozen=True):
    """POST /v1/namespaces/{ns}/open: a descriptor to read one segment from one tier."""

    tier: str
    segment_id: str


class SegmentOpened(Message, frozen=True):
    """Reply to OpenSegment. Closing every copy of the descriptor ends the lease."""

    ticket: str
    size_bytes: int
    """Current size of what can be read; less than the manifest says if it was truncated."""
    direct: bool
    slot_id: str | None
    """The slot, if the tier is memory: a trainer may have it mapped already."""


class Damage(Message, frozen=True):
    """POST /v1/namespaces/{ns}/damage: a reader found bad blocks; the agent quarantines them."""

    tier: str
    segment_id: str
    blocks: tuple[int, ...]
    """Block numbers; empty: the copy as a whole (its footer or size) is bad."""
    reason: str


Level = Literal["done", "queued", "active", "failed", "superseded", "not_scheduled", "waiting"]


class Progress(Message, frozen=True):
    """GET /v1/namespaces/{ns}/progress/{save_id}: state of a checkpoint per tier."""

    levels: dict[str, Level]
    """By tier name, and "memory". "waiting": the tier failed and will be tried again."""
    errors: dict[str, str]


class TierStatus(Message, frozen=True):
    """One tier of one namespace."""

    name: str
    url: str
    scope: str
    available: bool
    error: str | None
    checkpoints: int
    stored_bytes: int
    queued: int
    active_save_id: str | None
    retaining: bool
    """Whether checkpoints that the tier need not keep are being deleted."""
    newest_step: int | None
    lag_steps: int | None
    spilled_bytes_total: int
    spill_seconds_total: float
    quarantined: int


class NamespaceStatus(Message, frozen=True):
    """One namespace of an agent."""

    name: str
    capacity_bytes: int
    slot_bytes: int
    slots: int
    free_slots: int
    sessions: int
    checkpoints: int
    newest_step: int | None
    attempt: int
    skipped_saves: int
    """Saves without a checkpoint, as far as the live sessions told (see `save.on_error`)."""
    tiers: tuple[TierStatus, ...]


class Status(Message, frozen=True):
    """GET /v1/status."""

    health: Health
    runtime_dir: str
    survives: str
    """What the memory tier outlives here: "process", "container" or "host user session"."""
    shm_total_bytes: int
    shm_free_bytes: int
    rss_bytes: int
    namespaces: tuple[NamespaceStatus, ...]
