"""The records of a shared tier: commits and claims as they are listed, and all kinds as values."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

import msgspec

from tieredckpt.errors import (
    IntegrityError,
    NamespaceInUseError,
    NotFoundError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.envelope import ENVELOPE_BYTES
from tieredckpt.format.manifest import (
    ATTEMPT_LIMIT_BYTES,
    AttemptRecord,
    Manifest,
    SegmentRef,
    decode_attempt,
    decode_manifest,
    encode_attempt,
    encode_manifest,
)
from tieredckpt.format.records import (
    TOMBSTONE_LIMIT_BYTES,
    Tombstone,
    decode_tombstone,
    is_tombstone,
)
from tieredckpt.policy.history import NUMBER_MAX
from tieredckpt.storage.base import ObjectInfo, Tier, lease_key, manifest_key, save_of
from tieredckpt.storage.stored import Parse, StoredAttempt, StoredManifest, parse_manifest

LISTED_MAX = 1 << 17
"""More of one kind is not a checkpoint store but a mistake. A deleted checkpoint counts twice."""
ARCHIVED = "InvalidObjectState"
"""S3's code for an object that has to be brought back from an archive first."""

log = logging.getLogger(__name__)

T = TypeVar("T")
Save = tuple[str, str]
"""Stream and save id."""


class Listed(Generic[T]):
    """One prefix of a tier that others write to as well: listed anew, each object read once.

    Thread-safe: refreshes exclude each other, looking never waits for them.

    Args:
        tier: Where they lie.
        prefix: Ends in ``/``.
        limit: Most bytes of one, without its envelope.
        parse: Makes their values.
        dated: Of values that replace others under their key, and whose age counts: their time is
            asked after they were read, since what was listed may have been the one before.
    """

    def __init__(
        self,
        tier: Tier,
        prefix: str,
        limit: int,
        parse: Parse[T],
        dated: Callable[[T], bool] = lambda value: False,
    ) -> None:
        self._tier = tier
        self._prefix = prefix
        self._limit = limit
        self._parse = parse
        self._dated = dated
        self._refreshing = threading.Lock()
        self._known: dict[str, tuple[ObjectInfo, T]] = {}
        self._ahead: dict[str, tuple[ObjectInfo, T]] = {}
        """What a refresh had read that failed: of thousands, none is read twice for one failure."""

    def refresh(self) -> None:
        """List, read what is new or was replaced, forget what is gone.

        Raises:
            TierUnavailableError: What was known before stays.
        """
        with self._refreshing:
            known = self._known | self._ahead if self._ahead else self._known
            there = self._tier.list_at_most(LISTED_MAX, self._prefix)
            listed = {info.key: info for info in there}
            found = {
                k: known[k] for k, info in listed.items() if k in known and known[k][0] == info
            }
            new = [info for key, info in listed.items() if key not in found]
            try:
                for info, value in self._tier.each(self._read, new):
                    if value is not None:
                        found[info.key] = (info, value)
            except TierUnavailableError:
                self._ahead = found
                raise
            self._known, self._ahead = found, {}

    def _read(self, info: ObjectInfo) -> tuple[ObjectInfo, T | None]:
        try:
            try:
                value = self._parse(info.key, self.get(info.key), None)
            except IntegrityError:  # an answer that was cut short or bent on its way looks the same
                value = self._parse(info.key, self.get(info.key), None)
            if value is not None and self._dated(value):
                info = _later(info, self._tier.info(info.key))
            return info, value
        except NotFoundError:  # deleted meanwhile
            return info, None
        except IntegrityError as error:
            return info, self._parse(info.key, None, str(error))
        except TierUnavailableError as error:
            if error.fields.get("code") != ARCHIVED:
                raise
            # One that a rule of the bucket has archived hides no others. Read again each time.
            return ObjectInfo(info.key, -1), self._parse(info.key, None, str(error))

    def get(self, key: str) -> bytes:
        """What lies at one key. Raises NotFoundError, IntegrityError, TierUnavailableError."""
        return self._tier.get(key, limit=self._limit + ENVELOPE_BYTES)

    def all(self) -> dict[str, tuple[ObjectInfo, T]]:
        """By key, as of the last refresh and what was noted since; no I/O. Do not change it."""
        return self._known

    def values(self) -> list[T]:
        """Likewise, without keys."""
        return [value for _, value in self._known.values()]

    def note(self, key: str, value: T) -> None:
        """This was put just now."""
        with self._refreshing:
            # Of no known time: the next refresh reads it again.
            self._known = self._known | {key: (ObjectInfo(key, -1), value)}

    def forget(self, key: str) -> None:
        """This was deleted just now."""
        with self._refreshing:
            self._known = {k: v for k, v in self._known.items() if k != key}


def _later(listed: ObjectInfo, now: ObjectInfo) -> ObjectInfo:
    """What a listing says, unless it was replaced since; stores round times differently."""
    if listed.modified_s is None or now.modified_s is None:
        return listed
    return now if now.modified_s > listed.modified_s else listed


@functools.lru_cache(1024)
def _shared(value: object) -> object:
    return value


