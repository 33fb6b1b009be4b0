"""The agent's core: what requests mean. Synchronous, thread-safe, and it knows no HTTP.

Lock order: the node's lock, then a worker's. The node's lock is held over tables and small writes
into tmpfs only.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable

from tieredckpt import failpoints
from tieredckpt.agent import status as status_module
from tieredckpt.agent.data_cache import DataCache
from tieredckpt.agent.ended_runs import EndedRuns
from tieredckpt.agent.host.listeners import Listeners
from tieredckpt.agent.host.runtime import RuntimeDir
from tieredckpt.agent.host.sessions import Session, Tickets
from tieredckpt.agent.namespace import Namespace
from tieredckpt.agent.namespaces import Registry, check_ids
from tieredckpt.agent.peering.memory_retention import MEMORY
from tieredckpt.agent.tables import Tables
from tieredckpt.errors import (
    CapacityError,
    NotFoundError,
    RemoteProtocolError,
    TieredCkptError,
    TierUnavailableError,
)
from tieredckpt.format.manifest import Manifest, SegmentRef, check_host
from tieredckpt.policy.history import candidates
from tieredckpt.policy.retention import SAID
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages import kv as km
from tieredckpt.rpc.messages import no_collectives as gm
from tieredckpt.rpc.messages import peer as pm
from tieredckpt.rpc.messages.base import package_version
from tieredckpt.storage.base import OpenObject
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.memory.slot import NO_ID, REPLICA_ID

REAP_INTERVAL_S = 1.0

log = logging.getLogger(__name__)


class Node:
    """Implements :class:`.agent_server.NodeApi`, and for other hosts :class:`.PeerApi`.

    Whoever gets as far as ``peer_...`` has proven that he knows the namespace's secret; what he
    sends is validated all the same, since a host may be damaged or of another release.

    Args:
        runtime: The folder, of which this process holds the agent's lock.
        tickets: Where descriptors are offered.
        host_id: This host, as segments name it.
        survives: What its memory tier outlives, for ``status``.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        runtime: RuntimeDir,
        tickets: Tickets,
        *,
        host_id: str,
        survives: str = "process",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host_id = host_id
        self.survives = survives
        self._runtime = runtime
        self._tickets = tickets
        self._clock = clock
        self._started_s = clock()
        self._lock = threading.RLock()
        for folder in (runtime.slots, runtime.sessions, runtime.namespaces, runtime.specs):
            folder.mkdir(mode=0o700, exist_ok=True)
        self._pool = SlotPool(runtime.slots, clock=clock)
        self._listeners = Listeners(
            runtime, host_id, self, lambda session_id: self._registry.is_live(session_id),
            lambda namespace: self._registry.num_sessions(namespace) > 0,
        )  # fmt: skip
        self._registry = Registry(
            runtime, tickets, self._pool, self._lock, host_id, self._listeners, clock=clock
        )
        self._ledger = self._registry.ledger
        self._ended = EndedRuns(self._registry, self._pool, self._lock, clock=clock)
        self.tables = Tables(clock)
        self._data = DataCache(runtime.data, self._registry.is_live)
        self._stop = threading.Event()
        self._reaper = threading.Thread(target=self._reap_forever, name="tck-reaper", daemon=True)

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Adopt what lies in the runtime folder, then begin to reap, to spill, to serve peers."""
        self.adopt()
        for namespace in self._registry.namespaces():
            namespace.across.start()
            namespace.replication.start()
        self._reaper.start()

    def adopt(self) -> None:
        """Take up what lies in the runtime folder; spills resume. For who reaps himself."""
        failpoints.reach("agent.adopt.before")
        for slot in self._pool.scan():
            if slot.error:
                log.warning("slot %s is damaged: %s", slot.slot_id, slot.error)
        self._registry.adopt()
        freed = self._registry.reap_slots()
        failpoints.reach("agent.adopt.after")
        for namespace in self._registry.namespaces():
            namespace.use_tiers()
            namespace.retention.is_due = True
        log.info(
            "adopted %d slots, %d namespaces, %d sessions; %d orphan slots freed",
            len(self._pool.slots()), len(self._registry.namespaces()),
            self._registry.num_sessions(), freed,
        )  # fmt: skip

    def stop(self) -> None:
        """Stop spilling and reaping; nothing is deleted. Idempotent."""
        self._stop.set()
        self._listeners.stop()
        for namespace in self._registry.namespaces():
            namespace.stop()
        if self._reaper.is_alive():
            self._reaper.join(REAP_INTERVAL_S * 5)

    def is_busy(self) -> bool:
        """Whether sessions are open or spills under way."""
        if self._registry.num_sessions():
            return True
        if any(each.replication.is_busy() for each in self._registry.namespaces()):
            return True
        workers = [w for n in self._registry.namespaces() for w in list(n.workers.values())]
        # A tier that fails keeps its checkpoint waiting; that is work, too.
        return any(not worker.is_idle() for worker in workers)

    def _reap_forever(self) -> None:
        while not self._stop.wait(REAP_INTERVAL_S):
            try:
                self.reap()
            except Exception:  # the top of a daemon task: the next round may succeed
                log.exception("reaper: unexpected")

    def reap(self) -> None:
        """End the sessions whose lease is gone, and free what nobody accounts for."""
        self.tables.expire()
        self._registry.end_dead()
        for namespace in self._registry.namespaces():
            namespace.use_tiers()
            self._data.count(namespace.name)
        with self._lock:
            due = [each for each in self._registry.namespaces() if each.retention.is_due]
            ready = [each for each in due if catch_up(each, self._pool)]
        for namespace in ready:
            self._ledger.fulfil(namespace.name)
        self._registry.reap_slots()

    # --- sessions ---------------------------------------------------------------------------------

    def open_session(self, request: m.OpenSession) -> m.SessionOpened:
        """See :class:`tieredckpt.rpc.messages.agent.OpenSession`."""
        check_ids(request.session_id, namespace=request.namespace)
        return self._registry.open_session(request)

    def end_session(self, session_id: str) -> None:
        """A client says goodbye; ignored while somebody still holds the lease."""
        self._registry.end_if_dead(session_id)

    def check_session(self, namespace: str, session_id: str) -> None:
        """Raises NotFoundError with field ``what`` "session": the client must open it again."""
        self._registry.session(session_id, namespace)

    # --- saving -----------------------------------------------------------------------------------

    def prepare(self, namespace: str, request: m.Prepare) -> m.Prepared:
        """See :class:`tieredckpt.rpc.messages.agent.Prepare`."""
        # A trainer that was started again must find the slots of the one that just died.
        self._registry.end_dead()
        session, _, shape = self._registry.session(request.session_id, namespace)
        slots = self._ended.fitting(
            lambda more: self._ledger.prepare(session, shape, request.segment_bytes)
        )
        return m.Prepared(slots=tuple(slots))

    def reserve(self, namespace: str, request: m.Reserve) -> m.Grant:
        """See :class:`tieredckpt.rpc.messages.agent.Reserve`."""
        self._registry.end_dead()
        session, found, shape = self._registry.session(request.session_id, namespace)
        found.hear(request)
        keep = shape.spec.keep_last

        def make_room(spare: Callable[[str], bool]) -> bool:
            if found.retention.evict_leftover(spare) or found.across.make_room(request, keep):
                return True
            return found.retention.drop_left_behind(self._in_a_ring) or found.retention.relieve()

        try:
            return self._ended.fitting(
                lambda more: self._ledger.reserve(
                    session, shape, request, found.kept_segments, make_room, more
                )
            )
        except CapacityError as error:
            with self._lock:
                branches = found.retention.branches()
            raise found.across.explained(error, request.session_id, branches) from None

    def _in_a_ring(self, segment_id: str) -> bool:
        """Whether a segment's slot is one for saves, which nobody reads."""
        slot = self._pool.find(segment_id)
        copy = slot is None or slot.label.session_id == REPLICA_ID
        return slot is not None and not copy and not self._pool.is_locked(slot.slot_id)

    def seal(self, namespace: str, request: m.Seal) -> m.Sealed:
        """See :class:`tieredckpt.rpc.messages.agent.Seal`."""
        session, found, _ = self._registry.session(request.session_id, namespace)
        failpoints.reach("agent.seal.before_label")
        self._pool.seal(
            request.slot_id,
            segment_id=request.segment_id,
            segment_bytes=request.segment_bytes,
            root=request.root,
        )
        failpoints.reach("agent.seal.after_label")
        with self._lock:
            session.grant_ticket, session.sealed_s = "", self._clock()
            if session.next is not None and session.next.segment_id == request.segment_id:
                session.next = None  # that grant is the one that was used
            self._ledger.drop_unfinished(
                session,
                request.segment_id,
                len(found.catalog.manifests()),
                found.kept_segments,
            )
            grant = self._ledger.promise(
                session, request.segment_bytes, lambda s: self._predict(s, found)
            )
        return m.Sealed(next=grant)

    def ask_troubles(self, namespace: str, request: m.AskTroubles) -> m.Troubles:
        """See :class:`tieredckpt.rpc.messages.tiers.AskTroubles`."""
        found = self._registry.namespace(namespace)
        return m.Troubles(
            tiers=status_module.troubles_of(found), wants_credentials=found.wants_credentials()
        )

    def reserve_draft(self, namespace: str, request: m.ReserveDraft) -> m.Grant:
        """See :class:`tieredckpt.rpc.messages.agent.ReserveDraft`.

        Raises:
            CapacityError: There is no room for copies now.
        """
        _, found, _ = self._registry.session(request.session_id, namespace)
        room = self._ledger.drafts.begin(namespace, request, found.replication.copies.room)
        ref = SegmentRef(secrets.token_hex(16), request.segment_bytes, NO_ID, self.host_id)
        reserved, _ = self._ledger.replicas.reserve(room, ref)
        return m.Grant(
            segment_id=ref.id,
            slot_id=reserved.slot.slot_id,
            capacity_bytes=reserved.slot.capacity,
            ticket=self._tickets.offer(reserved.fd),
        )

    def seal_draft(self, namespace: str, request: m.SealDraft) -> None:
        """See :class:`tieredckpt.rpc.messages.agent.SealDraft`."""
        self._registry.session(request.session_id, namespace)
        failpoints.reach("agent.draft.before_seal")
        with self._lock:  # or the reaper frees what is sealed and unlocked since it asked
            self._ledger.drafts.seal(namespace, request)

    def _predict(self, session: Session, namespace: Namespace) -> str | None:
        mine = self._ledger.sealed_of(session)
        segment_id = namespace.retention.predict_free(list(mine))
        return mine[segment_id] if segment_id is not None else None

    def commit(self, namespace: str, request: m.Commit) -> m.Committed:
        """See :class:`tieredckpt.rpc.messages.agent.Commit`."""
        _, found, _ = self._registry.session(request.session_id, namespace)
        return found.commit(request)

    def contribute(self, namespace: str, request: m.Contribute) -> m.Gathered:
        """See :class:`tieredckpt.rpc.messages.agent.Contribute`."""
        session, found, _ = self._registry.session(request.session_id, namespace)
        gathered = found.gatherings.contribute(request, session.record.local_world_size)
        self._ledger.fulfil(namespace)
        return gathered

    def ask_gathering(self, namespace: str, request: m.AskGathering) -> m.Gathered:
        """See :class:`tieredckpt.rpc.messages.agent.AskGathering`."""
        _, found, _ = self._registry.session(request.session_id, namespace)
        return found.gatherings.ask(request)

    def save_failed(self, namespace: str, request: m.SaveFailed) -> None:
        """See :class:`tieredckpt.rpc.messages.agent.SaveFailed`."""
        session, found, _ = self._registry.session(request.session_id, namespace)
        self._registry.count_skipped(session, request.skipped)
        found.give_up(request.segments)
        self._ledger.fulfil(namespace)

    def open_attempt(self, namespace: str, request: m.OpenAttempt) -> bytes:
        """See :class:`tieredckpt.rpc.messages.agent.OpenAttempt`."""
        check_ids(request.attempt_id, request.run)
        _, found, _ = self._registry.session(request.session_id, namespace)
        return found.across.open_attempt(request)

    def reserve_data(self, namespace: str, request: m.ReserveData) -> m.DataReserved:
        """See :class:`tieredckpt.rpc.messages.agent.ReserveData`."""
        self._registry.session(request.session_id, namespace)
        return m.DataReserved(granted=self._data.reserve(namespace, request))

    # --- other hosts ------------------------------------------------------------------------------

    def listen(self, namespace: str, request: m.Listen) -> m.Listening:
        """See :class:`tieredckpt.rpc.messages.agent.Listen`."""
        self._registry.end_dead()
        _, found, _ = self._registry.session(request.session_id, namespace)
        return found.across.listen(request)

    def set_peers(self, namespace: str, request: m.SetPeers) -> None:
        """See :class:`tieredckpt.rpc.messages.agent.SetPeers`."""
        self._registry.end_dead()
        _, found, _ = self._registry.session(request.session_id, namespace)
        found.set_peers(request)

    def hand_credentials(self, namespace: str, request: m.HandCredentials) -> None:
        """See :class:`tieredckpt.rpc.messages.tiers.HandCredentials`."""
        session, found, _ = self._registry.session(request.session_id, namespace)
        found.hand_credentials(session.record.run, request)

    def peers(self, namespace: str) -> m.PeerTable:
        """See :class:`tieredckpt.rpc.messages.agent.PeerTable`."""
        return self._registry.namespace(namespace).peers.table()

    # --- reading ----------------------------------------------------------------------------------

    def holdings(self, namespace: str, within_s: float = math.inf) -> bytes:
        """Encoded holdings of a namespace; a tier has so long to say what it holds, 0: memory's."""
        failpoints.reach("agent.holdings")
        return status_module.holdings_of(self._registry.namespace(namespace), within_s=within_s)

    def plan(self, namespace: str, tier: str, plan_id: str) -> bytes:
        """An encoded plan as one tier holds it."""
        check_ids(plan_id)
        return self._registry.namespace(namespace).catalog_of(tier).read_plan(plan_id)

    def open_segment(self, namespace: str, request: m.OpenSegment) -> m.SegmentOpened:
        """See :class:`tieredckpt.rpc.messages.agent.OpenSegment`."""
        failpoints.reach("agent.open_segment")
        _, opened = self.read_segment(namespace, request.segment_id, request.tier)
        with opened:
            slot = self._pool.find(request.segment_id) if request.tier == MEMORY else None
            # The copy shares the open file description, and so the lease.
            ticket = self._tickets.offer(os.dup(opened.fileno()))
            return m.SegmentOpened(
                ticket=ticket,
                size_bytes=opened.size,
                direct=opened.direct,
                slot_id=slot.slot_id if slot is not None else None,
            )

    def read_segment(
        self, namespace: str, segment_id: str, tier: str | None
    ) -> tuple[str, OpenObject]:
        """Open a segment in ``tier``, or in the cheapest one that has it. Raises NotFoundError."""
        check_ids(segment_id)
        found = self._registry.namespace(namespace)
        names = [tier] if tier is not None else [MEMORY, *found.workers]
        for name in names[:-1]:
            with contextlib.suppress(NotFoundError):
                return name, found.open_in(name, segment_id)
        return names[-1], found.open_in(names[-1], segment_id)

    def report_damage(self, namespace: str, request: m.ReportDamage) -> None:
        """See :class:`tieredckpt.rpc.messages.agent.ReportDamage`."""
        check_ids(request.segment_id)
        found = self._registry.namespace(namespace)
        if request.host not in ("", self.host_id):
            _forward_damage(found, request)
            return
        found.catalog_of(request.tier)
        found.quarantine(request.tier, request.segment_id, request.blocks, request.reason[:500])

    def report_intact(self, namespace: str, request: m.ReportIntact) -> None:
        """See :class:`tieredckpt.rpc.messages.agent.ReportIntact`."""
        found, at = self._registry.namespace(namespace), request.read_at
        worker = found.workers.get(request.tier)
        if at is None or (worker and (at.url, at.object) == (worker.spec.url, worker.spec.object)):
            found.marks.lift(request.tier, request.segment_id, request.began_ns)

    def add_record(self, namespace: str, request: m.AddRecord) -> m.Pinned:
        """See :class:`tieredckpt.rpc.messages.agent.AddRecord`."""
        found = self._registry.namespace(namespace)
        if request.kind in SAID:
            return found.keeping.say(request)
        found.keeping.mark(request)
        return m.Pinned()

    def flush(self, namespace: str, request: m.Flush) -> m.Flushed:
        """See :class:`tieredckpt.rpc.messages.agent.Flush`."""
        return status_module.flush(self._registry.namespace(namespace), request)

    def progress(self, namespace: str, save_id: str, awaited: str = "") -> m.Progress:
        """See :class:`tieredckpt.rpc.messages.agent.Progress`."""
        return status_module.progress_of(self._registry.namespace(namespace), save_id, awaited)

    def protections(self, namespace: str) -> m.RetentionNeeds:
        """See :class:`tieredckpt.rpc.messages.agent.RetentionNeeds`."""
        return status_module.needs_of(self._registry.namespace(namespace), self._lock)

    async def kv(self, namespace: str, request: km.Kv, is_wanted: Callable[[], bool]) -> km.KvReply:
        """See :class:`tieredckpt.rpc.messages.kv.Kv`. The namespace need not be known here."""
        check_ids(namespace=namespace)
        return await self.tables.do(namespace, request, is_wanted)

    # --- what other hosts ask ---------------------------------------------------------------------

    def peer_served(self, namespace: str) -> tuple[m.HostEntry, Secret]:
        """Who this is, and what a caller must prove to know. Raises NotFoundError: not served."""
        return self._listeners.served(namespace)

    async def peer_kv(
        self, namespace: str, request: km.PeerKv, is_wanted: Callable[[], bool]
    ) -> km.KvReply:
        """See :class:`tieredckpt.rpc.messages.kv.Kv`."""
        return await self.tables.do(namespace, request.request, is_wanted)

    def peer_identify(self, namespace: str, request: pm.Identify) -> m.HostEntry:
        """Who this is; the caller is noted."""
        found = self._registry.namespace(namespace)
        caller = request.caller
        if caller is not None:
            try:
                check_host(caller.host_id, "the caller")
            except ValueError as error:
                raise RemoteProtocolError(str(error)) from error
            found.peers.learn([caller])
            found.across.watch.begin()
        return self.peer_served(namespace)[0]

    def peer_ask_holdings(self, namespace: str, request: pm.AskHoldings) -> bytes:
        """See :class:`tieredckpt.rpc.messages.peer.AskHoldings`."""
        return status_module.holdings_of(
            self._registry.namespace(namespace), frozenset(request.manifests)
        )

    def peer_ask_plan(self, namespace: str, request: pm.AskPlan) -> bytes:
        """See :class:`tieredckpt.rpc.messages.peer.AskPlan`."""
        return self.plan(namespace, request.tier, request.plan_id)

    def peer_probe(self, namespace: str, request: pm.Probe) -> bytes:
        """See :class:`tieredckpt.rpc.messages.peer.Probe`."""
        return bytes(request.size)

    def peer_push(self, namespace: str, request: pm.Push) -> pm.Pushed:
        """See :class:`tieredckpt.rpc.messages.peer.Push`."""
        return self._registry.namespace(namespace).across.take(request)

    def peer_sync(self, namespace: str, request: pm.Sync) -> pm.SyncReply:
        """See :class:`tieredckpt.rpc.messages.peer.Sync`."""
        return self._registry.namespace(namespace).across.anti_entropy.answer(request)

    def peer_forward_attempt(self, namespace: str, request: pm.ForwardAttempt) -> bytes:
        """See :class:`tieredckpt.rpc.messages.peer.ForwardAttempt`."""
        found = self._registry.namespace(namespace)
        check_ids(request.request.attempt_id, request.request.run)
        if not found.peers.is_leader:  # and not forwarded again: two might name each other
            raise TierUnavailableError(
                f"host {found.host_id} is not the leader of namespace {namespace}: the hosts of "
                "the job do not agree on the leader: restart the job",
                outcome="not_applied",
            )
        return found.across.open_attempt(request.request)

    def peer_hand_over(self, namespace: str, request: gm.HandOver) -> gm.Taken:
        """See :class:`tieredckpt.rpc.messages.no_collectives.HandOver`."""
        return self._registry.namespace(namespace).gatherings.take_over(request)

    def peer_confirm_parts(self, namespace: str, request: gm.ConfirmParts) -> gm.Confirmed:
        """See :class:`tieredckpt.rpc.messages.no_collectives.ConfirmParts`."""
        return self._registry.namespace(namespace).gatherings.confirm(request)

    def peer_bad_blocks(self, namespace: str, request: pm.BadBlocks) -> None:
        """A reader on another host found bad blocks in what this one sent."""
        check_ids(request.segment_id)
        found = self._registry.namespace(namespace)
        found.catalog_of(request.tier)
        found.quarantine(request.tier, request.segment_id, request.blocks, request.reason[:500])

    # --- operating --------------------------------------------------------------------------------

    def health(self) -> m.Health:
        """Who this is."""
        return m.Health(
            api=m.API_VERSION,
            version=package_version(),
            pid=os.getpid(),
            host_id=self.host_id,
            uptime_s=self._clock() - self._started_s,
        )

    def status(self) -> m.Status:
        """What this agent holds and does."""
        shm = os.statvfs(self._runtime.path)
        return m.Status(
            health=self.health(),
            runtime_dir=str(self._runtime.path),
            survives=self.survives,
            shm_total_bytes=shm.f_blocks * shm.f_frsize,
            shm_free_bytes=shm.f_bavail * shm.f_frsize,
            rss_bytes=status_module.resident_bytes(),
            namespaces=tuple(self._namespace_status(each) for each in self._registry.namespaces()),
        )

    def _namespace_status(self, namespace: Namespace) -> m.NamespaceStatus:
        slots = self._ledger.of_namespace(namespace.name)
        newest, spec = namespace.newest(), namespace.ruling.spec
        return m.NamespaceStatus(
            name=namespace.name,
            capacity_bytes=spec.capacity_bytes if spec is not None else 0,
            slot_bytes=sum(slot.file_bytes for slot in slots),
            data_bytes=self._data.count(namespace.name),
            slots=len(slots),
            free_slots=sum(slot.label.state == "free" for slot in slots),
            sessions=self._registry.num_sessions(namespace.name),
            checkpoints=len(namespace.catalog.manifests()),
            newest_step=newest.step if newest is not None else None,
            attempt=newest.attempt.number if newest is not None else 0,
            skipped_saves=self._registry.skipped_saves[namespace.name],
            tiers=status_module.tier_statuses(namespace),
            peers=namespace.peers.states(),
            replication=namespace.replication.status(newest.step if newest is not None else None),
            pins=namespace.keeping.pinned(),
        )

    def purge(self, namespace: str) -> None:
        """Delete a namespace from memory, slots included; lower tiers keep what they hold.

        Raises:
            NamespaceInUseError: Sessions of it are live.
        """
        self.reap()
        self._registry.purge(namespace)
        self._data.purge(namespace)
        self.tables.drop(namespace)
        log.info("namespace %s was purged from memory", namespace)


