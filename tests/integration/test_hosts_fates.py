"""What becomes of sealed segments while their save's coordinator is cut off. Hosts are real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.agent import LOST_AFTER
from tests.support.faults import eventually
from tests.support.hosts import DATA, Cluster, Host, HostJob, needs_links
from tieredckpt.errors import TierUnavailableError


def on(job: HostJob, ranks: list[int], command: str, *args: Any, **options: Any) -> list[Any]:
    """A command on some ranks at once; what they raise is raised."""
    for rank in ranks:
        job.trainers[rank].start(command, *args, **options)
    return [job.trainers[rank].result() for rank in ranks]


def parts_here(job: HostJob, rank: int, *steps: int) -> list[bool]:
    """Whether a host has all of its segments of these steps, as its own manifests name them."""
    found = []
    for step in steps:
        wanted, held = job.trainers[rank].copies(step, "part")
        found.append(bool(wanted) and set(wanted[rank - 1 : rank]) <= set(held))
    return found


def test_no_part_goes_while_the_coordinator_is_cut_off(tmp_path: Path):
    """It does not lead: for the leader it is lost, and what it commits no other host hears of."""
    needs_links()
    with Cluster(tmp_path, 3, environ={LOST_AFTER: "4"}) as cluster:
        leader, coordinator, _ = cluster.hosts
        cluster.start_agents()
        with cluster.job() as job:
            job.open()
            job.must("form", [1, 2])
            on(job, [1, 2], "save_part", 1)
            # The other host hears of a commit when it is over.
            eventually(lambda: bool(job.trainers[2].copies(1, "part")[0]))
            coordinator.cut(DATA)
            on(job, [1, 2], "save_part", 2)
            eventually(lambda: f"{coordinator.name} has not answered for 4 s" in log_of(leader))
            on(job, [1, 2], "save_part", 3)
            coordinator.heal(DATA)
            eventually(lambda: parts_here(job, 2, 3) == [True])
            eventually(lambda: parts_here(job, 2, 2, 3) == [True, True])
            assert [each.wrong for each in on(job, [1, 2], "load_part")] == [[], []]


@pytest.mark.full
def test_a_rank_tells_its_agent_of_a_failure_that_no_host_could(tmp_path: Path):
    """The coordinator is cut off when its save fails: the word comes with DCP, over the job's own
    network, and the next reserve frees the part.
    """
    needs_links()
    with Cluster(tmp_path, 3) as cluster:
        coordinator = cluster.hosts[1]
        cluster.start_agents()
        with cluster.job() as job:
            memory = {"keep": {"last": 1}, "replicas": 0}
            job.open(memory=memory)
            job.must("form", [1, 2])
            on(job, [1, 2], "save_part", 1)
            # The other host hears of a commit when it is over.
            eventually(lambda: bool(job.trainers[2].copies(1, "part")[0]))
            coordinator.cut(DATA)
            job.trainers[1].arm("save.seal.before=enospc")
            for rank in (1, 2):
                job.trainers[rank].start("save_part", 2)
            for rank in (1, 2):
                with pytest.raises(TierUnavailableError):
                    job.trainers[rank].result()
            first, held = job.trainers[2].copies(1, "part")
            (failed,) = set(held) - set(first)
            on(job, [1, 2], "save_part", 3)  # two slots are not enough for it: the rank asks
            _, held = job.trainers[2].copies(1, "part")
            assert failed not in held
            assert len(held) == 2


def log_of(host: Host) -> str:
    return (host.runtime_dir / "agent.log").read_text()
