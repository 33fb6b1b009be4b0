"""One event loop, in a thread of its own, that answers other hosts' requests.

Per request, in this order: the head is matched with a route, the proof is checked, only then is
a body read, compared with the proven digest, and handed to the API in a worker thread. Segments are
sent by threads that take the connection's socket over while the loop leaves it alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

import msgspec
from aiohttp import web

from tieredckpt.errors import (
    AgentError,
    NotFoundError,
    RemoteProtocolError,
    TieredCkptError,
    TierUnavailableError,
)
from tieredckpt.transport.auth import (
    BODY_HEADER,
    HOST_HEADER,
    PROOF_HEADER,
    body_digest,
    host_name,
    is_meant,
    refused,
    show_host,
)
from tieredckpt.transport.messages import TlsSpec
from tieredckpt.transport.peer_answers import Proven
from tieredckpt.transport.peer_connections import Admission, Connection
from tieredckpt.transport.peer_messages import HELLO, PEER_API_VERSION, PeerHello
from tieredckpt.transport.peer_routes import PeerApi, Route, Target, find_route
from tieredckpt.transport.peer_segments import STOP_S, Pools, Segments
from tieredckpt.transport.replies import BYTES_TYPE, JSON_TYPE, encode_error, package_version

LARGE_BODY_BYTES = 1 << 20
LARGE_BODIES_MAX = 4
"""Bodies larger than that in memory at one time, until they are answered; more wait in line."""
BODY_STALL_S = 10.0
BODY_PIECE_BYTES = 64 << 10
"""A body must bring this much, or end, within BODY_STALL_S."""
HEAD_BYTES_MAX = 4096
"""Of each line of a request's head."""
HEADERS_MAX = 32
HANDSHAKE_S = 10.0

_FOREIGN = ("Transfer-Encoding", "Content-Encoding", "Upgrade", "Expect")
"""Headers that our client never sends."""

log = logging.getLogger(__name__)
# What a stranger's malformed request is must not fill the log of an agent.
_quiet = log.getChild("http")
_quiet.setLevel(logging.CRITICAL)

_Result = TypeVar("_Result")


class _Http(web.Server):
    """aiohttp's parser and connection handling, told which connection is whose."""

    def __init__(self, loop: PeerLoop) -> None:
        self.known: dict[web.RequestHandler, Connection] = {}
        self._peer_loop = loop
        super().__init__(
            loop.handle, access_log=None, logger=_quiet, keepalive_timeout=3600.0,
            lingering_time=1.0, max_line_size=HEAD_BYTES_MAX, max_field_size=HEAD_BYTES_MAX,
            max_headers=HEADERS_MAX, auto_decompress=False,
        )  # fmt: skip

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        connection = self.known.pop(handler, None)
        if connection is not None:
            self._peer_loop.admission.drop(connection)
        super().connection_lost(handler, exc)


class PeerLoop:
    """See the module. Made and started by :class:`tieredckpt.transport.peer_server.PeerServer`.

    Args:
        api: Does the work.
        admission: Knows the connections.
        pools: Threads for what blocks.
        tls: What a namespace with TLS must ask for, to be served here.
    """

    def __init__(
        self, api: PeerApi, admission: Admission, pools: Pools, tls: TlsSpec | None
    ) -> None:
        self.admission = admission
        self.loop = asyncio.new_event_loop()
        self._api = api
        self._pools = pools
        self._tls = tls
        self._given: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tck-peer", daemon=True)

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; returns when the loop runs."""
        self._thread.start()
        self._running.wait()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._set_up())
        self._running.set()
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self._tear_down())
            self.loop.close()

    async def _set_up(self) -> None:
        self._large = asyncio.Semaphore(LARGE_BODIES_MAX)
        self._segments = Segments(self._api, self._pools)
        self._http = _Http(self)

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

    def stop(self) -> None:
        """End the loop and its connections; waits a few seconds at most."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):  # it has just ended
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_S)

    def give(self, connection: Connection, context: ssl.SSLContext | None) -> None:
        """Hand an accepted connection over to this loop. Thread-safe."""
        self._given.add(connection)
        try:
            self.loop.call_soon_threadsafe(self._serve, connection, context)
        except RuntimeError:  # the loop has ended
            connection.sock.close()

    def _serve(self, connection: Connection, context: ssl.SSLContext | None) -> None:
        task = self.loop.create_task(self._connect(connection, context))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: Connection, context: ssl.SSLContext | None) -> None:
        def protocol() -> web.RequestHandler:
            handler = self._http()
            self._http.known[handler] = connection
            return handler

        connection.tls = context is not None
        made = False
        try:
            await self.loop.connect_accepted_socket(
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
        """Answer one request. Whatever is wrong with it ends its connection."""
        connection = self._http.known.get(request.protocol)
        if connection is None:
            raise ConnectionResetError  # it was lost meanwhile
        self.admission.touch(connection, busy=True)
        try:
            return await self._answer(request, connection)
        except TieredCkptError as error:
            # Nothing was proven, so nothing is owed to this caller.
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
        found = find_route(request.method, target)
        if found is None:
            raise refused()
        route, named = found
        proven = await self._in(self._pools.proofs, self._prove, connection, named, request)
        self.admission.prove(connection)
        large = (request.content_length or 0) > LARGE_BODY_BYTES
        async with self._large if large else contextlib.nullcontext():
            try:
                _check_meant(proven.name, request)
                body = await self._body(request, route) if route.call is not None else b""
            except TieredCkptError as error:
                refusal = proven.error(error)
                refusal.force_close()  # some of it may still come
                return refusal
            if route.call is not None:
                return await self._in(self._pools.calls, self._call, route, named, proven, body)
        return await self._segments.answer(request, named, proven)

    async def _in(self, pool: Executor, call: Callable[..., _Result], *args: object) -> _Result:
        return await self.loop.run_in_executor(pool, call, *args)

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
            # Somebody who asks for what is not there waits as long as with a wrong token.
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

    async def _body(self, request: web.BaseRequest, route: Route) -> bytes | bytearray:
        size = request.content_length or 0
        if size > route.body_bytes_max or (route.method == "POST") != (
            request.content_length is not None
        ):
            raise RemoteProtocolError(
                f"a request body of {size} bytes; the limit is {route.body_bytes_max}"
            )
        if not size:
            return b""
        data = await _read(request, size)
        digest = await self._in(self._pools.proofs, body_digest, data)
        if digest != request.headers.get(BODY_HEADER):
            raise refused()
        return data

    def _call(
        self, route: Route, target: Target, proven: Proven, body: bytes | bytearray
    ) -> web.Response:
        assert route.call is not None
        try:
            reply = route.call(self._api, target, body)
        except TieredCkptError as error:
            return proven.error(error)
        except Exception as error:  # the top of a request: a bug must not end the connection mute
            log.exception("%s for another host failed", target.verb)
            return proven.error(
                AgentError(
                    f"the host's agent failed: {type(error).__name__} (see its log)",
                    outcome="unknown",
                )
            )
        data = reply if isinstance(reply, bytes) else msgspec.msgpack.encode(reply)
        return proven.answer(200, data, BYTES_TYPE)


def _check_meant(own: str, request: web.BaseRequest) -> None:
    """Answer no request that is for another host: its address may lead here, by a forwarder."""
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
    """A body of ``size`` bytes; a slow one is cut."""
    data = bytearray()
    while len(data) < size:
        goal = min(len(data) + BODY_PIECE_BYTES, size)
        try:
            async with asyncio.timeout(BODY_STALL_S):
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
