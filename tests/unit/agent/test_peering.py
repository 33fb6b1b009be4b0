"""What an agent knows of other hosts, without any: addresses, incarnation, book, rails."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tieredckpt.agent.cluster.members import LOST_AFTER_S, PROBE_AGAIN_S, Peers
from tieredckpt.agent.host import addresses
from tieredckpt.agent.host.events import Hooks
from tieredckpt.agent.host.runtime import RuntimeDir, incarnation
from tieredckpt.agent.peering import broadcast
from tieredckpt.agent.peering.failure_detector import FEW, STRANGERS_AT_ONCE, PeerWatch
from tieredckpt.errors import ConfigError, NotFoundError, TierUnavailableError
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.peer import Identify


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class FakeListeners:
    """What Peers needs of Listeners: this host's entry and secret, without sockets."""

    def __init__(self) -> None:
        self.own: m.HostEntry | None = host("me")

    def entry(self, namespace: str) -> m.HostEntry | None:
        return self.own

    def served(self, namespace: str) -> tuple[m.HostEntry, Secret]:
        if self.own is None:
            raise NotFoundError("no token is known")
        return self.own, Secret("t" * 32)

    def network(self, namespace: str) -> tuple[str, m.TlsSpec | None]:
        return ("t" * 32, None) if self.own is not None else ("", None)


def host(name: str, *, port: int = 1, incarnation: str = "a" * 32, rails: int = 1) -> m.HostEntry:
    where = tuple(f"127.0.{rail}.1:{port}" for rail in range(1, rails + 1))
    return m.HostEntry(host_id=name, incarnation=incarnation, addresses=where)


def told(*hosts: m.HostEntry, **values: object) -> m.SetPeers:
    fields = {"session_id": "0" * 32, "run": "1" * 32, "leader": "me", "hosts": hosts, **values}
    return m.SetPeers(**fields)  # type: ignore[arg-type]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hooks() -> Hooks:
    return Hooks()


@pytest.fixture
def peers(tmp_path: Path, clock: Clock, hooks: Hooks) -> Peers:
    return make(tmp_path, clock, hooks)


def make(folder: Path, clock: Clock, hooks: Hooks) -> Peers:
    listeners = FakeListeners()
    return Peers("run", "me", listeners, hooks, folder / "peers" / "run.hosts", clock=clock)  # type: ignore[arg-type]


# --- addresses ------------------------------------------------------------------------------------


def test_this_hosts_addresses():
    assert ("lo", "127.0.0.1") in addresses.local_addresses()
    assert addresses.choose_addresses(["lo"], []) == ("127.0.0.1",)
    assert addresses.choose_addresses([], ["127.0.0.0/8"]) == ("127.0.0.1",)
    assert addresses.choose_addresses(["lo"], ["127.0.0.1", "127.0.7.7/32"]) == (
        "127.0.0.1",
        "127.0.7.7",
    )


def test_without_a_route_it_is_loopback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(addresses, "_ELSEWHERE", ())
    assert addresses.choose_addresses([], []) == ("127.0.0.1",)


@pytest.mark.parametrize("text", ["nonsense", "10.0.0.0/33", "203.0.113.0/24", "::/129"])
def test_networks_that_cannot_be(text: str):
    with pytest.raises(ConfigError, match=r"network\.cidr"):
        addresses.choose_addresses([], [text])


def test_too_many_rails():
    with pytest.raises(ConfigError, match="limit is 16"):
        addresses.choose_addresses([], [f"127.0.0.{number}/32" for number in range(1, 18)])


@pytest.mark.parametrize("text", ["10.0.0.1:80", "[::1]:80", "name.example:65535"])
def test_addresses_with_ports(text: str):
    assert addresses.with_port(*addresses.split_port(text)) == text


@pytest.mark.parametrize(
    "text", ["", "a", "a:", ":1", "a:x", "a:65536", "::1:80", "a:-1", "a:\u0661"]
)
def test_no_addresses_with_ports(text: str):
    with pytest.raises(ValueError):
        addresses.split_port(text)


# --- hosts that do not answer ---------------------------------------------------------------------


