"""Plans that ranks make alone, merged, are the plan that they would have made together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.format.samples import plan_id
from tieredckpt.errors import IntegrityError, UsageError
from tieredckpt.format.nested import decode_nested, nested_of
from tieredckpt.format.plain import decode_plain, encode_plain
from tieredckpt.format.plan import (
    BytesEntry,
    Chunk,
    Entry,
    Plan,
    TensorEntry,
    build_plan,
    decode_plan,
    encode_plan,
)
from tieredckpt.format.plan_merge import merge_plans

Box = tuple[tuple[int, ...], tuple[int, ...]]


def tensor(name: str, shape: Sequence[int], boxes: Sequence[Box], first_item: int) -> TensorEntry:
    chunks = tuple(Chunk(*box, 0, first_item + n) for n, box in enumerate(boxes))
    return TensorEntry(
        name, "float32", "strided", False, "contiguous_format", False, tuple(shape), chunks
    )


@st.composite
def cut(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut into boxes that cover it."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):
        number = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[number]
        dims = [d for d, size in enumerate(sizes) if size > 1]
        if not dims:
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, sizes[dim] - 1))
        low = (*sizes[:dim], at, *sizes[dim + 1 :])
        high = (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])
        moved = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        boxes[number : number + 1] = [(offsets, low), (moved, high)]
    return boxes


@st.composite
def states(draw: st.DrawFn) -> list[list[tuple[str, Any]]]:
    """Per rank, what it saves: (name, (shape, boxes)) or (name, None) for bytes.

    Each box is on at least one rank, replicated ones on several.
    """
    world = draw(st.integers(1, 4))
    ranks: list[list[tuple[str, Any]]] = [[] for _ in range(world)]
    some = st.sets(st.integers(0, world - 1), min_size=1)
    for name in draw(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=5)):
        if draw(st.booleans()):
            for rank in draw(some):
                ranks[rank].append((name, None))
            continue
        shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
        mine: dict[int, list[Box]] = {}
        for box in draw(cut(shape)):
            for rank in draw(some):
                mine.setdefault(rank, []).append(box)
        for rank, boxes in mine.items():
            ranks[rank].append((name, (shape, draw(st.permutations(boxes)))))
    return [draw(st.permutations(rank)) for rank in ranks]


def part_of(rank: int, saved: Sequence[tuple[str, Any]]) -> Plan:
    """What a rank contributes: its items in one segment, tensors before bytes."""
    entries: list[Entry] = []
    item = 0
    blobs = sum(what is not None and len(what[1]) for _, what in saved)
    for name, what in saved:
        if what is None:
            entries.append(BytesEntry(name, 0, blobs))
            blobs += 1
        else:
            entries.append(tensor(name, what[0], what[1], item))
            item += len(what[1])
    return build_plan(
        entries,
        structures=[bytes([rank]) * 16] if entries else [],
        planner_data=encode_plain({name: (name, rank) for name, _ in saved}),
    )


@given(states())
def test_merging_is_planning_together(state: list[list[tuple[str, Any]]]):
    parts = [part_of(rank, saved) for rank, saved in enumerate(state)]
    # What is on the wire is what is merged.
    merged = merge_plans([decode_plan(encode_plan(part)) for part in parts])
    ordinal = {rank: n for n, rank in enumerate(r for r, s in enumerate(state) if s)}
    order = list(dict.fromkeys(name for saved in state for name, _ in saved))
    assert list(merged.names) == order
    assert merged.structures == tuple(bytes([rank]) * 16 for rank in ordinal)
    found = {entry.name: entry for entry in merged.entries()}
    for name, entry in found.items():
        owners = [(r, dict(saved)[name]) for r, saved in enumerate(state) if name in dict(saved)]
        lowest = {e.name: e for e in parts[owners[0][0]].entries()}[name]
        if isinstance(entry, BytesEntry):
            assert isinstance(lowest, BytesEntry)
            assert (entry.segment, entry.item) == (ordinal[owners[0][0]], lowest.item)
            continue
        # Each box once, where the lowest rank that has it wrote it, in the order of the ranks.
        wanted: dict[Box, tuple[int, int]] = {}
        for rank, _ in owners:
            own = {e.name: e for e in parts[rank].entries()}[name]
            assert isinstance(own, TensorEntry)
            for offsets, sizes, _, item in own.chunks:
                wanted.setdefault((offsets, sizes), (ordinal[rank], item))
        assert [((c.offsets, c.sizes), (c.segment, c.item)) for c in entry.chunks] == list(
            wanted.items()
        )
        assert sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.shape)
    mappings = decode_plain(merged.planner_data)
    assert mappings == {
        name: (name, min(r for r, saved in enumerate(state) if name in dict(saved)))
        for name in order
    }


@given(states(), st.data())
def test_a_missing_piece_is_refused(state: list[list[tuple[str, Any]]], data: st.DataObject):
    """A rank that is left out either had nothing of its own, or the merge says what is missing."""
    gone = data.draw(st.integers(0, len(state) - 1))
    left = [saved if rank != gone else [] for rank, saved in enumerate(state)]
    boxes = [
        {(name, box) for saved in each for name, what in saved if what for box in what[1]}
        for each in (state, left)
    ]
    names = {name for saved in left for name, _ in saved}
    parts = [part_of(rank, saved) for rank, saved in enumerate(left)]
    if {pair for pair in boxes[0] - boxes[1] if pair[0] in names}:
        with pytest.raises(UsageError, match="must be saved by all of its ranks"):
            merge_plans(parts)
    else:
        merge_plans(parts)


def two(**change: Any) -> list[Plan]:
    halves = [tensor("w", (4, 2), [((2 * rank, 0), (2, 2))], 0) for rank in range(2)]
    fields = {name: getattr(halves[1], name) for name in TensorEntry.__struct_fields__}
    halves[1] = TensorEntry(**{**fields, **change})
    return [build_plan([half], structures=[bytes(16)]) for half in halves]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"shape": (5, 2)},
        {"requires_grad": True},
        {"memory_format": "preserve_format"},
        {"pin_memory": True},
        {"layout": "sparse_coo"},
    ],
)
def test_ranks_that_differ(change: dict[str, Any]):
    assert plan_id(merge_plans(two())) == plan_id(merge_plans(two()))
    with pytest.raises(UsageError, match=f"same 'w'.*{next(iter(change))}") as caught:
        merge_plans(two(**change))
    assert caught.value.state_key == "w"


def test_pieces_that_overlap_and_leave_a_hole():
    with pytest.raises(UsageError, match="overlapping pieces of 'w'"):
        merge_plans(two(chunks=(Chunk((1, 0), (2, 2), 0, 0),)))


def test_a_tensor_and_bytes_of_one_name():
    blob = build_plan([BytesEntry("w", 0, 0)], structures=[bytes(16)])
    whole = build_plan([tensor("w", (2,), [((0,), (2,))], 0)], structures=[bytes(16)])
    for parts in ([blob, whole], [whole, blob]):
        with pytest.raises(UsageError, match="same 'w'"):
            merge_plans(parts)


def test_attributes_of_pieces_follow_them():
    def with_extras(part: Plan, extras: Any) -> Plan:
        return replace(part, extras=encode_plain(extras))

    one, other = two()
    merged = merge_plans(
        [
            with_extras(one, {(): {"v": 1}, ("w",): {"a": 2}, ("w", 0): {"first": True}}),
            with_extras(other, {(): {"u": 3}, ("w",): {"a": 2}, ("w", 0): {"first": False}}),
        ]
    )
    assert decode_plain(merged.extras) == {
        (): {"v": 1, "u": 3},
        ("w",): {"a": 2},
        ("w", 0): {"first": True},
        ("w", 1): {"first": False},
    }
    with pytest.raises(UsageError, match="has two values"):
        merge_plans([with_extras(one, {("w",): {"a": 2}}), with_extras(other, {("w",): {"a": 3}})])
    with pytest.raises(UsageError, match="has two values"):  # 1 is not True
        merge_plans([with_extras(one, {(): {"a": 1}}), with_extras(other, {(): {"a": True}})])
    for hostile in ([1], {1: {}}, {(): 2}):
        with pytest.raises(UsageError, match="not a table"):
            merge_plans([with_extras(one, hostile), other])
    with pytest.raises(IntegrityError):
        merge_plans([replace(one, extras=b"\xff\xff"), other])


def test_keys_of_all_ranks_are_kept():
    of_ranks = [nested_of({"a": {1: 0}}), nested_of({"b": {}}), b""]
    parts = [replace(each, nested=own) for each, own in zip(two(), of_ranks, strict=False)]
    assert decode_nested(merge_plans(parts).nested) == {("a",): True, ("b",): {}}
    assert merge_plans(two()).nested == b""


def test_values_that_only_torch_knows_are_kept():
    class Size:
        def __init__(self, value: Any) -> None:
            self.value = value

    def extra(value: object) -> tuple[str, Any] | None:
        return ("size", value.value) if isinstance(value, Size) else None

    one, other = two()
    data = [encode_plain({key: Size((1, 2))}, extra) for key in "ab"]
    merged = merge_plans([replace(one, planner_data=data[0]), replace(other, planner_data=data[1])])
    found = decode_plain(merged.planner_data, extra=lambda tag, value: (tag, value))
    assert found == {"a": ("size", (1, 2)), "b": ("size", (1, 2))}


def test_metadata_of_two_versions():
    one, other = two()
    with pytest.raises(UsageError, match="version"):
        merge_plans([one, replace(other, metadata_version="2")])
