"""What the agents of the authority simulation run on: hosts, their memory, wires, a bucket, clocks.

Everything here is hardware. Decisions are the product's, whose classes run unchanged on it
(``authority_adapter.py``): a host's tmpfs and slots are dicts that outlive the agent, a request to
another host is a call of that host's handlers through :class:`Wires`, which may drop, delay, lose
or repeat it, and nothing has a thread: what would run in one waits in :class:`Tasks`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

from tests.simulation.shared_store import Store
from tieredckpt.errors import (
    AgentError,
    CapacityError,
    IntegrityError,
    NamespaceInUseError,
    NotFoundError,
    StaleAttemptError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.storage.base import ByteSource, ObjectInfo, OpenObject, Scope, Tier
from tieredckpt.storage.memory.slot import Label

T = TypeVar("T")
SAID = (
    NotFoundError, IntegrityError, TierUnavailableError, CapacityError, StaleAttemptError,
    NamespaceInUseError, UsageError,
)  # fmt: skip
"""What another host may say, as in rpc/peer_client.py."""


class Killed(BaseException):
    """The agent that was doing this is no more."""

    def __init__(self, life: Life) -> None:
        super().__init__(life)
        self.life = life


@dataclass(eq=False, slots=True)
class Slot:
    """One slot file."""

    capacity: int
    label: Label
    content: tuple[str, int, str] | None = None
    """Segment id, size and root of what was written into it."""
    writer: int = 0
    """The descriptor that holds its lock."""


@dataclass(eq=False)
class Life:
    """One agent process."""

    machine: Machine
    node: Any = None
    front: Any = None
    backgrounds: list[Any] = field(default_factory=list)
    watches: list[Any] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.machine.life is self


@dataclass(eq=False)
class Machine:
    """One host: what outlives its agent, and what does not outlive the host's memory."""

    name: str
    address: str
    up: bool = True
    reaches_bucket: bool = True
    mono_ahead_s: float = 0.0
    wall_ahead_s: float = 0.0
    boot: int = 0
    life: Life | None = None
    objects: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """The small files of the memory tier, by namespace and key."""
    slots: dict[str, Slot] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    """Specs and known hosts."""
    leases: dict[str, bytes] = field(default_factory=dict)
    """Sessions whose process lives, or whose file was not removed yet."""
    trainers: set[str] = field(default_factory=set)
    """Session ids of the processes that live."""
    served: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """By namespace, this host as others know it, and the token."""

    def lose_memory(self) -> None:
        """The power is gone: agent, trainers and tmpfs."""
        self.up, self.life = False, None
        self.boot += 1
        for table in (self.objects, self.slots, self.files, self.leases, self.served):
            table.clear()
        self.trainers.clear()


