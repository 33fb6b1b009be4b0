"""The catalog and the time line against a dictionary: two tiers on the simulated file system.

Rules save, commit, roll back, spill, evict, crash (the process, or the power), restart and load, in
any order; the model is a dictionary of what was committed where. The tiers are real ones
(``FileTier``; memory is one that forgets with the power, durable only as tmpfs is).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.simulation.filesystem import Died, FileSystem, Mount
from tests.simulation.host import plan_of
from tests.simulation.system import SimPath, current, simulated
from tieredckpt.format.manifest import (
    AttemptId,
    AttemptRecord,
    Followed,
    Manifest,
    SegmentRef,
    encode_attempt,
    encode_manifest,
)
from tieredckpt.policy.history import (
    Base,
    Chain,
    abandoned,
    ancestry_of,
    base_of,
    candidates,
    next_attempt,
    saved_by,
    with_saves,
)
from tieredckpt.policy.retention import Keep, retain
from tieredckpt.recovery.plan import plan_recovery
from tieredckpt.storage.backends.file import FileTier
from tieredckpt.storage.base import segment_key
from tieredckpt.storage.catalog import Catalog
from tieredckpt.storage.holdings import Holdings, gather
from tieredckpt.testing.tier_suite import sample_segment

NAMES = ("near", "far")
PLAN, PLAN_BYTES = plan_of(1, 900)


@dataclass
class Saved:
    """A save as the model knows it: its chain is what it went on from, itself last."""

    manifest: Manifest
    data: bytes
    segment: bytes
    chain: tuple[str, ...]
    whole: set[str] = field(default_factory=set)
    """Tiers that said that they hold it, and have not lost it since."""


class Bytes:
    """A segment's source."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size = len(data)

    def read_into(self, offset: int, into: memoryview) -> None:
        into[:] = self.data[offset : offset + len(into)]


