"""Passes file descriptors over a unix socket, in exchange for one-time tickets.

An HTTP reply names a ticket, the client sends it on ``fds.sock`` and gets one status byte with the
descriptor in SCM_RIGHTS. The server keeps an offered descriptor open (and so holds any lock on it)
until the ticket is redeemed, revoked or :data:`TICKET_LIFE_S` old.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tieredckpt.errors import AgentError, CapacityError, RemoteProtocolError
from tieredckpt.storage.file_io import denied

TICKET_CHARS = 32
TICKET_LIFE_S = 30.0
OFFERS_MAX = 1024
"""Descriptors that wait to be fetched; a ring of 16 slots for each of 64 ranks."""
CONNECTIONS_MAX = 128
CONNECT_PAUSE_S = 0.005
CONNECTION_LIFE_S = 5.0
"""A client that has not sent its ticket after so long is cut off."""
BACKLOG = 1024
"""Connections that may wait to be accepted: all ranks of a host, several times."""
SOCKET_PATH_BYTES_MAX = 107
"""Length of ``sun_path`` on Linux, without the final NUL byte."""

_GIVEN = b"\x00"
_UNKNOWN = b"\x01"
_UCRED = struct.Struct("3i")


def peer_uid(sock: socket.socket) -> int:
    """The user id with which the process at the other end of ``sock`` connected or listened."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _pid, uid, _gid = _UCRED.unpack(data)
    return int(uid)


def is_trusted(uid: int) -> bool:
    """Whether a peer may use this process: the same user, or root."""
    return uid in (0, os.geteuid())


def check_socket_path(path: Path) -> None:
    """Raise AgentError if ``path`` is too long for a unix socket."""
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_BYTES_MAX:
        raise AgentError(
            f"the socket path {path} is {size} bytes long, Linux allows {SOCKET_PATH_BYTES_MAX}: "
            "set agent.runtime_dir (or TIEREDCKPT_RUNTIME_DIR) to a shorter folder",
            outcome="not_applied",
        )


def listen(path: Path) -> socket.socket:
    """A listening unix socket at ``path``, mode 0600, replacing a stale file.

    The caller must hold the lock that makes this process the only server of the folder.
    """
    check_socket_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)  # of a killed predecessor
        sock.bind(str(path))
        # Between bind and chmod the folder's mode 0700 excludes other users.
        path.chmod(0o600)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def connect(path: Path, timeout_s: float) -> socket.socket:
    """A unix socket, connected to a server of this user or root, with this time-out on each call.

    Raises:
        AgentError: The socket is another user's; nothing was sent to it. Field ``foreign``: True.
        OSError: No process listens (FileNotFoundError, ConnectionRefusedError), or the listener's
            queue stayed full (TimeoutError).
    """
    until_s = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(path))
        except BlockingIOError:
            # Unlike TCP, a full queue is an error at once: many ranks may arrive together.
            sock.close()
            if time.monotonic() >= until_s:
                raise TimeoutError(f"the queue of {path} stayed full") from None
            time.sleep(CONNECT_PAUSE_S)
        except PermissionError as error:
            sock.close()
            error.filename = str(path)
            text = f"cannot connect to {path}: {error.strerror}{denied(error)}"
            raise AgentError(text, outcome="not_applied", foreign=True) from error
        except OSError:
            sock.close()
            raise
        else:
            break
    if not is_trusted(uid := peer_uid(sock)):
        sock.close()
        raise AgentError(
            f"user {uid} listens on {path}, this process runs as {os.geteuid()}; run this "
            f"process as that user (sudo -u '#{uid}'), or use a runtime_dir of your own",
            outcome="not_applied",
            foreign=True,
        )
    return sock


@dataclass(slots=True)
class _Offer:
    fd: int
    until_s: float


@dataclass(slots=True)
class _Connection:
    sock: socket.socket
    until_s: float
    received: bytes = b""


