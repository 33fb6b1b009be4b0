"""What a run of so many steps would leave in each tier, and what it would cost.

The same schedule and the same retention as in a real run, over checkpoints that nobody makes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tieredckpt.format.manifest import AttemptId, Manifest, SegmentRef
from tieredckpt.policy.config_tiers import TierConfig
from tieredckpt.policy.retention import EVERYTHING, Best, Keep, retain
from tieredckpt.policy.schedule import LastSpill, TierSchedule, due_tiers

SAVES_MAX = 200_000
POINTS_MAX = 200
"""Of a curve."""
MONTH_S = 30 * 86400.0
MEMORY = "memory"
_ATTEMPT = AttemptId(1, "0" * 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """What is asked about."""

    steps: int
    """Steps 1 to this one are made."""
    save_every: int
    """Steps between two saves."""
    step_s: float
    save_bytes: int
    """Of one checkpoint, all ranks."""
    ranks: int
    """Each writes one segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What lies in a tier after a save."""

    step: int
    at_s: float
    checkpoints: int
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierForecast:
    """One tier at the end of the run, and how it came there."""

    tier: str
    kept: tuple[int, ...]
    """Steps, newest first."""
    reasons: tuple[str, ...]
    """Of each of them."""
    saves: int
    """That were written here."""
    objects: int
    """At the end: segments, manifests, one plan."""
    puts: int
    """Requests that write, with the parts of large segments."""
    peak_bytes: int
    curve: tuple[Point, ...]
    """At most 200 points, the last one is the end."""
    cost_month: float | None
    """Of what lies there at the end, and of writing as often as in the run; None: no price."""


def forecast(
    memory: Keep, tiers: Sequence[TierConfig], run: SimulatedRun
) -> tuple[TierForecast, ...]:
    """Memory first, then the tiers in their order.

    A ``best`` rule is given a metric that gets better with every save.

    Raises:
        ValueError: The run has more than 200,000 saves.
    """
    if run.steps // run.save_every > SAVES_MAX:
        raise ValueError(f"more than {SAVES_MAX} saves; save less often, or simulate fewer steps")
    schedules = [
        TierSchedule(name=tier.name, every=tier.every, source=tier.filled_from) for tier in tiers
    ]
    state = {MEMORY: _Tier(memory)} | {tier.name: _Tier(tier.keep) for tier in tiers}
    last: dict[str, LastSpill] = {}
    for number, step in enumerate(range(run.save_every, run.steps + 1, run.save_every)):
        at_s = step * run.step_s
        due = due_tiers(schedules, step, last, at_s)
        last |= {name: LastSpill(step=step, at_s=at_s) for name in due}
        for name in (MEMORY, *due):
            state[name].add(number, step, at_s, run.save_bytes)
    by_name = {tier.name: tier for tier in tiers}
    return tuple(_result(name, found, by_name.get(name), run) for name, found in state.items())


class _Tier:
    """What one tier holds while the run goes on."""

    def __init__(self, keep: Keep) -> None:
        self.keep = keep
        self.held: list[Manifest] = []
        """Newest first."""
        self.reasons: dict[str, str] = {}
        self.saves = 0
        self.points: list[Point] = []

    def add(self, number: int, step: int, at_s: float, size: int) -> None:
        best = self.keep.best
        tags = {} if best is None else {best.metric: str(_metric(best, number))}
        self.held.insert(0, _manifest(number, step, at_s, size, tags))
        self.saves += 1
        if not self.keep.everything:  # (there may be 200,000, and nothing to decide)
            plan = retain(self.held, (), self.keep, now_s=at_s)
            self.reasons = dict(plan.reasons)
            gone = set(plan.delete)
            self.held = [m for m in self.held if m.save_id not in gone] if gone else self.held
        total = len(self.held)
        self.points.append(
            Point(step=step, at_s=at_s, checkpoints=total, stored_bytes=total * size)
        )


def _metric(best: Best, number: int) -> int:
    return -number if best.mode == "min" else number


def _manifest(number: int, step: int, at_s: float, size: int, tags: dict[str, str]) -> Manifest:
    name = f"{number:032x}"
    return Manifest(
        save_id=name, namespace="simulated", stream="default", step=step, attempt=_ATTEMPT,
        seq=number, parent=None, lineage=(), plan="0" * 32, tiers=(),
        segments=(SegmentRef(id=name, size=size, root="0" * 32, host="h"),), world_size=1,
        tags=tags, created_at_s=at_s,
    )  # fmt: skip


def _result(name: str, found: _Tier, config: TierConfig | None, run: SimulatedRun) -> TierForecast:
    peak = max((point.stored_bytes for point in found.points), default=0)
    stored = found.points[-1].stored_bytes if found.points else 0
    puts = found.saves * _puts_of_one(config, run)
    price = config.price if config is not None else None
    cost = None
    if price is not None:
        months = run.steps * run.step_s / MONTH_S
        writes = puts / months if months else 0.0
        cost = stored / (1 << 30) * price.gib_month + writes / 1000 * price.put_1000
    return TierForecast(
        tier=name,
        kept=tuple(m.step for m in found.held),
        reasons=tuple(found.reasons.get(m.save_id, EVERYTHING) for m in found.held),
        saves=found.saves,
        objects=len(found.held) * (run.ranks + 1) + bool(found.held),
        puts=puts,
        peak_bytes=peak,
        curve=_thinned(found.points),
        cost_month=cost,
    )


def _puts_of_one(config: TierConfig | None, run: SimulatedRun) -> int:
    """Writing requests of one checkpoint; parts are counted where there are any."""
    per_segment = 1
    if config is not None and not config.is_file:
        parts = math.ceil(run.save_bytes / run.ranks / config.object.part_bytes)
        per_segment = 1 if parts <= 1 else parts + 2  # begin and complete
    announced = config is not None and config.scope == "shared"
    return run.ranks * per_segment + 1 + announced


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    every = math.ceil(len(points) / POINTS_MAX) or 1
    return tuple(reversed(points[::-1][::every]))
