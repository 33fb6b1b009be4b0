"""Which waiting spill is given up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.policy.schedule import WaitingSpill, give_up

_spills = st.lists(
    st.builds(
        WaitingSpill,
        save_id=st.integers(0, 30).map("{:032x}".format),
        age=st.tuples(st.integers(1, 2), st.integers(0, 9)),
        waiting=st.booleans(),
        safe=st.booleans(),
        committed=st.booleans(),
        kept=st.booleans(),
    ),
    unique_by=(lambda each: each.save_id, lambda each: each.age),
    max_size=8,
)


def _waiting(spills: list[WaitingSpill]) -> list[WaitingSpill]:
    found = [each for each in spills if each.waiting and not each.committed]
    return sorted(found, key=lambda each: each.age)


@given(_spills)
def test_what_is_given_up_waits_and_neither_is_the_newest_nor_wanted(spills: list[WaitingSpill]):
    gone = give_up(spills)
    if gone is None:
        return
    each = next(each for each in spills if each.save_id == gone)
    assert each in _waiting(spills)[:-1]
    assert not each.kept


@given(_spills)
def test_the_only_safe_copy_stays(spills: list[WaitingSpill]):
    gone = next((each for each in spills if each.save_id == give_up(spills)), None)
    if gone is not None and gone.safe:
        assert any(each.age > gone.age and (each.safe or each.committed) for each in spills)


@given(_spills)
def test_it_is_the_oldest_that_may_go(spills: list[WaitingSpill]):
    gone = next((each for each in spills if each.save_id == give_up(spills)), None)
    newest_safe = max((e.age for e in spills if e.safe or e.committed), default=None)
    for each in _waiting(spills)[:-1]:
        if each.kept or each.age == newest_safe:
            continue
        assert gone is not None
        assert gone.age <= each.age


@given(_spills, st.randoms(use_true_random=False))
def test_the_order_of_facts_does_not_matter(spills: list[WaitingSpill], random: object):
    shuffled = list(spills)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert give_up(shuffled) == give_up(spills)


@given(_spills)
def test_giving_up_again_and_again_ends_and_leaves_the_newest(spills: list[WaitingSpill]):
    left, before = list(spills), _waiting(spills)
    while (gone := give_up(left)) is not None:
        left = [each for each in left if each.save_id != gone]
    assert not before or _waiting(left)[-1] == before[-1]
