"""What the leader's agent decides about tiers for all hosts, and what hosts tell it for that.

It decides which waiting spill is given up (:class:`GivingUp`), and says it in a ``dropped`` record;
a host without room tells it what waits there. And it knows which checkpoints are on the disks of
all hosts, in a tier that each host has for itself (:class:`HostDisks`): each host tells it what it
holds and will keep, and is told what is whole. That is written down nowhere: who leads anew knows
nothing, and is told when hosts ask next. Until then, and while the leader does not answer, they
delete nothing that matters. On one host all that is the same agent, at once. Decisions are pure:
``policy/schedule.py``, ``policy/completeness.py``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tieredckpt.errors import TieredCkptError
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import RecordKind, SaveRecord, decode_save_record
from tieredckpt.policy.completeness import UNKNOWN, Claim, Parts, Whole, newest_whole
from tieredckpt.policy.replication import was_replicated
from tieredckpt.policy.retention import pin_reason
from tieredckpt.policy.schedule import WaitingSpill, destinations, give_up
from tieredckpt.rpc.messages import peer as pm

if TYPE_CHECKING:
    from tieredckpt.agent.cluster.authority import Ruling
    from tieredckpt.agent.leader.holds import Keeping
    from tieredckpt.agent.peering.peering import Across
    from tieredckpt.agent.tiers.worker import TierWorker

REPORT_EVERY_S = 0.25
"""The leader is told of one tier and stream not more often."""
SAID_MAX = 1 << 12
"""Decisions that are remembered after their checkpoint has gone."""
REPORTED_MAX = 256
"""Checkpoints that one report names; the oldest ones are what it is about."""
LINES_MAX = 1 << 12
"""Tiers times streams of which the leader remembers who holds what."""
LACKING_MAX = 1 << 12
"""Checkpoints remembered by the leader that a host has given up."""
OWN_LACKING_MAX = 64
"""Those of a tier that a host names each time: the leader may be another one."""
PARTS_MAX = 1 << 12
"""Checkpoints whose hosts are remembered."""
SILENT_S = 5.0
"""A leader that did not answer is asked again after so long: copies do not wait for it."""

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
            self._report(pm.Pressure(tier=tier, stream=stream, waiting=waits))
            return None
        gone = self._choose(worker, stream, waits)
        if gone is not None:
            self._give_up(worker, stream, gone)
        return gone

    def _report(self, pressure: pm.Pressure) -> None:
        key, now_s = (pressure.tier, pressure.stream), self._clock()
        with self._lock:
            if now_s - self._reported_at.get(key, -REPORT_EVERY_S) < REPORT_EVERY_S:
                return
            self._reported_at[key] = now_s
        self._across.exchange.at_once(lambda: self._tell_leader(pressure))

    def _tell_leader(self, pressure: pm.Pressure) -> None:
        answer = _tell_leader(self._across, pm.Push(pressure=(pressure,)))
        if answer is not None:
            self._across.ingest.take_records(answer.records)

    # --- the leader -------------------------------------------------------------------------------

    def take(self, reports: Iterable[pm.Pressure]) -> tuple[bytes, ...]:
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

    def _choose(self, worker: TierWorker, stream: str, waits: Sequence[pm.Waits]) -> str | None:
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
        self._across.exchange.publish(pm.Push(records=(data,)))
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
        records = self._keeping.records_of(manifest.save_id)
        dropped = tuple(r.id for r in records if r.kind == "dropped" and r.text == tier)
        said = {old for r in records if r.kind == "spill" and r.text == tier for old in r.segments}
        asked = any(r.kind == "spill" and r.text == tier for r in records)
        if not asked or not said.issuperset(dropped):
            # Also where it is here already: other hosts have their parts to bring, and first.
            self.say("spill", manifest.stream, manifest.save_id, tier, dropped)
        # After the record: what fails at once and is destined for no tier counts as shed.
        if worker.outcome(manifest.save_id).level != "done":
            worker.enqueue(manifest, urgent=True)

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


def _tell_leader(across: Across, push: pm.Push) -> pm.Pushed | None:
    """What the leader says to that; None: it does not answer."""
    try:
        return across.peers.ask(across.peers.leader, push)
    except TieredCkptError as error:
        log.debug("namespace %s: the leader is not informed: %s", across.namespace, error)
        return None


def _waits(waiting: Sequence[Manifest]) -> tuple[pm.Waits, ...]:
    return tuple(
        pm.Waits(save_id=each.save_id, attempt=each.attempt.number, seq=each.seq)
        for each in waiting
    )


class Vouchers:
    """The leader's table: who holds what. Not thread-safe; does no I/O."""

    def __init__(self) -> None:
        self._claims: OrderedDict[tuple[str, str], dict[str, Claim]] = OrderedDict()
        self._lacking: OrderedDict[tuple[str, str], None] = OrderedDict()

    def take(
        self, vouch: pm.Vouch, members: Collection[str], parts: Callable[[str], Parts | None]
    ) -> Whole:
        """What a host says; what it may count on."""
        line = (vouch.tier, vouch.stream)
        coming = frozenset(vouch.coming) if vouch.coming is not None else None
        claims = {h: c for h, c in self._claims.pop(line, {}).items() if h in members}
        claims[vouch.host] = Claim(frozenset(vouch.saves), coming, vouch.upto)
        self._claims[line] = claims
        while len(self._claims) > LINES_MAX:
            self._claims.popitem(last=False)
        # For good, also if somebody asks for it once more: others may have deleted theirs.
        for save_id in vouch.lacking:
            known = parts(save_id)
            if known is not None and vouch.host in known.hosts:
                self._lacking[vouch.tier, save_id] = None
        while len(self._lacking) > LACKING_MAX:
            self._lacking.popitem(last=False)
        return newest_whole(
            vouch.saves, claims, members, parts, lambda i: (vouch.tier, i) in self._lacking
        )


