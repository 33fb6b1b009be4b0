"""Fetches byte ranges of one segment from its copies and verifies each block in its destination.

The manifest has the segment's root digest. A footer that ends in it proves the table of block
digests, and the table proves each block, whichever copies they come from. So a bad block costs one
block from the next copy, and a truncated copy still provides its other blocks.

Each kind of copy is read in the fastest way that was measured (2 cores, GB/s verified):

- A slot that this process has mapped and populated is copied and digested in cache-sized pieces.
- A slot or file in the page cache is read straight into the destination.
- A file open with O_DIRECT is read up to 4 MiB at a time into aligned scratch by several threads,
  so that the disk is busy while other blocks are digested and copied.
- A copy on another host or in an object store is received in long runs of blocks
  (``recovery/remote.py``).

Copies are read in groups, the nearest first, and each group only for the blocks that the groups
before it could not provide.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tieredckpt.errors import FormatVersionError, IntegrityError, TierUnavailableError
from tieredckpt.format.manifest import SegmentRef, read_footer
from tieredckpt.format.segment import PAGE_BYTES, Footer
from tieredckpt.recovery.blocks import BlockTask, Range, ScratchPool, tasks_of
from tieredckpt.recovery.copies import Copy, CopyError, OpenedSource
from tieredckpt.recovery.evidence import distance
from tieredckpt.recovery.remote import (
    DONOR_STREAMS,
    STORE_STREAMS_MAX,
    STREAMS_MAX,
    Donors,
    Peer,
    RemoteCopy,
)
from tieredckpt.storage.file_io import CopyPool, aligned_buffer
from tieredckpt.storage.memory.mapping import address_of, advise_huge_pages

if TYPE_CHECKING:
    from tieredckpt.recovery.plan import SourceRef

HUGE_PAGE_RANGE_BYTES = 4 << 20
"""Destinations from this size on are advised to use huge pages (numpy does the same)."""

DIRECT_THREADS = 4
"""Concurrent reads from a disk. They mostly wait, so the number of cores does not limit them."""

FAILED_BLOCKS_MAX = 16
"""A fetch ends after so many blocks without any good copy: more would only lengthen the message."""

RETRY_PAUSES_S = (0.5, 2.0)
"""Pauses before unreachable hosts are asked again for blocks that no other copy has: a broken
connection must not cost a checkpoint."""

AnyCopy = Copy | RemoteCopy
Asks = Callable[[AnyCopy, int], bool]


@dataclass(slots=True)
class FetchReport:
    """The sources of all blocks that one fetcher has read."""

    bytes_by_tier: Counter[str] = field(default_factory=Counter)
    """Bytes of the blocks that were read and accepted."""
    bytes_by_place: Counter[str] = field(default_factory=Counter)
    """The same by :attr:`SourceRef.place`."""
    damaged: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By tier: blocks that did not match their digest or could not be read."""


