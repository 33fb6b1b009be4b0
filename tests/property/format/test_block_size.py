"""How large blocks are chosen, and digests of blocks from bytes in pieces of any size."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.format.digest import BlockDigests, digest
from tieredckpt.format.segment import (
    BLOCK_BYTES,
    BLOCK_BYTES_LEAST,
    BLOCKS_MAX,
    EXTRA,
    MEAN_BYTES_LEAST,
    SHARDS,
    SMALL_BYTES,
    ItemSpec,
    choose_block_bytes,
    lay_out,
)

MIB = 1 << 20


def tensor(rows: int, row_bytes: int, name: str = "t") -> ItemSpec:
    shape = (rows, row_bytes)
    return ItemSpec(name, "tensor", rows * row_bytes, "uint8", shape, (0, 0), shape)


def blob(size: int) -> ItemSpec:
    return ItemSpec("b", "bytes", size)


large = st.builds(tensor, st.integers(1, 4096), st.integers(1024, 32768)).filter(
    lambda spec: spec.size_bytes >= SMALL_BYTES
)
small = st.builds(tensor, st.integers(0, 64), st.integers(1, 512))
states = st.lists(st.one_of(large, large, small), max_size=40)


def read_of_shards(specs: Sequence[ItemSpec], block_bytes: int) -> tuple[int, int]:
    """Bytes of whole blocks that all of SHARDS shards by rows need together; bytes of tensors."""
    layout = lay_out(specs, block_bytes)
    read = 0
    for shard in range(SHARDS):
        blocks: set[int] = set()
        for item in layout.items:
            rows = item.global_shape[0]
            if not item.size_bytes:
                continue
            row_bytes, share = item.size_bytes // rows, -(-rows // SHARDS)
            first, stop = min(rows, shard * share), min(rows, (shard + 1) * share)
            if first < stop:
                start, end = item.offset + first * row_bytes, item.offset + stop * row_bytes
                blocks.update(range(start // block_bytes, -(-end // block_bytes)))
        read += len(blocks) * block_bytes
    return read, sum(item.size_bytes for item in layout.items)


@given(states)
def test_shards_by_rows_cost_little_more_than_their_bytes(specs: list[ItemSpec]):
    chosen = choose_block_bytes(specs)
    assert BLOCK_BYTES_LEAST <= chosen <= BLOCK_BYTES
    assert BLOCK_BYTES % chosen == 0, "reads and writes of 4 MiB hold whole blocks"
    small = sum(spec.size_bytes for spec in specs if spec.size_bytes < SMALL_BYTES)
    stretches = sum(
        spec.size_bytes < SMALL_BYTES
        and (number == 0 or specs[number - 1].size_bytes >= SMALL_BYTES)
        for number, spec in enumerate(specs)
    )
    read, wanted = read_of_shards(specs, chosen)
    # Small neighbours are read as a whole, with two blocks at worst, by each shard.
    extra = SHARDS * (small + 2 * chosen * stretches)
    if BLOCK_BYTES_LEAST < chosen < BLOCK_BYTES or (specs and wanted >= 200 * MIB * len(specs)):
        assert read <= (1 + EXTRA) * (wanted - small) + extra


@given(states, st.integers(1, 300 * MIB))
def test_bytes_items_do_not_count(specs: list[ItemSpec], size: int):
    """They differ between saves, and between a segment and a draft of it."""
    assert choose_block_bytes([*specs, blob(size), blob(1)]) == choose_block_bytes(specs)


@given(st.lists(large, min_size=1, max_size=20), st.integers(2, 9))
def test_larger_tensors_have_no_smaller_blocks(specs: list[ItemSpec], times: int):
    if sum(spec.size_bytes for spec in specs) >= len(specs) * MEAN_BYTES_LEAST:
        larger = [tensor(spec.global_shape[0] * times, spec.global_shape[1]) for spec in specs]
        assert choose_block_bytes(larger) >= choose_block_bytes(specs)


def test_examples():
    assert choose_block_bytes([]) == BLOCK_BYTES
    assert choose_block_bytes([blob(1 << 30)]) == BLOCK_BYTES
    assert choose_block_bytes([tensor(1, 4096)] * 1000) == BLOCK_BYTES, "read together anyway"
    assert choose_block_bytes([tensor(1024, 1023)] * 9) == BLOCK_BYTES, "not worth requests"
    assert choose_block_bytes([tensor(2048, 1024)]) == BLOCK_BYTES_LEAST
    assert choose_block_bytes([tensor(12 * 1024, 1024)]) == 256 << 10
    assert choose_block_bytes([tensor(1024, 1024)] * 2 + [tensor(94 * 1024, 1024)]) == 512 << 10
    assert choose_block_bytes([tensor(200 * 1024, 1024)] * 3) == BLOCK_BYTES
    # Few tensors more than a table of a million digests holds: fewer, larger blocks.
    many = [tensor(4 * MIB, 1)] * (64 << 10)
    assert choose_block_bytes(many) == 256 << 10
    assert sum(spec.size_bytes for spec in many) == BLOCKS_MAX * (256 << 10)


@given(
    st.binary(max_size=600),
    st.integers(1, 80),
    st.lists(st.integers(1, 200), min_size=1, max_size=20),
)
def test_digests_of_blocks_from_pieces(data: bytes, block_bytes: int, cuts: list[int]):
    digests = BlockDigests(block_bytes)
    at = number = 0
    while at < len(data):
        size = cuts[number % len(cuts)]
        digests.update(memoryview(data)[at : at + size])
        at += size
        number += 1
    expected = [digest(data[s : s + block_bytes]) for s in range(0, len(data), block_bytes)]
    assert digests.finish() == b"".join(expected)
