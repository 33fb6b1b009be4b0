"""Many agents on a virtual clock: network, job, faults, and the checks of what was promised.

What agents decide is decided by the product's own functions (``policy/``, ``recovery/plan.py``);
what is simulated is everything between: messages and their delays, transfers and their rates,
hosts that die, reboot, are cut off or slow. Everything follows from the seed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.simulation.cluster_host import CONNECT_S, Host
from tests.simulation.cluster_leader import Leader
from tests.simulation.cluster_promises import Promises, Violation
from tests.support.saves import NAMESPACE
from tieredckpt.format.manifest import (
    AttemptId,
    AttemptRecord,
    Followed,
    Holders,
    Manifest,
    SegmentRef,
    encode_attempt,
    encode_manifest,
)
from tieredckpt.format.records import SaveRecord
from tieredckpt.format.segment import PAGE_BYTES
from tieredckpt.policy import history, placement, replication, retention
from tieredckpt.recovery.plan import plan_recovery
from tieredckpt.storage.holdings import Holdings, ManifestFact, SegmentFact, TierFacts

OWN_SLOTS = 4
"""Of one rank and stream: one kept, one in flight, two for replication."""

GOSSIP_S = 10.0
RECOVERY_WAIT_S = 120.0
INTERVAL = 0.3
"""Between saves, in replication times."""

ROOT = "0" * 32


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one case is made of."""

    seed: int
    hosts: int
    replicas: int = 1
    streams: tuple[str, ...] = ("default",)
    racks: int = 0
    segments: int = 1
    """Per host and checkpoint."""
    saves: int = 100
    transfer_s: float = 3.0
    """Of one segment, on an idle link."""
    refill: bool = True
    """Whether a restored host has in memory what its ranks loaded."""
    ack_each: bool = False
    """Whether holders acknowledge each segment at once, or all together."""
    ack_gossip: bool = True
    """Whether acknowledgements, too, spread by anti-entropy."""
    shrink: float = 0.0
    """How likely a lost host is not replaced."""
    faults: float = 0.12
    """Per save."""
    quiet_s: float = 600.0
    """After the last save, without faults: everything must have caught up by then."""
    disasters: bool = False
    """Whether more hosts than ``replicas`` are lost at once, too; then nothing is promised."""


@dataclass(frozen=True)
class View:
    """What follows from what a host knows."""

    lines: dict[str, tuple[Manifest, ...]]
    stay: frozenset[str]
    active: tuple[Manifest, ...]
    """What it may have to pull, oldest first."""
    drop: tuple[str, ...]
    over: frozenset[str]
    """Attempts that one which has saved followed."""


@dataclass
class Message:
    """One broadcast on its way."""

    manifests: tuple[Manifest, ...]
    records: tuple[SaveRecord, ...]
    attempts: tuple[AttemptRecord, ...]
    wanted: int
    reached: set[str] = field(default_factory=set)
    failed: bool = False
    """Somebody could not be reached, or was not able to forward."""
    open: int = 0


