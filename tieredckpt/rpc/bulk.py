"""Segment bytes into a socket: sendfile where the kernel can do it, pieces where it cannot.

A worker thread takes the connection's socket over while the loop leaves it alone; encrypted ones
get pieces through the loop. A reader that takes too little for too long is given up, so that the
lease on the segment ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

from aiohttp import web

from tieredckpt.errors import TieredCkptError

SEND_PIECE_BYTES = 256 << 10
"""A reader must take this much, or what is left, within the stall time."""
SEND_STALL_S = 30.0
"""Of another host."""
TLS_PIECE_BYTES = 1 << 20
DRAIN_S = 10.0
STOP_S = 5.0


log = logging.getLogger(__name__)


class Readable(Protocol):
    """An open segment, as servers need it; see :class:`tieredckpt.storage.base.OpenObject`."""

    size: int

    def read_into(self, offset: int, into: memoryview) -> None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class Cut(Exception):
    """The connection is of no use any more: too little was sent of what was announced."""


async def answer(
    request: web.BaseRequest,
    response: web.StreamResponse,
    source: Readable,
    start: int,
    stop: int,
    pool: Executor,
    *,
    memory: bool,
    stall_s: float,
) -> None:
    """Answer with bytes ``start`` to ``stop`` of ``source``.

    If that fails on the way the connection is cut: too few bytes arrive, which is how the reader
    learns of it.

    Args:
        request: What is answered.
        response: Status and headers; was not begun.
        source: Stays open until this returns.
        start: First byte.
        stop: Behind the last one.
        pool: Whose threads send, or read for encrypted connections.
        memory: Whether it lies in tmpfs, whose pages never wait for a disk.
        stall_s: What a reader has to take SEND_PIECE_BYTES.
    """
    response.content_length = stop - start
    await response.prepare(request)
    transport = request.transport
    try:
        if transport is None:
            raise ConnectionResetError("the reader is gone")
        if transport.get_extra_info("sslcontext") is not None:
            await _send_encrypted(response, source, start, stop, pool, stall_s)
        else:
            # sendfile from tmpfs is a plain copy.
            move = send_file if memory else send_pieces
            await _send_plain(
                transport,
                lambda sock: asyncio.get_running_loop().run_in_executor(
                    pool, move, sock, source, start, stop, stall_s
                ),
            )
        await response.write_eof()
    except (Cut, TieredCkptError, TimeoutError, OSError) as error:
        log.info("%s was not sent whole: %s", request.path, error)
        if transport is not None:
            transport.abort()


async def _send_encrypted(
    response: web.StreamResponse,
    source: Readable,
    start: int,
    stop: int,
    pool: Executor,
    stall_s: float,
) -> None:
    loop = asyncio.get_running_loop()
    buffer = memoryview(bytearray(min(TLS_PIECE_BYTES, stop - start)))
    for offset in range(start, stop, TLS_PIECE_BYTES):
        piece = buffer[: min(TLS_PIECE_BYTES, stop - offset)]
        await loop.run_in_executor(pool, source.read_into, offset, piece)
        async with asyncio.timeout(stall_s):
            # A copy: the transport may keep it while the buffer is filled again.
            await response.write(bytes(piece))


async def _send_plain(
    transport: asyncio.Transport, send: Callable[[socket.socket], asyncio.Future[None]]
) -> None:
    async with asyncio.timeout(DRAIN_S):
        # The head, if the socket was full. No public event says that it has left.
        while transport.get_write_buffer_size():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    # The loop must not write meanwhile, and need not read: nothing but the next request comes.
    transport.pause_reading()
    sock = transport.get_extra_info("socket").dup()
    try:
        sending = send(sock)
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            # The thread that uses the socket is made to end.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            await asyncio.wait([sending], timeout=STOP_S)
            raise
        transport.resume_reading()
    finally:
        sock.close()


def send_file(sock: socket.socket, source: Readable, start: int, stop: int, stall_s: float) -> None:
    """Send bytes ``start`` to ``stop`` of a file into a socket that does not block.

    Raises:
        Cut: The reader stalled or is gone, or the file is shorter than it was.
    """
    out, fd = sock.fileno(), source.fileno()
    _all(out, start, stop, stall_s, lambda offset: os.sendfile(out, fd, offset, stop - offset))


def send_pieces(
    sock: socket.socket, source: Readable, start: int, stop: int, stall_s: float
) -> None:
    """Send bytes ``start`` to ``stop`` of ``source`` through a buffer. Raises as :func:`send_file`,
    and what the source raises.
    """
    # A mapping of its own is page-aligned, as direct I/O wants it.
    with mmap.mmap(-1, min(SEND_PIECE_BYTES, _whole_pages(stop - start))) as buffer:
        view = memoryview(buffer)
        try:
            for offset in range(start, stop, SEND_PIECE_BYTES):
                piece = view[: min(SEND_PIECE_BYTES, stop - offset)]
                source.read_into(offset, piece)
                _send(sock, piece, stall_s)
                piece.release()
        finally:
            view.release()


def _send(sock: socket.socket, piece: memoryview, stall_s: float) -> None:
    _all(sock.fileno(), 0, len(piece), stall_s, lambda offset: sock.send(piece[offset:]))


def _all(out: int, start: int, stop: int, stall_s: float, send: Callable[[int], int]) -> None:
    """Call ``send`` with offsets until everything is sent, waiting for the reader as need be."""
    poll = select.poll()
    poll.register(out, select.POLLOUT)
    offset = start
    while offset < stop:
        goal = min(offset + SEND_PIECE_BYTES, stop)
        until_s = time.monotonic() + stall_s
        while offset < goal:
            try:
                count = send(offset)
            except BlockingIOError:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not poll.poll(left_s * 1000):
                    raise Cut("the reader stalled") from None
                continue
            except OSError as error:
                raise Cut(str(error)) from error
            if not count:
                raise Cut("the file was truncated while it was served")
            offset += count


def _whole_pages(size: int) -> int:
    return max(-(-size // mmap.PAGESIZE), 1) * mmap.PAGESIZE
