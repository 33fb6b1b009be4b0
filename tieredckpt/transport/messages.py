"""What goes over the agent's socket: msgspec structs, encoded as JSON unless said otherwise.

The agent listens on ``<runtime dir>/agent.sock`` (HTTP/1.1) and hands out file descriptors on
``<runtime dir>/fds.sock``: the client connects, sends a 32-character ticket that an HTTP reply
named, and receives one status byte (``b"\\x00"``) with the descriptor in SCM_RIGHTS, or another
byte and no descriptor. A ticket works once, for the user who got it, for 30 s.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tieredckpt.policy.config_sections import Seconds
from tieredckpt.policy.config_tiers import TierSpec
from tieredckpt.transport.attempt_messages import BaseSpec, OpenAttempt
from tieredckpt.transport.gathering_messages import (
    RANK_VALUES_MAX,
    AskGathering,
    Contribute,
    Gathered,
    GatheringKey,
    RankValue,
    SealedPart,
)
from tieredckpt.transport.host_messages import (
    PIN_WAIT_S_MAX,
    AddRecord,
    HostEntry,
    Listen,
    Listening,
    PeerState,
    PeerTable,
    Pinned,
    PinStatus,
    ReplicationStatus,
    SetPeers,
    TlsSpec,
)
from tieredckpt.transport.message_base import (
    Count,
    ErrorReply,
    HexId,
    Message,
    StreamName,
    resolve,
)

API_VERSION = 5
"""Raised with every incompatible change; client and agent must agree exactly."""

WAIT_S_MAX = 3600.0
"""Longest wait for a slot that a namespace may ask for: it keeps a thread of the agent."""

SEGMENTS_MAX = 1 << 14
"""Segments that one request may name: the ranks of one host, with room to spare."""

MAX_BODY_BYTES = 256 << 20
"""Largest accepted request body: a plan of a few million pieces."""


class Health(Message, frozen=True):
    """GET /v1/health."""

    api: int
    version: str
    pid: int
    host_id: str
    uptime_s: float


class NamespaceSpec(Message, frozen=True):
    """What an agent is told of a namespace; all sessions of a run name the same."""

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
    run: HexId
    """Whose rules the spec is, once that run has saved."""
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


SEALED_BEFORE_MAX = 64
"""Segments whose fate one rank tells; of older ones it says nothing."""


class SealedBefore(Message, frozen=True):
    """A segment that a process has sealed, and what became of its save as far as it knows."""

    segment_id: HexId
    stream: StreamName
    fate: Literal["committed", "failed", "unknown"] = "unknown"


class Reserve(Message, frozen=True):
    """POST /v1/namespaces/{ns}/reserve -> Grant."""

    session_id: str
    segment_bytes: int
    asked_at_ns: Count = 0
    """By the caller's monotonic clock, which all processes of a session share. One that was given
    up and is read late (the agent stood still) must not take back what a later one was granted."""
    before: Annotated[tuple[SealedBefore, ...], msgspec.Meta(max_length=SEALED_BEFORE_MAX)] = ()
    """Oldest first. The agent does not know of itself how a save ended that another host's agent
    was to commit; what it is not told, and no manifest says, it keeps (``agent/fates.py``)."""


class Seal(Message, frozen=True):
    """POST /v1/namespaces/{ns}/seal. Idempotent by ``segment_id``."""

    session_id: str
    segment_id: str
    slot_id: str
    segment_bytes: int
    root: str
    """Root digest, 32 hex digits."""


class TierTrouble(Message, frozen=True):
    """Why a tier does not get what it is to get, for the log of training."""

    kind: Literal["failing", "full"]
    text: str


class Sealed(Message, frozen=True):
    """Reply to Seal."""

    next: Grant | None
    """Provisional grant of the slot that becomes free when this save commits, if it is known.

    The client locks its own descriptor of that slot (LOCK_EX, non-blocking), then checks that
    the label says RESERVED for this segment id; else it asks with Reserve.
    """
    troubles: dict[str, TierTrouble] = msgspec.field(default_factory=dict)
    """By tier; for local rank 0 only, so that it is told once per host."""


class Commit(Message, frozen=True):
    """POST /v1/namespaces/{ns}/commit, as msgpack. Idempotent by the manifest's save id."""

    session_id: str
    run: str
    """The caller's run: the ranks whose engines were opened together (32 hex digits)."""
    manifest: bytes
    plan: bytes | None
    """The encoded plan, or None if the client believes that the agent has it."""
    attempt: bytes
    """The encoded record of the manifest's attempt, which exists with its first checkpoint."""


