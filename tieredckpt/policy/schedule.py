"""Which tiers a checkpoint is destined for.

Schedules are asked once per save, by the coordinator; the answer stands in the manifest, and agents
never evaluate a schedule by their own clock. What is decided later is a record, and records merge
by union: all hosts that know the same agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tieredckpt.format.manifest import Manifest
from tieredckpt.format.record import SaveRecord
from tieredckpt.policy.config_tiers import TierSpec
from tieredckpt.policy.units import Every


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSpill:
    """The newest checkpoint of this stream that was destined for a tier."""

    step: int
    at_s: float
    """When it was saved, by the same clock as ``now_s``."""


def due_tiers(
    tiers: Sequence[TierSpec], step: int, last: Mapping[str, LastSpill], now_s: float
) -> tuple[str, ...]:
    """The names of the tiers that the checkpoint of ``step`` goes to, in the order of ``tiers``.

    * every N steps: ``step % N == 0``, or a multiple of N was passed since the last one;
    * every T seconds: T seconds have passed since the last one;
    * every save: always.

    The first save of a stream goes to every tier, and so does a save at an earlier step than the
    last one (after a roll-back, what the tier has newest was abandoned) or before the last one's
    time (the clock was set back). What goes to a tier that is filled from another one goes there
    too.
    """
    due = {t.name for t in tiers if _is_due(t.every, step, last.get(t.name), now_s)}
    for tier in reversed(tiers):  # a source stands before what is filled from it
        if tier.name in due and tier.filled_from is not None:
            due.add(tier.filled_from)
    return tuple(tier.name for tier in tiers if tier.name in due)


def destinations(manifest: Manifest, records: Iterable[SaveRecord]) -> tuple[str, ...]:
    """The tiers that a checkpoint is to reach, beside memory.

    Those of its manifest, in that order, and those of ``spill`` records, by name; less those of
    ``dropped`` records that no ``spill`` of the same tier overrules. Depends on the set of records
    only. Records about other checkpoints are passed over.
    """
    about = {each.id: each for each in records if each.save_id == manifest.save_id}.values()
    spills = [each for each in about if each.kind == "spill"]
    overruled = {(each.text, old) for each in spills for old in each.segments}
    dropped = {
        each.text
        for each in about
        if each.kind == "dropped" and (each.text, each.id) not in overruled
    }
    more = sorted({each.text for each in spills} - set(manifest.tiers))
    return tuple(tier for tier in (*manifest.tiers, *more) if tier not in dropped)


def _is_due(every: Every, step: int, last: LastSpill | None, now_s: float) -> bool:
    if last is None or step < last.step:
        return True
    if every.steps is not None:
        return step % every.steps == 0 or step // every.steps > last.step // every.steps
    if every.seconds is not None:
        return not 0 <= now_s - last.at_s < every.seconds
    return True
