"""The newest step that several streams have, against its definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.recovery.plan import newest_common

lines = st.lists(st.lists(st.integers(0, 8), max_size=8), min_size=1, max_size=4)
rising = st.lists(
    st.sets(st.integers(0, 12)).map(lambda steps: sorted(steps, reverse=True)),
    min_size=1,
    max_size=4,
)


@given(rising)
def test_the_highest_step_of_runs_that_count_upwards(found: list[list[int]]):
    shared = set.intersection(*map(set, found))
    assert newest_common(found) == max(shared, default=None)


@given(lines)
def test_no_other_common_step_is_newer_in_all_streams(found: list[list[int]]):
    chosen = newest_common(found)
    shared = set.intersection(*map(set, found))
    if chosen is None:
        assert not shared
        return
    assert chosen in shared
    for step in shared - {chosen}:
        assert any(line.index(step) > line.index(chosen) for line in found)


@given(lines, st.randoms())
def test_the_order_of_the_streams_does_not_matter(found: list[list[int]], random):
    chosen = newest_common(found)
    random.shuffle(found)
    assert newest_common(found) == chosen


@given(st.lists(st.integers(0, 8), max_size=8))
def test_a_single_stream_gives_its_newest(line: list[int]):
    assert newest_common([line]) == next(iter(line), None)
