"""How fast this machine moves a file in tmpfs from one process to another over TCP on loopback.

``python -m benchmarks.peer_limits FILE`` is the sending process: it prints its port, and each
connection tells it what to send and how. Imports neither torch nor tieredckpt.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable

COMMAND = struct.Struct("<BQQ")
"""Method, first byte, byte after the last."""
BUFFERS = (0, 4 << 20)
"""SO_SNDBUF and SO_RCVBUF; 0: the kernel tunes them by itself."""
PIECE_BYTES = 1 << 20


def _sendfile(sock: socket.socket, fd: int, start: int, stop: int) -> None:
    """Blocking sendfile."""
    while start < stop:
        start += os.sendfile(sock.fileno(), fd, start, stop - start)


def _sendfile_poll(sock: socket.socket, fd: int, start: int, stop: int) -> None:
    """sendfile into a socket that does not block, and poll."""
    sock.setblocking(False)
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    while start < stop:
        try:
            start += os.sendfile(sock.fileno(), fd, start, stop - start)
        except BlockingIOError:
            poll.poll()
    sock.setblocking(True)


def _send(sock: socket.socket, fd: int, start: int, stop: int) -> None:
    """pread into a warm buffer, then send: two copies instead of one."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    while start < stop:
        count = os.preadv(fd, [buffer[: stop - start]], start)
        sock.sendall(buffer[:count])
        start += count


SENDERS: dict[str, Callable[[socket.socket, int, int, int], None]] = {
    "sendfile": _sendfile,
    "sendfile + poll": _sendfile_poll,
    "pread + send": _send,
}
_CODES = list(SENDERS)


def _recv(sock: socket.socket, into: memoryview) -> None:
    position = 0
    while position < len(into):
        count = sock.recv_into(into[position:])
        assert count > 0, "the sender is gone"
        position += count


def _recv_all(sock: socket.socket, into: memoryview) -> None:
    position = 0
    while position < len(into):
        piece = into[position : position + PIECE_BYTES]
        count = sock.recv_into(piece, 0, socket.MSG_WAITALL)
        assert count > 0, "the sender is gone"
        position += count


RECEIVERS: dict[str, Callable[[socket.socket, memoryview], None]] = {
    "recv_into": _recv,
    "recv_into 1 MiB, MSG_WAITALL": _recv_all,
}


def run_together(actions: list[Callable[[], None]]) -> None:
    """Run all at once, each in a thread of its own; raises what one of them raised."""
    failures: list[BaseException] = []

    def run(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as failure:  # noqa: BLE001  raised below, in the thread that measures
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(each,)) for each in actions]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if failures:
        raise failures[0]


class RawPeer:
    """A sending process, and connections to it that are kept per variant, so that they are warm.

    Args:
        path: The file in tmpfs.
    """

    def __init__(self, path: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peer_limits", path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self._port = int(self.process.stdout.readline())
        self._kept: dict[tuple[int, int], list[socket.socket]] = {}

    def fetch(
        self, target: memoryview, streams: int, sender: str, receiver: str, buffer: int
    ) -> None:
        """Receive the whole file into ``target``, in ``streams`` equal parts at once."""
        key = (streams, buffer)
        if key not in self._kept:
            self._kept[key] = [self._connect(buffer) for _ in range(streams)]
        share = len(target) // streams
        actions: list[Callable[[], None]] = []
        for number, sock in enumerate(self._kept[key]):
            start = number * share
            stop = len(target) if number == streams - 1 else start + share

            def receive(sock: socket.socket = sock, start: int = start, stop: int = stop) -> None:
                sock.sendall(COMMAND.pack(_CODES.index(sender), start, stop))
                RECEIVERS[receiver](sock, target[start:stop])

            actions.append(receive)
        run_together(actions)

    def _connect(self, buffer: int) -> socket.socket:
        sock = socket.socket()
        if buffer:
            # Before it connects: the window's scale is agreed then.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.connect(("127.0.0.1", self._port))
        sock.sendall(COMMAND.pack(255, buffer, 0))
        return sock

    def close(self) -> None:
        """End the process."""
        for sock in [each for those in self._kept.values() for each in those]:
            sock.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def _serve(sock: socket.socket, fd: int) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with sock:
        while len(command := sock.recv(COMMAND.size, socket.MSG_WAITALL)) == COMMAND.size:
            code, start, stop = COMMAND.unpack(command)
            if code == 255:
                if start:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, start)
            else:
                SENDERS[_CODES[code]](sock, fd, start, stop)


def main() -> None:
    """The sending process: until its standard input ends."""
    fd = os.open(sys.argv[1], os.O_RDONLY)
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=_serve, args=(sock, fd), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
