"""HTTP over a unix socket, blocking: a few kept connections, and what to do when nobody answers.

A request whose connection broke is sent again (all requests are idempotent): once on a fresh
connection, since the agent may only have closed an idle one, and after ``revive`` if nobody
listens. A request that timed out is not, as a stopped agent may still carry it out.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tieredckpt.errors import AgentError, RemoteProtocolError, UsageError
from tieredckpt.transport import messages as m
from tieredckpt.transport.fds import check_socket_path, connect
from tieredckpt.transport.replies import API_HEADER, JSON_TYPE, decode_error

HEAD_BYTES_MAX = 1 << 16
REPLY_BYTES_MAX = 512 << 20
"""Largest accepted reply: holdings or a plan of a few million pieces."""
IDLE_CONNECTIONS_MAX = 8
ATTEMPTS_MAX = 4
"""How often one call may find the agent gone before it gives up."""


class _Malformed(Exception):
    """What came back is no reply of an agent, or it broke off."""


class _Connection:
    """One kept connection. HTTP/1.1 as our own server speaks it, no more.

    A request leaves in one system call and a reply is parsed without the standard library's mail
    parser: a save waits for two of them, and http.client would double what they cost.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._received = bytearray()
        self._sock = connect(path, timeout_s)

    def settimeout(self, timeout_s: float) -> None:
        """Longest wait of each following system call."""
        self._sock.settimeout(timeout_s)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._sock.close()

    def round_trip(
        self, method: str, path: str, body: bytes, content_type: str
    ) -> tuple[int, bytes]:
        """Status and body of the reply to one request."""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{API_HEADER}: {m.API_VERSION}\r\n"
            f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._sock.sendall(head.encode("ascii") + body)
        status, size = self._head()
        data = self._received[:size]
        if len(data) < size:
            rest = bytearray(size - len(data))
            view = memoryview(rest)
            while view:
                count = self._sock.recv_into(view)
                if not count:
                    raise _Malformed("the reply broke off")
                view = view[count:]
            data += rest
        elif len(self._received) > size:
            raise _Malformed("more than the reply arrived")
        self._received.clear()
        return status, bytes(data)

    def _head(self) -> tuple[int, int]:
        """Status and size of the body; what came of the body stays in the buffer."""
        while (end := self._received.find(b"\r\n\r\n")) < 0:
            if len(self._received) > HEAD_BYTES_MAX:
                raise _Malformed("an endless header")
            piece = self._sock.recv(HEAD_BYTES_MAX)
            if not piece:
                raise _Malformed("the connection was closed")
            self._received += piece
        head = bytes(self._received[:end])
        del self._received[: end + 4]
        status, size = _STATUS.match(head), _LENGTH.search(head)
        if status is None or size is None:
            raise _Malformed(f"no status or length in {head[:80]!r}")
        if int(size[1]) > REPLY_BYTES_MAX:
            raise RemoteProtocolError(
                f"the agent sends a reply of {int(size[1])} bytes; the limit is {REPLY_BYTES_MAX}"
            )
        return int(status[1]), int(size[1])


_GONE = (ConnectionError, FileNotFoundError, _Malformed)
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_LENGTH = re.compile(rb"\r\nContent-Length: (\d{1,12})(?:\r\n|$)", re.IGNORECASE)


def _close(connection: _Connection | None) -> None:
    if connection is not None:
        connection.close()


class Line:
    """A process's connections to one agent. Thread-safe, invalid after fork.

    Args:
        runtime_dir: The agent's folder.
        path: Its socket.
        deadline_s: Named in messages; each exchange brings its own point in time.
        revive: Called when nobody listens; None: fail at once.
    """

    def __init__(
        self,
        runtime_dir: Path,
        path: Path,
        *,
        deadline_s: float,
        revive: Callable[[], object] | None,
    ) -> None:
        check_socket_path(path)
        self._runtime_dir = runtime_dir
        self._path = path
        self._deadline_s = deadline_s
        self._revive = revive
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def exchange(
        self,
        method: str,
        path: str,
        body: bytes,
        until_s: float,
        *,
        content_type: str = JSON_TYPE,
        revive: bool = True,
    ) -> bytes:
        """One request and its reply, sent again while the agent is gone and can be revived.

        Args:
            method: HTTP method.
            path: Path and query.
            body: Request body.
            until_s: Deadline on the monotonic clock.
            content_type: Of the body.
            revive: False: do not start an agent for this one.

        Raises:
            AgentError: Nobody answers; ``outcome`` is "unknown".
            TieredCkptError: What the agent answered.
        """
        self.check_fork()
        if not path.isprintable() or not path.isascii() or " " in path:
            raise UsageError(f"{path[:200]!r} names something that cannot exist")
        began_s = time.monotonic()
        for attempt in range(ATTEMPTS_MAX):
            connection: _Connection | None = None
            fresh = True
            try:
                connection, fresh = self._take(until_s)
                status, data = connection.round_trip(method, path, body, content_type)
            except TimeoutError as error:
                _close(connection)
                raise self._silent(until_s - began_s) from error
            except _GONE as error:
                _close(connection)
                if not fresh:
                    self.close()  # an old connection says nothing about the agent of now
                    continue
                if attempt == ATTEMPTS_MAX - 1 or self._revive is None or not revive:
                    raise self._gone(error) from error
                self._revive()
                continue
            except BaseException:
                _close(connection)
                raise
            self._give(connection)
            if status >= 400:
                raise decode_error(status, data)
            return data
        raise self._gone(None)

    def _take(self, until_s: float) -> tuple[_Connection, bool]:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise self._silent(self._deadline_s)
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            return _Connection(self._path, left_s), True
        connection.settimeout(left_s)
        return connection, False

    def _give(self, connection: _Connection) -> None:
        with self._lock:
            if len(self._idle) < IDLE_CONNECTIONS_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close the idle connections; the next exchange makes new ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def abandon(self) -> None:
        """In a forked child: close the inherited sockets. Takes no lock: its holder is not here."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _gone(self, error: Exception | None) -> AgentError:
        return AgentError(
            f"no agent answers on {self._path} ({error}): start one with `tieredckpt agent run "
            f"--runtime-dir {self._runtime_dir}`, or let agent.start be auto; "
            f"its log is {self._runtime_dir / 'agent.log'}",
            outcome="unknown",
        )

    def _silent(self, waited_s: float) -> AgentError:
        return AgentError(
            f"the agent on {self._path} did not answer within {waited_s:.3g} s: it is "
            f"stopped or overloaded; its log is {self._runtime_dir / 'agent.log'}",
            outcome="unknown",
        )

    def check_fork(self) -> None:
        """Raise UsageError in a process that was forked off the one that made this."""
        if os.getpid() != self._pid:
            raise UsageError("an agent client cannot be used after fork: open a new one")
