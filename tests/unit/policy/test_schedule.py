"""Which tiers a save goes to."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.policy.test_history import saves, start
from tieredckpt.config.tiers import MEMORY, TierSpec
from tieredckpt.config.units import Every
from tieredckpt.policy.schedule import LastSpill, due_tiers, next_save


def tier(name: str, every: Every, source: str = MEMORY) -> TierSpec:
    return TierSpec(name=name, url=f"file:///{name}", every=every, source=source)


def due(every: Every, step: int, last: LastSpill | None = None, now_s: float = 0.0) -> bool:
    found = due_tiers([tier("t", every)], step, {"t": last} if last else {}, now_s)
    assert found in ((), ("t",))
    return bool(found)


def steps_due(every: int, saved: list[int]) -> list[int]:
    """The steps that go to the tier in a run that saves at ``saved``."""
    found: list[int] = []
    last: LastSpill | None = None
    for step in saved:
        if due(Every(steps=every), step, last):
            found.append(step)
            last = LastSpill(step=step, at_s=0.0)
    return found


@pytest.mark.parametrize(
    ("every", "saved", "expected"),
    [
        (10, list(range(41)), [0, 10, 20, 30, 40]),
        (10, list(range(1, 41)), [1, 10, 20, 30, 40]),
        (10, [3, 6, 9, 12, 15, 18, 21, 24, 27, 30], [3, 12, 21, 30]),
        (10, [7, 57, 58, 59, 60], [7, 57, 60]),
        (1, [5, 6, 7], [5, 6, 7]),
        (10, [30, 35, 10, 15, 20], [30, 10, 20]),  # rolled back to before 10
        (10, [30, 35, 11, 15, 20], [30, 11, 20]),
    ],
)
def test_by_steps(every: int, saved: list[int], expected: list[int]) -> None:
    assert steps_due(every, saved) == expected


def test_by_time() -> None:
    half_hour, last = Every(seconds=1800.0), LastSpill(step=5, at_s=1000.0)
    assert due(half_hour, 0)
    assert not due(half_hour, 6, last, now_s=1000.0)
    assert not due(half_hour, 6, last, now_s=2799.9)
    assert due(half_hour, 6, last, now_s=2800.0)
    assert due(half_hour, 6, last, now_s=999.0), "the clock was set back"
    assert due(half_hour, 4, last, now_s=1001.0), "rolled back"


def test_every_save() -> None:
    assert due(Every(), 3, LastSpill(step=3, at_s=0.0))


def test_order_and_independence_of_tiers() -> None:
    tiers = [
        tier("b", Every(steps=2)),
        tier("a", Every()),
        tier("c", Every(steps=3)),
    ]
    last = {name: LastSpill(step=3, at_s=0.0) for name in "abc"}
    assert due_tiers(tiers, 4, last, 0.0) == ("b", "a")
    assert due_tiers(tiers, 4, {}, 0.0) == ("b", "a", "c")


def test_a_source_gets_what_is_filled_from_it() -> None:
    tiers = [
        tier("a", Every(steps=10)),
        tier("b", Every(steps=10), "a"),
        tier("c", Every(steps=3), "b"),
    ]
    last = {name: LastSpill(step=10, at_s=0.0) for name in "abc"}
    assert due_tiers(tiers, 11, last, 0.0) == ()
    assert due_tiers(tiers, 12, last, 0.0) == ("a", "b", "c")
    assert due_tiers(tiers, 20, last | {"c": LastSpill(step=18, at_s=0.0)}, 0.0) == ("a", "b")


def test_the_next_save_is_as_far_as_saves_usually_are_apart() -> None:
    tiers = [tier("a", Every(steps=20)), tier("b", Every(seconds=90.0)), tier("c", Every())]
    made = [
        msgspec.structs.replace(m, created_at_s=m.step * 6.0, tiers=("b",), tags={"loss": "1"})
        for m in saves(start([], [], default=None), 0, 5, 10, 15, 20, 25, 27)
    ]
    # Of what is left of them the distances are larger, and their numbers tell so.
    line = [made[6], made[5], made[3], made[0]]
    found = next_save(tiers, line)
    assert found is not None
    assert (found.step, found.seq, found.created_at_s) == (32, 7, 27 * 6.0 + 30.0)
    assert (found.parent, found.tags) == (made[6].save_id, {})
    assert found.tiers == ("a", "c"), "b got the one before, 30 s ago"
    again = next_save(tiers, [found, *line])
    assert again is not None
    assert (again.step, again.tiers) == (37, ("c",))
    assert next_save(tiers, line[:1]) is None
    attempt = msgspec.structs.replace(made[6].attempt, number=2)
    after = [msgspec.structs.replace(made[6], attempt=attempt, step=60), *line[1:3]]
    later = next_save(tiers, after)
    assert later is not None
    assert later.step == 65, "how many are missing before a restart is not known"
    back = [msgspec.structs.replace(line[0], step=3, created_at_s=0.0), line[1]]
    assert [(m.step, m.created_at_s) for m in [next_save(tiers, back)] if m] == [(4, 0.0)]
