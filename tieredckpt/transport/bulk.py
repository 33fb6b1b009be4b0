"""Segment bytes into a TCP socket: sendfile where the kernel can do it, pieces where it cannot.

Blocking, for worker threads. A reader that takes too little for too long is
given up, so that the lease on the segment ends.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Protocol

SEND_PIECE_BYTES = 256 << 10
"""A reader must take this much, or what is left, within SEND_STALL_S."""
SEND_STALL_S = 30.0


class Source(Protocol):
    """An open segment that is not a file to the kernel, or not one to send from."""

    size: int

    def read_into(self, offset: int, into: memoryview) -> None: ...


class Cut(Exception):
    """The connection is of no use any more: too little was sent of what was announced."""


def send_file(sock: socket.socket, fd: int, start: int, stop: int) -> None:
    """Send bytes ``start`` to ``stop`` of the file ``fd`` into a socket that does not block.

    Raises:
        Cut: The reader stalled or is gone, or the file is shorter than it was.
    """
    out = sock.fileno()
    _all(out, start, stop, lambda offset: os.sendfile(out, fd, offset, stop - offset))


def send_pieces(sock: socket.socket, source: Source, start: int, stop: int) -> None:
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
                _send(sock, piece)
                piece.release()
        finally:
            view.release()


def _send(sock: socket.socket, piece: memoryview) -> None:
    _all(sock.fileno(), 0, len(piece), lambda offset: sock.send(piece[offset:]))


def _all(out: int, start: int, stop: int, send: Callable[[int], int]) -> None:
    """Call ``send`` with offsets until everything is sent, waiting for the reader as need be."""
    poll = select.poll()
    poll.register(out, select.POLLOUT)
    offset = start
    while offset < stop:
        goal = min(offset + SEND_PIECE_BYTES, stop)
        until_s = time.monotonic() + SEND_STALL_S
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
