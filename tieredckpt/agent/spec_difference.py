"""How two specs of one namespace differ, key by key, for the error that refuses the second."""

from __future__ import annotations

import msgspec

from tieredckpt.transport.messages import NamespaceSpec, TierSpec

_KEYS = (
    ("memory.capacity", "capacity_bytes"),
    ("memory.keep.last", "keep_last"),
    ("memory.wait", "wait_s"),
)
_NAMED = {
    "keep_last": "keep.last", "source": "from", "part_bytes": "part_size",
    "sse_type": "sse.type", "sse_key": "sse.key",
}  # fmt: skip
"""Keys that are not called like the field."""
_INNER = ("keep", "object")


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
    before, after = _flat(running), _flat(asked)
    return [
        _pair(f"tiers[{name}].{key}", before[key], after[key])
        for key in before
        if before[key] != after[key]
    ]


def _flat(spec: TierSpec) -> dict[str, object]:
    found: dict[str, object] = {}
    for field, value in msgspec.structs.asdict(spec).items():
        if field in _INNER:
            inside = msgspec.structs.asdict(value)
            prefix = "keep." if field == "keep" else ""
            found |= {_key(each, prefix): inside[each] for each in inside}
        else:
            found[_key(field)] = value
    return found


def _key(field: str, prefix: str = "") -> str:
    # "max_age_s" is written as "max_age" in a configuration, and so on.
    return _NAMED.get(field) or prefix + field.removesuffix("_s").removesuffix("_bytes_per")


def _pair(key: str, running: object, asked: object) -> str:
    return f"{key} is {running} in the running one, {asked} here"
