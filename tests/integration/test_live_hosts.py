"""Live recovery on several hosts: every loss is, bit for bit, that of an undisturbed run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.hosts import needs_links
from tests.support.live import STEPS, Fault, Row, stopped_agent, supervised
from tests.support.live_hosts import Hosts
from tieredckpt.errors import AgentError
from tieredckpt.live.control import CONTROL, Request, ask
from tieredckpt.testing import netns


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Row]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with stopped_agent(folder):
        found = supervised(folder, standby=0)
    assert found.code == 0, "\n".join(found.lines)
    return {row.step: row for row in found.rows}


def check(hosts: Hosts, reference: dict[int, Row], *, twice: int = 0) -> None:
    rows = hosts.rows()
    assert [row for row in rows if row != reference[row.step]] == [], hosts.text()
    assert {row.step for row in rows} == set(reference), hosts.text()
    assert len(rows) - len(reference) == twice, hosts.text()


def test_hosts_that_are_lost_are_replaced_and_an_agent_costs_nothing(runtime_dir: Path, reference):
    with Hosts(runtime_dir) as hosts:
        hosts.start("first", "second")
        hosts.start("third", stands_by=True)
        hosts.train_to(3)
        hosts.kill_agent("first")  # of the leader
        hosts.kill_agent("third")
        hosts.train_to(4)
        # A host whose agent refuses connections while ranks fail counts as lost after a second.
        hosts.wait(lambda: hosts.answers("first") and hosts.answers("third"))
        hosts.train_to(5)
        hosts.wait(lambda: hosts.text("third").count("ranks on this host: none") == 1)
        assert "generation 1 ended" not in hosts.text()
        vote = "hosts that vote: first, second, third"
        hosts.wait(lambda: vote in hosts.text("third"))

        hosts.lose("second")
        hosts.train_to(7)
        assert "generation 2 begins; ranks on this host: 2, 3" in hosts.text("third")
        hosts.start("second", stands_by=True)
        hosts.wait(lambda: "ranks on this host: none" in hosts.text("second"))
        hosts.wait(lambda: vote in hosts.text("third").split("ended")[-1])

        hosts.lose("first")  # which leads, with rank 0
        hosts.go_to(STEPS + 1)
        assert hosts.codes() == {"second": 0, "third": 0}, hosts.text()
        check(hosts, reference)
        assert hosts.text().count("from the state of the surviving ranks, no step lost") >= 2
        assert hosts.text().count("first update after the fault") >= 2


@pytest.mark.full
def test_a_hosts_own_standby_and_supervisors_that_do_not_belong(runtime_dir: Path, reference):
    """A second one on a host, and one of another size, end; the job goes on."""
    faults = [Fault(6, 3, "kill")]
    with Hosts(runtime_dir, standby=1, faults=faults, listed=2) as hosts:
        hosts.start("first", "second")
        hosts.train_to(3)
        assert hosts.start_again("second") == 1
        hosts.start("third", stands_by=True, per_host=3)
        found = "has --nnodes 2 --nproc-per-node 2, not --nnodes 2 --nproc-per-node 3"
        hosts.wait(lambda: found in hosts.text("third"))
        assert "generation 1 ended" not in hosts.text()
        hosts.go_to(STEPS + 1)
        assert hosts.codes() == {"first": 0, "second": 0, "third": 1}, hosts.text()
        assert "generation 2 begins; ranks on this host: 2, 3" in hosts.text("second")
        check(hosts, reference)


@pytest.mark.full
def test_hosts_leave_at_a_notice_and_at_a_users_order(runtime_dir: Path, reference):
    """Also the one that leads; not if too few would be left."""
    with Hosts(runtime_dir) as hosts:
        hosts.start("first", "second")
        hosts.start("third", stands_by=True)
        hosts.train_to(3)
        hosts.signal("second")
        hosts.wait(lambda: hosts.text("first", "second").count("host second is to leave") == 2)
        hosts.go_to(6)
        assert hosts.code("second") == 128 + signal.SIGTERM
        assert "generation 2 begins; ranks on this host: 2, 3" in hosts.text("third")
        assert "ended: host second leaves" in hosts.text("first")
        leave = Request(host="first", deadline_s=60.0)
        with pytest.raises(AgentError):
            ask(runtime_dir / "third" / CONTROL, leave, 1.0)
        assert "generation 3" not in hosts.text()
        hosts.start("second", stands_by=True)
        assert ask(runtime_dir / "third" / CONTROL, leave, 60.0).host == "third"
        hosts.wait(lambda: hosts.text("first", "third").count("host first is to leave") == 2)
        hosts.go_to(10)
        assert hosts.code("first") == 0
        hosts.go_to(STEPS + 1)
        assert hosts.codes() == {"second": 0, "third": 0}, hosts.text()
        check(hosts, reference)
        assert hosts.text().count("no step lost") == 2
        assert "host first leaves: no tier has its checkpoints" in hosts.text("first")


def test_all_replicas_of_a_shard_on_a_lost_host(runtime_dir: Path, reference):
    """The newest checkpoint is read from the memory of other hosts."""
    with Hosts(runtime_dir, replicas=1) as hosts:
        hosts.start("first", "second")
        hosts.start("third", stands_by=True)
        hosts.train_to(6)  # saved after 4
        hosts.wait(lambda: hosts.has_copies("first", 4))
        hosts.lose("second")
        hosts.go_to(STEPS + 1)
        assert hosts.codes() == {"first": 0, "third": 0}, hosts.text()
        assert "resumed at step 4 from the newest checkpoint, 2 steps lost" in hosts.text("first")


@pytest.mark.full  # in the gate it is simulated
@pytest.mark.parametrize("name", ["first", "second"])
def test_the_smaller_part_of_a_split_waits_and_follows_when_it_is_back(
    runtime_dir: Path, reference, name: str
):
    needs_links()
    with netns.Network(subnets=1) as network, Hosts(runtime_dir, network) as hosts:
        hosts.start("first", "second")
        hosts.start("third", stands_by=True)
        hosts.train_to(3)
        network.cut(name)
        hosts.wait(lambda: f"generation 1 ended: host {name} is lost" in hosts.text("third"))
        hosts.train_to(7)
        assert "generation 2" not in hosts.text(name)
        network.heal(name)
        hosts.wait(lambda: "generation 2 begins; ranks on this host: none" in hosts.text(name))
        hosts.go_to(STEPS + 1)
        assert hosts.codes() == {"first": 0, "second": 0, "third": 0}, hosts.text()
        check(hosts, reference)
