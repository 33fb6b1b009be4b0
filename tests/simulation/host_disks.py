"""Hosts that fill and prune a tier each, with the product's own decisions; everything else is here.

Hosts copy at different speeds, messages get lost and answers come late, the leader forgets and
moves, spills are given up, training goes back, disks are full. Checked at each delete: the newest
checkpoint of the line whose every part is there stays so. Everything follows from the seed.

``python -m tests.simulation.host_disks`` says for each mutation how many seeds it takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec

from tests.support.saves import made, manifest_of, record
from tieredckpt.agent.leader import shedding
from tieredckpt.agent.leader.shedding import Vouchers
from tieredckpt.agent.tiers import host_retention
from tieredckpt.agent.tiers.host_retention import HostRetention
from tieredckpt.agent.tiers.interface import Needs
from tieredckpt.config.tiers import Keep
from tieredckpt.format.manifest import (
    Ancestor,
    AttemptRecord,
    Followed,
    Manifest,
    StreamBase,
)
from tieredckpt.format.records import SaveRecord
from tieredckpt.policy import completeness
from tieredckpt.policy.completeness import UNKNOWN, Parts, Whole
from tieredckpt.policy.history import ancestry_of, candidates
from tieredckpt.policy.schedule import destinations
from tieredckpt.rpc.messages.agent import TierSpec
from tieredckpt.rpc.messages.peer import Vouch
from tieredckpt.storage.base import Scope
from tieredckpt.storage.stored import Swept

TIER, STREAM = "disk", "default"


def age(manifest: Manifest) -> tuple[int, int]:
    return manifest.attempt.number, manifest.seq


class Violation(AssertionError):
    """The newest whole checkpoint was taken apart, or something stays for ever."""


class Disk:
    """What :class:`HostRetention` needs of a catalogue."""

    tier = SimpleNamespace(scope=Scope.HOST)

    def __init__(self, host: Host) -> None:
        self.host = host
        self.held: dict[str, Manifest] = {}

    def manifests(self) -> tuple[Manifest, ...]:
        return tuple(self.held.values())

    def attempts(self) -> tuple[AttemptRecord, ...]:
        return ()

    def records(self, save_id: str) -> tuple[()]:
        return ()

    def finish_removals(self) -> Swept:
        return Swept()

    def remove(self, manifest: Manifest) -> Swept:
        before = self.host.world.newest_whole()
        del self.held[manifest.save_id]
        self.host.world.log(f"{self.host.name} deletes {manifest.step}")
        after = self.host.world.newest_whole()
        if before is not None and after is not before:
            raise Violation(
                f"{self.host.name} deletes its part of {manifest.step}, the newest that was whole"
            )
        return Swept()


@dataclass(eq=False)
class Host:
    """One host: its disk, and its agent. Implements what is asked of a SpillHost."""

    name: str
    world: World
    queue: list[Manifest] = field(default_factory=list)
    active: Manifest | None = None
    heard: dict[str, SaveRecord] = field(default_factory=dict)
    """By save id, that it was given up."""
    letters: list[SaveRecord] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    """What it gave up before it was there; forgotten with its agent."""
    told: Whole = UNKNOWN

    def __post_init__(self) -> None:
        self.disk = Disk(self)
        self.restart()

    def restart(self) -> None:
        """Its agent starts anew: it knows what lies on its disk."""
        self.told, self.active, self.lacking = UNKNOWN, None, []
        self.now_s = 0.0
        spec = TierSpec(
            name=TIER, url="file:///x", scope="host", keep=Keep(last=self.world.keep_last)
        )
        self.retention = HostRetention(spec, self, lambda: self.now_s)  # type: ignore[arg-type]
        self.retention.note(STREAM)

    # --- what its agent asks ----------------------------------------------------------------------

    @property
    def keeping(self) -> Host:
        return self

    ruling = keeping

    def prunes(self, tier: TierSpec) -> bool:
        return True

    def tidies(self) -> bool:
        return True

    def needs_of(self, tier: str, manifests: Sequence[Manifest]) -> Needs:
        return Needs()

    def records_of(self, save_id: str) -> tuple[SaveRecord, ...]:
        return (self.heard[save_id],) if save_id in self.heard else ()

    def is_destined(self, manifest: Manifest, tier: str) -> bool:
        return tier in destinations(manifest, self.records_of(manifest.save_id))

    def known_attempts(self) -> tuple[AttemptRecord, ...]:
        return tuple(self.world.attempts)

    def forget(self, tier: str, segments: Sequence[str]) -> None:
        pass

    def make_room_in(self, tier: str, beyond: Collection[str]) -> bool:
        return False

    def whole_in(self, tier: str, line: Sequence[Manifest]) -> Whole:
        """The question or the answer may be lost; the answer may be late."""
        world = self.world
        known = Whole(self.told.newest)
        if world.chance(0.2) and self is not world.leader:
            return known
        coming = [m for m in (self.active, *self.queue) if m is not None]
        vouch = Vouch(
            host=self.name, tier=TIER, stream=STREAM, saves=tuple(m.save_id for m in line),
            lacking=tuple(self.lacking), coming=tuple(m.save_id for m in coming),
            upto=max((age(m) for m in (*coming, *self.disk.held.values())), default=(0, 0)),
        )  # fmt: skip
        answer = world.vouchers.take(vouch, {h.name for h in world.hosts}, world.parts)
        if world.chance(0.2) and self is not world.leader:
            return known
        self.told = answer
        world.meanwhile(self)
        return answer

    # --- what happens to it -----------------------------------------------------------------------

    def begin(self) -> None:
        if self.active is None and self.queue:
            self.active = self.queue.pop(0)

    def finish(self) -> None:
        job, catalog = self.active, self.disk
        if job is None:
            return
        while len(catalog.held) >= self.world.room:
            if not self.retention.make_room(catalog, job):  # type: ignore[arg-type]
                self.world.found["no room"] += 1
                return
            self.world.found["room made"] += 1
        self.active = None
        catalog.held[job.save_id] = job
        self.world.log(f"{self.name} holds {job.step}")
        self.retention.note(STREAM)
        self.prune()

    def prune(self) -> None:
        self.retention.apply(self.disk)  # type: ignore[arg-type]

    def read_letters(self) -> None:
        letters, self.letters = self.letters, []
        for said in letters:
            self.heard[said.save_id] = said
            waited = any(m.save_id == said.save_id for m in self.queue)
            self.queue = [m for m in self.queue if m.save_id != said.save_id]
            if waited:
                self.lacking.append(said.save_id)


class World:
    """One case."""

    def __init__(self, seed: int) -> None:
        self.random = Random(f"disks {seed}")
        self.seed = seed
        self.found: Counter[str] = Counter()
        self.trace: list[str] = []
        self.keep_last = self.random.choice((1, 1, 2, 3))
        self.room = self.keep_last + self.random.choice((0, 1, 2, 100))
        self.room = max(self.room, 2)
        self.saves: dict[str, Manifest] = {}
        self.attempts: list[AttemptRecord] = []
        self.vouchers = Vouchers()
        self._busy = False
        self.hosts = [Host(f"h{n}", self) for n in range(self.random.choice((2, 2, 3, 4)))]
        self.leader = self.hosts[0]
        self._open(None)

    def chance(self, of: float) -> bool:
        return self.random.random() < of

    def log(self, text: str) -> None:
        self.trace.append(text)

    def line(self) -> tuple[Manifest, ...]:
        return candidates(self.saves.values(), self.attempts, STREAM)

    def parts(self, save_id: str) -> Parts:
        manifest = self.saves[save_id]
        return Parts(frozenset(ref.host for ref in manifest.segments), age(manifest))

    def newest_whole(self) -> Manifest | None:
        """Of which each host has its part, whoever knows it."""
        disks = {host.name: host.disk.held for host in self.hosts}
        for manifest in self.line():
            if all(manifest.save_id in disks[ref.host] for ref in manifest.segments):
                return manifest
        return None

    # --- what happens -----------------------------------------------------------------------------

    def _open(self, base: Manifest | None) -> None:
        number = len(self.attempts) + 1
        lineage: tuple[Ancestor, ...] = ancestry_of(base) if base is not None else ()
        before = self.attempts[-1] if self.attempts else None
        newest = next(iter(self.line()), None)
        self.attempts.append(
            AttemptRecord(
                namespace="run",
                number=number,
                id=made("attempt", number),
                run=made("run"),
                created_at_s=0.0,
                bases=(
                    StreamBase(
                        stream=STREAM,
                        parent=base.save_id if base is not None else None,
                        parent_step=base.step if base is not None else None,
                        lineage=lineage,
                        abandons=ancestry_of(newest) if newest not in (None, base) else (),
                    ),
                ),
                followed=(Followed(before.number, before.id),) if before is not None else (),
            )
        )
        self.seq = 0

    def save(self) -> None:
        self.seq += 1
        parts = [h.name for h in self.hosts if h is self.leader or not self.chance(0.1)]
        manifest = msgspec.structs.replace(
            manifest_of(self.seq, parts, attempt=len(self.attempts)),
            tiers=(TIER,), step=len(self.saves) + 1, lineage=self.attempts[-1].bases[0].lineage,
        )  # fmt: skip
        self.saves[manifest.save_id] = manifest
        for host in self.hosts:
            host.queue.append(manifest)

    def give_up(self) -> None:
        """The leader heard of a host what waits there: the oldest, never the newest."""
        host = self.random.choice(self.hosts)
        if len(host.queue) < 2:
            return
        said = record(host.queue[0], "dropped")
        said = msgspec.structs.replace(said, text=TIER)
        for each in self.hosts:
            each.letters.append(said)
        self.found["given up"] += 1
        self.log(f"{host.queue[0].step} is given up")

    def go_back(self) -> None:
        """Training starts anew from something that is whole; memories are lost."""
        disks = {host.name: host.disk.held for host in self.hosts}
        whole = [
            m for m in self.line() if all(m.save_id in disks[r.host] for r in m.segments)
        ]  # fmt: skip
        if not whole:
            return
        base = self.random.choice(whole[:2])
        self._open(base)
        self.log(f"training goes on from {base.step}")
        self.found["went back"] += 1
        for host in self.hosts:
            host.read_letters()
            host.queue, host.active = [], None

    def lead_anew(self) -> None:
        self.leader = self.random.choice(self.hosts)
        self.vouchers = Vouchers()
        self.found["leader"] += 1

    def restart(self) -> None:
        host = self.random.choice(self.hosts)
        if host.active is not None:
            host.queue.insert(0, host.active)
        host.restart()
        if host is self.leader:
            self.vouchers = Vouchers()

    def meanwhile(self, asking: Host) -> None:
        """Between an answer and what follows from it others go on."""
        if self._busy:
            return
        self._busy = True
        try:
            for _ in range(self.random.choice((0, 0, 1, 3))):
                self._of_host(self.random.choice([h for h in self.hosts if h is not asking]))
        finally:
            self._busy = False

    def _of_host(self, host: Host) -> None:
        calls: list[Callable[[], None]] = [
            host.begin, host.begin, host.finish, host.finish, host.prune, host.read_letters,
        ]  # fmt: skip
        self.random.choice(calls)()

    def step(self) -> None:
        draw = self.random.random()
        if draw < 0.12:
            self.save()
        elif draw < 0.15:
            self.give_up()
        elif draw < 0.16:
            self.go_back()
        elif draw < 0.17:
            self.lead_anew()
        elif draw < 0.19:
            self.restart()
        else:
            slow = self.hosts[-1]
            host = self.random.choice(self.hosts)
            if host is not slow or self.chance(0.4):
                self._of_host(host)

    def settle(self) -> None:
        """All faults are over: everything is copied, and what is too much goes."""
        self.chance = lambda of: False  # type: ignore[method-assign]
        self.save()
        for _ in range(300):
            for host in self.hosts:
                host.read_letters()
                host.begin()
                host.finish()
                host.prune()
        newest = self.newest_whole()
        if newest is None or newest is not self.line()[0]:
            raise Violation("the newest checkpoint is not whole in the end")
        for host in self.hosts:
            if len(host.disk.held) > self.keep_last:
                steps = sorted(m.step for m in host.disk.held.values())
                raise Violation(f"{host.name} keeps {steps} for ever")


def run_case(seed: int, found: Counter[str] | None = None, *, steps: int = 150) -> None:
    """Raises Violation, with the last that happened."""
    world = World(seed)
    try:
        for _ in range(steps):
            world.step()
        world.settle()
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}\n" + "\n".join(world.trace[-30:])) from violation
    if found is not None:
        found.update(world.found)


# --- mutations ------------------------------------------------------------------------------------


def _own_newest_is_enough(line: Sequence[Manifest], whole: Whole) -> Mapping[str, str]:
    return {m.save_id: "the newest" for m in line[:1]}


def _only_the_whole_one(line: Sequence[Manifest], whole: Whole) -> Mapping[str, str]:
    return {m.save_id: "whole" for m in line if m.save_id == whole.newest}


def _one_is_missing(saves: Any, claims: Any, members: Any, parts: Any, lacking: Any) -> Whole:
    def fewer(save_id: str) -> Parts:
        known = parts(save_id)
        return Parts(frozenset(sorted(known.hosts)[:-1]), known.age)

    return _newest_whole(saves, claims, members, fewer, lacking)


def _what_is_coming_counts_not(
    saves: Any, claims: Any, members: Any, parts: Any, lacking: Any
) -> Whole:
    fewer = {h: dataclasses.replace(c, coming=frozenset()) for h, c in claims.items()}
    return _newest_whole(saves, fewer, members, parts, lacking)


_newest_whole = completeness.newest_whole

MUTATIONS: dict[str, tuple[object, str, Any]] = {
    "what this host has is enough": (host_retention, "spared", _own_newest_is_enough),
    "what may become whole may go": (host_retention, "spared", _only_the_whole_one),
    "one host's part is not waited for": (shedding, "newest_whole", _one_is_missing),
    "what is coming is missing": (shedding, "newest_whole", _what_is_coming_counts_not),
}
"""By what is wrong: module, attribute, replacement."""


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """It is decided wrongly in here."""
    place, attribute, value = MUTATIONS[name]
    old = getattr(place, attribute)
    setattr(place, attribute, value)
    try:
        yield
    finally:
        setattr(place, attribute, old)


def seeds_until_found(name: str, *, most: int = 200) -> int:
    """0: it was not found."""
    with mutated(name):
        for seed in range(most):
            try:
                run_case(seed)
            except Violation:
                return seed + 1
    return 0


if __name__ == "__main__":
    for each in MUTATIONS:
        sys.stdout.write(f"{each}: {seeds_until_found(each) or 'NOT FOUND'}\n")