class FdServer:
    """Hands out offered descriptors, from one thread. All methods are thread-safe.

    Args:
        path: Path of the socket; see :func:`listen`.
        ticket_life_s: How long a ticket is valid.
    """

    def __init__(self, path: Path, *, ticket_life_s: float = TICKET_LIFE_S) -> None:
        self._ticket_life_s = ticket_life_s
        self._offers: dict[str, _Offer] = {}
        self._lock = threading.Lock()
        self._listener = listen(path)
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._connections: dict[int, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tck-fds", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and close every unfetched descriptor. Blocks briefly."""
        self._stopping = True
        os.write(self._wake_w, b"x")
        if self._thread.is_alive():
            self._thread.join(CONNECTION_LIFE_S)
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        self._listener.close()
        os.close(self._wake_r)
        os.close(self._wake_w)
        with self._lock:
            offers, self._offers = self._offers, {}
        for offer in offers.values():
            os.close(offer.fd)

    def offer(self, fd: int) -> str:
        """Take ownership of ``fd`` and return the ticket for it.

        Raises:
            CapacityError: :data:`OFFERS_MAX` descriptors wait to be fetched; ``fd`` was closed.
        """
        ticket = secrets.token_hex(TICKET_CHARS // 2)
        with self._lock:
            if len(self._offers) < OFFERS_MAX:
                self._offers[ticket] = _Offer(fd, time.monotonic() + self._ticket_life_s)
                return ticket
        os.close(fd)
        raise CapacityError(
            f"{OFFERS_MAX} descriptors wait to be fetched: clients request but do not fetch them",
            needed_bytes=0,
            available_bytes=0,
            limit="OFFERS_MAX",
        )

    def revoke(self, ticket: str) -> bool:
        """Close the descriptor of ``ticket``; False if it was fetched or is gone already."""
        with self._lock:
            offer = self._offers.pop(ticket, None)
        if offer is None:
            return False
        os.close(offer.fd)
        return True

    def _run(self) -> None:
        while not self._stopping:
            for key, _events in self._selector.select(1.0):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Connection):
                    self._receive(key.data)
            self._expire(time.monotonic())

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the client has disconnected
            return
        if len(self._connections) >= CONNECTIONS_MAX or not is_trusted(peer_uid(sock)):
            sock.close()
            return
        sock.setblocking(False)
        connection = _Connection(sock, time.monotonic() + CONNECTION_LIFE_S)
        self._connections[sock.fileno()] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(TICKET_CHARS - len(connection.received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.received += data
        if len(connection.received) == TICKET_CHARS:
            self._answer(connection)
            self._drop(connection)
        elif not data:
            self._drop(connection)

    def _answer(self, connection: _Connection) -> None:
        with self._lock:
            offer = self._offers.pop(connection.received.decode("ascii", "replace"), None)
        with contextlib.suppress(OSError):  # the client is gone
            if offer is None:
                connection.sock.send(_UNKNOWN)
            else:
                socket.send_fds(connection.sock, [_GIVEN], [offer.fd])
        if offer is not None:
            os.close(offer.fd)

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(connection.sock.fileno(), None)
        self._selector.unregister(connection.sock)
        connection.sock.close()

    def _expire(self, now_s: float) -> None:
        with self._lock:
            old = [t for t, offer in self._offers.items() if offer.until_s < now_s]
            fds = [self._offers.pop(ticket).fd for ticket in old]
        for fd in fds:
            os.close(fd)
        for connection in [c for c in self._connections.values() if c.until_s < now_s]:
            self._drop(connection)


def _receive_one(sock: socket.socket) -> tuple[bytes, array.array[int]]:
    """One byte and the descriptors that came with it.

    Not ``socket.recv_fds``: it ignores its flags, so a child that another thread starts at this
    moment would inherit the descriptors, and hold the lock, too.
    """
    fds = array.array("i")
    space = socket.CMSG_SPACE(fds.itemsize)
    data, ancillary, _flags, _address = sock.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, fds


def redeem(path: Path, ticket: str, *, timeout_s: float) -> int:
    """Fetch the descriptor of ``ticket``; the caller owns it (close-on-exec is set).

    Raises:
        AgentError: No process serves ``path``, or it does not answer within ``timeout_s``.
        RemoteProtocolError: The ticket is unknown, used or too old.
    """
    try:
        with connect(path, timeout_s) as sock:
            sock.sendall(ticket.encode("ascii"))
            data, fds = _receive_one(sock)
    except OSError as error:
        advice = "; if it was deleted, `tieredckpt agent stop`: the next agent creates it again"
        raise AgentError(
            f"the agent did not send a descriptor on {path}: {error}"
            + advice * isinstance(error, FileNotFoundError),
            outcome="unknown",
        ) from error
    if data == _GIVEN and len(fds) == 1:
        return fds[0]
    for fd in fds:
        os.close(fd)
    raise RemoteProtocolError(f"the agent does not know the ticket any more ({path})")
