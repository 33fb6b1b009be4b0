"""Pulling one segment from other hosts straight into a slot of this one, verified as it lands.

It comes from other hosts' memory, then from what tiers of hosts still have of it.

The footer comes first and is proven by the root in the manifest; then runs of blocks come over a
few connections at once, and each block is digested in the buffer that it was received into before
it counts. A block that does not match, or a host that does not deliver, costs that run once more
from the next host. The slot is written with ``pwrite``: a mapping would save a copy, and somebody
who truncates the slot's file meanwhile would kill the agent (SIGBUS).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tieredckpt import failpoints
from tieredckpt.config.tiers import TierSpec
from tieredckpt.errors import IntegrityError, NotFoundError, TieredCkptError, TierUnavailableError
from tieredckpt.format.digest import DIGEST_BYTES, BlockDigests, digest
from tieredckpt.format.manifest import SegmentRef, read_footer
from tieredckpt.format.segment import Footer
from tieredckpt.policy.replication import Pull
from tieredckpt.storage.base import OpenObject, unavailable
from tieredckpt.storage.file_io import CopyPool, aligned_buffer
from tieredckpt.storage.memory.pool import TIER

RUN_BYTES = 64 << 20
"""Most bytes of one request."""
RUNS_PER_CONNECTION = 4
"""So that no connection is left with the last run alone, where a segment is large enough."""
PIECE_BYTES = 1 << 20
"""Received, digested and written at once: measured best of 128 KiB to 4 MiB with ``pwrite``."""
UNIT_BYTES = 4 << 20
"""Blocks are received together up to this size: what breaks off in it comes once more."""
PIECE_BYTES_MIN = 4096
PIECES_PER_S = 20
"""Under a bandwidth limit pieces are so small that a connection never looks stalled."""
LIMITED_BYTES_PER_S = 256 << 20
"""Below this limit one connection is enough, and more would only wait for each other."""
MISMATCHES = 2
"""Pulled so often without a match, a block is damaged at its host, and not on the way: a mark of
damage is for good."""
TAIL_BYTES = 256 << 10
"""Asked for first: most footers are shorter."""
BURST_S = 0.05
"""What may come at once after a pause, in seconds of the budget: short, so that a link that is
shared with the training sees no bursts, and longer than a thread sleeps by mistake."""

log = logging.getLogger(__name__)


class Stream(Protocol):
    """One range on its way; see :class:`tieredckpt.rpc.peer_client.PeerClient`."""

    def read_into(self, into: memoryview) -> None:
        """Fill ``into``, or raise TierUnavailableError."""

    def close(self) -> None:
        """Idempotent."""


class RangeClient(Protocol):
    """What a pull needs of a peer's client. Thread-safe."""

    def open_range(self, segment_id: str, tier: str, start: int, stop: int) -> Stream:
        """One ranged GET.

        Raises:
            TierUnavailableError: The host does not answer.
            NotFoundError: It does not hold the segment.
            IntegrityError: Its copy is shorter than that.
        """

    def report_damage(self, tier: str, segment_id: str, blocks: Sequence[int], reason: str) -> None:
        """Tell the host that its copy is bad."""


@dataclass(frozen=True, slots=True)
class Donor:
    """A place that may hold the segment."""

    host_id: str
    client: RangeClient
    tier: str = TIER

    @property
    def name(self) -> str:
        """For messages; no two donors of a pull have the same."""
        return self.host_id if self.tier == TIER else f"{self.host_id} ({self.tier})"


class TiersHere(Protocol):
    """What a pull needs of this host's own tiers. Thread-safe."""

    def open_in(self, tier: str, segment_id: str) -> OpenObject:
        """Raises NotFoundError: there is no such tier, it does not answer, or it lacks that."""

    def quarantine(self, tier: str, segment_id: str, blocks: Sequence[int], reason: str) -> None:
        """Note that a copy is bad."""


class OwnTiers:
    """This host's own tiers as a donor: implements :class:`RangeClient` without a network."""

    def __init__(self, here: TiersHere) -> None:
        self._here = here

    def open_range(self, segment_id: str, tier: str, start: int, stop: int) -> Stream:
        """See :class:`RangeClient`."""
        return _OwnRange(self._here.open_in(tier, segment_id), start)

    def report_damage(self, tier: str, segment_id: str, blocks: Sequence[int], reason: str) -> None:
        """See :class:`RangeClient`."""
        self._here.quarantine(tier, segment_id, blocks, reason)


