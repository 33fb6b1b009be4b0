"""What all messages are made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

HexId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
StreamName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages."""


class ErrorReply(Message, frozen=True):
    """The body of every reply with status >= 400: one of our errors, by class name."""

    error: str
    message: str
    fields: dict[str, str | int | float | bool | None | list[str]] = msgspec.field(
        default_factory=dict
    )


def resolve(kinds: Iterable[object]) -> None:
    """Make the decoders' tables of all messages among ``kinds`` now, while one thread runs.

    msgspec makes them when a type is decoded for the first time, and not safely: two threads that
    do so at the same moment end the process with SIGSEGV (0.22.0, a test shows it).
    """
    for kind in list(kinds):
        if isinstance(kind, type) and issubclass(kind, Message):
            msgspec.msgpack.Decoder(kind)
