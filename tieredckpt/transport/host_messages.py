"""What goes over the agent's socket about other hosts: part of :mod:`.messages`, by those names."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tieredckpt.transport.message_base import Count, HexId, Message, StreamName


class HostEntry(Message, frozen=True):
    """One host of a job, as the others know it."""

    host_id: str
    incarnation: HexId
    """Of its memory; another one after a reboot, and then nothing that it held before counts."""
    addresses: Annotated[tuple[str, ...], msgspec.Meta(max_length=16)]
    """``ip:port`` or ``[ip6]:port``, one per rail."""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    """Failure domains, for example ``{"rack": "r7"}``."""


class TlsSpec(Message, frozen=True):
    """Files of mutual TLS; read again when they change."""

    cert: str
    key: str
    ca: str


class Listen(Message, frozen=True):
    """POST /v1/namespaces/{ns}/listen -> Listening: serve a namespace to other hosts. Idempotent.

    Another session with other values is refused while one of the first is live.
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


class Listening(Message, frozen=True):
    """Reply to Listen."""

    host: HostEntry


PIN_WAIT_S_MAX = 600.0
"""Longest wait for tiers that a pin may ask for: it keeps a thread of the agent."""


class SetPeers(Message, frozen=True):
    """POST /v1/namespaces/{ns}/peers -> {}: who belongs to the job now. Sent at each (re)start.

    Hosts that are not named any more stay known, to be asked at a recovery, but get no replicas.
    """

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


class AddRecord(Message, frozen=True):
    """POST /v1/namespaces/{ns}/records: say something of a checkpoint, for good, to all.

    The reply to "pin" and "unpin" is Pinned, else {}.
    """

    stream: StreamName
    save_id: HexId
    kind: Literal["restored", "bad", "good", "pin", "unpin"]
    segments: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=1 << 10)] = ()
    """unpin: ids of the pins that end. good: ids of the marks that are taken back."""
    text: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """Why; of a restored one, the id of the attempt that went on from it."""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=PIN_WAIT_S_MAX)] = 30.0
    """pin, unpin: how long the tiers that hold the checkpoint are waited for."""


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
