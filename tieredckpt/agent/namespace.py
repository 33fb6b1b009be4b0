"""One namespace of an agent: its catalog in memory, its tiers, commits and retention.

The catalog in memory is the truth about what exists there; each tier's worker has its own. All
methods block and are thread-safe; ``lock`` is the node's, held over tables and small writes into
tmpfs, never over a disk, an allocation or a spill.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence

from tieredckpt import failpoints
from tieredckpt.agent.cluster.authority import Ruling
from tieredckpt.agent.copies.replicator import Replication
from tieredckpt.agent.host.listeners import Listeners
from tieredckpt.agent.host.runtime import RuntimeDir
from tieredckpt.agent.leader.holds import Keeping
from tieredckpt.agent.leader.shedding import GivingUp, HostDisks
from tieredckpt.agent.no_collectives.participant import HostGatherings
from tieredckpt.agent.peering.attempts import Attempts
from tieredckpt.agent.peering.memory_retention import MEMORY, MemoryRetention
from tieredckpt.agent.peering.peering import Across
from tieredckpt.agent.slots.allocator import SlotLedger
from tieredckpt.agent.tiers.host_retention import lacking
from tieredckpt.agent.tiers.worker import ATTACH_WAIT_S, TierWorker
from tieredckpt.errors import (
    IntegrityError,
    NotFoundError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import AttemptRecord, Manifest, SegmentRef, decode_manifest
from tieredckpt.format.plan_record import encoded_plan_id
from tieredckpt.policy.completeness import Whole
from tieredckpt.policy.history import candidates
from tieredckpt.rpc.messages import agent as m
from tieredckpt.storage.base import OpenObject, segment_key
from tieredckpt.storage.catalog import Catalog, MemoryCatalog
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.memory.tier import MemoryTier
from tieredckpt.storage.object.supplied import Handed, Keys
from tieredckpt.storage.quarantine import QuarantineMarks

log = logging.getLogger(__name__)


class Namespace:
    """See the module. Implements :class:`tieredckpt.agent.tiers.interface.SpillHost` for its
    workers.

    Args:
        name: Validated name.
        runtime: The runtime folder.
        pool: The host's slots.
        lock: The node's lock.
        host_id: This host, as segments name it.
        listeners: How other hosts reach this one.
        ledger: Who has which slot.
        is_live: Whether a session's process still holds its lease.
        runs: Those that have sessions in the namespace of this name.
    """

    def __init__(
        self,
        name: str,
        runtime: RuntimeDir,
        pool: SlotPool,
        lock: threading.RLock,
        host_id: str,
        listeners: Listeners,
        ledger: SlotLedger,
        *,
        is_live: Callable[[str], bool],
        runs: Callable[[str], Collection[str]],
    ) -> None:
        self.name = name
        self.workers: dict[str, TierWorker] = {}
        self._pool = pool
        self._lock = lock
        self.host_id = host_id
        self._freed = ledger.fulfil
        """To be called after slots may have become free; with the lock not held."""
        self._switching = threading.Lock()  # of workers; taken before the node's lock
        self._memory = MemoryTier(pool, runtime.namespaces / name, name)
        self.catalog = MemoryCatalog(self._memory)
        self.contents = self.catalog.load()
        self.catalog.load_records()
        self.marks = QuarantineMarks(self._memory)
        self.attempts = Attempts(
            name, lock, self.catalog, lambda: tuple(self.workers.values()), is_live,
            lambda: self.across.ingest.elsewhere(),
        )  # fmt: skip
        self.retention = MemoryRetention(
            name, self.catalog, self.marks, lambda: tuple(self.workers.values()),
            lambda: self.ruling, lambda stream: self.replication.must_stay(stream),
            lambda: self.giving_up,
        )  # fmt: skip
        self._committing: set[str] = set()
        self.across = Across(
            name, runtime, host_id, listeners, lock, pool, self.catalog, lambda: self.workers,
            self.retention, self._committing, self._freed, is_live, self.attempts,
        )  # fmt: skip
        self.hooks = self.across.hooks
        # Before replication looks for what is missing.
        self.hooks.on_manifest.append(lambda made: ledger.drafts.settle(made, host_id))
        self.peers = self.across.peers
        self.ruling = Ruling(
            runtime.specs / f"{name}.json", self.catalog, self.peers, lambda: runs(name)
        )
        self._script = Handed(self.ruling.run_here)
        self.hooks.on_attempt.append(self.settle)
        self.replication = Replication(
            self.across, self.catalog, pool, ledger, self.marks, lambda: self.ruling.spec,
            self.free_memory, self,
        )  # fmt: skip
        self.keeping = Keeping(self.across, self.catalog, self.marks, lambda: self.workers)
        self._host_disks = HostDisks(self.across, self.keeping)
        self.giving_up = GivingUp(
            self.across, self.keeping, self.ruling, self.free_memory, self._host_disks.lack
        )
        self.gatherings = HostGatherings(
            lock, self.across, self.catalog.manifests, self.commit, self._check_sealed, is_live,
            pool,
        )  # fmt: skip

    # --- configuration ----------------------------------------------------------------------------

    def settle(self, run: str = "") -> None:
        """An attempt became known here, or ``run`` saves: from now on the run of the newest attempt
        rules, if this host has sessions of it. Never raises, and does not wait.
        """
        try:
            with self._lock:
                is_new = self.ruling.settle(run)
        except TieredCkptError as error:  # the agent looks again every second
            log.warning("namespace %s: the configuration is unchanged: %s", self.name, error)
            return
        self.peers.take_up(self.ruling.newest_run() or run)
        for worker in self.workers.values() if is_new else ():
            worker.poke()

    def use_tiers(self) -> None:
        """:meth:`settle`, then have the tiers attached that are configured now: workers of others
        stop, new ones start.
        """
        self.settle()
        with self._switching:
            with self._lock:
                wanted = self.ruling.tiers()
                kept = {n: w for n, w in self.workers.items() if wanted.get(n) == w.spec}
                old = [w for n, w in self.workers.items() if n not in kept]
                missing = [tier for name, tier in wanted.items() if name not in kept]
                new = {t.name: TierWorker(t, self.name, self, script=self._script) for t in missing}
                self.workers = {name: kept.get(name) or new[name] for name in wanted}
                # Until a tier has said what it holds, memory keeps what may be missing there.
                for tier in new:
                    self.attached(tier)
            # A folder that changes hands inside this agent is locked until its old worker is gone.
            for worker in old:
                worker.stop()
            for worker in new.values():
                worker.start()

    def hand_credentials(self, run: str, request: m.HandCredentials) -> None:
        """See :class:`tieredckpt.rpc.messages.tiers.HandCredentials`."""
        keys = Keys(request.access_key, request.secret_key, request.token, request.expires_at_s)
        is_new = self._script.give(run, keys)
        for worker in list(self.workers.values()):
            if is_new and worker.spec.object.of_script and worker.why() is not None:
                worker.poke()

    def wants_credentials(self) -> bool:
        """Whether a tier cannot go on without others of the training script."""
        with_script = any(w.spec.object.of_script for w in list(self.workers.values()))
        return with_script and self._script.are_wanted()

    def set_peers(self, request: m.SetPeers) -> None:
        """See :class:`tieredckpt.rpc.messages.agent.SetPeers`.

        Beside sessions of the run that rules it only says where hosts are, until that run saves.
        """
        term = self.ruling.term()
        later = term is not None and request.run != term and self.ruling.rules_here()
        self.across.set_peers(request, later=later)
        self.settle()

    def stop(self) -> None:
        """Stop all workers; what they were copying is abandoned."""
        self.keeping.stop()
        self.across.stop()  # before the others: a pull that waits for another host ends
        self.replication.stop()
        for worker in list(self.workers.values()):
            worker.stop()

    # --- what exists ------------------------------------------------------------------------------

    def kept_segments(self) -> set[str]:
        """Segments of a manifest in memory, of a running commit, or of a save that others join."""
        with self._lock:
            kept = {ref.id for each in self.catalog.manifests() for ref in each.segments}
            if self.catalog.unreadable():
                # A damaged manifest may have a good copy in another tier: until a newer checkpoint
                # exists, whatever it may refer to stays.
                kept |= sealed_of(self._pool, self.name)
            kept |= self.across.fates.undecided().keys()
            return kept | self._committing | self.gatherings.segments()

    def heads(self) -> list[Manifest]:
        """The newest candidate in memory of each stream."""
        manifests, attempts = self.catalog.manifests(), self.catalog.attempts()
        streams = sorted({manifest.stream for manifest in manifests})
        found = [candidates(manifests, attempts, stream)[:1] for stream in streams]
        return [manifest for newest in found for manifest in newest]

    def newest(self) -> Manifest | None:
        """The newest candidate in memory, of the stream that was saved last."""
        return max(self.heads(), key=lambda each: (each.attempt.number, each.step), default=None)

    # --- commit -----------------------------------------------------------------------------------

    def commit(self, request: m.Commit) -> m.Committed:
        """See :class:`tieredckpt.rpc.messages.agent.Commit`."""
        data, plan = request.manifest, request.plan
        manifest = decode_manifest(data)
        if manifest.namespace != self.name:
            raise UsageError(f"a manifest of namespace {manifest.namespace} sent to {self.name}")
        if plan is not None and encoded_plan_id(plan) != manifest.plan:
            raise IntegrityError(
                f"the plan is not the one that the manifest names ({manifest.plan})",
                key=manifest.plan,
            )
        begins = all(each.attempt != manifest.attempt for each in self.catalog.manifests())
        if not self._commit(manifest, request):
            return m.Committed(need_plan=True)
        # Also when it was committed before: whoever asks again may have lost the agent that had
        # not told the others yet.
        self._freed(self.name)
        if begins:
            self.use_tiers()
        self.across.committed(manifest, data, plan, begins=begins)
        return m.Committed(need_plan=False)

    def _commit(self, manifest: Manifest, request: m.Commit) -> bool:
        """False: the plan is not here, nothing was committed."""
        data, plan = request.manifest, request.plan
        ids = {ref.id for ref in manifest.segments}
        # Read anew each time, and not under the lock: checkpoints depend on it for as long as the
        # structure lives, and the one who can replace it is asking.
        has_plan = self.catalog.check_plan(manifest.plan)
        self.attempts.look()
        with self._lock:
            if self._is_committed(manifest, data):
                self.attempts.committed(manifest, request)  # an agent may have died before that
                return True
            self.attempts.check(manifest, request)
            for ref in manifest.segments:
                self._check_sealed(ref)
            if plan is None and not has_plan:
                return False
            # From here on a reserve or the reaper leaves these segments alone.
            self._committing |= ids
        try:
            failpoints.reach("agent.commit.before_plan")
            if plan is not None:
                self.catalog.put_plan(manifest.plan, plan)
            with self._lock:
                # The last checkpoint that used it may have been evicted meanwhile.
                if not self.catalog.has_plan(manifest.plan):
                    return False
                self.attempts.check(manifest, request)  # one may have been opened meanwhile
                self.across.fates.check(manifest.segments)
                failpoints.reach("agent.commit.before_manifest")
                own = {ref.id for ref in self.own_segments(manifest)}
                self.catalog.commit(data, segments=own)
                failpoints.reach("agent.commit.after_manifest")
                self.attempts.committed(manifest, request)
                self.settle(request.run)  # its first checkpoint: from now on its rules hold
                try:
                    for name in self.giving_up.destinations(manifest):
                        if name in self.workers:
                            self.workers[name].enqueue(manifest)
                    self._discard_unreadable(manifest.stream)
                    self.retention.apply(manifest.stream)
                except TieredCkptError as error:  # it is committed: nobody may hear that it failed
                    log.warning("namespace %s: step %d: %s", self.name, manifest.step, error)
        finally:
            with self._lock:
                self._committing -= ids
        return True

    def give_up(self, segments: Sequence[str]) -> None:
        """These were sealed for a save that will not be committed; what a manifest names stays."""
        with self._lock:
            kept = self.gatherings.segments()
            if self.catalog.unreadable():
                kept |= self.kept_segments()
        self.across.give_up(each for each in segments if each not in kept)

    def hear(self, request: m.Reserve) -> None:
        """A rank goes on to its next save, and says how the ones before ended: see ``before``."""
        failed = [each.segment_id for each in request.before if each.fate == "failed"]
        with self._lock:
            mine = self.across.fates.undecided()
        self.give_up([each for each in failed if mine.get(each) == request.session_id])

    def _is_committed(self, manifest: Manifest, data: bytes) -> bool:
        if self.catalog.get(manifest.save_id) is None:
            return False
        if self.catalog.read_manifest(manifest.stream, manifest.save_id) != data:
            raise UsageError(f"save {manifest.save_id} is committed already, with other contents")
        return True

    def _check_sealed(self, ref: SegmentRef) -> None:
        if ref.host != self.host_id:
            self.across.check_member(ref)
            return
        slot = self._pool.find(ref.id)
        if slot is None or slot.label.state != "sealed" or slot.label.namespace != self.name:
            raise NotFoundError(
                f"segment {ref.id} is not sealed in namespace {self.name}: nothing was committed",
                key=ref.id,
                what="segment",
            )
        if (slot.label.root, slot.label.segment_bytes) != (ref.root, ref.size):
            raise IntegrityError(
                f"segment {ref.id} was sealed with another root or size: nothing was committed",
                tier=MEMORY,
                key=ref.id,
                expected=ref.root,
                actual=slot.label.root,
            )

    def _discard_unreadable(self, committed: str) -> None:
        # One of a later release is whole: going back to that release must find it. Those of other
        # streams stay until these, too, have a newer checkpoint.
        for stream, save_id in self.catalog.unreadable(newer=False):
            if stream != committed:
                continue
            log.warning("namespace %s: damaged manifest %s is discarded", self.name, save_id)
            self.catalog.discard(stream, save_id)

    def own_segments(self, manifest: Manifest) -> tuple[SegmentRef, ...]:
        """Those that this host's ranks wrote."""
        return self.across.own(manifest)

    # --- what workers call ------------------------------------------------------------------------

    def quarantine(self, tier: str, segment_id: str, blocks: Sequence[int], reason: str) -> None:
        """Remember a bad copy; no blocks: all of it."""
        what = f"{len(blocks)} blocks from {min(blocks)}" if blocks else "the whole copy"
        log.warning(
            "namespace %s: %s copy of segment %s is bad (%s): %s",
            self.name, tier, segment_id, what, reason,
        )  # fmt: skip
        self.marks.add(tier, segment_id, blocks, reason)
        self.replication.wake()  # a bad copy of another host's segment is made anew

    def forget(self, tier: str, segment_ids: Sequence[str]) -> None:
        """These copies are deleted: their marks go too."""
        for segment_id in segment_ids:
            self.marks.forget(tier, segment_id)

    def free_memory(self) -> None:
        """Memory may let go of something: what need not stay there goes."""
        with self._lock:
            for stream in {manifest.stream for manifest in self.catalog.manifests()}:
                self.retention.apply(stream)
        self._freed(self.name)

    def spilled(self) -> None:
        """A spill ended: memory may be freed, and the tiers below may be filled."""
        try:
            self.free_memory()
        except TieredCkptError as error:  # the next commit, or the next spill, tries it again
            log.warning("namespace %s: retention in memory: %s", self.name, error)
        workers = dict(self.workers)
        for worker in workers.values():
            if worker.spec.source != MEMORY:
                worker.wake()
                if (above := workers.get(worker.spec.source)) is not None:
                    above.poke()

    # --- where a spill's bytes come from ----------------------------------------------------------

    def open_memory(self, segment_id: str) -> OpenObject:
        """Open a segment in memory under a lease. Raises NotFoundError."""
        return self._pool.open_segment(segment_id)

    def open_above(self, tier: str, segment_id: str) -> OpenObject:
        """Open a segment in the tier that a spill is filled from, without waiting for that tier.

        Raises NotFoundError, TierUnavailableError.
        """
        catalog = self._attached(tier)
        if catalog is None:
            raise NotFoundError(f"tier {tier} does not answer", key=segment_id, tier=tier)
        return catalog.tier.open(segment_key(segment_id))

    def _attached(self, tier: str) -> Catalog | None:
        """The catalog of a tier below memory; None: it was not read yet."""
        worker = self.workers.get(tier)
        return worker.catalog if worker is not None else None

    def is_in(self, tier: str, save_id: str) -> bool:
        """Whether a tier below memory holds this host's part of a checkpoint; never memory."""
        catalog = self._attached(tier)
        return catalog is not None and catalog.get(save_id) is not None

    def level_in(self, tier: str, save_id: str) -> m.Level:
        """How far a checkpoint has come in another tier of this host."""
        worker = self.workers.get(tier)
        return worker.outcome(save_id).level if worker is not None else "not_scheduled"

    def read_plan(self, plan_id: str) -> bytes:
        """A plan in memory; one that is damaged there is first replaced by another tier's copy.

        Raises:
            TierUnavailableError: No tier has it intact: the next commit is asked to bring it.
        """
        if not self.catalog.check_plan(plan_id):
            self._restore_plan(plan_id)
        return self.catalog.read_plan(plan_id)

    def _restore_plan(self, plan_id: str) -> None:
        """Put the first intact copy of another tier into memory."""
        for name, worker in list(self.workers.items()):
            try:
                if (catalog := worker.catalog) is None or not catalog.has_plan(plan_id):
                    continue
                self.catalog.put_plan(plan_id, catalog.read_plan(plan_id))
            except TieredCkptError as error:
                log.warning("namespace %s: plan %s in %s: %s", self.name, plan_id, name, error)
                continue
            log.warning("namespace %s: plan %s restored from %s", self.name, plan_id, name)
            return
        raise TierUnavailableError(
            f"plan {plan_id} is damaged or lost in memory and no tier has it; the next save of "
            "this structure brings it again",
            tier=MEMORY,
            outcome="not_applied",
        )

    def read_manifest(self, manifest: Manifest) -> bytes:
        """The encoded manifest. Raises NotFoundError."""
        error: TieredCkptError | None = None
        catalogs = [worker.catalog for worker in list(self.workers.values())]
        for catalog in (self.catalog, *catalogs):
            try:
                if catalog is not None:
                    return catalog.read_manifest(manifest.stream, manifest.save_id)
            except TieredCkptError as failure:
                error = error or failure
        assert error is not None
        raise error

    # --- what tiers are to be given ---------------------------------------------------------------

    def whole_in(self, tier: str, line: Sequence[Manifest]) -> Whole:
        """See :class:`tieredckpt.agent.tiers.interface.SpillHost`."""
        return self._host_disks.ask(tier, line)

    def make_room_in(self, tier: str, beyond: Collection[str]) -> bool:
        """See :class:`tieredckpt.agent.tiers.interface.SpillHost`."""
        gone = False
        for name, worker in list(self.workers.items()):
            if worker.spec.source != tier:
                continue
            waiting, unsure = worker.queued()
            queue = [m for m in waiting if m.save_id not in unsure and self.is_in(tier, m.save_id)]
            if queue and queue[0].save_id in beyond:
                gone |= self.giving_up.ask(name, queue, f"tier {tier}") is not None
        return gone

    def known_attempts(self) -> tuple[AttemptRecord, ...]:
        """Attempt records that memory holds, or a tier that others are filled from."""
        found = {(each.number, each.id): each for each in self.catalog.attempts()}
        for worker in list(self.workers.values()):
            catalog = self._attached(worker.spec.source)
            for each in catalog.attempts() if catalog is not None else ():
                found.setdefault((each.number, each.id), each)
        return tuple(found.values())

    def is_destined(self, manifest: Manifest, tier: str) -> bool:
        """Whether it is still to reach ``tier``: it was not given up."""
        return tier in self.giving_up.destinations(manifest)

    def wanted_by(self, tier: str) -> tuple[Manifest, ...]:
        """The candidates that are destined for ``tier`` and still here, oldest first."""
        worker = self.workers.get(tier)
        above = self._attached(worker.spec.source) if worker is not None else None
        found = {m.save_id: m for m in self.catalog.manifests()}
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
        """``tier`` is new, or was read: what it, or the tiers below it, may lack waits for them
        from now on.
        """
        for name, worker in list(self.workers.items()):
            catalog = worker.catalog
            if tier != worker.spec.source and (tier != name or catalog is not None):
                continue
            wanted = self.wanted_by(name)
            if catalog is not None:
                wanted = tuple(lacking(catalog, worker.spec, wanted, self))
            for manifest in wanted:
                worker.enqueue(manifest, sure=catalog is not None)

    # --- reading ----------------------------------------------------------------------------------

    def catalog_of(self, tier: str) -> Catalog:
        """The catalog of one tier, "memory" included.

        Raises:
            NotFoundError: The namespace has no such tier, or it does not answer.
        """
        if tier == MEMORY:
            return self.catalog
        worker = self.workers.get(tier)
        catalog = worker.attach(ATTACH_WAIT_S) if worker is not None else None
        if catalog is None:
            reason = f": {worker.why()}" if worker is not None else ""
            text = f"namespace {self.name} has no tier {tier!r} that answers{reason}"
            raise NotFoundError(text, key=tier, what="tier")
        return catalog

    def open_in(self, tier: str, segment_id: str) -> OpenObject:
        """Open a segment to read it; its checkpoint stays in ``tier`` meanwhile.

        Raises NotFoundError.
        """
        opened = self.catalog_of(tier).tier.open(segment_key(segment_id))
        self.keeping.opened(tier, segment_id)
        return opened

    def purge(self) -> None:
        """Delete everything that memory holds of this namespace. The caller holds the lock."""
        for manifest in self.catalog.manifests():
            self.catalog.remove(manifest)
        for each in self.catalog.load().manifests:
            self.catalog.discard(each.stream, each.save_id)
        self.catalog.sweep_orphans()
        for prefix in ("attempts/", "quarantine/", "plans/", "records/"):
            for info in list(self._memory.list(prefix)):
                try:
                    self._memory.delete(info.key)
                except TieredCkptError as error:
                    log.warning("namespace %s: %s: %s", self.name, info.key, error)


def sealed_of(pool: SlotPool, namespace: str) -> set[str]:
    """The segments that lie sealed in the slots of a namespace."""
    labels = (slot.label for slot in pool.slots())
    return {x.segment_id for x in labels if x.state == "sealed" and x.namespace == namespace}