class World:
    """Time, chance, whose turn it is, and what the oracle wants to hear."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(f"world {seed}")
        self.ids = Random(f"ids {seed}")
        self.now_s = 1_000_000.0
        self.applying_late = False
        self.running: list[Life] = []
        self.machines: dict[str, Machine] = {}
        self.store = Store(self)  # type: ignore[arg-type]
        self.tasks: list[tuple[Life, Callable[[], object]]] = []
        self.fds: dict[int, tuple[Slot, object]] = {}
        self.numbers = itertools.count(1000)
        self.owners: dict[str, str] = {}
        """By address, the host that answers there."""
        self.cuts: set[tuple[str, str]] = set()
        """(from, to) that nothing passes."""
        self.faults = 0.0
        """How likely one request goes wrong."""
        self.depth = 0
        self.trace: list[str] = []
        self.deleted: Callable[[str, str, Machine], None] = lambda place, save_id, by: None
        self.freed: Callable[[Machine, Label], None] = lambda machine, label: None

    # --- processes --------------------------------------------------------------------------------

    @property
    def here(self) -> Machine:
        """The host whose agent runs at this moment."""
        return self.running[-1].machine

    def mono(self) -> float:
        """Its monotonic clock."""
        return self.now_s + (self.running[-1].machine.mono_ahead_s if self.running else 0.0)

    def wall(self) -> float:
        """Its wall clock."""
        return 1.7e9 + self.now_s + (self.running[-1].machine.wall_ahead_s if self.running else 0.0)

    def token_hex(self, size: int) -> str:
        return self.ids.randbytes(size).hex()

    def as_agent(self, machine: Machine, call: Callable[[Life], T]) -> T:
        """Let a host's agent do something. Raises AgentError: there is none, or it died."""
        life = machine.life
        if life is None:
            raise AgentError(f"no agent on {machine.name}", outcome="not_applied")
        self.running.append(life)
        try:
            return call(life)
        except Killed as killed:
            if killed.life is not life:
                raise
            raise AgentError("the agent died", outcome="unknown") from None
        finally:
            self.running.pop()

    def kill_agent(self, machine: Machine) -> None:
        """Nothing of it happens any more; what it had open is closed."""
        life, machine.life = machine.life, None
        for fd in [fd for fd, (_, owner) in self.fds.items() if owner is life]:
            self.close(fd)

    def later(self, life: Life, call: Callable[[], object]) -> None:
        self.tasks.append((life, call))

    def run_task(self) -> bool:
        """One of the things that wait for a thread, in any order; False: nothing waits."""
        while self.tasks:
            at = self.rng.randrange(len(self.tasks)) if self.faults else 0
            life, call = self.tasks.pop(at)
            if not life.alive or life in self.running:
                if life.alive:  # its locks may be held by what waits below
                    self.tasks.append((life, call))
                    return False
                continue
            try:
                self.as_agent(life.machine, lambda _, call=call: call())
            except TieredCkptError as error:
                self.trace.append(f"  {life.machine.name}: in the background: {error}"[:300])
            return True
        return False

    # --- descriptors ------------------------------------------------------------------------------

    def open_fd(self, slot: Slot, owner: object, *, locked: bool) -> int:
        fd = next(self.numbers)
        self.fds[fd] = (slot, owner)
        if locked:
            slot.writer = fd
        return fd

    def close(self, fd: int) -> None:
        slot, _ = self.fds.pop(fd, (None, None))
        if slot is not None and slot.writer == fd:
            slot.writer = 0

    # --- wires ------------------------------------------------------------------------------------

    def passes(self, source: Machine, target: Machine) -> bool:
        return source.up and target.up and (source.name, target.name) not in self.cuts

    def request(
        self, source: Machine, address: str, namespace: str, token: str, meant: tuple[str, str],
        what: str, call: Callable[[Any], T],
    ) -> T:  # fmt: skip
        """Ask whoever answers at ``address``. Raises as rpc/peer_client.py.

        ``meant``: who has to answer: a host id, and its incarnation; "": any.
        """
        target = self.machines.get(self.owners.get(address, ""))
        if target is None or not self.passes(source, target) or target.life is None:
            raise TierUnavailableError(f"{address} does not answer", tier="peer", outcome="unknown")
        entry, known = target.served.get(namespace, (None, None))
        if known != token or entry is None:
            raise AgentError(f"{address} refuses the secret", outcome="not_applied")
        said = (entry.host_id, entry.incarnation)
        if any(mine not in ("", its) for mine, its in zip(meant, said, strict=True)):
            raise TierUnavailableError(
                f"{said[0]} answers at {address} in its place", tier="peer", outcome="not_applied"
            )
        life = target.life
        self._meanwhile()
        wrong = self.rng.random() if self.faults else 1.0
        kind = ""
        if wrong < self.faults:
            kind = self.rng.choice(("drop", "late", "lost", "twice", "killed"))
        if kind == "drop":
            raise TierUnavailableError(f"{what} was lost", tier="peer", outcome="unknown")
        if kind == "late":
            self.later(life, lambda: self._answer(target, call))
            raise TierUnavailableError(f"{what} is late", tier="peer", outcome="unknown")
        if kind == "twice":
            self._quietly(target, call)
        answer = self._answer(target, call)
        if kind == "killed" and self.running and self.running[-1].machine is source:
            self.trace.append(f"  {source.name}: agent dies in {what}")
            self.kill_agent(source)
            raise Killed(self.running[-1])
        self._meanwhile()
        if kind == "lost" or not self.passes(target, source):
            raise TierUnavailableError(
                f"the answer to {what} was lost", tier="peer", outcome="unknown"
            )
        return answer

    def _meanwhile(self) -> None:
        """Agents that do not wait for this request go on."""
        if self.depth < 2 and self.rng.random() < 2 * self.faults:
            self.depth += 1
            try:
                self.run_task()
            finally:
                self.depth -= 1

    def _answer(self, target: Machine, call: Callable[[Any], T]) -> T:
        try:
            return self.as_agent(target, lambda life: call(life.front))
        except AgentError as error:
            raise TierUnavailableError(str(error), tier="peer", outcome="unknown") from None
        except SAID:
            raise
        except TieredCkptError as error:
            raise AgentError(f"{target.name}: {error}", outcome="unknown") from None

    def _quietly(self, target: Machine, call: Callable[[Any], object]) -> None:
        try:
            self._answer(target, call)
        except TieredCkptError:
            pass  # the one that comes second answers


