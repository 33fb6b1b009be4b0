"""The agent's TCP server for other hosts: one event loop in a thread of its own.

For each request the server matches the head with a route (``rpc/peer_routes.py``), checks the
proof, then reads the body, compares it with the proven digest and calls the API in a worker thread,
or awaits it in the loop if the request is ``awaited``.
Other threads send segments; meanwhile the loop does not use the connection's socket.

A connection is *pending* until its first proven request. Pending connections are limited in time
and in number, in total and per address: for a new one the server closes the oldest of the address
that has most. So ten thousand unauthenticated connections cost as much as a few hundred, and a host
with the secret is still admitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import re
import resource
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from tieredckpt.errors import (
    AgentError,
    IntegrityError,
    NotFoundError,
    RemoteProtocolError,
    TieredCkptError,
    TierUnavailableError,
)
from tieredckpt.rpc import bulk
from tieredckpt.rpc.auth import (
    BODY_HEADER,
    HOST_HEADER,
    NONCE_CHARS,
    PROOF_HEADER,
    TlsFiles,
    Verifier,
    body_digest,
    host_name,
    is_meant,
    refused,
    show_host,
)
from tieredckpt.rpc.messages.agent import TlsSpec
from tieredckpt.rpc.messages.base import BYTES_TYPE, JSON_TYPE, encode_error, package_version
from tieredckpt.rpc.messages.peer import HELLO, PEER_API_VERSION, PeerHello, PeerRequest
from tieredckpt.rpc.peer_routes import PeerApi, Proven, Target, find_target


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one server."""

    connections: int = 2048
    """In total; a new connection then replaces the one that has been idle for longest."""
    pending: int = 256
    pending_per_address: int = 64
    """All trainers of a host may connect at once."""
    pending_s: float = 10.0
    """Until the first proven request."""
    idle_s: float = 120.0
    """For proven connections without a request, or with an unfinished one."""


