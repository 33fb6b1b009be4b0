"""Giving up waiting spills, for all hosts, and hearing that others did.

The leader's agent alone decides (``policy/schedule.py``) and says it in a ``dropped`` record; a
host without room tells it what waits there. On one host that is the same agent, at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from tieredckpt.errors import TieredCkptError
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.record import RecordKind, SaveRecord, decode_save_record
from tieredckpt.policy.pins import pin_reason
from tieredckpt.policy.replication import was_replicated
from tieredckpt.policy.schedule import WaitingSpill, destinations, give_up
from tieredckpt.transport.peer_messages import Pressure, Push, Waits

if TYPE_CHECKING:
    from tieredckpt.agent.across import Across
    from tieredckpt.agent.keeping import Keeping
    from tieredckpt.agent.rule import Ruling
    from tieredckpt.agent.spill import TierWorker

REPORT_EVERY_S = 0.25
"""The leader is told of one tier and stream not more often."""
SAID_MAX = 1 << 12
"""Decisions that are remembered after their checkpoint has gone."""
REPORTED_MAX = 256
"""Checkpoints that one report names; the oldest ones are what it is about."""

log = logging.getLogger(__name__)


class GivingUp:
    """Of one namespace. Thread-safe; may be called with the node's lock held.

    Args:
        across: The other hosts.
        keeping: Knows the tiers and the records.
        ruling: Whose rules hold, and who decides by them.
        freed: Called when memory may let go of something; with no lock held.
        lacking: Told of a tier, stream and save id: this host does not hold that, and will not.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        across: Across,
        keeping: Keeping,
        ruling: Ruling,
        freed: Callable[[], None],
        lacking: Callable[[str, str, str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = keeping.memory
        self._workers = keeping.workers
        self._across = across
        self._keeping = keeping
        self._ruling = ruling
        self._freed = freed
        self._lacking = lacking
        self._clock = clock
        self._lock = threading.Lock()
        self._reported_at: dict[tuple[str, str], float] = {}
        self._said: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        across.on_pressure = self.take
        keeping.on_destined = self.heard
        keeping.bring = self.bring

    # --- memory has no room -----------------------------------------------------------------------

    def choose(self, tier: str, waiting: Sequence[Manifest]) -> str | None:
        """What :meth:`ask` would give up at once; None: nothing, or the leader is asked first."""
        worker = self._workers().get(tier)
        if worker is None or not waiting or not (self._may(worker) and self._ruling.leads()):
            return None
        return self._choose(worker, waiting[0].stream, _waits(waiting))

    def _may(self, worker: TierWorker) -> bool:
        """Whether anything may be given up: the run that rules has said so, and has not ended."""
        return worker.spec.on_pressure != "keep" and self._ruling.prunes(worker.spec)

    def ask(self, tier: str, waiting: Sequence[Manifest], place: str = "memory") -> str | None:
        """``place`` has no room for these, oldest first, which wait for ``tier``.

        Returns the one that was given up now. None: there is none, or the leader was told and
        answers with a record.
        """
        worker = self._workers().get(tier)
        if worker is None or not waiting:
            return None
        worker.note_pressure(place)
        if not self._may(worker):
            return None
        stream, waits = waiting[0].stream, _waits(waiting[:REPORTED_MAX])
        if not self._ruling.leads():
            self._report(Pressure(tier=tier, stream=stream, waiting=waits))
            return None
        gone = self._choose(worker, stream, waits)
        if gone is not None:
            self._give_up(worker, stream, gone)
        return gone

    def _report(self, pressure: Pressure) -> None:
        key, now_s = (pressure.tier, pressure.stream), self._clock()
        with self._lock:
            if now_s - self._reported_at.get(key, -REPORT_EVERY_S) < REPORT_EVERY_S:
                return
            self._reported_at[key] = now_s
        self._across.exchange.at_once(lambda: self._tell_leader(pressure))

    def _tell_leader(self, pressure: Pressure) -> None:
        peers = self._across.peers
        push = Push(pressure=(pressure,))
        try:
            answer = peers.ask(peers.leader, push)
        except TieredCkptError as error:
            log.debug("namespace %s: the leader is not told: %s", self._across.namespace, error)
            return
        self._across.ingest.take_records(answer.records)

    # --- the leader -------------------------------------------------------------------------------

    def take(self, reports: Iterable[Pressure]) -> tuple[bytes, ...]:
        """What hosts without room said; the records of what is given up, now or before."""
        found: list[bytes] = []
        if not self._ruling.leads():
            return ()
        for report in reports:
            worker = self._workers().get(report.tier)
            if worker is None or not self._may(worker):
                continue
            before = [
                data
                for each in report.waiting
                if (data := self._dropped(report.tier, report.stream, each.save_id)) is not None
            ]
            if before:  # it has not heard of it yet
                found += before
            elif (gone := self._choose(worker, report.stream, report.waiting)) is not None:
                found.append(self._give_up(worker, report.stream, gone))
        return tuple(found)

    def _dropped(self, tier: str, stream: str, save_id: str) -> bytes | None:
        """The record that it was given up, if that still holds."""
        with self._lock:
            data = self._said.get((tier, save_id))
        if data is None:
            return None
        records = [*self._keeping.records_of(save_id), decode_save_record(data)]
        asked = any(each.kind == "spill" and each.text == tier for each in records)
        return None if asked else data

    def _choose(self, worker: TierWorker, stream: str, waits: Sequence[Waits]) -> str | None:
        tier = worker.spec.name
        here = [m for m in self._memory.manifests() if m.stream == stream]
        safe = {m.save_id for m in here if was_replicated(m, self._memory.records(m.save_id))}
        ages = {m.save_id: (m.attempt.number, m.seq) for m in here if m.save_id in safe}
        committed: set[str] = set()
        for name, other in self._workers().items():
            catalog = other.catalog
            for manifest in catalog.manifests() if catalog is not None else ():
                if manifest.stream != stream:
                    continue
                # Of a tier of each host this one's part says nothing about the others'.
                if name == tier and worker.spec.scope == "shared":
                    committed.add(manifest.save_id)
                safe.add(manifest.save_id)
                ages[manifest.save_id] = (manifest.attempt.number, manifest.seq)
        waiting = {each.save_id for each in waits}
        facts = [
            WaitingSpill(
                save_id=each.save_id,
                age=(each.attempt, each.seq),
                safe=each.save_id in safe,
                committed=each.save_id in committed,
                kept=self._is_kept(tier, each.save_id),
            )
            for each in waits
        ]
        facts += [
            WaitingSpill(save_id=save_id, age=age, waiting=False, safe=True)
            for save_id, age in ages.items()
            if save_id not in waiting
        ]
        return give_up(facts)

    def _is_kept(self, tier: str, save_id: str) -> bool:
        records = self._keeping.records_of(save_id)
        asked = any(each.kind == "spill" and each.text == tier for each in records)
        return asked or pin_reason(records) is not None

    def _give_up(self, worker: TierWorker, stream: str, save_id: str) -> bytes:
        tier = worker.spec.name
        data = self.say("dropped", stream, save_id, tier)
        with self._lock:
            self._said[tier, save_id] = data
            while len(self._said) > SAID_MAX:
                self._said.popitem(last=False)
        self._leave(worker, stream, save_id)
        return data

    def _leave(self, worker: TierWorker, stream: str, save_id: str) -> None:
        if worker.give_up(save_id):
            self._lacking(worker.spec.name, stream, save_id)
        if (above := self._workers().get(worker.spec.source)) is not None:
            above.poke()  # it may have had no room

    # --- records ----------------------------------------------------------------------------------

    def say(
        self, kind: RecordKind, stream: str, save_id: str, tier: str, overrules: Iterable[str] = ()
    ) -> bytes:
        """Note a ``dropped`` or ``spill`` record here, and tell all hosts.

        Raises CapacityError or TierUnavailableError: It could not be noted.
        """
        record, data = self._keeping.record(kind, stream, save_id, tier, tuple(overrules))
        if self._memory.get(save_id) is not None:
            self._memory.put_record(data)
        self._keeping.note([(record, data)])
        self._across.exchange.publish(Push(records=(data,)))
        return data

    def bring(self, manifest: Manifest) -> str:
        """Have a checkpoint go to the nearest tier that outlives the host, else to the nearest.

        Returns its name; "" if there is none.
        """
        workers = list(self._workers().values())
        shared = [worker for worker in workers if worker.spec.scope == "shared"]
        for worker in (*shared, *workers):
            self.send(worker, manifest)
            return worker.spec.name
        return ""

    def send(self, worker: TierWorker, manifest: Manifest) -> None:
        """Let it go to this tier before everything that waits there, on all hosts.

        Raises CapacityError or TierUnavailableError: It could not be noted.
        """
        tier = worker.spec.name
        if worker.outcome(manifest.save_id).level != "done":
            worker.enqueue(manifest, urgent=True)
        records = self._keeping.records_of(manifest.save_id)
        dropped = tuple(r.id for r in records if r.kind == "dropped" and r.text == tier)
        said = {old for r in records if r.kind == "spill" and r.text == tier for old in r.segments}
        asked = any(r.kind == "spill" and r.text == tier for r in records)
        if not asked or not said.issuperset(dropped):
            # Also where it is here already: other hosts have their parts to bring, and first.
            self.say("spill", manifest.stream, manifest.save_id, tier, dropped)

    def heard(self, records: Sequence[SaveRecord]) -> None:
        """Other hosts said where checkpoints go, or go no more. No lock is held."""
        for record in records:
            worker = self._workers().get(record.text)
            if worker is None:
                continue
            about = (*self._keeping.records_of(record.save_id), record)
            manifest = self._keeping.find(record.save_id)
            if record.kind == "spill" and manifest is not None:
                worker.enqueue(manifest, urgent=True)
            elif record.kind == "dropped" and (
                manifest is None or record.text not in destinations(manifest, about)
            ):
                self._leave(worker, record.stream, record.save_id)
                with self._lock:  # answered: if that was not enough, the leader is told again
                    self._reported_at.pop((record.text, record.stream), None)
        self._freed()

    def destinations(self, manifest: Manifest) -> tuple[str, ...]:
        """The tiers that it is to reach, as far as is known here."""
        return destinations(manifest, self._keeping.records_of(manifest.save_id))


def _waits(waiting: Sequence[Manifest]) -> tuple[Waits, ...]:
    return tuple(
        Waits(save_id=each.save_id, attempt=each.attempt.number, seq=each.seq) for each in waiting
    )