class _OwnRange:
    """Bytes of a tier of this host, in order."""

    def __init__(self, opened: OpenObject, start: int) -> None:
        self._opened = opened
        self._at = start

    def read_into(self, into: memoryview) -> None:
        self._opened.read_into(self._at, into)
        self._at += len(into)

    def close(self) -> None:
        self._opened.close()


def donors_of(
    pull: Pull,
    tiers: Sequence[TierSpec],
    client: Callable[[str], RangeClient],
    own: tuple[str, RangeClient],
) -> list[Donor]:
    """In the order to try: memory of other hosts, tiers of this one, disks of the others.

    Args:
        pull: What is wanted.
        tiers: Those that the checkpoint is destined for, the cheapest first. One of scope host has
            what its host wrote; a shared one this host can read, too.
        client: The line to a host; a host of which it raises one of our errors is left out.
        own: This host.
    """
    lines: list[tuple[str, RangeClient]] = []
    for host in pull.sources:
        try:
            lines.append((host, client(host)))
        except TieredCkptError:  # nobody can name an address of it
            continue
    disks = [tier.name for tier in tiers if tier.scope == "host"]
    shared = [tier.name for tier in tiers if tier.scope != "host"]
    found = [Donor(host, line) for host, line in lines]
    found += [Donor(*own, tier) for tier in (*(disks if pull.own else ()), *shared)]
    return found + [Donor(host, line, tier) for host, line in lines for tier in disks]


