"""What retention never does, whatever is there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_policy_retention import MADE, STEP, as_steps, newest_first
from tieredckpt.policy.config import Keep
from tieredckpt.policy.retention import retain


@given(
    candidates=st.sets(st.integers(1, 12)),
    abandoned=st.sets(st.integers(1, 12)),
    last=st.integers(1, 6),
    protected=st.sets(st.integers(1, 12)),
)
def test_laws(candidates, abandoned, last, protected) -> None:
    abandoned -= candidates
    good, off = newest_first(*candidates), newest_first(*abandoned)
    busy = {MADE[step - 1].save_id for step in protected}
    plan = retain(good, off, Keep(last=last), busy)
    keep, delete = as_steps(plan)
    assert sorted(keep + delete) == sorted(candidates | abandoned)
    assert not set(plan.delete) & busy
    assert {STEP[m.save_id] for m in good[:last]} <= set(keep)
    assert len([step for step in keep if step not in protected]) <= last
    assert delete == sorted(abandoned - set(keep)) + sorted(candidates - set(keep))
    assert plan.reasons.keys() == set(plan.keep) | set(plan.delete)
    left = [m for m in good if m.save_id in plan.keep], [m for m in off if m.save_id in plan.keep]
    assert retain(*left, Keep(last=last), busy).delete == (), "a second time deletes nothing more"
