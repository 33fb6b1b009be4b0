"""What a tier below memory keeps of one stream: carried out by its spill thread."""

from __future__ import annotations

from tieredckpt.agent.spill_host import SpillHost
from tieredckpt.policy.retention import Keep, retain
from tieredckpt.policy.timeline import abandoned, candidates
from tieredckpt.tiers.catalog import Catalog
from tieredckpt.transport.messages import TierSpec


def retain_in_tier(catalog: Catalog, spec: TierSpec, stream: str, host: SpillHost) -> None:
    """Delete the checkpoints of ``stream`` that the tier need not keep.

    Raises:
        TierUnavailableError: Some are deleted, some are not.
    """
    manifests, attempts = catalog.manifests(), catalog.attempts()
    plan = retain(
        candidates(manifests, attempts, stream),
        abandoned(manifests, attempts, stream),
        Keep(last=spec.keep_last),
    )
    by_id = {manifest.save_id: manifest for manifest in manifests}
    for save_id in plan.delete:
        swept = catalog.remove(by_id[save_id])
        host.forget(spec.name, swept.segments)
