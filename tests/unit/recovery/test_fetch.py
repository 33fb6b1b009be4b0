"""Fetching ranges of a segment from several copies, some of them bad, on tmpfs and on disk."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tieredckpt.errors import (
    FormatVersionError,
    IntegrityError,
    NotFoundError,
    TierUnavailableError,
)
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import SegmentRef
from tieredckpt.format.segment import (
    BLOCK_BYTES,
    TRAILER_BYTES,
    ItemSpec,
    decode_trailer,
    encode_footer,
    lay_out,
)
from tieredckpt.recovery import copies
from tieredckpt.recovery.blocks import Range
from tieredckpt.recovery.copies import OpenedSource
from tieredckpt.recovery.fetch import FAILED_BLOCKS_MAX, SegmentFetcher
from tieredckpt.recovery.plan import SourceRef

BLOCK = 64 << 10
"""Smaller than the default, so that a small segment has many blocks."""

SIZES = [300_000, 5, 0, 1, 64, 4096, 2 << 20, 100, 70_000, 12_345]
SEGMENT_ID = bytes(range(16))
WAYS = ["buffered", "direct", "mapped"]


def make_segment(block_bytes: int = BLOCK, sizes: Sequence[int] = SIZES) -> bytes:
    rng = random.Random(3)
    specs = [ItemSpec(f"i{n}", "bytes", s, "", (), (), ()) for n, s in enumerate(sizes)]
    layout = lay_out(specs, block_bytes)
    data = bytearray(layout.data_bytes)
    for item in layout.items:
        data[item.offset : item.offset + item.size_bytes] = rng.randbytes(item.size_bytes)
    digests = b"".join(
        digest(data[at : at + block_bytes]) for at in range(0, len(data), block_bytes)
    )
    return bytes(data) + encode_footer(layout, digests, SEGMENT_ID)


SEGMENT = make_segment()
TRAILER = decode_trailer(SEGMENT[-TRAILER_BYTES:])
DATA = SEGMENT[: TRAILER.data_bytes]
NUM_BLOCKS = TRAILER.num_blocks
REF = SegmentRef(SEGMENT_ID.hex(), len(SEGMENT), TRAILER.root.hex(), "host")


@dataclass
class World:
    """Copies of one segment in files, and a fetcher over them."""

    folders: dict[str, Path]
    way: str = "buffered"
    ref: SegmentRef = REF
    sources: list[SourceRef] = field(default_factory=list)
    damage: list[tuple[str, tuple[int, ...], str]] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)
    opened: list[str] = field(default_factory=list)
    maps: list[mmap.mmap] = field(default_factory=list)

    def path(self, tier: str) -> Path:
        return self.folders["memory" if tier == "memory" else "disk"] / tier

    def add(self, tier: str, data: bytes = SEGMENT, bad_blocks: tuple[int, ...] = ()) -> None:
        self.path(tier).write_bytes(data)
        self.sources.append(
            SourceRef(
                host="host", tier=tier, segment_id=self.ref.id, size=len(data),
                intact=not bad_blocks, bad_blocks=bad_blocks,
            )
        )  # fmt: skip

    def flip(self, tier: str, *positions: int) -> None:
        data = bytearray(self.path(tier).read_bytes())
        for position in positions:
            data[position] ^= 1 << position % 8
        self.path(tier).write_bytes(data)

    def open(self, source: SourceRef) -> OpenedSource:
        if source.tier in self.errors:
            raise self.errors[source.tier]
        self.opened.append(source.tier)
        path = self.path(source.tier)
        if self.way == "direct":
            return OpenedSource(fd=os.open(path, os.O_RDONLY | os.O_DIRECT), direct=True)
        fd = os.open(path, os.O_RDONLY)
        view = None
        if self.way == "mapped" and os.fstat(fd).st_size:
            self.maps.append(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
            view = memoryview(self.maps[-1])
        return OpenedSource(fd=fd, direct=False, view=view)

    def fetcher(self, threads: int = 2) -> SegmentFetcher:
        def report(source: SourceRef, blocks: tuple[int, ...], reason: str) -> None:
            self.damage.append((source.tier, blocks, reason))

        return SegmentFetcher(self.ref, self.sources, self.open, report, threads=threads)

    def fetch_all(self) -> None:
        """Everything comes, bit-exact, whatever happened to single copies."""
        with self.fetcher() as fetcher:
            into = bytearray(len(DATA))
            fetcher.fetch([Range(0, len(DATA), memoryview(into))])
            assert into == DATA


@pytest.fixture(params=WAYS)
def world(request: pytest.FixtureRequest, runtime_dir: Path, tmp_path: Path) -> Iterator[World]:
    if request.param == "direct":
        probe = tmp_path / "probe"
        probe.write_bytes(b"")
        try:
            os.close(os.open(probe, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            pytest.skip("this file system refuses O_DIRECT")
        # tmpfs before Linux 6.6 refuses it.
        yield World({"memory": tmp_path, "disk": tmp_path}, request.param)
        return
    yield World({"memory": runtime_dir, "disk": tmp_path}, request.param)


# --- intact copies ------------------------------------------------------------------------------


def test_all_of_it(world: World):
    world.add("memory")
    world.fetch_all()
    assert world.damage == []


@pytest.mark.parametrize("seed", range(8))
def test_random_ranges(world: World, seed: int):
    """Overlapping, tiny, empty, ending anywhere, many in one block."""
    rng = random.Random(seed)
    world.add("memory")
    ranges: list[Range] = []
    for _ in range(rng.choice([1, 3, 40])):
        start = rng.randrange(len(DATA) + 1)
        stop = min(len(DATA), start + rng.choice([0, 1, 63, 5000, BLOCK, 300_000, len(DATA)]))
        ranges.append(Range(start, stop, memoryview(bytearray(stop - start))))
    with world.fetcher(threads=rng.choice([1, 2, 5])) as fetcher:
        fetcher.fetch(ranges)
        for each in ranges:
            assert bytes(each.dest) == DATA[each.start : each.stop]
        touched = {
            block for r in ranges if r.stop > r.start
            for block in range(r.start // BLOCK, (r.stop - 1) // BLOCK + 1)
        }  # fmt: skip
        expected = sum(min(BLOCK, len(DATA) - block * BLOCK) for block in touched)
        assert fetcher.report.bytes_by_tier.get("memory", 0) == expected, "only what is touched"


def test_blocks_of_the_default_size_and_any_item_format(world: World):
    segment = make_segment(BLOCK_BYTES, [3 * BLOCK_BYTES + 77, 100])
    trailer = decode_trailer(segment[-TRAILER_BYTES:])
    world.ref = SegmentRef(SEGMENT_ID.hex(), len(segment), trailer.root.hex(), "host")
    world.add("memory", segment)
    into = bytearray(2 * BLOCK_BYTES)
    with world.fetcher() as fetcher:
        shaped = memoryview(into).cast("f", [512, 4096])
        fetcher.fetch([Range(4, 4 + len(into), shaped)])
    assert into == segment[4 : 4 + len(into)]


def test_footer_says_what_is_there(world: World):
    world.add("memory")
    with world.fetcher() as fetcher:
        footer = fetcher.footer()
        assert [item.size_bytes for item in footer.items] == SIZES
        assert fetcher.footer() is footer
    assert world.opened == ["memory"]


def test_an_empty_segment(world: World):
    segment = make_segment(BLOCK, [])
    root = decode_trailer(segment[-TRAILER_BYTES:]).root.hex()
    world.ref = SegmentRef(SEGMENT_ID.hex(), len(segment), root, "host")
    world.add("memory", segment)
    with world.fetcher() as fetcher:
        fetcher.fetch([Range(0, 0, memoryview(bytearray()))])


def open_below(folders: Collection[Path]) -> list[str]:
    """The open files in these folders. Python closes what other tests left when it likes."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [each for each in links if any(map(Path(each).is_relative_to, folders))]


