"""Plain data as bytes and back, exactly: the values that DCP accepts in a state besides tensors.

None, bool, int of any size, float, complex, str, bytes, list, tuple, dict with any plain keys in
their order, set and frozenset keep their types and values. Subclasses are refused, because they
would be decoded as their base class, unless the caller's ``extra`` handles them.

The bytes are msgpack: scalars and dicts as msgpack has them, everything else as an array whose
first element is a code. The decoder is our own because it must count costs: an empty set takes 2
bytes encoded and 216 in memory, and colliding dict keys take forever. So encoder and decoder charge
each value's memory against 16 times the limit, and charge keys whose hash an attacker can choose
for the comparisons that they may cause.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from tieredckpt.errors import IntegrityError, UsageError

MAX_PLAIN_BYTES = 64 << 20
"""Default limit of an encoded value."""

MAX_DEPTH = 64
"""Containers inside of containers."""

MAX_KEY_WORK = 1 << 31
"""Limit of the sum, over all rare keys, of encoded size times number of rare keys before it.

Dict keys and set elements are rare unless they are str, bytes, bool, None or 64-bit int. Hashes of
rare keys are not randomised, so an attacker can make them collide. Each key is then compared with
all before it, at up to 2 ns per byte: seconds in all. The limit allows 15,000 keys of 20 bytes.
"""

COST_FACTOR = 16
"""Memory that a decoded value may take, as a multiple of the limit of its encoded size."""

COST_PER_BYTE = 128
"""And as a multiple of its encoded size, which is smaller. Sets and dicts of one value take 117."""

_LIST, _TUPLE, _SET, _FROZENSET, _BIG_INT, _COMPLEX, _EXTRA = range(1, 8)
_COST_SLACK = 1 << 16
_SMALL_COST = 1 << 20
_SAFE_KEYS = (str, bytes, bool, type(None))

_F64 = struct.Struct(">d")
_U8, _U16, _U32, _U64 = (struct.Struct(f">{code}") for code in "BHIQ")
_I64 = struct.Struct(">q")

Extra = Callable[[Any], tuple[str, Any] | None]
"""Returns the tag and the plain content of a value that is not plain, or None if unknown."""

ExtraInverse = Callable[[str, Any], Any]
"""Returns the value of a tag and content; ValueError, TypeError or KeyError: there is none."""

_CONTAINERS: dict[type, int] = {list: _LIST, tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}


class NotPlainError(UsageError, TypeError):
    """A value is not plain data. Fields: ``path`` (where it is) and ``type`` (its full name)."""


def encode_plain(value: Any, extra: Extra | None = None, limit: int = MAX_PLAIN_BYTES) -> bytes:
    """``value`` as bytes; equal values of the same types give the same bytes.

    Args:
        value: Plain data.
        extra: Called for each value that is not plain; its result may contain such values again.
        limit: Largest result in bytes; a larger one could not be decoded.

    Raises:
        NotPlainError: ``value`` contains other data, or a str with a lone surrogate.
        UsageError: Nested deeper than 64, or larger than ``limit``.
    """
    encoder = _Encoder(extra, limit)
    encoder.put(value)
    encoder.cost += _size_bound(limit, len(encoder.out))
    encoder.check()
    return bytes(encoder.out)


def decode_plain(
    data: bytes, limit: int = MAX_PLAIN_BYTES, extra: ExtraInverse | None = None
) -> Any:
    """The value in ``data``; the inverse of :func:`encode_plain`.

    Args:
        data: Exactly one value.
        limit: Largest accepted ``data``; the value takes at most about 16 times as much memory.
        extra: The inverse of the encoder's ``extra``.

    Raises:
        IntegrityError: Malformed, too deep, too large, or a tag that ``extra`` does not know.
    """
    if len(data) > limit:
        raise IntegrityError(f"plain data of {len(data)} bytes is over the limit of {limit}")
    decoder = _Decoder(bytes(data), limit, extra)
    try:
        value = decoder.read(0)
    except (struct.error, IndexError) as error:
        raise IntegrityError("plain data is truncated") from error
    except UnicodeDecodeError as error:
        raise IntegrityError("plain data holds a str that is not UTF-8") from error
    if decoder.at != len(data):
        raise IntegrityError("plain data does not end after one value")
    return value


def _size_bound(limit: int, size: int) -> int:
    """What ``size`` encoded bytes leave of the cost that ``limit`` permits, negative."""
    return min(0, COST_PER_BYTE * size + _SMALL_COST - COST_FACTOR * limit)


class _Budget:
    """Costs that encoder and decoder count alike, so that every encoded value can be decoded."""

    def __init__(self, limit: int) -> None:
        self.cost = COST_FACTOR * limit + _COST_SLACK
        self.rare_keys = 0
        self.key_work = MAX_KEY_WORK

    def key_over(self, key: Any, size: int) -> bool:
        """Charge one key of ``size`` encoded bytes; return True if rare keys are over the limit."""
        kind = type(key)
        if kind in _SAFE_KEYS or (kind is int and -(1 << 63) <= key < 1 << 64):
            return False
        self.key_work -= size * self.rare_keys
        self.rare_keys += 1
        return self.key_work < 0


def _container_cost(code: int, count: int) -> int:
    """Bytes in memory of a container of ``count`` elements, without them; from sys.getsizeof."""
    if code in (_SET, _FROZENSET):
        return 216 + 128 * count
    return 64 + 8 * count


def _dict_cost(count: int) -> int:
    """Bytes in memory of a dict of ``count`` entries, without keys and values."""
    return 64 + (120 + 100 * count if count else 0)


def _short(key: Any) -> str:
    """``key`` for a path in an error message; never the repr of anything large or foreign."""
    if type(key) in (str, bytes):
        return repr(key[:80])
    if type(key) is int and key.bit_length() < 128:
        return repr(key)
    return repr(key) if type(key) in (bool, float, type(None)) else f"<{type(key).__name__}>"


class _Encoder(_Budget):
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
            self.out += b"\xcb" + _F64.pack(value)
        elif kind is bytes:
            self.cost -= 40 + len(value)
            self._put_header(len(value), (0xC4, 0xC5, 0xC6))
            self.out += value
        elif kind is complex:
            self.cost -= 2 * 36
            self.out += bytes((0x93, _COMPLEX, 0xCB)) + _F64.pack(value.real)
            self.out += b"\xcb" + _F64.pack(value.imag)
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
        elif code in (_LIST, _TUPLE):
            self._put_container_header(code, len(value))
            for number, each in enumerate(value):
                self.trail[-1] = f"[{number}]"
                self.put(each)
        else:
            self._put_container_header(code, len(value))
            self._put_elements(value)
        self.trail.pop()
        self.check()

    def _put_header(self, count: int, codes: tuple[int | None, int, int]) -> None:
        """A msgpack length: codes for 8, 16 and 32 bits."""
        if codes[0] is not None and count < 1 << 8:
            self.out += bytes((codes[0], count))
        elif count < 1 << 16:
            self.out += bytes((codes[1],)) + _U16.pack(count)
        elif count < 1 << 32:
            self.out += bytes((codes[2],)) + _U32.pack(count)
        else:
            raise UsageError("plain data holds something of more than 2**32 bytes or elements")

    def _put_container_header(self, code: int, count: int) -> None:
        self.cost -= _container_cost(code, count)
        if count < 15:
            self.out.append(0x90 | count + 1)
        else:
            self._put_header(count + 1, (None, 0xDC, 0xDD))
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
            self._put_header(len(encoded), (0xD9, 0xDA, 0xDB))
        self.out += encoded

    def _put_int(self, value: int) -> None:
        if -32 <= value < 128:
            self.out.append(value & 0xFF)
        elif 0 <= value < 1 << 64:
            self.cost -= 36
            self.out += b"\xcf" + _U64.pack(value)
        elif -(1 << 63) <= value < 0:
            self.cost -= 36
            self.out += b"\xd3" + _I64.pack(value)
        else:
            size = value.bit_length() // 8 + 1
            self.cost -= 40 + 3 * size
            self.out += bytes((0x92, _BIG_INT))
            self._put_header(size, (0xC4, 0xC5, 0xC6))
            self.out += value.to_bytes(size, "big", signed=True)

    def _put_dict(self, value: dict[Any, Any]) -> None:
        count = len(value)
        self.cost -= _dict_cost(count)
        if count < 16:
            self.out.append(0x80 | count)
        else:
            self._put_header(count, (None, 0xDE, 0xDF))
        for key, each in value.items():
            self.trail[-1] = f"[{_short(key)}]"
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
            self.trail[-1] = f"{{{_short(each)}}}"
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
        self.out += bytes((0x93, _EXTRA))
        self.cost -= 64
        self._put_str(tag)
        self.put(content)


class _Decoder(_Budget):
    """Reads values from ``data``; each is charged before it is made.

    A truncated end shows as struct.error or IndexError; everything else is IntegrityError.
    """

    def __init__(self, data: bytes, limit: int, extra: ExtraInverse | None) -> None:
        super().__init__(limit)
        self.cost += _size_bound(limit, len(data))
        self.data = data
        self.at = 0
        self.make_extra = extra

    def read(self, depth: int) -> Any:
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
            kind = _F64 if code == 0xCB else _U64 if code == 0xCF else _I64
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
        self.cost -= cost
        if self.cost < 0:
            raise IntegrityError("plain data would take more memory than its limit allows")

    def _count(self, size: int) -> int:
        """A length of 1, 2 or 4 bytes (size 0, 1, 2)."""
        kind = (_U8, _U16, _U32)[size]
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
        self._charge(_dict_cost(count))
        made: dict[Any, Any] = {}
        for _ in range(count):
            before = self.at
            key = self.read(depth + 1)
            self._key(key, self.at - before)
            made[key] = self.read(depth + 1)
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
        code = self.read(depth) if length and self.data[self.at] < 0x80 else 0
        count = length - 1
        if code in (_LIST, _TUPLE):
            self._charge(_container_cost(code, count))
            values = [self.read(depth + 1) for _ in range(count)]
            return values if code == _LIST else tuple(values)
        if code in (_SET, _FROZENSET):
            self._charge(_container_cost(code, count))
            elements = self._read_elements(count, depth)
            return elements if code == _SET else frozenset(elements)
        if code == _BIG_INT and count == 1:
            content = self.read(depth + 1)
            if type(content) is bytes and len(content) > 8:
                self._charge(2 * len(content))
                return int.from_bytes(content, "big", signed=True)
        elif code == _COMPLEX and count == 2:
            real, imag = self.read(depth + 1), self.read(depth + 1)
            if type(real) is float and type(imag) is float:
                return complex(real, imag)
        elif code == _EXTRA and count == 2:
            return self._extra(self.read(depth + 1), depth)
        raise IntegrityError("plain data holds a malformed array")

    def _read_elements(self, count: int, depth: int) -> set[Any]:
        made = set()
        for _ in range(count):
            before = self.at
            element = self.read(depth + 1)
            self._key(element, self.at - before)
            made.add(element)
        if len(made) != count:
            raise IntegrityError("plain data holds a set with an element twice")
        return made

    def _extra(self, tag: Any, depth: int) -> Any:
        content = self.read(depth + 1)
        self._charge(64)
        if type(tag) is not str or self.make_extra is None:
            raise IntegrityError(f"plain data holds the unknown tag {_short(tag)}")
        try:
            return self.make_extra(tag, content)
        except (ValueError, TypeError, KeyError) as error:
            raise IntegrityError(
                f"plain data holds a {_short(tag)} that is none: {error}"
            ) from error
