"""The blocking client of a node agent: standard library only, one of our errors for every failure.

All requests are idempotent. When the agent dies, a call in progress finds or starts a new one
(``revive``), opens the session again under the same id, and sends the same request again. A
client may be used by several threads; it may not be used after a fork.
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
from tieredckpt.transport import messages as m
from tieredckpt.transport.fds import redeem
from tieredckpt.transport.line import ATTEMPTS_MAX, Line
from tieredckpt.transport.replies import JSON_TYPE, MSGPACK_TYPE, package_version

AGENT_SOCKET = "agent.sock"
FDS_SOCKET = "fds.sock"

_Reply = TypeVar("_Reply")
_clients: weakref.WeakSet[AgentClient] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child (a data loader's worker) must not prolong the session of its parent."""
    for client in list(_clients):
        client.abandon()


os.register_at_fork(after_in_child=_close_in_child)

_encode_json = msgspec.json.Encoder().encode
_encode_msgpack = msgspec.msgpack.Encoder().encode


class AgentClient:
    """One process's line to the agent of ``runtime_dir``. Thread-safe, invalid after fork.

    Args:
        runtime_dir: The agent's folder.
        deadline_s: Longest that one call may take, finding a new agent included.
        revive: Called when nobody listens; returns when an agent does, or raises AgentError.
            None: such a call fails at once.

    Raises:
        AgentError: From every method: the agent cannot be reached or does not answer in time;
            ``outcome`` says what is known of the request.
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
        self._line = Line(
            runtime_dir, runtime_dir / AGENT_SOCKET, deadline_s=deadline_s, revive=revive
        )
        self._session_lock = threading.RLock()
        self._session: m.OpenSession | None = None
        self._attached: tuple[str, str] | None = None
        self._lease_fd: int | None = None
        self.run_id = ""
        """Of the open session: whose attempts and saves are this client's own."""
        _clients.add(self)

    def abandon(self) -> None:
        """In a forked child: close what was inherited; the parent's session goes on."""
        fd, self._lease_fd = self._lease_fd, None
        if fd is not None:
            os.close(fd)
        self._line.abandon()

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
        session_id: str | None = None,
        run_id: str | None = None,
    ) -> m.SessionOpened:
        """Open this client's session; it ends with :meth:`close` or with this process.

        Clients that save for one start of training give the same ``run_id`` (32 hex digits).

        Raises:
            NamespaceInUseError: A running session of the namespace has another spec.
            UsageError: This client has a session already.
        """
        with self._session_lock:
            if self._session is not None:
                raise UsageError("this client has an open session already")
            request = m.OpenSession(
                api=m.API_VERSION,
                version=package_version(),
                session_id=session_id or secrets.token_hex(16),
                namespace=namespace,
                spec=spec,
                local_rank=local_rank,
                local_world_size=local_world_size,
            )
            opened = self._open(request, time.monotonic() + self._deadline_s)
            self._session = request
            self.run_id = run_id or secrets.token_hex(16)
            return opened

    def attach(self, session_id: str, namespace: str, run_id: str) -> None:
        """Work in a session that another process has opened, and which ends with that one.

        It is never opened again from here: a call fails with AgentError once it has ended.

        Raises:
            UsageError: This client has a session already.
        """
        with self._session_lock:
            if self._session is not None or self._attached is not None:
                raise UsageError("this client has an open session already")
            self._attached = (session_id, namespace)
            self.run_id = run_id

    @property
    def session_id(self) -> str:
        """The id of the open session. Raises UsageError if there is none."""
        return self._attached[0] if self._attached is not None else self._opened().session_id

    @property
    def namespace(self) -> str:
        """The namespace of the open session. Raises UsageError if there is none."""
        return self._attached[1] if self._attached is not None else self._opened().namespace

    def _opened(self) -> m.OpenSession:
        if self._session is None:
            raise UsageError("no session is open: call open_session first")
        return self._session

    def _open(self, request: m.OpenSession, until_s: float) -> m.SessionOpened:
        # The agent may die between the reply and the ticket: then the whole exchange is repeated.
        for attempt in range(ATTEMPTS_MAX):
            body = self._line.exchange("POST", "/v1/sessions", _encode_json(request), until_s)
            opened = _decode(body, m.SessionOpened)
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
            # Politeness: without it the agent notices the free lease by itself within seconds.
            with contextlib.suppress(AgentError, RemoteProtocolError, NotFoundError, UsageError):
                path = f"/v1/sessions/{session.session_id}"
                self._line.exchange("DELETE", path, b"", time.monotonic() + 2.0, revive=False)
        self._line.close()

    # --- saving -----------------------------------------------------------------------------------

    def prepare(self, segment_bytes: int) -> m.Prepared:
        """Make this session's ring for segments of up to ``segment_bytes``.

        Raises CapacityError if the ring cannot fit; nothing was allocated then.
        """
        request = m.Prepare(session_id=self.session_id, segment_bytes=segment_bytes)
        return self._post("prepare", request, m.Prepared)

    def reserve(self, segment_bytes: int) -> m.Grant:
        """A slot to write one segment into. What this session sealed but never committed is freed.

        Raises CapacityError if no slot became free within ``memory.wait``.
        """
        request = m.Reserve(session_id=self.session_id, segment_bytes=segment_bytes)
        return self._post("reserve", request, m.Grant)

    def seal(self, segment_id: str, slot_id: str, segment_bytes: int, root: str) -> m.Sealed:
        """Declare a written segment complete: it is handed out no more for writing.

        Raises:
            IntegrityError: The slot's trailer does not say what the arguments say.
            NotFoundError: The slot is not reserved for this segment any more.
        """
        request = m.Seal(
            session_id=self.session_id,
            segment_id=segment_id,
            slot_id=slot_id,
            segment_bytes=segment_bytes,
            root=root,
        )
        return self._post("seal", request, m.Sealed)

    def commit(self, manifest: bytes, plan: bytes | None = None) -> m.Committed:
        """Make a checkpoint exist in memory. See :class:`tieredckpt.transport.messages.Commit`.

        Raises:
            StaleAttemptError: A newer attempt was opened; nothing was committed. Field
                ``same_run``: by other ranks of this run, so it may be adopted.
            UsageError: Another live session of this run saves into the stream.
            NotFoundError, IntegrityError: A segment is not sealed here as the manifest says.
            AgentError: With ``outcome="unknown"`` the checkpoint may exist.
        """
        request = m.Commit(
            session_id=self.session_id, run=self.run_id, manifest=manifest, plan=plan
        )
        path = f"/v1/namespaces/{self.namespace}/commit"
        body = self._call("POST", path, _encode_msgpack(request), content_type=MSGPACK_TYPE)
        return _decode(body, m.Committed)

    def save_failed(self, segments: Sequence[str], skipped: int) -> None:
        """Say that these sealed segments belong to no checkpoint and never will.

        ``skipped``: saves that this process has skipped so far.
        """
        request = m.SaveFailed(
            session_id=self.session_id, segments=tuple(segments), skipped=skipped
        )
        self._call("POST", f"/v1/namespaces/{self.namespace}/failed", _encode_json(request))

    def contribute(self, request: m.Contribute) -> m.Gathered:
        """This rank's part of a save without collectives; see the message."""
        path = f"/v1/namespaces/{self.namespace}/contribute"
        body = self._call("POST", path, _encode_msgpack(request), content_type=MSGPACK_TYPE)
        return _decode(body, m.Gathered)

    def ask_gathering(
        self,
        key: m.GatheringKey,
        rank: int | None = None,
        give_up: m.ErrorReply | None = None,
    ) -> m.Gathered:
        """What has become of a save without collectives; ``give_up`` fails it if it is open."""
        request = m.AskGathering(session_id=self.session_id, key=key, rank=rank, give_up=give_up)
        return self._post("gathering", request, m.Gathered)

    def open_attempt(
        self,
        attempt_id: str,
        bases: tuple[m.BaseSpec, ...] = (),
        *,
        known: int = 0,
        seen: int | None = None,
        cause: Literal["load", "save"] = "load",
    ) -> bytes:
        """Open a new attempt; returns the encoded AttemptRecord.

        See :class:`tieredckpt.transport.messages.OpenAttempt`.

        Raises:
            StaleAttemptError: Another run has taken over from this one.
            NotFoundError: A checkpoint to go on from does not exist any more.
            UsageError: It is of another stream, or another live session saves into the stream.
        """
        request = m.OpenAttempt(
            session_id=self.session_id,
            attempt_id=attempt_id,
            run=self.run_id,
            known=known,
            seen=seen,
            cause=cause,
            bases=bases,
        )
        return self._call(
            "POST", f"/v1/namespaces/{self.namespace}/attempts", _encode_json(request)
        )

    # --- reading ----------------------------------------------------------------------------------

    def health(self) -> m.Health:
        """Who answers. Works with every API version."""
        return _decode(self._call("GET", "/v1/health"), m.Health)

    def status(self) -> m.Status:
        """What the agent holds and does."""
        return _decode(self._call("GET", "/v1/status"), m.Status)

    def holdings(self, namespace: str | None = None) -> bytes:
        """A namespace's holdings, as msgpack of :class:`tieredckpt.tiers.catalog.Holdings`.

        Raises NotFoundError if the agent does not know the namespace.
        """
        return self._call("GET", f"/v1/namespaces/{namespace or self.namespace}/holdings")

    def plan(self, plan_id: str, *, tier: str = "memory", namespace: str | None = None) -> bytes:
        """The encoded plan as ``tier`` holds it, unverified. Raises NotFoundError."""
        name = namespace or self.namespace
        return self._call("GET", f"/v1/namespaces/{name}/plans/{plan_id}?tier={tier}")

    def open_segment(
        self, tier: str, segment_id: str, *, namespace: str | None = None
    ) -> tuple[m.SegmentOpened, int]:
        """A descriptor to read one copy of a segment; the caller closes it, which ends the lease.

        Raises NotFoundError or TierUnavailableError.
        """
        request = m.OpenSegment(tier=tier, segment_id=segment_id)
        path = f"/v1/namespaces/{namespace or self.namespace}/open"
        for attempt in range(2):
            opened = _decode(self._call("POST", path, _encode_json(request)), m.SegmentOpened)
            try:
                return opened, self.redeem(opened.ticket)
            except (AgentError, RemoteProtocolError):
                if attempt:  # once: the agent died in between
                    raise
        raise AssertionError  # the loop returns or raises

    def report_damage(
        self,
        tier: str,
        segment_id: str,
        blocks: tuple[int, ...],
        reason: str,
        *,
        namespace: str | None = None,
    ) -> None:
        """Tell the agent of bad blocks (none named: the copy as a whole is bad)."""
        request = m.Damage(tier=tier, segment_id=segment_id, blocks=blocks, reason=reason)
        self._call(
            "POST", f"/v1/namespaces/{namespace or self.namespace}/damage", _encode_json(request)
        )

    def progress(self, save_id: str, *, namespace: str | None = None) -> m.Progress:
        """How far a checkpoint has come in each tier."""
        path = f"/v1/namespaces/{namespace or self.namespace}/progress/{save_id}"
        return _decode(self._call("GET", path), m.Progress)

    # --- operating --------------------------------------------------------------------------------

    def purge(self, namespace: str) -> None:
        """Delete a namespace's checkpoints from memory (never from lower tiers).

        Raises NamespaceInUseError while sessions of it are live.
        """
        self._call("POST", f"/v1/namespaces/{namespace}/purge", b"{}")

    def shutdown(self) -> None:
        """Ask the agent to stop cleanly; committed checkpoints stay in memory."""
        until_s = time.monotonic() + self._deadline_s
        self._line.exchange("POST", "/v1/shutdown", b"{}", until_s, revive=False)

    def redeem(self, ticket: str) -> int:
        """Trade a ticket for its descriptor, which the caller owns."""
        self._line.check_fork()
        return redeem(self.runtime_dir / FDS_SOCKET, ticket, timeout_s=self._deadline_s)

    # --- exchange ---------------------------------------------------------------------------------

    def _post(self, verb: str, request: m.Message, kind: type[_Reply]) -> _Reply:
        path = f"/v1/namespaces/{self.namespace}/{verb}"
        return _decode(self._call("POST", path, _encode_json(request)), kind)

    def _call(
        self, method: str, path: str, body: bytes = b"", *, content_type: str = JSON_TYPE
    ) -> bytes:
        until_s = time.monotonic() + self._deadline_s
        try:
            return self._line.exchange(method, path, body, until_s, content_type=content_type)
        except NotFoundError as error:
            if error.fields.get("what") != "session":
                raise
            if self._attached is not None:
                raise AgentError(
                    "the session that this process works in has ended: its trainer is gone, or the "
                    "agent was restarted; the trainer's next save opens it again",
                    outcome="not_applied",
                ) from error
            if self._session is None:
                raise
        # An agent that started meanwhile does not know us yet.
        with self._session_lock:
            self._open(self._opened(), until_s)
        return self._line.exchange(method, path, body, until_s, content_type=content_type)


def _decode(body: bytes, kind: type[_Reply]) -> _Reply:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(
            f"the agent's reply is no {kind.__name__} ({error}): it is of another version; "
            "stop it with `tieredckpt agent stop`, then retry"
        ) from error
