"""What speaks against deleting a checkpoint from a tier: pins, readers, other tiers, damage.

A pin is a record that is written into every tier that holds the checkpoint and read back from
there, so that it outlives the hosts. A checkpoint may be pinned that memory holds no more.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tieredckpt.agent.copies.state import NOBODY
from tieredckpt.agent.tiers.interface import ON_ITS_WAY, Needs
from tieredckpt.errors import NotFoundError, TieredCkptError, TierUnavailableError, UsageError
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import RecordKind, SaveRecord, decode_save_record, encode_save_record
from tieredckpt.policy.history import branches
from tieredckpt.policy.retention import DESTINING, LASTING, PINNING, open_pins, pin_reason
from tieredckpt.policy.schedule import destinations
from tieredckpt.rpc.messages.agent import AddRecord, Pinned, PinStatus
from tieredckpt.rpc.messages.peer import Push
from tieredckpt.storage.catalog import Catalog
from tieredckpt.storage.quarantine import QuarantineMarks

if TYPE_CHECKING:
    from tieredckpt.agent.peering.peering import Across
    from tieredckpt.agent.tiers.worker import TierWorker

READING_S = 600.0
"""A checkpoint of which a segment was opened within that time is being read."""
READS_MAX = 1 << 16
"""Segments whose last opening is remembered."""
PINS_MAX = 1 << 12
"""Pins and unpins that other hosts said and that wait to be written into tiers."""
PINS_SHOWN = 256
"""Checkpoints of which ``status`` says that they are pinned."""
REASON_CHARS_MAX = 500
OWED_MAX = 1 << 12
"""Records that one tier is owed; the oldest is forgotten, and written when the tier is attached
again.
"""
PAUSE_S = 1.0
PAUSE_S_MAX = 60.0
"""Between two tries to write what a tier is owed."""
log = logging.getLogger(__name__)


class RecordWriters:
    """Writes what was said of checkpoints into the tiers that hold them, until they have it.

    A thread per tier, while it is owed something: a store that does not answer may keep one for
    minutes, and neither another tier nor whoever said it waits for that. Of one namespace;
    thread-safe. No lock is held over a tier's I/O.

    Args:
        namespace: Its name.
        catalogs: Of the configured tiers, by name; None: it is not attached at this moment.
    """

    def __init__(
        self, namespace: str, catalogs: Callable[[], Mapping[str, Catalog | None]]
    ) -> None:
        self._namespace = namespace
        self._catalogs = catalogs
        self._cond = threading.Condition()
        self._owed: dict[str, OrderedDict[str, tuple[SaveRecord, bytes]]] = {}
        self._errors: dict[tuple[str, str], str] = {}
        """By tier and record, why it could not be written."""
        self._writing: set[str] = set()
        self._nudged: set[str] = set()
        self._stopping = False

    def owe(self, tier: str, record: SaveRecord, data: bytes) -> None:
        """``tier`` holds the checkpoint, and is to hold this; it is tried at once."""
        with self._cond:
            if self._stopping:
                return
            owed = self._owed.setdefault(tier, OrderedDict())
            owed[record.id] = (record, data)
            while len(owed) > OWED_MAX:
                gone, _ = owed.popitem(last=False)
                self._errors.pop((tier, gone), None)
            self._nudged.add(tier)
            self._cond.notify_all()
            if tier not in self._writing:
                self._writing.add(tier)
                threading.Thread(
                    target=self._run, args=(tier,), name=f"tck-records-{tier}", daemon=True
                ).start()

    def wait(self, record_id: str, tiers: Iterable[str], timeout_s: float) -> dict[str, str]:
        """Wait until all ``tiers`` have the record; those that still lack it, and why."""
        names = list(tiers)
        with self._cond:
            self._cond.wait_for(
                lambda: self._stopping or not self._lack(record_id, names), timeout_s
            )
            return {
                tier: self._errors.get((tier, record_id), "it has not answered yet")
                for tier in self._lack(record_id, names)
            }

    def _lack(self, record_id: str, tiers: Iterable[str]) -> list[str]:
        return [tier for tier in tiers if record_id in self._owed.get(tier, ())]

    def stop(self) -> None:
        """Nothing more is begun. Idempotent; waits for nobody."""
        with self._cond:
            self._stopping = True
            self._cond.notify_all()

    def _run(self, tier: str) -> None:
        pause_s = PAUSE_S
        while True:
            with self._cond:
                waiting = list(self._owed.get(tier, {}).values())
                if not waiting or self._stopping:
                    self._writing.discard(tier)
                    return
                self._nudged.discard(tier)
            failed = [each for each in waiting if not self._write(tier, *each)]
            pause_s = PAUSE_S if len(failed) < len(waiting) else min(PAUSE_S_MAX, 2 * pause_s)
            with self._cond:
                if failed:
                    self._cond.wait_for(lambda: self._stopping or tier in self._nudged, pause_s)

    def _write(self, tier: str, record: SaveRecord, data: bytes) -> bool:
        error = None
        try:
            catalogs = self._catalogs()
            catalog = catalogs.get(tier)
            if catalog is None and tier in catalogs:
                error = "it does not answer"
            elif catalog is not None and catalog.get(record.save_id) is not None:
                catalog.put_record(data)
        except (TieredCkptError, OSError) as failure:
            error = str(failure)
        except Exception as failure:  # the top of a thread: a bug must not end this tier's writer
            error = f"{type(failure).__name__}: {failure}"
            if self._errors.get((tier, record.id)) != error:  # thousands may be owed, for hours
                log.exception("namespace %s: writing to %s failed", self._namespace, tier)
        with self._cond:
            if error is None:
                self._owed.get(tier, OrderedDict()).pop(record.id, None)
                self._errors.pop((tier, record.id), None)
            elif self._errors.get((tier, record.id)) != error:
                self._errors[tier, record.id] = error
                log.warning(
                    "namespace %s: a %s of %s is not in %s yet: %s",
                    self._namespace, record.kind, record.save_id, tier, error,
                )  # fmt: skip
            self._cond.notify_all()
        return error is None


class Keeping:
    """Of one namespace; thread-safe. No lock of others is held over a tier's I/O here.

    Args:
        across: How other hosts are told.
        catalog: Of the memory tier.
        marks: Which copies are known to be bad.
        workers: The tiers at this moment.
        clock: Monotonic.
    """

    def __init__(
        self,
        across: Across,
        catalog: Catalog,
        marks: QuarantineMarks,
        workers: Callable[[], Mapping[str, TierWorker]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._namespace = across.namespace
        self.memory = catalog
        self._marks = marks
        self.workers = workers
        self._across = across
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._said: OrderedDict[str, tuple[SaveRecord, bytes]] = OrderedDict()
        self._writers = RecordWriters(
            across.namespace, lambda: {name: w.catalog for name, w in list(workers().items())}
        )
        self.bring: Callable[[Manifest], str] = lambda manifest: ""
        """Has a checkpoint brought to a tier that it was not destined for; which one."""
        self.on_destined: Callable[[Sequence[SaveRecord]], object] = lambda records: None
        """Told of ``dropped`` and ``spill`` records that other hosts said."""
        across.ingest.on_pins = self.take
        across.hooks.on_found.append(self._tell)

    def stop(self) -> None:
        """Nothing more is written. Idempotent."""
        self._writers.stop()

    # --- readers ----------------------------------------------------------------------------------

    def opened(self, tier: str, segment_id: str) -> None:
        """Somebody opened a segment in ``tier`` to read it."""
        now_s = self._clock()
        with self._lock:
            self._read_at.pop((tier, segment_id), None)
            self._read_at[tier, segment_id] = now_s
            while len(self._read_at) > READS_MAX or (
                next(iter(self._read_at.values())) < now_s - READING_S
            ):
                self._read_at.popitem(last=False)

    def needs_of(self, tier: str, manifests: Sequence[Manifest]) -> Needs:
        """See :class:`tieredckpt.agent.tiers.interface.SpillHost`."""
        since_s = self._clock() - READING_S
        with self._lock:
            read = {s for (t, s), at_s in self._read_at.items() if t == tier and at_s >= since_s}
        fed = [w for w in list(self.workers().values()) if w.spec.source == tier]
        active = [w.active_manifest() for w in fed]
        wanted = {
            m.save_id: [w.spec.name for w in fed if w.outcome(m.save_id).level in ON_ITS_WAY]
            for m in manifests
        }
        return Needs(
            wanted_by=wanted,
            in_use={
                m.save_id: "it is being read"
                for m in manifests
                if any(ref.id in read for ref in m.segments)
            },
            copied=frozenset(m.save_id for m in manifests if m in active),
            bad=frozenset(
                m.save_id
                for m in manifests
                if any(self._marks.get(tier, ref.id) is not None for ref in m.segments)
            ),
        )

    # --- pins -------------------------------------------------------------------------------------

    def say(self, request: AddRecord) -> Pinned:
        """Pin or mark a checkpoint, or end that, in all tiers that hold it, on all hosts.

        It counts from now on. Tiers are waited for until ``request.wait_s``, and get it afterwards.
        A pin has what is in memory only, and on its way to no tier, brought to one.

        Raises:
            NotFoundError: This host knows no such checkpoint, it was deleted meanwhile, or there is
                no pin to end, and no branch that holds it.
            UsageError: It is in memory only, and no tier is configured that could keep it.
        """
        save_id = request.save_id
        manifest, found = self.find(save_id), self._holding(save_id)
        if manifest is None:
            raise NotFoundError(self._who_was_asked(save_id), key=save_id, what="save")
        pins = open_pins(record for record, _ in self._about(save_id).values())
        if request.kind == "unpin" and not pins and not self._on_a_branch(manifest):
            raise NotFoundError(f"checkpoint {save_id} is not pinned", key=save_id, what="pin")
        homeless = request.kind == "pin" and not found and not self._coming(manifest)
        if homeless and not self.workers():
            raise UsageError(
                f"checkpoint {save_id} is in memory only, which has few slots and is lost with the "
                "host: a pin needs a tier that keeps it, and none is configured (`tiers`)"
            )
        ended = tuple(pin.id for pin in pins) if request.kind == "unpin" else request.segments
        record, data = self.record(request.kind, request.stream, save_id, request.text, ended)
        # Noted before it is asked who holds the checkpoint: a spill that ends in between looks at
        # what is noted after its commit.
        self._publish(data)
        brought = self.bring(manifest) if homeless else ""
        found = self._holding(save_id)
        owed = self._writers.wait(record.id, found, request.wait_s)
        # What is said of it goes with it: only a pin asks whether it gets there.
        coming = self._coming(manifest) if request.kind in PINNING else {}
        # After it was written: whoever deletes it later has read that it is pinned.
        kept = []
        for name, (catalog, each) in found.items():
            try:
                if name not in owed and catalog.holds(each):
                    kept.append(name)
            except TierUnavailableError as error:
                owed = owed | {name: str(error)}
        if found and not owed and not coming and not kept:
            raise NotFoundError(
                f"checkpoint {save_id} was deleted from {', '.join(found)}",
                key=save_id,
                what="save",
            )
        return Pinned(
            tiers=tuple(kept),
            owed=owed | {name: error for name, error in coming.items() if error is not None},
            coming=tuple(name for name, error in coming.items() if error is None),
            brought=brought,
        )

    def mark(self, request: AddRecord) -> None:
        """Record something of a checkpoint in memory here, and tell the others.

        Raises:
            NotFoundError: Its manifest is not in this host's memory.
        """
        save_id, host = request.save_id, self._across.peers.host_id
        if self.memory.get(save_id) is None:
            text = f"checkpoint {save_id} is not in the memory of host {host}"
            raise NotFoundError(text, key=save_id, what="save")
        stream, ended = request.stream, request.segments
        _, data = self.record(request.kind, stream, save_id, request.text, ended)
        self._publish(data)

    def _publish(self, data: bytes) -> None:
        self._across.ingest.take_records([data])
        self._across.exchange.publish(Push(records=(data,)))

    def record(
        self, kind: RecordKind, stream: str, save_id: str, text: str, segments: tuple[str, ...]
    ) -> tuple[SaveRecord, bytes]:
        """A new record that this host says of a checkpoint, and the same encoded."""
        own = self._across.peers.own()
        made = SaveRecord(
            namespace=self._namespace,
            stream=stream,
            save_id=save_id,
            kind=kind,
            id=secrets.token_hex(16),
            host=self._across.peers.host_id,
            # Only what is held in memory depends on it, and this is about no such thing.
            incarnation=own.incarnation if own is not None else NOBODY,
            segments=segments,
            text=text,
        )
        return made, encode_save_record(made)

    def _on_a_branch(self, manifest: Manifest) -> bool:
        """Whether retention holds it somewhere until a person lets it go, as if it were pinned."""
        return any(
            manifest in branches(each.manifests(), each.attempts(), manifest.stream)
            for each in (self.memory, *self._catalogs().values())
        )

    def find(self, save_id: str) -> Manifest | None:
        """A checkpoint that memory holds, or a tier."""
        found = (each.get(save_id) for each in (self.memory, *self._catalogs().values()))
        return next((manifest for manifest in found if manifest is not None), None)

    def _holding(self, save_id: str) -> dict[str, tuple[Catalog, Manifest]]:
        """The tiers below memory that hold a checkpoint."""
        catalogs = self._catalogs().items()
        return {name: (c, m) for name, c in catalogs if (m := c.get(save_id)) is not None}

    def _coming(self, manifest: Manifest) -> dict[str, str | None]:
        """The tiers that it is on its way to, with why not now if one failed."""
        goes_to = destinations(manifest, self.records_of(manifest.save_id))
        found = {}
        for name, worker in list(self.workers().items()):
            outcome = worker.outcome(manifest.save_id)
            # Of a tier that has not answered yet it is not known what it holds.
            if outcome.level in ON_ITS_WAY and (worker.catalog is not None or name in goes_to):
                found[name] = worker.error
        return found

    def _who_was_asked(self, save_id: str) -> str:
        silent = [f"{n}: {w.error}" for n, w in self.workers().items() if w.catalog is None]
        left = f" ({'; '.join(silent)})" if silent else ""
        return f"no tier of this host that answers holds checkpoint {save_id}{left}"

    def take(self, sent: Sequence[tuple[SaveRecord, bytes]]) -> None:
        """Records that others said: from now on they count, and are written into the tiers."""
        self.note(sent)
        if destined := [record for record, _ in sent if record.kind in DESTINING]:
            self.on_destined(destined)

    def note(self, sent: Sequence[tuple[SaveRecord, bytes]]) -> None:
        """These count, and are written into the tiers that hold what they are about."""
        holding: dict[str, list[str]] = {}
        for name, catalog in self._catalogs().items():
            for manifest in catalog.manifests():
                holding.setdefault(manifest.save_id, []).append(name)
        with self._lock:
            for record, data in sent:
                if record.kind not in DESTINING or record.save_id in holding:
                    self._said[record.id] = (record, data)
            while len(self._said) > PINS_MAX:
                self._said.popitem(last=False)
        for record, data in sent:
            for tier in holding.get(record.save_id, ()):
                self._writers.owe(tier, record, data)

    def attached(self, tier: str, catalog: Catalog) -> None:
        """``tier`` was read: it gets the records of its checkpoints that it lacks."""
        for manifest in catalog.manifests():
            there = {record.id for record in catalog.records(manifest.save_id)}
            for record_id, (record, data) in self._about(manifest.save_id).items():
                if record_id not in there:
                    self._put(tier, catalog, record, data)

    def pins_of(self, save_id: str) -> tuple[bytes, ...]:
        """The encoded pins and unpins of a checkpoint, from wherever they are."""
        return tuple(data for _, data in self._about(save_id).values())

    def records_of(self, save_id: str) -> tuple[SaveRecord, ...]:
        """The same, decoded."""
        return tuple(record for record, _ in self._about(save_id).values())

    def pinned(self, most: int = PINS_SHOWN) -> tuple[PinStatus, ...]:
        """What is pinned, as far as this host knows: the newest first, of ``most`` checkpoints."""
        catalogs = {"memory": self.memory, **self._catalogs()}
        known = {m.save_id: m for catalog in catalogs.values() for m in catalog.manifests()}
        said: dict[str, dict[str, SaveRecord]] = {}
        with self._lock:
            for record, _ in self._said.values():
                said.setdefault(record.save_id, {})[record.id] = record
        found = []
        for manifest in sorted(known.values(), key=lambda m: (m.step, m.seq), reverse=True):
            save_id = manifest.save_id
            about = {r.id: r for c in catalogs.values() for r in c.records(save_id)}
            about |= said.get(save_id, {})
            if not (pins := open_pins(about.values())):
                continue
            holding = {n: c for n, c in catalogs.items() if c.get(save_id) is not None}
            ids = {pin.id for pin in pins}
            having = [n for n, c in holding.items() if ids <= {r.id for r in c.records(save_id)}]
            found.append(
                PinStatus(
                    stream=manifest.stream,
                    step=manifest.step,
                    save_id=save_id,
                    reason=(pin_reason(about.values()) or "")[:REASON_CHARS_MAX],
                    tiers=tuple(having),
                    owed=tuple(name for name in holding if name not in having),
                )
            )
            if len(found) == most:
                break
        return tuple(found)

    def all_pins(self) -> tuple[bytes, ...]:
        """Of all checkpoints that this host knows."""
        catalogs = [self.memory, *self._catalogs().values()]
        known = {m.save_id for catalog in catalogs for m in catalog.manifests()}
        return tuple(data for save_id in sorted(known) for data in self.pins_of(save_id))

    # --- parts ------------------------------------------------------------------------------------

    def _catalogs(self) -> dict[str, Catalog]:
        workers = list(self.workers().items())
        return {name: catalog for name, worker in workers if (catalog := worker.catalog)}

    def _about(self, save_id: str) -> dict[str, tuple[SaveRecord, bytes]]:
        """Pins and unpins of one checkpoint, by record id."""
        with self._lock:
            found = {i: each for i, each in self._said.items() if each[0].save_id == save_id}
        for catalog in (self.memory, *self._catalogs().values()):
            missing = [
                record.id
                for record in catalog.records(save_id)
                if record.kind in LASTING and record.id not in found
            ]
            for data in catalog.encoded_records(missing) if missing else ():
                record = decode_save_record(data)
                found[record.id] = (record, data)
        return found

    def _put(self, tier: str, catalog: Catalog, record: SaveRecord, data: bytes) -> None:
        try:
            catalog.put_record(data)
        except (TieredCkptError, OSError) as error:
            log.warning(
                "namespace %s: a record of a checkpoint is not in %s yet: %s",
                self._namespace,
                tier,
                error,
            )
            self._writers.owe(tier, record, data)

    def _tell(self, host: str) -> None:
        """A host that was away may have its part of what was pinned meanwhile."""
        if pins := self.all_pins():
            self._across.exchange.push(Push(records=pins), [host])
