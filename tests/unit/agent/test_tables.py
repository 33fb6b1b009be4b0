"""Key-value tables: one operation each, waits, bounds."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from tieredckpt.agent import tables as tables_module
from tieredckpt.agent.tables import (
    BYTES_MAX,
    REPLIES_BYTES_MAX,
    STOOD_S,
    TABLE_BYTES_MAX,
    TABLES_MAX,
    UNUSED_S,
    Tables,
)
from tieredckpt.errors import CapacityError, RemoteProtocolError, UsageError
from tieredckpt.rpc.messages.kv import (
    KEY_CHARS_MAX,
    REPLY_BYTES_MAX,
    WAIT_S_MAX,
    Kv,
    KvReply,
    watch,
)

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
    assert not tables._tables[NAMESPACE, "t"].waiters


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


class Clock:
    """Seconds that a test sets."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def passes(clock: Clock, tables: Tables, left_s: float) -> None:
    """The agent looks every few seconds."""
    until_s = clock.now_s + left_s
    while clock.now_s < until_s:
        clock.now_s = min(until_s, clock.now_s + STOOD_S / 2)
        tables.expire()


def test_a_table_goes_ten_minutes_after_its_last_use():
    clock = Clock()
    tables = Tables(clock)
    first = ask(tables, "set", "k", values=(b"x",)).table_id
    for _ in range(3):
        passes(clock, tables, UNUSED_S - 1)
        assert ask(tables, "count").table_id == first
    clock.now_s += 10 * UNUSED_S  # the whole host was stopped, with the job
    tables.expire()
    passes(clock, tables, 1.0)
    assert ask(tables, "count").table_id == first
    passes(clock, tables, UNUSED_S)
    assert not tables._tables
    assert ask(tables, "count").table_id != first


def test_a_wait_is_a_use(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables_module, "LOOK_S", 0.01)
    clock = Clock()
    tables = Tables(clock)

    def is_wanted() -> bool:
        clock.now_s += UNUSED_S / 2
        return clock.now_s < 4 * UNUSED_S

    reply = asyncio.run(tables.do(NAMESPACE, kv("get", "k", wait_s=WAIT_S_MAX), is_wanted))
    tables.expire()
    assert ask(tables, "count").table_id == reply.table_id


def test_a_namespace_that_has_too_many_tables_is_refused_and_no_other_one(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(tables_module, "NAMESPACES_MAX", 2)
    tables = Tables()

    def touch(name: str, namespace: str = NAMESPACE) -> str:
        request = Kv(table=name, op="count")
        return asyncio.run(tables.do(namespace, request)).table_id

    ids = [touch(f"t{i}") for i in range(TABLES_MAX)]
    with pytest.raises(CapacityError, match=f"of {TABLES_MAX} tables"):
        touch("new")
    touch("t0", "other")
    with pytest.raises(CapacityError, match="0 of 64 tables"):
        touch("t0", "third")
    assert [touch(f"t{i}") for i in range(TABLES_MAX)] == ids


def test_a_namespace_that_fills_its_tables_changes_nothing_in_the_table_of_another_job():
    tables = Tables()
    job = ask(tables, "set", "k", namespace="job", values=(b"x",)).table_id
    stored = 0

    async def fill() -> None:
        nonlocal stored
        for number in range(68):
            for part in range(10):
                value = bytes(100_000 + part)
                table = f"t{number}"
                request = Kv(table=table, op="set", keys=(f"{part}",), values=(value,))
                await tables.do(NAMESPACE, request)
                stored += len(value)

    with pytest.raises(CapacityError, match="Delete keys, or wait"):
        asyncio.run(fill())
    assert BYTES_MAX * 0.9 < stored < BYTES_MAX
    reply = ask(tables, "set", "more", namespace="job", values=(bytes(1 << 20),))
    assert reply.table_id == job
    assert ask(tables, "get", "k", namespace="job").values == (b"x",)


def test_a_full_generation_leaves_room_for_the_next_one():
    tables = Tables()
    fit = TABLE_BYTES_MAX // (1 << 20) - 1
    for number in range(fit):
        ask(tables, "set", f"{number}", values=(bytes(1 << 20),))
    with pytest.raises(CapacityError, match="Delete keys, or wait"):
        ask(tables, "set", f"{fit}", values=(bytes(1 << 20),))
    for name in ("next", "after"):
        request = Kv(table=name, op="set", keys=("k",), values=(bytes(1 << 20),))
        asyncio.run(tables.do(NAMESPACE, request))
    # The full one is as before, and has room again once something is deleted.
    ask(tables, "delete", "0")
    ask(tables, "set", "0", values=(bytes(1000),))


def test_bytes_that_do_not_fit_are_refused_and_change_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables_module, "TABLE_BYTES_MAX", 4000)
    tables = Tables()
    ask(tables, "set", "k", values=(bytes(3500),))
    before = ask(tables, "watch")
    for op, values in (
        ("set", (bytes(300),)), ("append", (bytes(300),)), ("push", (bytes(300),)),
        ("compare_set", (b"", bytes(300))),
    ):  # fmt: skip
        with pytest.raises(CapacityError, match="of 4000"):
            ask(tables, op, "more", values=values)
    with pytest.raises(CapacityError, match="of 4000"):
        ask(tables, "add", "\U0001f600" * 100, amount=1)  # 400 bytes
    assert ask(tables, "watch") == before
    assert ask(tables, "delete", "k").number == 1
    assert [table.size for table in tables._tables.values()] == [0]


