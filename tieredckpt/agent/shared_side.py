"""What the worker of a tier that several hosts share has beside its queue: turns, and pruning."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tieredckpt.agent.shared_commit import Count, SharedUploads, Stopping
from tieredckpt.agent.shared_pruner import SharedPruner, finish_others
from tieredckpt.agent.spill_host import Outcome, SpillHost
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.shared_tier import SharedTimes
from tieredckpt.tiers.base import Scope, Tier
from tieredckpt.tiers.catalog import Catalog
from tieredckpt.tiers.shared_catalog import SharedCatalog
from tieredckpt.transport.messages import TierSpec

REST_S_MAX = 30.0
"""A worker looks this often whether it has become its turn to prune."""

log = logging.getLogger(__name__)


def times_of(spec: TierSpec) -> SharedTimes:
    """As configured; what is not, follows from it."""
    return SharedTimes(
        takeover_after_s=spec.takeover_after_s,
        delete_delay_s=spec.delete_delay_s,
        sweep_after_s=spec.sweep_after_s,
        prune_every_s=max(1.0, min(600.0, spec.delete_delay_s)),
        sweep_every_s=max(1.0, min(3600.0, spec.sweep_after_s / 4)),
        unnamed_for_s=min(60.0, spec.sweep_after_s / 8),
    )


def open_catalog(
    tier: Tier,
    before: SharedSide | None,
    namespace: str,
    spec: TierSpec,
    host: SpillHost,
    clock: Callable[[], float],
) -> tuple[Catalog, SharedSide | None]:
    """Read the catalog of ``tier`` anew; with the worker's part of it if hosts share the tier.

    ``before`` is that part until now: its caches are used again.

    Raises TierUnavailableError: It does not answer.
    """
    if tier.scope is Scope.HOST:
        catalog = Catalog(tier)
        catalog.load()
        catalog.load_records()
        return catalog, None
    shared = before
    if shared is None or shared.catalog.tier is not tier:
        shared = SharedSide(tier, namespace, spec, host, clock)
    else:
        shared.catalog.refresh_commits()
    shared.catalog.plan_copies.refresh()
    shared.catalog.load_records()
    return shared.catalog, shared


class SharedSide:
    """Of one tier of one namespace. For the worker's thread, but for what is said of uploads.

    Args:
        tier: The tier.
        namespace: Name of the namespace.
        spec: Of the tier.
        host: This agent.
        clock: Monotonic seconds.
        catalog: Of the tier; by default a new one.
        times: How long things take; by default as the spec says.

    Raises:
        TierUnavailableError: It does not answer.
    """

    def __init__(
        self,
        tier: Tier,
        namespace: str,
        spec: TierSpec,
        host: SpillHost,
        clock: Callable[[], float],
        *,
        catalog: SharedCatalog | None = None,
        times: SharedTimes | None = None,
    ) -> None:
        times = times or times_of(spec)
        self._clock = clock
        self.catalog = catalog or SharedCatalog(tier)
        self.uploads = SharedUploads(self.catalog, host, times, clock)
        self._pruner = SharedPruner(self.catalog, namespace, spec, host, times, clock)
        self.catalog.refresh_commits()
        # Before a restart looks what there is.
        if count := finish_others(self.catalog, times):
            log.info("tier %s of %s: committed %d that were complete", spec.name, namespace, count)

    def put_part(self, job: Manifest, stopping: Stopping, count: Count) -> Outcome | None:
        """See :meth:`SharedUploads.put_part`."""
        outcome = self.uploads.put_part(job, stopping, count)
        if outcome is not None:
            self._pruner.wake()
        return outcome

    def step(self, stopping: Stopping, count: Count) -> list[tuple[Manifest, Outcome]]:
        """Take the turns that are due, then prune if it is time; what is settled.

        Raises:
            NamespaceInUseError: Another run has taken over.
            TierUnavailableError, CapacityError: To be tried again.
        """
        settled = self.uploads.step(stopping, count)
        if settled:
            self._pruner.wake()
            return settled  # whoever waits is told first
        self._pruner.step(stopping)
        return []

    def rest_s(self) -> float:
        """How long there is nothing to do."""
        due = [each for each in (self.uploads.due_s(), self._pruner.due_s()) if each is not None]
        return min(REST_S_MAX, max(0.0, min(due, default=float("inf")) - self._clock()))
