"""Ranks as real processes that outlive scenarios: starting them costs more than most scenarios.

There is one crew per number of ranks. A crew in which a rank failed, hung or died is ended and
replaced, since nobody knows what its collectives are waiting for.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tieredckpt.testing.dcp.scenario import ALONE

START_S = 120.0
"""How long the first ranks may take: the fork server imports torch before it."""

GRACE_S = 4.0
"""How long the other ranks may go on after one has failed: to fail as well, and to say why."""

LOG_BYTES_SHOWN = 1500

PRELOAD = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel",
    # What torch and numpy import at the first DTensor, the first save and the first load: a second
    # of processor time for every rank. (Modules that a version of torch lacks are left out.)
    "torch._dynamo",
    "torch._inductor.test_operators",
    "torch.onnx",
    "torch._functorch.deprecated",
    "torch.utils.serialization.config",
    "numpy.random",
    "numpy.fft",
    "tieredckpt.testing.dcp.job",
    "tieredckpt.testing.dcp.scenarios",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a rank is told to do."""

    scenario: str
    stage: int
    found: Any
    """The storage class, or factory, under test."""
    folder: Path
    meeting: Path
    """File of the store through which the ranks meet."""
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """How a rank ended its stage."""

    outcome: str
    """"done", "raised", "died" or "hangs"."""
    text: str = ""
    """A traceback, or what the process wrote last."""


class Crew:
    """Processes with one gloo group, or one process without any.

    Args:
        size: Number of ranks; ``ALONE``: no process group.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = Path(tempfile.mkdtemp(prefix="dcp-crew-"))
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        context = multiprocessing.get_context("forkserver")
        # No effect if some other code has started the fork server: then ranks start slower.
        context.set_forkserver_preload(list(PRELOAD))
        complete = False
        try:
            for rank in range(max(size, 1)):
                mine, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main, args=(theirs, size, rank, str(self._folder))
                )
                process.start()
                theirs.close()
                self._ranks.append((process, mine))
            for answer in self._collect(START_S, frozenset()):
                if answer.outcome != "done":
                    raise RuntimeError(f"a rank did not start:\n{answer.text}")
            complete = True
        finally:
            if not complete:
                self.end()

    def run(self, task: Task, killed: frozenset[int]) -> list[Answer]:
        """Do one stage on all ranks; who is in ``killed`` must die, the rest is then killed."""
        for _, pipe in self._ranks:
            pipe.send(task)
        return self._collect(task.deadline_s, killed)

    def _collect(self, deadline_s: float, killed: frozenset[int]) -> list[Answer]:
        until_s = time.monotonic() + deadline_s
        answers: dict[int, Answer] = {}
        numbers = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while len(answers) < len(self._ranks):
            if killed and killed <= answers.keys():
                break  # a launcher ends the others when it sees a rank die
            open_pipes = [pipe for pipe, rank in numbers.items() if rank not in answers]
            ready = wait(open_pipes, max(0.0, until_s - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    answers[numbers[pipe]] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[numbers[pipe]] = Answer("died", self._log_of(numbers[pipe]))
                if answers[numbers[pipe]].outcome != "done":
                    # It has failed. The others may be waiting for this rank, for ever.
                    until_s = min(until_s, time.monotonic() + GRACE_S)
        return [
            answers.get(rank) or Answer("hangs", self._log_of(rank))
            for rank in range(len(self._ranks))
        ]

    def _log_of(self, rank: int) -> str:
        try:
            return (self._folder / f"log{rank}").read_text(errors="replace")[-LOG_BYTES_SHOWN:]
        except OSError:  # it never came so far
            return ""

    def end(self) -> None:
        """End the processes: by closing their pipes, or else by force."""
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(0.2)
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks = []
        shutil.rmtree(self._folder, ignore_errors=True)


class Crews:
    """A crew of each size, made when it is first needed."""

    def __init__(self) -> None:
        self._crews: dict[int, Crew] = {}
        self._holders = 0

    def of(self, size: int) -> Crew:
        """The crew of ``size`` ranks."""
        if size not in self._crews:
            self._crews[size] = Crew(size)
        return self._crews[size]

    def replace(self, size: int) -> None:
        """End the crew of this size; the next use makes a new one."""
        crew = self._crews.pop(size, None)
        if crew is not None:
            crew.end()

    @contextlib.contextmanager
    def held(self) -> Iterator[Crews]:
        """The crews live until the last of those who hold them lets go."""
        self._holders += 1
        try:
            yield self
        finally:
            self._holders -= 1
            if not self._holders:
                for size in list(self._crews):
                    self.replace(size)


SHARED = Crews()
"""The crews of this process: several suites, one after the other, use the same ranks."""


# --- in the rank ----------------------------------------------------------------------------------


def _rank_main(pipe: Connection, size: int, rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    log = os.open(f"{folder}/log{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    world = max(size, 1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    if size != ALONE:
        store = dist.FileStore(f"{folder}/group", size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=80)
        )
    pipe.send(Answer("done"))
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            break
        pipe.send(_do(task, rank, world))
    # Not through the interpreter's end: threads of a failed scenario may hang in a collective.
    os._exit(0)


def _do(task: Task, rank: int, world: int) -> Answer:
    import torch
    import torch.distributed as dist

    from tieredckpt.testing.dcp.job import Job
    from tieredckpt.testing.dcp.scenario import SCENARIOS

    importlib.import_module("tieredckpt.testing.dcp.scenarios")
    torch.manual_seed(0)
    job: Job | None = None
    try:
        store = dist.FileStore(str(task.meeting), world)
        job = Job(task.found, task.folder, task.stage, rank, world, store)
        SCENARIOS[task.scenario].body(job)
        # Also, nobody closes while another still reads from it.
        job.meet()
        job.close()
    except BaseException:  # noqa: BLE001 (the answer; what follows is another scenario)
        if job is not None:
            with contextlib.suppress(Exception):
                job.close()
        return Answer("raised", traceback.format_exc())
    return Answer("done")
