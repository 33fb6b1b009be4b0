"""Which tier can be reached in the time that is left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.policy.schedule import Reachable, choose_tier

_tiers = st.lists(
    st.builds(
        Reachable,
        tier=st.sampled_from("abcdef"),
        outlives_host=st.booleans(),
        available=st.booleans(),
        remaining_bytes=st.integers(0, 100),
        bytes_per_s=st.none() | st.integers(1, 20).map(float),
        failing=st.booleans(),
    ),
    unique_by=lambda each: each.tier,
    max_size=5,
)
_left = st.none() | st.floats(0, 100)


def fits(each: Reachable, left_s: float | None) -> bool:
    return each.estimate_s is not None and (left_s is None or each.estimate_s <= left_s)


@given(_tiers, _left)
def test_what_answers_is_chosen_if_anything_does(tiers: list[Reachable], left_s: float | None):
    chosen = choose_tier(tiers, left_s)
    assert (chosen is None) == (not any(each.available for each in tiers))
    assert chosen is None or (chosen.available and chosen in tiers)


@given(_tiers, st.floats(0, 100))
def test_one_that_can_be_reached_is_preferred_and_then_one_that_stays(
    tiers: list[Reachable], left_s: float
):
    reached = [e for e in tiers if e.available and not e.failing and fits(e, left_s)]
    chosen = choose_tier(tiers, left_s)
    if reached:
        assert chosen in reached
        assert chosen is not None
        best = [e for e in reached if e.outlives_host == any(r.outlives_host for r in reached)]
        assert chosen == best[0]


@given(_tiers, st.floats(0, 100))
def test_if_none_can_be_reached_the_shortest_is_tried(tiers: list[Reachable], left_s: float):
    found = [each for each in tiers if each.available and not each.failing]
    known = [each.estimate_s for each in found]
    if found and all(each is not None and each > left_s for each in known):
        chosen = choose_tier(tiers, left_s)
        assert chosen is not None
        assert chosen.estimate_s == min(each for each in known if each is not None)


@given(_tiers, _left)
def test_what_fails_is_the_last_resort(tiers: list[Reachable], left_s: float | None):
    chosen = choose_tier(tiers, left_s)
    if chosen is not None and chosen.failing:
        assert all(each.failing for each in tiers if each.available)
