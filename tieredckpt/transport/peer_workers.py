"""The agent's side of the processes that send segments: started, given work, started again.

The processes do not accept connections: those are kept for long, and whom the kernel gave which
would decide for hours who sends everything. Each range goes to the process that has the fewest
instead, and no secret leaves the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tieredckpt.transport import bulk
from tieredckpt.transport.peer_worker import DONE, JOB, JOBS_MAX

SILENCE_S = 30.0
"""A process with work that says nothing for so long is stopped or broken: it is replaced."""
LOOK_S = 5.0
RESTART_S = 1.0
END_S = 2.0

log = logging.getLogger(__name__)


class _Worker:
    """One process, and what it has to do."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tieredckpt.transport.peer_worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=_environment(),
                pass_fds=(theirs.fileno(),),
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self.link = ours
        self.jobs: dict[int, asyncio.Future[bool]] = {}
        self.heard_s = time.monotonic()


class Workers:
    """Processes that send ranges of files. Used in one event loop.

    Args:
        number: How many.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._workers: list[_Worker] = []
        self._lost: list[_Worker] = []
        """They died, and were not reaped yet."""
        self._last = 0
        self._stopped = False

    def start(self) -> None:
        """Start the processes; called in the loop."""
        while len(self._workers) < self._number:
            if not self._begin():
                break
        asyncio.get_running_loop().call_later(LOOK_S, self._look)

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        return [each.process.pid for each in self._workers]

    async def send(self, sock: socket.socket, fd: int, start: int, stop: int) -> bool:
        """Have a range of the file ``fd`` sent; False: none of the processes can.

        Raises:
            bulk.Cut: It was not sent whole.
        """
        free = [each for each in self._workers if len(each.jobs) < JOBS_MAX]
        if not free:
            return False
        worker = min(free, key=lambda each: len(each.jobs))
        self._last += 1
        number = self._last
        try:
            socket.send_fds(worker.link, [JOB.pack(number, start, stop)], [sock.fileno(), fd])
        except OSError:  # it is dying, or its queue is full
            return False
        if not worker.jobs:
            worker.heard_s = time.monotonic()
        done = worker.jobs[number] = asyncio.get_running_loop().create_future()
        if not await done:
            raise bulk.Cut("the process that sends segments could not")
        return True

    def stop(self) -> None:
        """End the processes; waits briefly. Called when the loop has stopped."""
        self._stopped = True
        workers, self._workers = self._workers, []
        for each in workers:
            each.link.close()
        for each in (*workers, *self._lost):
            _end(each)
        self._lost.clear()

    # --- in the loop ------------------------------------------------------------------------------

    def _begin(self) -> bool:
        try:
            worker = _Worker()
        except OSError as error:
            log.warning("cannot start a process that sends segments: %s", error)
            return False
        self._workers.append(worker)
        asyncio.get_running_loop().add_reader(worker.link, self._hear, worker)
        return True

    def _hear(self, worker: _Worker) -> None:
        while True:
            try:
                message = worker.link.recv(64)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if len(message) != DONE.size:
                self._lose(worker)
                return
            worker.heard_s = time.monotonic()
            number, sent = DONE.unpack(message)
            done = worker.jobs.pop(number, None)
            if done is not None and not done.done():
                done.set_result(sent)

    def _lose(self, worker: _Worker) -> None:
        """It died: what it was sending is cut, and another one takes its place."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(worker.link)
        worker.link.close()
        with contextlib.suppress(ValueError):
            self._workers.remove(worker)
        for done in worker.jobs.values():
            if not done.done():
                done.set_result(False)
        worker.process.kill()
        self._lost.append(worker)
        log.warning("process %d that sends segments has ended", worker.process.pid)
        # It may die at once again: not more often than this.
        loop.call_later(RESTART_S, self._replace, worker)

    def _replace(self, worker: _Worker) -> None:
        _end(worker)
        with contextlib.suppress(ValueError):
            self._lost.remove(worker)
        if not self._stopped and len(self._workers) < self._number and not self._begin():
            asyncio.get_running_loop().call_later(LOOK_S, self._replace, worker)

    def _look(self) -> None:
        now_s = time.monotonic()
        for worker in [each for each in self._workers if each.jobs]:
            if now_s - worker.heard_s > SILENCE_S:
                self._lose(worker)
                continue
            with contextlib.suppress(OSError):
                worker.link.send(JOB.pack(0, 0, 0))
        if not self._stopped:
            asyncio.get_running_loop().call_later(LOOK_S, self._look)


def _end(worker: _Worker) -> None:
    """Reap it; its end of the pair is closed, so it ends by itself."""
    try:
        worker.process.wait(END_S)
    except subprocess.TimeoutExpired:
        worker.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(END_S)


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # A checkout that is not installed must be found from another working folder.
    root = Path(__file__).parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        parts = [str(root), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, parts))
    return environment
