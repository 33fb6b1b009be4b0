"""Writing a large object with direct I/O while its source is read and hashed.

A few buffers go round: they are filled by the source in the caller's thread (which reads and
digests) and written by one worker thread; both release the interpreter's lock. Direct I/O because
buffered writing plus fsync reached a tenth of the disk's speed, and because a spill must not push
training's pages out of the cache.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from tieredckpt import failpoints
from tieredckpt.tiers.base import ByteSource
from tieredckpt.tiers.opened import ALIGN_BYTES, aligned_buffer, clear_direct

RUN_BYTES = 4 << 20
"""Bytes per write, and per call of the source: one block. Larger ones measured no faster."""

NUM_BUFFERS = 4
"""Two would do if reading and writing took the same time for every run; they do not."""


class Output:
    """A file that is written in runs, direct as long as the file system takes it.

    Args:
        fd: Open for writing; stays the caller's.
        direct: Whether it has O_DIRECT set.
    """

    def __init__(self, fd: int, *, direct: bool) -> None:
        self._fd = fd
        self.direct = direct
        self.refused = False
        """Whether the file system refused a direct write with EINVAL."""

    def write(self, offset: int, run: memoryview) -> None:
        """Write all of ``run`` at ``offset``. Raises OSError; how much was written is unknown."""
        while len(run):
            if self.direct and (offset | len(run)) % ALIGN_BYTES:
                self._go_buffered()  # the last bytes of an object that does not end on a page
            failpoints.reach("tier.file.write")
            try:
                count = os.pwrite(self._fd, run, offset)
            except OSError as error:
                if not self.direct or error.errno != errno.EINVAL:
                    raise
                self.refused = True
                self._go_buffered()
                continue
            if count == 0:
                raise OSError(errno.EIO, "the file system wrote nothing")
            run, offset = run[count:], offset + count

    def _go_buffered(self) -> None:
        clear_direct(self._fd)
        self.direct = False


def write_from(source: ByteSource, output: Output, buffers: list[memoryview]) -> None:
    """Copy all of ``source`` to ``output``, reading ahead of what is being written.

    ``buffers`` are aligned, of :data:`RUN_BYTES`; of :data:`NUM_BUFFERS` those that are missing are
    made when they are first needed. Nothing is synced. No write is in progress any more when this
    returns or raises.

    Raises:
        OSError: A write failed.
        TieredCkptError: What the source raised.
    """
    with ThreadPoolExecutor(1, "tieredckpt-write") as worker:
        writing: deque[Future[None]] = deque()
        try:
            for number, offset in enumerate(range(0, source.size, RUN_BYTES)):
                if len(writing) == NUM_BUFFERS:
                    writing.popleft().result()  # its buffer is the next one
                place = number % NUM_BUFFERS
                if place == len(buffers):
                    buffers.append(aligned_buffer(RUN_BYTES))
                run = buffers[place][: min(RUN_BYTES, source.size - offset)]
                source.read_into(offset, run)
                writing.append(worker.submit(output.write, offset, run))
            while writing:
                writing.popleft().result()
        finally:
            for each in writing:
                each.cancel()  # after a failure nothing more is written