class HostDisks:
    """Of one namespace. Thread-safe.

    Args:
        across: The other hosts.
        keeping: Knows the tiers, and the checkpoints that are here.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        across: Across,
        keeping: Keeping,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._across = across
        self._workers = keeping.workers
        self._keeping = keeping
        self._clock = clock
        self._lock = threading.Lock()
        self._vouchers = Vouchers()
        self._parts: OrderedDict[str, Parts] = OrderedDict()
        self._told: dict[tuple[str, str], Whole] = {}
        self._last: dict[tuple[str, str], pm.Vouch] = {}
        self._silent_until_s = -SILENT_S
        across.on_vouched = self.take

    # --- each host --------------------------------------------------------------------------------

    def ask(self, tier: str, line: Sequence[Manifest]) -> Whole:
        """What is known to be whole of what this host holds; may wait for the leader.

        Args:
            tier: Of each host.
            line: See :func:`tieredckpt.policy.completeness.spared`. This host will keep the newest
                of them until it was told of a newer one that is whole.
        """
        alone = next((m.save_id for m in line if len(self._across.own(m)) == len(m.segments)), None)
        saves = [m.save_id for m in line]
        if alone is not None:
            saves = saves[: saves.index(alone)]
        if not saves:
            return Whole(alone)
        found = self._ask(self._vouch(tier, line[0].stream, saves))
        return replace(found, newest=found.newest or alone)

    def _vouch(self, tier: str, stream: str, saves: Sequence[str] | None, *more: str) -> pm.Vouch:
        """``saves``: None for those of before; ``more`` is lacking, too."""
        worker = self._workers().get(tier)
        coming, newest = worker.coming(stream) if worker is not None else (None, (0, 0))
        with self._lock:
            last = self._last.get((tier, stream))
            if saves is None:  # what it held then says nothing of what it lacks now
                saves, coming = last.saves if last is not None else (), None
            made = pm.Vouch(
                host=self._across.peers.host_id,
                tier=tier,
                stream=stream,
                saves=tuple(saves[: pm.INVENTORY_MAX]),
                lacking=(*(last.lacking if last is not None else ()), *more)[-OWN_LACKING_MAX:],
                coming=coming if max(len(coming or ()), len(saves)) <= pm.INVENTORY_MAX else None,
                upto=newest,
            )
            self._last[tier, stream] = made
        return made

    def _ask(self, vouch: pm.Vouch) -> Whole:
        peers, key = self._across.peers, (vouch.tier, vouch.stream)
        if peers.is_leader:
            return self._take(vouch)
        with self._lock:
            # That one is whole stays true enough; what will not be is to be heard just now.
            known = Whole(self._told.get(key, UNKNOWN).newest)
            if self._clock() < self._silent_until_s:
                return known
        answer = _tell_leader(self._across, pm.Push(vouched=(vouch,)))
        if answer is None:
            with self._lock:
                self._silent_until_s = self._clock() + SILENT_S
            return known
        found = UNKNOWN
        for each in answer.whole:
            found = Whole(each.newest or None, frozenset(each.never), frozenset(each.missing))
        with self._lock:
            self._told[key] = found
        return found

    def lack(self, tier: str, stream: str, save_id: str) -> None:
        """This host does not hold its part of a checkpoint, which it has given up. Never waits.

        Until that arrives others keep theirs, or until a newer one is whole.
        """
        peers, worker = self._across.peers, self._workers().get(tier)
        if not peers.active or worker is None or worker.spec.scope != "host":
            return
        vouch = self._vouch(tier, stream, None, save_id)
        if peers.is_leader:
            self._take(vouch)
        else:
            self._across.exchange.push(pm.Push(vouched=(vouch,)), [peers.leader])

    # --- the leader -------------------------------------------------------------------------------

    def take(self, vouched: Iterable[pm.Vouch]) -> tuple[pm.WholeReply, ...]:
        """What hosts said that they hold; what each of them may count on."""
        peers, found = self._across.peers, []
        for each in vouched:
            known = each.host in peers.members() and each.tier in self._workers()
            whole = self._take(each) if known and peers.leads else UNKNOWN
            found.append(pm.WholeReply(
                newest=whole.newest or "",
                never=tuple(sorted(whole.never)),
                missing=tuple(sorted(whole.missing)),
            ))  # fmt: skip
        return tuple(found)

    def _take(self, vouch: pm.Vouch) -> Whole:
        members = {*self._across.peers.members(), self._across.peers.host_id}
        with self._lock:
            return self._vouchers.take(vouch, members, self._parts_of)

    def _parts_of(self, save_id: str) -> Parts | None:
        known = self._parts.get(save_id)
        if known is None:
            manifest = self._keeping.find(save_id)
            if manifest is None:
                return None
            hosts = frozenset(ref.host for ref in manifest.segments)
            known = self._parts[save_id] = Parts(hosts, (manifest.attempt.number, manifest.seq))
            while len(self._parts) > PARTS_MAX:
                self._parts.popitem(last=False)
        return known
