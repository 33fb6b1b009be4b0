"""The tiers below memory: where they are, what goes there, what stays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tieredckpt.policy.buckets import check_bucket
from tieredckpt.policy.config_keep import effective_keep, parse_step, read_keep
from tieredckpt.policy.config_object import (
    OBJECT_ELSEWHERE,
    OBJECT_KEYS,
    ObjectOptions,
    read_object,
)
from tieredckpt.policy.config_sections import Section, duration, fail
from tieredckpt.policy.config_source import Tree, child
from tieredckpt.policy.names import FILE_URL_EXAMPLE, parse_name, parse_url
from tieredckpt.policy.retention import Keep
from tieredckpt.policy.units import DURATION_S_MAX, Every, format_duration, parse_every, show

TIERS_MAX = 8
"""Most tiers below memory: each may pin a slot of memory while it spills."""
KEEP_LAST_MAX = 1_000_000
MEMORY = "memory"
RESERVED_TIER_NAMES = (MEMORY, "replicated")
"""Levels that `wait` and `status` name beside the tiers."""

EVERY_SAVE = Every()
TIER_KEEP = Keep(last=3)
SHARED_KEEP = Keep(last=3, everything=True)
"""What hosts share may hold other runs' only copies: without rules of its own nothing goes. `last`
counts beside other rules that were written."""
_KEYS = ("name", "url", "scope", "every", "from", "keep", "on_pressure", "lag_alarm")
_SHARED_KEYS = ("takeover_after", "delete_delay", "sweep_after")
"""Without meaning in a tier of one host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """One tier below memory."""

    name: str
    url: str
    """``file://`` and an absolute, normalised path, taken literally, without %-escapes; or another
    scheme, a bucket or host, and a path."""
    scope: Literal["host", "shared"] = "host"
    every: Every = EVERY_SAVE
    source: str = MEMORY
    """What it is filled from: memory, or a tier before it in the list (key ``from``)."""
    keep: Keep = TIER_KEEP
    on_pressure: Literal["drop_oldest_queued", "keep"] = "drop_oldest_queued"
    lag_alarm: Every | None = None
    """Steps or seconds that the newest checkpoint here may be behind."""
    takeover_after_s: float = 60.0
    """Of a shared tier: when copies of segments are uploaded whose owner has not."""
    delete_delay_s: float = 600.0
    """Of a shared tier: between the tombstone and the deletion of segments."""
    sweep_after_s: float = 86400.0
    """Of a shared tier: age at which what was never committed is removed."""
    object: ObjectOptions = field(default_factory=ObjectOptions)

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
        """The tier that it is filled from; None: memory."""
        return None if self.source == MEMORY else self.source


def effective_tier(tier: TierConfig) -> dict[str, object]:
    """As it is written in the configuration; keys without meaning here are left out."""
    found: dict[str, object] = {
        "name": tier.name,
        "url": tier.url,
        "scope": tier.scope,
        "every": str(tier.every),
        "from": tier.source,
        "keep": effective_keep(tier.keep),
        "on_pressure": tier.on_pressure,
        "lag_alarm": None if tier.lag_alarm is None else str(tier.lag_alarm),
    }
    if tier.scope == "shared":
        found |= {
            "takeover_after": format_duration(tier.takeover_after_s),
            "delete_delay": format_duration(tier.delete_delay_s),
            "sweep_after": format_duration(tier.sweep_after_s),
        }
    return found if tier.is_file else found | tier.object.effective()


