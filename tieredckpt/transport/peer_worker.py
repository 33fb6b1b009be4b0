"""A process that sends segments for an agent: ``python -m tieredckpt.transport.peer_worker FD``.

It knows no secret and decides nothing. The agent has answered a request already up to its body;
this process gets the connection and the segment's file as descriptors, sends the bytes, and says
how it went. It ends with the agent: however that died, its end of their pair of sockets is closed.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

from tieredckpt.transport import bulk

JOB = struct.Struct("<QQQ")
"""Number, first byte, byte after the last; with two descriptors. Number 0: answer at once."""
DONE = struct.Struct("<Q?")
"""Number, whether all was sent."""
JOBS_MAX = 32


def main() -> None:
    """Serve the socket that the command line names."""
    link = socket.socket(fileno=int(sys.argv[1]))
    link.setblocking(True)
    threads = ThreadPoolExecutor(JOBS_MAX, "tck-send")
    while True:
        message, fds = _receive(link)
        if len(message) != JOB.size:
            # The agent is gone. Threads may still wait for a reader: nobody waits for them.
            os._exit(0)
        number, start, stop = JOB.unpack(message)
        if len(fds) == 2:
            threads.submit(_send, link, number, fds[0], fds[1], start, stop)
        else:
            link.send(DONE.pack(number, number == 0))


def _receive(link: socket.socket) -> tuple[bytes, array.array[int]]:
    fds = array.array("i")
    room = socket.CMSG_SPACE(2 * fds.itemsize)
    message, ancillary, _flags, _address = link.recvmsg(64, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return message, fds


def _send(link: socket.socket, number: int, out: int, file: int, start: int, stop: int) -> None:
    sent = False
    try:
        with socket.socket(fileno=out) as sock:
            bulk.send_file(sock, file, start, stop)
        sent = True
    except bulk.Cut:
        pass  # the agent says so in its log, with the segment's name
    finally:
        os.close(file)
        link.send(DONE.pack(number, sent))


if __name__ == "__main__":
    main()
