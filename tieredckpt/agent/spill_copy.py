"""Copying one checkpoint into a tier; nothing is visible until all is there."""

from __future__ import annotations

from collections.abc import Callable

from tieredckpt import failpoints
from tieredckpt.agent.source import SpillSource
from tieredckpt.agent.spill_host import SpillHost
from tieredckpt.errors import NotFoundError
from tieredckpt.format.manifest import Manifest, SegmentRef, encode_attempt
from tieredckpt.tiers.catalog import Catalog
from tieredckpt.tiers.keys import segment_key


def _has(catalog: Catalog, ref: SegmentRef) -> bool:
    try:
        return catalog.tier.info(segment_key(ref.id)).size == ref.size
    except NotFoundError:
        return False


def copy_checkpoint(
    catalog: Catalog,
    job: Manifest,
    host: SpillHost,
    tier: str,
    stopping: Callable[[], bool],
    count: Callable[[int], None],
) -> None:
    """Attempts, this host's segments, the plan, then the manifest.

    Each host copies what its own ranks wrote. A tier of this host holds its part when that is
    there, and the parts of all hosts count together. Shared ones: :mod:`.shared_commit`.

    Args:
        catalog: Of the tier.
        job: The checkpoint.
        host: Where it comes from.
        tier: Which copy is read: memory's, or that of the tier above.
        stopping: Asked between two blocks; True abandons the transfer.
        count: Told of bytes that were copied.

    Raises:
        DamagedSourceError: The copy is bad, and there is no other one here.
        TierUnavailableError: The tier does not answer: to be tried again.
        CapacityError, NotFoundError, IntegrityError: As the tier and the catalog.
    """
    # Attempts first: a manifest whose attempt is unknown could not be placed on the time line.
    there = {(record.number, record.id) for record in catalog.attempts()}
    for record in host.known_attempts():
        if (record.number, record.id) not in there:
            catalog.put_attempt(encode_attempt(record))
    mine = host.own_segments(job)
    for ref in mine:
        try:
            source = SpillSource(host, tier, ref, stopping)
        except NotFoundError:
            if not _has(catalog, ref):
                raise
            continue  # copied before this host lost its memory
        with source:
            catalog.tier.put_from(segment_key(ref.id), source)
        count(ref.size)
    failpoints.reach("agent.spill.before_plan")
    if not catalog.has_plan(job.plan):
        catalog.put_plan(job.plan, host.read_plan(job.plan))
    failpoints.reach("agent.spill.before_manifest")
    needed = None if len(mine) == len(job.segments) else {ref.id for ref in mine}
    catalog.commit(host.read_manifest(job), segments=needed)
    failpoints.reach("agent.spill.after_manifest")
    for data in host.keeping.pins_of(job.save_id):
        catalog.put_record(data)
