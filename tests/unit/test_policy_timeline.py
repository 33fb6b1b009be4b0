"""The time line in the few histories that a reader should be able to check by hand."""

from __future__ import annotations

import pytest

from tieredckpt.errors import NotFoundError, UsageError
from tieredckpt.format.manifest import (
    Ancestor,
    AttemptId,
    AttemptRecord,
    Manifest,
    SegmentRef,
    encode_attempt,
)
from tieredckpt.policy import timeline


def save_id(name: str) -> str:
    return name.encode().hex().rjust(32, "0")


def saves(record: AttemptRecord, *steps: int, stream: str = "default") -> list[Manifest]:
    """The saves of one attempt, in order; named by attempt and step."""
    base = timeline.base_of(record, stream)
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


def start(
    attempts: list[AttemptRecord], manifests: list[Manifest], **bases: Manifest | None
) -> AttemptRecord:
    return timeline.next_attempt(
        attempts,
        manifests,
        f"{len(attempts) + 1:032x}",
        {stream: base and base.save_id for stream, base in bases.items()},
        0.0,
        namespace="run",
        run="ab" * 16,
    )


def steps(manifests: tuple[Manifest, ...]) -> list[int]:
    return [manifest.step for manifest in manifests]


@pytest.fixture
def rolled_back() -> tuple[list[AttemptRecord], list[Manifest]]:
    """Attempt 1 saved 80, 90, 100; attempt 2 went back to 80 and saved 85, 95."""
    first = start([], [], default=None)
    made = saves(first, 80, 90, 100)
    second = start([first], made, default=made[0])
    return [first, second], made + saves(second, 85, 95)


def test_nothing_known() -> None:
    assert timeline.candidates([], [], "default") == ()
    assert timeline.abandoned([], [], "default") == ()
    assert timeline.head([], [], "default") is None
    assert timeline.newest_attempt([], []) is None


def test_roll_back_abandons_what_came_after(rolled_back) -> None:
    attempts, manifests = rolled_back
    assert steps(timeline.candidates(manifests, attempts, "default")) == [95, 85, 80]
    assert steps(timeline.abandoned(manifests, attempts, "default")) == [100, 90]
    assert manifests[3].parent == manifests[0].save_id
    assert manifests[3].lineage == (Ancestor(1, "1".rjust(32, "0"), 0),)


def test_roll_back_holds_before_the_first_save(rolled_back) -> None:
    attempts, manifests = rolled_back
    assert steps(timeline.candidates(manifests[:3], attempts, "default")) == [80]


def test_abandoned_is_a_candidate_again_if_it_is_loaded(rolled_back) -> None:
    attempts, manifests = rolled_back
    attempts.append(start(attempts, manifests, default=manifests[2]))
    assert steps(timeline.candidates(manifests, attempts, "default")) == [100, 90, 80]
    assert steps(timeline.abandoned(manifests, attempts, "default")) == [95, 85]


def test_deleting_the_middle_does_not_cut_the_line(rolled_back) -> None:
    attempts, manifests = rolled_back
    third = start(attempts, manifests, default=manifests[4])
    kept = [manifests[0], *saves(third, 105)]
    assert steps(timeline.candidates(kept, [*attempts, third], "default")) == [105, 80]


def test_manifests_alone_suffice(rolled_back) -> None:
    _, manifests = rolled_back
    assert steps(timeline.candidates(manifests, [], "default")) == [95, 85, 80]


def test_the_same_manifest_from_two_tiers_is_one_candidate(rolled_back) -> None:
    attempts, manifests = rolled_back
    twice = timeline.candidates(manifests * 2, attempts * 2, "default")
    assert steps(twice) == [95, 85, 80]
    assert steps(timeline.abandoned(manifests * 2, attempts, "default")) == [100, 90]


def test_zombie_that_slips_through_is_abandoned(rolled_back) -> None:
    attempts, manifests = rolled_back
    slipped = saves(attempts[0], 80, 90, 100, 110, 120)[3:]
    found = timeline.candidates(manifests + slipped, attempts, "default")
    assert steps(found) == [95, 85, 80]
    assert steps(timeline.abandoned(manifests + slipped, attempts, "default")) == [
        120, 110, 100, 90,
    ]  # fmt: skip


