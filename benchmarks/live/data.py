"""Scenario ``data``: the data cache against the loader that it wraps."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from benchmarks import engines
from benchmarks.live.bench import Bench
from benchmarks.live.data_rank import READY
from benchmarks.live.runs import RunError
from benchmarks.processes import ROOT

KIB = 512
"""Of a row; eight are a batch of 4 MiB."""
MEMORY_KIB = 2048
RANKS = 4
SAMPLES = 10


def data(bench: Bench) -> None:
    """First batch after a restart, time of a step, memory of four ranks that share rows."""
    repeat = 2 if bench.quick else 10
    bench.report("restarts", 0, 3)
    found = _measured(bench, "restart", KIB, repeat)
    for method, target in (("fork", 0.1), ("spawn", 0.01)):
        bench.ratio(
            f"first batch after a restart, workers that are started by {method}",
            found["cache"], found[method], limit_name="the loader", target=target,
            note="A new loader with the state of a checkpoint, two workers, batches of 4 MiB.",
        )  # fmt: skip
    bench.report("steps", 1, 3)
    found = _measured(bench, "steps", KIB, 40 if bench.quick else 400)
    bench.ratio(
        "time of a step with the cache", found["with"], found["without"],
        limit_name="without", target=1.02,
        note="The same loader, in turns of 20 steps of about 50 ms, without the first 5 of each.",
    )  # fmt: skip
    bench.report("memory", 2, 3)
    none, loaders, cache = (_memory(bench, mode) for mode in (2, 0, 1))
    bench.ratio(
        "memory for batches of four ranks that share rows",
        [each - min(none) for each in cache], [each - min(none) for each in loaders],
        limit_name="4 loaders", target=0.3, unit="MiB",
        note="Ranks, workers and files, above ranks without batches. Batches of 16 "
        "MiB, four workers in each loader, ahead 2, behind 2.",
    )  # fmt: skip


@contextlib.contextmanager
def _folder(bench: Bench) -> Iterator[Path]:
    bench.count += 1
    folder = bench.shm / f"data-{bench.count}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        engines.stop_agents(folder / "rt")


@contextlib.contextmanager
def _rank(folder: Path, *words: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.live.data_rank", *map(str, words)]
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _line(folder: Path, source: IO[str] | None) -> str:
    found = source.readline() if source is not None else ""
    if not found:
        raise RunError(f"a rank failed:\n{(folder / 'log').read_text()[-4000:]}")
    return found


def _measured(bench: Bench, mode: str, *numbers: int) -> dict[str, list[float]]:
    with _folder(bench) as folder, _rank(folder, mode, folder, *numbers) as rank:
        found: dict[str, list[float]] = json.loads(_line(folder, rank.stdout))
        return found


def _memory(bench: Bench, mode: int) -> list[float]:
    """MiB of all processes and files, several times."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder(bench))
        words = ("memory", folder, MEMORY_KIB, mode)
        ranks = [stack.enter_context(_rank(folder, *words)) for _ in range(RANKS)]
        for rank in ranks:
            assert _line(folder, rank.stdout).strip() == READY
        found = []
        for _ in range(SAMPLES):
            time.sleep(0.3)  # samples over several steps
            stored = sum(path.stat().st_size for path in folder.glob("rt/data/*/*/*"))
            found.append(sum(_pss_mib(rank.pid) for rank in ranks) + stored / (1 << 20))
        (folder / "enough").touch()
        for rank in ranks:
            rank.wait(60)
    return found


def _pss_mib(pid: int) -> float:
    """The proportional set size of a process and all that it has started, without entries."""
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
        children = Path(f"/proc/{pid}/task").glob("*/children")
        below = [int(child) for each in children for child in each.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    kib, is_entry = 0, False
    for line in lines:
        name, *words = line.split()
        if not name.endswith(":"):
            is_entry = "/rt/data/" in line  # counted as files
        elif name == "Pss:" and not is_entry:
            kib += int(words[0])
    return kib / 1024 + sum(map(_pss_mib, below))