current: World
"""Whose hosts run now. The product's modules reach it through the names that are replaced."""


def enter(world: World) -> None:
    """From now on the replaced names mean this world."""
    global current
    current = world


def mono() -> float:
    return current.mono()


def wall() -> float:
    return current.wall()


# --- files ------------------------------------------------------------------------------------


class SimPath:
    """As much of a path as the agent needs of its runtime folder."""

    __slots__ = ("machine", "text")

    def __init__(self, machine: Machine, text: str) -> None:
        self.machine, self.text = machine, text

    def __truediv__(self, name: str) -> SimPath:
        return SimPath(self.machine, f"{self.text}/{name}" if self.text else name)

    def __str__(self) -> str:
        return f"{self.machine.name}:{self.text}"

    def __lt__(self, other: SimPath) -> bool:
        return self.text < other.text

    def glob(self, _: str) -> list[SimPath]:
        return []  # the data cache has no entries

    @property
    def name(self) -> str:
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> SimPath:
        return SimPath(self.machine, self.text.rpartition("/")[0])

    def mkdir(self, mode: int = 0o777, *, parents: bool = False, exist_ok: bool = False) -> None:
        pass

    def with_suffix(self, suffix: str) -> SimPath:
        return SimPath(self.machine, self.text.rpartition(".")[0] + suffix)

    def exists(self) -> bool:
        return self.text in self.machine.files

    def read_bytes(self) -> bytes:
        try:
            return self.machine.files[self.text]
        except KeyError:
            raise FileNotFoundError(self.text) from None

    def write_bytes(self, data: bytes) -> None:
        self.machine.files[self.text] = data

    def unlink(self, *, missing_ok: bool = False) -> None:
        self.machine.files.pop(self.text, None)

    def iterdir(self) -> Iterator[SimPath]:
        """Of the folder of namespaces."""
        return iter([self / name for name in self.machine.objects])

    def remove_empty(self) -> None:
        """As :func:`tieredckpt.storage.folder.remove_empty`, of a namespace's folder."""
        if not self.machine.objects.get(self.name):
            self.machine.objects.pop(self.name, None)


class SimRuntime:
    """As :class:`tieredckpt.agent.host.runtime.RuntimeDir`."""

    def __init__(self, machine: Machine) -> None:
        self.path = SimPath(machine, "")
        for name in ("slots", "sessions", "namespaces", "specs", "data", "peers", "incarnation"):
            setattr(self, name, self.path / name)


def write_private(path: SimPath, data: bytes) -> None:
    path.write_bytes(data)


# --- slots ------------------------------------------------------------------------------------


