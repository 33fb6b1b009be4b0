"""What a spill reads is proven block by block, whatever the size of the blocks is."""

from __future__ import annotations

import pytest

from tests.format.samples import fill
from tests.simulation.shared_world import Bytes
from tieredckpt.agent.tiers.source import DamagedSourceError, VerifiedSource
from tieredckpt.errors import FormatVersionError, TierUnavailableError
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import SegmentRef
from tieredckpt.format.segment import ItemSpec, encode_footer, lay_out
from tieredckpt.storage.file_io import RUN_BYTES

SIZE = RUN_BYTES + 300_000
ID = bytes(range(16))


def segment(block_bytes: int) -> tuple[SegmentRef, bytes]:
    layout = lay_out([ItemSpec("t", "tensor", SIZE, "uint8", (SIZE,), (0,), (SIZE,))], block_bytes)
    data = fill(layout)
    digests = (digest(data[at : at + block_bytes]) for at in range(0, len(data), block_bytes))
    whole = data + encode_footer(layout, b"".join(digests), ID)
    return SegmentRef(ID.hex(), len(whole), whole[-16:].hex(), "host"), whole


def read(ref: SegmentRef, data: bytes) -> bytes:
    source = VerifiedSource(Bytes(data), ref, lambda: False)
    found = bytearray(ref.size)
    for at in range(0, ref.size, RUN_BYTES):
        source.read_into(at, memoryview(found)[at : at + RUN_BYTES])
    return bytes(found)


@pytest.mark.parametrize("block_bytes", [4096, 128 << 10, 1 << 20, RUN_BYTES])
def test_a_flipped_bit_is_found_in_its_block(block_bytes: int):
    ref, whole = segment(block_bytes)
    assert read(ref, whole) == whole
    for position in (0, block_bytes - 1, SIZE // 2, RUN_BYTES, SIZE - 1):
        bad = bytearray(whole)
        bad[position] ^= 8
        with pytest.raises(DamagedSourceError) as caught:
            read(ref, bytes(bad))
        assert caught.value.fields["blocks"] == (position // block_bytes,)


def test_stopping_is_asked_within_a_long_read():
    ref, whole = segment(4096)
    asked = []
    source = VerifiedSource(Bytes(whole), ref, lambda: bool(asked.append(0) or len(asked) > 1))
    with pytest.raises(TierUnavailableError):
        source.read_into(0, memoryview(bytearray(ref.size)))


@pytest.mark.parametrize("block_bytes", [12 << 10, 2 * RUN_BYTES])
def test_blocks_that_no_run_holds_are_a_later_releases_and_no_damage(block_bytes: int):
    ref, whole = segment(block_bytes)
    with pytest.raises(FormatVersionError, match="upgrade"):
        VerifiedSource(Bytes(whole), ref, lambda: False)
