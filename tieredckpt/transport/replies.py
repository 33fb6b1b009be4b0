"""Our errors as replies and back: by class name, with their fields, never pickled."""

from __future__ import annotations

import functools
import importlib.metadata

import msgspec

from tieredckpt import errors
from tieredckpt.errors import RemoteProtocolError, TieredCkptError
from tieredckpt.format.packing import MALFORMED
from tieredckpt.transport.message_base import FIELDS_MAX
from tieredckpt.transport.messages import ErrorReply

API_HEADER = "X-Tieredckpt-Api"
"""Carried by every request; the agent refuses another API version (except health, shutdown)."""
SESSION_HEADER = "X-Tieredckpt-Session"
"""Carried by every request about the namespace of an open session. An agent that does not know the
session says so and answers nothing else: it may know neither the namespace nor its tiers."""
JSON_TYPE = "application/json"
BYTES_TYPE = "application/octet-stream"
FIELD_CHARS_MAX = 4096

_STATUS: tuple[tuple[type[TieredCkptError], int], ...] = (
    (errors.NotFoundError, 404),
    (errors.StaleAttemptError, 409),
    (errors.NamespaceInUseError, 409),
    (errors.IntegrityError, 422),
    (errors.CapacityError, 507),
    (errors.TierUnavailableError, 503),
    (errors.ConfigError, 400),
    (errors.UsageError, 400),
    (errors.ProtocolError, 400),
)
"""Advisory, for people with curl: the client goes by the name in the body."""

_CLASSES: dict[str, type[TieredCkptError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, TieredCkptError)
}

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ErrorReply)

Field = str | int | float | bool | None | list[str]


@functools.cache
def package_version() -> str:
    """The installed version of tieredckpt, or "0+source" when run from a bare checkout."""
    try:
        return importlib.metadata.version("tieredckpt")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


def _field(value: object) -> Field:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [str(item)[:FIELD_CHARS_MAX] for item in list(value)[:FIELDS_MAX]]
    return str(value)[:FIELD_CHARS_MAX]


def encode_error(error: TieredCkptError) -> tuple[int, bytes]:
    """HTTP status and body for one of our errors."""
    status = next((code for cls, code in _STATUS if isinstance(error, cls)), 500)
    return status, _encoder.encode(describe_error(error))


def describe_error(error: TieredCkptError) -> ErrorReply:
    """One of our errors as a message."""
    fields = {name: _field(value) for name, value in error.fields.items()}
    return ErrorReply(error=type(error).__name__, message=error.message, fields=fields)


def decode_error(status: int, body: bytes) -> TieredCkptError:
    """The error that ``body`` describes; a RemoteProtocolError if it describes none of ours."""
    try:
        reply = _decoder.decode(body)
    except MALFORMED:
        text = body[:200].decode("utf-8", "replace")
        return RemoteProtocolError(f"the agent answered with status {status}: {text}")
    return described_error(reply)


def described_error(reply: ErrorReply) -> TieredCkptError:
    """The error that a message describes; inverse of :func:`describe_error`."""
    cls = _CLASSES.get(reply.error)
    if cls is None:
        return RemoteProtocolError(
            f"the agent answered with an unknown error {reply.error}: {reply.message}"
        )
    return cls(reply.message, **reply.fields)
