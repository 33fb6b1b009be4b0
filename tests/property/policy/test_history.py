"""The time line against a model that is nothing but a tree of saves and who knew of whom.

The model knows no numbers, lineages or records: a save points to the save that it went on from, a
start of training to the starts that it knew of, first the one that it went on from. A history is
what one meets walking up from a stream's newest save. Starts that did not know of each other are a
fork. Sides are cut off with a part of what is known, go on there, and are merged later.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
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

from tieredckpt.config.schema import Keep
from tieredckpt.errors import NotFoundError
from tieredckpt.format.manifest import (
    AttemptId,
    AttemptRecord,
    Followed,
    Manifest,
    SegmentRef,
    decode_attempt,
    decode_manifest,
    encode_attempt,
    encode_manifest,
)
from tieredckpt.policy import history as history_module
from tieredckpt.policy.retention import retain

STREAMS = ("default", "actor", "critic")
TIERS = ("memory", "nvme")
SIDES_MAX = 3

streams_drawn = st.sampled_from(STREAMS)


# --- the model ------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Save:
    """A node of the model's tree."""

    name: str
    stream: str
    start: Start
    went_on_from: Save | None


@dataclass(eq=False, repr=False)
class Start:
    """One start of training, also long after another one has taken over."""

    record: AttemptRecord
    knew: tuple[Start, ...]
    """First the one that it went on from."""
    at: dict[str, Save | None]
    """Where it took streams up; others go on as the one before left them."""
    left: dict[str, Save]
    """What was the newest when it knowingly went back behind that."""
    own: dict[str, list[Save]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.behind = behind(self.knew)

    def line(self) -> Iterator[Start]:
        """From here backwards."""
        at: Start | None = self
        while at is not None:
            yield at
            at = at.knew[0] if at.knew else None


def up(save: Save | None) -> list[Save]:
    """From ``save`` to the first one."""
    found = []
    while save is not None:
        found.append(save)
        save = save.went_on_from
    return found


def behind(starts: Iterable[Start]) -> set[Start]:
    """These, and all that they knew of."""
    found: set[Start] = set()
    for start in starts:
        found |= {start} | start.behind
    return found


def unsurpassed(starts: set[Start]) -> set[Start]:
    return starts - {each for start in starts for each in start.behind}


@dataclass(frozen=True)
class Seen:
    """What can be said of the saves that somebody sees."""

    saves: tuple[Save, ...]

    def heads(self) -> set[Start]:
        return unsurpassed(behind(save.start for save in self.saves))

    def own(self, start: Start, stream: str) -> list[Save]:
        return [save for save in start.own.get(stream, ()) if save in self.saves]

    def tip(self, start: Start, stream: str) -> tuple[bool, Save | None]:
        """Whether anybody says where the stream stands, and where."""
        for each in start.line():
            if own := self.own(each, stream):
                return True, own[-1]
            if stream in each.at:
                return True, each.at[stream]
        return False, None

    def history(self, start: Start, stream: str) -> list[str]:
        """The law: walk up, leave out what does not exist."""
        return [save.name for save in up(self.tip(start, stream)[1]) if save in self.saves]

    def sides(self, stream: str) -> set[tuple[str, ...]]:
        """Different histories; an empty one is no choice beside another one."""
        found = {tuple(self.history(head, stream)) for head in self.heads()}
        return {each for each in found if each} or {()}

    def candidates(self, stream: str) -> list[str]:
        sides = self.sides(stream)
        return list(*sides) if len(sides) == 1 else []

    def abandoned(self, stream: str) -> set[str]:
        """What a roll-back on the one line knowingly left, and nothing while there is a fork."""
        heads = self.heads()
        if len(heads) != 1:
            return set()
        (head,) = heads
        left = {
            save.name for start in head.line() for save in up(start.left.get(stream))
            if save in self.saves
        }  # fmt: skip
        return left - set(self.history(head, stream))

    def lived_on(self, stream: str) -> set[str]:
        """What was saved by those that the one line went on from, and which it never knew of."""
        heads = self.heads()
        if len(heads) != 1:
            return set()
        (head,) = heads
        line, history = list(head.line()), set(self.history(head, stream))
        known = (start.left.get(stream) for start in line), (start.at.get(stream) for start in line)
        left = {save for each in known for tip in each for save in up(tip)}
        return {
            save.name for start in line[1:] for save in self.own(start, stream)
            if save.name not in history and save not in left
        }  # fmt: skip


# --- what is stored -------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Place:
    """Hosts that know the same: all of them, or a side that is cut off."""

    stored: dict[str, dict[str, bytes]]
    records: dict[str, dict[str, bytes]]
    trainer: Start | None = None
    opened: list[Start] = field(default_factory=list)
    """Here, while it was cut off."""

    def manifests(self, tiers: Iterable[str] | None = None) -> list[Manifest]:
        return [
            decode_manifest(data) for tier in tiers or self.stored
            for data in self.stored[tier].values()
        ]  # fmt: skip

    def attempts(self, tiers: Iterable[str] | None = None) -> list[AttemptRecord]:
        return [
            decode_attempt(data) for tier in tiers or self.records
            for data in self.records[tier].values()
        ]  # fmt: skip

    def put(self, save: str, data: bytes, tiers: Iterable[str]) -> None:
        for tier in set(tiers) & self.stored.keys():
            self.stored[tier][save] = data

    def note(self, record: AttemptRecord) -> None:
        for held in self.records.values():
            held[record.id] = encode_attempt(record)


@dataclass(frozen=True)
class Says:
    """What the product says of one stream."""

    candidates: list[str]
    sides: set[tuple[str, ...]]
    abandoned: set[str]
    lived_on: set[str]


def says(manifests: Sequence[Manifest], records: Sequence[AttemptRecord], stream: str) -> Says:
    """As whoever asks does: of what was opened only what has saved counts."""
    counted = history_module.with_saves(records, history_module.saved_by(manifests))
    chain = history_module.Chain(manifests, counted)
    lines = chain.sides(manifests, stream)
    after = chain.lived_on(lines[0], manifests) if len(chain.heads) == 1 else {}
    found = history_module.candidates(manifests, counted, stream)
    left = history_module.abandoned(manifests, counted, stream)
    return Says(
        [m.save_id for m in found],
        {tuple(m.save_id for m in history_module.on_line(line, manifests)) for line in lines},
        {m.save_id for m in left},
        {m.save_id for saves in after.values() for m in saves},
    )


class Timeline(RuleBasedStateMachine):
    zombies = Bundle("zombies")

    @initialize()
    def begin(self) -> None:
        self.ids = itertools.count(1)
        self.all = Place({tier: {} for tier in TIERS}, {tier: {} for tier in TIERS})
        self.sides: list[Place] = []
        self.saves: dict[str, Save] = {}
        self.starts: dict[str, Start] = {}
        self.clock_s = 1e9

    def new_id(self) -> str:
        # Not in order of time, as random ids are not.
        return f"{next(self.ids) * 0x9E3779B97F4A7C15 % 2**128:032x}"

    def somewhere(self, data: st.DataObject) -> Place:
        return data.draw(st.sampled_from([self.all, *self.sides]))

    def seen(self, place: Place, tiers: Iterable[str] | None = None) -> Seen:
        names = {name for tier in tiers or place.stored for name in place.stored[tier]}
        return Seen(tuple(save for name, save in self.saves.items() if name in names))

    def known(self, place: Place) -> set[Start]:
        return {self.starts[each.id] for each in place.attempts()}

    # -- starts of training -----------------------------------------------------------------------

    def open(
        self, place: Place, data: st.DataObject, at: dict[str, Save | None] | None,
        streams: Iterable[str] = (), own: Start | None = None,
    ) -> None:  # fmt: skip
        """A run begins to save that loaded ``at``, or (None) the newest of ``streams``.

        At a fork a person has chosen the side. ``own``: what the same run had opened before.
        """
        self.clock_s = max(0.0, self.clock_s + data.draw(st.floats(-1e6, 1e6)))
        manifests, records, seen = place.manifests(), place.attempts(), self.seen(place)
        heads = sorted(seen.heads(), key=lambda each: each.record.id)
        head = data.draw(st.sampled_from(heads)) if heads else None
        first = [*dict.fromkeys(each for each in (own, head) if each is not None)]
        aside = history_module.Chain(manifests, records).beside(each.record.id for each in first)
        expected = unsurpassed(self.known(place)) - behind(first)
        assert {each.id for each in aside} == {each.record.id for each in expected}
        knew = (*first, *(self.starts[each.id] for each in aside))
        newest = {s: next(iter(seen.history(head, s)), "") if head else "" for s in STREAMS}
        if at is None:
            at = {stream: self.saves.get(newest[stream]) for stream in streams}
        by_id = {manifest.save_id: manifest for manifest in manifests}
        bases = {
            stream: history_module.Base(
                save_id=save and save.name,
                newest=history_module.ancestry_of(by_id[newest[stream]]) if newest[stream] else (),
            )
            for stream, save in at.items()
        }
        followed = tuple(Followed(each.record.number, each.record.id) for each in knew)
        named = history_module.saved_by(manifests).union(each.id for each in followed)
        record = history_module.next_attempt(
            history_module.with_saves(records, named), manifests, self.new_id(), bases, followed,
            self.clock_s, namespace="run",
            run=own.record.run if own is not None else self.new_id(),
        )  # fmt: skip
        assert record.number == 1 + max((each.number for each in followed), default=0)
        stands = dict(at)
        for stream in set(STREAMS) - at.keys() if knew else ():
            is_known, save = seen.tip(knew[0], stream)
            if is_known:
                stands[stream] = save
        left = {
            stream: self.saves[newest[stream]] for stream, save in at.items()
            if newest[stream] and (save is None or save.name != newest[stream])
        }  # fmt: skip
        start = self.starts[record.id] = Start(record, knew, stands, left)
        place.note(record)
        place.trainer = start
        place.opened.append(start)

    def write(self, place: Place, start: Start, stream: str, tiers: set[str], step: int) -> Save:
        base = history_module.base_of(start.record, stream)
        own = start.own.setdefault(stream, [])
        went_on_from = own[-1] if own else start.at.get(stream)
        save = Save(self.new_id(), stream, start, went_on_from)
        manifest = Manifest(
            save_id=save.name,
            namespace="run",
            stream=stream,
            step=step,
            attempt=AttemptId(start.record.number, start.record.id),
            seq=len(own),
            parent=went_on_from.name if went_on_from else base.parent,
            lineage=base.lineage,
            plan="ab" * 16,
            tiers=(),
            segments=(SegmentRef("cd" * 16, 4096, "ef" * 16, "host"),),
            world_size=1,
            tags={},
            created_at_s=self.clock_s,
        )
        own.append(save)
        self.saves[save.name] = save
        for each in behind([start]):  # it comes with the commit, and those before were told
            place.note(each.record)
        place.put(save.name, encode_manifest(manifest), tiers)
        return save

    def may_save(self, place: Place, start: Start, stream: str) -> bool:
        """Who saves into a stream that holds something has taken it up."""
        return stream in start.at or stream in start.own or not any(
            save.stream == stream for save in self.seen(place).saves
        )  # fmt: skip

    @rule(
        stream=streams_drawn,
        tiers=st.sets(st.sampled_from(TIERS), min_size=1),
        step=st.integers(0, 50),
        data=st.data(),
    )
    def save(self, stream: str, tiers: set[str], step: int, data: st.DataObject) -> None:
        place = self.somewhere(data)
        if place.trainer is None:
            self.open(place, data, None, [stream])
        assert place.trainer is not None
        if self.may_save(place, place.trainer, stream):
            tiers = tiers & place.stored.keys() or {TIERS[0]}
            self.write(place, place.trainer, stream, tiers, step)

    @rule(
        target=zombies,
        streams=st.sets(streams_drawn, min_size=1),
        times=st.sampled_from([1, 1, 3]),
        data=st.data(),
    )
    def restart_and_load_newest(self, streams: set[str], times: int, data: st.DataObject) -> object:
        place = self.somewhere(data)
        before = place.trainer
        for _ in range(times):
            self.open(place, data, None, sorted(streams))
        return _zombie(before)

    @rule(target=zombies, stream=streams_drawn, data=st.data())
    def roll_back_to_any_save(self, stream: str, data: st.DataObject) -> object:
        """Also to one that was abandoned, or is on a branch."""
        place = self.somewhere(data)
        existing = [save for save in self.seen(place).saves if save.stream == stream]
        save = data.draw(st.sampled_from(existing)) if existing else None
        before = place.trainer
        self.open(place, data, {stream: save})
        return _zombie(before)

    @rule(stream=streams_drawn, data=st.data())
    def the_same_run_loads_again(self, stream: str, data: st.DataObject) -> None:
        place = self.somewhere(data)
        mine, known = place.trainer, self.known(place)
        if mine is not None and mine in unsurpassed(known):
            existing = [save for save in self.seen(place).saves if save.stream == stream]
            save = data.draw(st.sampled_from(existing)) if existing else None
            self.open(place, data, {stream: save}, own=mine)

    @rule(target=zombies, stream=streams_drawn, data=st.data())
    def begin_anew(self, stream: str, data: st.DataObject) -> object:
        place = self.somewhere(data)
        before = place.trainer
        self.open(place, data, {stream: None})
        return _zombie(before)

    @rule(streams=st.sets(streams_drawn), data=st.data())
    def start_at_a_save_that_is_gone(self, streams: set[str], data: st.DataObject) -> None:
        place = self.somewhere(data)
        seen = self.seen(place).saves
        gone = [s for s in self.saves.values() if s not in seen and s.stream in streams]
        for save in gone[:1]:
            with pytest.raises(NotFoundError):
                self.open(place, data, {save.stream: save})

    @rule(zombie=zombies, stream=streams_drawn, tiers=st.sets(st.sampled_from(TIERS)))
    def zombie_slips_a_save_in(self, zombie: Start, stream: str, tiers: set[str]) -> None:
        """The agent refuses it; should it ever get through, it is no candidate, nor abandoned."""
        if not self.may_save(self.all, zombie, stream):
            return
        over = any(
            zombie in head.behind and stream in head.at for head in self.seen(self.all).heads()
        )
        before = len(self.seen(self.all).heads())
        save = self.write(self.all, zombie, stream, tiers, step=99)
        if over and before == 1:
            found = says(self.all.manifests(), self.all.attempts(), stream)
            assert save.name not in {*found.candidates, *found.abandoned}

    @rule(zombie=consumes(zombies))
    def zombie_ends(self, zombie: Start) -> None:
        pass

    # -- sides ----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.sides) < SIDES_MAX and self.saves)
    @rule(data=st.data(), with_trainer=st.booleans())
    def a_side_is_cut_off(self, data: st.DataObject, with_trainer: bool) -> None:
        """It knows some attempts, with what they followed, and some of their checkpoints."""
        starts = sorted(self.known(self.all), key=lambda each: each.record.id)
        told = behind(data.draw(st.sets(st.sampled_from(starts)) if starts else st.just(set())))
        held = {n: d for each in self.all.stored.values() for n, d in each.items()}
        held = {n: d for n, d in held.items() if self.saves[n].start in told}
        names = data.draw(st.sets(st.sampled_from(sorted(held)))) if held else set()
        side = Place({TIERS[0]: {name: held[name] for name in names}}, {TIERS[0]: {}})
        for start in told:
            side.note(start.record)
        if with_trainer and self.all.trainer in told:
            side.trainer = self.all.trainer
        self.sides.append(side)

    @precondition(lambda self: self.sides)
    @rule(target=zombies, data=st.data(), stays=st.booleans())
    def a_side_is_merged(self, data: st.DataObject, stays: bool) -> object:
        side = data.draw(st.sampled_from(self.sides))
        silent = not any(start.own for start in side.opened)
        known = {name for held in self.all.stored.values() for name in held}
        before = [says(self.all.manifests(), self.all.attempts(), s) for s in STREAMS]
        for record in side.attempts():
            self.all.note(record)
        for name, manifest in side.stored[TIERS[0]].items():
            if not silent or name in known:  # what was lost meanwhile does not come back by it
                tiers = data.draw(st.sampled_from([{"memory"}, {"nvme"}, set(TIERS)]))
                self.all.put(name, manifest, tiers)
        if silent:
            after = [says(self.all.manifests(), self.all.attempts(), s) for s in STREAMS]
            assert after == before, "a side that saved nothing has changed something"
        if stays:
            return multiple()
        self.sides.remove(side)
        trainer = side.trainer
        return _zombie(trainer if trainer is not self.all.trainer else None)

    @precondition(lambda self: self.all.trainer is not None)
    @rule(stream=streams_drawn, data=st.data())
    def who_saves_finds_another_side(self, stream: str, data: st.DataObject) -> None:
        """It goes on as it was, in an attempt that follows both."""
        place, mine = self.all, self.all.trainer
        assert mine is not None
        beside = unsurpassed(self.known(place)) - behind([mine])
        if any(mine in each.behind for each in self.known(place)) or not beside:
            return
        seen = self.seen(place)
        history = {s: seen.history(mine, s) for s in STREAMS}
        aside = {save.name for save in seen.saves if save.start not in behind([mine])}
        self.open_beside(place, mine)
        trainer = place.trainer
        assert trainer is not None
        if self.may_save(place, trainer, stream):
            save = self.write(place, trainer, stream, set(TIERS), 7)
            for each in STREAMS:
                found = says(place.manifests(), place.attempts(), each)
                assert found.candidates == [save.name] * (each == stream) + history[each]
                assert not aside & found.abandoned

    def open_beside(self, place: Place, mine: Start) -> None:
        manifests, records = place.manifests(), place.attempts()
        aside = history_module.Chain(manifests, records).beside([mine.record.id])
        aside = (Followed(each.number, each.id) for each in aside)
        followed = (Followed(mine.record.number, mine.record.id), *aside)
        named = history_module.saved_by(manifests).union(each.id for each in followed)
        record = history_module.next_attempt(
            history_module.with_saves(records, named), manifests, self.new_id(), {}, followed,
            self.clock_s, namespace="run", run=mine.record.run,
        )  # fmt: skip
        seen, stands = self.seen(place), {}
        for stream in STREAMS:
            is_known, save = seen.tip(mine, stream)
            if is_known:
                stands[stream] = save
        knew = tuple(self.starts[each.id] for each in followed)
        place.trainer = self.starts[record.id] = Start(record, knew, stands, {})
        place.note(record)

    # -- what is lost ------------------------------------------------------------------------------

    @rule(data=st.data(), in_tiers=st.sets(st.sampled_from(TIERS), min_size=1))
    def manifest_is_lost(self, data: st.DataObject, in_tiers: set[str]) -> None:
        place = self.somewhere(data)
        names = sorted({name for held in place.stored.values() for name in held})
        if names:
            name = data.draw(st.sampled_from(names))
            for tier in in_tiers & place.stored.keys():
                place.stored[tier].pop(name, None)

    @rule(data=st.data(), tier=st.sampled_from(TIERS))
    def attempt_record_is_lost_in_a_tier(self, data: st.DataObject, tier: str) -> None:
        """What follows from a record that is lost everywhere: see the last law."""
        (other,) = set(TIERS) - {tier}
        ids = sorted(self.all.records[tier].keys() & self.all.records[other].keys())
        if ids:
            del self.all.records[tier][data.draw(st.sampled_from(ids))]

    @rule(tier=st.sampled_from(TIERS))
    def whole_tier_is_lost(self, tier: str) -> None:
        self.all.stored[tier].clear()

    @rule(stream=streams_drawn, last=st.integers(1, 3), data=st.data())
    def retention(self, stream: str, last: int, data: st.DataObject) -> None:
        place = self.somewhere(data)
        tier = data.draw(st.sampled_from(sorted(place.stored)))
        names = place.stored[tier].keys()
        manifests, records = place.manifests(), place.attempts()
        counted = history_module.with_saves(records, history_module.saved_by(manifests))
        good = history_module.candidates(manifests, counted, stream)
        off = history_module.abandoned(manifests, counted, stream)
        plan = retain(
            [m for m in good if m.save_id in names], [m for m in off if m.save_id in names],
            Keep(last=last),
        )  # fmt: skip
        seen = self.seen(place)
        expected = seen.candidates(stream)
        mine = [name for name in expected if name in names]
        assert set(mine[:last]) <= set(plan.keep)
        assert set(plan.delete) <= {*mine, *seen.abandoned(stream)}, "a branch stays"
        died_after = data.draw(st.integers(0, len(plan.delete)))
        for name in plan.delete[:died_after]:
            del place.stored[tier][name]
        assert self.seen(place).candidates(stream)[:1] == expected[:1]

    # -- the laws ----------------------------------------------------------------------------------

    @precondition(lambda self: hasattr(self, "saves"))
    @invariant()
    def candidates_are_the_ancestors_that_exist(self) -> None:
        for place in (self.all, *self.sides):
            self.check(place, None)

    @precondition(lambda self: hasattr(self, "saves"))
    @invariant()
    def one_tier_alone_says_the_same_of_what_it_holds(self) -> None:
        for tier in TIERS:
            needed = behind(save.start for save in self.seen(self.all, [tier]).saves)
            if {each.record.id for each in needed} <= self.all.records[tier].keys():
                self.check(self.all, [tier])

    def check(self, place: Place, tiers: list[str] | None) -> None:
        manifests, records = place.manifests(tiers), place.attempts(tiers)
        seen = self.seen(place, tiers)
        for stream in STREAMS:
            found = says(manifests, records, stream)
            assert found.sides == seen.sides(stream)
            assert found.candidates == seen.candidates(stream)
            assert found.abandoned == seen.abandoned(stream)
            assert found.lived_on == seen.lived_on(stream)
            assert says(manifests[::-1], records[::-1], stream) == found

    @rule(data=st.data())
    def records_that_are_lost_decide_nothing(self, data: st.DataObject) -> None:
        """They cannot make anything abandoned, nor another line be chosen where lineages tell."""
        manifests, records = self.all.manifests(), self.all.attempts()
        ids = sorted({record.id for record in records})
        lost = data.draw(st.sets(st.sampled_from(ids))) if ids else set()
        left = [record for record in records if record.id not in lost]
        seen = self.seen(self.all)
        for stream in STREAMS:
            full, less = says(manifests, records, stream), says(manifests, left, stream)
            assert less.abandoned <= full.abandoned
            if all(seen.own(head, stream) for head in seen.heads()):
                assert less.candidates in (full.candidates, [])


def _zombie(start: Start | None) -> object:
    return multiple() if start is None else start


TestTimeline = Timeline.TestCase
TestTimeline.settings = settings(
    stateful_step_count=40, max_examples=2 * settings.default.max_examples // 5
)


def test_nothing_is_abandoned_while_another_side_may_not_know_of_it():
    """One side went back behind a checkpoint; the other one, which sees the same, did not."""
    case = Timeline()
    case.begin()

    class First:
        """Draws the first of what there is, and no clock that jumps."""

        def draw(self, strategy: st.SearchStrategy) -> object:
            return strategy.elements[0] if hasattr(strategy, "elements") else 0.0

    data = First()
    case.open(case.all, data, None, STREAMS)  # type: ignore[arg-type]
    first = case.all.trainer
    assert first is not None
    base = case.write(case.all, first, "default", {"memory"}, 80)
    side = Place({"memory": dict(case.all.stored["memory"])}, {"memory": {}})
    side.note(first.record)
    case.write(case.all, first, "default", {"memory"}, 90)
    case.open(case.all, data, {"default": base})  # type: ignore[arg-type]
    case.open(side, data, {"default": base})  # type: ignore[arg-type]
    for place in (case.all, side):
        assert place.trainer is not None
        case.write(place, place.trainer, "actor", {"memory"}, 1)
    case.check(case.all, ["memory"])
    assert case.seen(case.all).abandoned("default"), "who went back has said so"
    case.all.stored["memory"] |= side.stored["memory"]
    case.all.records["memory"] |= side.records["memory"]
    case.check(case.all, ["memory"])
