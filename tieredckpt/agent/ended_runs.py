"""Makes room in the host's memory by what ended runs hold, and names these runs if it cannot.

Runs of other namespaces stay in memory after their end, so that a restart is fast. A new run that
does not fit removes their free slots, and then their older checkpoints that are complete in a tier
below memory (:func:`tieredckpt.policy.capacity.can_go`), if that makes room. The tiers are listed
anew for that: somebody may have emptied a bucket since. Blocks there are not read, so the newest
checkpoint of each stream stays. The rest is for a person to decide.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from tieredckpt.agent.namespace import Namespace
from tieredckpt.agent.namespaces import Registry
from tieredckpt.agent.peering.memory_retention import MEMORY
from tieredckpt.agent.status import tier_facts
from tieredckpt.errors import CapacityError, TieredCkptError
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import SaveRecord
from tieredckpt.policy.capacity import IdleRun, Stored, can_go
from tieredckpt.policy.retention import pin_reason
from tieredckpt.storage.headroom import format_mib
from tieredckpt.storage.holdings import TierFacts
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.memory.slot import SlotInfo

READ_S = 10.0
"""Longest wait for tiers; training waits meanwhile."""
AGAIN_S = 10.0
"""After nothing was found that could go, it is not looked again for this time."""
NAMED_MAX = 5
"""Runs that one error names."""
_HOST_LIMITS = ("file system", "memory cgroup", "host memory")

T = TypeVar("T")
log = logging.getLogger(__name__)


class EndedRuns:
    """See the module. Thread-safe.

    Args:
        registry: All namespaces and sessions.
        pool: The host's slots.
        lock: The node's lock.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        registry: Registry,
        pool: SlotPool,
        lock: threading.RLock,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._pool = pool
        self._lock = lock
        self._clock = clock
        self._making = threading.Lock()
        """Tiers are read under it; taken before the node's lock."""
        self._made = 0
        """How often room was made."""
        self._vain_until_s = -AGAIN_S

    def fitting(self, call: Callable[[Callable[[CapacityError, float], bool]], T]) -> T:
        """The result of ``call``, which is repeated as long as room can be made for it.

        It is given a function that makes room for it in between, outside of the node's lock, in
        the seconds that it is given.

        Raises:
            CapacityError: Of the call; it names the ended runs that hold memory.
        """
        seen = self._made

        def more(error: CapacityError, within_s: float) -> bool:
            nonlocal seen
            found = self._make_room(error, seen, within_s)
            seen = self._made
            return found

        while True:
            try:
                return call(more)
            except CapacityError as error:
                if not more(error, READ_S):
                    raise self._explained(error) from None

    def _make_room(self, error: CapacityError, seen: int, within_s: float) -> bool:
        """Whether it may fit now: something went, for this call or for another one."""
        if error.fields.get("limit") not in _HOST_LIMITS:
            return False
        missing = int(error.fields["needed_bytes"]) - int(error.fields["available_bytes"])
        with self._making:
            if self._made != seen:
                return True
            if self._clock() < self._vain_until_s:
                return False
            found = self._free(missing, min(within_s, READ_S))
            self._made += found
            if not found:
                self._vain_until_s = self._clock() + AGAIN_S
            return found

    def _free(self, missing_bytes: int, within_s: float) -> bool:
        """Delete what makes room for so many bytes, or nothing if all of it would not."""
        idle, until_s = self._idle(), time.monotonic() + within_s
        left = missing_bytes - sum(s.file_bytes for run in idle for s in self._empty(run))
        going: list[tuple[Namespace, Manifest, list[Stored]]] = []
        for run in idle if left > 0 else ():
            stored = self._read(run, until_s)
            facts = self._facts(run)
            for manifest in can_go(facts, stored) if facts is not None and left > 0 else ():
                left -= sum(slot.file_bytes for slot in self._slots(manifest))
                going.append((run, manifest, stored))
                if left <= 0:
                    break
        if left > 0:
            return False
        removed = sum(self._pool.remove(s.slot_id) for run in idle for s in self._empty(run))
        return sum(self._delete(*each) for each in going) + removed > 0

    def _idle(self) -> list[Namespace]:
        """The one that ended first comes first."""
        found = [(self._registry.idle_s(n.name), n) for n in self._registry.namespaces()]
        idle = [(idle_s, run) for idle_s, run in found if idle_s is not None]
        return [run for _, run in sorted(idle, key=lambda each: (-each[0], each[1].name))]

    def _empty(self, run: Namespace) -> list[SlotInfo]:
        """The slots of an ended run that hold nothing."""
        with self._lock:
            if self._registry.idle_s(run.name) is None:
                return []
            slots = self._registry.ledger.of_namespace(run.name)
            return [s for s in slots if s.label.state == "free" and not s.label_lost]

    def _slots(self, manifest: Manifest) -> list[SlotInfo]:
        return [slot for ref in manifest.segments if (slot := self._pool.find(ref.id))]

    def _read(self, run: Namespace, until_s: float) -> list[Stored]:
        """What the tiers of an ended run hold, if they can be read until then."""
        facts = self._facts(run)
        # Without I/O: what its tiers held when they were read last.
        workers = [w for w in run.workers.values() if w.catalog is not None]
        known = {m.save_id for w in workers for m in (w.catalog.manifests() if w.catalog else ())}
        left_s = until_s - time.monotonic()
        if facts is None or left_s <= 0 or not any(m.save_id in known for m in facts.saves):
            return []
        return [_stored(each) for each in tier_facts(run, workers, within_s=left_s)]

    def _delete(self, run: Namespace, manifest: Manifest, stored: list[Stored]) -> bool:
        with self._lock:
            facts = self._facts(run)  # a process, a reader or a pin may have come meanwhile
            catalogs = [w.catalog for w in run.workers.values() if w.catalog is not None]
            still = any(c.get(manifest.save_id) is not None for c in catalogs)
            if facts is None or not still or manifest not in can_go(facts, stored):
                return False
            slots = self._slots(manifest)
            try:
                run.retention.delete(manifest)
                for slot in slots:
                    self._pool.remove(slot.slot_id)
            except TieredCkptError as error:
                log.warning("namespace %s: step %d: %s", run.name, manifest.step, error)
                return False
        log.warning(
            "namespace %s has ended: step %d (%s), which a tier below memory holds, is deleted "
            "from memory to make room for another run",
            run.name, manifest.step, manifest.save_id,
        )  # fmt: skip
        return True

    def _facts(self, run: Namespace) -> IdleRun | None:
        """None: it has a process here, or was purged."""
        with self._lock:
            idle_s = self._registry.idle_s(run.name)
            if idle_s is None or run not in self._registry.namespaces():
                return None
            saves = run.catalog.manifests()
            needs = run.keeping.needs_of(MEMORY, saves)
            return IdleRun(
                idle_s=idle_s,
                other_hosts=run.peers.active,
                unreadable=bool(run.catalog.unreadable() or run.catalog.bad_attempts()),
                saves=saves,
                needed=frozenset(
                    m.save_id
                    for m in saves
                    if needs.wanted_by.get(m.save_id)
                    or m.save_id in needs.in_use
                    or pin_reason(self._said(run, m)) is not None
                    or self._is_read(m)
                ),
            )

    def _said(self, run: Namespace, manifest: Manifest) -> tuple[SaveRecord, ...]:
        save_id = manifest.save_id
        return (*run.catalog.records(save_id), *run.keeping.records_of(save_id))

    def _is_read(self, manifest: Manifest) -> bool:
        return any(self._pool.is_locked(slot.slot_id) for slot in self._slots(manifest))

    def _explained(self, error: CapacityError) -> CapacityError:
        """``error`` with the ended runs that hold memory, and the command that frees it."""
        if error.fields.get("limit") not in _HOST_LIMITS:
            return error
        found = []
        for run in self._idle():
            held = sum(s.file_bytes for s in self._registry.ledger.of_namespace(run.name))
            if held:
                found.append((held, run))
        if not found:
            return error
        found.sort(key=lambda each: -each[0])
        name = max(found, key=lambda each: (bool(_tiers(each[1])), each[0]))[1].name
        named = [f"{run.name} {format_mib(held)}{_about(run)}" for held, run in found[:NAMED_MAX]]
        more = f", and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
        return CapacityError(
            f"{error.message}. Memory is held by runs without a process here: {', '.join(named)}"
            f"{more}. `tieredckpt agent purge --namespace {name}` deletes a run from memory, also "
            "what is nowhere else: look at `tieredckpt ls` and `verify` with this namespace before",
            **error.fields,
        )


def _about(run: Namespace) -> str:
    newest = run.newest()
    if newest is None:
        return ""
    tiers = _tiers(run)
    where = f"also in {', '.join(tiers)}" if tiers else "in no tier below memory"
    others = "; other hosts may go on with it" if run.peers.active else ""
    return f" (newest step {newest.step}, {where}{others})"


def _tiers(run: Namespace) -> list[str]:
    """Those that had the newest checkpoint when they were read last."""
    newest = run.newest()
    catalogs = {name: worker.catalog for name, worker in run.workers.items()}
    return [
        name
        for name, catalog in catalogs.items()
        if newest is not None and catalog is not None and catalog.get(newest.save_id) is not None
    ]


def _stored(facts: TierFacts) -> Stored:
    return Stored(
        saves=frozenset(each.save_id for each in facts.manifests if each.manifest is not None),
        plans=frozenset(facts.plans),
        segments={
            each.id: (each.size, each.root)
            for each in facts.segments
            if each.error is None and not each.bad_blocks
        },
    )
