"""What retention never does, whatever is there."""

from __future__ import annotations

import dataclasses

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.policy.test_retention import MADE, STEP, as_steps, newest_first
from tieredckpt.config.schema import Best, Every, Keep
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.history import abandoned as abandoned_of
from tieredckpt.policy.history import candidates as candidates_of
from tieredckpt.policy.retention import RetentionPlan, protections, retain, size_of

replace = msgspec.structs.replace
ids = st.sets(st.sampled_from([m.save_id for m in MADE]))


@given(
    candidates=st.sets(st.integers(1, 12)),
    abandoned=st.sets(st.integers(1, 12)),
    last=st.integers(1, 6),
    protected=st.sets(st.integers(1, 12)),
)
def test_newest_n(candidates, abandoned, last, protected) -> None:
    abandoned -= candidates
    good, off = newest_first(*candidates), newest_first(*abandoned)
    busy = {MADE[step - 1].save_id: "it is in use" for step in protected}
    plan = retain(good, off, Keep(last=last), busy)
    keep, delete = as_steps(plan)
    assert sorted(keep + delete) == sorted(candidates | abandoned)
    assert {STEP[m.save_id] for m in good[:last]} <= set(keep)
    assert len([step for step in keep if step not in protected]) <= last
    assert delete == sorted(abandoned - set(keep)) + sorted(candidates - set(keep))


@given(candidates=st.sets(st.integers(1, 12)), abandoned=st.sets(st.integers(1, 12)))
def test_where_everything_is_kept_nothing_goes(candidates, abandoned) -> None:
    good, off = newest_first(*candidates), newest_first(*(abandoned - candidates))
    plan = retain(good, off, Keep(last=1, max_age_s=1, max_bytes=1, everything=True))
    assert (plan.delete, len(plan.keep)) == ((), len(good) + len(off))
    assert plan.reasons.keys() == {m.save_id for m in (*good, *off)}


everies = st.builds(Every, steps=st.integers(1, 9)) | st.builds(Every, seconds=st.integers(1, 50))
bests = st.builds(
    Best, metric=st.just("loss"), mode=st.sampled_from(["min", "max"]), n=st.integers(1, 3)
)
keeps = st.builds(
    Keep,
    last=st.integers(1, 4),
    every=st.none() | everies,
    max_age_s=st.none() | st.integers(1, 60),
    max_bytes=st.none() | st.integers(1, 40).map(lambda pages: pages * 4096),
    best=st.none() | bests,
)


@dataclasses.dataclass
class Held:
    """What a tier holds of a stream, newest first."""

    candidates: list[Manifest]
    abandoned: list[Manifest]
    protected: dict[str, str]
    bad: frozenset[str]
    now_s: float

    def plan(self, keep: Keep) -> RetentionPlan:
        return retain(
            self.candidates,
            self.abandoned,
            keep,
            self.protected,
            unrecoverable=self.bad,
            now_s=self.now_s,
        )

    def without(self, gone: tuple[str, ...]) -> Held:
        return dataclasses.replace(
            self,
            candidates=[m for m in self.candidates if m.save_id not in gone],
            abandoned=[m for m in self.abandoned if m.save_id not in gone],
        )

    def ids(self) -> set[str]:
        return {m.save_id for m in (*self.candidates, *self.abandoned)}


@st.composite
def changed(draw: st.DrawFn, manifest: Manifest) -> Manifest:
    """With any size, time, step and tag: clocks jump, and losses are no numbers."""
    ref = manifest.segments[0]
    pages = draw(st.integers(1, 8))
    loss = draw(st.sampled_from(["0.1", "0.2", "3", "nan", "inf", "", "x", None]))
    return replace(
        manifest,
        segments=(replace(ref, size=4096 * pages),),
        step=draw(st.integers(0, 30)),
        created_at_s=float(draw(st.integers(0, 100))),
        tags={} if loss is None else {"loss": loss},
    )


