"""The agent's metrics: all of its status, by Prometheus's own parser and conventions."""

from __future__ import annotations

import re
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.agent import AgentProcess, FakeTrainer, spec_of, wait_until
from tests.support.faults import ForkedAgent
from tieredckpt.cli.main import main
from tieredckpt.config.units import Every
from tieredckpt.errors import AgentError
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.agent_server import SLOW_THREADS
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.metrics import TEXT_TYPE, exposition

DOCS = Path(__file__).parents[3] / "docs" / "operate" / "metrics.md"
HOSTILE = 'a"} 1\ntieredckpt_up 0\n# \\ {é\x00,'


def parsed(text: bytes) -> dict[str, Metric]:
    found = list(text_string_to_metric_families(text.decode()))
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


def value(found: dict[str, Metric], name: str, **labels: str) -> float:
    (sample,) = (s for f in found.values() for s in f.samples if s.name == f"tieredckpt_{name}"
                 and labels.items() <= s.labels.items())  # fmt: skip
    return sample.value


def numbers(of: Any) -> Iterator[tuple[str, float]]:
    """Every number in a message, by its field's name."""
    for name, each in of.items() if isinstance(of, dict) else ():
        if isinstance(each, bool | int | float):
            yield name, float(each)
        for inner in each if isinstance(each, list | tuple) else [each]:
            yield from numbers(inner)


def full_status(name: str = "run", tier: str = "s3") -> m.Status:
    """Each number is another one, so that none can stand in for its neighbour."""
    host = m.HostEntry(host_id="b", incarnation="0" * 32, addresses=("127.0.0.2:1",))
    peers = (
        m.PeerState(host=host, member=True, reachable=True, rtt_s=0.125, bytes_per_s=7e9),
        m.PeerState(host=host, member=True, reachable=False, error="silent"),
        m.PeerState(host=host, member=True, reachable=None),
        m.PeerState(host=host, member=False, reachable=True, rtt_s=99.5, bytes_per_s=1.5),
    )
    tiers = m.TierStatus(
        name=tier, url="s3://user:secret@bucket/x", scope="shared", available=True,
        error=f"denied: {'ab' * 16}",
        checkpoints=101, stored_bytes=102, queued=103, active_save_id="0" * 32, retaining=True,
        newest_step=104, lag_steps=105, spilled_bytes_total=106, spill_seconds_total=107.25,
        quarantined=108, awaited=109, lag_s=110.5, lag_bytes=111, alarm=True, memory_full=True,
        dropped_total=112,
    )  # fmt: skip
    replication = m.ReplicationStatus(
        replicas=201, possible=202, newest_replicated_step=203, lag_steps=204,
        active_save_id=None, pulled_bytes_total=205, pull_seconds_total=206.5, held_bytes=207,
        error="no host",
    )  # fmt: skip
    namespace = m.NamespaceStatus(
        name=name, capacity_bytes=301, slot_bytes=302, slots=303, free_slots=304, sessions=305,
        checkpoints=306, newest_step=307, attempt=308, skipped_saves=309, tiers=(tiers,),
        peers=peers, replication=replication,
    )  # fmt: skip
    return m.Status(
        health=m.Health(api=401, version="1.2", pid=402, host_id="a", uptime_s=403.5),
        runtime_dir="/r", survives="process", shm_total_bytes=404, shm_free_bytes=405,
        rss_bytes=406, namespaces=(namespace,),
    )  # fmt: skip


def bare_status() -> m.Status:
    """What need not be known is not."""
    full = full_status()
    (namespace,) = full.namespaces
    change = msgspec.structs.replace
    tier = change(namespace.tiers[0], newest_step=None, lag_steps=None, lag_s=None,
                  active_save_id=None, retaining=False, alarm=False, available=False,
                  error=None)  # fmt: skip
    spaces = change(namespace, newest_step=None, tiers=(tier,), peers=(), replication=None)
    return change(full, namespaces=(spaces, change(spaces, name="empty", tiers=())))


