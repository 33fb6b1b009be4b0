"""The agent's sockets as a hostile, clumsy or hurried client sees them."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent import AgentProcess, FakeTrainer, spec_of, wait_until
from tieredckpt.errors import CapacityError, RemoteProtocolError
from tieredckpt.rpc.messages import agent as m

HEADERS = {"X-Tieredckpt-Api": str(m.API_VERSION)}


class UnixConnection(http.client.HTTPConnection):
    """An independent client: the standard library's."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=20)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(str(self.path))


@pytest.fixture
def agent(runtime_dir: Path) -> Iterator[AgentProcess]:
    with AgentProcess(runtime_dir) as agent:
        yield agent


@pytest.fixture
def http_line(agent: AgentProcess, runtime_dir: Path) -> Iterator[UnixConnection]:
    connection = UnixConnection(runtime_dir / "agent.sock")
    yield connection
    connection.close()


def ask(
    line: UnixConnection, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    line.request(method, path, body or None, {**HEADERS, **headers})
    reply = line.getresponse()
    return reply.status, reply.read(), dict(reply.headers)


SESSION = "/v1/sessions"
SEAL = "/v1/namespaces/run/seal"


MALFORMED = [
    ("GET", "/v1/nothing", b"", 404),
    ("PUT", "/v1/health", b"x", 405),
    ("POST", SESSION, b"", 400),
    ("POST", SESSION, b"{", 400),
    ("POST", SESSION, b'{"api": 1}', 400),
    ("POST", SESSION, b"\xff\xfe", 400),
    ("POST", SESSION, b'{"x": ' + b"[" * 100_000, 400),
    ("POST", SEAL, b'{"session_id": 5}', 400),
    ("POST", "/v1/namespaces/run/commit", b"\xa2\xe0 ", 400),
    ("GET", "/v1/namespaces/run/holdings?within_s=nan", b"", 400),
    ("POST", "/v1/namespaces/..%2f..%2fetc/reserve", b"{}", 400),
    ("GET", "/v1/namespaces/..%2f..%2fetc/holdings", b"", 404),
    ("GET", "/v1/namespaces/run/segments/..%2f..%2fetc", b"", 400),
    ("GET", "/v1/namespaces/run/plans/zz", b"", 400),
    ("DELETE", "/v1/sessions/..%2f..%2fetc", b"", 200),
    ("GET", "/v1/namespaces/run/progress/%00", b"", 404),
]


def test_malformed_requests_are_refused(http_line: UnixConnection):
    for method, path, body, status in MALFORMED:
        got, _, _ = ask(http_line, method, path, body)
        assert got == status, (method, path, body[:20])
        assert ask(http_line, "GET", "/v1/health")[0] == 200


def test_a_body_over_the_limit_is_refused_before_it_is_read(http_line: UnixConnection):
    http_line.putrequest("POST", SEAL)
    http_line.putheader("X-Tieredckpt-Api", str(m.API_VERSION))
    http_line.putheader("Content-Length", str(1 << 40))
    http_line.endheaders()
    reply = http_line.getresponse()
    assert reply.status == 400
    assert "limit" in json.loads(reply.read())["message"]


def test_segments_by_range_from_memory_and_disk(
    runtime_dir: Path, http_line: UnixConnection, tmp_path: Path
):
    spec = spec_of(keep_last=1, tiers={"disk": tmp_path / "disk"})
    with FakeTrainer(runtime_dir, spec, size=9 << 20) as trainer:
        saved = trainer.save(1, tiers=("disk",))
        ref = saved.segments[0]
        whole = trainer.read(ref)
        wait_until(lambda: trainer.client.progress(saved.save_id).levels["disk"] == "done")
        path = f"/v1/namespaces/run/segments/{ref.id}"
        for tier in ("memory", "disk"):
            status, body, headers = ask(http_line, "GET", path)
            assert (status, body == whole) == (200, True)
            assert headers["X-Tieredckpt-Tier"] == tier
            for start, stop in [(0, 1), (4095, 8193), (4 << 20, 8 << 20), (len(whole) - 7, None)]:
                last = "" if stop is None else str(stop - 1)
                status, body, headers = ask(http_line, "GET", path, Range=f"bytes={start}-{last}")
                assert (status, body == whole[start:stop]) == (206, True)
                assert headers["Content-Range"].startswith(f"bytes {start}-")
            status, _, _ = ask(http_line, "GET", path, Range="bytes=0-1,5-6")
            assert status == 400
            trainer.save(2)  # now only the disk has it
        assert ask(http_line, "GET", f"{path}?tier=memory")[0] == 404


def test_a_reader_of_a_range_keeps_its_slot(runtime_dir: Path, agent: AgentProcess):
    """Half a segment is read, then the slot would be reused: the reader gets the old bytes."""
    spec = spec_of(keep_last=1, capacity_bytes=1 << 30)
    with FakeTrainer(runtime_dir, spec, size=16 << 20) as trainer:
        saved = trainer.save(1)
        whole = trainer.read(saved.segments[0])
        line = UnixConnection(runtime_dir / "agent.sock")
        line.request("GET", f"/v1/namespaces/run/segments/{saved.segments[0].id}", headers=HEADERS)
        reply = line.getresponse()
        head = reply.read(1 << 18)
        for step in range(2, 6):
            trainer.save(step)
        assert head + reply.read() == whole
        line.close()


def test_a_waiting_reserve_holds_nothing_up(runtime_dir: Path, agent: AgentProcess):
    spec = spec_of(keep_last=1, capacity_bytes=3 << 20, wait_s=3.0)
    with FakeTrainer(runtime_dir, spec) as trainer:
        fds = []
        for step in (1, 2):
            saved = trainer.save(step)
            fds.append(trainer.client.open_segment("memory", saved.segments[0].id)[1])
        failed: list[CapacityError] = []

        def third() -> None:
            try:
                trainer.save(3)
                trainer.save(4)
            except CapacityError as error:
                failed.append(error)

        waiting = threading.Thread(target=third)
        waiting.start()
        with agent.client() as client:
            replies = 0
            while waiting.is_alive() and replies < 5:
                client.progress(saved.save_id, namespace="run")
                replies += 1
        waiting.join()
        for fd in fds:
            os.close(fd)
        assert len(failed) == 1
        assert replies > 1  # one may have waited with it, a second one did not


def test_garbage_on_both_sockets(runtime_dir: Path, agent: AgentProcess):
    for name in ("agent.sock", "fds.sock"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(runtime_dir / name))
            sock.sendall(b"\x00\xff" * 16)
            sock.settimeout(20)
            sock.recv(100)
    with agent.client() as client:
        assert client.health().api == m.API_VERSION
        with pytest.raises(RemoteProtocolError):
            client.redeem("0" * 32)


def test_sockets_and_files_are_private(runtime_dir: Path, agent: AgentProcess):
    for name in ("agent.sock", "fds.sock", "agent.lock"):
        assert (runtime_dir / name).stat().st_mode & 0o077 == 0, name
    for name in ("slots", "sessions", "ns", "specs"):
        assert (runtime_dir / name).stat().st_mode & 0o077 == 0, name


def test_a_save_in_steady_state_asks_for_no_slot(runtime_dir: Path, agent: AgentProcess):
    """Its requests are a seal and a commit: the grant came with the seal before."""
    with FakeTrainer(runtime_dir, spec_of(), size=4096) as trainer:
        trainer.prepare()
        for step in range(50):
            trainer.save(step)
        assert trainer.reserves == 1
