"""``tieredckpt run``: starts the ranks of one host, and acts as ``decide`` decides.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tieredckpt.live import messages as m
from tieredckpt.live.decide import (
    REFILL_UPDATES,
    Action,
    Begin,
    EndGeneration,
    Exit,
    Generation,
    Kill,
    Policy,
    Situation,
    Start,
    StopAll,
    decide,
)
from tieredckpt.live.processes import Died, Event, Process, Processes, Spawn

POLL_S = 0.1
"""Longest time until a decision that no event causes, such as a hang."""
STACKS_S = 0.5
"""Time for a process to write its stacks before it is killed."""
EXIT_WAIT_S = 20.0
"""Time for processes to end by themselves after a failure."""

_RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip


class Supervisor:
    """The parent of one host's ranks and standbys.

    Args:
        policy: Sizes and deadlines.
        spawn, write: As for :class:`Processes`.
        folder: For the keys of each generation; it must be this user's alone.
        max_restarts: Processes that may be started in place of others.
        grace_s: Time between a first SIGTERM or SIGINT, which is forwarded, and SIGKILL.
    """

    def __init__(
        self,
        policy: Policy,
        spawn: Spawn,
        folder: Path,
        *,
        max_restarts: int,
        grace_s: float,
        write: Callable[[str], None],
    ) -> None:
        self._policy = policy
        self._folder = folder
        self._max_restarts = self._budget = max_restarts
        self._grace_s = grace_s
        self._write = write
        self._processes = Processes(spawn, write)
        self._run = secrets.token_hex(16)
        self._started_s = time.monotonic()
        self._generation: Generation | None = None
        self._begun = 0
        """Generations so far."""
        self._reason = ""
        self._fault_s: float | None = None
        """When the last generation was ended, until the next update."""
        self._updates_in_a_row = 0
        self._updated = 0
        """The newest update of any rank."""
        self._failures, self._failed_at = 0, -1
        """How often the script has failed in a row, after this update."""
        self._code = 1
        self._is_final = False
        self._signalled: tuple[int, float] | None = None

    def run(self) -> int:
        """Train until done; the exit code. Leaves no process behind."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            self._start(self._policy.size + self._policy.standby)
            return self._loop()
        finally:
            self._processes.close()

    def _loop(self) -> int:
        while True:
            self._poll(POLL_S)
            if self._signalled is not None:
                number, until_s = self._signalled
                if not self._processes.living or time.monotonic() >= until_s:
                    return 128 + number
                self._dismiss(0)  # a rank that ends by itself runs what follows live.run
                continue
            while (action := decide(self._policy, self._situation())) is not None:
                if isinstance(action, Exit):
                    self._log(f"{action.reason}: exit {action.code}")
                    return self._release(action.code)
                self._do(action)

    def _on_signal(self, number: int, _: Any) -> None:
        until_s = time.monotonic() + self._grace_s
        first = self._signalled is None
        self._signalled = (number, until_s if first else 0.0)
        if first:
            for process in self._processes.living.values():
                process.kill_group(number)

    def _situation(self) -> Situation:
        return Situation(
            now_s=time.monotonic(),
            processes=tuple(each.facts() for each in self._processes.living.values()),
            generation=self._generation,
            budget=self._budget,
            begun=self._begun > 0,
            failures=self._failures,
            code=self._code,
            is_final=self._is_final,
        )

    # --- events ----------------------------------------------------------------------------------

    def _poll(self, wait_s: float) -> None:
        for process, event in self._processes.poll(wait_s):
            self._handle(process, event)

    def _handle(self, process: Process, event: Event) -> None:
        now = self._generation
        if isinstance(event, Died):
            self._died(process, event)
        elif isinstance(event, m.Ready):
            process.where, process.version = "ready", event.version
        elif now is None or event.generation != now.number:
            return
        elif isinstance(event, m.Done):
            process.where, process.version = "done", event.version
        elif isinstance(event, m.Fault):
            self._code = self._code if now.death else 1
            self._is_final = self._is_final or event.is_final
            self._stop(now, f"rank {process.rank} raised {event.error}")
        else:
            self._progress(now, process, event)

    def _died(self, process: Process, event: Died) -> None:
        self._log(f"{self._name(process)} (process {process.pid}) is gone: {event}")
        for key in _RANK_VARIABLES:
            if event.last_line == f"KeyError: '{key}'":
                self._log(f"{key} is set inside of train(world) only: read it there")
        self._code = event.code if event.code > 0 else 1
        now = self._generation
        if now is not None and process.rank is not None:
            now.quiet_until_s.pop(process.pid, None)
            now.lost.add(process.rank)
            if not process.is_killed:
                now.death = now.death or f"rank {process.rank} died ({event})"
                now.by_signal = now.by_signal or event.code < 0
            self._stop(now, now.death)

    def _progress(self, now: Generation, process: Process, event: m.Progress) -> None:
        now_s = now.progress_s = time.monotonic()
        now.quiet_until_s[process.pid] = now_s + event.quiet_s
        if event.what == "begin":
            process.begun = event.version
        if event.what in ("load", "update"):
            least = self._updated if event.what == "update" else 0
            self._updated = max(event.version, least)  # ranks report in any order
        if process.rank != 0:
            return
        if event.what == "load":
            self._log(f"generation {now.number}: {event.restored}")
        if event.what == "update":
            if self._fault_s is not None and now.stopping_since_s is None:
                elapsed_s = now_s - self._fault_s
                self._log(f"first update after the fault: step {event.version}, {elapsed_s:.2f} s")
                self._fault_s = None
            now.updates_s.append(now_s)
            self._updates_in_a_row += 1
            if self._updates_in_a_row % REFILL_UPDATES == 0:
                self._budget = self._max_restarts

    # --- actions ---------------------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        now = self._generation
        match action:
            case Start(count):
                self._budget -= count
                self._start(count)
            case Begin(pids, saves_only):
                self._begin(pids, saves_only=saves_only)
            case StopAll(reason) if now is not None:
                self._stop(now, reason)
            case Kill(pids):
                self._kill(pids)
            case EndGeneration() if now is not None:
                self._end(now)

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

    def _begin(self, pids: Sequence[int], *, saves_only: bool) -> None:
        self._begun += 1
        self._generation = Generation(
            number=self._begun, progress_s=time.monotonic(), saves_only=saves_only
        )
        for process in self._processes.living.values():
            process.rank = process.begun = None
        for rank, pid in enumerate(pids):
            process = self._processes.living[pid]
            process.rank, process.where, process.version = rank, "in", None
            process.send(
                m.Train(
                    generation=self._begun,
                    rank=rank,
                    size=len(pids),
                    run=self._run,
                    store=os.fspath(self._store(self._begun)),
                    reason=self._reason,
                    updated=self._updated,
                    saves_only=saves_only,
                )
            )

    def _stop(self, now: Generation, reason: str) -> None:
        now.faults.append(reason)
        if now.stopping_since_s is not None:
            return
        now.stopping_since_s = time.monotonic()
        self._fault_s = self._fault_s or now.stopping_since_s
        for process in self._members():
            process.send(m.Stop(generation=now.number))

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
        if self._generation is not None:
            self._generation.stopping_since_s = time.monotonic()

    def _end(self, now: Generation) -> None:
        self._store(now.number).unlink(missing_ok=True)
        for process in self._members():
            if process.where == "done":
                process.where, process.version = "ready", None
        self._generation = None
        if now.saves_only and not now.faults:
            self._log(f"generation {now.number}: the surviving ranks have saved what they kept")
            return
        self._reason = now.reason
        self._log(f"generation {now.number} ended: {now.reason}")
        self._updates_in_a_row = 0
        if not now.by_signal:  # else the budget of restarts ends it
            if self._updated != self._failed_at:
                self._failures, self._failed_at = 0, self._updated
            self._failures += 1

    def _release(self, code: int) -> int:
        """Let done processes end, however long it takes; the exit code."""
        self._dismiss(code)
        for process in self._processes.living.values():
            if not process.is_dismissed:  # it may still import
                process.kill_group(signal.SIGKILL)
                process.is_killed = True
        failed = 0
        limit_s = math.inf if code == 0 else time.monotonic() + EXIT_WAIT_S
        while self._processes.living and time.monotonic() < limit_s:
            for process, event in self._processes.poll(POLL_S):
                if isinstance(event, Died) and event.code and not (code or process.is_killed):
                    self._log(f"{self._name(process)} failed after live.run: {event}")
                    failed = failed or max(event.code, 1)
            if self._signalled is not None:
                limit_s = min(limit_s, self._signalled[1])
        return 128 + self._signalled[0] if self._signalled is not None else failed or code

    def _dismiss(self, code: int) -> None:
        for process in self._processes.living.values():
            if process.where in ("ready", "done") and not process.is_dismissed:
                process.is_dismissed = True
                process.send(m.Leave(code=code))

    def _members(self) -> list[Process]:
        return [each for each in self._processes.living.values() if each.rank is not None]

    @staticmethod
    def _name(process: Process) -> str:
        return "a standby" if process.rank is None else f"rank {process.rank}"

    def _store(self, generation: int) -> Path:
        return self._folder / f"store-{generation}"

    def _log(self, text: str) -> None:
        self._write(f"[tieredckpt] {time.monotonic() - self._started_s:8.2f} s  {text}")