class SlotFiles:
    """As :mod:`tieredckpt.storage.memory.slot_file`."""

    def _slot(self, path: SimPath) -> Slot:
        try:
            return path.machine.slots[path.name]
        except KeyError:
            raise FileNotFoundError(path.name) from None

    def adopt(self, path: SimPath) -> tuple[int, Label, None]:
        slot = self._slot(path)
        return slot.capacity, slot.label, None

    def open_for_mapping(self, path: SimPath, capacity: int) -> int:
        return current.open_fd(self._slot(path), current.running[-1], locked=False)

    def lock_and_label(self, path: SimPath, capacity: int, label: Label) -> int | None:
        slot = self._slot(path)
        if slot.writer:
            return None
        self._relabel(path, slot, label)
        return current.open_fd(slot, current.running[-1], locked=True)

    def relabel(self, path: SimPath, capacity: int, label: Label, *, exclusively: bool) -> bool:
        slot = self._slot(path)
        if exclusively and slot.writer:
            return False
        self._relabel(path, slot, label)
        return True

    def _relabel(self, path: SimPath, slot: Slot, label: Label) -> None:
        before, slot.label = slot.label, label
        if before.state == "sealed" and label.segment_id != before.segment_id:
            slot.content = None
            current.freed(path.machine, before)

    def is_locked(self, path: SimPath) -> bool:
        return bool(self._slot(path).writer)

    def unlink(self, path: SimPath, *, even_if_locked: bool) -> bool:
        slot = path.machine.slots.get(path.name)
        if slot is None:
            return True
        if slot.writer and not even_if_locked:
            return False
        del path.machine.slots[path.name]
        if slot.label.state == "sealed":
            current.freed(path.machine, slot.label)
        return True

    def seal(self, path: SimPath, capacity: int, label: Label) -> None:
        slot = self._slot(path)
        if slot.content != (label.segment_id, label.segment_bytes, label.root):
            raise IntegrityError("its trailer is another segment's", key=label.segment_id)
        slot.label = label


class Tickets:
    """Descriptors that an agent offers: the ticket is the descriptor."""

    def __init__(self, world: World) -> None:
        self._world = world

    def offer(self, fd: int | str) -> str:
        return str(fd)

    def revoke(self, ticket: str) -> bool:
        slot, owner = self._world.fds.get(int(ticket) if ticket.isdigit() else -1, (None, None))
        if slot is None or not isinstance(owner, Life):
            return False  # somebody has fetched it
        self._world.close(int(ticket))
        return True


def _replace(source: SimPath, target: SimPath) -> None:
    target.machine.files[target.text] = source.machine.files.pop(source.text)


sim_os = SimpleNamespace(
    replace=_replace,
    close=lambda fd: current.close(fd),
    listdir=lambda folder: list(folder.machine.slots),
    O_RDONLY=0,
)