def test_zombie_is_abandoned_in_a_stream_that_was_only_inherited() -> None:
    first = start([], [], actor=None)
    critic = saves(first, 1, 2, stream="critic")
    second = start([first], critic, actor=None)
    slipped = saves(first, 1, 2, 3, stream="critic")
    assert steps(timeline.candidates(slipped, [first, second], "critic")) == [2, 1]


def test_begin_anew_abandons_all(rolled_back) -> None:
    attempts, manifests = rolled_back
    attempts.append(start(attempts, manifests, default=None))
    assert timeline.candidates(manifests, attempts, "default") == ()
    assert len(timeline.abandoned(manifests, attempts, "default")) == 5


def test_streams_roll_back_on_their_own() -> None:
    first = start([], [], actor=None, critic=None)
    made = saves(first, 10, 20, stream="actor") + saves(first, 10, 20, stream="critic")
    second = start([first], made, actor=made[0])
    assert steps(timeline.candidates(made, [first, second], "actor")) == [10]
    assert steps(timeline.candidates(made, [first, second], "critic")) == [20, 10]
    assert [base.stream for base in second.bases] == ["actor", "critic"]
    assert timeline.base_of(second, "critic").parent_step == 20


def test_lost_record_leaves_a_stream_without_saves_uncertain() -> None:
    """Attempt 2 took both back to 10; only its save of the actor tells that it existed."""
    first = start([], [], actor=None, critic=None)
    made = saves(first, 10, 20, stream="actor") + saves(first, 10, 20, stream="critic")
    second = start([first], made, actor=made[0], critic=made[2])
    made += saves(second, 15, stream="actor")
    assert steps(timeline.candidates(made, [first], "actor")) == [15, 10]
    assert timeline.line(made, [first], "actor").certain
    assert not timeline.line(made, [first], "critic").certain
    assert steps(timeline.candidates(made, [first], "critic")) == [20, 10]
    assert timeline.abandoned(made, [first], "critic") == ()
    third = start([first], made, actor=None)
    assert [base.stream for base in third.bases] == ["actor"], "it must stay visibly uncertain"


def test_a_stream_found_later_goes_on_as_it_was() -> None:
    """The tier with the critic's checkpoints did not answer while attempt 2 was opened."""
    first = start([], [], actor=None)
    critic = saves(first, 10, 20, stream="critic")
    second = start([first], [], actor=None)
    assert steps(timeline.candidates(critic, [first, second], "critic")) == [20, 10]
    assert timeline.abandoned(critic, [first, second], "critic") == ()
    assert not timeline.line(critic, [first, second], "critic").certain


def test_two_claimants_of_one_number_do_not_mix() -> None:
    first = start([], [], default=None)
    made = saves(first, 10)
    claims = [
        timeline.next_attempt([first], made, id_ * 32, {"default": made[0].save_id}, 0.0,
                              namespace="run", run="ab" * 16)
        for id_ in "ab"
    ]  # fmt: skip
    both = made + saves(claims[0], 20) + saves(claims[1], 30)
    assert claims[0].number == claims[1].number == 2
    assert steps(timeline.candidates(both, [first, *claims], "default")) == [30, 10]


def test_a_number_is_above_all_that_is_known(rolled_back) -> None:
    attempts, manifests = rolled_back
    assert start(attempts, [], default=None).number == 3
    assert start([], manifests, default=None).number == 3
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
    for _ in range(timeline.LINEAGE_MAX + 20):
        record = start(attempts[-1:], newest, default=newest[0] if newest else None)
        record = AttemptRecord(
            namespace="run", number=record.number, id=f"{record.number:032x}",
            run=record.run, bases=record.bases, created_at_s=0.0,
        )  # fmt: skip
        attempts.append(record)
        newest = saves(record, record.number)
    lineage = timeline.base_of(attempts[-1], "default").lineage
    assert len(lineage) == timeline.LINEAGE_MAX
    assert lineage[-1].number == attempts[-2].number
    assert len(encode_attempt(attempts[-1])) < 200_000
