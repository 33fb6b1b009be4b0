"""Fetching byte ranges of one segment from its copies, each block verified where it lands.

Whoever holds the manifest knows the segment's root digest; a footer that ends in it proves the
table of block digests, whichever copy it came from, and the table proves each block, whichever
copy that came from. So one bad block costs one block from the next copy, and a copy that was
truncated still gives what it has.

Three ways of reading, each the fastest measured for its kind of copy (2 cores, GB/s verified):
a slot that this process has mapped and populated is copied and digested in cache-sized pieces; a
slot or file in the page cache is read straight into the destination; a file open with O_DIRECT is
read block by block into aligned scratch by several threads, so that the disk stays busy while
other blocks are digested and copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tieredckpt.errors import FormatVersionError, IntegrityError, TierUnavailableError
from tieredckpt.format.digest import Hasher
from tieredckpt.format.segment import (
    PAGE_BYTES,
    TRAILER_BYTES,
    Footer,
    decode_footer,
    decode_trailer,
)
from tieredckpt.recovery.blocks import BlockTask, Range, spread, tasks_of
from tieredckpt.recovery.copies import Copy, CopyError, OpenedSource, ScratchPool
from tieredckpt.tiers.copy_pool import CopyPool
from tieredckpt.tiers.mapping import address_of, advise_huge_pages

if TYPE_CHECKING:
    from tieredckpt.format.manifest import SegmentRef
    from tieredckpt.recovery.plan import SourceRef

__all__ = ["FetchReport", "OpenedSource", "Range", "SegmentFetcher"]

READ_PIECE_BYTES = 512 << 10
"""Read into the destination, then digested."""

STRAIGHT_PIECES_MAX = 4
"""A block that is scattered further is read as a whole and then spread: fewer system calls."""

HUGE_PAGE_RANGE_BYTES = 4 << 20
"""Destinations from this size on are advised to use huge pages (numpy does the same)."""

DIRECT_THREADS = 4
"""Reads in flight from a disk; most of the time they wait, so cores do not bound them."""

FAILED_BLOCKS_MAX = 16
"""So many blocks without any good copy end a fetch: the rest would only lengthen the message."""


@dataclass(slots=True)
class FetchReport:
    """What came from where, summed over all fetches of one fetcher."""

    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    """Bytes of the blocks that were read and accepted."""
    damaged: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By tier: blocks that did not match their digest or could not be read."""


