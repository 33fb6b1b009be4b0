"""How far a tier is behind memory, and whether that is an alarm: pure.

Times are differences of one clock, the coordinator's, which stamps manifests; nobody's present time
is asked. So a job that saves nothing does not fall behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tieredckpt.format.manifest import AttemptRecord, Manifest, SegmentRef
from tieredckpt.policy.timeline import candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """Of the newest checkpoint that a tier holds, against the newest one in memory.

    Of several streams, that of the one which is furthest behind.
    """

    steps: int | None
    """Where the tier holds none, from the oldest one that waits for it; None: none does either."""
    seconds: float | None
    """Between their saves, likewise."""
    bytes: int
    """This host's part of what waits or is being copied."""


def lag_of(
    heads: Iterable[Manifest],
    held: Iterable[Manifest],
    waiting: Iterable[Manifest],
    attempts: Iterable[AttemptRecord],
    own: Callable[[Manifest], Iterable[SegmentRef]],
) -> Lag:
    """The lag of one tier.

    Args:
        heads: The newest candidate in memory of each stream.
        held: What the tier holds. What a roll-back abandoned does not count.
        waiting: What waits for it or is being copied.
        attempts: All that are known.
        own: The segments of a checkpoint that this host copies. Not those that name it: it may have
            had another name, or another memory, when it wrote them.
    """
    heads, held, waiting = tuple(heads), tuple(held), tuple(waiting)
    attempts = tuple(attempts)
    in_tier = {manifest.save_id for manifest in held}
    steps: list[int] = []
    seconds: list[float] = []
    for newest in heads:
        line = candidates((*held, *heads), attempts, newest.stream)
        here = next((each for each in line if each.save_id in in_tier), None)
        if here is None:
            others = (each for each in waiting if each.stream == newest.stream)
            here = min(others, key=lambda each: (each.attempt.number, each.seq), default=None)
        if here is not None:
            steps.append(max(0, newest.step - here.step))
            seconds.append(max(0.0, newest.created_at_s - here.created_at_s))
    return Lag(
        steps=max(steps, default=None),
        seconds=max(seconds, default=None),
        bytes=sum(ref.size for manifest in waiting for ref in own(manifest)),
    )


def lag_alarm(lag: Lag, *, steps: int | None, seconds: float | None) -> bool:
    """Whether the limit of ``lag_alarm`` is reached; neither is set: never."""
    late_steps = steps is not None and lag.steps is not None and lag.steps >= steps
    late_s = seconds is not None and lag.seconds is not None and lag.seconds >= seconds
    return late_steps or late_s
