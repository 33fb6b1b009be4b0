"""The recovery plan against a model: a real tree of saves, copies in every state of damage.

The model knows what really happened; the plan knows only what the holdings say. It must choose the
newest checkpoint of the newest attempt's own history that can be had, and give a reason for each
one that it passes over.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tieredckpt.format.manifest import (
    AttemptId,
    AttemptRecord,
    Followed,
    Manifest,
    SegmentRef,
    encode_attempt,
    encode_manifest,
)
from tieredckpt.format.segment import BLOCK_BYTES
from tieredckpt.policy.history import Base, ancestry_of, base_of, next_attempt
from tieredckpt.recovery.plan import RecoveryPlan, plan_recovery
from tieredckpt.storage.holdings import Holdings, ManifestFact, SegmentFact, TierFacts

BLOCKS = 3
SEGMENT_BYTES = BLOCKS * BLOCK_BYTES + 4096
PLAN_ID = "f" * 32

Copy = tuple[str, frozenset[int]]
"""State of a copy, and the blocks that are bad or (truncated) cut off."""

ABSENT: Copy = ("absent", frozenset())
INTACT: Copy = ("intact", frozenset())
blocks = st.frozensets(st.integers(0, BLOCKS - 1), min_size=1)
copies = st.one_of(
    st.just(INTACT),
    st.just(ABSENT),
    st.tuples(st.sampled_from(["bad blocks", "bad footer", "quarantined"]), blocks),
    st.integers(0, BLOCKS).map(lambda n: ("truncated", frozenset(range(n, BLOCKS)))),
    st.just(("other", frozenset(range(BLOCKS)))),
)


@dataclass
class Save:
    manifest: Manifest
    parent: Save | None


@dataclass
class Attempt:
    record: AttemptRecord
    base: Save | None
    knew: list[Save] = field(default_factory=list)
    """The line when it began, and what it went on from."""
    saves: list[Save] = field(default_factory=list)


def back_from(at: Save | None) -> list[Save]:
    """It and all before it, newest first."""
    found = []
    while at is not None:
        found.append(at)
        at = at.parent
    return found


class History:
    """What really happened in one stream."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.saves: list[Save] = []

    def start(self, base: Save | None) -> None:
        """It knows of all attempts, saves at once, and so exists."""
        before = self.line()
        last = self.attempts[-1].record if self.attempts else None
        record = next_attempt(
            [attempt.record for attempt in self.attempts],
            [save.manifest for save in self.saves],
            f"{len(self.attempts):032x}",
            {
                "default": Base(
                    save_id=base.manifest.save_id if base else None,
                    newest=ancestry_of(before[0].manifest) if before else (),
                )
            },
            (Followed(last.number, last.id),) if last is not None else (),
            0.0,
            namespace="run",
            run="ab" * 16,
        )
        self.attempts.append(Attempt(record, base, [*before, *back_from(base)]))

    def save(self, attempt: Attempt, num_segments: int) -> None:
        parent = attempt.saves[-1] if attempt.saves else attempt.base
        number = len(self.saves)
        save_id = f"{number:032x}"
        refs = tuple(
            SegmentRef(f"{number:016x}{ordinal:016x}", SEGMENT_BYTES, save_id, "a")
            for ordinal in range(num_segments)
        )
        manifest = Manifest(
            save_id=save_id,
            namespace="run",
            stream="default",
            step=parent.manifest.step + 1 if parent else 0,
            attempt=AttemptId(attempt.record.number, attempt.record.id),
            seq=len(attempt.saves),
            parent=parent.manifest.save_id if parent else None,
            lineage=base_of(attempt.record, "default").lineage,
            plan=PLAN_ID,
            tiers=("nvme",),
            segments=refs,
            world_size=num_segments,
            tags={},
            created_at_s=0.0,
        )
        save = Save(manifest, parent)
        attempt.saves.append(save)
        self.saves.append(save)

    def line(self, is_seen: Callable[[Save], bool] = lambda save: True) -> list[Save]:
        """The history of the newest attempt of which a save is seen, newest first."""
        seen = [each for each in self.attempts if any(map(is_seen, each.saves))]
        if not seen:
            return []
        newest = seen[-1]
        return back_from(newest.saves[-1] if newest.saves else newest.base)

    def lived_on(self, is_seen: Callable[[Save], bool]) -> list[Save]:
        """What is seen of the attempts before that line's, and none of those after them knew of."""
        line = self.line(is_seen)
        last = max(
            (n for n, a in enumerate(self.attempts) if any(map(is_seen, a.saves))), default=0
        )
        known = [*line, *(save for each in self.attempts[: last + 1] for save in each.knew)]
        ids = {each.manifest.save_id for each in known}
        found = [save for each in self.attempts[:last] for save in each.saves]
        return [each for each in found if is_seen(each) and each.manifest.save_id not in ids]


