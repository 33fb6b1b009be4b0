"""One simulated host: what its agent knows, what is in its memory, what it pulls.

It decides nothing itself: what stays, what is pulled and in which order is answered by
``policy/replication.py``, ``policy/retention.py`` and ``policy/history.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.saves import NAMESPACE
from tieredckpt.format.manifest import AttemptRecord, Manifest
from tieredckpt.format.records import SaveRecord
from tieredckpt.policy import replication

if TYPE_CHECKING:
    from tests.simulation.cluster import World

Domains = tuple[tuple[str, str], ...]

COPY_SLOTS = 2
"""Checkpoints of one stream of which a host keeps copies for others: ``keep + 1``, at least 2."""

STALL_S = 10.0
CONNECT_S = 2.0


class Host:
    """A host and its agent. ``life`` is the incarnation of its memory."""

    def __init__(self, world: World, host_id: str, domains: Domains) -> None:
        self.world = world
        self.id = host_id
        self.domains = domains
        self.alive = True
        self.up = True
        """Its agent runs."""
        self.cut = False
        self.slow = 1.0
        self.epoch = 0
        """Changes whenever transfers from and to it break off."""
        self.sending = 0
        self.pulling = False
        self.boot()

    def boot(self) -> None:
        """Begin with nothing in memory."""
        self.life = self.world.new_id()
        self.manifests: dict[str, Manifest] = {}
        self.words: dict[str, SaveRecord] = {}
        """Orders and what was said to be replicated, by record id."""
        self.acks: dict[str, dict[str, SaveRecord]] = {}
        self.attempts: dict[str, AttemptRecord] = {}
        self.own: dict[str, tuple[str, ...]] = {}
        """Segments that its ranks sealed, by save id."""
        self._idle: dict[str, int] = {}
        """By save id, how many orders it knew when there was nothing left to pull."""
        self.copies: dict[str, dict[str, None]] = {}
        self.break_off()

    def break_off(self) -> None:
        """What is being sent and pulled is lost; what is in memory stays."""
        self.epoch += 1
        self.sending = 0
        self.pulling = False

    def key(self) -> frozenset[str]:
        """All that decides what it keeps and pulls."""
        return frozenset((*self.manifests, *self.words, *self.attempts))

    def has(self, save_id: str, segment_id: str) -> bool:
        return segment_id in self.copies.get(save_id, ()) or segment_id in self.own.get(save_id, ())

    def segments_of(self, save_id: str) -> set[str]:
        return {*self.own.get(save_id, ()), *self.copies.get(save_id, ())}

    def records_of(self, save_id: str) -> list[SaveRecord]:
        words = [word for word in self.words.values() if word.save_id == save_id]
        return words + list(self.acks.get(save_id, {}).values())

    def learn(
        self,
        manifests: tuple[Manifest, ...] = (),
        records: tuple[SaveRecord, ...] = (),
        attempts: tuple[AttemptRecord, ...] = (),
    ) -> None:
        """Take over what it does not know yet, and act on it."""
        before = len(self.manifests), len(self.words), len(self.attempts)
        for manifest in manifests:
            self.manifests.setdefault(manifest.save_id, manifest)
        for attempt in attempts:
            self.attempts.setdefault(attempt.id, attempt)
        for record in records:
            if record.kind == "ack":
                self.acks.setdefault(record.save_id, {})[record.id] = record
            else:
                self.words.setdefault(record.id, record)
        if before != (len(self.manifests), len(self.words), len(self.attempts)):
            self.settle()

    def settle(self) -> None:
        """Let go of what need not stay, then pull what was ordered."""
        for save_id in self.world.view(self).drop:
            self.forget(save_id)
        self.pull()

    def forget(self, save_id: str) -> None:
        self.world.promises.recycle(self, save_id)
        del self.manifests[save_id]
        self.own.pop(save_id, None)
        self.copies.pop(save_id, None)
        self.acks.pop(save_id, None)
        self._idle.pop(save_id, None)
        for record_id in [r.id for r in self.words.values() if r.save_id == save_id]:
            del self.words[record_id]

    # --- pulling -------------------------------------------------------------------------------

    def pull(self) -> None:
        """Begin the next transfer, if none is under way and there is one to make."""
        if self.pulling or not self.up:
            return
        for manifest in self.world.view(self).active:
            if self._begin(manifest):
                return

    def _begin(self, manifest: Manifest) -> bool:
        known = tuple(self.records_of(manifest.save_id))
        orders = sum(record.kind == "order" for record in known)
        if self._idle.get(manifest.save_id) == orders:
            return False
        jobs = replication.jobs_of(self.id, self.life, manifest, known, self.world.lost())
        if not jobs:
            self._idle[manifest.save_id] = orders
        done = []
        for job in jobs:
            if self.has(manifest.save_id, job.ref.id):
                done.append(job.ref.id)
                continue
            if self.world.setting.ack_each and done:
                break
            self.world.promises.pull(self, manifest)
            if not self._slot_free(manifest):
                break
            self.pulling = True
            self._fetch(manifest, job, 0)
            break
        if done and (len(done) == len(jobs) or self.world.setting.ack_each):
            self._acknowledge(manifest, tuple(done))
            return self.pulling or self._begin(manifest)
        return self.pulling

    def _slot_free(self, manifest: Manifest) -> bool:
        held = [s for s in self.copies if self.manifests[s].stream == manifest.stream]
        return manifest.save_id in held or len(held) < COPY_SLOTS

    def _fetch(
        self, manifest: Manifest, job: replication.Pull, number: int, silent: bool = False
    ) -> None:
        """Ask the ``number``-th source; ``silent``: one before did not answer."""
        world = self.world
        if number == len(job.sources):
            records = self.records_of(manifest.save_id)
            if not silent and not replication.was_replicated(manifest, records):
                self._say_that_it_is_nowhere(manifest)
            self._acknowledge_what_is_here(manifest)
            world.after(CONNECT_S, self._again, self.epoch)
            return
        source = world.hosts.get(job.sources[number])
        if source is None or not world.reachable(self, source):
            world.after(CONNECT_S, self._next, self.epoch, manifest, job, number, True)
        elif not source.has(manifest.save_id, job.ref.id):
            world.after(world.latency(), self._next, self.epoch, manifest, job, number, silent)
        else:
            source.sending += 1
            slow = max(self.slow, source.slow) * source.sending
            took_s = world.setting.transfer_s * slow
            epochs = self.epoch, source.epoch
            world.after(took_s, self._landed, epochs, source, manifest, job, number)

    def _landed(
        self,
        epochs: tuple[int, int],
        source: Host,
        manifest: Manifest,
        job: replication.Pull,
        number: int,
    ) -> None:
        same = source.epoch == epochs[1]
        source.sending -= same
        if self.epoch != epochs[0]:
            return
        if not same or not self.world.reachable(self, source):
            self.world.after(STALL_S, self._next, self.epoch, manifest, job, number, True)
            return
        if manifest.save_id in self.manifests:
            self.copies.setdefault(manifest.save_id, {})[job.ref.id] = None
            self.world.found["segments pulled", "all"] += 1
        self._again(self.epoch)

    def _next(
        self, epoch: int, manifest: Manifest, job: replication.Pull, number: int, silent: bool
    ) -> None:
        if self.epoch == epoch:
            self._fetch(manifest, job, number + 1, silent)

    def _say_that_it_is_nowhere(self, manifest: Manifest) -> None:
        word = SaveRecord(
            namespace=NAMESPACE, stream=manifest.stream, save_id=manifest.save_id, kind="failed",
            id=self.world.new_id(), host=self.id, incarnation=self.life,
        )  # fmt: skip
        self.world.found["orders", "without a source"] += 1
        self.world.promises.nowhere(manifest)
        self.learn(records=(word,))

    def _again(self, epoch: int) -> None:
        if self.epoch == epoch:
            self.pulling = False
            self.pull()

    def _acknowledge(self, manifest: Manifest, segments: tuple[str, ...]) -> None:
        ack = SaveRecord(
            namespace=NAMESPACE, stream=manifest.stream, save_id=manifest.save_id, kind="ack",
            id=self.world.new_id(), host=self.id, incarnation=self.life, segments=segments,
        )  # fmt: skip
        self.learn(records=(ack,))
        self.world.found["acknowledgements", "all"] += 1
        self.world.tell_leader(self, (ack,))

    def _acknowledge_what_is_here(self, manifest: Manifest) -> None:
        """What is missing does not come now: the leader may have others copy what is not."""
        known = tuple(self.records_of(manifest.save_id))
        jobs = replication.jobs_of(self.id, self.life, manifest, known, self.world.lost())
        here = tuple(job.ref.id for job in jobs if self.has(manifest.save_id, job.ref.id))
        if here:
            self._acknowledge(manifest, here)

    def my_acks(self) -> tuple[SaveRecord, ...]:
        """What it has acknowledged, for a leader that does not know it."""
        return tuple(
            ack for save_id in self.acks for ack in self.acks[save_id].values()
            if ack.host == self.id
        )  # fmt: skip
