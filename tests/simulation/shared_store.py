"""A store that hosts share, in memory: linearizable, with its own clock, and with lost, late and
failing requests. Whoever uses it is a thread that runs only when the scheduler says so.
"""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tieredckpt.errors import (
    IntegrityError,
    NotFoundError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.storage.base import ByteSource, ObjectInfo, OpenObject, Scope, Tier

LATE_S = 300.0
"""A request that its client has given up is applied within this time, or never."""
PAUSE_LOG = 3.0
"""Logarithm of the longest pause of a process, in seconds."""
PAGE = 3
"""Keys that one listing request returns."""

T = TypeVar("T")


class Died(BaseException):
    """The process of an actor was killed; nothing of it happens any more."""


class Actor:
    """One process: a thread that waits at every operation for its turn."""

    def __init__(self, world: Scheduler, name: str, work: Callable[[Actor], None]) -> None:
        self.world = world
        self.name = name
        self.wake_s = world.now_s
        self.over = False
        self.killed = False
        self.ops = 0
        self.listed_s: dict[str, float] = {}
        """When a listing began that is the latest, by request."""
        self.error: BaseException | None = None
        self._go = threading.Lock()
        self._go.acquire()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Actor], None]) -> None:
        self._go.acquire()
        try:
            if not self.killed:
                work(self)
        except Died:
            pass
        except BaseException as error:
            self.error = error
        self.over = True
        self.world.back.release()

    def turn(self) -> None:
        """Called by the scheduler: run up to the next operation."""
        self._go.release()
        self.world.back.acquire()
        if self.error is not None:
            raise self.error

    def pause(self, until_s: float) -> None:
        """Called by the actor: let others run until it is this late, and it is its turn."""
        if self.killed:
            raise Died
        self.wake_s = until_s
        self.world.back.release()
        self._go.acquire()
        if self.killed:
            raise Died

    def kill(self) -> None:
        """Called by the scheduler: the process ends where it is."""
        self.killed = True
        if not self.over:
            self.turn()
        self._thread.join(10)


@dataclass
class Hold:
    """What happens to one chosen request: it waits, and then goes wrong or not."""

    actor: str
    what: str
    """How the request begins, as a regular expression."""
    for_s: float = 0.0
    skip: int = 0
    """So many requests that begin so go ahead."""
    then: str = ""
    """failed, lost, late, killed (before it), done (killed after it); empty: it goes well."""
    reached: bool = False
    after: Hold | None = None
    """Not before this one."""


