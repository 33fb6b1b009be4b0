"""Which checkpoints stay."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.saves import record
from tests.unit.policy.test_history import saves, start
from tieredckpt.agent.tiers.host_retention import why_full
from tieredckpt.config.schema import Best, Every, Keep
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import SaveRecord
from tieredckpt.policy.retention import RetentionPlan, given_up, protections, retain

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
    busy = dict.fromkeys([MADE[0].save_id, MADE[8].save_id, "not here"], "it is being read")
    plan = retain(newest_first(1, 2, 3, 4), newest_first(8, 9), Keep(last=2), busy)
    assert as_steps(plan) == ([4, 3, 1, 9], [8, 2])


def test_what_is_protected_without_a_reason_stays() -> None:
    plan = retain(newest_first(1, 2), [], Keep(last=1), {MADE[0].save_id: ""})
    assert as_steps(plan) == ([2, 1], [])


def test_reasons() -> None:
    busy = dict.fromkeys([MADE[0].save_id, MADE[3].save_id], "it is in use")
    keep = Keep(last=2, every=Every(steps=2))
    plan = retain(newest_first(1, 2, 3, 4, 5), newest_first(9), keep, busy)
    assert {STEP[name]: why for name, why in plan.reasons.items()} == {
        5: "the newest; one of the newest 2",
        4: "one of the newest 2; the first in its 2 steps; it is in use",
        3: "no rule keeps it",
        2: "the first in its 2 steps",
        1: "it is in use",
        9: "abandoned",
    }


def line(*facts: tuple[int, float]) -> list[Manifest]:
    """Checkpoints with these steps and times, oldest first; returned newest first."""
    made = saves(RECORD, *(step for step, _ in facts))
    timed = [
        msgspec.structs.replace(m, created_at_s=at_s, tags={"loss": str(100 - m.step)})
        for m, (_, at_s) in zip(made, facts, strict=True)
    ]
    return timed[::-1]


def test_a_branch_is_given_up_by_its_age_or_by_a_person() -> None:
    three, two, _ = made = line((1, 0.0), (2, 100.0), (3, 160.0))
    newest = line((9, 200.0))[0]
    pin, bad = record(three, "pin"), record(two, "bad")
    unpin = record(three, "unpin", segments=(pin.id,))
    steps = {each.save_id: each.step for each in made}

    def gone(records: list[SaveRecord], keep: Keep, now_s: float = 1e9) -> set[int]:
        return {steps[each] for each in given_up(made, records, keep, newest, now_s)}

    assert gone([], Keep(last=1)) == set()
    assert gone([], Keep(last=1, max_age_s=100.0)) == {1}
    assert gone([], Keep(last=1, max_age_s=99.0)) == {1, 2}
    assert gone([], Keep(last=1, max_age_s=99.0), now_s=150.0) == {1}, "a newest of the future"
    assert gone([bad, pin], Keep(last=1)) == set()
    assert gone([bad, pin, unpin], Keep(last=1)) == set(), "only the pin was ended"
    let_go = record(three, "unpin")
    assert gone([let_go, record(two, "unpin")], Keep(last=1)) == {2, 3}
    assert gone([pin, unpin, let_go], Keep(last=1)) == {3}
    assert gone([pin, let_go], Keep(last=1)) == set(), "somebody pinned it who was not heard"
    assert given_up(made, [], Keep(last=1, max_age_s=1.0), None, 1e9) == frozenset()


def kept_steps(held: list[Manifest], keep: Keep, now_s: float = 1e9) -> list[int]:
    plan = retain(held, [], keep, now_s=now_s)
    return sorted(m.step for m in held if m.save_id in plan.keep)


@pytest.mark.parametrize(
    ("steps", "every", "kept"),
    [
        (range(0, 50, 5), 20, [0, 20, 40, 45]),
        (range(5, 50, 5), 20, [20, 40, 45]),  # 5 is no multiple, and none was passed
        ([3, 6, 9, 12, 15, 18, 21, 24], 10, [12, 21, 24]),
        ([7, 57, 58, 59], 10, [57, 59]),
        ([10, 20, 5, 25, 30], 10, [10, 20, 30]),  # going back begins no period again
    ],
)
def test_every_steps(steps, every, kept) -> None:
    held = line(*((step, 0.0) for step in steps))
    assert kept_steps(held, Keep(last=1, every=Every(steps=every))) == kept


@pytest.mark.parametrize(
    ("times", "kept"),
    [
        ([0, 60, 3600, 3660, 7300, 7400], [1, 3, 5, 6]),
        ([0, 60, 10_000, 3660, 7300, 7400], [1, 3, 6]),  # ahead: the periods up to there are taken
        ([7300, 60, 70, 80, 90, 10_900], [1, 6]),  # set back: nothing until it is past again
    ],
)
def test_every_hour_by_clocks_that_jump(times, kept) -> None:
    held = line(*((number, float(at_s)) for number, at_s in enumerate(times, start=1)))
    assert kept_steps(held, Keep(last=1, every=Every(seconds=3600.0))) == kept


def test_max_age() -> None:
    held = line((1, 0.0), (2, 50.0), (3, 100.0))
    keep = Keep(last=3, max_age_s=60.0)
    assert kept_steps(held, keep) == [2, 3], "measured from the newest"
    assert kept_steps(held, keep, now_s=55.0) == [1, 2, 3], "a save from the future counts as now"
    assert kept_steps(line((1, 0.0), (2, 9.0), (3, 1e9)), keep, now_s=50.0) == [1, 2, 3]
    assert kept_steps(line((1, 0.0)), keep) == [1], "the newest stays"


def test_what_looked_young_for_the_sake_of_one_that_goes() -> None:
    held = line((1, 100.0), (2, 0.0), (3, 200.0))
    assert kept_steps(held, Keep(last=2, max_age_s=100.0)) == [3], "at once, not when asked again"
    assert kept_steps(held, Keep(last=3, max_age_s=100.0)) == [1, 2, 3]


def test_max_bytes_takes_the_least_useful() -> None:
    held = line(*((step, 0.0) for step in range(1, 13)))
    size = sum(ref.size for ref in held[0].segments)
    rules = Keep(last=2, every=Every(steps=4), best=Best(metric="loss", mode="max", n=2))
    assert kept_steps(held, rules) == [1, 2, 4, 8, 11, 12]
    for room, kept in [(5, [1, 2, 8, 11, 12]), (4, [1, 2, 11, 12]), (3, [1, 11, 12]), (1, [12])]:
        limited = Keep(last=2, every=rules.every, best=rules.best, max_bytes=room * size)
        assert kept_steps(held, limited) == kept


def test_the_best_are_numbers() -> None:
    held = line(*((step, 0.0) for step in range(1, 6)))
    losses = ["nan", "0.5", "", "0.5", "1e3"]
    held = [
        msgspec.structs.replace(m, tags={"loss": loss})
        for m, loss in zip(held, losses, strict=True)
    ]
    best = Best(metric="loss", mode="min", n=1)
    assert kept_steps(held, Keep(last=1, best=best)) == [4, 5], "of two equals, the newer one"
    plan = retain(held, [], Keep(last=1, best=best))
    assert plan.reasons[held[1].save_id] == "one of the 1 with the least loss"
    assert plan.reasons[held[2].save_id] == "no rule keeps it"
    assert kept_steps(held, Keep(last=1, best=Best(metric="bleu", mode="max"))) == [5]


def test_damaged_ones_are_not_counted_on() -> None:
    held = newest_first(1, 2, 3, 4)
    bad = {held[0].save_id, held[1].save_id}
    plan = retain(held, [], Keep(last=1), unrecoverable=bad)
    assert as_steps(plan) == ([4, 2], [1, 3])
    assert plan.reasons[held[2].save_id] == "the newest that can be restored"


def test_protections_are_sentences() -> None:
    assert protections(
        pinned={"a": "for the paper"},
        wanted_by={"a": ["s3"], "b": ["s3", "far"], "c": []},
        in_use={"b": "it is read", "d": "it is being restored"},
    ) == {
        "a": "pinned: for the paper",
        "b": "tier far, s3 is still to be filled from it",
        "d": "it is being restored",
    }


def test_why_a_full_tier_deletes_nothing_has_each_reason_once() -> None:
    plan = retain(newest_first(1, 2, 3), (), Keep(last=3))
    why = " (of its stream it keeps 3: the newest; one of the newest 3)"
    assert why_full(plan, MADE[8]) == why
    assert why_full(retain((), (), Keep(last=1)), MADE[8]) == ""
