"""How far a tier is behind memory, and when that is an alarm."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tests.support.saves import manifest_of
from tieredckpt.format.manifest import (
    AttemptId,
    AttemptRecord,
    Manifest,
    SegmentRef,
    StreamBase,
)
from tieredckpt.policy.history import ancestry_of
from tieredckpt.policy.schedule import Lag, lag_alarm, lag_of


def saved(step: int, *, stream: str = "default", at_s: float | None = None) -> Manifest:
    ref = SegmentRef(id=f"{step:032x}", size=4096 * step, root="0" * 32, host="a")
    return msgspec.structs.replace(
        manifest_of(step, ["a"]),
        stream=stream,
        created_at_s=10.0 * step if at_s is None else at_s,
        segments=(ref,),
    )


def lag(
    heads: list[Manifest],
    held: list[Manifest],
    waiting: list[Manifest],
    own: Callable[[Manifest], tuple[SegmentRef, ...]] = lambda manifest: manifest.segments,
    attempts: tuple[AttemptRecord, ...] = (),
) -> Lag:
    return lag_of(heads, held, waiting, attempts, own)


def test_a_tier_is_behind_by_steps_seconds_and_bytes():
    found = lag([saved(9)], [saved(2), saved(4)], [saved(5), saved(9)])
    assert found == Lag(steps=5, seconds=50.0, bytes=14 * 4096)
    assert lag([saved(9)], [saved(4)], [saved(9)], lambda manifest: ()).bytes == 0


def test_what_holds_the_newest_is_not_behind_even_if_clocks_jump():
    assert lag([saved(9)], [saved(9)], []) == Lag(steps=0, seconds=0.0, bytes=0)
    assert lag([saved(9)], [saved(4, at_s=1e9)], []).seconds == 0.0


def test_an_empty_tier_is_behind_since_the_oldest_that_waits():
    found = lag([saved(9)], [], [saved(9), saved(3)])
    assert (found.steps, found.seconds) == (6, 60.0)
    assert lag_alarm(found, steps=6, seconds=None)  # it has never worked: none else would say so
    assert lag([saved(9)], [saved(8, stream="other")], []).steps is None
    found = lag_of([saved(9)], [], [saved(9)], (), lambda each: (), missed=[saved(3), saved(5)])
    assert (found.steps, found.seconds) == (6, 60.0)  # whatever became of them
    assert lag([], [saved(1)], []) == Lag(steps=None, seconds=None, bytes=0)


def test_of_several_streams_the_one_that_is_furthest_behind_counts():
    actor, critic = saved(900, stream="actor"), saved(40, stream="critic")
    found = lag([actor, critic], [actor, saved(10, stream="critic")], [])
    assert (found.steps, found.seconds) == (30, 300.0)


def test_what_a_roll_back_abandoned_is_no_progress():
    # 10 to 40, back to 20, and on from there: 30 is new. The tier has only what was before.
    old = [saved(each) for each in (10, 20, 30, 40)]
    base = StreamBase(
        stream="default", parent=old[1].save_id, parent_step=20, lineage=ancestry_of(old[1])
    )
    record = AttemptRecord(
        namespace="run", number=2, id="2" * 32, run="3" * 32, bases=(base,), created_at_s=0.0
    )
    new = msgspec.structs.replace(
        saved(30), save_id="4" * 32, attempt=AttemptId(2, "2" * 32), lineage=base.lineage, seq=0,
        created_at_s=900.0,
    )  # fmt: skip
    found = lag([new], old, [], attempts=(record,))
    assert (found.steps, found.seconds) == (10, 700.0)


def test_the_alarm_is_raised_at_the_limit_and_never_without_one():
    found = Lag(steps=500, seconds=60.0, bytes=0)
    assert not lag_alarm(found, steps=None, seconds=None)
    assert lag_alarm(found, steps=500, seconds=None)
    assert not lag_alarm(found, steps=501, seconds=61.0)
    assert lag_alarm(found, steps=None, seconds=60.0)
    assert not lag_alarm(Lag(steps=None, seconds=None, bytes=1), steps=1, seconds=1.0)
