"""Pulling a segment into a slot: only verified bytes count, whoever sends what."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.agent import content, layout_of
from tieredckpt.agent.copies.pull import (
    Donor,
    PullStoppedError,
    RateLimit,
    SegmentPull,
    donors_of,
)
from tieredckpt.config.tiers import TierSpec
from tieredckpt.errors import IntegrityError, NotFoundError, TierUnavailableError
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import SegmentRef
from tieredckpt.format.segment import BLOCK_BYTES, encode_footer
from tieredckpt.policy.replication import Pull

ID = "ab" * 16


def segment(size: int, block_bytes: int = BLOCK_BYTES) -> tuple[SegmentRef, bytes]:
    layout = replace(layout_of(size), block_bytes=block_bytes)
    data = content(7, layout.data_bytes)
    digests = b"".join(
        digest(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes)
    )
    whole = data + encode_footer(layout, digests, bytes.fromhex(ID))
    return SegmentRef(ID, len(whole), whole[-16:].hex(), "owner"), whole


class Served:
    """A host that serves what it has been given, in memory.

    Args:
        data: What it serves; None: it does not hold the segment.
        dies_after: It stops delivering after so many bytes.
        once_bad: This block is damaged on the way the first time.
        tier: Where it has it.
    """

    def __init__(
        self,
        data: bytes | None,
        *,
        dies_after: int | None = None,
        once_bad: int | None = None,
        tier: str = "memory",
    ) -> None:
        self.data = data
        self.tier = tier
        self.left = dies_after
        self.once_bad = once_bad
        self.asked: list[tuple[int, int]] = []
        self.reports: list[tuple[int, ...]] = []
        self.lock = threading.Lock()

    def open_range(self, segment_id: str, tier: str, start: int, stop: int) -> ServedRange:
        assert (segment_id, tier) == (ID, self.tier)
        if self.data is None:
            raise NotFoundError("it does not hold it", key=segment_id)
        if stop > len(self.data):
            raise IntegrityError("its copy is shorter")
        with self.lock:
            self.asked.append((start, stop))
        return ServedRange(self, start, stop)

    def report_damage(self, tier: str, segment_id: str, blocks: Sequence[int], reason: str) -> None:
        self.reports.append(tuple(blocks))

    @property
    def block_bytes_asked(self) -> int:
        return sum(stop - start for start, stop in self.asked if stop <= data_bytes(self.data))


def data_bytes(data: bytes | None) -> int:
    return len(data or b"") // BLOCK_BYTES * BLOCK_BYTES


class ServedRange:
    def __init__(self, host: Served, start: int, stop: int) -> None:
        self.host, self.at, self.stop = host, start, stop

    def read_into(self, into: memoryview) -> None:
        host = self.host
        assert host.data is not None
        assert self.at + len(into) <= self.stop
        with host.lock:
            if host.left is not None:
                host.left -= len(into)
                if host.left < 0:
                    raise TierUnavailableError("no byte for 10 s")
        into[:] = host.data[self.at : self.at + len(into)]
        if host.once_bad is not None and self.at == host.once_bad * BLOCK_BYTES:
            host.once_bad = None
            into[0] ^= 1
        self.at += len(into)

    def close(self) -> None:
        pass


def flipped(data: bytes, *blocks: int) -> bytes:
    changed = bytearray(data)
    for block in blocks:
        changed[block * BLOCK_BYTES + 5] ^= 0x10
    return bytes(changed)


def pull(
    path: Path,
    ref: SegmentRef,
    *hosts: Served,
    resume: bool = False,
    limit: RateLimit | None = None,
    stopping: threading.Event | None = None,
    landed: list[int] | None = None,
) -> bytes:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        SegmentPull(
            ref,
            [Donor(f"host-{number}", host, host.tier) for number, host in enumerate(hosts)],
            limit=limit or RateLimit(),
            stopping=stopping or threading.Event(),
            landed=(landed if landed is not None else []).append,
        ).run(fd, resume=resume)
    finally:
        os.close(fd)
    return path.read_bytes()


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 5 * BLOCK_BYTES + 77])
def test_the_copy_is_the_segment(tmp_path: Path, size: int):
    ref, whole = segment(size)
    landed: list[int] = []
    assert pull(tmp_path / "slot", ref, Served(whole), landed=landed) == whole
    assert sum(landed) >= len(whole)


def test_a_footer_longer_than_the_first_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tieredckpt.agent.copies.pull.TAIL_BYTES", 4096)
    # Two thousand blocks of a page: their digests alone are longer than the guess.
    ref, whole = segment(2000 * 4096, 4096)
    assert pull(tmp_path / "slot", ref, Served(whole)) == whole


def test_a_bad_block_comes_from_the_next_host_and_is_reported(tmp_path: Path):
    ref, whole = segment(5 * BLOCK_BYTES)
    first, second = Served(flipped(whole, 1, 3)), Served(whole)
    assert pull(tmp_path / "slot", ref, first, second) == whole
    assert sorted(block for blocks in first.reports for block in blocks) == [1, 3]
    assert second.reports == []
    assert second.block_bytes_asked == 2 * BLOCK_BYTES, "only what was bad"


def test_a_block_that_was_damaged_on_the_way_is_nobodys_damage(tmp_path: Path):
    ref, whole = segment(3 * BLOCK_BYTES)
    host = Served(whole, once_bad=1)
    assert pull(tmp_path / "slot", ref, host) == whole
    assert host.reports == []


def test_a_block_that_is_bad_everywhere_never_becomes_a_copy(tmp_path: Path):
    ref, whole = segment(3 * BLOCK_BYTES)
    hosts = [Served(flipped(whole, 2)), Served(flipped(whole, 2))]
    with pytest.raises(IntegrityError, match="blocks 2 to 2"):
        pull(tmp_path / "slot", ref, *hosts)
    assert [host.reports for host in hosts] == [[(2,)], [(2,)]]
    # Nothing looks like a segment: the trailer was not written.
    assert ref.root not in (tmp_path / "slot").read_bytes()[-16:].hex()


@pytest.mark.parametrize("dies_after", [0, 300_000, BLOCK_BYTES + 300_000, 3 * BLOCK_BYTES])
def test_a_host_that_stalls_is_replaced(tmp_path: Path, dies_after: int):
    ref, whole = segment(5 * BLOCK_BYTES)
    first, second = Served(whole, dies_after=dies_after), Served(whole)
    assert pull(tmp_path / "slot", ref, first, second) == whole
    assert first.reports == [], "not delivering is no damage"


def test_a_stalled_only_host_is_asked_again_later_and_sent_blocks_are_kept(tmp_path: Path):
    ref, whole = segment(6 * BLOCK_BYTES)
    with pytest.raises(TierUnavailableError, match="no byte for 10 s"):
        pull(tmp_path / "slot", ref, Served(whole, dies_after=4 * BLOCK_BYTES))
    host = Served(whole)
    assert pull(tmp_path / "slot", ref, host, resume=True) == whole
    assert host.block_bytes_asked < 6 * BLOCK_BYTES


def test_what_lies_in_the_slot_counts_only_if_it_matches(tmp_path: Path):
    ref, whole = segment(4 * BLOCK_BYTES)
    (tmp_path / "slot").write_bytes(flipped(whole, 0, 2))
    host = Served(whole)
    assert pull(tmp_path / "slot", ref, host, resume=True) == whole
    assert host.block_bytes_asked == 2 * BLOCK_BYTES


SMALL = 128 << 10


def flip_small(data: bytes, *blocks: int) -> bytes:
    changed = bytearray(data)
    for block in blocks:
        changed[block * SMALL + 5] ^= 0x10
    return bytes(changed)


def test_small_blocks_are_judged_one_by_one_and_asked_for_together(tmp_path: Path):
    ref, whole = segment(2 * BLOCK_BYTES + 77_777, SMALL)
    first = Served(flip_small(whole, 3, 4, 5, 30, 31, 40))
    second = Served(flip_small(whole, 2, 5))
    third = Served(whole)
    assert pull(tmp_path / "slot", ref, first, second, third) == whole
    assert sorted(block for each in first.reports for block in each) == [3, 4, 5, 30, 31, 40]
    assert second.reports == [(5,)], "what it was not asked for it has not shown"
    # Neighbours are asked for in one request, and only they.
    assert set(second.asked) >= {(30 * SMALL, 32 * SMALL), (40 * SMALL, 41 * SMALL)}
    assert sum(stop - start for start, stop in second.asked) == 7 * SMALL
    assert third.asked == [(5 * SMALL, 6 * SMALL)]


@pytest.mark.parametrize("seed", range(4))
def test_small_blocks_from_whoever_has_them(tmp_path: Path, seed: int):
    """Each block is good at one host; connections break in between."""
    rng = random.Random(seed)
    ref, whole = segment(rng.randrange(1, 3 * BLOCK_BYTES), SMALL)
    blocks = range(-(-(ref.size - 4096) // SMALL))
    good = {block: rng.randrange(3) for block in blocks}
    hosts = [
        Served(flip_small(whole, *(b for b in blocks if good[b] != host and rng.random() < 0.5)))
        for host in range(3)
    ]
    hosts[0].once_bad = rng.choice([None, 0])
    assert pull(tmp_path / "slot", ref, *hosts) == whole


def test_a_damaged_footer_is_the_whole_copys_damage(tmp_path: Path):
    ref, whole = segment(2 * BLOCK_BYTES)
    bad = bytearray(whole)
    bad[-200] ^= 1
    first, second = Served(bytes(bad)), Served(whole)
    assert pull(tmp_path / "slot", ref, first, second) == whole
    assert first.reports == [()]


def test_another_segment_under_this_id_is_refused(tmp_path: Path):
    ref, whole = segment(BLOCK_BYTES)
    other = SegmentRef(ID, ref.size, "00" * 16, "owner")
    with pytest.raises(IntegrityError, match="another segment's"):
        pull(tmp_path / "slot", other, Served(whole))


def test_who_does_not_hold_it_is_passed_over(tmp_path: Path):
    ref, whole = segment(BLOCK_BYTES)
    assert pull(tmp_path / "slot", ref, Served(None), Served(whole)) == whole
    with pytest.raises(NotFoundError):
        pull(tmp_path / "slot", ref, Served(None), Served(None))
    with pytest.raises(NotFoundError):
        pull(tmp_path / "slot", ref)


@pytest.mark.parametrize("fails", [0, 1])
def test_what_nobody_expected_ends_the_pull(tmp_path: Path, fails: int):
    """In whichever of the threads it happens: a copy with a hole must not pass for one."""
    ref, data = segment(8 * BLOCK_BYTES)
    calls = itertools.count()

    class Broken(Served):
        def open_range(self, segment_id: str, tier: str, start: int, stop: int) -> ServedRange:
            if stop <= data_bytes(self.data) and next(calls) == fails:
                raise TypeError("a bug")
            return super().open_range(segment_id, tier, start, stop)

    with pytest.raises(TypeError, match="a bug"):
        pull(tmp_path / "slot", ref, Broken(data))


def test_a_truncated_copy_is_damage(tmp_path: Path):
    ref, whole = segment(2 * BLOCK_BYTES)
    first = Served(whole[:BLOCK_BYTES])
    assert pull(tmp_path / "slot", ref, first, Served(whole)) == whole
    assert first.reports == [()]


def test_an_abandoned_pull_ends_at_once(tmp_path: Path):
    ref, whole = segment(2 * BLOCK_BYTES)
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(PullStoppedError):
        pull(tmp_path / "slot", ref, Served(whole), stopping=stopping)


def test_the_limit_is_a_budget_over_all_that_is_pulled():
    now_s = [100.0]
    limit = RateLimit(lambda: now_s[0])
    assert limit.take(1 << 40) == 0.0, "none"
    limit.set(1000)
    waited_s = 0.0
    for _ in range(100):
        wait_s = limit.take(100)
        now_s[0] += wait_s
        waited_s += wait_s
    # 10,000 bytes at 1,000 per second, but for one short burst at the start.
    assert 9.9 <= waited_s <= 10.0
    now_s[0] += 1000
    assert limit.take(100) > 0.0, "a pause saves up no more than the burst"
    limit.set(0)
    assert limit.take(1 << 40) == 0.0


def test_a_limited_pull_takes_its_time(tmp_path: Path):
    ref, whole = segment(3 * BLOCK_BYTES)
    now_s = [0.0]

    class Clocked(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            now_s[0] += timeout or 0.0
            return self.is_set()

    limit = RateLimit(lambda: now_s[0])
    limit.set(1 << 20)
    assert pull(tmp_path / "slot", ref, Served(whole), limit=limit, stopping=Clocked()) == whole
    assert 0.9 <= now_s[0] / (len(whole) / (1 << 20)) <= 1.1


# --- disks ----------------------------------------------------------------------------------------


def test_memory_comes_first_then_disks():
    lines = {name: Served(None) for name in ("owner", "holder", "me")}

    def client(host: str) -> Served:
        if host == "unknown":
            raise NotFoundError("no address", key=host)
        return lines[host]

    ref, _ = segment(100)
    tiers = [
        TierSpec(name="nvme", url="file:///nvme"),
        TierSpec(name="s3", url="s3://bucket/prefix", scope="shared"),
    ]
    others = Pull(ref=ref, sources=("owner", "unknown", "holder"))
    found = donors_of(others, tiers, client, ("me", lines["me"]))
    assert [each.name for each in found] == [
        "owner", "holder", "me (s3)", "owner (nvme)", "holder (nvme)",
    ]  # fmt: skip
    own = Pull(ref=ref, sources=("holder",), own=True)
    found = donors_of(own, tiers, client, ("me", lines["me"]))
    assert [each.name for each in found] == ["holder", "me (nvme)", "me (s3)", "holder (nvme)"]


def test_a_disk_gives_what_no_memory_has(tmp_path: Path):
    ref, whole = segment(5 * BLOCK_BYTES)
    gone, disk = Served(None), Served(whole, tier="nvme")
    assert pull(tmp_path / "slot", ref, gone, disk) == whole
    # Of one host, too, whose memory lacks a block.
    bad = Served(flipped(whole, 2))
    assert pull(tmp_path / "again", ref, bad, disk) == whole
    assert bad.reports == [(2,)]


def test_a_disk_that_fails_is_not_waited_for(tmp_path: Path):
    """The order fails, as memory lacks the segment, and newer checkpoints get their copies."""
    ref, whole = segment(5 * BLOCK_BYTES)
    with pytest.raises(NotFoundError, match="no byte for 10 s"):
        pull(tmp_path / "slot", ref, Served(None), Served(whole, dies_after=1000, tier="nvme"))
