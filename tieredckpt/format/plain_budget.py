"""What plain data may cost, and its codes: shared by encoder and decoder, which must agree.

Import what is public here from :mod:`tieredckpt.format.plain`.
"""

from __future__ import annotations

import struct
from typing import Any

MAX_PLAIN_BYTES = 64 << 20
"""Default limit of an encoded value."""

MAX_DEPTH = 64
"""Containers inside of containers."""

MAX_KEY_WORK = 1 << 31
"""Limit of the sum, over all rare keys, of encoded size times number of rare keys before it.

Rare are all dict keys and set elements but str, bytes, bool, None and 64-bit int. Their hashes are
not randomised, so they can be made to collide, and then each is compared with all before it, at
up to 2 ns per byte: some seconds in all. It allows some 15,000 keys of 20 bytes.
"""

COST_FACTOR = 16
"""Memory that a decoded value may take, as a multiple of the limit of its encoded size."""

LIST, TUPLE, SET, FROZENSET, BIG_INT, COMPLEX, EXTRA = range(1, 8)
COST_SLACK = 1 << 16
SAFE_KEYS = (str, bytes, bool, type(None))

F64 = struct.Struct(">d")
U8, U16, U32, U64 = (struct.Struct(f">{code}") for code in "BHIQ")
I64 = struct.Struct(">q")


class Budget:
    """What both directions count, so that what was encoded can be decoded."""

    def __init__(self, limit: int) -> None:
        self.cost = COST_FACTOR * limit + COST_SLACK
        self.rare_keys = 0
        self.key_work = MAX_KEY_WORK

    def over(self, cost: int) -> bool:
        """Charge ``cost`` bytes; whether the budget is exceeded."""
        self.cost -= cost
        return self.cost < 0

    def key_over(self, key: Any, size: int) -> bool:
        """Charge one key of ``size`` encoded bytes; whether the rare ones are too many."""
        kind = type(key)
        if kind in SAFE_KEYS or (kind is int and -(1 << 63) <= key < 1 << 64):
            return False
        self.key_work -= size * self.rare_keys
        self.rare_keys += 1
        return self.key_work < 0


def container_cost(code: int, count: int) -> int:
    """Bytes in memory of a container of ``count`` elements, without them; from sys.getsizeof."""
    if code in (SET, FROZENSET):
        return 216 + 128 * count
    return 64 + 8 * count


def dict_cost(count: int) -> int:
    """Bytes in memory of a dict of ``count`` entries, without keys and values."""
    return 64 + (120 + 100 * count if count else 0)


def short(key: Any) -> str:
    """``key`` for a path in an error message; never the repr of anything large or foreign."""
    if type(key) in (str, bytes):
        return repr(key[:80])
    if type(key) is int and key.bit_length() < 128:
        return repr(key)
    return repr(key) if type(key) in (bool, float, type(None)) else f"<{type(key).__name__}>"
