"""A key-value table does what a dict and lists do, and its waits end exactly when they may."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict, deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.agent.tables import Tables
from tieredckpt.rpc.messages.kv import WAIT_S_MAX, Kv

KEYS = st.sampled_from(["a", "b", "c"])
MANY = st.lists(KEYS, max_size=3)
VALUE = st.binary(max_size=3)
PAIRS = st.lists(st.tuples(KEYS, VALUE), max_size=3)
OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["set", "append"]), PAIRS),
    st.tuples(st.sampled_from(["get", "check", "delete"]), MANY),
    st.tuples(st.just("compare_set"), st.tuples(KEYS, VALUE, VALUE)),
    st.tuples(st.sampled_from(["count", "watch"]), st.none()),
    st.tuples(st.just("push"), st.tuples(KEYS, VALUE)),
    st.tuples(st.sampled_from(["pop", "len"]), KEYS),
)


class Model:
    """What a table is expected to be."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = defaultdict(deque)
        self.changes = 0

    def exists(self, key: str) -> bool:
        return key in self.held or bool(self.queues[key])

    def expect(self, op: str, what: Any) -> tuple[Kv, tuple[Any, ...], int]:
        """The request, and its values and number."""
        values: tuple[Any, ...] = ()
        number = 0
        match op:
            case "set" | "append":
                keys, given = tuple(k for k, _ in what), tuple(v for _, v in what)
                for key, value in what:
                    self.held[key] = (self.held.get(key, b"") if op == "append" else b"") + value
                self.changes += len(what)
                return Kv(table="t", op=op, keys=keys, values=given), (), 0
            case "get":
                values = tuple(self.held.get(key) for key in what)
                number = int(None not in values)
            case "check":
                number = int(all(self.exists(key) for key in what))
            case "delete":
                number = sum(self.held.pop(key, None) is not None for key in what)
                self.changes += number
            case "compare_set":
                key, expected, desired = what
                if self.held.get(key, b"") == expected:
                    self.held[key] = desired
                    self.changes += 1
                values = (self.held.get(key, expected),)
                return Kv(table="t", op=op, keys=(key,), values=(expected, desired)), values, 0
            case "count":
                return Kv(table="t", op=op), (), len(self.held)
            case "watch":
                return Kv(table="t", op=op), tuple(self.held.items()), self.changes
            case "push":
                self.queues[what[0]].append(what[1])
                self.changes += 1
                return Kv(table="t", op=op, keys=what[:1], values=what[1:]), (), 0
            case "pop":
                values = (self.queues[what].popleft() if self.queues[what] else None,)
                number = int(values != (None,))
                self.changes += number
            case "len":
                number = len(self.queues[what])
        keys = (what,) if isinstance(what, str) else tuple(what)
        return Kv(table="t", op=op, keys=keys), values, number


@given(st.lists(OPERATIONS, max_size=30))
def test_a_table_is_a_dict_and_queues(operations: list[tuple[str, Any]]):
    async def run() -> None:
        tables, model = Tables(), Model()
        for op, what in operations:
            request, values, number = model.expect(op, what)
            reply = await tables.do("run", request)
            if op == "watch":
                found = dict(zip(reply.keys, reply.values, strict=True))
                assert (found, reply.number) == (dict(values), number)
            else:
                assert (reply.values, reply.number) == (values, number)
        queued = [(key, value) for key, queue in model.queues.items() for value in queue]
        entries = [*model.held.items(), *queued]
        size = sum(128 + sys.getsizeof(key) + sys.getsizeof(value) for key, value in entries)
        assert sum(table.size for table in tables._tables.values()) == size

    asyncio.run(run())


@given(
    st.lists(st.tuples(st.sampled_from(["get", "check"]), MANY), max_size=4),
    st.lists(OPERATIONS, max_size=15),
)
def test_a_wait_ends_exactly_when_its_keys_exist(
    waits: list[tuple[str, list[str]]], operations: list[tuple[str, Any]]
):
    async def run() -> None:
        tables, model = Tables(), Model()
        tasks = []
        for op, keys in waits:
            request = Kv(table="t", op=op, keys=tuple(keys), wait_s=WAIT_S_MAX)  # type: ignore[arg-type]
            tasks.append((op, keys, asyncio.create_task(tables.do("run", request))))
        ended: set[int] = set()
        for op, what in [("count", None), *operations]:
            await tables.do("run", model.expect(op, what)[0])
            for _ in range(6):  # rounds of the event loop until all that may end have ended
                await asyncio.sleep(0)
            for number, (wait, keys, task) in enumerate(tasks):
                exists = model.held.__contains__ if wait == "get" else model.exists
                if all(map(exists, keys)):
                    ended.add(number)
                assert task.done() == (number in ended), (wait, keys, op, what)
        for _, _, task in tasks:
            task.cancel()
        await asyncio.gather(*(task for _, _, task in tasks), return_exceptions=True)
        assert tables.waiting == 0

    asyncio.run(run())
