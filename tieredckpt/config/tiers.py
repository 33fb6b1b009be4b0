"""The tiers below memory: URL, schedule, retention, and the options of object stores.

Credentials come from the store's client (environment, profile, role of the machine), never from
here: a configuration is printed and logged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from tieredckpt.config.names import (
    FILE_URL_EXAMPLE,
    check_bucket,
    parse_folder,
    parse_name,
    parse_url,
)
from tieredckpt.config.reader import Tree, child
from tieredckpt.config.sections import (
    NOT_A_KEY,
    Options,
    Positive,
    Seconds,
    Written,
    duration,
    entries,
    fail,
    integer,
    keys_of,
    parsed,
    rate,
    read,
    size,
)
from tieredckpt.config.units import (
    DURATION_S_MAX,
    Every,
    format_size,
    parse_every,
    parse_size,
    parse_step,
    show,
)

KEEP_LAST_MAX = 1_000_000
MEMORY_KEEP_LAST_MAX = 100
BEST_MAX = 10_000
ALL = "all"
"""In place of rules: nothing is deleted."""
CONCURRENCY_MAX = 128
PART_BYTES_MIN = 5 << 20
"""S3 refuses smaller parts, except the last one."""
PART_BYTES_MAX = 1 << 30
"""A part is kept in memory while it is sent."""
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
TIERS_MAX = 8
"""Most tiers below memory: each may pin a slot of memory while it spills."""
MEMORY = "memory"
RESERVED_TIER_NAMES = (MEMORY, "replicated")
"""Levels that `wait` and `status` name in addition to the tiers."""

EVERY_SAVE = Every()
_SHARED_KEYS = ("takeover_after", "delete_delay", "sweep_after")
"""Without meaning in a tier of one host."""

_LAST = Annotated[int, msgspec.Meta(ge=1, le=KEEP_LAST_MAX)]


class Best(Options, frozen=True):
    """The ``n`` best by a number that the saves carry as a tag."""

    metric: Annotated[str, Written(parse_name, missing="for example metric: loss")]
    """Name of the tag, as in ``engine.writer(step, tags={"loss": "0.3"})``."""
    mode: Annotated[
        Literal["min", "max"],
        Written(missing="mode: min if less is better, else mode: max"),
    ]
    n: Annotated[Positive, Written(integer(1, BEST_MAX, "checkpoints"))] = 1


class Keep(Options, frozen=True):
    """Retention of a tier, per stream.

    A checkpoint is kept if one of the rules ``last``, ``every`` and ``best`` selects it. The limits
    ``max_age_s`` and ``max_bytes`` delete kept checkpoints, the least useful first.
    """

    hints: ClassVar = {
        "min_age": "delete it: retention by least age is not in this release",
        "tags": "delete it: retention by tag is not in this release",
    }
    last: Annotated[_LAST, Written(integer(1, KEEP_LAST_MAX, "checkpoints"))]
    """The newest ``last`` checkpoints of the timeline; at least 1."""
    every: Annotated[Every | None, Written(parse_step, str)] = None
    """One per so many steps or seconds, for good; never "every save"."""
    max_age_s: Annotated[Seconds | None, duration(1, DURATION_S_MAX)] = None
    """Checkpoints that are older than the newest by more than that are deleted."""
    max_bytes: Annotated[Positive | None, size("max_bytes")] = None
    """Limit of the bytes of one stream's segments in this tier."""
    best: Best | None = None
    everything: Annotated[bool, NOT_A_KEY] = False
    """Nothing is deleted; the other rules have no effect."""

    def __post_init__(self) -> None:
        if self.every == Every():
            raise ValueError("one per so many steps or seconds, not every save")

    def effective(self) -> Any:
        """As it is written in the configuration of a tier."""
        return ALL if self.everything else super().effective()


MEMORY_KEEP = Keep(last=2)
TIER_KEEP = Keep(last=3)
SHARED_KEEP = Keep(last=3, everything=True)
"""A shared tier may hold other runs' only copies, so nothing is deleted without explicit rules.
With other rules, `last` counts too."""


class _MemoryKeep(Options, frozen=True):
    """Retention of memory: its slots are counted, so only ``last`` makes sense there."""

    hints: ClassVar = Keep.hints | dict.fromkeys(
        ("every", "max_age", "max_bytes", "best"),
        "it below a tier; memory has a fixed number of slots",
    )
    last: Annotated[int, Written(integer(1, MEMORY_KEEP_LAST_MAX, "checkpoints"))] = (
        MEMORY_KEEP.last
    )


def parse_memory_keep(value: Tree) -> Keep:
    """The retention of memory. Raises ValueError."""
    return Keep(last=read(_MemoryKeep, _keep_entries(value, _MemoryKeep)).last)


def _keep_entries(value: Tree, kind: type[Options]) -> dict[str, Tree]:
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValueError(f"{value} of what? Write {{last: {value}}}")
    return entries(value, kind)


def _parse_keep(default: Keep, value: Tree) -> Keep:
    if value == ALL:
        return SHARED_KEEP
    values = {key: each for key, each in _keep_entries(value, Keep).items() if each is not None}
    return read(Keep, {"last": TIER_KEEP.last, **values}) if values else default


