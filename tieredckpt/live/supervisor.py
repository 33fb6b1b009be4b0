"""``tieredckpt run``: starts the ranks of one host, and applies what ``decide`` decides.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tieredckpt.live import decide as d
from tieredckpt.live import messages as m
from tieredckpt.live.board import LOST_S, Board, Record
from tieredckpt.live.control import Control, Status
from tieredckpt.live.job import ASK_S, Job
from tieredckpt.live.processes import Died, Event, Process, Processes, Spawn

POLL_S = 0.1
"""Longest time until a decision that no event causes, such as a hang."""
STACKS_S = 0.5
"""Time for a process to write its stacks before it is killed."""
EXIT_WAIT_S = 20.0
"""Time for processes to end by themselves after a failure."""
UPDATES_KEPT = 20
LEAVE_S = 2.0
"""Then a host that leaves knows whether the job can go on without it."""
ALONE_S = 10.0
"""Then a host that waits for others logs why they do not answer."""
PROBLEMS_SHOWN = 8
SAFE_VOTERS = 3
"""Of so many, one may be lost."""

_RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Observed:
    """What this host's ranks did in a generation; times are of the monotonic clock.

    Attributes:
        progress_s: When a rank last made progress; at first when the generation began.
        updated: The newest update of any rank.
        quiet_until_s: By pid, no progress need be expected before.
        updates: Of the lowest rank.
        updates_s: When it made the last ones.
        failures: In the order in which they were seen.
    """

    progress_s: float
    updated: int = 0
    quiet_until_s: dict[int, float] = field(default_factory=dict)
    updates: int = 0
    updates_s: deque[float] = field(default_factory=lambda: deque(maxlen=UPDATES_KEPT))
    failures: list[m.Failure] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Leaving:
    """This host was asked to leave at ``asked_s``; it ends by ``until_s``, with this code."""

    asked_s: float
    until_s: float
    code: int


class Supervisor:
    """The parent of one host's ranks and standbys.

    Args:
        policy: Sizes and deadlines.
        spawn, write: As for :class:`Processes`.
        folder: For the keys of each generation; it must be this user's alone.
        max_restarts: Processes that may be started in place of others.
        grace_s: Time between a first SIGTERM or SIGINT, which is forwarded, and SIGKILL.
        join: Called with what wakes the supervisor; joins a job of several hosts.
    """

    def __init__(
        self,
        policy: d.Policy,
        spawn: Spawn,
        folder: Path,
        *,
        max_restarts: int,
        grace_s: float,
        write: Callable[[str], None],
        join: Callable[[Callable[[], None]], Job] | None = None,
    ) -> None:
        self._policy = policy
        self._folder = folder
        self._max_restarts = self._budget = max_restarts
        self._grace_s = grace_s
        self._write = write
        self._processes = Processes(spawn, write)
        self._control = Control(folder)
        self._order = m.Order()
        """Of a command that waits on this host."""
        self._job = join(self._processes.wake) if join is not None else None
        self._host = self._job.board.host if self._job is not None else ""
        self._id = secrets.token_hex(16)
        self._started_s = self._changed_s = self._led_since_s = time.monotonic()
        self._stable_since_s = self._started_s
        self._joined_s = self._started_s
        """When this host last led, or had a leader."""
        self._is_joined = self._is_alone_logged = False
        self._leader = self._host
        self._known = m.Decision()
        self._term = self._own_term = m.NEVER[0]
        """The highest one that this host has acknowledged, and that in which it leads."""
        self._now = Observed(progress_s=self._started_s)
        self._followers = frozenset[str]()
        self._ready = dict[str, int]()
        """Processes of each host that may have ranks; since ``_stable_since_s``."""
        self._logged = 0
        """The newest generation whose end is logged."""
        self._fault_s: float | None = None
        """When the last generation was ended, until the next update."""
        self._updates_in_a_row = 0
        self._code = 1
        self._signalled: tuple[int, float] | None = None
        self._leaving: Leaving | None = None

    def run(self) -> int:
        """Train until done; the exit code. Leaves no process behind."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            self._start(self._policy.per_host + self._policy.standby)
            if self._job is not None:
                self._job.board.start()
                name, at = self._job.name, ", ".join(self._job.board.entry.addresses)
                self._log(f"job {name}: this is host {self._host} at {at}")
            return self._loop()
        finally:
            if self._job is not None:
                self._job.board.close()
            self._control.close()
            self._processes.close()

    def _loop(self) -> int:
        while True:
            self._poll(POLL_S)
            if self._signalled is not None:
                number, until_s = self._signalled
                if not self._processes.living or time.monotonic() >= until_s:
                    if self._leaving is not None and self._job is not None:
                        left_s = max(until_s - time.monotonic(), ASK_S)  # also of what ranks saved
                        self._log(f"host {self._host} leaves: {self._job.flush(left_s)}")
                    return 128 + number
                self._dismiss(0)  # a rank that ends by itself runs what follows live.run
                self._show()
                continue
            code = self._turn()
            if code is not None:
                return self._release(code)

    def _on_signal(self, number: int, _: Any) -> None:
        until_s = time.monotonic() + self._grace_s
        if number == signal.SIGTERM and self._job is not None and self._leaving is None:
            self._leaving = Leaving(time.monotonic(), until_s, 128 + number)
            self._budget = 0
            return
        first = self._signalled is None
        self._signalled = (number, until_s if first else 0.0)
        self._budget = 0
        if first:
            for process in self._processes.living.values():
                process.kill_group(number)

    def _leave(self, leaving: Leaving) -> int | None:
        """End once the job goes on without this host; the exit code."""
        known, now_s = self._known, time.monotonic()
        if self._host in known.leaving and self._job is not None:
            if self._trains() and not known.ranks_on(self._host):
                self._log(f"host {self._host} leaves: {self._job.flush(leaving.until_s - now_s)}")
                return leaving.code
            if now_s < leaving.until_s:
                return None
        elif now_s < leaving.asked_s + LEAVE_S:
            return None
        self._log("the job does not go on without this host: its ranks are signalled")
        self._signalled = signal.SIGTERM, max(leaving.until_s, now_s)
        for process in self._processes.living.values():
            process.kill_group(signal.SIGTERM)
        return None

    # --- decisions -------------------------------------------------------------------------------

    def _turn(self) -> int | None:
        """Decide, or follow the leader, and do all that is to be done now; the exit code."""
        if self._job is not None and (code := self._read_others(self._job.board)) is not None:
            return code
        while self._known.exit is None:
            decision = self._decide()
            if decision is not None:
                self._adopt(decision)
                continue
            action = d.apply_here(
                self._policy,
                self._known,
                self._host,
                self._facts(),
                budget=self._budget,
                now_s=time.monotonic(),
            )
            if action is None:
                break
            self._do(action)
        self._show()
        if self._known.exit is None and self._leaving is not None:
            return self._leave(self._leaving)
        return self._known.exit

    def _read_others(self, board: Board) -> int | None:
        """Adopt the newest decision; an exit code if this host cannot go on."""
        records = board.records(failing=self._is_failing())
        for host, sizes in [(host, each.sizes) for host, each in records.items()]:
            if sizes == self._policy.sizes:
                continue
            del records[host]
            if not self._known.voters:  # else it is the other host that is wrong
                self._log(f"host {host} has {sizes}, not {self._policy.sizes}")
                return 1
        newer = [each.decision for each in records.values() if each.decision.term == each.term]
        for decision in newer:
            if decision.place > self._known.place and decision.term >= self._term:
                self._adopt(decision)
        for decision in board.ends(self._known):
            if self._known.exit is None:
                self._adopt(decision)
        now_s = time.monotonic()
        # As others see it, also if this host was started anew and must not adopt what they know.
        known = [e.decision for e in records.values() if e.decision.exit is None]
        newest = max([self._known, *known], key=lambda each: each.place)
        leader = d.leader_of(newest, self._host, records)
        if leader != self._leader:
            self._leader, self._led_since_s = leader, now_s
        self._acknowledge(records)
        if leader == self._host:
            self._is_joined = self._leads(self._situation())
        else:
            found = records.get(leader)
            # A leader that has enough followers repeats what is known in its own term.
            leads = found is not None and found.leader == leader and (
                not self._known.generation or found.decision.term == found.term
            )  # fmt: skip
            self._is_joined = leads
        if self._is_joined:
            self._joined_s = now_s
            self._is_alone_logged = False
            return None
        waited_s = now_s - self._joined_s
        is_over = waited_s >= self._policy.wait_s
        if is_over or (waited_s >= ALONE_S and not self._is_alone_logged):
            self._is_alone_logged = True
            wanted = ", ".join(self._known.voters) or f"{self._policy.hosts_to_begin} hosts"
            self._log(f"too few of {wanted} answer, waited {waited_s:.0f} s")
            for place, problem in sorted(board.problems.items())[:PROBLEMS_SHOWN]:
                self._log(f"  {place}: {problem}")
        return d.EXIT_RESTART_HOST if is_over else None

    def _acknowledge(self, records: Mapping[str, Record]) -> None:
        """Acknowledge the leader's term, or begin one: a higher one than any host that follows.

        The own one binds this host once a decision was made in it: else two that lead would outbid
        each other for ever.
        """
        if self._leader == self._host:
            views = {} if self._job is None else self._job.board.views(failing=self._is_failing())
            terms = [each.term for each in views.values() if each.leader == self._host]
            newest = max([self._term, *terms])
            if self._own_term < newest or self._own_term == m.NEVER[0]:
                self._own_term = newest[0] + 1, self._host, self._id
        elif self._leader and records[self._leader].leader == self._leader:
            self._term = max(self._term, records[self._leader].term)

    def _shown_term(self) -> m.Term:
        return self._own_term if self._leader == self._host else self._term

    def _situation(self) -> d.Situation:
        """As this host sees it if it leads."""
        views, awaited = dict[str, m.View](), frozenset[str]()
        now_s = time.monotonic()
        if self._job is not None:
            failing = self._is_failing()
            found = self._job.board.views(failing=failing)
            views = {host: each for host, each in found.items() if each.term == self._own_term}
            awaited = frozenset(found)
            if now_s - self._led_since_s < LOST_S:
                # Those that would lead in this one's place do not answer.
                order = d.order_of(self._known)
                first = order.index(self._host) if self._host in order else 0
                awaited |= frozenset(order[first:])
        views[self._host] = self._view()
        ready = {
            host: sum(each.where in m.WITH_RANKS for each in view.processes)
            for host, view in views.items()
        }
        if ready != self._ready:
            self._ready, self._stable_since_s = ready, now_s
        return d.Situation(
            leader=self._host,
            known=d.adopt_newest(self._known, views),
            views=views,
            awaited=awaited - views.keys(),
            waited_s=now_s - self._changed_s,
            stable_s=now_s - self._stable_since_s,
            listed=self._job.board.listed if self._job is not None else 0,
            start=self._id,
            term=self._own_term,
        )

    def _is_failing(self) -> bool:
        return bool(self._known.ended or self._now.failures)

    def _leads(self, now: d.Situation) -> bool:
        if self._job is not None and self._followers != now.views.keys():
            self._followers = frozenset(now.views)
            self._log(f"hosts: {', '.join(sorted(now.views))}")
        return d.may_lead(self._policy, now)

    def _decide(self) -> m.Decision | None:
        if self._leader != self._host:
            return None
        now = self._situation()
        if not self._leads(now):
            return None
        if now.known.exit is not None:
            return now.known
        decision = d.decide(self._policy, now)
        if decision is None and d.is_over(now) and self._logged < self._known.generation:
            self._log_end(self._known, d.reason_of(self._policy, now))
            if self._job is not None:
                self._log(f"waiting for processes, up to {self._policy.wait_s:g} s")
        return decision

    def _adopt(self, decision: m.Decision) -> None:
        """Log a decision; what follows applies it."""
        before, self._known = self._known, decision
        self._term = max(self._term, decision.term)
        self._changed_s = now_s = time.monotonic()
        for host in decision.leaving:
            if host not in before.leaving:
                self._log(f"host {host} is to leave")
        if self._policy.size_after(decision) != self._policy.size_after(before):
            self._log(f"the job is to have {self._policy.size_after(decision)} ranks")
        if self._host in decision.leaving and self._leaving is None and before.generation:
            left_s = self._grace_s if decision.left_s is None else decision.left_s
            if decision.order.host == self._host:
                left_s = decision.order.deadline_s
            self._leaving = Leaving(now_s, now_s + left_s, 0)
            self._budget = 0
        is_first = not before.voters and len(decision.voters) > 1
        if (before.old_voters or is_first) and not decision.old_voters:
            self._log(f"hosts that vote: {', '.join(sorted(decision.voters))}")
            if not is_first:
                self._warn_of(decision.voters)
        if decision.exit is not None:
            if decision.exit:
                self._log_end(before, decision.ended)
            self._log(f"{decision.reason}: exit {decision.exit}")
        elif decision.began != before.began:
            self._log_end(before, decision.reason)
            self._now = Observed(progress_s=now_s, updated=decision.updated)
            ranks = decision.ranks_on(self._host)
            if decision.generation > 1:  # a standby host may have seen the begin alone
                self._fault_s = (self._fault_s or now_s) if ranks else None
            for process in self._processes.living.values():
                if process.where != "in":
                    process.rank, process.begun = ranks.get(process.pid), None
            if self._job is not None:
                self._job.board.add_hosts(decision.hosts)
            if self._job is not None and not decision.ended:
                shown = ", ".join(map(str, ranks.values())) or "none"
                self._log(f"generation {decision.generation} begins; ranks on this host: {shown}")
                if decision.generation == 1 and decision.term[1] == self._host:
                    for place, problem in sorted(self._job.board.problems.items())[:PROBLEMS_SHOWN]:
                        self._log(f"{place}: a first load waits for it: {problem}")
                    self._warn_of(decision.voters)
        if decision.ended:
            self._fault_s = self._fault_s or now_s

    def _warn_of(self, voters: Collection[str]) -> None:
        """Log that a loss ends the job, which a user may not expect."""
        if (
            len(voters) < SAFE_VOTERS
            and not self._policy.allow_split
            and self._leader == self._host
        ):
            hosts = " or ".join(sorted(voters))
            self._log(f"the loss of {hosts} ends this job: add hosts (--standby-host)")

    def _log_end(self, known: m.Decision, reason: str) -> None:
        """Log the end of a generation, once."""
        number = known.generation
        if number <= self._logged:
            return
        self._logged = number
        if known.saves_only and not known.ended:
            self._log(f"generation {number}: the surviving ranks have saved what they kept")
            return
        self._log(f"generation {number} ended: {reason}")
        self._updates_in_a_row = 0

    def _facts(self) -> tuple[m.ProcessFacts, ...]:
        return tuple(each.facts() for each in self._processes.living.values())

    def _view(self) -> m.View:
        now, now_s, processes = self._now, time.monotonic(), self._facts()
        steps_s = [after - before for before, after in itertools.pairwise(now.updates_s)]
        return m.View(
            start=self._id,
            leader=self._leader,
            term=self._shown_term(),
            place=self._known.place,
            entry=self._job.board.entry if self._job is not None else None,
            is_standby=self._job is not None and self._job.is_standby,
            order=self._order,
            left_s=self._leaving.until_s - now_s if self._leaving is not None else None,
            processes=processes,
            to_start=d.to_start(self._policy, processes, self._budget),
            code=self._code,
            began=self._known.began,
            failures=tuple(now.failures),
            updates=now.updates,
            step_s=statistics.median(steps_s) if steps_s else 0.0,
            updated=now.updated,
            idle_s=now_s - now.progress_s,
            quiet_s=max(0.0, max(now.quiet_until_s.values(), default=0.0) - now_s),
        )

    def _trains(self) -> bool:
        """Whether ranks of this host have made an update in the generation, or all have."""
        if self._known.ranks_on(self._host) or self._job is None:
            return self._now.updates > 0
        leader = self._job.board.records(failing=False).get(self._leader)
        return leader is not None and leader.trains and leader.decision.began == self._known.began

    def _status(self) -> Status:
        """For a user."""
        known, waiting = self._known, [each.where for each in self._processes.living.values()]
        return Status(
            pid=os.getpid(),
            job=self._job.name if self._job is not None else "",
            host=self._host,
            leader=self._leader,
            generation=known.generation,
            ranks=known.members,
            size=self._policy.size_after(known),
            per_host=self._policy.per_host,
            ended=known.ended,
            step=self._now.updated,
            trains=self._trains(),
            standbys=waiting.count("ready"),
            starting=waiting.count("starting"),
        )

    def _show(self) -> None:
        """Show users and other hosts what this one knows."""
        self._order = self._control.serve(self._status, self._known.order)
        if self._job is None:
            return
        board, view = self._job.board, self._view()
        leader = board.records(failing=False).get(self._leader)
        if leader is not None and leader.decision.place < self._known.place:
            view = msgspec.structs.replace(view, newer=self._known)
        order = d.order_of(self._known)
        above: list[str] | None = None
        if self._is_joined and order and not self._misses_voters(board):
            # It is enough to read those that would lead in its leader's place.
            above = order[: order.index(self._leader)] if self._leader in order else order
        record = Record(
            leader=self._leader,
            term=self._shown_term(),
            decision=self._known,
            trains=self._leader == self._host and d.has_trained(self._situation()),
            sizes=self._policy.sizes,
        )
        board.put(record, view, above)

    def _misses_voters(self, board: Board) -> bool:
        """Whether this host leads, and others that may lead do not follow it."""
        followers = {self._host, *board.views(failing=False)}
        return self._leader == self._host and not followers.issuperset(self._known.voters)

    # --- events ----------------------------------------------------------------------------------

    def _poll(self, wait_s: float) -> None:
        for process, event in self._processes.poll(wait_s):
            self._handle(process, event)

    def _handle(self, process: Process, event: Event) -> None:
        if isinstance(event, Died):
            self._died(process, event)
        elif isinstance(event, m.Ready):
            process.where, process.version = "ready", event.version
        elif event.generation != process.generation:
            return
        elif isinstance(event, m.Done):
            process.where, process.version = "done", event.version
        elif process.began != self._known.began:
            return
        elif isinstance(event, m.Fault):
            text = f"rank {process.rank} raised {event.error}"
            self._now.failures.append(m.Failure(text=text, is_final=event.is_final))
        else:
            self._progress(process, event)

    def _died(self, process: Process, event: Died) -> None:
        self._log(f"{self._name(process)} (process {process.pid}) is gone: {event}")
        for key in _RANK_VARIABLES:
            if event.last_line == f"KeyError: '{key}'":
                self._log(f"{key} is set inside of train(world) only: read it there")
        self._code = event.code if event.code > 0 else 1
        is_of_now = process.generation > 0 and process.began == self._known.began
        if is_of_now and not process.is_killed:
            self._now.quiet_until_s.pop(process.pid, None)
            self._now.failures.append(
                m.Failure(
                    text=f"rank {process.rank} died ({event})",
                    is_death=True,
                    by_signal=event.code < 0,
                    code=self._code,
                )
            )

    def _progress(self, process: Process, event: m.Progress) -> None:
        known, now = self._known, self._now
        now_s = now.progress_s = time.monotonic()
        now.quiet_until_s[process.pid] = now_s + event.quiet_s
        if event.what == "begin":
            process.begun = event.version
        if event.what in ("load", "update"):
            least = now.updated if event.what == "update" else 0
            now.updated = max(event.version, least)  # ranks report in any order
        if event.what == "load" and process.rank == 0:
            self._log(f"generation {known.generation}: {event.restored}")
        if event.what != "update" or process.rank != min(known.ranks_on(self._host).values()):
            return
        if self._fault_s is not None and not known.ended:
            if process.rank == 0:
                elapsed_s = now_s - self._fault_s
                self._log(f"first update after the fault: step {event.version}, {elapsed_s:.2f} s")
            self._fault_s = None
        now.updates += 1
        now.updates_s.append(now_s)
        self._updates_in_a_row += 1
        if self._updates_in_a_row % d.REFILL_UPDATES == 0:
            self._budget = self._max_restarts

    # --- actions ---------------------------------------------------------------------------------

    def _do(self, action: d.Action) -> None:
        living = self._processes.living
        match action:
            case d.Start(count):
                self._budget -= count
                self._start(count)
            case d.Stop(pids):
                for process in map(living.__getitem__, pids):
                    process.stopped_s = time.monotonic()
                    process.send(m.Stop(generation=process.generation))
            case d.Change(pids):
                for process in map(living.__getitem__, pids):
                    process.is_changing = True
                    process.send(
                        m.Change(
                            generation=process.generation,
                            size=self._policy.size_after(self._known),
                            left_s=self._known.left_s,
                        )
                    )
            case d.Kill(pids):
                self._kill(pids)
            case d.Enter(ranks):
                self._enter(ranks)

    def _start(self, count: int) -> None:
        env = {key: value for key, value in os.environ.items() if key not in _RANK_VARIABLES}
        env |= {"PYTHONUNBUFFERED": "1"}
        env.setdefault("OMP_NUM_THREADS", "1")
        for name in (
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "TORCH_NCCL_ENABLE_MONITORING",
            "TORCH_NCCL_RETHROW_CUDA_ERRORS",
            "NCCL_NVLS_ENABLE",
        ):
            env.setdefault(name, "0")  # NCCL's watchdog must not kill a rank that recovers
        for _ in range(count):
            try:
                self._processes.start(env)
            except OSError as error:  # it must not end the other processes
                self._log(f"cannot start a process: {error}")

    def _enter(self, ranks: Mapping[int, int]) -> None:
        known, job, keys = self._known, self._job, None
        hosts = list(dict.fromkeys(each.host for each in known.members))
        if job is not None:
            table = known.table_of(job.keys.table)
            keys = msgspec.structs.replace(job.keys, table=table, hosts=known.hosts)
        for pid, rank in ranks.items():
            process = self._processes.living[pid]
            process.where, process.generation = "in", known.generation
            process.began = known.began
            process.version = process.stopped_s = None
            process.is_changing = False
            process.send(
                m.Train(
                    generation=known.generation,
                    rank=rank,
                    size=len(known.members),
                    local_rank=known.members[rank].local_rank,
                    local_size=len(known.ranks_on(self._host)),
                    host_rank=hosts.index(self._host),
                    run=known.run,
                    job=job.name if job is not None else known.run,
                    store="" if keys is not None else os.fspath(self._store(known.generation)),
                    keys=keys,
                    reason=known.reason,
                    updated=known.updated,
                    saves_only=known.saves_only,
                )
            )
        self._store(known.generation - 1).unlink(missing_ok=True)

    def _kill(self, pids: Sequence[int]) -> None:
        found = [self._processes.living[pid] for pid in pids]
        limit_s = self._policy.unwind_s
        for process in found:
            what = f"leave within {limit_s:g} s" if process.where == "in" else "reach live.run"
            self._log(f"{self._name(process)} does not {what}: killing it")
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)  # it writes stacks; its children would die
        until_s = time.monotonic() + STACKS_S
        while time.monotonic() < until_s:
            self._poll(0.05)
        for process in found:
            if process.pid in self._processes.living and process.where in ("in", "starting"):
                process.is_killed = True  # the signal has not woken it
                process.kill_group(signal.SIGKILL)
                process.started_s = process.stopped_s = time.monotonic()

    def _release(self, code: int) -> int:
        """Let done processes end, however long it takes; the exit code."""
        self._dismiss(code)
        for process in self._processes.living.values():
            if not process.is_dismissed:  # it may still import
                process.kill_group(signal.SIGKILL)
                process.is_killed = True
        failed = 0
        limit_s = math.inf if code == 0 else time.monotonic() + EXIT_WAIT_S
        while self._is_needed() and time.monotonic() < limit_s:
            for process, event in self._processes.poll(POLL_S):
                if isinstance(event, Died) and event.code and not (code or process.is_killed):
                    self._log(f"{self._name(process)} failed after live.run: {event}")
                    failed = failed or max(event.code, 1)
            self._show()
            if self._signalled is not None:
                limit_s = min(limit_s, self._signalled[1])
        return 128 + self._signalled[0] if self._signalled is not None else failed or code

    def _is_needed(self) -> bool:
        """Whether processes still end, or hosts that follow this one do not know the decision."""
        views = self._job.board.views(failing=True) if self._job is not None else {}
        behind = any(each.place < self._known.place for each in views.values())
        return bool(self._processes.living) or (behind and self._leader == self._host)

    def _dismiss(self, code: int) -> None:
        for process in self._processes.living.values():
            if process.where in ("ready", "done") and not process.is_dismissed:
                process.is_dismissed = True
                process.send(m.Leave(code=code))

    @staticmethod
    def _name(process: Process) -> str:
        return "a standby" if process.rank is None else f"rank {process.rank}"

    def _store(self, generation: int) -> Path:
        return self._folder / f"store-{generation}"

    def _log(self, text: str) -> None:
        self._write(f"[tieredckpt] {time.monotonic() - self._started_s:8.2f} s  {text}")
