"""What goes over the agent's socket: msgspec structs, encoded as JSON unless said otherwise.

The agent listens on ``<runtime dir>/agent.sock`` (HTTP/1.1) and hands out file descriptors on
``<runtime dir>/fds.sock``: the client connects, sends a 32-character ticket that an HTTP reply
named, and receives one status byte (``b"\\x00"``) with the descriptor in SCM_RIGHTS, or another
byte and no descriptor. A ticket works once, for the user who got it, for 30 s.

A new request is a :class:`.base.NodeRequest` here, and the method of the agent's node that
has the same name: route, client and reply follow from these.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from tieredckpt.config.sections import Seconds
from tieredckpt.config.tiers import TierSpec
from tieredckpt.format.manifest import MAX_HOST_CHARS, MAX_LINEAGE, MAX_PARENTS, Ancestor, Followed
from tieredckpt.rpc.messages.base import (
    MAX_BODY_BYTES,
    Count,
    ErrorReply,
    HexId,
    Message,
    NodeRequest,
    Request,
    StreamName,
    resolve,
)
from tieredckpt.rpc.messages.no_collectives import (
    RANK_VALUES_MAX,
    AskGathering,
    Contribute,
    Gathered,
    GatheringKey,
    RankValue,
    SealedPart,
)

API_VERSION = 5
"""Raised with every incompatible change; client and agent must agree exactly."""

WAIT_S_MAX = 3600.0
"""Longest wait for a slot that a namespace may ask for: it keeps a thread of the agent."""

SEGMENTS_MAX = 1 << 14
"""Segments that one request may name: the ranks of one host, with room to spare."""


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


class SessionOpened(Message, frozen=True):
    """Reply to OpenSession."""

    host_id: str
    lease_ticket: str
    """Descriptor of the session's lock file, locked; the client keeps it open until it ends."""
    expected_segment_bytes: int
    """This rank's segment in the newest checkpoint in memory, or the largest one; 0 if none."""


class OpenSession(Request[SessionOpened], frozen=True):
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


class Prepared(Message, frozen=True):
    """Reply to Prepare: the slots that this session will be granted in turn."""

    slots: tuple[SlotHandle, ...]


class Prepare(NodeRequest[Prepared], frozen=True):
    """Make this session's whole ring, so it can be prefaulted."""

    session_id: str
    segment_bytes: int


SEALED_BEFORE_MAX = 64
"""Segments whose fate one rank tells; of older ones it says nothing."""


class SealedBefore(Message, frozen=True):
    """A segment that a process has sealed, and what became of its save as far as it knows."""

    segment_id: HexId
    stream: StreamName
    fate: Literal["committed", "failed", "unknown"] = "unknown"


class Reserve(NodeRequest[Grant], frozen=True):
    """Grant a slot to write one segment into."""

    session_id: str
    segment_bytes: int
    asked_at_ns: Count = 0
    """By the caller's monotonic clock, which all processes of a session share. One that was given
    up and is read late (the agent stood still) must not take back what a later one was granted."""
    before: Annotated[tuple[SealedBefore, ...], msgspec.Meta(max_length=SEALED_BEFORE_MAX)] = ()
    """Oldest first. The agent does not know of itself how a save ended that another host's agent
    was to commit; what it is not told, and no manifest says, it keeps
    (``agent/cluster/in_doubt.py``)."""


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


class Seal(NodeRequest[Sealed], frozen=True):
    """Declare a written segment complete. Idempotent by ``segment_id``."""

    slow: ClassVar[bool] = False
    session_id: str
    segment_id: str
    slot_id: str
    segment_bytes: int
    root: str
    """Root digest, 32 hex digits."""


class Committed(Message, frozen=True):
    """Reply to Commit."""

    need_plan: bool
    """True: nothing was committed; the agent lacks the plan, send Commit again with it."""


class Commit(NodeRequest[Committed], frozen=True):
    """Make a checkpoint exist in memory. Idempotent by the manifest's save id."""

    body_bytes_max: ClassVar[int] = MAX_BODY_BYTES
    slow: ClassVar[bool] = False
    packed: ClassVar[bool] = True
    session_id: str
    run: str
    """The caller's run: the ranks whose engines were opened together (32 hex digits)."""
    manifest: bytes
    plan: bytes | None
    """The encoded plan, or None if the client believes that the agent has it."""
    attempt: bytes
    """The encoded record of the manifest's attempt, which exists with its first checkpoint."""


class SaveFailed(NodeRequest[None], frozen=True):
    """Give up a save that will not be committed. Idempotent."""

    slow: ClassVar[bool] = False
    session_id: str
    segments: Annotated[tuple[str, ...], msgspec.Meta(max_length=SEGMENTS_MAX)]
    """What ranks sealed for it; what a manifest refers to is left alone."""
    skipped: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """Saves that this session's process has skipped so far, this one included."""


MIRRORS_MAX = 1 << 14
"""Of one rank and save."""