def catch_up(namespace: Namespace, pool: SlotPool) -> bool:
    """Apply retention that is due; False: not yet, ask again. The node's lock is held.

    It is after an agent's start: the one before may have ended between a commit, or a spill, and
    the retention that follows. Else the slots of an older checkpoint would be taken until the next
    one. And where only runs had sessions that do not rule, and they have ended.

    Unknown is never permission to free. So it waits for rules, and for other hosts: the time
    line may have gone on from an older checkpoint while no agent ran here. It leaves a namespace
    alone while a manifest or an attempt of it cannot be read, and a stream of which something that
    is to stay has lost its slot here: then the older one may be the only good copy.

    Args:
        namespace: Whose.
        pool: The host's slots.
    """
    catalog = namespace.catalog
    keep = namespace.ruling.keep_last()
    if keep is None or not namespace.ruling.tidies() or not namespace.peers.has_caught_up():
        return False
    if catalog.unreadable() or catalog.bad_attempts():
        return False
    namespace.retention.is_due = False
    before = len(catalog.manifests())
    try:
        for stream in sorted({manifest.stream for manifest in catalog.manifests()}):
            line = candidates(catalog.manifests(), catalog.attempts(), stream)
            if line and all(_is_sealed(namespace, pool, each) for each in line[:keep]):
                namespace.retention.apply(stream)
    except TieredCkptError as error:  # the next commit tries it again
        log.warning("namespace %s: retention after the start: %s", namespace.name, error)
    if gone := before - len(catalog.manifests()):
        log.info(
            "namespace %s: %d checkpoints that the previous agent had not deleted yet are deleted "
            "from memory", namespace.name, gone,
        )  # fmt: skip
    return True


def _is_sealed(namespace: Namespace, pool: SlotPool, manifest: Manifest) -> bool:
    """Whether this host's part of a checkpoint is here, as far as its labels tell."""
    for ref in namespace.own_segments(manifest):
        slot = pool.find(ref.id)
        if slot is None or slot.label.state != "sealed" or slot.label.root != ref.root:
            return False
    return True


def _forward_damage(namespace: Namespace, request: m.ReportDamage) -> None:
    """Tell the host whose copy is bad. Raises TierUnavailableError or NotFoundError."""
    bad = pm.BadBlocks(
        tier=request.tier,
        segment_id=request.segment_id,
        blocks=request.blocks if len(request.blocks) <= m.DAMAGED_BLOCKS_MAX else (),
        reason=request.reason[:500],
    )
    namespace.peers.ask(request.host, bad)
