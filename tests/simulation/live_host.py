"""Simulated hosts of a job with live recovery: time, links, agents, supervisors and processes.

The supervisor, its record of others and its decisions are the product's own. Simulated are the
clocks, the threads of its exchange (a generator each), the tables of the agents, and processes.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from tieredckpt.errors import AgentError
from tieredckpt.live import board as b
from tieredckpt.live import decide as d
from tieredckpt.live import messages as m
from tieredckpt.live import processes as p
from tieredckpt.live import supervisor as s
from tieredckpt.live.job import Job
from tieredckpt.rpc.messages.agent import HostEntry

POLL_S = 1.0
"""Between two turns of a supervisor if nothing happens; longer than the product's, which is cheaper
to simulate."""
LATE_S = 8.0
"""Longest time that a request takes whose client does not wait for it any more."""
LEFT = 128 + signal.SIGTERM
"""Exit code of a supervisor whose host has left the job."""
SUPERVISOR, RANKS, AGENT = "supervisor", "ranks", "agent"


class Clock:
    """In place of the ``time`` module: each host's clock has another zero."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ahead_s = 0.0
        self._ns = 0

    def monotonic(self) -> float:
        return self.now_s + self.ahead_s

    def time_ns(self) -> int:
        self._ns += 1
        return int((self.now_s + abs(self.ahead_s)) * 1e9) + self._ns


clock = Clock()


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Have the product use simulated clocks and processes."""
    before = s.time, s.Processes, s.Control, b.time, b.Seen.__init__
    s.time, s.Processes, b.time = clock, Processes, clock  # type: ignore[assignment, misc]
    s.Control = Control  # type: ignore[assignment, misc]
    b.Seen.__init__ = _seen  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        s.time, s.Processes, s.Control, b.time = before[:4]  # type: ignore[misc]
        b.Seen.__init__ = before[4]  # type: ignore[method-assign]


def _seen(self: Any, _: Any, now: Callable[[], float]) -> None:
    """Messages are not encoded."""
    self._decode = lambda message: message
    self._clock = now
    self._found = {}
    self._read_s = {}


# --- events ---------------------------------------------------------------------------------------


class Lane:
    """What happens to one thread or process, in order; it may sleep, or be gone."""

    def __init__(self, machine: Machine, part: str) -> None:
        self.machine, self.part = machine, part
        self.is_gone = False
        self.woken_s = 0.0

    @property
    def sleeps(self) -> bool:
        return self.part in self.machine.asleep


class Unanswered(Exception):
    """A request that got no answer."""


class Task(Lane):
    """A thread: a generator that yields how long it waits."""

    def __init__(self, machine: Machine, steps: Iterator[float]) -> None:
        super().__init__(machine, SUPERVISOR)
        self._steps = steps
        self._token = 0
        self.is_waiting = False
        """A notice ends its wait."""

    def resume(self, token: int) -> None:
        if token == self._token:
            self._token += 1
            self.is_waiting = False
            wait_s = next(self._steps)
            self.machine.world.after(wait_s, self, self.resume, self._token)

    def notify(self, after_s: float = 0.0) -> None:
        """End its wait."""
        self._token += 1
        self.is_waiting = False
        self.machine.world.after(after_s, self, self.resume, self._token)


class World:
    """Time, and the network between machines."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(f"live {seed}")
        self.machines: dict[str, Machine] = {}
        self.cut: set[tuple[str, str]] = set()
        """Pairs of hosts between which nothing passes, in both orders."""
        self.deaf: set[tuple[str, str]] = set()
        """The first one's requests to the second one's agent get no answer."""
        self.late = 0.0
        """Part of the messages that arrive late, and in any order."""
        self.trace: list[str] = []
        self._events: list[tuple[float, int, Lane | None, Callable[..., None], tuple[Any, ...]]]
        self._events = []
        self._count = 0
        clock.now_s = 1000.0

    @property
    def now_s(self) -> float:
        return clock.now_s

    def note(self, text: str) -> None:
        self.trace.append(f"{clock.now_s - 1000.0:8.3f} {text}")

    def after(
        self, wait_s: float, lane: Lane | None, call: Callable[..., None], *arguments: Any
    ) -> None:
        """Call once the time is there, if the lane is not gone."""
        self._count += 1
        at = (clock.now_s + wait_s, self._count, lane, call, arguments)
        heapq.heappush(self._events, at)

    def run(self, until_s: float, is_over: Callable[[], bool]) -> None:
        """Until there is nothing left to happen, or the time has come."""
        while self._events and not is_over():
            at_s, _, lane, call, arguments = heapq.heappop(self._events)
            if at_s > until_s:
                return
            if lane is not None:
                if lane.is_gone:
                    continue
                if lane.part in lane.machine.asleep:
                    lane.machine.deferred.append((lane, call, arguments))
                    continue
                if lane.woken_s > at_s:  # it was asleep, and has not run since
                    self.after(lane.woken_s - clock.now_s, lane, call, *arguments)
                    continue
                clock.ahead_s = lane.machine.ahead_s
            clock.now_s = at_s
            call(*arguments)

    def latency_s(self) -> float:
        return self.rng.choice((0.001, 0.002, 0.01, 0.05))

    def reaches(self, host: str, other: str) -> bool:
        """Whether a request to the other host's agent gets an answer."""
        link = (host, other)
        return self.machines[other].answers and link not in self.cut and link not in self.deaf


