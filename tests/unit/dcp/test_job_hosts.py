"""Which hosts a job has, and what its ranks must agree on: pure, from what each rank says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tieredckpt.config.schema import Config, load_config
from tieredckpt.dcp.job.hosts import (
    JobHosts,
    RankFacts,
    check_alike,
    earlier_hosts,
    job_hosts,
    shortage,
)
from tieredckpt.errors import ConfigError, UsageError
from tieredckpt.format.manifest import Holders
from tieredckpt.rpc.messages.agent import HostEntry, PeerState


def facts(host: str, given: dict[str, Any] | None = None, **more: Any) -> RankFacts:
    config = load_config(given or {}, {})
    found = RankFacts(
        host_id=host,
        agent=("boot", 1, sum(host.encode())),
        runtime_dir=f"/run/{host}",
        namespace="test",
        labels=config.labels,
        discovery=config.discovery.kind,
        replicas=config.memory.replicas,
        require_replicas=config.memory.require_replicas,
        ack=config.save.ack,
        copies=config.memory.copies,
        credentials=False,
        met_others=False,
    )
    return replace(found, **more)


def of(hosts: str, given: dict[str, Any] | None = None, **more: Any) -> JobHosts:
    """A job with a rank on each of these hosts, in this configuration."""
    return job_hosts([facts(host, given, **more) for host in hosts], load_config(given or {}, {}))


def replicas(number: int) -> dict[str, Any]:
    return {"memory": {"replicas": number}}


SECRET = {"security": {"token_env": "A_TOKEN"}}
STATIC = {"discovery": {"static": ["a:7411"]}, **SECRET}
DNS = {"discovery": {"dns": "all:7411"}, **SECRET}
ACK = {"save": {"ack": "replicated"}}


def test_one_host_needs_no_other():
    job = of("aa")
    assert (job.listens, job.wanted, job.possible) == (False, 0, 0)
    assert job.replicas_of(["a"]) == ()
    assert shortage(job, "memory") is None


def test_several_hosts_replicate_by_default():
    job = of("aabb")
    assert (job.listens, job.wanted, job.possible) == (True, 1, 1)
    assert (job.leader, job.hosts) == ("a", ("a", "b"))
    assert job.replicas_of(["a", "b", "a"]) == (Holders("a", ("b",)), Holders("b", ("a",)))
    assert job.replicas_of(["b"]) == (Holders("b", ("a",)),)
    assert [job.is_lowest_of_its_host(rank) for rank in range(4)] == [True, False, True, False]
    assert shortage(job, "replicated") is None


def test_no_replicas_if_none_are_wanted():
    job = of("ab", replicas(0))
    assert (job.listens, job.wanted) == (True, 0)  # a recovery asks the others all the same
    assert job.replicas_of(["a", "b"]) == ()
    assert shortage(job, "memory") is None


def test_static_discovery_listens_on_one_host_too():
    assert of("a", STATIC).listens
    assert of("a", DNS).listens


def test_a_job_that_was_left_with_one_host_still_knows_the_others():
    job = of("a", met_others=True)
    assert (job.listens, job.wanted) == (True, 0)


def test_too_few_hosts_warn():
    assert "0/1" in (shortage(of("a", replicas(1)), "memory") or "")
    assert "1/2" in (shortage(of("ab", replicas(2)), "memory") or "")
    job = of("a", ACK)
    assert job.wanted == 1
    assert "nothing to wait for" in (shortage(job, "replicated") or "")


@pytest.mark.parametrize(("hosts", "number"), [("a", 1), ("a", None), ("ab", 2)])
def test_required_replicas(hosts: str, number: int | None):
    with pytest.raises(ConfigError, match="require_replicas") as caught:
        of(hosts, {"memory": {"replicas": number, "require_replicas": True}})
    assert caught.value.key == "memory.require_replicas"


def test_labels_reach_the_placement():
    ranks = [
        facts(host, labels=(("rack", rack),)) for host, rack in zip("abcd", "xxyy", strict=True)
    ]
    job = job_hosts(ranks, Config())
    for host in "ab":
        assert set(job.holders[host]) <= {"c", "d"}
    for host in "cd":
        assert set(job.holders[host]) <= {"a", "b"}


def test_a_placement_changes_little():
    before = of("abcdef")
    ranks = [facts(host) for host in "abcdex"]
    after = job_hosts(ranks, Config(), before.holders)
    kept = [h for h in "abcde" if "f" not in before.holders[h]]
    assert kept
    assert [after.holders[h] for h in kept] == [before.holders[h] for h in kept]


def test_two_agents_of_one_name():
    ranks = [facts("a"), facts("b"), facts("a", agent=("boot", 2, 7), runtime_dir="/run/other")]
    with pytest.raises(ConfigError, match="TIEREDCKPT_NODE_NAME") as caught:
        check_alike(ranks)
    text = str(caught.value)
    assert "rank 0" in text
    assert "rank 2" in text
    assert "/run/a" in text
    assert "/run/other" in text
    check_alike([facts("a"), facts("b"), facts("a")])


@pytest.mark.parametrize(
    ("field", "value", "key"),
    [
        ("discovery", "static", "discovery"),
        ("replicas", 2, "memory.replicas"),
        ("require_replicas", True, "memory.require_replicas"),
        ("ack", "replicated", "save.ack"),
        ("credentials", True, "credentials="),
    ],
)
def test_ranks_that_are_configured_differently(field: str, value: Any, key: str):
    with pytest.raises(ConfigError) as caught:
        check_alike([facts("a"), replace(facts("b"), **{field: value})])
    assert caught.value.key == key
    assert "rank 1" in str(caught.value)


def test_ranks_of_different_runs():
    with pytest.raises(UsageError, match="namespaces"):
        check_alike([facts("a"), facts("b", namespace="other")])


def test_of_what_is_known_of_an_earlier_host_what_answered_counts():
    def known(name: str, port: int, reachable: bool | None) -> PeerState:
        entry = HostEntry(
            host_id=name, incarnation=f"{port:032d}", addresses=(f"127.0.1.1:{port}",)
        )
        return PeerState(host=entry, member=False, reachable=reachable)

    told = [
        known("a", 1, None), known("a", 2, True), known("a", 3, False), known("a", 4, None),
        known("b", 5, False),
    ]  # fmt: skip
    for states in (told, told[::-1]):
        found = {entry.host_id: entry.addresses for entry in earlier_hosts(states)}
        assert found == {"a": ("127.0.1.1:2",), "b": ("127.0.1.1:5",)}