@st.composite
def histories(draw: st.DrawFn) -> History:
    history = History()
    for _ in range(draw(st.integers(0, 12))):
        action = draw(st.sampled_from(["save", "save", "save", "zombie", "restart", "roll back"]))
        if not history.attempts:
            history.start(None)
        if action == "save":
            history.save(history.attempts[-1], draw(st.integers(1, 2)))
        elif action == "zombie":
            history.save(draw(st.sampled_from(history.attempts)), 1)
        elif action == "restart":
            line = history.line()
            history.start(line[0] if line else None)
        else:
            history.start(draw(st.sampled_from([None, *history.saves])))
    return history


@dataclass
class Place:
    """One tier of one host."""

    host: str
    tier: str
    available: bool
    manifests: dict[str, bool]
    """By save id, whether it is readable; others are not there."""
    segments: dict[str, Copy]
    has_plan: bool

    def facts(self, history: History) -> TierFacts:
        if not self.available:
            return TierFacts(tier=self.tier, scope="host", kind=self._kind, available=False,
                             error="it is away")  # fmt: skip
        by_id = {save.manifest.save_id: save.manifest for save in history.saves}
        manifests = []
        for save_id, readable in self.manifests.items():
            data = encode_manifest(by_id[save_id])
            if not readable:
                data = data[:-1] + bytes([data[-1] ^ 1])
            manifests.append(
                ManifestFact(stream="default", save_id=save_id, manifest=data, error=None)
            )
        roots = {ref.id: ref.root for manifest in by_id.values() for ref in manifest.segments}
        segments = [fact_of(i, roots[i], copy) for i, copy in self.segments.items()]
        return TierFacts(
            tier=self.tier, scope="host", kind=self._kind, available=True, error=None,
            manifests=tuple(manifests), plans=(PLAN_ID,) if self.has_plan else (),
            segments=tuple(fact for fact in segments if fact is not None),
        )  # fmt: skip

    @property
    def _kind(self) -> str:
        return "memory" if self.tier == "memory" else "file"


def fact_of(segment_id: str, root: str, copy: Copy) -> SegmentFact | None:
    state, bad = copy
    fact = SegmentFact(
        id=segment_id, size=SEGMENT_BYTES, root=root, error=None, block_bytes=BLOCK_BYTES
    )
    changes: dict[str, object] = {
        "intact": {},
        "bad blocks": {"bad_blocks": tuple(sorted(bad))},
        "bad footer": {
            "root": None,
            "block_bytes": None,
            "error": "damaged",
            "bad_blocks": tuple(sorted(bad)),
        },
        "quarantined": {"error": "a reader found it bad", "bad_blocks": tuple(sorted(bad))},
        "truncated": {
            "root": None,
            "error": "short",
            "block_bytes": None,
            "size": (BLOCKS - len(bad)) * BLOCK_BYTES,
        },
        "other": {"root": "e" * 32},
        "absent": None,
    }[state]  # type: ignore[assignment]
    if changes is None:
        return None
    return SegmentFact(
        **{name: changes.get(name, getattr(fact, name)) for name in fact.__struct_fields__}
    )


@st.composite
def worlds(draw: st.DrawFn) -> tuple[History, list[Place]]:
    history = draw(histories())
    places = []
    for host, tier in (("a", "memory"), ("a", "nvme"), ("b", "memory")):
        manifests = {}
        segments = {}
        for save in history.saves:
            state = draw(st.sampled_from(["there", "there", "there", "damaged", "gone"]))
            if state != "gone":
                manifests[save.manifest.save_id] = state == "there"
            for ref in save.manifest.segments:
                segments[ref.id] = draw(copies)
        available = tier == "memory" or draw(st.booleans())
        places.append(Place(host, tier, available, manifests, segments, draw(st.booleans())))
    return history, places


def holdings_of(history: History, places: list[Place]) -> list[Holdings]:
    attempts = tuple(encode_attempt(attempt.record) for attempt in history.attempts)
    return [
        Holdings(
            host_id=host, namespace="run", attempts=attempts,
            tiers=tuple(place.facts(history) for place in places if place.host == host),
        )
        for host in ("a", "b")
    ]  # fmt: skip