class SegmentFetcher:
    """Reads one segment. Use it from one thread at a time, and close it.

    Args:
        ref: The segment, as the manifest names it.
        sources: Its copies, in the order to try.
        open_source: Opens a copy. NotFoundError, TierUnavailableError, IntegrityError and
            OSError mean that this copy cannot be had.
        report_damage: Called as (copy, bad blocks, reason), at the end of a fetch, once per copy;
            no blocks: its footer or size is bad.
        threads: How many cores may be used.
    """

    def __init__(
        self,
        ref: SegmentRef,
        sources: Sequence[SourceRef],
        open_source: Callable[[SourceRef], OpenedSource],
        report_damage: Callable[[SourceRef, tuple[int, ...], str], None],
        *,
        threads: int = 2,
    ) -> None:
        self.report = FetchReport()
        self._ref = ref
        self._copies = [Copy(source, ref.size, open_source) for source in sources]
        self._report_damage = report_damage
        self._cpu_pool = CopyPool(max(1, threads))
        self._disk_pool = CopyPool(max(DIRECT_THREADS, threads))
        self._scratch = ScratchPool()
        self._footer: Footer | None = None
        self._lock = threading.Lock()
        self._bad: dict[Copy, dict[int, str]] = {}
        self._lost: dict[int, list[tuple[Copy, CopyError]]] = {}

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

    # --- the footer -------------------------------------------------------------------------------

    def footer(self) -> Footer:
        """The verified footer, from the first copy that has it; read once.

        Raises:
            IntegrityError: No copy has it (FormatVersionError: they are of a later release).
            TierUnavailableError: No copy could be opened.
        """
        if self._footer is not None:
            return self._footer
        failures: list[tuple[Copy, CopyError]] = []
        newer: FormatVersionError | None = None
        for copy in self._copies:
            try:
                self._footer = self._read_footer(copy)
                break
            except FormatVersionError as error:
                # Not damage: an upgraded process reads this very copy.
                newer = error
                failures.append((copy, CopyError(str(error), damaged=False)))
            except CopyError as failure:
                failures.append((copy, failure))
        for copy, found in failures:
            if found.damaged:
                self._report_damage(copy.source, (), found.reason)
        if self._footer is not None:
            return self._footer
        reasons = "; ".join(f"{copy.name}: {found.reason}" for copy, found in failures)
        text = f"segment {self._ref.id}: no copy has its footer: {reasons or 'there is no copy'}"
        if newer is not None:
            raise FormatVersionError(text, key=self._ref.id)
        raise self._error(text, failures)

    def _read_footer(self, copy: Copy) -> Footer:
        ref = self._ref
        if ref.size % PAGE_BYTES or not ref.size:
            raise CopyError(f"no segment has {ref.size} bytes", damaged=False)
        copy.check_size(ref.size)
        page = self._read_pages(copy, ref.size - PAGE_BYTES, ref.size)
        try:
            trailer = decode_trailer(page[-TRAILER_BYTES:])
            if trailer.root.hex() != ref.root or trailer.segment_id.hex() != ref.id:
                raise IntegrityError(
                    f"it holds segment {trailer.segment_id.hex()} with root {trailer.root.hex()}, "
                    f"the manifest says {ref.root}"
                )
            if trailer.segment_bytes != ref.size:
                raise IntegrityError(f"its trailer says {trailer.segment_bytes} bytes")
            first = trailer.index_offset // PAGE_BYTES * PAGE_BYTES
            data = self._read_pages(copy, first, ref.size)
            return decode_footer(trailer, data[trailer.index_offset - first :])
        except FormatVersionError:
            raise
        except IntegrityError as error:
            raise CopyError(str(error), damaged=True) from error

    def _read_pages(self, copy: Copy, start: int, stop: int) -> bytes:
        scratch = self._scratch.take(stop - start)
        try:
            with memoryview(scratch) as memory, memory[: stop - start] as into:
                copy.read_into(start, into)
                return bytes(into)
        finally:
            self._scratch.give(scratch)

    # --- the data ---------------------------------------------------------------------------------

    def fetch(self, ranges: Sequence[Range]) -> None:
        """Fill every destination with verified bytes, or raise. Ranges may overlap.

        Only blocks that the ranges touch are read. After a failure the contents of all
        destinations are undefined.

        Raises:
            IntegrityError: Some block has no good copy; the text lists each copy's failure. Or a
                range is outside of the segment.
            TierUnavailableError: The same, if no copy could even be opened.
        """
        footer = self.footer()
        tasks = tasks_of(footer, ranges)
        if not tasks:
            return
        for each in ranges:
            if each.stop - each.start >= HUGE_PAGE_RANGE_BYTES:
                advise_huge_pages(address_of(each.dest), each.stop - each.start)
        self._bad, self._lost = {}, {}
        pool = self._disk_pool if self._is_direct() else self._cpu_pool
        try:
            pool.run(lambda number: self._fetch_block(footer, tasks[number]), len(tasks))
        finally:
            self._report_bad_blocks()
        if self._lost:
            self._raise_lost()

    def _is_direct(self) -> bool:
        for copy in self._copies:
            try:
                return copy.open().direct
            except CopyError:
                continue
        return False

    def _fetch_block(self, footer: Footer, task: BlockTask) -> None:
        if len(self._lost) >= FAILED_BLOCKS_MAX:
            return
        expected = footer.block_digest(task.block)
        failures: list[tuple[Copy, CopyError]] = []
        # A quarantined block is asked for last: the digest decides, not what someone found before.
        for copy in sorted(self._copies, key=lambda c: task.block in c.source.bad_blocks):
            try:
                actual = self._land(copy, task, expected)
                if actual != expected:
                    raise CopyError(
                        f"digest is {actual.hex()}, expected {expected.hex()}", damaged=True
                    )
            except CopyError as failure:
                failures.append((copy, failure))
                continue
            with self._lock:
                by_tier = self.report.bytes_by_tier
                tier = copy.source.tier
                by_tier[tier] = by_tier.get(tier, 0) + task.stop - task.start
            break
        else:
            with self._lock:
                self._lost[task.block] = failures
        with self._lock:
            for copy, found in failures:
                if found.damaged:
                    self._bad.setdefault(copy, {})[task.block] = found.reason

    def _land(self, copy: Copy, task: BlockTask, expected: bytes) -> bytes:
        """Bring a block's bytes to where they are wanted; returns the digest of what is there."""
        opened = copy.open()
        # Bytes wanted in several places are digested before they are copied, so not where another
        # process could change them in between.
        if copy.address is not None and opened.view is not None and not task.overlaps():
            copy.check_size(task.stop)
            return spread(task, opened.view, copy.address, 0, expected)
        if not (opened.direct or len(task.parts) > STRAIGHT_PIECES_MAX or task.overlaps()):
            return self._read_straight(copy, task)
        size = task.stop - task.start
        # A block starts on a page, and the footer fills the page in which the last one ends.
        padded = -(-size // PAGE_BYTES) * PAGE_BYTES
        scratch = self._scratch.take(padded)
        try:
            with memoryview(scratch) as memory:
                with memory[:padded] as into:
                    copy.read_into(task.start, into, needed=size)
                return spread(task, memory, address_of(memory), task.start, expected)
        finally:
            self._scratch.give(scratch)

    def _read_straight(self, copy: Copy, task: BlockTask) -> bytes:
        hasher = Hasher()
        scratch = self._scratch.take(READ_PIECE_BYTES)
        try:
            with memoryview(scratch) as memory:
                for start, stop, part in task.pieces():
                    for at in range(start, stop, READ_PIECE_BYTES):
                        size = min(READ_PIECE_BYTES, stop - at)
                        if part is None:
                            into = memory[:size]
                        else:
                            into = part.dest[at - start : at - start + size]
                        with into:
                            copy.read_into(at, into)
                            hasher.update(into)
        finally:
            self._scratch.give(scratch)
        return hasher.digest()

    # --- failures ---------------------------------------------------------------------------------

    def _report_bad_blocks(self) -> None:
        for copy, blocks in self._bad.items():
            numbers = tuple(sorted(blocks))
            self._report_damage(copy.source, numbers, blocks[numbers[0]])
            before = self.report.damaged.get(copy.source.tier, ())
            self.report.damaged[copy.source.tier] = tuple(sorted({*before, *numbers}))

    def _raise_lost(self) -> None:
        lines = [
            f"block {block}: "
            + ("; ".join(f"{copy.name}: {f.reason}" for copy, f in failures) or "there is no copy")
            for block, failures in sorted(self._lost.items())
        ]
        failures = [each for found in self._lost.values() for each in found]
        raise self._error(
            f"segment {self._ref.id}: no copy has these blocks intact:\n" + "\n".join(lines),
            failures,
        )

    def _error(
        self, text: str, failures: list[tuple[Copy, CopyError]]
    ) -> IntegrityError | TierUnavailableError:
        if failures and not any(failure.damaged for _, failure in failures):
            return TierUnavailableError(text, key=self._ref.id)
        return IntegrityError(text, key=self._ref.id, blocks=tuple(sorted(self._lost)))
