"""The save records of one tier: said once, never changed, gone with their checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Set

from tieredckpt.errors import CapacityError, NotFoundError
from tieredckpt.format.record import RECORD_LIMIT_BYTES, SaveRecord, decode_save_record
from tieredckpt.tiers.base import ObjectInfo, Tier
from tieredckpt.tiers.keys import record_key
from tieredckpt.tiers.stored import read_one

RECORDS_MAX = 1 << 16
"""Of one namespace."""
RECORDS_OF_SAVE_MAX = 1 << 14
"""Of one checkpoint: an acknowledgement or two of each of its holders."""


class SaveRecords:
    """See the module; thread-safe; keeps the tier's records in memory.

    Args:
        tier: Where they are kept.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._by_save: dict[str, dict[str, tuple[SaveRecord, bytes]]] = {}
        self._count = 0
        self._coming = 0
        """That are being put."""

    def load(self, saves: Set[str] | None) -> None:
        """Read those about ``saves``; others, and what cannot be read, is deleted.

        None: what is new is read, and nothing is deleted, since the tier is not ours alone.

        Raises TierUnavailableError.
        """
        listed = [
            info
            for info in self._tier.list("records/")
            if saves is not None or not self._is_known(*_names(info.key))
        ]
        for info, (data, record, _) in self._tier.each(self._read, listed):
            save_id, record_id = _names(info.key)
            named = record is not None and (record.save_id, record.id) == (save_id, record_id)
            if saves is None and not named:
                continue
            stranger = saves is not None and save_id not in saves
            if record is None or data is None or not named or stranger:
                # Unlike a manifest it stands for nothing that would be lost: others have it too.
                self._tier.delete(info.key)
                continue
            with self._lock:
                self._note(record, data)

    def _is_known(self, save_id: str, record_id: str) -> bool:
        return record_id in self._by_save.get(save_id, {})

    def _read(
        self, info: ObjectInfo
    ) -> tuple[ObjectInfo, tuple[bytes | None, SaveRecord | None, str | None]]:
        return info, read_one(self._tier, info.key, RECORD_LIMIT_BYTES, decode_save_record)

    def _note(self, record: SaveRecord, data: bytes) -> None:
        mine = self._by_save.setdefault(record.save_id, {})
        self._count += record.id not in mine
        mine[record.id] = (record, data)

    def put(self, data: bytes) -> SaveRecord | None:
        """Store an encoded record; returns it, or None if it was there already.

        Raises:
            IntegrityError: ``data`` is damaged.
            CapacityError: There are too many of them, or no space.
            TierUnavailableError: As :meth:`Tier.put`.
        """
        record = decode_save_record(data)
        with self._lock:
            mine = self._by_save.get(record.save_id, {})
            if record.id in mine:
                return None
            if self._count + self._coming >= RECORDS_MAX or len(mine) >= RECORDS_OF_SAVE_MAX:
                raise CapacityError(
                    f"{len(mine)} records about checkpoint {record.save_id}, {self._count} in all: "
                    "no more are kept",
                    limit="records",
                )
            self._coming += 1
        # Without the lock: a store may take minutes to say no, and looking never waits for one.
        try:
            self._tier.put(record_key(record.save_id, record.id), data)
        finally:
            with self._lock:
                self._coming -= 1
        with self._lock:
            known = record.id in self._by_save.get(record.save_id, {})
            self._note(record, data)
        return None if known else record

    def of(self, save_id: str) -> tuple[SaveRecord, ...]:
        """The records about one checkpoint; no I/O."""
        with self._lock:
            return tuple(record for record, _ in self._by_save.get(save_id, {}).values())

    def ids(self) -> tuple[str, ...]:
        """Of all records; no I/O."""
        with self._lock:
            return tuple(each for mine in self._by_save.values() for each in mine)

    def encoded(self, ids: Iterable[str]) -> tuple[bytes, ...]:
        """The encoded records with these ids, as far as they are here; no I/O."""
        wanted = set(ids)
        with self._lock:
            return tuple(
                data
                for mine in self._by_save.values()
                for record_id, (_, data) in mine.items()
                if record_id in wanted
            )

    def forget(self, save_id: str) -> None:
        """Delete those about one checkpoint. Raises TierUnavailableError: some are left."""
        with self._lock:
            mine = self._by_save.pop(save_id, {})
            self._count -= len(mine)
        for record_id in mine:
            try:
                self._tier.delete(record_key(save_id, record_id))
            except NotFoundError:  # somebody deleted the file
                continue


def _names(key: str) -> tuple[str, str]:
    """Save id and record id of a key."""
    save_id, _, record_id = key.partition("/")[2].partition("/")
    return save_id, record_id
