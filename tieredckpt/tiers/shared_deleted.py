"""What becomes of a deleted checkpoint of a shared tier: it is taken back, or its segments go.

Both create the next key of it (``shared_records.py``), so one of them is refused. Segments are
deleted only after that; so who was not refused finds all of them, and keeps them.
"""

from __future__ import annotations

from tieredckpt.errors import NotFoundError, TierUnavailableError, UsageError
from tieredckpt.format.manifest import Manifest, decode_manifest
from tieredckpt.format.tombstone import (
    Tombstone,
    decode_tombstone,
    encode_tombstone,
    is_tombstone,
)
from tieredckpt.tiers.keys import manifest_key
from tieredckpt.tiers.shared_catalog import SharedCatalog
from tieredckpt.tiers.shared_records import Save


def close(catalog: SharedCatalog, tombstone: Tombstone, deletions: int, host: str) -> bool:
    """Decide that the segments of a deleted checkpoint go; False: it was taken back before.

    Args:
        catalog: Of the tier.
        tombstone: The last one of it; because of retention.
        deletions: How many there were before this one.
        host: Who decides. Informative.

    Raises:
        CapacityError, TierUnavailableError: It is not known; nothing may be deleted here.
    """
    end = Tombstone(
        namespace=tombstone.namespace, stream=tombstone.stream, save_id=tombstone.save_id,
        cause="emptied", host=host,
    )  # fmt: skip
    save = (tombstone.stream, tombstone.save_id)
    return _is_closed(_create(catalog, save, deletions + 1, encode_tombstone(end)))


def take_back(catalog: SharedCatalog, save: Save, pin: bytes) -> Manifest:
    """Make a deleted checkpoint exist again, pinned, if its segments were not given up before.

    Args:
        catalog: Of the tier, loaded.
        save: Which one.
        pin: Encoded record: retention would delete it again.

    Raises:
        UsageError: It is not deleted.
        NotFoundError: It was never there, or never whole, or it is too late.
        CapacityError, TierUnavailableError: It is not known whether it is taken back.
    """
    catalog.carry_out(catalog.notices.left())  # what is decided, and not yet buried
    name = f"checkpoint {save[1]} of stream {save[0]}"
    deletions, data = catalog.commits.read(*save)
    if not is_tombstone(data):
        raise UsageError(f"{name} is in tier {catalog.tier.name}: there is nothing to take back")
    tombstone = decode_tombstone(data)
    too_late = NotFoundError(
        f"it is too late: {name} was deleted from tier {catalog.tier.name}, and its segments too",
        key=save[1],
    )
    if tombstone.cause == "unfinished":
        raise NotFoundError(
            f"{name} was never whole in tier {catalog.tier.name}: it was given up", key=save[1]
        )
    if tombstone.cause == "emptied":
        raise too_late
    manifest = decode_manifest(tombstone.manifest)
    if not catalog.check_plan(manifest.plan) or not all(
        catalog.has_segment(ref.id, ref.size) for ref in manifest.segments
    ):
        raise too_late  # of a release that did not say so
    catalog.put_record(pin)
    found = _create(catalog, save, deletions + 1, tombstone.manifest)
    if _is_closed(found):
        raise too_late
    if is_tombstone(found):
        raise NotFoundError(f"{name} was taken back and deleted again: try again", key=save[1])
    return manifest


def _is_closed(data: bytes) -> bool:
    return is_tombstone(data) and decode_tombstone(data).cause == "emptied"


def _create(catalog: SharedCatalog, save: Save, deletions: int, data: bytes) -> bytes:
    """What lies at a key of a checkpoint now, whoever put it there.

    Raises TierUnavailableError: nothing, or nobody can tell.
    """
    key = manifest_key(*save, deletions)
    try:
        catalog.tier.put(key, data)
        found = data
    except (UsageError, TierUnavailableError) as error:
        now, found = catalog.commits.read(*save)
        if now < deletions:  # the request failed, or is late: who tries again finds out
            if isinstance(error, TierUnavailableError):
                raise
            raise TierUnavailableError(
                f"{key} is in tier {catalog.tier.name}, and is not: {error}",
                tier=catalog.tier.name, outcome="unknown",
            ) from error  # fmt: skip
        if now > deletions:
            found = catalog.commits.get(key)
    what = decode_tombstone(found) if is_tombstone(found) else decode_manifest(found)
    catalog.noted(key, what)
    return found
