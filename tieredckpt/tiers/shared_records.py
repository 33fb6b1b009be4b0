"""The records of a shared tier, as values: called with bytes, or with why there are none."""

from __future__ import annotations

import functools
import re
from typing import Literal, TypeVar

import msgspec

from tieredckpt.format.manifest import (
    ID_PATTERN,
    NAME_PATTERN,
    Manifest,
    SegmentRef,
    decode_attempt,
    decode_manifest,
    encode_manifest,
)
from tieredckpt.format.tombstone import Tombstone, decode_tombstone, is_tombstone
from tieredckpt.tiers.contents import StoredAttempt, StoredManifest
from tieredckpt.tiers.keys import attempt_key

T = TypeVar("T")


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
    return _stored(named[0], key, data, error)


def parse_pending(key: str, data: bytes | None, error: str | None) -> StoredManifest | None:
    """A pending manifest, likewise."""
    named = save_of(key)
    return _stored(named[0], key, data, error) if named is not None and not named[1] else None


def _stored(
    named: tuple[str, str], key: str, data: bytes | None, error: str | None
) -> StoredManifest:
    manifest = decode_manifest(data) if data is not None else None
    if manifest is not None and (manifest.stream, manifest.save_id) != named:
        manifest, error = None, f"{key} is the manifest of another checkpoint"
    if manifest is None:
        return StoredManifest(
            stream=named[0], save_id=named[1], data=None, manifest=None, error=error
        )
    kept = lean(manifest)
    return StoredManifest(
        stream=kept.stream, save_id=kept.save_id, data=None, manifest=kept, error=None
    )


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


_DELETIONS = re.compile(r"[1-9][0-9]{0,5}")


def save_of(key: str) -> tuple[tuple[str, str], int] | None:
    """Stream and save id that a key of a commit names, and after how many deletions; or None."""
    _, stream, name = key.split("/") if key.count("/") == 2 else ("", "", "")
    save_id, dot, deletions = name.partition(".")
    valid = NAME_PATTERN.fullmatch(stream) and ID_PATTERN.fullmatch(save_id)
    if not valid or (dot and not _DELETIONS.fullmatch(deletions)):
        return None
    return (stream, save_id), int(deletions or 0)


def parse_attempt(key: str, data: bytes | None, error: str | None) -> StoredAttempt | None:
    """An attempt record, likewise."""
    record = decode_attempt(data) if data is not None else None
    if record is not None and attempt_key(record.number, record.id) != key:
        record, error = None, f"{key} is the record of another attempt"
    return StoredAttempt(key=key, data=data, record=record, error=error)


def parse_claim(key: str, data: bytes | None, error: str | None) -> StoredAttempt | None:
    """A claim, likewise."""
    name = key.rpartition("/")[2]
    if not (name.isascii() and name.isdigit() and len(name) <= 19):
        return None
    record = decode_attempt(data) if data is not None else None
    if record is not None and record.number != int(name):
        record, error = None, f"{key} is the claim of another attempt"
    return StoredAttempt(key=key, data=data, record=record, error=error)


def tombstone_of(
    manifest: Manifest, cause: Literal["retention", "unfinished"], host: str
) -> Tombstone:
    """The tombstone of a checkpoint."""
    return Tombstone(
        namespace=manifest.namespace, stream=manifest.stream, save_id=manifest.save_id,
        cause=cause, host=host, manifest=encode_manifest(manifest),
    )  # fmt: skip
