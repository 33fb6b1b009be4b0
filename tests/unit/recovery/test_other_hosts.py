"""Asking other hosts what they hold: real servers on loopback, some of them broken."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest

from benchmarks.hosts import encoded_holdings
from tests.support.peer_server import NAMESPACE, TOKEN, Peer, serving
from tieredckpt.errors import TierUnavailableError
from tieredckpt.recovery import other_hosts
from tieredckpt.recovery.evidence import SourceRef
from tieredckpt.recovery.other_hosts import AllHoldings, OtherHosts, read_plan
from tieredckpt.recovery.plan import plan_recovery
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages import peer as pm
from tieredckpt.storage.holdings import (
    Holdings,
    TierFacts,
    decode_holdings,
    encode_holdings,
    manifest_digest,
    slimmed,
)
from tieredckpt.storage.object.errors import Refusal, error_of

HOSTS = 6


@dataclass
class Job:
    """Hosts of one namespace; the first is this one, whose agent is stood in for by this object."""

    held: dict[str, Holdings]
    peers_of: dict[str, Peer] = field(default_factory=dict)
    states: dict[str, m.PeerState] = field(default_factory=dict)
    namespace: str = NAMESPACE
    tables: int = 0
    unmet: dict[str, str] = field(default_factory=dict)
    made: list[OtherHosts] = field(default_factory=list)

    @property
    def here(self) -> str:
        return next(iter(self.held))

    @property
    def own(self) -> Holdings:
        return self.held[self.here]

    def holdings(self, *, within_s: float | None, tiers: bool) -> bytes:
        return encode_holdings(self.own)

    def peers(self) -> m.PeerTable:
        self.tables += 1
        return m.PeerTable(
            host=None, leader=self.here, replicas=1, token=TOKEN, tls=None,
            peers=tuple(self.states.values()), unmet=self.unmet,
        )  # fmt: skip

    def lines(self) -> OtherHosts:
        self.made.append(OtherHosts(self, None))  # type: ignore[arg-type]
        return self.made[-1]


def whole(data: list[bytes]) -> list[Holdings]:
    """The holdings of all hosts in the tests' namespace, each with all manifests in full."""
    decoded = [decode_holdings(each) for each in data]
    manifests = decoded[0].tiers[0].manifests
    facts = []
    for fact in manifests:
        assert fact.manifest is not None
        facts.append(msgspec.structs.replace(fact, digest=None))
    return [
        msgspec.structs.replace(
            each, tiers=(msgspec.structs.replace(each.tiers[0], manifests=tuple(facts)),)
        )
        for each in decoded
    ]


def answer(peer: Peer, holdings: Holdings, asked: list[tuple[str, ...]]) -> None:
    """Have a server tell ``holdings``, as an agent does."""

    def peer_ask_holdings(namespace: str, request: pm.AskHoldings) -> bytes:
        asked.append(request.manifests)
        return encode_holdings(slimmed(holdings, request.manifests))

    peer.peer_ask_holdings = peer_ask_holdings  # type: ignore[method-assign]


@dataclass
class Running:
    job: Job
    asked: dict[str, list[tuple[str, ...]]]


@pytest.fixture
def running() -> Iterator[Running]:
    job = Job({h.host_id: h for h in whole(encoded_holdings(HOSTS, 2, 3, NAMESPACE))})
    asked: dict[str, list[tuple[str, ...]]] = {}
    with contextlib.ExitStack() as stack:
        for name, holdings in list(job.held.items())[1:]:
            peer, entry, _ = stack.enter_context(serving())
            asked[name] = []
            answer(peer, holdings, asked[name])
            peer.entry = entry = msgspec.structs.replace(entry, host_id=name)
            job.peers_of[name] = peer
            job.states[name] = m.PeerState(host=entry, member=True, reachable=None)
        yield Running(job, asked)
        for lines in job.made:
            lines.close()


def digests(holdings: Holdings) -> set[str]:
    return {manifest_digest(f.manifest) for f in holdings.tiers[0].manifests if f.manifest}


