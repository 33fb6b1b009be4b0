"""What strangers, and callers who lie, can do to the server of other hosts: be refused or cut."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.peer_server import HERE, NAMESPACE, SEGMENT, TOKEN, Peer, serving
from tieredckpt.errors import AgentError, TierUnavailableError
from tieredckpt.rpc import bulk, peer_server
from tieredckpt.rpc.auth import REFUSED, Secret, body_digest, sign
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages import peer as pm
from tieredckpt.rpc.peer_client import PeerClient
from tieredckpt.rpc.peer_server import Limits, PeerServer

HOST_TARGET = f"/p1/ns/{NAMESPACE}/identify"
BODY = msgspec.msgpack.encode(pm.Identify(caller=None))


class Raw:
    """A connection on which anything can be said."""

    def __init__(self, entry: m.HostEntry, source: str = "127.0.0.1") -> None:
        host, port = entry.addresses[0].split(":")
        self.sock = socket.create_connection((host, int(port)), 30, source_address=(source, 0))
        self.counter = 0
        self.nonce = ""

    def hello(self) -> Raw:
        self.sock.sendall(b"GET /p1/hello HTTP/1.1\r\nHost: x\r\n\r\n")
        status, body = self.reply()
        assert status == 200
        self.nonce = msgspec.msgpack.decode(body, type=pm.PeerHello).nonce
        return self

    def signed(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        extra: str = "",
        counter: int | None = None,
        token: str = TOKEN,
        span: str = "",
        send: bytes | None = None,
        meant: str = "",
    ) -> bytes:
        """The bytes of a proven request; ``send`` is the body that really goes out."""
        if counter is None:
            self.counter += 1
            counter = self.counter
        mac = sign(token, self.nonce, counter, meant, method, target, span, body)
        sent = body if send is None else send
        head = (
            f"{method} {target} HTTP/1.1\r\nHost: x\r\nX-Tieredckpt-Proof: {counter} {mac}\r\n"
            f"X-Tieredckpt-Body: {body_digest(body)}\r\n"
        )
        if meant:
            head += f"X-Tieredckpt-Host: {meant}\r\n"
        if span:
            head += f"Range: {span}\r\n"
        if method == "POST":
            head += f"Content-Length: {len(body)}\r\n"
        return f"{head}{extra}\r\n".encode() + sent

    def ask(self, data: bytes) -> tuple[int, bytes]:
        """Status and body; status 0: the connection was cut without a word."""
        with contextlib.suppress(ConnectionError):
            self.sock.sendall(data)
        return self.reply()

    def reply(self) -> tuple[int, bytes]:
        data = b""
        with contextlib.suppress(ConnectionError):
            while b"\r\n\r\n" not in data:
                piece = self.sock.recv(65536)
                if not piece:
                    return 0, data
                data += piece
            head, _, rest = data.partition(b"\r\n\r\n")
            found = re.search(rb"(?i)content-length: (\d+)", head)
            assert found, head
            while len(rest) < int(found[1]):
                piece = self.sock.recv(65536)
                if not piece:
                    return 0, rest
                rest += piece
            return int(head.split()[1]), rest
        return 0, data

    def is_cut(self) -> bool:
        """Whether the server ends it within the socket's time-out."""
        try:
            while self.sock.recv(65536):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        return True

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Peer, m.HostEntry, PeerServer]]:
    with serving(limits=Limits(pending_s=60.0)) as running:
        yield running


Running = tuple[Peer, m.HostEntry, PeerServer]


def assert_refused(raw: Raw, data: bytes, peer: Peer) -> None:
    before = len(peer.calls)
    status, body = raw.ask(data)
    assert status in (403, 400, 0), (status, body)
    if status == 403:
        assert msgspec.json.decode(body)["message"] == REFUSED
    assert raw.is_cut()
    assert len(peer.calls) == before


def test_a_proven_request_is_answered(shared: Running):
    with Raw(shared[1]).hello() as raw:
        status, body = raw.ask(raw.signed("POST", HOST_TARGET, BODY))
        assert (status, msgspec.msgpack.decode(body, type=m.HostEntry)) == (200, HERE)


