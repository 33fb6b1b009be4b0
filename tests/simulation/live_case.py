"""A job of several hosts under faults: one case per seed. See ``test_live.py``.

python -m tests.simulation.live_case SEED      # with its trace
python -m tests.simulation.live_case FIRST LAST
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections import Counter
from typing import Any

from tests.simulation.live_host import (
    AGENT,
    LATE_S,
    RANKS,
    SUPERVISOR,
    Agent,
    Life,
    Machine,
    World,
    simulated,
)
from tests.simulation.live_ranks import Generation, Rank
from tieredckpt.live import board as b
from tieredckpt.live import decide as d
from tieredckpt.live import messages as m

SPLIT_S = 2 * b.LOST_S + LATE_S
"""A host that could not reach most voters for so long makes no decision."""
END_S = 400.0
"""Longest time from the end of the faults to the end of the job."""
THEMES: dict[str, dict[str, float]] = {
    "mixed": {
        "kill": 3, "raise": 1, "hang": 1, "host": 2, "supervisor": 1, "sleep": 2, "split": 2,
        "link": 1, "deaf": 1, "agent": 1,
    },
    "processes": {"kill": 3, "raise": 1, "hang": 1, "host": 2, "supervisor": 1},
    "splits": {"split": 3, "kill": 1},
    "links": {"link": 2, "deaf": 2, "split": 1, "agent": 1},
    "sleeps": {"sleep": 3, "kill": 1, "host": 1},
    "hosts": {"host": 3, "supervisor": 1, "sleep": 1},
    "alone": {"alone": 1},
    "orders": {"order": 4, "kill": 2, "host": 1, "split": 1, "supervisor": 1, "sleep": 1},
    "elastic": {"host": 4, "leave": 2, "kill": 2, "split": 1, "supervisor": 1, "sleep": 1},
    "voters": {"order": 3, "link": 4, "split": 1, "leave": 1, "deaf": 1, "supervisor": 1},
    "leaves": {"leave": 4, "order": 1, "kill": 2, "host": 1, "split": 1, "sleep": 1},
    "returns": {"kill": 4, "split": 2, "sleep": 1, "link": 1},
}  # fmt: skip
"""Faults of a case, and how likely each is."""
ELASTIC = ("elastic", "voters")
"""Themes in which worlds shrink and grow with the hosts."""
CALM = ("processes",)
"""Themes in which all that lives answers."""


def place(found: m.Place) -> str:
    """As short as it can be."""
    (term, host, start), number = found
    return f"{term}.{host}.{start[:3]}.{number}"


class Violation(AssertionError):
    """Something happened that must not."""


class Case(World):
    """See the module."""

    def __init__(self, seed: int, theme: str = "") -> None:
        super().__init__(seed)
        rng, self.seed = self.rng, seed
        self.theme = rng.choice(sorted(THEMES))
        self.theme = theme or self.theme
        hosts = rng.choice((2, 2, 2, 3, 3, 4)) if self.theme != "alone" else 2
        if self.theme in ELASTIC:
            hosts = rng.choice((3, 4, 5))
        self.policy = d.Policy(
            per_host=1 if self.theme == "alone" else rng.choice((1, 1, 2)),
            hosts=hosts,
            hosts_min=rng.randint(1, hosts - 1) if self.theme in ELASTIC else 0,
            standby=2 if self.theme == "alone" else rng.choice((0, 1, 1, 2)),
            hang_s=15.0,
            unwind_s=5.0,
            wait_s=rng.choice((30.0, 60.0)),
            allow_split=rng.random() < 0.05,
        )
        self.max_restarts = rng.choice((1000, 1000, 3))
        self.faults_s = rng.uniform(20.0, 60.0)
        self.step_s = rng.choice((0.4, 1.0))
        self.last = int(rng.choice((0.5, 1.0, 1.5)) * self.faults_s / self.step_s)
        self.save_every = 7
        self.checkpoint = 0
        self.slow = 0.5 if self.theme == "returns" else 0.03
        """Part of the ranks that take seconds to leave a world."""
        self.start_s = 10.0 if self.theme == "alone" else 5.0
        spares = min(hosts - 1, rng.choice((0, 1, 1, 2)) if self.theme != "alone" else 1)
        names = [f"h{number}" for number in range(hosts + spares)]
        rng.shuffle(names)
        for number, name in enumerate(names):
            self.machines[name] = Machine(self, name, is_spare=number >= hosts)
        self.machines = dict(sorted(self.machines.items()))
        self._pid = 1 << 23
        self.worlds: dict[str, Generation] = {}
        """By the name of its table."""
        self.history: list[Generation] = []
        """That made updates."""
        self.updated_s = 0.0
        self.newest = 0
        self.decisions: dict[tuple[str, object], m.Decision] = {}
        self.reached_s: dict[tuple[str, str], float] = {}
        """When two hosts were last connected."""
        self.lives: list[Life] = []
        self.counts: Counter[str] = Counter()
        self.is_calm = False
        """The faults are over."""
        self.is_over = False

    def __str__(self) -> str:
        hosts = " ".join(n + "*" * each.is_spare for n, each in self.machines.items())
        return f"seed {self.seed}: {self.theme}, {hosts}, {self.policy}"

    # --- what the simulated hosts call ------------------------------------------------------------

    def make(self, life: Life) -> Rank:
        self._pid += 1
        return Rank(self, life, self._pid)

    def decided(self, life: Life, decision: m.Decision) -> None:
        """A leader has made a decision."""
        host = life.machine.name
        what = f"exit {decision.exit}" if decision.exit is not None else decision.ended
        members = " ".join(f"{each.host}:{each.pid % 1000}" for each in decision.members)
        self.note(
            f"{host} decides {place(decision.place)}: generation {decision.generation} "
            f"{'saves ' * decision.saves_only}[{members}] {what or decision.reason}"
        )
        self.counts["decisions"] += 1
        before = life.supervisor._known
        if decision.began == decision.place and not decision.saves_only:
            self.check_size(before, decision)
        key = (decision.run, decision.place)
        if self.decisions.setdefault(key, decision) != decision:
            raise Violation(f"two decisions are {decision.place}")
        self.look()
        if before.voters:
            self.counts["voters"] += before.voters != decision.voters
            if "sleep" not in THEMES[self.theme]:  # else it may read views that have waited
                self.check_reaches_most(host, decision, self.now_s - SPLIT_S)

    def check_size(self, before: m.Decision, decision: m.Decision) -> None:
        """A world has as many ranks as were wanted, or as may be where processes are missing."""
        policy, target, size = self.policy, decision.order.size or self.policy.size, decision.size
        least = policy.per_host * policy.hosts_min or target
        if size != target and (not least <= size < target or size % policy.group):
            raise Violation(f"a world has {size} of {target} ranks")
        self.counts["shrunk"] += 0 < size < before.size and size < target
        self.counts["grown"] += 0 < before.size < size and not before.saves_only

    def look(self) -> None:
        """Note which hosts are connected: the network is about to change, or has changed."""
        up = [name for name, each in self.machines.items() if each.is_up]
        for a in up:
            for other in up:
                if (a, other) not in self.cut:
                    self.reached_s[a, other] = self.now_s

    def check_reaches_most(self, host: str, decision: m.Decision, since_s: float) -> None:
        """A host that makes a decision was connected to most voters since then."""
        reached = {each for each in self.machines if self.reached_s.get((host, each), 0) > since_s}
        self.check_most(decision, reached, f"{host} decides, and has reached")

    def check_most(self, decision: m.Decision, hosts: set[str], what: str) -> None:
        """Hosts are most of the voters, and of those before."""
        for voters in (decision.voters, decision.old_voters):
            found = hosts & voters.keys()
            if voters and 2 * len(found) <= len(voters) and not self.policy.allow_split:
                raise Violation(f"{what} {sorted(found)} of {sorted(voters)}")

    def enter(self, process: Rank, order: m.Train, known: m.Decision) -> Generation:
        """A process enters a generation: none of its host may be in another one."""
        assert order.keys is not None
        world = self.worlds.setdefault(order.keys.table, Generation(self, known))
        if world.decision.began != known.began:
            raise Violation(f"the table {order.keys.table} is that of two worlds")
        for each in process.machine.processes:
            if isinstance(each, Rank) and each.world not in (None, world):
                raise Violation(f"{process.host} enters {world}, and has a rank in {each.world}")
        world.add(process, order.rank)
        return world

    def restore(self, world: Generation) -> int:
        """The update that a new world goes on from."""
        kept = [each.kept for each in world.ranks.values() if each.kept is not None]
        shards = range(self.policy.per_host)
        whole = [v for v, _ in kept if all((v, shard) in kept for shard in shards)]
        found = self.checkpoint = max([self.checkpoint, *whole])
        is_calm = self.theme in CALM and not self.policy.allow_split
        if found < self.newest and is_calm and self.history:
            living = {
                each.kept
                for machine in self.machines.values()
                for each in machine.processes
                if isinstance(each, Rank)
            }
            if all((self.newest, shard) in living for shard in shards):
                raise Violation(f"{world} goes on from {found}, and {self.newest} is there")
        self.counts["restores"] += 1
        self.newest = found
        return found

    def updated(self, world: Generation, since_s: float) -> None:
        """A world has completed an update that began then."""
        last = self.history[-1] if self.history else world
        if last is not world and not self.policy.allow_split:
            if world in self.history:
                raise Violation(f"{world} updates after {last} did")
            if since_s <= self.updated_s:
                raise Violation(f"{world} and {last} update at the same time")
        began = self.decisions[world.decision.run, world.decision.began]  # voters change later
        self.check_most(began, {each.host for each in began.members}, f"{world} updates on")
        if last is not world or not self.history:
            self.history.append(world)
            self.note(f"{world}: first update {world.version}")
        self.updated_s, self.newest = self.now_s, world.version
        self.counts["updates"] += 1

    # --- faults -----------------------------------------------------------------------------------

    def fault(self) -> None:
        if self.is_calm:
            return
        weights = THEMES[self.theme]
        kind = self.rng.choices(list(weights), list(weights.values()))[0]
        self.counts[kind] += 1
        machine = self.rng.choice(list(self.machines.values()))
        self.look()
        getattr(self, f"_{kind}")(machine)
        self.look()
        self.after(self.rng.expovariate(1 / self.pace_s), None, self.fault)

    def _rank(self, machine: Machine) -> Rank | None:
        ranks = [e for e in machine.processes if isinstance(e, Rank) and e.world is not None]
        return self.rng.choice(ranks) if ranks else None

    def _kill(self, machine: Machine) -> None:
        if machine.processes:
            process = self.rng.choice(machine.processes)
            process = self._rank(machine) or process
            self.note(f"{machine.name}: {process.pid} is killed")
            process.die(self.rng.choice((-9, -9, 7)))

    def _raise(self, machine: Machine) -> None:
        if (process := self._rank(machine)) is not None:
            self.note(f"{machine.name}: {process.pid} raises")
            process.fail("an error")

    def _hang(self, machine: Machine) -> None:
        process = self._rank(machine)
        if process is not None and process.world is not None and process.world.updates > 3:
            process.is_stuck = True
            process.stays = self.rng.random() < 0.3
            self.note(f"{machine.name}: {process.pid} hangs")

    def _host(self, machine: Machine) -> None:
        if machine.is_up:
            self.note(f"{machine.name} is lost")
            machine.die()
            most_s = 30.0 if self.theme != "alone" else 4.0
            self.after(self.rng.uniform(2.0, most_s), None, self.start, machine)

    def _supervisor(self, machine: Machine) -> None:
        if machine.life is not None and not machine.asleep:
            self.note(f"{machine.name}: the supervisor is killed")
            machine.life.end()
            self.after(self.rng.uniform(1.0, 10.0), None, self.start, machine)

    def _sleep(self, machine: Machine) -> None:
        if machine.life is not None and not machine.asleep:
            parts = self.rng.choice(
                ((SUPERVISOR, RANKS, AGENT), (SUPERVISOR, RANKS), (SUPERVISOR,), (AGENT,), (RANKS,))
            )
            wait_s = self.rng.choice((1.0, 4.0, 7.0, 15.0, 40.0)) * self.rng.uniform(0.5, 1.5)
            self.note(f"{machine.name}: {', '.join(parts)} sleep for {wait_s:.1f} s")
            machine.asleep.update(parts)
            self.after(wait_s, None, self._wake, machine)

    def _wake(self, machine: Machine) -> None:
        if machine.asleep:
            self.note(f"{machine.name} wakes")
            machine.wake()

    def _order(self, machine: Machine) -> None:
        """A user orders another number of ranks, and waits for a while."""
        if machine.life is not None and not machine.asleep:
            control = machine.life.supervisor._control
            at_ns = max(int(self.now_s * 1e9), machine.life.supervisor._known.order.at_ns + 1)
            size = self.rng.randint(1, self.policy.size + 1)
            control.order = order = m.Order(at_ns=at_ns, size=size)  # type: ignore[attr-defined]
            self.note(f"{machine.name}: a user orders {size} ranks")
            self.after(self.rng.uniform(1.0, 20.0), None, self._order_ends, control, order)

    def _leave(self, machine: Machine) -> None:
        """A host gets a notice, or a user wants it to leave; later it is there again."""
        other = self.rng.choice(list(self.machines))
        life = machine.life
        if life is None or machine.asleep:
            return
        if self.rng.random() < 0.5:
            self.note(f"{machine.name} gets SIGTERM")
            life.supervisor._on_signal(signal.SIGTERM, None)
        else:
            self.note(f"{machine.name}: a user wants {other} to leave")
            at_ns = max(int(self.now_s * 1e9), life.supervisor._known.order.at_ns + 1)
            order = m.Order(at_ns=at_ns, host=other, deadline_s=self.rng.uniform(1.0, 40.0))
            life.supervisor._control.order = order  # type: ignore[attr-defined]
            self.after(20.0, None, self._order_ends, life.supervisor._control, order)

    @staticmethod
    def _order_ends(control: Any, order: m.Order) -> None:
        if control.order == order:
            control.order = m.Order()

    def _split(self, _: Machine) -> None:
        parts = {name: self.rng.choice("ab" if self.rng.random() < 0.8 else "abc")
                 for name in self.machines}  # fmt: skip
        self._cut([(a, b) for a in parts for b in parts if parts[a] != parts[b]], 40.0)

    def _link(self, machine: Machine) -> None:
        other = self.rng.choice(list(self.machines))
        if other != machine.name:
            self._cut([(machine.name, other), (other, machine.name)], 30.0)

    def _alone(self, machine: Machine) -> None:
        """All other hosts are lost, come back, and are then cut off from this one."""
        for other in self.machines.values():
            if other is not machine and other.is_up:
                self._host(other)
        pairs = [(machine.name, other) for other in self.machines if other != machine.name]
        pairs += [(b, a) for a, b in pairs]
        self.after(self.rng.uniform(5.0, 40.0), None, self._cut, pairs, 40.0)

    def _cut(self, pairs: list[tuple[str, str]], most_s: float) -> None:
        if self.is_calm:
            return
        self.look()
        wait_s = self.rng.uniform(1.0, most_s)
        self.note(f"{' '.join(f'{a}-{b}' for a, b in pairs if a < b)} cut for {wait_s:.1f} s")
        self.cut.update(pairs)
        self.after(wait_s, None, self._mend, pairs)

    def _mend(self, pairs: list[tuple[str, str]]) -> None:
        self.look()
        self.cut.difference_update(pairs)
        self.look()
        self.note(f"mended; cut: {' '.join(sorted(f'{a}-{b}' for a, b in self.cut if a < b))}")

    def _deaf(self, machine: Machine) -> None:
        other = self.rng.choice(list(self.machines))
        if other == machine.name:
            return
        pair, wait_s = (machine.name, other), self.rng.uniform(1.0, 30.0)
        self.note(f"{machine.name} gets no answer from {other} for {wait_s:.1f} s")
        self.deaf.add(pair)
        self.after(wait_s, None, self.deaf.discard, pair)

    def _agent(self, machine: Machine) -> None:
        if machine.has_agent and machine.is_up:
            wait_s = self.rng.choice((0.3, 3.0, 15.0))
            self.note(f"{machine.name}: the agent is killed, for {wait_s:.1f} s")
            machine.has_agent, machine.agent = False, Agent(machine)
            self.after(wait_s, None, self._agent_starts, machine)

    @staticmethod
    def _agent_starts(machine: Machine) -> None:
        machine.has_agent = True

    # --- the whole case ---------------------------------------------------------------------------

    def start(self, machine: Machine) -> None:
        """Start a host's supervisor, unless the job is done."""
        if machine.life is None and not self._is_done():
            self.look()
            machine.is_up = machine.has_agent = True
            self.note(f"{machine.name} starts")
            life = Life(machine, self.policy, self.max_restarts, self.make)
            self.lives.append(life)

    def _is_done(self) -> bool:
        return any(
            each.code not in (None, d.EXIT_RESTART_HOST) and not each.has_left
            for each in self.lives
        )

    def _keep_up(self) -> None:
        """Start the supervisors that ended with 3 again, as a cluster's scheduler would."""
        for machine in self.machines.values():
            ended = [each for each in self.lives if each.machine is machine and each.is_over]
            if not machine.is_up or not ended:
                continue
            if ended[-1].has_left or ended[-1].code == d.EXIT_RESTART_HOST:
                self.start(machine)
        self.is_over = self._is_done() and all(each.life is None for each in self.machines.values())
        self.after(5.0, None, self._keep_up)

    def _heal(self) -> None:
        self.note("the faults are over")
        self.is_calm = True
        self.calm_s = self.now_s
        self.cut.clear()
        self.deaf.clear()
        self.late = 0.0
        for machine in self.machines.values():
            self._wake(machine)
            machine.has_agent = True
            if machine.life is None:
                self.after(self.rng.uniform(0.0, 5.0), None, self.start, machine)

    def run_all(self) -> None:
        rng = self.rng
        self.pace_s = rng.choice((1.5, 4.0, 10.0)) if self.theme != "alone" else 30.0
        self.late = rng.choice((0.0, 0.0, 0.03)) if self.theme not in CALM else 0.0
        for machine in self.machines.values():
            self.after(rng.choice((0.0, rng.uniform(0.0, 10.0))), None, self.start, machine)
        self.after(rng.uniform(3.0, 12.0), None, self.fault)
        self.after(self.faults_s, None, self._heal)
        self.after(5.0, None, self._keep_up)
        self.run(self.now_s + self.faults_s + END_S, lambda: self.is_over)
        self.check_end()

    def check_end(self) -> None:
        """The job has ended on all hosts, as it should."""
        left = [name for name, each in self.machines.items() if each.life is not None]
        if left or not self.is_over:
            raise Violation(f"the job does not end on {left}")
        self.counts["left"] += sum(each.has_left for each in self.lives)
        ended = [each for each in self.lives if each.code is not None and not each.has_left]
        codes = {each.code for each in ended}
        kinds = ("kill", "raise", "hang", "link", "split") if self.theme != "alone" else ()
        faults = sum(self.counts[each] for each in kinds)
        if codes - {0, d.EXIT_RESTART_HOST} and (0 in codes or faults < d.FAILURES_MAX):
            raise Violation(f"the exit codes are {sorted(map(str, codes))}")
        first_s = min(each.released_s for each in ended if each.code != d.EXIT_RESTART_HOST)
        for life in ended:
            self.counts[f"exit {life.code}"] += 1
            late = life.code == d.EXIT_RESTART_HOST and life.released_s > first_s
            if late and life.supervisor._is_joined and not self.policy.allow_split:
                raise Violation(f"{life.machine.name} follows a leader, and exits 3")


def run_case(seed: int, found: Counter[str] | None = None, theme: str = "") -> Case:
    """Run it to its end. Raises Violation."""
    with simulated():
        case = Case(seed, theme)
        try:
            case.run_all()
        except Exception as error:
            case.note(f"{type(error).__name__}: {error}")
            raise Violation(
                f"{case}\n" + "\n".join(case.trace[-60:])
                + f"\npython -m tests.simulation.live_case {seed}"
            ) from error  # fmt: skip
    if found is not None:
        found.update(case.counts)
    return case


def main(arguments: list[str]) -> None:
    if len(arguments) == 1:
        with simulated():
            case = Case(int(arguments[0]))
            print(case)
            try:
                case.run_all()
            except Exception:
                traceback.print_exc()
            print("\n".join(case.trace))
            print(case.counts)
        return
    found: Counter[str] = Counter()
    bad: dict[str, list[int]] = {}
    for seed in range(int(arguments[0]), int(arguments[1])):
        try:
            run_case(seed, found)
        except Violation as error:
            bad.setdefault(f"{error.__cause__}"[:60], []).append(seed)
    print(found)
    for text, seeds in bad.items():
        print(len(seeds), text, seeds[:12])


if __name__ == "__main__":
    main(sys.argv[1:])
