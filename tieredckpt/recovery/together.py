"""Several streams of one job restored together: the newest step that all of them have. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tieredckpt.recovery.plan import RecoveryPlan, plan_recovery
from tieredckpt.tiers.facts import Holdings


def plan_common(
    holdings: Sequence[Holdings],
    streams: Sequence[str],
    *,
    step: int | None = None,
    save_id: str | None = None,
    exclude: frozenset[str] = frozenset(),
    silent: Mapping[str, str] | None = None,
    up_to: float = math.inf,
    own: str = "",
) -> tuple[RecoveryPlan, ...]:
    """One plan per stream; what they choose is of one step, or none of them chooses anything.

    Of a step that a stream has saved more than once, the newest checkpoint counts. For a single
    stream this is :func:`tieredckpt.recovery.plan.plan_recovery`.

    Args:
        holdings: What each host holds of one namespace; the host that will read comes first.
        streams: At least one, each once.
        step: Only this step.
        save_id: Only this checkpoint; of a single stream.
        exclude: Save ids that were tried and failed.
        silent: Hosts that did not answer, as in :func:`~tieredckpt.recovery.plan.plan_recovery`.
        up_to: Choose no later step.
        own: The asking run's attempt, as in :func:`~tieredckpt.recovery.plan.plan_recovery`.
    """
    plans = [
        plan_recovery(
            holdings,
            stream=stream,
            step=step,
            save_id=save_id,
            exclude=exclude,
            silent=silent,
            own=own,
        )
        for stream in streams
    ]
    lines = [[c.manifest.step for c in plan.candidates] for plan in plans]
    common = newest_common([[each for each in line if each <= up_to] for line in lines])
    return tuple(
        replace(
            plan,
            chosen=next((c for c in plan.candidates if c.manifest.step == common), None),
        )
        for plan in plans
    )


def newest_common(lines: Sequence[Sequence[int]]) -> int | None:
    """The newest step that occurs in all ``lines``, each newest first; None if there is none.

    "Newest" is the order of the lines, as everywhere: a run that began to count anew has higher
    steps that are older. Where the lines disagree about two steps, the one counts that is not so
    far back in the line where it is farthest back.
    """
    places = [{step: -back for back, step in reversed(list(enumerate(line)))} for line in lines]
    shared = set.intersection(*map(set, places))
    return max(
        shared, key=lambda step: (min(p[step] for p in places), sum(p[step] for p in places), step),
        default=None,
    )  # fmt: skip
