"""Parts of wrappers: no name collides, and the pieces of any mixture are put together again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.property.format.test_plan_merge import cut, tensor
from tieredckpt.errors import IntegrityError, UsageError
from tieredckpt.format.parts import MARK, Kind, PartName, join_parts, parse_part
from tieredckpt.format.plain import encode_plain
from tieredckpt.format.plan import (
    BytesEntry,
    Chunk,
    Plan,
    TensorEntry,
    build_plan,
    decode_plan,
    encode_plan,
)
from tieredckpt.format.plan_merge import merge_plans

TEXTS = st.sampled_from(["a", ".", ":", "0", ",", "\n", MARK[:5], MARK[5:]])
KEYS = st.lists(TEXTS, max_size=9).map("".join).filter(lambda key: MARK not in key)
NAMES = st.builds(
    PartName,
    KEYS,
    st.lists(st.sampled_from(["codes", "a", "_b1"]), min_size=1, max_size=3).map(".".join),
    st.lists(st.integers(0, 1 << 40), max_size=3).map(tuple),
    st.binary(max_size=3),
)


@given(NAMES, NAMES, KEYS)
def test_a_part_has_a_name_of_its_own(one: PartName, other: PartName, key: str):
    assert parse_part(str(one)) == one
    assert (str(one) == str(other)) == (one == other)
    assert parse_part(key) is None
    assert parse_part(f"{key}{MARK}codes:{'9' * 5000}:") is None


def kind(shape: Any, sizes: Any, context: Any = True) -> bytes:
    tree = ("Quantized", tuple(sizes), context, {"codes": None, "scale": None})
    return Kind("bfloat16", tuple(shape), tree).encode()


def parts(shape: Any, box: Any, encoded: bytes) -> list[TensorEntry]:
    names = [PartName("x", "codes", box[0], encoded), PartName("x", "scale", box[0])]
    return [tensor(str(name), (5,), [((0,), (5,))], item) for item, name in enumerate(names)]


@st.composite
def pieces(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Any, bool]]]:
    """A tensor cut into boxes; of each, whether it is a wrapper."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    return shape, [(box, draw(st.booleans())) for box in draw(cut(shape))]


def plan_of(shape: Any, boxes: Any) -> Plan:
    plain = [box for box, is_wrapper in boxes if not is_wrapper]
    entries: list[Any] = [tensor("x", shape, plain, 10)] if plain else []
    for box, is_wrapper in boxes:
        if is_wrapper:
            entries += parts(shape, box, kind(shape, box[1]))
    return build_plan([*entries, BytesEntry("y", 0, 0)], structures=[bytes(16)])


def joined(plan: Plan) -> Any:
    return join_parts(decode_plan(encode_plan(plan)).entries())


@given(pieces())
def test_pieces_are_put_together(drawn: Any):
    shape, boxes = drawn
    entries, found = joined(plan_of(shape, boxes))
    whole, value = sorted(entries, key=lambda each: each.name)
    assert value.name == "y"
    assert (whole.name, whole.shape) == ("x", shape)
    assert sorted(each[:2] for each in whole.chunks) == sorted(box for box, _ in boxes)
    assert {at for _, at in found} == {box[0] for box, is_wrapper in boxes if is_wrapper}
    for piece in found.values():
        assert piece.kind.sizes == piece.chunk.sizes
        assert [*piece.names] == ["codes", "scale"]


@given(pieces(), st.data())
def test_ranks_that_plan_alone_leave_no_hole_in_a_wrapper(drawn: Any, data: st.DataObject):
    shape, boxes = drawn
    of_ranks = [plan_of(shape, [box]) for box in boxes]
    entries, found = joined(merge_plans(of_ranks))
    whole = next(each for each in entries if each.name == "x")
    assert sorted(each[:2] for each in whole.chunks) == sorted(box for box, _ in boxes)
    assert len(found) == sum(is_wrapper for _, is_wrapper in boxes)
    lost = data.draw(st.integers(0, len(boxes) - 1))
    if len(boxes) > 1:
        with pytest.raises(UsageError, match=r"the pieces of 'x' have .* saved by all of its rank"):
            merge_plans(of_ranks[:lost] + of_ranks[lost + 1 :])


def test_of_two_kinds_of_one_piece_the_first_counts():
    box = ((0,), (4,))
    mine = parts((4,), box, kind((4,), (4,)))
    theirs = parts((4,), box, kind((4,), (4,), False))
    entries, found = join_parts([*mine, theirs[0]])
    assert [each.name for each in entries] == ["x"]
    [piece] = found.values()
    assert piece.kind.tree[2] is True
    assert [*piece.names.values()] == [each.name for each in mine]


@pytest.mark.parametrize(
    "damage",
    ["no kind", "not plain", "not a kind", "outside", "bytes", "dims", "value", "cut", "no chunk"],
)
def test_malformed_parts_are_refused(damage: str):
    box = ((2,), (2,))
    found = parts((4,), box, kind((4,), (2,)))
    twice = msgspec.structs.replace(found[0], chunks=found[0].chunks * 2)  # as a rebuilt plan has
    assert join_parts([twice, found[1]]) == join_parts(found)
    entries: list[Any] = [*found]
    if damage == "no kind":
        del entries[0]
    elif damage == "bytes":
        entries[0] = BytesEntry(found[0].name, 0, 0)
    elif damage == "dims":
        entries.append(tensor("x", (2, 2), [((0, 0), (1, 2))], 5))
    elif damage == "value":
        entries.append(BytesEntry("x", 0, 0))
    elif damage in ("cut", "no chunk"):
        chunks = (*found[0].chunks, Chunk((0,), (1,), 0, 9)) if damage == "cut" else ()
        entries[0] = msgspec.structs.replace(found[0], chunks=chunks)
    else:
        data = b"\xc1" if damage == "not plain" else encode_plain([("float32", (4,))])
        entries = [*parts((4,), box, kind((3,), (2,)) if damage == "outside" else data)]
    with pytest.raises(IntegrityError):
        join_parts(entries)
