"""The blocking client of a node agent: standard library only, one of our errors for every failure.

All requests are idempotent. A request whose connection broke is sent again: once on a fresh
connection, since the agent may only have closed an idle one, and after ``revive`` if no agent
listens. A request that timed out is not, as a stopped agent may still apply it. A new agent may not
know the session. Then it refuses every request about the session's namespace; the client reopens
the session under the same id and repeats the request. A client may be used by several threads, but
not after a fork.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from tieredckpt.errors import AgentError, NotFoundError, RemoteProtocolError, UsageError
from tieredckpt.format.envelope import MALFORMED
from tieredckpt.format.manifest import Followed
from tieredckpt.rpc.fd_passing import check_socket_path, connect, redeem
from tieredckpt.rpc.http1 import HttpConnection, Malformed
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.base import API_HEADER, SESSION_HEADER, decode_error, package_version

AGENT_SOCKET = "agent.sock"
LEAST_WAIT_S = 1.0
"""The least time that a call waits for its reply, even if its caller has none left."""
FDS_SOCKET = "fds.sock"
REPLY_BYTES_MAX = 512 << 20
"""Largest accepted reply: holdings or a plan of a few million pieces."""
IDLE_CONNECTIONS_MAX = 8
ATTEMPTS_MAX = 4
"""How often one call may find the agent gone before it fails."""
_GONE = (ConnectionError, FileNotFoundError, Malformed)

_Reply = TypeVar("_Reply")
_clients: weakref.WeakSet[AgentClient] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child (a data loader's worker) must not prolong the session of its parent."""
    for client in list(_clients):
        client.abandon()


os.register_at_fork(after_in_child=_close_in_child)


def _decoded(body: bytes, kind: type[_Reply]) -> _Reply:
    """The agent's reply; bytes are not decoded. Raises RemoteProtocolError: it is no ``kind``."""
    if kind is bytes:
        return body  # type: ignore[return-value]
    try:
        return msgspec.json.decode(body, type=kind)
    except MALFORMED as error:
        name = getattr(kind, "__name__", kind)
        raise RemoteProtocolError(
            f"the agent's reply is no {name} ({error}), so the agent is of another version: "
            "stop it with `tieredckpt agent stop`, then retry"
        ) from error


def _round_trip(
    connection: HttpConnection, method: str, path: str, body: bytes, session_id: str
) -> tuple[int, bytes]:
    """Status and body of the reply to one request; a failure closes the connection."""
    session = f"{SESSION_HEADER}: {session_id}\r\n" if session_id else ""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{API_HEADER}: {m.API_VERSION}\r\n"
        f"{session}Content-Length: {len(body)}\r\n\r\n"
    )
    try:
        connection.send(head.encode("ascii"), body, at_once=True)
        status, size, _ = connection.read_head()
        if size > REPLY_BYTES_MAX:
            raise RemoteProtocolError(
                f"the agent sends a reply of {size} bytes; the limit is {REPLY_BYTES_MAX}"
            )
        return status, connection.read_body(size)
    except BaseException:
        connection.close()
        raise


