"""Key-value tables: one operation each, waits, bounds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from tieredckpt.agent import tables as tables_module
from tieredckpt.agent.tables import TABLES_MAX, Tables
from tieredckpt.errors import CapacityError, RemoteProtocolError, UsageError
from tieredckpt.rpc.messages.kv import KEY_CHARS_MAX, REPLY_BYTES_MAX, WAIT_S_MAX, Kv, KvReply

NAMESPACE = "run"


def ask(tables: Tables, op: str, *keys: str, namespace: str = NAMESPACE, **more: object) -> KvReply:
    request = Kv(table="t", op=op, keys=keys, **more)  # type: ignore[arg-type]
    return asyncio.run(tables.do(namespace, request))


def kv(op: str, *keys: str, **more: object) -> Kv:
    return Kv(table="t", op=op, keys=keys, **more)  # type: ignore[arg-type]


def waits(
    tables: Tables, *asked: Kv, then: Callable[[], Awaitable[object]]
) -> tuple[list[KvReply], float]:
    """Replies to requests that wait when ``then`` is called, and how long the last one took."""

    async def run() -> tuple[list[KvReply], float]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        tasks = [loop.create_task(tables.do(NAMESPACE, each)) for each in asked]
        await asyncio.sleep(0)  # each runs until it waits
        assert tables.waiting == len(asked)
        await then()
        return await asyncio.gather(*tasks), loop.time() - began_s

    return asyncio.run(run())


def test_each_operation():
    tables = Tables()
    ask(tables, "set", "a", "b", values=(b"1", b"2"))
    ask(tables, "append", "b", "c", values=(b"3", b"4"))
    assert ask(tables, "get", "a", "b", "c", "d").values == (b"1", b"23", b"4", None)
    assert ask(tables, "check", "a", "b").number == 1
    assert ask(tables, "check", "a", "d").number == 0
    assert ask(tables, "add", "n", amount=5).number == 5
    assert ask(tables, "add", "n", amount=-7).number == -2
    assert ask(tables, "get", "n").values == (b"-2",)
    assert ask(tables, "count").number == 4
    assert ask(tables, "delete", "a", "d").number == 1
    assert ask(tables, "check").number == 1
    found = ask(tables, "watch")
    assert dict(zip(found.keys, found.values, strict=True)) == {"b": b"23", "c": b"4", "n": b"-2"}


def test_add_to_no_number():
    tables = Tables()
    numbers = (b"x", b"9" * 100, b"9" * 5000, b"%d" % (2**63 - 1))
    ask(tables, "set", "k", "long", "longer", "largest", values=numbers)
    for key in ("k", "long", "longer", "largest"):
        with pytest.raises(UsageError, match="no decimal number"):
            ask(tables, "add", key, amount=1)


def test_a_watch_returns_after_a_change():
    tables = Tables()
    before = ask(tables, "set", "k", values=(b"1",))
    revision = ask(tables, "watch").number
    change = kv("delete", "k")
    watch = kv("watch", after=revision, wait_s=WAIT_S_MAX)
    (reply,), took_s = waits(tables, watch, then=lambda: tables.do(NAMESPACE, change))
    assert (reply.keys, reply.number, reply.table_id) == ((), revision + 1, before.table_id)
    assert took_s < WAIT_S_MAX / 2
    # What did not change anything wakes nobody.
    ask(tables, "delete", "k")
    assert ask(tables, "watch").number == revision + 1


def test_a_watch_of_a_lost_table_returns_at_once():
    """Its revisions begin anew: a watcher that waited for a higher one might wait for ever."""
    tables = Tables()
    before = ask(tables, "set", "k", values=(b"1",))
    tables.drop(NAMESPACE)
    reply = ask(tables, "watch", after=1, wait_s=WAIT_S_MAX)
    assert (reply.number, reply.values) == (0, ())
    assert reply.table_id != before.table_id


def test_a_change_in_another_event_loop_wakes():
    tables = Tables()

    async def change() -> None:
        other = threading.Thread(target=ask, args=(tables, "set", "k"), kwargs={"values": (b"x",)})
        other.start()
        await asyncio.to_thread(other.join)

    (reply,), took_s = waits(tables, kv("get", "k", wait_s=WAIT_S_MAX), then=change)
    assert reply.values == (b"x",)
    assert took_s < WAIT_S_MAX / 2


def test_a_request_that_is_not_wanted_any_more_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables_module, "LOOK_S", 0.05)
    tables, asked = Tables(), []

    def is_wanted() -> bool:
        asked.append(tables.waiting)
        return len(asked) < 3

    reply = asyncio.run(tables.do(NAMESPACE, kv("get", "k", wait_s=WAIT_S_MAX), is_wanted))
    assert reply.values == (None,)
    assert len(asked) == 3
    assert not tables.waiting


def test_a_request_that_is_cancelled_leaves_no_waiter():
    tables = Tables()

    async def run() -> None:
        task = asyncio.create_task(tables.do(NAMESPACE, kv("get", "k", wait_s=WAIT_S_MAX)))
        await asyncio.sleep(0)
        assert tables.waiting
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert not tables.waiting
    assert not tables._namespaces[NAMESPACE]["t"].waiters


def test_the_number_of_waiters_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables_module, "WAITERS_MAX", 2)
    tables = Tables()
    get = kv("get", "k", wait_s=0.2)

    async def third() -> None:
        with pytest.raises(CapacityError, match="2 requests wait"):
            await tables.do(NAMESPACE, get)
        await tables.do(NAMESPACE, kv("set", "k", values=(b"x",)))

    replies, _ = waits(tables, get, get, then=third)
    assert [reply.values for reply in replies] == [(b"x",), (b"x",)]


def test_the_least_recently_used_table_of_a_namespace_is_dropped():
    tables = Tables()

    def touch(name: str, namespace: str = NAMESPACE) -> str:
        request = Kv(table=name, op="count")
        return asyncio.run(tables.do(namespace, request)).table_id

    ids = [touch(f"t{i}") for i in range(TABLES_MAX)]
    other = touch("t0", "other")
    assert touch("t0") == ids[0]
    touch("new")
    assert touch("t0") == ids[0]
    assert touch("t1") != ids[1]
    assert touch("t0", "other") == other


def test_the_bytes_of_all_tables_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables_module, "BYTES_MAX", 4000)
    tables = Tables()
    ask(tables, "set", "k", values=(bytes(2500),))
    ask(tables, "push", "q", namespace="other", values=(bytes(2500),))
    for op, more in (("set", (b"",)), ("append", (b"",)), ("push", (b"",)), ("add", ())):
        with pytest.raises(CapacityError, match="4000 bytes"):
            ask(tables, op, "more", values=more)
    assert ask(tables, "pop", "q", namespace="other").values == (bytes(2500),)
    ask(tables, "set", "k", values=(b"",))
    ask(tables, "set", "more", values=(b"",))
    ask(tables, "delete", "k", "more")
    assert tables._namespaces[NAMESPACE]["t"].size == 0


def test_the_reply_is_bounded():
    tables = Tables()
    ask(tables, "set", "k", values=(bytes(1 << 20),))
    with pytest.raises(CapacityError, match="the reply has more"):
        ask(tables, "get", *["k"] * (REPLY_BYTES_MAX // (1 << 20) + 1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"table": "../t"},
        {"table": "t" * 200},
        {"op": "drop"},
        {"keys": ["k" * (KEY_CHARS_MAX + 1)], "op": "get"},
        {"keys": ["k"] * 5000, "op": "get"},
        {"keys": ["k"], "values": [], "op": "set"},
        {"keys": [], "op": "add"},
        {"keys": ["a", "b"], "op": "add"},
        {"keys": ["a"], "values": [b"x"], "op": "compare_set"},
        {"keys": ["a"], "values": [b"x"], "op": "get"},
        {"wait_s": WAIT_S_MAX + 1},
        {"wait_s": -1.0},
        {"wait_s": float("nan")},
        {"amount": 1 << 63},
        {"after": -1},
        {"more": 1},
    ],
)
def test_malformed_requests(wrong: dict[str, object]):
    with pytest.raises(RemoteProtocolError, match="malformed"):
        Kv.decode(msgspec.msgpack.encode({"table": "t", "op": "count", **wrong}))


def test_a_request_that_is_repeated_is_carried_out_once():
    """Both kinds of clients send a request again whose connection broke."""
    tables = Tables()
    for op, more in (
        ("add", {"amount": 1}),
        ("append", {"values": (b"x",)}),
        ("push", {"values": (b"x",)}),
        ("push", {"values": (b"y",)}),
        ("pop", {}),
    ):
        key, once = op.replace("pop", "push"), f"{op}{more}"
        replies = [ask(tables, op, key, once=once, **more) for _ in range(2)]
        assert replies[0] == replies[1]
    assert ask(tables, "get", "add", "append").values == (b"1", b"x")
    assert ask(tables, "len", "push").number == 1
    assert ask(tables, "add", "add", amount=1, once="another").number == 2


def test_an_incomplete_reply_is_not_kept():
    tables = Tables()
    assert ask(tables, "pop", "q", once="1").values == (None,)
    ask(tables, "push", "q", values=(b"x",))
    assert ask(tables, "pop", "q", once="1").values == (b"x",)


def test_kept_replies_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables_module, "REPLIES_MAX", 2)
    tables = Tables()
    for once in ("1", "2", "3", "2", "1"):
        reply = ask(tables, "add", "k", amount=1, once=once)
    assert reply.number == 4
