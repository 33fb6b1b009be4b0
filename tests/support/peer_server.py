"""A small API for a real peer server: segments are files in tmpfs, the rest is remembered."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.leftovers import shm
from tieredckpt.agent.tables import Tables
from tieredckpt.errors import IntegrityError, NotFoundError
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages import kv as km
from tieredckpt.rpc.messages import no_collectives as gm
from tieredckpt.rpc.messages import peer as pm
from tieredckpt.rpc.peer_server import Limits, PeerServer, listen_tcp

TOKEN = "a token for tests, of no worth"
NAMESPACE = "run-7"
SEGMENT = "5e" * 16
HERE = m.HostEntry(host_id="here", incarnation="1" * 32, addresses=("127.0.0.1:1",))


class OpenFile:
    """A segment as the server needs it; counts how many are open."""

    def __init__(self, path: Path, api: Peer) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size
        self._api = api
        with api.lock:
            api.open_segments += 1
            api.opened += 1

    def read_into(self, offset: int, into: memoryview) -> None:
        if os.preadv(self._fd, [into], offset) != len(into):
            raise IntegrityError("truncated")

    def fileno(self) -> int:
        return self._fd

    @property
    def direct(self) -> bool:
        return False

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            with self._api.lock:
                self._api.open_segments -= 1


class Peer:
    """Implements :class:`tieredckpt.rpc.peer_routes.PeerApi`."""

    def __init__(self, folder: Path, secret: Secret) -> None:
        self.folder = folder
        self.secrets = {NAMESPACE: secret}
        self.entry = HERE
        self.calls: list[object] = []
        self.tables = Tables()
        self.open_segments = self.opened = 0
        self.lock = threading.Lock()

    def add(self, segment_id: str, data: bytes, tier: str = "memory") -> None:
        (self.folder / f"{tier}-{segment_id}").write_bytes(data)

    def _note(self, *call: object) -> None:
        with self.lock:
            self.calls.append(call)

    def peer_served(self, namespace: str) -> tuple[m.HostEntry, Secret]:
        if namespace not in self.secrets:
            raise NotFoundError("not served", key=namespace)
        return self.entry, self.secrets[namespace]

    def peer_identify(self, namespace: str, request: pm.Identify) -> m.HostEntry:
        self._note("identify", namespace, request)
        return HERE

    def peer_ask_holdings(self, namespace: str, request: pm.AskHoldings) -> bytes:
        self._note("holdings", namespace, request)
        return b"holdings of " + namespace.encode()

    def peer_ask_plan(self, namespace: str, request: pm.AskPlan) -> bytes:
        self._note("plan", namespace, request)
        raise NotFoundError("no such plan", key=request.plan_id)

    def peer_probe(self, namespace: str, request: pm.Probe) -> bytes:
        return bytes(request.size)

    def peer_push(self, namespace: str, request: pm.Push) -> pm.Pushed:
        self._note("push", namespace, request)
        return pm.Pushed(need_plans=("ab" * 16,))

    def peer_sync(self, namespace: str, request: pm.Sync) -> pm.SyncReply:
        self._note("sync", namespace, request)
        return pm.SyncReply(
            push=pm.Push(), wanted_manifests=request.manifests, wanted_records=(),
            wanted_attempts=(),
        )  # fmt: skip

    def peer_forward_attempt(self, namespace: str, request: pm.ForwardAttempt) -> bytes:
        self._note("attempt", namespace, request)
        return b"an attempt"

    def peer_hand_over(self, namespace: str, request: gm.HandOver) -> gm.Taken:
        self._note("gather", namespace, request)
        return gm.Taken(outcome=m.Gathered(state="open", missing=(3,)), wanted=(1,))

    def peer_confirm_parts(self, namespace: str, request: gm.ConfirmParts) -> gm.Confirmed:
        self._note("confirm", namespace, request)
        return gm.Confirmed(state="yes")

    async def peer_kv(
        self, namespace: str, request: km.PeerKv, is_wanted: Callable[[], bool]
    ) -> km.KvReply:
        return await self.tables.do(namespace, request.request, is_wanted)

    def peer_bad_blocks(self, namespace: str, request: pm.BadBlocks) -> None:
        self._note("damage", namespace, request)

    def read_segment(
        self, namespace: str, segment_id: str, tier: str | None
    ) -> tuple[str, OpenFile]:
        try:
            return tier or "memory", OpenFile(self.folder / f"{tier}-{segment_id}", self)
        except FileNotFoundError as error:
            raise NotFoundError("no such segment", key=segment_id) from error


@contextlib.contextmanager
def serving(
    *,
    secret: Secret | None = None,
    tls: m.TlsSpec | None = None,
    limits: Limits | None = None,
    addresses: tuple[str, ...] = ("127.0.0.1",),
) -> Iterator[tuple[Peer, m.HostEntry, PeerServer]]:
    """A running server, its API, and the entry under which others know it."""
    with tempfile.TemporaryDirectory(dir=shm()) as folder:
        peer = Peer(Path(folder), secret or Secret(TOKEN, tls))
        listeners = [listen_tcp(each, 0) for each in addresses]
        server = PeerServer(peer, listeners, tls=tls, limits=limits)
        where = [f"{a}:{p}" for a, p in zip(addresses, server.ports, strict=True)]
        entry = m.HostEntry(host_id="here", incarnation="1" * 32, addresses=tuple(where))
        server.start()
        try:
            yield peer, entry, server
        finally:
            server.stop()
