"""Requests and their parameters, taken apart: whatever they hold that is none is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from tieredckpt.errors import RemoteProtocolError, UsageError
from tieredckpt.format.packing import MALFORMED

_Request = TypeVar("_Request")


def from_json(data: bytes, kind: type[_Request]) -> _Request:
    """``data`` as ``kind``. Raises RemoteProtocolError."""
    return _decoded(msgspec.json.decode, data, kind)


def from_msgpack(data: bytes | bytearray, kind: type[_Request]) -> _Request:
    """``data`` as ``kind``. Raises RemoteProtocolError."""
    return _decoded(msgspec.msgpack.decode, data, kind)


def _decoded(
    decode: Callable[..., _Request], data: bytes | bytearray, kind: type[_Request]
) -> _Request:
    try:
        return decode(data, type=kind)
    except MALFORMED as error:
        raise RemoteProtocolError(f"malformed request: {error}") from error


def seconds(text: str, what: str) -> float:
    """A number of seconds from 0 on, infinity included. Raises UsageError."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not found >= 0:  # also what is no number
        raise UsageError(f"{what}={text[:80]!r} is not a number of seconds from 0 on")
    return found
