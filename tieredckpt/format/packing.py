"""Columns: a list of numbers or names as one byte string, so that no count is ever trusted.

A column's length follows from the bytes that are there, hence a hostile one cannot make a
decoder allocate more than a small multiple of what it was given. No numpy here: the agent reads
segment footers, and must stay small.

* numbers, 0 to 2**63 - 1: one byte with the width w (1, 2, 4 or 8), then little-endian values.
  The encoder takes the smallest width that fits; an empty column is the byte 1.
* names: a column of byte lengths, and the UTF-8 bytes of all of them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from tieredckpt.errors import IntegrityError

INT_MAX = (1 << 63) - 1
"""Largest number in any column: what a signed 64-bit integer holds."""

_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
_BIG_ENDIAN = sys.byteorder == "big"

T = TypeVar("T")

MALFORMED: Final = (ValueError, RecursionError)
"""What msgspec raises for bytes that it cannot decode: its own errors are ValueErrors, and so is
that of text that is no UTF-8; what is nested too deeply is none."""


def width_for(largest: int) -> int:
    """Bytes per value of a column whose largest value is ``largest``."""
    return 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4 if largest < 1 << 32 else 8


def pack_column(values: Sequence[int]) -> bytes:
    """``values`` as one byte string. Raises ValueError if one is not in 0 .. 2**63 - 1."""
    largest = max(values, default=0)
    if largest > INT_MAX or min(values, default=0) < 0:
        raise ValueError("a size, offset or count is negative or over 2**63 - 1")
    width = width_for(largest)
    column = array(_CODES[width], values)
    if _BIG_ENDIAN:
        column.byteswap()
    return bytes((width,)) + column.tobytes()


def column_width(column: bytes, limit: int, what: str) -> int:
    """Bytes per value of ``column``, its shape checked.

    Raises IntegrityError if it is no column or has more than ``limit`` values.
    """
    width = column[0] if column else 0
    if width not in _CODES or (len(column) - 1) % width:
        raise IntegrityError(f"{what}: not a column")
    if (len(column) - 1) // width > limit:
        raise IntegrityError(f"{what}: more than {limit} values")
    return width


def unpack_column(column: bytes, limit: int, what: str) -> list[int]:
    """The values of ``column``; the inverse of :func:`pack_column`.

    Raises:
        IntegrityError: No column, more than ``limit`` values, or one is over 2**63 - 1.
    """
    width = column_width(column, limit, what)
    values = array(_CODES[width])
    values.frombytes(memoryview(column)[1:])
    if _BIG_ENDIAN:
        values.byteswap()
    numbers = values.tolist()
    if width == 8 and max(numbers, default=0) > INT_MAX:
        raise IntegrityError(f"{what}: a value is over 2**63 - 1")
    return numbers


def pack_names(names: Sequence[str]) -> tuple[bytes, bytes]:
    """``names`` as (column of byte lengths, UTF-8 bytes).

    Raises ValueError (UnicodeEncodeError) for a lone surrogate, which UTF-8 cannot express.
    """
    encoded = [name.encode() for name in names]
    return pack_column([len(name) for name in encoded]), b"".join(encoded)


def unpack_names(lengths: bytes, text: bytes, limit: int, what: str) -> list[str]:
    """The names; the inverse of :func:`pack_names`. Raises IntegrityError."""
    names: list[str] = []
    position = 0
    try:
        for length in unpack_column(lengths, limit, what):
            names.append(str(text[position : position + length], "utf-8"))
            position += length
    except UnicodeDecodeError as error:
        raise IntegrityError(f"{what}: a name is not UTF-8") from error
    if position != len(text):
        raise IntegrityError(f"{what}: the lengths of the names do not fit their bytes")
    return names


def unpack_struct(
    decoder: msgspec.msgpack.Decoder[T],
    payload: bytes,
    what: str,
    check: Callable[[T], object] = lambda value: None,
) -> T:
    """``payload`` decoded, its types checked, and what ``check`` raises ValueError for.

    Raises IntegrityError.
    """
    try:
        value = decoder.decode(payload)
    except MALFORMED as error:
        raise IntegrityError(f"{what} is malformed: {error}") from error
    try:
        check(value)
    except ValueError as error:
        raise IntegrityError(f"{what}: {error}") from error
    return value
