"""A thousand and ten thousand agents on a virtual clock; see ``test_cluster.py``."""

from __future__ import annotations

import pytest

from tests.simulation.cluster_case import large, run_case
from tests.support import counts


def test_a_thousand_agents_and_a_hundred_saves():
    """About 7 s on an idle core."""
    world = run_case(large(0, hosts=1000, saves=100), counts.of("cluster of 1,000"))
    assert world.found["replicated", "all"] >= 3
    assert world.found["faults", "host lost"] >= 1


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_ten_thousand_agents():
    """About 30 s on an idle core."""
    world = run_case(large(0, hosts=10_000, saves=10), counts.of("cluster of 10,000"))
    assert world.found["replicated", "all"] >= 1
    assert world.found["faults", "host lost"] >= 1


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 12))
def test_many_more_large_clusters(seed: int):
    run_case(large(seed, hosts=1000, saves=100), counts.of("cluster of 1,000"))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ten_thousand_agents_and_more_saves():
    run_case(large(1, hosts=10_000, saves=100), counts.of("cluster of 10,000"))
