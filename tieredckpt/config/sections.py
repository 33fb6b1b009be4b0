"""Reads a mapping of a configuration into a struct; every error names the key.

A section's keys are the fields of a struct, whose annotations define how each value is written
(:class:`Written`). A parser of a value knows keys below it only; the section around it adds its
own. Wrong keys are refused with the nearest known key, or with a hint of the struct.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from tieredckpt.config.reader import NO_SPACE, Tree, child
from tieredckpt.config.units import (
    format_duration,
    format_rate,
    format_size,
    one_of,
    parse_duration,
    parse_rate,
    parse_size,
    show,
)
from tieredckpt.errors import ConfigError

T = TypeVar("T")
O = TypeVar("O", bound="Options")  # noqa: E741

Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
"""Range of a field in messages; the configuration's is narrower."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
NOT_A_KEY = object()
"""Marks a field that is written under another field's key, or in the section around."""


@dataclass(frozen=True, slots=True)
class Written:
    """How the value of a field is written in a configuration; an annotation of the field.

    Words (``Literal``), booleans and sections need none.
    """

    parse: Callable[[Any], Any] | None = None
    """From YAML's value, which is not null: see :func:`parsed`."""
    show: Callable[[Any], object] | None = None
    """The inverse of ``parse``. None: the value is shown as it is."""
    key: str = ""
    """Its key, if that is not the field's name (without the ``_s`` of seconds)."""
    missing: str = ""
    """Advice for the error if a required key is missing; "": the key is optional."""


@functools.cache
def _fields(kind: type[Options]) -> Mapping[str, Written]:
    """By name of the field, how it is written, with its parser and its key."""
    found: dict[str, Written] = {}
    hints = get_type_hints(kind, include_extras=True)
    for name in kind.__struct_fields__:
        hint, marks = hints[name], getattr(hints[name], "__metadata__", ())
        if NOT_A_KEY not in marks:
            written = next((each for each in marks if isinstance(each, Written)), Written())
            parse = written.parse or _parser(hint.__origin__ if marks else hint)
            key = written.key or name.removesuffix("_s")
            found[name] = replace(written, parse=parse, key=key)
    return found


def _parser(hint: Any) -> Callable[[Any], Any]:
    """The parser of a field that needs no other annotation than its type."""
    if get_origin(hint) is UnionType:
        hint = get_args(hint)[0]
    if hint is bool:
        return _parse_bool
    if get_origin(hint) is Literal:
        return partial(_parse_word, allowed=get_args(hint))
    return lambda value: read(hint, entries(value, hint))


