"""Engines over several hosts, and what the YAML says of the network between them: rails,
certificates, names, failure domains. Agents, ranks, links and the name server are real.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.support.faults import eventually
from tests.support.hosts import AGENT_PORT, DATA, Cluster, Host, HostJob, needs_links
from tieredckpt.errors import NoRecoverableCheckpointError, TierUnavailableError
from tieredckpt.rpc.messages.agent import PeerTable

WAIT_S = 90.0
BYTES = 1 << 20
"""What nothing but copies can be."""


def received(host: Host) -> dict[str, int]:
    """Bytes that each interface of a host has received."""
    assert host.agent is not None
    lines = Path(f"/proc/{host.agent.pid}/net/dev").read_text().splitlines()[2:]
    split = (line.partition(":") for line in lines)
    return {name.strip(): int(rest.split()[0]) for name, _, rest in split}


def save(job: HostJob, step: int) -> None:
    """A checkpoint, and all its copies."""
    job.must("save", step)
    job.must("wait", step, "replicated", WAIT_S)


def load(job: HostJob, step: int) -> list[Any]:
    found = job.all("load")
    for each in found:
        if isinstance(each, BaseException):
            raise each
        assert (each.step, each.wrong) == (step, [])
    return found


def peers(host: Host) -> PeerTable:
    with closing(host.client()) as client:
        return client.peers("run")


@pytest.mark.full
def test_two_rails(tmp_path: Path):
    """Both carry bytes; when one is cut, and nobody told, all goes on over the other one."""
    needs_links()
    network = {"interface": ["eth1", "eth2"], "port": AGENT_PORT}
    with Cluster(tmp_path, 2, rails=2) as cluster:
        one, other = cluster.hosts
        cluster.start_agents()
        with cluster.job(mib=16.0) as job:
            job.open(network=network)
            before, step = received(other), 0
            while step < 20:  # on a busy machine one of them may look slow for a while
                save(job, step := step + 1)
                carried = {name: count - before[name] for name, count in received(other).items()}
                if min(carried["eth1"], carried["eth2"]) > BYTES:
                    break
            else:
                raise AssertionError(f"one rail carries nothing: {carried}")
            other.cut(DATA)
            save(job, step := step + 1)
            # The rail that failed was measured again, and is left out.
            left = f"{one.address(DATA + 1)}:{AGENT_PORT}"
            eventually(lambda: peers(other).peers[0].address == left)
        one.kill()
        cluster.replace(one)
        cluster.start_agents()
        with cluster.job(mib=16.0) as job:
            job.open(network=network)
            load(job, step)


def certify(host: Host, folder: Path, ca: trustme.CA, *names: str) -> None:
    """Give a host a certificate, of its own address if no names are given."""
    leaf = ca.issue_cert(*(names or (host.address(DATA),)))
    pems = {"cert": leaf.cert_chain_pems[0], "key": leaf.private_key_pem, "ca": ca.cert_pem}
    paths = {name: folder / f"{host.name}-{name}.pem" for name in pems}
    for name, pem in pems.items():
        paths[name].touch(0o600)
        pem.write_to_path(str(paths[name]))
    host.settings["security"] = {"tls": {name: str(path) for name, path in paths.items()}}


def test_certificates_and_racks(tmp_path: Path):
    """Copies are in the other rack, so that all of one rack may be lost; all of it over TLS.

    A host with another authority's certificate is refused and named, until it has the right one.
    """
    ca = trustme.CA()
    with Cluster(tmp_path, 4, racks=2) as cluster:
        for host in cluster.hosts:
            certify(host, tmp_path, ca)
        cluster.start_agents()
        with cluster.job() as job:
            job.open()
            save(job, 1)
            rack = {host.name: host.labels["rack"] for host in cluster.hosts}
            placed = job.trainers[0].placed(1)
            assert {owner for owner, _ in placed} == set(rack)
            for owner, (holder,) in placed:
                assert rack[holder] != rack[owner], placed
            shown = {each.host.host_id: each.host.labels for each in job.trainers[0].status().peers}
            assert shown == {name: {"rack": rack[name]} for name in list(rack)[1:]}
        for host in [host for host in cluster.hosts if rack[host.name] == "r2"]:
            host.kill()
            certify(cluster.replace(host), tmp_path, ca)
        good, _, _, wrong = cluster.hosts
        certify(wrong, tmp_path, trustme.CA())
        cluster.start_agents()
        with cluster.job() as job:
            job.open(recovery={"wait": "2s"})
            for error in job.all("load"):
                assert isinstance(error, TierUnavailableError), error
                assert "its certificate is refused" in str(error)
                assert "(rank 3)" in str(error), "the one on that host"
            named = [each for each in peers(good).peers if each.host.host_id == wrong.name]
            assert named[0].reachable is False
            assert "its certificate is refused" in (named[0].error or "")
            certify(wrong, tmp_path, ca)
            eventually(lambda: not isinstance(job.all("load")[0], TierUnavailableError))
            load(job, 1)
            save(job, 2)


def token_in(folder: Path) -> dict[str, Any]:
    """A secret that all hosts have."""
    path = folder / "token"
    path.touch(0o600)
    path.write_text("0123456789abcdef" * 2)
    return {"token_file": str(path)}


def test_every_listed_host_is_expected_to_answer(tmp_path: Path):
    """At the first start a host is listed that is not up; then the job moves to just that one,
    while the agent of the other one is down."""
    with Cluster(tmp_path, 2) as cluster:
        old, new = cluster.hosts
        where = [f"{host.address(DATA)}:{AGENT_PORT}" for host in cluster.hosts]
        more = {
            "discovery": {"static": where},
            "security": token_in(tmp_path),
            "network": {"port": AGENT_PORT},
            "recovery": {"wait": "0s"},
        }
        cluster.start_agents([old])
        with cluster.job([old]) as job:
            job.open(**more)
            refused_without(job, where[1:])
            assert [each.step for each in job.all("load", fresh_start=True)] == [None]
            job.must("save", 1)
        old.stop_agent()
        cluster.start_agents([new])
        with cluster.job([new]) as job:
            job.open(**more)
            refused_without(job, where[:1])
            cluster.start_agents([old])
            eventually(lambda: not peers(new).unmet)
            load(job, 1)


def refused_without(job: HostJob, addresses: list[str]) -> None:
    for error in job.all("load"):
        assert isinstance(error, NoRecoverableCheckpointError), error
        for each in addresses:
            assert f"not asked: host {each}" in str(error)


NAME = "agents.my-job"


@pytest.mark.full
def test_a_job_that_moved_finds_its_old_hosts_by_name(tmp_path: Path):
    """No host of the new job was in the old one: the name alone says where the checkpoints are.

    Until somebody answers the name nothing is loaded, and nothing begun anew.
    """
    needs_links()
    more = {"discovery": {"dns": f"{NAME}:{AGENT_PORT}"}, "security": token_in(tmp_path)}
    with Cluster(tmp_path, 2, names=True) as cluster:
        names = cluster.names
        assert names is not None
        names.addresses[NAME] = [host.address(DATA) for host in cluster.hosts]
        cluster.start_agents()
        with cluster.job() as job:
            job.open(**more)
            assert [each.step for each in job.all("load")] == [None, None]
            save(job, 1)
        fresh = [cluster.add(), cluster.add()]
        names.addresses[NAME] = [host.address(DATA) for host in cluster.hosts]
        cluster.start_agents()
        with cluster.job(fresh) as job:
            names.answers.clear()
            job.open(**more, recovery={"wait": "0s"})
            refused_without(job, [f"{NAME}:{AGENT_PORT}"])
            names.answers.set()
            eventually(lambda: not peers(fresh[0]).unmet)
            load(job, 1)
            save(job, 2)
