"""The processes of one supervisor: their output, their messages and their deaths.

Imports no torch. Each process leads a session of its own, and is killed with all that it started,
such as loader workers. A death is seen by its pidfd, not by the end of a socket or a pipe, which
loader workers keep open. A process inherits its end of a socket pair, so that nobody else can send
messages in its name.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from tieredckpt.errors import IntegrityError
from tieredckpt.live import messages as m

_READ_BYTES = 1 << 16

Spawn = Callable[[Mapping[str, str], int], "subprocess.Popen[bytes]"]
"""Starts a process with an environment and an inherited descriptor, as leader of a session of its
own, with a pipe for its output."""


def spawner(command: Sequence[str]) -> Spawn:
    """Starts ``command``."""

    def spawn(env: Mapping[str, str], descriptor: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=env,
            pass_fds=(descriptor,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    return spawn


@dataclass(frozen=True, slots=True)
class Died:
    """A process is gone.

    Attributes:
        code: Its exit code; negative: the signal.
        last_line: Of its output.
    """

    code: int
    last_line: str

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        names = {each.value: each.name for each in signal.Signals}
        return names.get(-self.code, f"signal {-self.code}")


Event = m.FromProcess | Died


class Process:
    """One process, as the supervisor knows it; see :class:`ProcessFacts`."""

    def __init__(self, popen: subprocess.Popen[bytes], sock: socket.socket) -> None:
        assert popen.stdout is not None
        self.popen = popen
        self.stdout = popen.stdout
        os.set_blocking(self.stdout.fileno(), False)
        self.pid = popen.pid
        self.pidfd = os.pidfd_open(popen.pid)
        self.output = b""
        self.last_line = ""
        self.socket = sock
        self.where: m.Where = "starting"
        self.rank: int | None = None
        self.generation = 0
        self.began: m.Place = m.NEVER
        self.version: int | None = None
        self.begun: int | None = None
        self.started_s = time.monotonic()
        self.stopped_s: float | None = None
        self.is_changing = False
        self.is_dismissed = False
        """It was sent Leave."""
        self.is_killed = False
        """By the supervisor, so that its death explains nothing."""

    @property
    def name(self) -> str:
        """Of the output's prefix and of the log."""
        return "standby" if self.rank is None else f"rank{self.rank}"

    def facts(self) -> m.ProcessFacts:
        """For the next decision."""
        return m.ProcessFacts(
            pid=self.pid,
            where=self.where,
            began=self.began,
            version=self.version,
            begun=self.begun,
            started_s=self.started_s,
            stopped_s=self.stopped_s,
            is_changing=self.is_changing,
        )

    def send(self, message: m.ToProcess) -> None:
        """Instruct it."""
        with contextlib.suppress(OSError):  # it is dying, which is an event of its own
            self.socket.sendall(m.encode(message))

    def kill_group(self, number: int) -> None:
        """Signal it and what it started. It is not reaped yet, so its number is no other's."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # it leads no group yet, or is a zombie
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Processes:
    """Starts them, and reports what happens to them.

    Args:
        spawn: See :data:`Spawn` and :func:`spawner`.
        write: Gets each line of output.
    """

    def __init__(self, spawn: Spawn, write: Callable[[str], None]) -> None:
        self._spawn = spawn
        self._write = write
        self.living: dict[int, Process] = {}
        """By pid."""
        self._selector = selectors.DefaultSelector()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def wake(self) -> None:
        """Have :meth:`poll` return at once. Called in any thread."""
        os.eventfd_write(self._woken, 1)

    def start(self, env: Mapping[str, str]) -> None:
        """Start one. Raises OSError: there is no such program, or no process can be made."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            env = {**env, m.SOCKET_VARIABLE: str(theirs.fileno())}
            process = Process(self._spawn(env, theirs.fileno()), ours)
        self.living[process.pid] = process
        for source in (process.stdout, process.socket, process.pidfd):
            self._selector.register(source, selectors.EVENT_READ, process)

    def poll(self, wait_s: float) -> list[tuple[Process, Event]]:
        """What happened; waits at most ``wait_s``. Of a process that died, its death comes last."""
        events: list[tuple[Process, Event]] = []
        dead = []
        for key, _ in self._selector.select(wait_s):
            process: Process | None = key.data
            if process is None:
                os.eventfd_read(self._woken)
            elif key.fileobj is process.stdout:
                self._read_output(process)
            elif key.fileobj is process.socket:
                events += [(process, each) for each in self._receive(process)]
            else:
                dead.append(process)
        return [*events, *((process, self._reap(process)) for process in dead)]

    def close(self) -> None:
        """Kill all that are left."""
        for process in list(self.living.values()):
            self._reap(process)
        self._selector.close()
        os.close(self._woken)

    def _receive(self, process: Process) -> list[m.FromProcess]:
        data = b""
        with contextlib.suppress(OSError):
            data = process.socket.recv(m.MESSAGE_BYTES_MAX)
        try:
            if data:
                return [m.decode_from_process(data)]
        except IntegrityError as error:
            self._write(f"[tieredckpt] process {process.pid}: {error}: killed")
            process.kill_group(signal.SIGKILL)
        self._forget(process.socket)
        return []

    def _forget(self, source: socket.socket | IO[bytes]) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)

    def _read_output(self, process: Process) -> None:
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(process.stdout.fileno(), _READ_BYTES)
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")  # of progress bars
        *lines, process.output = (process.output + data).split(b"\n")
        if not data or len(process.output) > _READ_BYTES:
            lines, process.output = [*lines, process.output] if process.output else lines, b""
        if not data:
            self._forget(process.stdout)
        for line in lines:
            process.last_line = line.decode(errors="replace")
            self._write(f"[{process.name}]: {process.last_line}")

    def _reap(self, process: Process) -> Died:
        process.kill_group(signal.SIGKILL)
        code = process.popen.wait()
        del self.living[process.pid]
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        self._forget(process.socket)
        process.socket.close()
        while process.stdout in self._selector.get_map():
            self._read_output(process)
        process.stdout.close()
        return Died(code, process.last_line)
