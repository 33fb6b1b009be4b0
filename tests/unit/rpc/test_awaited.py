"""Requests that wait in a server's event loop: both servers, with real key-value tables."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.agent import wait_until
from tests.support.peer_server import NAMESPACE, TOKEN, serving
from tieredckpt.agent.tables import Tables
from tieredckpt.errors import NotFoundError, TierUnavailableError, UsageError
from tieredckpt.rpc.agent_client import AgentClient, _round_trip
from tieredckpt.rpc.agent_server import AgentServer
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.fd_passing import connect, listen
from tieredckpt.rpc.http1 import HttpConnection
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.base import API_HEADER
from tieredckpt.rpc.messages.kv import WAIT_S_MAX, Kv, KvReply, PeerKv
from tieredckpt.rpc.messages.peer import Probe
from tieredckpt.rpc.peer_client import PeerClient

WAITING = 64
"""More than a server's threads."""
WAIT = Kv(table="t", op="get", keys=("k",), wait_s=WAIT_S_MAX)
SET = Kv(table="t", op="set", keys=("k",), values=(b"x",))


class Node:
    """As much of a node as these tests need."""

    def __init__(self) -> None:
        self.tables = Tables()

    async def kv(self, namespace: str, request: Kv, is_wanted: Callable[[], bool]) -> KvReply:
        return await self.tables.do(namespace, request, is_wanted)

    def health(self) -> m.Health:
        return m.Health(api=m.API_VERSION, version="", pid=1, host_id="here", uptime_s=0.0)

    def check_session(self, namespace: str, session_id: str) -> None:
        if session_id != "known":
            raise NotFoundError("no session", key=session_id, what="session")


@contextlib.contextmanager
def agent_server(folder: Path) -> Iterator[Node]:
    node, stop, loop = Node(), asyncio.Event(), asyncio.new_event_loop()
    server = AgentServer(node, listen(folder / "agent.sock"), stop.set)  # type: ignore[arg-type]

    async def run() -> None:
        await server.start()
        await stop.wait()
        await server.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=[run()])
    thread.start()
    try:
        yield node
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()


class Side:
    """One kind of server: its tables, a request, and another request that needs a thread."""

    tables: Tables
    ask: Callable[[Kv], KvReply]
    other: Callable[[], object]


@pytest.fixture(params=["agent", "peer"])
def side(request: pytest.FixtureRequest, runtime_dir: Path) -> Iterator[Side]:
    side = Side()
    if request.param == "agent":
        with agent_server(runtime_dir) as node, AgentClient(runtime_dir) as local:
            side.tables = node.tables
            side.ask = lambda asked: local.call(asked, NAMESPACE)
            side.other = local.health
            yield side
    else:
        with (
            serving() as (peer, entry, _),
            PeerClient(entry, NAMESPACE, Secret(TOKEN)) as client,
        ):
            side.tables = peer.tables
            side.ask = lambda asked: client.ask(PeerKv(request=asked))
            side.other = lambda: client.ask(Probe(size=1))
            yield side


def test_requests_that_wait_delay_no_other(side: Side):
    replies: list[KvReply] = []
    threads = [
        threading.Thread(target=lambda: replies.append(side.ask(WAIT))) for _ in range(WAITING)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: side.tables.waiting == WAITING)
    for _ in range(10):
        side.other()
        assert side.ask(Kv(table="t", op="count")).number == 0
    # All of that while they waited, and none of them is answered yet.
    assert (side.tables.waiting, replies) == (WAITING, [])
    side.ask(SET)
    for thread in threads:
        thread.join(20)
    assert [reply.values for reply in replies] == [(b"x",)] * WAITING
    assert side.tables.waiting == 0


def test_a_wait_ends_without_a_value(side: Side):
    began_s = time.monotonic()
    reply = side.ask(msgspec.structs.replace(WAIT, wait_s=0.2))
    assert (reply.values, reply.number) == ((None,), 0)
    assert 0.2 <= time.monotonic() - began_s < WAIT_S_MAX / 2