# --- options of object stores -------------------------------------------------------------------

_PART_BYTES = Annotated[int, msgspec.Meta(ge=PART_BYTES_MIN, le=PART_BYTES_MAX)]
_CONCURRENCY = Annotated[int, msgspec.Meta(ge=1, le=CONCURRENCY_MAX)]


class _Encryption(Options, frozen=True):
    """The section ``sse``."""

    type: Annotated[Literal["s3", "kms"], Written(missing="for example type: kms")]
    key: Annotated[str | None, Written(_parse_text("a key's id"))] = None

    def __post_init__(self) -> None:
        if self.type == "s3" and self.key is not None:
            fail("key", 'the store has the keys of "type: s3"; write "type: kms"')


class _Sse(Options, frozen=True):
    """The key of :class:`ObjectOptions` that has two fields there."""

    sse: _Encryption | None = None


class ObjectOptions(Options, frozen=True):
    """Options of one object store: in the configuration, in messages to the agent, in the tier.

    Options without a meaning for the store are ignored.
    """

    hints: ClassVar = dict.fromkeys(
        _CREDENTIALS,
        "no credentials here: the store's client takes them from the environment, from a profile "
        '("profile: name") or from the role of the machine',
    )

    endpoint: Annotated[str | None, Written(parse_endpoint)] = None
    """``https://host[:port]``; None: the store's own."""
    region: Annotated[str | None, Written(_parse_text("a region"))] = None
    """None: that of the profile or of the environment, else us-east-1."""
    profile: Annotated[str | None, Written(_parse_text("a name"))] = None
    """Of the credentials; None: environment, then role of the machine."""
    anonymous: bool = False
    of_script: Annotated[bool, NOT_A_KEY] = False
    """Use the credentials that the training script supplies (``Engine.open(credentials=...)``)."""
    path_style: bool = False
    """``https://endpoint/bucket/key`` instead of ``https://bucket.endpoint/key``."""
    allow_http: bool = False
    """Allow an ``http://`` endpoint: anyone on the network path can then read and change data."""
    ca: Annotated[str | None, Written(parse_folder)] = None
    """PEM file of the CAs accepted for the store's certificate; None: the system's."""
    concurrency: Annotated[_CONCURRENCY, Written(integer(1, CONCURRENCY_MAX, "requests"))] = 8
    """Requests at once, per host and tier; an upload keeps as many parts in memory."""
    part_bytes: Annotated[_PART_BYTES, Written(_parse_part, format_size, "part_size")] = 16 << 20
    bandwidth_bytes_per_s: Annotated[
        Positive | None, rate("bandwidth", BANDWIDTH_BYTES_PER_S_MIN)
    ] = None
    """Limit of this host's uploads; None: no limit."""
    storage_class: Annotated[str | None, Written(_parse_text("a storage class"))] = None
    sse_type: Annotated[Literal["s3", "kms"] | None, NOT_A_KEY] = None
    sse_key: Annotated[str | None, NOT_A_KEY] = None
    """With "kms" only: id or ARN of the key; None: the account's default key."""
    timeout_s: Annotated[Seconds, duration(1, 3600)] = 30.0
    """Time-out of a request in which no byte moves."""
    retry_for_s: Annotated[Seconds, duration(1, 86400)] = 300.0
    """How long a failing request is repeated before the tier counts as unavailable for a while."""

    def effective(self) -> Any:
        """As it is written in the configuration."""
        sse = None if self.sse_type is None else {"type": self.sse_type, "key": self.sse_key}
        return super().effective() | {"sse": sse}


def _read_object(values: Mapping[str, Tree]) -> ObjectOptions:
    """The object store's keys of a tier. Raises ConfigError."""
    sse = read(_Sse, values).sse
    encryption = {} if sse is None else {"sse_type": sse.type, "sse_key": sse.key}
    found = read(ObjectOptions, values, **encryption)
    if found.endpoint is not None and found.endpoint.startswith("http:") and not found.allow_http:
        fail(
            "endpoint",
            f'"{found.endpoint}" is not encrypted, so anyone on the network path can change stored '
            'data; write https, or add "allow_http: true"',
        )
    if found.anonymous and found.profile is not None:
        fail("anonymous", f'true, and there is "profile: {found.profile}"; write one')
    return found


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


# --- a tier -------------------------------------------------------------------------------------