class Scheduler:
    """Time, chance, and whose turn it is. Everything follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 1_000_000.0
        self.back = threading.Lock()
        self.back.acquire()
        self.actors: list[Actor] = []
        self.late: list[tuple[float, Callable[[], None]]] = []
        self.faults = True
        self.applying_late = False
        self.counts: Counter[str] = Counter()
        self.trace: list[str] = []
        self.holds: list[Hold] = []

    def hold_of(self, actor: str, what: str) -> Hold | None:
        """The hold that is due for this request; each is due once."""
        for hold in self.holds:
            ready = hold.after is None or hold.after.reached
            if not ready or hold.reached or hold.actor != actor:
                continue
            if re.match(hold.what, what):
                if hold.skip:
                    hold.skip -= 1
                    continue
                hold.reached = True
                return hold
        return None

    def step(self, horizon_s: float) -> bool:
        """One operation of some actor, or one late request; False: nothing is due by then."""
        live = [each for each in self.actors if not each.over]
        due = [each for each in live if each.wake_s <= self.now_s]
        ripe = [each for each in self.late if each[0] <= self.now_s]
        if ripe:
            self.late.remove(ripe[0])
            self.applying_late = True
            ripe[0][1]()
            self.applying_late = False
            return True
        if not due:
            times = [each.wake_s for each in live] + [at_s for at_s, _ in self.late]
            next_s = min(times, default=horizon_s)
            self.now_s = max(self.now_s, min(next_s, horizon_s))
            return next_s < horizon_s
        actor = due[self.rng.randrange(len(due))]
        if self.faults and self.rng.random() < 0.01:
            # A process that is stopped, swapped out or on a crawling host.
            self.counts["pause"] += 1
            actor.wake_s = self.now_s + 10 ** self.rng.uniform(0.5, PAUSE_LOG)
            return True
        actor.turn()
        self.now_s += self.rng.random() * (3.0 if self.faults else 0.2)
        return True


class Store:
    """The objects; ``watch`` is told of each change, and raises if it must not be."""

    def __init__(self, world: Scheduler) -> None:
        self.world = world
        self.objects: dict[str, tuple[bytes, int, float]] = {}
        """Bytes (none of segments), size, time."""
        self.watch: Callable[[str, str, bytes | None, Actor | None], None] = lambda *_: None

    def write(self, key: str, data: bytes, size: int, how: str, actor: Actor | None) -> None:
        self.objects[key] = (data, size, self.world.now_s)
        self.watch(how, key, data, actor)

    def create(self, key: str, data: bytes, size: int, actor: Actor | None) -> None:
        """If-None-Match: *, and what the contract makes of it."""
        there = self.objects.get(key)
        if there is None:
            self.write(key, data, size, "put", actor)
        elif there[:2] != (data, size):
            raise UsageError(f"{key} exists with other bytes", key=key)

    def erase(self, key: str, actor: Actor | None) -> None:
        if self.objects.pop(key, None) is not None:
            self.watch("delete", key, None, actor)


class SharedSimTier(Tier):
    """The store as one process sees it; each request is a turn, and may go wrong.

    Args:
        store: The store.
        actor: Who uses it.
    """

    name, scope = "bucket", Scope.SHARED

    def __init__(self, store: Store, actor: Actor) -> None:
        self._store = store
        self._actor = actor
        self._world = store.world

    def each(self, call: Callable[[ObjectInfo], T], items: Sequence[ObjectInfo]) -> list[T]:
        return [call(each) for each in items]

    def _request(self, what: str, apply: Callable[[], T], *, changes: bool = False) -> T:
        world, actor = self._world, self._actor
        late_s = 0.0
        decided = changes and what.startswith(("PUT manifests", "DELETE", "REPLACE"))
        hold = world.hold_of(actor.name, what)
        if hold is not None:
            late_s = hold.for_s
        elif world.faults and world.rng.random() < (0.25 if decided else 0.03):
            # Between a decision and what follows from it: stopped, swapped out, a slow line.
            world.counts["pause"] += 1
            late_s = 10 ** world.rng.uniform(0.5, PAUSE_LOG)
        actor.pause(world.now_s + late_s)
        actor.ops += 1
        world.trace.append(f"{world.now_s:12.1f} {actor.name} {what}")
        kind = hold.then if hold is not None else self._chance(changes)
        if kind in ("killed", "done"):
            world.counts["killed"] += 1
            if kind == "done":
                self._quietly(apply)
            actor.killed = True
            raise Died
        if kind:
            world.counts[kind] += 1
            world.trace.append(f"             {kind}")
            if kind == "lost":
                self._quietly(apply)
            if kind == "late":
                at_s = world.now_s + world.rng.random() * LATE_S
                world.late.append((at_s, lambda: self._quietly(apply)))
            outcome = "unknown" if changes else "not_applied"
            raise TierUnavailableError(f"{what}: {kind}", tier=self.name, outcome=outcome)
        world.counts[what.split()[0]] += 1
        return apply()

    def _chance(self, changes: bool) -> str:
        """How a request goes that nobody has plans for."""
        world = self._world
        chance = world.rng.random() if world.faults else 1.0
        if chance < 0.004:
            return "done" if changes and world.rng.random() < 0.5 else "killed"
        if chance < (0.08 if changes else 0.02):
            return world.rng.choice(("failed", "lost", "late") if changes else ("failed",))
        return ""

    def _quietly(self, apply: Callable[[], object]) -> None:
        """Nobody hears of an error of the request."""
        try:
            apply()
        except (UsageError, NotFoundError):
            pass

    def put(self, key: str, data: bytes) -> None:
        store, actor = self._store, self._actor
        self._request(f"PUT {key}", lambda: store.create(key, data, len(data), actor), changes=True)

    def replace(self, key: str, data: bytes) -> None:
        store, actor = self._store, self._actor
        self._request(
            f"REPLACE {key}", lambda: store.write(key, data, len(data), "replace", actor),
            changes=True,
        )  # fmt: skip

    def put_from(self, key: str, source: ByteSource) -> None:
        source.read_into(0, memoryview(bytearray(source.size)))
        store, actor, size = self._store, self._actor, source.size
        # Looked at first, as the real ones do: two requests.
        try:
            if self.info(key).size == size:
                return
        except NotFoundError:
            pass
        self._request(f"PUT {key}", lambda: store.create(key, b"", size, actor), changes=True)

    def get(self, key: str, *, limit: int) -> bytes:
        found = self._request(f"GET {key}", lambda: self._store.objects.get(key))
        if found is None:
            raise NotFoundError(f"no {key}", key=key)
        if found[1] > limit:
            raise IntegrityError(f"{key} is too large", key=key)
        return found[0]

    def info(self, key: str) -> ObjectInfo:
        found = self._request(f"HEAD {key}", lambda: self._store.objects.get(key))
        if found is None:
            raise NotFoundError(f"no {key}", key=key)
        return ObjectInfo(key, found[1], found[2])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Pages, each as the store is when it is asked for."""
        after = ""
        while True:
            if not after:
                self._actor.listed_s[f"LIST {prefix}"] = self._world.now_s
            found = self._request(f"LIST {prefix}", lambda a=after: self._page(prefix, a))
            yield from found
            if len(found) < PAGE:
                return
            after = found[-1].key

    def _page(self, prefix: str, after: str) -> list[ObjectInfo]:
        objects = self._store.objects
        keys = sorted(key for key in objects if key.startswith(prefix) and key > after)
        return [ObjectInfo(key, objects[key][1], objects[key][2]) for key in keys[:PAGE]]

    def delete(self, key: str) -> None:
        self._request(f"DELETE {key}", lambda: self._store.erase(key, self._actor), changes=True)

    def now_s(self) -> float:
        return self._world.now_s

    def open(self, key: str) -> OpenObject:
        raise NotImplementedError("nobody reads segments here")
