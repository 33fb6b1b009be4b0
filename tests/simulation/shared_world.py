"""Jobs of several hosts over one simulated store, with the product's own uploads and pruner.

A case is decided by its seed: hosts, saves, restarts, a second job that takes over, pauses, failing
requests. ``watch`` checks after every change of the store what docs/design/004 promises.

    python -m tests.simulation.shared_world SEED
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.format.samples import hex_id, make_segment, small_specs
from tests.simulation.shared_store import Actor, Scheduler, SharedSimTier, Store
from tieredckpt.agent.tiers.interface import Needs, Outcome
from tieredckpt.agent.tiers.pruner import SharedSide, times_of
from tieredckpt.config.tiers import Keep
from tieredckpt.errors import (
    CapacityError,
    NamespaceInUseError,
    NotFoundError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format import segment
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import (
    AttemptId,
    AttemptRecord,
    Followed,
    Manifest,
    SegmentRef,
    decode_attempt,
    decode_manifest,
    encode_manifest,
)
from tieredckpt.format.plan_record import seal_plan
from tieredckpt.format.records import (
    SaveRecord,
    decode_decision,
    decode_intent,
    decode_tombstone,
    encode_save_record,
    is_tombstone,
)
from tieredckpt.policy.completeness import Whole
from tieredckpt.policy.history import (
    Base,
    Chain,
    ancestry_of,
    base_of,
    candidates,
    next_attempt,
    saved_by,
    with_saves,
)
from tieredckpt.policy.shared_tier import SharedTimes
from tieredckpt.rpc.messages.agent import Level, TierSpec
from tieredckpt.storage.base import OpenObject, Tier
from tieredckpt.storage.shared.catalog import SharedCatalog, take_back

SPEC = TierSpec(
    name="bucket", url="file:///bucket", scope="shared", keep=Keep(last=2),
    takeover_after_s=10.0, delete_delay_s=20.0, sweep_after_s=300.0,
)  # fmt: skip
BACKOFF_S = 5.0
BETWEEN_S = 15.0
"""Between two things that happen."""
TOMBSTONE_S = 5000.0
"""Longer than anybody is paused here, and longer than requests are late."""
MEMORY_LAST = 3
STREAM = "default"


class Broken(AssertionError):
    """A promise was not kept."""


PLANS = {digest(data).hex(): seal_plan(data) for data in (b"plan one", b"plan two")}


@functools.cache
def segment_bytes(number: int) -> tuple[str, str, bytes]:
    """Id, root and bytes of a small real segment."""
    data = make_segment(small_specs()[:1])
    layout = segment.lay_out(small_specs()[:1], 4096)
    body = data[: layout.data_bytes]
    digests = b"".join(digest(body[i : i + 4096]) for i in range(0, layout.data_bytes, 4096))
    name = bytes.fromhex(hex_id(100_000 + number))
    whole = body + segment.encode_footer(layout, digests, name)
    return name.hex(), segment.decode_trailer(whole[-128:]).root.hex(), whole


class Bytes(OpenObject):
    """A segment in memory."""

    direct = False

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size = len(data)

    def read_into(self, offset: int, into: memoryview) -> None:
        into[:] = self.data[offset : offset + len(into)]

    def fileno(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Keeping:
    """Nothing speaks against deleting."""

    def needs_of(self, tier: str, manifests: object) -> Needs:
        return Needs()

    def pins_of(self, save_id: str) -> tuple[bytes, ...]:
        return ()

    def records_of(self, save_id: str) -> tuple[()]:
        return ()

    def attached(self, tier: str, catalog: object) -> None:
        pass


class WatchedCatalog(SharedCatalog):
    """Tells when a job has taken over: from then on others delete nothing.

    Args:
        host: Of whom it is.
        tier: Where everything is kept.
        more: See :class:`SharedCatalog`.
    """

    def __init__(self, host: SimHost, tier: SharedSimTier, **more: Any) -> None:
        super().__init__(tier, **more)
        self._host = host

    def claim(self, mine: AttemptRecord, known: Collection[str]) -> None:
        super().claim(mine, known)
        self._host.job.claimed = max(self._host.job.claimed, mine.number)


@dataclass(eq=False)
class SimHost:
    """One host of one job: its memory, and what its agent does. Implements SpillHost."""

    host_id: str
    job: Job
    leader: bool
    world: World
    memory: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[Manifest, bytes]] = field(default_factory=dict)
    queue: list[Manifest] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    actor: Actor | None = None
    side: SharedSide | None = None
    pins: list[tuple[Literal["pin", "unpin"], str]] = field(default_factory=list)
    """That were said here and are not in the store for sure."""
    taking_back: list[str] = field(default_factory=list)
    """Checkpoints that somebody wants back here, and was not told about."""
    told: dict[str, bool] = field(default_factory=dict)
    """What came of it."""
    keeping = Keeping()

    @property
    def ruling(self) -> SimHost:
        return self

    def term(self) -> str | None:
        newest = max(self.job.attempts, key=lambda each: each.number, default=None)
        return newest.run if newest is not None else None

    def leads(self) -> bool:
        return self.leader

    def prunes(self, tier: TierSpec) -> bool:
        return True

    fills = prunes

    def is_in(self, tier: str, save_id: str) -> bool:
        return False

    def whole_in(self, tier: str, line: object) -> Whole:
        raise AssertionError("this is about tiers of one host")

    def make_room_in(self, tier: str, beyond: object) -> bool:
        raise AssertionError("this is about tiers of one host")

    def level_in(self, tier: str, save_id: str) -> Level:
        return "failed"

    def attached(self, tier: str) -> None:
        pass

    def is_destined(self, manifest: Manifest, tier: str) -> bool:
        return tier in manifest.tiers

    def open_above(self, tier: str, segment_id: str) -> OpenObject:
        raise NotFoundError(f"nothing is filled from {tier} here", key=segment_id)

    def open_memory(self, segment_id: str) -> OpenObject:
        if segment_id not in self.memory:
            raise NotFoundError("not in memory", key=segment_id)
        return Bytes(self.memory[segment_id])

    def own_segments(self, manifest: Manifest) -> tuple[SegmentRef, ...]:
        return tuple(ref for ref in manifest.segments if ref.host == self.host_id)

    def read_plan(self, plan_id: str) -> bytes:
        return PLANS[plan_id]

    def read_manifest(self, manifest: Manifest) -> bytes:
        if manifest.save_id not in self.manifests:
            raise NotFoundError("not in memory", key=manifest.save_id)
        return self.manifests[manifest.save_id][1]

    def known_attempts(self) -> tuple[AttemptRecord, ...]:
        return tuple(self.job.known)

    def wanted_by(self, tier: str) -> tuple[Manifest, ...]:
        held = [manifest for manifest, _ in self.manifests.values()]
        return candidates(held, self.job.attempts, STREAM)[:1]

    def quarantine(self, *_: object) -> None:
        raise Broken("nothing is damaged here")

    def forget(self, *_: object) -> None:
        pass

    def spilled(self) -> None:
        pass

    # --- its agent --------------------------------------------------------------------------------

    def take(self, manifest: Manifest, data: bytes, pieces: dict[str, bytes]) -> None:
        """A checkpoint was committed in memory; the oldest one leaves it."""
        self.manifests[manifest.save_id] = (manifest, data)
        self.memory.update(pieces)
        while len(self.manifests) > MEMORY_LAST:
            gone, _ = self.manifests.pop(next(iter(self.manifests)))
            for ref in gone.segments:
                self.memory.pop(ref.id, None)
        if self.actor is not None:
            self.queue.append(manifest)
            self.actor.wake_s = min(self.actor.wake_s, self.world.clock.now_s)

    def start(self) -> None:
        self.queue = []
        world = self.world.clock
        self.actor = Actor(world, self.host_id, self.run)
        world.actors.append(self.actor)

    def run(self, actor: Actor) -> None:
        """What the worker of the tier does, without its thread."""
        clock = self.world.clock
        tier = SharedSimTier(self.world.store, actor)
        catalog = WatchedCatalog(
            self,
            tier,
            mint=self.world.mint,
        )
        while True:
            try:
                self.side = SharedSide(
                    tier, "gpt-run-7", SPEC, self, lambda: clock.now_s, catalog=catalog,
                    times=self.world.times(SPEC),
                )  # fmt: skip
                break
            except TierUnavailableError:
                actor.pause(clock.now_s + BACKOFF_S)
        held = {each.save_id for each in catalog.manifests()}
        queued = {each.save_id for each in self.queue}
        self.queue[:0] = [
            m for m in self.wanted_by("bucket") if m.save_id not in held | queued
        ]  # fmt: skip
        while True:
            rest_s = self.turn(self.side)
            actor.pause(clock.now_s + rest_s)

    def turn(self, side: SharedSide) -> float:
        try:
            if self.pins:
                self.say(side.catalog, *self.pins[0])
                self.pins.pop(0)
                return 0.0
            if self.taking_back:
                self.take_back(side.catalog.tier, self.taking_back[0])
                self.taking_back.pop(0)
                return 0.0
            if not self.queue:
                for manifest, outcome in side.step(lambda: False, lambda size: None):
                    self.note(manifest, outcome)
                return 0.0 if self.queue else side.rest_s()
            job = self.queue[0]
            outcome = side.put_part(job, lambda: False, lambda size: None)
            self.queue.remove(job)
            if outcome is not None:
                self.note(job, outcome)
            return 0.0
        except NamespaceInUseError:
            self.world.clock.counts["refused"] += 1
            return 20 * BACKOFF_S
        except (TierUnavailableError, CapacityError):
            return BACKOFF_S
        except TieredCkptError as error:
            if not self.queue:
                raise
            self.note(self.queue.pop(0), Outcome("failed", str(error)))
            return 0.0

    def say(self, catalog: SharedCatalog, kind: Literal["pin", "unpin"], save_id: str) -> None:
        """What :class:`tieredckpt.agent.leader.holds.Keeping` does with a pin or an unpin."""
        world = self.world
        record = world.pin_record(self.host_id, kind, save_id)
        if kind == "pin":
            world.said.setdefault(save_id, []).append(record.id)
        else:
            world.pinned.discard(save_id)
            world.ended.update(record.segments)
        catalog.put_record(encode_save_record(record))
        if kind == "pin" and catalog.holds(world.ever[save_id]) and record.id not in world.ended:
            world.note_pinned(save_id)

    def take_back(self, tier: Tier, save_id: str) -> None:
        """What `tieredckpt undelete` does, which has a catalog of its own."""
        world = self.world
        catalog = SharedCatalog(tier, mint=world.mint)
        catalog.load()
        pin = world.pin_record(self.host_id, "pin", save_id)
        world.said.setdefault(save_id, []).append(pin.id)
        try:
            take_back(catalog, (STREAM, save_id), encode_save_record(pin))
        except (UsageError, NotFoundError) as error:
            self.told[save_id] = False
            if "too late" in str(error) and save_id not in world.closed | world.swept:
                raise Broken(f"{save_id} is said to be gone, and is not") from error
            return
        self.told[save_id] = True
        if save_id not in world.visible and pin.id not in world.ended:
            raise Broken(f"{save_id} is said to be taken back, and is not there")
        if pin.id not in world.ended:
            world.note_pinned(save_id)

    def note(self, manifest: Manifest, outcome: Outcome) -> None:
        self.outcomes[manifest.save_id] = outcome
        self.world.clock.counts[outcome.level] += 1
        if outcome.level == "done" and manifest.save_id not in self.world.ever:
            raise Broken(f"{manifest.save_id} is said to be committed and never was")
        why = outcome.error or ""
        # Who was late gives up; others may be completing it in the same moment.
        failed = outcome.level == "failed" and not why.startswith("abandoned")
        if failed and manifest.save_id in self.world.visible:
            raise Broken(f"{manifest.save_id} is committed, and said to have failed: {why}")


@dataclass(eq=False)
class Job:
    """Hosts that save together."""

    number: int
    hosts: list[SimHost] = field(default_factory=list)
    attempts: list[AttemptRecord] = field(default_factory=list)
    known: list[AttemptRecord] = field(default_factory=list)
    """Its own, and what it knew of when it opened them."""
    saved: list[Manifest] = field(default_factory=list)
    seq: int = 0
    claimed: int = -1
    """The newest attempt that some host of it has claimed for sure."""


class World:
    """See the module."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.clock = Scheduler(seed)
        self.rng = self.clock.rng
        self.store = Store(self.clock)
        self.store.watch = self.watch
        self.jobs: list[Job] = []
        self.visible: dict[str, Manifest] = {}
        self.ever: dict[str, Manifest] = {}
        self.buried: dict[str, float] = {}
        """When a checkpoint got its first tombstone, after it was taken back last."""
        self.heads: dict[str, int] = {}
        """The highest key of a checkpoint, if it is not the first one."""
        self.closed: set[str] = set()
        """Deleted, and nobody can take them back any more."""
        self.missing = 0.0
        """How likely one that is deleted is wanted back."""
        self.missed: list[tuple[float, str]] = []
        """When somebody will want which deleted one back."""
        self.swept: set[str] = set()
        """Of which nothing is left."""
        self.pinned: set[str] = set()
        """Somebody was told that these are pinned, and they were not unpinned since."""
        self.decided: set[str] = set()
        """Verdicts say that these go."""
        self.said: dict[str, list[str]] = {}
        """Ids of the pins of each checkpoint."""
        self.ended: set[str] = set()
        """Ids of pins that an unpin names."""
        self.first: dict[int, dict[str, int]] = {}
        """By job: the requests that each agent had made when its first manifest appeared."""
        self.upto: dict[str, int] = {}
        """By attempt, the last save that somebody knew who went on from it, or back behind it."""
        self.minted = 0
        self.saves = 0
        self.steps = 0
        for number, (plan_id, data) in enumerate(PLANS.items()):
            # Of a job of long ago: nothing names them any more.
            key = f"plans/{plan_id}.{'0' * 15}{number}"
            self.store.objects[key] = (data, len(data), self.clock.now_s - 2 * TOMBSTONE_S)
        self.claimed: dict[int, tuple[Job | None, dict[str, int]]] = {}

    def times(self, spec: TierSpec) -> SharedTimes:
        """What is unnamed goes at once: lists do not err here, and the rules have to suffice."""
        return dataclasses.replace(
            times_of(spec), tombstone_keep_s=TOMBSTONE_S, listing_limit_s=15.0, unnamed_for_s=0.0
        )

    def mint(self) -> str:
        self.minted += 1
        return f"{self.minted:016x}"

    # --- the promises -----------------------------------------------------------------------------

    def watch(self, how: str, key: str, data: bytes | None, actor: Actor | None) -> None:
        """After each change of the store."""
        kind, _, name = key.partition("/")
        if kind == "manifests":
            save_id, _, deletions = name.partition("/")[2].partition(".")
            self.watch_commit(save_id, int(deletions or 0), data, actor)
        elif kind == "segments" and how == "delete":
            self.check_deleted(name)
        elif kind == "pending" and how == "delete":
            if f"manifests/{name}" not in self.store.objects:
                raise Broken(f"pending {name} went, and is neither committed nor given up")
        elif kind == "plans" and how == "delete":
            for manifest in self.visible.values():
                self.check_plan(manifest)
        elif kind == "verdicts" and how == "put" and data is not None:
            notice = self.store.objects.get(f"notices/{name}")
            if decode_decision(data).goes and notice is not None and actor is not None:
                found = decode_intent(notice[0])
                counts = found.deletions or (0,) * len(found.saves)
                for (_, save_id), deletions in zip(found.saves, counts, strict=True):
                    if deletions >= self.heads.get(save_id, 0):
                        self.watch_verdict(save_id, actor)
        elif kind == "claims" and data is None:
            if int(name) == max(self.claimed):
                raise Broken("the newest claim was deleted")
        elif kind == "claims" and data is not None:
            record = decode_attempt(data)
            owner = next((j for j in self.jobs if any(a.id == record.id for a in j.attempts)), None)
            ops = {each.name: each.ops for each in self.clock.actors if not each.over}
            self.claimed[record.number] = (owner, ops)

    def check_deleted(self, segment_id: str) -> None:
        """A segment was deleted: nothing needs it, and whoever reads it had time to open it."""
        objects = self.store.objects
        for manifest in self.visible.values():
            if any(ref.id == segment_id for ref in manifest.segments):
                raise Broken(f"segment {segment_id} of visible {manifest.save_id} was deleted")
        for key, (data, _, _) in objects.items():
            kind, _, name = key.partition("/")
            if kind == "pending" and f"manifests/{name}" not in objects:
                manifest = decode_manifest(data)
                if any(ref.id == segment_id for ref in manifest.segments):
                    raise Broken(f"segment {segment_id} of undecided {manifest.save_id} went")
        for save_id, at_s in self.buried.items():
            segments = self.ever[save_id].segments if save_id in self.ever else ()
            if all(ref.id != segment_id for ref in segments):
                continue
            if self.clock.now_s - at_s < SPEC.delete_delay_s:
                raise Broken(f"segment {segment_id} of {save_id} is deleted at once")
            if save_id not in self.closed:
                raise Broken(f"segment {segment_id} goes, and {save_id} may still be taken back")

    def watch_verdict(self, save_id: str, actor: Actor) -> None:
        """It was decided that a checkpoint is deleted."""
        manifest, job = self.visible.get(save_id), self.job_of(actor)
        newest = self.newest(job)
        self.decided.add(save_id)
        if save_id in self.pinned:
            raise Broken(f"{save_id} is pinned, and it was decided that it goes")
        if manifest is None:
            return
        if manifest in newest:
            raise Broken(f"{save_id} is one of the newest of its line and is to be deleted")
        if any(other.claimed >= 0 for other in self.jobs[job.number + 1 :]):
            raise Broken(f"{actor.name} decides that {save_id} goes, and another job took over")

    def note_pinned(self, save_id: str) -> None:
        """Somebody was told so."""
        if save_id in self.decided:
            raise Broken(f"{save_id} is said to be pinned, and it is decided that it goes")
        self.pinned.add(save_id)
        self.clock.counts["pinned"] += 1

    def watch_commit(
        self, save_id: str, deletions: int, data: bytes | None, actor: Actor | None
    ) -> None:
        """Of a checkpoint the highest key counts: what is below it changes nothing any more."""
        head = self.heads.get(save_id, 0)
        if data is None and deletions == head:
            self.heads.pop(save_id, None)
            self.closed.discard(save_id)
            self.swept.add(save_id)
        elif deletions != head:
            if deletions > head:
                self.watch_next(save_id, deletions, data, actor)
            return
        self.watch_manifest(save_id, data, actor)

    def watch_next(
        self, save_id: str, deletions: int, data: bytes | None, actor: Actor | None
    ) -> None:
        """It is taken back, or cannot be any more."""
        assert data is not None
        at_s = self.buried.get(save_id)
        if at_s is None or deletions != self.heads.get(save_id, 0) + 1 or save_id in self.closed:
            raise Broken(f"{save_id}.{deletions} appears, and it is not deleted")
        self.heads[save_id] = deletions
        if is_tombstone(data):
            self.closed.add(save_id)
            if self.clock.now_s - at_s < SPEC.delete_delay_s:
                raise Broken(f"{save_id} could be taken back for too short a time")
            return
        self.clock.counts["taken back"] += 1
        self.buried.pop(save_id)
        self.decided.discard(save_id)
        self.appear(save_id, decode_manifest(data))

    def appear(self, save_id: str, manifest: Manifest) -> None:
        self.visible[save_id] = self.ever[save_id] = manifest
        for ref in manifest.segments:
            found = self.store.objects.get(f"segments/{ref.id}")
            if found is None or found[1] != ref.size:
                raise Broken(f"{save_id} is visible without segment {ref.id}")
        self.check_plan(manifest)

    def watch_manifest(self, save_id: str, data: bytes | None, actor: Actor | None) -> None:
        before = self.visible.pop(save_id, None)
        if data is None:
            if before is not None:
                raise Broken(f"the manifest of {save_id} vanished without a tombstone")
            if self.clock.now_s - self.buried.get(save_id, 0.0) > TOMBSTONE_S:
                # Whoever slept since before begins anew: it is whole, and retention deletes it.
                self.buried.pop(save_id, None)
                self.decided.discard(save_id)
            return
        if is_tombstone(data):
            tombstone = decode_tombstone(data)
            if before is not None and tombstone.cause != "retention":
                raise Broken(f"{save_id} was committed and is given up")
            if before is not None and actor is not None:
                if save_id not in self.decided:
                    raise Broken(f"{save_id} is deleted, and it was not decided")
                later = self.jobs[self.job_of(actor).number + 1 :]
                if any(other.claimed >= 0 for other in later):
                    raise Broken(f"{actor.name} deletes {save_id}, and another job took over")
            elif tombstone.cause == "unfinished" and actor is not None and tombstone.manifest:
                self.check_unfinished(decode_manifest(tombstone.manifest), actor)
            self.buried.setdefault(save_id, self.clock.now_s)
            if before is not None and self.rng.random() < self.missing:
                # Somebody misses it at once, or a little too late.
                at_s = self.clock.now_s + self.rng.expovariate(1 / SPEC.delete_delay_s)
                self.missed.append((at_s, save_id))
            return
        manifest = decode_manifest(data)
        if save_id in self.buried:
            raise Broken(f"{save_id} had a tombstone and is back")
        self.appear(save_id, manifest)
        self.check_zombie(manifest, actor)
        owner = next((j for j in self.jobs if manifest.attempt.id == j.attempts[0].id), None)
        if owner is not None and owner.number not in self.first:
            ops = {each.name: each.ops for each in self.clock.actors if not each.over}
            self.first[owner.number] = ops

    def check_unfinished(self, manifest: Manifest, actor: Actor) -> None:
        """Given up is only what the pruner did not see whole, or what is not finished for long."""
        if self.clock.applying_late:
            return
        objects = self.store.objects
        plans = [k for k in objects if k.startswith(f"plans/{manifest.plan}.")]
        keys = [f"segments/{ref.id}" for ref in manifest.segments]
        pending = objects.get(f"pending/{STREAM}/{manifest.save_id}")
        if not plans or pending is None or any(key not in objects for key in keys):
            return
        whole_s = max(min(objects[k][2] for k in plans), *(objects[k][2] for k in keys))
        began_s = actor.listed_s.get("LIST segments/", 0.0)
        if whole_s < began_s and began_s - pending[2] <= 2 * SPEC.sweep_after_s:
            raise Broken(f"{manifest.save_id} was whole, and is given up")

    def job_of(self, actor: Actor) -> Job:
        return self.jobs[int(actor.name[1 : actor.name.index("h")])]

    def newest(self, job: Job) -> tuple[Manifest, ...]:
        """What retention keeps on one job's line, of what is visible or being deleted.

        A pruner of an earlier job that sleeps in the middle of a delete may delete what a later
        job has begun from; of its own line it may not.
        """
        gone = self.buried.keys() | self.decided
        attempts = [a for each in self.jobs[: job.number + 1] for a in each.attempts]
        ids = {each.id for each in attempts}
        mine = [
            each for each in self.ever.values()
            if each.save_id not in gone and each.attempt.id in ids
        ]  # fmt: skip
        return candidates(mine, attempts, STREAM)[: SPEC.keep.last]

    def check_plan(self, manifest: Manifest) -> None:
        if not any(key.startswith(f"plans/{manifest.plan}.") for key in self.store.objects):
            raise Broken(f"{manifest.save_id} is visible without its plan")

    def check_zombie(self, manifest: Manifest, actor: Actor | None) -> None:
        """Whoever commits has looked at the claims a few requests ago."""
        for number, (owner, ops) in self.claimed.items():
            if actor is None or owner is None or self.clock.applying_late:
                continue
            if self.job_of(actor).number < owner.number:
                since = actor.ops - ops.get(actor.name, actor.ops)
                if since > 80:
                    raise Broken(f"{actor.name} acts {since} requests after {number} took over")
        if actor is None or self.clock.applying_late:
            return
        for number, ops in self.first.items():
            since = actor.ops - ops.get(actor.name, 0)
            if self.job_of(actor).number < number and since > 40:
                raise Broken(f"{actor.name} acts {since} requests after a manifest of {number}")

    # --- what happens -----------------------------------------------------------------------------

    def open_job(
        self, count: int, leaders: Collection[int] | None = None, base: str | None = None
    ) -> Job:
        """Another job on ``count`` hosts; it goes on from ``base``, or from the newest one."""
        job = Job(len(self.jobs))
        if leaders is None:
            leaders = (0, 1) if self.rng.random() < 0.3 else (0,)
        for number in range(count):
            leader = number in leaders
            job.hosts.append(SimHost(f"j{job.number}h{number}", job, leader, self))
        self.begin_attempt(job, base, hex_id(6000 + job.number))
        self.jobs.append(job)
        for host in job.hosts:
            host.start()
        return job

    def begin_attempt(self, job: Job, base: str | None, run: str) -> int:
        """The next attempt of ``job``, which goes on from ``base``, or from the newest one."""
        seen = [*(a for j in self.jobs for a in j.attempts)]
        there = list(self.visible.values())
        counted = Chain(there, with_saves(seen, saved_by(there)))
        line = candidates(there, counted.records.values(), STREAM)
        base = base or (line[0].save_id if line else None)
        # It follows what was saved, its own attempts, and what was opened and has saved nothing.
        heads = [*counted.heads, *(AttemptId(a.number, a.id) for a in job.attempts[-1:])]
        aside = Chain(there, seen).beside(each.id for each in heads)
        attempt = next_attempt(
            seen, [*there, *(m for m in self.ever.values() if m.save_id == base)],
            hex_id(5000 + 100 * job.number + len(job.attempts)),
            {STREAM: Base(save_id=base, newest=ancestry_of(line[0]) if line else ())},
            tuple(Followed(a.number, a.id) for a in dict.fromkeys((*heads, *aside))), 0.0,
            namespace="gpt-run-7", run=run,
        )  # fmt: skip
        for known in line[:1]:
            before = [(each.id, each.last_seq) for each in known.lineage]
            for of, last_seq in (*before, (known.attempt.id, known.seq)):
                self.upto[of] = max(last_seq, self.upto.get(of, -1))
        job.attempts.append(attempt)
        job.known = [*seen, *(a for a in job.attempts if a not in seen)]
        return attempt.number

    def save(
        self, job: Job, of: Sequence[SimHost] = (), *, copies: float = 0.7, plan: int | None = None
    ) -> str | None:
        """A checkpoint is committed in memory, and destined for the store.

        ``of``: the hosts that take part; ``copies``: how likely one holds another's segment.
        """
        hosts = list(of or job.hosts)
        live = [host for host in hosts if host.actor is not None]
        if not live:
            return None
        self.saves += 1
        refs, pieces = [], {}
        for host in hosts:
            name, root, data = segment_bytes(self.saves * 8 + job.hosts.index(host))
            refs.append(SegmentRef(name, len(data), root, host.host_id))
            pieces[name] = data
        attempt = job.attempts[-1]
        base = base_of(attempt, STREAM)
        which = self.rng.random() < 0.2 if plan is None else plan
        manifest = Manifest(
            save_id=hex_id(self.saves), namespace="gpt-run-7", stream=STREAM, step=self.saves,
            attempt=AttemptId(attempt.number, attempt.id), seq=job.seq, parent=None,
            lineage=base.lineage, plan=list(PLANS)[which], tiers=("bucket",),
            segments=tuple(refs), world_size=len(refs), tags={}, created_at_s=0.0,
        )  # fmt: skip
        job.seq += 1
        job.saved.append(manifest)
        data = encode_manifest(manifest)
        for host in live:
            held = {
                ref.id: pieces[ref.id]
                for ref in refs
                if ref.host == host.host_id or self.rng.random() < copies
            }
            host.take(manifest, data, held)
        return manifest.save_id

    def pin(self, host: SimHost, save_id: str, kind: Literal["pin", "unpin"] = "pin") -> None:
        """Somebody pins a checkpoint, or ends all pins of it, on one host."""
        host.pins.append((kind, save_id))
        if host.actor is not None:
            host.actor.wake_s = min(host.actor.wake_s, self.clock.now_s)

    def pin_record(self, host: str, kind: Literal["pin", "unpin"], save_id: str) -> SaveRecord:
        """What is said now. Each attempt is another record: an unpin may end an earlier one."""
        self.minted += 1
        return SaveRecord(
            namespace="gpt-run-7", stream=STREAM, save_id=save_id, kind=kind,
            id=hex_id(900_000 + self.minted), host=host, incarnation="0" * 32,
            segments=tuple(self.said.get(save_id, ())) if kind == "unpin" else (),
        )  # fmt: skip

    def pin_one(self, job: Job) -> None:
        """Of what is there; or one of the pinned ones is unpinned."""
        host = self.rng.choice(job.hosts)
        if self.pinned and self.rng.random() < 0.4:
            self.pin(host, self.rng.choice(sorted(self.pinned)), "unpin")
        elif self.visible:
            self.pin(host, self.rng.choice(sorted(self.visible)))

    def take_back(self, host: SimHost, save_id: str) -> None:
        """Somebody wants a checkpoint back, on one host."""
        host.taking_back.append(save_id)
        if host.actor is not None:
            host.actor.wake_s = min(host.actor.wake_s, self.clock.now_s)

    def kill(self, host: SimHost, *, memory: bool = True) -> None:
        if host.actor is not None:
            host.actor.kill()
            self.clock.actors.remove(host.actor)
            host.actor = None
            if memory and self.rng.random() < 0.4:  # the host, and not only its agent
                host.memory.clear()
                host.manifests.clear()

    def revive(self) -> None:
        """Agents whose process is gone are started again, where the job goes on."""
        for job in self.jobs:
            for host in job.hosts:
                if host.actor is not None and host.actor.over:
                    self.clock.actors.remove(host.actor)
                    host.actor = None
                if host.actor is None and (not self.clock.faults or self.rng.random() < 0.5):
                    host.start()

    def drive(self, until_s: float) -> None:
        """Run until it is so late."""
        while self.clock.now_s < until_s:
            self.steps += 1
            for each in [each for each in self.missed if each[0] <= self.clock.now_s]:
                self.missed.remove(each)
                hosts = self.jobs[-1].hosts
                if hosts:
                    self.take_back(self.rng.choice(hosts), each[1])
            self.clock.step(until_s)

    def happen(self) -> None:
        kind = self.rng.random()
        job = self.jobs[-1] if self.rng.random() < 0.7 else self.rng.choice(self.jobs)
        if kind < 0.4:
            self.save(job)
        elif kind < 0.5:
            self.kill(self.rng.choice(job.hosts))
        elif kind < 0.62:
            self.revive()
        elif kind < 0.7:
            self.pin_one(job)
        elif kind < 0.92:
            self.outage()
        elif len(self.jobs) < 3:
            self.open_job(self.rng.randrange(1, 4))

    def outage(self) -> None:
        """Time passes over what is half done: the store, a line or all agents are away."""
        self.clock.counts["long"] += 1
        job = self.jobs[-1]
        self.save(job)
        for _ in range(self.rng.randrange(60)):
            self.clock.step(self.clock.now_s + 5.0)
        if self.rng.random() < 0.7:
            for host in job.hosts:
                self.kill(host, memory=False)
        self.clock.now_s += SPEC.sweep_after_s * self.rng.uniform(0.2, 1.5)
        for host in job.hosts:
            if host.actor is not None and host.actor.over:
                self.clock.actors.remove(host.actor)
                host.actor = None
            if host.actor is None and self.rng.random() < 0.9:
                host.start()

    def end(self, *, long: bool) -> None:
        """Faults are over, the last job lives and the others are stopped: all is put right.

        ``long``: two weeks pass, after which nothing may be left over.
        """
        for job in self.jobs[:-1]:
            for host in job.hosts:
                self.kill(host)
        job = self.jobs[-1]
        for other in self.jobs[:-1]:
            other.hosts.clear()
        self.clock.faults = False
        self.revive()
        for each in self.clock.actors:  # who was paused goes on
            each.wake_s = min(each.wake_s, self.clock.now_s)
        self.save(job)
        newest = job.saved[-1]
        until_s = self.clock.now_s + 2000.0
        while self.clock.now_s < until_s and not all(
            host.outcomes.get(newest.save_id) for host in job.hosts
        ):
            self.drive(self.clock.now_s + 10.0)
        if newest.save_id not in self.visible:
            raise Broken(f"nothing failed, and {newest.save_id} was not committed")
        for host in job.hosts:
            if host.outcomes.get(newest.save_id) != Outcome("done"):
                raise Broken(f"{host.host_id} does not know that {newest.save_id} is committed")
        if not long:
            return
        # Whatever was begun comes to an end, and what is left over goes.
        self.drive(self.clock.now_s + 700.0)
        for host in job.hosts:
            if host.queue or (host.side is not None and host.side.uploads.waiting()):
                raise Broken(f"{host.host_id} still waits")
        self.save(job)
        for _ in range(3):
            self.clock.now_s += TOMBSTONE_S
            self.drive(self.clock.now_s + 400.0)
        self.check_garbage()

    def check_garbage(self) -> None:
        kinds: dict[str, list[str]] = {}
        for key in self.store.objects:
            kinds.setdefault(key.partition("/")[0], []).append(key)
        named = {f"segments/{ref.id}" for m in self.visible.values() for ref in m.segments}
        plans = {m.plan for m in self.visible.values()}
        if set(kinds.get("segments", ())) != named:
            raise Broken(f"{len(set(kinds['segments']) - named)} orphans are left")
        if kinds.get("pending"):
            raise Broken(f"pending are left: {kinds['pending']}")
        left = [k for k in kinds.get("plans", ()) if k[6:38] not in plans]
        if left or len(kinds.get("plans", ())) > 3 * len(plans):
            raise Broken(f"plans are left: {kinds['plans']}")
        newest = max(self.claimed, default=0)
        if any(int(key.rpartition("/")[2]) < newest for key in kinds.get("claims", ())):
            raise Broken("claims are left")
        attempts = {int(key[9:17]) for key in kinds.get("attempts", ())}
        if missing := self.claimed.keys() - attempts:
            raise Broken(f"attempts {missing} were claimed, and their records are not there")
        # Below what was taken back its tombstones stay.
        if len(kinds.get("manifests", ())) > sum(1 + self.heads.get(i, 0) for i in self.visible):
            raise Broken("tombstones are left")
        mine = {each.id for each in self.jobs[-1].attempts}
        unpinned = [
            each for each in self.visible.values()
            if each.save_id not in self.said
            # What earlier jobs added unknown to those after them is a branch, and stays.
            and (each.attempt.id in mine or each.seq <= self.upto.get(each.attempt.id, -1))
        ]  # fmt: skip
        if len(unpinned) > SPEC.keep.last:
            raise Broken(f"{len(unpinned)} are kept")
        if kinds.get("notices") or kinds.get("verdicts"):
            raise Broken("notices or verdicts are left")

    def close(self) -> None:
        for actor in self.clock.actors:
            actor.kill()


def run_case(seed: int, counts: Counter[str] | None = None) -> World:
    """One case. Raises Broken."""
    world = World(seed)
    world.missing = 0.3
    try:
        world.open_job(world.rng.randrange(1, 4))
        for _ in range(world.rng.randrange(4, 16)):
            world.drive(world.clock.now_s + world.rng.expovariate(1 / BETWEEN_S))
            world.happen()
        world.end(long=world.rng.random() < 0.05)
    finally:
        if counts is not None:
            counts.update(world.clock.counts)
            counts["requests"] += world.steps
        world.close()
    return world


def main() -> None:
    world = World(int(sys.argv[1]))
    del world
    try:
        found = run_case(int(sys.argv[1]))
        print(*found.clock.trace, sep="\n")
    except Broken as error:
        print(error)


if __name__ == "__main__":
    main()
