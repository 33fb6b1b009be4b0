"""Which tiers a checkpoint is destined for.

Asked once per save, by the coordinator; the answer stands in the manifest, and agents never
evaluate a schedule by their own clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.units import Every


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSchedule:
    """How often one tier gets a checkpoint."""

    name: str
    every: Every


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSpill:
    """The newest checkpoint of this stream that was destined for a tier."""

    step: int
    at_s: float
    """When it was saved, by the same clock as ``now_s``."""


def due_tiers(
    tiers: Sequence[TierSchedule], step: int, last: Mapping[str, LastSpill], now_s: float
) -> tuple[str, ...]:
    """The names of the tiers that the checkpoint of ``step`` goes to, in the order of ``tiers``.

    * every N steps: ``step % N == 0``, or a multiple of N was passed since the last one;
    * every T seconds: T seconds have passed since the last one;
    * every save: always.

    The first save of a stream goes to every tier, and so does a save at an earlier step than the
    last one (after a roll-back, what the tier has newest was abandoned) or before the last one's
    time (the clock was set back).
    """
    return tuple(
        tier.name for tier in tiers if _is_due(tier.every, step, last.get(tier.name), now_s)
    )


def _is_due(every: Every, step: int, last: LastSpill | None, now_s: float) -> bool:
    if last is None or step < last.step:
        return True
    if every.steps is not None:
        return step % every.steps == 0 or step // every.steps > last.step // every.steps
    if every.seconds is not None:
        return not 0 <= now_s - last.at_s < every.seconds
    return True


def last_spills(candidates: Iterable[Manifest]) -> dict[str, LastSpill]:
    """By tier, its newest destined checkpoint: what :func:`due_tiers` needs after a restart.

    ``candidates`` are those of the time line, newest first, so that an abandoned checkpoint does
    not make a tier look up to date.
    """
    found: dict[str, LastSpill] = {}
    for manifest in candidates:
        for tier in manifest.tiers:
            found.setdefault(tier, LastSpill(step=manifest.step, at_s=manifest.created_at_s))
    return found
