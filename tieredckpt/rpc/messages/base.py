"""Base classes of messages, and errors as replies.

An error travels as its class name, message and fields, never pickled.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Iterable
from typing import Annotated, ClassVar, Generic, Self, TypeVar

import msgspec

from tieredckpt import errors
from tieredckpt.errors import RemoteProtocolError, TieredCkptError
from tieredckpt.format.envelope import MALFORMED

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]

SMALL_BODY_BYTES_MAX = 1 << 20
"""Largest accepted body of a request that sets no limit of its own."""
IDS_BYTES_MAX = 16 << 20
"""Largest accepted body of a request that lists ids and hosts: RECORDS_MAX of each."""
MAX_BODY_BYTES = 256 << 20
"""Largest accepted body of any request: a plan of a few million pieces."""

FIELDS_MAX = 64
"""Number of fields of an error, and of items of a field that is a list."""
ErrorField = (
    str | int | float | bool | None | Annotated[list[str], msgspec.Meta(max_length=FIELDS_MAX)]
)

Reply = TypeVar("Reply")


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Request(Message, Generic[Reply], frozen=True):
    """Base of requests, generic in the reply: None, bytes that are not encoded, or a message."""

    body_bytes_max: ClassVar[int] = SMALL_BODY_BYTES_MAX
    packed: ClassVar[bool] = False
    """Whether its body is msgpack; else JSON."""
    awaited: ClassVar[bool] = False
    """Whether a coroutine answers it in the server's event loop, so that a request that waits holds
    no thread. The coroutine also gets a function: whether the client is still connected."""

    def encode(self) -> bytes:
        """Its body."""
        return (msgspec.msgpack.encode if self.packed else msgspec.json.encode)(self)

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Self:
        """The request with this untrusted body. Raises RemoteProtocolError."""
        try:
            return (msgspec.msgpack.decode if cls.packed else msgspec.json.decode)(data, type=cls)
        except MALFORMED as error:
            raise RemoteProtocolError(f"malformed request: {error}") from error

    @classmethod
    def verb(cls) -> str:
        """The last part of its path, and of the name of the method that answers it."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @classmethod
    def reply(cls) -> type[Reply]:
        """The type of the reply."""
        return cls.__orig_bases__[0].__args__[0]  # type: ignore[attr-defined, no-any-return]


class NodeRequest(Request[Reply], Generic[Reply], frozen=True):
    """``POST /v1/namespaces/{ns}/<verb>`` on the agent's socket: ``Node.<verb>`` answers."""

    slow: ClassVar[bool] = True
    """Whether it may wait, scan or allocate."""


class PeerRequest(Request[Reply], Generic[Reply], frozen=True):
    """``POST /p1/ns/{ns}/<verb>`` on another host, msgpack: ``Node.peer_<verb>`` answers."""

    packed: ClassVar[bool] = True
    reply_bytes_max: ClassVar[int] = SMALL_BODY_BYTES_MAX


class ErrorReply(Message, frozen=True):
    """The body of every reply with status >= 400: one of our errors, by class name."""

    error: str
    message: str
    fields: Annotated[dict[str, ErrorField], msgspec.Meta(max_length=FIELDS_MAX)] = msgspec.field(
        default_factory=dict
    )


def resolve(kinds: Iterable[object]) -> None:
    """Make the decoders' tables of all messages among ``kinds`` now, while one thread runs.

    msgspec makes them when a type is decoded for the first time, which is not thread-safe: two
    threads that do so at the same moment end the process with SIGSEGV (0.22.0, a test shows it).
    """
    for kind in list(kinds):
        if isinstance(kind, type) and issubclass(kind, Message):
            msgspec.msgpack.Decoder(kind)


API_HEADER = "X-Tieredckpt-Api"
"""In every request; the agent refuses another API version (except for health, shutdown)."""
SESSION_HEADER = "X-Tieredckpt-Session"
"""In every request about the namespace of an open session. An agent that does not know the session
refuses the request: it may know neither the namespace nor its tiers."""
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
"""For people with curl: the client uses the name in the body."""

_CLASSES: dict[str, type[TieredCkptError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, TieredCkptError)
}

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ErrorReply)


@functools.cache
def package_version() -> str:
    """The installed version of tieredckpt, or "0+source" when run from a bare checkout."""
    try:
        return importlib.metadata.version("tieredckpt")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


def _field(value: object) -> ErrorField:
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
    """The message that describes one of our errors."""
    fields = {name: _field(value) for name, value in error.fields.items()}
    return ErrorReply(error=type(error).__name__, message=error.message, fields=fields)


def decode_error(status: int, body: bytes) -> TieredCkptError:
    """The error that ``body`` describes; RemoteProtocolError if it is none of ours."""
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
