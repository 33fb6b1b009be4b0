"""The other hosts of one namespace: which there are, who belongs to the job, who answers, how fast.

The *members* are the hosts of the running job, as its ranks have said. Known besides are the hosts
of earlier jobs, which may hold what nobody else does. A host's entry changes when it has answered
itself, or the job has named it: nothing that one agent says of a third host is taken over.

The configuration's ``discovery`` addresses are tracked here, too (:class:`Seeds`). One that has not
answered since the job began may belong to a host that holds the only copy of a checkpoint, so a
recovery that finds nothing names the address instead of starting from scratch.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from tieredckpt.agent.host.events import Hooks
from tieredckpt.agent.host.listeners import Listeners
from tieredckpt.agent.host.runtime import write_private
from tieredckpt.errors import NotFoundError, TieredCkptError, TierUnavailableError
from tieredckpt.format.envelope import MALFORMED
from tieredckpt.format.manifest import check_host
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.peer import PeerRequest
from tieredckpt.rpc.peer_client import PeerClient

NOT_YET = "not asked yet"


class Seeds:
    """Of one namespace. Thread-safe.

    Args:
        addresses: ``host:port`` of a static list.
        dns: ``name:port`` that resolves to all hosts; "": none.

    Attributes:
        addresses, dns: As given.
    """

    def __init__(self, addresses: tuple[str, ...] = (), dns: str = "") -> None:
        self.addresses, self.dns = addresses, dns
        self._lock = threading.Lock()
        self._unmet = dict.fromkeys((*addresses, *([dns] if dns else ())), NOT_YET)
        self._met: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self.addresses or self.dns)

    def unmet(self) -> dict[str, str]:
        """What has not answered, and why."""
        with self._lock:
            own = {*self.addresses, self.dns}
            return {
                place if place in own else f"{place} ({self.dns})": why
                for place, why in self._unmet.items()
            }

    def resolved(self, addresses: Iterable[str]) -> None:
        """The name stands for these at present; what it stood for before is forgotten."""
        with self._lock:
            wanted = dict.fromkeys(addresses)
            self._unmet.pop(self.dns, None)
            before = self._unmet
            self._unmet = {a: w for a, w in before.items() if a in self.addresses}
            self._unmet |= {a: before.get(a, NOT_YET) for a in wanted if a not in self._met}

    def met(self, address: str) -> None:
        """A host has said there who it is."""
        with self._lock:
            self._met.add(address)
            self._unmet.pop(address, None)

    def failed(self, place: str, why: str) -> bool:
        """An address, or the name, did not answer, unless it has before; whether that is news."""
        with self._lock:
            before = self._unmet.get(place, why)
            if place in self._unmet:
                self._unmet[place] = why
            return before != why


BOOK_MAX = 1 << 16
EARLIER_MAX = 1 << 14
"""Hosts of earlier jobs that stay known; of more, those are forgotten that left first."""
COMING_MAX = 4
PROBE_AGAIN_S = 60.0
LOST_AFTER_S = 30.0
"""A member that has not answered for so long is lost: others get copies of what it held."""
SLOW_RAIL = 4.0
"""A rail that is so many times slower than the host's best one is not used."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class Noted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of it outlives the agent."""

    run: str = ""
    leader: str = ""
    members: tuple[str, ...] = ()
    hosts: tuple[m.HostEntry, ...] = ()
    seeds: tuple[str, ...] = ()
    dns: str = ""
    replicas: int = 0
    replication_bytes_per_s: int = 0
    coming: tuple[m.SetPeers, ...] = ()
    """Of runs that take over when they have saved."""


_decoder = msgspec.json.Decoder(Noted)


def is_host(name: str) -> bool:
    """Whether a host can be called ``name``."""
    try:
        check_host(name, "a host")
    except ValueError:
        return False
    return True


def read_noted(path: Path) -> Noted:
    """What was written down; nothing if there is no such file, or it cannot be used."""
    try:
        return _decoder.decode(path.read_bytes())
    except FileNotFoundError:
        return Noted()
    except (OSError, *MALFORMED) as error:
        log.warning("%s is unreadable, and the hosts in it are unknown: %s", path, error)
        return Noted()


