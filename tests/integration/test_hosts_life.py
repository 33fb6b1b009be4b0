"""Hosts that are slow, gone, or come back, in a job over several of them; the rest of the promises.

What happens in each operation under each fault is in test_hosts_faults.py.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support.counts import of
from tests.support.host_bench import DEADLINE_S, HostBench, HostCase
from tests.support.hosts import Host
from tieredckpt.errors import NoRecoverableCheckpointError, RankError


def bench(name: str, folder: Path) -> HostBench:
    """Four hosts; the name is the seed of what is drawn."""
    of("hosts")["restart", name] += 1
    return HostBench(HostCase("restart", name, "named", 0), folder)


def pair_goes_down(found: HostBench) -> tuple[list[Host], list[Host]]:
    """The agents of two hosts that are all who hold some segment of the newest checkpoint go down.

    Returns them, and the hosts of the next start: the other two and two fresh ones.
    """
    owner, holders = found.job.trainers[0].placed(found.step)[0]
    names = {owner, *holders}
    assert len(names) == 2, holders
    found.job.end()
    pair = [host for host in found.cluster.hosts if host.name in names]
    for host in pair:
        host.stop_agent()
    rest = [host for host in found.cluster.hosts if host not in pair]
    return pair, [*rest, found.cluster.add(), found.cluster.add()]


def test_a_holder_that_boots_slowly_is_waited_for(tmp_path: Path):
    """Both who have a segment are down when the job starts again elsewhere; one comes in time."""
    with bench("slow boot", tmp_path) as found:
        found.prepare(2)
        pair, members = pair_goes_down(found)
        found.start(members, wait_s=60.0)
        timer = threading.Timer(2.0, pair[1].start_agent)
        timer.start()
        try:
            assert found.load().step == 2
        finally:
            timer.join(DEADLINE_S)
        found.save(replicated=True)


def test_who_never_boots_is_waited_for_no_longer_than_told(tmp_path: Path):
    with bench("no boot", tmp_path) as found:
        found.prepare(2)
        pair, members = pair_goes_down(found)
        found.start(members, wait_s=1.0)
        found.job.start("load", seeds=found.ledger.seeds())
        outcomes = found.job.outcomes(DEADLINE_S)
        for each in outcomes:
            assert isinstance(each, NoRecoverableCheckpointError | RankError), outcomes
        assert any(isinstance(each, NoRecoverableCheckpointError) for each in outcomes), outcomes
        text = " ".join(map(str, outcomes))
        assert any(host.name in text for host in pair), text
        pair[0].start_agent()  # what was not to be had comes, and the same engines find it
        assert found.load().step == 2


@pytest.mark.parametrize("fresh", [1, 3])
def test_the_job_moves_to_other_hosts(tmp_path: Path, fresh: int):
    """Old hosts that are no members any more give what they have; then they are lost."""
    with bench("moved", tmp_path) as found:
        found.prepare(2)
        found.job.end()
        old = list(found.cluster.hosts)
        members = [*old[fresh:], *(found.cluster.add() for _ in range(fresh))]
        found.start(members)
        assert found.load(nothing_lost=True).step == 2
        found.save(replicated=True)
        found.job.end()
        for host in old[:fresh]:
            host.kill()
            found.cluster.hosts.remove(host)
        found.start(members)
        assert found.load(nothing_lost=True).step == 3


def test_hosts_are_lost_one_after_the_other(tmp_path: Path):
    """Each restart makes the fresh host a donor: in the end no host of the first start is left."""
    with bench("all in turn", tmp_path) as found:
        found.prepare(1)
        for host in list(found.cluster.hosts):
            found.lose(host)
            loaded = found.restart("replaced")
            assert loaded.step == 1
            found.repaired(1)
