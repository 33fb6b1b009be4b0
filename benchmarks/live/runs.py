"""Starts one training, follows it within a deadline, and leaves no process of it behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks import engines
from benchmarks.live.journal import Event, Recovery, events_of, recoveries_of
from benchmarks.processes import ROOT

POLL_S = 0.2
STOP_S = 45.0
"""Time for a launcher to end its ranks after SIGTERM."""
TAIL_CHARS = 4000
UNWIND_S = 10

Fault = tuple[int, int, Literal["kill", "raise"]]
"""Step, rank and kind."""
Loop = Literal["live", "engine", "dcp", "plain"]


class RunError(RuntimeError):
    """A training failed or passed its deadline; the text ends with the tail of its output."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training.

    Attributes:
        loop: "live": under ``tieredckpt run``; under torchrun: "engine" loads with ``engine.load``
            after a restart, "dcp" with stock DCP from a disk, "plain" saves nothing.
        sleep_s: In each step, in place of work.
        wait_started: Training begins when so many processes have imported everything.
        exact: The journal has losses, sample ids, scales and buffers.
        sample: The journal has descriptors, threads, children and memory per generation.
        rotated: Each process gets another rank in each generation.
        device: Of the model; "cuda" is shared by all ranks.
    """

    loop: Loop
    steps: int
    ranks: int = 4
    standby: int = 0
    sleep_s: float = 0.0
    save_every: int = 0
    faults: tuple[Fault, ...] = ()
    wait_started: int = 0
    exact: bool = False
    compiled: bool = False
    sample: bool = False
    rotated: bool = False
    device: str = "cpu"

    def command(self, folder: Path, disk: Path) -> list[str]:
        """What is started."""
        if self.loop == "live":
            module = "benchmarks.live.rotated" if self.rotated else "tieredckpt"
            found = [sys.executable, "-m", module, "run", "--standby", str(self.standby)]
            found += ["--unwind", str(UNWIND_S), "--grace", "5"]
        else:
            found = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            found += ["--monitor-interval", "0.1"]
        found += ["--max-restarts", "1000", "--nproc-per-node", str(self.ranks)]
        found += ["-m", "benchmarks.live.train", "--folder", str(folder), "--disk", str(disk)]
        found += ["--loop", self.loop, "--steps", str(self.steps), "--sleep", str(self.sleep_s)]
        found += ["--save-every", str(self.save_every), "--faults", json.dumps(self.faults)]
        found += ["--wait-started", str(self.wait_started), "--device", self.device]
        for name in ("exact", "compiled", "sample"):
            if getattr(self, name):
                found.append(f"--{name}")
        return found


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a training came to.

    Attributes:
        begun_s: Time of day at its start.
        seconds: From its start to the end of all processes, or to ``limit_s``.
        done: Whether it ended by itself; False: it was stopped at its limit.
    """

    begun_s: float
    seconds: float
    done: bool
    events: list[Event]
    output: list[str] = field(repr=False)

    @property
    def updates(self) -> list[Event]:
        """Those of all ranks."""
        return [event for event in self.events if event["kind"] == "update"]

    @property
    def recoveries(self) -> list[Recovery]:
        """As the supervisor reported them."""
        return recoveries_of(self.output)


def follow(
    job: Job,
    folder: Path,
    disk: Path,
    *,
    limit_s: float,
    report: Callable[[int, int], None],
    may_exceed: bool = False,
) -> Run:
    """Run ``job`` in two empty folders. Raises :class:`RunError` if it fails.

    Args:
        may_exceed: A training that passes ``limit_s`` is stopped and returned as it is.
    """
    folder.mkdir(mode=0o700)
    disk.mkdir()
    output = folder / "output"
    begun_s = time.time()
    with output.open("w") as out:
        process = subprocess.Popen(
            job.command(folder, disk),
            cwd=ROOT,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        done = _wait(process, folder / "journal", job.steps, begun_s + limit_s, report)
        seconds = time.time() - begun_s
    finally:
        _end(process)
        engines.stop_agents(folder)
    lines = output.read_text(errors="replace").splitlines()
    if (done and process.returncode != 0) or not (done or may_exceed):
        ended = f"ended with exit code {process.returncode}" if done else "was not done"
        tail = "\n".join(lines)[-TAIL_CHARS:]
        raise RunError(f"{job.loop}: {ended} after {seconds:.0f} s\n{tail}")
    events = events_of((folder / "journal").read_text())
    return Run(begun_s=begun_s, seconds=seconds, done=done, events=events, output=lines)


def _wait(
    process: subprocess.Popen[bytes],
    journal: Path,
    steps: int,
    until_s: float,
    report: Callable[[int, int], None],
) -> bool:
    """Until it ends; False if it did not in time."""
    new = _newest_step(journal)
    while time.time() < until_s:
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            report(next(new), steps)
        else:
            return True
    return False


def _newest_step(journal: Path) -> Iterator[int]:
    """The step of the last line of the journal, each time."""
    step = 0
    while True:
        if journal.exists():
            with journal.open("rb") as file:
                file.seek(max(0, journal.stat().st_size - 4096))
                for line in file.read().split(b"\n")[1:-1]:
                    step = int(json.loads(line).get("step", step))
        yield step


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def environment(folder: Path) -> dict[str, str]:
    """The same for all launchers."""
    kept: dict[str, Any] = {
        name: value
        for name, value in os.environ.items()
        # Without compiled modules each restart would compile ours anew.
        if not name.startswith("TIEREDCKPT_") and name != "PYTHONDONTWRITEBYTECODE"
    }
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")])),
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else its sums differ between runs
        "PYTHONUNBUFFERED": "1",
        # Else a restart under torchrun 2.13 may find the addresses of the ranks before it.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "XDG_RUNTIME_DIR": str(folder),
        "TMPDIR": str(folder),
        # Only the first run of a scenario compiles; without a pool of processes for it.
        "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