class Committed(Message, frozen=True):
    """Reply to Commit."""

    need_plan: bool
    """True: nothing was committed; the agent lacks the plan, send Commit again with it."""


class SaveFailed(Message, frozen=True):
    """POST /v1/namespaces/{ns}/failed: a save that will not be committed. Idempotent."""

    session_id: str
    segments: Annotated[tuple[str, ...], msgspec.Meta(max_length=SEGMENTS_MAX)]
    """What ranks sealed for it; what a manifest refers to is left alone."""
    skipped: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """Saves that this session's process has skipped so far, this one included."""


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


DAMAGED_BLOCKS_MAX = 1 << 14
"""Whoever found more bad blocks says that the whole copy is bad."""


class Damage(Message, frozen=True):
    """POST /v1/namespaces/{ns}/damage: a reader found bad blocks; the agent quarantines them."""

    tier: str
    segment_id: str
    blocks: tuple[int, ...]
    """Block numbers; empty: the copy as a whole (its footer or size) is bad."""
    reason: str
    host: str = ""
    """Whose copy it is; "": this agent's."""


Level = Literal["done", "queued", "active", "failed", "superseded", "not_scheduled", "waiting"]


class Progress(Message, frozen=True):
    """GET /v1/namespaces/{ns}/progress/{save_id}: state of a checkpoint per tier.

    With ``?awaited=TIER`` that tier, if it failed, is tried now and not when its pause ends.
    """

    levels: dict[str, Level]
    """By tier name, "memory", and "replicated" for the copies on other hosts. "waiting": what
    failed will be tried again."""
    errors: dict[str, str]
    copies_done: int | None = None
    """Copies of segments on other hosts that count, as far as this host knows; the leader knows
    all. None: no copies were wanted."""
    copies_wanted: int | None = None


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
    awaited: int = 0
    """Checkpoints that wait for other hosts to upload their part, in a shared tier."""
    lag_s: float | None = None
    """Seconds of saving that the newest one here is behind memory's newest."""
    lag_bytes: int = 0
    """This host's part of what waits or is being copied."""
    alarm: bool = False
    """The limit of ``lag_alarm`` is reached."""
    memory_full: bool = False
    """Memory, or the tier that this one is filled from, has had no room for what waits, and
    something waits still: see ``on_pressure``."""
    dropped_total: int = 0
    """Checkpoints that were given up, or deleted from memory before their turn."""


class Flush(Message, frozen=True):
    """POST /v1/namespaces/{ns}/flush -> Flushed: bring the newest checkpoints to a tier now."""

    tier: str = ""
    """"": the one that can be reached."""
    left_s: Seconds | None = None
    """None: as long as it takes."""


class FlushedSave(Message, frozen=True):
    """One stream's newest checkpoint."""

    stream: str
    step: int
    save_id: str


class Flushed(Message, frozen=True):
    """Reply to Flush, at once; how far it comes is asked with ``progress``."""

    tier: str
    saves: tuple[FlushedSave, ...]
    remaining_bytes: int
    """This host's, what is being copied before included."""
    estimate_s: float | None
    """None: nothing was copied there yet."""


class RetentionNeeds(Message, frozen=True):
    """GET /v1/namespaces/{ns}/needs: what retention leaves alone at this moment, beside pins."""

    tiers: dict[str, dict[str, str]]
    """By tier, memory included, and save id: who needs the checkpoint there (a sentence's end)."""


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
    peers: tuple[PeerState, ...] = ()
    replication: ReplicationStatus | None = None
    pins: tuple[PinStatus, ...] = ()
    """The newest first; at most 256."""


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


resolve(globals().values())
