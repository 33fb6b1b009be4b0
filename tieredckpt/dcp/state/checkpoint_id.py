"""The step and stream in a ``checkpoint_id``: its last component, and the folder of that.

``outputs/actor/step-100`` is step 100 of the stream ``actor``; ``100`` is step 100 of the
stream that the writer or reader was made for.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tieredckpt.errors import UsageError
from tieredckpt.format.manifest import check_name, check_tags

DEFAULT_STREAM = "default"

# Nineteen digits are what fits the manifest's 64-bit step.
_STEP = re.compile(r"(?:step[-_=])?([0-9]{1,19})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Target:
    """Which step of which stream; each None if it is not named."""

    step: int | None
    stream: str | None
    tags: tuple[tuple[str, str], ...] = ()
    """Of the checkpoint that is made."""

    def merged(self, other: Target) -> Target:
        """Both together.

        Raises:
            UsageError: They name different steps or streams.
        """
        for what in ("step", "stream"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine is not None and theirs is not None and mine != theirs:
                raise UsageError(
                    f"the checkpoint_id names {what} {theirs!r}, but the writer or reader was made "
                    f"for {what} {mine!r}: name it in one place only",
                )
        return Target(
            step=other.step if self.step is None else self.step,
            stream=other.stream if self.stream is None else self.stream,
            tags=self.tags or other.tags,
        )


class Named:
    """Receives the ``checkpoint_id`` from DCP: mixed into our storage writer and reader."""

    _named = Target(None, None)
    _reset_error: UsageError | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            parse(checkpoint_id)
        except UsageError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        # DCP calls this only if there is a checkpoint_id, and outside of its collectives. An error
        # is raised by the first call inside of them, or the other ranks would wait for this one.
        self._reset_error = None
        self._named = Target(None, None)
        if checkpoint_id is None:
            return
        try:
            self._named = parse(checkpoint_id)
        except UsageError as error:
            self._reset_error = error


def checked_stream(stream: str | None) -> str | None:
    """``stream`` itself; None for the default one, which a ``checkpoint_id`` may override.

    Raises UsageError if it cannot be a stream's name.
    """
    if stream is None or stream == DEFAULT_STREAM:
        return None
    try:
        check_name(stream, "stream")
    except ValueError as error:
        raise UsageError(str(error)) from error
    return stream


def checked_tags(tags: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """``tags`` as a manifest has them. Raises UsageError: they are not strings, or too many."""
    found = tuple((tags or {}).items())
    if not all(isinstance(text, str) for pair in found for text in pair):
        raise UsageError(f"tags are strings by name, as {{'loss': '0.31'}}, not {str(tags)[:200]}")
    try:
        check_tags(dict(found))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return found


def checked_target(step: int | None, stream: str, tags: Mapping[str, str] | None = None) -> Target:
    """The target of a writer or reader. Raises UsageError if one of them is not valid."""
    return Target(checked_step(step), checked_stream(stream), checked_tags(tags))


def checked_step(step: int | None) -> int | None:
    """``step`` itself. Raises UsageError if it is not a step (0 is one)."""
    if step is None:
        return None
    try:
        number = operator.index(step)  # also NumPy's integers
    except TypeError:
        number = -1
    if type(step) is bool or not 0 <= number < 1 << 63:
        raise UsageError(f"a step is an integer from 0 on, not {step!r}")
    return number


def parse(checkpoint_id: str | os.PathLike[str]) -> Target:
    """The target that ``checkpoint_id`` names.

    Raises:
        UsageError: Its last component is no step, or its folder cannot name a stream.
    """
    text = os.fspath(checkpoint_id)
    if not isinstance(text, str):
        raise UsageError(f"a checkpoint_id is text, not {text!r}")
    folder, last = os.path.split(text.rstrip("/"))
    match = _STEP.fullmatch(last)
    if match is None:
        raise UsageError(
            f"checkpoint_id {text!r} names no step: its last component must be a number or like "
            "'step-100', 'step_100' or 'step=100'"
        )
    name = os.path.basename(folder)
    if name in ("", ".", ".."):
        return Target(checked_step(int(match[1])), None)
    try:
        check_name(name, "stream")
    except ValueError as error:
        raise UsageError(
            f"the folder {name!r} of checkpoint_id {text!r} names the stream: {error}"
        ) from error
    return Target(checked_step(int(match[1])), name)
