"""Records about checkpoints in a tier: kept once, bounded, gone with the checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from tests.format.samples import hex_id, save_record
from tieredckpt.errors import CapacityError, IntegrityError
from tieredckpt.format.records import SaveRecord, encode_save_record
from tieredckpt.storage import stored
from tieredckpt.storage.base import record_key
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.memory.tier import MemoryTier
from tieredckpt.storage.stored import SaveRecords


@pytest.fixture
def tier(tmp_path: Path) -> MemoryTier:
    (tmp_path / "slots").mkdir()
    return MemoryTier(SlotPool(tmp_path / "slots"), tmp_path / "run", "run")


def record(number: int, save: int = 1) -> SaveRecord:
    return msgspec.structs.replace(save_record("ack"), id=hex_id(number), save_id=hex_id(save))


def test_each_is_kept_once_and_read_again(tier: MemoryTier):
    records = SaveRecords(tier)
    first, second = record(1), record(2, save=2)
    assert records.put(encode_save_record(first)) == first
    assert records.put(encode_save_record(first)) is None
    records.put(encode_save_record(second))
    assert records.of(hex_id(1)) == (first,)
    assert set(records.ids()) == {hex_id(1), hex_id(2)}
    assert records.encoded([hex_id(2), hex_id(9)]) == (encode_save_record(second),)
    again = SaveRecords(tier)
    again.load({hex_id(1)})  # checkpoint 2 is gone, its records go
    assert again.ids() == (hex_id(1),)
    assert [each.key for each in tier.list("records/")] == [record_key(hex_id(1), hex_id(1))]
    again.forget(hex_id(1))
    assert list(tier.list("records/")) == []
    assert again.ids() == ()


def test_what_cannot_be_read_is_dropped(tier: MemoryTier):
    tier.put(record_key(hex_id(1), hex_id(1)), b"garbage")
    tier.put(record_key(hex_id(1), hex_id(2)), encode_save_record(record(3)))  # of another key
    records = SaveRecords(tier)
    records.load({hex_id(1)})
    assert records.ids() == ()
    assert list(tier.list("records/")) == []
    with pytest.raises(IntegrityError):
        records.put(b"garbage")


def test_there_is_a_bound(tier: MemoryTier, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stored, "RECORDS_OF_SAVE_MAX", 2)
    monkeypatch.setattr(stored, "RECORDS_MAX", 3)
    records = SaveRecords(tier)
    for number, save in ((1, 1), (2, 1), (3, 2)):
        records.put(encode_save_record(record(number, save)))
    with pytest.raises(CapacityError, match="records about checkpoint"):
        records.put(encode_save_record(record(4, 1)))
    with pytest.raises(CapacityError, match="records about checkpoint"):
        records.put(encode_save_record(record(5, 3)))
    records.forget(hex_id(1))
    records.put(encode_save_record(record(5, 3)))


def test_looking_does_not_wait_for_a_store_that_hangs(
    tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
):
    records = SaveRecords(tier)
    records.put(encode_save_record(record(1)))
    hangs, go_on, put = threading.Event(), threading.Event(), MemoryTier.put

    def held(self: MemoryTier, key: str, data: bytes) -> None:
        hangs.set()
        assert go_on.wait(60)
        put(self, key, data)

    monkeypatch.setattr(MemoryTier, "put", held)
    pinning = threading.Thread(target=records.put, args=(encode_save_record(record(2)),))
    looking = threading.Thread(target=lambda: records.encoded(records.ids()))
    pinning.start()
    try:
        assert hangs.wait(60)
        looking.start()
        looking.join(20)
        assert not looking.is_alive()
    finally:
        go_on.set()
        pinning.join(60)
    assert set(records.ids()) == {hex_id(1), hex_id(2)}
