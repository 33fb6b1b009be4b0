"""The one digest of all formats: XXH3-128, in its canonical (big-endian) form.

It finds accidents (flipped bits, torn or truncated writes, wrong files), not attackers: XXH3 is
not cryptographic, and whoever can write to a tier can forge a digest (docs/security.md).
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
