"""What leaves memory for another run is complete elsewhere, whatever is there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.policy.test_retention import MADE
from tieredckpt.policy.capacity import ENDED_AFTER_S, IdleRun, Stored, can_go

made = st.sampled_from(MADE)
segments = st.dictionaries(
    st.sampled_from([ref.id for each in MADE for ref in each.segments]),
    st.sampled_from(
        [(ref.size, root) for each in MADE for ref in each.segments for root in (ref.root, None)]
    ),
)
tiers = st.builds(
    Stored,
    st.frozensets(made.map(lambda each: each.save_id)),
    st.frozensets(made.map(lambda each: each.plan)),
    segments,
)
whole = st.lists(made).map(
    lambda saves: Stored(
        frozenset(each.save_id for each in saves),
        frozenset(each.plan for each in saves),
        {ref.id: (ref.size, None) for each in saves for ref in each.segments},
    )
)
runs = st.builds(
    IdleRun,
    idle_s=st.sampled_from([0.0, ENDED_AFTER_S - 1, ENDED_AFTER_S, 1e9]),
    other_hosts=st.booleans(),
    unreadable=st.booleans(),
    saves=st.lists(made, unique_by=lambda each: each.save_id).map(tuple),
    needed=st.frozensets(made.map(lambda each: each.save_id)),
)


@given(run=runs, stored=st.lists(tiers | whole, max_size=3))
def test_only_what_is_complete_elsewhere_goes(run: IdleRun, stored: list[Stored]):
    found = can_go(run, stored)
    ended = run.idle_s >= ENDED_AFTER_S and not (run.other_hosts or run.unreadable)
    safe = {
        each.save_id
        for each in run.saves
        for tier in stored
        if each.save_id in tier.saves
        and each.plan in tier.plans
        and all(
            ref.id in tier.segments
            and tier.segments[ref.id][0] == ref.size
            and tier.segments[ref.id][1] in (None, ref.root)
            for ref in each.segments
        )
    }
    newest = {
        each.stream: each for each in sorted(run.saves, key=lambda m: (m.attempt.number, m.seq))
    }
    safe -= {each.save_id for each in newest.values()}
    assert {each.save_id for each in found} == (safe - run.needed if ended else set())
    ages = [(each.attempt.number, each.seq) for each in found]
    assert ages == sorted(ages)