def can_be_had(manifest: Manifest, places: list[Place]) -> bool:
    for ref in manifest.segments:
        found = [place.segments[ref.id] for place in places if place.available]
        if not any(state in ("intact", "bad blocks") for state, _ in found):
            return False  # nothing to verify blocks with
        for block in range(BLOCKS):
            if not any(
                state not in ("absent", "other") and block not in bad for state, bad in found
            ):
                return False
    return True


def is_known(save: Save, places: list[Place]) -> bool:
    return any(p.available and p.manifests.get(save.manifest.save_id) for p in places)


def is_damaged(save: Save, places: list[Place]) -> bool:
    seen = any(p.available and save.manifest.save_id in p.manifests for p in places)
    return seen and not is_known(save, places)


def on_the_line(history: History, places: list[Place]) -> list[Save]:
    """What can be restored, newest first."""
    line = history.line(lambda save: is_known(save, places))
    return [s for s in line if is_known(s, places) and can_be_had(s.manifest, places)]


def further(
    history: History, places: list[Place], tried: frozenset[str] = frozenset()
) -> list[Save]:
    """What got further than the line without knowing of it: nothing tells which one is meant."""
    left = [s for s in on_the_line(history, places) if s.manifest.save_id not in tried]
    reached = left[0].manifest.step if left else -1
    return [
        save for save in history.lived_on(lambda save: is_known(save, places))
        if save.manifest.step > reached and can_be_had(save.manifest, places)
        and save.manifest.save_id not in tried
    ]  # fmt: skip


@given(worlds())
def test_who_got_further_without_knowing_is_named(world: tuple[History, list[Place]]):
    """As a side beside the line; and nothing is chosen."""
    history, places = world
    plan = plan_recovery(holdings_of(history, places))
    ahead = further(history, places)
    line = history.line(lambda save: is_known(save, places))
    tips = [save for save in line if is_known(save, places)][:1]
    for attempt in {save.manifest.attempt for save in ahead}:
        own = [s for s in history.saves if s.manifest.attempt == attempt and is_known(s, places)]
        tips.append(max(own, key=lambda save: save.manifest.seq))
    wanted = {save.manifest.save_id for save in tips} if ahead else set()
    assert {side.save_id for side in plan.sides} == wanted
    if ahead:
        assert plan.chosen is None
        chosen = plan_recovery(holdings_of(history, places), save_id=ahead[0].manifest.save_id)
        assert chosen.chosen is not None
        assert chosen.sides == ()


@given(worlds())
def test_the_newest_checkpoint_on_the_line_that_can_be_had(world: tuple[History, list[Place]]):
    history, places = world
    if further(history, places):
        return
    plan = plan_recovery(holdings_of(history, places))
    line = history.line(lambda save: is_known(save, places))
    on_line = [save for save in line if is_known(save, places)]
    expected = [save for save in on_line if can_be_had(save.manifest, places)]
    assert [c.manifest for c in plan.candidates] == [save.manifest for save in expected]
    assert plan.chosen == (plan.candidates[0] if plan.candidates else None)
    # Each one that was passed over has its reason, newest first.
    passed = [save.manifest.save_id for save in on_line if save not in expected]
    damaged = sorted(s.manifest.save_id for s in history.saves if is_damaged(s, places))
    assert [refusal.save_id for refusal in plan.refused] == damaged + passed
    assert all(refusal.reason for refusal in plan.refused)
    off_line = {
        s.manifest.save_id for s in history.saves if s not in on_line and is_known(s, places)
    }
    assert {refusal.save_id for refusal in plan.abandoned} == off_line
    # What lies off the line and is at least as far, or that nobody on it knew of, is never passed
    # over without a word.
    unknown = history.lived_on(lambda save: is_known(save, places)) if plan.chosen else []
    least = plan.chosen.manifest.step if plan.chosen is not None else 2**63
    beyond = [
        s for s in history.saves
        if s.manifest.save_id in off_line and (s.manifest.step >= least or s in unknown)
        and can_be_had(s.manifest, places)
    ]  # fmt: skip
    # Each kind for itself: what a live run saved is not hidden behind what was given up long ago.
    for lived_on, why in ((True, "knew of them"), (False, "resumed before them")):
        kind = [s.manifest for s in beyond if (s in unknown) == lived_on]
        said = [each for each in plan.warnings if why in each]
        assert len(said) == bool(kind)
        for each in said:
            assert f"{len(kind)} checkpoint(s) up to step {max(m.step for m in kind)} " in each
            named = each.rpartition(" ")[2]
            assert named in {m.save_id for m in kind if m.step == max(n.step for n in kind)}
    away = [f"{place.tier} on {place.host}: it is away" for place in places if not place.available]
    assert list(plan.incomplete) == away
    check_sources(plan, places)