@pytest.mark.parametrize("counter", [0, 7, 8, 9, 1 << 62, (1 << 63) - 1])
def test_replay_on_the_same_connection(shared: Running, counter: int):
    """Also of what was captured and held back, with an earlier counter, or an impossible one."""
    with Raw(shared[1]).hello() as raw:
        for each in (7, 9):
            assert raw.ask(raw.signed("POST", HOST_TARGET, BODY, counter=each))[0] == 200
        assert_refused(raw, raw.signed("POST", HOST_TARGET, BODY, counter=counter), shared[0])


def test_replay_on_another_connection(shared: Running):
    with Raw(shared[1]).hello() as raw, Raw(shared[1]).hello() as other:
        assert raw.nonce != other.nonce
        captured = raw.signed("POST", HOST_TARGET, BODY)
        assert raw.ask(captured)[0] == 200
        assert_refused(other, captured, shared[0])


def test_each_part_of_a_request_is_proven(shared: Running):
    peer, entry, _ = shared
    peer.add(SEGMENT, bytes(8192))
    target = f"/p1/ns/{NAMESPACE}/segments/{SEGMENT}?tier=memory"
    for before, after in [
        (b"bytes=0-99", b"bytes=0-98"),
        (b"tier=memory", b"tier=nvme"),
        (SEGMENT.encode(), b"00" * 16),
        (NAMESPACE.encode(), b"run-8"),
        (b"Host: here", b"Host: there"),
        (b"X-Tieredckpt-Host", b"X-Nothing"),
    ]:
        with Raw(entry).hello() as raw:
            data = raw.signed("GET", target, span="bytes=0-99", meant="here " + "1" * 32)
            assert before in data
            assert_refused(raw, data.replace(before, after), peer)
    with Raw(entry).hello() as raw:
        data = raw.signed("POST", HOST_TARGET, BODY).replace(b"/identify", b"/sync")
        assert_refused(raw, data, peer)
    with Raw(entry).hello() as raw:
        changed = BODY[:-1] + b"\xc2"
        data = raw.signed("POST", HOST_TARGET, BODY, send=changed)
        before = len(peer.calls)
        status, body = raw.ask(data)
        assert status == 503
        assert msgspec.json.decode(body)["message"] == REFUSED
        assert raw.is_cut()
        assert len(peer.calls) == before


@pytest.mark.parametrize(
    "meant", ["there", f"here {'2' * 32}", f"here {'1' * 31}", "her", "here  ", "\xff", "%\x7f"]
)
def test_a_request_for_another_host_is_not_answered(shared: Running, meant: str):
    """The one that is meant for it may have been led here by a forwarder, with its proof."""
    peer, entry, _ = shared
    peer.add(SEGMENT, bytes(8192))
    for method, target, body in [
        ("POST", HOST_TARGET, BODY),
        ("GET", f"/p1/ns/{NAMESPACE}/segments/{SEGMENT}?tier=memory", b""),
    ]:
        before = len(peer.calls), peer.opened
        with Raw(entry).hello() as raw:
            status, said = raw.ask(raw.signed(method, target, body, meant=meant))
            if status == 503:
                assert "this is host here" in msgspec.json.decode(said)["message"]
            assert status in (503, 403, 400, 0)
            assert raw.is_cut()
        assert (len(peer.calls), peer.opened) == before


def test_strangers_cannot_fill_the_log(shared: Running, caplog: pytest.LogCaptureFixture):
    for header in ("X-Tieredckpt-Host", "Range", "X-Tieredckpt-Body"):
        with Raw(shared[1]).hello() as raw:
            data = raw.signed("POST", HOST_TARGET, BODY, token="another token 123")
            assert_refused(raw, data.replace(b"Host: x", header.encode() + b": \xff"), shared[0])
    assert not caplog.records