class TierSpec(Options, frozen=True):
    """One tier below memory, in the configuration and in messages to the agent."""

    hints: ClassVar = {"price": "delete it: the key is gone"}

    name: Annotated[str, Written(parse_name, missing="for example name: nvme")]
    url: Annotated[str, Written(parse_url, missing=f"for example url: {FILE_URL_EXAMPLE}")]
    """``file://`` and an absolute, normalised path without %-escapes; or another scheme, a bucket
    or host, and a path."""
    scope: Literal["host", "shared"] = "host"
    every: Annotated[Every, Written(parse_every, str)] = EVERY_SAVE
    """Not sent to the agent, which does not need it."""
    source: Annotated[str, Written(parse_name, key="from")] = MEMORY
    """Name of its source: memory, or a tier before it in the list."""
    keep: Keep = TIER_KEEP
    on_pressure: Literal["drop_oldest_queued", "keep"] = "drop_oldest_queued"
    lag_alarm: Annotated[Every | None, Written(parse_step, str)] = None
    """Steps or seconds by which the newest checkpoint here may lag behind."""
    takeover_after_s: Annotated[Seconds, duration(1, 86400)] = 60.0
    """Shared tier: delay after which another holder uploads a segment in place of its owner."""
    delete_delay_s: Annotated[Seconds, duration(0, 7 * 86400)] = 600.0
    """Shared tier: time between the tombstone and the deletion of segments."""
    sweep_after_s: Annotated[Seconds, duration(60, DURATION_S_MAX)] = 86400.0
    """Shared tier: age at which uncommitted objects are deleted."""
    object: Annotated[ObjectOptions, NOT_A_KEY] = ObjectOptions()

    @property
    def is_file(self) -> bool:
        """Whether it is a folder."""
        return self.url.startswith("file://")

    @property
    def path(self) -> str:
        """The folder of a file tier."""
        return self.url.removeprefix("file://")

    @property
    def filled_from(self) -> str | None:
        """The tier that is its source; None: memory."""
        return None if self.source == MEMORY else self.source

    def effective(self) -> Any:
        """As it is written in the configuration, without keys that do not apply to this tier."""
        found = super().effective()
        if self.scope == "host":
            for key in _SHARED_KEYS:
                del found[key]
        return found if self.is_file else found | self.object.effective()


def parse_tiers(value: Tree) -> tuple[TierSpec, ...]:
    """The section ``tiers``.

    Raises:
        ConfigError: A tier is wrong.
        ValueError: No list, or too long.
    """
    if not isinstance(value, list):
        raise ValueError(f'{show(value)} is not a list; write "- name: nvme" and so on below it')
    if len(value) > TIERS_MAX:
        raise ValueError(f"{len(value)} tiers; allowed are 0 to {TIERS_MAX}")
    tiers: list[TierSpec] = []
    for number, item in enumerate(value):
        tiers.append(parsed(child("", number), item, partial(_parse_tier, tiers)))
    return tuple(tiers)


def _parse_tier(before: list[TierSpec], value: Tree) -> TierSpec:
    values = entries(value, TierSpec, ObjectOptions, _Sse)
    tier = read(TierSpec, values, keep=TIER_KEEP)
    if tier.name in RESERVED_TIER_NAMES:
        fail("name", f'"{tier.name}" has a meaning of its own; choose another name')
    if not tier.is_file and values.get("scope") is None:
        tier = msgspec.structs.replace(tier, scope="shared")
    if tier.scope == "host" and not tier.is_file:
        fail("scope", f'"host" is for file:// only: every host sees "{tier.url}"')
    if tier.is_file:
        why = "is about an object store, and this tier is a folder"
        _refuse(values, keys_of(ObjectOptions, _Sse), why)
    if tier.scope == "host":
        _refuse(values, _SHARED_KEYS, 'is about a tier of several hosts, "scope: shared"')
    options = _read_object(values)
    try:
        check_bucket(tier.url, own_endpoint=options.endpoint is not None)
    except ValueError as error:
        fail("url", str(error))
    default = TIER_KEEP if tier.scope == "host" else SHARED_KEEP
    keep = parsed("keep", values.get("keep"), partial(_parse_keep, default))
    tier = msgspec.structs.replace(tier, keep=keep, object=options)
    _check_source(tier.source, before)
    for number, other in enumerate(before):
        _check_apart(tier, other, f"tiers[{number}]")
    return tier


def _refuse(values: Mapping[str, Tree], keys: tuple[str, ...], why: str) -> None:
    for key in keys:
        if values.get(key) is not None:
            fail(key, why)


def _check_source(name: str, before: list[TierSpec]) -> None:
    """Refuse a source that is neither memory nor an earlier file tier."""
    if name == MEMORY:
        return
    found = next((tier for tier in before if tier.name == name), None)
    if found is None:
        known = [MEMORY, *(tier.name for tier in before)]
        fail(
            "from",
            f'"{name}" is no tier before this one; write one of {", ".join(known)}',
            allowed=known,
        )
    if not found.is_file:
        fail("from", f'"{name}" is no folder: a tier is filled from memory or file://')


def _check_apart(tier: TierSpec, other: TierSpec, place: str) -> None:
    """Refuse a name or a folder of another tier."""
    if tier.name == other.name:
        fail("name", f'"{tier.name}" is the name of {place} too')
    if tier.url == other.url and tier.object.endpoint == other.object.endpoint:
        fail("url", f'"{tier.url}" is the url of {place} too')
    # A folder in a tier is a namespace of it: deleting that would delete the other tier.
    below = tier.url.startswith(other.url + "/")
    if tier.is_file and (below or other.url.startswith(tier.url + "/")):
        fail(
            "url",
            f'"{tier.url}" is {"below" if below else "above"} the url of {place}, "{other.url}"; '
            "give each tier a folder of its own",
        )
