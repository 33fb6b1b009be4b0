"""A proxy that knows HTTP/1.1, between a client and a store: it spoils chosen requests.

Other than :mod:`tests.support.proxy`, which spoils connections, this one sees requests: it can
answer one itself (503), end the connection in the middle of its body, or pass it on and lose the
answer. What no rule is for passes through. A signed request still fits, since
``Host`` is passed on as the client sent it.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote

_CHUNK_BYTES = 1 << 16
_RST = struct.pack("ii", 1, 0)

Fault = Literal[
    "answer",
    "cut_request",
    "flip_request",
    "lose_response",
    "cut_response",
    "flip_response",
    "stall",
]


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for, without the body."""

    method: str
    target: str
    """Path and query, as sent."""
    headers: dict[str, str]
    """Names in lower case."""

    @property
    def signature(self) -> str:
        """Who signed it and how, wherever that stands."""
        return unquote(self.target) + self.headers.get("authorization", "")

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return int(self.headers.get("content-length", 0))

    def __str__(self) -> str:
        return f"{self.method} {self.target}"


@dataclass(slots=True)
class Rule:
    """One fault, for requests that it is meant for.

    ============== ================================================================================
    answer         the store never sees it; ``status``, ``headers`` and ``body`` are the answer
    cut_request    after ``after_bytes`` of the body both ends see a reset
    flip_request   one bit of the body, at ``after_bytes``, is changed
    lose_response  the store carries it out, then the client sees a reset instead of the answer
    cut_response   after ``after_bytes`` of the answer's body the client sees the end, too early
    flip_response  one bit of the answer's body, at ``after_bytes``, is changed
    stall          the store carries it out, and the client waits for the answer until :meth:`heal`
    ============== ================================================================================
    """

    fault: Fault
    pattern: str = ""
    """Regular expression that is searched for in ``METHOD target``."""
    times: int | None = 1
    """How often; None: until it is removed."""
    skip: int = 0
    """So many requests pass first."""
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    after_bytes: int = 0
    signed_by: str = ""
    """Only requests that are signed with this access key."""
    met: int = 0
    """How often it has struck."""

    def strikes(self, request: Request) -> bool:
        """Whether it is for this request; counts."""
        if not re.search(self.pattern, str(request)) or self.times == 0:
            return False
        if self.signed_by and f"Credential={self.signed_by}/" not in request.signature:
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        self.met += 1
        return True


def slow_down(pattern: str = "", *, times: int | None = 1, status: int = 503) -> Rule:
    """The answer with which S3 throttles (503), or another one of the same form."""
    code = {503: "SlowDown", 500: "InternalError", 507: "InsufficientStorage"}[status]
    return _told(status, code, "Please reduce your request rate.", pattern, times)


def expired(access_key: str) -> Rule:
    """The answer to each request that is signed with this key, as if its token had expired."""
    rule = _told(400, "ExpiredToken", "The provided token has expired.", "", None)
    rule.signed_by = access_key
    return rule


def _told(status: int, code: str, message: str, pattern: str, times: int | None) -> Rule:
    body = (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code>'
        f"<Message>{message}</Message></Error>"
    ).encode()
    headers = {"Content-Type": "application/xml"}
    return Rule("answer", pattern, times, status=status, headers=headers, body=body)


