"""Receives blocks from copies on other hosts and in object stores, and digests them in cache.

A run of consecutive blocks is one request. Wanted bytes are received straight into their
destination. Other bytes of a block are received into scratch memory and digested, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from tieredckpt.errors import (
    AgentError,
    FormatVersionError,
    IntegrityError,
    NotFoundError,
    TieredCkptError,
)
from tieredckpt.recovery.blocks import BlockTask, ScratchPool, land
from tieredckpt.recovery.copies import CopyError
from tieredckpt.recovery.evidence import SourceRef
from tieredckpt.recovery.runs import Run, Runs
from tieredckpt.storage.file_io import CopyPool

STREAMS_MAX = 8
"""Connections of one fetch, over all donors, unless a store is configured for more."""

STORE_STREAMS_MAX = 64

TAIL_BYTES = 64 << 10
TAIL_BYTES_MAX = 1 << 20
"""Limits of the first read at a segment's end: the digests of blocks of 256 KiB take 1/16,384 of
its size."""

DONOR_STREAMS = 2
"""Connections to one donor: while one waits for its first byte, the other one uses the link."""


class Stream(Protocol):
    """The bytes of one request, in order."""

    def read_into(self, into: memoryview) -> None:
        """Fill ``into``. Raises TierUnavailableError: the stream broke off or stalled."""

    def abort(self) -> None:
        """End the stream from any thread: a read that waits fails."""

    def close(self) -> None:
        """End the stream; unread bytes are lost."""


class Peer(Protocol):
    """The reader's view of one other host or object store. Thread-safe."""

    def open_range(self, segment_id: str, tier: str, start: int, stop: int) -> Stream:
        """Ask for bytes of a segment. Raises our errors."""


class RemoteCopy:
    """A copy of a segment behind a :class:`Peer`. Thread-safe; nothing is verified here.

    Args:
        source: The copy.
        size_bytes: The segment's size.
        find_peer: Finds the host or store. Raises TierUnavailableError: it cannot be reached.
        streams: Number of concurrent requests to it.
    """

    def __init__(
        self,
        source: SourceRef,
        size_bytes: int,
        find_peer: Callable[[SourceRef], Peer],
        streams: int = DONOR_STREAMS,
    ) -> None:
        self.source = source
        self.streams = streams
        self.tail_bytes = max(
            TAIL_BYTES, min(TAIL_BYTES_MAX, TAIL_BYTES // 2 + size_bytes // (16 << 10))
        )
        """Size of the first read at the end: nearly always all of index and digests."""
        self._size_bytes = size_bytes
        self._find_peer = find_peer

    def has(self, stop: int) -> bool:
        """Whether the copy had bytes up to ``stop`` when the holdings were made."""
        return self.source.size >= stop

    def check_size(self, stop: int) -> None:
        """Raise CopyError unless :meth:`has`."""
        if not self.has(stop):
            raise self.truncated()

    def truncated(self) -> CopyError:
        """The failure to read bytes that it does not have."""
        return CopyError(
            f"truncated: {self.source.size} of {self._size_bytes} bytes are there", damaged=True
        )

    def open_range(self, start: int, stop: int) -> Stream:
        """Ask for bytes. Raises our errors: see :func:`why_not`."""
        peer = self._find_peer(self.source)
        return peer.open_range(self.source.segment_id, self.source.tier, start, stop)

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill ``into`` from ``start``. Raises CopyError."""
        try:
            with closing(self.open_range(start, start + len(into))) as stream:
                stream.read_into(into)
        except (TieredCkptError, OSError) as error:
            raise why_not(error)[0] from error

    def close(self) -> None:
        """Do nothing: connections belong to the peer's owner."""


def why_not(error: TieredCkptError | OSError) -> tuple[CopyError, bool]:
    """A failed request as a failure of the copy, and whether it is final."""
    damaged = isinstance(error, IntegrityError) and not isinstance(error, FormatVersionError)
    final = isinstance(error, NotFoundError | FormatVersionError | AgentError)
    return CopyError(str(error), damaged=damaged, may_answer=not (damaged or final)), final


def _donors_of_streams(wanted: Sequence[int]) -> list[int]:
    """The donor of each stream: in turns each donor that wants more gets one more, to the limit."""
    most = min(STORE_STREAMS_MAX, max(STREAMS_MAX, *wanted))
    turns = [donor for turn in range(most) for donor, n in enumerate(wanted) if turn < max(1, n)]
    return turns[:most]


@dataclass(frozen=True, slots=True)
class Donors:
    """Reads blocks of one segment from equally near copies on other hosts, from all at once.

    Attributes:
        copies: From one to :data:`STREAMS_MAX`.
        scratch: Buffers for bytes that are not wanted, or scattered.
        expected: The digests of a task's blocks, concatenated.
        accepted: Called for all good blocks, with the copy they came from. From any thread.
    """

    copies: Sequence[RemoteCopy]
    scratch: ScratchPool
    expected: Callable[[BlockTask], bytes]
    accepted: Callable[[RemoteCopy, BlockTask], None]

    def fetch(
        self,
        tasks: Sequence[BlockTask],
        asks: Callable[[RemoteCopy, int], bool],
        pool: CopyPool,
    ) -> tuple[list[BlockTask], dict[int, dict[RemoteCopy, CopyError]]]:
        """Read ``tasks``; ``asks``: whether a copy may be asked for a block.

        Returns:
            The blocks that no copy provided, and by block each copy's failure, even if another
            copy provided the block.
        """
        assert 0 < len(self.copies) <= STREAMS_MAX
        numbered = list(enumerate(self.copies))

        def refused(task: BlockTask) -> frozenset[int]:
            able = {n for n, copy in numbered if asks(copy, task.block) and copy.has(task.stop)}
            return frozenset(range(len(numbered))) - able

        donors = _donors_of_streams([copy.streams for copy in self.copies])
        runs = Runs(tasks, len(numbered), refused, len(donors))

        def work(number: int) -> None:
            while (run := runs.next_run(donors[number])) is not None:
                self._serve(runs, run)

        pool.run(work, len(donors))
        left = runs.left()
        failures = {
            task.block: {
                copy: copy.truncated()
                for copy in self.copies
                if asks(copy, task.block) and not copy.has(task.stop)
            }
            for task in tasks
        }
        for block, found in runs.failures.items():
            failures.setdefault(block, {}).update((self.copies[n], why) for n, why in found.items())
        return left, failures

    def _serve(self, runs: Runs, run: Run) -> None:
        """Receive one run, and report its end to the queue."""
        opened = False
        try:
            stream = self.copies[run.donor].open_range(run.start_byte, run.stop_byte)
            opened = True
            with closing(stream):
                runs.connected(run, stream.abort)
                while (task := runs.next_task(run)) is not None:
                    self._receive(stream, runs, run, task)
        except (TieredCkptError, OSError) as error:
            failure, final = why_not(error)
            if failure.damaged and not opened:
                runs.incomplete(run, failure)
            else:
                runs.failed(run, failure, final=final)
        finally:
            # Also after a bug: the other streams wait for this run to end.
            runs.done(run)

    def _receive(self, stream: Stream, runs: Runs, run: Run, task: BlockTask) -> None:
        expected = self.expected(task)
        actual = land(task, lambda _, into: stream.read_into(into), expected, self.scratch)
        good, bad = task.compared(actual, expected)
        for each in good:
            self.accepted(self.copies[run.donor], each)
        if bad:
            runs.bad(run, [(each, CopyError(text, damaged=True)) for each, text in bad])
        else:
            runs.landed(run)
