"""Descriptors, errors on the wire, ranges, and the client's own failures."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.agent import wait_until
from tieredckpt import errors
from tieredckpt.errors import (
    AgentError,
    CapacityError,
    NoRecoverableCheckpointError,
    NotFoundError,
    RemoteProtocolError,
    TieredCkptError,
    UsageError,
)
from tieredckpt.rpc import fd_passing
from tieredckpt.rpc.agent_client import AGENT_SOCKET, AgentClient
from tieredckpt.rpc.agent_server import parse_range
from tieredckpt.rpc.fd_passing import FdServer, listen, redeem
from tieredckpt.rpc.http1 import STALL_BYTES, HttpConnection
from tieredckpt.rpc.messages.base import decode_error, encode_error
from tieredckpt.storage.memory.slot import try_lock_exclusive


@pytest.fixture
def fds(runtime_dir: Path) -> Iterator[FdServer]:
    server = FdServer(runtime_dir / "fds.sock", ticket_life_s=30.0)
    server.start()
    yield server
    server.stop()


def file_fd(folder: Path, text: bytes = b"hello") -> int:
    path = folder / "file"
    path.write_bytes(text)
    return os.open(path, os.O_RDONLY)


def test_a_ticket_works_once(runtime_dir: Path, fds: FdServer):
    ticket = fds.offer(file_fd(runtime_dir))
    fd = redeem(runtime_dir / "fds.sock", ticket, timeout_s=5)
    assert os.pread(fd, 10, 0) == b"hello"
    assert not os.get_inheritable(fd)
    os.close(fd)
    with pytest.raises(RemoteProtocolError, match="ticket"):
        redeem(runtime_dir / "fds.sock", ticket, timeout_s=5)


def test_a_revoked_ticket_is_closed(runtime_dir: Path, fds: FdServer):
    fd = file_fd(runtime_dir)
    ticket = fds.offer(fd)
    assert fds.revoke(ticket)
    assert not fds.revoke(ticket)
    with pytest.raises(OSError):
        os.fstat(fd)


def test_a_lock_travels_with_the_descriptor(runtime_dir: Path, fds: FdServer):
    import fcntl

    fd = file_fd(runtime_dir)
    fcntl.flock(fd, fcntl.LOCK_EX)
    received = redeem(runtime_dir / "fds.sock", fds.offer(fd), timeout_s=5)
    other = os.open(runtime_dir / "file", os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(received)
    wait_until(lambda: try_lock_exclusive(other))  # the server closes its own copy after sending
    os.close(other)


def test_old_offers_and_slow_clients_are_dropped(runtime_dir: Path):
    server = FdServer(runtime_dir / "fds.sock", ticket_life_s=0.05)
    # Not for the stop: the server's thread is waited for as long as a connection lives.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fd_passing, "CONNECTION_LIFE_S", 0.05)
        server.start()
        ticket = server.offer(file_fd(runtime_dir))
        with socket.socket(socket.AF_UNIX) as slow:
            slow.connect(str(runtime_dir / "fds.sock"))
            slow.settimeout(60)
            with contextlib.suppress(ConnectionError):  # it may have ended before this was read
                slow.send(b"half")
                assert slow.recv(1) == b""
        assert not server.revoke(ticket)
    server.stop()


def test_offers_are_bounded(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, fds: FdServer):
    monkeypatch.setattr(fd_passing, "OFFERS_MAX", 1)
    fds.offer(file_fd(runtime_dir))
    with pytest.raises(CapacityError):
        fds.offer(file_fd(runtime_dir))


def test_another_user_gets_nothing(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, fds: FdServer
):
    monkeypatch.setattr(fd_passing, "peer_uid", lambda sock: 12345)
    ticket = fds.offer(file_fd(runtime_dir))
    with pytest.raises((AgentError, RemoteProtocolError)):
        redeem(runtime_dir / "fds.sock", ticket, timeout_s=5)
    assert fds.revoke(ticket)


def test_sockets_are_private(runtime_dir: Path, fds: FdServer):
    assert (runtime_dir / "fds.sock").stat().st_mode & 0o777 == 0o600


def test_a_socket_path_that_is_too_long(tmp_path: Path):
    folder = tmp_path / ("x" * 100)
    with pytest.raises(AgentError, match=r"agent\.runtime_dir"):
        AgentClient(folder)
    with pytest.raises(AgentError, match="shorter"):
        listen(folder / "fds.sock")


CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, TieredCkptError)
]


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_cross_by_name_with_their_fields(cls: type[TieredCkptError]):
    status, body = encode_error(cls("what, and what to do", limit="x", needed_bytes=3))
    again = decode_error(status, body)
    assert type(again) is cls
    assert (str(again), again.limit, again.needed_bytes) == ("what, and what to do", "x", 3)


@pytest.mark.parametrize("name", ["message", "self", "fields", "error"])
def test_a_field_of_any_name_is_a_field(name: str):
    body = f'{{"error":"NotFoundError","message":"gone","fields":{{"{name}":"x"}}}}'.encode()
    found = decode_error(404, body)
    assert (type(found), str(found)) == (errors.NotFoundError, "gone")
    assert found.fields == {name: "x"}


def test_an_error_with_too_many_fields_is_none_of_ours():
    """Read they would be many times as large."""
    fields = ",".join(f'"{number}":[]' for number in range(65))
    body = f'{{"error":"NotFoundError","message":"gone","fields":{{{fields}}}}}'.encode()
    assert isinstance(decode_error(404, body), errors.RemoteProtocolError)


def test_all_of_a_request_has_one_deadline():
    """However regularly the server takes a piece of it."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    body = bytes(16 * STALL_BYTES)
    ended = threading.Event()

    def take() -> None:
        while not ended.wait(0.1):
            left = STALL_BYTES
            while left and not ended.is_set():
                left -= len(theirs.recv(left))

    taking = threading.Thread(target=take)
    taking.start()
    try:
        with pytest.raises(TimeoutError):
            HttpConnection(ours, 0.5).send(b"POST / HTTP/1.1\r\n\r\n", body, at_once=True)
    finally:
        ended.set()
        ours.close()
        taking.join()
        theirs.close()


