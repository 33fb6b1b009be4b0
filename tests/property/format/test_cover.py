"""The check that pieces make up their tensors agrees with counting each element."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.property.format.test_plan_merge import Box, cut, tensor
from tieredckpt.errors import UsageError
from tieredckpt.format.cover import check_cover
from tieredckpt.format.plan import Plan, build_plan


@st.composite
def some_pieces(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor and boxes in it: a cut of it, of which pieces were lost, repeated or moved."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    boxes = draw(cut(shape))
    for _ in range(draw(st.integers(0, 3))):
        number = draw(st.integers(0, len(boxes)))
        if number < len(boxes) and draw(st.booleans()):
            del boxes[number]
            continue
        at = tuple(draw(st.integers(0, size)) for size in shape)
        ends = (draw(st.integers(0, size - low)) for low, size in zip(at, shape, strict=True))
        boxes.insert(number, draw(st.sampled_from([*boxes, (at, tuple(ends))])))
    return shape, boxes


def plan_of(tensors: Sequence[tuple[tuple[int, ...], list[Box]]]) -> Plan:
    entries = [tensor(str(n), shape, boxes, 0) for n, (shape, boxes) in enumerate(tensors)]
    return build_plan(entries, structures=[bytes(16)])


def counts(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """How often each element is saved."""
    found = np.zeros(shape, int)
    for at, sizes in boxes:
        found[tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))] += 1
    return found


@given(st.lists(some_pieces(), max_size=4))
def test_it_agrees_with_counting(tensors: list[tuple[tuple[int, ...], list[Box]]]):
    bad = [str(number) for number, each in enumerate(tensors) if not (counts(*each) == 1).all()]
    try:
        check_cover(plan_of(tensors))
        refused = None
    except UsageError as error:
        refused = error.state_key
    assert refused == (bad[0] if bad else None)


def test_two_pieces_at_one_place_leave_a_hole():
    halves: list[Box] = [((0,), (8,)), ((0,), (8,))]
    with pytest.raises(UsageError, match="overlapping pieces of '0', which leave a hole"):
        check_cover(plan_of([((16,), halves)]))


def test_places_beyond_32_bits_and_many_dimensions():
    far = 1 << 62
    check_cover(plan_of([((2 * far - 1,), [((0,), (far,)), ((far,), (far - 1,))])]))
    deep = (2,) * 40
    halves: list[Box] = [((at, *[0] * 39), (1, *[2] * 39)) for at in range(2)]
    check_cover(plan_of([(deep, halves)]))
    with pytest.raises(UsageError, match="overlapping"):
        check_cover(plan_of([(deep, halves[:1] * 2)]))
