"""Messages on the agent's socket: msgspec structs, encoded as JSON unless stated otherwise.

The agent listens on ``<runtime dir>/agent.sock`` (HTTP/1.1) and passes file descriptors on
``<runtime dir>/fds.sock``: the client connects, sends a 32-character ticket that an HTTP reply
named, and receives one status byte (``b"\\x00"``) with the descriptor in SCM_RIGHTS, or another
byte and no descriptor. A ticket works once, for the user who got it, for 30 s.

A new request is a :class:`.base.NodeRequest` here, and a method of the agent's node with its verb
as name: route, client and reply follow from these.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from tieredckpt.config.sections import Seconds
from tieredckpt.config.tiers import TierSpec
from tieredckpt.format.manifest import (
    MAX_HOST_CHARS,
    MAX_LINEAGE,
    MAX_PARENTS,
    Ancestor,
    Followed,
    HexId,
    Name,
)
from tieredckpt.rpc.messages.base import (
    MAX_BODY_BYTES,
    Count,
    ErrorReply,
    Message,
    NodeRequest,
    Request,
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
from tieredckpt.rpc.messages.tiers import AskTroubles, HandCredentials, TierTrouble, Troubles

API_VERSION = 10
"""Raised with every incompatible change; client and agent must agree exactly."""

WAIT_S_MAX = 3600.0
"""Longest configurable wait for a slot: it occupies a thread of the agent."""

SEGMENTS_MAX = 1 << 14
"""Segments that one request may name: more than the ranks of one host."""


class Health(Message, frozen=True):
    """GET /v1/health."""

    api: int
    version: str
    pid: int
    host_id: str
    uptime_s: float


class NamespaceSpec(Message, frozen=True):
    """The configuration of a namespace; all sessions of a run send the same."""

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
    """The agent enforces the spec once this run has saved."""
    spec: NamespaceSpec
    local_rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    local_world_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    pid: int = 0
    job: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    """Names of the job by its launchers, of which a restart keeps one, in lines; else the process
    of rank 0; "": not known."""
    take_over: bool = False
    """Also from another job that saves."""


class Grant(Message, frozen=True):
    """A slot reserved for writing one segment. The client holds LOCK_EX on it while it writes."""

    segment_id: str
    slot_id: str
    capacity_bytes: int
    """Usable bytes; the slot file has one more page of 4096 bytes, the label."""
    ticket: str | None
    """Descriptor of the slot, already locked; None for a provisional grant (see Sealed.next)."""


class SlotHandle(Message, frozen=True):
    """A slot to map and prefault; it must not be written yet."""

    slot_id: str
    capacity_bytes: int
    ticket: str


class Prepared(Message, frozen=True):
    """Reply to Prepare: the slots that this session will be granted in turn."""

    slots: tuple[SlotHandle, ...]


class Prepare(NodeRequest[Prepared], frozen=True):
    """Allocate this session's ring, so that it can be prefaulted."""

    session_id: str
    segment_bytes: int


SEALED_BEFORE_MAX = 64
"""Segments that one rank reports; older ones are left out."""


class SealedBefore(Message, frozen=True):
    """A segment that a process has sealed, and the outcome of its save as far as it knows."""

    segment_id: HexId
    stream: Name
    fate: Literal["committed", "failed", "unknown"] = "unknown"


class Reserve(NodeRequest[Grant], frozen=True):
    """Grant a slot to write one segment into."""

    session_id: str
    segment_bytes: int
    asked_at_ns: Count = 0
    """The caller's monotonic clock, which all processes of a session share. A request that timed
    out and is read late (the agent was stopped) must not reclaim the slot of a later grant."""
    before: Annotated[tuple[SealedBefore, ...], msgspec.Meta(max_length=SEALED_BEFORE_MAX)] = ()
    """Oldest first. The agent does not know the outcome of saves that another host's agent commits;
    it keeps segments that neither a report nor a manifest names (``agent/cluster/in_doubt.py``)."""


class Sealed(Message, frozen=True):
    """Reply to Seal."""

    next: Grant | None
    """Provisional grant of the slot that becomes free when this save commits, if it is known.

    The client locks its own descriptor of that slot (LOCK_EX, non-blocking), then checks that the
    label is RESERVED for this segment id; otherwise it sends Reserve.
    """


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
    """True: nothing was committed, as the agent does not have the plan: send Commit with it."""


