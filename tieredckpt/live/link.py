"""A process's connection to its supervisor."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable

import msgspec

from tieredckpt.live import messages as m

EXIT_NO_SUPERVISOR = 17
"""Exit code of a process whose supervisor is gone: without it the process cannot be stopped."""

log = logging.getLogger(__name__)


class Link:
    """Receives instructions in a thread, and sends reports. Thread-safe.

    Args:
        descriptor: This process's end of the socket pair.
        on_stop: Called in that thread with the generation that ends; 0: none does.
    """

    def __init__(self, descriptor: int, on_stop: Callable[[int], None]) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._on_stop = on_stop
        self._lock = threading.Lock()
        self._received: queue.SimpleQueue[m.Train | m.Leave] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="tck-live-link", daemon=True).start()

    def send(self, message: m.FromProcess) -> None:
        """Report; a supervisor that is gone ends this process in the listening thread."""
        with self._lock:
            try:
                self._socket.sendall(m.encode(message))
            except OSError as error:
                log.debug("the supervisor is gone: %s", error)

    def wait(self) -> m.Train | m.Leave:
        """The next instruction."""
        return self._received.get()

    def _listen(self) -> None:
        try:
            while data := self._socket.recv(m.MESSAGE_BYTES_MAX):
                order = m.decode_to_process(data)
                if isinstance(order, m.Stop):
                    self._on_stop(order.generation)
                else:
                    self._on_stop(0)  # a Stop before was for another one, also of the same number
                    self._received.put(order)
        except (OSError, msgspec.MsgspecError):
            log.exception("the supervisor's message cannot be read")
        finally:
            os._exit(EXIT_NO_SUPERVISOR)
