"""The product's classes on simulated hosts: which names are replaced, and by what.

As in ``system.py``: names in the modules that start threads, open sockets, read clocks or files are
replaced once while cases run, so that the product has no parameter for tests.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec

from tests.simulation import authority_host as hw
from tests.simulation.worker import SimWorker
from tieredckpt.agent.cluster.in_doubt import Fates
from tieredckpt.agent.cluster.members import Peers
from tieredckpt.agent.copies.pull import PullStoppedError
from tieredckpt.agent.copies.replicator import Replication
from tieredckpt.agent.host.sessions import Session, SessionRecord
from tieredckpt.agent.leader.holds import Keeping, RecordWriters
from tieredckpt.agent.leader.shedding import GivingUp, HostDisks
from tieredckpt.agent.peering.attempts import Attempts
from tieredckpt.agent.peering.broadcast import Exchange
from tieredckpt.agent.peering.failure_detector import PeerWatch
from tieredckpt.agent.slots.allocator import SlotLedger
from tieredckpt.errors import NotFoundError, TieredCkptError, TierUnavailableError
from tieredckpt.format import manifest as manifest_format
from tieredckpt.format import plan_record
from tieredckpt.format import records as records_module
from tieredckpt.format.manifest import SegmentRef
from tieredckpt.policy import history
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages import peer as pm
from tieredckpt.storage.headroom import Headroom
from tieredckpt.storage.holdings import SegmentFact
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.shared.catalog import SharedCatalog

T = TypeVar("T")
NOT_THERE = object()
"""The value of a builtin's name before it was given to a module."""
EVERYWHERE: tuple[Callable[..., Any], ...] = (
    manifest_format.decode_manifest, manifest_format.decode_attempt,
    records_module.decode_save_record,
    manifest_format.encode_attempt, plan_record.encoded_plan_id,
)  # fmt: skip
"""Pure functions that dominate the time of a case: each answer is kept."""
LINES: tuple[Callable[..., Any], ...] = (
    history.candidates, history.abandoned, history.line,
)  # fmt: skip
"""Likewise, of manifests, attempts and a stream."""


def _remembering(function: Callable[..., T]) -> Callable[..., T]:
    """A pure function of (manifests, attempts, stream, ...), each answer of which is kept.

    By identity of manifests and attempts, which are immutable and kept, too: to compare costs as
    much as to decide.
    """
    kept: dict[tuple[object, ...], tuple[object, T]] = {}

    def ask(manifests: Iterable[Any], attempts: Iterable[Any], *more: Hashable) -> T:
        given = (tuple(manifests), tuple(attempts))
        key = (*map(id, given[0]), 0, *map(id, given[1]), *more)
        found = kept.get(key)
        if found is None:
            if len(kept) > 5_000:
                kept.clear()
            found = kept[key] = (given, function(*given, *more))
        return found[1]

    return ask


class Pool(SlotPool):
    """Slots whose segments nobody reads; there is always room."""

    def _make(self, slot_id: str, capacity: int, label: Any) -> None:
        self.folder.machine.slots[slot_id] = hw.Slot(capacity, label)

    def open_segment(self, segment_id: str) -> hw.Nothing:
        slot = self.find(segment_id)
        if slot is None or slot.label.state != "sealed":
            raise NotFoundError(f"no slot holds segment {segment_id}", key=segment_id)
        return hw.Nothing(slot.label.segment_bytes)


class Leases:
    """As :class:`tieredckpt.agent.host.sessions.Leases`: a lease is held while its trainer
    lives."""

    def __init__(self, folder: hw.SimPath, tickets: hw.Tickets) -> None:
        self._machine = folder.machine

    def adopt(self) -> list[Session]:
        self._machine.leases = {
            key: data for key, data in self._machine.leases.items() if self.is_held(key)
        }
        return [
            Session(key, msgspec.json.decode(data, type=SessionRecord))
            for key, data in self._machine.leases.items()
        ]

    def open(self, session_id: str, of: SessionRecord) -> str:
        if session_id in self._machine.leases:
            return ""
        self._machine.leases[session_id] = msgspec.json.encode(of)
        return f"lease {session_id}"

    def is_held(self, session_id: str) -> bool:
        return session_id in self._machine.trainers

    def end(self, session_id: str) -> None:
        self._machine.leases.pop(session_id, None)


