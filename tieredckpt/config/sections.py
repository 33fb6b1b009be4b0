"""Reads one mapping of a configuration, key by key; every error names the key.

A parser refuses a wrong value by a ValueError. Wrong keys are refused here: unknown ones with the
nearest known key, keys of later releases by name. A section's keys are the fields of a struct,
whose annotations define how each value is written (:class:`Written`).
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from tieredckpt.config.reader import Tree, child
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

    parse: Callable[[object], Any] | None = None
    """From YAML's value; raises ValueError. None: the reader of the section parses it."""
    show: Callable[[Any], object] | None = None
    """The inverse of ``parse``. None: the value is shown as it is."""
    key: str = ""
    """Its key, if that is not the field's name (without the ``_s`` of seconds)."""
    missing: str = ""
    """Advice for the error if a required key is missing; "": the key is optional."""


@functools.cache
def _fields(kind: type[Options]) -> Mapping[str, tuple[object, Written]]:
    """By name of the field, its type and how it is written, with its key."""
    found: dict[str, tuple[object, Written]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ())
        if NOT_A_KEY not in marks:
            written = next((each for each in marks if isinstance(each, Written)), Written())
            hint = hint.__origin__ if marks else hint
            found[name] = hint, replace(written, key=written.key or name.removesuffix("_s"))
    return found


def keys_of(kind: type[Options]) -> tuple[str, ...]:
    """The keys of a section that holds such a struct."""
    return tuple(written.key for _, written in _fields(kind).values())


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the structs that represent one section of a configuration."""

    def effective(self) -> Any:
        """The section as plain data; reading that gives an equal struct.

        A dict of all keys of the section, unless a subclass has a shorter way to write it.
        """
        found: dict[str, object] = {}
        for name, (_, written) in _fields(type(self)).items():
            value = getattr(self, name)
            if value is not None and written.show is not None:
                value = written.show(value)
            found[written.key] = value.effective() if isinstance(value, Options) else value
        return found


def fail(key: str, problem: str, *, allowed: list[str] | None = None) -> NoReturn:
    """Raise the ConfigError about ``key``. ``problem`` follows the key and a colon."""
    raise ConfigError(f"{key}: {problem}", key=key, allowed=allowed or [])


class Section:
    """One mapping at ``path``. Unknown keys are refused when it is made.

    Args:
        value: The mapping; None is read as an empty one.
        path: Its dotted key, "" for the whole file.
        keys: The keys that it may have.
        later: Keys that a later release will have, with the sentence's subject and verb
            ("checkpoint replicas are").
        hints: Wrong keys that people write here, with what to write instead.

    Raises:
        ConfigError: Not a mapping, or a key that is not one of ``keys``.
    """

    def __init__(
        self,
        value: Tree,
        path: str,
        keys: tuple[str, ...],
        *,
        later: Mapping[str, str] | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        if value is None:
            value = {}
        if not isinstance(value, dict):
            fail(path, f"{show(value)} is not a mapping; write the keys {', '.join(keys)} below it",
                 allowed=list(keys))  # fmt: skip
        self._values = value
        for key in value:
            if key in keys:
                continue
            place = child(path, key)
            if later and key in later:
                fail(place, f"{later[key]} not in this release")
            if hints and key in hints:
                fail(place, f"unknown key; write {hints[key]}", allowed=list(keys))
            fail(place, f"unknown key{_nearest(key, keys)}; allowed keys: {', '.join(keys)}",
                 allowed=list(keys))  # fmt: skip

    def key(self, name: str) -> str:
        """The dotted key of an entry."""
        return child(self.path, name)

    def raw(self, name: str) -> Tree:
        """The value at ``name``, None if it is missing."""
        return self._values.get(name)

    def fill(self, default: O) -> O:
        """``default`` with the values of this section; its nested sections are not changed.

        Raises:
            ConfigError: A value is refused.
        """
        return msgspec.structs.replace(default, **self._found(type(default)))

    def make(self, kind: type[O]) -> O:
        """A struct of this section. Raises ConfigError: a required key is missing, or a value is
        refused.
        """
        return kind(**self._found(kind))

    def _found(self, kind: type[Options]) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, (hint, written) in _fields(kind).items():
            value, key = self.raw(written.key), self.key(written.key)
            if value is None:
                if written.missing:
                    fail(key, f"missing; write {written.missing}")
            elif written.parse is not None:
                found[name] = parsed(key, value, written.parse)
            elif hint is bool:
                if not isinstance(value, bool):
                    fail(key, f"{show(value)} is not allowed; write true or false",
                         allowed=["true", "false"])  # fmt: skip
                found[name] = value
            elif get_origin(hint) is Literal:
                found[name] = one_word(key, value, get_args(hint))
        return found

    def below(
        self,
        name: str,
        default: O,
        *,
        later: Mapping[str, str] | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> O:
        """The section at ``name``, whose keys are the fields of ``default``: see :meth:`fill`."""
        keys = keys_of(type(default))
        section = Section(self.raw(name), self.key(name), keys, later=later, hints=hints)
        return section.fill(default)

    def read(self, name: str, parse: Callable[[object], T], default: T) -> T:
        """The parsed value at ``name``; ``default`` if it is missing or null.

        Raises:
            ConfigError: The parser refused it.
        """
        value = self._values.get(name)
        return default if value is None else parsed(self.key(name), value, parse)


def one_word(key: str, value: Tree, allowed: tuple[str, ...]) -> str:
    """The value at ``key``, one of a few words.

    Raises:
        ConfigError: It is none of them; field ``allowed`` lists them.
    """
    if not isinstance(value, str) or value not in allowed:
        near = _nearest(value, allowed) if isinstance(value, str) else ""
        fail(key, f"{show(value)} is not allowed{near}; write {one_of(allowed)}",
             allowed=list(allowed))  # fmt: skip
    return value


def parsed(key: str, value: Tree, parse: Callable[[object], T]) -> T:
    """The value at ``key``. Raises ConfigError if the parser refuses it."""
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}", key=key, allowed=[]) from None


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
