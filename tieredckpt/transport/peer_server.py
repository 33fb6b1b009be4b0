"""The agent's TCP server for other hosts: listens, admits connections, hands them to a loop.

Nothing here runs in the agent's own event loop. What requests are: ``peer_routes.py``; how one is
answered: ``peer_loop.py``; how many there may be: ``peer_connections.py``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import socket
from collections.abc import Sequence

from tieredckpt.errors import AgentError
from tieredckpt.transport.messages import TlsSpec
from tieredckpt.transport.peer_connections import Admission, Limits
from tieredckpt.transport.peer_loop import PeerLoop
from tieredckpt.transport.peer_routes import PeerApi
from tieredckpt.transport.peer_segments import Pools
from tieredckpt.transport.tls import TlsFiles

__all__ = ["PeerApi", "PeerServer", "listen_tcp"]

BACKLOG = 1024
ACCEPTS_AT_ONCE = 16
"""Then the loop looks at the connections that it has, so that cut ones are closed."""
PAUSE_S = 0.1
"""Without descriptors left, until the next try."""
SWEEP_S = 0.5
DESCRIPTORS_WANTED = 8192

log = logging.getLogger(__name__)


def listen_tcp(address: str, port: int) -> socket.socket:
    """A listening socket on one IP address. Port 0: any free one. The caller owns it.

    Raises:
        AgentError: The address is not of this host, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restarted agent gets its port back although connections of the old one linger.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise AgentError(
            f"cannot listen on {address} port {port}: {error.strerror}; see network.port, "
            "network.interface and network.cidr",
            outcome="not_applied",
        ) from error
    sock.setblocking(False)
    return sock


class PeerServer:
    """Serves an API to other hosts on listening sockets (one per rail).

    Who may listen where is decided before, with :func:`tieredckpt.transport.auth.check_listen`.

    Args:
        api: Does the work.
        listeners: From :func:`listen_tcp`; owned and closed by the server.
        tls: Mutual TLS on all of them. Namespaces whose secret names other files, or TLS where
            there is none, are refused here.
        limits: Bounds on connections.

    Raises:
        AgentError: The TLS files cannot be used.
    """

    def __init__(
        self,
        api: PeerApi,
        listeners: Sequence[socket.socket],
        *,
        tls: TlsSpec | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._listeners = list(listeners)
        self._tls = TlsFiles(tls, server=True) if tls is not None else None
        self.admission = Admission(_within_descriptors(limits or Limits()))
        self._pools = Pools()
        self._loop = PeerLoop(api, self.admission, self._pools, tls)
        self._stopped = False

    @property
    def ports(self) -> tuple[int, ...]:
        """Of the listeners, in their order."""
        return tuple(int(each.getsockname()[1]) for each in self._listeners)

    def start(self) -> None:
        """Begin to serve, in a thread; returns when it does."""
        self._loop.start()
        self._loop.loop.call_soon_threadsafe(self._open)

    def stop(self) -> None:
        """Stop listening and cut all connections; waits a few seconds at most. Idempotent."""
        self._stopped = True
        self.admission.cut_all()
        self._loop.stop()
        for listener in self._listeners:
            listener.close()
        self._pools.shutdown()

    # --- in the loop ------------------------------------------------------------------------------

    def _open(self) -> None:
        for listener in self._listeners:
            self._loop.loop.add_reader(listener, self._accept, listener)
        self._sweep()

    def _sweep(self) -> None:
        self.admission.sweep()
        self._loop.loop.call_later(SWEEP_S, self._sweep)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            if self._stopped:
                return
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause(listener, error)
                return
            sock.setblocking(False)
            connection = self.admission.admit(sock, str(address[0]))
            if connection is None:
                sock.close()
            else:
                self._loop.give(connection, self._tls.context() if self._tls is not None else None)

    def _pause(self, listener: socket.socket, error: OSError) -> None:
        """The queue stays readable: without a pause the loop would spin."""
        log.warning("cannot accept connections of other hosts: %s", error)
        loop = self._loop.loop
        loop.remove_reader(listener)
        loop.call_later(PAUSE_S, loop.add_reader, listener, self._accept, listener)


def _within_descriptors(limits: Limits) -> Limits:
    """The limits, within what this process may open; a shell's default of 1024 is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < DESCRIPTORS_WANTED:
        wanted = (
            DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_WANTED)
        )
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft == resource.RLIM_INFINITY:
        return limits
    # Half of them is for slots, files and the agent's own clients.
    most = max(soft // 2, 2)
    return Limits(
        connections=min(limits.connections, most),
        pending=min(limits.pending, most // 2),
        pending_per_address=limits.pending_per_address,
        pending_s=limits.pending_s,
        idle_s=limits.idle_s,
    )
