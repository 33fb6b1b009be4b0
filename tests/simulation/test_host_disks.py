"""Several hosts with a disk each: at no moment is the newest whole checkpoint taken apart."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.host_disks import MUTATIONS, run_case, seeds_until_found

pytestmark = pytest.mark.full


def test_the_newest_whole_checkpoint_stays_on_all_hosts():
    found: Counter[str] = Counter()
    for seed in range(120):
        run_case(seed, found)
    assert min(found[each] for each in ("room made", "given up", "leader", "went back")) > 20


@pytest.mark.nightly
def test_many_seeds():
    for seed in range(1000, 21_000):
        run_case(seed)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_found(name: str):
    assert seeds_until_found(name, most=60)