def check_sources(plan: RecoveryPlan, places: list[Place]) -> None:
    cost = {("a", "memory"): 0, ("b", "memory"): 1, ("a", "nvme"): 2}
    by_name = {(place.host, place.tier): place for place in places}
    for candidate in plan.candidates:
        for ref, sources in zip(candidate.manifest.segments, candidate.sources, strict=True):
            keys = []
            for source in sources:
                place = by_name[source.host, source.tier]
                state, _ = place.segments[ref.id]
                assert place.available
                assert source.segment_id == ref.id
                assert source.intact == (state == "intact")
                assert (source.error is None) == (state in ("intact", "bad blocks"))
                assert state not in ("absent", "other")
                keys.append(
                    (not source.intact, source.error is not None, cost[place.host, place.tier])
                )
            assert keys == sorted(keys), "whole before damaged, near before far"
        for host, tier in candidate.plan_sources:
            assert by_name[host, tier].has_plan


@given(worlds(), st.data())
def test_asking_for_one_step_or_one_save(world: tuple[History, list[Place]], data: st.DataObject):
    history, places = world
    holdings = holdings_of(history, places)
    if not history.saves:
        return
    wanted = data.draw(st.sampled_from(history.saves))
    by_id = plan_recovery(holdings, save_id=wanted.manifest.save_id)
    if is_known(wanted, places) and can_be_had(wanted.manifest, places):
        assert by_id.chosen is not None
        assert by_id.chosen.manifest == wanted.manifest
        assert by_id.refused == ()
    else:
        assert by_id.chosen is None
        known = is_known(wanted, places) or is_damaged(wanted, places)
        assert [r.save_id for r in by_id.refused] == [wanted.manifest.save_id] * known
    step = wanted.manifest.step
    by_step = plan_recovery(holdings, step=step)
    restored = [save.manifest for save in on_the_line(history, places)]
    matching = [manifest for manifest in restored if manifest.step == step]
    assert [c.manifest for c in by_step.candidates] == matching
    if not matching and is_known(wanted, places):
        assert wanted.manifest.save_id in {refusal.save_id for refusal in by_step.refused}


@given(worlds(), st.data())
def test_excluding_what_failed_leads_to_the_next_one(
    world: tuple[History, list[Place]], data: st.DataObject
):
    history, places = world
    holdings = holdings_of(history, places)
    first = plan_recovery(holdings)
    ids = [candidate.manifest.save_id for candidate in first.candidates]
    tried = frozenset(data.draw(st.lists(st.sampled_from(ids))) if ids else [])
    plan = plan_recovery(holdings, exclude=tried)
    if further(history, places, tried):
        assert plan.sides
        return
    assert [c.manifest.save_id for c in plan.candidates] == [i for i in ids if i not in tried]
    assert tried <= {refusal.save_id for refusal in plan.refused}


@given(worlds())
def test_a_plan_is_plain_data_and_depends_on_nothing_else(world: tuple[History, list[Place]]):
    history, places = world
    holdings = holdings_of(history, places)
    plan = plan_recovery(holdings)
    assert plan == plan_recovery(list(holdings))
    assert pickle.loads(pickle.dumps(plan)) == plan
    as_json = json.loads(json.dumps(plan.to_json()))
    assert as_json == plan.to_json()
    assert (as_json["chosen"] is None) == (plan.chosen is None)


@given(worlds(), st.integers(0, 10_000), st.binary(max_size=60))
@example((History(), []), 0, b"")
def test_damaged_records_never_raise(
    world: tuple[History, list[Place]], position: int, junk: bytes
):
    """Bytes in holdings come from files; each may be cut, flipped or replaced."""
    history, places = world
    damaged = []
    for each in holdings_of(history, places):
        attempts = list(each.attempts)
        if attempts:
            record = bytearray(attempts[position % len(attempts)])
            record[position % len(record)] ^= 1 << position % 8
            attempts[position % len(attempts)] = bytes(record)
        tiers = []
        for tier in each.tiers:
            manifests = list(tier.manifests)
            if manifests:
                fact = manifests[position % len(manifests)]
                manifests[position % len(manifests)] = ManifestFact(
                    stream=fact.stream, save_id=fact.save_id, manifest=junk or None, error=None
                )
            tiers.append(replace_struct(tier, manifests=tuple(manifests)))
        damaged.append(replace_struct(each, attempts=(*attempts, junk), tiers=tuple(tiers)))
    plan = plan_recovery(damaged)
    assert plan.warnings
    on_line = {save.manifest.save_id for save in history.line()}
    if len(history.attempts) <= 1:
        assert {c.manifest.save_id for c in plan.candidates} <= on_line
    for candidate in plan.candidates:
        assert can_be_had(candidate.manifest, places)
    json.dumps(plan.to_json())


