"""The supervisor's decisions against processes that die, raise and hang in any order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.live import decide as d

POLICY = d.Policy(size=3, standby=1, hang_s=None, unwind_s=10.0)
LONG_S = 1e6


@dataclass
class Sim:
    """A supervisor that carries out decisions, and processes that follow a seeded script."""

    seed: int
    budget: int
    now: d.Situation = field(init=False)
    generations: int = 0
    restarts: int = 0
    updates: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.next_pid = 1
        self.now = d.Situation(now_s=0.0, processes=(), budget=self.budget)
        self.start(POLICY.size + POLICY.standby)

    def start(self, count: int) -> None:
        for _ in range(count):
            process = d.ProcessFacts(pid=self.next_pid, where="starting")
            self.now = replace(self.now, processes=(*self.now.processes, process))
            self.next_pid += 1

    def change(self, pid: int, **fields: object) -> None:
        self.now = replace(
            self.now,
            processes=tuple(
                replace(each, **fields) if each.pid == pid else each  # type: ignore[arg-type]
                for each in self.now.processes
            ),
        )

    def happens(self) -> None:
        """Something happens to one process: most go on, some fail."""
        each = self.rng.choice(self.now.processes) if self.now.processes else None
        self.now = replace(self.now, now_s=self.now.now_s + self.rng.choice((0.1, 1.0, 30.0)))
        if each is None:
            return
        what = self.rng.random()
        if what < 0.1:
            rest = tuple(other for other in self.now.processes if other is not each)
            lost = {each.rank} if each.rank is not None and self.now.running else set()
            self.now = replace(self.now, processes=rest, lost=self.now.lost | lost)
        elif each.where == "starting":
            self.change(each.pid, where="ready")
        elif each.where == "in" and self.now.stopping_since_s is not None:
            if what < 0.7:  # else it does not leave
                version = self.rng.choice((None, self.updates, self.updates - 1))
                self.change(each.pid, where="ready", version=version)
        elif each.where == "in" and what < 0.8:
            self.updates += 1
            self.now = replace(
                self.now,
                progress_s=self.now.now_s,
                intervals_s=(*self.now.intervals_s, 1.0),
                fruitless=0,
            )
        elif each.where == "in" and what > 0.97:
            self.change(each.pid, where="done")

    def do(self, action: d.Action) -> None:
        now = self.now
        match action:
            case d.Start(count):
                assert 0 < count <= now.budget
                self.restarts += count
                self.now = replace(now, budget=now.budget - count)
                self.start(count)
            case d.StopAll():
                assert now.running
                assert now.stopping_since_s is None
                self.now = replace(now, stopping_since_s=now.now_s)
            case d.Kill(pids):
                assert now.now_s - (now.stopping_since_s or 0.0) >= POLICY.unwind_s
                dead = [each for each in now.processes if each.pid in pids]
                assert dead
                assert all(each.where == "in" for each in dead)
                self.now = replace(
                    now,
                    processes=tuple(each for each in now.processes if each not in dead),
                    lost=now.lost | {each.rank for each in dead if each.rank is not None},
                )
            case d.EndGeneration():
                assert not [each for each in now.processes if each.where == "in"]
                fruitless = now.fruitless + (not now.intervals_s)
                self.now = replace(
                    now, running=False, stopping_since_s=None, lost=frozenset(), fruitless=fruitless
                )
                for each in now.processes:
                    if each.where == "done":
                        self.change(each.pid, where="ready", version=None)
            case d.Begin(pids):
                assert not now.running
                assert len(set(pids)) == POLICY.size
                assert {each.pid for each in now.processes if each.where == "ready"} >= set(pids)
                self.generations += 1
                for each in now.processes:
                    rank = pids.index(each.pid) if each.pid in pids else None
                    where = "in" if rank is not None else each.where
                    self.change(each.pid, rank=rank, where=where)
                self.now = replace(
                    self.now, running=True, intervals_s=(), progress_s=now.now_s, lost=frozenset()
                )


@given(st.integers(0, 1 << 32), st.integers(0, 8))
def test_every_fault_leads_to_a_new_generation_or_to_an_exit(seed: int, budget: int):
    sim = Sim(seed, budget)
    for _ in range(300):
        for _ in range(20):
            action = d.decide(POLICY, sim.now)
            if action is None:
                break
            if isinstance(action, d.Exit):
                assert sim.restarts <= budget
                if sim.now.fruitless < d.FRUITLESS_MAX and action.code:
                    assert len(sim.now.processes) < POLICY.size
                return
            sim.do(action)
        else:
            pytest.fail("the decisions do not come to rest")
        # What is waited for will happen: a process that starts or leaves, or a time.
        assert sim.now.processes
        sim.happens()
    assert sim.generations > 0


@given(st.integers(0, 1 << 32))
def test_a_hang_ends_the_generation_and_what_stays_is_killed(seed: int):
    sim = Sim(seed, 0)
    for each in sim.now.processes:
        sim.change(each.pid, where="ready")
    begin = d.decide(POLICY, sim.now)
    assert isinstance(begin, d.Begin)
    sim.do(begin)
    sim.now = replace(sim.now, now_s=LONG_S)
    assert d.decide(POLICY, sim.now) is None  # not armed before three updates
    sim.now = replace(sim.now, intervals_s=(1.0,) * (d.ARMED_AFTER - 1), quiet_until_s=2 * LONG_S)
    assert d.decide(POLICY, sim.now) is None  # announced by pause()
    sim.now = replace(sim.now, quiet_until_s=0.0)
    stop = d.decide(POLICY, sim.now)
    assert isinstance(stop, d.StopAll)
    sim.do(stop)
    assert d.decide(POLICY, sim.now) is None
    sim.now = replace(sim.now, now_s=LONG_S + POLICY.unwind_s)
    assert d.decide(POLICY, sim.now) == d.Kill(begin.pids)


def ready(pid: int, rank: int | None, version: int | None) -> d.ProcessFacts:
    return d.ProcessFacts(pid=pid, where="ready", rank=rank, version=version)


def test_processes_with_state_keep_their_ranks():
    found = [ready(1, None, None), ready(2, 1, 7), ready(3, 2, 6), ready(4, 0, None)]
    assert d.assign(found, 3) == (4, 2, 3)
    # Of two that had the rank, the one with the newer state has it.
    assert d.assign([ready(1, 0, 5), ready(2, 0, 6), ready(3, None, None)], 2) == (2, 1)


def test_three_generations_without_an_update_end_with_the_code_of_the_failure():
    now = d.Situation(now_s=0.0, processes=(), fruitless=d.FRUITLESS_MAX, code=9)
    assert d.decide(POLICY, now) == d.Exit(9, "3 generations in a row ended without an update")
