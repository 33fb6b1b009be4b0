"""What the supervisors of a job's hosts exchange, through the key-value tables of their agents.

Each supervisor keeps its record in the table of its own agent: the newest decision, and the host
that it follows. It puts its view into the tables of the agents of that host and of the next one in
order, which can lead at once if that host is lost. A message gets old: a host whose messages stop
is lost, and delays no other host.

Threads send and receive, so that an agent that does not answer never delays a supervisor.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from tieredckpt.agent.host.addresses import split_port, with_port
from tieredckpt.config.network import DiscoveryConfig
from tieredckpt.errors import (
    IntegrityError,
    RemoteProtocolError,
    TieredCkptError,
    TierUnavailableError,
)
from tieredckpt.format.envelope import unpack_struct
from tieredckpt.live.decide import order_of
from tieredckpt.live.messages import Decision, Term, View
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages.agent import HostEntry
from tieredckpt.rpc.messages.kv import Kv, KvReply, PeerKv, watch
from tieredckpt.rpc.peer_client import PeerClient

BEAT_S = 0.5
"""Longest time between two messages of a supervisor."""
LOST_S = 5.0
"""A host of which nothing was read for so long is lost."""
FAILING_S = 3.0
"""The same while ranks of other hosts fail, which is evidence of it."""
DOUBT_S = 1.0
"""The same if its agent refuses connections, too: a slow one does not."""
WATCH_S = 1.0
ANSWER_S = 1.25
"""The own agent answers a request to watch within this time."""
CONNECT_S = 1.0
STALL_S = 2.0
PAUSE_S = 0.02
"""Between two readings of a table, so that the beats of many hosts come together."""
POLLERS = 8

log = logging.getLogger(__name__)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor shows to all others.

    Attributes:
        leader: The host that it follows; "": none.
        term: The highest one that it has acknowledged; its own if it leads.
        decision: The newest that it knows.
        trains: Of a leader: all ranks have made an update in the generation.
        sizes: Flags that must be the same on all hosts.
        beat: When the message was sent, by its host's wall clock, in ns.
    """

    leader: str
    term: Term
    decision: Decision
    trains: bool
    sizes: str
    beat: int = 0


Message = TypeVar("Message", Record, View)


class Seen(Generic[Message]):
    """The newest message of each host, and when it came. Thread-safe.

    A first message may be what an earlier start of the job left: it counts once another one comes.
    So does the first one after the host was lost, or after this host has not read for as long.
    A message does not show that its host is there now if it was in the table before the reading
    began. Nor does one that waited, such as at an agent that was stopped: more time passed between
    its sending and that of the message before than between their readings.

    Args:
        kind: Of the messages.
        clock: By which messages get old.
    """

    def __init__(self, kind: type[Message], clock: Callable[[], float]) -> None:
        self._decode: Callable[[bytes], Message] = partial(
            unpack_struct, msgspec.msgpack.Decoder(kind), what="its message"
        )
        self._clock = clock
        self._found: dict[str, tuple[Message, float]] = {}
        self._read_s: dict[str, float] = {}
        """When the last message of each host was read."""

    def record(self, host: str, data: bytes, *, is_first: bool) -> bool:
        """Record a message; whether it is a new one. Raises IntegrityError.

        ``is_first``: the reading of its table begins, so that it may have been there for long.
        """
        message = self._decode(data)
        before = self._found.get(host)
        if before is not None and before[0].beat == message.beat:
            return False
        now_s = self._clock()
        at_s = -math.inf
        if before is not None and (passed_s := now_s - self._read_s[host]) < LOST_S:
            has_waited = message.beat - before[0].beat > (passed_s + BEAT_S) * 1e9
            at_s = before[1] if has_waited or is_first else now_s
        self._read_s[host] = now_s
        self._found = {**self._found, host: (message, at_s)}
        return True

    def now(self) -> dict[str, tuple[Message, float]]:
        """By host, its message and the message's age."""
        now_s = self._clock()
        return {host: (each, now_s - at_s) for host, (each, at_s) in self._found.items()}

    def split(self, is_here: Callable[[str, float], bool]) -> dict[str, tuple[Message, float]]:
        """As :meth:`now`, of the hosts for which ``is_here(host, age)``; others are lost."""
        found = self.now()
        here = {host: each for host, each in found.items() if is_here(host, each[1])}
        for host in found.keys() - here.keys():
            self._found = {**self._found, host: (found[host][0], -math.inf)}
        return here


