"""Which checkpoints stay."""

from __future__ import annotations

import pytest

from tests.unit.test_policy_timeline import saves, start
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.config import Keep
from tieredckpt.policy.retention import RetentionPlan, retain

RECORD = start([], [], default=None)
MADE = saves(RECORD, *range(1, 13))
STEP = {manifest.save_id: manifest.step for manifest in MADE}


def newest_first(*steps: int) -> list[Manifest]:
    return [MADE[step - 1] for step in sorted(steps, reverse=True)]


def as_steps(plan: RetentionPlan) -> tuple[list[int], list[int]]:
    return [STEP[name] for name in plan.keep], [STEP[name] for name in plan.delete]


@pytest.mark.parametrize(
    ("candidates", "abandoned", "last", "keep", "delete"),
    [
        ((), (), 1, [], []),
        ((5,), (), 1, [5], []),
        ((1, 2, 3, 4, 5), (), 2, [5, 4], [1, 2, 3]),
        ((1, 2, 3), (8, 9), 2, [3, 2], [8, 9, 1]),
        ((3,), (7, 8, 9), 3, [3, 9, 8], [7]),
        ((), (7, 8, 9), 2, [9, 8], [7]),
    ],
)
def test_last(candidates, abandoned, last, keep, delete) -> None:
    plan = retain(newest_first(*candidates), newest_first(*abandoned), Keep(last=last))
    assert as_steps(plan) == (keep, delete)


def test_protected_stay_and_take_no_room() -> None:
    busy = {MADE[0].save_id, MADE[8].save_id, "not here"}
    plan = retain(newest_first(1, 2, 3, 4), newest_first(8, 9), Keep(last=2), busy)
    assert as_steps(plan) == ([4, 3, 1, 9], [8, 2])


def test_reasons() -> None:
    plan = retain(newest_first(1, 2, 3), newest_first(9), Keep(last=2), {MADE[0].save_id})
    assert {STEP[name]: why for name, why in plan.reasons.items()} == {
        3: "the newest",
        2: "one of the newest 2",
        1: "protected: it is in use",
        9: "abandoned",
    }
