"""The time line in the few histories that a reader should be able to check by hand."""

from __future__ import annotations

import msgspec
import pytest

from tieredckpt.errors import NotFoundError, UsageError
from tieredckpt.format.manifest import (
    Ancestor,
    AttemptId,
    AttemptRecord,
    Followed,
    Manifest,
    SegmentRef,
    encode_attempt,
)
from tieredckpt.policy import history


def save_id(name: str) -> str:
    return name.encode().hex().rjust(32, "0")


def saves(record: AttemptRecord, *steps: int, stream: str = "default") -> list[Manifest]:
    """The saves of one attempt, in order; named by attempt and step."""
    base = history.base_of(record, stream)
    made: list[Manifest] = []
    for seq, step in enumerate(steps):
        made.append(
            Manifest(
                save_id=save_id(f"{stream[0]}{record.number}.{step}"),
                namespace="run",
                stream=stream,
                step=step,
                attempt=AttemptId(record.number, record.id),
                seq=seq,
                parent=made[-1].save_id if made else base.parent,
                lineage=base.lineage,
                plan="ab" * 16,
                tiers=(),
                segments=(SegmentRef("cd" * 16, 4096, "ef" * 16, "host"),),
                world_size=1,
                tags={},
                created_at_s=0.0,
            )
        )
    return made


def told(attempt: AttemptId) -> Followed:
    return Followed(attempt.number, attempt.id)


def start(
    attempts: list[AttemptRecord], manifests: list[Manifest], **bases: Manifest | None
) -> AttemptRecord:
    """An attempt of a run that knew all of these when it loaded, and follows their head."""
    return follow(f"{len(attempts) + 1:032x}", attempts, manifests, **bases)


def follow(
    attempt_id: str,
    attempts: list[AttemptRecord],
    manifests: list[Manifest],
    **bases: Manifest | None,
) -> AttemptRecord:
    chosen = {}
    for stream, base in bases.items():
        newest = history.head(manifests, attempts, stream)
        chosen[stream] = history.Base(
            save_id=base and base.save_id,
            newest=history.ancestry_of(newest) if newest is not None else (),
        )
    saved = history.saved_by(manifests)
    heads = tuple(
        Followed(each.number, each.id, saved=each.id in saved)
        for each in history.Chain(manifests, attempts).heads
    )
    return history.next_attempt(
        attempts, manifests, attempt_id, chosen, heads, 0.0, namespace="run", run="ab" * 16
    )


def steps(manifests: tuple[Manifest, ...]) -> list[int]:
    return [manifest.step for manifest in manifests]


def test_a_claim_that_turns_out_to_have_saved_is_a_side() -> None:
    """The second run saw that the first had begun, and none of its checkpoints."""
    first = start([], [], default=None)
    second = start([first], [], default=None)
    own = saves(second, 1)
    assert history.candidates(own, [first, second], "default") == tuple(own)

    both = own + saves(first, 5)
    chain = history.Chain(both, [first, second])
    assert {each.id for each in chain.heads} == {first.id, second.id}
    assert history.line(both, [first, second], "default") is None
    assert history.abandoned(both, [first, second], "default") == ()

    base = history.Base(save_id=own[0].save_id, newest=history.ancestry_of(own[0]))
    third = history.next_attempt(
        [first, second], both, f"{3:032x}", {"default": base},
        (Followed(2, second.id), Followed(1, first.id)), 0.0, namespace="run", run="ab" * 16,
    )  # fmt: skip
    known, after = [first, second, third], both + saves(third, 2)
    assert steps(history.candidates(after, known, "default")) == [2, 1]
    assert steps(history.branches(after, known, "default")) == [5]
    assert history.Chain(after, known).heads == (AttemptId(3, third.id),)


def test_a_stored_record_proves_saves_unless_it_came_with_a_load() -> None:
    first = start([], [], default=None)
    second = start([first], saves(first, 1), default=None)
    of_version_1 = msgspec.structs.replace(second, id="9" * 32, followed=())
    assert history.proven([first, second, of_version_1]) == {first.id, second.id}


