"""How two specs of one namespace differ, key by key, for the error that refuses the second."""

from __future__ import annotations

from tieredckpt.transport.messages import NamespaceSpec, TierSpec

_KEYS = (
    ("memory.capacity", "capacity_bytes"),
    ("memory.keep.last", "keep_last"),
    ("memory.wait", "wait_s"),
)
_TIER_KEYS = (("url", "url"), ("scope", "scope"), ("keep.last", "keep_last"))


def describe_difference(running: NamespaceSpec, asked: NamespaceSpec) -> list[str]:
    """Sentences such as ``memory.keep.last is 2 in the running one, 3 here``; empty if equal."""
    found = [
        _pair(key, getattr(running, field), getattr(asked, field))
        for key, field in _KEYS
        if getattr(running, field) != getattr(asked, field)
    ]
    before = {tier.name: tier for tier in running.tiers}
    after = {tier.name: tier for tier in asked.tiers}
    for name in dict.fromkeys([*before, *after]):
        if name not in after:
            found.append(f"tiers[{name}] is in the running one only")
        elif name not in before:
            found.append(f"tiers[{name}] is here only")
        else:
            found += _tier(name, before[name], after[name])
    if not found and running != asked:
        orders = (", ".join(before), ", ".join(after))
        found.append(_pair("the order of tiers", *orders))
    return found


def _tier(name: str, running: TierSpec, asked: TierSpec) -> list[str]:
    return [
        _pair(f"tiers[{name}].{key}", getattr(running, field), getattr(asked, field))
        for key, field in _TIER_KEYS
        if getattr(running, field) != getattr(asked, field)
    ]


def _pair(key: str, running: object, asked: object) -> str:
    return f"{key} is {running} in the running one, {asked} here"
