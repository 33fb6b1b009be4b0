"""The client of another host's agent, against the real server on loopback."""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import closing

import msgspec
import pytest

from tests.support.peer_server import HERE, NAMESPACE, SEGMENT, TOKEN, serving
from tieredckpt.errors import (
    AgentError,
    IntegrityError,
    NotFoundError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.rpc import http1
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages import peer as pm
from tieredckpt.rpc.peer_client import PeerClient

SECRET = Secret(TOKEN)


def read(client: PeerClient, start: int, stop: int, tier: str = "memory") -> bytes:
    data = bytearray(stop - start)
    with closing(client.open_range(SEGMENT, tier, start, stop)) as stream:
        stream.read_into(memoryview(data))
    return bytes(data)


def test_every_request_reaches_the_api():
    with serving() as (peer, entry, _), PeerClient(entry, NAMESPACE, SECRET) as client:
        assert client.identify(HERE) == HERE
        assert client.ask(pm.AskHoldings(manifests=("ab" * 16,))) == b"holdings of run-7"
        with pytest.raises(NotFoundError, match="no such plan"):
            client.ask(pm.AskPlan(plan_id="cd" * 16, tier="nvme"))
        pushed = client.ask(pm.Push(manifests=(b"one",), forward=("h1",)))
        assert pushed.need_plans == ("ab" * 16,)
        sync = pm.Sync(manifests=("ef" * 16,), records=(), attempts=())
        assert client.ask(sync).wanted_manifests == ("ef" * 16,)
        attempt = m.OpenAttempt(session_id="1", attempt_id="2", run="3", cause="load", bases=())
        assert client.ask(pm.ForwardAttempt(request=attempt)) == b"an attempt"
        client.report_damage("memory", SEGMENT, [1, 2], "bad")
        damage = pm.BadBlocks(tier="memory", segment_id=SEGMENT, blocks=(1, 2), reason="bad")
        assert peer.calls == [
            ("identify", NAMESPACE, pm.Identify(caller=HERE)),
            ("holdings", NAMESPACE, pm.AskHoldings(manifests=("ab" * 16,))),
            ("plan", NAMESPACE, pm.AskPlan(plan_id="cd" * 16, tier="nvme")),
            ("push", NAMESPACE, pm.Push(manifests=(b"one",), forward=("h1",))),
            ("sync", NAMESPACE, sync),
            ("attempt", NAMESPACE, pm.ForwardAttempt(request=attempt)),
            ("damage", NAMESPACE, damage),
        ]
        rtt_s, bytes_per_s = client.probe(1 << 20)
        assert 0 < rtt_s < 10
        assert bytes_per_s > 0


@pytest.mark.parametrize("ahead_s", [0.0, 30.0, -4000.0])
def test_the_clock_of_a_host(ahead_s: float):
    with serving() as (_, entry, _), PeerClient(entry, NAMESPACE, SECRET) as client:
        least_s, most_s = client.clock(lambda: time.time() - ahead_s)
        assert least_s <= ahead_s <= most_s
        assert 1 <= most_s - least_s < 60


def test_a_host_that_sends_no_clock(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http1, "_DATE", re.compile(rb"\r\nDated: (.*)"))
    with serving() as (_, entry, _), PeerClient(entry, NAMESPACE, SECRET) as client:
        with pytest.raises(TierUnavailableError, match="not understood: Invalid date"):
            client.clock()
        assert client.identify(HERE) == HERE


@pytest.mark.parametrize("tier", ["memory", "nvme"])
def test_ranges_of_a_segment(tier: str):
    data = os.urandom((5 << 20) + 4096)
    with serving() as (peer, entry, server), PeerClient(entry, NAMESPACE, SECRET) as client:
        peer.add(SEGMENT, data, tier)
        size = len(data)
        for start, stop in [(0, size), (0, 1), (size - 1, size), (12345, 4 << 20), (4096, 8192)]:
            assert read(client, start, stop, tier) == data[start:stop]
        assert client.identify(HERE) == HERE  # the connection serves other requests again
        assert len(server.admission) == 1
        assert peer.open_segments == 0


def test_a_stream_is_read_in_pieces_of_any_size():
    data = os.urandom(300_000)
    with serving() as (peer, entry, _), PeerClient(entry, NAMESPACE, SECRET) as client:
        peer.add(SEGMENT, data)
        got = bytearray(len(data))
        with closing(client.open_range(SEGMENT, "memory", 0, len(data))) as stream:
            for start, stop in [(0, 1), (1, 1), (1, 3000), (3000, 299_999), (299_999, 300_000)]:
                stream.read_into(memoryview(got)[start:stop])
            with pytest.raises(UsageError):
                stream.read_into(memoryview(bytearray(1)))
        assert got == data


def test_many_threads_share_one_client():
    data = os.urandom(1 << 20)
    failures: list[BaseException] = []
    with serving() as (peer, entry, server), PeerClient(entry, NAMESPACE, SECRET) as client:
        peer.add(SEGMENT, data)

        def work(number: int) -> None:
            try:
                for turn in range(20):
                    start = (number * 7919 + turn * 104_729) % (len(data) - 70_000)
                    assert read(client, start, start + 70_000) == data[start : start + 70_000]
                    assert client.identify(HERE) == HERE
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(120)
        assert not failures
        assert len(server.admission) <= 12


def test_a_range_that_the_copy_does_not_have():
    with serving() as (peer, entry, _), PeerClient(entry, NAMESPACE, SECRET) as client:
        peer.add(SEGMENT, bytes(1000))
        for start, stop in [(0, 1001), (1000, 1001), (5000, 6000), (0, 10**17)]:
            with pytest.raises(IntegrityError, match="1000 bytes only"):
                client.open_range(SEGMENT, "memory", start, stop)
        with pytest.raises(NotFoundError):
            client.open_range("00" * 16, "memory", 0, 1)
        with pytest.raises(NotFoundError):
            client.open_range(SEGMENT, "nvme", 0, 1)
        for start, stop in [(5, 5), (6, 5), (-1, 4)]:
            with pytest.raises(UsageError):
                client.open_range(SEGMENT, "memory", start, stop)


@pytest.mark.parametrize("tier", ["memory", "nvme"])
def test_a_segment_that_is_truncated_while_it_is_sent(tier: str):
    with serving() as (peer, entry, _), PeerClient(entry, NAMESPACE, SECRET) as client:
        peer.add(SEGMENT, bytes(64 << 20), tier)
        with closing(client.open_range(SEGMENT, tier, 0, 64 << 20)) as stream:
            os.truncate(peer.folder / f"{tier}-{SEGMENT}", 4096)
            with pytest.raises(TierUnavailableError, match="are missing"):
                stream.read_into(memoryview(bytearray(64 << 20)))


def test_a_stream_that_is_given_up_ends_the_lease():
    with serving() as (peer, entry, _), PeerClient(entry, NAMESPACE, SECRET) as client:
        peer.add(SEGMENT, bytes(64 << 20))
        stream = client.open_range(SEGMENT, "memory", 0, 64 << 20)
        assert peer.open_segments == 1
        stream.close()
        until_s = time.monotonic() + 60
        while peer.open_segments:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert client.identify(HERE) == HERE


def test_a_wrong_token_and_a_wrong_namespace_are_refused_alike():
    with serving() as (peer, entry, _):
        messages = []
        for namespace, token in [
            (NAMESPACE, TOKEN + "!"),
            ("another", TOKEN),
            (NAMESPACE, "x" * 30),
        ]:
            with PeerClient(entry, namespace, Secret(token)) as client:
                for call in (client.identify, lambda c=client: c.open_range(SEGMENT, "a", 0, 1)):
                    with pytest.raises(AgentError) as caught:
                        call()
                    assert type(caught.value) is AgentError
                    messages.append(str(caught.value))
                    assert token not in str(caught.value)
        assert len(set(messages)) == 1
        assert not peer.calls


def test_a_kept_connection_that_the_server_closed():
    with serving() as (_, entry, server), PeerClient(entry, NAMESPACE, SECRET) as client:
        for _ in range(5):
            assert client.identify(HERE) == HERE
            server.admission.cut_all()


def test_the_next_address_is_asked_if_one_does_not_answer():
    with serving(addresses=("127.0.0.2", "127.0.0.3")) as (peer, entry, _):
        peer.add(SEGMENT, b"x" * 5000)
        host = m.HostEntry(
            host_id="here", incarnation="1" * 32, addresses=("127.0.0.4:1", *entry.addresses)
        )
        with PeerClient(host, NAMESPACE, SECRET) as client:
            assert client.identify(HERE) == HERE
            assert read(client, 0, 5000) == b"x" * 5000
        with (
            PeerClient(host, NAMESPACE, SECRET, address="127.0.0.4:1") as client,
            pytest.raises(TierUnavailableError, match="refused"),
        ):
            client.identify()


@pytest.mark.parametrize(
    ("name", "incarnation"),
    [("there", "1" * 32), ("here", "2" * 32), ("h\u00f6st 7 / \u2615", "1" * 32)],
)
def test_who_is_not_meant_is_not_believed(name: str, incarnation: str):
    """It knows the token, and answers at the address of another host, or of before a reboot."""
    with serving() as (peer, entry, _):
        peer.add(SEGMENT, b"x" * 100)
        asked = msgspec.structs.replace(entry, host_id=name, incarnation=incarnation)
        with PeerClient(asked, NAMESPACE, SECRET) as client:
            for call in (
                lambda: client.ask(pm.AskHoldings(manifests=())),
                lambda: read(client, 0, 100),
            ):
                with pytest.raises(TierUnavailableError) as caught:
                    call()
                assert f"host {name} (incarnation {incarnation}) was asked" in str(caught.value)
                assert f"host here (incarnation {'1' * 32}) answered" in str(caught.value)
            if name == "here":
                assert client.identify(HERE) == HERE  # how it is learnt what it is now
            else:
                with pytest.raises(TierUnavailableError, match="was asked at"):
                    client.identify()
        assert [call for call in peer.calls if call[0] != "identify"] == []
        assert peer.opened == 0
        # Who is there is what is asked at an address of which nothing else is known.
        nobody = msgspec.structs.replace(entry, host_id="", incarnation="0" * 32)
        with PeerClient(nobody, NAMESPACE, SECRET) as client:
            assert client.identify(HERE) == HERE


@pytest.mark.parametrize("name", ["h\u00f6st 7 / \u2615", "a%20b", "\u2615" * 255])
def test_hosts_of_any_name(name: str):
    with serving() as (peer, entry, _):
        peer.add(SEGMENT, b"x" * 100)
        peer.entry = named = msgspec.structs.replace(entry, host_id=name)
        with PeerClient(named, NAMESPACE, SECRET) as client:
            assert read(client, 0, 100) == b"x" * 100
            assert client.identify(HERE) == HERE


def test_a_rail_that_leads_to_another_host_is_passed_over():
    with serving(addresses=("127.0.0.2",)) as (right, entry, _), serving() as (wrong, other, _):
        wrong.entry = msgspec.structs.replace(other, host_id="there")
        both = msgspec.structs.replace(entry, addresses=(*other.addresses, *entry.addresses))
        with PeerClient(both, NAMESPACE, SECRET) as client:
            assert client.ask(pm.AskHoldings(manifests=())) == b"holdings of run-7"
            assert client.doubts
        assert len(right.calls) == 1
        assert not wrong.calls


def test_connections_to_an_address_that_failed_are_not_kept():
    """On a link that was cut each of them would stall for as long as the first one."""
    with serving(addresses=("127.0.0.2", "127.0.0.3")) as (peer, entry, _):
        # More than both sockets' buffers hold: what came before the cut can still be read.
        large = 64 << 20
        peer.add(SEGMENT, bytes(large))
        with PeerClient(entry, NAMESPACE, SECRET) as client:
            streams = [client.open_range(SEGMENT, "memory", 0, 5000) for _ in range(4)]
            for stream in streams:
                stream.read_into(memoryview(bytearray(5000)))
            assert not client.doubts
            # (By turns, unless one address was slow to answer.)
            assert sum(len(kept) for kept in client._idle.values()) == 4
            with closing(client.open_range(SEGMENT, "memory", 0, large)) as broken:
                failed = broken._connection.address  # type: ignore[union-attr]
                broken.abort()
                with pytest.raises(TierUnavailableError):
                    broken.read_into(memoryview(bytearray(large)))
            assert client.doubts
            assert failed not in client._idle
            for _ in range(4):
                stream = client.open_range(SEGMENT, "memory", 0, 5000)
                assert stream._connection.address != failed  # type: ignore[union-attr]
                stream.read_into(memoryview(bytearray(5000)))


def test_a_client_is_invalid_after_fork():
    with serving() as (_, entry, _), PeerClient(entry, NAMESPACE, SECRET) as client:
        assert client.identify(HERE) == HERE
        pid = os.fork()
        if pid == 0:
            try:
                client.identify()
            except UsageError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert client.identify(HERE) == HERE


def test_a_forked_child_does_not_keep_the_parents_stream_open():
    with serving() as (peer, entry, _), PeerClient(entry, NAMESPACE, SECRET) as client:
        peer.add(SEGMENT, bytes(64 << 20))
        stream = client.open_range(SEGMENT, "memory", 0, 64 << 20)
        wait_r, wait_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(wait_w)
            os.read(wait_r, 1)
            os._exit(0)
        stream.close()
        until_s = time.monotonic() + 20
        while peer.open_segments:  # the server learns of it although the child lives
            assert time.monotonic() < until_s
            time.sleep(0.01)
        os.close(wait_r)
        os.close(wait_w)
        os.waitpid(pid, 0)


def test_bulk_data_takes_all_rails_in_turn():
    with serving(addresses=("127.0.0.2", "127.0.0.3")) as (peer, entry, _):
        peer.add(SEGMENT, bytes(4096))
        with PeerClient(entry, NAMESPACE, SECRET) as client:
            for _ in range(4):
                assert read(client, 0, 4096) == bytes(4096)
            assert sorted(client._idle) == sorted(entry.addresses)
            for _ in range(4):
                client.identify()
            assert all(len(those) == 1 for those in client._idle.values())


def test_a_host_without_an_address():
    nowhere = m.HostEntry(host_id="h", incarnation="1" * 32, addresses=())
    with (
        PeerClient(nowhere, NAMESPACE, SECRET) as client,
        pytest.raises(TierUnavailableError, match="no address"),
    ):
        client.identify()


@pytest.mark.parametrize("bad", ["a b", "ä", "x\r\nHost: y", ""])
def test_names_that_cannot_exist(bad: str):
    with serving() as (peer, entry, _):
        with (
            PeerClient(entry, bad, SECRET) as client,
            pytest.raises((UsageError, AgentError)),
        ):
            client.identify()
        assert not peer.calls


def test_the_token_is_never_shown():
    assert TOKEN not in repr(SECRET)
    assert TOKEN not in repr(PeerClient(HERE, NAMESPACE, SECRET))
