"""Saves without collectives over hosts that fail: whatever is lost, and whoever dies or gives up.

The real classes of three hosts, with a network that loses requests and replies, agents that are
killed anywhere in between and ranks that die or lose patience, all chosen by Hypothesis. No
checkpoint ever has parts of two saves, and no rank is told what is not so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.format.samples import hex_id, small_manifest
from tests.unit.agent.test_no_collectives import STREAM, plan_of
from tieredckpt.agent.host.events import Hooks
from tieredckpt.agent.no_collectives.coordinator import Gatherings, Parts, not_applied
from tieredckpt.agent.no_collectives.participant import HostGatherings
from tieredckpt.errors import NotFoundError, TierUnavailableError
from tieredckpt.format.manifest import Manifest, SegmentRef, decode_manifest, encode_manifest
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.base import describe_error
from tieredckpt.rpc.messages.no_collectives import Confirmed, ConfirmParts, HandOver, Taken

LAYOUT = ("a", "a", "b", "b", "c")
WORLD = len(LAYOUT)
PLANS = [plan_of(rank, WORLD) for rank in range(WORLD)]
UNREACHED = TierUnavailableError("not reached", tier="peer", outcome="unknown")
TOO_LATE = describe_error(not_applied("too late"))


class Killed(BaseException):
    """The agent that was doing this is no more."""


class Rank:
    """A rank in its save, as :mod:`tieredckpt.dcp.save.no_collectives` is."""

    def __init__(self, number: int) -> None:
        self.number, self.host = number, LAYOUT[number]
        self.alive = True
        self.ordinal = 0
        self.saving = False
        self.told: dict[int, str] = {}
        """By ordinal: the save id, "no", or "unknown"."""

    @property
    def key(self) -> m.GatheringKey:
        return m.GatheringKey(stream=STREAM, epoch=hex_id(1), ordinal=self.ordinal)

    def segment(self, ordinal: int) -> str:
        return hex_id(10_000 + 100 * ordinal + self.number)

    def part(self) -> m.Contribute:
        draft = msgspec.structs.replace(
            small_manifest(), save_id=hex_id(1_000_000 + self.ordinal), step=self.ordinal,
            world_size=WORLD, segments=(), plan=hex_id(0),
        )  # fmt: skip
        return m.Contribute(
            session_id=f"session {self.number}", run=hex_id(77), key=self.key, step=self.ordinal,
            world_size=WORLD, members=hex_id(0), rank=self.number,
            part=m.SealedPart(
                segment_id=self.segment(self.ordinal), size=4096, root=hex_id(self.number)
            ),
            values=(), plan=PLANS[self.number], error=None, decider="a",
            draft=encode_manifest(draft) if self.number == 0 else None,
            here=LAYOUT.count(self.host), hosts=("a", "b", "c") if self.number == 0 else (),
        )  # fmt: skip

    def hear(self, outcome: m.Gathered) -> None:
        if outcome.state == "committed":
            assert outcome.save_id is not None
            self._end(outcome.save_id)
        elif outcome.state == "failed":
            assert outcome.error is not None
            unknown = outcome.error.fields.get("outcome") == "unknown"
            self._end("unknown" if unknown else "no")

    def _end(self, told: str) -> None:
        self.told[self.ordinal] = told
        self.ordinal, self.saving = self.ordinal + 1, False


class World:
    """Three hosts; ``a`` decides."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.faulty = True
        self.depth = 0
        self.ranks = [Rank(number) for number in range(WORLD)]
        self.commits: list[Manifest] = []
        self.manifests: dict[str, list[Manifest]] = {host: [] for host in "abc"}
        self.tasks: list[tuple[object, Callable[[], None]]] = []
        self.lost: set[str] = set()
        self.sealed: set[str] = set()
        self.clock = 0.0
        self.life = 0
        """Of the agent that decides."""
        self.restart("a")
        self.restart("b")
        self.restart("c")

    def restart(self, host: str) -> None:
        """Its agent is another one, which knows what is committed and nothing else."""
        if host == "a":
            self.life += 1
            mine = self.life
            self.decider = Gatherings(
                threading.RLock(), "a", lambda: tuple(self.manifests["a"]),
                lambda request: self.commit(mine, request),
                lambda key, parts: self.confirm(mine, key, parts), lambda: frozenset(),
            )  # fmt: skip
            return
        others = self.__dict__.setdefault("others", {})
        made: HostGatherings

        def at_once(call: Callable[[], None]) -> bool:
            self.tasks.append((made, call))
            return True

        across: Any = SimpleNamespace(
            peers=SimpleNamespace(
                host_id=host,
                ask=lambda to, request: self.hand_over(host, made, request),
                lost=lambda: self.lost,
                members=lambda: ("a", "b", "c"),
            ),
            exchange=SimpleNamespace(at_once=at_once),
            hooks=Hooks(),
        )
        labels = [SimpleNamespace(state="sealed", segment_id=each) for each in self.sealed]
        pool: Any = SimpleNamespace(slots=lambda: [SimpleNamespace(label=x) for x in labels])
        made = others[host] = HostGatherings(
            threading.RLock(), across, lambda: tuple(self.manifests[host]), self.refuse,
            self.check, self.is_live, pool, clock=lambda: self.clock,
        )  # fmt: skip

    # --- what agents ask of the world -------------------------------------------------------------

    def refuse(self, request: m.Commit) -> m.Committed:
        raise AssertionError("another host decides")

    def is_live(self, session_id: str) -> bool:
        rank = self.ranks[int(session_id.split()[1])]
        if not rank.alive:
            self.agent(rank).drop_session(session_id)
        return rank.alive

    def check(self, ref: SegmentRef) -> None:
        """Ranks give their slots back when they hear that nothing was committed."""
        for rank in self.ranks:
            for ordinal, told in rank.told.items():
                if told == "no" and rank.segment(ordinal) == ref.id:
                    raise NotFoundError("it was given back", key=ref.id)

    def fails(self) -> bool:
        return self.faulty and self.random.random() < 0.15

    def meanwhile(self) -> None:
        """Others do something while this waits."""
        if self.faulty and self.depth < 2:
            self.depth += 1
            for _ in range(self.random.choice((0, 0, 1, 3))):
                self.step()
            self.depth -= 1

    def hand_over(self, host: str, sender: HostGatherings, request: HandOver) -> Taken:
        if self.fails():
            raise UNREACHED
        self.meanwhile()
        decider = self.decider
        try:
            taken = decider.take_over(request)
        except Killed:
            raise UNREACHED from None
        self.meanwhile()
        if self.fails() or self.others[host] is not sender or decider is not self.decider:
            raise UNREACHED
        return taken

    def confirm(self, life: int, key: m.GatheringKey, parts: Parts) -> frozenset[str]:
        answers = dict[str, Confirmed]()
        for host, have in parts.items():
            if self.fails():
                continue
            self.meanwhile()
            asked = self.others[host]
            answer = asked.confirm(ConfirmParts(host="a", key=key, have=have))
            if not self.fails() and asked is self.others[host]:
                answers[host] = answer
        self.meanwhile()
        if self.life != life:
            raise Killed
        for answer in answers.values():
            if answer.state == "no":
                raise not_applied("a host says no")
        return frozenset(h for h in parts if h not in answers or answers[h].state != "yes")

    def commit(self, life: int, request: m.Commit) -> m.Committed:
        self.meanwhile()
        if self.life != life or self.dies("a"):
            raise Killed
        made = decode_manifest(request.manifest)
        self.commits.append(made)
        self.manifests["a"].append(made)
        self.meanwhile()
        if self.life != life or self.dies("a"):
            raise Killed
        return m.Committed(need_plan=False)

    def dies(self, host: str) -> bool:
        if self.fails():
            self.restart(host)
            return True
        return False

    # --- what happens -----------------------------------------------------------------------------

    def agent(self, rank: Rank) -> Gatherings | HostGatherings:
        return self.decider if rank.host == "a" else self.others[rank.host]

    def contribute(self, agent: Gatherings | HostGatherings, rank: Rank) -> m.Gathered:
        if isinstance(agent, HostGatherings):
            return agent.contribute(rank.part(), LAYOUT.count(rank.host))
        return agent.contribute(rank.part())

    def go_on(self, rank: Rank, give_up: m.ErrorReply | None = None) -> None:
        """The next request of a rank; what it hears of an agent that was killed meanwhile is lost.

        A rank makes one request at a time.
        """
        if not rank.alive or rank.__dict__.get("asks"):
            return
        rank.__dict__["asks"] = True
        agent, ordinal = self.agent(rank), rank.ordinal
        try:
            if not rank.saving:
                rank.saving = True
                self.sealed.add(rank.segment(rank.ordinal))
                heard = self.contribute(agent, rank)
            else:
                request = m.AskGathering(
                    session_id=f"session {rank.number}", key=rank.key, rank=rank.number,
                    give_up=give_up,
                )  # fmt: skip
                heard = agent.ask(request)
                if heard.state == "unknown":
                    heard = self.contribute(agent, rank)
            if agent is self.agent(rank) and rank.alive and ordinal == rank.ordinal:
                rank.hear(heard)
        except Killed:
            pass
        finally:
            rank.__dict__["asks"] = False

    def run_task(self) -> None:
        if self.tasks:
            sender, call = self.tasks.pop(self.random.randrange(len(self.tasks)))
            if sender in self.others.values():
                call()

    def tell(self, host: str) -> None:
        """A manifest arrives."""
        new = [each for each in self.commits if each not in self.manifests[host]]
        if new:
            found = self.random.choice(new)
            self.manifests[host].append(found)
            self.others[host].committed(found)

    def step(self) -> None:
        self.clock += 0.1
        random = self.random
        match random.randrange(40):
            case 0:
                self.go_on(random.choice(self.ranks), TOO_LATE)
            case 1:
                self.restart(random.choice("abc"))
            case 2:
                dead = random.choice(self.ranks)
                if random.random() < 0.3:
                    dead.alive = False
                    self.agent(dead).drop_session(f"session {dead.number}")
            case 3:
                self.lost ^= {"a"}
            case 4 | 5 | 6:
                self.tell(random.choice("bc"))
            case number if number < 16:
                self.run_task()
            case _:
                self.go_on(random.choice(self.ranks))
        self.check_promises()

    # --- promises ---------------------------------------------------------------------------------

    def check_promises(self) -> None:
        by_save = {made.save_id: made for made in self.commits}
        assert len(by_save) == len(self.commits), "a save was committed twice"
        for made in self.commits:
            wanted = [rank.segment(made.step) for rank in self.ranks]
            assert [ref.id for ref in made.segments] == wanted
            assert [ref.host for ref in made.segments] == list(LAYOUT)
        for rank in self.ranks:
            for ordinal, told in rank.told.items():
                if told == "no":
                    assert all(made.step != ordinal for made in self.commits), "it was committed"
                elif told != "unknown":
                    assert by_save[told].step == ordinal

    def settle(self) -> None:
        """From now on nothing fails: all ranks learn of their saves, and can save together."""
        self.faulty = False
        self.lost.clear()
        last = max(rank.ordinal for rank in self.ranks)
        for _ in range(400):
            self.clock += 0.1
            for rank in self.ranks:
                if rank.alive and (rank.saving or rank.ordinal <= last):
                    late = rank.saving and self.random.random() < 0.1
                    self.go_on(rank, TOO_LATE if late else None)
            while self.tasks:
                self.run_task()
            self.check_promises()
        for other in self.others.values():
            left = [each for each in other._known.values() if each.state == "open"]
            assert all(any(self.ranks[rank].alive for rank in each.parts) for each in left)
        for rank in self.ranks:
            assert not rank.alive or (not rank.saving and rank.ordinal > last), "one still waits"


SEEDS = st.integers(0, 2**32)


@settings(max_examples=150, deadline=None)
@given(SEEDS, st.integers(0, 300))
def test_no_rank_is_told_what_is_not_so(seed: int, steps: int):
    world = World(Random(seed))
    for _ in range(steps):
        world.step()
    world.settle()


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_without_faults_each_save_is_committed(seed: int):
    world = World(Random(seed))
    world.faulty = False
    for step in range(3):
        for _ in range(100):
            for rank in world.random.sample(world.ranks, WORLD):
                if rank.ordinal == step:
                    world.go_on(rank)
                world.clock += 0.01
                world.run_task()
        assert [made.step for made in world.commits] == list(range(step + 1))
        assert {rank.told[step] for rank in world.ranks} == {world.commits[-1].save_id}