@dataclass(slots=True)
class KnownHost:
    """One other host. Guarded by the lock of :class:`Peers`."""

    entry: m.HostEntry
    reachable: bool | None = None
    error: str | None = None
    rtt_s: float | None = None
    rails: dict[str, float] | None = None
    """Bytes per second by address, as probed."""
    probed_s: float | None = None
    heard_s: float | None = None
    asked_s: float | None = None
    """When it was first asked in vain since it answered last."""
    lost: bool = False
    client: PeerClient | None = None

    def state(self, member: bool) -> m.PeerState:
        """For status and trainers."""
        rails = self.rails or {}
        return m.PeerState(
            host=self.entry,
            member=member,
            reachable=self.reachable,
            error=self.error,
            address=max(rails, key=rails.__getitem__) if rails else None,
            rtt_s=self.rtt_s,
            bytes_per_s=max(rails.values()) if rails else None,
        )

    def needs_probe(self, before_s: float) -> bool:
        """Whether it answers, and its rails were not measured, or one has failed since then, or
        some are left out for long.
        """
        if not self.reachable:
            return False
        if len(self.entry.addresses) > 1 and self.client is not None and self.client.doubts:
            return True
        complete = self.rails is not None and len(self.usable()) == len(self.entry.addresses)
        return not complete and (self.probed_s is None or self.probed_s < before_s)

    def usable(self) -> tuple[str, ...]:
        """Its addresses without the slow rails, the fastest first."""
        if not self.rails:
            return self.entry.addresses
        least = max(self.rails.values()) / SLOW_RAIL
        return tuple(
            sorted(
                (a for a, speed in self.rails.items() if speed > least),
                key=lambda address: -(self.rails or {})[address],
            )
        )


