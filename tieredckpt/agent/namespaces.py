"""Which namespaces and sessions an agent serves: adopting, admitting, ending and purging them."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from tieredckpt import failpoints
from tieredckpt.agent.host.listeners import Listeners
from tieredckpt.agent.host.runtime import RuntimeDir, remove_empty
from tieredckpt.agent.host.sessions import Leases, Session, SessionRecord, Tickets
from tieredckpt.agent.namespace import Namespace, sealed_of
from tieredckpt.agent.peering.memory_retention import MEMORY
from tieredckpt.agent.slots.allocator import RingShape, SlotLedger
from tieredckpt.errors import (
    AgentError,
    NamespaceInUseError,
    NotFoundError,
    RemoteProtocolError,
    TieredCkptError,
    TierUnavailableError,
)
from tieredckpt.format.manifest import NAME_PATTERN, Manifest, SegmentRef, check_id, check_name
from tieredckpt.rpc.messages import agent as m
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.memory.slot import Label, SlotInfo

NAMESPACES_MAX = 1024
SESSIONS_MAX = 1024
SAVES_S = 600.0
"""A process that has sealed nothing for so long hangs, and is no obstacle to another job."""

log = logging.getLogger(__name__)


class Registry:
    """See the module. Thread-safe.

    Args:
        runtime: The runtime folder.
        tickets: Where descriptors are offered.
        pool: The slots.
        lock: The node's lock.
        host_id: This host.
        listeners: How other hosts reach this one.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        runtime: RuntimeDir,
        tickets: Tickets,
        pool: SlotPool,
        lock: threading.RLock,
        host_id: str,
        listeners: Listeners,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._runtime = runtime
        self._tickets = tickets
        self._pool = pool
        self._lock = lock
        self._host_id = host_id
        self._listeners = listeners
        # One session is opened at a time: comparing specs and starting workers is slow work, and
        # no business of the node's lock. Taken before that one.
        self._opening = threading.Lock()
        self._leases = Leases(runtime.sessions, tickets)
        self._sessions: dict[str, Session] = {}
        self._namespaces: dict[str, Namespace] = {}
        self._left_alone: set[str] = set()
        """Namespaces that lie there and could not be read: nothing of theirs may be freed."""
        self._clock, self._began_s = clock, clock()
        self._ended_s: dict[str, float] = {}
        """By namespace, when its last session ended; at most one for each that is known."""
        self.skipped_saves: Counter[str] = Counter()
        """By namespace, as sessions have reported them, also those that ended."""
        self.ledger = SlotLedger(pool, tickets, lock, self._sessions, clock=clock)

    # --- adopting ---------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Take up the live sessions and all namespaces that lie in the runtime folder."""
        for session in self._leases.adopt():
            self._sessions[session.session_id] = session
        for folder in sorted(self._runtime.namespaces.iterdir()):
            self._adopt_namespace(folder)

    def _adopt_namespace(self, folder: Path) -> None:
        try:
            check_name(folder.name, "namespace")
            namespace = self._make(folder.name)
        except (ValueError, OSError, TieredCkptError) as error:
            log.warning("%s and its sealed slots are not changed: %s", folder, error)
            self._left_alone.add(folder.name)
            return
        for bad in namespace.contents.manifests:
            if bad.error is not None:
                log.warning("namespace %s: manifest %s: %s", folder.name, bad.save_id, bad.error)
        # A commit that died between plan and manifest left a plan: the client sends it again.
        alive = {
            slot.label.segment_id
            for slot in self._pool.slots()
            if slot.label.session_id in self._sessions
        }
        with self._lock:  # another host may hold the manifest
            alive |= namespace.across.fates.undecided().keys()
        try:
            namespace.catalog.sweep_orphans(keep_segments=alive)
        except TieredCkptError as error:
            log.warning("namespace %s: orphans are not deleted: %s", folder.name, error)

    def _make(self, name: str) -> Namespace:
        namespace = Namespace(
            name,
            self._runtime,
            self._pool,
            self._lock,
            self._host_id,
            self._listeners,
            self.ledger,
            is_live=self.is_live,
            runs=self._runs,
        )
        self._namespaces[name] = namespace
        self._left_alone.discard(name)
        return namespace

    # --- opening ----------------------------------------------------------------------------------

    def open_session(self, request: m.OpenSession) -> m.SessionOpened:
        """See :class:`tieredckpt.rpc.messages.agent.OpenSession`."""
        if request.api != m.API_VERSION:
            raise AgentError(
                f"the running agent speaks API {m.API_VERSION}, the caller {request.api}: stop it "
                "with `tieredckpt agent stop` (checkpoints stay in memory), then retry",
                outcome="not_applied",
            )
        # One at a time: comparing specs and starting workers is no business of the node's lock.
        with self._opening:
            namespace = self._admit(request)
            with self._lock:
                record = msgspec.convert(request, SessionRecord, from_attributes=True)
                session = self._sessions.get(request.session_id)
                session = session or Session(request.session_id, record)
                session.record, session.adopted, session.opened = record, False, request
                if session.lease_ticket:
                    self._tickets.revoke(session.lease_ticket)
                failpoints.reach("agent.session.before_lease")
                session.lease_ticket = self._leases.open(request.session_id, session.record)
                failpoints.reach("agent.session.after_lease")
                self._sessions[request.session_id] = session
                namespace.ruling.note(request.run, request.spec)
            namespace.use_tiers()
        log.info(
            "session %s of namespace %s (local rank %d, version %s)",
            request.session_id, request.namespace, request.local_rank, request.version,
        )  # fmt: skip
        return m.SessionOpened(
            host_id=self._host_id,
            lease_ticket=session.lease_ticket,
            expected_segment_bytes=_expected_bytes(namespace.newest(), session.record),
        )

    def _admit(self, request: m.OpenSession) -> Namespace:
        """The namespace, if no live session of it is in the way of the spec."""
        with self._lock:
            for tier in request.spec.tiers:
                if not NAME_PATTERN.fullmatch(tier.name) or tier.name == MEMORY:
                    raise RemoteProtocolError(f"{tier.name[:80]!r} is no name of a tier")
            namespace = self._namespaces.get(request.namespace)
            if namespace is None:
                if len(self._namespaces) >= NAMESPACES_MAX or len(self._sessions) >= SESSIONS_MAX:
                    raise AgentError(
                        f"this agent serves {len(self._namespaces)} namespaces already: purge old "
                        "ones with `tieredckpt agent purge`",
                        outcome="not_applied",
                    )
                namespace = self._make(request.namespace)
            differences, others = list[str](), list[Session]()
            for session in list(self._sessions.values()):
                if session.namespace != request.namespace:
                    continue
                run = session.record.run
                if session.session_id == request.session_id:
                    continue
                if run != request.run and request.session_id not in self._sessions:
                    self._check_ended(session, request, namespace)
                if session.adopted and run == request.run:
                    continue  # its configuration is known from a file only
                if found := namespace.ruling.conflict(request.run, request.spec, run):
                    if self._leases.is_held(session.session_id):
                        differences, others = found, [*others, session]
                    else:
                        self._end(session.session_id)
            if others:
                ranks = ", ".join(str(s.record.local_rank) for s in others)
                raise NamespaceInUseError(
                    f"namespace {request.namespace} is open with another configuration (by local "
                    f"ranks {ranks}): {'; '.join(differences)}. Use the same configuration, "
                    "another namespace, or stop the other job",
                    differences=differences,
                )
            return namespace

    def _check_ended(self, other: Session, request: m.OpenSession, namespace: Namespace) -> None:
        """Raises NamespaceInUseError if another job saves here, which this one's would end."""
        opened, age_s = other.opened, self._clock() - other.sealed_s
        if opened is None or request.take_over or not (opened.job and request.job):
            return
        is_other = set(opened.job.splitlines()).isdisjoint(request.job.splitlines())
        if is_other and age_s < SAVES_S and self._leases.is_held(other.session_id):
            newest = namespace.newest()
            raise NamespaceInUseError(
                f"process {opened.pid} of host {self._host_id} saves into {namespace.name} (last "
                f"{age_s:.0f} s ago, newest step {newest.step if newest else None}), and the first "
                "save of this job would end it: stop it, use another namespace, or take over on "
                "purpose with TIEREDCKPT_TAKE_OVER=true"
            )

    # --- ending -----------------------------------------------------------------------------------

    def end_if_dead(self, session_id: str) -> None:
        """End a session, unless somebody holds its lease."""
        with self._lock:
            if session_id in self._sessions and not self._leases.is_held(session_id):
                self._end(session_id)

    def is_live(self, session_id: str) -> bool:
        """Whether the session is open and its process holds the lease; ends it otherwise."""
        with self._lock:
            self.end_if_dead(session_id)
            return session_id in self._sessions

    def end_dead(self) -> None:
        """End all sessions whose lease nobody holds."""
        with self._lock:
            for session_id in list(self._sessions):
                self.end_if_dead(session_id)

    def _runs(self, namespace: str) -> set[str]:
        """The runs that have sessions."""
        with self._lock:
            return {s.record.run for s in self._sessions.values() if s.namespace == namespace}

    def _end(self, session_id: str) -> None:
        session = self._sessions.pop(session_id)
        if session.namespace in self._namespaces:
            self._ended_s[session.namespace] = self._clock()
        self._leases.end(session_id)
        if (namespace := self._namespaces.get(session.namespace)) is not None:
            namespace.gatherings.drop_session(session_id)
            namespace.ruling.drop_guests()
        self.ledger.take_back(session, self._kept_of(session.namespace))
        self.ledger.forget(session)
        log.info("session %s of namespace %s ended", session_id, session.namespace)

    def _kept_of(self, name: str) -> set[str]:
        """Segments of a namespace that must stay; if it could not be read, all that are sealed."""
        if name in self._left_alone:
            return sealed_of(self._pool, name)
        namespace = self._namespaces.get(name)
        return namespace.kept_segments() if namespace is not None else set()

    def reap_slots(self) -> int:
        """Free the slots that no session and no manifest accounts for; returns how many."""
        with self._lock:
            unknown = take_up_lost(
                self._pool, list(self._namespaces.values()), complete=not self._left_alone
            )
            kept = self.ledger.drafts.ids()
            for name in (*self._namespaces, *self._left_alone):
                kept |= self._kept_of(name)
            freed = self.ledger.reap(kept, unknown)
        if freed:
            log.info("freed %d slots that no manifest or session needs", freed)
        return freed

    def purge(self, name: str) -> None:
        """Delete a namespace from memory, slots included.

        Raises:
            NotFoundError: There is no such namespace.
            NamespaceInUseError: Sessions of it are live; nothing was deleted.
        """
        with self._opening:
            with self._lock:
                found = self.namespace(name)
                if live := self.num_sessions(name):
                    raise NamespaceInUseError(
                        f"{live} processes have namespace {name} open: stop them first"
                    )
                del self._namespaces[name]
                self._ended_s.pop(name, None)
                self.skipped_saves.pop(name, None)
            found.stop()
            found.across.forget()
            with self._lock:
                found.purge()
                for slot in self.ledger.of_namespace(name):
                    self._pool.remove(slot.slot_id)
            found.ruling.forget()
            remove_empty(self._runtime.namespaces / name)

    # --- looking up -------------------------------------------------------------------------------

    def num_sessions(self, namespace: str | None = None) -> int:
        """Sessions of one namespace, or of all."""
        with self._lock:
            return sum(namespace in (None, s.namespace) for s in self._sessions.values())

    def idle_s(self, namespace: str) -> float | None:
        """Seconds without a session here, since this agent began at most; None: there is one."""
        with self._lock:
            self.end_dead()
            if self.num_sessions(namespace):
                return None
            return self._clock() - self._ended_s.get(namespace, self._began_s)

    def count_skipped(self, session: Session, skipped: int) -> None:
        """A session has skipped so many saves since its process opened it."""
        with self._lock:
            more = max(0, skipped - session.skipped_saves)
            session.skipped_saves += more
            self.skipped_saves[session.namespace] += more

    def namespaces(self) -> list[Namespace]:
        """All namespaces."""
        with self._lock:
            return list(self._namespaces.values())

    def session(self, session_id: str, namespace: str) -> tuple[Session, Namespace, RingShape]:
        """A session, its namespace, and what its ring depends on.

        Raises:
            NotFoundError: Field ``what`` is "session": it must be opened again.
        """
        with self._lock:
            session = self._sessions.get(session_id)
            found = self._namespaces.get(namespace)
            if session is None or found is None or session.namespace != namespace:
                raise NotFoundError(
                    f"no session {session_id[:64]!r} in namespace {namespace[:128]!r}",
                    key=session_id[:64],
                    what="session",
                )
            spec = found.ruling.spec_of(session.record.run)
            if spec is None or session.adopted:  # the configuration of its process counts
                raise NotFoundError("the session must be opened again", what="session")
            return session, found, found.replication.ring(spec)

    def namespace(self, namespace: str) -> Namespace:
        """A namespace by name. Raises NotFoundError, which names those that exist."""
        with self._lock:
            found = self._namespaces.get(namespace)
            if found is None:
                names = sorted(self._namespaces)[:20]
                raise NotFoundError(
                    f"this agent knows no namespace {namespace[:128]!r}; it knows "
                    f"{', '.join(names) or 'none'}",
                    key=namespace[:128],
                    what="namespace",
                )
            return found


