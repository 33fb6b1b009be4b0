"""What ``tieredckpt status`` and ``tieredckpt peers`` print of other hosts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tieredckpt.cli.status import peers_json, print_peers, print_status
from tieredckpt.rpc.messages.agent import (
    Health,
    HostEntry,
    NamespaceStatus,
    PeerState,
    PeerTable,
    ReplicationStatus,
    Status,
)

TOKEN = "a-secret-that-nobody-is-to-see"
NAMES = ("leads", "slow", "gone", "old")
ENTRIES = {
    name: HostEntry(
        host_id=name,
        incarnation=f"{number:x}" * 32,
        addresses=(f"10.0.0.{number}:7411", f"10.1.0.{number}:7411"),
        labels={"rack": f"r{number}"} if number < 3 else {},
    )
    for number, name in enumerate(NAMES, 1)
}
PEERS = (
    PeerState(host=ENTRIES["old"], member=False, reachable=None),
    PeerState(
        host=ENTRIES["slow"],
        member=True,
        reachable=True,
        address="10.1.0.2:7411",
        rtt_s=0.0012,
        bytes_per_s=2.5e9,
    ),
    PeerState(host=ENTRIES["gone"], member=True, reachable=False, error="no route\nto host"),
)


def table(**more: Any) -> PeerTable:
    values: dict[str, Any] = {
        "host": ENTRIES["leads"],
        "leader": "leads",
        "replicas": 1,
        "token": TOKEN,
        "tls": None,
        "peers": PEERS,
    }
    return PeerTable(**{**values, **more})


def test_peers_for_people(capsys: pytest.CaptureFixture[str]):
    print_peers("run", table())
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines()[2:]}
    assert list(rows) == ["leads", "gone", "slow", "old"]  # members first
    assert rows["leads"].split()[1] == "leader"
    assert rows["leads"].endswith("this host")
    assert rows["slow"].split()[1:4] == ["member", "10.1.0.2:7411,", "10.0.0.2:7411"]
    assert "1.20 ms  2.50 GB/s  yes" in rows["slow"]
    assert "rack=r2" in rows["slow"]
    assert rows["gone"].endswith("no: no route to host")
    assert rows["old"].split()[1] == "left"
    assert rows["old"].endswith("not asked yet")
    assert TOKEN not in out


def test_places_that_have_not_answered(capsys: pytest.CaptureFixture[str]):
    unmet = {"10.0.0.9:7411 (agents:7411)": "no route\nto host"}
    print_peers("run", table(unmet=unmet))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "10.0.0.9:7411 (agents:7411) of discovery has not answered yet: no route to host"
    )
    assert peers_json("run", table(unmet=unmet))["unmet"] == unmet


def test_peers_as_json():
    answer = json.loads(json.dumps(peers_json("run", table())))
    assert (answer["namespace"], answer["leader"], answer["tls"]) == ("run", "leads", False)
    assert answer["host"]["addresses"] == ["10.0.0.1:7411", "10.1.0.1:7411"]
    assert [each["host"]["host_id"] for each in answer["peers"]] == ["old", "slow", "gone"]
    assert TOKEN not in json.dumps(answer)
    assert TOKEN not in repr(table())


def test_a_host_that_does_not_listen(capsys: pytest.CaptureFixture[str]):
    print_peers("run", table(host=None, leader="", peers=()))
    assert capsys.readouterr().out == "this host does not listen for others in namespace run\n"


def shown(capsys: pytest.CaptureFixture[str], **more: Any) -> list[str]:
    namespace = NamespaceStatus(
        name="run",
        capacity_bytes=1,
        slot_bytes=1,
        slots=1,
        free_slots=1,
        sessions=1,
        checkpoints=1,
        newest_step=90,
        attempt=1,
        skipped_saves=0,
        tiers=(),
        **more,
    )
    print_status(
        Status(
            health=Health(api=1, version="1", pid=1, host_id="leads", uptime_s=1.0),
            runtime_dir="/r",
            survives="process",
            rss_bytes=1,
            shm_free_bytes=1,
            shm_total_bytes=1,
            namespaces=(namespace,),
        )
    )
    return capsys.readouterr().out.splitlines()


def replication(**more: Any) -> ReplicationStatus:
    values: dict[str, Any] = {
        "replicas": 2,
        "possible": 1,
        "newest_replicated_step": 80,
        "lag_steps": 10,
        "active_save_id": None,
        "pulled_bytes_total": 3 << 30,
        "pull_seconds_total": 2.0,
        "held_bytes": 1 << 30,
        "error": None,
    }
    return ReplicationStatus(**{**values, **more})


def test_status_of_replicas(capsys: pytest.CaptureFixture[str]):
    lines = shown(capsys, peers=PEERS, replication=replication())
    (row,) = (line for line in lines if line.startswith("run") and "1/2" in line)
    assert row.split()[2:5] == ["80", "10", "idle"]
    for text in ("3 GiB", "1.61 GB/s", "1 GiB", "1 of 2"):
        assert text in row
    assert lines[-1] == "host gone of run: no route to host"


def test_status_of_a_replication_that_fails(capsys: pytest.CaptureFixture[str]):
    found = replication(error="no room\nhere", newest_replicated_step=None, lag_steps=None)
    lines = shown(capsys, replication=found)
    (row,) = (line for line in lines if line.startswith("run") and "1/2" in line)
    assert row.split()[2:5] == ["-", "-", "failing"]
    assert lines[-1] == "replicas of run: no room here"


def test_status_of_one_host_says_nothing_of_others(capsys: pytest.CaptureFixture[str]):
    assert not [line for line in shown(capsys) if "hosts" in line or "replica" in line]