class Machine:
    """A host: it stays, and what runs on it does not."""

    def __init__(self, world: World, name: str, *, is_spare: bool) -> None:
        self.world, self.name, self.is_spare = world, name, is_spare
        self.ahead_s = world.rng.choice((0.0, -500.0, 1e6))
        self.is_up = True
        self.has_agent = True
        self.asleep: set[str] = set()
        self.deferred: list[tuple[Lane, Callable[..., None], tuple[Any, ...]]] = []
        self.agent = Agent(self)
        self.life: Life | None = None
        self.processes: list[Process] = []
        """Also those that a supervisor left behind."""

    @property
    def answers(self) -> bool:
        return self.is_up and self.has_agent and AGENT not in self.asleep

    def wake(self) -> None:
        """Go on with what was deferred; each thread and process when it happens to run."""
        self.asleep.clear()
        lanes: dict[Lane, float] = {}
        for lane, call, arguments in self.deferred:
            wait_s = lanes.setdefault(lane, self.world.rng.choice((0.0, 0.01, 0.1, 0.3)))
            lane.woken_s = self.world.now_s + wait_s
            self.world.after(wait_s, lane, call, *arguments)
        self.deferred.clear()
        late, self.agent.late = self.agent.late, []
        for action in late:
            self.world.after(self.world.rng.random(), None, action)

    def die(self) -> None:
        """Lose everything but the name."""
        self.is_up = False
        self.asleep.clear()
        self.deferred.clear()
        if self.life is not None:
            self.life.end()
        for process in list(self.processes):
            process.vanish()
        self.agent = Agent(self)


class Agent:
    """The tables of one agent: by kind, the message of each host."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.tables: dict[Any, dict[str, Any]] = {b.Record: {}, m.View: {}}
        self.revisions = {b.Record: 0, m.View: 0}
        self.watchers: list[tuple[Any, str, Task]] = []
        self.late: list[Callable[[], None]] = []
        """Requests that it has not read yet."""

    def set(self, kind: Any, host: str, message: Any) -> None:
        self.tables[kind][host] = message
        self.revisions[kind] += 1
        waiting, self.watchers = self.watchers, []
        for each in waiting:
            if each[0] is not kind:
                self.watchers.append(each)
            elif not each[2].is_gone:
                local = each[1] == self.machine.name
                each[2].notify(0.001 if local else self.machine.world.latency_s())


# --- the supervisors' exchange --------------------------------------------------------------------


class _Condition:
    """In place of a lock: there is one thread."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self.notify_all = notify

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return


