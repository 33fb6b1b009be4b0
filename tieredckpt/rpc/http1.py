"""Blocking HTTP/1.1 connections to agents; only what our own servers speak.

:class:`HttpConnection` is one kept connection on a unix socket, :class:`PeerConnection` one on TCP
to another host's agent. :class:`Dial` tries all addresses of a host within one deadline, so that an
unreachable host with several rails does not cost a deadline for each.

Everything that another host sends is hostile: heads and bodies are bounded before they are read,
and each wait is for at least so many bytes within so many seconds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tieredckpt.errors import AgentError
from tieredckpt.format.envelope import MALFORMED
from tieredckpt.rpc.auth import (
    BODY_HEADER,
    HOST_HEADER,
    NONCE_CHARS,
    PROOF_HEADER,
    body_digest,
    is_meant,
    refused,
    same,
    show_host,
    sign,
    sign_reply,
)
from tieredckpt.rpc.messages.peer import HELLO, PEER_API_VERSION, PeerHello

HEAD_BYTES_MAX = 8192
HEAD_PIECE_BYTES = 2048
"""Little of a body comes with its head, so that most of it goes straight where it is wanted."""
STALL_BYTES = 256 << 10
"""This much, or what is left if that is less, must come or go within the stall time."""

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_LENGTH = re.compile(rb"\r\nContent-Length: (\d{1,18})(?=\r\n|$)", re.IGNORECASE)


class Malformed(Exception):
    """What came back is no reply of an agent, or it broke off."""


class Broken(Malformed):
    """The connection ended before the reply began: the server may only have closed an idle one."""


class HttpConnection:
    """One kept connection. HTTP/1.1 as our own servers speak it, no more. One thread at a time.

    A request leaves in one system call and a reply is parsed without the standard library's mail
    parser: a save waits for two of them, and http.client would double what they cost.

    Args:
        sock: Connected, blocking; closed with this.
        stall_s: Longest wait for STALL_BYTES.
    """

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        self._sock = sock
        self._received = bytearray()
        self.settimeout(stall_s)

    def settimeout(self, stall_s: float) -> None:
        """Longest wait for STALL_BYTES from now on."""
        self._stall_s = stall_s
        self._sock.settimeout(stall_s)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._sock.close()

    def send(self, head: bytes, body: bytes, *, at_once: bool = False) -> None:
        """Send a request; ``at_once``: all of it within the stall time. Raises OSError."""
        if len(body) <= STALL_BYTES:
            self._sock.sendall(head + body)
            return
        self._sock.sendall(head)
        view = memoryview(body)
        piece = len(body) if at_once else STALL_BYTES
        for offset in range(0, len(body), piece):
            self._sock.sendall(view[offset : offset + piece])

    def read_head(self) -> tuple[int, int, bytes]:
        """Status, size of the body, and the whole head; what came of the body stays in the buffer.

        Raises Malformed, TimeoutError or OSError.
        """
        until_s = time.monotonic() + self._stall_s
        while (end := self._received.find(b"\r\n\r\n")) < 0:
            if len(self._received) > HEAD_BYTES_MAX:
                raise Malformed("an endless header")
            if time.monotonic() > until_s:
                raise TimeoutError("timed out")
            try:
                piece = self._sock.recv(HEAD_PIECE_BYTES)
            except ConnectionError as error:
                raise Broken(str(error)) from error
            if not piece:
                raise (Malformed if self._received else Broken)("the connection was closed")
            self._received += piece
        head = bytes(self._received[:end])
        del self._received[: end + 4]
        status, length = _STATUS.match(head), _LENGTH.search(head)
        if status is None or length is None:
            raise Malformed(f"no status or length in {head[:80]!r}")
        return int(status[1]), int(length[1]), head

    def read_body(self, size: int) -> bytes:
        """The whole body of a reply. Raises as :meth:`fill`."""
        data = bytearray(size)
        self.fill(memoryview(data))
        self.check_end()
        return bytes(data)

    def check_end(self) -> None:
        """Raise Malformed if more came than the reply."""
        if self._received:
            raise Malformed("more than the reply arrived")

    def fill(self, into: memoryview) -> None:
        """Fill ``into`` with what comes next. Raises Malformed, TimeoutError or OSError."""
        have = min(len(self._received), len(into))
        if have:
            into[:have] = self._received[:have]
            del self._received[:have]
        position, size = have, len(into)
        while position < size:
            goal = min(position + STALL_BYTES, size)
            until_s = time.monotonic() + self._stall_s
            while position < goal:
                # Into all that is left, not only up to the goal: that is only for the clock.
                count = self._sock.recv_into(into[position:])
                if not count:
                    raise Malformed(
                        f"the reply broke off: {size - position} bytes of it are missing"
                    )
                position += count
                if position < goal and time.monotonic() > until_s:
                    raise TimeoutError("timed out")


HEAD_START_S = 0.25
"""An address is tried alone for so long before the next one is, too."""
CHECK_S = 0.05
"""How often a dial looks whether it is still wanted."""

_Where = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]
"""Of ``getaddrinfo``."""
_BEGUN = (errno.EINPROGRESS, errno.EWOULDBLOCK)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``ip:port``, ``[ip6]:port`` or ``name:port``. Raises AgentError."""
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise AgentError(f"{address[:200]!r} is no address: want host:port", outcome="not_applied")
    return host, int(port)


