"""The agent's HTTP server on a unix socket: it turns requests into calls on a node.

Each call on the node runs in one of three bounded thread pools, so that the event loop never blocks
and a wait for a free slot never delays a commit. Other threads send segments (``rpc/bulk.py``).
Requests that are ``awaited`` are coroutines in the loop, and hold no thread while they wait.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
from aiohttp import web

from tieredckpt.errors import AgentError, RemoteProtocolError, TieredCkptError, UsageError
from tieredckpt.rpc import bulk
from tieredckpt.rpc.bulk import Readable
from tieredckpt.rpc.fd_passing import BACKLOG, is_trusted, peer_uid
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.base import (
    API_HEADER,
    BYTES_TYPE,
    JSON_TYPE,
    SESSION_HEADER,
    SMALL_BODY_BYTES_MAX,
    encode_error,
    package_version,
)
from tieredckpt.rpc.metrics import METRICS_PATH, TEXT_TYPE, exposition

BODY_WAIT_S = 30.0
KEEPALIVE_S = 3600.0
"""Trainers keep one connection for the whole run; saves may be minutes apart."""
PIECE_WAIT_S = 60.0
"""A reader of a segment that receives no bytes for this long is cut off, so its lease ends."""
FAST_THREADS = 8
SLOW_THREADS = 24
WATCH_THREADS = 2
"""For status and metrics: they are answered while all other threads wait, and delay no request."""
SERVED_SEGMENTS_MAX = 16
"""Segments being sent at one time; more wait in line."""

log = logging.getLogger(__name__)

Reply = m.Message | bytes | None
Call = Callable[["NodeApi", "web.Request", bytes], Reply]


class NodeApi(Protocol):
    """The node that requests are calls of: blocking, thread-safe, raising our errors only.

    It also has a method for each :class:`tieredckpt.rpc.messages.agent.NodeRequest`, with the name
    of its verb, which takes the namespace and the request. It is a coroutine if the request is
    ``awaited``.
    """

    def health(self) -> m.Health: ...
    def status(self) -> m.Status: ...
    def open_session(self, request: m.OpenSession) -> m.SessionOpened: ...
    def end_session(self, session_id: str) -> None: ...
    def check_session(self, namespace: str, session_id: str) -> None: ...
    def peers(self, namespace: str) -> m.PeerTable: ...
    def holdings(self, namespace: str, within_s: float) -> bytes: ...
    def plan(self, namespace: str, tier: str, plan_id: str) -> bytes: ...
    def progress(self, namespace: str, save_id: str, awaited: str) -> m.Progress: ...
    def protections(self, namespace: str) -> m.RetentionNeeds: ...
    def purge(self, namespace: str) -> None: ...
    def read_segment(
        self, namespace: str, segment_id: str, tier: str | None
    ) -> tuple[str, Readable]: ...


_encode_json = msgspec.json.Encoder().encode


def _ns(request: web.Request) -> str:
    return request.match_info["ns"]


def _within_s(request: web.Request) -> float:
    """Seconds from 0 on, infinity included. Raises UsageError."""
    text = request.query.get("within_s", "inf")
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not found >= 0:  # rejects NaN, too
        raise UsageError(f"within_s={text[:80]!r} is not a number of seconds from 0 on")
    return found


STATUS_PATH = "/v1/status"
_NAMESPACE = "/v1/namespaces/{ns}"
_Route = tuple[str, str, bool, Call]
"""Method, path, slow (may wait, scan or allocate), call."""


def _answer(
    kind: type[m.NodeRequest[Any]], node: NodeApi, request: web.Request, body: bytes
) -> Reply:
    reply: Reply = getattr(node, kind.verb())(_ns(request), kind.decode(body))
    return reply


_ROUTES: tuple[_Route, ...] = (
    ("GET", "/v1/health", False, lambda n, r, b: n.health()),
    ("GET", STATUS_PATH, False, lambda n, r, b: n.status()),
    ("POST", "/v1/sessions", True, lambda n, r, b: n.open_session(m.OpenSession.decode(b))),
    ("DELETE", "/v1/sessions/{id}", False, lambda n, r, b: n.end_session(r.match_info["id"])),
    ("GET", _NAMESPACE + "/peers", True, lambda n, r, b: n.peers(_ns(r))),
    ("GET", _NAMESPACE + "/holdings", True, lambda n, r, b: n.holdings(_ns(r), _within_s(r))),
    (
        "GET", _NAMESPACE + "/plans/{id}", True,
        lambda n, r, b: n.plan(_ns(r), r.query.get("tier", "memory"), r.match_info["id"]),
    ),
    (
        "GET", _NAMESPACE + "/progress/{id}", False,
        lambda n, r, b: n.progress(_ns(r), r.match_info["id"], r.query.get("awaited", "")),
    ),
    ("GET", _NAMESPACE + "/needs", True, lambda n, r, b: n.protections(_ns(r))),
    ("POST", _NAMESPACE + "/purge", True, lambda n, r, b: n.purge(_ns(r))),
)  # fmt: skip

_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
_ANY_API = ("/v1/health", "/v1/shutdown", METRICS_PATH)


def parse_range(header: str | None, size: int) -> tuple[int, int]:
    """``(start, stop)`` of a Range header over ``size`` bytes; everything if there is none.

    Raises:
        UsageError: Not one range of the form ``bytes=A-B`` or ``bytes=A-`` inside the object.
    """
    if header is None:
        return 0, size
    found = _RANGE.fullmatch(header.strip())
    if found is None:
        raise UsageError(f"cannot serve the range {header[:80]!r}: want bytes=FIRST-LAST")
    start = int(found[1])
    stop = min(int(found[2]) + 1, size) if found[2] else size
    if start >= stop:
        raise UsageError(f"the range {header[:80]!r} is outside of an object of {size} bytes")
    return start, stop


class AgentServer:
    """Serves a node on one listening unix socket.

    Args:
        node: Answers the requests.
        listener: From :func:`tieredckpt.rpc.fd_passing.listen`; owned and closed by the server.
        on_shutdown: Called in the event loop when a client stops the agent.
    """

    def __init__(
        self, node: NodeApi, listener: socket.socket, on_shutdown: Callable[[], None]
    ) -> None:
        self._node = node
        self._listener = listener
        self._on_shutdown = on_shutdown
        self._fast = ThreadPoolExecutor(FAST_THREADS, "tck-fast")
        self._slow = ThreadPoolExecutor(SLOW_THREADS, "tck-slow")
        self._bulk = ThreadPoolExecutor(SERVED_SEGMENTS_MAX, "tck-bulk")
        self._watch = ThreadPoolExecutor(WATCH_THREADS, "tck-watch")
        self._serving = asyncio.Semaphore(SERVED_SEGMENTS_MAX)
        self._runner: web.AppRunner | None = None
        self.last_request_s = time.monotonic()
        """When the last request came in (monotonic clock), for the idle time-out."""

    async def start(self) -> None:
        """Begin to serve; returns at once."""
        app = web.Application(middlewares=[self._guard], client_max_size=m.MAX_BODY_BYTES)
        for method, path, slow, call in _ROUTES:
            pool = self._watch if path == STATUS_PATH else self._slow if slow else self._fast
            app.router.add_route(method, path, self._handler(call, pool, SMALL_BODY_BYTES_MAX))
        for kind in m.NodeRequest.__subclasses__():
            handler = self._handler(
                functools.partial(_answer, kind),
                self._slow if kind.slow else self._fast,
                kind.body_bytes_max,
            )
            if kind.awaited:
                handler = self._awaited(kind)
            app.router.add_post(f"{_NAMESPACE}/{kind.verb()}", handler)
        app.router.add_get(_NAMESPACE + "/segments/{id}", self._segment)
        app.router.add_post("/v1/shutdown", self._shutdown)
        app.router.add_get(METRICS_PATH, self._metrics)
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=2.0,
        )  # fmt: skip
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener, backlog=BACKLOG).start()

    async def stop(self) -> None:
        """Stop listening, wait two seconds for running requests, close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
        for each in (self._fast, self._slow, self._bulk, self._watch):
            each.shutdown(wait=False, cancel_futures=True)

    @web.middleware
    async def _guard(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        try:
            self._check(request)
            return await handler(request)
        except TieredCkptError as error:
            return _refusal(error)
        except (web.HTTPException, asyncio.CancelledError):
            raise
        except Exception as error:  # the top of a request: a bug must not end the connection mute
            log.exception("%s %s failed", request.method, request.path)
            text = f"the agent failed: {type(error).__name__}: {error} (see its log)"
            return _refusal(AgentError(text, outcome="unknown"))

    def _check(self, request: web.Request) -> None:
        if request.path != METRICS_PATH:  # monitoring does not keep an idle agent alive
            self.last_request_s = time.monotonic()
        transport = request.transport
        sock = transport.get_extra_info("socket") if transport is not None else None
        if sock is None or not is_trusted(peer_uid(sock)):
            raise AgentError(
                "this agent belongs to another user: use a runtime_dir of your own",
                outcome="not_applied",
            )
        api = request.headers.get(API_HEADER)
        if api != str(m.API_VERSION) and request.path not in _ANY_API:
            raise AgentError(
                f"the running agent speaks API {m.API_VERSION}, the caller {api or 'none'}: send "
                f"the header {API_HEADER}: {m.API_VERSION}, or install the agent's version "
                f"({package_version()}); an agent that is the older one can be stopped with "
                "`tieredckpt agent stop`, checkpoints stay in memory",
                outcome="not_applied",
            )

    def _handler(
        self, call: Call, pool: ThreadPoolExecutor, body_bytes_max: int
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await _body(request, body_bytes_max)
            loop = asyncio.get_running_loop()
            reply = await loop.run_in_executor(pool, self._answer, call, request, body)
            if isinstance(reply, bytes):
                return web.Response(body=reply, content_type=BYTES_TYPE)
            return web.Response(body=_encode_json(reply), content_type=JSON_TYPE)

        return handle

    def _answer(self, call: Call, request: web.Request, body: bytes) -> Reply:
        self._check_session(request)
        return call(self._node, request, body)

    def _check_session(self, request: web.Request) -> None:
        if SESSION_HEADER in request.headers:
            namespace = request.match_info.get("ns", "")
            self._node.check_session(namespace, request.headers[SESSION_HEADER])

    def _awaited(
        self, kind: type[m.NodeRequest[Any]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await _body(request, kind.body_bytes_max)
            if SESSION_HEADER in request.headers:  # the check may wait for the node's lock
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._fast, self._check_session, request)
            call, asked = getattr(self._node, kind.verb()), kind.decode(body)
            reply = await call(_ns(request), asked, lambda: request.transport is not None)
            return web.Response(body=_encode_json(reply), content_type=JSON_TYPE)

        return handle

    async def _shutdown(self, request: web.Request) -> web.StreamResponse:
        log.info("stopping: a client requested it")
        # The reply is sent first: the shutdown closes all connections.
        asyncio.get_running_loop().call_later(0.05, self._on_shutdown)
        return web.Response(body=b"{}", content_type=JSON_TYPE)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self._watch, lambda: exposition(self._node.status()))
        return web.Response(body=text, headers={"Content-Type": TEXT_TYPE})

    async def _segment(self, request: web.Request) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        async with self._serving:
            tier, source = await loop.run_in_executor(
                self._slow,
                self._node.read_segment,
                _ns(request),
                request.match_info["id"],
                request.query.get("tier"),
            )
            try:
                start, stop = parse_range(request.headers.get("Range"), source.size)
                response = web.StreamResponse(status=206 if "Range" in request.headers else 200)
                response.headers["Accept-Ranges"] = "bytes"
                response.headers["X-Tieredckpt-Tier"] = tier
                if response.status == 206:
                    response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{source.size}"
                await bulk.answer(
                    request, response, source, start, stop, self._bulk,
                    memory=tier == "memory", stall_s=PIECE_WAIT_S,
                )  # fmt: skip
                return response
            finally:
                source.close()


async def _body(request: web.Request, limit: int) -> bytes:
    if request.method != "POST":
        return b""
    size = request.content_length
    if size is None or size > limit:
        raise RemoteProtocolError(f"a request body of {size} bytes; the limit is {limit}")
    async with asyncio.timeout(BODY_WAIT_S):
        return await request.read()


def _refusal(error: TieredCkptError) -> web.Response:
    status, body = encode_error(error)
    return web.Response(status=status, body=body, content_type=JSON_TYPE)
