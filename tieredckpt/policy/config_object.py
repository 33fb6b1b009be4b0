"""How a tier talks to its object store: plain values, the same for every store.

Credentials are found by the store's client (environment, profile, role of the machine), never here:
a configuration is printed and logged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from tieredckpt.policy.config_sections import (
    NOT_A_KEY,
    Options,
    Positive,
    Seconds,
    Section,
    Written,
    duration,
    fail,
    one_word,
    rate,
    whole_number,
    written_keys,
)
from tieredckpt.policy.names import parse_folder
from tieredckpt.policy.units import format_size, parse_size, show

CONCURRENCY_MAX = 128
PART_BYTES_MIN = 5 << 20
"""S3 refuses smaller parts, except the last one."""
PART_BYTES_MAX = 1 << 30
"""A part is held in memory while it is sent."""
BANDWIDTH_BYTES_PER_S_MIN = 1 << 20
_TEXT_CHARS_MAX = 1024
_HOST = re.compile(r"(?:[^:\[\]]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")
_HOST_CHARS_MAX = 255
_PORT_MAX = 65535

_CREDENTIALS = (
    "access_key", "access_key_id", "secret_key", "secret_access_key", "session_token", "token",
    "password", "credentials", "account_key", "aws_access_key_id", "aws_secret_access_key",
    "aws_session_token",
)  # fmt: skip
OBJECT_ELSEWHERE = dict.fromkeys(
    _CREDENTIALS,
    "no credentials here: the store's client takes them from the environment, from a profile "
    '("profile: name") or from the role of the machine',
)


_PART_BYTES = Annotated[int, msgspec.Meta(ge=PART_BYTES_MIN, le=PART_BYTES_MAX)]
_CONCURRENCY = Annotated[int, msgspec.Meta(ge=1, le=CONCURRENCY_MAX)]


class ObjectOptions(Options, frozen=True):
    """Of one tier: what is configured, what the agent is told and what the tier takes.

    What has no meaning for its store, or for a folder, is ignored.
    """

    endpoint: Annotated[str | None, Written(parse_endpoint)] = None
    """``https://host[:port]``; None: the store's own."""
    region: Annotated[str | None, Written(_parse_text("a region"))] = None
    """None: that of the profile or of the environment, else us-east-1."""
    profile: Annotated[str | None, Written(_parse_text("a name"))] = None
    """Of the credentials; None: environment, then role of the machine."""
    anonymous: bool = False
    path_style: bool = False
    """``https://endpoint/bucket/key`` instead of ``https://bucket.endpoint/key``."""
    allow_http: bool = False
    """Whether ``endpoint`` may be ``http://``: then anybody on the way can read and change all."""
    ca: Annotated[str | None, Written(parse_folder)] = None
    """PEM file of the authorities that the store's certificate may come from; None: the usual."""
    concurrency: Annotated[_CONCURRENCY, Written(whole_number(1, CONCURRENCY_MAX, "requests"))] = 8
    """Requests at once, per host and tier; an upload holds as many parts in memory."""
    part_bytes: Annotated[_PART_BYTES, Written(_parse_part, format_size, "part_size")] = 16 << 20
    bandwidth_bytes_per_s: Annotated[
        Positive | None, rate("bandwidth", BANDWIDTH_BYTES_PER_S_MIN)
    ] = None
    """Most that this host uploads; None: no limit."""
    storage_class: Annotated[str | None, Written(_parse_text("a storage class"))] = None
    sse_type: Annotated[Literal["s3", "kms"] | None, Written(key="sse")] = None
    sse_key: Annotated[str | None, NOT_A_KEY] = None
    """With "kms" only: id or ARN of the key; None: the account's default key."""
    timeout_s: Annotated[Seconds, duration(1, 3600)] = 30.0
    """Of a request in which no byte moves."""
    retry_for_s: Annotated[Seconds, duration(1, 86400)] = 300.0
    """How long a failing request is repeated, before the tier counts as unavailable for a while."""

    def effective(self) -> dict[str, object]:
        """As it is written in the configuration."""
        sse = None if self.sse_type is None else {"type": self.sse_type, "key": self.sse_key}
        return written_keys(self) | {"sse": sse}


def read_object(section: Section) -> ObjectOptions:
    """The object store's keys of a tier. Raises ConfigError."""
    sse_type, sse_key = _sse(section)
    found = section.fill(ObjectOptions(sse_type=sse_type, sse_key=sse_key))
    if found.endpoint is not None and found.endpoint.startswith("http:") and not found.allow_http:
        fail(
            section.key("endpoint"),
            f'"{found.endpoint}" is not encrypted, and everybody on the way can change what is '
            'stored; write https, or "allow_http: true" beside it',
        )
    if found.anonymous and found.profile is not None:
        fail(section.key("anonymous"), f'true, and there is "profile: {found.profile}"; write one')
    return found


def _sse(around: Section) -> tuple[Literal["s3", "kms"] | None, str | None]:
    value = around.raw("sse")
    if value is None:
        return None, None
    section = Section(value, around.key("sse"), ("type", "key"))
    word = section.raw("type")
    if word is None:
        fail(section.key("type"), "missing; write for example type: kms")
    kind: Literal["s3", "kms"] = (
        "kms" if one_word(section.key("type"), word, ("s3", "kms")) == "kms" else "s3"
    )
    key = section.read("key", _parse_text("a key's id"), None)
    if kind == "s3" and key is not None:
        fail(section.key("key"), 'the store has the keys of "type: s3"; write "type: kms"')
    return kind, key


def parse_endpoint(value: object) -> str:
    """``http[s]://host[:port]``, without a slash at the end. Raises ValueError."""
    text = value.rstrip("/") if isinstance(value, str) else ""
    scheme, colon, host = text.partition("://")
    usable = host.isascii() and host.isprintable() and not set(host) & set("/@?# ")
    found = _HOST.fullmatch(host) if usable and len(host) <= _HOST_CHARS_MAX else None
    if not colon or scheme not in ("http", "https") or found is None:
        raise ValueError(
            f'{show(value)} is not an endpoint; write for example "https://s3.example.com:9000", '
            "without bucket and credentials"
        )
    if found[1] is not None and not 1 <= int(found[1]) <= _PORT_MAX:
        raise ValueError(f"{show(value)}: there is no port {found[1]}; write 1 to {_PORT_MAX}")
    return f"{scheme}://{host}"


def _parse_text(what: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        good = isinstance(value, str) and value.isprintable() and value.strip() == value
        if not good or not 1 <= len(str(value)) <= _TEXT_CHARS_MAX:
            raise ValueError(f"{show(value)} is not {what}")
        return str(value)

    return parse


def _parse_part(value: object) -> int:
    size = parse_size(value, least_bytes=PART_BYTES_MIN)
    if size > PART_BYTES_MAX:
        raise ValueError(
            f"{show(value)} is out of range; allowed are {format_size(PART_BYTES_MIN)} to "
            f"{format_size(PART_BYTES_MAX)}"
        )
    return size