class Connection:
    """One accepted connection."""

    __slots__ = ("asked", "busy", "group", "last_s", "sock", "tls", "verifier")

    def __init__(self, sock: socket.socket, group: str, now_s: float) -> None:
        self.sock = sock
        self.group = group
        self.last_s = now_s
        """When it was accepted, or when its last request began or ended."""
        self.verifier = Verifier(secrets.token_hex(NONCE_CHARS // 2))
        self.busy = False
        self.asked = False
        """Whether its nonce was sent."""
        self.tls = False

    def cut(self) -> None:
        """End it, from any thread; the owner of the socket detects it and closes it."""
        with contextlib.suppress(OSError):  # it is closed already
            self.sock.shutdown(socket.SHUT_RDWR)


def group_of(address: str) -> str:
    """The key of limits per address: an IPv4 address, or an IPv6 network of 64 bits."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
    return str(parsed)


class Admission:
    """The connections of one server. Thread-safe.

    Args:
        limits: Bounds.
        clock: Monotonic seconds.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        # Both in the order of their last_s, the oldest first.
        self._pending: dict[Connection, None] = {}
        self._proven: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._pending) + len(self._proven)

    def admit(self, sock: socket.socket, address: str) -> Connection | None:
        """Admit a new connection, cutting older ones for it; None: the caller must close it."""
        connection = Connection(sock, group_of(address), self._clock())
        with self._lock:
            same = [each for each in self._pending if each.group == connection.group]
            if len(same) >= self._limits.pending_per_address:
                self._cut(same[0])
            elif len(self._pending) >= self._limits.pending:
                self._cut(self._oldest_pending())
            if len(self) >= self._limits.connections and not self._cut_idle():
                return None
            self._pending[connection] = None
        return connection

    def _cut_idle(self) -> bool:
        idle = next((each for each in self._proven if not each.busy), None)
        if idle is None and not self._pending:
            return False
        self._cut(idle or self._oldest_pending())
        return True

    def _oldest_pending(self) -> Connection:
        # Of the address with most: one connection of a host outlasts any number of another one's.
        counts = Counter(each.group for each in self._pending)
        return max(self._pending, key=lambda each: counts[each.group])

    def touch(self, connection: Connection, *, busy: bool) -> None:
        """Record that a request has begun or ended."""
        with self._lock:
            connection.busy = busy
            connection.last_s = self._clock()
            if connection in self._proven:
                self._proven[connection] = self._proven.pop(connection)

    def prove(self, connection: Connection) -> None:
        """Record that a request of the connection was proven."""
        with self._lock:
            if connection in self._pending:
                self._forget(connection)
                self._proven[connection] = None

    def drop(self, connection: Connection) -> None:
        """Record that the connection is closed. Idempotent."""
        with self._lock:
            self._forget(connection)

    def sweep(self) -> None:
        """Cut connections whose time is over."""
        now_s = self._clock()
        with self._lock:
            old = [c for c in self._pending if now_s - c.last_s > self._limits.pending_s]
            old += [
                each
                for each in self._proven
                if not each.busy and now_s - each.last_s > self._limits.idle_s
            ]
            for each in old:
                self._cut(each)

    def cut_all(self) -> None:
        """End every connection."""
        with self._lock:
            for each in [*self._pending, *self._proven]:
                self._cut(each)

    def _cut(self, connection: Connection) -> None:
        self._forget(connection)
        connection.cut()

    def _forget(self, connection: Connection) -> None:
        self._proven.pop(connection, None)
        self._pending.pop(connection, None)


BACKLOG = 1024
ACCEPTS_AT_ONCE = 16
"""Then the loop serves its other connections, so that cut ones are closed."""
PAUSE_S = 0.1
"""Pause until the next attempt when no descriptors are left."""
SWEEP_S = 0.5
DESCRIPTORS_WANTED = 8192

CALL_THREADS = 16
PROOF_THREADS = 4
SERVED_SEGMENTS_MAX = 32
"""Segments being sent at one time; more wait in line."""
LARGE_BODY_BYTES = 1 << 20
LARGE_BODIES_MAX = 4
"""Bodies larger than that in memory at one time, until they are answered; more wait in line."""
BODY_STALL_S = 10.0
BODY_PIECE_BYTES = 64 << 10
"""So much of a body, or its end, must be received within BODY_STALL_S."""
BODY_BYTES_PER_S = 4 << 20
"""Least rate of the whole body, after BODY_STALL_S."""
HEAD_BYTES_MAX = 4096
"""Limit of each line of a request's head."""
HEADERS_MAX = 32
HANDSHAKE_S = 10.0

_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")
_FOREIGN = ("Transfer-Encoding", "Content-Encoding", "Upgrade", "Expect")
"""Headers that our client never sends."""

log = logging.getLogger(__name__)
# Malformed requests of unauthenticated clients must not fill the log of an agent.
_quiet = log.getChild("http")
_quiet.setLevel(logging.CRITICAL)

_Result = TypeVar("_Result")


class _Http(web.Server):
    """aiohttp's parser and connection handling, with our connection of each handler."""

    def __init__(self, server: PeerServer) -> None:
        self.known: dict[web.RequestHandler, Connection] = {}
        self._server = server
        super().__init__(
            server.handle, access_log=None, logger=_quiet, keepalive_timeout=3600.0,
            lingering_time=1.0, max_line_size=HEAD_BYTES_MAX, max_field_size=HEAD_BYTES_MAX,
            max_headers=HEADERS_MAX, auto_decompress=False,
        )  # fmt: skip

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        connection = self.known.pop(handler, None)
        if connection is not None:
            self._server.admission.drop(connection)
        super().connection_lost(handler, exc)


class PeerServer:
    """Serves an API to other hosts on listening sockets (one per rail).

    The caller has checked the addresses with :func:`tieredckpt.rpc.auth.check_listen`.

    Args:
        api: Answers the requests.
        listeners: From :func:`listen_tcp`; owned and closed by the server.
        tls: Mutual TLS on all of them. Requests for namespaces whose secret names other files, or
            TLS if this is None, are refused.
        limits: Bounds on connections.

    Raises:
        AgentError: The TLS files cannot be used.
    """

    def __init__(
        self,
        api: PeerApi,
        listeners: Sequence[socket.socket],
        *,
        tls: TlsSpec | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._api = api
        self._listeners = list(listeners)
        self._tls = tls
        self._tls_files = TlsFiles(tls, server=True) if tls is not None else None
        self.admission = Admission(_within_descriptors(limits or Limits()))
        self._proofs = ThreadPoolExecutor(PROOF_THREADS, "tck-peer-proof")
        self._calls = ThreadPoolExecutor(CALL_THREADS, "tck-peer-call")
        self._bulk = ThreadPoolExecutor(SERVED_SEGMENTS_MAX, "tck-peer-bulk")
        self._loop = asyncio.new_event_loop()
        self._given: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="tck-peer", daemon=True)

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports of the listeners, in their order."""
        return tuple(int(each.getsockname()[1]) for each in self._listeners)

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve in a thread; returns when it runs."""
        self._thread.start()
        self._running.wait()

    def stop(self) -> None:
        """Stop listening and cut all connections; waits a few seconds at most. Idempotent."""
        self._stopped = True
        self.admission.cut_all()
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(bulk.STOP_S)
        for listener in self._listeners:
            listener.close()
        for pool in (self._proofs, self._calls, self._bulk):
            pool.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._set_up())
        # Called by the running loop, which logs a failure: start() must not wait for ever.
        self._loop.call_soon(self._open)
        self._running.set()
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._tear_down())
            self._loop.close()

    async def _set_up(self) -> None:
        self._large = asyncio.Semaphore(LARGE_BODIES_MAX)
        self._serving = asyncio.Semaphore(SERVED_SEGMENTS_MAX)
        self._http = _Http(self)
        self._sweep()

    def _open(self) -> None:
        for listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    async def _tear_down(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for handler in list(self._http.known):
            handler.force_close()
        await asyncio.sleep(0)  # one round, in which the transports close their sockets
        for connection in self._given:
            connection.sock.close()

    # --- connections ------------------------------------------------------------------------------

    def _sweep(self) -> None:
        self.admission.sweep()
        self._loop.call_later(SWEEP_S, self._sweep)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            if self._stopped:
                return
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause(listener, error)
                return
            sock.setblocking(False)
            connection = self.admission.admit(sock, str(address[0]))
            if connection is None:
                sock.close()
                continue
            self._given.add(connection)
            task = self._loop.create_task(self._connect(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _pause(self, listener: socket.socket, error: OSError) -> None:
        """The queue stays readable: without a pause the loop would spin."""
        log.warning("cannot accept connections of other hosts: %s", error)
        self._loop.remove_reader(listener)
        self._loop.call_later(PAUSE_S, self._loop.add_reader, listener, self._accept, listener)

    async def _connect(self, connection: Connection) -> None:
        def protocol() -> web.RequestHandler:
            handler = self._http()
            self._http.known[handler] = connection
            return handler

        context = self._tls_files.context() if self._tls_files is not None else None
        connection.tls = context is not None
        made = False
        try:
            await self._loop.connect_accepted_socket(
                protocol,
                connection.sock,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_S if context is not None else None,
            )
            made = True
        except (OSError, EOFError) as error:  # ssl.SSLError is an OSError
            log.info("%s: no connection: %s", connection.group, error)
        finally:
            self._given.discard(connection)
            if not made:
                self._forget(connection)
                connection.sock.close()

    def _forget(self, connection: Connection) -> None:
        self.admission.drop(connection)
        for handler in [h for h, c in self._http.known.items() if c is connection]:
            del self._http.known[handler]

    # --- one request ------------------------------------------------------------------------------

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. A malformed or unproven request ends its connection."""
        connection = self._http.known.get(request.protocol)
        if connection is None:
            raise ConnectionResetError  # it was lost meanwhile
        self.admission.touch(connection, busy=True)
        try:
            return await self._answer(request, connection)
        except TieredCkptError as error:
            # Nothing was proven, so the connection of this caller is not kept.
            body = encode_error(error)[1]
            response = web.Response(status=403, body=body, content_type=JSON_TYPE)
            response.force_close()
            return response
        except ConnectionError:
            raise
        except Exception:  # the top of a request: a bug must be seen, and end this connection alone
            log.exception("%s of another host failed", request.method)
            raise ConnectionResetError from None
        finally:
            self.admission.touch(connection, busy=False)

    async def _answer(self, request: web.BaseRequest, connection: Connection) -> web.StreamResponse:
        target = request.raw_path
        if any(name in request.headers for name in _FOREIGN):
            raise refused()
        if target == HELLO and request.method == "GET" and not request.can_read_body:
            return _hello(connection)
        named = find_target(request.method, target)
        if named is None:
            raise refused()
        proven = self._prove(connection, named, request)  # a thread would take longer
        self.admission.prove(connection)
        large = (request.content_length or 0) > LARGE_BODY_BYTES
        async with self._large if large else contextlib.nullcontext():
            try:
                _check_meant(proven.name, request)
                body = await self._body(request, named.kind) if named.kind is not None else b""
            except TieredCkptError as error:
                refusal = proven.error(error)
                refusal.force_close()  # the rest of the body may follow
                return refusal
            if named.kind is not None and named.kind.awaited:
                return await self._await(named.kind, named.namespace, proven, body, request)
            if named.kind is not None:
                return await self._in(
                    self._calls, self._call, named.kind, named.namespace, proven, body
                )
        return await self._segment(request, named, proven)

    async def _in(self, pool: Executor, call: Callable[..., _Result], *args: object) -> _Result:
        return await self._loop.run_in_executor(pool, call, *args)

    def _prove(self, connection: Connection, target: Target, request: web.BaseRequest) -> Proven:
        name, secret = "", None
        with contextlib.suppress(NotFoundError):
            own, secret = self._api.peer_served(target.namespace)
            name = host_name(own.host_id, own.incarnation)
        if secret is not None and secret.tls is not None:
            # The certificate was checked against the server's CA: it must be this namespace's.
            if not connection.tls or secret.tls != self._tls:
                secret = None
            elif not secret.token:
                return Proven(name, secret, "", 0)
        counter = connection.verifier.check(
            # An unknown namespace is refused after the same time as a wrong token.
            secret.token if secret is not None else connection.verifier.nonce[::-1],
            request.headers.get(PROOF_HEADER, ""),
            request.headers.get(HOST_HEADER, ""),
            request.method,
            request.raw_path,
            request.headers.get("Range", ""),
            request.headers.get(BODY_HEADER, ""),
        )
        if secret is None or not secret.token:
            raise refused()
        return Proven(name, secret, connection.verifier.nonce, counter)

    async def _body(
        self, request: web.BaseRequest, kind: type[PeerRequest[Any]]
    ) -> bytes | bytearray:
        size = request.content_length or 0
        if size > kind.body_bytes_max or request.content_length is None:
            raise RemoteProtocolError(
                f"a request body of {size} bytes; the limit is {kind.body_bytes_max}"
            )
        if not size:
            return b""
        data = await _read(request, size)
        small = size <= BODY_PIECE_BYTES
        digest = body_digest(data) if small else await self._in(self._proofs, body_digest, data)
        if digest != request.headers.get(BODY_HEADER):
            raise refused()
        return data

    async def _await(
        self,
        kind: type[PeerRequest[Any]],
        namespace: str,
        proven: Proven,
        body: bytes | bytearray,
        request: web.BaseRequest,
    ) -> web.Response:
        call = getattr(self._api, f"peer_{kind.verb()}")
        try:
            asked = kind.decode(body)
            reply = await call(namespace, asked, lambda: request.transport is not None)
        except TieredCkptError as error:
            return proven.error(error)
        return proven.answer(200, msgspec.msgpack.encode(reply), BYTES_TYPE)

    def _call(
        self,
        kind: type[PeerRequest[Any]],
        namespace: str,
        proven: Proven,
        body: bytes | bytearray,
    ) -> web.Response:
        try:
            reply = getattr(self._api, f"peer_{kind.verb()}")(namespace, kind.decode(body))
        except TieredCkptError as error:
            return proven.error(error)
        except Exception as error:  # the top of a request: a bug must not end the connection mute
            log.exception("%s for another host failed", kind.verb())
            return proven.error(
                AgentError(
                    f"the host's agent failed: {type(error).__name__} (see its log)",
                    outcome="unknown",
                )
            )
        data = reply if isinstance(reply, bytes) else msgspec.msgpack.encode(reply)
        return proven.answer(200, data, BYTES_TYPE)

    async def _segment(
        self, request: web.BaseRequest, target: Target, proven: Proven
    ) -> web.StreamResponse:
        async with self._serving:
            try:
                tier, source = await self._in(
                    self._calls,
                    self._api.read_segment, target.namespace, target.ident, target.tier,
                )  # fmt: skip
            except TieredCkptError as error:
                return proven.error(error)
            try:
                try:
                    start, stop = _range(request.headers.get("Range", ""), source.size)
                except TieredCkptError as error:
                    return proven.error(error)
                span = f"bytes {start}-{stop - 1}/{source.size}"
                headers = proven.headers(206, span, "")
                response = web.StreamResponse(status=206, headers=headers)
                response.content_type = BYTES_TYPE
                response.headers["Content-Range"] = span
                await bulk.answer(
                    request, response, source, start, stop, self._bulk,
                    memory=tier == "memory", stall_s=bulk.SEND_STALL_S,
                )  # fmt: skip
                return response
            finally:
                source.close()


def _range(header: str, size: int) -> tuple[int, int]:
    found = _RANGE.fullmatch(header)
    if found is None:
        raise RemoteProtocolError(f"cannot serve the range {header[:80]!r}: want bytes=FIRST-LAST")
    start, stop = int(found[1]), int(found[2]) + 1
    if start >= stop:
        raise RemoteProtocolError(f"the range {header[:80]!r} is empty")
    if stop > size:
        # The caller knows the size from the manifest: the copy is shorter than it was.
        raise IntegrityError(f"the copy has {size} bytes only", expected=stop, actual=size)
    return start, stop


def listen_tcp(address: str, port: int) -> socket.socket:
    """A listening socket on one IP address. Port 0: any free one. The caller owns it.

    Raises:
        AgentError: The address is not of this host, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restarted agent gets its port again, although connections of the old one linger.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise AgentError(
            f"cannot listen on {address} port {port}: {error.strerror}; see network.port, "
            "network.interface and network.cidr",
            outcome="not_applied",
        ) from error
    sock.setblocking(False)
    return sock


def _check_meant(own: str, request: web.BaseRequest) -> None:
    """Refuse a request for another host: a forwarder may have sent it to this one."""
    if not is_meant(own, request.headers.get(HOST_HEADER, "")):
        raise TierUnavailableError(
            f"another host was asked: this is {show_host(own)}", outcome="not_applied"
        )


def _hello(connection: Connection) -> web.Response:
    if connection.asked:
        raise refused()
    connection.asked = True
    hello = PeerHello(
        api=PEER_API_VERSION, version=package_version(), nonce=connection.verifier.nonce
    )
    return web.Response(body=msgspec.msgpack.encode(hello), content_type=BYTES_TYPE)


async def _read(request: web.BaseRequest, size: int) -> bytearray:
    """Read a body of ``size`` bytes; a slow one is cut, since other requests wait for its end."""
    data = bytearray()
    until_s = asyncio.get_running_loop().time() + BODY_STALL_S + size / BODY_BYTES_PER_S
    while len(data) < size:
        goal = min(len(data) + BODY_PIECE_BYTES, size)
        try:
            async with asyncio.timeout_at(until_s), asyncio.timeout(BODY_STALL_S):
                while len(data) < goal:
                    piece = await request.content.readany()
                    if not piece:
                        raise RemoteProtocolError("the request's body broke off")
                    data += piece
        except TimeoutError as error:
            raise TierUnavailableError(
                "the request's body stalled", outcome="not_applied"
            ) from error
        except web.HTTPException as error:
            raise RemoteProtocolError(f"malformed body: {error}") from error
    if len(data) > size:
        raise RemoteProtocolError("the request's body is longer than announced")
    return data


def _within_descriptors(limits: Limits) -> Limits:
    """The limits, within what this process may open; a shell's default of 1024 is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < DESCRIPTORS_WANTED:
        wanted = (
            DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_WANTED)
        )
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft == resource.RLIM_INFINITY:
        return limits
    # Half of them is for slots, files and the agent's own clients.
    most = max(soft // 2, 2)
    return replace(
        limits,
        connections=min(limits.connections, most),
        pending=min(limits.pending, most // 2),
    )
