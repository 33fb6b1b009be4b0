"""``tieredckpt run``: starts the ranks of one host, and acts as ``decide`` decides.

Imports no torch. A rank's death is SIGCHLD; each rank is a process group of its own, killed as one
with its loader workers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tieredckpt.errors import UsageError
from tieredckpt.live import messages as m
from tieredckpt.live.decide import (
    REFILL_UPDATES,
    Action,
    Begin,
    EndGeneration,
    Exit,
    Kill,
    Policy,
    ProcessFacts,
    Situation,
    Start,
    StopAll,
    Where,
    decide,
)

INTERVALS_KEPT = 20
POLL_S = 0.1
"""Longest time until a decision that no event causes, such as a hang."""
STACKS_S = 0.5
"""Time for a process to write its stacks before it is killed."""
EXIT_WAIT_S = 20.0
"""Time for done processes to end by themselves."""

_RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip


Spawn = Callable[[dict[str, str]], "subprocess.Popen[bytes]"]


def spawner(command: Sequence[str]) -> Spawn:
    """Starts ``command``."""

    def spawn(env: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    return spawn


class _Child:
    """One process, with its output and its connection."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        self.popen = popen
        self.stdout = popen.stdout
        os.set_blocking(self.stdout.fileno(), False)
        self.pid = popen.pid
        self.output = b""
        self.lines = b""
        self.socket: socket.socket | None = None
        self.where: Where = "starting"
        self.rank: int | None = None
        self.version: int | None = None
        self.is_killed = False
        """By the supervisor, because it did not leave a generation."""

    def facts(self) -> ProcessFacts:
        return ProcessFacts(pid=self.pid, where=self.where, rank=self.rank, version=self.version)

    def send(self, message: m.ToProcess) -> None:
        if self.socket is not None:
            with contextlib.suppress(OSError):  # it is dying, and SIGCHLD follows
                self.socket.sendall(m.encode(message))

    def is_dead(self) -> bool:
        """Without reaping it: until then no other process has its number."""
        try:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return status is not None

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Supervisor:
    """The parent of one host's ranks and standbys.

    Args:
        policy: Sizes and deadlines.
        spawn: Starts a process with an environment, as leader of a session of its own, with a pipe
            for its output; see :func:`spawner`.
        folder: For the socket and the keys of each generation; it must be this user's alone.
        max_restarts: Processes that may be started in place of others.
        grace_s: Time between a first SIGTERM or SIGINT, which is forwarded, and SIGKILL.
        write: Gets each line of output.
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
        self._spawn = spawn
        self._folder = folder
        self._max_restarts = self._budget = max_restarts
        self._grace_s = grace_s
        self._write = write
        self._run = secrets.token_hex(8)
        self._started_s = time.monotonic()
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._generation = 0
        self._reason = ""
        self._running = False
        self._stopping_since_s: float | None = None
        self._fault_s: float | None = None
        self._lost: set[int] = set()
        self._faults: list[str] = []
        self._death = ""
        """The first death of a rank in this generation, unless the supervisor killed it."""
        self._quiet_until_s: dict[int, float] = {}
        self._progress_s = 0.0
        self._updates_s: deque[float] = deque(maxlen=INTERVALS_KEPT)
        self._updates_in_a_row = 0
        self._updated = 0
        """The newest update of any rank."""
        self._fruitless = 0
        self._code = 1
        self._signalled: tuple[int, float] | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._wakeup, self._wakeup_end = socket.socketpair()

    @property
    def socket_path(self) -> Path:
        """Where its processes connect."""
        return self._folder / "live.sock"

    def run(self) -> int:
        """Train until done; the exit code. Leaves no process behind."""
        if len(os.fsencode(self.socket_path)) > 100:
            raise UsageError(f"the path {self.socket_path} is too long for a socket")
        self._listener.bind(os.fspath(self.socket_path))
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._wakeup.setblocking(False)
        self._wakeup_end.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._drain_wakeup)
        signal.set_wakeup_fd(self._wakeup_end.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            self._start(self._policy.size + self._policy.standby)
            return self._loop()
        finally:
            for child in self._children.values():
                child.signal(signal.SIGKILL)
                child.popen.wait()
                self._read_output(child)
            self._selector.close()

    def _loop(self) -> int:
        while True:
            self._handle_events(POLL_S)
            self._reap()
            if self._signalled is not None:
                number, until_s = self._signalled
                if not self._children or time.monotonic() >= until_s:
                    return 128 + number
                continue
            while (action := decide(self._policy, self._situation())) is not None:
                if isinstance(action, Exit):
                    self._log(f"{action.reason}: exit {action.code}")
                    self._release(action.code)
                    return action.code
                self._do(action)

    # --- events ----------------------------------------------------------------------------------

    def _handle_events(self, wait_s: float) -> None:
        for key, _ in self._selector.select(wait_s):
            key.data()

    def _drain_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakeup.recv(4096)

    def _on_signal(self, number: int, _: Any) -> None:
        until_s = time.monotonic() + self._grace_s
        first = self._signalled is None
        self._signalled = (number, until_s if first else 0.0)
        if first:
            for child in self._children.values():
                child.signal(number)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        child = self._children.get(struct.unpack("3i", peer)[0])
        if child is None or child.socket is not None:
            sock.close()
            return
        sock.setblocking(True)
        child.socket = sock
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._receive(child))

    def _receive(self, child: _Child) -> None:
        assert child.socket is not None
        try:
            data = child.socket.recv(1 << 16)
        except OSError:
            data = b""
        *lines, child.lines = (child.lines + data).split(b"\n")
        try:
            for line in lines:
                self._handle(child, m.decode_from_process(line))
            if len(child.lines) > m.MESSAGE_BYTES_MAX:
                raise msgspec.DecodeError("a line is too long")
        except msgspec.MsgspecError as error:
            self._log(f"process {child.pid} sent {error}: killed")
            child.signal(signal.SIGKILL)
            data = b""
        if not data:
            self._selector.unregister(child.socket)
            child.socket.close()
            child.socket = None

    def _handle(self, child: _Child, message: m.FromProcess) -> None:
        if isinstance(message, m.Ready):
            child.where, child.version = "ready", message.version
            return
        if message.generation != self._generation or not self._running:
            return
        if isinstance(message, m.Done):
            child.where, child.version = "done", None
        elif isinstance(message, m.Fault):
            self._code = 1
            self._stop(f"rank {child.rank} raised {message.error}")
        else:
            self._progress(child, message)

    def _progress(self, child: _Child, message: m.Progress) -> None:
        now_s = self._progress_s = time.monotonic()
        self._quiet_until_s[child.pid] = now_s + message.quiet_s if message.quiet_s else 0.0
        if message.what in ("load", "update"):
            least = self._updated if message.what == "update" else 0
            self._updated = max(message.version, least)  # ranks report in any order
        if child.rank != 0:
            return
        if message.what == "load":
            self._log(f"generation {self._generation}: {message.restored}")
        if message.what == "update":
            if self._fault_s is not None:
                elapsed_s = now_s - self._fault_s
                self._log(
                    f"first update after the fault: step {message.version}, {elapsed_s:.2f} s"
                )
                self._fault_s = None
            self._updates_s.append(now_s)
            self._fruitless = 0
            self._updates_in_a_row += 1
            if self._updates_in_a_row % REFILL_UPDATES == 0:
                self._budget = self._max_restarts

    def _read_output(self, child: _Child) -> None:
        stdout = child.stdout
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(stdout.fileno(), 1 << 16)
        *lines, child.output = (child.output + data).split(b"\n")
        if not data and child.output:
            lines.append(child.output)
            child.output = b""
        name = "standby" if child.rank is None else f"rank{child.rank}"
        for line in lines:
            self._write(f"[{name}]: {line.decode(errors='replace')}")
        if not data:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(stdout)

    def _reap(self) -> None:
        for child in [each for each in self._children.values() if each.is_dead()]:
            child.signal(signal.SIGKILL)  # its loader workers
            code = child.popen.wait()
            self._read_output(child)
            del self._children[child.pid]
            self._quiet_until_s.pop(child.pid, None)
            if child.socket is not None:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(child.socket)
                child.socket.close()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            name = "a standby" if child.rank is None else f"rank {child.rank}"
            self._log(f"{name} (process {child.pid}) is gone: {how}")
            self._code = code if code > 0 else 1
            if self._running and child.rank is not None:
                self._lost.add(child.rank)
                if not child.is_killed:
                    self._death = self._death or f"rank {child.rank} died ({how})"
                self._stop(self._death)

    # --- actions ---------------------------------------------------------------------------------

    def _situation(self) -> Situation:
        intervals = list(self._updates_s)
        return Situation(
            now_s=time.monotonic(),
            processes=tuple(each.facts() for each in self._children.values()),
            lost=frozenset(self._lost),
            budget=self._budget,
            running=self._running,
            stopping_since_s=self._stopping_since_s,
            quiet_until_s=max(self._quiet_until_s.values(), default=0.0),
            progress_s=self._progress_s,
            intervals_s=tuple(b - a for a, b in itertools.pairwise(intervals)),
            begun=self._generation > 0,
            fruitless=self._fruitless,
            code=self._code,
        )

    def _do(self, action: Action) -> None:
        match action:
            case Start(count):
                self._budget -= count
                self._start(count)
            case StopAll(reason):
                self._stop(reason)
            case Kill(pids):
                self._kill(pids)
            case EndGeneration():
                self._end_generation()
            case Begin(pids):
                self._begin(pids)

    def _start(self, count: int) -> None:
        env = {key: value for key, value in os.environ.items() if key not in _RANK_VARIABLES}
        env |= {m.SOCKET_VARIABLE: os.fspath(self.socket_path), "PYTHONUNBUFFERED": "1"}
        env.setdefault("OMP_NUM_THREADS", "1")
        for name in (
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "TORCH_NCCL_ENABLE_MONITORING",
            "TORCH_NCCL_RETHROW_CUDA_ERRORS",
            "NCCL_NVLS_ENABLE",
        ):
            env.setdefault(name, "0")  # NCCL's watchdog must not kill a rank that recovers
        for _ in range(count):
            child = _Child(self._spawn(env))
            self._children[child.pid] = child
            self._selector.register(
                child.stdout,
                selectors.EVENT_READ,
                lambda child=child: self._read_output(child),
            )

    def _stop(self, reason: str) -> None:
        self._faults.append(reason)
        if self._stopping_since_s is not None:
            return
        self._stopping_since_s = self._fault_s = time.monotonic()
        for child in self._members():
            child.send(m.Stop(generation=self._generation))

    def _kill(self, pids: Sequence[int]) -> None:
        found = [self._children[pid] for pid in pids]
        for child in found:
            self._log(
                f"rank {child.rank} does not leave within {self._policy.unwind_s:g} s: killing it"
            )
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGUSR1)  # it writes its stacks; its children would die
        until_s = time.monotonic() + STACKS_S
        while time.monotonic() < until_s:
            self._handle_events(0.05)
        for child in found:
            if child.where == "in":  # the signal may have woken it
                child.is_killed = True
                child.signal(signal.SIGKILL)
        self._stopping_since_s = time.monotonic()

    def _end_generation(self) -> None:
        # The error of a rank whose peer died often arrives before the death itself.
        self._reason = self._death or (self._faults or ["a rank was done before the others"])[0]
        self._log(f"generation {self._generation} ended: {self._reason}")
        self._store(self._generation).unlink(missing_ok=True)
        if not self._updates_s:
            self._fruitless += 1
        for child in self._members():
            child.where = "ready"
        self._running, self._stopping_since_s = False, None
        self._updates_in_a_row = 0

    def _begin(self, pids: Sequence[int]) -> None:
        self._generation += 1
        self._running = True
        self._lost.clear()
        self._faults.clear()
        self._death = ""
        self._quiet_until_s.clear()
        self._updates_s.clear()
        self._progress_s = time.monotonic()
        for child in self._children.values():
            child.rank = None
        for rank, pid in enumerate(pids):
            child = self._children[pid]
            child.rank, child.where, child.version = rank, "in", None
            child.send(
                m.Train(
                    generation=self._generation,
                    rank=rank,
                    size=len(pids),
                    run=self._run,
                    store=os.fspath(self._store(self._generation)),
                    reason=self._reason,
                    updated=self._updated,
                )
            )

    def _release(self, code: int) -> None:
        """Let done processes end; others, which may still import, are killed."""
        for child in self._children.values():
            if child.where in ("ready", "done"):
                child.send(m.Leave(code=code))
            else:
                child.signal(signal.SIGKILL)
        until_s = time.monotonic() + EXIT_WAIT_S
        while time.monotonic() < until_s and not all(c.is_dead() for c in self._children.values()):
            self._handle_events(POLL_S)

    def _members(self) -> list[_Child]:
        return [each for each in self._children.values() if each.rank is not None]

    def _store(self, generation: int) -> Path:
        return self._folder / f"store-{generation}"

    def _log(self, text: str) -> None:
        self._write(f"[tieredckpt] {time.monotonic() - self._started_s:8.2f} s  {text}")


def write_line(line: str) -> None:
    """One line to standard output; a reader that has gone ends the output, not the training."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
