"""Messages that no supervisor and no rank sends: each is the problem of its sender alone."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.agent import wait_until
from tieredckpt.agent.cluster.members import Noted, read_noted
from tieredckpt.agent.tables import Tables
from tieredckpt.config.network import DiscoveryConfig
from tieredckpt.errors import AgentError, TieredCkptError
from tieredckpt.live import board as board_module
from tieredckpt.live import control, messages, rank
from tieredckpt.live.board import Board, Record
from tieredckpt.live.messages import Decision, Order, View
from tieredckpt.live.processes import Died, Processes, spawner
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages.agent import HostEntry
from tieredckpt.rpc.messages.kv import Kv, KvReply, PeerKv

DEEP = 20_000
BAD_VIEWS = {
    "not UTF-8": b"\x81\xa6leader\xa1\xff",
    "too deep": b"\x81\xa1x" + b"\x91" * DEEP,
    "no msgpack": b"\xc1",
    "another type": b"\x81\xa6leader\x01",
}


def entry(host: str) -> HostEntry:
    return HostEntry(host_id=host, incarnation="0" * 32, addresses=(f"{host}:1",))


class Agent:
    """As the client of one, with the agent's own tables."""

    namespace = "ns"

    def __init__(self) -> None:
        self.tables = Tables()

    def call(self, request: Kv, within_s: float | None = None) -> KvReply:
        return asyncio.run(self.tables.do(self.namespace, request))

    def set(self, table: str, **values: bytes) -> None:
        keys, data = tuple(values), tuple(values.values())
        self.call(Kv(table=table, op="set", keys=keys, values=data))


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def board(agent: Agent) -> Iterator[Board]:
    found: Any = Board(
        agent,  # type: ignore[arg-type]
        entry("a"), Secret("x" * 16), DiscoveryConfig(), "job", lambda: None,
    )  # fmt: skip
    yield found
    closing = threading.Thread(target=found.close)
    closing.start()
    while closing.is_alive():
        agent.set("job.views", a=b"")  # (a request that waits for news would last a second)
        closing.join(0.01)


RECORD = Record(leader="a", term=(1, "a", ""), decision=Decision(), trains=False, sizes="")


@pytest.mark.parametrize("bad", BAD_VIEWS.values(), ids=BAD_VIEWS)
def test_a_view_that_cannot_be_read_is_its_hosts_problem(
    bad: bytes, agent: Agent, board: Board, caplog: pytest.LogCaptureFixture
):
    beat = 0

    def both_have_sent(**values: bytes) -> bool:
        """Whether another view of c, which comes after what others sent, counts."""
        nonlocal beat
        beat += 1
        good = msgspec.msgpack.encode(View(start="good", beat=beat))
        agent.set("job.views", **values, c=good)
        return board.views(failing=False).get("c", View()).start == "good"

    board.put(RECORD, View(), ())
    board.start()
    wait_until(lambda: both_have_sent(b=bad))
    wait_until(lambda: "b" in board.problems)
    assert board.views(failing=False).keys() == {"c"}
    assert list(board.problems) == ["b"]
    assert "its message is malformed" in board.problems["b"]
    logged = [each.getMessage() for each in caplog.records if each.levelname != "DEBUG"]
    assert [each[:33] for each in logged] == ["host 'b' does not count: its mess"]

    def is_back() -> bool:
        both_have_sent(b=msgspec.msgpack.encode(View(start="back", beat=beat + 1)))
        return board.views(failing=False).get("b", View()).start == "back"

    wait_until(is_back)
    assert not board.problems


class Peer:
    """As a client of another host's agent; that of b tells more values than keys."""

    def __init__(self, host: HostEntry, *_: object, **more: object) -> None:
        self.host = host

    def ask(self, request: PeerKv) -> KvReply:
        assert request.request.table == "job.records"
        data = msgspec.msgpack.encode(msgspec.structs.replace(RECORD, beat=1))
        more = (data,) if self.host.host_id == "b" else ()
        return KvReply(table_id="", keys=(self.host.host_id,), values=(data, *more))

    def close(self) -> None:
        pass