class Listeners:
    """As :class:`tieredckpt.agent.host.listeners.Listeners`, without sockets."""

    def __init__(
        self,
        runtime: hw.SimRuntime,
        host_id: str,
        api: Any,
        is_live: Callable[[str], bool],
        in_use: Callable[[str], bool],
    ) -> None:
        self._machine = runtime.path.machine
        hw.current.running[-1].front = api
        self._served = set[str]()

    def entry(self, namespace: str) -> m.HostEntry | None:
        return self._machine.served[namespace][0] if namespace in self._served else None

    def served(self, namespace: str) -> tuple[m.HostEntry, Secret]:
        if namespace not in self._served:
            raise NotFoundError("it is not served here", key=namespace, what="token")
        entry, token = self._machine.served[namespace]
        return entry, Secret(token, None)

    def network(self, namespace: str) -> tuple[str, None]:
        return (self._machine.served[namespace][1] if namespace in self._served else "", None)

    def listen(self, namespace: str, request: m.Listen) -> m.HostEntry:
        machine = self._machine
        entry = m.HostEntry(
            host_id=machine.name,
            incarnation=f"{int(machine.name[1:]):016x}{machine.boot:016x}",
            addresses=(machine.address,),
        )
        machine.served[namespace] = (entry, request.token)
        self._served.add(namespace)
        return entry

    def restore(self, namespace: str) -> None:
        if namespace in self._machine.served:
            self._served.add(namespace)

    def forget(self, namespace: str) -> None:
        self._served.discard(namespace)
        self._machine.served.pop(namespace, None)

    def stop(self) -> None:
        self._served.clear()


class Client:
    """As :class:`tieredckpt.rpc.peer_client.PeerClient`, over the wires."""

    doubts = False

    def __init__(
        self,
        host: m.HostEntry,
        namespace: str,
        secret: Secret,
        *,
        address: str | None = None,
        source: hw.Machine | None = None,
    ) -> None:
        self.host, self.namespace = host, namespace
        self._token = secret.token
        self._address = address or host.addresses[0]
        self._source = source

    def close(self) -> None:
        pass

    retire = close

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def _ask(self, what: str, call: Callable[[Any], T]) -> T:
        world = hw.current
        source = self._source or world.here
        meant = (self.host.host_id, self.host.incarnation if what != "identify" else "")
        return world.request(source, self._address, self.namespace, self._token, meant, what, call)

    def ask(self, request: pm.PeerRequest[T]) -> T:
        verb = request.verb()
        sent = ordered(request) if isinstance(request, pm.Push) else request
        found: Any = self._ask(verb, lambda api: getattr(api, f"peer_{verb}")(self.namespace, sent))
        if isinstance(found, pm.SyncReply):
            found = msgspec.structs.replace(
                found,
                push=ordered(found.push),
                wanted_records=tuple(sorted(found.wanted_records)),
                wanted_attempts=tuple(sorted(found.wanted_attempts)),
            )
        return found

    def identify(self, caller: m.HostEntry | None = None) -> m.HostEntry:
        return self.ask(pm.Identify(caller=caller))

    def pull(self, ref: SegmentRef, tier: str) -> None:
        """Copy a segment. Raises NotFoundError: it is not there."""

        def read(api: Any) -> None:
            _, opened = api.read_segment(self.namespace, ref.id, tier)
            opened.close()

        self._ask("segment", read)


def ordered(push: pm.Push) -> pm.Push:
    """The same for every order that sets may have."""
    return msgspec.structs.replace(
        push,
        records=tuple(sorted(push.records)),
        attempts=tuple(sorted(push.attempts)),
        failed_segments=tuple(sorted(push.failed_segments)),
    )


