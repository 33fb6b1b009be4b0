"""Ranges as tasks of several blocks: against what each block by itself would say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.format.digest import digest
from tieredckpt.format.segment import (
    TRAILER_BYTES,
    Footer,
    ItemSpec,
    decode_footer,
    decode_trailer,
    encode_footer,
    lay_out,
)
from tieredckpt.recovery import blocks
from tieredckpt.recovery.blocks import BlockTask, Range, spread, tasks_of

BLOCK = 4096
UNIT = 4 * BLOCK
SIZE = 11 * BLOCK + 192

spans = st.lists(
    st.tuples(st.integers(0, SIZE), st.sampled_from([0, 1, 63, 900, BLOCK, 3 * BLOCK, SIZE])),
    max_size=12,
).map(lambda found: [(at, min(SIZE, at + size)) for at, size in found])


def segment() -> tuple[bytes, Footer]:
    layout = lay_out([ItemSpec("t", "tensor", SIZE, "uint8", (SIZE,), (0,), (SIZE,))], BLOCK)
    data = random.Random(1).randbytes(SIZE)
    digests = b"".join(digest(data[at : at + BLOCK]) for at in range(0, SIZE, BLOCK))
    whole = data + encode_footer(layout, digests, bytes(16))
    trailer = decode_trailer(whole[-TRAILER_BYTES:])
    return data, decode_footer(trailer, whole[trailer.index_offset :])


DATA, FOOTER = segment()


def made(spans: Sequence[tuple[int, int]], apart: set[int]) -> tuple[list[Range], list[BlockTask]]:
    ranges = [Range(a, b, memoryview(bytearray(b - a))) for a, b in spans]
    with patch.object(blocks, "UNIT_BYTES", UNIT):
        return ranges, tasks_of(FOOTER, ranges, lambda task: not apart.isdisjoint(task.blocks))


@given(spans, st.sets(st.integers(0, 11), max_size=2))
def test_each_touched_block_is_in_one_task(spans: list[tuple[int, int]], apart: set[int]):
    _, tasks = made(spans, apart)
    touched = {block for a, b in spans if b > a for block in range(a // BLOCK, -(-b // BLOCK))}
    assert [block for task in tasks for block in task.blocks] == sorted(touched)
    for task in tasks:
        assert task.start == task.block * BLOCK
        assert task.stop == min(SIZE, task.blocks.stop * BLOCK)
        assert task.start // UNIT == (task.stop - 1) // UNIT
        assert task.count == 1 or not (task.overlaps() or apart & set(task.blocks))
        assert b"".join(DATA[a:b] for a, b, _ in task.pieces()) == DATA[task.start : task.stop] or (
            task.overlaps()
        )
        single = task.split()
        assert [each.block for each in single] == list(task.blocks)
        assert all(each.count == 1 and each.parts for each in single)
        parts = [(p.start, p.stop, p.address) for each in single for p in each.parts]
        assert sum(stop - start for start, stop, _ in parts) == sum(
            part.stop - part.start for part in task.parts
        )


@given(spans, st.booleans())
def test_everything_arrives_from_tasks_and_from_their_blocks(
    spans: list[tuple[int, int]], split: bool
):
    ranges, tasks = made(spans, set())
    image = memoryview(bytearray(DATA))
    for task in [each for whole in tasks for each in (whole.split() if split else [whole])]:
        expected = FOOTER.digests_of(task.block, task.count)
        assert spread(task, image, 0, expected) == expected
    for each in ranges:
        assert bytes(each.dest) == DATA[each.start : each.stop]


@given(spans, st.sets(st.integers(0, SIZE - 1), min_size=1, max_size=4))
def test_bad_blocks_are_named_one_by_one(spans: list[tuple[int, int]], flipped: set[int]):
    image = bytearray(DATA)
    for position in flipped:
        image[position] ^= 4
    memory = memoryview(image)
    _, tasks = made(spans, set())
    for task in tasks:
        expected = FOOTER.digests_of(task.block, task.count)
        actual = spread(task, memory, 0, expected)
        bad = {position // BLOCK for position in flipped} & set(task.blocks)
        assert {each.block for each, _ in task.compared(actual, expected)[1]} == bad
        assert (actual == expected) == (not bad)
