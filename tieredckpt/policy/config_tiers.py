"""The tiers below memory: where they are, what goes there, what stays."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from tieredckpt.policy.buckets import check_bucket
from tieredckpt.policy.config_keep import Keep, read_keep
from tieredckpt.policy.config_object import OBJECT_ELSEWHERE, ObjectOptions, read_object
from tieredckpt.policy.config_sections import (
    NOT_A_KEY,
    Options,
    Seconds,
    Section,
    Written,
    duration,
    fail,
    keys_of,
    written_keys,
)
from tieredckpt.policy.config_source import Tree, child
from tieredckpt.policy.names import FILE_URL_EXAMPLE, parse_name, parse_url
from tieredckpt.policy.units import DURATION_S_MAX, Every, parse_every, parse_step, show

TIERS_MAX = 8
"""Most tiers below memory: each may pin a slot of memory while it spills."""
MEMORY = "memory"
RESERVED_TIER_NAMES = (MEMORY, "replicated")
"""Levels that `wait` and `status` name beside the tiers."""

EVERY_SAVE = Every()
TIER_KEEP = Keep(last=3)
SHARED_KEEP = Keep(last=3, everything=True)
"""What hosts share may hold other runs' only copies: without rules of its own nothing goes. `last`
counts beside other rules that were written."""
_SHARED_KEYS = ("takeover_after", "delete_delay", "sweep_after")
"""Without meaning in a tier of one host."""


class TierSpec(Options, frozen=True):
    """One tier below memory: what is configured, and what the agent is told."""

    name: Annotated[str, Written(parse_name)]
    url: Annotated[str, Written(parse_url)]
    """``file://`` and an absolute, normalised path, taken literally, without %-escapes; or another
    scheme, a bucket or host, and a path."""
    scope: Literal["host", "shared"] = "host"
    every: Annotated[Every, Written(parse_every, str)] = EVERY_SAVE
    """Of no concern to the agent, which is not told."""
    source: Annotated[str, Written(parse_name, key="from")] = MEMORY
    """What it is filled from: memory, or a tier before it in the list."""
    keep: Keep = TIER_KEEP
    on_pressure: Literal["drop_oldest_queued", "keep"] = "drop_oldest_queued"
    lag_alarm: Annotated[Every | None, Written(parse_step, str)] = None
    """Steps or seconds that the newest checkpoint here may be behind."""
    takeover_after_s: Annotated[Seconds, duration(1, 86400)] = 60.0
    """Of a shared tier: when copies of segments are uploaded whose owner has not."""
    delete_delay_s: Annotated[Seconds, duration(0, 7 * 86400)] = 600.0
    """Of a shared tier: between the tombstone and the deletion of segments."""
    sweep_after_s: Annotated[Seconds, duration(60, DURATION_S_MAX)] = 86400.0
    """Of a shared tier: age at which what was never committed is removed."""
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
        """The tier that it is filled from; None: memory."""
        return None if self.source == MEMORY else self.source

    def effective(self) -> dict[str, Any]:
        """As it is written in the configuration; keys without meaning here are left out."""
        found = written_keys(self)
        if self.scope == "host":
            for key in _SHARED_KEYS:
                del found[key]
        return found if self.is_file else found | self.object.effective()


def read_tiers(value: Tree) -> tuple[TierSpec, ...]:
    """The section ``tiers``. Raises ConfigError."""
    if value is None:
        return ()
    if not isinstance(value, list):
        fail("tiers", f'{show(value)} is not a list; write "- name: nvme" and so on below it')
    if len(value) > TIERS_MAX:
        fail("tiers", f"{len(value)} tiers; allowed are 0 to {TIERS_MAX}")
    tiers: list[TierSpec] = []
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


def _is_below(tier: TierSpec, other: TierSpec) -> bool:
    # A folder in a tier is a namespace of it: deleting that would delete the other tier.
    return tier.is_file and other.is_file and tier.path.startswith(other.path + "/")


def _tier(value: Tree, path: str, before: list[TierSpec]) -> TierSpec:
    elsewhere = OBJECT_ELSEWHERE | {"price": "nothing, the key is gone: delete it"}
    object_keys = keys_of(ObjectOptions)
    section = Section(value, path, (*keys_of(TierSpec), *object_keys), elsewhere=elsewhere)
    name = section.require("name", parse_name, "name: nvme")
    if name in RESERVED_TIER_NAMES:
        fail(section.key("name"), f'"{name}" has a meaning of its own; choose another name')
    url = section.require("url", parse_url, f"url: {FILE_URL_EXAMPLE}")
    is_file = url.startswith("file://")
    tier = section.fill(TierSpec(name=name, url=url, scope="host" if is_file else "shared"))
    if tier.scope == "host" and not is_file:
        fail(section.key("scope"), f'"host" is for file:// only: every host sees "{url}"')
    if is_file:
        _refuse(section, object_keys, "is about an object store, and this tier is a folder")
    if tier.scope == "host":
        _refuse(section, _SHARED_KEYS, 'is about a tier of several hosts, "scope: shared"')
    options = read_object(section)
    try:
        check_bucket(url, own_endpoint=options.endpoint is not None)
    except ValueError as error:
        fail(section.key("url"), str(error))
    _check_source(section, tier.source, before)
    keep = read_keep(section, TIER_KEEP if tier.scope == "host" else SHARED_KEEP)
    return msgspec.structs.replace(tier, keep=keep, object=options)


def _refuse(section: Section, keys: tuple[str, ...], why: str) -> None:
    for key in keys:
        if section.raw(key) is not None:
            fail(section.key(key), why)


def _check_source(section: Section, name: str, before: list[TierSpec]) -> None:
    """Refuse what is neither memory nor an earlier tier whose segments can be read like a file."""
    if name == MEMORY:
        return
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
