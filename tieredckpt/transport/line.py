"""HTTP/1.1 as our own servers speak it, no more: one kept connection, blocking."""

from __future__ import annotations

import re
import socket
import time

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
