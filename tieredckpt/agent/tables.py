"""Key-value tables in this agent's memory, with which the ranks of a generation find each other.

A table is used for one generation, and a lost host ends the generation. So nothing is replicated,
written to disk or recovered, and nobody closes a table: it is dropped once it has not been used for
``UNUSED_S``, and never to make room. A namespace may fill only its own tables: where a request does
not fit it is refused, and no other one.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
import threading
import time
from collections.abc import Callable

from tieredckpt.errors import CapacityError, UsageError
from tieredckpt.rpc.messages.kv import REPLY_BYTES_MAX, Kv, KvReply

UNUSED_S = 600.0
STOOD_S = 60.0
"""An agent that has not looked for so long was stopped, with the host or by its job's scheduler."""
TABLES_MAX = 64
"""Of one namespace: more than the generations of a job that fails again and again in UNUSED_S."""
NAMESPACES_MAX = 64
BYTES_MAX = 64 << 20
"""Of all tables of one namespace, with the replies that they keep."""
TABLE_BYTES_MAX = 16 << 20
"""Of one table, so that a generation that fills its table leaves room for the next one's."""
ENTRY_BYTES = 128
"""What an entry takes beside its key and value, about."""
WAITERS_MAX = 8192
"""Of one table: more than the connections that are served."""
REPLIES_MAX = 4096
"""Kept by one table for requests that are repeated: more than clients have under way."""
REPLIES_BYTES_MAX = 2 * REPLY_BYTES_MAX
"""Of the replies that one table keeps."""
LOOK_S = 1.0
"""A waiting request whose client is gone is dropped so much later, at most."""

SUM_MAX = 1 << 63

_GROWING = ("set", "append", "add", "compare_set", "push")
_Waiter = asyncio.Future[None]
_Values = tuple[bytes | None, ...]
_Awaited = tuple[str | None, ...]
"""The key that must change before a reply is complete, None: any, or nothing."""


class Table:
    """One table. Its caller holds the lock of :class:`Tables`.

    Attributes:
        size: Bytes of its keys and values.
        kept: Bytes of the replies that it keeps.
        used_s: When it was last used, or waited for.
    """

    def __init__(self) -> None:
        self.id = secrets.token_hex(16)
        self.size = self.kept = self._revision = 0
        self.used_s = 0.0
        self.waiters: dict[_Waiter, str | None] = {}
        """Futures that are done once a key changes; None: any key."""
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, list[bytes]] = {}
        self._replies: dict[str, KvReply] = {}

    def apply(self, request: Kv) -> tuple[KvReply, _Awaited]:
        """The reply, as far as it is complete."""
        if request.once in self._replies:
            return self._replies[request.once], ()
        values, number, awaited = self._result_of(request)
        page, more = self._page_of(request) if request.op == "watch" else ((), False)
        values = values or tuple(map(self._values.get, page))
        if sum(len(value) for value in values if value is not None) > REPLY_BYTES_MAX:
            raise CapacityError(f"the reply has more than {REPLY_BYTES_MAX} bytes of values")
        reply = KvReply(table_id=self.id, keys=page, values=values, number=int(number), more=more)
        if request.once and request.op in (*_GROWING, "pop") and not awaited:
            self._replies[request.once] = reply
            self.kept += _bytes(request.once, *values)
            while len(self._replies) > REPLIES_MAX or self.kept > REPLIES_BYTES_MAX:
                once = next(iter(self._replies))
                self.kept -= _bytes(once, *self._replies.pop(once).values)
        return reply, awaited

    def _page_of(self, request: Kv) -> tuple[tuple[str, ...], bool]:
        """The next keys in order, as many as a reply may have, and whether there are more."""
        keys = sorted(key for key in self._values if not request.keys or key > request.keys[0])
        sizes = itertools.accumulate(_bytes(key, self._values[key]) for key in keys)
        count = sum(size <= REPLY_BYTES_MAX for size in sizes)
        return tuple(keys[:count]), count < len(keys)

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
                return (), self._revision, waits
            case "push":
                self._queues.setdefault(key, []).append(request.values[0])
                self._changed(key, _size(key, request.values[0]))
            case "pop":
                first = self._pop(key)
                return (first,), first is not None, () if first is not None else (key,)
            case "len":
                return (), len(self._queues.get(key, ())), ()
        return (), 0, ()

    def _put(self, key: str, value: bytes | None) -> bool:
        """Set or, with None, delete; False: there was nothing to delete."""
        if value is not None and _bytes(key, value) > REPLY_BYTES_MAX:
            raise CapacityError(f"the value has more than {REPLY_BYTES_MAX} bytes with its key")
        old = self._values.pop(key, None)
        if value is not None:
            self._values[key] = value
        if value is not None or old is not None:
            self._changed(key, _size(key, value) - _size(key, old))
        return value is not None or old is not None

    def _pop(self, key: str) -> bytes | None:
        queue = self._queues.pop(key, [])
        value = queue.pop(0) if queue else None
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

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.waiting = 0
        self._lock = threading.Lock()
        self._expired_s = clock()
        self._tables: dict[tuple[str, str], Table] = {}
        """By namespace and name."""

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
                if len(table.waiters) >= WAITERS_MAX:
                    raise CapacityError(f"{WAITERS_MAX} requests wait for keys of this table")
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
            self._tables = {key: each for key, each in self._tables.items() if key[0] != namespace}

    def expire(self) -> None:
        """Drop the tables that nobody has used for ``UNUSED_S``. To be called every few seconds."""
        with self._lock:
            now_s, before_s = self._clock(), self._expired_s
            from_s, self._expired_s = now_s - UNUSED_S, now_s
            if now_s - before_s > STOOD_S:  # nobody could use them, and a job may go on now
                for each in self._tables.values():
                    each.used_s = now_s
            self._tables = {k: each for k, each in self._tables.items() if each.used_s > from_s}

    def _find(self, namespace: str, request: Kv) -> Table:
        """The table of a request, which is used now. Raises CapacityError: nothing was changed."""
        key = namespace, request.table
        table = self._tables.get(key) or Table()
        others = [each for (of, _), each in self._tables.items() if of == namespace]
        held = sum(each.size + each.kept for each in others)
        more = 0
        if request.op in _GROWING:
            more = _bytes(*request.values) + sum(map(_bytes, request.keys))
        is_full = more > max(0, min(BYTES_MAX - held, TABLE_BYTES_MAX - table.size))
        if key not in self._tables:
            namespaces = {namespace} | {of for of, _ in self._tables}
            is_full |= len(others) >= TABLES_MAX or len(namespaces) > NAMESPACES_MAX
        if is_full:
            raise CapacityError(
                f"{more} bytes more do not fit into key-value table {request.table}: it has "
                f"{table.size} of {TABLE_BYTES_MAX}, and namespace {namespace} {held} of "
                f"{BYTES_MAX} in {len(others)} of {TABLES_MAX} tables on this host. Delete keys, "
                f"or wait: a table goes {UNUSED_S:.0f} s after its last use"
            )
        table.used_s = self._clock()
        self._tables[key] = table
        return table


def _size(key: str, value: bytes | None) -> int:
    return _bytes(key, value) if value is not None else 0


def _bytes(*parts: str | bytes | None) -> int:
    """What an entry of these parts takes in memory, about."""
    return ENTRY_BYTES + sum(map(sys.getsizeof, parts))


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