@pytest.mark.parametrize("what", ["replies", "small", "queues", "keys"])
def test_what_requests_take_in_memory_is_bounded(what: str, monkeypatch: pytest.MonkeyPatch):
    """1,500 compare_set of 1 MB took 1.5 GiB: each of their replies was kept."""
    if what != "replies":
        monkeypatch.setattr(tables_module, "TABLE_BYTES_MAX", 1 << 20)
    tables = Tables()

    def request(number: int) -> Kv:
        match what:
            case "replies":
                return kv("compare_set", "k", values=(bytes(1_000_000), b""), once=f"{number}")
            case "small":
                return kv("set", f"{number}", values=(b"",))
            case "queues":
                return kv("push", f"{number}", values=(b"",))
        return kv("add", "\U0001f600" * 1000 + f"{number}", amount=1)

    async def run() -> int:
        tracemalloc.start()
        try:
            for number in range(1500 if what == "replies" else 10_000):
                await tables.do(NAMESPACE, request(number))
        except CapacityError:
            assert what != "replies"
        else:
            assert what == "replies"
        finally:
            found = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
        return found

    limit = REPLIES_BYTES_MAX if what == "replies" else 1 << 20
    assert limit / 4 < asyncio.run(run()) < limit


def test_pages_of_a_watch():
    tables = Tables()
    values = {f"k{number:02}": bytes([number]) * 1_000_000 for number in range(12)}
    for key, value in values.items():
        ask(tables, "set", key, values=(value,))
    sizes = []

    def of(request: Kv) -> KvReply:
        reply = asyncio.run(tables.do(NAMESPACE, request))
        sizes.append(sum(map(len, filter(None, reply.values))))
        if len(sizes) == 1:
            ask(tables, "set", "k11", values=(b"new",))
        return reply

    revision = ask(tables, "count") and ask(tables, "watch").number
    reply = watch(of, kv("watch", after=revision - 1, wait_s=WAIT_S_MAX))
    assert dict(zip(reply.keys, reply.values, strict=True)) == values | {"k11": b"new"}
    assert reply.number == revision
    assert len(sizes) == 2
    assert max(sizes) <= REPLY_BYTES_MAX


@pytest.mark.parametrize("keys", [(), ("k",)])
def test_a_host_whose_pages_never_end_is_refused(keys: tuple[str, ...]):
    page = KvReply(table_id="t", keys=keys, values=(b"v",) * len(keys), more=True)
    with pytest.raises(RemoteProtocolError, match="pages"):
        watch(lambda _: page, kv("watch"))


def test_a_value_that_no_reply_can_have_is_refused():
    tables = Tables()
    for _ in range(7):
        ask(tables, "append", "k", values=(bytes(1 << 20),))
    with pytest.raises(CapacityError, match="the value has more"):
        ask(tables, "append", "k", values=(bytes(1 << 20),))
    assert ask(tables, "watch").keys == ("k",)


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
