"""The decoder of plain data; see :mod:`tieredckpt.format.plain`, which is its public side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tieredckpt.errors import IntegrityError
from tieredckpt.format.plain_budget import (
    BIG_INT,
    COMPLEX,
    EXTRA,
    F64,
    FROZENSET,
    I64,
    LIST,
    MAX_DEPTH,
    SET,
    TUPLE,
    U8,
    U16,
    U32,
    U64,
    Budget,
    container_cost,
    dict_cost,
    short,
)

ExtraInverse = Callable[[str, Any], Any]
"""Given tag and content: the value. Raises ValueError, TypeError or KeyError if it is none."""


class Decoder(Budget):
    """Takes values from ``data``, each charged before it is made.

    A truncated end shows as struct.error or IndexError; everything else is IntegrityError.
    """

    def __init__(self, data: bytes, limit: int, extra: ExtraInverse | None) -> None:
        super().__init__(limit)
        self.data = data
        self.at = 0
        self.make_extra = extra

    def take(self, depth: int) -> Any:
        """The next value, ``depth`` containers deep."""
        code = self.data[self.at]
        self.at += 1
        if code < 0x80 or code >= 0xE0:
            return code if code < 0x80 else code - 256
        if code < 0x90:
            return self._dict(code & 15, depth)
        if code < 0xA0:
            return self._array(code & 15, depth)
        if code < 0xC0:
            return self._str(code & 31)
        return self._long(code, depth)

    def _long(self, code: int, depth: int) -> Any:
        if code in (0xC0, 0xC2, 0xC3):
            return None if code == 0xC0 else code == 0xC3
        if code in (0xCB, 0xCF, 0xD3):
            self._charge(36)
            kind = F64 if code == 0xCB else U64 if code == 0xCF else I64
            self.at += 8
            return kind.unpack_from(self.data, self.at - 8)[0]
        if 0xD9 <= code <= 0xDB:
            return self._str(self._count(code - 0xD9))
        if 0xC4 <= code <= 0xC6:
            return self._bytes(self._count(code - 0xC4))
        if code in (0xDC, 0xDD):
            return self._array(self._count(code - 0xDB), depth)
        if code in (0xDE, 0xDF):
            return self._dict(self._count(code - 0xDD), depth)
        raise IntegrityError(f"plain data holds the unknown code {code:#x}")

    def _charge(self, cost: int) -> None:
        if self.over(cost):
            raise IntegrityError("plain data would take more memory than its limit allows")

    def _count(self, size: int) -> int:
        """A length of 1, 2 or 4 bytes (size 0, 1, 2)."""
        kind = (U8, U16, U32)[size]
        self.at += kind.size
        count: int = kind.unpack_from(self.data, self.at - kind.size)[0]
        return count

    def _slice(self, size: int) -> bytes:
        # Nothing is allocated for bytes that are not there.
        if size > len(self.data) - self.at:
            raise IntegrityError("plain data is truncated")
        self.at += size
        return self.data[self.at - size : self.at]

    def _str(self, size: int) -> str:
        self._charge(64 + 4 * size)
        return str(self._slice(size), "utf-8")

    def _bytes(self, size: int) -> bytes:
        self._charge(40 + size)
        return self._slice(size)

    def _elements(self, count: int, depth: int) -> None:
        """Refuse a count that the bytes left cannot hold, before anything is made for it."""
        if depth > MAX_DEPTH:
            raise IntegrityError(f"plain data is nested deeper than {MAX_DEPTH}")
        if count > len(self.data) - self.at:
            raise IntegrityError("plain data is truncated")

    def _dict(self, count: int, depth: int) -> dict[Any, Any]:
        self._elements(count, depth)
        self._charge(dict_cost(count))
        made: dict[Any, Any] = {}
        for _ in range(count):
            before = self.at
            key = self.take(depth + 1)
            self._key(key, self.at - before)
            made[key] = self.take(depth + 1)
        if len(made) != count:
            raise IntegrityError("plain data holds a dict with a key twice")
        return made

    def _key(self, key: Any, size: int) -> None:
        if self.key_over(key, size):
            raise IntegrityError("plain data has too many keys of rare types")
        try:
            hash(key)
        except TypeError as error:
            raise IntegrityError("plain data holds a key that cannot be one") from error

    def _array(self, length: int, depth: int) -> Any:
        self._elements(length, depth)
        code = self.take(depth) if length and self.data[self.at] < 0x80 else 0
        count = length - 1
        if code in (LIST, TUPLE):
            self._charge(container_cost(code, count))
            values = [self.take(depth + 1) for _ in range(count)]
            return values if code == LIST else tuple(values)
        if code in (SET, FROZENSET):
            self._charge(container_cost(code, count))
            elements = self._take_elements(count, depth)
            return elements if code == SET else frozenset(elements)
        if code == BIG_INT and count == 1:
            content = self.take(depth + 1)
            if type(content) is bytes and len(content) > 8:
                self._charge(2 * len(content))
                return int.from_bytes(content, "big", signed=True)
        elif code == COMPLEX and count == 2:
            real, imag = self.take(depth + 1), self.take(depth + 1)
            if type(real) is float and type(imag) is float:
                return complex(real, imag)
        elif code == EXTRA and count == 2:
            return self._extra(self.take(depth + 1), depth)
        raise IntegrityError("plain data holds a malformed array")

    def _take_elements(self, count: int, depth: int) -> set[Any]:
        made = set()
        for _ in range(count):
            before = self.at
            element = self.take(depth + 1)
            self._key(element, self.at - before)
            made.add(element)
        if len(made) != count:
            raise IntegrityError("plain data holds a set with an element twice")
        return made

    def _extra(self, tag: Any, depth: int) -> Any:
        content = self.take(depth + 1)
        self._charge(64)
        if type(tag) is not str or self.make_extra is None:
            raise IntegrityError(f"plain data holds the unknown tag {short(tag)}")
        try:
            return self.make_extra(tag, content)
        except (ValueError, TypeError, KeyError) as error:
            raise IntegrityError(
                f"plain data holds a {short(tag)} that is none: {error}"
            ) from error
