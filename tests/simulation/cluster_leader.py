"""The leader's agent: orders, counts, says what is replicated, and has lost copies made again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from tests.simulation.cluster_host import Host
from tests.support.saves import NAMESPACE
from tieredckpt.format.manifest import AttemptRecord, Holders, Manifest
from tieredckpt.format.records import SaveRecord
from tieredckpt.policy import replication
from tieredckpt.policy.placement import Placement, PlacementHost

if TYPE_CHECKING:
    from tests.simulation.cluster import World

TICK_S = 5.0
LOST_S = 30.0
"""A member that does not answer for so long is lost."""


def scarce(
    manifest: Manifest,
    holdings_by_host: Mapping[str, AbstractSet[str]],
    members: Iterable[str],
    replicas: int,
) -> tuple[str, ...]:
    """The segments that less than ``1 + replicas`` members have now; () when all is repaired."""
    count = dict.fromkeys((ref.id for ref in manifest.segments), 0)
    for member in members:
        for segment_id in holdings_by_host.get(member, frozenset()):
            if segment_id in count:
                count[segment_id] += 1
    return tuple(segment_id for segment_id, copies in count.items() if copies <= replicas)


class Leader:
    """The leader of one attempt."""

    def __init__(
        self, world: World, host: Host, members: list[Host], placement: Placement,
        attempt: AttemptRecord,
    ) -> None:  # fmt: skip
        self.world = world
        self.host = host
        self.members = members
        self.placement = placement
        self.attempt = attempt
        self.last: str | None = None
        self.mending: dict[str, Manifest] = {}
        self._lives = {member.id: member.life for member in members}
        self._silent: dict[str, float] = {}
        self._heard: dict[str, set[tuple[str, str]]] = {}
        self._enough: dict[str, int] = {}
        world.after(TICK_S, self._tick)

    @property
    def in_office(self) -> bool:
        """Its host lives, is in no newer job, and knows of none that has saved."""
        if not self.host.alive or not self.host.up:
            return False
        leader = self.world.leader
        if leader is not None and leader is not self and self.host in leader.members:
            return False
        return self.attempt.id not in self.world.view(self.host).over

    def lost(self) -> frozenset[str]:
        """Members that have not answered for too long."""
        return frozenset(
            h for h, since in self._silent.items() if self.world.now_s - since >= LOST_S
        )

    def lives(self) -> dict[str, str]:
        """The incarnations of the members that are not lost."""
        lost = self.lost()
        return {host: life for host, life in self._lives.items() if host not in lost}

    def hear(self, acks: tuple[SaveRecord, ...]) -> None:
        """Acknowledgements arrived."""
        if not self.host.alive or not self.host.up:
            return
        self.host.learn(records=acks)
        for ack in acks:
            heard = self._heard.setdefault(ack.save_id, set())
            heard.update((ack.host, segment_id) for segment_id in ack.segments)
            # Counting is linear in the hosts: worth it when all may be there, and at each tick.
            if len(heard) >= self._enough.get(ack.save_id, 1 << 40):
                self.lead()

    def lead(self) -> None:
        """Say what is complete, and order what is next."""
        if not self.in_office:
            return
        view = self.world.view(self.host)
        lives = self.lives()
        for line in view.lines.values():
            for manifest in replication.ordered_and_open(line, self.host.words.values()):
                records = self.host.records_of(manifest.save_id)
                if replication.progress(manifest, records, lives).complete:
                    self.world.promises.declare(manifest)
                    self.world.found["replicated", "all"] += 1
                    memories = replication.vouchers(manifest, records, lives)
                    self._say(manifest, "replicated", segments=memories)
                    break  # what is older is overtaken
            words = tuple(self.host.words.values())
            acks = [a for m in line for a in self.host.acks.get(m.save_id, {}).values()]
            for manifest in replication.given_up(line, (*words, *acks), lives):
                self.world.promises.fail(manifest)
                self.world.found["orders", "failed"] += 1
                self._say(manifest, "failed")
        while self._order_next(lives):
            pass

    def _order_next(self, lives: dict[str, str]) -> bool:
        lines = self.world.view(self.host).lines
        known = list(self.host.words.values())
        for line in lines.values():
            for each in replication.ordered_and_open(line, known):
                known += self.host.acks.get(each.save_id, {}).values()
        save_id = replication.next_of_streams(lines, known, self.last, lives)
        if save_id is None:
            return False
        manifest = self.host.manifests[save_id]
        self.last = manifest.stream
        self.world.found["orders", "replicate"] += 1
        self.world.promises.order(manifest, repairs=False)
        self._say(manifest, "order")
        return True

    def _say(
        self, manifest: Manifest, kind: str, placement: tuple[Holders, ...] = (),
        segments: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        word = SaveRecord(
            namespace=NAMESPACE, stream=manifest.stream, save_id=manifest.save_id, kind=kind,
            id=self.world.new_id(), host=self.host.id, incarnation=self.host.life,
            placement=placement, segments=segments,
        )  # fmt: skip
        if kind == "order":
            of = replication.placement_of(manifest, [*self.host.records_of(manifest.save_id), word])
            self._enough[manifest.save_id] = sum(1 + len(of[ref.host]) for ref in manifest.segments)
        self.host.learn(records=(word,))
        self.world.broadcast(self, (manifest,), (word,))

    def commit(self, manifest: Manifest) -> None:
        """A save was committed here."""
        self.host.learn(manifests=(manifest,))
        # With what is ordered: a host that heard of this one first would let go of the one before,
        # which was ordered a moment ago.
        stay = self.world.view(self.host).stay
        words = tuple(word for word in self.host.words.values() if word.save_id in stay)
        self.world.broadcast(self, (manifest,), words)
        self.lead()

    # --- losses --------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self.world.over or not self.host.alive:
            return
        if self.in_office:
            self._probe()
            self.lead()
            self.mend()
        elif self.host.up:
            return  # it has learnt that another one leads
        self.world.after(TICK_S, self._tick)

    def _probe(self) -> None:
        before = self.lost()
        for member in self.members:
            if self.world.reachable(self.host, member):
                self._silent.pop(member.id, None)
                self._lives[member.id] = member.life
            else:
                self._silent.setdefault(member.id, self.world.now_s)
        if self.lost() - before:
            view = self.world.view(self.host)
            for save_id in sorted(view.stay):
                self.mending[save_id] = self.host.manifests[save_id]

    def mend(self) -> None:
        """Order new holders for what has too few copies, until everything has enough."""
        lost = self.lost()
        live = [m for m in self.members if m.id not in lost]
        places = [PlacementHost(m.id, m.domains) for m in live]
        for save_id, manifest in list(self.mending.items()):
            if self._superseded(manifest):
                del self.mending[save_id]
                continue
            known = self.host.records_of(save_id)
            lives = self.lives()
            holdings = {
                m.id: m.segments_of(save_id) for m in live if self.world.reachable(self.host, m)
            }
            said: dict[str, set[str]] = {}
            for ack in known:
                if ack.kind == "ack" and lives.get(ack.host) == ack.incarnation:
                    said.setdefault(ack.host, set()).update(ack.segments)
            replicas = min(self.placement.possible, len(live) - 1)
            if not replication.is_ordered(manifest, known):  # it was loaded
                if all(ref.host in lives for ref in manifest.segments):
                    self.world.promises.order(manifest, repairs=True)
                    self._say(manifest, "order")
                continue
            added = replication.repair(manifest, known, places, replicas, lives)
            if added:
                self.world.found["orders", "repair"] += 1
                self.world.promises.order(manifest, repairs=True)
                self._say(manifest, "order", added)
            elif replicas == self.placement.possible and not any(
                scarce(manifest, each, each, replicas) for each in (said, holdings)
            ):
                del self.mending[save_id]
                self.world.promises.mended(manifest, 1 + replicas)
                self.world.found["mended", "all"] += 1

    def _superseded(self, manifest: Manifest) -> bool:
        """Something newer is replicated, or it is off the line: its copies are needed no more."""
        line = self.world.view(self.host).lines.get(manifest.stream, ())
        newest = replication.newest_replicated(line, self.host.words.values())
        if manifest not in line:
            return True
        return newest is not None and line.index(newest) < line.index(manifest)
