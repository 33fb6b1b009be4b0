"""The keys of a nested state that are not in the names of its values: numbers, None, empty dicts.

DCP names a value by the path to it, on which each key of a dict is text, and a dict without values
has no name at all. Where the engine sees the state, it keeps a table of such dicts, as plain data:
by the dict's path (DCP's own, text for a key and an integer for a place in a list) the keys by
their text, as far as they are no text themselves, or True if all are integers. So an empty dict has
no keys. Where all keys are decimal text they are in the table, too: they are no numbers.
docs/reference/format/plan.md is normative.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tieredckpt.errors import IntegrityError, UsageError
from tieredckpt.format.plain import MAX_DEPTH, decode_plain, encode_plain

OF_RANK_BYTES_MAX = 64 << 10
"""Of the table of one rank. A state that needs more has none."""
NESTED_BYTES_MAX = 1 << 20
"""Of the table of all ranks."""

_CONTAINERS_MAX = 1 << 18
_NUMBER = re.compile(r"-?[0-9]{1,4000}")
_NUMBER_BITS_MAX = 13_000  # Python refuses to make text of more than 4300 digits
_KEY_TYPES = frozenset((int, bool, float, str, type(None)))

Path = tuple[Any, ...]
Nested = dict[Path, Any]
"""The table: by path True, or keys by their text."""


class Real(NamedTuple):
    """On a path, a key of a dict as the table has it."""

    key: Any

    def __str__(self) -> str:
        return str(self.key)


def nested_of(state: Mapping[Any, Any]) -> bytes:
    """The table of ``state``, or the part of it that fits; empty if the names have all."""
    table: Nested = {}
    todo: list[tuple[Path, Any]] = [((), state)]
    nests: dict[type, bool] = {}
    for path, value in todo:  # it grows
        is_list = isinstance(value, list)
        if not is_list and (path or value) and (kept := _kept(value)) is not None:
            table[path] = kept
        for key, each in enumerate(value) if is_list else value.items():
            kind = type(each)
            if kind not in nests:
                nests[kind] = issubclass(kind, Mapping | list)
            if nests[kind]:
                todo.append(((*path, key if is_list else str(key)), each))
        if len(todo) > _CONTAINERS_MAX or len(path) > MAX_DEPTH:  # it may even contain itself
            return b""
    return _encode(table, OF_RANK_BYTES_MAX)


def _kept(value: Mapping[Any, Any]) -> dict[str, Any] | bool | None:
    others = {str(key): key for key in value if type(key) is not str}
    if not others:
        return {key: key for key in value} if all(map(str.isdecimal, value)) else None
    ints = all(type(key) is int for key in value)
    return ints or {text: key for text, key in others.items() if _is_key(key)} or None


def _is_key(key: object) -> bool:
    if isinstance(key, int) and key.bit_length() > _NUMBER_BITS_MAX:
        return False
    return type(key) in _KEY_TYPES or (type(key) is tuple and all(map(_is_key, key)))


def _encode(table: Nested, limit: int) -> bytes:
    """Of a table that is too large, the dicts with the fewest keys."""
    sizes = {path: len(keys) if isinstance(keys, dict) else 0 for path, keys in table.items()}
    left = sorted(table, key=sizes.__getitem__)
    while left:
        try:
            kept = set(left)
            return encode_plain({at: table[at] for at in table if at in kept}, limit=limit)
        except UsageError:
            left = left[: len(left) * 3 // 4]
    return b""


def decode_nested(data: bytes) -> Nested:
    """The table in ``data``. Raises IntegrityError if it is malformed."""
    table = decode_plain(data, NESTED_BYTES_MAX) if data else {}
    if type(table) is not dict or not all(
        isinstance(path, tuple)
        and len(path) <= MAX_DEPTH
        and _is_key(path)
        and (keys is True or (isinstance(keys, dict) and _is_key(tuple(keys.values()))))
        and (path or keys)
        for path, keys in table.items()
    ):
        raise IntegrityError("the table of a nested state's keys is malformed")
    return table


def merge_nested(parts: Iterable[bytes]) -> bytes:
    """One table of the ranks', each of which may have own keys of a dict; the first rank's count.

    Raises:
        IntegrityError: One is malformed.
    """
    table: Nested = {}
    for part in dict.fromkeys(parts):
        for path, keys in decode_nested(part).items():
            known = table.get(path, {})
            both = isinstance(known, dict) and isinstance(keys, dict)
            table[path] = keys | known if both else known or keys
    return _encode(table, NESTED_BYTES_MAX)


def real_path(path: Path, nested: Nested) -> Path:
    """DCP's ``path``, with a :class:`Real` for each key that the table has."""
    found = []
    for number, at in enumerate(path):
        keys = nested.get(path[:number], {})
        if keys is True:
            keys = {at: int(at)} if _NUMBER.fullmatch(str(at)) else {}
        found.append(Real(keys[at]) if at in keys else at)
    return tuple(found)
