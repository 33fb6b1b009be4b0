"""Starts measured processes: each function runs in its own fresh interpreter, or in several ranks.

A child gets its call as JSON on stdin and answers with JSON lines on a pipe of its own, so that
nothing printed by torch can be mistaken for a result. Its output goes to a log, whose end is
part of the error if it fails. A child that passes its deadline is killed.

With ``forked`` a child is forked where torch is imported already: a tenth of the processor time,
for runs whose figures mean nothing.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from benchmarks.measure import Report, Samples
from benchmarks.shapes import Shape

ROOT = Path(__file__).parent.parent
LOG_TAIL_BYTES = 3000


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a scenario measures with. All folders are its own, empty at its start."""

    shape: Shape
    shm: str
    """Folder in tmpfs: the agent's runtime folder lies below it."""
    disk: str
    """Folder on the disk that spills go to."""
    repeat: int
    """Rounds of what takes a fraction of a second."""
    repeat_slow: int
    """Rounds of what takes seconds."""

    @property
    def work_bytes(self) -> int:
        """Size of the state."""
        return self.shape.size_bytes


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is told to run."""

    module: str
    function: str
    setup: Setup
    options: dict[str, str | int | bool]
    rank: int
    ranks: int
    rendezvous: str


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What a child tells: how far it is, or its result."""

    done: int = 0
    total: int = 0
    samples: Samples | None = None


class ChildError(RuntimeError):
    """A measured process failed or passed its deadline; the text ends with its log's tail."""


Measured = Callable[..., Samples]
"""``function(setup, report, **options)``; must be importable by name."""


@dataclass(kw_only=True)
class Spawner:
    """Runs functions in child processes for one scenario, within one deadline for all of them."""

    setup: Setup
    timeout_s: float
    report: Callable[[str, int, int], None]
    """Called with (function, done, total) as the children report."""
    forked: bool = False
    """Fork from a server with torch imported, instead of a new interpreter."""
    bucket: str = ""
    """For scenarios of object tiers: a ``benchmarks.buckets.Bucket`` as JSON."""
    started_s: float = field(default_factory=time.monotonic)
    count: int = 0

    def one(self, function: Measured, **options: str | int | bool) -> Samples:
        """Run in one fresh process. Raises :class:`ChildError`."""
        return self.ranks(1, function, **options)[0]

    def ranks(self, number: int, function: Measured, **options: str | int | bool) -> list[Samples]:
        """Run in ``number`` processes at once, which form a gloo group if they are several."""
        self.count += 1
        stem = Path(self.setup.disk) / f"{self.count:03d}-{function.__name__}"
        children = [
            _Child(
                Call(
                    module=function.__module__,
                    function=function.__name__,
                    setup=self.setup,
                    options=options,
                    rank=rank,
                    ranks=number,
                    rendezvous=f"{stem}.rendezvous",
                ),
                Path(f"{stem}-{rank}.log"),
                forked=self.forked,
            )
            for rank in range(number)
        ]
        try:
            self._collect(children)
        finally:
            for child in children:
                child.end()
        return [child.result() for child in children]

    def _collect(self, children: list[_Child]) -> None:
        """Read all pipes until each is closed, one child has failed, or time is up."""
        with selectors.DefaultSelector() as selector:
            for child in children:
                selector.register(child.pipe, selectors.EVENT_READ, child)
            while selector.get_map():
                left_s = self.started_s + self.timeout_s - time.monotonic()
                ready = selector.select(max(0.0, left_s))
                if not ready:
                    names = ", ".join(child.name for child in children if not child.closed)
                    raise ChildError(f"{names}: not done within {self.timeout_s:.0f} s")
                for key, _ in ready:
                    child = key.data
                    for line in child.lines():
                        self.report(child.name, line.done, line.total)
                    if child.closed:
                        selector.unregister(key.fileobj)
                        # The other ranks would wait for a failed one until their own time-out.
                        child.result()


