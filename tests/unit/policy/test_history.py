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


def test_roll_back_abandons_what_came_after(rolled_back) -> None:
    attempts, manifests = rolled_back
    assert steps(history.candidates(manifests, attempts, "default")) == [95, 85, 80]
    assert steps(history.abandoned(manifests, attempts, "default")) == [100, 90]
    assert manifests[3].parent == manifests[0].save_id
    assert manifests[3].lineage == (Ancestor(1, "1".rjust(32, "0"), 0),)


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


def test_base_that_is_gone_or_of_another_stream(rolled_back) -> None:
    attempts, manifests = rolled_back
    with pytest.raises(NotFoundError, match="does not exist any more") as gone:
        start(attempts, manifests[1:], default=manifests[0])
    assert gone.value.key == manifests[0].save_id
    with pytest.raises(UsageError, match="belongs to stream 'default', not 'actor'"):
        start(attempts, manifests, actor=manifests[0])


def test_lineage_is_bounded_and_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LINEAGE_MAX", history.LINEAGE_MAX // 8)
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
    assert len(encode_attempt(attempts[-1])) < 25_000