def test_odd_fields_become_text():
    refused = [("ab", 3, "why")]
    status, body = encode_error(NoRecoverableCheckpointError("none", refused=refused))
    assert decode_error(status, body).refused == ["('ab', 3, 'why')"]


@given(st.integers(100, 599), st.binary(max_size=200))
def test_a_body_that_is_no_error_of_ours(status: int, body: bytes):
    assert isinstance(decode_error(status, body), TieredCkptError)


@pytest.mark.parametrize(
    ("header", "want"),
    [
        (None, (0, 100)),
        ("bytes=0-9", (0, 10)),
        ("bytes=90-", (90, 100)),
        ("bytes=90-1000", (90, 100)),
        ("bytes=99-99", (99, 100)),
    ],
)
def test_ranges(header: str | None, want: tuple[int, int]):
    assert parse_range(header, 100) == want


@pytest.mark.parametrize(
    "header", ["bytes=100-", "bytes=5-4", "bytes=-5", "bytes=0-1,3-4", "items=0-1", "", "bytes=a-b"]
)
def test_bad_ranges(header: str):
    with pytest.raises(UsageError):
        parse_range(header, 100)


@given(st.text(max_size=40))
def test_any_range_header_is_answered(header: str):
    try:
        start, stop = parse_range(header, 1000)
    except UsageError:
        return
    assert 0 <= start < stop <= 1000


# --- the client against servers that misbehave ----------------------------------------------------


class Scripted:
    """Answers each connection with the next of its scripts: bytes, or None to say nothing."""

    def __init__(self, path: Path, *scripts: bytes | None) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._scripts = scripts
        self.requests: list[bytes] = []
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for script in self._scripts:
            sock, _ = self._listener.accept()
            self.requests.append(sock.recv(65536))
            if script is None:
                self._held.append(sock)
                continue
            sock.sendall(script)
            sock.close()

    def close(self) -> None:
        self._thread.join(10)
        for sock in self._held:
            sock.close()
        self._listener.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
NOTHING = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnull"


