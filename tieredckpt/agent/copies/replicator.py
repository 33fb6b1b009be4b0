"""Replication of one namespace on one host: it pulls what it is told to keep, and says so.

The leader orders (``agent/copies/leader.py``), holders pull (``agent/copies/holder.py``) and
acknowledge; what is known is in records (``agent/copies/state.py``). One thread pulls, one decides
on the leader; neither exists before another host and replicas are known. Retention asks here what
must stay.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tieredckpt.agent.cluster.members import Peers
from tieredckpt.agent.copies.holder import CopiesHere
from tieredckpt.agent.copies.leader import REPAIR_PAUSE_S, Orders
from tieredckpt.agent.copies.pull import PullStoppedError, TiersHere
from tieredckpt.agent.copies.state import KnownSaves
from tieredckpt.agent.peering.peering import Across
from tieredckpt.agent.slots.allocator import RingShape, SlotLedger
from tieredckpt.errors import CapacityError, IntegrityError, NotFoundError, TieredCkptError
from tieredckpt.format.manifest import Manifest, SegmentRef
from tieredckpt.format.records import SaveRecord
from tieredckpt.policy.replication import (
    Pull,
    is_failed,
    is_ordered,
    is_replicated,
    newest_replicated,
    ordered_and_open,
    progress,
    was_replicated,
)
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.peer import Push
from tieredckpt.storage.catalog import Catalog
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.quarantine import QuarantineMarks

RETRY_S = 0.5
RETRY_S_MAX = 15.0
ACK_WAIT_S = 5.0
"""The leader is told again what did not arrive after so long; anti-entropy does it too, later."""
HISTORY_MAX = 1024
"""Checkpoints whose outcome is remembered after retention has deleted them here."""
STOP_WAIT_S = 10.0
AFTER_BUG_S = 5.0
"""Pause after an unexpected failure, so that it does not fill the log."""

log = logging.getLogger(__name__)


class Background:
    """A thread that does one thing whenever it is woken, or a time that it named has come.

    Thread-safe.

    Args:
        name: Of the thread.
        step: What to do; returns the seconds until it is to be done again, None: when woken.
    """

    def __init__(self, name: str, step: Callable[[], float | None]) -> None:
        self._name = name
        self._step = step
        self._cond = threading.Condition()
        self._woken = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, if it has not begun or was stopped."""
        with self._cond:
            if self._thread is not None or self._stopping:
                return
            self._woken = True
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """There is something to do. Never waits."""
        with self._cond:
            self._woken = True
            self._cond.notify_all()

    def stop(self) -> None:
        """End after the current step. Idempotent; it cannot begin again."""
        with self._cond:
            self._stopping = True
            self._cond.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_WAIT_S)

    def _run(self) -> None:
        while True:
            with self._cond:
                self._woken = False
                if self._stopping:
                    return
            try:
                wait_s = self._step()
            except Exception:  # the top of a daemon task: a bug must not end all of it
                log.exception("%s: unexpected", self._name)
                wait_s = AFTER_BUG_S
            with self._cond:
                self._cond.wait_for(lambda: self._stopping or self._woken, wait_s)


@dataclass(frozen=True, slots=True)
class ReplicaOutcome:
    """How far the copies of a checkpoint are, for ``wait`` and ``status``."""

    level: m.Level
    done: int | None = None
    """Copies that count, as far as this host knows; the leader knows all."""
    wanted: int | None = None
    error: str | None = None