class Dial:
    """One try to reach a host. Used once, by one thread.

    Args:
        addresses: Each ``host:port``, the preferred one first.
        within_s: For all of them together, but for resolving names.
        wanted: Looked at while it waits; False ends it.
    """

    def __init__(
        self, addresses: Sequence[str], within_s: float, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        self._todo: list[tuple[str, _Where | None]] = [(each, None) for each in addresses]
        self._within_s = within_s
        self._wanted = wanted
        self._tried: dict[str, None] = {}
        self._problem: OSError = OSError("it has no address")

    @property
    def failed(self) -> list[str]:
        """Addresses that did not answer, or not before one that was tried after them."""
        return list(self._tried)

    def run(self) -> tuple[str, socket.socket]:
        """The address that answered, and a blocking socket.

        Raises:
            OSError: None did (TimeoutError: in time).
            AgentError: One is no address.
        """
        with selectors.DefaultSelector() as selector:
            try:
                address, sock = self._first(selector)
            finally:
                for key in list(selector.get_map().values()):
                    assert isinstance(key.fileobj, socket.socket)
                    key.fileobj.close()
        del self._tried[address]
        sock.setblocking(True)
        return address, sock

    def _first(self, selector: selectors.BaseSelector) -> tuple[str, socket.socket]:
        until_s = time.monotonic() + self._within_s
        pause_s = min(HEAD_START_S, self._within_s / (2 * max(len(self._todo), 1)))
        next_s = 0.0
        while self._todo or selector.get_map():
            now_s = time.monotonic()
            if not self._wanted():
                raise ConnectionAbortedError(errno.ECONNABORTED, "it is not wanted any more")
            due = self._todo and (now_s >= next_s or not selector.get_map())
            left_s = max(0.0, min(until_s, next_s if self._todo else until_s) - now_s)
            # First of all: this thread may have slept longer than the head start or the deadline,
            # and who has answered long ago would be one that did not, and be shunned.
            answered = selector.select(0 if due else min(left_s, CHECK_S))
            if now_s >= until_s and not answered:
                raise TimeoutError("timed out")
            if due and not answered:
                next_s = now_s + pause_s
                self._begin(*self._todo.pop(0), selector)
            for key, _ in answered:
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                selector.unregister(sock)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not code:
                    return key.data, sock
                sock.close()
                self._problem = OSError(code, os.strerror(code))
                next_s = 0.0
        raise self._problem

    def _begin(self, address: str, where: _Where | None, selector: selectors.BaseSelector) -> None:
        self._tried[address] = None
        try:
            if where is None:
                host, port = split_address(address)
                where, *more = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                # A name may mean several, of which only one is listened at.
                self._todo[:0] = [(address, each) for each in more]
            family, kind, proto, _, at = where
            sock = socket.socket(family, kind, proto)
        except (OSError, UnicodeError) as error:
            self._problem = error if isinstance(error, OSError) else OSError(str(error))
            return
        sock.setblocking(False)
        code = sock.connect_ex(at)
        if code and code not in _BEGUN:
            sock.close()
            self._problem = OSError(code, os.strerror(code))
            return
        # One that is connected at once is writable at once.
        selector.register(sock, selectors.EVENT_WRITE, address)


HELLO_BYTES_MAX = 1024
ERROR_BYTES_MAX = 1 << 20

_SPAN = re.compile(
    rb"\r\nContent-Range: (bytes \d{1,18}-\d{1,18}/\d{1,18})(?=\r\n|$)", re.IGNORECASE
)
_PROOF = re.compile(rb"\r\nX-Tieredckpt-Proof: ([0-9a-f]{64})(?=\r\n|$)", re.IGNORECASE)
_HOST = re.compile(rb"\r\nX-Tieredckpt-Host: ([!-~]{1,4000} [0-9a-f]{32})(?=\r\n|$)", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nConnection: close(?=\r\n|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a reply; its proof was checked for bulk data, and is with the body else."""

    status: int
    length: int
    span: str
    name: str
    """Who answers."""
    proof: str
    closing: bool


class PeerConnection(HttpConnection):
    """A connection that can ask once it has said hello. One thread at a time.

    Args:
        sock: Connected, blocking; closed with this.
        address: ``host:port`` that it is connected to.
        token: "" with TLS only.
        connect_s: Longest time to shake hands.
        stall_s: Longest wait for :data:`.line.STALL_BYTES`.
    """

    def __init__(
        self, sock: socket.socket, address: str, token: str, *, connect_s: float, stall_s: float
    ) -> None:
        super().__init__(sock, stall_s)
        self.address = address
        self._token = token
        self._connect_s = connect_s
        self._counter = 0
        self._nonce = ""
        self.clean = True
        """Whether the next request may follow: the last reply was read to its end."""
        self._host = split_address(address)[0]

    def greet(self, context: ssl.SSLContext | None) -> None:
        """Begin to encrypt, if there is a client's context, and say hello.

        Raises:
            OSError: Nobody answers there (ssl.SSLError: the certificates do not fit).
            Malformed: Somebody who is no agent does.
            AgentError: An agent of another version does.
        """
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.settimeout(self._connect_s)
        if context is not None:
            # First the socket, then the handshake: else it could not be cut meanwhile.
            self._sock = encrypted = context.wrap_socket(
                self._sock, server_hostname=self._host, do_handshake_on_connect=False
            )
            encrypted.do_handshake()
        self._sock.settimeout(self._stall_s)
        self._nonce = self._hello()

    def _hello(self) -> str:
        self.send(f"GET {HELLO} HTTP/1.1\r\nHost: {_named(self._host)}\r\n\r\n".encode(), b"")
        head = self.head()
        if head.status != 200:
            raise Malformed(f"the greeting has status {head.status}")
        try:
            hello = msgspec.msgpack.decode(self.body(head, HELLO_BYTES_MAX), type=PeerHello)
        except MALFORMED as error:
            raise Malformed(f"no greeting of an agent: {error}") from error
        if hello.api != PEER_API_VERSION:
            raise AgentError(
                f"the other host's agent (release {hello.version[:40]!r}) speaks peer API "
                f"{hello.api}, this one {PEER_API_VERSION}: use one release on all hosts",
                outcome="not_applied",
            )
        if len(hello.nonce) != NONCE_CHARS or not hello.nonce.isalnum():
            raise Malformed("the greeting has no nonce")
        return hello.nonce

    def cut(self) -> None:
        """End the connection while another thread reads from it, which then fails."""
        self.clean = False
        with contextlib.suppress(OSError):  # it has ended already
            # Not an SSLSocket's own method: that takes the encryption off first, and what is still
            # in the socket's buffer would be read as it is.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    @property
    def usable(self) -> bool:
        """Whether the next request may go out: the last reply has ended, and nothing came since."""
        if not self.clean or self._received:
            return False
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | select.POLLHUP | select.POLLERR)
        with contextlib.suppress(OSError, ValueError):
            return not poll.poll(0)
        return False

    def ask(
        self, meant: str, method: str, target: str, body: bytes = b"", range_header: str = ""
    ) -> Head:
        """Send one request and read the head of the reply, which is of the host that is meant.

        Raises:
            Malformed: Another host answers (as it says; whether that is so the proof shows).
        """
        self.clean = False
        lines = [f"{method} {target} HTTP/1.1", f"Host: {_named(self._host)}"]
        self._counter += 1
        if self._token:
            text = (meant, method, target, range_header, body)
            mac = sign(self._token, self._nonce, self._counter, *text)
            lines.append(f"{PROOF_HEADER}: {self._counter} {mac}")
        if meant:
            lines.append(f"{HOST_HEADER}: {meant}")
        lines.append(f"{BODY_HEADER}: {body_digest(body)}")
        if range_header:
            lines.append(f"Range: {range_header}")
        if method == "POST":
            lines.append(f"Content-Length: {len(body)}")
        self.send("\r\n".join([*lines, "", ""]).encode("ascii"), body)
        head = self.head()
        # A refusal comes from somebody who has proven nothing, not even his name.
        if head.status != 403 and not (head.name and is_meant(head.name, meant)):
            asked = f"{show_host(meant)} was asked at {self.address}, and " if meant else ""
            raise Malformed(f"{asked}{show_host(head.name)} answered")
        return head

    def body(self, head: Head, limit: int) -> bytes:
        """The whole body of a reply of at most ``limit`` bytes; then the next request may follow.

        Raises Malformed if it is longer, breaks off or stalls (TimeoutError).
        """
        if head.length > limit:
            raise Malformed(f"a reply of {head.length} bytes; the limit is {limit}")
        data = self.read_body(head.length)
        self.clean = not head.closing
        return data

    def proven_body(self, head: Head, limit: int) -> bytes:
        """The body of a reply, which the other side has proven to be its own.

        Raises:
            AgentError: It refuses the secret, or does not know it itself.
        """
        if head.status == 403:
            # Whoever says so has proven nothing: the words are ours.
            self.body(head, ERROR_BYTES_MAX)
            raise refused()
        data = self.body(head, limit if head.status < 400 else ERROR_BYTES_MAX)
        self.check(head, body_digest(data) if self._token else "")
        return data

    def check(self, head: Head, digest: str) -> None:
        """Raise AgentError if the reply was not made by somebody who knows the token."""
        if not self._token:
            return
        text = (head.name, head.status, head.span, digest)
        expected = sign_reply(self._token, self._nonce, self._counter, *text)
        if not same(expected, head.proof):
            raise AgentError(
                "who answers does not know this namespace's token: it is another job's agent or "
                "none at all",
                outcome="unknown",
            )

    def end(self, head: Head) -> None:
        """The reply was read to its end."""
        self.check_end()
        self.clean = not head.closing

    def head(self) -> Head:
        """Read the head of a reply; what came of its body stays in the buffer."""
        status, length, head = self.read_head()
        span, name, proof = _SPAN.search(head), _HOST.search(head), _PROOF.search(head)
        return Head(
            status=status,
            length=length,
            span=span[1].decode("ascii") if span is not None else "",
            name=name[1].decode("ascii") if name is not None else "",
            proof=proof[1].decode("ascii") if proof is not None else "",
            closing=_CLOSE.search(head) is not None,
        )


def _named(host: str) -> str:
    return f"[{host}]" if ":" in host else host
