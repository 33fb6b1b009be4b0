"""The decisions of one host's supervisor against processes that die, raise and hang in any order.

Those of several hosts: tests/simulation/test_live.py.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tieredckpt.live import decide as d
from tieredckpt.live import messages as m
from tieredckpt.policy.ranks import Candidate, Member, assign

POLICY = d.Policy(per_host=3, standby=1, hang_s=None, unwind_s=10.0)
LONG_S = 1e6


@dataclass
class Sim:
    """A supervisor that carries out decisions, and processes that follow a seeded script."""

    seed: int = 0
    budget: int = 0
    known: m.Decision = field(default_factory=m.Decision)
    processes: list[m.ProcessFacts] = field(default_factory=list)
    failures: list[m.Failure] = field(default_factory=list)
    now_s: float = 0.0
    restarts: int = 0
    updates: int = 0
    updated: int = 0
    progress_s: float = 0.0
    quiet_s: float = 0.0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.next_pid = 1
        self.start(POLICY.per_host + POLICY.standby)

    def start(self, count: int) -> None:
        for _ in range(count):
            self.processes.append(
                m.ProcessFacts(pid=self.next_pid, where="starting", started_s=self.now_s)
            )
            self.next_pid += 1

    def change(self, pid: int, **fields: Any) -> None:
        self.processes = [
            replace(each, **fields) if each.pid == pid else each for each in self.processes
        ]

    def inside(self) -> list[m.ProcessFacts]:
        return [each for each in self.processes if each.where == "in"]

    def situation(self) -> d.Situation:
        view = m.View(
            place=self.known.place,
            processes=tuple(self.processes),
            to_start=d.to_start(POLICY, self.processes, self.budget),
            began=self.known.began,
            failures=tuple(self.failures),
            updates=self.updates,
            step_s=1.0,
            updated=self.updated,
            idle_s=self.now_s - self.progress_s,
            quiet_s=self.quiet_s,
        )
        return d.Situation(leader="", known=self.known, views={"": view}, start="a run")

    def carried_out(self) -> d.Action:
        return d.apply_here(
            POLICY, self.known, "", self.processes, budget=self.budget, now_s=self.now_s
        )

    def turn(self) -> int | None:
        """Decide and act until there is nothing to be done now; the exit code."""
        for _ in range(20):
            now = self.situation()
            assert d.may_lead(POLICY, now)
            decision = d.decide(POLICY, now)
            if decision is not None:
                self.adopt(decision)
                if decision.exit is not None:
                    return decision.exit
            elif (action := self.carried_out()) is not None:
                self.do(action)
            else:
                return None
        pytest.fail("the decisions do not come to rest")

    def adopt(self, decision: m.Decision) -> None:
        before, self.known = self.known, decision
        assert decision.place > before.place
        assert before.run in ("", decision.run)
        if decision.exit is not None:
            self.check_exit(before, decision)
        elif decision.generation == before.generation:
            assert decision.ended
            assert not before.ended
        else:
            self.check_begin(before, decision)
            self.failures, self.updates, self.updated = [], 0, decision.updated
            self.progress_s, self.quiet_s = self.now_s, 0.0

    def check_exit(self, before: m.Decision, decision: m.Decision) -> None:
        if decision.exit == 0:
            done = [self.fact(each.pid) for each in before.members]
            assert all(each is not None and each.where == "done" for each in done)
        elif not (decision.reason.startswith("the script failed") or self.is_final()):
            assert len(self.processes) + d.to_start(POLICY, self.processes, self.budget) < 3
            assert decision.exit == (d.EXIT_RESTART_HOST if before.generation else 1)
            assert all(each.version is None or each.where != "ready" for each in self.processes)

    def check_begin(self, before: m.Decision, decision: m.Decision) -> None:
        assert decision.generation == before.generation + 1
        assert not decision.ended
        assert not self.inside()
        pids = {each.pid for each in decision.members}
        assert len(pids) == len({each.local_rank for each in decision.members})
        free = {each.pid: each for each in self.processes if each.where in ("ready", "done")}
        assert pids <= free.keys()
        if decision.saves_only:
            # The others still start, and none that keeps state is left out.
            assert len(free) < POLICY.size
            keeping = {p for p, e in free.items() if e.where == "ready" and e.version is not None}
            assert pids == keeping
            assert pids
        else:
            assert len(pids) == POLICY.size

    def fact(self, pid: int) -> m.ProcessFacts | None:
        return next((each for each in self.processes if each.pid == pid), None)

    def is_final(self) -> bool:
        return any(each.is_final for each in self.failures)

    def do(self, action: d.Action) -> None:
        match action:
            case d.Start(count):
                assert 0 < count <= self.budget
                assert len(self.processes) + count <= POLICY.per_host + POLICY.standby
                assert not (self.known.ended and self.inside())  # one unwinds, which may die
                self.restarts += count
                self.budget -= count
                self.start(count)
            case d.Stop(pids):
                assert self.known.ended
                for pid in pids:
                    self.change(pid, stopped_s=self.now_s)
            case d.Kill(pids):
                for pid in pids:
                    each = self.fact(pid)
                    assert each is not None
                    since_s = each.started_s if each.where == "starting" else each.stopped_s
                    limit_s = d.START_S_MAX if each.where == "starting" else POLICY.unwind_s
                    assert since_s is not None
                    assert self.now_s - since_s >= limit_s
                self.processes = [each for each in self.processes if each.pid not in pids]
            case d.Enter(ranks):
                assert not self.inside()
                assert set(ranks) == {each.pid for each in self.known.members}
                for pid in ranks:
                    self.change(
                        pid,
                        where="in",
                        began=self.known.began,
                        version=None,
                        begun=None,
                        stopped_s=None,
                    )

    # --- what happens to processes ---------------------------------------------------------------

    def happens(self) -> None:
        """Something happens to one process: most go on, some fail."""
        each = self.rng.choice(self.processes)
        self.now_s += self.rng.choice((0.1, 1.0, 30.0))
        what = self.rng.random()
        if what < 0.1:
            self.die(each.pid, self.rng.choice((1, 7, -9)))
        elif each.where == "starting" and what < 0.9:
            self.change(each.pid, where="ready")
        elif each.where == "in":
            self.goes_on(each, what)

    def goes_on(self, each: m.ProcessFacts, what: float) -> None:
        """Something happens to a rank."""
        if each.stopped_s is not None:
            if what < 0.7:  # else it does not leave
                version = self.rng.choice((None, self.updated, self.updated - 1))
                self.change(each.pid, where="ready", version=version)
        elif self.known.saves_only:
            self.change(each.pid, where="ready", version=None)
        elif what < 0.7:
            self.update()
        elif what < 0.8:
            self.change(each.pid, begun=self.updated)
        elif what < 0.9:
            self.failures.append(m.Failure(text="it raised", is_final=self.rng.random() < 0.05))
            self.change(each.pid, where="ready", version=self.updated)
        elif what > 0.97:
            self.change(each.pid, where="done", version=self.updated)

    def update(self) -> None:
        self.updates += 1
        self.updated += 1
        self.progress_s = self.now_s

    def die(self, pid: int, code: int) -> None:
        each = self.fact(pid)
        assert each is not None
        self.processes.remove(each)
        if each.began == self.known.began != m.NEVER:
            failure = m.Failure(
                text=f"{pid} died", is_death=True, by_signal=code < 0, code=max(code, 1)
            )
            self.failures.append(failure)

    # --- for tests of one law --------------------------------------------------------------------

    def begin(self) -> list[int]:
        """All processes are ready, and a generation begins; the pids by rank."""
        for each in self.processes:
            if each.where == "starting":
                self.change(each.pid, where="ready")
        assert self.turn() is None
        assert len(self.inside()) == POLICY.size
        return [each.pid for each in self.known.members]

    def unwind(self) -> None:
        """All ranks leave the generation that has ended, and keep the last update."""
        for each in self.inside():
            assert each.stopped_s is not None
            self.change(each.pid, where="ready", version=self.updated)


@given(st.integers(0, 1 << 32), st.integers(0, 8))
def test_every_fault_leads_to_a_new_generation_or_to_an_exit(seed: int, budget: int):
    sim = Sim(seed, budget)
    for _ in range(300):
        if sim.turn() is not None:
            break
        # What is waited for will happen: a process starts, trains or leaves.
        assert any(each.where in ("starting", "in") for each in sim.processes)
        if sim.inside() and not sim.known.ended:
            assert all(sim.fact(each.pid) is not None for each in sim.known.members)
        sim.happens()
    else:
        assert sim.known.generation > 0
    assert sim.restarts <= budget


def test_a_hang_ends_the_generation_and_what_stays_is_killed():
    sim = Sim()
    pids = sim.begin()
    sim.now_s = LONG_S
    assert sim.turn() is None
    assert not sim.known.ended  # not armed before three updates
    sim.updates, sim.quiet_s = d.ARMED_AFTER, 1.0
    assert sim.turn() is None
    assert not sim.known.ended  # announced by pause()
    sim.quiet_s = 0.0
    assert sim.turn() is None
    assert sim.known.ended == f"no rank made progress for {LONG_S:.0f} s"
    assert all(each.stopped_s == LONG_S for each in sim.inside())
    assert sim.carried_out() is None
    sim.now_s += POLICY.unwind_s
    assert sim.carried_out() == d.Kill(tuple(sorted(pids)))


@pytest.mark.parametrize(
    ("hang_s", "updates", "step_s", "limit_s"),
    [
        (0, 100, 1.0, None),
        (None, d.ARMED_AFTER - 1, 1.0, None),
        (None, d.ARMED_AFTER, 1.0, d.HANG_S_MIN),
        (None, d.ARMED_AFTER, 100.0, d.HANG_FACTOR * 100.0),
        (7.0, d.ARMED_AFTER, 100.0, 7.0),
    ],
)
def test_seconds_that_are_a_hang(
    hang_s: float | None, updates: int, step_s: float, limit_s: float | None
):
    policy = d.Policy(per_host=1, hang_s=hang_s)
    assert d.hang_s(policy, updates, step_s) == limit_s


def test_a_rank_that_returns_while_another_begins_a_step_ends_the_generation():
    sim = Sim()
    pids = sim.begin()
    sim.change(pids[0], begun=4)
    sim.change(pids[1], where="done", version=5)
    assert sim.turn() is None
    assert not sim.known.ended  # the others may finish this step, too
    sim.change(pids[0], begun=5)
    assert sim.turn() is None
    assert sim.known.ended == "rank 1 returned from train after step 5"


def test_training_is_done_once_all_ranks_are():
    sim = Sim()
    pids = sim.begin()
    for pid in pids:
        assert sim.turn() is None
        sim.change(pid, where="done", version=9)
    assert sim.turn() == 0


def test_ranks_that_are_done_enter_the_next_generation_without_a_state():
    sim = Sim()
    pids = sim.begin()
    sim.change(pids[1], where="done", version=9)
    sim.die(pids[0], -9)
    assert sim.turn() is None
    sim.unwind()
    assert sim.turn() is None
    assert sim.known.generation == 2
    assert [each.pid for each in sim.known.members] == [4, pids[1], pids[2]]


def candidate(pid: int, version: int | None = None) -> Candidate:
    return Candidate(host="", pid=pid, version=version)


def before(*pids: int) -> list[Member]:
    return [Member("", pid, 5 - pid) for pid in pids]


def test_processes_with_state_keep_their_ranks_and_their_local_ranks():
    found = [candidate(1), candidate(2, 7), candidate(3, 6), candidate(4)]
    members = assign(found, 3, 3, before(4, 2, 3))
    assert [(each.pid, each.local_rank) for each in members] == [(4, 1), (2, 3), (3, 2)]
    # One that is new has a local rank that no other has.
    members = assign([candidate(1), candidate(2, 7), candidate(3)], 3, 3, before(4, 2, 3))
    assert [(each.pid, each.local_rank) for each in members] == [(1, 0), (2, 3), (3, 2)]
    # Of a smaller world, the process with the newest state has the rank.
    assert [each.pid for each in assign(found, 1, 3, before(4, 2, 3))] == [2]
    assert assign(found, 5, 3, before()) == ()


def test_replicas_of_a_shard_come_to_different_hosts():
    """Rank 3 has moved to host c, then host a is lost with ranks 0 and 1."""
    old = [Member(host, pid, 0) for host, pid in [("a", 1), ("a", 2), ("b", 3), ("c", 5)]]
    left = [Candidate(host="b", pid=3, version=7), Candidate(host="c", pid=5, version=7)]
    new = [Candidate(host="b", pid=4), Candidate(host="c", pid=6, is_standby=True)]
    found = assign([*left, *new], 4, 2, old)
    assert [each.host for each in found] == ["c", "b", "b", "c"]


@pytest.mark.parametrize(("code", "is_counted"), [(9, True), (-9, False)])
def test_three_failures_at_one_step_end_with_their_code(code: int, is_counted: bool):
    sim = Sim(budget=20)
    for number in range(d.FAILURES_MAX):
        pids = sim.begin()
        if number == 0:
            sim.update()
        sim.die(pids[0], code)
        assert sim.turn() is None
        sim.unwind()
        exit_code = sim.turn()
    if is_counted:
        assert exit_code == code
        assert sim.known.reason == "the script failed 3 times at the same step"
    else:
        assert exit_code is None


def test_failures_at_other_steps_do_not_end_the_training():
    sim = Sim(budget=20)
    for _ in range(2 * d.FAILURES_MAX):
        pids = sim.begin()
        sim.update()
        sim.die(pids[0], 9)
        assert sim.turn() is None
        sim.unwind()
        assert sim.turn() is None


def test_a_final_failure_ends_the_training():
    sim = Sim(budget=20)
    pids = sim.begin()
    sim.failures.append(m.Failure(text="the namespace is taken over", is_final=True))
    sim.change(pids[0], where="ready")
    assert sim.turn() is None
    sim.unwind()
    assert sim.turn() == 1


def test_survivors_save_in_a_world_of_their_own_before_the_exit():
    sim = Sim()
    pids = sim.begin()
    for pid in (pids[0], pids[2], 4):
        sim.die(pid, -9)
    assert sim.turn() is None
    sim.unwind()
    assert sim.turn() is None
    assert sim.known.saves_only
    assert [each.pid for each in sim.known.members] == [pids[1]]
    sim.change(pids[1], where="ready", version=None)
    assert sim.turn() == d.EXIT_RESTART_HOST
    assert sim.known.reason == "1 of 3 processes are left, and no restarts"


def test_survivors_save_in_a_world_of_their_own_while_others_start():
    sim = Sim(budget=2)
    pids = sim.begin()
    sim.die(pids[0], -9)
    sim.die(4, -9)
    assert sim.turn() is None
    sim.unwind()
    assert sim.turn() is None
    assert sim.known.saves_only
    assert {each.pid for each in sim.known.members} == {*pids[1:]}
    for pid in pids[1:]:
        sim.change(pid, where="ready", version=None)
    assert sim.turn() is None
    assert [each.pid for each in sim.processes if each.where == "starting"] == [5, 6]
    sim.begin()
    assert {each.pid: each.local_rank for each in sim.known.members} == {2: 1, 3: 2, 5: 0}


def test_no_replacement_is_started_while_a_rank_unwinds():
    sim = Sim(budget=1)
    pids = sim.begin()
    sim.die(pids[0], -9)
    assert sim.turn() is None
    assert [each.pid for each in sim.processes] == [*pids[1:], 4]
    sim.change(pids[1], where="ready", version=None)
    assert sim.turn() is None
    assert [each.pid for each in sim.processes] == [*pids[1:], 4]
    sim.change(pids[2], where="ready", version=None)
    assert sim.turn() is None
    assert [each.pid for each in sim.processes] == [*pids[1:], 4, 5]
    assert sim.known.generation == 2


def test_a_process_that_does_not_reach_live_run_is_killed():
    sim = Sim()
    for pid in (1, 2, 3):
        sim.change(pid, where="ready")
    assert sim.turn() is None
    sim.now_s = d.START_S_MAX - 1
    assert sim.carried_out() is None
    sim.now_s = d.START_S_MAX
    assert sim.carried_out() == d.Kill((4,))


def test_a_host_whose_processes_never_got_ready_exits_with_their_code():
    sim = Sim()
    for pid in (1, 2):
        sim.die(pid, 1)
    assert sim.turn() == 1
    assert sim.known.reason == "2 of 3 processes are left, and no restarts"


def test_a_leader_waits_for_a_newer_decision_that_a_host_knows():
    sim = Sim()
    sim.begin()
    sim.die(sim.inside()[0].pid, 1)
    now = sim.situation()
    assert d.decide(POLICY, now) is not None
    ahead = m.View(place=((now.known.term[0], "other", ""), 1))
    now = dataclasses.replace(now, views={**now.views, "other": ahead})
    assert d.decide(POLICY, now) is None


def ordered(sim: Sim, size: int, at_ns: int = 1) -> d.Situation:
    """With the order of a user who waits."""
    now = sim.situation()
    view = replace(now.views[""], order=m.Order(at_ns=at_ns, size=size))
    return dataclasses.replace(now, views={"": view})


def test_an_order_is_carried_out_by_all_ranks_together():
    sim = Sim()
    sim.begin()
    decision = d.decide(POLICY, ordered(sim, 2))
    assert decision is not None
    assert not decision.ended
    sim.known = decision
    members = tuple(each.pid for each in sim.inside())
    assert sim.carried_out() == d.Change(members)
    for pid in members:
        sim.change(pid, is_changing=True)
    assert sim.carried_out() is None
    for pid in members:  # they have saved, and keep nothing
        sim.change(pid, where="ready")
    begun = d.decide(POLICY, sim.situation())
    assert begun is not None
    assert [each.pid for each in begun.members] == list(members[:2])
    assert begun.reason == "resize from 3 to 2 ranks"
    assert begun.failures == 0
    assert not POLICY.is_changing(begun)


def test_an_order_that_cannot_be_carried_out_waits_and_an_older_one_is_void():
    sim = Sim()
    sim.begin()
    living = sum(each.where != "starting" for each in sim.processes)
    assert d.decide(POLICY, ordered(sim, living + 1)) is None
    sim.known = replace(sim.known, order=m.Order(at_ns=7, size=3))
    assert d.decide(POLICY, ordered(sim, 2, at_ns=6)) is None


@pytest.mark.parametrize(("before", "wanted"), [(2, 2), (5, 4)])
def test_a_larger_size_is_undone_if_too_few_processes_are_left(before: int, wanted: int):
    """Not a smaller one: more processes would be missing."""
    sim = Sim()
    sim.begin()
    sim.known = replace(sim.known, order=m.Order(at_ns=1, size=4, before=before))
    sim.die(sim.processes[-1].pid, -9)
    for each in sim.inside():
        sim.change(each.pid, where="ready", is_changing=True)
    found = d.decide(POLICY, sim.situation())
    assert found is not None
    assert found.order.size == wanted
    assert found.exit == (None if before < 4 else d.EXIT_RESTART_HOST)


def test_a_fault_amid_a_resize_ends_the_generation_and_the_size_stays_ordered():
    sim = Sim()
    sim.begin()
    sim.known = replace(sim.known, order=m.Order(at_ns=1, size=2))
    first, *others = [each.pid for each in sim.inside()]
    sim.die(first, -9)
    ended = d.decide(POLICY, sim.situation())
    assert ended is not None
    assert "died" in ended.ended
    sim.known = ended
    for pid in others:
        sim.change(pid, where="ready", version=4)
    begun = d.decide(POLICY, sim.situation())
    assert begun is not None
    assert {each.pid for each in begun.members} == set(others)
