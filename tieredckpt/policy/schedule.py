"""Which tiers a checkpoint is destined for, can still reach, and is given up for: pure.

Schedules are asked once per save, by the coordinator; the answer stands in the manifest, and agents
never evaluate a schedule by their own clock. What is decided later is a record, and records merge
by union: all hosts that know the same agree.

A checkpoint waits in memory for a tier that is slower than the saves. What is given up, when memory
has no room, is a place in that tier's queue, for all hosts, by a ``dropped`` record, which the
leader's host decides on; then memory may let go of it. Laws of that:
tests/property/policy/test_pressure.py.

The lag of a tier behind memory is a difference of two timestamps of one clock, the coordinator's,
which stamps manifests. No present time enters, so a job that saves nothing does not fall behind.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tieredckpt.config.tiers import TierSpec
from tieredckpt.config.units import Every
from tieredckpt.format.manifest import AttemptRecord, Manifest, SegmentRef
from tieredckpt.format.records import SaveRecord
from tieredckpt.policy.history import candidates

SHARE_MAX_S = 60.0
"""A tier that fails is waited for no longer, once another one holds everything."""
_OVER = frozenset(("done", "failed", "superseded"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """Of the newest checkpoint that a tier holds, against the newest one in memory.

    Of several streams, that of the one which is furthest behind.
    """

    steps: int | None
    """Where the tier holds none, from the earliest that waits for it or missed it; None: none."""
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
    *,
    missed: Iterable[Manifest] = (),
) -> Lag:
    """The lag of one tier.

    Args:
        heads: The newest candidate in memory of each stream.
        held: What the tier holds. What a roll-back abandoned does not count.
        waiting: What waits for it or is being copied.
        attempts: All that are known.
        own: The segments of a checkpoint that this host copies. Not those that name it: it may have
            had another name, or another memory, when it wrote them.
        missed: What was to go there and never will: given up, or deleted from memory before.
    """
    heads, held, waiting = tuple(heads), tuple(held), tuple(waiting)
    attempts, missed = tuple(attempts), tuple(missed)
    in_tier = {manifest.save_id for manifest in held}
    steps: list[int] = []
    seconds: list[float] = []
    for newest in heads:
        line = candidates((*held, *heads), attempts, newest.stream)
        here = next((each for each in line if each.save_id in in_tier), None)
        if here is None:
            others = (each for each in (*missed, *waiting) if each.stream == newest.stream)
            here = min(others, key=lambda each: each.step, default=None)
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


def next_save(tiers: Sequence[TierSpec], line: Sequence[Manifest]) -> Manifest | None:
    """The save that is to be expected after the newest of ``line``; None: it has fewer than two.

    As large as that one, as far from it as saves of ``line`` are usually apart, in the tiers that
    it is due in, and without tags.

    Args:
        tiers: The configured ones.
        line: The known candidates of one stream, newest first. Saves may be missing between them.
    """
    if len(line) < 2:
        return None
    newest = line[0]
    # In one attempt the numbers of saves tell how many are missing between two.
    pairs = [
        (a, b, max(1, a.seq - b.seq)) for a, b in itertools.pairwise(line) if a.attempt == b.attempt
    ] or [(line[0], line[1], 1)]
    steps = statistics.median((a.step - b.step) / n for a, b, n in pairs)
    seconds = statistics.median((a.created_at_s - b.created_at_s) / n for a, b, n in pairs)
    step, now_s = newest.step + max(1, round(steps)), newest.created_at_s + max(0.0, seconds)
    last = {t: LastSpill(step=m.step, at_s=m.created_at_s) for m in line[::-1] for t in m.tiers}
    return msgspec.structs.replace(
        newest, save_id=f"{newest.stream} {step}", step=step, seq=newest.seq + 1, tags={},
        parent=newest.save_id, created_at_s=now_s, tiers=due_tiers(tiers, step, last, now_s),
    )  # fmt: skip


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingSpill:
    """One checkpoint of a stream, and one tier that it is to reach."""

    save_id: str
    age: tuple[int, int]
    """Number of the attempt and the save's number in it: a greater one is newer."""
    waiting: bool = True
    """Nothing of it was begun in the tier by the host that has no room. False: it is here because
    it is safe, and so counts for the others."""
    safe: bool = False
    """Copied to other hosts, or committed in another tier."""
    committed: bool = False
    """In this tier, whole."""
    kept: bool = False
    """Pinned, or somebody asked for it to be brought there."""