class Commit(NodeRequest[Committed], frozen=True):
    """Commit a checkpoint to memory. Idempotent by the manifest's save id."""

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
    """Abort a save that will not be committed. Idempotent."""

    slow: ClassVar[bool] = False
    session_id: str
    segments: Annotated[tuple[str, ...], msgspec.Meta(max_length=SEGMENTS_MAX)]
    """Its sealed segments; those that a manifest refers to are kept."""
    skipped: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """Saves that this session's process has skipped so far, this one included."""


MIRRORS_MAX = 1 << 14
"""Mirror segments of one rank and save."""


class ReserveDraft(NodeRequest[Grant], frozen=True):
    """Grant a slot for one mirror segment: another host's rank writes it, and this one does, too.

    The request does not wait for a slot.

    Raises:
        CapacityError: There is no space for it now.
    """

    session_id: str
    segment_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    stream: Name
    step: Count
    drafts: Annotated[int, msgspec.Meta(ge=1, le=MIRRORS_MAX)]
    """How many the session writes of each save."""


class SealDraft(NodeRequest[None], frozen=True):
    """Declare a mirror segment complete. Idempotent by ``segment_id``.

    It counts as a copy once segment number ``ordinal`` of the manifest of this stream and step is
    equal to it.

    Raises:
        NotFoundError: Its slot was reclaimed.
        IntegrityError: The slot contradicts the arguments.
    """

    slow: ClassVar[bool] = False
    session_id: str
    segment_id: HexId
    slot_id: str
    segment_bytes: Annotated[int, msgspec.Meta(ge=4096, lt=1 << 62)]
    root: HexId
    stream: Name
    step: Count
    ordinal: Annotated[int, msgspec.Meta(ge=0, lt=1 << 17)]


class BaseSpec(Message, frozen=True):
    """Where a stream resumes."""

    stream: str
    save_id: str | None
    """The checkpoint that was loaded; None: the stream begins anew."""
    manifest: bytes = b""
    """Its encoded manifest: it may have been evicted since, or be on other hosts only."""
    newest: Annotated[tuple[Ancestor, ...], msgspec.Meta(max_length=MAX_LINEAGE)] = ()
    """The timeline up to the newest checkpoint that was known when this one was chosen."""
    in_silence: bool = False
    """Some hosts or tiers did not answer: newer checkpoints are skipped, and not abandoned."""


class DataReserved(Message, frozen=True):
    """Reply to ReserveData."""

    granted: bool
    """False: the cache is full, and nothing was made."""


class ReserveData(NodeRequest[DataReserved], frozen=True):
    """Free space for an entry of the data cache, and delete those that are old.

    If granted, ``data/<namespace>/<stream>/<step>.<session_id>`` in the runtime folder is an empty
    file of its size. The session writes it, and renames it to ``<step>`` once it is complete.
    """

    session_id: str
    stream: HexId
    step: Annotated[int, msgspec.Meta(ge=1, lt=10**15)]
    size_bytes: Count
    position: Count
    """The last step that the rank has used."""
    behind: Count
    """So many steps until there are kept."""
    ahead: Count
    """So many steps after it are loaded."""
    capacity_bytes: Count
    """Limit of all entries on this host, those of other namespaces included."""