def test_closing_closes_every_descriptor(world: World):
    world.add("memory")
    world.flip("memory", 0)
    world.add("nvme")
    fetcher = world.fetcher()
    fetcher.fetch([Range(0, 10, memoryview(bytearray(10)))])
    assert open_below(world.folders.values())
    fetcher.close()
    fetcher.close()
    for each in world.maps:  # Python's mapping keeps a descriptor
        each.close()
    assert open_below(world.folders.values()) == []


# --- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_flipped_bits_cost_their_block_and_nothing_else(world: World, seed: int):
    rng = random.Random(seed)
    world.add("memory")
    world.add("nvme")
    positions = sorted({rng.randrange(len(DATA)) for _ in range(rng.choice([1, 2, 9]))})
    world.flip("memory", *positions)
    blocks = tuple(sorted({position // BLOCK for position in positions}))
    with world.fetcher() as fetcher:
        into = bytearray(len(DATA))
        fetcher.fetch([Range(0, len(DATA), memoryview(into))])
        assert into == DATA
        assert fetcher.report.damaged == {"memory": blocks}
        lost = sum(min(BLOCK, len(DATA) - block * BLOCK) for block in blocks)
        assert fetcher.report.bytes_by_tier["nvme"] == lost
        assert fetcher.report.bytes_by_tier["memory"] == len(DATA) - lost
    ((tier, found, reason),) = world.damage
    assert (tier, found) == ("memory", blocks)
    assert "digest" in reason


def test_each_block_may_come_from_another_copy(world: World):
    for number, tier in enumerate(("memory", "nvme", "s3")):
        world.add(tier)
        bad = [block for block in range(NUM_BLOCKS) if block % 3 != number]
        world.flip(tier, *(block * BLOCK + 1 for block in bad))
    world.fetch_all()
    assert {tier for tier, _, _ in world.damage} == {"memory", "nvme"}


FOOTER_POSITIONS = {
    "index": TRAILER.index_offset + 3,
    "table": TRAILER.table_offset + 5,
    "padding": TRAILER.table_offset + TRAILER.table_bytes + 1,
    "magic": len(SEGMENT) - TRAILER_BYTES,
    "trailer": len(SEGMENT) - TRAILER_BYTES + 30,
    "root": len(SEGMENT) - 1,
}


@pytest.mark.parametrize("where", FOOTER_POSITIONS)
def test_a_damaged_footer_is_taken_from_the_next_copy_and_the_data_from_the_first(
    world: World, where: str
):
    world.add("memory")
    world.flip("memory", FOOTER_POSITIONS[where])
    world.add("nvme")
    with world.fetcher() as fetcher:
        into = bytearray(len(DATA))
        fetcher.fetch([Range(0, len(DATA), memoryview(into))])
        assert into == DATA
        assert fetcher.report.bytes_by_tier == {"memory": len(DATA)}
    assert [(tier, blocks) for tier, blocks, _ in world.damage] == [("memory", ())]


CUTS = [0, 1, 4095, 4096, BLOCK - 1, BLOCK, 5 * BLOCK + 4096, 5 * BLOCK + 5000, len(DATA) - 1]
CUTS += [len(DATA), TRAILER.table_offset, len(SEGMENT) - TRAILER_BYTES, len(SEGMENT) - 1]


@pytest.mark.parametrize("size", CUTS)
def test_a_truncated_copy_gives_what_it_still_has(world: World, size: int):
    world.add("memory", SEGMENT[:size])
    world.add("nvme")
    with world.fetcher() as fetcher:
        into = bytearray(len(DATA))
        fetcher.fetch([Range(0, len(DATA), memoryview(into))])
        assert into == DATA
        whole = size // BLOCK * BLOCK if size < len(DATA) else len(DATA)
        assert fetcher.report.bytes_by_tier.get("memory", 0) == whole
    assert world.damage[0][:2] == ("memory", ())


@pytest.mark.parametrize("size", CUTS)
def test_a_truncated_copy_without_another_one_fails(world: World, size: int):
    world.add("memory", SEGMENT[:size])
    with world.fetcher() as fetcher, pytest.raises(IntegrityError, match="memory on host"):
        fetcher.fetch([Range(0, 10, memoryview(bytearray(10)))])


def test_a_copy_truncated_after_it_was_opened_is_no_signal(world: World):
    world.add("memory")
    world.add("nvme")
    with world.fetcher() as fetcher:
        fetcher.footer()
        os.truncate(world.path("memory"), 2 * BLOCK)
        into = bytearray(len(DATA))
        fetcher.fetch([Range(0, len(DATA), memoryview(into))])
        assert into == DATA
        assert fetcher.report.bytes_by_tier["memory"] == 2 * BLOCK
    assert "truncated" in world.damage[0][2]


def test_another_segment_under_this_name(world: World):
    other = make_segment(BLOCK, [*SIZES[:-1], SIZES[-1] - 1])
    assert len(other) == len(SEGMENT)
    world.add("memory", other)
    world.add("nvme")
    world.fetch_all()
    assert "the manifest has root" in world.damage[0][2]


def test_no_good_copy_of_a_block_names_every_failure(world: World):
    world.add("memory")
    world.add("nvme")
    world.flip("memory", 3 * BLOCK, 7 * BLOCK)
    world.flip("nvme", 7 * BLOCK + 9)
    world.errors["s3"] = TierUnavailableError("the store is away")
    world.add("s3")
    # The store may have the block: it is not proven lost.
    with world.fetcher() as fetcher, pytest.raises(TierUnavailableError) as caught:
        fetcher.fetch([Range(0, len(DATA), memoryview(bytearray(len(DATA))))])
    text = str(caught.value)
    assert "block 7: memory on host: digest is" in text
    assert "nvme on host: digest is" in text
    assert "s3 on host: cannot be opened: the store is away" in text
    assert "block 3" not in text
    assert caught.value.blocks == (7,)
    assert min(world.damage)[:2] == ("memory", (3, 7))
    # Blocks that nobody needs are nobody's failure.
    with world.fetcher() as fetcher:
        fetcher.fetch([Range(0, 2 * BLOCK, memoryview(bytearray(2 * BLOCK)))])


def test_a_hopeless_fetch_ends_early(world: World):
    world.add("memory")
    world.flip("memory", *(block * BLOCK for block in range(NUM_BLOCKS)))
    with world.fetcher(threads=1) as fetcher, pytest.raises(IntegrityError) as caught:
        fetcher.fetch([Range(0, len(DATA), memoryview(bytearray(len(DATA))))])
    assert FAILED_BLOCKS_MAX <= len(caught.value.blocks) < FAILED_BLOCKS_MAX + 8 < NUM_BLOCKS


def test_a_quarantined_block_is_asked_for_last_and_used_if_it_is_good(world: World):
    world.add("memory", bad_blocks=(2, 3))
    world.add("nvme")
    world.flip("nvme", 2 * BLOCK)
    with world.fetcher() as fetcher:
        into = bytearray(len(DATA))
        fetcher.fetch([Range(0, len(DATA), memoryview(into))])
        assert into == DATA
        assert fetcher.report.bytes_by_tier["nvme"] == BLOCK
    assert [(tier, blocks) for tier, blocks, _ in world.damage] == [("nvme", (2,))]


# --- media that fail ----------------------------------------------------------------------------


def test_copies_that_cannot_be_opened_are_no_damage(world: World):
    world.errors = {
        "memory": NotFoundError("gone"),
        "s3": OSError(errno.EACCES, "no"),
        "nvme": TierUnavailableError("away"),
    }
    for tier in world.errors:
        world.add(tier)
    with world.fetcher() as fetcher, pytest.raises(TierUnavailableError) as caught:
        fetcher.footer()
    assert all(tier in str(caught.value) for tier in world.errors)
    world.add("good")
    world.fetch_all()
    assert world.damage == []


def test_no_copy_at_all(world: World):
    with world.fetcher() as fetcher, pytest.raises(IntegrityError, match="there is no copy"):
        fetcher.footer()


Preadv = Callable[[int, list[memoryview], int], int]


def replace_preadv(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Preadv, str], Preadv], tier: str = "memory"
) -> None:
    """Reads of one tier go through what ``make`` returns."""
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) == tier:
            return make(real, tier)(fd, buffers, offset)
        return real(fd, buffers, offset)

    monkeypatch.setattr(copies.os, "preadv", preadv)


