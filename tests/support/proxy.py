"""A TCP proxy that spoils what it forwards: latency, a rate, cut, stalled and half-open lines.

It stands for ``tc netem``, which many kernels lack. On one machine it forwards from an address of
its own to another one; on a host's link (``Network.interpose``) it carries both directions unseen.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from tieredckpt.testing.netns import inside

_CHUNK_BYTES = 1 << 16
_RST = struct.pack("ii", 1, 0)
_IP_FREEBIND = 15  # not in Python's socket module


class Proxy:
    """Forwards TCP connections, in a thread of its own; all faults may change at any time.

    Args:
        seed: Of what is drawn.

    Attributes:
        latency_s: Added to each direction.
        bytes_per_s: Limit of both directions of all connections together; 0: none.
        cut_after_bytes: Each new connection is reset after a number of bytes that is drawn from
            this range.
        refusing: New connections are reset at once.
        opened: Connections so far.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.latency_s = 0.0
        self.bytes_per_s = 0.0
        self.cut_after_bytes: tuple[int, int] | None = None
        self.refusing = False
        self.opened = 0
        self._chance = random.Random(seed)
        self._lines: set[_Line] = set()
        self._listeners: list[socket.socket] = []
        self._free_s = 0.0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    # --- what it forwards ------------------------------------------------------------------------

    def forward(self, target: str, *, listen: str = "127.0.0.1:0") -> str:
        """Listen, and forward to ``target``; the address (``ip:port``) to be used instead."""
        to, at = _pair(target), _pair(listen)
        listener = self._listen(at, None)

        async def connect(accepted: socket.socket) -> socket.socket:
            found = socket.socket()
            found.setblocking(False)
            try:
                await self._loop.sock_connect(found, to)
            except BaseException:
                found.close()
                raise
            return found

        self._serve(listener, connect)
        host, port = listener.getsockname()
        return f"{host}:{port}"

    def carry(self, outer: str, inner: str, address: str, port: int) -> None:
        """Carry what is for ``port`` between a host at ``address`` and its switch, unseen."""
        for come_from, go_to, at in ((outer, inner, address), (inner, outer, "0.0.0.0")):
            listener = self._listen((at, port), come_from)

            async def connect(accepted: socket.socket, go_to: str = go_to) -> socket.socket:
                with inside(go_to):
                    found = socket.socket()
                found.setblocking(False)
                found.setsockopt(socket.SOL_IP, _IP_FREEBIND, 1)
                try:
                    found.bind((accepted.getpeername()[0], 0))
                    await self._loop.sock_connect(found, accepted.getsockname())
                except BaseException:
                    found.close()
                    raise
                return found

            self._serve(listener, connect)

    def _listen(self, at: tuple[str, int], namespace: str | None) -> socket.socket:
        with inside(namespace) if namespace else nullcontext():
            listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(at)
        listener.listen(128)
        self._listeners.append(listener)
        return listener

    def _serve(self, listener: socket.socket, connect: Callable[[socket.socket], Any]) -> None:
        async def accept() -> None:
            while True:
                accepted, _ = await self._loop.sock_accept(listener)
                accepted.setblocking(False)
                self._keep(self._line(accepted, connect))

        self._loop.call_soon_threadsafe(lambda: self._keep(accept()))

    def _keep(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _line(self, client: socket.socket, connect: Callable[[socket.socket], Any]) -> None:
        self.opened += 1
        try:
            if self.refusing:
                raise ConnectionRefusedError
            target = await connect(client)
        except (OSError, asyncio.CancelledError):
            _reset(client)
            return
        life = self._chance.randint(*self.cut_after_bytes) if self.cut_after_bytes else None
        line = _Line(client, target, life)
        line.task = self._loop.create_task(self._run(line))
        self._lines.add(line)
        try:
            await asyncio.wait({line.task})
            if line.half_open:
                _reset(target)
                while await self._loop.sock_recv(client, _CHUNK_BYTES):
                    pass
        except OSError:
            pass
        finally:
            line.task.cancel()
            self._lines.discard(line)
            done = line.task.done() and not line.task.cancelled()
            ended_well = done and line.task.exception() is None
            for each in (client, target):
                each.close() if ended_well else _reset(each)

    async def _run(self, line: _Line) -> None:
        async with asyncio.TaskGroup() as both:
            for source, sink in ((line.client, line.target), (line.target, line.client)):
                queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
                both.create_task(self._read(line, source, queue))
                both.create_task(self._deliver(sink, queue))

    async def _read(self, line: _Line, source: socket.socket, queue: Any) -> None:
        """Take over at the rate that is set."""
        data = b"."
        while data:
            rate = self.bytes_per_s
            size = min(_CHUNK_BYTES, max(64, int(rate / 20))) if rate else _CHUNK_BYTES
            data = await self._loop.sock_recv(source, size)
            due_s = time.monotonic()
            if rate := self.bytes_per_s:  # it may have changed while we waited
                due_s = self._free_s = max(due_s, self._free_s) + len(data) / rate
            await queue.put((due_s + self.latency_s, data))
            if line.spent(len(data)):
                raise ConnectionResetError

    async def _deliver(self, sink: socket.socket, queue: Any) -> None:
        """Pass on what is due; an end of the data is one, too."""
        while True:
            due_s, data = await queue.get()
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await self._flowing.wait()
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            await self._loop.sock_sendall(sink, data)

    # --- faults -----------------------------------------------------------------------------------

    def cut(self) -> int:
        """Reset all connections, at both ends; how many there were."""
        return int(self._do(lambda: sum(line.reset() for line in list(self._lines))))

    def stall(self, stalled: bool = True) -> None:
        """Forward nothing from now on, and keep all connections; or go on."""
        self._do(self._flowing.clear if stalled else self._flowing.set)

    def half_open(self) -> int:
        """Lose the targets of all connections and let the clients believe that they are there."""
        return int(self._do(lambda: sum(line.lose_target() for line in list(self._lines))))

    def heal(self) -> None:
        """No fault any more, for connections that are left and for new ones."""
        self.latency_s = self.bytes_per_s = 0.0
        self.cut_after_bytes = None
        self.refusing = False
        self.stall(False)

    def _do(self, action: Callable[[], Any]) -> Any:
        async def act() -> Any:
            return action()

        return asyncio.run_coroutine_threadsafe(act(), self._loop).result(30)

    def close(self) -> None:
        """Reset what is open, and end. Idempotent."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
        for listener in self._listeners:
            listener.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Line:
    """One connection through the proxy."""

    task: asyncio.Task[None]

    def __init__(self, client: socket.socket, target: socket.socket, life: int | None) -> None:
        self.client, self.target = client, target
        self.half_open = False
        self._life = life

    def spent(self, size: int) -> bool:
        """Whether it has reached the number of bytes after which it is cut."""
        if self._life is None:
            return False
        self._life -= size
        return self._life <= 0

    def reset(self) -> int:
        """Both ends see a reset."""
        self.task.cancel()
        return 1

    def lose_target(self) -> int:
        """The target sees a reset, the client nothing."""
        self.half_open = True
        return self.reset()


def _reset(end: socket.socket) -> None:
    """Close with a reset instead of an orderly end."""
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
    except OSError:  # it has ended already
        pass
    end.close()


def _pair(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