class OpenAttempt(NodeRequest[bytes], frozen=True):
    """Open an attempt; the reply is the encoded AttemptRecord. Idempotent by ``attempt_id``.

    Sent before the first save of a run, and when its timeline changes. Streams that are not named
    resume where the parent attempt ended. Nothing is stored before the save itself.
    """

    body_bytes_max: ClassVar[int] = MAX_BODY_BYTES
    session_id: str
    attempt_id: str
    run: str
    """The caller's run, as in Commit. A run that another one continues is refused."""
    cause: Literal["load", "save"]
    """A load may move a stream from the session that saved into it last, a save may not."""
    bases: tuple[BaseSpec, ...]
    followed: Annotated[tuple[Followed, ...], msgspec.Meta(max_length=MAX_PARENTS)] = ()
    """The attempt that the caller continues, then others that it knows: see ``history.Chain``."""
    silent: Annotated[tuple[str, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Hosts that did not answer the caller just now: they are asked again, but not waited for."""


class SegmentOpened(Message, frozen=True):
    """Reply to OpenSegment. Closing every copy of the descriptor ends the lease."""

    ticket: str
    size_bytes: int
    """Bytes that can be read now; fewer than in the manifest if the copy was truncated."""
    direct: bool
    slot_id: str | None
    """The slot, if the tier is memory: a trainer may have it mapped already."""


class OpenSegment(NodeRequest[SegmentOpened], frozen=True):
    """Open a descriptor to read one segment from one tier."""

    tier: str
    segment_id: str


DAMAGED_BLOCKS_MAX = 1 << 14
"""A reader that found more bad blocks reports the whole copy."""


class ReportDamage(NodeRequest[None], frozen=True):
    """Report bad blocks that a reader found; the agent quarantines them."""

    tier: str
    segment_id: str
    blocks: tuple[int, ...]
    """Block numbers; empty: the copy as a whole (its footer or size) is bad."""
    reason: str
    host: str = ""
    """The host of the copy; "": this agent's."""


class ReportIntact(NodeRequest[None], frozen=True):
    """Report that a copy here was read whole and every block is good: its mark of damage goes.

    Ignored if it was reported as damaged since, or if another place than the agent's tier was read.
    """

    tier: str
    segment_id: str
    began_ns: int
    """When reading began, by this host's monotonic clock."""
    read_at: TierSpec | None = None
    """Where the reader found the tier; None: the agent opened the copy for it."""


Level = Literal["done", "queued", "active", "failed", "superseded", "not_scheduled", "waiting"]


class Progress(Message, frozen=True):
    """GET /v1/namespaces/{ns}/progress/{save_id}: state of a checkpoint per tier.

    With ``?awaited=TIER`` that tier, if it failed, is tried now, before its pause ends.
    """

    levels: dict[str, Level]
    """By tier name, "memory", and "replicated" for the copies on other hosts. "waiting": a failed
    copy will be tried again."""
    errors: dict[str, str]
    copies_done: int | None = None
    """Verified copies of segments on other hosts that this host knows of; the leader knows all.
    None: no copies were wanted."""
    copies_wanted: int | None = None
    quiet_s: dict[str, float | None] = msgspec.field(default_factory=dict)
    """By tier, seconds since bytes were read for it last; None: it fails at this moment."""


class FlushedSave(Message, frozen=True):
    """One stream's newest checkpoint."""

    stream: str
    step: int
    save_id: str


class Flushed(Message, frozen=True):
    """Reply to Flush, at once; ``progress`` reports the rest."""

    tiers: tuple[str, ...]
    """At least one: those that are filled, the surest first."""
    saves: tuple[FlushedSave, ...]
    remaining_bytes: int
    """This host's, of all tiers, including checkpoints that are copied before."""
    estimate_s: float | None
    """Until all are filled; None: nothing was copied to one of them yet."""


class Flush(NodeRequest[Flushed], frozen=True):
    """Copy the newest checkpoints to a tier now. Idempotent.

    Raises:
        NotFoundError: There is no such tier, or no checkpoint.
        UsageError: No tier is configured.
        TierUnavailableError: None answers.
    """

    tier: str = ""
    """"": all in which the checkpoints are due, or that are not too slow."""
    left_s: Seconds | None = None
    """Seconds until the caller ends; None: no limit."""


class RetentionNeeds(Message, frozen=True):
    """GET /v1/namespaces/{ns}/needs: checkpoints that retention keeps now, besides pins."""

    tiers: dict[str, dict[str, str]]
    """By tier, memory included, and save id: why the checkpoint is kept (a sentence's end)."""


LABELS_MAX = 64
HostText = Annotated[str, msgspec.Meta(max_length=300)]
"""A host name and a port, or a label: other agents store what one agent reports of itself."""


class HostEntry(Message, frozen=True):
    """One host of a job, as it reports itself to the others."""

    host_id: Annotated[str, msgspec.Meta(max_length=MAX_HOST_CHARS)]
    incarnation: HexId
    """The id of its memory, which changes with a reboot, since memory is lost then."""
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

    New values replace those of processes that have ended.

    Raises:
        ConfigError: No such interface or address, or neither token nor TLS.
        NamespaceInUseError: Another live session wants other values.
        AgentError: The port is in use, or the token is malformed.
    """

    session_id: str
    token: str
    """Shared by the job's hosts; "" only with ``tls``. Never logged, kept in a 0600 file."""
    tls: TlsSpec | None
    interfaces: tuple[str, ...]
    cidrs: tuple[str, ...]
    """Choose this host's addresses; with neither: that of the default route, else loopback."""
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    """0: any free one."""
    labels: dict[str, str]

    def __repr__(self) -> str:  # no token in a log or a traceback
        return f"Listen(port={self.port}, interfaces={self.interfaces}, cidrs={self.cidrs})"


PIN_WAIT_S_MAX = 600.0
"""Longest wait of a pin for tiers: it occupies a thread of the agent."""


class SetPeers(NodeRequest[None], frozen=True):
    """Set the hosts of the job, this host included. Sent at each (re)start.

    Former hosts are still asked at a recovery, but get no replicas.
    """

    body_bytes_max: ClassVar[int] = MAX_BODY_BYTES
    session_id: str
    run: HexId
    leader: str
    """The host of the job's rank 0: it opens attempts and assigns replicas."""
    hosts: Annotated[tuple[HostEntry, ...], msgspec.Meta(max_length=1 << 16)]
    earlier: Annotated[tuple[HostEntry, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Hosts of earlier jobs, which another host of this job knows."""
    seeds: Annotated[tuple[str, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Static discovery: addresses of hosts whose names are not known yet."""
    dns: str = ""
    """``name:port`` that resolves to all hosts; asked again every few seconds."""
    replicas: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    replication_bytes_per_s: Count = 0
    """0: no limit."""


class Pinned(Message, frozen=True):
    """Where a pin, or its end, is stored on this host. It is in force already, and on all hosts."""

    tiers: tuple[str, ...] = ()
    """Tiers that have the checkpoint and the pin."""
    owed: dict[str, str] = msgspec.field(default_factory=dict)
    """Tiers that have the checkpoint, but not yet the pin, or do not answer, and why. They get the
    pin as soon as they answer."""
    coming: tuple[str, ...] = ()
    """Tiers that the checkpoint is being copied to, and the pin with it."""
    brought: str = ""
    """The tier that it is copied to because of the pin: it was in memory only."""


class AddRecord(NodeRequest[Pinned], frozen=True):
    """Record a permanent fact about a checkpoint on all hosts.

    The reply is empty for "restored".

    Raises:
        NotFoundError: This host does not know the checkpoint, or for "restored" its memory.
        UsageError: A pin of a checkpoint in memory only, and there is no tier to keep it.
    """

    stream: Name
    save_id: HexId
    kind: Literal["restored", "bad", "good", "pin", "unpin"]
    segments: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=1 << 10)] = ()
    """unpin: ids of the pins that end. good: ids of the marks that end."""
    text: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """The reason; for "restored" the id of the attempt that continued it."""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=PIN_WAIT_S_MAX)] = 30.0
    """Longest wait for the tiers that have the checkpoint; not for "restored"."""