@contextlib.contextmanager
def mute() -> Iterator[int]:
    """The port of somebody who takes connections and never says anything."""
    with socket.create_server(("127.0.1.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_an_attempt_does_not_wait_for_who_was_silent_just_now(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
):
    """Each wait would last until the silent host's deadline, and then it would be known as such."""
    monkeypatch.setattr(broadcast, "SYNC_PUSH_S", 3600.0)
    nothing = SimpleNamespace(manifests=tuple, record_ids=tuple, attempts=tuple)
    with mute() as port:
        peers.set(told(host("me"), host("far", port=port)))
        telling = broadcast.Exchange("run", peers, nothing, None)  # type: ignore[arg-type]
        comparing = broadcast.AntiEntropy(
            peers, nothing, None, telling  # type: ignore[arg-type]
        )  # fmt: skip
        assert comparing.sync_all(silent=("far",)) == []
        assert [each.reachable for each in peers.states()] == [None]
        telling.stop()
        peers.lines.stop()


def test_who_stops_waits_for_nobody(peers: Peers):
    raised: list[BaseException] = []
    with mute() as port:
        peers.set(told(host("me"), host("far", port=port)))
        client = peers.client("far")

        def work() -> None:
            try:
                peers.ask("far", Identify(caller=None))
            except TierUnavailableError as error:
                raised.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        peers.lines.stop()
        thread.join(60)
        assert not thread.is_alive()
        # It was cut, or had not begun; its deadline would say that there was no answer in time.
        assert "was closed here" in str(raised[0])
        peers.reset_clients()
        with pytest.raises(TierUnavailableError, match="the agent stops"):
            peers.client("far")
        with pytest.raises(TierUnavailableError, match="was closed here"):
            client.identify()


# --- incarnation ----------------------------------------------------------------------------------


def test_an_incarnation_is_kept_until_the_next_boot(tmp_path: Path):
    runtime = RuntimeDir(tmp_path)
    first = incarnation(runtime, "boot-1")
    assert incarnation(runtime, "boot-1") == first
    assert stat.S_IMODE(os.stat(runtime.incarnation).st_mode) == 0o600
    second = incarnation(runtime, "boot-2")
    assert second != first
    assert incarnation(runtime, "boot-2") == second
    for damaged in ("", "x boot-2", f"{second}", f"{second} boot-2 more", "\0\xff"):
        runtime.incarnation.write_bytes(damaged.encode("latin-1"))
        third = incarnation(runtime, "boot-2")
        assert third not in (first, second)
        assert incarnation(runtime, "boot-2") == third


# --- the book -------------------------------------------------------------------------------------


def test_nobody_is_known_at_first(peers: Peers, tmp_path: Path):
    assert not peers.active
    assert peers.is_leader
    assert peers.members() == ()
    peers.note()
    assert not (tmp_path / "peers").exists()


def test_members_and_strangers(peers: Peers, hooks: Hooks):
    calls: list[str] = []
    hooks.on_members.append(lambda: calls.append("members"))
    peers.set(told(host("me"), host("a"), host("b"), leader="a", replicas=2))
    assert peers.active
    assert peers.members() == ("a", "b", "me")
    assert peers.others() == ("a", "b")
    assert (peers.leader, peers.is_leader, peers.replicas) == ("a", False, 2)
    peers.set(told(host("me"), host("b"), leader="me"))
    assert peers.others() == ("b",)
    assert peers.strangers() == ("a",)
    assert peers.is_leader
    assert [state.member for state in peers.states()] == [True, False]
    assert set(peers.incarnations()) == {"me", "a", "b"}
    assert calls == ["members"] * 2


def test_two_hosts_of_one_name(peers: Peers):
    with pytest.raises(ValueError, match="TIEREDCKPT_NODE_NAME"):
        peers.set(told(host("a"), host("a", incarnation="b" * 32)))
    with pytest.raises(ValueError, match="named"):
        peers.set(told(host("a\n")))
    assert not peers.active


def test_what_the_job_says_of_earlier_hosts_changes_nobody_who_answers(peers: Peers):
    old, new = host("a"), host("a", port=2, incarnation="b" * 32)
    moved = host("b", port=2, incarnation="b" * 32)
    peers.learn([old, host("b")])
    peers.heard("a")
    earlier = (new, moved, host("c"), host("me", port=9), host("\0"))
    peers.set(told(host("me"), host("d"), earlier=earlier))
    assert peers.entry("a") == old
    assert peers.entry("b") == moved
    assert peers.entry("c") == host("c")
    assert peers.strangers() == ("a", "b", "c")
    peers.learn([new])  # it has said so itself
    assert peers.incarnations()["a"] == "b" * 32


@pytest.mark.parametrize("silent_s", [0.0, LOST_AFTER_S])
def test_what_a_visitor_says_of_earlier_hosts_changes_no_member(
    peers: Peers, clock: Clock, silent_s: float
):
    """Neither where it is asked, nor whether it is lost."""
    member, stale = host("b", port=2, incarnation="b" * 32), host("b", port=9)
    peers.set(told(host("me"), member, leader="b"))
    peers.heard("b")
    peers.failed("b", "no answer")
    clock.now_s += silent_s
    peers.failed("b", "no answer")
    lost = peers.lost()
    peers.set(told(host("me"), host("d"), run="2" * 32, earlier=(stale,)), later=True)
    assert (peers.entry("b"), peers.lost()) == (member, lost)
    assert bool(lost) == (silent_s > 0)


def test_who_asks_who_this_is_makes_nobody_compare(
    peers: Peers, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """A leader of a thousand is asked so all the time."""
    peers.set(told(host("me"), *map(host, ("a", "b"))))
    recorded = Recorded()
    parts: list[Any] = [peers, recorded, recorded]
    watch = PeerWatch("run", *parts, tuple, clock=clock, rng=Random(1))
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(peers, "ask", lambda host_id, _: host(host_id))
    peers.met(peers.run, "a")
    peers.met(peers.run, "b")
    watch.start()
    for _ in range(10):
        watch.begin()
        recorded.calls.clear()
        watch.step()
        for call in recorded.calls:
            call()
    assert len(recorded.compared) == 1


@pytest.mark.parametrize("count", [64, 1000])
def test_who_has_not_met_the_leader_asks_it_soon(
    peers: Peers, clock: Clock, monkeypatch: pytest.MonkeyPatch, count: int
):
    """Slots of an ended job wait for that; by chance it took a host of 256 twenty minutes."""
    peers.set(told(host("me"), *[host(f"h{n:04}") for n in range(count)], leader="h0050"))
    leader = peers.leader
    recorded = Recorded()
    parts: list[Any] = [peers, recorded, recorded]
    watch = PeerWatch("run", *parts, tuple, clock=clock, rng=Random(3))
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(peers, "ask", lambda host_id, _: host(host_id))
    monkeypatch.setattr(recorded, "sync_with", lambda host_id: peers.met(peers.run, host_id))
    peers.met(peers.run, "h0007")  # somebody was compared with: no more are sampled at once
    watch.start()
    rounds = 0
    while leader in peers.unmet():
        rounds += 1
        assert rounds < 20, "intervals"
        clock.now_s += 2 * broadcast.INTERVAL_S
        recorded.calls.clear()
        watch.step()
        for call in recorded.calls:
            call()


def test_hosts_that_are_gone_for_good_do_not_hold_all_threads(
    peers: Peers, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    peers.set(told(host("me"), earlier=tuple(host(f"old{number}") for number in range(200))))
    recorded = Recorded()
    parts: list[Any] = [peers, recorded, recorded]
    watch = PeerWatch("run", *parts, tuple, clock=clock, rng=Random(1))
    watch.step()
    watch.step()
    assert len(recorded.calls) == STRANGERS_AT_ONCE, "none has ended"
    asked: list[str] = []
    monkeypatch.setattr(peers, "ask", lambda host_id, _: asked.append(host_id) or host(host_id))
    while len(asked) < 200:
        calls, recorded.calls = recorded.calls, []
        assert 0 < len(calls) <= STRANGERS_AT_ONCE
        for call in calls:
            call()
        watch.step()
    assert len(set(asked)) == 200


def test_hosts_of_earlier_jobs_are_forgotten_in_the_end(peers: Peers, monkeypatch):
    monkeypatch.setattr("tieredckpt.agent.cluster.members.EARLIER_MAX", 2)
    peers.set(told(host("me"), *map(host, "abc")))
    peers.set(told(host("me"), host("b"), host("d")))
    assert peers.strangers() == ("a", "c")
    peers.set(told(host("me"), host("e")))
    assert peers.strangers() == ("b", "d"), "who was in the job until now"
    assert peers.members() == ("e", "me")


def test_it_outlives_the_agent(peers: Peers, tmp_path: Path, clock: Clock):
    peers.set(told(host("me"), host("a"), leader="a", replicas=1, seeds=("10.0.0.1:1",)))
    peers.learn([host("b")])
    peers.note_changes()
    again = make(tmp_path, clock, Hooks())
    assert again.active
    assert (again.members(), again.strangers()) == (("a", "me"), ("b",))
    assert (again.leader, again.replicas) == ("a", 1)
    assert (again.seeds.addresses, again.seeds.dns) == (("10.0.0.1:1",), "")
    (tmp_path / "peers" / "run.hosts").write_bytes(b"{")
    assert not make(tmp_path, clock, Hooks()).active


class Recorded:
    """What the watch needs of the exchange and of anti-entropy: notes what would have been done."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.compared: list[str] = []

    def soon(self, call: Callable[[], None]) -> bool:
        self.calls.append(call)
        return True

    def sync_with(self, host_id: str) -> None:
        self.compared.append(host_id)


def test_who_is_reached_elsewhere_tells_all_members(
    peers: Peers, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """Also those that it does not work with, a few at a time, and each of them once."""
    names = [f"h{number:02d}" for number in range(3 * FEW)]
    peers.set(told(host("me"), *map(host, names), leader="h00"))
    asked: list[str] = []

    def ask(host_id: str, request: Identify) -> m.HostEntry:
        asked.append(host_id)
        return host(host_id)

    recorded = Recorded()
    parts: list[Any] = [peers, recorded, recorded]
    watch = PeerWatch("run", *parts, tuple, clock=clock, rng=Random(1))
    monkeypatch.setattr(peers, "ask", ask)
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)  # its turns are taken here
    assert watch.partners() == ["h00"]
    watch.start()
    watch.start(moved=True)
    most = 0
    for _ in range(5):
        recorded.calls.clear()
        watch.step()
        before = len(asked)
        for call in recorded.calls:
            call()
        most = max(most, len(asked) - before)
    assert sorted(asked) == names
    assert most <= FEW + 1, "and the leader"


def test_a_silent_member_is_lost_and_found(peers: Peers, clock: Clock, hooks: Hooks):
    heard: list[str] = []
    hooks.on_lost.append(lambda name: heard.append(f"lost {name}"))
    hooks.on_found.append(lambda name: heard.append(f"found {name}"))
    peers.set(told(host("me"), host("a"), host("b")))
    peers.heard("a")
    peers.failed("a", "no answer")
    clock.now_s += LOST_AFTER_S - 1
    peers.failed("a", "no answer")
    assert peers.lost() == frozenset()
    clock.now_s += 1
    peers.failed("a", "no answer")
    peers.failed("a", "no answer")
    assert peers.lost() == {"a"}
    assert peers.nearest_first(["a", "b", "me"]) == (["b"], ["a"])
    peers.heard("a")
    assert peers.lost() == frozenset()
    assert heard == ["found a", "lost a", "found a"]
    peers.learn([host("x")])
    peers.failed("x", "no answer")
    clock.now_s += LOST_AFTER_S
    peers.failed("x", "no answer")  # a stranger cannot be lost
    assert heard[-1] == "found a"


def test_a_slow_rail_is_left_out_and_measured_again(peers: Peers, clock: Clock):
    entry = host("a", rails=3)
    peers.set(told(host("me"), entry))
    assert peers.needs_probe(["a"]) == []  # it has not answered yet
    peers.heard("a")
    assert peers.needs_probe(["a"]) == ["a"]
    first, second, third = entry.addresses
    peers.probed("a", entry, 0.001, {first: 1e9, second: 1e9 / 40, third: 3e9})
    with peers.client("a") as client:
        assert client.host.addresses == (third, first)
    state = peers.states()[0]
    assert (state.address, state.bytes_per_s, state.rtt_s) == (third, 3e9, 0.001)
    assert peers.needs_probe(["a"]) == []
    clock.now_s += PROBE_AGAIN_S + 1
    assert peers.needs_probe(["a"]) == ["a"]
    peers.probed("a", entry, 0.001, dict.fromkeys(entry.addresses, 1e9))
    assert set(peers.client("a").host.addresses) == set(entry.addresses)
    clock.now_s += PROBE_AGAIN_S + 1
    assert peers.needs_probe(["a"]) == []
    peers.probed("a", host("a"), 0.001, {first: 1.0})  # of an entry that is no more
    assert set(peers.client("a").host.addresses) == set(entry.addresses)


def test_a_rail_that_fails_is_measured_again_at_once(peers: Peers):
    entry = host("a", rails=2)
    first, second = entry.addresses
    peers.set(told(host("me"), entry))
    peers.heard("a")
    peers.probed("a", entry, 0.001, dict.fromkeys(entry.addresses, 1e9))
    client = peers.client("a")
    assert peers.needs_probe(["a"]) == []
    client.doubts = True
    assert peers.needs_probe(["a"]) == ["a"]
    peers.probed("a", entry, 0.001, dict.fromkeys(entry.addresses, 1e9))  # it is well again
    assert peers.client("a") is client
    assert peers.needs_probe(["a"]) == []
    client.doubts = True
    peers.probed("a", entry, 0.001, {second: 1e9})
    assert peers.client("a").host.addresses == (second,)
    assert peers.needs_probe(["a"]) == []
    peers.probed("a", entry, 0.001, {first: 1e9, second: 1e9})
    assert set(peers.client("a").host.addresses) == {first, second}


def test_nobody_is_asked_without_a_secret(peers: Peers):
    peers.learn([host("a")])
    with pytest.raises(NotFoundError, match="no host b"):
        peers.client("b")
    peers._listeners.own = None  # type: ignore[attr-defined]
    with pytest.raises(NotFoundError, match="no token"):
        peers.client("a")
    assert peers.table().token == ""
