"""Taking over what other hosts say: attempts, plans, manifests, records, failed segments.

Everything here comes from the wire, so it is validated as if hostile, and is harmless to say twice.
A manifest is taken over if its plan is here, no segment of this host's lies here otherwise than it
says, and retention would not delete it at once (so what was deleted does not come back). It is
committed elsewhere; that this host has lost its part, in a reboot, say, changes nothing of that:
the copies of others are pulled back (``agent/copies/replicator.py``).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from tieredckpt import failpoints
from tieredckpt.agent.cluster.in_doubt import Fates
from tieredckpt.agent.cluster.members import Peers
from tieredckpt.agent.host.events import Hooks
from tieredckpt.agent.peering.attempts import Attempts
from tieredckpt.agent.peering.memory_retention import MemoryRetention
from tieredckpt.agent.tiers.worker import TierWorker
from tieredckpt.errors import CapacityError, IntegrityError, TieredCkptError, TierUnavailableError
from tieredckpt.format.manifest import Manifest, SegmentRef, decode_manifest
from tieredckpt.format.plan_record import encoded_plan_id
from tieredckpt.format.records import SaveRecord, decode_save_record
from tieredckpt.policy.history import age
from tieredckpt.policy.retention import LASTING
from tieredckpt.policy.schedule import destinations
from tieredckpt.rpc.messages.peer import Push, Pushed
from tieredckpt.storage.catalog import Catalog
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.memory.slot import REPLICA_ID

REFUSED_MAX = 1 << 12
"""Checkpoints remembered as not to be asked for again."""
ELSEWHERE_MAX = 256
"""Manifests remembered that only other hosts hold, so that an attempt can go on from them."""
EARLY_MAX = 1 << 10
"""Records kept that came before their manifest."""

EARLY_BYTES_MAX = 16 << 20
ELSEWHERE_PARTS_MAX = 1 << 18
"""Segments, hosts with replicas and ancestors that they name, all together."""

# Of the process. What is compressed to kilobytes may need a hundred MiB until it is known to be
# good or bad: one message is looked at after the other, whoever sends them. Nothing waits in there.
_EXPANDING = threading.RLock()

_T = TypeVar("_T")
_NEEDS_PLAN = "its plan is not here"
_AT_ONCE = "retention would delete it at once"

log = logging.getLogger(__name__)


class Ingest:
    """Of one namespace. Thread-safe.

    Args:
        namespace: Its name.
        host_id: This host.
        lock: The node's lock.
        peers: Whether this host is in a job.
        pool: The host's slots.
        catalog: Of the memory tier.
        workers: The tiers at this moment.
        retention: Of the memory tier.
        fates: Told of failed segments.
        hooks: Told of what is new.
        committing: Segments that must not be freed meanwhile; guarded by ``lock``.
        freed: Called after slots may have become free; with the lock not held.
        attempts: Of the namespace.
    """

    def __init__(
        self,
        namespace: str,
        host_id: str,
        lock: threading.RLock,
        peers: Peers,
        pool: SlotPool,
        catalog: Catalog,
        workers: Callable[[], dict[str, TierWorker]],
        retention: MemoryRetention,
        fates: Fates,
        hooks: Hooks,
        committing: set[str],
        freed: Callable[[str], None],
        attempts: Attempts,
    ) -> None:
        self._namespace = namespace
        self._host_id = host_id
        self._lock = lock
        self._peers = peers
        self._pool = pool
        self._catalog = catalog
        self._workers = workers
        self._retention = retention
        self._fates = fates
        self._hooks = hooks
        self._committing = committing
        self._freed = freed
        self._attempts = attempts
        # One manifest at a time: two of the same save must not meet between check and commit.
        self._taking = threading.Lock()
        self._refused: OrderedDict[str, str] = OrderedDict()
        self._elsewhere: OrderedDict[str, Manifest] = OrderedDict()
        self._early: OrderedDict[str, list[bytes]] = OrderedDict()
        self.on_pins: Callable[[Sequence[tuple[SaveRecord, bytes]]], object] = lambda pins: None
        """Told of records that outlive memory (``policy.pins.LASTING``), also of checkpoints that
        are not in memory; must not wait."""
        hooks.on_refilled.append(self._enqueue)

    def take(self, push: Push, *, complete: bool = False) -> Pushed:
        """Take over what can be. Never raises for what was sent: it is left out, and logged.

        ``complete``: no more plans come, so nothing waits for them.
        """
        with _EXPANDING:
            return self._take(push, complete=complete or bool(push.plans))

    def _take(self, push: Push, *, complete: bool) -> Pushed:
        self._read(push.attempts, self._attempts.note, "an attempt record")
        # Before the manifests: what must stay for a copy's sake must not go with one that is newer.
        self.take_records(push.records)
        plans = dict(self._read(push.plans, encoded_plan_id, "a plan"))
        needed: dict[str, None] = {}
        refused = []
        # Decoded they may be large: one at a time.
        sent = self._read(push.manifests, lambda data: age(decode_manifest(data)), "a manifest")
        # The newest first: what an attempt went back behind must not look like the line, and have
        # what that attempt went on from deleted. So what is older than one whose plan is missing
        # comes again with the plan.
        for _, data in sorted(sent, key=lambda each: each[0], reverse=True):
            manifest = decode_manifest(data)
            if not needed or complete:
                why = self._take_manifest(manifest, data, plans)
            else:
                why = "" if self._catalog.has_plan(manifest.plan) else _NEEDS_PLAN
            if why == _NEEDS_PLAN:
                needed[manifest.plan] = None
            elif why:
                refused.append((manifest.save_id, why))
        if push.attempts or push.manifests:
            self._store_attempts()
        self.fail(push.failed_segments)
        return Pushed(need_plans=tuple(needed), refused=tuple(refused))

    # --- parts ------------------------------------------------------------------------------------

    def _store_attempts(self) -> None:
        """From now on attempts that those of the new checkpoints followed are refused here."""
        try:
            failpoints.reach("agent.ingest.before_attempt")
            stored = self._attempts.store()
            for call in self._hooks.on_attempt if stored else ():
                call()
            for record in stored:
                log.info(
                    "namespace %s: attempt %d (%s) of another host",
                    self._namespace, record.number, record.id,
                )  # fmt: skip
        except TieredCkptError as error:
            log.warning("namespace %s: attempt records: %s", self._namespace, error)

    def _read(
        self, sent: Sequence[bytes], read: Callable[[bytes], _T], what: str
    ) -> list[tuple[_T, bytes]]:
        """What was sent, read and as it came; what cannot be read is left out."""
        found = []
        for data in sent:
            try:
                found.append((read(data), data))
            except TieredCkptError as error:
                log.warning("namespace %s: %s that was sent: %s", self._namespace, what, error)
        return found

    def _take_manifest(self, manifest: Manifest, data: bytes, plans: dict[str, bytes]) -> str:
        """Why it is not taken over; "": it is here now."""
        if manifest.namespace != self._namespace:
            return f"it is of namespace {manifest.namespace}"
        with self._taking:
            if self.holds(manifest.save_id):
                return ""
            with self._lock:
                why = self._why_not(manifest)
                if why:
                    return why
            plan = plans.get(manifest.plan)
            if plan is None and not self._catalog.has_plan(manifest.plan):
                return _NEEDS_PLAN
            try:
                new = self._commit(manifest, data, plan)
            except (CapacityError, TierUnavailableError, IntegrityError) as error:
                log.warning("namespace %s: step %d: %s", self._namespace, manifest.step, error)
                return str(error)
            except TieredCkptError as error:  # the last user of the plan was deleted just now
                log.info("namespace %s: step %d: %s", self._namespace, manifest.step, error)
                return _NEEDS_PLAN
        log.info(
            "namespace %s: step %d of stream %s (%s) was committed by another host",
            self._namespace, manifest.step, manifest.stream, manifest.save_id,
        )  # fmt: skip
        self._freed(self._namespace)
        for call in self._hooks.on_manifest:
            call(manifest)
        self._tell_records(new)
        return ""

    def _why_not(self, manifest: Manifest) -> str:
        if self._peers.is_over() and not self.own(manifest):
            # Nothing is deleted here any more, so nothing is taken in for good.
            return "this host is in no running job"
        if self._retention.refuses(manifest) and not self._is_ordered(manifest.save_id):
            self._note_elsewhere(manifest)
            self._refused[manifest.save_id] = _AT_ONCE
            while len(self._refused) > REFUSED_MAX:
                self._refused.popitem(last=False)
            return self._refused[manifest.save_id]
        for ref in self.own(manifest):
            slot = self._pool.find(ref.id)
            if slot is None:
                if self._fates.is_disowned(ref.id):
                    return f"segment {ref.id} was released, because its save was reported as failed"
                continue  # its copy here is gone; others may have one
            label = slot.label
            if label.namespace != self._namespace:
                return f"segment {ref.id} is of namespace {label.namespace}"
            if label.session_id == REPLICA_ID and label.state == "reserved":
                continue  # it is being pulled back
            if label.state != "sealed":
                self._note_elsewhere(manifest)
                return f"segment {ref.id} is not sealed here"
            if (label.root, label.segment_bytes) != (ref.root, ref.size):
                return f"segment {ref.id} was sealed here with another root or size"
        return ""

    def _lost(self, manifest: Manifest) -> set[str]:
        """Segments that this host wrote, and has no more."""
        found = set()
        for ref in self.own(manifest):
            slot = self._pool.find(ref.id)
            if slot is None or slot.label.state != "sealed":
                found.add(ref.id)
        return found

    def _is_ordered(self, save_id: str) -> bool:
        """Whether copies of it were ordered: retention may have to leave it alone, then."""
        waiting = self._early.get(save_id, ())
        return any(decode_save_record(data).kind == "order" for data in waiting)

    def _note_elsewhere(self, manifest: Manifest) -> None:
        self._elsewhere[manifest.save_id] = manifest
        while len(self._elsewhere) > ELSEWHERE_MAX or (
            sum(map(_parts_of, self._elsewhere.values())) > ELSEWHERE_PARTS_MAX
        ):
            self._elsewhere.popitem(last=False)

    def _commit(self, manifest: Manifest, data: bytes, plan: bytes | None) -> list[SaveRecord]:
        """Returns the records that came before it."""
        own = {ref.id for ref in self.own(manifest)}
        with self._lock:
            lost = self._lost(manifest)
            self._committing |= own
        if lost:
            log.warning(
                "namespace %s: step %d of stream %s (%s): %d segments that this host wrote are not "
                "in its memory any more",
                self._namespace, manifest.step, manifest.stream, manifest.save_id, len(lost),
            )  # fmt: skip
        try:
            if plan is not None:
                self._catalog.put_plan(manifest.plan, plan)
            with self._lock:
                failpoints.reach("agent.ingest.before_manifest")
                self._catalog.commit(data, segments=own - lost)
                failpoints.reach("agent.ingest.after_manifest")
                early = self._early.pop(manifest.save_id, ())
                new = [r for each in early if (r := self._catalog.put_record(each)) is not None]
                if not lost:  # else when they have been pulled back
                    self._enqueue(manifest)
                self._retention.apply(manifest.stream)
                if not self.holds(manifest.save_id):
                    self._refused[manifest.save_id] = "a newer checkpoint has superseded it"
                return new
        finally:
            with self._lock:
                self._committing -= own

    def _enqueue(self, manifest: Manifest) -> None:
        """Let this host's segments be copied to its tiers."""
        with self._lock:
            workers = self._workers()
            for name in destinations(manifest, self._catalog.records(manifest.save_id)):
                if name in workers:
                    workers[name].enqueue(manifest)

    def take_records(self, sent: Sequence[bytes]) -> None:
        """Records about checkpoints that are here; those of others wait for their manifest."""
        new: list[SaveRecord] = []
        pins: list[tuple[SaveRecord, bytes]] = []
        for data in sent:
            try:
                record = decode_save_record(data)
                if record.namespace != self._namespace:
                    raise IntegrityError(f"it is of namespace {record.namespace}")
                if record.kind in LASTING:
                    pins.append((record, data))  # tiers may hold what memory does not
                if not self.holds(record.save_id):
                    self._keep_early(record, data)
                elif self._catalog.put_record(data):
                    new.append(record)
            except TieredCkptError as error:
                log.warning("namespace %s: a record that was sent: %s", self._namespace, error)
        if pins:
            self.on_pins(pins)
        self._tell_records(new)

    def _tell_records(self, new: Sequence[SaveRecord]) -> None:
        if new:
            for call in self._hooks.on_records:
                call(new)

    def _keep_early(self, record: SaveRecord, data: bytes) -> None:
        with self._taking:
            if record.kind == "order" and self._refused.get(record.save_id) == _AT_ONCE:
                del self._refused[record.save_id]  # its copies are wanted here, it is told
            if record.save_id in self._refused:
                return
            waiting = self._early.setdefault(record.save_id, [])
            if data not in waiting:
                waiting.append(data)
            while (
                sum(map(len, self._early.values())) > EARLY_MAX
                or sum(len(each) for those in self._early.values() for each in those)
                > EARLY_BYTES_MAX
            ):
                self._early.popitem(last=False)

    def fail(self, segments: Sequence[str]) -> set[str]:
        """These were sealed for a save that was not committed: their slots are free.

        Returns those that are of other hosts, as far as is known here.
        """
        if not segments:
            return set()
        with self._lock:
            gone = self._fates.disown(set(segments) - self._committing)
            here = {each for each in gone if self._pool.find(each) is not None}
            freed = self._fates.free(gone)
        if freed:
            self._freed(self._namespace)
        return gone - here

    # --- what is here -----------------------------------------------------------------------------

    def own(self, manifest: Manifest) -> list[SegmentRef]:
        """The segments that this host wrote."""
        return [ref for ref in manifest.segments if ref.host == self._host_id]

    def holds(self, save_id: str) -> bool:
        """Whether the checkpoint's manifest is in memory."""
        return self._catalog.get(save_id) is not None

    def wants(self, save_id: str) -> bool:
        """Whether to ask for a manifest that another host has."""
        return save_id not in self._refused and not self.holds(save_id)

    def elsewhere(self) -> tuple[Manifest, ...]:
        """Manifests that other hosts hold and this one would not keep."""
        return tuple(self._elsewhere.copy().values())


def _parts_of(manifest: Manifest) -> int:
    return len(manifest.segments) + len(manifest.replicas) + len(manifest.lineage)