class HttpProxy:
    """Listens on loopback and forwards to ``target`` (``ip:port``), a thread for each connection.

    With ``tls`` it ends the client's TLS; the store is always asked in the clear.

    Attributes:
        rules: The first one that is for a request strikes it. Change them at any time.
        seen: All requests, in order.
        bytes_per_s: Limit of all bodies together; 0: none.
    """

    def __init__(self, target: str, *rules: Rule, tls: ssl.SSLContext | None = None) -> None:
        self.rules: list[Rule] = list(rules)
        self.seen: list[Request] = []
        self.bytes_per_s = 0.0
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._tls = tls
        self._free_s = 0.0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ends: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._thread = threading.Thread(target=self._accept, name="http-proxy", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """What the client is to use."""
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self._listener.getsockname()[1]}"

    def count(self, pattern: str) -> int:
        """How many requests so far match, counting those that were struck."""
        with self._lock:
            return sum(1 for each in self.seen if re.search(pattern, str(each)))

    def heal(self) -> None:
        """No fault any more; whoever is stalled goes on."""
        with self._lock:
            self.rules.clear()
            self.bytes_per_s = 0.0
            self._changed.notify_all()

    def cut(self) -> None:
        """Reset all connections."""
        with self._lock:
            ends = list(self._ends)
        for each in ends:
            _reset(each)

    def close(self) -> None:
        """End everything. Idempotent."""
        self._listener.close()
        self.heal()
        self.cut()

    def __enter__(self) -> HttpProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- connections ------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server: socket.socket | None = None
        with self._lock:
            self._ends.add(client)
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                with self._lock:
                    self._ends.discard(client)
                client = self._tls.wrap_socket(client, server_side=True)
                with self._lock:
                    self._ends.add(client)
            asking = _Reader(client)
            while (head := asking.head()) is not None:
                request = _request_of(head)
                with self._lock:
                    self.seen.append(request)
                    rule = next((r for r in self.rules if r.strikes(request)), None)
                if rule is not None and rule.fault == "answer":
                    self._answer(client, asking, request, rule)
                    continue
                if server is None:
                    server = socket.create_connection(self._target, timeout=120)
                    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    with self._lock:
                        self._ends.add(server)
                    answering = _Reader(server)
                self._forward(client, asking, server, answering, head, request, rule)
        except _EndedEarly:
            with contextlib.suppress(OSError):  # a reset could take with it what was sent before
                client.shutdown(socket.SHUT_WR)
            client.close()
        except (OSError, EOFError, ValueError):
            pass  # a reset that was asked for, or an end that died: the other one sees it, too
        finally:
            for each in (client, server):
                if each is not None:
                    with self._lock:
                        self._ends.discard(each)
                    _reset(each)

    def _answer(self, client: socket.socket, asking: _Reader, request: Request, rule: Rule) -> None:
        if request.headers.get("expect", "").lower() == "100-continue":
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        asking.body(request.headers, lambda _: None)
        headers = {**rule.headers, "Content-Length": str(len(rule.body))}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        body = b"" if request.method == "HEAD" else rule.body
        client.sendall(f"HTTP/1.1 {rule.status} Told\r\n{lines}\r\n".encode() + body)

    def _forward(
        self,
        client: socket.socket,
        asking: _Reader,
        server: socket.socket,
        answering: _Reader,
        head: bytes,
        request: Request,
        rule: Rule | None,
    ) -> None:
        fault = rule.fault if rule is not None else None
        after = rule.after_bytes if rule is not None else 0
        if request.headers.get("expect", "").lower() == "100-continue":
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = re.sub(rb"(?i)\r\nexpect:[^\r]*", b"", head)
        server.sendall(head)
        if fault == "cut_request" and not after:
            raise ConnectionResetError
        asking.body(
            request.headers,
            self._sender(
                server,
                after if fault == "cut_request" else None,
                after if fault == "flip_request" else None,
            ),
        )
        while True:
            reply = answering.head()
            if reply is None:
                raise EOFError
            status = int(reply.split(b" ", 2)[1])
            if status >= 200:
                break
        headers = _headers_of(reply)
        if request.method == "HEAD" or status in (204, 304):
            headers = {"content-length": "0"}
        if fault == "lose_response":
            answering.body(headers, lambda _: None)
            raise ConnectionResetError
        if fault == "stall":
            answering.body(headers, lambda _: None)
            with self._changed:
                self._changed.wait_for(lambda: rule not in self.rules, 120)
            raise ConnectionResetError
        client.sendall(reply)
        cut = after if fault == "cut_response" else None
        flip = after if fault == "flip_response" else None
        try:
            answering.body(headers, self._sender(client, cut, flip))
        except ConnectionResetError as error:
            raise _EndedEarly from error

    def _sender(
        self, to: socket.socket, cut: int | None = None, flip: int | None = None
    ) -> Callable[[bytes], None]:
        done = 0

        def send(data: bytes) -> None:
            nonlocal done
            self._pace(len(data))
            if cut is not None and done + len(data) >= cut:
                to.sendall(data[: cut - done])
                raise ConnectionResetError
            if flip is not None and done <= flip < done + len(data):
                changed = bytearray(data)
                changed[flip - done] ^= 1
                data = bytes(changed)
            to.sendall(data)
            done += len(data)

        return send

    def _pace(self, size: int) -> None:
        if rate := self.bytes_per_s:
            with self._lock:
                due_s = self._free_s = max(time.monotonic(), self._free_s) + size / rate
            time.sleep(max(0.0, due_s - time.monotonic()))


class _EndedEarly(Exception):
    """The answer is not to be completed."""


class _Reader:
    """Takes heads and bodies from one end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._left = b""

    def _more(self) -> bytes:
        data = self._end.recv(_CHUNK_BYTES)
        self._left += data
        return data

    def head(self) -> bytes | None:
        """Up to the empty line; None at the end."""
        while b"\r\n\r\n" not in self._left:
            if not self._more():
                return None
        head, _, self._left = self._left.partition(b"\r\n\r\n")
        return head + b"\r\n\r\n"

    def body(self, headers: dict[str, str], send: Callable[[bytes], None]) -> None:
        """Hand on a body, as it is framed."""
        if "chunked" in headers.get("transfer-encoding", "").lower():
            while True:
                while b"\r\n" not in self._left:
                    if not self._more():
                        raise EOFError
                line, _, self._left = self._left.partition(b"\r\n")
                size = int(line.split(b";")[0], 16)
                send(line + b"\r\n")
                self._exactly(size + 2, send)  # (trailers are not in use)
                if not size:
                    return
        else:
            self._exactly(int(headers.get("content-length", 0)), send)

    def _exactly(self, size: int, send: Callable[[bytes], None]) -> None:
        while size:
            if not self._left and not self._more():
                raise EOFError
            data, self._left = self._left[:size], self._left[size:]
            size -= len(data)
            send(data)


def _headers_of(head: bytes) -> dict[str, str]:
    found = {}
    for line in head.decode("latin-1").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            found[name.strip().lower()] = value.strip()
    return found


def _request_of(head: bytes) -> Request:
    method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
    return Request(method, target, _headers_of(head))


def _reset(end: socket.socket) -> None:
    """Close with a reset, also under a thread that waits for it."""
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
        end.shutdown(socket.SHUT_RD)
    except OSError:  # it has ended already
        pass
    end.close()