class ReserveDraft(NodeRequest[Grant], frozen=True):
    """Grant a slot for one draft: a segment that another host's rank writes, written here as well.

    It is never waited for.

    Raises:
        CapacityError: There is no room for it now.
    """

    session_id: str
    segment_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    stream: StreamName
    step: Count
    drafts: Annotated[int, msgspec.Meta(ge=1, le=MIRRORS_MAX)]
    """How many the session writes of each save."""


class SealDraft(NodeRequest[None], frozen=True):
    """Declare a draft whole. Idempotent by ``segment_id``.

    It is no copy of anything until the manifest of this stream and step names, as segment number
    ``ordinal``, one that is equal.

    Raises:
        NotFoundError: Its slot was taken back.
        IntegrityError: The slot says something else.
    """

    slow: ClassVar[bool] = False
    session_id: str
    segment_id: HexId
    slot_id: str
    segment_bytes: Annotated[int, msgspec.Meta(ge=4096, lt=1 << 62)]
    root: HexId
    stream: StreamName
    step: Count
    ordinal: Annotated[int, msgspec.Meta(ge=0, lt=1 << 17)]


class BaseSpec(Message, frozen=True):
    """Where a stream goes on from."""

    stream: str
    save_id: str | None
    """The checkpoint that was loaded; None: the stream begins anew."""
    manifest: bytes = b""
    """Its encoded manifest: it may have been evicted since, or lie on other hosts only."""
    newest: Annotated[tuple[Ancestor, ...], msgspec.Meta(max_length=MAX_LINEAGE)] = ()
    """The line up to the newest checkpoint that was known when this one was chosen."""
    in_silence: bool = False
    """Not everybody could be asked for what is newer: it is left behind, and not abandoned."""