class Board:
    """See the module.

    Args:
        agent: With an open session, whose agent listens.
        entry: This host.
        secret: Of the namespace.
        discovery: Where other hosts are found.
        job: Name of the job's tables, the same on all hosts.
        wake: Called in a thread when something was read.
    """

    def __init__(
        self,
        agent: AgentClient,
        entry: HostEntry,
        secret: Secret,
        discovery: DiscoveryConfig,
        job: str,
        wake: Callable[[], None],
    ) -> None:
        self.host, self.entry = entry.host_id, entry
        self._agent = agent
        self._namespace = agent.namespace
        self._secret = secret
        self._discovery = discovery
        self._job = job
        self._tables: dict[type[Any], str] = {Record: f"{job}.records", View: f"{job}.views"}
        self._wake = wake
        self._records = Seen(Record, time.monotonic)
        self._views = Seen(View, self._answered_s)
        self._answer_s: float | None = None
        """When the own agent answered last; None: no views are sent to it."""
        self._stood_s = 0.0
        """See :meth:`_answered_s`; before that answer."""
        self._lock = threading.Condition()
        self._out: tuple[Record, View] | None = None
        self._poll: Collection[str] | None = None
        self._refused_s: dict[str, float] = {}
        """When the agent of a host refused a connection."""
        self._clients: dict[str, PeerClient] = {}
        self._places: dict[str, str] = {}
        """By address, the host that is there."""
        self._stopped = threading.Event()
        self.listed = len(discovery.addresses)
        """Addresses of hosts, by ``discovery``."""
        self._unreached: dict[str, str] = {}
        self._unreadable: dict[str, str] = {}
        # A view has a thread of its own for each host that it is sent to: an agent that does not
        # answer, such as the own one while it is started again, delays no other.
        views = [partial(self._send_view, number) for number in range(2)]
        loops = (*views, self._send_record, self._watch, self._poll_others)
        self._threads = [
            threading.Thread(target=self._forever, args=(loop,), name="tck-board", daemon=True)
            for loop in loops
        ]

    @property
    def problems(self) -> dict[str, str]:
        """By address or host, why it does not count."""
        return {**self._unreached, **self._unreadable}

    def start(self) -> None:
        """Begin to exchange."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End all requests, and send what was put last."""
        self._stopped.set()
        with self._lock:
            self._lock.notify_all()
        for client in list(self._clients.values()):
            client.close()
        until_s = time.monotonic() + STALL_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        with contextlib.suppress(TieredCkptError):
            self._put_record()

    def put(self, record: Record, view: View, poll: Collection[str] | None) -> None:
        """Have this record, and the view for its leader, sent; hosts ``poll`` (None: all) read."""
        with self._lock:
            before, self._out, self._poll = self._out, (record, view), poll
            if before is None or before[0] != record or _news(before[1]) != _news(view):
                self._lock.notify_all()

    def records(self, *, failing: bool) -> dict[str, Record]:
        """Of the hosts that are not lost; ``failing``: ranks fail."""
        views = {host: age_s for host, (_, age_s) in self._views.now().items()}

        def is_here(host: str, age_s: float) -> bool:
            # A host needs no agent to send views.
            last_s = min(age_s, views.get(host, age_s))
            return age_s < LOST_S and self._is_here(failing, host, last_s)

        return {host: each for host, (each, _) in self._records.split(is_here).items()}

    def _is_here(self, failing: bool, host: str, age_s: float) -> bool:
        """Whether a host is not lost, given the age of what was read of it last."""
        if not failing:
            return age_s < LOST_S
        has_refused = time.monotonic() - self._refused_s.get(host, -math.inf) < age_s
        return age_s < (DOUBT_S if has_refused else FAILING_S)

    def ends(self, known: Decision) -> list[Decision]:
        """Decisions that the run is over, also of hosts that have left.

        Not those of hosts that know an older generation alone.
        """
        found = [each.decision for each, _ in self._records.now().values()]
        ended = [each for each in found if known.run and each.run == known.run]
        return [each for each in ended if each.exit is not None and each.began >= known.began]

    def views(self, *, failing: bool) -> dict[str, View]:
        """Of the hosts that are not lost, as of now; ``failing``: ranks fail."""
        found = self._views.split(partial(self._is_here, failing))
        return {
            host: msgspec.structs.replace(
                each, idle_s=each.idle_s + age_s, quiet_s=max(0.0, each.quiet_s - age_s)
            )
            for host, (each, age_s) in found.items()
        }

    def _leaders(self) -> list[str]:
        """The leader, and the host that would lead in its place."""
        if self._out is None or not self._out[0].leader:
            return []
        leader, order = self._out[0].leader, order_of(self._out[0].decision)
        return order[order.index(leader) :][:2] if leader in order else [leader]

    def _to_read(self, above: Collection[str]) -> set[str]:
        """Hosts whose records are read: ``above``, and those of which nothing was read for long.

        Whether their agents refuse connections is of interest, and what the next leader decides.
        """
        found = [*self._records.now().items(), *self._views.now().items()]
        doubted = {host for host, (_, age_s) in found if DOUBT_S / 2 < age_s < LOST_S}
        return doubted.union(above, self._leaders() if self._leader() in doubted else ())

    def _answered_s(self) -> float:
        """A clock that stands while the own agent, to which views are sent, does not answer.

        After LOST_S it goes on: other hosts have another leader by then.
        """
        return time.monotonic() - self._stood_s - self._stands_s()

    def _stands_s(self) -> float:
        if self._answer_s is None:
            return 0.0
        return min(max(0.0, time.monotonic() - self._answer_s - ANSWER_S), LOST_S)

    # --- threads ----------------------------------------------------------------------------------

    def _forever(self, loop: Callable[[], None]) -> None:
        while not self._stopped.is_set():
            try:
                loop()
            except TieredCkptError as error:
                log.debug("%s", error)
                self._stopped.wait(0.1)
            except Exception:  # the top of a thread: the next round may succeed
                log.exception("the supervisors' exchange: unexpected")
                self._stopped.wait(1.0)

    def _send_view(self, number: int) -> None:
        with self._lock:
            self._lock.wait(BEAT_S)
        for host in self._leaders()[number : number + 1]:
            if self._out is not None and host != self.host:
                view = msgspec.structs.replace(self._out[1], beat=time.time_ns())
                self._set(host, View, view)

    def _send_record(self) -> None:
        with self._lock:
            self._lock.wait(BEAT_S)
        self._put_record()

    def _put_record(self) -> None:
        if self._out is not None:
            record = msgspec.structs.replace(self._out[0], beat=time.time_ns())
            self._set(self.host, Record, record)
            # Else its keys are dropped while the ranks train for long and need none of them.
            if record.decision.generation:
                table = record.decision.table_of(self._job)
                self._ask(self.host, Kv(table=table, op="count"))

    def _watch(self) -> None:
        """Read the own table of views while this host leads, else the leader's record."""
        revision = 0
        leader = self._leader()
        while not self._stopped.is_set() and self._leader() == leader:
            if leader != self.host:
                self._answer_s = None
            elif self._answer_s is None:
                self._answer_s = time.monotonic()
            if not leader:
                self._stopped.wait(0.1)
                return
            kind = View if leader == self.host else Record
            request = Kv(table=self._tables[kind], op="watch", after=revision, wait_s=WATCH_S)
            reply = watch(partial(self._ask, leader), request)
            if leader == self.host:
                self._stood_s += self._stands_s()
                self._answer_s = time.monotonic()
            self._receive(kind, reply, is_first=revision == 0)
            revision = reply.number
            self._stopped.wait(PAUSE_S)

    def _receive(self, kind: type[Any], reply: KvReply, *, is_first: bool = False) -> None:
        seen: Seen[Any] = self._records if kind is Record else self._views
        news = False
        if len(reply.keys) != len(reply.values):
            raise RemoteProtocolError("a table's reply has not one value for each key")
        for host, data in zip(reply.keys, reply.values, strict=True):
            if host == self.host or data is None:
                continue
            try:
                news |= seen.record(host, data, is_first=is_first)
                self._unreadable.pop(host, None)
            except IntegrityError as error:  # of another version, or not a supervisor's
                if host not in self._unreadable:
                    log.warning("host %.64r does not count: %s", host, error.message)
                self._unreadable[host] = error.message
        if news:
            self._wake()

    def _leader(self) -> str:
        return self._out[0].leader if self._out is not None else ""

    def _poll_others(self) -> None:
        """Read the records of hosts that this one does not follow, and find unknown hosts."""
        hosts = self._poll
        unknown = self._addresses() - self._places.keys() if hosts is None else set()
        known = set(self._clients)
        if hosts is not None:
            known &= self._to_read(hosts)
        if unknown or known:
            with ThreadPoolExecutor(POLLERS, "tck-poll") as pool:
                list(pool.map(partial(self._try, self._find), unknown))
                list(pool.map(partial(self._try, self._read), known))
        if self.host in self._leaders()[1:]:
            own = Kv(table=self._tables[View], op="watch")
            self._receive(View, watch(partial(self._ask, self.host), own))
        self._stopped.wait(BEAT_S / 2)

    def _try(self, call: Callable[[str], None], place: str) -> None:
        try:
            call(place)
            self._unreached.pop(place, None)
        except TieredCkptError as error:  # perhaps it has not started yet
            self._unreached[place] = error.message

    def _addresses(self) -> set[str]:
        found = set(self._discovery.addresses)
        if self._discovery.dns_name:
            host, port = split_port(self._discovery.dns_name)
            with contextlib.suppress(OSError):
                places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                found |= {with_port(str(at[0]), int(at[1])) for *_, at in places}
        self.listed = len(found)
        return found

    def _find(self, address: str) -> None:
        """Find out which host is at an address."""
        place = HostEntry(host_id="", incarnation="0" * 32, addresses=(address,))
        with self._client(place) as client:
            entry = client.identify()
        self._places[address] = entry.host_id
        self.add_hosts([entry])

    def _read(self, host: str) -> None:
        request = Kv(table=self._tables[Record], op="watch")
        try:
            reply = watch(partial(self._ask, host), request)
        except TieredCkptError:
            # It may be another host by now, or the same one after a reboot.
            self._places = {place: at for place, at in self._places.items() if at != host}
            raise
        self._receive(Record, reply)

    # --- requests ---------------------------------------------------------------------------------

    def add_hosts(self, entries: Iterable[HostEntry]) -> None:
        """Record how hosts are reached."""
        for entry in entries:
            known = self._clients.get(entry.host_id)
            if entry.host_id != self.host and (known is None or known.host != entry):
                self._clients[entry.host_id] = self._client(entry)
                if known is not None:
                    known.close()

    def _client(self, entry: HostEntry) -> PeerClient:
        return PeerClient(
            entry, self._namespace, self._secret, connect_s=CONNECT_S, stall_s=STALL_S
        )

    def _set(self, host: str, kind: type[Any], message: Record | View) -> None:
        data = msgspec.msgpack.encode(message)
        self._ask(host, Kv(table=self._tables[kind], op="set", keys=(self.host,), values=(data,)))

    def _ask(self, host: str, request: Kv) -> KvReply:
        if host == self.host:
            # To close takes no longer, also if the agent is stopped.
            return self._agent.call(request, within_s=STALL_S if self._stopped.is_set() else None)
        client = self._clients.get(host)
        if client is None:
            raise TieredCkptError(f"host {host} is not known yet")
        try:
            return client.ask(PeerKv(request=request))
        except TierUnavailableError as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                self._refused_s[host] = time.monotonic()
            raise


def _news(view: View) -> View:
    """The part of a view that cannot wait for the next beat."""
    view = msgspec.structs.replace(view, left_s=None if view.left_s is None else 0.0)
    processes = tuple(msgspec.structs.replace(each, begun=None) for each in view.processes)
    return msgspec.structs.replace(
        view, processes=processes, idle_s=0.0, quiet_s=0.0, updates=0, step_s=0.0, updated=0, beat=0
    )
