"""Which TCP connections an agent keeps: strangers are few and short, all together are bounded.

A connection is *pending* until its first proven request. Pending ones are limited in number (in
total and per address; the oldest of the address that has most is cut for the newest) and in time;
so ten thousand strangers cost what a few hundred do, and who knows the secret gets in past them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tieredckpt.transport.auth import Verifier, new_nonce


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one server."""

    connections: int = 2048
    """In total; a new one then takes the place of the one that has been idle for longest."""
    pending: int = 256
    pending_per_address: int = 64
    """All trainers of a host may come at once."""
    pending_s: float = 10.0
    """Until the first proven request."""
    idle_s: float = 120.0
    """Proven connections that ask nothing, or never end their question."""


class Connection:
    """One accepted connection."""

    __slots__ = ("asked", "busy", "group", "last_s", "sock", "tls", "verifier")

    def __init__(self, sock: socket.socket, group: str, now_s: float) -> None:
        self.sock = sock
        self.group = group
        self.last_s = now_s
        """When it was accepted, then when it was last asked something."""
        self.verifier = Verifier(new_nonce())
        self.busy = False
        self.asked = False
        """Whether it got its nonce already."""
        self.tls = False

    def cut(self) -> None:
        """End it, from any thread; whoever owns the socket notices and closes it."""
        with contextlib.suppress(OSError):  # it is closed already
            self.sock.shutdown(socket.SHUT_RDWR)


def group_of(address: str) -> str:
    """What counts as one address: an IPv4 address, or an IPv6 network of 64 bits."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
    return str(parsed)


class Admission:
    """The connections of one server. Thread-safe.

    Args:
        limits: Bounds.
        clock: Monotonic seconds.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        # Both in the order of their last_s, the oldest first.
        self._pending: dict[Connection, None] = {}
        self._proven: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._pending) + len(self._proven)

    @property
    def num_pending(self) -> int:
        """Connections that have not proven anything yet."""
        return len(self._pending)

    def admit(self, sock: socket.socket, address: str) -> Connection | None:
        """Take a new connection in, cutting older ones for it; None: no room, close it."""
        connection = Connection(sock, group_of(address), self._clock())
        with self._lock:
            same = [each for each in self._pending if each.group == connection.group]
            if len(same) >= self._limits.pending_per_address:
                self._cut(same[0])
            elif len(self._pending) >= self._limits.pending:
                self._cut(self._oldest_pending())
            if len(self) >= self._limits.connections and not self._make_room():
                return None
            self._pending[connection] = None
        return connection

    def _make_room(self) -> bool:
        idle = next((each for each in self._proven if not each.busy), None)
        if idle is None and not self._pending:
            return False
        self._cut(idle or self._oldest_pending())
        return True

    def _oldest_pending(self) -> Connection:
        # Of those who have most: one connection of a host outlasts any number of theirs.
        counts = Counter(each.group for each in self._pending)
        return max(self._pending, key=lambda each: counts[each.group])

    def touch(self, connection: Connection, *, busy: bool) -> None:
        """A request has begun or ended."""
        with self._lock:
            connection.busy = busy
            connection.last_s = self._clock()
            if connection in self._proven:
                self._proven[connection] = self._proven.pop(connection)

    def prove(self, connection: Connection) -> None:
        """The connection's first request was proven."""
        with self._lock:
            if connection in self._pending:
                self._forget(connection)
                self._proven[connection] = None

    def drop(self, connection: Connection) -> None:
        """The connection is closed. Idempotent."""
        with self._lock:
            self._forget(connection)

    def sweep(self) -> None:
        """Cut who has had its time."""
        now_s = self._clock()
        with self._lock:
            old = [c for c in self._pending if now_s - c.last_s > self._limits.pending_s]
            old += [
                each
                for each in self._proven
                if not each.busy and now_s - each.last_s > self._limits.idle_s
            ]
            for each in old:
                self._cut(each)

    def cut_all(self) -> None:
        """End every connection."""
        with self._lock:
            for each in [*self._pending, *self._proven]:
                self._cut(each)

    def _cut(self, connection: Connection) -> None:
        self._forget(connection)
        connection.cut()

    def _forget(self, connection: Connection) -> None:
        self._proven.pop(connection, None)
        self._pending.pop(connection, None)