def _one(value: T) -> T:
    """The one object that stands for all that are equal to this one."""
    return _shared(value)  # type: ignore[return-value]


def parse_commit(
    key: str, data: bytes | None, error: str | None
) -> StoredManifest | Tombstone | None:
    """A manifest or a tombstone; None: neither can have this key. Raises IntegrityError: damage."""
    if (named := save_of(key)) is None:
        return None
    if data is not None and is_tombstone(data):
        tombstone = decode_tombstone(data)
        if (tombstone.stream, tombstone.save_id) == named[0]:
            return bare(tombstone)
        data, error = None, f"{key} is the tombstone of another checkpoint"
    return _stored(key, data, error)


def parse_pending(key: str, data: bytes | None, error: str | None) -> StoredManifest | None:
    """A pending manifest, likewise."""
    named = save_of(key)
    return _stored(key, data, error) if named is not None and not named[1] else None


def _stored(key: str, data: bytes | None, error: str | None) -> StoredManifest | None:
    found = parse_manifest(key, data, error)
    if found is None:
        return None
    manifest = lean(found.manifest) if found.manifest is not None else None
    return replace(found, stream=_one(found.stream), data=None, manifest=manifest)


def bare(tombstone: Tombstone) -> Tombstone:
    """Without the manifest: there may be thousands of them, and it is read when it is needed."""
    return msgspec.structs.replace(
        tombstone, namespace=_one(tombstone.namespace), stream=_one(tombstone.stream),
        host=_one(tombstone.host), manifest=b"",
    )  # fmt: skip


def lean(manifest: Manifest) -> Manifest:
    """The same, sharing what many have in common: a bucket may hold tens of thousands."""
    return msgspec.structs.replace(
        manifest, namespace=_one(manifest.namespace), stream=_one(manifest.stream),
        attempt=_one(manifest.attempt), lineage=_one(manifest.lineage), plan=_one(manifest.plan),
        tiers=_one(manifest.tiers), replicas=_one(manifest.replicas),
        segments=tuple(
            SegmentRef(ref.id, ref.size, ref.root, _one(ref.host)) for ref in manifest.segments
        ),
    )  # fmt: skip


def parse_claim(key: str, data: bytes | None, error: str | None) -> StoredAttempt | None:
    """A claim, likewise; without a record if it cannot be the claim of any run."""
    name = key.rpartition("/")[2]
    if not (name.isascii() and name.isdigit() and len(name) <= 19):
        return None
    record = decode_attempt(data) if data is not None else None
    if record is not None and record.number != int(name):
        record, error = None, f"{key} is the claim of another attempt"
    if record is not None and record.number > NUMBER_MAX:
        record, error = None, f"{key} is ignored: no run makes a number above {NUMBER_MAX}"
        log.warning("%s", error)
    return StoredAttempt(key=key, data=data, record=record, error=error)