def test_all_hosts_are_asked_and_manifests_come_once(running: Running):
    job = running.job
    found = job.lines().ask_all(job.own)
    assert [each.host_id for each in found.holdings] == list(job.held)
    assert found.unreachable == {}
    known = digests(job.own)
    for asked in running.asked.values():
        assert [set(each) for each in asked] == [known]
    assert all(f.manifest is None for h in found.holdings[1:] for f in h.tiers[0].manifests)
    plan = plan_recovery(found.holdings, unreachable=found.unreachable)
    assert [c.manifest.step for c in plan.candidates] == [2, 1, 0]
    assert plan.incomplete == ()


def test_a_host_that_knows_nothing_gets_them_from_few(running: Running):
    job = running.job
    empty = msgspec.structs.replace(
        job.own, tiers=(msgspec.structs.replace(job.own.tiers[0], manifests=(), segments=()),)
    )
    found = job.lines().ask_all(empty)
    full = [h for h in found.holdings[1:] if any(f.manifest for f in h.tiers[0].manifests)]
    assert 1 <= len(full) <= other_hosts.FIRST_ASKED
    assert plan_recovery(found.holdings, unreachable=found.unreachable).chosen is not None


def test_hosts_that_do_not_answer_are_silent_and_asked_again(running: Running):
    job = running.job
    away, lying, odd = list(job.held)[1:4]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{closed.getsockname()[1]}"
    state = job.states[away]
    dead = msgspec.structs.replace(state.host, addresses=(nowhere,))
    job.states[away] = msgspec.structs.replace(state, host=dead)
    answer(job.peers_of[lying], job.held[odd], running.asked[lying])
    odd_peer = job.peers_of[odd]
    odd_peer.peer_ask_holdings = lambda *_: b"\x93rubbish"  # type: ignore[method-assign]
    lines = job.lines()
    found = lines.ask_all(job.own)
    assert found.unreachable is not None
    assert found.unreachable.keys() == {away, lying, odd}
    assert "does not answer" in found.unreachable[away]
    assert "it reports that it is" in found.unreachable[lying]
    assert "malformed" in found.unreachable[odd]
    assert len(found.holdings) == HOSTS - 3
    assert lines.unreachable() == tuple(sorted((away, lying, odd)))
    before = {name: len(asked) for name, asked in running.asked.items()}
    # They are back: only these are asked again, and the others' answers are kept.
    job.states[away] = state
    for name in (lying, odd):
        answer(job.peers_of[name], job.held[name], running.asked[name])
    again = lines.ask_all(job.own, found)
    assert again.unreachable == {}
    assert lines.unreachable() == ()
    assert len(again.holdings) == HOSTS
    for name in list(job.held)[4:]:
        assert len(running.asked[name]) == before[name]


def test_configured_addresses_that_have_not_answered_are_silent(running: Running):
    """Who is there may be the only one to hold a checkpoint: nothing is certain without it."""
    job = running.job
    job.unmet = {"10.0.0.9:7411": "no route to host"}
    lines = job.lines()
    found = lines.ask_all(job.own)
    assert found.unreachable == job.unmet
    plan = plan_recovery(found.holdings, unreachable=found.unreachable)
    assert plan.incomplete == ("host 10.0.0.9:7411: no route to host",)
    assert not found.should_wait([plan])  # the newest one can be restored without it
    nothing = plan_recovery([], unreachable=found.unreachable)
    assert found.should_wait([nothing])
    job.unmet = {}
    assert lines.ask_all(job.own, found).unreachable == {}


def test_one_failed_request_is_repeated(running: Running):
    job = running.job
    name = list(job.held)[2]
    calls = []

    def peer_ask_holdings(_namespace: str, request: pm.AskHoldings) -> bytes:
        calls.append(request)
        if len(calls) == 1:
            raise TierUnavailableError("just now it is busy")
        return encode_holdings(job.held[name])

    job.peers_of[name].peer_ask_holdings = peer_ask_holdings  # type: ignore[method-assign]
    assert job.lines().ask_all(job.own).unreachable == {}
    assert len(calls) == 2


