"""Copies of a plan: memory's is replaced by another tier's where it is damaged or lost."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tieredckpt.agent.memory_retention import MEMORY
from tieredckpt.agent.spill import TierWorker
from tieredckpt.errors import TieredCkptError, TierUnavailableError
from tieredckpt.tiers.catalog import Catalog

log = logging.getLogger(__name__)


def restore_plan(
    namespace: str, memory: Catalog, workers: Iterable[tuple[str, TierWorker]], plan_id: str
) -> None:
    """Put the first intact copy of another tier into memory.

    Raises:
        TierUnavailableError: There is none.
    """
    for name, worker in list(workers):
        if (catalog := worker.catalog) is None or not catalog.has_plan(plan_id):
            continue
        try:
            memory.put_plan(plan_id, catalog.read_plan(plan_id))
        except TieredCkptError as error:
            log.warning("namespace %s: plan %s in %s: %s", namespace, plan_id, name, error)
            continue
        log.warning("namespace %s: plan %s restored from %s", namespace, plan_id, name)
        return
    raise TierUnavailableError(
        f"plan {plan_id} is damaged or lost in memory and no tier has it; the next save of "
        "this structure brings it again",
        tier=MEMORY,
        outcome="not_applied",
    )