class SegmentFetcher:
    """Reads one segment. Use it from one thread at a time, and close it.

    Args:
        ref: The segment, as the manifest names it.
        sources: Its copies, in the order to try.
        open_source: Opens a copy of this host. NotFoundError, TierUnavailableError, IntegrityError
            and OSError mean that the copy cannot be read.
        report_damage: Called as (copy, bad blocks, reason), at the end of a fetch, once per copy;
            no blocks: its footer or size is bad.
        threads: How many cores may be used.
        find_peer: Finds the host or store of any other copy. Raises TierUnavailableError.
        host_id: This host, if there are others.
        streams_of: The number of concurrent requests to a copy of ``find_peer``.
    """

    def __init__(
        self,
        ref: SegmentRef,
        sources: Sequence[SourceRef],
        open_source: Callable[[SourceRef], OpenedSource],
        report_damage: Callable[[SourceRef, tuple[int, ...], str], None],
        *,
        threads: int = 2,
        find_peer: Callable[[SourceRef], Peer] | None = None,
        host_id: str = "",
        streams_of: Callable[[SourceRef], int] = lambda _source: DONOR_STREAMS,
    ) -> None:
        self.report = FetchReport()
        self._ref = ref
        self._host_id = host_id
        self._copies: list[AnyCopy] = [
            RemoteCopy(source, ref.size, find_peer, streams_of(source))
            if find_peer is not None and _is_remote(source, host_id)
            else Copy(source, ref.size, open_source)
            for source in sources
        ]
        self._report_damage = report_damage
        self._cpu_pool = CopyPool(max(1, threads))
        self._disk_pool = CopyPool(max(DIRECT_THREADS, threads))
        self._net_pool = CopyPool(STORE_STREAMS_MAX)
        self._scratch = ScratchPool()
        self._footer: Footer | None = None
        self._lock = threading.Lock()
        self._failures: dict[int, dict[AnyCopy, CopyError]] = {}

    def __enter__(self) -> SegmentFetcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the copies, and so end their leases. Idempotent."""
        for copy in self._copies:
            copy.close()
        self._cpu_pool.close()
        self._disk_pool.close()
        self._net_pool.close()

    # --- the footer -------------------------------------------------------------------------------

    def footer(self) -> Footer:
        """The verified footer, from the first copy that has it; read once.

        Copies whose host or store did not answer are tried again, as for blocks.

        Raises:
            IntegrityError: All copies are damaged (FormatVersionError: of a later release).
            TierUnavailableError: Some copy could not be read, and no other copy has it.
        """
        if self._footer is not None:
            return self._footer
        failures: dict[AnyCopy, CopyError] = {}
        newer = False
        asked = self._copies
        for pause_s in (0.0, *RETRY_PAUSES_S):
            time.sleep(pause_s if asked else 0.0)
            for copy in asked:
                try:
                    self._footer = self._read_footer(copy)
                    break
                except FormatVersionError as error:
                    # Not damage: an upgraded process can read this copy.
                    newer = True
                    failures[copy] = CopyError(str(error), damaged=False)
                except CopyError as failure:
                    failures[copy] = failure
            if self._footer is not None:
                break
            asked = [copy for copy, found in failures.items() if found.may_answer]
        for copy, found in failures.items():
            if found.damaged:
                self._report_damage(copy.source, (), found.reason)
        if self._footer is not None:
            return self._footer
        reasons = "; ".join(
            f"{copy.source.place}: {found.reason}" for copy, found in failures.items()
        )
        text = f"segment {self._ref.id}: no copy has its footer: {reasons or 'there is no copy'}"
        if newer:
            raise FormatVersionError(text, key=self._ref.id)
        raise self._error(text, [failures])

    def _read_footer(self, copy: AnyCopy) -> Footer:
        """Read the footer from one copy. Raises CopyError, FormatVersionError."""

        def read(start: int, stop: int) -> bytes:
            buffer = aligned_buffer(stop - start)
            copy.read_into(start, buffer)
            return bytes(buffer)

        if self._ref.size % PAGE_BYTES or not self._ref.size:
            raise CopyError(f"no segment has {self._ref.size} bytes", damaged=False)
        copy.check_size(self._ref.size)
        try:
            return read_footer(self._ref, read, copy.tail_bytes)[0]
        except FormatVersionError:
            raise
        except IntegrityError as error:
            raise CopyError(str(error), damaged=True) from error

    # --- the data ---------------------------------------------------------------------------------

    def fetch(self, ranges: Sequence[Range]) -> None:
        """Fill every destination with verified bytes. Ranges may overlap.

        Only blocks that the ranges touch are read. After a failure the contents of all
        destinations are undefined.

        Raises:
            IntegrityError: All copies of some block are damaged (the text lists each copy's
                failure), or a range is outside of the segment.
            TierUnavailableError: Blocks are missing, and some copy of each could not be read.
        """
        tasks = tasks_of(self.footer(), ranges, self._apart())
        if not tasks:
            return
        for each in ranges:
            if each.stop - each.start >= HUGE_PAGE_RANGE_BYTES:
                advise_huge_pages(address_of(each.dest), each.stop - each.start)
        self._failures = {}
        left: list[BlockTask] = tasks
        try:
            for group, asks, last in self._passes():
                left = self._ask(group, asks, left, last=last)
                if not left:
                    return
            left = self._ask_again(left)
        finally:
            self._report_bad_blocks()
        if left:
            self._raise_lost(left)

    def _apart(self) -> Callable[[BlockTask], bool]:
        """Tasks to split into blocks: those for which some copy is truncated or marked as bad."""
        marked = {block for copy in self._copies for block in copy.source.bad_blocks}
        least = min((copy.source.size for copy in self._copies), default=0)
        return lambda task: task.stop > least or not marked.isdisjoint(task.blocks)

    def _passes(self) -> Iterator[tuple[list[AnyCopy], Asks, bool]]:
        """Groups of copies, the blocks to ask each for, and whether it is the last group."""
        groups = [list(group) for _, group in itertools.groupby(self._copies, self._group_of)]
        if all(isinstance(copy, Copy) for copy in self._copies):
            # One host alone: each block is tried in all copies by itself.
            yield self._copies, lambda _copy, _block: True, True
            return
        for group in groups:
            yield group, lambda copy, block: block not in copy.source.bad_blocks, False
        # A quarantined block is read last: its digest decides, and not an earlier report.
        for group in groups:
            if any(copy.source.bad_blocks for copy in group):
                yield group, lambda copy, block: block in copy.source.bad_blocks, False

    def _group_of(self, copy: AnyCopy) -> object:
        return isinstance(copy, Copy) or distance(copy.source, self._host_id)

    def _ask(
        self,
        group: list[AnyCopy],
        asks: Asks,
        tasks: list[BlockTask],
        *,
        last: bool = False,
    ) -> list[BlockTask]:
        """Read the blocks of ``tasks`` that the group has; returns the rest."""
        local = [copy for copy in group if isinstance(copy, Copy)]
        if local:
            return self._ask_here(local, asks, tasks, last=last)
        remote = [copy for copy in group if isinstance(copy, RemoteCopy)]
        for first in range(0, len(remote), STREAMS_MAX):
            donors = Donors(
                remote[first : first + STREAMS_MAX],
                self._scratch,
                self._expected,
                self._accepted,
            )
            tasks, failures = donors.fetch(tasks, asks, self._net_pool)
            for block, found in failures.items():
                self._failures.setdefault(block, {}).update(dict(found.items()))
            if not tasks:
                break
        return tasks

    def _ask_again(self, tasks: list[BlockTask]) -> list[BlockTask]:
        """Ask hosts that did not answer again: no other copy is left to try."""
        for pause_s in RETRY_PAUSES_S:
            away = {
                copy
                for task in tasks
                for block in task.blocks
                for copy, failure in self._failures.get(block, {}).items()
                if isinstance(copy, RemoteCopy) and failure.may_answer
            }
            if not away or not tasks:
                break
            time.sleep(pause_s)
            group: list[AnyCopy] = [copy for copy in self._copies if copy in away]
            tasks = self._ask(group, lambda _copy, _block: True, tasks)
        return tasks

    def _ask_here(
        self, group: list[Copy], asks: Asks, tasks: list[BlockTask], *, last: bool
    ) -> list[BlockTask]:
        pool = self._disk_pool if _is_direct(group) else self._cpu_pool
        left: list[BlockTask] = []

        def fetch(number: int) -> None:
            task = tasks[number]
            several = task.count > 1
            for each in self._fetch_together(group, asks, task) if several else (task,):
                if last and len(left) >= FAILED_BLOCKS_MAX:
                    return
                if not self._fetch_block(group, asks, each):
                    with self._lock:
                        left.append(each)

        pool.run(fetch, len(tasks))
        return sorted(left, key=lambda task: task.block)

    def _fetch_together(self, group: list[Copy], asks: Asks, task: BlockTask) -> list[BlockTask]:
        """Read several blocks from the first copy; returns the others, each by itself."""
        copy = next((copy for copy in group if asks(copy, task.block)), None)
        with suppress(CopyError):
            if copy is not None:
                return [each for each, _ in self._read_blocks(copy, task)]
        return task.split()

    def _fetch_block(self, group: list[Copy], asks: Asks, task: BlockTask) -> bool:
        failures: dict[AnyCopy, CopyError] = {}
        landed = False
        # A quarantined block is read last: its digest decides, and not an earlier report.
        for copy in sorted(group, key=lambda c: task.block in c.source.bad_blocks):
            if not asks(copy, task.block):
                continue
            try:
                if bad := self._read_blocks(copy, task):
                    raise CopyError(bad[0][1], damaged=True)
                landed = True
                break
            except CopyError as failure:
                failures[copy] = failure
        if failures:
            with self._lock:
                self._failures.setdefault(task.block, {}).update(failures)
        return landed

    def _read_blocks(self, copy: Copy, task: BlockTask) -> list[tuple[BlockTask, str]]:
        """Read blocks from one copy; the bad ones, each with a message. Raises CopyError."""
        expected = self._expected(task)
        good, bad = task.compared(copy.land(task, expected, self._scratch), expected)
        for each in good:
            self._accepted(copy, each)
        return bad

    def _expected(self, task: BlockTask) -> bytes:
        return self.footer().digests_of(task.block, task.count)

    def _accepted(self, copy: AnyCopy, task: BlockTask) -> None:
        with self._lock:
            self.report.bytes_by_tier[copy.source.tier] += task.stop - task.start
            self.report.bytes_by_place[copy.source.place] += task.stop - task.start

    # --- failures ---------------------------------------------------------------------------------

    def _report_bad_blocks(self) -> None:
        bad: dict[AnyCopy, dict[int, str]] = {}
        for block, failures in self._failures.items():
            for copy, failure in failures.items():
                if failure.damaged:
                    bad.setdefault(copy, {})[block] = failure.reason
        for copy, blocks in bad.items():
            numbers = tuple(sorted(blocks))
            self._report_damage(copy.source, numbers, blocks[numbers[0]])
            before = self.report.damaged.get(copy.source.tier, ())
            self.report.damaged[copy.source.tier] = tuple(sorted({*before, *numbers}))

    def _raise_lost(self, left: Sequence[BlockTask]) -> None:
        lost = [block for task in left for block in task.blocks]
        reasons = []
        for block in lost[: 2 * FAILED_BLOCKS_MAX]:
            found = self._failures.get(block, {}).items()
            why = "; ".join(f"{copy.source.place}: {failure.reason}" for copy, failure in found)
            reasons.append(f"block {block}: {why or 'there is no copy'}")
        if len(lost) > len(reasons):
            reasons.append(f"and {len(lost) - len(reasons)} more blocks")
        raise self._error(
            f"segment {self._ref.id}: no copy has these blocks intact:\n" + "\n".join(reasons),
            [self._failures.get(block, {}) for block in lost],
            lost,
        )

    def _error(
        self,
        text: str,
        lost: Sequence[dict[AnyCopy, CopyError]],
        blocks: Sequence[int] = (),
    ) -> IntegrityError | TierUnavailableError:
        # A copy that could not be read may be intact: only damage of all of them proves a loss.
        if all(any(not failure.damaged for failure in found.values()) for found in lost):
            return TierUnavailableError(text, key=self._ref.id, blocks=tuple(blocks))
        return IntegrityError(text, key=self._ref.id, blocks=tuple(blocks))


def _is_remote(source: SourceRef, host_id: str) -> bool:
    return source.kind == "object" or (not source.shared and source.host != host_id)


def _is_direct(group: Sequence[Copy]) -> bool:
    for copy in group:
        try:
            return copy.open().direct
        except CopyError:
            continue
    return False
