"""Simulated ranks: processes that enter, train, fail and leave; and the worlds that they form.

An update of a world is completed only while all of its ranks are in it, and every two of their
hosts are connected. A world restores what its ranks keep if it has each shard, as HSDP has that
shards within a host; else the newest checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.live_host import RANKS, Life, Process
from tieredckpt.live import messages as m
from tieredckpt.live import processes as p

if TYPE_CHECKING:
    from tests.simulation.live_case import Case

RETRY_S = 0.3
GLOO_S = 20.0
"""After so long without a connection a collective fails."""


class Rank(Process):
    """A process of the script."""

    def __init__(self, case: Case, life: Life, pid: int) -> None:
        super().__init__(life, pid)
        self.case = case
        self.world: Generation | None = None
        """The one that it is in."""
        self.kept: tuple[int, int] | None = None
        """The update and the shard of its state."""
        self.is_stuck = False
        self.stays = False
        """Stuck, also once it is told to leave."""
        self.changes = 0
        """The generation that it is to leave together with all others."""
        life.machine.processes.append(self)
        case.after(case.rng.uniform(0.5, case.start_s), self, self.report, m.Ready())

    @property
    def host(self) -> str:
        return self.machine.name

    @property
    def works(self) -> bool:
        return not self.is_stuck and RANKS not in self.machine.asleep

    def receive(self, message: m.ToProcess, known: m.Decision) -> None:
        case = self.case
        if isinstance(message, m.Train):
            self.world = case.enter(self, message, known)
        elif isinstance(message, m.Change):
            self.changes = message.generation
        elif isinstance(message, m.Stop):
            if self.world is not None and self.world.number == message.generation:
                slow = case.rng.random() < case.slow
                wait_s = case.rng.uniform(1.0, 10.0) if slow else case.rng.uniform(0.01, 0.3)
                case.after(wait_s, self, self.leave, self.world)
        else:
            case.after(case.rng.uniform(0.05, 1.0), self, self.die, message.code)

    def fail(self, error: str) -> None:
        """Its ``train`` raises."""
        if self.world is None or not self.works:
            return
        self.report(m.Fault(generation=self.world.number, error=error))
        self.case.after(self.case.rng.uniform(0.01, 1.0), self, self.leave, self.world)

    def leave(self, world: Generation) -> None:
        if self.world is not world or self.stays:
            return
        number, self.is_stuck = self.world.number, False
        self.world.is_broken = True
        self.world = None
        version = self.kept[0] if self.kept is not None else None
        self.report(m.Ready(generation=number, version=version))

    def leave_saved(self, world: Generation) -> None:
        """After the save of all ranks."""
        if self.world is world:
            self.kept = None
            self.leave(world)

    def be_done(self, version: int) -> None:
        assert self.world is not None
        number, self.world, self.kept = self.world.number, None, None
        self.report(m.Done(generation=number, version=version))

    def progress(self, what: str, version: int) -> None:
        assert self.world is not None
        self.report(m.Progress(generation=self.world.number, what=what, version=version))

    def die(self, code: int) -> None:
        if self.is_gone:
            return
        world = self.world
        self.vanish()
        if world is not None:
            world.noticed(0.6, 1.0)
        self.report(p.Died(code, ""))

    def vanish(self) -> None:
        """Its host is lost, too."""
        world, self.world = self.world, None
        self.is_gone = True
        self.machine.processes.remove(self)
        if world is not None:
            world.is_broken = True
            if not self.machine.is_up:
                world.noticed(0.1, 5.0)


class Generation:
    """One world."""

    def __init__(self, case: Case, decision: m.Decision) -> None:
        self.case = case
        self.decision = decision
        self.number = decision.generation
        self.ranks: dict[int, Rank] = {}
        self.is_broken = False
        """One of its ranks has left, so it makes no more updates."""
        self.version = 0
        self.updates = 0
        self._vote_s = 0.0
        self._stalled_s = case.now_s

    def __str__(self) -> str:
        (term, host, _), number = self.decision.place
        return f"generation {self.number} of {term}.{host}.{number}"

    def add(self, process: Rank, rank: int) -> None:
        self.ranks[rank] = process
        if len(self.ranks) == len(self.decision.members):
            self.case.after(self.case.rng.uniform(0.1, 1.0), None, self._load)

    def noticed(self, part: float, within_s: float) -> None:
        """Some of the ranks notice that another one is gone."""
        rng = self.case.rng
        for each in self.ranks.values():
            if each.world is self and rng.random() < part:
                wait_s = rng.uniform(0.0, within_s)
                self.case.after(wait_s, each, self._fail, each)

    def _fail(self, process: Rank) -> None:
        if process.world is self:
            process.fail("RuntimeError: connection closed by peer")

    def _goes_on(self) -> bool:
        """Whether all ranks are there, and connected."""
        ranks = self.ranks.values()
        cut = self.case.cut
        if cut:
            hosts = dict.fromkeys(each.host for each in ranks)
            if any((a, b) in cut for a in hosts for b in hosts):
                if self.case.now_s - self._stalled_s > GLOO_S:
                    self.case.rng.choice(list(ranks)).fail("RuntimeError: timed out")
                return False
        self._stalled_s = self.case.now_s
        return all(each.works for each in ranks)

    def _load(self) -> None:
        if self.is_broken:
            return
        case = self.case
        if not self._goes_on():
            case.after(RETRY_S, None, self._load)
            return
        self.version = case.restore(self)
        for each in self.ranks.values():
            each.kept = None
            each.progress("load", self.version)
            if self.decision.saves_only:
                case.after(case.rng.uniform(0.01, 0.2), each, each.leave, self)
        if not self.decision.saves_only:
            self._begin()

    def _begin(self) -> None:
        case = self.case
        if self.version >= case.last:
            case.checkpoint = self.version
            for each in self.ranks.values():
                each.be_done(self.version)
            self.is_broken = True
            return
        if any(each.changes == self.number for each in self.ranks.values()) and self.updates:
            case.checkpoint = self.version
            case.counts["changes"] += 1
            for each in self.ranks.values():
                case.after(case.rng.uniform(0.01, 0.2), each, each.leave_saved, self)
            return
        for each in self.ranks.values():
            each.progress("begin", self.version)
        case.after(case.step_s, None, self._vote)

    def _vote(self) -> None:
        if self.is_broken:
            return
        if not self._goes_on():
            self.case.after(RETRY_S, None, self._vote)
            return
        self._vote_s = self.case.now_s
        self.case.after(self.case.rng.choice((0.002, 0.02, 0.2)), None, self._update)

    def _update(self) -> None:
        if self.is_broken:
            return
        case = self.case
        if not self._goes_on():
            case.after(RETRY_S, None, self._update)
            return
        self.version += 1
        self.updates += 1
        case.updated(self, self._vote_s)
        for rank, each in self.ranks.items():
            each.kept = (self.version, rank % case.policy.per_host)
            each.progress("update", self.version)
        if self.version % case.save_every == 0:
            case.checkpoint = self.version
        self._begin()
