"""One kept TCP connection to another host's agent: HTTP/1.1 as our own server speaks it, no more.

Everything that comes back is hostile: heads and bodies are bounded before they are read, and each
wait is for at least so many bytes within so many seconds.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import ssl
from dataclasses import dataclass

import msgspec

from tieredckpt.errors import AgentError
from tieredckpt.format.packing import MALFORMED
from tieredckpt.transport.auth import (
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
from tieredckpt.transport.line import HttpConnection, Malformed
from tieredckpt.transport.peer_dial import split_address
from tieredckpt.transport.peer_messages import HELLO, PEER_API_VERSION, PeerHello

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
