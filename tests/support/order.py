"""The order of test files for several workers: the longest first, so that none ends alone."""

from __future__ import annotations

import pytest

LONGEST = (
    "tests/integration/test_fault_matrix.py",
    "tests/integration/test_hosts_faults.py",
    "tests/simulation/test_simulation.py",
    "tests/integration/test_replication_faults.py",
    "tests/integration/test_benchmarks.py",
    "tests/integration/test_examples.py",
    "tests/conformance/test_dcp.py",
    "tests/integration/test_s3_faults.py",
    "tests/integration/test_s3_ranks.py",
    "tests/integration/test_forks.py",
    "tests/integration/test_hosts_engine.py",
    "tests/simulation/test_shared_tier.py",
    "tests/integration/test_faults_trainer.py",
    "tests/integration/test_gathered_saves.py",
    "tests/integration/test_tutorial.py",
    "tests/integration/test_async_process.py",
    "tests/integration/test_local_copies.py",
    "tests/integration/test_faults_damage.py",
    "tests/integration/test_hosts_life.py",
    "tests/integration/test_agent_peers.py",
    "tests/integration/test_agent_faults.py",
    "tests/integration/test_s3_hosts.py",
    "tests/integration/test_shared_tier.py",
    "tests/simulation/test_cluster.py",
    "tests/simulation/test_authority.py",
    "tests/integration/test_async_save.py",
    "tests/integration/test_faults_space.py",
    "tests/simulation/test_cluster_large.py",
    "tests/integration/test_replication.py",
    "tests/integration/test_remote_load.py",
    "tests/test_quality.py",
    "tests/integration/test_per_rank.py",
    "tests/integration/test_save_load.py",
    "tests/integration/test_s3_damage.py",
    "tests/integration/test_frameworks_torchtitan.py",
    "tests/integration/test_failed_saves.py",
    "tests/integration/test_faults_agent.py",
    "tests/integration/test_planners.py",
)
"""What takes longest, in this order; all other files follow as they were collected.

By processor time and waiting together; a file that is missing here costs only balance.
"""


def longest_first(items: list[pytest.Item]) -> None:
    """Sort ``items`` by their file's place in :data:`LONGEST`; the same in every worker."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))
