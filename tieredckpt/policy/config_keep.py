"""The key ``keep``: which checkpoints stay in a tier."""

from __future__ import annotations

from tieredckpt.policy.config_sections import Section, duration, fail, whole_number
from tieredckpt.policy.names import parse_name
from tieredckpt.policy.retention import Best, Keep
from tieredckpt.policy.units import (
    DURATION_S_MAX,
    Every,
    format_duration,
    format_size,
    parse_every,
    parse_size,
    show,
)

BEST_MAX = 10_000
ALL = "all"
"""In place of rules: nothing is deleted."""


def read_keep(around: Section, default: Keep, most: int) -> Keep:
    """The retention at ``keep`` of a tier, of at most ``most`` newest checkpoints.

    Raises:
        ConfigError: It is wrong.
    """
    if around.raw("keep") == ALL:
        return Keep(last=default.last, everything=True)
    keys = ("last", "every", "max_age", "max_bytes", "best")
    section = _section(around, keys, {})
    if all(section.raw(key) is None for key in keys):
        return default
    return Keep(
        last=_last(section, default, most),
        every=section.read("every", parse_step, None),
        max_age_s=section.read("max_age", duration(1, DURATION_S_MAX), None),
        max_bytes=section.read("max_bytes", parse_size, None),
        best=_best(section),
    )


def read_memory_keep(around: Section, default: Keep, most: int) -> Keep:
    """The retention of memory: its slots are counted, so only ``last`` makes sense there.

    Raises:
        ConfigError: It is wrong.
    """
    others = ("every", "max_age", "max_bytes", "best")
    section = _section(
        around,
        ("last",),
        dict.fromkeys(others, "it below a tier; memory has a fixed number of slots"),
    )
    return Keep(last=_last(section, default, most))


def effective_keep(keep: Keep) -> dict[str, object] | str:
    """As it is written in the configuration of a tier."""
    if keep.everything:
        return ALL
    best = keep.best
    return {
        "last": keep.last,
        "every": None if keep.every is None else str(keep.every),
        "max_age": None if keep.max_age_s is None else format_duration(keep.max_age_s),
        "max_bytes": None if keep.max_bytes is None else format_size(keep.max_bytes),
        "best": None if best is None else {"metric": best.metric, "mode": best.mode, "n": best.n},
    }


def parse_step(value: object) -> Every:
    """A schedule that is not "save". Raises ValueError."""
    every = parse_every(value)
    if every == Every():
        raise ValueError(f'{show(value)} is not allowed; write "1000 steps" or "6 h"')
    return every


def _section(around: Section, keys: tuple[str, ...], elsewhere: dict[str, str]) -> Section:
    value, path = around.raw("keep"), around.key("keep")
    if isinstance(value, int) and not isinstance(value, bool):
        fail(path, f"{value} of what? Write {{last: {value}}}")
    return Section(
        value,
        path,
        keys,
        later={"min_age": "retention by least age is", "tags": "retention by tag is"},
        elsewhere=elsewhere,
    )


def _last(section: Section, default: Keep, most: int) -> int:
    return section.read("last", whole_number(1, most, "checkpoints"), default.last)


def _best(around: Section) -> Best | None:
    if around.raw("best") is None:
        return None
    section = Section(around.raw("best"), around.key("best"), ("metric", "mode", "n"))
    metric = section.require("metric", parse_name, "metric: loss")
    if section.raw("mode") is None:
        fail(section.key("mode"), "missing; write mode: min if less is better, else mode: max")
    return Best(
        metric=metric,
        mode="max" if section.choice("mode", ("min", "max"), "") == "max" else "min",
        n=section.read("n", whole_number(1, BEST_MAX, "checkpoints"), 1),
    )
