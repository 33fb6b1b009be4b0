"""The footer of one copy, held against the root digest that the manifest names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tieredckpt.errors import FormatVersionError, IntegrityError
from tieredckpt.format.segment import (
    PAGE_BYTES,
    TRAILER_BYTES,
    Footer,
    decode_footer,
    decode_trailer,
)
from tieredckpt.recovery.copies import CopyError, ScratchPool

if TYPE_CHECKING:
    from tieredckpt.format.manifest import SegmentRef


class Readable(Protocol):
    """A copy, wherever it is."""

    @property
    def tail_bytes(self) -> int: ...
    def check_size(self, stop: int) -> None: ...
    def read_into(self, start: int, into: memoryview) -> None: ...


def read_footer(copy: Readable, ref: SegmentRef, scratch: ScratchPool) -> Footer:
    """The footer of ``copy``, if it is that of the segment ``ref``.

    Raises:
        CopyError: It is not, or it cannot be read.
        FormatVersionError: It is of a later release.
    """
    if ref.size % PAGE_BYTES or not ref.size:
        raise CopyError(f"no segment has {ref.size} bytes", damaged=False)
    copy.check_size(ref.size)
    start = max(0, ref.size - copy.tail_bytes)
    tail = _read_pages(copy, start, ref.size, scratch)
    try:
        trailer = decode_trailer(tail[-TRAILER_BYTES:])
        if trailer.root.hex() != ref.root or trailer.segment_id.hex() != ref.id:
            raise IntegrityError(
                f"it holds segment {trailer.segment_id.hex()} with root {trailer.root.hex()}, "
                f"the manifest says {ref.root}"
            )
        if trailer.segment_bytes != ref.size:
            raise IntegrityError(f"its trailer says {trailer.segment_bytes} bytes")
        first = trailer.index_offset // PAGE_BYTES * PAGE_BYTES
        if first < start:
            start, tail = first, _read_pages(copy, first, ref.size, scratch)
        return decode_footer(trailer, tail[trailer.index_offset - start :])
    except FormatVersionError:
        raise
    except IntegrityError as error:
        raise CopyError(str(error), damaged=True) from error


def _read_pages(copy: Readable, start: int, stop: int, scratch: ScratchPool) -> bytes:
    buffer = scratch.take(stop - start)
    try:
        with memoryview(buffer) as memory, memory[: stop - start] as into:
            copy.read_into(start, into)
            return bytes(into)
    finally:
        scratch.give(buffer)