class Board(b.Board):
    """The product's, but for its threads: they are tasks that do the same."""

    def __init__(self, life: Life) -> None:
        self._life, self._world = life, life.world
        self.host = life.machine.name
        self.entry = HostEntry(host_id=self.host, incarnation="0" * 32, addresses=())
        self._wake = life.wake
        self._records = b.Seen(b.Record, clock.monotonic)
        self._views = b.Seen(m.View, self._answered_s)
        self._answer_s = None
        self._stood_s = 0.0
        self.listed = len(self._world.machines)
        self._unreached, self._unreadable = {}, {}
        self._lock: Any = _Condition(self._notify)
        self._out = None
        self._poll = None
        self._refused_s = {}
        self._found = {self.host}
        """Hosts that it can reach by name."""
        self._tasks: list[Task] = []

    def start(self) -> None:
        for steps in (
            self._send_views(0),
            self._send_views(1),
            self._send_records(),
            self._watches(),
            self._polls(),
        ):
            task = Task(self._life.machine, steps)
            self._tasks.append(task)
            task.notify()

    def close(self) -> None:
        self.stop()
        if self._out is not None and self._life.machine.answers:
            record = msgspec.structs.replace(self._out[0], beat=clock.time_ns())
            self._life.machine.agent.set(b.Record, self.host, record)

    def stop(self) -> None:
        for task in self._tasks:
            task.is_gone = True

    def add_hosts(self, entries: Any) -> None:
        self._found |= {each.host_id for each in entries}

    def _notify(self) -> None:
        for task in self._tasks[:3]:
            if task.is_waiting:
                task.notify()

    def _send_views(self, number: int) -> Iterator[float]:
        while True:
            self._tasks[number].is_waiting = True
            yield b.BEAT_S
            self._tasks[number].is_waiting = False
            for host in self._leaders()[number : number + 1]:
                if self._out is not None and host != self.host:
                    view = msgspec.structs.replace(self._out[1], beat=clock.time_ns())
                    try:
                        yield from self._sets(host, m.View, view)
                    except Unanswered:
                        yield 0.1

    def _send_records(self) -> Iterator[float]:
        while True:
            self._tasks[2].is_waiting = True
            yield b.BEAT_S
            self._tasks[2].is_waiting = False
            if self._out is not None:
                record = msgspec.structs.replace(self._out[0], beat=clock.time_ns())
                try:
                    yield from self._sets(self.host, b.Record, record)
                except Unanswered:
                    yield 0.1

    def _sets(self, host: str, kind: Any, message: Any) -> Iterator[float]:
        world, machine = self._world, self._world.machines[host]

        def action() -> None:
            machine.agent.set(kind, self.host, message)

        if host == self.host:
            if not machine.answers:
                raise Unanswered
            action()
            return
        if host not in self._found:
            raise Unanswered
        if not world.reaches(self.host, host):
            if AGENT in machine.asleep and (self.host, host) not in world.cut:
                machine.agent.late.append(action)
            yield self._stall_s(machine)
            raise Unanswered
        if world.rng.random() < world.late:
            world.after(LATE_S * world.rng.random(), None, action)
            yield b.STALL_S
            raise Unanswered
        yield world.latency_s()
        if not world.reaches(self.host, host):
            yield b.STALL_S
            raise Unanswered
        action()

    def _stall_s(self, machine: Machine) -> float:
        if (
            machine.is_up
            and not machine.has_agent
            and (self.host, machine.name) not in self._world.cut
        ):
            self._refused_s[machine.name] = clock.monotonic()
            return 0.01
        return b.STALL_S if machine.is_up else b.CONNECT_S

    def _watches(self) -> Iterator[float]:
        while True:
            leader = self._leader()
            if leader != self.host:
                self._answer_s = None
            elif self._answer_s is None:
                self._answer_s = clock.monotonic()
            if not leader:
                yield 0.1
                continue
            try:
                yield from self._watches_one(leader)
            except Unanswered:
                yield 0.1

    def _watches_one(self, leader: str) -> Iterator[float]:
        machine, revision = self._world.machines[leader], 0
        kind = m.View if leader == self.host else b.Record
        task = self._tasks[3]
        while self._leader() == leader:
            if leader != self.host and leader not in self._found:
                raise Unanswered
            if self._reads(machine) and machine.agent.revisions[kind] <= revision:
                machine.agent.watchers.append((kind, self.host, task))
                yield b.WATCH_S
            if not self._reads(machine):
                if leader != self.host:
                    yield self._stall_s(machine)
                raise Unanswered
            if leader == self.host:
                self._stood_s += self._stands_s()
                self._answer_s = clock.monotonic()
            self._takes(kind, machine, is_first=revision == 0)
            revision = machine.agent.revisions[kind]
            yield b.PAUSE_S

    def _reads(self, machine: Machine) -> bool:
        if machine.name == self.host:
            return machine.answers
        return self._world.reaches(self.host, machine.name)

    def _takes(self, kind: Any, machine: Machine, *, is_first: bool = False) -> None:
        """As ``_receive``, but a beat without news does not wake the supervisor."""
        seen: b.Seen[Any] = self._records if kind is b.Record else self._views
        for host, message in machine.agent.tables[kind].items():
            if host == self.host:
                continue
            before = seen._found.get(host)
            if not seen.record(host, message, is_first=is_first):
                continue
            if (
                before is None
                or _differs(before[0], message)
                or before[1] < 0
                or clock.monotonic() - before[1] > b.DOUBT_S
            ):
                self._wake()

    def _polls(self) -> Iterator[float]:
        places: set[str] = set()
        while True:
            names = list(self._world.machines)
            if self._poll is not None:
                wanted = self._to_read(self._poll)
                names = [each for each in names if each in wanted and each in self._found]
            found = [each for each in names if each != self.host]
            yield self._world.latency_s()
            stall_s = 0.0
            for name in found:
                machine = self._world.machines[name]
                if not self._world.reaches(self.host, name):
                    places.discard(name)
                    stall_s = max(stall_s, self._stall_s(machine))
                elif name in self._found and (self._poll is not None or name in places):
                    self._takes(b.Record, machine)
                elif self._poll is None:
                    places.add(name)
                    self._found.add(name)
            machine = self._world.machines[self.host]
            if self.host in self._leaders()[1:] and machine.answers:
                self._takes(m.View, machine)
            yield stall_s + b.BEAT_S / 2


