"""Sends segment bytes to a socket: with sendfile where the kernel supports it, else in pieces.

A worker thread uses the connection's socket while the event loop does not. For encrypted
connections the loop sends pieces. A reader that receives too little for too long is cut off, so
that the lease on the segment ends.
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
from tieredckpt.format.segment import PAGE_BYTES, round_up

SEND_PIECE_BYTES = 256 << 10
"""A reader must receive this much, or the rest, within the stall time."""
SEND_STALL_S = 30.0
"""The stall time of other hosts."""
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
    """The connection cannot be used any more: fewer bytes were sent than announced."""


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

    A failure cuts the connection: the reader detects that bytes are missing.

    Args:
        request: The request.
        response: Status and headers; not begun.
        source: The segment; open until this returns.
        start: First byte.
        stop: Behind the last byte.
        pool: Its threads send, or read for encrypted connections.
        memory: Whether the source is in tmpfs, whose pages never wait for a disk.
        stall_s: Longest time in which a reader must receive SEND_PIECE_BYTES.
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
        log.info("%s was sent in part: %s", request.path, error)
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
        # The head, if the socket was full. No public event reports that it was sent.
        while transport.get_write_buffer_size():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    # The loop must not write meanwhile, and need not read: only the next request can come.
    transport.pause_reading()
    sock = transport.get_extra_info("socket").dup()
    try:
        sending = send(sock)
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            # This ends the thread that uses the socket.
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
    # An anonymous mapping is page-aligned, as direct I/O needs it.
    size = round_up(max(stop - start, 1), PAGE_BYTES)
    with mmap.mmap(-1, min(SEND_PIECE_BYTES, size)) as buffer:
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
    """Call ``send`` with offsets until everything is sent, waiting for the reader if necessary."""
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