def test_a_wrong_token_is_no_reason_to_ask_again(running: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "tests.unit.recovery.test_other_hosts.TOKEN", "another token, of no worth either"
    )
    found = running.job.lines().ask_all(running.job.own)
    assert found.unreachable is not None
    assert len(found.unreachable) == HOSTS - 1
    assert all("secret" in why or "token" in why for why in found.unreachable.values())
    assert not any(running.asked.values())


# --- what is settled for --------------------------------------------------------------------------


def plan_of(found: AllHoldings) -> list[object]:
    return [plan_recovery(found.holdings, unreachable=found.unreachable)]


def test_a_lost_host_is_not_waited_for_if_nothing_newer_is_missed(running: Running):
    own, *rest = running.job.held.values()
    lost_one = AllHoldings((own, *rest[:2], *rest[3:]), {rest[2].host_id: "lost"})
    (plan,) = plan_of(lost_one)
    assert plan.incomplete
    assert not lost_one.should_wait([plan])
    lost_two = AllHoldings(
        (own, *rest[:2], *rest[4:]), {each.host_id: "lost" for each in rest[2:4]}
    )
    assert lost_two.should_wait(plan_of(lost_two))
    answered = AllHoldings(tuple(running.job.held.values()), {})
    assert not answered.should_wait(plan_of(answered))


def test_an_own_tier_that_does_not_answer_is_waited_for(running: Running):
    own = running.job.own
    away = msgspec.structs.replace(
        own.tiers[0], tier="nvme", kind="file", available=False, error="away", manifests=(),
        segments=(), plans=(),
    )  # fmt: skip
    found = AllHoldings((msgspec.structs.replace(own, tiers=(*own.tiers, away)),))
    assert found.should_wait(plan_of(found))


def test_a_slow_host_is_waited_for_before_an_older_step(
    running: Running, monkeypatch: pytest.MonkeyPatch
):
    """Two neighbours are away, so the plan would have nothing; one comes back."""
    monkeypatch.setattr(other_hosts, "POLL_S", 0.01)
    job = running.job
    names = list(job.held)[2:4]
    tries = 0

    def busy(_namespace: str, _request: pm.AskHoldings) -> bytes:
        raise TierUnavailableError("booting")

    def booting(_namespace: str, _request: pm.AskHoldings) -> bytes:
        nonlocal tries
        tries += 1
        if tries < 7:
            raise TierUnavailableError("booting")
        return encode_holdings(job.held[names[1]])

    job.peers_of[names[0]].peer_ask_holdings = busy  # type: ignore[method-assign]
    job.peers_of[names[1]].peer_ask_holdings = booting  # type: ignore[method-assign]
    lines = job.lines()
    at_once = read_plan(job, lines, "default")  # type: ignore[arg-type]
    assert at_once.chosen is None
    tries = 0
    patient = read_plan(job, lines, "default", wait_s=60)  # type: ignore[arg-type]
    assert patient.chosen is not None
    assert patient.chosen.manifest.step == 2
    assert patient.incomplete == (f"host {names[0]}: {patient.incomplete[0].split(': ', 1)[1]}",)


def test_a_tier_of_another_host_that_comes_back_is_seen(
    running: Running, monkeypatch: pytest.MonkeyPatch
):
    """Its agent answers all the time; what was on its disk is needed."""
    monkeypatch.setattr(other_hosts, "POLL_S", 0.01)
    job = running.job
    away, other = list(job.held)[2:4]
    tier = msgspec.structs.replace(job.held[away].tiers[0], tier="nvme", kind="file")
    gone = msgspec.structs.replace(
        tier, available=False, error="not mounted", manifests=(), plans=(), segments=()
    )
    found = msgspec.structs.replace(job.held[away], tiers=(gone,))
    answers = [found] * 5 + [msgspec.structs.replace(found, tiers=(tier,))]

    def booting(_namespace: str, request: pm.AskHoldings) -> bytes:
        now = answers.pop(0) if len(answers) > 1 else answers[0]
        return encode_holdings(slimmed(now, request.manifests))

    def lost(_namespace: str, _request: pm.AskHoldings) -> bytes:
        raise TierUnavailableError("lost")

    job.peers_of[away].peer_ask_holdings = booting  # type: ignore[method-assign]
    job.peers_of[other].peer_ask_holdings = lost  # type: ignore[method-assign]
    plan = read_plan(job, job.lines(), "default", wait_s=60)  # type: ignore[arg-type]
    assert plan.chosen is not None
    assert plan.chosen.manifest.step == 2
    assert len(answers) == 1