@st.composite
def helds(draw: st.DrawFn) -> Held:
    steps = draw(st.sets(st.integers(1, 12)))
    off = draw(st.sets(st.integers(1, 12))) - steps
    pinned, wanted, read = draw(ids), draw(ids), draw(ids)
    few = draw(st.sampled_from(["none", "some"]))
    protected = protections(
        pinned=dict.fromkeys(pinned, "for the paper"),
        wanted_by={save_id: ["s3"] for save_id in wanted},
        in_use=dict.fromkeys(read, "it is being restored"),
    )
    return Held(
        candidates=[draw(changed(m)) for m in newest_first(*steps)],
        abandoned=[draw(changed(m)) for m in newest_first(*off)],
        protected=protected if few == "some" else {},
        bad=frozenset(draw(ids)),
        now_s=float(draw(st.integers(0, 200))),
    )


@given(helds(), keeps)
def test_what_is_never_deleted(held: Held, keep: Keep) -> None:
    plan = held.plan(keep)
    gone = set(plan.delete)
    assert gone.isdisjoint(plan.keep)
    assert gone | set(plan.keep) == held.ids() == plan.reasons.keys()
    assert gone.isdisjoint(held.protected), "pinned, a source of another tier, or being read"
    good = [m for m in (*held.candidates, *held.abandoned) if m.save_id not in held.bad]
    assert gone.isdisjoint(m.save_id for m in good[:1]), "the newest recoverable"
    assert gone.isdisjoint(m.save_id for m in held.candidates[:1]), "the newest"
    assert all(plan.reasons.values())


@given(helds(), keeps, st.integers(0, 12))
def test_asking_again_deletes_nothing_more(held: Held, keep: Keep, stopped_after: int) -> None:
    plan = held.plan(keep)
    assert held.without(plan.delete).plan(keep).delete == ()
    # Interrupted: what is left of the plan is what is left to do, in the same order.
    done, left = plan.delete[:stopped_after], plan.delete[stopped_after:]
    assert set(held.without(done).plan(keep).delete) <= set(left)


@given(helds(), keeps, everies, bests, st.integers(0, 3))
def test_a_reason_more_to_stay_deletes_no_more(held, keep, every, best, more) -> None:
    """With ``max_bytes`` only without that limit: what else stays takes another one's room."""
    before = set(held.plan(keep).delete)
    limits_off = [{"max_bytes": None}]
    if keep.max_bytes is None:
        limits_off.append({"max_age_s": None})
    rules = [] if keep.max_bytes is not None else [{"last": keep.last + more}]
    if keep.max_bytes is None and keep.every is None:
        rules.append({"every": every})
    if keep.max_bytes is None and keep.best is None:
        rules.append({"best": best})
    for change in (*limits_off, *rules):
        assert set(held.plan(replace(keep, **change)).delete) <= before, change
    for save_id in held.ids():
        spared = held.protected | {save_id: "pinned: now"}
        after = dataclasses.replace(held, protected=spared).plan(keep)
        assert set(after.delete) == before - {save_id}, "and no other one goes in its place"


@given(helds(), keeps)
def test_limits_hold_for_what_is_not_spared(held: Held, keep: Keep) -> None:
    plan = held.plan(keep)
    by_id = {m.save_id: m for m in (*held.candidates, *held.abandoned)}
    spared = held.protected.keys() | {
        save_id for save_id, why in plan.reasons.items() if why.startswith("the newest")
    }
    if keep.max_bytes is not None:
        taken = sum(size_of(by_id[each]) for each in plan.keep if each not in spared)
        assert taken <= keep.max_bytes


@given(helds(), keeps)
def test_the_least_useful_go_first(held: Held, keep: Keep) -> None:
    delete = held.plan(keep).delete
    off = {m.save_id for m in held.abandoned}
    assert sorted(delete, key=lambda each: each not in off) == list(delete), "abandoned first"
    if keep.every is None and keep.best is None:
        age = [m.save_id for m in (*reversed(held.abandoned), *reversed(held.candidates))]
        assert sorted(delete, key=age.index) == list(delete), "then the oldest first"


def retain_stream(manifests: list[Manifest], keep: Keep) -> RetentionPlan:
    """What a tier holds, in any order."""
    line = candidates_of(manifests, [], "default")
    return retain(line, abandoned_of(manifests, [], "default"), keep)


@given(st.randoms(), keeps, st.sets(st.integers(0, 11)))
def test_the_order_of_what_is_asked_does_not_matter(random, keep, there) -> None:
    manifests = [MADE[index] for index in sorted(there)]
    expected = retain_stream(manifests, keep)
    for _ in range(3):
        random.shuffle(manifests)
        assert retain_stream([*manifests, *manifests[:2]], keep) == expected
