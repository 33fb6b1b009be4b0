"""A segment as the source of a spill: each block is verified before it is handed on.

It is read from the tier that the spill is filled from, and from memory where that copy is bad.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from tieredckpt import failpoints
from tieredckpt.agent.tiers.interface import SpillHost
from tieredckpt.errors import (
    FormatVersionError,
    IntegrityError,
    NotFoundError,
    TieredCkptError,
    TierUnavailableError,
)
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import Manifest, SegmentRef, encode_attempt, read_footer
from tieredckpt.format.segment import Footer
from tieredckpt.storage.base import OpenObject, attempt_key, segment_key
from tieredckpt.storage.catalog import Catalog
from tieredckpt.storage.file_io import RUN_BYTES

MEMORY = "memory"

log = logging.getLogger(__name__)


class DamagedSourceError(IntegrityError):
    """The copy to be spilled is bad. Fields: ``tier``, ``segment_id``, ``blocks`` (empty: all)."""


class VerifiedSource:
    """Implements :class:`tieredckpt.storage.base.ByteSource` over an open segment.

    Args:
        opened: The segment; stays the caller's to close.
        ref: What the manifest says of it.
        stopping: Asked at every few blocks; True abandons the transfer.
        tier: Which copy it is.

    Raises:
        DamagedSourceError: Size or footer are not what the manifest says.
        FormatVersionError: Its blocks are not of a size that this release writes.
    """

    def __init__(
        self,
        opened: OpenObject,
        ref: SegmentRef,
        stopping: Callable[[], bool],
        tier: str = MEMORY,
    ) -> None:
        self.size = ref.size
        self._tier = tier
        self._opened = opened
        self._ref = ref
        self._stopping = stopping
        self._footer, self._tail = self._read_footer()

    def _read_footer(self) -> tuple[Footer, bytes]:
        """The footer, and its bytes: all that follow the data."""
        if self._opened.size < self.size:
            raise self._damaged((), f"{self._opened.size} of {self.size} bytes are left")
        try:
            footer, data = read_footer(self._ref, self._read)
        except FormatVersionError:
            raise
        except IntegrityError as error:
            raise self._damaged((), str(error)) from error
        block_bytes = footer.trailer.block_bytes
        if RUN_BYTES % block_bytes:
            raise FormatVersionError(
                f"segment {self._ref.id} has blocks of {block_bytes} bytes, of which runs "
                f"of {RUN_BYTES} bytes hold no whole number: upgrade",
                key=self._ref.id,
            )
        return footer, data

    def _read(self, start: int, stop: int) -> bytes:
        buffer = bytearray(stop - start)
        self._opened.read_into(start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with verified bytes; see :class:`tieredckpt.storage.base.ByteSource`."""
        trailer = self._footer.trailer
        self._opened.read_into(offset, into)
        block_bytes, data_bytes = trailer.block_bytes, trailer.data_bytes
        stop = offset + len(into)
        # Runs start on a block's boundary and hold whole blocks, except at the very end.
        assert offset % block_bytes == 0 or offset >= data_bytes
        last = -(-min(stop, data_bytes) // block_bytes)
        together = max(1, RUN_BYTES // block_bytes)
        for first in range(offset // block_bytes, last, together):
            failpoints.reach("agent.spill.segment")
            if self._stopping():
                raise TierUnavailableError(
                    "the agent stops: the spill is abandoned", outcome="not_applied", stopping=True
                )
            for index in range(first, min(first + together, last)):
                start, end = self._footer.block_range(index)
                assert end <= stop
                if digest(into[start - offset : end - offset]) != self._footer.block_digest(index):
                    raise self._damaged((index,), f"block {index} does not match its digest")
        if stop > data_bytes:
            start = max(offset, data_bytes)
            expected = memoryview(self._tail)[start - data_bytes : stop - data_bytes]
            if into[start - offset :] != expected:
                raise self._damaged((), "its footer changed while it was read")

    def _damaged(self, blocks: tuple[int, ...], what: str) -> DamagedSourceError:
        return DamagedSourceError(
            f"the {self._tier} copy of segment {self._ref.id} is damaged: {what}",
            tier=self._tier,
            key=self._ref.id,
            segment_id=self._ref.id,
            blocks=blocks,
        )


class SpillSource:
    """This host's own segment, from the tier above or from memory: a context manager.

    Implements :class:`tieredckpt.storage.base.ByteSource`.

    Args:
        host: Opens copies.
        tier: Where to read first: memory, or a tier that is asked before memory.
        ref: The segment.
        stopping: Asked at every few blocks.

    Raises:
        NotFoundError: There is no copy.
        DamagedSourceError: A copy is bad, and there is no other one.
        TierUnavailableError: The tier above does not answer, and memory has no copy.
    """

    def __init__(
        self, host: SpillHost, tier: str, ref: SegmentRef, stopping: Callable[[], bool]
    ) -> None:
        self.size = ref.size
        self._host = host
        self._ref = ref
        self._stopping = stopping
        self._tier = tier
        self._open = contextlib.ExitStack()
        self._source = self._first()

    def __enter__(self) -> SpillSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def _first(self) -> VerifiedSource:
        if self._tier != MEMORY:
            try:
                return self._of(self._tier)
            except TieredCkptError as error:
                self._tier = MEMORY
                return self._from_memory(error)
        return self._of(MEMORY)

    def _of(self, tier: str) -> VerifiedSource:
        if tier == MEMORY:
            opened = self._host.open_memory(self._ref.id)
        else:
            opened = self._host.open_above(tier, self._ref.id)
        self._open.push(lambda *exc: opened.close())
        return VerifiedSource(opened, self._ref, self._stopping, tier)

    def _from_memory(self, error: TieredCkptError) -> VerifiedSource:
        """The tier above has no good copy; raises ``error`` if memory has none either."""
        if isinstance(error, DamagedSourceError):
            self._host.quarantine(error.tier, error.segment_id, error.blocks, error.message)
        log.warning("segment %s is read from memory instead: %s", self._ref.id, error)
        try:
            return self._of(MEMORY)
        except NotFoundError:
            raise error from None

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with verified bytes; see :class:`tieredckpt.storage.base.ByteSource`."""
        try:
            self._source.read_into(offset, into)
        except (IntegrityError, TierUnavailableError) as error:
            if self._tier == MEMORY or self._stopping():
                raise
            self._tier = MEMORY
            self._source = self._from_memory(error)
            self._source.read_into(offset, into)


def _has(catalog: Catalog, ref: SegmentRef) -> bool:
    try:
        return catalog.tier.info(segment_key(ref.id)).size == ref.size
    except NotFoundError:
        return False


def copy_checkpoint(
    catalog: Catalog,
    job: Manifest,
    host: SpillHost,
    tier: str,
    stopping: Callable[[], bool],
    count: Callable[[int], None],
) -> None:
    """Attempts, this host's segments, the plan, then the manifest.

    Each host copies what its own ranks wrote. A tier of this host holds its part when that is
    there, and the parts of all hosts count together. Shared ones: :mod:`.upload`.

    Args:
        catalog: Of the tier.
        job: The checkpoint.
        host: Where it comes from.
        tier: Which copy is read: memory's, or that of the tier above.
        stopping: Asked between two blocks; True abandons the transfer.
        count: Told of bytes that were copied.

    Raises:
        DamagedSourceError: The copy is bad, and there is no other one here.
        TierUnavailableError: The tier does not answer: to be tried again.
        CapacityError, NotFoundError, IntegrityError: As the tier and the catalog.
    """
    # Attempts first: a manifest whose attempt is unknown could not be placed on the time line.
    # They are looked for each time: a scratch disk is purged of files that are old.
    readable, there = catalog.attempts(), {info.key for info in catalog.tier.list("attempts/")}
    for record in host.known_attempts():
        if record not in readable or attempt_key(record.number, record.id) not in there:
            catalog.put_attempt(encode_attempt(record))
    mine = host.own_segments(job)
    for ref in mine:
        try:
            source = SpillSource(host, tier, ref, stopping)
        except NotFoundError:
            if not _has(catalog, ref):
                raise
            continue  # copied before this host lost its memory
        with source:
            catalog.tier.put_from(segment_key(ref.id), source)
        count(ref.size)
    failpoints.reach("agent.spill.before_plan")
    if not catalog.has_plan(job.plan):
        catalog.put_plan(job.plan, host.read_plan(job.plan))
    failpoints.reach("agent.spill.before_manifest")
    needed = None if len(mine) == len(job.segments) else {ref.id for ref in mine}
    catalog.commit(host.read_manifest(job), segments=needed)
    failpoints.reach("agent.spill.after_manifest")
    for data in host.keeping.pins_of(job.save_id):
        catalog.put_record(data)