@pytest.mark.parametrize("way", ["buffered", "direct"])
def test_a_disk_that_gives_errors(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    world = World({"memory": tmp_path, "disk": tmp_path}, way)
    world.add("memory")
    world.add("nvme")
    asked = []

    def make(real: Preadv, _: str) -> Preadv:
        def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
            if offset < len(DATA) - BLOCK:
                asked.append(offset)
                raise OSError(errno.EIO, "Input/output error")
            return real(fd, buffers, offset)

        return failing

    replace_preadv(monkeypatch, make)
    world.fetch_all()
    # It is left alone after a while, and nothing is called bad: it may answer another day.
    assert len(asked) < copies.READ_ERRORS_MAX + 8
    assert world.damage == []


@pytest.mark.parametrize("way", ["buffered", "direct"])
def test_short_reads_are_continued(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    world = World({"memory": tmp_path, "disk": tmp_path}, way)
    world.add("memory")
    step = 4096 if way == "direct" else 1000

    def make(real: Preadv, _: str) -> Preadv:
        return lambda fd, buffers, offset: real(fd, [buffers[0][:step]], offset)

    replace_preadv(monkeypatch, make)
    world.fetch_all()
    assert world.damage == []


def test_a_file_system_that_refuses_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    world = World({"memory": tmp_path, "disk": tmp_path}, "direct")
    world.add("memory")

    def make(real: Preadv, _: str) -> Preadv:
        def refusing(fd: int, buffers: list[memoryview], offset: int) -> int:
            import fcntl

            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, buffers, offset)

        return refusing

    replace_preadv(monkeypatch, make)
    world.fetch_all()
    assert world.damage == []


def test_a_newer_version_is_not_reported_as_damage(world: World):
    segment = bytearray(SEGMENT)
    segment[len(segment) - TRAILER_BYTES + 8] = 99
    segment[-16:] = digest(segment[-TRAILER_BYTES:-16])
    world.ref = SegmentRef(SEGMENT_ID.hex(), len(segment), segment[-16:].hex(), "host")
    world.add("memory", bytes(segment))
    with world.fetcher() as fetcher, pytest.raises(FormatVersionError, match="upgrade"):
        fetcher.footer()
    assert world.damage == []


@pytest.mark.parametrize("start", [0, len(DATA)])
def test_a_range_outside_of_the_data(world: World, start: int):
    world.add("memory")
    size = len(DATA) + 1 - start
    with world.fetcher() as fetcher, pytest.raises(IntegrityError, match="are wanted"):
        fetcher.fetch([Range(start, len(DATA) + 1, memoryview(bytearray(size)))])


@pytest.mark.parametrize("size", [0, 100, 4096, len(SEGMENT) - 4096, len(SEGMENT) + 4096, 1 << 40])
def test_a_manifest_with_another_size(world: World, size: int):
    world.ref = SegmentRef(REF.id, size, REF.root, "host")
    world.add("memory")
    with world.fetcher() as fetcher, pytest.raises((IntegrityError, TierUnavailableError)):
        fetcher.footer()