class NoThreads:
    """As a ThreadPoolExecutor that is never given anything."""

    def __init__(self, threads: int, name: str) -> None:
        pass

    def shutdown(self, *, wait: bool, cancel_futures: bool) -> None:
        pass


class AtOnce:
    """As a ThreadPoolExecutor whose threads are done before anybody looks."""

    def __init__(self, threads: int, name: str) -> None:
        pass

    def submit(self, call: Callable[..., T], *args: object) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(call(*args))
        except TieredCkptError as error:
            future.set_exception(error)
        return future

    def shutdown(self, *, wait: bool) -> None:
        pass


class SimExchange(Exchange):
    """What runs in its threads waits among the world's tasks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._life = hw.current.running[-1]

    def each(
        self, hosts: Iterable[str], call: Callable[[str], object], within_s: float
    ) -> list[str]:
        world, answered = hw.current, []
        for host in sorted(set(hosts) - {self._peers.host_id}):
            if self._stopped:
                break
            if world.faults and world.rng.random() < world.faults / 2:
                world.later(self._life, functools.partial(call, host))  # it takes too long
                continue
            try:
                call(host)
            except TieredCkptError:
                continue
            answered.append(host)
        return answered

    def soon(self, call: Callable[..., None], *args: object) -> bool:
        if self._stopped:
            return False
        self._pending += 1
        hw.current.later(self._life, lambda: self._run(call, args))
        return True

    def at_once(self, call: Callable[[], None]) -> bool:
        if self._stopped:
            return False
        hw.current.later(self._life, call)
        return True


class Background:
    """As :class:`tieredckpt.agent.copies.replicator.Background`: the scheduler is the thread."""

    def __init__(self, name: str, step: Callable[[], float | None]) -> None:
        self._step = step
        self._due_s: float | None = None
        self._started = self._stopped = False
        hw.current.running[-1].backgrounds.append(self)

    def start(self) -> None:
        if not self._started:
            self._started, self._due_s = True, 0.0

    def wake(self) -> None:
        self._due_s = 0.0

    def stop(self) -> None:
        self._stopped = True

    def turn(self) -> None:
        for _ in range(4):
            now_s = hw.mono()
            due = self._due_s is not None and self._due_s <= now_s
            if not due or not self._started or self._stopped:
                return
            self._due_s = None
            wait_s = self._step()
            if wait_s is not None and self._due_s is None:
                self._due_s = now_s + wait_s


class InOrder(Fates):
    """Sets are gone through in one order, in whatever process."""

    def free(self, segments: Iterable[str]) -> bool:
        return super().free(sorted(segments))


class SortedSet(set[Any]):
    """As ``set``, gone through in the same order in every process."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__()))

    def intersection(self, *others: Iterable[Any]) -> SortedSet:
        return SortedSet(super().intersection(*others))

    def difference(self, *others: Iterable[Any]) -> SortedSet:
        return SortedSet(super().difference(*others))


class Watch(PeerWatch):
    """The thread's turns are the scheduler's."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, clock=hw.mono, rng=hw.current.rng)
        self.on = False
        hw.current.running[-1].watches.append(self)

    def begin(self) -> None:
        if self._peers.active or self._peers.seeds:
            self.on = not self._stopping

    def _once(self, what: str, call: Callable[[], None]) -> None:
        if not what.startswith("probe "):  # how fast an address is decides nothing here
            super()._once(what, call)


class Writers(RecordWriters):
    """Writes what is owed when it is its turn."""

    def owe(self, tier: str, of: Any, data: bytes) -> None:
        if self._stopping:
            return
        self._owed.setdefault(tier, {})[of.id] = (of, data)  # type: ignore[arg-type]
        hw.current.later(hw.current.running[-1], lambda: self._write(tier, of, data))


class Worker(SimWorker):
    """On the host's clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, clock=hw.mono)

    def turn(self) -> None:
        """What the thread does when it has nothing to rest for."""
        if self._must_rest and self._clock() - self._tried_at_s < min(self._backoff_s, 5.0):
            return
        self._must_rest = False
        self.step()


