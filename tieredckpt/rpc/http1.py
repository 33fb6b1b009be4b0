"""Blocking HTTP/1.1 connections to agents: the subset that our own servers use.

:class:`HttpConnection` is a kept connection on a unix socket, :class:`PeerConnection` one on TCP
to another host's agent. :class:`Dial` tries all addresses of a host within one deadline, so that an
unreachable host with several rails does not cost a deadline for each.

Everything that another host sends is hostile: heads and bodies are bounded before they are read,
and each wait is for a least number of bytes within a time limit.
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
"""Little of a body is read with its head: most of it is received straight into its destination."""
STALL_BYTES = 256 << 10
"""This much, or the rest if that is less, must be sent or received within the stall time."""

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_LENGTH = re.compile(rb"\r\nContent-Length: (\d{1,18})(?=\r\n|$)", re.IGNORECASE)


class Malformed(Exception):
    """The received bytes are no reply of an agent, or the reply broke off."""


class Broken(Malformed):
    """The connection ended before the reply began: the server may only have closed an idle one."""


class HttpConnection:
    """One kept connection. One thread at a time.

    A request is sent in one system call, and a reply is parsed without the standard library's mail
    parser: a save waits for two requests, and http.client would double their cost.

    Args:
        sock: Connected, blocking; owned by this object.
        stall_s: Longest wait for STALL_BYTES.
    """

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        self._sock = sock
        self._received = bytearray()
        self.settimeout(stall_s)

    def settimeout(self, stall_s: float) -> None:
        """Set the longest wait for STALL_BYTES."""
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
        """Status, size of the body, and the head. Received bytes of the body stay in the buffer.

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
        """Raise Malformed if more bytes were received than the reply's."""
        if self._received:
            raise Malformed("more than the reply arrived")

    def fill(self, into: memoryview) -> None:
        """Fill ``into`` with the next bytes. Raises Malformed, TimeoutError or OSError."""
        have = min(len(self._received), len(into))
        if have:
            into[:have] = self._received[:have]
            del self._received[:have]
        position, size = have, len(into)
        while position < size:
            goal = min(position + STALL_BYTES, size)
            until_s = time.monotonic() + self._stall_s
            while position < goal:
                # Into all of the rest: the goal is for the time limit alone.
                count = self._sock.recv_into(into[position:])
                if not count:
                    raise Malformed(
                        f"the reply broke off: {size - position} bytes of it are missing"
                    )
                position += count
                if position < goal and time.monotonic() > until_s:
                    raise TimeoutError("timed out")


HEAD_START_S = 0.25
"""An address is tried alone for so long before the next one is tried, too."""
CHECK_S = 0.05
"""How often a dial checks whether it is still wanted."""

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
    """One attempt to connect to a host. Used once, by one thread.

    Args:
        addresses: Each ``host:port``, the preferred one first.
        within_s: For all of them together, without resolving names.
        wanted: Called while the dial waits; False ends it.
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
        """Addresses that did not answer, or later than one that was tried after them."""
        return list(self._tried)

    def run(self) -> tuple[str, socket.socket]:
        """The address that answered, and a blocking socket.

        Raises:
            OSError: No address answered (TimeoutError: in time).
            AgentError: One is malformed.
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
            begin = self._todo and (now_s >= next_s or not selector.get_map())
            left_s = max(0.0, min(until_s, next_s if self._todo else until_s) - now_s)
            # Before the clock is compared: this thread may have slept longer than the head start or
            # the deadline, and an address that has answered in time must not be shunned.
            answered = selector.select(0 if begin else min(left_s, CHECK_S))
            if now_s >= until_s and not answered:
                raise TimeoutError("timed out")
            if begin and not answered:
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
                # A name may have several addresses, of which only one is listened at.
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
        # A socket that is connected at once is writable at once.
        selector.register(sock, selectors.EVENT_WRITE, address)


HELLO_BYTES_MAX = 1024
ERROR_BYTES_MAX = 1 << 20

