"""Key-value tables in this agent's memory, with which the ranks of a generation find each other.

A table is used for one generation, and a lost host ends the generation. So nothing is replicated,
written to disk or recovered, and nobody closes a table: the least recently used ones are dropped.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import Callable

from tieredckpt.errors import CapacityError, UsageError
from tieredckpt.rpc.messages.kv import REPLY_BYTES_MAX, Kv, KvReply

TABLES_MAX = 16
"""Of one namespace: a generation has one, and a late request may be of the one before."""
NAMESPACES_MAX = 64
BYTES_MAX = 64 << 20
"""Of all tables: if they have more, no request adds to them."""
ENTRY_BYTES = 128
"""What a key takes beside its own bytes, about."""
WAITERS_MAX = 8192
"""More than the connections that are served."""
REPLIES_MAX = 4096
"""Kept by one table for requests that are repeated: more than clients have under way."""
LOOK_S = 1.0
"""A waiting request whose client is gone is dropped so much later, at most."""

SUM_MAX = 1 << 63

_GROWING = ("set", "append", "add", "compare_set", "push")
_Waiter = asyncio.Future[None]
_Values = tuple[bytes | None, ...]
_Awaited = tuple[str | None, ...]
"""The key that must change before a reply is complete, None: any, or nothing."""


class Table:
    """One table. Its caller holds the lock of :class:`Tables`."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(16)
        self.size = self._revision = 0
        self.waiters: dict[_Waiter, str | None] = {}
        """Futures that are done once a key changes; None: any key."""
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._replies: dict[str, KvReply] = {}

    def apply(self, request: Kv) -> tuple[KvReply, _Awaited]:
        """The reply, as far as it is complete."""
        if request.once in self._replies:
            return self._replies[request.once], ()
        values, number, awaited = self._result_of(request)
        if sum(len(value) for value in values if value is not None) > REPLY_BYTES_MAX:
            raise CapacityError(f"the reply has more than {REPLY_BYTES_MAX} bytes of values")
        shown = tuple(self._values) if request.op == "watch" else ()
        reply = KvReply(table_id=self.id, keys=shown, values=values, number=int(number))
        if request.once and not awaited:
            self._replies[request.once] = reply
            if len(self._replies) > REPLIES_MAX:
                del self._replies[next(iter(self._replies))]
        return reply, awaited

    def _result_of(self, request: Kv) -> tuple[_Values, int, _Awaited]:
        """Values and number of the reply, and the awaited key."""
        keys, key, held = request.keys, next(iter(request.keys), ""), self._values
        match request.op:
            case "set" | "append":
                for each, value in zip(keys, request.values, strict=True):
                    old = held.get(each, b"") if request.op == "append" else b""
                    self._put(each, old + value)
            case "get" | "check":
                queues = self._queues if request.op == "check" else {}
                missing = tuple(k for k in keys if k not in held and k not in queues)
                values = tuple(map(held.get, keys)) if request.op == "get" else ()
                return values, not missing, missing[:1]
            case "add":
                total = _sum(held.get(key) or b"0", request.amount)
                self._put(key, b"%d" % total)
                return (), total, ()
            case "compare_set":
                expected, desired = request.values
                if held.get(key, b"") == expected:
                    self._put(key, desired)
                return (held.get(key, expected),), 0, ()
            case "delete":
                return (), sum([self._put(each, None) for each in keys]), ()
            case "count":
                return (), len(held), ()
            case "watch":
                waits = (None,) if self._revision == request.after else ()
                return tuple(held.values()), self._revision, waits
            case "push":
                self._queues.setdefault(key, deque()).append(request.values[0])
                self._changed(key, _size(key, request.values[0]))
            case "pop":
                first = self._pop(key)
                return (first,), first is not None, () if first is not None else (key,)
            case "len":
                return (), len(self._queues.get(key, ())), ()
        return (), 0, ()

    def _put(self, key: str, value: bytes | None) -> bool:
        """Set or, with None, delete; False: there was nothing to delete."""
        old = self._values.pop(key, None)
        if value is not None:
            self._values[key] = value
        if value is not None or old is not None:
            self._changed(key, _size(key, value) - _size(key, old))
        return value is not None or old is not None

    def _pop(self, key: str) -> bytes | None:
        queue = self._queues.pop(key, deque())
        value = queue.popleft() if queue else None
        if queue:
            self._queues[key] = queue
        if value is not None:
            self._changed(key, -_size(key, value))
        return value

    def _changed(self, key: str, more_bytes: int) -> None:
        self.size += more_bytes
        self._revision += 1
        for waiter, awaited in self.waiters.items():
            if awaited in (key, None):
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)


class Tables:
    """The tables of all namespaces. Thread-safe; a request waits in the event loop of its caller.

    :attr:`waiting` is the number of requests that wait.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self._lock = threading.Lock()
        self._namespaces: dict[str, dict[str, Table]] = {}

    async def do(
        self, namespace: str, request: Kv, is_wanted: Callable[[], bool] = lambda: True
    ) -> KvReply:
        """Apply one operation. ``is_wanted``: whether its client is still there.

        The class of the request documents the errors.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + request.wait_s
        while True:
            with self._lock:
                table = self._find(namespace, request)
                reply, awaited = table.apply(request)
                left_s = until_s - loop.time()
                if not awaited or left_s <= 0 or not is_wanted():
                    return reply
                if self.waiting >= WAITERS_MAX:
                    raise CapacityError(f"{WAITERS_MAX} requests wait for keys in this agent")
                waiter = loop.create_future()
                table.waiters[waiter] = awaited[0]
                self.waiting += 1
            try:
                await asyncio.wait((waiter,), timeout=min(left_s, LOOK_S))
            finally:
                with self._lock:
                    del table.waiters[waiter]
                    self.waiting -= 1

    def drop(self, namespace: str) -> None:
        """Drop the tables of a namespace."""
        with self._lock:
            self._namespaces.pop(namespace, None)

    def _find(self, namespace: str, request: Kv) -> Table:
        """The table of a request, from now on the most recently used one."""
        tables = self._namespaces[namespace] = self._namespaces.pop(namespace, {})
        tables[request.table] = table = tables.pop(request.table, None) or Table()
        while len(tables) > 1 and (len(tables) > TABLES_MAX or self._bytes() > BYTES_MAX):
            del tables[next(iter(tables))]
        if len(self._namespaces) > NAMESPACES_MAX:
            del self._namespaces[next(iter(self._namespaces))]
        if request.op in _GROWING and self._bytes() > BYTES_MAX:
            raise CapacityError(f"the key-value tables of this agent have {BYTES_MAX} bytes")
        return table

    def _bytes(self) -> int:
        return sum(each.size for tables in self._namespaces.values() for each in tables.values())


def _size(key: str, value: bytes | None) -> int:
    return ENTRY_BYTES + len(key) + len(value) if value is not None else 0


def _sum(value: bytes, amount: int) -> int:
    try:
        total = int(value) + amount
    except ValueError:
        total = SUM_MAX
    if abs(total) >= SUM_MAX:
        raise UsageError(f"the value {value[:40]!r} is no decimal number that {amount} is added to")
    return total


def _wake(waiter: _Waiter) -> None:
    if not waiter.done():
        waiter.set_result(None)
