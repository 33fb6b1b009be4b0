"""Plain data as bytes and back, exactly: what DCP lets users put beside their tensors.

None, bool, int of any size, float, complex, str, bytes, list, tuple, dict with any plain keys in
their order, set and frozenset come back with the same types and values. Subclasses are refused,
because they would come back as something else, unless the caller's ``extra`` knows them.

The bytes are msgpack: scalars and dicts as msgpack has them, everything else as an array whose
first element is a code. The decoder is written out here, not a library's, because it must count:
an empty set takes 2 bytes encoded and 216 in memory, and colliding dict keys take forever. So
encoder and decoder charge each value what it costs in memory against 16 times the limit, and
keys whose hash an attacker can choose with the comparisons that they may cost.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from tieredckpt.errors import IntegrityError, UsageError
from tieredckpt.format.plain_budget import (
    BIG_INT,
    COMPLEX,
    COST_FACTOR,
    EXTRA,
    F64,
    FROZENSET,
    I64,
    LIST,
    MAX_DEPTH,
    MAX_KEY_WORK,
    MAX_PLAIN_BYTES,
    SET,
    TUPLE,
    U16,
    U32,
    U64,
    Budget,
    container_cost,
    dict_cost,
    short,
)
from tieredckpt.format.plain_decoder import Decoder, ExtraInverse

__all__ = [
    "COST_FACTOR",
    "MAX_DEPTH",
    "MAX_KEY_WORK",
    "MAX_PLAIN_BYTES",
    "Extra",
    "ExtraInverse",
    "NotPlainError",
    "decode_plain",
    "encode_plain",
]

Extra = Callable[[Any], tuple[str, Any] | None]
"""Given a value that is not plain: its tag and plain content, or None if it is unknown."""

_CONTAINERS: dict[type, int] = {list: LIST, tuple: TUPLE, set: SET, frozenset: FROZENSET}


class NotPlainError(UsageError, TypeError):
    """A value is not plain data. Fields: ``path`` (where it is) and ``type`` (its full name)."""


def encode_plain(value: Any, extra: Extra | None = None, limit: int = MAX_PLAIN_BYTES) -> bytes:
    """``value`` as bytes; equal values of the same types give the same bytes.

    Args:
        value: Plain data.
        extra: Asked for each value that is not plain; its content may hold such values again.
        limit: Largest result in bytes; what is larger could not be decoded.

    Raises:
        NotPlainError: Somewhere in ``value`` is something else, or a str with a lone surrogate.
        UsageError: Nested deeper than 64, or larger than ``limit``.
    """
    encoder = _Encoder(extra, limit)
    encoder.put(value)
    encoder.check()
    return bytes(encoder.out)


def decode_plain(
    data: bytes, limit: int = MAX_PLAIN_BYTES, extra: ExtraInverse | None = None
) -> Any:
    """The value in ``data``; the inverse of :func:`encode_plain`.

    Args:
        data: Exactly one value.
        limit: Largest accepted ``data``; the value takes at most about 16 times as much memory.
        extra: Makes the values that the encoder's ``extra`` took apart.

    Raises:
        IntegrityError: Malformed, too deep, too large, or a tag that ``extra`` does not know.
    """
    if len(data) > limit:
        raise IntegrityError(f"plain data of {len(data)} bytes is over the limit of {limit}")
    decoder = Decoder(bytes(data), limit, extra)
    try:
        value = decoder.take(0)
    except (struct.error, IndexError) as error:
        raise IntegrityError("plain data is truncated") from error
    except UnicodeDecodeError as error:
        raise IntegrityError("plain data holds a str that is not UTF-8") from error
    if decoder.at != len(data):
        raise IntegrityError("plain data is followed by something else")
    return value


class _Encoder(Budget):
    def __init__(self, extra: Extra | None, limit: int) -> None:
        super().__init__(limit)
        self.pack_extra = extra
        self.limit = limit
        self.out = bytearray()
        self.trail: list[str] = []

    def check(self) -> None:
        """Raise UsageError if the budget is exceeded."""
        if self.cost < 0 or len(self.out) > self.limit:
            raise UsageError(f"plain data is larger than the limit of {self.limit} bytes")
        if self.key_work < 0:
            raise UsageError(
                f"plain data has too many dict keys and set elements ({self.rare_keys}) that are "
                "neither str, bytes, bool, None nor a 64-bit int"
            )

    def where(self) -> str:
        """The path from the outermost value to the one at hand, for error messages."""
        return "".join(self.trail)

    def put(self, value: Any) -> None:
        """Append ``value``."""
        kind = type(value)
        if kind is str:
            self._put_str(value)
        elif kind is int:
            self._put_int(value)
        elif value is None or kind is bool:
            self.out.append(0xC0 if value is None else 0xC3 if value else 0xC2)
        elif kind is float:
            self.cost -= 36
            self.out += b"\xcb" + F64.pack(value)
        elif kind is bytes:
            self.cost -= 40 + len(value)
            self._head(len(value), (0xC4, 0xC5, 0xC6))
            self.out += value
        elif kind is complex:
            self.cost -= 2 * 36
            self.out += bytes((0x93, COMPLEX, 0xCB)) + F64.pack(value.real)
            self.out += b"\xcb" + F64.pack(value.imag)
        else:
            self._put_nested(value)

    def _put_nested(self, value: Any) -> None:
        if len(self.trail) >= MAX_DEPTH:
            raise UsageError(f"{self.where()[:200]} is nested deeper than {MAX_DEPTH}")
        self.trail.append("")
        code = _CONTAINERS.get(type(value))
        if type(value) is dict:
            self._put_dict(value)
        elif code is None:
            self._put_extra(value)
        elif code in (LIST, TUPLE):
            self._container_head(code, len(value))
            for number, each in enumerate(value):
                self.trail[-1] = f"[{number}]"
                self.put(each)
        else:
            self._container_head(code, len(value))
            self._put_elements(value)
        self.trail.pop()
        self.check()

    def _head(self, count: int, codes: tuple[int | None, int, int]) -> None:
        """A msgpack length: codes for 8, 16 and 32 bits."""
        if codes[0] is not None and count < 1 << 8:
            self.out += bytes((codes[0], count))
        elif count < 1 << 16:
            self.out += bytes((codes[1],)) + U16.pack(count)
        elif count < 1 << 32:
            self.out += bytes((codes[2],)) + U32.pack(count)
        else:
            raise UsageError("plain data holds something of more than 2**32 bytes or elements")

    def _container_head(self, code: int, count: int) -> None:
        self.cost -= container_cost(code, count)
        if count < 15:
            self.out.append(0x90 | count + 1)
        else:
            self._head(count + 1, (None, 0xDC, 0xDD))
        self.out.append(code)

    def _put_str(self, value: str) -> None:
        try:
            encoded = value.encode()
        except UnicodeEncodeError as error:
            raise NotPlainError(
                f"{self.where() or 'the value'} is a str that UTF-8 cannot express",
                path=self.where(),
                type="str",
            ) from error
        self.cost -= 64 + 4 * len(encoded)
        if len(encoded) < 32:
            self.out.append(0xA0 | len(encoded))
        else:
            self._head(len(encoded), (0xD9, 0xDA, 0xDB))
        self.out += encoded

    def _put_int(self, value: int) -> None:
        if -32 <= value < 128:
            self.out.append(value & 0xFF)
        elif 0 <= value < 1 << 64:
            self.cost -= 36
            self.out += b"\xcf" + U64.pack(value)
        elif -(1 << 63) <= value < 0:
            self.cost -= 36
            self.out += b"\xd3" + I64.pack(value)
        else:
            size = value.bit_length() // 8 + 1
            self.cost -= 40 + 3 * size
            self.out += bytes((0x92, BIG_INT))
            self._head(size, (0xC4, 0xC5, 0xC6))
            self.out += value.to_bytes(size, "big", signed=True)

    def _put_dict(self, value: dict[Any, Any]) -> None:
        count = len(value)
        self.cost -= dict_cost(count)
        if count < 16:
            self.out.append(0x80 | count)
        else:
            self._head(count, (None, 0xDE, 0xDF))
        for key, each in value.items():
            self.trail[-1] = f"[{short(key)}]"
            self._put_key(key)
            self.put(each)

    def _put_key(self, key: Any) -> None:
        before = len(self.out)
        self.put(key)
        if self.key_over(key, len(self.out) - before):
            self.check()

    def _put_elements(self, value: Any) -> None:
        """A set has no order: its elements are sorted by their encoded bytes."""
        start = len(self.out)
        parts = []
        for each in value:
            before = len(self.out)
            self.trail[-1] = f"{{{short(each)}}}"
            self._put_key(each)
            parts.append(bytes(self.out[before:]))
        self.out[start:] = b"".join(sorted(parts))

    def _put_extra(self, value: Any) -> None:
        known = self.pack_extra(value) if self.pack_extra else None
        if known is None:
            name = f"{type(value).__module__}.{type(value).__qualname__}"
            raise NotPlainError(
                f"{self.where() or 'the value'} is a {name}, which is not plain data (None, bool, "
                "int, float, complex, str, bytes, list, tuple, dict, set, frozenset; no subclass)",
                path=self.where(),
                type=name,
            )
        tag, content = known
        self.out += bytes((0x93, EXTRA))
        self.cost -= 64
        self._put_str(tag)
        self.put(content)
