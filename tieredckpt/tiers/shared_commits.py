"""What lies in ``manifests/`` of a shared tier: of each checkpoint its manifest or its tombstone.

    manifests/<stream>/<save id>        the commit; or, in its place, a tombstone
    manifests/<stream>/<save id>.<n>    after n deletions: the manifest again, if it was taken back,
                                        or that its segments go, so that it cannot be any more

A key is created once, and what it holds is replaced at most once, a manifest by its tombstone. Who
takes a checkpoint back and who deletes its segments create the same key: one of them is refused,
and knows it, however long anybody sleeps. So of a checkpoint the highest key tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tieredckpt.errors import NotFoundError
from tieredckpt.format.envelope import ENVELOPE_BYTES
from tieredckpt.format.manifest import Manifest, decode_manifest
from tieredckpt.format.tombstone import (
    TOMBSTONE_LIMIT_BYTES,
    Tombstone,
    decode_tombstone,
    is_tombstone,
)
from tieredckpt.tiers.base import ObjectInfo, Tier
from tieredckpt.tiers.contents import StoredManifest
from tieredckpt.tiers.keys import manifest_key
from tieredckpt.tiers.listed import Fetch, Listed
from tieredckpt.tiers.shared_records import parse_commit, save_of

Save = tuple[str, str]
"""Stream and save id."""


@dataclass(frozen=True, slots=True)
class Head:
    """The highest key of one checkpoint, and what lies there."""

    deletions: int
    """How many there were before: the number in the key."""
    info: ObjectInfo
    value: StoredManifest | Tombstone


class SharedCommits(Listed[StoredManifest | Tombstone]):
    """See the module. Thread-safe.

    Args:
        tier: Where they lie.
        fetch: As of :class:`Listed`.
    """

    def __init__(self, tier: Tier, fetch: Fetch[Any]) -> None:
        super().__init__(
            tier, "manifests/", TOMBSTONE_LIMIT_BYTES, parse_commit, fetch,
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

    def get(self, key: str) -> bytes:
        """What lies at one key. Raises NotFoundError, IntegrityError, TierUnavailableError."""
        return self._tier.get(key, limit=TOMBSTONE_LIMIT_BYTES + ENVELOPE_BYTES)
