"""Real peer servers that hold copies of one segment, each with faults of its own."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.support.peer_server import NAMESPACE, TOKEN, OpenFile, Peer, serving
from tieredckpt.errors import TierUnavailableError
from tieredckpt.format.manifest import SegmentRef
from tieredckpt.recovery.copies import OpenedSource
from tieredckpt.recovery.evidence import SourceRef
from tieredckpt.recovery.fetch import SegmentFetcher
from tieredckpt.recovery.remote import DONOR_STREAMS
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.peer_client import PeerClient
from tieredckpt.rpc.peer_server import PeerServer
from tieredckpt.storage.holdings import TierKind

STALL_S = 30.0
"""How long the clients wait for bytes, unless a test says otherwise."""

Hook = Callable[[int, memoryview], None]
"""Called with the offset of bytes that are about to be sent; may change them, block or raise."""


class FaultyFile(OpenFile):
    """Sent piece by piece through a hook, instead of by sendfile."""

    def __init__(self, inner: OpenFile, hook: Hook) -> None:
        self._inner = inner
        self._hook = hook
        self.size = inner.size

    def read_into(self, offset: int, into: memoryview) -> None:
        self._inner.read_into(offset, into)
        self._hook(offset, into)

    def fileno(self) -> int:
        return self._inner.fileno()

    @property
    def direct(self) -> bool:
        return True  # never by sendfile

    def close(self) -> None:
        self._inner.close()


_KINDS: dict[str, TierKind] = {"memory": "memory", "store": "object"}


@dataclass
class Donor:
    """One host with a copy in its memory."""

    host: str
    peer: Peer
    server: PeerServer
    client: PeerClient
    hook: Hook | None = None
    asked: int = 0

    def path(self, segment_id: str, tier: str = "memory") -> str:
        return str(self.peer.folder / f"{tier}-{segment_id}")

    def flip(self, segment_id: str, *positions: int, tier: str = "memory") -> None:
        with open(self.path(segment_id, tier), "r+b") as file:
            for position in positions:
                file.seek(position)
                byte = file.read(1)[0]
                file.seek(position)
                file.write(bytes([byte ^ (1 << position % 8)]))


@dataclass
class Donors:
    """Copies of one segment, here and on other hosts; ``here`` is this host's name."""

    ref: SegmentRef
    segment: bytes
    here: str = "here"
    donors: dict[str, Donor] = field(default_factory=dict)
    sources: list[SourceRef] = field(default_factory=list)
    local: dict[str, bytes] = field(default_factory=dict)
    damage: list[tuple[str, tuple[int, ...], str]] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    streams: int = DONOR_STREAMS
    """Connections to each donor."""
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def add(
        self,
        host: str,
        data: bytes | None = None,
        *,
        tier: str = "memory",
        known_size: int | None = None,
        bad_blocks: tuple[int, ...] = (),
        stall_s: float = STALL_S,
    ) -> Donor:
        """A donor that serves ``data``, which its holdings say to have ``known_size`` bytes."""
        data = self.segment if data is None else data
        if host not in self.donors:
            address = f"127.0.0.{2 + len(self.donors)}"
            peer, entry, server = self._stack.enter_context(serving(addresses=(address,)))
            client = PeerClient(entry, NAMESPACE, Secret(TOKEN), stall_s=stall_s)
            self._stack.callback(client.close)
            donor = self.donors[host] = Donor(host, peer, server, client)
            plain = peer.read_segment

            def read_segment(
                namespace: str, segment_id: str, tier: str | None
            ) -> tuple[str, OpenFile]:
                donor.asked += 1
                name, opened = plain(namespace, segment_id, tier)
                if donor.hook is None:
                    return name, opened
                return "in pieces", FaultyFile(opened, donor.hook)  # memory goes by sendfile

            peer.read_segment = read_segment  # type: ignore[method-assign]
        self.donors[host].peer.add(self.ref.id, data, tier)
        self._source(host, tier, len(data) if known_size is None else known_size, bad_blocks)
        return self.donors[host]

    def add_here(
        self, tier: str, data: bytes | None = None, bad_blocks: tuple[int, ...] = ()
    ) -> None:
        """A copy on this host."""
        self.local[tier] = self.segment if data is None else data
        self._source(self.here, tier, len(self.local[tier]), bad_blocks)

    def _source(self, host: str, tier: str, size: int, bad_blocks: tuple[int, ...]) -> None:
        self.sources.append(
            SourceRef(
                host=host, tier=tier, segment_id=self.ref.id, size=size, intact=not bad_blocks,
                bad_blocks=bad_blocks, kind=_KINDS.get(tier, "file"), shared=tier == "store",
            )
        )  # fmt: skip

    def fetcher(self) -> SegmentFetcher:
        return SegmentFetcher(
            self.ref, self.sources, self._open, self._report,
            find_peer=self._find, host_id=self.here, streams_of=lambda _source: self.streams,
        )  # fmt: skip

    def _open(self, source: SourceRef) -> OpenedSource:
        assert source.host == self.here
        fd = os.memfd_create(source.tier)
        os.write(fd, self.local[source.tier])
        return OpenedSource(fd=fd, direct=False)

    def _find(self, source: SourceRef) -> PeerClient:
        if source.host in self.unknown:
            raise TierUnavailableError(f"the address of host {source.host} is not known")
        return self.donors[source.host].client

    def _report(self, source: SourceRef, blocks: tuple[int, ...], reason: str) -> None:
        self.damage.append((f"{source.tier} on {source.host}", blocks, reason))

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def donors_of(ref: SegmentRef, segment: bytes) -> Iterator[Donors]:
    """No donors yet; all servers are stopped at the end."""
    found = Donors(ref, segment)
    try:
        yield found
    finally:
        found.close()


def once(donor: Donor, at: int, action: Callable[[], None]) -> None:
    """Call ``action`` when the donor is about to send byte ``at`` for the first time."""
    lock = threading.Lock()
    done = False

    def hook(offset: int, into: memoryview) -> None:
        nonlocal done
        with lock:
            mine = not done and offset <= at < offset + len(into)
            done = done or mine
        if mine:
            action()

    donor.hook = hook
