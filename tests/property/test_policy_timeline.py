"""The time line against a model that is nothing but a tree of saves.

The model knows no attempts, numbers or lineages: a save points to the save that it went on from, a
stream has one head, and the history is what one meets walking up from it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from tieredckpt.errors import NotFoundError
from tieredckpt.format.manifest import (
    AttemptId,
    AttemptRecord,
    Manifest,
    SegmentRef,
    decode_attempt,
    decode_manifest,
    encode_attempt,
    encode_manifest,
)
from tieredckpt.policy import timeline
from tieredckpt.policy.config import Keep
from tieredckpt.policy.retention import retain

STREAMS = ("default", "actor", "critic")
TIERS = ("memory", "nvme")


@dataclass(eq=False)
class Save:
    """A node of the model's tree."""

    name: str
    stream: str
    went_on_from: Save | None
    tiers: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Trainer:
    """One start of training, also long after another one has taken over."""

    record: AttemptRecord
    at: dict[str, Save | None]
    knew: frozenset[str]
    saves: dict[str, int] = field(default_factory=dict)


class Timeline(RuleBasedStateMachine):
    zombies = Bundle("zombies")

    @initialize()
    def begin(self) -> None:
        self.ids = itertools.count(1)
        self.stored: dict[str, dict[str, bytes]] = {tier: {} for tier in TIERS}
        self.records: dict[str, dict[str, bytes]] = {tier: {} for tier in TIERS}
        self.saves: dict[str, Save] = {}
        self.heads: dict[str, Save | None] = {}
        self.trainer: Trainer | None = None
        self.clock_s = 1e9

    # -- what the stores hold -------------------------------------------------------------------

    def new_id(self) -> str:
        # Not in order of time, as random ids are not.
        return f"{next(self.ids) * 0x9E3779B97F4A7C15 % 2**128:032x}"

    def manifests(self, tiers: tuple[str, ...] = TIERS) -> list[Manifest]:
        return [decode_manifest(data) for tier in tiers for data in self.stored[tier].values()]

    def attempts(self, tiers: tuple[str, ...] = TIERS) -> list[AttemptRecord]:
        return [decode_attempt(data) for tier in tiers for data in self.records[tier].values()]

    def alive(self, save: Save) -> bool:
        return any(save.name in self.stored[tier] for tier in TIERS)

    def existing(self, stream: str) -> list[Save]:
        return [s for s in self.saves.values() if s.stream == stream and self.alive(s)]

    def history(self, stream: str, tiers: tuple[str, ...] = TIERS) -> list[str]:
        """The law, by the model: walk up from the head, leave out what does not exist."""
        found, save = [], self.heads.get(stream)
        while save is not None:
            if any(save.name in self.stored[tier] for tier in tiers):
                found.append(save.name)
            save = save.went_on_from
        return found

    # -- what happens ---------------------------------------------------------------------------

    def start(self, at: dict[str, Save | None], clock_jump_s: float) -> Trainer | None:
        """A new start of training that loaded ``at``; streams not named go on as they were."""
        self.clock_s = max(0.0, self.clock_s + clock_jump_s)
        record = timeline.next_attempt(
            self.attempts(),
            self.manifests(),
            self.new_id(),
            {stream: save and save.name for stream, save in at.items()},
            self.clock_s,
            namespace="run",
            run=self.new_id(),
        )
        known = {a.number for a in self.attempts()} | {m.attempt.number for m in self.manifests()}
        assert record.number > max(known, default=0)
        for tier in TIERS:
            self.records[tier][record.id] = encode_attempt(record)
        self.heads |= at
        before, self.trainer = (
            self.trainer,
            Trainer(record, dict(self.heads), frozenset(self.heads)),
        )
        return before

    def write(self, trainer: Trainer, stream: str, tiers: set[str], step: int) -> Save:
        base = timeline.base_of(trainer.record, stream)
        went_on_from = trainer.at.get(stream)
        save = Save(self.new_id(), stream, went_on_from, tiers)
        seq = trainer.saves.get(stream, 0)
        manifest = Manifest(
            save_id=save.name,
            namespace="run",
            stream=stream,
            step=step,
            attempt=AttemptId(trainer.record.number, trainer.record.id),
            seq=seq,
            parent=went_on_from.name if seq and went_on_from else base.parent,
            lineage=base.lineage,
            plan="ab" * 16,
            tiers=(),
            segments=(SegmentRef("cd" * 16, 4096, "ef" * 16, "host"),),
            world_size=1,
            tags={},
            created_at_s=self.clock_s,
        )
        for tier in tiers:
            self.stored[tier][save.name] = encode_manifest(manifest)
        trainer.saves[stream] = seq + 1
        trainer.at[stream] = save
        self.saves[save.name] = save
        return save

    @rule(
        stream=st.sampled_from(STREAMS),
        tiers=st.sets(st.sampled_from(TIERS), min_size=1),
        step=st.integers(0, 50),
    )
    def save(self, stream: str, tiers: set[str], step: int) -> None:
        if self.trainer is None:
            self.start({stream: None}, 0.0)
        assert self.trainer is not None
        self.heads[stream] = self.write(self.trainer, stream, tiers, step)

    @rule(
        target=zombies,
        streams=st.sets(st.sampled_from(STREAMS), min_size=1),
        clock_jump_s=st.floats(-1e6, 1e6),
    )
    def restart_and_load_newest(self, streams: set[str], clock_jump_s: float) -> object:
        newest = {}
        for stream in streams:
            found = timeline.head(self.manifests(), self.attempts(), stream)
            expected = self.history(stream)
            assert (found and found.save_id) == (expected[0] if expected else None)
            newest[stream] = self.saves[expected[0]] if expected else None
        return _zombie(self.start(newest, clock_jump_s))

    @rule(
        target=zombies,
        stream=st.sampled_from(STREAMS),
        data=st.data(),
        clock_jump_s=st.floats(-9, 9),
    )
    def roll_back_to_any_save(
        self, stream: str, data: st.DataObject, clock_jump_s: float
    ) -> object:
        existing = self.existing(stream)
        save = data.draw(st.sampled_from(existing)) if existing else None
        return _zombie(self.start({stream: save}, clock_jump_s))

    @rule(target=zombies, stream=st.sampled_from(STREAMS))
    def begin_anew(self, stream: str) -> object:
        return _zombie(self.start({stream: None}, 0.0))

    @rule(target=zombies, streams=st.sets(st.sampled_from(STREAMS)))
    def start_at_a_save_that_is_gone(self, streams: set[str]) -> object:
        gone = [s for s in self.saves.values() if not self.alive(s) and s.stream in streams]
        for save in gone[:1]:
            with pytest.raises(NotFoundError):
                self.start({save.stream: save}, 0.0)
        return multiple()

    @rule(zombie=zombies, stream=st.sampled_from(STREAMS), tiers=st.sets(st.sampled_from(TIERS)))
    def zombie_slips_a_save_in(self, zombie: Trainer, stream: str, tiers: set[str]) -> None:
        """The agent refuses it; should it ever get through, it is still no candidate."""
        newest = timeline.newest_attempt(self.manifests(), self.attempts())
        assert newest is not None
        assert (zombie.record.number, zombie.record.id) < (newest.number, newest.id)
        if stream in self.heads:  # else nobody has a line that it could lie outside of
            self.write(zombie, stream, tiers, step=99)

    @rule(zombie=consumes(zombies))
    def zombie_ends(self, zombie: Trainer) -> None:
        pass

    # -- what is lost ---------------------------------------------------------------------------

    def newest_is_known(
        self, records: dict[str, dict[str, bytes]], stored: dict[str, dict[str, bytes]]
    ) -> bool:
        """Whether the newest attempt is known, for each stream, by its record or by a save."""
        if self.trainer is None:
            return True
        newest = self.trainer.record.id
        saves = [decode_manifest(data) for held in stored.values() for data in held.values()]
        saved_into = {save.stream for save in saves if save.attempt.id == newest}
        recorded = any(newest in held for held in records.values())
        return self.heads.keys() <= saved_into | (self.trainer.knew if recorded else set())

    @rule(data=st.data(), in_tiers=st.sets(st.sampled_from(TIERS), min_size=1))
    def manifest_is_lost(self, data: st.DataObject, in_tiers: set[str]) -> None:
        names = sorted({name for tier in TIERS for name in self.stored[tier]})
        if names:
            name = data.draw(st.sampled_from(names))
            self.lose(manifests={tier: {name} for tier in in_tiers})

    @rule(data=st.data(), in_tiers=st.sets(st.sampled_from(TIERS), min_size=1))
    def attempt_record_is_lost(self, data: st.DataObject, in_tiers: set[str]) -> None:
        ids = sorted({record for tier in TIERS for record in self.records[tier]})
        if ids:
            lost = data.draw(st.sampled_from(ids))
            self.lose(records={tier: {lost} for tier in in_tiers})

    @rule(tier=st.sampled_from(TIERS), records_too=st.booleans())
    def whole_tier_is_lost(self, tier: str, records_too: bool) -> None:
        self.lose(
            manifests={tier: set(self.stored[tier])},
            records={tier: set(self.records[tier])} if records_too else {},
        )

    def lose(
        self,
        manifests: dict[str, set[str]] | None = None,
        records: dict[str, set[str]] | None = None,
    ) -> None:
        stored = _without(self.stored, manifests or {})
        attempts = _without(self.records, records or {})
        if self.newest_is_known(attempts, stored):
            self.stored, self.records = stored, attempts

    @rule(
        stream=st.sampled_from(STREAMS),
        tier=st.sampled_from(TIERS),
        last=st.integers(1, 3),
        data=st.data(),
    )
    def retention(self, stream: str, tier: str, last: int, data: st.DataObject) -> None:
        held = [m for m in self.manifests((tier,)) if m.stream == stream]
        names = {m.save_id for m in held}
        good = [
            m
            for m in timeline.candidates(self.manifests(), self.attempts(), stream)
            if m.save_id in names
        ]
        off = [
            m
            for m in timeline.abandoned(self.manifests(), self.attempts(), stream)
            if m.save_id in names
        ]
        plan = retain(good, off, Keep(last=last))
        died_after = data.draw(st.integers(0, len(plan.delete)))
        expected = self.history(stream, (tier,))
        assert set(expected[:last]) <= set(plan.keep)
        self.lose(manifests={tier: set(plan.delete[:died_after])})
        assert self.history(stream, (tier,))[:1] == expected[:1]

    # -- the laws -------------------------------------------------------------------------------

    @precondition(lambda self: hasattr(self, "stored"))
    @invariant()
    def candidates_are_the_ancestors_that_exist(self) -> None:
        for stream in STREAMS:
            self.check(stream, TIERS)

    @precondition(lambda self: hasattr(self, "stored"))
    @invariant()
    def one_tier_alone_says_the_same_of_what_it_holds(self) -> None:
        for tier in TIERS:
            alone = {tier: self.records[tier]}, {tier: self.stored[tier]}
            if self.newest_is_known(*alone):
                for stream in STREAMS:
                    self.check(stream, (tier,))

    def check(self, stream: str, tiers: tuple[str, ...]) -> None:
        manifests, attempts = self.manifests(tiers), self.attempts(tiers)
        expected = self.history(stream, tiers)
        found = [m.save_id for m in timeline.candidates(manifests, attempts, stream)]
        assert found == expected
        off = [m.save_id for m in timeline.abandoned(manifests, attempts, stream)]
        everything = {m.save_id for m in manifests if m.stream == stream}
        assert sorted(off) == sorted(everything - set(expected))
        assert timeline.line(manifests, attempts, stream).certain
        backwards = timeline.candidates(manifests[::-1], attempts[::-1], stream)
        assert [m.save_id for m in backwards] == expected


def _zombie(trainer: Trainer | None) -> object:
    return multiple() if trainer is None else trainer


def _without(
    held: dict[str, dict[str, bytes]], lost: dict[str, set[str]]
) -> dict[str, dict[str, bytes]]:
    return {
        tier: {name: data for name, data in entries.items() if name not in lost.get(tier, set())}
        for tier, entries in held.items()
    }


TestTimeline = Timeline.TestCase
TestTimeline.settings = settings(stateful_step_count=40)
