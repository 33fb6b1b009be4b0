"""What the workers of a namespace's tiers ask: where bytes come from, what is wanted, who leads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from tieredckpt.agent.across import Across
from tieredckpt.agent.giving_up import GivingUp
from tieredckpt.agent.host_disks import HostDisks
from tieredckpt.agent.keeping import Keeping
from tieredckpt.agent.tier_retention import lacking
from tieredckpt.errors import NotFoundError, TieredCkptError
from tieredckpt.format.manifest import AttemptRecord, Manifest, SegmentRef
from tieredckpt.policy.host_disks import Whole
from tieredckpt.policy.timeline import candidates
from tieredckpt.tiers.base import OpenObject, unavailable
from tieredckpt.tiers.catalog import Catalog
from tieredckpt.tiers.keys import segment_key
from tieredckpt.tiers.pool import SlotPool
from tieredckpt.transport.messages import Level

if TYPE_CHECKING:
    from tieredckpt.agent.rule import Ruling
    from tieredckpt.agent.spill import TierWorker

MEMORY = "memory"

log = logging.getLogger(__name__)


class SpillSources:
    """Implements :class:`tieredckpt.agent.spill_host.SpillHost` for one namespace.

    Args:
        namespace: Its name.
        catalog: Of the memory tier.
        pool: The host's slots.
        workers: The tiers at this moment.
        across: The other hosts.
        keeping: What speaks against deleting.
        giving_up: Where checkpoints go, and go no more.
        host_disks: What other hosts hold.
        ruling: Whose rules hold.
        quarantine, forget, spilled: See :class:`SpillHost`.
    """

    def __init__(
        self,
        namespace: str,
        catalog: Catalog,
        pool: SlotPool,
        workers: Callable[[], Mapping[str, TierWorker]],
        across: Across,
        keeping: Keeping,
        giving_up: GivingUp,
        host_disks: HostDisks,
        ruling: Ruling,
        *,
        quarantine: Callable[[str, str, Sequence[int], str], None],
        forget: Callable[[str, Sequence[str]], None],
        spilled: Callable[[], None],
    ) -> None:
        self._namespace = namespace
        self._memory = catalog
        self._pool = pool
        self._workers = workers
        self._across = across
        self._giving_up = giving_up
        self._host_disks = host_disks
        self.keeping = keeping
        self.ruling = ruling
        self.host_id = across.peers.host_id
        self.quarantine = quarantine
        self.forget = forget
        self._freed = spilled

    def own_segments(self, manifest: Manifest) -> tuple[SegmentRef, ...]:
        """Those that this host's ranks wrote."""
        return self._across.own(manifest)

    def spilled(self) -> None:
        """A spill ended: memory may be freed, and the tiers below may be filled."""
        try:
            self._freed()
        except TieredCkptError as error:  # the next commit, or the next spill, tries it again
            log.warning("namespace %s: retention in memory: %s", self._namespace, error)
        workers = dict(self._workers())
        for worker in workers.values():
            if worker.spec.source != MEMORY:
                worker.wake()
                if (above := workers.get(worker.spec.source)) is not None:
                    above.poke()

    # --- where bytes come from --------------------------------------------------------------------

    def open_memory(self, segment_id: str) -> OpenObject:
        """Open a segment in memory under a lease. Raises NotFoundError."""
        return self._pool.open_segment(segment_id)

    def open_in(self, tier: str, segment_id: str) -> OpenObject:
        """Open a segment in another tier. Raises NotFoundError, TierUnavailableError."""
        catalog = self._catalog(tier)
        if catalog is None:
            raise NotFoundError(f"tier {tier} does not answer", key=segment_id, tier=tier)
        return catalog.tier.open(segment_key(segment_id))

    def _catalog(self, tier: str) -> Catalog | None:
        worker = self._workers().get(tier)
        return worker.catalog if worker is not None else None

    def is_in(self, tier: str, save_id: str) -> bool:
        """Whether a tier below memory holds this host's part of a checkpoint; never memory."""
        catalog = self._catalog(tier)
        return catalog is not None and catalog.get(save_id) is not None

    def level_in(self, tier: str, save_id: str) -> Level:
        """How far a checkpoint has come in another tier of this host."""
        worker = self._workers().get(tier)
        return worker.outcome(save_id).level if worker is not None else "not_scheduled"

    def read_plan(self, plan_id: str) -> bytes:
        """A plan in memory; one that is damaged there is first replaced by another tier's copy.

        Raises:
            TierUnavailableError: No tier has it intact: the next commit is asked to bring it.
        """
        if not self._memory.check_plan(plan_id):
            self._restore_plan(plan_id)
        return self._memory.read_plan(plan_id)

    def _restore_plan(self, plan_id: str) -> None:
        """Put the first intact copy of another tier into memory."""
        namespace = self._namespace
        for name, worker in list(self._workers().items()):
            if (catalog := worker.catalog) is None or not catalog.has_plan(plan_id):
                continue
            try:
                self._memory.put_plan(plan_id, catalog.read_plan(plan_id))
            except TieredCkptError as error:
                log.warning("namespace %s: plan %s in %s: %s", namespace, plan_id, name, error)
                continue
            log.warning("namespace %s: plan %s restored from %s", namespace, plan_id, name)
            return
        raise unavailable(
            MEMORY,
            f"plan {plan_id} is damaged or lost in memory and no tier has it; the next save of "
            "this structure brings it again",
        )

    def read_manifest(self, manifest: Manifest) -> bytes:
        """The encoded manifest. Raises NotFoundError."""
        error: TieredCkptError | None = None
        catalogs = [worker.catalog for worker in list(self._workers().values())]
        for catalog in (self._memory, *catalogs):
            try:
                if catalog is not None:
                    return catalog.read_manifest(manifest.stream, manifest.save_id)
            except TieredCkptError as failure:
                error = error or failure
        assert error is not None
        raise error

    # --- what is wanted ---------------------------------------------------------------------------

    def whole_in(self, tier: str, line: Sequence[Manifest]) -> Whole:
        """See :class:`SpillHost`."""
        return self._host_disks.ask(tier, line)

    def make_room_in(self, tier: str, beyond: Collection[str]) -> bool:
        """See :class:`SpillHost`."""
        gone = False
        for name, worker in list(self._workers().items()):
            if worker.spec.source != tier:
                continue
            waiting, unsure = worker.queued()
            queue = [m for m in waiting if m.save_id not in unsure and self.is_in(tier, m.save_id)]
            if queue and queue[0].save_id in beyond:
                gone |= self._giving_up.ask(name, queue, f"tier {tier}") is not None
        return gone

    def known_attempts(self) -> tuple[AttemptRecord, ...]:
        """Attempt records that memory holds, or a tier that others are filled from."""
        found = {(each.number, each.id): each for each in self._memory.attempts()}
        for worker in list(self._workers().values()):
            catalog = self._catalog(worker.spec.source)
            for each in catalog.attempts() if catalog is not None else ():
                found.setdefault((each.number, each.id), each)
        return tuple(found.values())

    def is_destined(self, manifest: Manifest, tier: str) -> bool:
        """Whether it is still to reach ``tier``: it was not given up."""
        return tier in self._giving_up.destinations(manifest)

    def wanted_by(self, tier: str) -> tuple[Manifest, ...]:
        """The candidates that are destined for ``tier`` and still here, oldest first."""
        worker = self._workers().get(tier)
        above = self._catalog(worker.spec.source) if worker is not None else None
        found = {m.save_id: m for m in self._memory.manifests()}
        for manifest in above.manifests() if above is not None else ():
            found.setdefault(manifest.save_id, manifest)
        manifests, attempts = tuple(found.values()), self.known_attempts()
        return tuple(
            each
            for stream in sorted({manifest.stream for manifest in manifests})
            for each in reversed(candidates(manifests, attempts, stream))
            if self.is_destined(each, tier)
        )

    def attached(self, tier: str) -> None:
        """``tier`` was read: the tiers below it may be filled from what it holds."""
        for name, worker in list(self._workers().items()):
            if worker.spec.source != tier:
                continue
            catalog, wanted = worker.catalog, self.wanted_by(name)
            if catalog is not None:
                held = {manifest.save_id for manifest in catalog.manifests()}
                wanted = tuple(each for each in wanted if each.save_id not in held)
                wanted = tuple(lacking(catalog, worker.spec, wanted, self))
            for manifest in wanted:
                worker.enqueue(manifest, sure=catalog is not None)

    def refill(self, tier: str) -> None:
        """What ``tier``, or one that is filled from it, may still lack waits from now on."""
        for name, worker in list(self._workers().items()):
            if tier in (name, worker.spec.source) and worker.catalog is None:
                for manifest in self.wanted_by(name):
                    worker.enqueue(manifest, sure=False)