@pytest.fixture
def rolled_back() -> tuple[list[AttemptRecord], list[Manifest]]:
    """Attempt 1 saved 80, 90, 100; attempt 2 went back to 80 and saved 85, 95."""
    first = start([], [], default=None)
    made = saves(first, 80, 90, 100)
    second = start([first], made, default=made[0])
    return [first, second], made + saves(second, 85, 95)


def test_nothing_known() -> None:
    assert history.candidates([], [], "default") == ()
    assert history.abandoned([], [], "default") == ()
    assert history.head([], [], "default") is None
    assert history.Chain([], []).heads == ()


def test_roll_back_abandons_what_came_after(rolled_back) -> None:
    attempts, manifests = rolled_back
    assert steps(history.candidates(manifests, attempts, "default")) == [95, 85, 80]
    assert steps(history.abandoned(manifests, attempts, "default")) == [100, 90]
    assert manifests[3].parent == manifests[0].save_id
    assert manifests[3].lineage == (Ancestor(1, "1".rjust(32, "0"), 0),)


def test_roll_back_holds_before_the_first_save(rolled_back) -> None:
    attempts, manifests = rolled_back
    assert steps(history.candidates(manifests[:3], attempts, "default")) == [80]


def test_what_was_passed_over_in_silence_is_left_behind() -> None:
    """After 80, 90 and 100 a run goes on from 80, and does not say that it agreed to that."""
    first = start([], [], default=None)
    made = saves(first, 80, 90, 100)
    newest = history.ancestry_of(made[2])
    base = history.Base(save_id=made[0].save_id, newest=newest, in_silence=True)
    second = history.next_attempt(
        [first], made, f"{2:032x}", {"default": base}, (Followed(1, first.id),), 0.0,
        namespace="run", run="cd" * 16,
    )  # fmt: skip
    known, after = [first, second], made + saves(second, 85)
    assert steps(history.candidates(after, known, "default")) == [85, 80]
    assert history.abandoned(after, known, "default") == ()
    assert steps(history.branches(after, known, "default")) == [100, 90]
    assert steps(history.left_behind(after, known, "default")) == [100, 90]
    # What a trainer saves afterwards that did not know that it was over is a branch, and no more.
    late = made + saves(second, 85) + saves(first, 0, 0, 0, 110)[3:]
    assert steps(history.branches(late, known, "default")) == [110, 100, 90]
    assert steps(history.left_behind(late, known, "default")) == [100, 90]
    agreed = start([first], made, default=made[0])
    after = made + saves(agreed, 85)
    assert steps(history.abandoned(after, [first, agreed], "default")) == [100, 90]
    assert history.left_behind(after, [first, agreed], "default") == ()


def test_abandoned_is_a_candidate_again_if_it_is_loaded(rolled_back) -> None:
    attempts, manifests = rolled_back
    attempts.append(start(attempts, manifests, default=manifests[2]))
    assert steps(history.candidates(manifests, attempts, "default")) == [100, 90, 80]
    assert steps(history.abandoned(manifests, attempts, "default")) == [95, 85]


def test_deleting_the_middle_does_not_cut_the_line(rolled_back) -> None:
    attempts, manifests = rolled_back
    third = start(attempts, manifests, default=manifests[4])
    kept = [manifests[0], *saves(third, 105)]
    assert steps(history.candidates(kept, [*attempts, third], "default")) == [105, 80]


def test_manifests_alone_suffice(rolled_back) -> None:
    _, manifests = rolled_back
    assert steps(history.candidates(manifests, [], "default")) == [95, 85, 80]


def test_the_same_manifest_from_two_tiers_is_one_candidate(rolled_back) -> None:
    attempts, manifests = rolled_back
    twice = history.candidates(manifests * 2, attempts * 2, "default")
    assert steps(twice) == [95, 85, 80]
    assert steps(history.abandoned(manifests * 2, attempts, "default")) == [100, 90]


