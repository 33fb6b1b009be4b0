"""How a user's commands reach the supervisor of their host: JSON, one request per connection.

An order to resize counts while its command is connected: nothing is left of a command that has
ended, or of a host that slept meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from tieredckpt.errors import AgentError, IntegrityError
from tieredckpt.format.envelope import unpack_struct
from tieredckpt.live.messages import Order
from tieredckpt.policy.ranks import Member

CONTROL = "control"
"""Name of the socket in a supervisor's folder."""
FOLDER_PREFIX = "tck-live-"
CLIENTS_MAX = 16
MESSAGE_BYTES_MAX = 1 << 20
CONNECT_S = 5.0
SIZE_MAX = 1 << 20


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A command: an order, or with neither ``size`` nor ``host`` for the status.

    Attributes:
        size, host, deadline_s: As of :class:`Order`.
    """

    size: Annotated[int, msgspec.Meta(ge=0, le=SIZE_MAX)] = 0
    host: str = ""
    deadline_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the supervisor of one host knows it.

    Attributes:
        pid: Of the supervisor.
        job, host, leader: Names; "" in a job of one host.
        generation: From 1; 0: none began.
        ranks: Of the generation.
        size: Ranks that the job is to have; another number than that of ``ranks`` if it changes.
        per_host: ``--nproc-per-node``.
        ended: Why the generation ended; "": it runs.
        step: The newest update that this host knows.
        trains: The ranks of this host have made an update in the generation; all, if it has none.
        standbys: Processes of this host that may enter the next generation.
        starting: Those that still import.
    """

    pid: int
    job: str
    host: str
    leader: str
    generation: int
    ranks: tuple[Member, ...]
    size: int
    per_host: int
    ended: str
    step: int
    trains: bool
    standbys: int
    starting: int


_requests = msgspec.json.Decoder(Request)
_statuses = msgspec.json.Decoder(Status)


class Control:
    """The supervisor's side. Nothing of it waits.

    Args:
        folder: Of this user alone.
    """

    def __init__(self, folder: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        (folder / CONTROL).unlink(missing_ok=True)
        with _short(folder / CONTROL) as path:
            self._socket.bind(path)
        self._socket.listen(CLIENTS_MAX)
        self._clients: dict[socket.socket, Order | None] = {}
        """What each has ordered; None: it has not asked yet."""

    def serve(self, status: Callable[[], Status], done: Order) -> Order:
        """Answer commands; the newest order that is not ``done`` yet.

        An order is answered once a decision has adopted it, or a newer one.
        """
        if len(self._clients) < CLIENTS_MAX:
            with contextlib.suppress(OSError):  # there is none, or no descriptor for it
                client, _ = self._socket.accept()
                client.setblocking(False)
                self._clients[client] = None
        for client, order in list(self._clients.items()):
            try:
                asked = unpack_struct(_requests, client.recv(MESSAGE_BYTES_MAX), "its request")
                at_ns = max(time.time_ns(), done.at_ns + 1) if asked != Request() else 0
                order = Order(at_ns, asked.size, 0, asked.host, asked.deadline_s)
            except BlockingIOError:
                pass  # it waits for the answer, or has not asked yet
            except (OSError, IntegrityError):
                self._drop(client)  # it has ended, or sent nonsense
                continue
            self._clients[client] = order
            if order is not None and order <= max(done, Order()):
                with contextlib.suppress(OSError):
                    client.send(msgspec.json.encode(status()))
                self._drop(client)
        return max([Order(), *(each for each in self._clients.values() if each is not None)])

    def _drop(self, client: socket.socket) -> None:
        client.close()
        del self._clients[client]

    def close(self) -> None:
        """End all connections."""
        for each in (self._socket, *self._clients):
            each.close()


def ask(path: Path, request: Request, timeout_s: float) -> Status:
    """What the supervisor at ``path`` answers.

    Raises:
        AgentError: Nobody answers there, or not in time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        try:
            client.settimeout(CONNECT_S)
            with _short(path) as short:
                client.connect(short)
            client.send(msgspec.json.encode(request))
            client.settimeout(timeout_s)
            data = client.recv(MESSAGE_BYTES_MAX)
            return unpack_struct(_statuses, data, "its answer")
        except (OSError, IntegrityError) as error:
            raise AgentError(f"the supervisor at {path}: {error}", outcome="unknown") from error


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """The same place by a path that is short enough for a socket (107 bytes)."""
    folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def folders_of_sockets() -> list[str]:
    """Where the folders of supervisors may be, of which they use the first one.

    A command may have another environment than they, such as in another login.
    """
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    places = (own, tempfile.gettempdir(), f"/run/user/{os.getuid()}")
    return [each for each in dict.fromkeys(places) if each and os.path.isdir(each)]


def supervisors() -> Iterator[Path]:
    """The sockets of this user's supervisors, also of those that were killed."""
    for place in folders_of_sockets():
        for path in sorted(Path(place).glob(f"{FOLDER_PREFIX}*/{CONTROL}")):
            with contextlib.suppress(OSError):
                if path.parent.lstat().st_uid == os.getuid():
                    yield path