def tombstone_of(
    manifest: Manifest, cause: Literal["retention", "unfinished"], host: str
) -> Tombstone:
    """The tombstone of a checkpoint."""
    return Tombstone(
        namespace=manifest.namespace, stream=manifest.stream, save_id=manifest.save_id,
        cause=cause, host=host, manifest=encode_manifest(manifest),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Head:
    """The highest key of one checkpoint, and what lies there."""

    deletions: int
    """How many there were before: the number in the key."""
    info: ObjectInfo
    value: StoredManifest | Tombstone


class SharedCommits(Listed[StoredManifest | Tombstone]):
    """What lies in ``manifests/``: of each checkpoint its manifest or its tombstone. Thread-safe.

        manifests/<stream>/<save id>        the commit; or, in its place, a tombstone
        manifests/<stream>/<save id>.<n>    after n deletions: the manifest again, if it was taken
                                            back, or that its segments go, so that it cannot be

    A key is created once, and what it holds is replaced at most once, a manifest by its tombstone.
    Who takes a checkpoint back and who deletes its segments create the same key: one of them is
    refused, and knows it, however long anybody sleeps. So of a checkpoint the highest key tells.

    Args:
        tier: Where they lie.
    """

    def __init__(self, tier: Tier) -> None:
        super().__init__(
            tier, "manifests/", TOMBSTONE_LIMIT_BYTES, parse_commit,
            dated=lambda each: isinstance(each, Tombstone),
        )  # fmt: skip

    def heads(self) -> dict[Save, Head]:
        """By checkpoint, as of the last refresh and what was noted since; no I/O."""
        found: dict[Save, Head] = {}
        for key, (info, value) in self.all().items():
            named = save_of(key)
            assert named is not None, "others are not parsed"
            save, deletions = named
            if save not in found or found[save].deletions < deletions:
                found[save] = Head(deletions, info, value)
        return found

    def tombstones(self) -> dict[Save, tuple[Head, Tombstone]]:
        """Those that are deleted, likewise; without the manifests in them."""
        return {
            save: (head, head.value)
            for save, head in self.heads().items()
            if isinstance(head.value, Tombstone)
        }

    def read(self, stream: str, save_id: str) -> tuple[int, bytes]:
        """The head of one checkpoint as it is now: how many deletions were before, and its bytes.

        Raises NotFoundError, IntegrityError, TierUnavailableError.
        """
        known = self.all()
        deletions = 0
        while manifest_key(stream, save_id, deletions + 1) in known:
            deletions += 1
        data = self.get(manifest_key(stream, save_id, deletions))
        while is_tombstone(data) and decode_tombstone(data).cause == "retention":
            try:
                data = self.get(manifest_key(stream, save_id, deletions + 1))
            except NotFoundError:
                break
            deletions += 1
        return deletions, data

    def buried(self, stream: str, save_id: str, head: Head) -> Manifest | None:
        """What the tombstone at, or below, a deleted one's head has in it; None: nothing.

        Raises IntegrityError, TierUnavailableError.
        """
        closed = isinstance(head.value, Tombstone) and head.value.cause == "emptied"
        try:
            data = self.get(manifest_key(stream, save_id, head.deletions - closed))
        except NotFoundError:
            return None
        inner = decode_tombstone(data).manifest if is_tombstone(data) else b""
        return decode_manifest(inner) if inner else None

    def drop(self, stream: str, save_id: str) -> None:
        """Delete all of a checkpoint, the highest key last. Raises TierUnavailableError."""
        head = self.heads().get((stream, save_id))
        for deletions in range(head.deletions + 1 if head else 0):
            key = manifest_key(stream, save_id, deletions)
            self._tier.delete(key)
            self.forget(key)


class SharedClaims(Listed[StoredAttempt]):
    """Which attempt has which number, and so who may write and delete. Thread-safe.

    Args:
        tier: Where they lie.
    """

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier, "claims/", ATTEMPT_LIMIT_BYTES, parse_claim)

    def old_ones(self, born_before_s: float, namespace: str) -> list[StoredAttempt]:
        """Claims that one which is as old as that makes superfluous: whoever has a lower number is
        refused by that one, also who lists while they are deleted. One of nobody refuses nobody.
        """
        old = [
            each
            for info, each in self.all().values()
            if info.modified_s is not None and info.modified_s < born_before_s
        ]
        newest = max((_number(each) for each in old if _is_of(each, namespace)), default=0)
        return [each for each in old if _number(each) < newest]

    def nobodys(self, namespace: str) -> list[int]:
        """The numbers of claims that cannot be read, or are of another namespace; as of the last
        refresh.
        """
        return [_number(each) for each in self.values() if not _is_of(each, namespace)]

    def hold(self, mine: AttemptRecord, known: Collection[str]) -> None:
        """Claim the namespace for attempt ``mine``, unless that is done already: a lease.

        Args:
            mine: The attempt. Two that followed the same one have the same number, and so the same
                key, which is created once.
            known: Ids of the attempts that it followed, knowingly.

        Raises:
            NamespaceInUseError: An attempt that is not ``known`` has a claim: another run's; but
                a lower one that came after this one's is late, and does not count.
            CapacityError, TierUnavailableError: As :meth:`Tier.put`.
        """
        for last in (False, True):
            self.refresh()
            self._check(mine, known)
            key = lease_key(mine.number)
            if (there := self.all().get(key)) is not None:
                if _is_of(there[1], mine.namespace):
                    return
                raise NamespaceInUseError(
                    f"claim {mine.number} in tier {self._tier.name} is of another namespace or "
                    f"damaged ({there[1].error}), and nobody can tell whose it was: start this job "
                    "again, which then takes the next number"
                )
            data = encode_attempt(mine)
            try:
                self._tier.put(key, data)
            except UsageError:  # somebody was faster, perhaps with the same record
                if last:
                    raise
                continue
            # And looked again: it may have come a day late, when higher ones were there already.
            self.note(key, StoredAttempt(key=key, data=data, record=mine))

    def _check(self, mine: AttemptRecord, known: Collection[str]) -> None:
        own, _ = self.all().get(lease_key(mine.number), (ObjectInfo("", -1), None))
        found = [(info, each.record) for _, (info, each) in sorted(self.all().items())]
        # Who knows an attempt knows the earlier ones of its run, also if one between them is lost.
        upto = {record.run: record.number for _, record in found if record and record.id in known}
        for info, record in found:
            # What cannot be read ends nobody: its number is taken, and whoever starts counts on.
            if record is None or record.number <= upto.get(record.run, 0) or record.run == mine.run:
                continue
            late = (info.modified_s or 0.0) > (own.modified_s or float("inf"))
            if record.namespace == mine.namespace and not (late and record.number < mine.number):
                raise NamespaceInUseError(
                    f"attempt {record.number} of another run has claimed the namespace in tier "
                    f"{self._tier.name}, and this one has attempt {mine.number}: if the other one "
                    "is to go on, stop this one, else start this one again"
                )


def _is_of(claim: StoredAttempt, namespace: str) -> bool:
    return claim.record is not None and claim.record.namespace == namespace


def _number(claim: StoredAttempt) -> int:
    return int(claim.key.rpartition("/")[2])