def _differs(before: Any, message: Any) -> bool:
    if isinstance(before, m.View):
        return b._news(before) != b._news(message)
    return before.decision is not message.decision or before.leader != message.leader


# --- supervisors and processes --------------------------------------------------------------------


class Supervisor(s.Supervisor):
    """The product's, but that it kills at once, and what decisions it makes is seen."""

    life: Life

    def _decide(self) -> m.Decision | None:
        decision = super()._decide()
        if decision is not None and decision.term[1] == self._host:
            self.life.world.decided(self.life, decision)  # type: ignore[attr-defined]
        return decision

    def _kill(self, pids: Any) -> None:
        for process in [self._processes.living[pid] for pid in pids]:
            process.is_killed = True
            process.kill_group(9)
            process.started_s = process.stopped_s = clock.monotonic()

    def _store(self, generation: int) -> Any:
        return _NO_FILE


class _NoTier:
    namespace = "live"

    def status(self, within_s: float | None = None, revive: bool = True) -> None:
        raise AgentError("no tier is simulated", outcome="not_applied")


class _NoFile:
    def unlink(self, *, missing_ok: bool) -> None:
        assert missing_ok


_NO_FILE = _NoFile()


class Life(Lane):
    """One start of a supervisor on a host."""

    def __init__(self, machine: Machine, policy: d.Policy, max_restarts: int, make: Any) -> None:
        super().__init__(machine, SUPERVISOR)
        self.world = machine.world
        self.policy = policy
        self.make = make
        """Makes a process."""
        self.code: int | None = None
        """Its exit code, once it ends its processes."""
        self.is_over = False
        self.lines: list[str] = []
        self.limit_s = math.inf
        self._token = 0
        self._next_s = math.inf
        clock.ahead_s = machine.ahead_s
        self.processes: Processes
        self.board: Board
        self.supervisor = Supervisor(
            policy, self, Path(), max_restarts=max_restarts, grace_s=5.0, write=self.write,
            join=self._join,
        )  # type: ignore[arg-type]  # fmt: skip
        self.supervisor.life = self
        self.supervisor._id = f"{self.world.rng.getrandbits(128):032x}"
        machine.life = self
        self.supervisor._start(policy.per_host + policy.standby)
        self.board.start()
        self.wake()

    @property
    def has_left(self) -> bool:
        """Its host has left a job that goes on."""
        known = self.supervisor._known
        return self.code is not None and self.supervisor._leaving is not None and known.exit is None

    def _join(self, wake: Callable[[], None]) -> Job:
        self.board = Board(self)
        keys = m.Keys(runtime_dir="", namespace="live", table="job", hosts=(self.board.entry,))
        return Job(
            board=self.board, keys=keys, is_standby=self.machine.is_spare, name="job",
            agent=_NoTier(),
        )  # type: ignore[arg-type]  # fmt: skip

    def write(self, line: str) -> None:
        self.lines.append(line)
        self.world.note(f"{self.machine.name}: {line[12:]}")

    def wake(self, after_s: float = 0.001) -> None:
        """Have a turn soon."""
        if self._next_s > clock.now_s + after_s:
            self._token += 1
            self._next_s = clock.now_s + after_s
            self.world.after(after_s, self, self.turn, self._token)

    def turn(self, token: int) -> None:
        if token != self._token:
            return
        self._next_s = math.inf
        supervisor = self.supervisor
        if self.code is None and supervisor._signalled is not None:
            supervisor._poll(0.0)  # its processes were signalled, and die of it
            if self.processes.living and clock.monotonic() < supervisor._signalled[1]:
                supervisor._show()
                self.wake(POLL_S)
                return
            self.release(LEFT)
        elif self.code is None:
            supervisor._poll(0.0)
            code = supervisor._turn()
            if code is not None:
                self.release(code)
        else:
            self.processes.poll(0.0)
            supervisor._show()
            if not self.processes.living or clock.now_s >= self.limit_s:
                self.end()
                self.board.close()
                return
        self.wake(POLL_S)

    def release(self, code: int) -> None:
        """As ``_release`` begins."""
        self.code, self.released_s = code, clock.now_s
        self.limit_s = math.inf if code == 0 else clock.now_s + s.EXIT_WAIT_S
        self.supervisor._dismiss(code)
        for process in list(self.processes.living.values()):
            if not process.is_dismissed:
                process.kill_group(9)
                process.is_killed = True

    def end(self) -> None:
        """It ends, or is killed; its processes find out."""
        self.is_gone = self.is_over = True
        self.board.stop()
        self.machine.life = None
        for process in self.machine.processes:
            if process.life is self:
                self.world.after(0.2 * self.world.rng.random(), process, process.die, 17)


