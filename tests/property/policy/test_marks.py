"""Marks that are taken back: what hosts know in common decides, in whatever order it came."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.saves import manifest_of, record
from tieredckpt.format.records import SaveRecord
from tieredckpt.policy.retention import standing_marks

SAVES = [manifest_of(seq, ["h0"]) for seq in range(2)]


@st.composite
def histories(draw) -> list[SaveRecord]:
    """What people say one after another, each knowing any part of what was said before."""
    said: list[SaveRecord] = []
    for _ in range(draw(st.integers(0, 10))):
        about = draw(st.sampled_from(SAVES))
        kind = draw(st.sampled_from(["bad", "bad", "good", "pin", "order"]))
        known = [each for each in said if draw(st.booleans())]
        marks = tuple(each.id for each in standing_marks(known) if each.save_id == about.save_id)
        said.append(record(about, kind, segments=marks if kind == "good" else ()))
    return said


@given(histories(), histories(), histories(), st.randoms(use_true_random=False))
def test_merging_is_commutative_associative_and_idempotent(one, two, three, random) -> None:
    """Records are merged by union; what stands is the same however that was done."""
    whole = [*one, *two, *three]
    stands = standing_marks(whole)
    mixed = [*whole, *two]
    random.shuffle(mixed)
    assert standing_marks(mixed) == stands
    assert standing_marks([*three, *one, *two]) == stands
    # Marks of histories that know nothing of each other do not touch each other.
    assert set(stands) == {each for part in (one, two, three) for each in standing_marks(part)}


@given(histories())
def test_a_mark_stands_until_somebody_who_knew_of_it_takes_it_back(said) -> None:
    marks = {each.id: each for each in said if each.kind == "bad"}
    ended = {i for each in said if each.kind == "good" for i in each.segments}
    assert {each.id for each in standing_marks(said)} == marks.keys() - ended
    for about in SAVES:
        known = [each for each in standing_marks(said) if each.save_id == about.save_id]
        good = record(about, "good", segments=tuple(each.id for each in known))
        assert not {each.save_id for each in standing_marks([*said, good])} & {about.save_id}
        # Meant at the same time, or afterwards: it is not overruled.
        again = record(about, "bad")
        assert again in standing_marks([*said, good, again])


def test_no_record_speaks_of_another_checkpoint() -> None:
    mark = record(SAVES[0], "bad")
    assert standing_marks([mark, record(SAVES[1], "good", segments=(mark.id,))]) == (mark,)
    assert standing_marks([mark, record(SAVES[0], "good", segments=(mark.id,))]) == ()
