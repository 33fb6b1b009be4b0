"""Connecting to whichever of a host's addresses answers first, within one deadline for all.

A host of several rails that is silent would else cost a deadline for each of them.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from tieredckpt.errors import AgentError

HEAD_START_S = 0.25
"""An address is tried alone for so long before the next one is, too."""
LOOK_S = 0.05
"""How often a dial looks whether it is still wanted."""

_Where = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]
"""Of ``getaddrinfo``."""
_BEGUN = (errno.EINPROGRESS, errno.EWOULDBLOCK)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``ip:port``, ``[ip6]:port`` or ``name:port``. Raises AgentError."""
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise AgentError(f"{address[:200]!r} is no address: want host:port", outcome="not_applied")
    return host, int(port)


class Dial:
    """One try to reach a host. Used once, by one thread.

    Args:
        addresses: Each ``host:port``, the preferred one first.
        within_s: For all of them together, but for resolving names.
        wanted: Looked at while it waits; False ends it.
    """

    def __init__(
        self, addresses: Sequence[str], within_s: float, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        self._todo: list[tuple[str, _Where | None]] = [(each, None) for each in addresses]
        self._within_s = within_s
        self._wanted = wanted
        self._tried: dict[str, None] = {}
        self._problem: OSError = OSError("it has no address")

    @property
    def failed(self) -> list[str]:
        """Addresses that did not answer, or not before one that was tried after them."""
        return list(self._tried)

    def run(self) -> tuple[str, socket.socket]:
        """The address that answered, and a blocking socket.

        Raises:
            OSError: None did (TimeoutError: in time).
            AgentError: One is no address.
        """
        with selectors.DefaultSelector() as selector:
            try:
                address, sock = self._first(selector)
            finally:
                for key in list(selector.get_map().values()):
                    assert isinstance(key.fileobj, socket.socket)
                    key.fileobj.close()
        del self._tried[address]
        sock.setblocking(True)
        return address, sock

    def _first(self, selector: selectors.BaseSelector) -> tuple[str, socket.socket]:
        until_s = time.monotonic() + self._within_s
        pause_s = min(HEAD_START_S, self._within_s / (2 * max(len(self._todo), 1)))
        next_s = 0.0
        while self._todo or selector.get_map():
            now_s = time.monotonic()
            if not self._wanted():
                raise ConnectionAbortedError(errno.ECONNABORTED, "it is not wanted any more")
            due = self._todo and (now_s >= next_s or not selector.get_map())
            left_s = max(0.0, min(until_s, next_s if self._todo else until_s) - now_s)
            # First of all: this thread may have slept longer than the head start or the deadline,
            # and who has answered long ago would be one that did not, and be shunned.
            answered = selector.select(0 if due else min(left_s, LOOK_S))
            if now_s >= until_s and not answered:
                raise TimeoutError("timed out")
            if due and not answered:
                next_s = now_s + pause_s
                self._begin(*self._todo.pop(0), selector)
            for key, _ in answered:
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                selector.unregister(sock)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not code:
                    return key.data, sock
                sock.close()
                self._problem = OSError(code, os.strerror(code))
                next_s = 0.0
        raise self._problem

    def _begin(self, address: str, where: _Where | None, selector: selectors.BaseSelector) -> None:
        self._tried[address] = None
        try:
            if where is None:
                host, port = split_address(address)
                where, *more = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                # A name may mean several, of which only one is listened at.
                self._todo[:0] = [(address, each) for each in more]
            family, kind, proto, _, at = where
            sock = socket.socket(family, kind, proto)
        except (OSError, UnicodeError) as error:
            self._problem = error if isinstance(error, OSError) else OSError(str(error))
            return
        sock.setblocking(False)
        code = sock.connect_ex(at)
        if code and code not in _BEGUN:
            sock.close()
            self._problem = OSError(code, os.strerror(code))
            return
        # One that is connected at once is writable at once.
        selector.register(sock, selectors.EVENT_WRITE, address)
