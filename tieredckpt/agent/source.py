"""A segment in memory as the source of a spill: each block is verified before it is handed on."""

from __future__ import annotations

from collections.abc import Callable

from tieredckpt import failpoints
from tieredckpt.errors import IntegrityError, TierUnavailableError
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import SegmentRef
from tieredckpt.format.segment import TRAILER_BYTES, Footer, decode_footer, decode_trailer
from tieredckpt.tiers.base import OpenObject


class DamagedSourceError(IntegrityError):
    """The memory copy is bad. Fields: ``segment_id``, ``blocks`` (empty: as a whole)."""


class VerifiedSource:
    """Implements :class:`tieredckpt.tiers.base.ByteSource` over an open segment.

    Args:
        opened: The segment; stays the caller's to close.
        ref: What the manifest says of it.
        stopping: Asked at every block; True abandons the transfer.

    Raises:
        DamagedSourceError: Size or footer are not what the manifest says.
    """

    def __init__(self, opened: OpenObject, ref: SegmentRef, stopping: Callable[[], bool]) -> None:
        self.size = ref.size
        self._opened = opened
        self._ref = ref
        self._stopping = stopping
        self._footer, self._tail = self._read_footer()

    def _read_footer(self) -> tuple[Footer, bytes]:
        """The footer, and all bytes after the last item: padding and footer."""
        if self._opened.size < self.size:
            raise self._damaged((), f"{self._opened.size} of {self.size} bytes are left")
        try:
            trailer = decode_trailer(self._read(self.size - TRAILER_BYTES, TRAILER_BYTES))
            if trailer.root.hex() != self._ref.root or trailer.segment_bytes != self.size:
                raise IntegrityError("its trailer is another segment's")
            start = trailer.index_offset
            data = self._read(start, self.size - start)
            footer = decode_footer(trailer, data)
        except IntegrityError as error:
            raise self._damaged((), str(error)) from error
        return footer, bytes(start - trailer.data_bytes) + data

    def _read(self, offset: int, size: int) -> bytes:
        buffer = bytearray(size)
        self._opened.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with verified bytes; see :class:`tieredckpt.tiers.base.ByteSource`."""
        trailer = self._footer.trailer
        self._opened.read_into(offset, into)
        block_bytes, data_bytes = trailer.block_bytes, trailer.data_bytes
        stop = offset + len(into)
        # Runs start on a block's boundary and hold whole blocks, except at the very end.
        assert offset % block_bytes == 0 or offset >= data_bytes
        for index in range(offset // block_bytes, -(-min(stop, data_bytes) // block_bytes)):
            failpoints.reach("agent.spill.segment")
            if self._stopping():
                raise TierUnavailableError(
                    "the agent stops: the spill is abandoned", outcome="not_applied", stopping=True
                )
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
            f"the memory copy of segment {self._ref.id} is damaged: {what}",
            tier="memory",
            key=self._ref.id,
            segment_id=self._ref.id,
            blocks=blocks,
        )