# --- bytes ----------------------------------------------------------------------------------------


def source(host: str) -> SourceRef:
    return SourceRef(
        host=host, tier="memory", segment_id="5e" * 16, size=4096, intact=True, kind="memory"
    )


def test_a_host_is_found_when_the_agent_learns_of_it(running: Running):
    job = running.job
    lines = job.lines()
    name, state = next(iter(job.states.items()))
    job.states.clear()
    with pytest.raises(TierUnavailableError, match="is not known"):
        lines.client(name)
    job.states[name] = state
    job.peers_of[name].add("5e" * 16, bytes(8192))
    into = bytearray(100)
    stream = lines.client(name).open_range("5e" * 16, "memory", 50, 150)
    stream.read_into(memoryview(into))
    stream.close()
    asked = job.tables
    assert lines.client(name) is lines.client(name)
    assert job.tables == asked


def test_a_host_that_did_not_answer_is_asked_last(running: Running):
    job = running.job
    lines = job.lines()
    one, two, *_ = job.states
    far = [source(one), source(two)]
    first = lines.in_order(far, "me")[0].host
    other = two if first == one else one
    dead = msgspec.structs.replace(job.states[first].host, addresses=("127.0.0.1:9",))
    job.states[first] = msgspec.structs.replace(job.states[first], host=dead)
    with pytest.raises(TierUnavailableError):
        lines.client(first).open_range("5e" * 16, "memory", 0, 10)
    ordered = lines.in_order(far, "me")
    assert [each.host for each in ordered] == [other, first]
    assert not ordered[1].intact


def test_many_threads_share_the_lines(running: Running):
    lines = running.job.lines()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            assert len(lines.ask_all(running.job.own).holdings) == HOSTS
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not failures


@pytest.mark.parametrize("away", ["own", "other"])
def test_a_tier_that_is_away_on_any_host_may_hold_what_could_not_be_read(away: str):
    def host(name: str) -> Holdings:
        disk = TierFacts(tier="disk", scope="host", kind="file", available=name != away, error=None)
        return Holdings(host_id=name, namespace=NAMESPACE, attempts=(), tiers=(disk,))

    held = AllHoldings((host("own"), host("other")), {})
    assert held.is_away
    assert held.should_wait([]) == (away == "own")  # an older one is settled for without the other
    assert not AllHoldings((host("mine"),), {}).is_away


@pytest.mark.parametrize(
    ("status", "code", "waits"), [(404, "NoSuchBucket", False), (403, "AccessDenied", True)]
)
def test_a_bucket_that_does_not_exist_is_not_waited_for(status: int, code: str, waits: bool):
    error = error_of(Refusal(status, code, ""), tier="s3", doing="look into s3://b")
    away = TierFacts(tier="s3", scope="shared", kind="object", available=False, error=str(error))
    disk = TierFacts(tier="disk", scope="host", kind="file", available=True, error=None)
    own = Holdings(host_id="own", namespace=NAMESPACE, attempts=(), tiers=(disk, away))
    plan = plan_recovery((own,))
    assert plan.incomplete
    assert AllHoldings((own,)).should_wait([plan]) == waits
    disk = msgspec.structs.replace(disk, available=False, error="it hangs")
    both = msgspec.structs.replace(own, tiers=(disk, away))
    assert AllHoldings((both,)).should_wait([])