_SPAN = re.compile(
    rb"\r\nContent-Range: (bytes \d{1,18}-\d{1,18}/\d{1,18})(?=\r\n|$)", re.IGNORECASE
)
_PROOF = re.compile(rb"\r\nX-Tieredckpt-Proof: ([0-9a-f]{64})(?=\r\n|$)", re.IGNORECASE)
_HOST = re.compile(rb"\r\nX-Tieredckpt-Host: ([!-~]{1,4000} [0-9a-f]{32})(?=\r\n|$)", re.IGNORECASE)
_DATE = re.compile(rb"\r\nDate: ([ ,:0-9A-Za-z]{29})(?=\r\n|$)", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nConnection: close(?=\r\n|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a reply. For bulk data its proof is checked alone, else with the body."""

    status: int
    length: int
    span: str
    name: str
    """The host that answers."""
    proof: str
    date: str
    """The host's wall clock, which nothing proves."""
    closing: bool


class PeerConnection(HttpConnection):
    """A connection to another host's agent, for requests after :meth:`greet`. One thread at a time.

    Args:
        sock: Connected, blocking; owned by this object.
        address: ``host:port`` that it is connected to.
        token: "" with TLS only.
        connect_s: Longest time for the handshake.
        stall_s: Longest wait for :data:`STALL_BYTES`.
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
        """Whether the last reply was read to its end, so that the next request may follow."""
        self._host = split_address(address)[0]

    def greet(self, context: ssl.SSLContext | None) -> None:
        """Begin to encrypt, if there is a client's context, and read the agent's greeting.

        Raises:
            OSError: There is no answer (ssl.SSLError: the certificates do not match).
            Malformed: The answer is not of an agent.
            AgentError: The answer is of an agent of another version.
        """
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.settimeout(self._connect_s)
        if context is not None:
            # The socket is replaced before the handshake: otherwise it could not be cut meanwhile.
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
        """End the connection from any thread: a read that waits fails."""
        self.clean = False
        with contextlib.suppress(OSError):  # it has ended already
            # Not an SSLSocket's own method: it removes the encryption first, and the bytes in the
            # socket's buffer would be read encrypted.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    @property
    def usable(self) -> bool:
        """Whether the next request may be sent: the last reply has ended without further bytes."""
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
        """Send one request and read the head of the reply.

        Raises:
            Malformed: Another host than ``meant`` answers, by the name in its head; the proof is
                checked later.
        """
        self.clean = False
        headers = [f"Host: {_named(self._host)}"]
        self._counter += 1
        if self._token:
            signed = (meant, method, target, range_header, body)
            mac = sign(self._token, self._nonce, self._counter, *signed)
            headers.append(f"{PROOF_HEADER}: {self._counter} {mac}")
        if meant:
            headers.append(f"{HOST_HEADER}: {meant}")
        headers.append(f"{BODY_HEADER}: {body_digest(body)}")
        if range_header:
            headers.append(f"Range: {range_header}")
        if method == "POST":
            headers.append(f"Content-Length: {len(body)}")
        text = "\r\n".join([f"{method} {target} HTTP/1.1", *headers, "", ""])
        self.send(text.encode("ascii"), body)
        head = self.head()
        # The sender of a refusal has proven nothing, not even its name.
        if head.status != 403 and not (head.name and is_meant(head.name, meant)):
            asked = f"{show_host(meant)} was asked at {self.address}, and " if meant else ""
            raise Malformed(f"{asked}{show_host(head.name)} answered")
        return head

    def body(self, head: Head, limit: int) -> bytes:
        """The body of a reply of at most ``limit`` bytes; then the next request may follow.

        Raises Malformed if it is longer, breaks off or stalls (TimeoutError).
        """
        if head.length > limit:
            raise Malformed(f"a reply of {head.length} bytes; the limit is {limit}")
        data = self.read_body(head.length)
        self.clean = not head.closing
        return data

    def proven_body(self, head: Head, limit: int) -> bytes:
        """The body of a reply, with its proof checked.

        Raises:
            AgentError: The host refuses the secret, or does not know it itself.
        """
        if head.status == 403:
            # The sender has proven nothing, so its text is not shown.
            self.body(head, ERROR_BYTES_MAX)
            raise refused()
        data = self.body(head, limit if head.status < 400 else ERROR_BYTES_MAX)
        self.check(head, body_digest(data) if self._token else "")
        return data

    def check(self, head: Head, digest: str) -> None:
        """Raise AgentError unless the reply's sender knows the token."""
        if not self._token:
            return
        text = (head.name, head.status, head.span, digest)
        expected = sign_reply(self._token, self._nonce, self._counter, *text)
        if not same(expected, head.proof):
            raise AgentError(
                "the answering host does not know this namespace's token: it is another job's "
                "agent or none at all",
                outcome="unknown",
            )

    def end(self, head: Head) -> None:
        """Record that the reply was read to its end."""
        self.check_end()
        self.clean = not head.closing

    def head(self) -> Head:
        """Read the head of a reply; received bytes of its body are kept in the buffer."""
        status, length, head = self.read_head()

        def field(pattern: re.Pattern[bytes]) -> str:
            found = pattern.search(head)
            return found[1].decode("ascii") if found is not None else ""

        return Head(
            status=status,
            length=length,
            span=field(_SPAN),
            name=field(_HOST),
            proof=field(_PROOF),
            date=field(_DATE),
            closing=_CLOSE.search(head) is not None,
        )


def _named(host: str) -> str:
    return f"[{host}]" if ":" in host else host