def test_a_table_that_does_not_fit_is_its_hosts_problem(
    board: Board, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(board_module, "PeerClient", Peer)
    board.add_hosts([entry("b"), entry("c")])
    board.put(msgspec.structs.replace(RECORD, leader=""), View(), None)
    board.start()
    wait_until(lambda: "b" in board.problems)
    assert board.problems == {"b": "a table's reply has not one value for each key"}


SENDER = """
import os, time
os.write(int(os.environ["TIEREDCKPT_LIVE"]), bytes.fromhex(os.environ["PACKET"]))
time.sleep(60)
"""


def test_a_process_that_sends_nonsense_is_killed_and_the_others_go_on():
    lines: list[str] = []
    processes = Processes(spawner([sys.executable, "-I", "-S", "-c", SENDER]), lines.append)
    found: list[object] = []
    try:
        for packet in (b'{"is":"fault","error":"\xff"}', b'{"is":"ready","version":3}'):
            processes.start({**os.environ, "PACKET": packet.hex()})
        wait_until(lambda: found.extend(each for _, each in processes.poll(1.0)) or found[1:])
        assert len(processes.living) == 1
    finally:
        processes.close()
    assert Died(-9, "") in found
    assert messages.Ready(version=3) in found
    (line,) = lines
    assert "its message is malformed" in line
    assert line.endswith(": killed")


@pytest.mark.parametrize(
    "bad",
    [b'{"is":"train","rank":0,"size":1,"run":"\xff"}', b'{"is":"stop","x":' + b"[" * DEEP, b"{"],
    ids=["not UTF-8", "too deep", "no JSON"],
)
def test_a_rank_whose_supervisor_sends_nonsense_ends_with_a_reason(
    bad: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        link = rank.Link(theirs.detach(), lambda generation: None, lambda order: None)
        ours.sendall(bad)
        wait_until(lambda: codes)
    link._socket.close()
    assert codes == [rank.EXIT_NO_SUPERVISOR]
    assert "the supervisor's message cannot be read" in caplog.text


BAD_JSON = [b'{"host":"\xff"}', b'{"x":' + b"[" * DEEP, b"{", b'{"size":"1"}', b"\0" * 9]


def test_a_supervisor_serves_after_any_request(tmp_path: Path):
    served = control.Control(tmp_path)
    try:
        for bad in BAD_JSON:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.connect(str(tmp_path / control.CONTROL))
                client.send(bad)
                for _ in range(2):
                    assert served.serve(lambda: pytest.fail("asked"), Order()) == Order()
                assert client.recv(1) == b"", "it was dropped"
    finally:
        served.close()


@pytest.mark.parametrize("bad", BAD_JSON)
def test_any_answer_to_a_command_is_one_of_our_errors(bad: bytes, tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(tmp_path / control.CONTROL))
        server.listen()

        def answer() -> None:
            client, _ = server.accept()
            with client:
                client.recv(1 << 16)
                client.send(bad)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(AgentError, match="its answer is malformed"):
            control.ask(tmp_path / control.CONTROL, control.Request(), 30.0)
        thread.join()


def test_notes_of_other_hosts_that_cannot_be_read_are_forgotten(tmp_path: Path):
    path = tmp_path / "noted"
    for bad in (b'{"run":"\xff"}', b'{"seeds":' + b"[" * DEEP, b"{"):
        path.write_bytes(bad)
        assert read_noted(path) == Noted()


def test_only_our_errors_come_out_of_a_decoder():
    """The types that their callers catch."""
    for decode in (messages.decode_to_process, messages.decode_from_process):
        for bad in (b"", b"\xff", b"[" * DEEP, b'{"is":"\xff"}'):
            with pytest.raises(TieredCkptError):
                decode(bad)