class AgentClient:
    """One process's client of the agent of ``runtime_dir``. Thread-safe, invalid after fork.

    Args:
        runtime_dir: The agent's folder.
        deadline_s: Longest duration of one call, starting a new agent included.
        revive: Called when no agent listens; returns when one does, or raises AgentError. None:
            such a call fails at once.

    Raises:
        AgentError: From every method: the agent cannot be reached or does not answer in time;
            ``outcome`` is "unknown" if the request may have been applied.
    """

    def __init__(
        self,
        runtime_dir: Path,
        *,
        deadline_s: float = 60.0,
        revive: Callable[[], object] | None = None,
    ) -> None:
        self.runtime_dir = runtime_dir
        self._deadline_s = deadline_s
        self._path = runtime_dir / AGENT_SOCKET
        check_socket_path(self._path)
        self._revive = revive
        self._idle: list[HttpConnection] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._session_lock = threading.RLock()
        self._session: m.OpenSession | None = None
        self._setup: dict[str, m.Listen | m.SetPeers | m.SaveFailed] = {}
        """By verb, what a new agent needs, too: the job's hosts, how many saves were skipped."""
        self._setup_pending = False
        """Whether an agent may have reopened the session without having received all of these."""
        self._lease_fd: int | None = None
        self.run_id = ""
        """The run of the open session, which owns this client's attempts and saves."""
        self.unreported_segments: Callable[[], tuple[m.SealedBefore, ...]] = tuple
        """Segments that this process has sealed and whose outcome the agent may not know."""
        _clients.add(self)

    def abandon(self) -> None:
        """In a forked child: close inherited descriptors; the parent's session continues.

        Takes no lock: its holder does not exist in the child.
        """
        fd, self._lease_fd = self._lease_fd, None
        if fd is not None:
            os.close(fd)
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __enter__(self) -> AgentClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- sessions ---------------------------------------------------------------------------------

    def open_session(
        self,
        namespace: str,
        spec: m.NamespaceSpec,
        *,
        local_rank: int = 0,
        local_world_size: int = 1,
        run_id: str | None = None,
        job: str = "",
        take_over: bool = False,
    ) -> m.SessionOpened:
        """Open this client's session; it ends with :meth:`close` or with this process.

        Clients that save for one start of training give the same ``run_id`` (32 hex digits).

        Raises:
            NamespaceInUseError: The run that saved last is live here, with another spec; or
                another job saves, and ``take_over`` is False.
            UsageError: This client has a session already.
        """
        with self._session_lock:
            if self._session is not None:
                raise UsageError("this client has an open session already")
            run = run_id or secrets.token_hex(16)
            request = m.OpenSession(
                api=m.API_VERSION,
                version=package_version(),
                session_id=secrets.token_hex(16),
                namespace=namespace,
                run=run,
                spec=spec,
                local_rank=local_rank,
                local_world_size=local_world_size,
                pid=os.getpid(),
                job=job,
                take_over=take_over,
            )
            opened = self._open(request, time.monotonic() + self._deadline_s)
            self._session = request
            self.run_id = run
            return opened

    @property
    def session_id(self) -> str:
        """The id of the open session. Raises UsageError if there is none."""
        return self._opened().session_id

    @property
    def namespace(self) -> str:
        """The namespace of the open session. Raises UsageError if there is none."""
        return self._opened().namespace

    def _opened(self) -> m.OpenSession:
        if self._session is None:
            raise UsageError("no session is open: call open_session first")
        return self._session

    def _open(self, request: m.OpenSession, until_s: float) -> m.SessionOpened:
        # The agent may die between the reply and the ticket: then both are repeated.
        for attempt in range(ATTEMPTS_MAX):
            body = self._request("POST", "/v1/sessions", request.encode(), until_s)
            opened = _decoded(body, m.SessionOpened)
            if not opened.lease_ticket:
                return opened
            try:
                fd = self.redeem(opened.lease_ticket)
            except (AgentError, RemoteProtocolError):
                if attempt == ATTEMPTS_MAX - 1:
                    raise
                continue
            old, self._lease_fd = self._lease_fd, fd
            if old is not None:
                os.close(old)
            return opened
        raise AssertionError  # the loop returns or raises

    def close(self) -> None:
        """End the session and close all connections. Idempotent; never raises for a dead agent."""
        with self._session_lock:
            session, self._session = self._session, None
            fd, self._lease_fd = self._lease_fd, None
        if fd is not None:
            os.close(fd)
        if session is not None:
            # Without this request the agent detects the free lease within seconds.
            with contextlib.suppress(AgentError, RemoteProtocolError, NotFoundError, UsageError):
                path = f"/v1/sessions/{session.session_id}"
                self._request("DELETE", path, b"", time.monotonic() + 2.0, revive=False)
        self._close_idle()

    # --- saving -----------------------------------------------------------------------------------

    def prepare(self, segment_bytes: int) -> m.Prepared:
        """Allocate this session's ring for segments of up to ``segment_bytes``.

        Raises CapacityError if the ring cannot fit; then nothing was allocated.
        """
        return self.call(m.Prepare(session_id=self.session_id, segment_bytes=segment_bytes))

    def reserve(self, segment_bytes: int) -> m.Grant:
        """A slot to write one segment into; reports :attr:`unreported_segments`.

        Raises CapacityError if no slot became free within ``memory.wait``.
        """
        request = m.Reserve(
            session_id=self.session_id,
            segment_bytes=segment_bytes,
            asked_at_ns=time.monotonic_ns(),
            before=self.unreported_segments(),
        )
        return self.call(request)

    def seal(self, segment_id: str, slot_id: str, segment_bytes: int, root: str) -> m.Sealed:
        """Declare a written segment complete: its slot is not granted for writing any more.

        Raises:
            IntegrityError: The slot's trailer contradicts the arguments.
            NotFoundError: The slot is not reserved for this segment any more.
        """
        request = m.Seal(
            session_id=self.session_id,
            segment_id=segment_id,
            slot_id=slot_id,
            segment_bytes=segment_bytes,
            root=root,
        )
        return self.call(request)

    def commit(self, manifest: bytes, plan: bytes | None = None, *, attempt: bytes) -> m.Committed:
        """Commit a checkpoint to memory. See :class:`tieredckpt.rpc.messages.agent.Commit`.

        Raises:
            StaleAttemptError: A newer attempt was opened; nothing was committed. Field
                ``same_run``: by other ranks of this run, so it may be adopted.
            UsageError: Another live session of this run saves into the stream.
            NotFoundError, IntegrityError: A segment is not sealed here as in the manifest.
            AgentError: With ``outcome="unknown"`` the checkpoint may exist.
        """
        request = m.Commit(
            session_id=self.session_id, run=self.run_id, manifest=manifest, plan=plan,
            attempt=attempt,
        )  # fmt: skip
        return self.call(request)

    def save_failed(self, segments: Sequence[str], skipped: int) -> None:
        """Report that these sealed segments belong to no checkpoint and never will.

        ``skipped``: saves that this process has skipped so far.
        """
        self.report_skipped(skipped, pending=self._setup_pending)
        request = m.SaveFailed(
            session_id=self.session_id, segments=tuple(segments), skipped=skipped
        )
        self.call(request)

    def report_skipped(self, skipped: int, *, pending: bool = True) -> None:
        """Report with the next request that so many saves were skipped; ``pending``: not only to
        a new agent.
        """
        if skipped:
            request = m.SaveFailed(session_id=self.session_id, segments=(), skipped=skipped)
            self._setup[request.verb()], self._setup_pending = request, pending

    def poll_save(
        self,
        key: m.GatheringKey,
        rank: int | None = None,
        give_up: m.ErrorReply | None = None,
    ) -> m.Gathered:
        """The state of a save without collectives; ``give_up`` fails it if it is open."""
        request = m.AskGathering(session_id=self.session_id, key=key, rank=rank, give_up=give_up)
        return self.call(request)

    def open_attempt(
        self,
        attempt_id: str,
        bases: tuple[m.BaseSpec, ...] = (),
        *,
        followed: tuple[Followed, ...] = (),
        cause: Literal["load", "save"] = "load",
        silent: tuple[str, ...] = (),
    ) -> bytes:
        """Open a new attempt; returns the encoded AttemptRecord.

        See :class:`tieredckpt.rpc.messages.agent.OpenAttempt`.

        Raises:
            StaleAttemptError: Another run continues this one.
            NotFoundError: A checkpoint to resume at does not exist any more.
            UsageError: It is of another stream, or another live session saves into the stream.
        """
        request = m.OpenAttempt(
            session_id=self.session_id, attempt_id=attempt_id, run=self.run_id,
            followed=followed, cause=cause, bases=bases, silent=silent,
        )  # fmt: skip
        return self.call(request)

    # --- reading ----------------------------------------------------------------------------------

    def health(self) -> m.Health:
        """The agent's identity. Works with every API version."""
        return _decoded(self._call("GET", "/v1/health"), m.Health)

    def status(self, *, within_s: float | None = None, revive: bool = True) -> m.Status:
        """The agent's status. ``revive``: as for :meth:`call`."""
        return _decoded(self._call("GET", "/v1/status", within_s=within_s, revive=revive), m.Status)

    def metrics(self) -> bytes:
        """The status in Prometheus's text format. Does not keep an idle agent alive."""
        return self._call("GET", "/metrics")

    def holdings(
        self, namespace: str | None = None, *, within_s: float | None = None, tiers: bool = True
    ) -> bytes:
        """A namespace's holdings, as msgpack of :class:`tieredckpt.storage.holdings.Holdings`.

        A tier that is not listed ``within_s`` (None: as long as the agent waits) is reported as
        unavailable; without ``tiers`` only memory is listed. The reply may take a moment longer.

        Raises NotFoundError if the agent does not know the namespace.
        """
        path = self._path_of("holdings", namespace)
        if not tiers:
            path += "?within_s=0"
        elif within_s is not None:
            path += f"?within_s={within_s:.3f}"
        return self._call(
            "GET", path, within_s=None if within_s is None else within_s + LEAST_WAIT_S
        )

    def plan(self, plan_id: str, *, tier: str = "memory", namespace: str | None = None) -> bytes:
        """The encoded plan as ``tier`` holds it, unverified. Raises NotFoundError."""
        return self._call("GET", self._path_of(f"plans/{plan_id}?tier={tier}", namespace))

    def peers(self, namespace: str | None = None) -> m.PeerTable:
        """The other hosts that the agent knows, and the secret for requests to them.

        Raises NotFoundError if the agent does not know the namespace.
        """
        return _decoded(self._call("GET", self._path_of("peers", namespace)), m.PeerTable)

    def progress(
        self,
        save_id: str,
        *,
        namespace: str | None = None,
        awaited: str = "",
        within_s: float | None = None,
        revive: bool = True,
    ) -> m.Progress:
        """The level of a checkpoint in each tier. The ``awaited`` tier is tried now.

        ``revive``: as for :meth:`call`.

        Raises NotFoundError if no tier that answers knows the checkpoint.
        """
        verb = f"progress/{save_id}" + (f"?awaited={awaited}" if awaited else "")
        path = self._path_of(verb, namespace)
        reply = self._call("GET", path, within_s=within_s, revive=revive)
        return _decoded(reply, m.Progress)

    def protections(self, namespace: str | None = None) -> m.RetentionNeeds:
        """What retention does not delete now. Raises NotFoundError: no such namespace."""
        return _decoded(self._call("GET", self._path_of("needs", namespace)), m.RetentionNeeds)

    def open_segment(
        self, tier: str, segment_id: str, *, namespace: str | None = None
    ) -> tuple[m.SegmentOpened, int]:
        """A descriptor to read one copy of a segment; closing it ends the lease.

        Raises NotFoundError or TierUnavailableError.
        """
        request = m.OpenSegment(tier=tier, segment_id=segment_id)
        for attempt in range(2):
            opened = self.call(request, namespace)
            try:
                return opened, self.redeem(opened.ticket)
            except (AgentError, RemoteProtocolError):
                if attempt:  # repeated once: the agent may have died in between
                    raise
        raise AssertionError  # the loop returns or raises

    # --- reporting --------------------------------------------------------------------------------

    def report_damage(
        self,
        tier: str,
        segment_id: str,
        blocks: tuple[int, ...],
        reason: str,
        *,
        namespace: str | None = None,
    ) -> None:
        """Report bad blocks (none: all) in this agent's copy of a segment."""
        named = blocks if len(blocks) <= m.DAMAGED_BLOCKS_MAX else ()
        request = m.ReportDamage(tier=tier, segment_id=segment_id, blocks=named, reason=reason)
        self.call(request, namespace)

    def pin(self, request: m.AddRecord, namespace: str | None = None) -> m.Pinned:
        """Pin a checkpoint or end its pins, and wait for its tiers for ``request.wait_s``.

        Raises:
            NotFoundError: There is no such checkpoint, or no pin to end.
            UsageError: The checkpoint is in memory only, and there is no tier to keep it.
        """
        return self.call(request, namespace, more_s=request.wait_s)

    # --- operating --------------------------------------------------------------------------------

    def purge(self, namespace: str) -> None:
        """Delete a namespace's checkpoints from memory (never from lower tiers).

        Raises NamespaceInUseError while sessions of it are live.
        """
        self._call("POST", self._path_of("purge", namespace), b"{}")

    def shutdown(self) -> None:
        """Ask the agent to stop cleanly; committed checkpoints stay in memory."""
        until_s = time.monotonic() + self._deadline_s
        self._request("POST", "/v1/shutdown", b"{}", until_s, revive=False)

    def redeem(self, ticket: str) -> int:
        """The descriptor of a ticket; the caller owns it."""
        self._check_fork()
        return redeem(self.runtime_dir / FDS_SOCKET, ticket, timeout_s=self._deadline_s)

    # --- requests ---------------------------------------------------------------------------------

    def call(
        self,
        request: m.NodeRequest[_Reply],
        namespace: str | None = None,
        *,
        more_s: float = 0.0,
        within_s: float | None = None,
        revive: bool = True,
    ) -> _Reply:
        """Send a request; its class documents the errors.

        Args:
            request: The request.
            namespace: None: the open session's.
            more_s: Seconds that it may take beyond the client's deadline.
            within_s: Seconds that the caller has left; None: no limit of its own.
            revive: False: do not start an agent for this request.
        """
        path, body = self._path_of(request.verb(), namespace), request.encode()
        reply = self._call("POST", path, body, more_s=more_s, within_s=within_s, revive=revive)
        if isinstance(request, m.Listen | m.SetPeers):
            self._setup[request.verb()] = request
        return _decoded(reply, request.reply())

    def _path_of(self, verb: str, namespace: str | None) -> str:
        return f"/v1/namespaces/{namespace or self.namespace}/{verb}"

    def _call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        more_s: float = 0.0,
        within_s: float | None = None,
        revive: bool = True,
    ) -> bytes:
        limit_s = self._deadline_s + more_s
        if within_s is not None:
            limit_s = min(limit_s, max(within_s, LEAST_WAIT_S))
        until_s = time.monotonic() + limit_s
        session = self._session
        about = session is not None and path.startswith(f"/v1/namespaces/{session.namespace}/")
        session_id = session.session_id if session is not None and about else ""
        for attempt in range(ATTEMPTS_MAX + 1):
            try:
                if attempt or (revive and self._setup_pending):  # a new agent knows no session
                    self._open_again(until_s)
                return self._request(
                    method, path, body, until_s, revive=revive, session_id=session_id
                )
            except NotFoundError as error:
                if error.fields.get("what") != "session" or self._session is None:
                    raise
        raise AgentError(
            f"{ATTEMPTS_MAX} agents were started, and each one ended before it had answered: see "
            "the agent's log",
            outcome="unknown",
        )

    def _open_again(self, until_s: float) -> None:
        left_s = max(0.0, until_s - time.monotonic())
        # Another thread may have longer to wait for an agent that hangs.
        if not self._session_lock.acquire(timeout=left_s):
            raise self._timed_out(left_s)
        try:
            self._setup_pending = True
            self._open(self._opened(), until_s)
            for verb, request in list(self._setup.items()):
                self._request("POST", self._path_of(verb, None), request.encode(), until_s)
            self._setup_pending = False
        finally:
            self._session_lock.release()

    def _request(
        self,
        method: str,
        path: str,
        body: bytes,
        until_s: float,
        *,
        revive: bool = True,
        session_id: str = "",
    ) -> bytes:
        """One request and its reply, repeated while the agent is gone and can be revived.

        Args:
            method: HTTP method.
            path: Path and query.
            body: Request body.
            until_s: Deadline on the monotonic clock.
            revive: False: do not start an agent for this request.
            session_id: The session that the agent must know to answer; "": none.

        Raises:
            AgentError: No agent answers; ``outcome`` is "unknown".
            TieredCkptError: The error that the agent replied.
        """
        self._check_fork()
        if not path.isprintable() or not path.isascii() or " " in path:
            raise UsageError(f"the request path {path[:200]!r} has characters of no valid name")
        began_s = time.monotonic()
        for attempt in range(ATTEMPTS_MAX):
            fresh = True
            try:
                connection, fresh = self._connection(until_s)
                status, data = _round_trip(connection, method, path, body, session_id)
            except TimeoutError as error:
                raise self._timed_out(until_s - began_s) from error
            except _GONE as error:
                if not fresh:
                    self._close_idle()  # an old connection is no evidence about the agent now
                    continue
                if attempt == ATTEMPTS_MAX - 1 or self._revive is None or not revive:
                    raise self._gone(error) from error
                self._revive()
                continue
            self._keep(connection)
            if status >= 400:
                raise decode_error(status, data)
            return data
        raise self._gone(None)

    def _connection(self, until_s: float) -> tuple[HttpConnection, bool]:
        """An idle connection, or a new one and True."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise self._timed_out(self._deadline_s)
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            return HttpConnection(connect(self._path, left_s), left_s), True
        connection.settimeout(left_s)
        return connection, False

    def _keep(self, connection: HttpConnection) -> None:
        with self._lock:
            if len(self._idle) < IDLE_CONNECTIONS_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def _close_idle(self) -> None:
        """Close the idle connections; the next request makes new ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _gone(self, error: Exception | None) -> AgentError:
        return AgentError(
            f"no agent answers on {self._path} ({error}): start one with `tieredckpt agent run "
            f"--runtime-dir {self.runtime_dir}`, or let agent.start be auto{self._see_log()}",
            outcome="unknown",
        )

    def _timed_out(self, waited_s: float) -> AgentError:
        return AgentError(
            f"the agent on {self._path} did not answer within {waited_s:.3g} s: it is "
            f"stopped or overloaded{self._see_log()}",
            outcome="unknown",
        )

    def _see_log(self) -> str:
        """Where its log is; "" if it is not in the runtime folder: a service logs elsewhere."""
        log = self.runtime_dir / "agent.log"
        return f" (its log is {log})" if os.path.exists(log) else ""

    def _check_fork(self) -> None:
        """Raise UsageError in a forked child of the process that made this client."""
        if os.getpid() != self._pid:
            raise UsageError("an agent client cannot be used after fork: open a new one")