class Place:
    """As :class:`tieredckpt.agent.tiers.place.TierPlace`."""

    def __init__(self, spec: m.TierSpec, namespace: str, script: object) -> None:
        self._tier = hw.SimBucket(hw.current.here)

    def open(self) -> hw.SimBucket:
        self._tier.check()
        return self._tier

    def found(self) -> None:
        pass

    abandon = close = found

    def retrying(self) -> str | None:
        return None  # a simulated bucket answers or fails at once

    def is_gone(self) -> bool:
        return False


class Source:
    """As SpillSource and VerifiedSource: there or not, nobody looks at bytes."""

    def __init__(self, first: Any, *rest: Any) -> None:
        ref = rest[0] if isinstance(rest[0], SegmentRef) else rest[1]
        if not isinstance(first, hw.Nothing):
            first.open_memory(ref.id)
        self.size = ref.size

    def read_into(self, offset: int, into: memoryview) -> None:
        pass

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class Pull:
    """As SegmentPull: from the first donor that has it."""

    def __init__(
        self, ref: SegmentRef, donors: Sequence[Any], *, stopping: Any, **more: Any
    ) -> None:
        self._ref, self._donors, self._stopping = ref, donors, stopping

    def run(self, fd: int, *, resume: bool) -> None:
        silent: TierUnavailableError | None = None
        for donor in self._donors:
            if self._stopping.is_set():
                raise PullStoppedError("stopped", outcome="not_applied")
            try:
                if isinstance(donor.client, Client):
                    donor.client.pull(self._ref, donor.tier)
                else:
                    donor.client.open_range(self._ref.id, donor.tier, 0, 1).close()
            except TierUnavailableError as error:
                silent = error
            except NotFoundError:
                continue
            else:
                slot, _ = hw.current.fds[fd]
                slot.content = (self._ref.id, self._ref.size, self._ref.root)
                return
        raise silent or NotFoundError("nobody has it", key=self._ref.id)


def segment_fact(
    tier: Any, segment_id: str, listed: int, kind: str, marks: Any
) -> SegmentFact | None:
    """As storage/holdings.py says it of a whole slot."""
    slot = tier.pool.find(segment_id)
    if slot is None:
        return None
    label = slot.label
    return SegmentFact(
        id=segment_id, size=label.segment_bytes, root=label.root, error=None, block_bytes=4096
    )


def headroom(folder: object) -> Headroom:
    return Headroom(available_bytes=1 << 50, limit="tmpfs", advice="none")


def _token(size: int) -> str:
    return hw.current.token_hex(size)


_secrets = SimpleNamespace(token_hex=_token)
_clocked = {
    "tieredckpt.agent.peering.peering": (("Peers", Peers),),
    "tieredckpt.agent.namespace": (
        ("Replication", Replication), ("GivingUp", GivingUp), ("Keeping", Keeping),
        ("HostDisks", HostDisks),
    ),
}  # fmt: skip