def give_up(spills: Iterable[WaitingSpill]) -> str | None:
    """The save id of the one to be given up in this tier, or None: all of them stay.

    The oldest that waits, but never

    * the newest of those that wait: the tier would get none,
    * one that the tier holds already,
    * one that somebody wants there (pinned, asked for by ``spill``),
    * the only safe copy: one that is safe elsewhere while nothing newer is safe. Were it lost
      there, the job would go back to something older than what this tier could have had.
    """
    found = sorted(spills, key=lambda each: (each.age, each.save_id))
    waiting = [each for each in found if each.waiting and not each.committed]
    newest_safe = next((e for e in reversed(found) if e.safe or e.committed), None)
    for each in waiting[:-1]:
        if not each.kept and each is not newest_safe:
            return each.save_id
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachable:
    """One tier, as a host finds it. In a sequence of them, the nearest comes first."""

    tier: str
    outlives_host: bool
    """Whether what it holds is there when this host is given back (scope shared)."""
    available: bool
    remaining_bytes: int
    """Of this host: what is being copied now, and what is then to be copied; 0: it is there."""
    bytes_per_s: float | None
    """Measured; None: nothing was copied yet."""
    due: bool = False
    """The newest checkpoint of a stream is to go there in any case."""

    @property
    def estimate_s(self) -> float | None:
        """How long it takes; None: not known."""
        if self.remaining_bytes == 0:
            return 0.0
        return self.remaining_bytes / self.bytes_per_s if self.bytes_per_s else None


def tiers_to_fill(tiers: Sequence[Reachable], left_s: float | None) -> tuple[Reachable, ...]:
    """The tiers that a flush fills, the surest first: those of this host, then those that outlive
    it, each in the order of ``tiers``; empty: none answers.

    All but those in which it is not due and that are known to take longer than ``left_s``; if no
    other one answers, the one that takes the shortest time. What fails, or does not answer, is
    among them: that may be over soon, and the report is to name it.

    Args:
        tiers: The nearest first.
        left_s: Seconds; None: as long as it takes.
    """
    estimates_s = {each.tier: each.estimate_s or 0.0 for each in tiers}
    limit_s = math.inf if left_s is None else left_s
    found = [each for each in tiers if each.due or estimates_s[each.tier] <= limit_s]
    answering = [each for each in tiers if each.available]
    if not answering:
        return ()
    if not any(each.available for each in found):
        found.append(min(answering, key=lambda each: estimates_s[each.tier]))
    return tuple(sorted(found, key=lambda each: (each.outlives_host, tiers.index(each))))


def ends_flush(
    levels: Mapping[str, Mapping[str, str]],
    failing_s: Mapping[str, float],
    deadline_s: float | None,
) -> bool:
    """Whether a flush waits for no tier any longer.

    A tier that fails is waited for until its share of the time is over: an equal one, and
    SHARE_MAX_S at most. As long as none has everything, all are waited for.

    Args:
        levels: By tier and stream.
        failing_s: By tier, for how long it has failed without a pause, in seconds.
        deadline_s: Seconds that the flush may take in all; None: as long as it takes.
    """
    share_s = min(SHARE_MAX_S, math.inf if deadline_s is None else deadline_s / len(levels))
    some = any(set(found.values()) == {"done"} for found in levels.values())
    return all(
        set(found.values()) <= _OVER or (some and failing_s[tier] >= share_s)
        for tier, found in levels.items()
    )