def test_wrong_or_missing_proofs(shared: Running):
    for change in (
        lambda d: re.sub(rb"X-Tieredckpt-Proof: .*\r\n", b"", d),
        lambda d: re.sub(rb"X-Tieredckpt-Body: .*\r\n", b"", d),
        lambda d: re.sub(rb"(X-Tieredckpt-Proof: \d+ ).*\r\n", rb"\1\r\n", d),
        lambda d: re.sub(rb"(X-Tieredckpt-Proof: \d+ )", rb"\1 ", d),
        lambda d: d.replace(b"X-Tieredckpt-Proof: ", b"X-Tieredckpt-Proof: +"),
        lambda d: d.replace(b"X-Tieredckpt-Proof: ", b"Authorization: Bearer "),
        lambda d: re.sub(rb"(Proof: \d+ )(.*)\r\n", lambda f: f[1] + f[2].upper() + b"\r\n", d),
    ):
        with Raw(shared[1]).hello() as raw:
            assert_refused(raw, change(raw.signed("POST", HOST_TARGET, BODY)), shared[0])


def test_a_wrong_token_and_a_wrong_namespace_get_the_same_bytes(shared: Running):
    replies = []
    for namespace, token in [(NAMESPACE, "x" * 40), ("nobody", TOKEN), ("nobody", "")]:
        with Raw(shared[1]).hello() as raw:
            target = f"/p1/ns/{namespace}/identify"
            raw.sock.sendall(raw.signed("POST", target, BODY, token=token))
            data = b""
            while piece := raw.sock.recv(65536):
                data += piece
            replies.append(re.sub(rb"Date: .*\r\n", b"", data))
    assert len(set(replies)) == 1
    assert REFUSED.encode() in replies[0]


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/p1",
        "/p1/hello/",
        "/p1/hello?x=1",
        f"/p1/ns/{NAMESPACE}/segments/{SEGMENT}",
        f"/p1/ns/{NAMESPACE}/segments/{SEGMENT}?tier=..",
        f"/p1/ns/{NAMESPACE}/segments/{SEGMENT}?tier=memory&tier=nvme",
        f"/p1/ns/{NAMESPACE}/segments/{SEGMENT}?tier=a%2f..%2fb",
        f"/p1/ns/{NAMESPACE}/segments/{SEGMENT.upper()}?tier=memory",
        f"/p1/ns/{NAMESPACE}/segments/../../../etc/passwd?tier=memory",
        f"/p1/ns/{NAMESPACE}/segments/%2e%2e%2f%2e%2e?tier=memory",
        f"/p1/ns/{NAMESPACE}/segments/{SEGMENT}%00?tier=memory",
        f"/p1/ns/../ns/{NAMESPACE}/segments/{SEGMENT}?tier=memory",
        f"/p1/ns/{NAMESPACE}%2f/segments/{SEGMENT}?tier=memory",
        f"/p1/ns/{'n' * 129}/segments/{SEGMENT}?tier=memory",
        f"/p1/ns/.hidden/segments/{SEGMENT}?tier=memory",
        f"/p1/ns/{NAMESPACE}/segments/{SEGMENT}?tier={'t' * 2000}",
        f"//p1/ns/{NAMESPACE}/segments/{SEGMENT}?tier=memory",
        f"http://x/p1/ns/{NAMESPACE}/segments/{SEGMENT}?tier=memory",
        f"/p1/ns/{NAMESPACE}/probe",
        f"/p1/ns/{NAMESPACE}/identify?x=1",
        f"/p1/ns/{NAMESPACE}/identify",
        f"/p1/ns/{NAMESPACE}/served",
        f"/p1/ns/{NAMESPACE}/peer_served",
        f"/p1/ns/{NAMESPACE}/push#x",
        "/v1/status",
        "*",
    ],
)
def test_path_tricks_of_somebody_with_the_token(shared: Running, target: str):
    peer, entry, _ = shared
    peer.add(SEGMENT, bytes(100))
    with Raw(entry).hello() as raw:
        assert_refused(raw, raw.signed("GET", target, span="bytes=0-9"), peer)


