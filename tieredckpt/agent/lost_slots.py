"""Slots whose label was damaged while no agent ran: found again by what manifests say of segments.

A segment ends in its trailer, at a place that only its size tells; so each segment that a manifest
refers to and no slot holds is looked for in each slot without a label. What is not found is kept
as it is while it may be what somebody needs: unknown is never permission to free.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tieredckpt.agent.namespace import Namespace
from tieredckpt.errors import NotFoundError, TierUnavailableError
from tieredckpt.format.manifest import SegmentRef
from tieredckpt.tiers.pool import SlotPool
from tieredckpt.tiers.slot import Label, SlotInfo

log = logging.getLogger(__name__)


def take_up_lost(
    pool: SlotPool, namespaces: Sequence[Namespace], *, complete: bool
) -> frozenset[str]:
    """Label the slots again that can be identified.

    Args:
        pool: The slots.
        namespaces: Those whose manifests are known.
        complete: Whether that is all; if not, any of them may hold what an unknown one refers to.

    Returns:
        Ids of the slots that still have no label and may hold a segment that a manifest refers to.
    """
    stay = set()
    unlabelled = [slot for slot in pool.slots() if slot.label_lost and slot.capacity]
    certain = complete and not any(each.catalog.unreadable() for each in namespaces)
    for slot in unlabelled:
        missing = [
            (namespace.name, ref)
            for namespace in namespaces
            for manifest in namespace.catalog.manifests()
            for ref in manifest.segments
            if ref.size <= slot.capacity and pool.find(ref.id) is None
        ]
        if any(_holds(pool, slot, name, ref) for name, ref in missing):
            continue
        if missing or not certain:
            stay.add(slot.slot_id)
    return frozenset(stay)


def _holds(pool: SlotPool, slot: SlotInfo, namespace: str, ref: SegmentRef) -> bool:
    label = Label(
        state="sealed",
        namespace=namespace,
        segment_id=ref.id,
        segment_bytes=ref.size,
        root=ref.root,
    )
    try:
        found = pool.readopt(slot.slot_id, label)
    except (NotFoundError, TierUnavailableError) as error:
        log.debug("slot %s without a label: %s", slot.slot_id, error)
        return False
    if found:
        log.warning(
            "slot %s had lost its label; its trailer says that it holds segment %s of namespace %s",
            slot.slot_id, ref.id, namespace,
        )  # fmt: skip
    return found