@pytest.mark.parametrize(
    ("reply", "error", "text"),
    [
        (b"", AgentError, "no agent answers"),
        (b"HTTP/1.1 200 OK\r\n", AgentError, "closed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{}", AgentError, "broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{}", AgentError, "more than"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", AgentError, "no status or length"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", AgentError, "no status or length"),
        (b"x" * 70000, AgentError, "endless"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
            RemoteProtocolError, "the limit is",
        ),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nOops", RemoteProtocolError, "Oops"),
        (OK, RemoteProtocolError, "another version"),
    ],
)  # fmt: skip
def test_odd_replies(runtime_dir: Path, reply: bytes, error: type[Exception], text: str):
    server = Scripted(runtime_dir / AGENT_SOCKET, reply)
    with AgentClient(runtime_dir, deadline_s=5) as client, pytest.raises(error, match=text):
        client.health()
    server.close()


def test_a_silent_agent_is_given_up_at_the_deadline(runtime_dir: Path):
    server = Scripted(runtime_dir / AGENT_SOCKET, None)
    client = AgentClient(runtime_dir, deadline_s=0.1)
    with client, pytest.raises(AgentError, match="did not answer within") as caught:
        client.health()
    assert caught.value.outcome == "unknown"
    server.close()


def test_a_connection_that_was_closed_meanwhile_is_opened_again(runtime_dir: Path):
    server = Scripted(runtime_dir / AGENT_SOCKET, NOTHING, NOTHING)
    with AgentClient(runtime_dir, deadline_s=5) as client:
        client.report_damage("memory", "ab" * 16, (), "x", namespace="run")
        client.report_damage("memory", "ab" * 16, (), "x", namespace="run")
    server.close()
    assert len(server.requests) == 2


def test_nobody_there(runtime_dir: Path):
    client = AgentClient(runtime_dir, deadline_s=5)
    with client, pytest.raises(AgentError, match="tieredckpt agent run"):
        client.health()
    calls: list[int] = []
    client = AgentClient(runtime_dir, deadline_s=5, revive=lambda: calls.append(1))
    with client, pytest.raises(AgentError):
        client.health()
    assert len(calls) == 3


def test_a_client_without_a_session_says_so(runtime_dir: Path):
    with AgentClient(runtime_dir) as client, pytest.raises(UsageError, match="open_session"):
        client.reserve(4096)


def test_a_client_is_invalid_after_fork(runtime_dir: Path):
    with AgentClient(runtime_dir) as client:
        client._pid += 1
        with pytest.raises(UsageError, match="fork"):
            client.health()


def test_names_that_are_no_names_never_reach_the_wire(runtime_dir: Path):
    with AgentClient(runtime_dir) as client:
        for name in ("a b", "a\r\nX: y", "\u00e9", "a\x00"):
            with pytest.raises(UsageError):
                client.holdings(name)


class OfARestartedAgent(AgentClient):
    """The agent does not know the session, and cannot listen for other hosts at first."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._session: Any = SimpleNamespace(namespace="run", session_id="a" * 32)
        self._setup: Any = {"listen": SimpleNamespace(encode=bytes)}
        self.knows, self.can_listen, self.received = False, False, 0

    def _open(self, *_: Any) -> Any:
        self.knows = True

    def _request(
        self, method: str, path: str, *_: Any, session_id: str = "", **options: Any
    ) -> bytes:
        if path.endswith("/listen"):
            if not self.can_listen:
                raise AgentError("the port is taken", outcome="unknown")
            self.received += 1
        elif not self.knows:
            raise NotFoundError("no such session", what="session")
        return b""


def test_a_restarted_agent_is_sent_the_other_hosts_until_it_has_received_them(tmp_path: Path):
    """Else it would answer a load as an agent that knows no other hosts."""
    client = OfARestartedAgent(tmp_path)
    for _ in range(2):
        with pytest.raises(AgentError, match="the port is taken"):
            client._call("GET", "/v1/namespaces/run/holdings")
    client.can_listen = True
    for _ in range(2):
        client._call("GET", "/v1/namespaces/run/holdings")
    assert client.received == 1


def test_a_request_does_not_wait_for_one_that_opens_the_session_again(tmp_path: Path):
    """The agent hangs, and the other one may wait for it as long as a save."""
    client = OfARestartedAgent(tmp_path)
    client._setup_pending, client._deadline_s = True, 0.05
    with ThreadPoolExecutor(1) as pool, client._session_lock:
        asked = pool.submit(client._call, "GET", "/v1/status")
        with pytest.raises(AgentError, match="did not answer within"):
            asked.result(10)
