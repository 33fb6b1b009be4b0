"""Segments to other hosts: opened, sent by a thread that takes the connection's socket, closed.

Plain connections get their bytes by sendfile from tmpfs, else in pieces that a thread reads.
Encrypted ones get pieces through the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

from aiohttp import web

from tieredckpt.errors import IntegrityError, RemoteProtocolError, TieredCkptError
from tieredckpt.transport import bulk
from tieredckpt.transport.peer_answers import Proven
from tieredckpt.transport.peer_routes import PeerApi, Target
from tieredckpt.transport.replies import BYTES_TYPE
from tieredckpt.transport.server import Readable

CALL_THREADS = 16
PROOF_THREADS = 4
SERVED_SEGMENTS_MAX = 32
"""Segments being sent at one time; more wait in line."""
TLS_PIECE_BYTES = 1 << 20
DRAIN_S = 10.0
STOP_S = 5.0

_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Pools:
    """The threads of a server."""

    def __init__(self) -> None:
        self.proofs = ThreadPoolExecutor(PROOF_THREADS, "tck-peer-proof")
        self.calls = ThreadPoolExecutor(CALL_THREADS, "tck-peer-call")
        self.bulk = ThreadPoolExecutor(SERVED_SEGMENTS_MAX, "tck-peer-bulk")

    def shutdown(self) -> None:
        """Begin nothing new; what runs ends by itself."""
        for each in (self.proofs, self.calls, self.bulk):
            each.shutdown(wait=False, cancel_futures=True)


class Segments:
    """Sends segments of one API in one loop. Made in the loop."""

    def __init__(self, api: PeerApi, pools: Pools) -> None:
        self._api = api
        self._pools = pools
        self._serving = asyncio.Semaphore(SERVED_SEGMENTS_MAX)

    async def _in(self, pool: Executor, call: Callable[..., _Result], *args: object) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *args)

    async def answer(
        self, request: web.BaseRequest, target: Target, proven: Proven
    ) -> web.StreamResponse:
        """Send what a proven request asks for."""
        async with self._serving:
            try:
                tier, source = await self._in(
                    self._pools.calls,
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
                response.content_length = stop - start
                response.headers["Content-Range"] = span
                await response.prepare(request)
                try:
                    await self._send(request, response, source, start, stop, tier == "memory")
                except (bulk.Cut, TieredCkptError, TimeoutError, OSError) as error:
                    # Too few bytes arrive: that is how the other side learns of it.
                    log.info("segment %s was not sent whole: %s", target.ident, error)
                    if request.transport is not None:
                        request.transport.abort()
                return response
            finally:
                source.close()

    async def _send(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        source: Readable,
        start: int,
        stop: int,
        memory: bool,
    ) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the reader is gone")
        if transport.get_extra_info("sslcontext") is not None:
            await self._send_encrypted(response, source, start, stop)
        else:
            await self._send_plain(transport, source, start, stop, memory)
        await response.write_eof()

    async def _send_encrypted(
        self, response: web.StreamResponse, source: Readable, start: int, stop: int
    ) -> None:
        buffer = memoryview(bytearray(min(TLS_PIECE_BYTES, stop - start)))
        for offset in range(start, stop, TLS_PIECE_BYTES):
            piece = buffer[: min(TLS_PIECE_BYTES, stop - offset)]
            await self._in(self._pools.bulk, source.read_into, offset, piece)
            async with asyncio.timeout(bulk.SEND_STALL_S):
                # A copy: the transport may keep it while the buffer is filled again.
                await response.write(bytes(piece))

    async def _send_plain(
        self, transport: asyncio.Transport, source: Readable, start: int, stop: int, memory: bool
    ) -> None:
        async with asyncio.timeout(DRAIN_S):
            # The head, if the socket was full. No public event says that it has left.
            while transport.get_write_buffer_size():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        # The loop must not write meanwhile, and need not read: nothing but the next request comes.
        transport.pause_reading()
        sock = transport.get_extra_info("socket").dup()
        try:
            await _finish(self._move(sock, source, start, stop, memory), sock)
            transport.resume_reading()
        finally:
            sock.close()

    async def _move(
        self, sock: socket.socket, source: Readable, start: int, stop: int, memory: bool
    ) -> None:
        if memory:  # pages of tmpfs never wait for a disk, so sendfile is a plain copy
            await self._in(self._pools.bulk, bulk.send_file, sock, source.fileno(), start, stop)
        else:
            await self._in(self._pools.bulk, bulk.send_pieces, sock, source, start, stop)


async def _finish(sending: Coroutine[None, None, None], sock: socket.socket) -> None:
    """Wait for a thread that uses ``sock``; if the wait is cancelled, the thread is made to end."""
    task = asyncio.ensure_future(sending)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        await asyncio.wait([task], timeout=STOP_S)
        raise


def _range(header: str, size: int) -> tuple[int, int]:
    found = _RANGE.fullmatch(header)
    if found is None:
        raise RemoteProtocolError(f"cannot serve the range {header[:80]!r}: want bytes=FIRST-LAST")
    start, stop = int(found[1]), int(found[2]) + 1
    if start >= stop:
        raise RemoteProtocolError(f"the range {header[:80]!r} is empty")
    if stop > size:
        # The caller asks for what the manifest promises: the copy is shorter than it was.
        raise IntegrityError(f"the copy has {size} bytes only", expected=stop, actual=size)
    return start, stop