def keys_of(*kinds: type[Options]) -> tuple[str, ...]:
    """The keys of a section that holds such structs."""
    return tuple(written.key for kind in kinds for written in _fields(kind).values())


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the structs that represent one section of a configuration."""

    hints: ClassVar[Mapping[str, str]] = {}
    """Wrong keys that people write there, with what to write instead."""

    def effective(self) -> Any:
        """The section as plain data; reading that gives an equal struct.

        A dict of all keys of the section, unless a subclass has a shorter way to write it.
        """
        found: dict[str, object] = {}
        for name, written in _fields(type(self)).items():
            value = getattr(self, name)
            if value is not None and written.show is not None:
                value = written.show(value)
            found[written.key] = value.effective() if isinstance(value, Options) else value
        return found


def fail(key: str, problem: str, *, allowed: Sequence[str] = ()) -> NoReturn:
    """Raise the ConfigError about ``key``. ``problem`` follows the key and a colon.

    In a parser ``key`` is relative to the value that is parsed.
    """
    raise ConfigError(f"{key}: {problem}", key=key, allowed=list(allowed)) from None


def entries(value: Tree, *kinds: type[Options]) -> dict[str, Tree]:
    """``value`` as a section with the keys of ``kinds``; None is an empty one.

    Raises:
        ConfigError: Not a mapping, or a key that is none of them.
    """
    keys = keys_of(*kinds)
    if value is None:
        return {}
    if not isinstance(value, dict):
        # Not shown: it may be a token, and errors are printed and logged.
        fail("", f"not a mapping; write the keys {', '.join(keys)} below it", allowed=keys)
    hints = {wrong: right for kind in kinds for wrong, right in kind.hints.items()}
    for key in value:
        if key in keys:
            continue
        if key in hints:
            hint = hints[key] if hints[key].startswith("delete it") else f"write {hints[key]}"
            fail(child("", key), f"unknown key; {hint}", allowed=keys)
        near = f"; {NO_SPACE}" if key.partition(":")[0] in keys else _nearest(key, keys)
        allowed = f"allowed keys: {', '.join(keys)}"
        fail(child("", key), f"unknown key{near}; {allowed}", allowed=keys)
    return value


def read(kind: type[O], values: Mapping[str, Tree], **given: object) -> O:
    """A struct of the ``values`` of its keys; fields that are ``given`` are not read.

    Raises:
        ConfigError: A required key is missing, or a value is refused.
        ValueError: Values do not fit together.
    """
    found = dict(given)
    for name, written in _fields(kind).items():
        value = values.get(written.key)
        if name in given:
            continue
        if value is not None and written.parse is not None:
            found[name] = parsed(written.key, value, written.parse)
        elif written.missing:
            fail(written.key, f"missing; write {written.missing}")
    return kind(**found)


def _parse_bool(value: object) -> bool:
    if not isinstance(value, bool):
        fail("", f"{show(value)} is not allowed; write true or false", allowed=("true", "false"))
    return value


def _parse_word(value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        near = _nearest(value, allowed) if isinstance(value, str) else ""
        fail("", f"{show(value)} is not allowed{near}; write {one_of(allowed)}", allowed=allowed)
    return value


def parsed(key: str, value: Tree, parse: Callable[[Any], T]) -> T:
    """The value at ``key``.

    A parser raises ValueError to refuse a value as a whole, and ConfigError (:func:`fail`) for a
    key below it.

    Raises:
        ConfigError: The parser refused it.
    """
    try:
        return parse(value)
    except ConfigError as error:
        dot = "." if error.key and not error.key.startswith("[") else ""
        raise ConfigError(
            f"{key}{dot}{error.message}", key=f"{key}{dot}{error.key}", allowed=error.allowed
        ) from None
    except ValueError as error:
        fail(key, str(error))


def integer(least: int, most: int, what: str) -> Callable[[object], int]:
    """A parser of whole numbers in ``least .. most``, both included; ``what`` is their unit."""

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{show(value)} is not a whole number of {what}; "
                             f"allowed are {least} to {most}")  # fmt: skip
        if not least <= value <= most:
            raise ValueError(f"{show(value)} is out of range; "
                             f"allowed are {least} to {most} {what}")  # fmt: skip
        return value

    return parse


def duration(least_s: float, most_s: float) -> Written:
    """A duration in ``least_s .. most_s``, both included; the field holds seconds."""
    return Written(
        lambda value: parse_duration(value, least_s=least_s, most_s=most_s), format_duration
    )


def size(key: str, least_bytes: int = 1) -> Written:
    """A size of at least ``least_bytes``; the field holds bytes."""
    return Written(lambda value: parse_size(value, least_bytes=least_bytes), format_size, key)


def rate(key: str, least_bytes_per_s: int) -> Written:
    """A bandwidth; the field holds bytes per second."""
    return Written(
        lambda value: parse_rate(value, least_bytes_per_s=least_bytes_per_s), format_rate, key
    )


def _nearest(word: str, known: tuple[str, ...]) -> str:
    # A long word is no misspelling, and comparing it would cost its length squared.
    lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1) if len(word) <= 64 else []
    return f' (did you mean "{lower[close[0]]}"?)' if close else ""