def replace_struct(struct, **changes):
    values = {name: getattr(struct, name) for name in struct.__struct_fields__}
    return type(struct)(**{**values, **changes})


# --- single cases -------------------------------------------------------------------------------


def one_save() -> History:
    history = History()
    history.start(None)
    history.save(history.attempts[0], 1)
    return history


def place(history: History, host: str = "a", tier: str = "memory", copy: Copy = INTACT) -> Place:
    manifests = {save.manifest.save_id: True for save in history.saves}
    segments = {ref.id: copy for save in history.saves for ref in save.manifest.segments}
    return Place(host, tier, True, manifests, segments, True)


def test_nothing_at_all():
    plan = plan_recovery([])
    assert (plan.chosen, plan.refused, plan.incomplete) == (None, (), ())


def test_two_manifests_with_one_save_id_are_both_refused():
    history = one_save()
    (here, there) = holdings_of(history, [place(history), place(history, "b")])
    forged = encode_manifest(replace_struct(history.saves[0].manifest, step=99))
    (tier,) = there.tiers
    fact = replace_struct(tier.manifests[0], manifest=forged)
    there = replace_struct(there, tiers=(replace_struct(tier, manifests=(fact,)),))
    plan = plan_recovery([here, there])
    assert plan.chosen is None
    assert "two different manifests" in plan.refused[0].reason


@pytest.mark.parametrize(
    "changes", [{"save_id": "a" * 32}, {"stream": "critic"}, {"namespace": "another"}]
)
def test_a_manifest_under_a_wrong_name_is_unreadable(changes: dict[str, str]):
    history = one_save()
    here, there = holdings_of(history, [place(history)])
    (tier,) = here.tiers
    wrong = encode_manifest(replace_struct(history.saves[0].manifest, **changes))
    fact = replace_struct(tier.manifests[0], manifest=wrong)
    here = replace_struct(here, tiers=(replace_struct(tier, manifests=(fact,)),))
    plan = plan_recovery([here, there])
    assert plan.chosen is None
    assert plan.refused[0].step is None


def test_reasons_name_tier_host_segment_and_what_is_wrong():
    history = one_save()
    places = [
        place(history, copy=("truncated", frozenset({1, 2}))),
        place(history, tier="nvme", copy=("bad blocks", frozenset({0}))),
        place(history, "b", copy=("other", frozenset())),
    ]
    places[2] = replace(places[2], has_plan=False)
    plan = plan_recovery(holdings_of(history, places))
    assert plan.chosen is not None, "block 0 is in memory, the rest on disk"
    places[0] = place(history, copy=("bad footer", frozenset({0})))
    (refusal,) = plan_recovery(holdings_of(history, places)).refused
    for text in ("segment 0", "blocks 0", "memory on a: damaged", "nvme on a: bad blocks 0",
                 "memory on b: holds another segment"):  # fmt: skip
        assert text in refusal.reason


def test_a_shared_tier_is_one_place_seen_through_a_host_that_reaches_it():
    history = one_save()
    first, second = holdings_of(history, [place(history, tier="nvme"), place(history, "b", "nvme")])
    shared = [replace_struct(h.tiers[0], scope="shared") for h in (first, second)]
    away = replace_struct(shared[0], available=False, error="no route", manifests=(), segments=())
    both = [replace_struct(h, tiers=(t,)) for h, t in zip((first, second), shared, strict=True)]
    plan = plan_recovery(both)
    assert plan.chosen is not None
    assert [source.host for source in plan.chosen.sources[0]] == ["a"]
    plan = plan_recovery([replace_struct(both[0], tiers=(away,)), both[1]])
    assert plan.chosen is not None
    assert [source.host for source in plan.chosen.sources[0]] == ["b"]
    assert plan.incomplete == ()


def test_other_streams_do_not_interfere():
    history = one_save()
    plan = plan_recovery(holdings_of(history, [place(history)]), stream="critic")
    assert (plan.chosen, plan.candidates, plan.refused, plan.abandoned) == (None, (), (), ())