class CatalogModel(RuleBasedStateMachine):
    """See the module."""

    saves = Bundle("saves")

    def __init__(self) -> None:
        super().__init__()
        self.context = simulated()
        self.context.__enter__()
        self.fs = FileSystem(Random(7), [("/sim/near", True), ("/sim/far", False)])
        current.set(self.fs, Random(8))
        self.countdown = 0
        self.fs.before = self.before
        self.saved: dict[str, Saved] = {}
        self.attempt: AttemptRecord | None = None
        self.chain: tuple[str, ...] = ()
        """What the next save of ``attempt`` goes on from, itself last."""
        self.lines: dict[str, tuple[str, ...]] = {}
        """By attempt that has saved, oldest first."""
        self.seq = self.number = 0
        self.tiers: dict[str, FileTier] = {}
        self.catalogs: dict[str, Catalog] = {}
        self.restart()

    def teardown(self) -> None:
        self.context.__exit__(None, None, None)

    # --- the world --------------------------------------------------------------------------------

    def before(self, name: str, mount: Mount | None) -> None:
        if self.countdown:
            self.countdown -= 1
            if not self.countdown:
                raise Died("here")

    def attempted(self, dies_at: int, call: object) -> bool:
        """Carry out a call, in which the process may die at a system call; False if it did."""
        self.fs.process, self.countdown = "agent", dies_at
        try:
            call()  # type: ignore[operator]
        except Died:
            return False
        finally:
            self.fs.process, self.countdown = "test", 0
        return True

    def restart(self) -> None:
        """A new process: locks are gone, catalogs are read anew, orphans are swept."""
        self.fs.kill("agent")
        self.fs.process = "agent"
        for name in NAMES:
            self.tiers[name] = FileTier(name, SimPath(f"/sim/{name}"), "run")  # type: ignore[arg-type]
            self.catalogs[name] = Catalog(self.tiers[name])
            self.catalogs[name].load()
            self.catalogs[name].sweep_orphans()
        self.fs.process = "test"

    def known(self) -> tuple[tuple[Manifest, ...], tuple[AttemptRecord, ...]]:
        manifests = {m.save_id: m for c in self.catalogs.values() for m in c.manifests()}
        records = {r.id: r for c in self.catalogs.values() for r in c.attempts()}
        return tuple(manifests.values()), tuple(records.values())

    def put(self, tier: str, save: Saved) -> None:
        """Copy a checkpoint into a tier in the order that the agent keeps."""
        catalog = self.catalogs[tier]
        there = {record.id for record in catalog.attempts()}
        for record in self.known()[1]:
            if record.id not in there:
                catalog.put_attempt(encode_attempt(record))
        for ref in save.manifest.segments:
            self.tiers[tier].put_from(segment_key(ref.id), Bytes(save.segment))
        catalog.put_plan(PLAN, PLAN_BYTES)
        catalog.commit(save.data)

    def counted(self) -> tuple[tuple[Manifest, ...], tuple[AttemptRecord, ...]]:
        """What is known, without attempts of which no checkpoint is."""
        manifests, records = self.known()
        return manifests, with_saves(records, saved_by(manifests))

    def line(self) -> tuple[str, ...]:
        """Of the newest attempt of which a checkpoint exists: what was opened alone is nothing."""
        saved = saved_by(self.known()[0])
        return next((c for a, c in reversed(self.lines.items()) if a in saved), ())

    def is_told(self) -> bool:
        """Whether there is a record of each attempt that has saved.

        Whoever dies between a first manifest and its record leaves what may look like a fork; then
        nothing is chosen, and a person says where to go on.
        """
        manifests, records = self.known()
        return saved_by(manifests) <= {record.id for record in records}

    # --- rules ------------------------------------------------------------------------------------

    def open_attempt(self, base: str | None) -> None:
        """It lies nowhere until it saves."""
        manifests, records = self.counted()
        self.number += 1
        heads = Chain(manifests, records).heads
        assert len(heads) < 2 or not self.is_told(), "one after the other is no fork"
        # A person has chosen, if it is one.
        order = [*self.lines]
        heads = tuple(sorted(heads, key=lambda each: order.index(each.id), reverse=True))
        newest = next(iter(candidates(manifests, records, "default")), None)
        self.attempt = next_attempt(
            records, manifests, f"{self.number:032x}",
            {"default": Base(
                save_id=base, newest=ancestry_of(newest) if newest is not None else ()
            )},
            tuple(Followed(each.number, each.id) for each in heads), 0.0,
            namespace="run", run="5" * 32,
        )  # fmt: skip
        self.chain = self.saved[base].chain if base is not None else ()
        self.seq = 0

    @rule(target=saves, dies_at=st.integers(0, 60))
    def save(self, dies_at: int) -> object:
        if self.attempt is None:
            self.load()
        attempt = self.attempt
        assert attempt is not None
        self.number += 1
        identity = f"{self.number:032x}"
        segment = sample_segment(identity, 2000 + self.number, self.number)
        manifest = Manifest(
            save_id=identity, namespace="run", stream="default", step=self.number,
            attempt=AttemptId(attempt.number, attempt.id), seq=self.seq,
            parent=self.chain[-1] if self.chain else None,
            lineage=base_of(attempt, "default").lineage, plan=PLAN, tiers=("far",),
            segments=(SegmentRef(identity, len(segment), segment[-16:].hex(), "host"),),
            world_size=1, tags={}, created_at_s=0.0,
        )  # fmt: skip
        save = Saved(manifest, encode_manifest(manifest), segment, (*self.chain, identity))
        self.saved[identity] = save
        self.seq += 1
        # It may exist, whatever its trainer heard: its place on the line is taken.
        self.chain = self.lines[attempt.id] = save.chain

        def commit() -> None:
            self.put("near", save)
            self.catalogs["near"].put_attempt(encode_attempt(attempt))

        if self.attempted(dies_at, commit):
            save.whole.add("near")
            return save
        self.restart()
        return multiple(save)

    @rule(save=saves, dies_at=st.integers(0, 60))
    def spill(self, save: Saved, dies_at: int) -> None:
        if "near" not in save.whole:
            return
        if self.attempted(dies_at, lambda: self.put("far", save)):
            save.whole.add("far")
        else:
            self.restart()

    @rule(tier=st.sampled_from(NAMES), last=st.integers(1, 3), dies_at=st.integers(0, 40))
    def evict(self, tier: str, last: int, dies_at: int) -> None:
        catalog = self.catalogs[tier]
        manifests, records = catalog.manifests(), catalog.attempts()
        line = candidates(manifests, records, "default")
        off = abandoned(manifests, records, "default")
        plan = retain(line, off, Keep(last=last))
        assert not line or line[0].save_id in plan.keep
        by_id = {m.save_id: m for m in manifests}

        def remove() -> None:
            for save_id in plan.delete:
                self.saved[save_id].whole.discard(tier)
                catalog.remove(by_id[save_id])

        if not self.attempted(dies_at, remove):
            self.restart()

    @rule()
    def crash(self) -> None:
        self.restart()

    @rule()
    def lose_power(self) -> None:
        self.fs.lose_power()
        for save in self.saved.values():
            save.whole.discard("near")
        self.restart()
        self.attempt = None  # nobody runs any more

    @rule()
    def load(self) -> None:
        """A start of training: what is restored is the newest of the line, and goes on from it."""
        chosen = self.check_newest()
        self.open_attempt(chosen)

    @precondition(lambda self: self.saved)
    @rule(save=saves)
    def roll_back(self, save: Saved) -> None:
        if any(m.save_id == save.manifest.save_id for m in self.known()[0]):
            self.open_attempt(save.manifest.save_id)

    # --- what must hold ---------------------------------------------------------------------------

    def plan(self) -> object:
        self.fs.process = "agent"
        try:
            facts = tuple(gather(self.catalogs[n], kind="file") for n in NAMES)
        finally:
            self.fs.process = "test"
        records = tuple(encode_attempt(record) for record in self.known()[1])
        held = Holdings(host_id="host", namespace="run", attempts=records, tiers=facts)
        return plan_recovery([held])

    def check_newest(self) -> str | None:
        plan = self.plan()
        chosen = plan.chosen.manifest.save_id if plan.chosen is not None else None  # type: ignore[attr-defined]
        assert not plan.refused  # type: ignore[attr-defined]
        line = self.line()
        on_line = [each for each in line if self.saved[each].whole]
        if not line:
            assert chosen is None
        elif self.is_told() or chosen is not None:
            assert chosen in line
        if chosen is not None and on_line:
            # One whose commit died may be there too, and is then newer.
            assert line.index(chosen) >= line.index(on_line[-1])
        return chosen

    @invariant()
    def what_tiers_said_is_there(self) -> None:
        for name, catalog in self.catalogs.items():
            held = {m.save_id: m for m in catalog.manifests()}
            for identity, save in self.saved.items():
                assert (name not in save.whole) or held.get(identity) == save.manifest
                if identity in held:
                    path = f"/sim/{name}/run/segments/{identity}"
                    assert bytes(self.fs.find(path).data) == save.segment
            assert not catalog.unreadable()
            assert catalog.has_plan(PLAN) or not held

    @invariant()
    def catalogs_know_what_lies_there(self) -> None:
        for name, catalog in self.catalogs.items():
            files = self.fs.files(f"/sim/{name}/run/manifests")
            assert {f"default/{m.save_id}" for m in catalog.manifests()} == set(files)

    @invariant()
    def the_newest_is_restored(self) -> None:
        self.check_newest()


def test_the_catalog_is_what_a_dictionary_says():
    run_state_machine_as_test(CatalogModel, settings=settings(stateful_step_count=30))