def check_ids(*identities: str, namespace: str | None = None) -> None:
    """Names from the outside become paths, so they are validated first.

    Raises:
        RemoteProtocolError: One is not an id, or ``namespace`` is not a name.
    """
    try:
        for identity in identities:
            check_id(identity, "id")
        if namespace is not None:
            check_name(namespace, "namespace")
    except ValueError as error:
        raise RemoteProtocolError(str(error)) from error


def _expected_bytes(newest: Manifest | None, record: SessionRecord) -> int:
    """What this rank wrote last if the ranks are the same ones, else the most that any wrote."""
    sizes = [ref.size for ref in newest.segments] if newest is not None else []
    if len(sizes) == record.local_world_size:
        return sizes[record.local_rank % len(sizes)]
    return max(sizes, default=0)


def take_up_lost(
    pool: SlotPool, namespaces: Sequence[Namespace], *, complete: bool
) -> frozenset[str]:
    """Label the slots again that lost their label while no agent ran, and can be identified.

    A segment ends in its trailer, at a place that only its size tells; so each segment that a
    manifest refers to and no slot holds is looked for in each slot without a label. What is not
    found is kept as it is while it may be what somebody needs: unknown is never permission to free.

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
            "slot %s had lost its label; by its trailer it contains segment %s of namespace %s",
            slot.slot_id, ref.id, namespace,
        )  # fmt: skip
    return found
