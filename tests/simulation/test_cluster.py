"""Agents on a virtual clock, with the product's own decisions.

Each seed is a cluster whose hosts die, reboot, are cut off and crawl while a job saves faster than
it can replicate; ``cluster_promises.py`` has what must hold. One seed alone, with its trace:
``CLUSTER_SEED=17 make test PYTEST_ARGS=tests/simulation/test_cluster.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.simulation import cluster_mutations
from tests.simulation.cluster_case import CaseFailed, run_case, small
from tests.simulation.cluster_mutations import MUTATIONS, NOT_VISIBLE, seeds_until_found
from tests.simulation.repeated import printed_by_each_process
from tests.support import counts

pytestmark = pytest.mark.full

SEEDS = 48
NIGHTLY_SEEDS = 5000
FOUND_WITHIN = 60
"""Seeds that are enough to find each fault that is put into the policy: the slowest takes 42."""
TRIED_FIRST = {
    "acknowledgements of an old incarnation count": 41,
    "only the first stream is ever ordered": 6,
}
"""Seeds that found these when they were written: to come to them takes ten seconds."""


def run_small(seeds: Iterator[int] | range) -> None:
    for seed in seeds:
        run_case(small(seed), counts.of("cluster"))


@pytest.mark.parametrize("chunk", range(3))
def test_what_was_replicated_is_restored(chunk: int):
    run_small(range(SEEDS)[chunk::3])


def test_the_seed_that_was_asked_for():
    seed = os.environ.get("CLUSTER_SEED")
    if seed is None:
        pytest.skip("CLUSTER_SEED names no seed")
    world = run_case(small(int(seed)))
    print(*world.trace, sep="\n")


@pytest.mark.nightly
@pytest.mark.timeout(2 * 3600)
def test_many_more_clusters():
    run_small(range(SEEDS, NIGHTLY_SEEDS))


@pytest.mark.parametrize("name", sorted(set(MUTATIONS) - set(NOT_VISIBLE)))
def test_what_is_broken_on_purpose_is_found(name: str):
    found, how = seeds_until_found(name, most=FOUND_WITHIN, first=TRIED_FIRST.get(name, 0))
    assert found, how


def test_a_seed_does_the_same_every_time():
    code = (
        f"from {__name__} import *\n"
        "for seed in (1, 4, 7, 10):\n"
        "    world = run_case(small(seed))\n"
        "    print(world.trace, sorted(world.found.items()), world.now_s)"
    )
    assert printed_by_each_process(code).strip()


def test_without_faults_every_third_or_fourth_save_is_replicated_and_none_is_skipped():
    found = run_case(small(0).__class__(seed=5, hosts=8, faults=0.0)).found
    assert found["commits", "all"] == 100
    assert 25 <= found["replicated", "all"] <= 34
    assert found["orders", "replicate"] == found["replicated", "all"]


def test_what_is_not_found_is_not_found_for_the_reason_given():
    for name in NOT_VISIBLE:
        with cluster_mutations.mutated(name):
            run_small(range(4))


def test_a_failure_says_how_to_see_it_again():
    with cluster_mutations.mutated("one host sends to all"), pytest.raises(CaseFailed) as failure:
        run_small(range(8))
    assert "CLUSTER_SEED=" in str(failure.value)