class RateLimit:
    """How fast this host may pull: one budget of bytes per second for all connections together.

    A token bucket that says how long to wait. Thread-safe.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bytes_per_s = 0
        self._paid_until_s = 0.0
        """When everything that was taken so far is paid for."""

    @property
    def bytes_per_s(self) -> int:
        """The limit; 0: none."""
        return self._bytes_per_s

    def set(self, bytes_per_s: int) -> None:
        """Another limit from now on; 0: none."""
        with self._lock:
            self._bytes_per_s = bytes_per_s
            self._paid_until_s = 0.0

    def take(self, size: int) -> float:
        """Book ``size`` bytes; the seconds that the caller must wait before it moves them."""
        with self._lock:
            if not self._bytes_per_s:
                return 0.0
            now_s = self._clock()
            begin_s = max(self._paid_until_s, now_s - BURST_S)
            self._paid_until_s = begin_s + size / self._bytes_per_s
            return max(0.0, self._paid_until_s - now_s)


class PullStoppedError(TierUnavailableError):
    """The agent stops, or nobody wants the copy any more: the pull is abandoned."""


class SegmentPull:
    """Fills one slot with one segment. Used once.

    Args:
        ref: The segment.
        donors: Who may hold it, the first to be asked first.
        limit: Shared by all pulls.
        stopping: Set: the pull is abandoned within a piece.
        connections: At most so many ranges at once.
        landed: Called with the bytes of each piece that was received.
    """

    def __init__(
        self,
        ref: SegmentRef,
        donors: Sequence[Donor],
        *,
        limit: RateLimit,
        stopping: threading.Event,
        connections: int = 3,
        landed: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._ref = ref
        self._fd = -1
        self._donors = donors
        self._limit = limit
        self._stopping = stopping
        self._connections = connections
        self._landed = landed
        self._lock = threading.Lock()
        self._failed = threading.Event()
        """One connection found that the pull cannot succeed: the others need not go on."""
        self._down: dict[str, TieredCkptError] = {}
        """Donors, by name, that did not deliver; not asked again in this pull."""
        self._mismatched: dict[tuple[str, int], int] = {}
        """How often a block of a host did not match: once may be the network's doing."""
        self._footer: Footer | None = None
        self._tail = b""
        """The bytes of the footer."""

    def run(self, fd: int, *, resume: bool) -> None:
        """Fill the slot with the whole segment, verified; it may be sealed then.

        Args:
            fd: The slot, locked by us for writing; stays the caller's.
            resume: It may hold blocks of an earlier try: they are digested, not pulled again.

        Raises:
            TierUnavailableError: A host that may hold what is missing did not deliver: try later.
            IntegrityError: Every host that answers has a damaged copy of what is missing.
            NotFoundError: No host that answers holds the segment.
            OSError: The slot cannot be written.
        """
        self._fd = fd
        footer = self.find()
        self._pull_all(footer, self._plan_runs(footer, resume=resume))
        # Last: the trailer is what makes the slot look like a whole segment.
        _write_all(fd, memoryview(self._tail), footer.trailer.index_offset)

    # --- the footer -------------------------------------------------------------------------------

    def find(self) -> Footer:
        """The proven footer, of the first copy that vouches for itself. Raises as :meth:`run`."""
        for donor in self._donors if self._footer is None else ():
            try:
                read = partial(self._fetch, donor)
                self._footer, self._tail = read_footer(self._ref, read, TAIL_BYTES)
                break
            except PullStoppedError:
                raise
            except TieredCkptError as error:
                self._give_up(donor, error)
        if self._footer is None:
            raise self._nobody("its footer")
        return self._footer

    def _fetch(self, donor: Donor, start: int, stop: int) -> bytes:
        data = bytearray(stop - start)
        self._pause(len(data))
        with contextlib.closing(
            donor.client.open_range(self._ref.id, donor.tier, start, stop)
        ) as stream:
            stream.read_into(memoryview(data))
        self._landed(len(data))
        return bytes(data)

    # --- runs of blocks ---------------------------------------------------------------------------

    def _plan_runs(self, footer: Footer, *, resume: bool) -> list[range]:
        """The blocks that are missing, in runs that are one request each."""
        share = footer.trailer.data_bytes // (self._connections * RUNS_PER_CONNECTION)
        most = max(1, min(RUN_BYTES, share) // footer.trailer.block_bytes)
        missing = range(footer.trailer.num_blocks)
        if not resume:
            return _runs_of(missing, most)
        left = [block for block in missing if not self._has(footer, block)]
        log.info(
            "segment %s: %d of %d blocks are in the slot already",
            self._ref.id, footer.trailer.num_blocks - len(left), footer.trailer.num_blocks,
        )  # fmt: skip
        return _runs_of(left, most)

    def _has(self, footer: Footer, block: int) -> bool:
        self._check_going()
        start, stop = footer.block_range(block)
        data = os.pread(self._fd, stop - start, start)
        return len(data) == stop - start and digest(data) == footer.block_digest(block)

    def _pull_all(self, footer: Footer, runs: list[range]) -> None:
        """Pull all runs over several connections; the first error of any is raised."""
        errors: list[TieredCkptError | OSError] = []

        def work(number: int) -> None:
            try:
                self._pull_run(footer, runs[number], aligned_buffer(PIECE_BYTES))
            except (TieredCkptError, OSError) as error:
                errors.append(error)
                self._failed.set()
                raise

        limited = 0 < self._limit.bytes_per_s < LIMITED_BYTES_PER_S
        pool = CopyPool(1 if limited else self._connections)
        try:
            pool.run(work, len(runs))  # each ends within a piece: reading has a deadline
        except (TieredCkptError, OSError):
            raise errors[0] from None  # the others were told to stop because of it
        finally:
            pool.close()

    def _pull_run(self, footer: Footer, run: range, buffer: memoryview) -> None:
        """All blocks of ``run``, from whoever delivers them intact."""
        todo = [run]
        while todo:
            part = todo.pop()
            donor = self._choose(part)
            done = part.start
            bad: list[int] = []
            try:
                start, stop = footer.block_range(part.start)[0], footer.block_range(part[-1])[1]
                stream = donor.client.open_range(self._ref.id, donor.tier, start, stop)
                with contextlib.closing(stream):
                    for blocks in _units(part, footer.trailer.block_bytes):
                        bad += self._receive(stream, footer, blocks, buffer)
                        done = blocks.stop
            except PullStoppedError:
                raise
            except TieredCkptError as error:
                self._give_up(donor, error)
            self._note_bad(donor, bad)
            todo += _runs_of(bad, footer.trailer.num_blocks)
            if done < part.stop:
                todo.append(range(done, part.stop))

    def _receive(
        self, stream: Stream, footer: Footer, blocks: range, buffer: memoryview
    ) -> list[int]:
        """Blocks from the stream into the slot; those that are not what they should be."""
        start, stop = footer.block_range(blocks.start)[0], footer.block_range(blocks[-1])[1]
        # Incrementally: a second pass over four megabytes would find them out of the cache.
        digests = BlockDigests(footer.trailer.block_bytes)
        while start < stop:
            piece = buffer[: min(self._piece_bytes(), stop - start)]
            self._pause(len(piece))
            stream.read_into(piece)
            digests.update(piece)
            _write_all(self._fd, piece, start)
            self._landed(len(piece))
            start += len(piece)
        failpoints.reach("agent.replica.block")
        found = digests.finish()
        return [
            block
            for number, block in enumerate(blocks)
            if found[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            != footer.block_digest(block)
        ]

    def _piece_bytes(self) -> int:
        limit = self._limit.bytes_per_s
        if not limit:
            return PIECE_BYTES
        size = limit // PIECES_PER_S // PIECE_BYTES_MIN * PIECE_BYTES_MIN
        return max(PIECE_BYTES_MIN, min(PIECE_BYTES, size))

    def _pause(self, size: int) -> None:
        """Wait as the bandwidth limit demands. Raises PullStoppedError."""
        self._check_going()
        wait_s = self._limit.take(size)
        if wait_s > 0 and self._stopping.wait(wait_s):
            self._check_going()

    def _check_going(self) -> None:
        if self._stopping.is_set() or self._failed.is_set():
            raise PullStoppedError("the pull was abandoned", outcome="not_applied")

    # --- who delivers -----------------------------------------------------------------------------

    def _choose(self, part: range) -> Donor:
        """The first donor that delivers and is not known to have a bad block in ``part``."""
        with self._lock:
            for donor in self._donors:
                bad = any(
                    self._mismatched.get((donor.name, block), 0) >= MISMATCHES for block in part
                )
                if donor.name not in self._down and not bad:
                    return donor
        raise self._nobody(f"blocks {part.start} to {part.stop - 1}")

    def _note_bad(self, donor: Donor, blocks: Sequence[int]) -> None:
        """These did not match; those that did not for the second time are damaged there."""
        damaged = []
        with self._lock:
            for block in blocks:
                key = (donor.name, block)
                self._mismatched[key] = self._mismatched.get(key, 0) + 1
                if self._mismatched[key] == MISMATCHES:
                    damaged.append(block)
        if damaged:
            self._report(donor, damaged, "pulled twice, they do not match their digests")

    def _give_up(self, donor: Donor, error: TieredCkptError) -> None:
        if isinstance(error, IntegrityError):
            self._report(donor, (), str(error))
        with self._lock:
            self._down[donor.name] = error

    def _report(self, donor: Donor, blocks: Sequence[int], reason: str) -> None:
        log.warning(
            "segment %s: the copy of %s is bad (%s): %s",
            self._ref.id, donor.name, list(blocks) or "all of it", reason,
        )  # fmt: skip
        try:
            donor.client.report_damage(donor.tier, self._ref.id, blocks, reason)
        except TieredCkptError as error:  # it will be found again
            log.info("the damage was not reported to %s: %s", donor.name, error)

    def _nobody(self, what: str) -> TieredCkptError:
        """Why no host is left for ``what``, as the error that says what to do next."""
        with self._lock:
            reasons = {each.name: self._down.get(each.name) for each in self._donors}
        # A disk that does not answer is not waited for: what memory lacks would hold up all else.
        away = {d.name for d in self._donors if d.tier != TIER and _may_answer(reasons[d.name])}
        said = "; ".join(
            f"{host}: {error or 'damaged'}" for host, error in reasons.items()
        )  # fmt: skip
        text = f"{what} of segment {self._ref.id} cannot be copied: {said or 'no host holds it'}"
        errors = [error for name, error in reasons.items() if name not in away]
        if any(map(_may_answer, errors)):
            return unavailable(TIER, text)
        if not errors or all(isinstance(error, NotFoundError) for error in errors):
            return NotFoundError(text, key=self._ref.id)
        return IntegrityError(text, tier="memory", key=self._ref.id)


def _units(blocks: range, block_bytes: int) -> list[range]:
    count = max(1, UNIT_BYTES // block_bytes)
    return [blocks[at : at + count] for at in range(0, len(blocks), count)]


def _may_answer(error: TieredCkptError | None) -> bool:
    """Whether who failed so may deliver when it is asked again."""
    return error is not None and not isinstance(error, IntegrityError | NotFoundError)


def _runs_of(blocks: Iterable[int], most: int) -> list[range]:
    """Blocks in ascending order as runs of neighbours, of at most so many each."""
    runs: list[range] = []
    for block in blocks:
        if runs and runs[-1].stop == block and len(runs[-1]) < most:
            runs[-1] = range(runs[-1].start, block + 1)
        else:
            runs.append(range(block, block + 1))
    return runs


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