class Replication:
    """See the module. Thread-safe.

    Args:
        across: Peers, exchange and hooks of the namespace.
        catalog: Of the memory tier.
        pool: The host's slots.
        ledger: Who has which slot.
        marks: Of the memory tier.
        spec: Of the namespace, once a session has said it.
        settled: Called when checkpoints may go that had to stay; with no lock held.
        here: This host's own tiers.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        across: Across,
        catalog: Catalog,
        pool: SlotPool,
        ledger: SlotLedger,
        marks: QuarantineMarks,
        spec: Callable[[], m.NamespaceSpec | None],
        settled: Callable[[], None],
        here: TiersHere,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers = across.peers
        self._exchange = across.exchange
        self._spec = spec
        self._settled = settled
        self._clock = clock
        self._saves = KnownSaves(across.namespace, catalog, across.peers, across.hooks)
        self.copies = CopiesHere(
            self._saves, across.peers, pool, ledger, marks, self._ring, here, clock=clock
        )
        self.orders = Orders(self._saves, across.peers, across.exchange, catalog, clock=clock)
        self._lock = threading.Lock()
        self._active: str | None = None
        self._errors: dict[str, str] = {}
        self._retry: dict[str, tuple[float, float]] = {}
        """By save id, when it is tried again, and the pause after the next failure."""
        self._told: dict[str, set[str]] = {}
        """By save id, ids of the acknowledgements that the leader has got."""
        self._behind = False
        """The leader did not answer when it was told."""
        self._history: dict[str, m.Level] = {}
        self._pulling = Background(f"tck-replicate-{across.namespace}", self._pull_step)
        self._ordering = Background(f"tck-orders-{across.namespace}", self.orders.step)
        across.hooks.on_attempt.append(self.wake)
        across.hooks.on_manifest.append(self._on_manifest)
        across.hooks.on_records.append(self._on_records)
        across.hooks.on_members.append(self._on_members)
        across.hooks.on_lost.append(lambda host: self._on_change(0.0))
        across.hooks.on_found.append(lambda host: self.wake())
        across.exchange.sent_along = self._sent_along
        self._refilled = across.hooks.on_refilled

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Go on where the agent before this one stopped, if there are other hosts."""
        if self._peers.others() and self._peers.replicas:
            self._on_members()

    def stop(self) -> None:
        """Abandon what is being pulled; its slot is taken up by the next agent. Idempotent."""
        self.copies.stop()
        self._pulling.stop()
        self._ordering.stop()

    @property
    def replicas(self) -> int:
        """Copies that there are hosts for; 0 on one host."""
        return min(self._peers.replicas, len(self._peers.others()))

    def ring(self, spec: m.NamespaceSpec) -> RingShape:
        """What a session's ring depends on."""
        return RingShape(
            namespace=self._saves.namespace,
            spec=spec,
            num_streams=len(self._saves.lines()),
            replicas=self.replicas,
        )

    def _ring(self) -> RingShape | None:
        spec = self._spec()
        return self.ring(spec) if spec is not None else None

    def is_busy(self) -> bool:
        """Whether copies are being pulled."""
        with self._lock:
            return self._active is not None

    def _sent_along(self, manifest: Manifest) -> tuple[bytes, ...]:
        self.orders.order()
        return self._saves.sent_along(manifest)

    # --- what happens -----------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to do. Never waits."""
        self._pulling.wake()
        self._ordering.wake()

    def _on_manifest(self, manifest: Manifest) -> None:
        if not self._peers.replicas:
            return
        if manifest.replicas:
            # What retention deletes before its turn was overtaken.
            self._remember(manifest.save_id, "superseded")
        self.wake()

    def _on_records(self, records: Sequence[SaveRecord]) -> None:
        kinds = {record.kind for record in records}
        if "restored" in kinds:
            self.orders.repair_in(0.0)
        for record in records:
            if record.kind == "replicated":
                self._remember(record.save_id, "done")
        self.wake()
        if kinds & {"replicated", "failed"}:
            self._abandon_overtaken()
            self._settled()

    def _abandon_overtaken(self) -> None:
        """What is being pulled may be of no use any more; what is ordered now need not wait."""
        with self._lock:
            active = self._active
        manifest = self._saves.find(active) if active is not None else None
        if active is not None and (manifest is None or not self._still_wanted(manifest)):
            self.copies.stopping.set()

    def _on_members(self) -> None:
        self.copies.limit.set(self._peers.replication_bytes_per_s)
        if not self._peers.others() or not self._peers.replicas:
            return
        self._pulling.start()
        self._ordering.start()
        with self._lock:
            self._retry.clear()
            self._told = {}  # another leader may not know what this host holds
        self._on_change(REPAIR_PAUSE_S)

    def _on_change(self, pause_s: float) -> None:
        self.orders.repair_in(pause_s)
        self.wake()

    def _remember(self, save_id: str, level: m.Level) -> None:
        with self._lock:
            self._history[save_id] = level
            while len(self._history) > HISTORY_MAX:
                del self._history[next(iter(self._history))]

    # --- pulling ----------------------------------------------------------------------------------

    def _wanted(self) -> list[Manifest]:
        """Checkpoints to keep copies of: what was replicated before what is being replicated."""
        found = []
        for line in self._saves.lines().values():
            stay = self._saves.stay_of(line)
            found += [each for each in line if each.save_id in stay]
        return sorted(found, key=lambda each: not was_replicated(each, self._saves.about(each)))

    def _pull_step(self) -> float | None:
        wanted = self._wanted()
        self._forget({each.save_id for each in wanted})
        self.copies.settle_drafts(wanted)
        self.copies.drop_unwanted(wanted)
        self._send_acks(wanted)
        now_s = self._clock()
        waits = []
        for manifest in wanted:
            pulls = self.copies.assigned(manifest)
            unsaid = self.copies.unsaid(manifest)
            lacking = [each for each in pulls if not self.copies.holds(each.ref)]
            # One that a rank wrote here and that is bad is not made anew: its slot is the rank's.
            missing = [each for each in lacking if self.copies.can_make(each.ref)]
            if not missing or is_failed(manifest, self._saves.about(manifest)):
                self._acknowledge(manifest, unsaid)
                continue
            at_s = self._retry.get(manifest.save_id, (0.0, RETRY_S))[0]
            if at_s > now_s:
                waits.append(at_s - now_s)
                continue
            self._work(manifest, missing, unsaid)
            return 0.0
        if self._behind:
            waits.append(ACK_WAIT_S)
        return min(waits, default=None)

    def _forget(self, wanted: set[str]) -> None:
        with self._lock:
            for table in (self._errors, self._retry, self._told):
                for save_id in [each for each in table if each not in wanted]:
                    del table[save_id]

    def _work(self, manifest: Manifest, pulls: Sequence[Pull], done: list[SegmentRef]) -> None:
        """Pull these, and acknowledge them and what was ``done`` before in one record."""
        with self._lock:
            self._active = manifest.save_id
        error: TieredCkptError | None = None
        spec = self._spec()
        tiers = [t for t in (spec.tiers if spec is not None else ()) if t.name in manifest.tiers]
        try:
            for pull in pulls:
                if not self._still_wanted(manifest):
                    break
                try:
                    self.copies.pull(pull, tiers)
                    done.append(pull.ref)
                except PullStoppedError:
                    break
                except (NotFoundError, IntegrityError, CapacityError) as failure:
                    error = failure
                    break
                except TieredCkptError as failure:
                    error = failure  # others may still answer
            self._acknowledge(manifest, done)
            self._settle(manifest, error)
            if any(each.own for each in pulls) and all(self.copies.holds(p.ref) for p in pulls):
                for call in self._refilled:
                    call(manifest)
        finally:
            with self._lock:
                self._active = None

    def _still_wanted(self, manifest: Manifest) -> bool:
        return manifest.save_id in self._saves.must_stay(manifest.stream)

    def _settle(self, manifest: Manifest, error: TieredCkptError | None) -> None:
        save_id = manifest.save_id
        if error is None:
            with self._lock:
                self._errors.pop(save_id, None)
                self._retry.pop(save_id, None)
            return
        text = str(error)
        log.warning(
            "namespace %s: copies of step %d of stream %s (%s): %s",
            self._saves.namespace, manifest.step, manifest.stream, save_id, text,
        )  # fmt: skip
        hopeless = isinstance(error, NotFoundError | IntegrityError)
        if hopeless and not was_replicated(manifest, self._saves.about(manifest)):
            data = self._saves.say(manifest, "failed", text=text)
            if data is not None:
                self._exchange.publish(Push(records=(data,)))
        with self._lock:
            pause_s = self._retry.get(save_id, (0.0, RETRY_S))[1]
            self._errors[save_id] = text
            self._retry[save_id] = (self._clock() + pause_s, min(pause_s * 2, RETRY_S_MAX))

    # --- acknowledging ----------------------------------------------------------------------------

    def _acknowledge(self, manifest: Manifest, refs: Sequence[SegmentRef]) -> None:
        ids = tuple(ref.id for ref in refs)
        if not ids or self._saves.say(manifest, "ack", segments=ids) is None:
            return
        log.info(
            "namespace %s: holds %d segments of step %d of stream %s (%s)",
            self._saves.namespace, len(ids), manifest.step, manifest.stream, manifest.save_id,
        )  # fmt: skip
        self._send_acks([manifest])

    def _send_acks(self, manifests: Sequence[Manifest]) -> None:
        """Tell the leader in this thread; what does not arrive is tried again at the next step."""
        told, leader = self._told, self._peers.leader
        acks = [each for manifest in manifests for each in self._saves.own_acks(manifest)]
        unsent = [each for each in acks if each.id not in told.get(each.save_id, ())]
        if not unsent or not leader or self._peers.is_leader:
            self._behind = False
            return
        push = Push(records=self._saves.encoded(unsent))
        self._behind = not self._exchange.push_now(push, [leader], ACK_WAIT_S)
        for each in () if self._behind else unsent:
            told.setdefault(each.save_id, set()).add(each.id)

    # --- looking ----------------------------------------------------------------------------------

    def must_stay(self, stream: str) -> frozenset[str]:
        """Save ids of a stream that retention must leave alone."""
        return frozenset(self._saves.must_stay(stream)) if self._peers.active else frozenset()

    def outcome(self, save_id: str) -> ReplicaOutcome:
        """How far the copies of a checkpoint are."""
        with self._lock:
            past = self._history.get(save_id, "not_scheduled")  # if it is not in memory any more
            error = self._errors.get(save_id)  # why its copies cannot be pulled here now
        manifest = self._saves.find(save_id)
        if manifest is None:
            return ReplicaOutcome(past)
        about = self._saves.about(manifest)
        if not manifest.replicas and not is_ordered(manifest, about):
            return ReplicaOutcome("not_scheduled")
        live = self._saves.live()
        copies = progress(manifest, about, live)
        done, wanted = copies.done, copies.wanted
        if is_replicated(manifest, about, live):
            return ReplicaOutcome("done", wanted, wanted)
        newer = _newer(self._saves, manifest)
        whole = newest_replicated(newer, self._saves.about(*newer))
        if was_replicated(manifest, about) and whole is not None:
            # Nobody makes the copies again that were lost.
            text = f"the newer step {whole.step} is replicated"
            return ReplicaOutcome("superseded", done, wanted, text)
        if is_failed(manifest, about):
            why = next((each.text for each in about if each.kind == "failed"), "")
            return ReplicaOutcome("failed", done, wanted, why)
        if is_ordered(manifest, about):
            if error is None and self._peers.is_leader:
                error = _silent(self._peers, copies.missing)
            return ReplicaOutcome("waiting" if error else "active", done, wanted, error)
        for each in newer:
            if is_ordered(each, self._saves.about(each)):
                text = f"the newer step {each.step} was assigned first"
                return ReplicaOutcome("superseded", 0, wanted, text)
        return ReplicaOutcome("queued", 0, wanted)

    def status(self, newest_step: int | None) -> m.ReplicationStatus | None:
        """For ``tieredckpt status``; None where nothing is wanted, and nobody is there for it."""
        if not self._peers.active and not self._peers.replicas:
            return None
        with self._lock:
            active = self._active
            error = next(iter(self._errors.values()), None) or self.orders.error
        newest, waiting = newest_and_open(self._saves)
        step = newest.step if newest is not None else None
        lag = max(0, newest_step - step) if newest_step is not None and step is not None else None
        return m.ReplicationStatus(
            replicas=self._peers.replicas,
            possible=self.replicas,
            newest_replicated_step=step,
            lag_steps=lag,
            active_save_id=active or next((each.save_id for each in waiting), None),
            pulled_bytes_total=self.copies.pulled_bytes,
            pull_seconds_total=self.copies.pull_seconds,
            held_bytes=self.copies.held_bytes(),
            error=error,
        )


def _newer(saves: KnownSaves, manifest: Manifest) -> Sequence[Manifest]:
    """The candidates before it; all of them if it is none."""
    line = saves.lines().get(manifest.stream, ())
    return line[: line.index(manifest)] if manifest in line else line


def _silent(peers: Peers, missing: Sequence[tuple[str, str, str]]) -> str | None:
    """Holders that are waited for and do not answer."""
    down = {each.host.host_id: each.error for each in peers.states() if each.error}
    silent = sorted({holder for _, _, holder in missing if holder in down})
    return f"no answer from {', '.join(silent)}: {down[silent[0]]}" if silent else None


def newest_and_open(saves: KnownSaves) -> tuple[Manifest | None, list[Manifest]]:
    """The checkpoint with the highest step of which all copies are there, and what is being
    replicated.
    """
    found: list[Manifest] = []
    waiting: list[Manifest] = []
    live = saves.live()
    for line in saves.lines().values():
        about = saves.about(*line)
        newest = newest_replicated(line, about, live)
        found += [newest] if newest is not None else []
        waiting += ordered_and_open(line, about)
    return max(found, key=lambda each: each.step, default=None), waiting
