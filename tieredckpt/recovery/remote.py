"""Copies on other hosts and in object stores: blocks as they stream in, digested in cache.

A run of consecutive blocks is one request. Its bytes are received straight into where they are
wanted; what nobody wants of a block goes to scratch memory, and is digested all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
"""Connections of one fetch, over all donors; a store that is to be asked for more gets more."""

STORE_STREAMS_MAX = 64

TAIL_BYTES = 64 << 10
TAIL_BYTES_MAX = 1 << 20
"""What is read of a segment's end before anything is known of it: the digests of blocks of 256 KiB
take 1/16,384 of its size."""

DONOR_STREAMS = 2
"""Connections to one donor: one that waits for its first byte does not leave the link idle."""


class Stream(Protocol):
    """The bytes of one request, in order."""

    def read_into(self, into: memoryview) -> None:
        """Fill ``into``. Raises TierUnavailableError: it broke off or stalled."""

    def abort(self) -> None:
        """End it from any thread: a read that waits fails."""

    def close(self) -> None:
        """End it; what was not read is lost."""


class Peer(Protocol):
    """One other host, or an object store, as a reader needs it. Thread-safe."""

    def open_range(self, segment_id: str, tier: str, start: int, stop: int) -> Stream:
        """Ask for bytes of a segment. Raises our errors."""


class RemoteCopy:
    """A copy of a segment behind a :class:`Peer`. Thread-safe; nothing is verified here.

    Args:
        source: Which one.
        size_bytes: What the segment has.
        find_peer: The host; raises TierUnavailableError if it cannot be reached at all.
        streams: Requests at a time that it is to be asked for.
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
        """How much to read at once of the end: nearly always index and digests, in one trip."""
        self._size_bytes = size_bytes
        self._find_peer = find_peer

    @property
    def name(self) -> str:
        """Tier and host, for messages."""
        return self.source.place

    def has(self, stop: int) -> bool:
        """Whether bytes up to ``stop`` were there when the holdings were made."""
        return self.source.size >= stop

    def check_size(self, stop: int) -> None:
        """Raises CopyError if bytes up to ``stop`` were not there."""
        if not self.has(stop):
            raise self.truncated()

    def truncated(self) -> CopyError:
        """Why it cannot give bytes that it does not have."""
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
            stream = self.open_range(start, start + len(into))
            try:
                stream.read_into(into)
            finally:
                stream.close()
        except (TieredCkptError, OSError) as error:
            raise why_not(error)[0] from error

    def close(self) -> None:
        """Nothing is held between requests; the peer's connections are its owner's."""


def why_not(error: TieredCkptError | OSError) -> tuple[CopyError, bool]:
    """A failed request as a failure of the copy, and whether asking again is no use."""
    damaged = isinstance(error, IntegrityError) and not isinstance(error, FormatVersionError)
    final = isinstance(error, NotFoundError | FormatVersionError | AgentError)
    return CopyError(str(error), damaged=damaged, may_answer=not (damaged or final)), final


def _donors_of_streams(wanted: Sequence[int]) -> list[int]:
    """For each stream its donor: each gets one, then who wants more one more, to the limit."""
    most = min(STORE_STREAMS_MAX, max(STREAMS_MAX, *wanted))
    turns = [donor for turn in range(most) for donor, n in enumerate(wanted) if turn < max(1, n)]
    return turns[:most]


class Donors:
    """Brings blocks of one segment from equally near copies on other hosts, from all at once.

    Args:
        copies: At most :data:`STREAMS_MAX`.
        scratch: For what is not wanted, or wanted elsewhere.
        expected: The digests of a task's blocks, concatenated.
        accepted: Called for all that is good, with the copy that gave it. From any thread.
    """

    def __init__(
        self,
        copies: Sequence[RemoteCopy],
        scratch: ScratchPool,
        expected: Callable[[BlockTask], bytes],
        accepted: Callable[[RemoteCopy, BlockTask], None],
    ) -> None:
        assert 0 < len(copies) <= STREAMS_MAX
        self._copies = copies
        self._scratch = scratch
        self._expected = expected
        self._accepted = accepted

    def fetch(
        self,
        tasks: Sequence[BlockTask],
        asks: Callable[[RemoteCopy, int], bool],
        pool: CopyPool,
    ) -> tuple[list[BlockTask], dict[int, dict[RemoteCopy, CopyError]]]:
        """Bring ``tasks``; ``asks`` says whether a copy is to be asked for a block.

        Returns:
            The blocks that no copy could give, and by block why each copy could not, also for
            blocks that another one gave.
        """
        refusals: dict[int, frozenset[int]] = {}
        short: dict[int, dict[RemoteCopy, CopyError]] = {}
        for task in tasks:
            refused = set()
            for number, copy in enumerate(self._copies):
                if not asks(copy, task.block):
                    refused.add(number)
                elif not copy.has(task.stop):
                    refused.add(number)
                    short.setdefault(task.block, {})[copy] = copy.truncated()
            refusals[task.block] = frozenset(refused)
        donors = _donors_of_streams([copy.streams for copy in self._copies])
        runs = Runs(tasks, len(self._copies), lambda task: refusals[task.block], len(donors))

        def work(number: int) -> None:
            while (run := runs.next_run(donors[number])) is not None:
                self._serve(runs, run)

        pool.run(work, len(donors))
        left = runs.left()
        for block, found in runs.failures.items():
            into = short.setdefault(block, {})
            for donor, failure in found.items():
                if asks(self._copies[donor], block):
                    into.setdefault(self._copies[donor], failure)
        return left, short

    def _serve(self, runs: Runs, run: Run) -> None:
        """Carry out one run, and report to the queue how it ended."""
        failed: TieredCkptError | OSError | None = None
        opened = False
        try:
            stream = self._copies[run.donor].open_range(run.start_byte, run.stop_byte)
            opened = True
            try:
                runs.connected(run, stream.abort)
                while (task := runs.next_task(run)) is not None:
                    self._receive(stream, runs, run, task)
            finally:
                stream.close()
        except (TieredCkptError, OSError) as error:
            failed = error
        finally:
            # Also if something of ours is broken: the other streams wait for this run to end.
            if failed is None:
                runs.done(run)
        if failed is None:
            return
        failure, final = why_not(failed)
        if failure.damaged and not opened:
            runs.incomplete(run, failure)
        else:
            runs.failed(run, failure, final=final)

    def _receive(self, stream: Stream, runs: Runs, run: Run, task: BlockTask) -> None:
        expected = self._expected(task)
        actual = land(task, lambda _, into: stream.read_into(into), expected, self._scratch)
        good, bad = task.compared(actual, expected)
        for each in good:
            self._accepted(self._copies[run.donor], each)
        if bad:
            runs.bad(run, [(each, CopyError(text, damaged=True)) for each, text in bad])
        else:
            runs.landed(run)