def read_tiers(value: Tree) -> tuple[TierConfig, ...]:
    """The section ``tiers``. Raises ConfigError."""
    if value is None:
        return ()
    if not isinstance(value, list):
        fail("tiers", f'{show(value)} is not a list; write "- name: nvme" and so on below it')
    if len(value) > TIERS_MAX:
        fail("tiers", f"{len(value)} tiers; allowed are 0 to {TIERS_MAX}")
    tiers: list[TierConfig] = []
    for number, item in enumerate(value):
        path = child("tiers", number)
        tier = _tier(item, path, tiers)
        for earlier, other in enumerate(tiers):
            if tier.name == other.name:
                fail(f"{path}.name", f'"{tier.name}" is the name of tiers[{earlier}] too')
            if tier.url == other.url and tier.object.endpoint == other.object.endpoint:
                fail(f"{path}.url", f'"{tier.url}" is the url of tiers[{earlier}] too')
            if _is_below(tier, other) or _is_below(other, tier):
                how = "is below" if _is_below(tier, other) else "is above"
                fail(
                    f"{path}.url",
                    f'"{tier.url}" {how} the url of tiers[{earlier}], "{other.url}"; '
                    "give each tier a folder of its own",
                )
        tiers.append(tier)
    return tuple(tiers)


def _is_below(tier: TierConfig, other: TierConfig) -> bool:
    # A folder in a tier is a namespace of it: deleting that would delete the other tier.
    return tier.is_file and other.is_file and tier.path.startswith(other.path + "/")


def _tier(value: Tree, path: str, before: list[TierConfig]) -> TierConfig:
    elsewhere = OBJECT_ELSEWHERE | {"price": "nothing, the key is gone: delete it"}
    section = Section(value, path, (*_KEYS, *_SHARED_KEYS, *OBJECT_KEYS), elsewhere=elsewhere)
    name = section.require("name", parse_name, "name: nvme")
    if name in RESERVED_TIER_NAMES:
        fail(section.key("name"), f'"{name}" has a meaning of its own; choose another name')
    url = section.require("url", parse_url, f"url: {FILE_URL_EXAMPLE}")
    is_file = url.startswith("file://")
    scope = section.choice("scope", ("host", "shared"), "host" if is_file else "shared")
    if scope == "host" and not is_file:
        fail(section.key("scope"), f'"host" is for file:// only: every host sees "{url}"')
    if is_file:
        _refuse(section, OBJECT_KEYS, "is about an object store, and this tier is a folder")
    if scope == "host":
        _refuse(section, _SHARED_KEYS, 'is about a tier of several hosts, "scope: shared"')
    options = read_object(section)
    try:
        check_bucket(url, own_endpoint=options.endpoint is not None)
    except ValueError as error:
        fail(section.key("url"), str(error))
    default = TierConfig(name=name, url=url)
    pressure = section.choice("on_pressure", ("drop_oldest_queued", "keep"), default.on_pressure)
    return TierConfig(
        name=name,
        url=url,
        scope="shared" if scope == "shared" else "host",
        every=section.read("every", parse_every, EVERY_SAVE),
        source=_source(section, before),
        keep=read_keep(section, TIER_KEEP if scope == "host" else SHARED_KEEP, KEEP_LAST_MAX),
        on_pressure="keep" if pressure == "keep" else "drop_oldest_queued",
        lag_alarm=section.read("lag_alarm", parse_step, None),
        takeover_after_s=section.read(
            "takeover_after", duration(1, 86400), default.takeover_after_s
        ),
        delete_delay_s=section.read("delete_delay", duration(0, 7 * 86400), default.delete_delay_s),
        sweep_after_s=section.read(
            "sweep_after", duration(60, DURATION_S_MAX), default.sweep_after_s
        ),
        object=options,
    )


def _refuse(section: Section, keys: tuple[str, ...], why: str) -> None:
    for key in keys:
        if section.raw(key) is not None:
            fail(section.key(key), why)


def _source(section: Section, before: list[TierConfig]) -> str:
    """Memory, or an earlier tier whose segments can be read like a file."""
    name = section.read("from", parse_name, MEMORY)
    if name == MEMORY:
        return MEMORY
    found = next((tier for tier in before if tier.name == name), None)
    if found is None:
        known = [MEMORY, *(tier.name for tier in before)]
        fail(
            section.key("from"),
            f'"{name}" is no tier before this one; write one of {", ".join(known)}',
            allowed=known,
        )
    if not found.is_file:
        fail(section.key("from"), f'"{name}" is no folder: a tier is filled from memory or file://')
    return name
