"""What a tier's worker tells ``tieredckpt status``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tieredckpt.agent.spill_line import SpillCounts
from tieredckpt.format.manifest import AttemptRecord, Manifest, SegmentRef
from tieredckpt.policy.lag import lag_alarm, lag_of
from tieredckpt.policy.units import Every
from tieredckpt.tiers.catalog import Catalog
from tieredckpt.transport.messages import TierSpec, TierStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What tiers are compared with."""

    heads: tuple[Manifest, ...]
    """The newest candidate of each stream."""
    attempts: tuple[AttemptRecord, ...]


def tier_status(
    spec: TierSpec,
    catalog: Catalog | None,
    memory: Memory,
    own: Callable[[Manifest], Sequence[SegmentRef]],
    *,
    error: str | None,
    queued: Sequence[Manifest],
    awaited: int,
    active: Manifest | None,
    retaining: bool,
    counts: SpillCounts,
    quarantined: int,
    full: bool,
) -> TierStatus:
    """The tier, as far as it is known."""
    manifests = catalog.manifests() if catalog is not None else ()
    newest = max((m.step for m in manifests), default=None)
    moving = [*queued, active] if active is not None else queued
    lag = lag_of(memory.heads, manifests, moving, memory.attempts, own)
    limit = spec.lag_alarm or Every()
    return TierStatus(
        name=spec.name,
        url=spec.url,
        scope=spec.scope,
        available=catalog is not None and error is None,
        error=error,
        checkpoints=len(manifests),
        stored_bytes=sum(ref.size for m in manifests for ref in m.segments),
        queued=len(queued),
        awaited=awaited,
        active_save_id=active.save_id if active is not None else None,
        retaining=retaining,
        newest_step=newest,
        lag_steps=lag.steps,
        lag_s=lag.seconds,
        lag_bytes=lag.bytes,
        alarm=lag_alarm(lag, steps=limit.steps, seconds=limit.seconds),
        memory_full=full,
        dropped_total=counts.dropped,
        spilled_bytes_total=counts.bytes,
        spill_seconds_total=counts.seconds,
        quarantined=quarantined,
    )
