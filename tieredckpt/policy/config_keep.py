"""The key ``keep``: which checkpoints stay in a tier."""

from __future__ import annotations

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
    keys_of,
    size,
    whole_number,
    written_keys,
)
from tieredckpt.policy.names import parse_name
from tieredckpt.policy.units import DURATION_S_MAX, Every, parse_step

KEEP_LAST_MAX = 1_000_000
BEST_MAX = 10_000
ALL = "all"
"""In place of rules: nothing is deleted."""

_LAST = Annotated[int, msgspec.Meta(ge=1, le=KEEP_LAST_MAX)]


class Best(Options, frozen=True):
    """The ``n`` best by a number that the saves carry as a tag."""

    metric: Annotated[str, Written(parse_name)]
    """Name of the tag, as in ``engine.writer(step, tags={"loss": "0.3"})``."""
    mode: Literal["min", "max"]
    n: Annotated[Positive, Written(whole_number(1, BEST_MAX, "checkpoints"))] = 1


class Keep(Options, frozen=True):
    """What retention leaves in a tier, per stream.

    The rules ``last``, ``every`` and ``best`` are reasons to stay, any of them suffices; the limits
    ``max_age_s`` and ``max_bytes`` delete of what only rules keep, the least useful first.
    """

    last: Annotated[_LAST, Written(whole_number(1, KEEP_LAST_MAX, "checkpoints"))]
    """The newest so many checkpoints of the time line; at least 1."""
    every: Annotated[Every | None, Written(parse_step, str)] = None
    """One per so many steps or seconds, for good; never "every save"."""
    max_age_s: Annotated[Seconds | None, duration(1, DURATION_S_MAX)] = None
    """What is older than the newest by more than that goes."""
    max_bytes: Annotated[Positive | None, size("max_bytes")] = None
    """Segments of one stream in this tier may take so much."""
    best: Best | None = None
    everything: Annotated[bool, NOT_A_KEY] = False
    """Nothing goes, whatever the other rules say."""

    def __post_init__(self) -> None:
        if self.every == Every():
            raise ValueError("one per so many steps or seconds, not every save")

    def effective(self) -> object:
        """As it is written in the configuration of a tier."""
        return ALL if self.everything else written_keys(self)


def read_keep(around: Section, default: Keep) -> Keep:
    """The retention at ``keep`` of a tier.

    Raises:
        ConfigError: It is wrong.
    """
    if around.raw("keep") == ALL:
        return Keep(last=default.last, everything=True)
    keys = keys_of(Keep)
    section = _section(around, keys, {})
    if all(section.raw(key) is None for key in keys):
        return default
    return section.fill(Keep(last=default.last, best=_best(section)))


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
    last = section.read("last", whole_number(1, most, "checkpoints"), default.last)
    return Keep(last=last)


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


def _best(around: Section) -> Best | None:
    if around.raw("best") is None:
        return None
    section = Section(around.raw("best"), around.key("best"), keys_of(Best))
    metric = section.require("metric", parse_name, "metric: loss")
    if section.raw("mode") is None:
        fail(section.key("mode"), "missing; write mode: min if less is better, else mode: max")
    return section.fill(Best(metric=metric, mode="min"))
