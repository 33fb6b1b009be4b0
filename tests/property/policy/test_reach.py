"""Which tier can be reached in the time that is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.policy.schedule import (
    SHARE_MAX_S,
    Reachable,
    choose_tier,
    ends_flush,
    tiers_to_fill,
)

_tiers = st.lists(
    st.builds(
        Reachable,
        tier=st.sampled_from("abcdef"),
        outlives_host=st.booleans(),
        available=st.booleans(),
        remaining_bytes=st.integers(0, 100),
        bytes_per_s=st.none() | st.integers(1, 20).map(float),
        failing=st.booleans(),
        due=st.booleans(),
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


@given(_tiers, _left)
def test_a_flush_fills_all_but_what_is_too_slow(tiers: list[Reachable], left_s: float | None):
    filled = tiers_to_fill(tiers, left_s)
    chosen = choose_tier(tiers, left_s)
    if chosen is None:
        assert filled == ()
        return
    assert chosen in filled
    slow = [e for e in tiers if not e.failing and e.estimate_s is not None and not fits(e, left_s)]
    assert [e for e in tiers if e.due or e not in slow or e is chosen] == [
        e for e in tiers if e in filled
    ]
    if chosen in slow:  # there is nothing better that answers
        assert all(e in slow or e.failing or not e.available for e in tiers)
    # The surest first, and the nearest of equals.
    assert filled == tuple(
        e for shared in (False, True) for e in tiers if e in filled and e.outlives_host is shared
    )


@pytest.mark.parametrize(
    ("disk", "bucket", "failing_s", "deadline_s", "ends"),
    [
        ("done", "done", 0.0, 20.0, True),
        ("done", "active", 0.0, 20.0, False),
        ("done", "waiting", 9.0, 20.0, False),
        ("done", "waiting", 10.0, 20.0, True),  # half of the time: there are two
        ("done", "waiting", SHARE_MAX_S - 1, 3600.0, False),
        ("done", "waiting", SHARE_MAX_S, 3600.0, True),
        ("done", "waiting", SHARE_MAX_S, None, True),
        ("active", "waiting", 19.0, 20.0, False),  # nothing is anywhere yet
        ("failed", "waiting", 19.0, 20.0, False),
        ("failed", "superseded", 0.0, 20.0, True),
    ],
)
def test_a_flush_gives_up_on_one_that_fails_after_its_share(
    disk: str, bucket: str, failing_s: float, deadline_s: float | None, ends: bool
):
    levels = {"disk": {"default": disk}, "bucket": {"default": bucket}}
    assert ends_flush(levels, {"disk": 0.0, "bucket": failing_s}, deadline_s) is ends


def test_a_tier_alone_and_one_that_lacks_a_stream():
    assert not ends_flush({"disk": {"a": "waiting"}}, {"disk": 59.0}, 60.0)
    half = {"a": "done", "b": "active"}
    assert not ends_flush({"disk": half, "bucket": half}, {"disk": 99.0, "bucket": 99.0}, 60.0)