@pytest.mark.parametrize(
    "method", ["PUT", "DELETE", "HEAD", "CONNECT", "OPTIONS", "get", "G" * 9000]
)
def test_other_methods(shared: Running, method: str):
    target = f"/p1/ns/{NAMESPACE}/segments/{SEGMENT}?tier=memory"
    with Raw(shared[1]).hello() as raw:
        raw.sock.sendall(raw.signed(method, target, span="bytes=0-9"))
        data = raw.sock.recv(65536)
        assert re.match(rb"HTTP/1\.[01] (400|403) |$", data), data
        assert raw.is_cut()


@pytest.mark.parametrize(
    "extra",
    [
        "Transfer-Encoding: chunked\r\n",
        "Content-Encoding: deflate\r\n",
        "Upgrade: websocket\r\nConnection: upgrade\r\n",
        "Expect: 100-continue\r\n",
        "X: " + "x" * 9000 + "\r\n",
        "".join(f"X{number}: x\r\n" for number in range(200)),
        "Content-Length: 5\r\n",
        "\x00: x\r\n",
    ],
)
def test_headers_that_our_client_never_sends(shared: Running, extra: str):
    with Raw(shared[1]).hello() as raw:
        data = raw.signed("POST", HOST_TARGET, BODY, extra=extra)
        assert_refused(raw, data, shared[0])


def test_bodies_are_bounded_before_they_are_read(shared: Running):
    peer, entry, _ = shared
    # Without proof: nothing of it is read at all, whatever it says.
    with Raw(entry).hello() as raw:
        head = f"POST {HOST_TARGET} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 40}\r\n\r\n"
        assert_refused(raw, head.encode() + bytes(1000), peer)
    # With it, but larger than the verb allows.
    with Raw(entry).hello() as raw:
        data = raw.signed("POST", HOST_TARGET, BODY).replace(
            f"Content-Length: {len(BODY)}".encode(), b"Content-Length: 1048577"
        )
        status, body = raw.ask(data)
        assert status == 400
        assert "the limit is 1048576" in msgspec.json.decode(body)["message"]
        assert raw.is_cut()


def test_malformed_messages(shared: Running):
    peer, entry, _ = shared
    before = len(peer.calls)
    verbs = [kind.verb() for kind in pm.PeerRequest.__subclasses__()]
    assert len(verbs) >= 10
    for verb in verbs:
        with Raw(entry).hello() as raw:
            for body in (
                b"",
                b"\xc1",
                b"\xa2\xe0 ",
                b"\x81\xa2\xe0 \x01",
                b"\x81\xa1x" + b"\x91" * 20_000,
                b"\x81\xa1x\x01",
                b"\xdf\xff\xff\xff\xff",
                os.urandom(300),
            ):
                target = f"/p1/ns/{NAMESPACE}/{verb}"
                status, reply = raw.ask(raw.signed("POST", target, body))
                assert status == 400, reply
                assert "malformed request" in msgspec.json.decode(reply)["message"]
    assert len(peer.calls) == before


def test_garbage(shared: Running):
    entry = shared[1]
    for data in (
        os.urandom(4096),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(500),  # a TLS greeting
        b"GET " + b"/" * 20_000,
        b"GET /p1/hello HTTP/1.1\r\n" + b"x" * 20_000,
        b"GET /p1/hello HTTP/9.9\r\n\r\n",
        b"\r\n" * 5000 + b"\0" * 10,
    ):
        with Raw(entry) as raw:
            with contextlib.suppress(ConnectionError):
                raw.sock.sendall(data)
                raw.sock.shutdown(socket.SHUT_WR)
            assert raw.is_cut()
    with PeerClient(entry, NAMESPACE, Secret(TOKEN)) as client:
        assert client.identify() == HERE


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_head_that_drips_is_cut():
    with serving(limits=Limits(pending_s=1.0)) as (_, entry, server), Raw(entry) as raw:
        raw.sock.settimeout(0.05)
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                raw.sock.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if not raw.sock.recv(1):
                        break
            else:
                pytest.fail("not cut")
        assert len(server.admission) == 0


@pytest.mark.full
def test_a_proven_connection_that_never_ends_its_next_head():
    with serving(limits=Limits(idle_s=1.0)) as (_, entry, _), Raw(entry).hello() as raw:
        assert raw.ask(raw.signed("POST", HOST_TARGET, BODY))[0] == 200
        raw.sock.sendall(b"POST /p1/")
        assert raw.is_cut()