def test_every_number_of_the_status_is_told():
    status = full_status()
    samples = [s for family in parsed(exposition(status)).values() for s in family.samples]
    told = {s.value for s in samples} | {
        float(text) for s in samples for text in s.labels.values() if text.isdecimal()
    }
    plain = msgspec.to_builtins(status)
    # Of single hosts only what stands for all: the doc says why.
    plain["namespaces"][0]["peers"] = plain["namespaces"][0]["peers"][:1]
    want = list(numbers(plain))
    assert len(want) > 35
    assert [each for each in want if each[1] not in told] == []


def test_values_are_under_their_names():
    found = parsed(exposition(full_status()))
    of_tier = {"namespace": "run", "tier": "s3"}
    assert value(found, "up") == 1
    assert value(found, "build_info", version="1.2", api="401") == 1
    assert value(found, "tier_info", scope="shared", **of_tier) == 1
    assert value(found, "tier_error_info", error="denied: *", **of_tier) == 1
    assert "tieredckpt_tier_error" not in parsed(exposition(bare_status()))
    for name, want in {
        "tier_alarm": 1, "tier_memory_full": 1, "tier_available": 1, "tier_active": 1,
        "tier_deleting": 1, "tier_lag_steps": 105, "tier_lag_seconds": 110.5,
        "tier_lag_bytes": 111, "tier_dropped_checkpoints_total": 112, "tier_queue_length": 103,
        "tier_spilled_bytes_total": 106, "tier_spill_seconds_total": 107.25,
        "tier_quarantined_copies": 108,
    }.items():  # fmt: skip
        assert value(found, name, **of_tier) == want, name
    for name, want in {
        "peers": 3, "peers_reachable": 1, "peers_rtt_max_seconds": 0.125,
        "peers_speed_min_bytes_per_second": 7e9, "replication_failing": 1,
        "replication_active": 0, "replication_copies_wanted": 201, "memory_free_slots": 304,
    }.items():  # fmt: skip
        assert value(found, name, namespace="run") == want, name
    assert b"secret" not in exposition(full_status())


def test_what_is_not_known_has_no_sample():
    found = parsed(exposition(bare_status()))
    assert value(found, "tier_available") == 0
    assert value(found, "tier_alarm") == 0
    assert value(found, "memory_slots", namespace="empty") == 303
    for name in ("tier_newest_step", "tier_lag_steps", "tier_lag_seconds", "memory_newest_step"):
        assert f"tieredckpt_{name}" not in found
    assert not any("replication" in name or "rtt" in name for name in found)


def test_names_and_units_follow_the_conventions():
    found = parsed(exposition(full_status()))
    for name, family in found.items():
        assert re.fullmatch(r"tieredckpt_[a-z]+(_[a-z]+)*", name)
        assert family.documentation.endswith(".")
        assert family.type in ("gauge", "counter")
        # The parser takes the ending of a counter off the family's name, and only of a counter's.
        ends = {sample.name.endswith("_total") for sample in family.samples}
        assert ends == {family.type == "counter"}
        assert not re.search(r"_(count|sum|bucket|created|ms|mb|kb|gb|percent|s)$", name)
        if family.type == "counter":
            assert all(sample.value >= 0 for sample in family.samples)


@pytest.mark.parametrize("status", [None, bare_status(), full_status()])
def test_the_same_status_gives_the_same_bytes(status: m.Status | None):
    assert exposition(status) == exposition(status)


def test_without_an_agent_there_is_only_up():
    found = parsed(exposition(None))
    assert list(found) == ["tieredckpt_up"]
    assert value(found, "up") == 0


def test_hostile_names_stay_labels():
    found = parsed(exposition(full_status(HOSTILE, HOSTILE[::-1])))
    assert found.keys() == parsed(exposition(full_status())).keys()
    assert value(found, "up") == 1
    assert value(found, "tier_lag_steps", namespace=HOSTILE, tier=HOSTILE[::-1]) == 105


def test_a_path_that_is_no_text_costs_nothing():
    status = msgspec.structs.replace(full_status(), runtime_dir="/r/\udcff")
    assert value(parsed(exposition(status)), "agent_info", runtime_dir="/r/\\udcff") == 1


