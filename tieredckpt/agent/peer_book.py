"""The hosts of one namespace that are known: which there are, and who belongs to the job.

The *book* has every host that was ever heard of; the *members* are the hosts of the running job.
What a host says of itself, or the job says of it, is taken as it is. What one host says of another
is only where to ask: the entry of a host that is known changes when that host itself has answered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from tieredckpt.agent.hooks import Hooks
from tieredckpt.agent.known_host import KnownHost, Noted, is_host, read_noted
from tieredckpt.agent.listen import Listeners
from tieredckpt.agent.runtime import write_private
from tieredckpt.agent.seeds import Seeds
from tieredckpt.format.manifest import check_host
from tieredckpt.transport import messages as m
from tieredckpt.transport.peer_client import PeerClient

BOOK_MAX = 1 << 16
HINTS_MAX = 1 << 12
"""Addresses to try that were heard of and not asked yet."""
COMING_MAX = 4


class PeerBook:
    """See the module. Thread-safe; its lock is held over tables only.

    Args:
        namespace: Its name.
        host_id: This host.
        listeners: How this host is reached, and the secret.
        hooks: Told of changes.
        path: Where what is known is kept.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        namespace: str,
        host_id: str,
        listeners: Listeners,
        hooks: Hooks,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.namespace = namespace
        self.host_id = host_id
        self._listeners = listeners
        self._hooks = hooks
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._noting = threading.Lock()  # the file has one writer at a time
        self._hints: dict[str, None] = {}
        self.is_over: Callable[[], bool] = lambda: False
        """Whether the run of the members has saved, and another one, of which this host is not."""
        self._changed = False
        """The file is older than what is known."""
        self._noted = read_noted(path)
        self.seeds = Seeds(self._noted.seeds, self._noted.dns)
        self._members = frozenset(self._noted.members)
        self._hosts = {e.host_id: KnownHost(e) for e in self._noted.hosts if e.host_id != host_id}

    # --- what is known ----------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether any other host is known; False on every agent that serves one host."""
        return bool(self._hosts)

    @property
    def leader(self) -> str:
        """The host that opens attempts and orders replication; "" if no job has said."""
        return self._noted.leader

    @property
    def is_leader(self) -> bool:
        """Whether this host decides: it is the leader, or there are no others."""
        return self._noted.leader in ("", self.host_id) or not self._members - {self.host_id}

    @property
    def leads(self) -> bool:
        """Whether it decides, and for a job that is not over."""
        return self.is_leader and not self.is_over()

    @property
    def replicas(self) -> int:
        """Copies wanted on other hosts."""
        return self._noted.replicas

    @property
    def replication_bytes_per_s(self) -> int:
        """The most that pulling copies may take; 0: no limit."""
        return self._noted.replication_bytes_per_s

    @property
    def run(self) -> str:
        """The run that the members are of."""
        return self._noted.run

    def members(self) -> tuple[str, ...]:
        """Host ids of the running job, in order, this host's included."""
        return tuple(sorted(self._members))

    def others(self) -> tuple[str, ...]:
        """The members but this host."""
        return tuple(sorted(self._members - {self.host_id}))

    def strangers(self) -> tuple[str, ...]:
        """Known hosts that are no members: of earlier jobs, or heard of."""
        with self._lock:
            return tuple(sorted(self._hosts.keys() - self._members))

    def lost(self) -> frozenset[str]:
        """Members that have not answered for :data:`LOST_AFTER_S`."""
        with self._lock:
            return frozenset(h for h in self._members if h in self._hosts and self._hosts[h].lost)

    def unheard(self, within_s: float) -> list[str]:
        """Hosts of the book from which nothing was heard for so long."""
        until_s = self._clock() - within_s
        with self._lock:
            return [h for h, k in self._hosts.items() if k.heard_s is None or k.heard_s < until_s]

    def entry(self, host_id: str) -> m.HostEntry | None:
        """One host as it is known, this one included."""
        if host_id == self.host_id:
            return self.own()
        with self._lock:
            return found.entry if (found := self._hosts.get(host_id)) is not None else None

    def own(self) -> m.HostEntry | None:
        """This host; None: it does not listen."""
        return self._listeners.entry(self.namespace)

    def book(self) -> tuple[m.HostEntry, ...]:
        """All hosts that are known, this one first."""
        own = self.own()
        with self._lock:
            return (*((own,) if own is not None else ()), *(k.entry for k in self._hosts.values()))

    def incarnations(self) -> dict[str, str]:
        """Of every known host, this one included: what copies must name to count."""
        return {entry.host_id: entry.incarnation for entry in self.book()}

    def labels(self) -> dict[str, dict[str, str]]:
        """Failure domains of every known host."""
        return {entry.host_id: entry.labels for entry in self.book()}

    def states(self) -> tuple[m.PeerState, ...]:
        """All other hosts, members first."""
        with self._lock:
            found = [known.state(host in self._members) for host, known in self._hosts.items()]
        return tuple(sorted(found, key=lambda state: (not state.member, state.host.host_id)))

    def table(self) -> m.PeerTable:
        """See :class:`tieredckpt.transport.messages.PeerTable`."""
        token, tls = self._listeners.network(self.namespace)
        return m.PeerTable(
            host=self.own(), leader=self.leader, replicas=self.replicas, token=token, tls=tls,
            peers=self.states(), unmet=self.seeds.unmet(),
        )  # fmt: skip

    # --- learning ---------------------------------------------------------------------------------

    def set(self, request: m.SetPeers, *, later: bool = False) -> None:
        """See :class:`tieredckpt.transport.messages.SetPeers`; ``later``: with :meth:`take_up`.

        Raises:
            ValueError: A host has an impossible name, or two have the same.
        """
        names: dict[str, str] = {}
        for entry in request.hosts:
            check_host(entry.host_id, "a host")
            if names.setdefault(entry.host_id, entry.incarnation) != entry.incarnation:
                raise ValueError(
                    f"two hosts are called {entry.host_id!r}: give each its own "
                    "TIEREDCKPT_NODE_NAME, or none"
                )
        self.learn(request.hosts, tell=False)
        others = tuple(each for each in self._noted.coming if each.run != request.run)
        if later:
            with self._lock:
                coming = (*others, request)[-COMING_MAX:]
                self._noted = msgspec.structs.replace(self._noted, coming=coming)
            self.note()
            return
        with self._lock:
            self._noted = Noted(
                run=request.run, leader=request.leader, seeds=request.seeds, dns=request.dns,
                replicas=request.replicas,
                replication_bytes_per_s=request.replication_bytes_per_s, coming=others,
            )  # fmt: skip
            self.seeds = Seeds(request.seeds, request.dns)
            self._members = frozenset(entry.host_id for entry in request.hosts) | {self.host_id}
            for host_id in self._members & self._hosts.keys():
                # It has joined the job just now, whatever became of it before.
                self._hosts[host_id].lost, self._hosts[host_id].asked_s = False, None
        self.note()
        for call in self._hooks.on_members:
            call()

    def take_up(self, run: str) -> None:
        """``run`` has saved: its members take over, if it named them and they waited for that."""
        for request in self._noted.coming:
            if request.run == run:
                self.set(request)

    def learn(
        self, entries: Iterable[m.HostEntry], *, member: bool = False, tell: bool = True
    ) -> None:
        """Take over what hosts say of themselves; ``member``: they belong to the job, too."""
        changed, dropped = False, list[PeerClient]()
        with self._lock:
            for entry in entries:
                if entry.host_id == self.host_id or not is_host(entry.host_id):
                    continue
                known = self._hosts.get(entry.host_id)
                if known is None and len(self._hosts) >= BOOK_MAX:
                    continue
                if known is None or known.entry != entry:
                    if known is not None and known.client is not None:
                        dropped.append(known.client)
                    self._hosts[entry.host_id] = KnownHost(entry)
                    self._changed = True
                    changed |= entry.host_id in self._members
                if member and entry.host_id not in self._members:
                    self._members |= {entry.host_id, self.host_id}
                    self._changed = changed = True
        for client in dropped:
            client.retire()
        if changed and tell:
            for call in self._hooks.on_members:
                call()

    def hear_of(self, entries: Iterable[m.HostEntry]) -> None:
        """What one host says of others: new hosts are noted, changed ones are to be asked."""
        new = []
        with self._lock:
            for entry in entries:
                known = self._hosts.get(entry.host_id)
                if entry.host_id == self.host_id or (known and known.entry == entry):
                    continue
                if known is None:
                    new.append(entry)
                elif not known.reachable and len(self._hints) < HINTS_MAX:
                    self._hints |= dict.fromkeys(entry.addresses)
        self.learn(new)

    def nearest_first(self, hosts: Iterable[str]) -> tuple[list[str], list[str]]:
        """``hosts`` but this one, in order: those that may answer, and those that did not."""
        wanted = [host for host in hosts if host != self.host_id]
        with self._lock:
            silent = {h for h in wanted if h in self._hosts and self._hosts[h].reachable is False}
        return [h for h in wanted if h not in silent], [h for h in wanted if h in silent]

    def take_hints(self) -> list[str]:
        """Addresses at which hosts may be that are known elsewhere; each is returned once."""
        with self._lock:
            hints, self._hints = list(self._hints), {}
            return hints

    # --- writing it down ------------------------------------------------------------------------

    def note(self) -> None:
        """Write down what is known. Raises AgentError."""
        with self._noting:
            with self._lock:
                self._changed = False
                self._noted = msgspec.structs.replace(
                    self._noted,
                    members=tuple(sorted(self._members)),
                    hosts=tuple(known.entry for known in self._hosts.values()),
                )
                data = msgspec.json.encode(self._noted)
            if self.active or self.seeds or self._path.exists():
                self._path.parent.mkdir(mode=0o700, exist_ok=True)
                write_private(self._path, data)

    def note_changes(self) -> None:
        """As :meth:`note`, if something was learnt since."""
        if self._changed:
            self.note()