@pytest.mark.full
def test_a_body_that_stalls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peer_server, "BODY_STALL_S", 0.5)
    with serving() as (peer, entry, _), Raw(entry).hello() as raw:
        body = bytes(200_000)
        data = raw.signed("POST", f"/p1/ns/{NAMESPACE}/sync", body, send=body[:100_000])
        status, reply = raw.ask(data)
        assert status == 503
        assert "stalled" in msgspec.json.decode(reply)["message"]
        assert raw.is_cut()
        assert not peer.calls


def test_a_body_that_drips_in_time_for_each_piece(monkeypatch: pytest.MonkeyPatch):
    """It holds the place of other large ones, so all of it has a deadline, too."""
    monkeypatch.setattr(peer_server, "BODY_STALL_S", 1.0)
    monkeypatch.setattr(peer_server, "BODY_BYTES_PER_S", 1 << 40)
    with serving() as (peer, entry, _), Raw(entry).hello() as raw:
        piece = peer_server.BODY_PIECE_BYTES
        body = bytes(100 * piece)
        raw.sock.sendall(raw.signed("POST", f"/p1/ns/{NAMESPACE}/sync", body, send=b""))
        raw.sock.settimeout(0.2)
        for _ in range(90):
            with contextlib.suppress(TimeoutError):
                if raw.sock.recv(1, socket.MSG_PEEK):
                    break
            with contextlib.suppress(ConnectionError):
                raw.sock.sendall(bytes(piece))
        raw.sock.settimeout(30)
        status, reply = raw.reply()
        assert status == 503
        assert "stalled" in msgspec.json.decode(reply)["message"]
        assert not peer.calls


def test_a_server_that_cannot_listen_says_so_and_ends(tmp_path: Path):
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    server = PeerServer(Peer(tmp_path, Secret(TOKEN)), [listener])
    listener.close()
    server.start()
    server.stop()


@pytest.mark.parametrize(
    "field",
    [
        {"labels": {str(number): "x" for number in range(65)}},
        {"labels": {"x": "y" * 301}},
        {"addresses": ["1" * 301]},
        {"host_id": "h" * 256},
    ],
    ids=["labels", "a label", "address", "name"],
)
def test_who_says_too_much_of_himself(shared: Running, field: dict[str, object]):
    """What a host says of itself is kept, and told to trainers."""
    peer, entry, _ = shared
    before = len(peer.calls)
    said = {"host_id": "a", "incarnation": "1" * 32, "addresses": ["127.0.0.1:1"], **field}
    with Raw(entry).hello() as raw:
        body = msgspec.msgpack.encode({"caller": said})
        assert raw.ask(raw.signed("POST", HOST_TARGET, body))[0] == 400
    assert len(peer.calls) == before


def test_a_reply_larger_than_its_request_allows(shared: Running):
    _, entry, _ = shared

    class Greedy(pm.Probe, frozen=True):
        reply_bytes_max = 1000

        @classmethod
        def verb(cls) -> str:
            return "probe"

        @classmethod
        def reply(cls) -> type[bytes]:
            return bytes

    with PeerClient(entry, NAMESPACE, Secret(TOKEN)) as client:
        assert client.ask(Greedy(size=1000)) == bytes(1000)
        with pytest.raises(TierUnavailableError, match="1001 bytes; the limit is 1000"):
            client.ask(Greedy(size=1001))


@pytest.mark.parametrize("tier", ["memory", pytest.param("nvme", marks=pytest.mark.full)])
def test_a_reader_that_stalls_loses_its_lease(monkeypatch: pytest.MonkeyPatch, tier: str):
    monkeypatch.setattr(bulk, "SEND_STALL_S", 1.0)
    with serving() as (peer, entry, _), Raw(entry).hello() as raw:
        peer.add(SEGMENT, bytes(64 << 20), tier)
        target = f"/p1/ns/{NAMESPACE}/segments/{SEGMENT}?tier={tier}"
        raw.sock.sendall(raw.signed("GET", target, span=f"bytes=0-{(64 << 20) - 1}"))
        assert raw.sock.recv(10)
        assert peer.opened == 1
        until_s = time.monotonic() + 60
        while peer.open_segments:
            assert time.monotonic() < until_s
            time.sleep(0.02)
        with PeerClient(entry, NAMESPACE, Secret(TOKEN)) as client:
            assert client.identify() == HERE