def test_the_page_lists_exactly_these_metrics_and_its_rules_use_them():
    page = DOCS.read_text("utf-8")
    found = parsed(exposition(full_status()))
    told = {
        sample.name: "info" if sample.name.endswith("_info") else family.type
        for family in found.values()
        for sample in family.samples
    }
    table = dict(re.findall(r"^\| `(tieredckpt_\w+)` \| (\w+) \|", page, re.MULTILINE))
    assert table == told
    (rules,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (group,) = yaml.safe_load(rules)["groups"]
    assert len(group["rules"]) >= 5
    for rule in group["rules"]:
        used = set(re.findall(r"tieredckpt_\w+", rule["expr"]))
        assert used
        assert used <= told.keys(), rule["alert"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["tieredckpt", "agent", "metrics", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def test_a_real_agent_is_scraped(
    runtime_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
):
    disk, output = tmp_path / "disk", tmp_path / "tieredckpt.prom"
    place = ("--runtime-dir", str(runtime_dir))
    with AgentProcess(runtime_dir) as agent:
        with FakeTrainer(runtime_dir, spec_of(tiers={"disk": disk})) as trainer:
            trainer.spilled(trainer.save(7, tiers=("disk",)).save_id)
        # No trainer is there any more.
        found = parsed(scraped(runtime_dir))
        assert value(found, "memory_newest_step") == 7
        assert value(found, "tier_lag_steps", tier="disk") == 0
        assert value(found, "agent_info", pid=str(agent.pid)) == 1
        assert value(found, "sessions") == 0

        capfdbinary.readouterr()
        assert run(monkeypatch, *place) == 0
        assert parsed(capfdbinary.readouterr().out).keys() == found.keys()
        output.write_text("old")
        assert run(monkeypatch, *place, "--output", str(output)) == 0
        assert value(parsed(output.read_bytes()), "tier_newest_step", tier="disk") == 7
    assert run(monkeypatch, *place, "--output", str(output)) == 4
    assert output.read_bytes() == exposition(None)
    assert [each.name for each in tmp_path.glob("*.p*")] + [
        each.name for each in tmp_path.glob(".*")
    ] == [output.name]
    assert run(monkeypatch, *place, "--output", str(tmp_path / "none" / "x.prom")) == 1


def test_they_are_served_by_http_with_and_without_an_agent(runtime_dir: Path):
    words = ["agent", "metrics", "--runtime-dir", str(runtime_dir), "--listen", "127.0.0.1:0"]
    server = subprocess.Popen([sys.executable, "-m", "tieredckpt", *words], stderr=subprocess.PIPE)
    try:
        assert server.stderr is not None
        url = server.stderr.readline().decode().split()[-1]
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url, timeout=30) as reply:
            assert reply.headers["Content-Type"].startswith("text/plain; version=")
            assert reply.read() == exposition(None)
        with AgentProcess(runtime_dir) as agent, urllib.request.urlopen(url, timeout=30) as reply:
            assert value(parsed(reply.read()), "agent_info", pid=str(agent.pid)) == 1
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url + "/other", timeout=30)
    finally:
        server.terminate()
        server.communicate(timeout=30)


@pytest.mark.parametrize("listen", ["9411", "x:", "127.0.0.1:70000", "203.0.113.1:9411"])
def test_an_address_that_cannot_be_served(
    listen: str,
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    assert run(monkeypatch, "--runtime-dir", str(runtime_dir), "--listen", listen) == 2
    assert listen in capsys.readouterr().err


def scraped(runtime_dir: Path) -> bytes:
    """GET /metrics as a stranger to our protocol sends it: without a header of ours."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(30)
        raw.connect(str(runtime_dir / "agent.sock"))
        raw.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        reply = b"".join(iter(lambda: raw.recv(1 << 16), b""))
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert f"content-type: {TEXT_TYPE}".encode() in head.lower()
    return body


def test_the_alarm_is_raised_while_a_tier_is_behind_and_ends_with_it(
    runtime_dir: Path, tmp_path: Path
):
    spec = spec_of(tiers={"disk": tmp_path / "disk"}, keep_last=3)
    disk = msgspec.structs.replace(spec.tiers[0], lag_alarm=Every(steps=20))
    spec = msgspec.structs.replace(spec, tiers=(disk,))
    ours, copied = {"namespace": "run", "tier": "disk"}, "tier_spilled_bytes_total"
    agent = ForkedAgent(runtime_dir)
    try:
        with FakeTrainer(runtime_dir, spec) as trainer:
            client = trainer.client
            assert isinstance(client, AgentClient)
            trainer.spilled(trainer.save(10, tiers=("disk",)).save_id)
            before = parsed(client.metrics())
            assert value(before, "tier_alarm", **ours) == 0
            agent.call("break_os", [str(tmp_path)], "enospc", 1, True)
            for step, alarm in ((20, 0), (30, 1)):
                last = trainer.save(step, tiers=("disk",))
                wait_until(lambda: tier_status(client).error)
                found = parsed(client.metrics())
                size = trainer.segment_bytes * (step - 10) // 10
                for name, want in (
                    ("alarm", alarm), ("available", 0), ("newest_step", 10),
                    ("lag_steps", step - 10), ("lag_bytes", size),
                ):  # fmt: skip
                    assert value(found, f"tier_{name}", **ours) == want, (step, name)
            status = tier_status(client)
            assert (status.alarm, status.lag_steps, status.lag_bytes) == (True, 20, size)
            agent.call("mend_os")
            trainer.spilled(last.save_id)
            found = parsed(client.metrics())
            for name, want in (("alarm", 0), ("lag_steps", 0), ("lag_bytes", 0), ("available", 1)):
                assert value(found, f"tier_{name}", **ours) == want, name
            # What failed half way was copied twice.
            assert value(found, copied, **ours) - value(before, copied, **ours) >= size
        agent.kill()
        agent = ForkedAgent(runtime_dir)
        with AgentClient(runtime_dir, deadline_s=60) as client:
            wait_until(lambda: value(parsed(client.metrics()), "tier_available", **ours) == 1)
            # It begins anew, as the page says.
            assert value(parsed(client.metrics()), copied, **ours) == 0
    finally:
        agent.kill()


def tier_status(client: AgentClient) -> m.TierStatus:
    return client.status().namespaces[0].tiers[0]


def test_a_scrape_is_answered_while_every_thread_waits_for_memory(runtime_dir: Path):
    spec = spec_of(capacity_bytes=4 << 20, wait_s=300.0)
    with (
        ThreadPoolExecutor(2 * SLOW_THREADS) as savers,
        AgentProcess(runtime_dir),  # dies first, or nobody could go
        FakeTrainer(runtime_dir, spec, deadline_s=300) as trainer,
    ):
        for _ in range(trainer.prepare()):  # there is room for no more
            _, trainer.fds[secrets.token_hex(16)] = trainer.reserve()
        # All of one moment: of two that a session makes, the earlier one is taken for given up.
        client = trainer.client
        request = m.Reserve(
            session_id=client.session_id,
            segment_bytes=trainer.segment_bytes,
            asked_at_ns=time.monotonic_ns(),
        )
        for _ in range(2 * SLOW_THREADS):
            savers.submit(client.call, request)
        wait_until(lambda: not is_answered(runtime_dir), deadline_s=60)
        with AgentClient(runtime_dir, deadline_s=60) as client:
            found = parsed(client.metrics())
            assert value(found, "sessions") == 1
            assert client.status().namespaces[0].sessions == 1
            # Many at once are no trouble, either, and each is whole.
            with ThreadPoolExecutor(8) as scrapers:
                texts = list(scrapers.map(lambda _: client.metrics(), range(32)))
            assert all(value(parsed(text), "sessions") == 1 for text in texts)
        assert not is_answered(runtime_dir)


def is_answered(runtime_dir: Path) -> bool:
    """Whether a request that may wait gets a thread."""
    with AgentClient(runtime_dir, deadline_s=1) as client:
        try:
            client.peers("run")
        except AgentError:
            return False
    return True


def test_an_agent_that_is_only_watched_still_goes_when_idle(runtime_dir: Path):
    with AgentProcess(runtime_dir, idle_timeout_s=0.6) as agent:

        def ended_while_watched() -> bool:
            with AgentClient(runtime_dir, deadline_s=10) as client, suppress(AgentError):
                client.metrics()
            return agent.ended()

        wait_until(ended_while_watched, deadline_s=60)
        assert "idle for" in agent.log()