def test_errors_are_raised_as_they_are(side: Side):
    side.ask(SET)
    with pytest.raises(UsageError, match="no decimal number"):
        side.ask(Kv(table="t", op="add", keys=("k",), amount=1))
    assert side.ask(WAIT).values == (b"x",)


def test_a_reply_of_megabytes(side: Side):
    values = {f"k{number}": bytes([number]) * 900_000 for number in range(8)}
    for key, value in values.items():
        side.ask(Kv(table="t", op="set", keys=(key,), values=(value,)))
    reply = side.ask(Kv(table="t", op="watch"))
    assert dict(zip(reply.keys, reply.values, strict=True)) == values
    assert reply.number == 8


def wait_or_fail(client: PeerClient) -> None:
    with contextlib.suppress(TierUnavailableError):
        client.ask(PeerKv(request=WAIT))


def test_a_waiter_whose_client_is_gone_is_dropped(runtime_dir: Path):
    with agent_server(runtime_dir) as node:
        line = HttpConnection(connect(runtime_dir / "agent.sock", 5.0), 20.0)
        body = WAIT.encode()
        head = (
            f"POST /v1/namespaces/{NAMESPACE}/kv HTTP/1.1\r\nHost: x\r\n"
            f"{API_HEADER}: {m.API_VERSION}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        line.send(head.encode(), body)
        wait_until(lambda: node.tables.waiting == 1)
        began_s = time.monotonic()
        line.close()
        wait_until(lambda: node.tables.waiting == 0)
        assert time.monotonic() - began_s < WAIT_S_MAX / 2


def test_a_waiter_whose_host_is_gone_is_dropped():
    with serving() as (peer, entry, _):
        client = PeerClient(entry, NAMESPACE, Secret(TOKEN))
        thread = threading.Thread(target=wait_or_fail, args=[client])
        thread.start()
        wait_until(lambda: peer.tables.waiting == 1)
        began_s = time.monotonic()
        client.close()
        thread.join(WAIT_S_MAX / 2)
        assert not thread.is_alive()
        wait_until(lambda: peer.tables.waiting == 0)
        assert time.monotonic() - began_s < WAIT_S_MAX / 2


def test_a_server_that_stops_ends_its_waits():
    with serving() as (peer, entry, server):
        client = PeerClient(entry, NAMESPACE, Secret(TOKEN))
        thread = threading.Thread(target=wait_or_fail, args=[client])
        thread.start()
        wait_until(lambda: peer.tables.waiting == 1)
        server.stop()
        thread.join(WAIT_S_MAX / 2)
        assert not thread.is_alive()
        assert peer.tables.waiting == 0
        client.close()


def test_a_session_is_checked_if_there_is_one(runtime_dir: Path):
    """A client whose agent is a new one opens its session again."""
    with agent_server(runtime_dir):
        for session, status in (("known", 200), ("lost", 404)):
            line = HttpConnection(connect(runtime_dir / "agent.sock", 5.0), 20.0)
            got, body = _round_trip(
                line, "POST", f"/v1/namespaces/{NAMESPACE}/kv", SET.encode(), session
            )
            assert got == status, body
            line.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x81\xa1x" + b"\x91" * 20_000,
        b"\xdf\xff\xff\xff\xff",
        msgspec.msgpack.encode({"table": "t", "op": "set", "keys": ["k"]}),
        msgspec.msgpack.encode({"table": "../t", "op": "count"}),
        msgspec.msgpack.encode({"table": "t", "op": "get", "keys": ["k"], "wait_s": 1e9}),
    ],
)
def test_malformed_bodies(runtime_dir: Path, body: bytes):
    with agent_server(runtime_dir):
        line = HttpConnection(connect(runtime_dir / "agent.sock", 5.0), 20.0)
        status, reply = _round_trip(line, "POST", "/v1/namespaces/run/kv", body, "")
        assert status == 400
        assert b"malformed" in reply
        line.close()
