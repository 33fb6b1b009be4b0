"""How a tier talks to its object store: plain values, the same for every store.

Credentials are found by the store's client (environment, profile, role of the machine), never here:
a configuration is printed and logged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from tieredckpt.policy.config_sections import Section, duration, fail, whole_number
from tieredckpt.policy.names import parse_folder
from tieredckpt.policy.units import (
    format_duration,
    format_rate,
    format_size,
    parse_rate,
    parse_size,
    show,
)

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

OBJECT_KEYS = (
    "endpoint", "region", "profile", "anonymous", "path_style", "allow_http", "ca", "concurrency",
    "part_size", "bandwidth", "storage_class", "sse", "timeout", "retry_for",
)  # fmt: skip
"""The keys of a tier that are about its object store."""
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


class ObjectOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one tier: what is configured, what the agent is told and what the tier takes.

    What has no meaning for its store, or for a folder, is ignored.
    """

    endpoint: str | None = None
    """``https://host[:port]``; None: the store's own."""
    region: str | None = None
    """None: that of the profile or of the environment, else us-east-1."""
    profile: str | None = None
    """Of the credentials; None: environment, then role of the machine."""
    anonymous: bool = False
    path_style: bool = False
    """``https://endpoint/bucket/key`` instead of ``https://bucket.endpoint/key``."""
    allow_http: bool = False
    """Whether ``endpoint`` may be ``http://``: then anybody on the way can read and change all."""
    ca: str | None = None
    """PEM file of the authorities that the store's certificate may come from; None: the usual."""
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=CONCURRENCY_MAX)] = 8
    """Requests at once, per host and tier; an upload holds as many parts in memory."""
    part_bytes: Annotated[int, msgspec.Meta(ge=PART_BYTES_MIN, le=PART_BYTES_MAX)] = 16 << 20
    bandwidth_bytes_per_s: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)] | None = None
    """Most that this host uploads; None: no limit."""
    storage_class: str | None = None
    sse_type: Literal["s3", "kms"] | None = None
    sse_key: str | None = None
    """With "kms" only: id or ARN of the key; None: the account's default key."""
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 30.0
    """Of a request in which no byte moves."""
    retry_for_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 300.0
    """How long a failing request is repeated, before the tier counts as unavailable for a while."""

    def effective(self) -> dict[str, object]:
        """As it is written in the configuration."""
        rate = self.bandwidth_bytes_per_s
        sse = None if self.sse_type is None else {"type": self.sse_type, "key": self.sse_key}
        return {
            "endpoint": self.endpoint,
            "region": self.region,
            "profile": self.profile,
            "anonymous": self.anonymous,
            "path_style": self.path_style,
            "allow_http": self.allow_http,
            "ca": self.ca,
            "concurrency": self.concurrency,
            "part_size": format_size(self.part_bytes),
            "bandwidth": None if rate is None else format_rate(rate),
            "storage_class": self.storage_class,
            "sse": sse,
            "timeout": format_duration(self.timeout_s),
            "retry_for": format_duration(self.retry_for_s),
        }


def read_object(section: Section) -> ObjectOptions:
    """The object store's keys of a tier. Raises ConfigError."""
    default = ObjectOptions()
    allow_http = section.flag("allow_http", default.allow_http)
    endpoint = section.read("endpoint", parse_endpoint, None)
    if endpoint is not None and endpoint.startswith("http:") and not allow_http:
        fail(
            section.key("endpoint"),
            f'"{endpoint}" is not encrypted, and everybody on the way can change what is stored; '
            'write https, or "allow_http: true" beside it',
        )
    anonymous = section.flag("anonymous", default.anonymous)
    profile = section.read("profile", _text("a name"), None)
    if anonymous and profile is not None:
        fail(section.key("anonymous"), f'true, and there is "profile: {profile}"; write one')
    sse_type, sse_key = _sse(section)
    return ObjectOptions(
        endpoint=endpoint,
        region=section.read("region", _text("a region"), None),
        profile=profile,
        anonymous=anonymous,
        path_style=section.flag("path_style", default.path_style),
        allow_http=allow_http,
        ca=section.read("ca", parse_folder, None),
        concurrency=section.read(
            "concurrency", whole_number(1, CONCURRENCY_MAX, "requests"), default.concurrency
        ),
        part_bytes=section.read("part_size", _parse_part, default.part_bytes),
        bandwidth_bytes_per_s=section.read("bandwidth", _parse_bandwidth, None),
        storage_class=section.read("storage_class", _text("a storage class"), None),
        sse_type=sse_type,
        sse_key=sse_key,
        timeout_s=section.read("timeout", duration(1, 3600), default.timeout_s),
        retry_for_s=section.read("retry_for", duration(1, 86400), default.retry_for_s),
    )


def _sse(around: Section) -> tuple[Literal["s3", "kms"] | None, str | None]:
    value = around.raw("sse")
    if value is None:
        return None, None
    section = Section(value, around.key("sse"), ("type", "key"))
    if section.raw("type") is None:
        fail(section.key("type"), "missing; write for example type: kms")
    kind: Literal["s3", "kms"] = (
        "kms" if section.choice("type", ("s3", "kms"), "") == "kms" else "s3"
    )
    key = section.read("key", _text("a key's id"), None)
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


def _text(what: str) -> Callable[[object], str]:
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


def _parse_bandwidth(value: object) -> int:
    return parse_rate(value, least_bytes_per_s=BANDWIDTH_BYTES_PER_S_MIN)