def _replacements() -> dict[tuple[str, str], object]:
    agent = "tieredckpt.agent."
    found: dict[tuple[str, str], object] = {
        (module, name): functools.partial(kind, clock=hw.mono)
        for module, names in _clocked.items()
        for name, kind in names
    }
    minting = ("node", "leader.holds", "copies.state", "slots.allocator")
    found |= {(agent + each, "secrets"): _secrets for each in minting}
    found |= {("tieredckpt.storage.memory.pool", "secrets"): _secrets}
    found |= {("tieredckpt.dcp.job.history", "secrets"): _secrets}
    found |= {(agent + each, "os"): hw.sim_os for each in ("copies.holder", "slots.replicas")}
    found |= {(agent + n, "headroom_of"): headroom for n in ("slots.allocator", "slots.owners")}
    shared = functools.partial(SharedCatalog, mint=lambda: _token(8))
    return found | {
        ("tieredckpt.agent.slots.replicas", "headroom_of"): headroom,
        ("tieredckpt.agent.slots.replicas", "lock_reserved"): lambda fd, capacity, segment_id: True,
        ("tieredckpt.agent.data_cache", "shutil"): SimpleNamespace(rmtree=lambda *_, **__: None),
        ("tieredckpt.agent.node", "SlotPool"): Pool,
        ("tieredckpt.agent.node", "Listeners"): Listeners,
        ("tieredckpt.agent.namespaces", "Leases"): Leases,
        ("tieredckpt.agent.namespaces", "SlotLedger"): SlotLedger,
        ("tieredckpt.agent.namespaces", "remove_empty"): hw.SimPath.remove_empty,
        ("tieredckpt.agent.namespace", "MemoryTier"): hw.SimMemory,
        ("tieredckpt.agent.namespace", "TierWorker"): Worker,
        ("tieredckpt.agent.namespace", "Attempts"): functools.partial(Attempts, now_s=hw.wall),
        ("tieredckpt.agent.peering.attempts", "ThreadPoolExecutor"): AtOnce,
        ("tieredckpt.agent.peering.attempts", "wait"): lambda asked, within_s: (list(asked), []),
        ("tieredckpt.agent.cluster.authority", "os"): hw.sim_os,
        ("tieredckpt.agent.peering.peering", "Exchange"): SimExchange,
        ("tieredckpt.agent.peering.peering", "Fates"): InOrder,
        ("tieredckpt.agent.peering.broadcast", "set"): SortedSet,
        ("tieredckpt.agent.peering.peering", "PeerWatch"): Watch,
        ("tieredckpt.agent.peering.broadcast", "ThreadPoolExecutor"): NoThreads,
        ("tieredckpt.agent.copies.replicator", "Background"): Background,
        ("tieredckpt.agent.leader.holds", "RecordWriters"): Writers,
        ("tieredckpt.agent.cluster.members", "PeerClient"): Client,
        ("tieredckpt.agent.peering.failure_detector", "PeerClient"): Client,
        ("tieredckpt.agent.cluster.members", "write_private"): hw.write_private,
        ("tieredckpt.agent.tiers.worker", "TierPlace"): Place,
        ("tieredckpt.agent.tiers.pruner", "SharedCatalog"): shared,
        ("tieredckpt.agent.tiers.upload", "SpillSource"): Source,
        ("tieredckpt.agent.tiers.upload", "VerifiedSource"): Source,
        ("tieredckpt.agent.copies.holder", "SegmentPull"): Pull,
        ("tieredckpt.agent.tiers.host_retention", "time"): SimpleNamespace(
            time=hw.wall, monotonic=hw.mono
        ),
        ("tieredckpt.storage.memory.pool", "slot_file"): hw.SlotFiles(),
        ("tieredckpt.storage.memory.pool", "os"): hw.sim_os,
        ("tieredckpt.storage.holdings", "_segment_fact"): segment_fact,
    }


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """The product runs on simulated hosts in here, and logs nothing."""
    old: list[tuple[object, str, object]] = []

    def replace(module: object, name: str, value: object) -> None:
        old.append((module, name, getattr(module, name, NOT_THERE)))
        setattr(module, name, value)

    for (module, name), value in _replacements().items():
        replace(importlib.import_module(module), name, value)
    kept_ones = {each: functools.lru_cache(maxsize=4096)(each) for each in EVERYWHERE}
    kept_ones |= {each: _remembering(each) for each in LINES}
    for function, kept in kept_ones.items():
        for module in [each for n, each in sys.modules.items() if n.startswith("tieredckpt.")]:
            for name in [name for name, value in vars(module).items() if value is function]:
                replace(module, name, kept)
    logging.disable(logging.CRITICAL)
    gc.freeze()  # cases make many objects, and no garbage that could not wait
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        logging.disable(logging.NOTSET)
        for module, name, value in reversed(old):
            if value is NOT_THERE:
                delattr(module, name)
            else:
                setattr(module, name, value)
