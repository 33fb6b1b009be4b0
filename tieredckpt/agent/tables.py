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
"""Of all tables."""
ENTRY_BYTES = 128
"""What a key takes beside its own bytes, about."""
WAITERS_MAX = 8192
"""More than connections are served."""
LOOK_S = 1.0
"""A waiting request whose client is gone is dropped so much later, at most."""

_Waiter = asyncio.Future[None]


class Table:
    """One table. Its caller holds the lock of :class:`Tables`."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(16)
        self.size = 0
        self._revision = 0
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._waiters: dict[str | None, set[_Waiter]] = {}

    def apply(self, request: Kv) -> tuple[KvReply, tuple[str | None, ...]]:
        """The reply, and the keys of which one must change before it is another; None: any key."""
        awaited: tuple[str | None, ...] = ()
        keys, values, number = request.keys, tuple[bytes | None, ...](), 0
        match request.op:
            case "set":
                for key, value in zip(keys, request.values, strict=True):
                    self._put(key, value)
            case "append":
                for key, value in zip(keys, request.values, strict=True):
                    self._put(key, self._values.get(key, b"") + value)
            case "get":
                values = tuple(map(self._values.get, keys))
                awaited = tuple(k for k, v in zip(keys, values, strict=True) if v is None)[:1]
            case "check":
                number = int(all(key in self._values for key in keys))
            case "add":
                number = _number(self._values.get(keys[0], b"0")) + request.amount
                self._put(keys[0], b"%d" % number)
            case "compare_set":
                expected, desired = request.values
                found = self._values.get(keys[0])
                if found == expected or (found is None and not expected):
                    self._put(keys[0], desired)
                    found = desired
                values = (expected if found is None else found,)
            case "delete":
                number = sum(self._remove(key) for key in keys)
            case "count":
                number = len(self._values)
            case "watch":
                number = self._revision
                keys, values = tuple(self._values), tuple(self._values.values())
                awaited = (None,) if number == request.after else ()
            case "push":
                self._queues.setdefault(keys[0], deque()).append(request.values[0])
                self._changed(keys[0], _size(keys[0], request.values[0]))
            case "pop":
                values = (self._pop(keys[0]),)
                awaited = keys if values == (None,) else ()
            case "len":
                number = len(self._queues.get(keys[0], ()))
        if sum(len(value) for value in values if value is not None) > REPLY_BYTES_MAX:
            raise CapacityError(f"more than {REPLY_BYTES_MAX} bytes of values in one reply")
        shown = keys if request.op == "watch" else ()
        return KvReply(table_id=self.id, keys=shown, values=values, number=number), awaited

    def _put(self, key: str, value: bytes) -> None:
        old = self._values.get(key)
        self._values[key] = value
        self._changed(key, _size(key, value) - (_size(key, old) if old is not None else 0))

    def _remove(self, key: str) -> bool:
        old = self._values.pop(key, None)
        if old is not None:
            self._changed(key, -_size(key, old))
        return old is not None

    def _pop(self, key: str) -> bytes | None:
        queue = self._queues.get(key)
        if queue is None:
            return None
        value = queue.popleft()
        if not queue:
            del self._queues[key]
        self._changed(key, -_size(key, value))
        return value

    def _changed(self, key: str, more_bytes: int) -> None:
        self.size += more_bytes
        self._revision += 1
        for each in (key, None):
            for waiter in self._waiters.pop(each, ()):
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    def wait(self, key: str | None, waiter: _Waiter) -> None:
        """Wake ``waiter`` once ``key`` (None: any) has changed."""
        self._waiters.setdefault(key, set()).add(waiter)

    def forget(self, key: str | None, waiter: _Waiter) -> None:
        """Do not wake ``waiter``."""
        waiters = self._waiters.get(key)
        if waiters is not None:
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[key]


class Tables:
    """The tables of all namespaces. Thread-safe; requests wait in the event loop of their caller.

    :attr:`waiting` is the number of requests that wait.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self._lock = threading.Lock()
        self._namespaces: dict[str, dict[str, Table]] = {}

    async def do(
        self, namespace: str, request: Kv, is_wanted: Callable[[], bool] = lambda: True
    ) -> KvReply:
        """Carry out one operation. ``is_wanted``: whether its client is still there.

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
                table.wait(awaited[0], waiter)
                self.waiting += 1
            try:
                await asyncio.wait((waiter,), timeout=min(left_s, LOOK_S))
            finally:
                with self._lock:
                    table.forget(awaited[0], waiter)
                    self.waiting -= 1

    def drop(self, namespace: str) -> None:
        """Drop the tables of a namespace."""
        with self._lock:
            self._namespaces.pop(namespace, None)

    def _find(self, namespace: str, request: Kv) -> Table:
        """The table of a request that fits into it, now the most recently used one."""
        tables = self._namespaces.pop(namespace, {})
        self._namespaces[namespace] = tables
        tables[request.table] = table = tables.pop(request.table, None) or Table()
        if len(tables) > TABLES_MAX:
            del tables[next(iter(tables))]
        if len(self._namespaces) > NAMESPACES_MAX:
            del self._namespaces[next(iter(self._namespaces))]
        more = sum(map(len, request.values)) + sum(ENTRY_BYTES + len(key) for key in request.keys)
        if request.op in _GROWING and more + self._size() > BYTES_MAX:
            raise CapacityError(f"the key-value tables of this agent have {BYTES_MAX} bytes")
        return table

    def _size(self) -> int:
        return sum(each.size for tables in self._namespaces.values() for each in tables.values())


_GROWING = ("set", "append", "add", "compare_set", "push")


def _size(key: str, value: bytes) -> int:
    return ENTRY_BYTES + len(key) + len(value)


def _number(value: bytes) -> int:
    try:
        if len(value) <= 20:
            return int(value)
    except ValueError:
        pass
    raise UsageError(f"the value {value[:40]!r} is no decimal number to add to")


def _wake(waiter: _Waiter) -> None:
    if not waiter.done():
        waiter.set_result(None)
