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
        what, generation = self.rng.random(), self.now.generation
        if what < 0.1:
            rest = tuple(other for other in self.now.processes if other is not each)
            self.now = replace(self.now, processes=rest)
            if each.rank is not None and generation is not None:
                generation.lost.add(each.rank)
        elif each.where == "starting":
            self.change(each.pid, where="ready")
        elif each.where == "in" and generation is not None:
            self.inside(each, generation, what)

    def inside(self, each: d.ProcessFacts, generation: d.Generation, what: float) -> None:
        """Something happens to a rank."""
        if generation.stopping_since_s is not None:
            if what < 0.7:  # else it does not leave
                version = self.rng.choice((None, self.updates, self.updates - 1))
                self.change(each.pid, where="ready", version=version)
        elif generation.saves_only:
            self.change(each.pid, where="ready", version=None)
        elif what < 0.8:
            self.updates += 1
            generation.progress_s = self.now.now_s
            generation.updates_s.append(self.now.now_s)
            self.now = replace(self.now, failures=0)
        elif what > 0.97:
            self.change(each.pid, where="done", version=self.updates)

    def do(self, action: d.Action) -> None:
        now, generation = self.now, self.now.generation
        match action:
            case d.Start(count):
                assert 0 < count <= now.budget
                self.restarts += count
                self.now = replace(now, budget=now.budget - count)
                self.start(count)
            case d.StopAll():
                assert generation is not None
                assert generation.stopping_since_s is None
                generation.stopping_since_s = now.now_s
            case d.Kill(pids):
                assert generation is not None
                assert generation.stopping_since_s is not None
                assert now.now_s - generation.stopping_since_s >= POLICY.unwind_s
                dead = [each for each in now.processes if each.pid in pids]
                assert dead
                assert all(each.where == "in" for each in dead)
                generation.lost |= {each.rank for each in dead if each.rank is not None}
                left = tuple(each for each in now.processes if each not in dead)
                self.now = replace(now, processes=left)
            case d.EndGeneration():
                assert generation is not None
                assert not [each for each in now.processes if each.where == "in"]
                counts = not generation.updates_s and not generation.saves_only
                self.now = replace(now, generation=None, failures=now.failures + counts)
                for each in now.processes:
                    if each.where == "done":
                        self.change(each.pid, where="ready", version=None)
            case d.Begin(pids, saves_only):
                self.begin(pids, saves_only=saves_only)

    def begin(self, pids: tuple[int, ...], *, saves_only: bool) -> None:
        assert self.now.generation is None
        ready = {each.pid: each for each in self.now.processes if each.where == "ready"}
        assert set(pids) <= set(ready)
        if saves_only:
            # Nobody waits for it: the others still start, and none that keeps state is left out.
            keeping = {pid for pid, each in ready.items() if each.version is not None}
            assert len(ready) < POLICY.size
            assert keeping == set(pids) != set()
        else:
            assert len(set(pids)) == POLICY.size
        self.generations += 1
        for each in self.now.processes:
            rank = pids.index(each.pid) if each.pid in pids else None
            where = "in" if rank is not None else each.where
            self.change(each.pid, rank=rank, where=where, version=None)
        self.now = replace(
            self.now,
            begun=True,
            generation=d.Generation(
                number=self.generations, progress_s=self.now.now_s, saves_only=saves_only
            ),
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
                if sim.now.failures < d.FAILURES_MAX and action.code:
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
    generation = sim.now.generation
    assert generation is not None
    assert d.decide(POLICY, sim.now) is None  # not armed before three updates
    generation.updates_s.extend(range(d.ARMED_AFTER))
    generation.quiet_until_s[begin.pids[0]] = 2 * LONG_S
    assert d.decide(POLICY, sim.now) is None  # announced by pause()
    generation.quiet_until_s.clear()
    stop = d.decide(POLICY, sim.now)
    assert isinstance(stop, d.StopAll)
    sim.do(stop)
    assert d.decide(POLICY, sim.now) is None
    sim.now = replace(sim.now, now_s=LONG_S + POLICY.unwind_s)
    assert d.decide(POLICY, sim.now) == d.Kill(begin.pids)


def test_a_rank_that_returns_while_another_begins_a_step_ends_the_generation():
    sim = Sim(0, 0)
    for each in sim.now.processes:
        sim.change(each.pid, where="ready")
    begin = d.decide(POLICY, sim.now)
    assert isinstance(begin, d.Begin)
    sim.do(begin)
    sim.change(begin.pids[0], begun=4)
    sim.change(begin.pids[1], where="done", version=5)
    assert d.decide(POLICY, sim.now) is None  # the others may finish this step, too
    sim.change(begin.pids[0], begun=5)
    assert d.decide(POLICY, sim.now) == d.StopAll("rank 1 returned from train after step 5")


def ready(pid: int, rank: int | None, version: int | None) -> d.ProcessFacts:
    return d.ProcessFacts(pid=pid, where="ready", rank=rank, version=version)


def test_processes_with_state_keep_their_ranks():
    found = [ready(1, None, None), ready(2, 1, 7), ready(3, 2, 6), ready(4, 0, None)]
    assert d.assign(found, 3) == (4, 2, 3)
    # Of two that had the rank, the one with the newer state has it.
    assert d.assign([ready(1, 0, 5), ready(2, 0, 6), ready(3, None, None)], 2) == (2, 1)


def test_three_failures_at_one_step_end_with_their_code():
    now = d.Situation(now_s=0.0, processes=(), failures=d.FAILURES_MAX, code=9)
    assert d.decide(POLICY, now) == d.Exit(9, "the script failed 3 times at the same step")


def test_survivors_save_in_a_world_of_their_own_while_others_start():
    starting = d.ProcessFacts(pid=9, where="starting")
    now = d.Situation(
        now_s=0.0, processes=(ready(1, 2, 7), ready(2, 1, None), starting), budget=0, begun=True
    )
    assert d.decide(POLICY, now) == d.Begin((1,), saves_only=True)
    saved = replace(now, processes=(ready(1, 0, None), ready(2, 1, None), starting))
    assert d.decide(POLICY, saved) is None


def test_a_process_that_does_not_reach_live_run_is_killed():
    late = d.ProcessFacts(pid=9, where="starting", started_s=10.0)
    now = d.Situation(
        now_s=10.0 + d.START_S_MAX, processes=(ready(1, 0, None), ready(2, 1, None), late)
    )
    assert d.decide(POLICY, now) == d.Kill((9,))
    assert d.decide(POLICY, replace(now, now_s=now.now_s - 1)) is None
