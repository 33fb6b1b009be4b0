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
from collections.abc import Callable
from pathlib import Path

from tieredckpt.errors import AgentError, NotFoundError, RemoteProtocolError, UsageError
from tieredckpt.transport import messages as m
from tieredckpt.transport.client_peers import PeerRequests
from tieredckpt.transport.client_requests import decode_reply, encode_json
from tieredckpt.transport.client_saves import SaveRequests
from tieredckpt.transport.client_tiers import TierRequests
from tieredckpt.transport.fds import redeem
from tieredckpt.transport.line import ATTEMPTS_MAX, Line
from tieredckpt.transport.replies import JSON_TYPE, package_version

AGENT_SOCKET = "agent.sock"
LEAST_WAIT_S = 1.0
"""What a call has to answer even if whoever calls has no time left."""
FDS_SOCKET = "fds.sock"

_clients: weakref.WeakSet[AgentClient] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child (a data loader's worker) must not prolong the session of its parent."""
    for client in list(_clients):
        client.abandon()


os.register_at_fork(after_in_child=_close_in_child)


class AgentClient(SaveRequests, PeerRequests, TierRequests):
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
            NamespaceInUseError: The run that saved last is live here, with another spec.
            UsageError: This client has a session already.
        """
        with self._session_lock:
            if self._session is not None:
                raise UsageError("this client has an open session already")
            run = run_id or secrets.token_hex(16)
            request = m.OpenSession(
                api=m.API_VERSION,
                version=package_version(),
                session_id=session_id or secrets.token_hex(16),
                namespace=namespace,
                run=run,
                spec=spec,
                local_rank=local_rank,
                local_world_size=local_world_size,
            )
            opened = self._open(request, time.monotonic() + self._deadline_s)
            self._session = request
            self.run_id = run
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
            body = self._line.exchange("POST", "/v1/sessions", encode_json(request), until_s)
            opened = decode_reply(body, m.SessionOpened)
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

    # --- reading ----------------------------------------------------------------------------------

    def health(self) -> m.Health:
        """Who answers. Works with every API version."""
        return decode_reply(self._call("GET", "/v1/health"), m.Health)

    def holdings(
        self, namespace: str | None = None, *, within_s: float | None = None, tiers: bool = True
    ) -> bytes:
        """A namespace's holdings, as msgpack of :class:`tieredckpt.tiers.facts.Holdings`.

        A tier that has not said what it holds ``within_s`` (None: as long as the agent waits) is in
        it as unavailable; without ``tiers`` only memory is asked. The agent itself has a moment
        longer.

        Raises NotFoundError if the agent does not know the namespace.
        """
        path = self._path("holdings", namespace)
        if not tiers:
            path += "?within_s=0"
        elif within_s is not None:
            path += f"?within_s={within_s:.3f}"
        return self._call(
            "GET", path, within_s=None if within_s is None else within_s + LEAST_WAIT_S
        )

    def plan(self, plan_id: str, *, tier: str = "memory", namespace: str | None = None) -> bytes:
        """The encoded plan as ``tier`` holds it, unverified. Raises NotFoundError."""
        return self._call("GET", self._path(f"plans/{plan_id}?tier={tier}", namespace))

    def open_segment(
        self, tier: str, segment_id: str, *, namespace: str | None = None
    ) -> tuple[m.SegmentOpened, int]:
        """A descriptor to read one copy of a segment; the caller closes it, which ends the lease.

        Raises NotFoundError or TierUnavailableError.
        """
        request = m.OpenSegment(tier=tier, segment_id=segment_id)
        for attempt in range(2):
            opened = self._post("open", request, m.SegmentOpened, namespace)
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
        host: str = "",
    ) -> None:
        """Tell the agent of bad blocks (none: all) in the copy of ``host`` ("": its own)."""
        named = blocks if len(blocks) <= m.DAMAGED_BLOCKS_MAX else ()
        request = m.Damage(tier=tier, segment_id=segment_id, blocks=named, reason=reason, host=host)
        self._tell("damage", request, namespace)

    # --- operating --------------------------------------------------------------------------------

    def purge(self, namespace: str) -> None:
        """Delete a namespace's checkpoints from memory (never from lower tiers).

        Raises NamespaceInUseError while sessions of it are live.
        """
        self._call("POST", self._path("purge", namespace), b"{}")

    def shutdown(self) -> None:
        """Ask the agent to stop cleanly; committed checkpoints stay in memory."""
        until_s = time.monotonic() + self._deadline_s
        self._line.exchange("POST", "/v1/shutdown", b"{}", until_s, revive=False)

    def redeem(self, ticket: str) -> int:
        """Trade a ticket for its descriptor, which the caller owns."""
        self._line.check_fork()
        return redeem(self.runtime_dir / FDS_SOCKET, ticket, timeout_s=self._deadline_s)

    # --- exchange ---------------------------------------------------------------------------------

    def _call(
        self, method: str, path: str, body: bytes = b"", *,
        content_type: str = JSON_TYPE, more_s: float = 0.0, within_s: float | None = None,
    ) -> bytes:  # fmt: skip
        limit_s = self._deadline_s + more_s
        if within_s is not None:  # who asks has no more time
            limit_s = min(limit_s, max(within_s, LEAST_WAIT_S))
        until_s = time.monotonic() + limit_s
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
        # An agent that started meanwhile does not know us yet; it may die in this very request.
        for _ in range(ATTEMPTS_MAX):
            with self._session_lock:
                self._open(self._opened(), until_s)
            try:
                return self._line.exchange(method, path, body, until_s, content_type=content_type)
            except NotFoundError as error:
                if error.fields.get("what") != "session":
                    raise
        raise AgentError(
            f"{ATTEMPTS_MAX} agents were started, and each one ended before it had answered: look "
            "into the agent's log",
            outcome="unknown",
        )
