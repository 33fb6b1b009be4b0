"""Which tier can be reached in the time that is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.policy.schedule import (
    SHARE_MAX_S,
    Reachable,
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
        due=st.booleans(),
    ),
    unique_by=lambda each: each.tier,
    max_size=5,
)
_left = st.none() | st.floats(0, 100)


def is_slow(each: Reachable, left_s: float | None) -> bool:
    known = each.estimate_s is not None and left_s is not None
    return known and each.estimate_s > left_s and not each.due


@given(_tiers, _left)
def test_a_flush_fills_all_but_what_is_too_slow(tiers: list[Reachable], left_s: float | None):
    filled = tiers_to_fill(tiers, left_s)
    answering = [each for each in tiers if each.available]
    if not answering:
        assert filled == ()
        return
    wanted = [each for each in tiers if not is_slow(each, left_s)]
    if not any(each.available for each in wanted):
        (last,) = [each for each in filled if each not in wanted]
        assert last.estimate_s == min(each.estimate_s for each in answering)
        wanted.append(last)
    assert sorted(each.tier for each in wanted) == sorted(each.tier for each in filled)
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
