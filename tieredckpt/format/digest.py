"""The one digest of all formats: XXH3-128, in its canonical (big-endian) form.

It finds accidents (flipped bits, torn or truncated writes, wrong files), not attackers: XXH3 is
not cryptographic, and anyone who can write to a tier can forge a digest (docs/operate/security.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

DIGEST_BYTES = 16
"""Bytes of a digest."""

Hasher = xxhash.xxh3_128
"""Incremental form: ``update(buffer)``, then ``digest()``. Releases the GIL on large buffers."""


def digest(data: Buffer) -> bytes:
    """The digest of ``data`` (any contiguous buffer), 16 bytes. Releases the GIL if it is large."""
    return xxhash.xxh3_128_digest(data)


class BlockDigests:
    """Digests of consecutive blocks, from bytes that come in order and in pieces of any size.

    A copy can so use pieces that suit the cache or the disk, independent of the block size.
    """

    __slots__ = ("_block_bytes", "_found", "_hasher", "_left")

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._left = block_bytes
        """Bytes that are missing from the current block."""
        self._hasher = Hasher()
        self._found: list[bytes] = []

    def update(self, data: memoryview) -> None:
        """The next bytes (of format "B"). Releases the GIL for large input."""
        size = len(data)
        if size < self._left:
            self._hasher.update(data)
            self._left -= size
            return
        at = 0
        if self._left < self._block_bytes:
            at = self._left
            self._hasher.update(data[:at])
            self._found.append(self._hasher.digest())
            self._hasher.reset()
        while size - at >= self._block_bytes:
            self._found.append(digest(data[at : at + self._block_bytes]))
            at += self._block_bytes
        self._left = self._block_bytes - (size - at)
        if at < size:
            self._hasher.update(data[at:])

    def finish(self) -> bytes:
        """The digests of all blocks, concatenated; the last may be shorter than the others."""
        if self._left < self._block_bytes:
            self._found.append(self._hasher.digest())
            self._left = self._block_bytes
        return b"".join(self._found)
