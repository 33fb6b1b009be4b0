"""A name server for hosts that are network namespaces, without touching the machine's resolver.

Each host asks it at its own loopback address. What the host's processes read as /etc/resolv.conf
says so, in a mount namespace of their own, as ``ip netns exec`` does it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import socket
import struct
import threading
from pathlib import Path

from tieredckpt.testing import netns

PORT = 53
_RESOLV_CONF = "/etc/resolv.conf"
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x1000, 0x4000, 1 << 18
_A, _NO_SUCH_NAME = 1, 3


class NameServer:
    """Answers questions for IPv4 addresses from :attr:`addresses`; all else has none.

    Args:
        folder: For the file that stands in for /etc/resolv.conf.
    """

    def __init__(self, folder: Path) -> None:
        self.addresses: dict[str, list[str]] = {}
        """By name, in lower case; may change at any time."""
        self.answers = threading.Event()
        """While it is not set, questions are taken and not answered."""
        self.answers.set()
        self.resolv_conf = folder / "resolv.conf"
        self.resolv_conf.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:2\n")
        self._sockets: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="names", daemon=True)
        self._thread.start()

    def serve(self, namespace: str) -> None:
        """Answer in one more network namespace."""
        with netns.inside(namespace):
            found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            found.bind(("127.0.0.1", PORT))
        self._sockets.append(found)
        self._selector.register(found, selectors.EVENT_READ)

    def close(self) -> None:
        self._wake.close()
        self._thread.join(10)
        for each in (*self._sockets, self._woken):
            each.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    return
                assert isinstance(key.fileobj, socket.socket)
                with contextlib.suppress(OSError):  # a question of somebody who has ended
                    data, who = key.fileobj.recvfrom(512)
                    if self.answers.is_set():
                        key.fileobj.sendto(self._answer(data), who)

    def _answer(self, question: bytes) -> bytes:
        (number,) = struct.unpack_from(">H", question)
        labels, at = [], 12
        while size := question[at]:
            labels.append(question[at + 1 : at + 1 + size].decode("ascii"))
            at += 1 + size
        (kind,) = struct.unpack_from(">H", question, at + 1)
        name = ".".join(labels).lower()
        found = self.addresses.get(name, ()) if kind == _A else ()
        code = 0 if name in self.addresses else _NO_SUCH_NAME
        head = struct.pack(">HHHHHH", number, 0x8580 | code, 1, len(found), 0, 0)
        # The name of each answer is a pointer to that in the question.
        records = (
            struct.pack(">HHHIH", 0xC00C, _A, 1, 0, 4) + socket.inet_aton(each) for each in found
        )
        return head + question[12 : at + 5] + b"".join(records)


def use_names(resolv_conf: Path) -> None:
    """From now on this process resolves names as a file says; no other one notices."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(failed: int) -> None:
        if failed:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    check(libc.unshare(_CLONE_NEWNS))
    check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    check(libc.mount(os.fsencode(resolv_conf), _RESOLV_CONF.encode(), None, _MS_BIND, None))