def test_what_a_zombie_adds_is_no_candidate_and_not_abandoned_either(rolled_back) -> None:
    """Who went back to 80 knew of 100, and not of 110: nobody may delete that for them."""
    attempts, manifests = rolled_back
    slipped = saves(attempts[0], 80, 90, 100, 110, 120)[3:]
    found = history.candidates(manifests + slipped, attempts, "default")
    assert steps(found) == [95, 85, 80]
    assert steps(history.abandoned(manifests + slipped, attempts, "default")) == [100, 90]


@pytest.mark.parametrize("same_run", [True, False])
def test_a_save_that_slips_into_a_stream_that_was_only_inherited(same_run: bool) -> None:
    """It is a zombie's, but of other ranks of the run, which save that stream, not."""
    first = start([], [], actor=None)
    if not same_run:
        first = msgspec.structs.replace(first, run="cd" * 16)
    critic = saves(first, 1, 2, stream="critic")
    second = start([first], critic, actor=None)
    slipped = saves(first, 1, 2, 3, stream="critic")
    found = steps(history.candidates(slipped, [first, second], "critic"))
    assert found == ([3, 2, 1] if same_run else [2, 1])
    later = saves(second, 4, stream="critic")
    found = steps(history.candidates(slipped + later, [first, second], "critic"))
    assert found == ([4, 3, 2, 1] if same_run else [4, 2, 1])


def test_begin_anew_abandons_all(rolled_back) -> None:
    attempts, manifests = rolled_back
    attempts.append(start(attempts, manifests, default=None))
    assert history.candidates(manifests, attempts, "default") == ()
    assert len(history.abandoned(manifests, attempts, "default")) == 5


def test_streams_roll_back_on_their_own() -> None:
    first = start([], [], actor=None, critic=None)
    made = saves(first, 10, 20, stream="actor") + saves(first, 10, 20, stream="critic")
    second = start([first], made, actor=made[0])
    assert steps(history.candidates(made, [first, second], "actor")) == [10]
    assert steps(history.candidates(made, [first, second], "critic")) == [20, 10]
    assert [base.stream for base in second.bases] == ["actor", "critic"]
    assert history.base_of(second, "critic").parent_step == 20


def test_without_the_record_nothing_is_abandoned() -> None:
    """Attempt 2 took both back to 10; only its save of the actor tells that it existed."""
    first = start([], [], actor=None, critic=None)
    made = saves(first, 10, 20, stream="actor") + saves(first, 10, 20, stream="critic")
    second = start([first], made, actor=made[0], critic=made[2])
    made += saves(second, 15, stream="actor")
    assert steps(history.candidates(made, [first], "actor")) == [15, 10]
    assert steps(history.candidates(made, [first], "critic")) == [20, 10]
    assert history.abandoned(made, [first], "actor") == ()
    assert history.abandoned(made, [first], "critic") == ()
    assert steps(history.abandoned(made, [first, second], "actor")) == [20]
    assert steps(history.candidates(made, [first, second], "critic")) == [10]


def test_a_stream_found_later_goes_on_as_it_was() -> None:
    """The tier with the critic's checkpoints did not answer while attempt 2 was opened."""
    first = start([], [], actor=None)
    critic = saves(first, 10, 20, stream="critic")
    second = start([first], [], actor=None)
    assert steps(history.candidates(critic, [first, second], "critic")) == [20, 10]
    assert history.abandoned(critic, [first, second], "critic") == ()


@pytest.fixture
def forked() -> tuple[list[AttemptRecord], list[Manifest]]:
    """After 10 one side saved 20, and another one, restarted twice, 30 and 40."""
    first = start([], [], default=None)
    made = saves(first, 10)
    one = follow("a" * 32, [first], made, default=made[0])
    two = follow("b" * 32, [first], made, default=made[0])
    there = saves(two, 30)
    three = follow("c" * 32, [first, two], [*made, *there], default=there[0])
    return [first, one, two, three], [*made, *saves(one, 20), *there, *saves(three, 40)]


def test_at_a_fork_nothing_is_chosen_and_nothing_abandoned(forked) -> None:
    attempts, manifests = forked
    named = {each.save_id for each in manifests}
    assert history.candidates(manifests, attempts, "default") == ()
    assert history.abandoned(manifests, attempts, "default", named) == ()
    assert len(history.branches(manifests, attempts, "default")) == len(manifests)
    chain = history.Chain(manifests, attempts)
    sides = chain.sides(manifests, "default")
    lines = [steps(history.on_line(side, manifests)) for side in sides]
    assert sorted(lines) == [[20, 10], [40, 30, 10]]
    assert {each.id for each in chain.heads} == {"a" * 32, "c" * 32}


