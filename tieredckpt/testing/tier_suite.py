"""Conformance suite for tiers: subclass it, say how to make the tier, run pytest.

    class TestMyTier(TierSuite):
        def make_tier(self, folder: Path) -> Tier:
            return MyTier("mine", folder)

Needs pytest and no plugin of it. The suite knows only the contract
(:mod:`tieredckpt.storage.base`); what a crash leaves behind is different for each tier and is not
in here.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tieredckpt.errors import IntegrityError, NotFoundError, TierUnavailableError, UsageError
from tieredckpt.format.segment import BLOCK_BYTES
from tieredckpt.storage.base import OpenObject, Tier
from tieredckpt.storage.file_io import aligned_buffer
from tieredckpt.testing.tier_samples import (
    HOSTILE_KEYS,
    SampleSource,
    sample_segment,
    segment_name,
)

__all__ = ["SampleSource", "TierSuite", "sample_segment", "segment_name"]

PLAN = "plans/" + "ab" * 16
OTHER = "plans/" + "cd" * 16


class TierSuite:
    """All that the contract of a tier promises; subclasses make the tier."""

    sizes: tuple[int, ...] = (1, 4096, BLOCK_BYTES - 4096, BLOCK_BYTES, 3 * BLOCK_BYTES + 12345)
    """Data bytes of the segments that are stored."""

    def make_tier(self, folder: Path) -> Tier:
        """A tier that keeps everything in (or under a name made of) ``folder``."""
        raise NotImplementedError

    def reopen(self, tier: Tier, folder: Path) -> Tier:
        """The same tier as after the death of its process. By default closed and made again."""
        tier.close()
        return self.make_tier(folder)

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """An empty folder of the test's own; override it for another file system."""
        return tmp_path

    @pytest.fixture
    def tier(self, folder: Path) -> Iterator[Tier]:
        """The tier under test."""
        tier = self.make_tier(folder)
        yield tier
        tier.close()

    @staticmethod
    def _read(opened: OpenObject, offset: int, size: int) -> bytes:
        data = bytearray(size)
        opened.read_into(offset, memoryview(data))
        return bytes(data)

    @staticmethod
    def _keys(tier: Tier, prefix: str) -> list[str]:
        return sorted(info.key for info in tier.list(prefix))

    def _store(self, tier: Tier, number: int = 1, data_bytes: int = 9000) -> tuple[str, bytes]:
        data = sample_segment(segment_name(number), data_bytes, seed=number)
        key = f"segments/{segment_name(number)}"
        tier.put_from(key, SampleSource(data))
        return key, data

    # --- small objects ------------------------------------------------------------------------

    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000], ids=len)
    def test_put_then_get(self, tier: Tier, data: bytes) -> None:
        """What was put is got, listed and measured."""
        tier.put(PLAN, data)
        assert tier.get(PLAN, limit=len(data)) == data
        assert tier.info(PLAN).size == len(data)
        assert [(i.key, i.size) for i in tier.list("plans/")] == [(PLAN, len(data))]

    def test_put_again(self, tier: Tier) -> None:
        """Identical bytes are success; others, longer or shorter, raise and change nothing."""
        tier.put(PLAN, b"one")
        tier.put(PLAN, b"one")
        for other in (b"two", b"", b"one and more"):
            with pytest.raises(UsageError):
                tier.put(PLAN, other)
            assert tier.get(PLAN, limit=100) == b"one"
        assert self._keys(tier, "plans/") == [PLAN]

    def test_replace(self, tier: Tier) -> None:
        """Replacing makes what is not there, and takes the place of what is."""
        for data in (b"one", b"two and more", b""):
            tier.replace(PLAN, data)
            assert tier.get(PLAN, limit=100) == data
            assert [(i.key, i.size) for i in tier.list("plans/")] == [(PLAN, len(data))]
        with pytest.raises(UsageError):
            tier.replace("plans/../x", b"")

    def test_ages_are_differences_of_the_stores_clock(self, tier: Tier) -> None:
        """Objects are as old as they are, and one that is replaced is young again."""
        before_s = tier.now_s()
        tier.put(PLAN, b"one")
        first_s = tier.info(PLAN).modified_s
        assert [each.modified_s for each in tier.list("plans/")] == [first_s]
        tier.replace(PLAN, b"two")
        second_s = tier.info(PLAN).modified_s
        after_s = tier.now_s()
        assert first_s is not None
        assert second_s is not None
        slack_s = 2.0  # stores count in whole seconds, kernels in ticks
        assert before_s - slack_s <= first_s <= second_s <= after_s + slack_s

    def test_missing(self, tier: Tier) -> None:
        """What does not exist is NotFoundError, for each way of asking."""
        for key in (PLAN, "manifests/default/" + "00" * 16, "segments/" + "00" * 16):
            with pytest.raises(NotFoundError):
                tier.get(key, limit=10)
            with pytest.raises(NotFoundError):
                tier.info(key)
            with pytest.raises(NotFoundError):
                tier.open(key)
        assert self._keys(tier, "plans/") == []

    def test_limit(self, tier: Tier) -> None:
        """An object over the limit is refused, not cut."""
        tier.put(PLAN, b"12345")
        with pytest.raises(IntegrityError):
            tier.get(PLAN, limit=4)

    def test_delete(self, tier: Tier) -> None:
        """Deleted is gone; deleting again, or what never was, is success; it can be put anew."""
        tier.put(PLAN, b"one")
        tier.put(OTHER, b"two")
        for _ in range(2):
            tier.delete(PLAN)
        tier.delete("manifests/default/" + "00" * 16)
        with pytest.raises(NotFoundError):
            tier.get(PLAN, limit=10)
        assert self._keys(tier, "plans/") == [OTHER]
        tier.put(PLAN, b"other bytes now")
        assert tier.get(PLAN, limit=100) == b"other bytes now"
        tier.delete_many([PLAN, "manifests/default/" + "00" * 16, OTHER])
        assert self._keys(tier, "plans/") == []
        tier.delete_many([])

    def test_list(self, tier: Tier) -> None:
        """A prefix is a folder and lists what is in it at any depth, and nothing else."""
        keys = ["manifests/a/" + "00" * 16, "manifests/a.b/" + "00" * 16, PLAN]
        for key in keys:
            tier.put(key, key.encode())
        assert self._keys(tier, "manifests/") == sorted(keys[:2])
        assert self._keys(tier, "manifests/a/") == keys[:1]
        assert self._keys(tier, "segments/") == []
        with pytest.raises(UsageError):
            list(tier.list("plan"))

    @pytest.mark.parametrize("key", HOSTILE_KEYS, ids=ascii)
    def test_hostile_keys(self, tier: Tier, key: str) -> None:
        """A name that is no key is refused before it becomes a path."""
        with pytest.raises(UsageError):
            tier.put(key, b"x")
        with pytest.raises(UsageError):
            tier.put_from(key, SampleSource(b"x" * 4096))
        for ask in (tier.info, tier.open, tier.delete, lambda key: tier.get(key, limit=1)):
            with pytest.raises(UsageError):
                ask(key)

    # --- segments -----------------------------------------------------------------------------

    def test_put_from_then_read(self, tier: Tier) -> None:
        """Segments of many sizes come back, whole and by ranges of any alignment."""
        rng = random.Random(1)
        for number, size in enumerate(self.sizes):
            key, data = self._store(tier, number, size)
            assert tier.info(key).size == len(data)
            with tier.open(key) as opened:
                assert opened.size == len(data)
                assert self._read(opened, 0, len(data)) == data
                assert self._read(opened, len(data) - 128, 128) == data[-128:]
                assert self._read(opened, len(data), 0) == b""
                for _ in range(20):
                    start = rng.randrange(len(data))
                    stop = rng.randint(start, len(data))
                    assert self._read(opened, start, stop - start) == data[start:stop]
        assert len(self._keys(tier, "segments/")) == len(self.sizes)

    def test_descriptor(self, tier: Tier) -> None:
        """A trainer reads through the descriptor, if there is one: aligned, for direct I/O."""
        key, data = self._store(tier)
        with tier.open(key) as opened:
            if not opened.has_descriptor:
                with pytest.raises(UsageError):
                    opened.fileno()
                assert not opened.direct
                return
            page = aligned_buffer(4096)
            assert os.preadv(opened.fileno(), [page], 4096) == 4096
            assert bytes(page) == data[4096:8192]

    def test_aligned_reads(self, tier: Tier) -> None:
        """Reads into page-aligned memory give the same bytes as others."""
        key, data = self._store(tier, data_bytes=2 * BLOCK_BYTES + 100)
        with tier.open(key) as opened:
            buffer = aligned_buffer(-(-len(data) // 4096) * 4096)[: len(data)]
            opened.read_into(0, buffer)
            assert bytes(buffer) == data

    def test_source_is_damaged(self, tier: Tier) -> None:
        """A put whose source fails, at the first or the last byte, raises that, leaves nothing."""
        name = segment_name(7)
        data = sample_segment(name, 3 * BLOCK_BYTES)
        for at in (0, BLOCK_BYTES, len(data) - 1):
            with pytest.raises(IntegrityError, match="the source is damaged"):
                tier.put_from(f"segments/{name}", SampleSource(data, fail_at=at))
            assert self._keys(tier, "segments/") == []
            with pytest.raises(NotFoundError):
                tier.open(f"segments/{name}")
        tier.put_from(f"segments/{name}", SampleSource(data))
        assert tier.get(f"segments/{name}", limit=len(data)) == data

    def test_not_listed_while_written(self, tier: Tier) -> None:
        """Half an object is not there for anybody."""
        name = segment_name(8)
        seen: list[str] = []

        def look() -> None:
            seen.extend(self._keys(tier, "segments/"))
            with pytest.raises(NotFoundError):
                tier.info(f"segments/{name}")

        data = sample_segment(name, 2 * BLOCK_BYTES)
        tier.put_from(f"segments/{name}", SampleSource(data, during=look))
        assert seen == []

    def test_sweep(self, tier: Tier) -> None:
        """Neither what is there nor what is on its way is taken for something left behind."""
        data = sample_segment(segment_name(8), 2 * BLOCK_BYTES)
        key = f"segments/{segment_name(8)}"
        tier.put(PLAN, b"one")
        tier.put_from(key, SampleSource(data, during=lambda: _no_more(tier.sweep_unfinished(3600))))
        tier.sweep_unfinished(-1)
        assert tier.get(PLAN, limit=10) == b"one"
        assert tier.get(key, limit=len(data)) == data

    def test_put_from_again(self, tier: Tier) -> None:
        """The same size is taken for the same segment; another size is refused."""
        key, data = self._store(tier)
        tier.put_from(key, SampleSource(data))
        with pytest.raises(UsageError):
            tier.put_from(key, SampleSource(data + bytes(4096)))
        assert tier.get(key, limit=len(data)) == data

    def test_read_beyond_the_end(self, tier: Tier) -> None:
        """There is no short read: what is not there is an error."""
        key, data = self._store(tier)
        with tier.open(key) as opened:
            for offset, size in ((len(data), 1), (len(data) - 10, 11), (1 << 40, 1), (0, 1 << 20)):
                with pytest.raises(IntegrityError):
                    self._read(opened, offset, size)

    def test_open_objects_outlive_their_key(self, tier: Tier) -> None:
        """Deleted and followed by others, an object reads the same until it is closed.

        In a tier without leases it reads the same or not at all.
        """
        key, data = self._store(tier, 1)
        with tier.open(key) as opened:
            tier.delete(key)
            assert self._keys(tier, "segments/") == []
            for number in range(2, 6):
                self._store(tier, number)
            try:
                assert self._read(opened, 0, len(data)) == data
            except (NotFoundError, IntegrityError):
                assert not tier.leases

    def test_replaced_while_open(self, tier: Tier) -> None:
        """What is read from an open object is never a mixture of old and new bytes."""
        tier.replace(PLAN, b"old" * 5000)
        with tier.open(PLAN) as opened:
            tier.replace(PLAN, b"new" * 5000)
            try:
                assert self._read(opened, 0, 15000) == b"old" * 5000
            except (NotFoundError, IntegrityError):
                assert not tier.leases

    def test_close_twice(self, tier: Tier) -> None:
        """Closing is idempotent; after it, reading is an error."""
        key, _ = self._store(tier)
        opened = tier.open(key)
        opened.close()
        opened.close()
        with pytest.raises(TierUnavailableError):
            self._read(opened, 0, 1)

    # --- many at once -------------------------------------------------------------------------

    def test_concurrent_reads(self, tier: Tier) -> None:
        """One open object serves many threads."""
        key, data = self._store(tier, data_bytes=BLOCK_BYTES + 777)
        with tier.open(key) as opened:

            def read(number: int) -> None:
                rng = random.Random(number)
                for _ in range(50):
                    start = rng.randrange(len(data))
                    size = min(rng.randrange(200_000), len(data) - start)
                    assert self._read(opened, start, size) == data[start : start + size]

            assert _in_threads(read) == []

    def test_concurrent_puts(self, tier: Tier) -> None:
        """Of several that put other bytes under one key, one wins; the rest learn of it."""
        failed = _in_threads(lambda number: tier.put(PLAN, b"%d" % number * 5000))
        assert len(failed) == 3
        assert all(isinstance(each, UsageError) for each in failed)
        assert tier.get(PLAN, limit=5000) in [b"%d" % number * 5000 for number in range(4)]
        assert _in_threads(lambda number: tier.put(OTHER, b"the same")) == []

    def test_concurrent_segments(self, tier: Tier) -> None:
        """Several segments are stored at once, none in the other's place."""
        assert _in_threads(lambda number: self._store(tier, number, BLOCK_BYTES + number)) == []
        for number in range(4):
            name = segment_name(number)
            data = sample_segment(name, BLOCK_BYTES + number, seed=number)
            assert tier.get(f"segments/{name}", limit=len(data)) == data

    # --- life of the tier ---------------------------------------------------------------------

    def test_reopen(self, tier: Tier, folder: Path) -> None:
        """What was stored is there for the next process."""
        tier.put(PLAN, b"plan")
        key, data = self._store(tier)
        again = self.reopen(tier, folder)
        try:
            assert again.get(PLAN, limit=10) == b"plan"
            assert self._keys(again, "segments/") == [key]
            assert again.get(key, limit=len(data)) == data
        finally:
            again.close()


def _no_more(swept: int) -> None:
    assert swept == 0


def _in_threads(work: Callable[[int], object], count: int = 4) -> list[BaseException]:
    """Run ``work(0)`` to ``work(count - 1)`` at once; what they raised."""
    failed: list[BaseException] = []
    together = threading.Barrier(count)

    def run(number: int) -> None:
        together.wait(timeout=60)
        try:
            work(number)
        except Exception as error:  # noqa: BLE001 (handed to the caller, which asserts on it)
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(timeout=60)
        assert not each.is_alive(), "a call to the tier did not return within 60 s"
    return failed
