"""The records of one tier as they are read, and the results of sweeping it.

A bad record is a result, not an error. Save records are immutable and are deleted with their
checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import TypeVar

from tieredckpt.errors import CapacityError, FormatVersionError, IntegrityError, NotFoundError
from tieredckpt.format.envelope import ENVELOPE_BYTES
from tieredckpt.format.manifest import (
    ATTEMPT_LIMIT_BYTES,
    MANIFEST_LIMIT_BYTES,
    AttemptRecord,
    Manifest,
    decode_attempt,
    decode_manifest,
)
from tieredckpt.format.records import RECORD_LIMIT_BYTES, SaveRecord, decode_save_record
from tieredckpt.storage.base import ObjectInfo, Tier, attempt_key, record_key, save_of

MAX_MANIFESTS = 1 << 16
"""More manifests in one tier and namespace are a mistake."""

RECORDS_MAX = 1 << 16
"""Limit per namespace."""
RECORDS_OF_SAVE_MAX = 1 << 14
"""Limit per checkpoint: one or two acknowledgements of each holder."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A record as found: decoded, or with the error.

    ``data`` is None if it could not be read or is not kept.
    """

    data: bytes | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredManifest(Stored):
    """A manifest as found."""

    stream: str
    save_id: str
    manifest: Manifest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAttempt(Stored):
    """An attempt record as found."""

    key: str
    record: AttemptRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All objects of a namespace in a tier."""

    manifests: tuple[StoredManifest, ...]
    plans: frozenset[str]
    """Intact ones only."""
    segments: dict[str, int]
    """Size in bytes by segment id, whether referred to or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """The removed objects, or the reason why none was removed."""

    segments: tuple[str, ...] = ()
    plans: tuple[str, ...] = ()
    blocked_by: tuple[str, ...] = ()
    """Keys of unreadable manifests, which may refer to anything."""


# --- manifests and attempts -----------------------------------------------------------------------


Parse = Callable[[str, bytes | None, str | None], T | None]
"""A parser is called with a key and its bytes, and with an error if they could not be read or
decoded. It returns None if the key is not of its kind."""


def parse_manifest(key: str, data: bytes | None, error: str | None) -> StoredManifest | None:
    """A manifest; None: it cannot have this key. Raises IntegrityError: damage."""
    if (named := save_of(key)) is None:
        return None
    (stream, save_id), _ = named
    manifest = decode_manifest(data) if data is not None and error is None else None
    if manifest is not None and (manifest.stream, manifest.save_id) != (stream, save_id):
        manifest, error = None, f"{key} is the manifest of another checkpoint"
    return StoredManifest(stream=stream, save_id=save_id, data=data, manifest=manifest, error=error)


def parse_attempt(key: str, data: bytes | None, error: str | None) -> StoredAttempt:
    """An attempt record, likewise."""
    record = decode_attempt(data) if data is not None and error is None else None
    if record is not None and attempt_key(record.number, record.id) != key:
        record, error = None, f"{key} is the record of another attempt"
    return StoredAttempt(key=key, data=data, record=record, error=error)


def read_manifests(tier: Tier) -> list[StoredManifest]:
    """All manifests of ``tier``. Raises TierUnavailableError."""
    found = []
    for info in tier.list_at_most(MAX_MANIFESTS, "manifests/"):
        if (named := save_of(info.key)) is None or named[1]:
            continue
        stored = read_stored(tier, info.key, MANIFEST_LIMIT_BYTES, parse_manifest)
        if stored is not None:
            found.append(stored)
    return found


def read_attempts(tier: Tier) -> list[StoredAttempt]:
    """All attempt records of ``tier``. Raises TierUnavailableError."""
    read = (
        read_stored(tier, info.key, ATTEMPT_LIMIT_BYTES, parse_attempt)
        for info in tier.list("attempts/")
    )
    return [each for each in read if each is not None]


def read_stored(tier: Tier, key: str, limit: int, parse: Parse[T]) -> T | None:
    """One record, or its error; None: it was deleted meanwhile, or the key is not of this kind."""
    data = None
    try:
        data = tier.get(key, limit=limit + ENVELOPE_BYTES)
        return parse(key, data, None)
    except NotFoundError:
        return None
    except IntegrityError as error:
        return parse(key, data, str(error))


def is_newer(found: Stored) -> bool:
    """Whether it is an intact record of a later release, which must not be replaced."""
    decode: Callable[[bytes], object] = decode_attempt
    if isinstance(found, StoredManifest):
        decode = decode_manifest
    try:
        decode(found.data or b"")
    except IntegrityError as error:
        return isinstance(error, FormatVersionError)
    return False


# --- save records ---------------------------------------------------------------------------------


class SaveRecords:
    """The save records of one tier; thread-safe; keeps them in memory.

    Args:
        tier: The tier that stores them.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._by_save: dict[str, dict[str, tuple[SaveRecord, bytes]]] = {}
        self._pending = 0
        """Number of records that are being put."""

    def load(self, saves: Set[str] | None) -> None:
        """Read the records of ``saves``; delete other records and unreadable ones.

        None: read new records and delete none, since other hosts use the tier.

        Raises TierUnavailableError.
        """
        listed = [
            info
            for info in self._tier.list("records/")
            if saves is not None or not self._is_known(*_names(info.key))
        ]
        for key, data, record in self._tier.each(self._read, listed):
            if record is not None and (saves is None or record.save_id in saves):
                with self._lock:
                    self._remember(record, data)
            elif saves is not None:
                # Unlike a manifest, a bad record loses nothing: other hosts have it, too.
                self._tier.delete(key)

    def _is_known(self, save_id: str, record_id: str) -> bool:
        return record_id in self._by_save.get(save_id, {})

    def _read(self, info: ObjectInfo) -> tuple[str, bytes, SaveRecord | None]:
        """Key, bytes and value; no value: the record is bad or was deleted meanwhile."""
        try:
            data = self._tier.get(info.key, limit=RECORD_LIMIT_BYTES + ENVELOPE_BYTES)
            record = decode_save_record(data)
        except (NotFoundError, IntegrityError):
            return info.key, b"", None
        named = (record.save_id, record.id) == _names(info.key)
        return info.key, data, record if named else None

    def _remember(self, record: SaveRecord, data: bytes) -> None:
        self._by_save.setdefault(record.save_id, {})[record.id] = (record, data)

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
            count = sum(map(len, self._by_save.values()))
            if count + self._pending >= RECORDS_MAX or len(mine) >= RECORDS_OF_SAVE_MAX:
                raise CapacityError(
                    f"{len(mine)} records about checkpoint {record.save_id}, {count} in all: "
                    "no more are kept",
                    limit="records",
                )
            self._pending += 1
        # Without the lock: a store may take minutes to fail, and readers must not wait for it.
        try:
            self._tier.put(record_key(record.save_id, record.id), data)
        finally:
            with self._lock:
                self._pending -= 1
        with self._lock:
            known = self._is_known(record.save_id, record.id)
            self._remember(record, data)
        return None if known else record

    def of(self, save_id: str) -> tuple[SaveRecord, ...]:
        """The records about one checkpoint; no I/O."""
        with self._lock:
            return tuple(record for record, _ in self._by_save.get(save_id, {}).values())

    def ids(self) -> tuple[str, ...]:
        """The ids of all records; no I/O."""
        with self._lock:
            return tuple(each for mine in self._by_save.values() for each in mine)

    def encoded(self, ids: Iterable[str]) -> tuple[bytes, ...]:
        """The encoded records with these ids that are known; no I/O."""
        wanted = set(ids)
        with self._lock:
            return tuple(
                data
                for mine in self._by_save.values()
                for record_id, (_, data) in mine.items()
                if record_id in wanted
            )

    def forget(self, save_id: str) -> None:
        """Delete the records of one checkpoint. Raises TierUnavailableError: some are left."""
        with self._lock:
            mine = self._by_save.pop(save_id, {})
        for record_id in mine:
            self._tier.delete(record_key(save_id, record_id))


def _names(key: str) -> tuple[str, str]:
    """Save id and record id of a key."""
    save_id, _, record_id = key.partition("/")[2].partition("/")
    return save_id, record_id