# --- numbers --------------------------------------------------------------------------------------


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_thousands_of_strangers():
    """As many connections as descriptors permit, from 200 addresses; ours are served meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    # Each takes two descriptors of this process, until the server closes its own.
    number = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 2000, 5_000)
    assert number >= 1000, "too few descriptors for this test"
    limits = Limits(connections=600, pending=256, pending_per_address=64)
    open_socks: list[socket.socket] = []
    served: list[int] = []
    stop = threading.Event()
    with serving(limits=limits) as (_, entry, server):
        port = server.ports[0]
        honest = PeerClient(entry, NAMESPACE, Secret(TOKEN))
        assert honest.identify() == HERE

        def keep_asking() -> None:
            while not stop.is_set():
                assert honest.identify() == HERE
                with PeerClient(entry, NAMESPACE, Secret(TOKEN)) as fresh:
                    assert fresh.identify() == HERE
                served.append(1)

        thread = threading.Thread(target=keep_asking)
        thread.start()
        before = rss_bytes()
        most = 0
        try:
            flooded_s = time.monotonic() + 120
            for count in itertools.count():
                if count >= number:
                    # However slow this machine is: ours are served while strangers go on coming.
                    if len(served) > 3:
                        break
                    assert thread.is_alive()
                    assert time.monotonic() < flooded_s
                    open_socks.pop(0).close()
                sock = socket.socket()
                sock.bind((f"127.0.1.{count % 200 + 1}", 0))
                sock.settimeout(30)
                sock.connect(("127.0.0.1", port))
                if count % 3:
                    with contextlib.suppress(ConnectionError):
                        sock.sendall(b"GET /p1/hello HTTP/1.1\r\nHost: x\r\n\r\n"[: count % 45])
                open_socks.append(sock)
                most = max(most, len(server.admission))
            grown = rss_bytes() - before
            done = len(served)
            until_s = time.monotonic() + 60
            while len(served) < done + 3:
                assert thread.is_alive()
                assert time.monotonic() < until_s
                time.sleep(0.01)
        finally:
            stop.set()
            thread.join(60)
            for sock in open_socks:
                sock.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        honest.close()
        assert most <= 256 + 10
        # The client's half is here, too; unbounded, the server's would be several times this.
        assert grown < 100 << 20


@pytest.mark.full
@pytest.mark.parametrize(
    "limits",
    [
        Limits(pending=16, pending_per_address=8),
        Limits(pending=32, pending_per_address=8, connections=16),
    ],
)
def test_the_only_one_of_an_address_outlasts_those_who_have_more(limits: Limits):
    """Else a host on a busy machine, slow to prove itself, would be pushed out by a flood."""
    with (
        serving(limits=limits) as (_, entry, server),
        contextlib.ExitStack() as stack,
    ):
        early = stack.enter_context(Raw(entry, "127.0.0.5").hello())
        for number in range(300):
            stack.enter_context(Raw(entry, f"127.0.1.{number % 10 + 1}"))
        until_s = time.monotonic() + 30
        while len(server.admission._pending) != 16:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert early.ask(early.signed("POST", HOST_TARGET, BODY))[0] == 200


def test_an_api_that_fails_is_logged_and_told_as_unknown(caplog: pytest.LogCaptureFixture):
    with (
        serving() as (peer, entry, _),
        PeerClient(entry, NAMESPACE, Secret(TOKEN)) as client,
    ):
        peer.peer_identify = None  # type: ignore[method-assign,assignment]
        with pytest.raises(Exception, match="the host's agent failed: TypeError") as caught:
            client.identify()
        assert not isinstance(caught.value, AgentError)
        assert caught.value.outcome == "unknown"
        assert "Traceback" in caplog.text
        assert TOKEN not in caplog.text