class PinStatus(Message, frozen=True):
    """A pinned checkpoint, as one host sees it."""

    stream: Name
    step: int
    save_id: HexId
    reason: str
    tiers: tuple[str, ...]
    """Tiers that have it and all its pins, memory included."""
    owed: tuple[str, ...] = ()
    """Tiers that have it, but not yet all its pins."""


class PeerState(Message, frozen=True):
    """One other host, as this agent sees it."""

    host: HostEntry
    member: bool
    """Whether it belongs to the job now."""
    reachable: bool | None
    """None: not asked yet."""
    error: str | None = None
    address: str | None = None
    """The address in use: the fastest that answered."""
    rtt_s: float | None = None
    bytes_per_s: float | None = None
    """Measured by a short probe."""


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
    """Why nothing gets there now, also while requests to a store are being repeated."""
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
    """Checkpoints of a shared tier that wait for other hosts to upload their part."""
    lag_s: float | None = None
    """How far the newest checkpoint here is behind memory's newest, in seconds of saving."""
    lag_bytes: int = 0
    """This host's part of the checkpoints that wait or are being copied."""
    alarm: bool = False
    """Whether the limit of ``lag_alarm`` is reached."""
    memory_full: bool = False
    """Whether checkpoints wait that memory, or the tier that this one is filled from, had no space
    for: see ``on_pressure``."""
    dropped_total: int = 0
    """Checkpoints that were shed, or deleted from memory before their turn."""


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
    """Saves without a checkpoint (see `save.on_error`) that sessions have reported to this agent:
    it only grows."""
    tiers: tuple[TierStatus, ...]
    peers: tuple[PeerState, ...] = ()
    replication: ReplicationStatus | None = None
    pins: tuple[PinStatus, ...] = ()
    """The newest first; at most 256."""
    data_bytes: int = 0
    """Of the data cache, which `memory.capacity` does not count."""


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
