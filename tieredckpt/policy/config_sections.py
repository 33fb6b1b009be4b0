"""Reads one mapping of a configuration, key by key; every complaint names the key.

What is wrong with a value is said by its parser (a ValueError), what is wrong with a key is said
here: unknown ones with the nearest known one, those of later releases by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

from tieredckpt.errors import ConfigError
from tieredckpt.policy.config_source import Tree, child
from tieredckpt.policy.units import one_of, parse_duration, show

T = TypeVar("T")


def fail(key: str, problem: str, *, allowed: list[str] | None = None) -> NoReturn:
    """Raise the ConfigError about ``key``. ``problem`` follows the key and a colon."""
    raise ConfigError(f"{key}: {problem}", key=key, allowed=allowed or [])


def not_in_this_release(key: str, what: str, *, instead: str = "") -> NoReturn:
    """Raise the ConfigError about something that is designed but not built.

    ``what`` is the sentence's subject and verb ("checkpoint replicas are").
    """
    fail(key, f"{what} not in this release" + (f"; {instead}" if instead else ""))


class Section:
    """One mapping at ``path``. Unknown keys are refused when it is made.

    Args:
        value: What stands there; None reads as an empty mapping.
        path: Its dotted key, "" for the whole file.
        keys: The keys that it may have.
        later: Keys that a later release will have, with the sentence's subject and verb
            ("checkpoint replicas are").
        elsewhere: Keys that people look for here, with where they are.

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
        elsewhere: Mapping[str, str] | None = None,
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
                not_in_this_release(place, later[key])
            if elsewhere and key in elsewhere:
                fail(place, f"unknown key; write {elsewhere[key]}", allowed=list(keys))
            fail(place, f"unknown key{_nearest(key, keys)}; allowed keys: {', '.join(keys)}",
                 allowed=list(keys))  # fmt: skip

    def key(self, name: str) -> str:
        """The dotted key of an entry."""
        return child(self.path, name)

    def raw(self, name: str) -> Tree:
        """What stands at ``name``, None if nothing does."""
        return self._values.get(name)

    def read(self, name: str, parse: Callable[[object], T], default: T) -> T:
        """The parsed value at ``name``; ``default`` if nothing, or null, stands there.

        Raises:
            ConfigError: The parser refused it.
        """
        value = self._values.get(name)
        if value is None:
            return default
        try:
            return parse(value)
        except ValueError as error:
            raise ConfigError(
                f"{self.key(name)}: {error}", key=self.key(name), allowed=[]
            ) from None

    def require(self, name: str, parse: Callable[[object], T], example: str) -> T:
        """The parsed value at ``name``. Raises ConfigError if it is missing or refused."""
        if self._values.get(name) is None:
            fail(self.key(name), f"missing; write for example {example}")
        value: T | None = self.read(name, parse, None)
        assert value is not None
        return value

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        """One of a few words. Raises ConfigError, with field ``allowed``, for others."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or value not in allowed:
            near = _nearest(value, allowed) if isinstance(value, str) else ""
            fail(self.key(name), f"{show(value)} is not allowed{near}; write {one_of(allowed)}",
                 allowed=list(allowed))  # fmt: skip
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A yes or no. Raises ConfigError for anything but true and false."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            fail(self.key(name), f"{show(value)} is not allowed; write true or false",
                 allowed=["true", "false"])  # fmt: skip
        return value


def whole_number(least: int, most: int, what: str) -> Callable[[object], int]:
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


def duration(least_s: float, most_s: float) -> Callable[[object], float]:
    """A parser of durations in ``least_s .. most_s``, in seconds, both included."""
    return lambda value: parse_duration(value, least_s=least_s, most_s=most_s)


def _nearest(word: str, known: tuple[str, ...]) -> str:
    # A long word is no misspelling, and comparing it would cost its length squared.
    lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1) if len(word) <= 64 else []
    return f' (did you mean "{lower[close[0]]}"?)' if close else ""