class World:
    """Clock, network, hosts and the job of one case."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.random = Random(setting.seed)
        self.now_s = 0.0
        self.over = False
        self.found: Counter[tuple[str, str]] = Counter()
        self.trace: list[str] = []
        self._events: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._numbers = itertools.count()
        self._ids = itertools.count(1)
        self._views: dict[frozenset[str], View] = {}
        self._facts: dict[str, SegmentFact] = {}
        self._encoded: dict[str, bytes] = {}
        self.hosts: dict[str, Host] = {}
        self._host_numbers = itertools.count()
        self.members: list[Host] = []
        self.leader: Leader | None = None
        self.running = False
        self.placed = placement.Placement(holders={}, possible=0)
        self.attempt: AttemptRecord | None = None
        self.seq: Counter[str] = Counter()
        self.saves = 0
        self.committed: dict[str, Manifest] = {}
        self.stream_of: dict[str, str] = {}
        """By save id, also of saves that were never committed."""
        self.in_flight: set[str] = set()
        """Sealed, and not committed yet."""
        self.promises = Promises(self)

    # --- clock and network -----------------------------------------------------------------------

    def after(self, delay_s: float, call: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), call, args))

    def run(self) -> None:
        """Until the case is over."""
        while not self.over:
            self.now_s, _, call, args = heapq.heappop(self._events)
            call(*args)

    def log(self, text: str) -> None:
        self.trace.append(f"{self.now_s:9.3f}  {text}")

    def new_id(self) -> str:
        return f"{next(self._ids):032x}"

    def latency(self) -> float:
        return 0.0002 + 0.002 * self.random.random()

    def reachable(self, one: Host, other: Host) -> bool:
        if not (one.alive and other.alive and one.up and other.up):
            return False
        return one is other or not (one.cut or other.cut)

    def broadcast(
        self, leader: Leader, manifests: tuple[Manifest, ...], records: tuple[SaveRecord, ...]
    ) -> None:
        """Push to all members, through the tree."""
        hosts = [member.id for member in leader.members if member is not leader.host]
        message = Message(manifests, records, (leader.attempt,), len(hosts))
        self._forward(leader.host, message, tuple(hosts))

    def _forward(self, sender: Host, message: Message, hosts: tuple[str, ...]) -> None:
        branches = replication.split(hosts)
        if len(branches) > replication.DEGREE:
            raise Violation(f"{sender.id} sends one message to {len(branches)} hosts at a time")
        for branch in branches:
            self._send(sender, message, branch)

    def _send(self, sender: Host, message: Message, branch: replication.Branch) -> None:
        message.open += 1
        child = self.hosts[branch[0]]
        if self.reachable(sender, child):
            delay = self.latency() * max(sender.slow, child.slow)
            self.after(delay, self._arrive, sender, message, branch, child.epoch)
        else:
            self.after(CONNECT_S, self._promote, sender, message, branch)

    def _promote(self, sender: Host, message: Message, branch: replication.Branch) -> None:
        message.failed = True
        following = replication.promote(branch)
        if following is not None and sender.alive and sender.up:
            self._send(sender, message, following)
        self._close(message)

    def _arrive(
        self, sender: Host, message: Message, branch: replication.Branch, epoch: int
    ) -> None:
        child = self.hosts[branch[0]]
        if not self.reachable(sender, child) or child.epoch != epoch:
            self._promote(sender, message, branch)
            return
        if child.id in message.reached:
            raise Violation(f"{child.id} was sent one message twice")
        message.reached.add(child.id)
        self.found["messages", "all"] += 1
        child.learn(message.manifests, message.records, message.attempts)
        self._forward(child, message, branch[1])
        self._close(message)

    def _close(self, message: Message) -> None:
        message.open -= 1
        if not message.open and not message.failed and len(message.reached) != message.wanted:
            raise Violation(f"a message reached {len(message.reached)} of {message.wanted} hosts")

    def tell_leader(self, host: Host, acks: tuple[SaveRecord, ...]) -> None:
        if acks and self.leader is not None and self.reachable(host, self.leader.host):
            self.after(self.latency() * host.slow, self.leader.hear, acks)

    def gossip(self, host: Host) -> None:
        """Anti-entropy: compare with one other member."""
        if self.over or not host.alive:
            return
        self.after(GOSSIP_S * (0.9 + 0.2 * self.random.random()), self.gossip, host)
        if self.leader is not None:
            known = self.leader.host.acks
            self.tell_leader(host, tuple(
                a for a in host.my_acks() if a.id not in known.get(a.save_id, ())
            ))  # fmt: skip
        other = self.members[self.random.randrange(len(self.members))]
        if other is host or not self.reachable(host, other):
            return
        for one, two in ((host, other), (other, host)):
            if (one.manifests.keys(), one.words.keys(), one.attempts.keys()) == (
                two.manifests.keys(), two.words.keys(), two.attempts.keys()
            ) and not self.setting.ack_gossip:  # fmt: skip
                continue
            manifests = tuple(m for s, m in one.manifests.items() if s not in two.manifests)
            words = [w for i, w in one.words.items() if i not in two.words]
            attempts = tuple(a for i, a in one.attempts.items() if i not in two.attempts)
            if self.setting.ack_gossip or (self.leader is not None and two is self.leader.host):
                for save_id, acks in one.acks.items():
                    known = two.acks.get(save_id, {})
                    words += [ack for i, ack in acks.items() if i not in known]
            if manifests or words or attempts:
                two.learn(manifests, tuple(words), attempts)

    # --- what hosts decide, once for all that know the same ---------------------------------------

    def lost(self) -> frozenset[str]:
        return self.leader.lost() if self.leader is not None else frozenset()

    def view(self, host: Host) -> View:
        key = host.key()
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = self._view(host)
        return found

    def _view(self, host: Host) -> View:
        manifests = tuple(host.manifests.values())
        saved = history.saved_by(manifests)
        attempts = history.with_saves(host.attempts.values(), saved)
        words = tuple(host.words.values())
        lines, stay, drop, active = {}, set(), [], []
        for stream in sorted({manifest.stream for manifest in manifests}):
            line = history.candidates(manifests, attempts, stream)
            lines[stream] = line
            kept = replication.must_stay(line, words, stream)
            stay |= kept
            off = history.abandoned(manifests, attempts, stream)
            plan = retention.retain(
                line, off, retention.Keep(last=1), dict.fromkeys(kept, "replicas")
            )
            drop += plan.delete
            active += [m for m in reversed(line) if m.save_id in kept]
        chain = history.Chain(manifests, attempts)
        over = chain.ancestors(saved) - {each.id for each in chain.heads}
        return View(lines, frozenset(stay), tuple(active), tuple(drop), frozenset(over))

    # --- the job ----------------------------------------------------------------------------------

    def new_host(self) -> Host:
        number = next(self._host_numbers)
        racks = self.setting.racks
        domains = (("rack", f"r{number % racks}"),) if racks else ()
        host = Host(self, f"h{number:05}", domains)
        self.hosts[host.id] = host
        self.after(GOSSIP_S * self.random.random(), self.gossip, host)
        return host

    def start(self) -> None:
        self.members = [self.new_host() for _ in range(self.setting.hosts)]
        self._open(dict.fromkeys(self.setting.streams), {}, ())

    def interval_s(self) -> float:
        each = self.setting.transfer_s * self.setting.segments
        return INTERVAL * each * max(self.placed.possible, 1)

    def _open(
        self,
        bases: dict[str, Manifest | None],
        newest: dict[str, Manifest],
        followed: tuple[Followed, ...],
    ) -> None:
        """Engine.open and engine.load on all members; the first one leads.

        It knows what is in its memory, and of what the ranks loaded; nobody counts for all.
        """
        host = self.members[0]
        everybody = [h for h in self.hosts.values() if h.alive]
        loaded = {stream: m for stream, m in bases.items() if m is not None}
        manifests = {**host.manifests, **{m.save_id: m for m in loaded.values()}}
        aside = history.Chain(manifests.values(), host.attempts.values()).beside(
            each.id for each in followed
        )
        self.attempt = history.next_attempt(
            host.attempts.values(), manifests.values(), self.new_id(),
            {
                stream: history.Base(
                    save_id=m and m.save_id,
                    newest=history.ancestry_of(newest[stream]) if stream in newest else (),
                )
                for stream, m in bases.items()
            },
            (*followed, *(Followed(each.number, each.id) for each in aside)), 0.0,
            namespace=NAMESPACE, run=self.new_id(),
        )  # fmt: skip
        # What is known of the loaded checkpoints goes to all members with the attempt: who does not
        # know that one is replicated would let go of it at the next save.
        words = {w.id: w for h in everybody for w in h.words.values()
                 if any(w.save_id == m.save_id for m in loaded.values())}  # fmt: skip
        for member in self.members:
            member.learn(tuple(loaded.values()), tuple(words.values()), (self.attempt,))
            for save_id in [s for s in member.own if s not in self.committed]:
                del member.own[save_id]  # its session ended, and no manifest refers to it
        self.placed = placement.place(
            [placement.PlacementHost(m.id, m.domains) for m in self.members],
            self.setting.replicas, self.placed.holders,
        )  # fmt: skip
        self.leader = Leader(self, host, list(self.members), self.placed, self.attempt)
        self.leader.mending = {m.save_id: m for m in loaded.values()}
        for save_id in sorted(self.view(host).stay):
            self.leader.mending[save_id] = host.manifests[save_id]
        for member in self.members:
            self.tell_leader(member, member.my_acks())
        self.leader.mend()
        self.seq.clear()
        self.running = True
        self.found["starts", "all"] += 1
        self.after(self.interval_s(), self.save, self.attempt)

    def save(self, attempt: AttemptRecord) -> None:
        """All ranks save: each host seals, then the leader commits."""
        if not self.running or attempt is not self.attempt or self.saves >= self.setting.saves:
            return
        self.after(self.interval_s(), self.save, attempt)
        stream = self.setting.streams[self.saves % len(self.setting.streams)]
        self.saves += 1
        if not all(member.up for member in self.members):
            self.found["saves", "skipped: an agent is away"] += 1
            return
        if not all(self._slot_free(member, stream) for member in self.members):
            self.found["saves", "skipped: no free slot"] += 1
            return
        save_id = self.new_id()
        self.stream_of[save_id] = stream
        refs = []
        for number, member in enumerate(self.members):
            ids = tuple(
                f"{int(save_id, 16):012x}{number:016x}{n:04x}" for n in range(self.setting.segments)
            )
            member.own[save_id] = ids
            refs += [SegmentRef(id=i, size=PAGE_BYTES, root=ROOT, host=member.id) for i in ids]
        base = history.base_of(attempt, stream)
        manifest = Manifest(
            save_id=save_id, namespace=NAMESPACE, stream=stream, step=self.saves,
            attempt=AttemptId(attempt.number, attempt.id), seq=self.seq[stream], parent=base.parent,
            lineage=base.lineage, plan=ROOT, tiers=(), segments=tuple(refs),
            world_size=len(self.members), tags={}, created_at_s=0.0,
            replicas=self._replicas(),
        )  # fmt: skip
        self.in_flight.add(save_id)
        self.after(0.05, self._commit, attempt, manifest)

    def _slot_free(self, host: Host, stream: str) -> bool:
        """Whether a rank's ring has room; asks the leader what became of unknown saves."""
        held = [s for s in host.own if self.stream_of[s] == stream]
        if len(held) < OWN_SLOTS:
            return True
        leader = self.leader and self.leader.host
        if leader is None or not self.reachable(host, leader):
            return False
        for save_id in held:
            if save_id in host.manifests:
                continue
            if save_id in leader.manifests:
                words = tuple(leader.words.values())
                host.learn((leader.manifests[save_id],), words)
            elif save_id in self.committed or save_id not in self.in_flight:
                del host.own[save_id]  # no manifest refers to it
        return sum(self.stream_of[s] == stream for s in host.own) < OWN_SLOTS

    def _replicas(self) -> tuple[Holders, ...]:
        if not self.placed.possible:
            return ()
        return tuple(Holders(owner, held) for owner, held in self.placed.holders.items())

    def _commit(self, attempt: AttemptRecord, manifest: Manifest) -> None:
        self.in_flight.discard(manifest.save_id)
        if not self.running or attempt is not self.attempt or self.leader is None:
            return
        self.seq[manifest.stream] += 1
        self.committed[manifest.save_id] = manifest
        self.found["commits", "all"] += 1
        self.leader.commit(manifest)

    # --- restart ----------------------------------------------------------------------------------

    def fail(self, *lost: Host) -> None:
        """Hosts were lost, or only trainers: the job ends, and starts again later."""
        self.promises.lost(*lost)
        if self.running:
            self.running = False
            self.after(5 + 20 * self.random.random(), self.restart, self.now_s)

    def restart(self, since_s: float) -> None:
        """Ask everybody who lives, plan, go on from what the plan chooses."""
        living = [host for host in self.hosts.values() if host.alive]
        if any(h.cut or not h.up for h in living) and self.now_s - since_s < RECOVERY_WAIT_S:
            self.after(5.0, self.restart, since_s)
            return
        told: set[str] = set()
        holdings = [self._holdings(host, told) for host in living]
        bases: dict[str, Manifest | None] = {}
        newest: dict[str, Manifest] = {}
        for stream in self.setting.streams:
            plan = plan_recovery(holdings, stream=stream)
            if plan.sides:
                raise Violation(f"nobody saved but the job, and {stream} has {plan.sides}")
            if plan.newest is not None:
                newest[stream] = plan.newest
            bases[stream] = plan.chosen.manifest if plan.chosen else None
            self.promises.restore(stream, bases[stream])
            self.found["restores", "from memory" if plan.chosen else "nothing"] += 1
        self.promises.restarted()
        self._replace_lost(bases)
        self._open(bases, newest, plan.followed)

    def stray(self, host: Host) -> None:
        """Somebody starts training on a host that is cut off, again and again, and saves nothing.

        It counts on from what that host knows, and may come to higher numbers than the job.
        """
        for _ in range(self.random.randint(1, 4)):
            attempts, manifests = host.attempts.values(), host.manifests.values()
            heads = history.Chain(manifests, attempts).heads
            heads = tuple(Followed(each.number, each.id) for each in heads)
            record = history.next_attempt(
                attempts, manifests, self.new_id(), {}, heads, 0.0,
                namespace=NAMESPACE, run=self.new_id(),
            )  # fmt: skip
            host.learn(attempts=(record,))
            self.found["strays", "all"] += 1

    def _replace_lost(self, bases: dict[str, Manifest | None]) -> None:
        members = []
        for member in self.members:
            if member.alive:
                members.append(member)
            elif self.random.random() >= self.setting.shrink:
                fresh = self.new_host()
                members.append(fresh)
                if self.setting.refill:
                    self._refill(fresh, member, bases)
        if not members:
            members = [self.new_host()]
        if self.setting.shrink and self.random.random() < 0.3 and len(members) > 2:
            members.append(members.pop(0))  # another host leads
        self.members = members
        for member in members:
            if self.setting.refill and member.epoch and not member.manifests:
                self._refill(member, member, bases)

    def _refill(self, host: Host, place: Host, bases: dict[str, Manifest | None]) -> None:
        """``host``'s ranks loaded what those of ``place`` had saved."""
        for manifest in bases.values():
            for ref in manifest.segments if manifest is not None else ():
                if ref.host == place.id and manifest is not None:
                    host.copies.setdefault(manifest.save_id, {})[ref.id] = None

    def _holdings(self, host: Host, told: set[str]) -> Holdings:
        """What the host reports, without manifests that another one has told of."""
        facts = self._facts
        segments = []
        for of in (host.own, host.copies):
            for ids in of.values():
                for each in ids:
                    if each not in facts:
                        facts[each] = SegmentFact(id=each, size=PAGE_BYTES, root=ROOT, error=None)
                    segments.append(facts[each])
        new = [m for s, m in host.manifests.items() if s not in told]
        told.update(host.manifests)
        for manifest in new:
            if manifest.save_id not in self._encoded:
                self._encoded[manifest.save_id] = encode_manifest(manifest)
        memory = TierFacts(
            tier="memory", scope="host", kind="memory", available=True, error=None,
            manifests=tuple(
                ManifestFact(stream=m.stream, save_id=m.save_id, error=None,
                             manifest=self._encoded[m.save_id])
                for m in new
            ),
            plans=(ROOT,), segments=tuple(segments),
        )  # fmt: skip
        attempts = [a for i, a in host.attempts.items() if i not in told]
        told.update(host.attempts)
        return Holdings(
            host_id=host.id, namespace=NAMESPACE, tiers=(memory,),
            attempts=tuple(encode_attempt(a) for a in attempts),
        )  # fmt: skip