class _Child:
    """One running process and what it has told so far."""

    def __init__(self, call: Call, log: Path, *, forked: bool) -> None:
        self.name = f"{call.function}[{call.rank}]" if call.ranks > 1 else call.function
        self.log = log
        self.closed = False
        self.samples: Samples | None = None
        self._rest = b""
        self.pipe, theirs = os.pipe()
        try:
            self.process = (_fork if forked else _execute)(call, log, theirs)
        finally:
            os.close(theirs)

    def lines(self) -> list[Line]:
        """The lines that have arrived; remembers the result and the end."""
        data = os.read(self.pipe, 1 << 16)
        self.closed = not data
        *whole, self._rest = (self._rest + data).split(b"\n")
        found = [msgspec.json.decode(line, type=Line) for line in whole]
        for line in found:
            self.samples = line.samples or self.samples
        return [line for line in found if line.samples is None]

    def result(self) -> Samples:
        """What it measured. Raises ChildError if it ended without telling."""
        code = self.process.wait(timeout=30)
        if self.samples is None or code != 0:
            tail = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
            raise ChildError(f"{self.name} ended with exit code {code}\n{tail}")
        return self.samples

    def end(self) -> None:
        """Kill it if it still runs, and close the pipe."""
        if self.process.poll() is None:
            # A child that has told its result only tears down its interpreter.
            try:
                self.process.wait(timeout=10 if self.closed else 0.1)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        os.close(self.pipe)


def _execute(call: Call, log: Path, pipe: int) -> subprocess.Popen[bytes]:
    """A new interpreter, which gets its call on stdin."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.processes", str(pipe)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            pass_fds=[pipe],
            cwd=ROOT,
            env=_environment(call),
        )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(call))
    process.stdin.close()
    return process


def _fork(call: Call, log: Path, pipe: int) -> _Forked:
    """A fork of the server, which is started by the first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.preloaded"])
    theirs = Connection(os.dup(pipe), readable=False)
    try:
        # No daemon: those may not start processes of their own, as an asynchronous save does.
        process = context.Process(
            target=_forked_main, args=(msgspec.json.encode(call), str(log), theirs)
        )
        process.start()
    finally:
        theirs.close()
    return _Forked(process)


class _Forked:
    """As much of :class:`subprocess.Popen` as is used of it."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()


def _forked_main(call_json: bytes, log: str, pipe: Connection) -> None:
    """The child's side of :func:`_fork`."""
    call = msgspec.json.decode(call_json, type=Call)
    out = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    for fd in (1, 2):
        os.dup2(out, fd)
    os.close(out)
    os.chdir(ROOT)
    environment = _environment(call)
    os.environ.clear()
    os.environ.update(environment)
    if call.ranks > 1:
        import torch

        torch.set_num_threads(1)  # it has read OMP_NUM_THREADS before the fork
    _answer(call, pipe.fileno())


def _environment(call: Call) -> dict[str, str]:
    """As torchrun would set it; nothing of the machine's own tieredckpt settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TIEREDCKPT_")}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    ranks = {
        "RANK": call.rank,
        "LOCAL_RANK": call.rank,
        "WORLD_SIZE": call.ranks,
        "LOCAL_WORLD_SIZE": call.ranks,
    }
    if call.ranks > 1:
        ranks["OMP_NUM_THREADS"] = 1
    return kept | {"PYTHONPATH": path} | {name: str(value) for name, value in ranks.items()}


def main() -> None:
    """The side of a child that is no fork: its call is on stdin, the pipe's number in argv[1]."""
    _answer(msgspec.json.decode(sys.stdin.buffer.read(), type=Call), int(sys.argv[1]))


def _answer(call: Call, fd: int) -> None:
    """Run one call and write its result to ``fd``."""
    with os.fdopen(fd, "wb", buffering=0, closefd=False) as pipe:

        def tell(line: Line) -> None:
            pipe.write(msgspec.json.encode(line) + b"\n")

        report: Report = lambda done, total: tell(Line(done=done, total=total))  # noqa: E731
        function = getattr(importlib.import_module(call.module), call.function)
        if call.ranks > 1:
            samples = _in_group(call, lambda: function(call.setup, report, **call.options))
        else:
            samples = function(call.setup, report, **call.options)
        tell(Line(samples=samples))


def _in_group(call: Call, action: Callable[[], Samples]) -> Samples:
    """Run ``action`` inside a gloo group of all ranks of the call."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{call.rendezvous}",
        rank=call.rank,
        world_size=call.ranks,
    )
    try:
        return action()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