class OpenAttempt(NodeRequest[bytes], frozen=True):
    """Open an attempt; the reply is the encoded AttemptRecord. Idempotent by ``attempt_id``.

    Sent before the first save of a run, and when its line changes. Streams that are not named go on
    as the attempt left them that it follows. Nothing is on disk before the save itself.
    """

    body_bytes_max: ClassVar[int] = MAX_BODY_BYTES
    session_id: str
    attempt_id: str
    run: str
    """The caller's run, as in Commit. A run that another one has taken over from is refused."""
    cause: Literal["load", "save"]
    """A load may take a stream over from the session that saved into it last, a save may not."""
    bases: tuple[BaseSpec, ...]
    followed: Annotated[tuple[Followed, ...], msgspec.Meta(max_length=MAX_PARENTS)] = ()
    """The attempts that the caller goes on from, first, and knows of: see ``timeline.Chain``."""
    silent: Annotated[tuple[str, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Hosts that have just not answered the caller: they are asked again, but not waited for."""


class SegmentOpened(Message, frozen=True):
    """Reply to OpenSegment. Closing every copy of the descriptor ends the lease."""

    ticket: str
    size_bytes: int
    """Current size of what can be read; less than the manifest says if it was truncated."""
    direct: bool
    slot_id: str | None
    """The slot, if the tier is memory: a trainer may have it mapped already."""


class OpenSegment(NodeRequest[SegmentOpened], frozen=True):
    """Open a descriptor to read one segment from one tier."""

    tier: str
    segment_id: str


DAMAGED_BLOCKS_MAX = 1 << 14
"""Whoever found more bad blocks says that the whole copy is bad."""


class ReportDamage(NodeRequest[None], frozen=True):
    """Report bad blocks that a reader found; the agent quarantines them."""

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


class Flush(NodeRequest[Flushed], frozen=True):
    """Bring the newest checkpoints to a tier now. Idempotent.

    Raises:
        NotFoundError: There is no such tier, or no checkpoint.
        UsageError: No tier is configured.
        TierUnavailableError: None answers.
    """

    tier: str = ""
    """"": the one that can be reached."""
    left_s: Seconds | None = None
    """None: as long as it takes."""


class RetentionNeeds(Message, frozen=True):
    """GET /v1/namespaces/{ns}/needs: what retention leaves alone at this moment, beside pins."""

    tiers: dict[str, dict[str, str]]
    """By tier, memory included, and save id: who needs the checkpoint there (a sentence's end)."""


LABELS_MAX = 64
HostText = Annotated[str, msgspec.Meta(max_length=300)]
"""A host name and a port, or a label: what one agent says of itself, others keep."""


class HostEntry(Message, frozen=True):
    """One host of a job, as the others know it."""

    host_id: Annotated[str, msgspec.Meta(max_length=MAX_HOST_CHARS)]
    incarnation: HexId
    """Of its memory; another one after a reboot, and then nothing that it held before counts."""
    addresses: Annotated[tuple[HostText, ...], msgspec.Meta(max_length=16)]
    """``ip:port`` or ``[ip6]:port``, one per rail."""
    labels: Annotated[dict[HostText, HostText], msgspec.Meta(max_length=LABELS_MAX)] = (
        msgspec.field(default_factory=dict)
    )
    """Failure domains, for example ``{"rack": "r7"}``."""


class TlsSpec(Message, frozen=True):
    """Files of mutual TLS; read again when they change."""

    cert: str
    key: str
    ca: str


class Listening(Message, frozen=True):
    """Reply to Listen."""

    host: HostEntry


class Listen(NodeRequest[Listening], frozen=True):
    """Serve a namespace to other hosts. Idempotent.

    An agent that serves it with other values, for processes that have ended, changes over.

    Raises:
        ConfigError: No such interface or address, or neither token nor TLS.
        NamespaceInUseError: Another live session wants other values.
        AgentError: The port is taken, or the token cannot be one.
    """

    session_id: str
    token: str
    """Shared by the job's hosts; "" only with ``tls``. Never logged, kept in a 0600 file."""
    tls: TlsSpec | None
    interfaces: tuple[str, ...]
    cidrs: tuple[str, ...]
    """Which of this host's addresses; with neither: that of the default route, else loopback."""
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    """0: any free one."""
    labels: dict[str, str]

    def __repr__(self) -> str:  # no token in a log or a traceback
        return f"Listen(port={self.port}, interfaces={self.interfaces}, cidrs={self.cidrs})"


PIN_WAIT_S_MAX = 600.0
"""Longest wait for tiers that a pin may ask for: it keeps a thread of the agent."""


class SetPeers(NodeRequest[None], frozen=True):
    """Tell the agent who belongs to the job now, this host included. Sent at each (re)start.

    Hosts that are not named any more stay known, to be asked at a recovery, but get no replicas.
    """

    body_bytes_max: ClassVar[int] = MAX_BODY_BYTES
    session_id: str
    run: HexId
    leader: str
    """The host of the job's rank 0: it opens attempts and orders replication."""
    hosts: Annotated[tuple[HostEntry, ...], msgspec.Meta(max_length=1 << 16)]
    earlier: Annotated[tuple[HostEntry, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Hosts of jobs before, which another host of this job knows."""
    seeds: Annotated[tuple[str, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Static discovery: addresses of hosts whose names are not known yet."""
    dns: str = ""
    """``name:port`` that resolves to all hosts; asked again every few seconds."""
    replicas: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    replication_bytes_per_s: Count = 0
    """0: no limit."""


class Pinned(Message, frozen=True):
    """What became of a pin, or of its end, on this host; it counts already, and on all hosts."""

    tiers: tuple[str, ...] = ()
    """That hold the checkpoint, and the pin."""
    owed: dict[str, str] = msgspec.field(default_factory=dict)
    """That hold the checkpoint and could not be given the pin yet, or do not answer, and why. They
    get it as soon as they answer."""
    coming: tuple[str, ...] = ()
    """That the checkpoint is on its way to, and the pin with it."""
    brought: str = ""
    """The tier that it is brought to because of the pin: it was in memory only."""


class AddRecord(NodeRequest[Pinned], frozen=True):
    """Say something of a checkpoint, for good, to all.

    The reply says nothing of "restored".

    Raises:
        NotFoundError: This host knows no such checkpoint; of a restored one, its memory does not.
        UsageError: A pin of what is in memory only, and there is no tier to keep it.
    """

    stream: StreamName
    save_id: HexId
    kind: Literal["restored", "bad", "good", "pin", "unpin"]
    segments: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=1 << 10)] = ()
    """unpin: ids of the pins that end. good: ids of the marks that are taken back."""
    text: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """Why; of a restored one, the id of the attempt that went on from it."""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=PIN_WAIT_S_MAX)] = 30.0
    """How long the tiers that hold the checkpoint are waited for; not of "restored"."""


class PinStatus(Message, frozen=True):
    """A checkpoint that is pinned, as one host finds it."""

    stream: StreamName
    step: int
    save_id: HexId
    reason: str
    tiers: tuple[str, ...]
    """That hold it and all its pins, memory included."""
    owed: tuple[str, ...] = ()
    """That hold it, and are still to be given a pin."""


class PeerState(Message, frozen=True):
    """One other host, as this agent finds it."""

    host: HostEntry
    member: bool
    """Whether it belongs to the job now."""
    reachable: bool | None
    """None: not asked yet."""
    error: str | None = None
    address: str | None = None
    """The one in use: the fastest that answered."""
    rtt_s: float | None = None
    bytes_per_s: float | None = None
    """Of a short probe."""


class PeerTable(Message, frozen=True):
    """GET /v1/namespaces/{ns}/peers, for trainers and the command line (unix socket only)."""

    host: HostEntry | None
    """This host; None: it does not listen."""
    leader: str
    replicas: int
    token: str
    tls: TlsSpec | None
    peers: tuple[PeerState, ...]
    unmet: dict[str, str] = msgspec.field(default_factory=dict)
    """Configured addresses and names that have not answered since the job began, and why."""

    def __repr__(self) -> str:  # likewise
        return f"PeerTable(host={self.host}, leader={self.leader!r}, peers={self.peers})"


class ReplicationStatus(Message, frozen=True):
    """Replicas of one namespace, as this agent sees them."""

    replicas: int
    """Wanted."""
    possible: int
    """Of these, what the number of hosts allows."""
    newest_replicated_step: int | None
    lag_steps: int | None
    active_save_id: str | None
    pulled_bytes_total: int
    pull_seconds_total: float
    held_bytes: int
    """Of other hosts' segments in this host's memory."""
    error: str | None


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