def test_who_follows_both_ends_the_fork_and_the_other_side_stays(forked) -> None:
    attempts, manifests = forked
    heads = history.Chain(manifests, attempts).heads
    ours = next(each for each in heads if each.id == "a" * 32)
    aside = next(each for each in heads if each.id == "c" * 32)
    settled = history.next_attempt(
        attempts,
        manifests,
        "d" * 32,
        {},
        (told(ours), told(aside)),
        0.0,
        namespace="run",
        run="ab" * 16,
    )
    assert settled.number == aside.number + 1
    attempts, manifests = [*attempts, settled], [*manifests, *saves(settled, 50)]
    assert steps(history.candidates(manifests, attempts, "default")) == [50, 20, 10]
    assert history.abandoned(manifests, attempts, "default") == ()
    named = {m.save_id for m in manifests if m.step in (20, 30)}
    assert steps(history.abandoned(manifests, attempts, "default", named)) == [30]
    assert steps(history.branches(manifests, attempts, "default")) == [40, 30]
    assert history.left_behind(manifests, attempts, "default") == (), "another side's"
    assert steps(history.branches(manifests, attempts, "default", named)) == [40]
    chain = history.Chain(manifests, attempts)
    assert [each.id for each in chain.after("c" * 32)] == ["d" * 32], "it is over for that side"


def test_a_side_without_checkpoints_of_the_stream_is_no_side(forked) -> None:
    attempts, manifests = forked
    here = [each for each in manifests if each.attempt.id not in ("b" * 32, "c" * 32)]
    assert history.candidates(here, attempts, "default") == (), "unless it has saved, as it said"
    counted = history.with_saves(attempts, history.saved_by(here))
    assert steps(history.candidates(here, counted, "default")) == [20, 10]


def test_a_huge_number_is_not_counted_on() -> None:
    huge = AttemptRecord(
        namespace="run", number=2**63 - 1, id="f" * 32, run="cd" * 16, bases=(), created_at_s=0.0
    )
    first = start([], [], default=None)
    chain = history.Chain([], [first, huge])
    assert len(chain.heads) == 2
    settled = history.next_attempt(
        [first, huge],
        [],
        "d" * 32,
        {},
        tuple(map(told, chain.heads)),
        0.0,
        namespace="run",
        run="ab" * 16,
    )
    assert settled.number == 2


def test_a_number_is_above_all_that_is_known(rolled_back) -> None:
    attempts, _manifests = rolled_back
    assert start(attempts, [], default=None).number == 3
    assert start([], [], default=None).number == 1


def test_base_that_is_gone_or_of_another_stream(rolled_back) -> None:
    attempts, manifests = rolled_back
    with pytest.raises(NotFoundError, match="does not exist any more") as gone:
        start(attempts, manifests[1:], default=manifests[0])
    assert gone.value.key == manifests[0].save_id
    with pytest.raises(UsageError, match="belongs to stream 'default', not 'actor'"):
        start(attempts, manifests, actor=manifests[0])


def test_lineage_is_bounded_and_encodes() -> None:
    attempts: list[AttemptRecord] = []
    newest: list[Manifest] = []
    for _ in range(history.LINEAGE_MAX + 20):
        record = start(attempts[-1:], newest, default=newest[0] if newest else None)
        record = AttemptRecord(
            namespace="run", number=record.number, id=f"{record.number:032x}",
            run=record.run, bases=record.bases, created_at_s=0.0, followed=record.followed,
        )  # fmt: skip
        attempts.append(record)
        newest = saves(record, record.number)
    lineage = history.base_of(attempts[-1], "default").lineage
    assert len(lineage) == history.LINEAGE_MAX
    assert lineage[-1].number == attempts[-2].number
    assert len(encode_attempt(attempts[-1])) < 200_000