class Nothing(OpenObject):
    """An opened segment: nobody here looks at bytes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def read_into(self, offset: int, into: memoryview) -> None:
        pass

    def close(self) -> None:
        pass


class SimMemory(Tier):
    """As :class:`tieredckpt.storage.memory.tier.MemoryTier`."""

    name, scope = "memory", Scope.HOST

    def __init__(self, pool: Any, folder: SimPath, namespace: str) -> None:
        self.pool, self.namespace = pool, namespace
        self._machine = folder.machine
        self._objects = folder.machine.objects.setdefault(namespace, {})

    def put(self, key: str, data: bytes) -> None:
        if self._objects.setdefault(key, data) != data:
            raise UsageError(f"{key} exists with other bytes", key=key)

    def replace(self, key: str, data: bytes) -> None:
        self._objects[key] = data

    def put_from(self, key: str, source: ByteSource) -> None:
        raise NotImplementedError("segments are sealed in slots")

    def get(self, key: str, *, limit: int) -> bytes:
        try:
            return self._objects[key]
        except KeyError:
            raise NotFoundError(f"no {key}", key=key) from None

    def info(self, key: str) -> ObjectInfo:
        if key.startswith("segments/"):
            return ObjectInfo(key, self.sealed(key[9:]).label.segment_bytes)
        return ObjectInfo(key, len(self.get(key, limit=0)))

    def sealed(self, segment_id: str) -> Any:
        slot = self.pool.find(segment_id)
        if slot is None or not self._is_mine(slot):
            raise NotFoundError(f"no {segment_id}", key=segment_id)
        return slot

    def _is_mine(self, slot: Any) -> bool:
        return slot.label.state == "sealed" and slot.label.namespace == self.namespace

    def open(self, key: str) -> OpenObject:
        return Nothing(self.info(key).size)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if prefix == "segments/":
            for slot in self.pool.slots():
                if self._is_mine(slot):
                    yield ObjectInfo(prefix + slot.label.segment_id, slot.label.segment_bytes)
            return
        for key in [key for key in self._objects if key.startswith(prefix)]:
            yield ObjectInfo(key, len(self._objects[key]))

    def now_s(self) -> float:
        return current.now_s

    def delete(self, key: str) -> None:
        if key.startswith("segments/"):
            slot = self.pool.find(key[9:])
            if slot is not None and self._is_mine(slot):
                self.pool.free(slot.slot_id)
            return
        if self._objects.pop(key, None) is not None and key.startswith("manifests/"):
            current.deleted(f"memory of {self._machine.name}", key[-32:], current.here)


class SimBucket(Tier):
    """The one store, as one host's agent sees it."""

    name, scope = "bucket", Scope.SHARED

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._store = current.store

    def each(self, call: Callable[[ObjectInfo], T], items: Sequence[ObjectInfo]) -> list[T]:
        return [call(each) for each in items]

    def _request(self, what: str, apply: Callable[[], T], *, changes: bool = False) -> T:
        world = current
        if not self._machine.reaches_bucket or not self._machine.up:
            raise TierUnavailableError(f"{what}: no answer", tier=self.name, outcome="not_applied")
        if world.faults and world.rng.random() < world.faults / 4:
            if changes and world.rng.random() < 0.5:
                try:
                    apply()
                except (UsageError, NotFoundError):
                    pass  # nobody hears of it
                raise TierUnavailableError(f"{what}: lost", tier=self.name, outcome="unknown")
            outcome = "unknown" if changes else "not_applied"
            raise TierUnavailableError(f"{what}: failed", tier=self.name, outcome=outcome)
        return apply()

    def put(self, key: str, data: bytes) -> None:
        def apply() -> None:
            self._store.create(key, data, len(data), self._machine)  # type: ignore[arg-type]

        self._request(f"PUT {key}", apply, changes=True)

    def replace(self, key: str, data: bytes) -> None:
        def apply() -> None:
            self._store.write(key, data, len(data), "replace", self._machine)  # type: ignore[arg-type]

        self._request(f"REPLACE {key}", apply, changes=True)

    def put_from(self, key: str, source: ByteSource) -> None:
        def apply() -> None:
            if key not in self._store.objects:
                self._store.create(key, b"", source.size, self._machine)  # type: ignore[arg-type]

        self._request(f"PUT {key}", apply, changes=True)

    def get(self, key: str, *, limit: int) -> bytes:
        found = self._request(f"GET {key}", lambda: self._store.objects.get(key))
        if found is None:
            raise NotFoundError(f"no {key}", key=key)
        return found[0]

    def info(self, key: str) -> ObjectInfo:
        found = self._request(f"HEAD {key}", lambda: self._store.objects.get(key))
        if found is None:
            raise NotFoundError(f"no {key}", key=key)
        return ObjectInfo(key, found[1], found[2])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        objects = self._store.objects
        keys = self._request(
            f"LIST {prefix}", lambda: sorted(key for key in objects if key.startswith(prefix))
        )
        return iter([ObjectInfo(key, objects[key][1], objects[key][2]) for key in keys])

    def delete(self, key: str) -> None:
        def apply() -> None:
            self._store.erase(key, self._machine)  # type: ignore[arg-type]

        self._request(f"DELETE {key}", apply, changes=True)

    def now_s(self) -> float:
        return current.now_s

    def open(self, key: str) -> OpenObject:
        return Nothing(self.info(key).size)

    def check(self) -> None:
        self._request("CHECK", lambda: None)
