"""The way to the disk and back, and what training feels of it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks import engines, limits
from benchmarks import state as states
from benchmarks.machine import resident_bytes
from benchmarks.measure import Report, Row, Samples, explore, interleave, memory_row, ratio_row
from benchmarks.processes import Setup, Spawner
from benchmarks.scenarios.load import check_digest, digest_file
from benchmarks.shapes import MIB

MATMUL = 768
"""Rows of the square matrices of a training step: tens of milliseconds of work for two cores."""
STEPS_ALONE = 20


def _explored(setup: Setup, raw: Callable[[str], float]) -> tuple[str, Samples]:
    """The fastest way of direct I/O on this disk, and all that were tried."""
    variants = {name: partial(raw, name) for name in limits.DIRECT_VARIANTS}
    return explore(variants, rounds=min(2, setup.repeat_slow))


def spill_process(setup: Setup, report: Report) -> Samples:
    """Raw write, spill, raw write, spill, ...: same disk, same size, same promise."""
    state = states.filled(setup.shape)
    size = -(-setup.work_bytes // 4096) * 4096
    raw_file = Path(setup.disk) / "raw"

    def raw(variant: str) -> float:
        threads, piece_bytes = limits.DIRECT_VARIANTS[variant]
        try:
            return limits.direct_write(
                str(raw_file), size, threads=threads, piece_bytes=piece_bytes
            )
        finally:
            raw_file.unlink()

    best, tried = _explored(setup, raw)
    counted: list[float] = []
    with engines.opened(setup, spill=True) as engine:
        counters = engines.spill_counters(engine)

        def spill(number: int) -> float:
            nonlocal counters
            states.touch(state, number)
            engines.save(engine, state, number)
            start_s = time.perf_counter()
            engine.wait(number, engines.TIER, engines.WAIT_S)
            wall_s = time.perf_counter() - start_s
            before, counters = counters, engines.spill_counters(engine)
            seconds, moved = counters[1] - before[1], counters[0] - before[0]
            counted.append(seconds * setup.work_bytes / moved)
            engines.wait_idle(engine)
            return wall_s

        spill(0)  # makes the slots
        counted.clear()
        samples = interleave(
            setup.repeat_slow + 2,
            report,
            {"raw": lambda _number: raw(best), "wall": lambda number: spill(number + 1)},
        )
        (pid,) = engines.agents(engines.runtime_dir(setup))
        rss = [resident_bytes(pid) / 1e6]
    renamed = {f"raw write: {name}": found for name, found in tried.items()}
    return samples | renamed | {"counted": counted, "agent": rss}


def spill(spawn: Spawner) -> list[Row]:
    """Spill speed, by the agent's counters and by the clock, and the agent's memory after it."""
    samples = spawn.one(spill_process)
    tried = tuple(name for name in samples if name.startswith("raw write: "))
    best = min(tried, key=lambda name: min(samples[name]))
    rows = [
        ratio_row(
            "spill",
            what,
            samples,
            ours=ours,
            limit="raw",
            limit_name=best.replace("raw write", "raw O_DIRECT write + fsync"),
            work_bytes=spawn.setup.work_bytes,
            target=target,
            note=note,
            detail=detail,
        )
        for what, ours, target, note, detail in (
            ("spill to disk, by the agent's counters", "counted", 0.8, "", tried),
            (
                "spill to disk, engine.wait",
                "wall",
                None,
                "from the end of dcp.save until the checkpoint is committed on disk; the one "
                "before is deleted afterwards, which neither side counts",
                (),
            ),
        )
    ]
    what = "agent's own resident memory after spills"
    return [*rows, memory_row("spill", what, samples["agent"], "MB", 80.0, "slots not counted")]


def keeper_process(setup: Setup, _report: Report) -> Samples:
    """Leave one checkpoint on disk."""
    state = states.filled(setup.shape)
    digest_file(setup).write_text(states.digest(state))
    with engines.opened(setup, spill=True) as engine:
        engines.save(engine, state, 0)
        engine.wait(0, engines.TIER, engines.WAIT_S)
    return {"saved": [0.0]}


def disk_load_process(setup: Setup, report: Report) -> Samples:
    """Load what only the disk has, into resident tensors."""
    state = states.filled(setup.shape, seed=1)
    segment = engines.newest_segment(setup)
    size = segment.stat().st_size

    def raw(variant: str) -> float:
        threads, piece_bytes = limits.DIRECT_VARIANTS[variant]
        return limits.direct_read(str(segment), size, threads=threads, piece_bytes=piece_bytes)

    best, tried = _explored(setup, raw)
    with engines.opened(setup, spill=True) as engine:

        def load(_number: int) -> float:
            states.spoil(state)
            seconds = engines.load(engine, state)
            check_digest(setup, state)
            return seconds

        samples = interleave(
            setup.repeat_slow + 2, report, {"raw": lambda _number: raw(best), "load": load}
        )
    return samples | {f"raw read: {name}": found for name, found in tried.items()}


def disk_load(spawn: Spawner) -> list[Row]:
    """Recovery after the memory tier was lost."""
    spawn.one(keeper_process)
    engines.stop_agents(engines.runtime_dir(spawn.setup))
    shutil.rmtree(engines.runtime_dir(spawn.setup))
    samples = spawn.one(disk_load_process)
    tried = tuple(name for name in samples if name.startswith("raw read: "))
    best = min(tried, key=lambda name: min(samples[name]))
    return [
        ratio_row(
            "disk",
            "dcp.load from disk, verified",
            samples,
            ours="load",
            limit="raw",
            limit_name=best.replace("raw read", "raw O_DIRECT read"),
            work_bytes=spawn.setup.work_bytes,
            target=0.8,
            note="tensors resident; the memory tier was removed before",
            detail=tried,
        )
    ]


def train_process(setup: Setup, report: Report) -> Samples:
    """Steps of a small training loop, alone and while a spill runs in the agent."""
    state = states.filled(setup.shape)
    weights, batch = torch.randn(MATMUL, MATMUL), torch.randn(MATMUL, MATMUL)

    def step() -> float:
        start_s = time.perf_counter()
        hidden = batch
        for _ in range(4):
            hidden = torch.tanh(hidden @ weights)
        return time.perf_counter() - start_s

    samples: Samples = {"alone": [], "spilling": []}
    with engines.opened(setup, spill=True) as engine:
        for number in range(setup.repeat_slow + 1):
            states.touch(state, number)
            engines.wait_idle(engine)
            alone = [step() for _ in range(STEPS_ALONE)]
            engines.save(engine, state, number)
            done = threading.Event()

            def wait(number: int = number, done: threading.Event = done) -> None:
                try:
                    engine.wait(number, engines.TIER, engines.WAIT_S)
                finally:
                    done.set()

            waiter = threading.Thread(target=wait)
            waiter.start()
            during = [step()]
            while not done.is_set():
                during.append(step())
            waiter.join()
            if number:  # the first round makes the slots
                samples["alone"] += alone
                samples["spilling"] += during
            report(number, setup.repeat_slow)
    return samples


def train(spawn: Spawner) -> list[Row]:
    """How much slower steps are while a spill runs."""
    return [
        ratio_row(
            "train",
            f"training step while a spill runs ({spawn.setup.work_bytes / MIB:.0f} MiB)",
            spawn.one(train_process),
            ours="spilling",
            limit="alone",
            limit_name="the same step alone",
            work_bytes=0,
            note="1.0: training does not feel it",
        )
    ]