class PeerLines:
    """The lines to other hosts that end when the agent does: who waits on one gets an error then.

    Of one namespace. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: weakref.WeakSet[PeerClient] = weakref.WeakSet()
        self._stopped = False

    def add(self, client: PeerClient) -> PeerClient:
        """``client``, which :meth:`stop` closes if it is in use then.

        Raises:
            TierUnavailableError: The agent stops; the client is closed.
        """
        with self._lock:
            if not self._stopped:
                self._made.add(client)
                return client
        client.close()
        raise TierUnavailableError("the agent stops", tier="peer", outcome="not_applied")

    def stop(self) -> None:
        """Close them all, for good. Idempotent."""
        with self._lock:
            self._stopped = True
            made = list(self._made)
        for client in made:
            client.close()


class Peers:
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
        self.is_over: Callable[[], bool] = lambda: False
        """Whether the run of the members has saved, and another one, of which this host is not."""
        self._changed = False
        """The file is older than what is known."""
        self._noted = read_noted(path)
        self.seeds = Seeds(self._noted.seeds, self._noted.dns)
        self._members = frozenset(self._noted.members)
        self._hosts = {e.host_id: KnownHost(e) for e in self._noted.hosts if e.host_id != host_id}
        self.lines = PeerLines()
        self._met: set[tuple[str, str]] = set()
        """Run and host: this one knows what that one knew, at some time of this run."""

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
        """Known hosts that are no members: of earlier jobs, or found by discovery."""
        with self._lock:
            return tuple(sorted(self._hosts.keys() - self._members))

    def lost(self) -> frozenset[str]:
        """Members that have not answered for :data:`LOST_AFTER_S`."""
        with self._lock:
            return frozenset(h for h in self._members if h in self._hosts and self._hosts[h].lost)

    def met(self, run: str, host_id: str) -> None:
        """This host has compared what it knows with another one, in that run."""
        with self._lock:
            self._met = {each for each in self._met if each[0] == run} | {(run, host_id)}

    def unmet(self) -> list[str]:
        """Members, lost ones excepted, that this host has not compared itself with in this run."""
        run, lost = self.run, self.lost()
        with self._lock:
            return [h for h in self.others() if (run, h) not in self._met and h not in lost]

    def has_caught_up(self) -> bool:
        """Whether this host knows what the leader knows; as the leader, what all others know."""
        if not self.others():
            return True
        unmet = self.unmet()
        if self.is_leader:
            return not unmet
        return self.leader not in unmet and self.leader not in self.lost()

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
        """See :class:`tieredckpt.rpc.messages.agent.PeerTable`."""
        token, tls = self._listeners.network(self.namespace)
        return m.PeerTable(
            host=self.own(), leader=self.leader, replicas=self.replicas, token=token, tls=tls,
            peers=self.states(), unmet=self.seeds.unmet(),
        )  # fmt: skip

    # --- learning ---------------------------------------------------------------------------------

    def set(self, request: m.SetPeers, *, later: bool = False) -> None:
        """See :class:`tieredckpt.rpc.messages.agent.SetPeers`; ``later``: with :meth:`take_up`.

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
        with self._lock:
            known = {h for h, each in self._hosts.items() if each.reachable} | self._members
        unknown = [each for each in request.earlier if each.host_id not in known]
        self.learn(unknown, tell=False)
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
            before = self._members
            self._members = frozenset(entry.host_id for entry in request.hosts) | {self.host_id}
            # Who was in the job until now has left last.
            self._hosts = dict(sorted(self._hosts.items(), key=lambda item: item[0] in before))
            for host_id in self._members & self._hosts.keys():
                # It has joined the job just now, whatever became of it before.
                self._hosts[host_id].lost, self._hosts[host_id].asked_s = False, None
            earlier = [host_id for host_id in self._hosts if host_id not in self._members]
            gone = [self._hosts.pop(host_id).client for host_id in earlier[:-EARLIER_MAX]]
        for client in gone:
            if client is not None:
                client.retire()
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

    def nearest_first(self, hosts: Iterable[str]) -> tuple[list[str], list[str]]:
        """``hosts`` but this one, in order: those that may answer, and those that did not."""
        wanted = [host for host in hosts if host != self.host_id]
        with self._lock:
            silent = {h for h in wanted if h in self._hosts and self._hosts[h].reachable is False}
        return [h for h in wanted if h not in silent], [h for h in wanted if h in silent]

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

    # --- asking -----------------------------------------------------------------------------------

    def secret(self) -> Secret:
        """What hosts prove to each other. Raises NotFoundError: this one does not listen."""
        return self._listeners.served(self.namespace)[1]

    def client(self, host_id: str) -> PeerClient:
        """The line to a host; shared, do not close it.

        Raises:
            NotFoundError: It is not known, or this host has no secret.
            TierUnavailableError: The agent stops.
        """
        secret = self.secret()
        with self._lock:
            known = self._hosts.get(host_id)
            if known is None:
                raise NotFoundError(f"no host {host_id} is known", key=host_id, what="host")
            if known.client is None:
                entry = msgspec.structs.replace(known.entry, addresses=known.usable())
                known.client = self.lines.add(PeerClient(entry, self.namespace, secret))
            return known.client

    def ask(self, host_id: str, request: PeerRequest[T]) -> T:
        """Ask a host for what ``request`` stands for, noting whether it answered.

        Raises as :meth:`PeerClient.ask`, and NotFoundError as :meth:`client`.
        """
        client = self.client(host_id)
        try:
            answer = client.ask(request)
        except TierUnavailableError as error:
            self.failed(host_id, str(error))
            raise
        except TieredCkptError:
            self.heard(host_id)
            raise
        self.heard(host_id)
        return answer

    def heard(self, host_id: str) -> None:
        """A host has answered, or asked."""
        with self._lock:
            known = self._hosts.get(host_id)
            if known is None:
                return
            back = known.lost or known.reachable is not True
            known.reachable, known.error, known.lost = True, None, False
            known.heard_s, known.asked_s = self._clock(), None
        if back:
            for call in self._hooks.on_found:
                call(host_id)

    def failed(self, host_id: str, error: str) -> None:
        """A host has not answered; after :data:`LOST_AFTER_S` it is lost."""
        now_s = self._clock()
        with self._lock:
            known = self._hosts.get(host_id)
            if known is None:
                return
            if known.reachable is not False:
                log.warning("namespace %s: host %s: %s", self.namespace, host_id, error[:300])
            known.reachable, known.error = False, error[:1000]
            known.asked_s = now_s if known.asked_s is None else known.asked_s
            lost = host_id in self._members and now_s - known.asked_s >= LOST_AFTER_S
            lost, known.lost = lost and not known.lost, known.lost or lost
        if lost:
            log.warning(
                "namespace %s: host %s has not answered for %g s: it is lost",
                self.namespace, host_id, LOST_AFTER_S,
            )  # fmt: skip
            for call in self._hooks.on_lost:
                call(host_id)

    def probed(
        self, host_id: str, entry: m.HostEntry, rtt_s: float, rails: dict[str, float]
    ) -> None:
        """How fast a host's rails are; slow ones are left out from now on."""
        with self._lock:
            known = self._hosts.get(host_id)
            if known is None or known.entry != entry:
                return
            known.probed_s = self._clock()
            before = known.usable()
            known.rtt_s, known.rails = rtt_s, rails
            if known.client is not None:
                known.client.doubts = False
            slow = sorted(set(known.entry.addresses) - set(known.usable()))
            stale = known.client if known.usable() != before else None
            known.client = known.client if stale is None else None
        if stale is not None:
            stale.retire()
        if slow:
            log.warning(
                "namespace %s: host %s is not asked at %s: no answer there, or %g times slower than"
                " at its best address", self.namespace, host_id, ", ".join(slow), SLOW_RAIL,
            )  # fmt: skip

    def needs_probe(self, hosts: Sequence[str]) -> list[str]:
        """Of ``hosts``, those that answer and whose rails were not measured, or are left out for
        :data:`PROBE_AGAIN_S`: a rail may have been busy, or come back.
        """
        before_s = self._clock() - PROBE_AGAIN_S
        with self._lock:
            return [h for h in hosts if h in self._hosts and self._hosts[h].needs_probe(before_s)]

    # --- life -----------------------------------------------------------------------------------

    def tell_all(self) -> None:
        """This host is reached elsewhere than before: all others are to be asked, and so told."""
        with self._lock:
            for known in self._hosts.values():
                known.heard_s = None

    def reset_clients(self) -> None:
        """The secret or this host's address is another one: lines are made anew."""
        with self._lock:
            clients = [k.client for k in self._hosts.values() if k.client is not None]
            for known in self._hosts.values():
                known.client = None
        for client in clients:
            client.retire()

    def forget(self) -> None:
        """The namespace was purged."""
        self.reset_clients()
        with self._lock:
            self._hosts, self._members, self._noted = {}, frozenset(), Noted()
            self.seeds = Seeds()
        self._path.unlink(missing_ok=True)