class Control:
    """In place of the product's: the order that a user gives and waits for."""

    def __init__(self, _: Path) -> None:
        self.order = m.Order()

    def serve(self, _: Any, done: m.Order) -> m.Order:
        if self.order <= done:
            self.order = m.Order()
        return self.order

    def close(self) -> None:
        return


class Processes:
    """In place of the product's."""

    def __init__(self, life: Life, write: Callable[[str], None]) -> None:
        self._life = life
        self.living: dict[int, Process] = {}
        self._events: list[tuple[Process, Any]] = []
        life.processes = self

    def wake(self) -> None:
        self._life.wake()

    def start(self, _: Any) -> None:
        process = self._life.make(self._life)
        self.living[process.pid] = process

    def report(self, process: Process, event: Any) -> None:
        self._events.append((process, event))
        self._life.wake()

    def poll(self, _: float) -> list[tuple[Process, Any]]:
        found, self._events = self._events, []
        for process, event in found:
            if isinstance(event, p.Died):
                self.living.pop(process.pid, None)
        return sorted(found, key=lambda each: isinstance(each[1], p.Died))


class Process(p.Process, Lane):
    """What a supervisor knows of one, without a real one; see ``live_ranks.py``."""

    def __init__(self, life: Life, pid: int) -> None:
        Lane.__init__(self, life.machine, RANKS)
        self.life = life
        self.pid = pid
        self.last_line = ""
        self.where: m.Where = "starting"
        self.rank: int | None = None
        self.generation = 0
        self.began = m.NEVER
        self.version: int | None = None
        self.begun: int | None = None
        self.started_s = clock.monotonic()
        self.stopped_s: float | None = None
        self.is_dismissed = self.is_killed = self.is_changing = False

    def send(self, message: m.ToProcess) -> None:
        known = self.life.supervisor._known
        self.life.world.after(0.001, self, self.receive, message, known)

    def kill_group(self, number: int) -> None:
        self.die(-number)

    def report(self, event: Any) -> None:
        if not self.life.is_gone:
            self.life.processes.report(self, event)

    def receive(self, message: m.ToProcess, known: m.Decision) -> None:
        raise NotImplementedError

    def die(self, code: int) -> None:
        raise NotImplementedError

    def vanish(self) -> None:
        raise NotImplementedError
