"""How long after a save its copy is safe on another host, and what training feels of the copying.

Two ranks with an agent each, as two hosts on loopback addresses: rank 0 holds the state, the agent
of rank 1 keeps the copy. Both hosts share this machine's cores, as the raw limit's ends do.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import engines
from benchmarks import state as states
from benchmarks.measure import Report, Row, Samples, explore, ratio_row, summary, timed
from benchmarks.peer_limits import BUFFERS, RECEIVERS, SENDERS, RawPeer
from benchmarks.processes import Setup, Spawner
from benchmarks.scenarios.disk import MATMUL, STEPS_ALONE
from benchmarks.shapes import MIB
from tieredckpt import Engine

REPLICATED = "replicated"
CONNECTIONS = 3
"""As many as a pull uses."""
EXPLORE_ROUNDS = 2
WARM_UP = 3
"""Saves that make the slots of both hosts."""


@contextlib.contextmanager
def _host(setup: Setup, limit: str | None) -> Iterator[Engine]:
    """This rank's engine, with an agent of its own."""
    rank = dist.get_rank()
    folder = Path(setup.shm) / f"host{rank}"
    folder.mkdir(mode=0o700)
    os.environ["TIEREDCKPT_NODE_NAME"] = f"host{rank}"
    capacity = f"{setup.work_bytes * 5 // MIB + 64}MiB"
    memory: dict[str, object] = {"capacity": capacity, "keep": {"last": 1}, "replicas": 1}
    if limit is not None:
        memory["replication_bandwidth"] = limit
    config = engines.config(setup, spill=False) | {
        "memory": memory,
        "network": {"cidr": f"127.0.{rank + 1}.1/32"},
        "agent": {"runtime_dir": str(folder)},
    }
    with Engine.open(config) as engine:
        yield engine


def _state(setup: Setup) -> states.State:
    """All of it on rank 0; next to nothing on rank 1, which has to write something."""
    if dist.get_rank() == 0:
        return states.filled(setup.shape)
    return {"other": torch.zeros(1024)}


def _lag(engine: Engine, step: int) -> float:
    """Seconds from the end of a save to the word that all copies are there."""
    start_s = time.perf_counter()
    engine.wait(step, REPLICATED, engines.WAIT_S)
    return time.perf_counter() - start_s


def _slot_of(folder: Path, least: int) -> Path:
    for path in sorted((folder / "slots").iterdir()):
        with path.open("rb") as file:
            if path.stat().st_size >= least and any(file.read(4096)):
                return path
    raise FileNotFoundError("no slot holds anything")


def _raw_methods(raw: RawPeer, target: memoryview) -> dict[str, Callable[[], float]]:
    return {
        f"raw: {sender} -> {receiver}, buffers {buffer >> 20} MiB": partial(
            timed, partial(raw.fetch, target, CONNECTIONS, sender, receiver, buffer)
        )
        for sender in SENDERS
        for receiver in RECEIVERS
        for buffer in BUFFERS
    }


def lag_process(setup: Setup, report: Report) -> Samples:
    """One of two ranks: raw fetch, save and wait, raw fetch, ...; rank 0 measures."""
    state = _state(setup)
    samples: Samples = {"lag": [], "raw": []}
    rounds = max(setup.repeat_slow, 2)
    with _host(setup, None) as engine, contextlib.ExitStack() as stack:
        for step in range(WARM_UP):
            engines.save(engine, state, step)
            _lag(engine, step)
        engines.wait_prefaulted(engine)
        fetch: Callable[[], float] | None = None
        if dist.get_rank() == 0:
            raw = RawPeer(str(_slot_of(Path(setup.shm) / "host0", setup.work_bytes)))
            stack.callback(raw.close)
            target = memoryview(mmap.mmap(-1, setup.work_bytes))
            target[:] = bytes(1) * len(target)  # warm: no page fault is measured
            methods = _raw_methods(raw, target)
            best, tried = explore(methods, rounds=EXPLORE_ROUNDS)
            fetch, samples = methods[best], samples | tried
        for number in range(rounds):
            dist.barrier()
            if fetch is not None:
                samples["raw"].append(fetch())
            dist.barrier()
            engines.save(engine, state, WARM_UP + number)
            samples["lag"].append(_lag(engine, WARM_UP + number))
            report(number + 1, rounds)
        dist.barrier()
    return samples


def train_process(setup: Setup, report: Report, *, limit: str) -> Samples:
    """One of two ranks: training steps on rank 0, alone and while a limited copy is pulled."""
    state = _state(setup)
    weights, batch = torch.randn(MATMUL, MATMUL), torch.randn(MATMUL, MATMUL)

    def step_s() -> float:
        start_s = time.perf_counter()
        hidden = batch
        for _ in range(4):
            hidden = torch.tanh(hidden @ weights)
        return time.perf_counter() - start_s

    samples: Samples = {"alone": [], "copying": []}
    rounds = max(setup.repeat_slow, 2)
    with _host(setup, limit) as engine:
        for number in range(rounds + 1):
            dist.barrier()
            alone = [step_s() for _ in range(STEPS_ALONE)] if dist.get_rank() == 0 else []
            dist.barrier()
            engines.save(engine, state, number)
            during = _steps_while(engine, number, step_s)
            if number:  # the first round makes the slots
                samples["alone"] += alone
                samples["copying"] += during
            report(number, rounds)
        dist.barrier()
    return samples


def _steps_while(engine: Engine, number: int, step_s: Callable[[], float]) -> list[float]:
    """Times of steps until the copy is there; rank 1 only waits."""
    if dist.get_rank() != 0:
        engine.wait(number, REPLICATED, engines.WAIT_S)
        return []
    done = threading.Event()

    def wait() -> None:
        try:
            engine.wait(number, REPLICATED, engines.WAIT_S)
        finally:
            done.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    during = [step_s()]
    while not done.is_set():
        during.append(step_s())
    waiter.join()
    return during


def _clean(spawn: Spawner) -> None:
    for rank in range(2):
        folder = Path(spawn.setup.shm) / f"host{rank}"
        engines.stop_agents(folder)
        shutil.rmtree(folder)


def replication(spawn: Spawner) -> list[Row]:
    """Lag of a copy against the raw fetch of the same bytes; training beside a limited copy."""
    size = spawn.setup.work_bytes
    samples = spawn.ranks(2, lag_process)[0]
    _clean(spawn)
    tried = [name for name in samples if name.startswith("raw: ")]
    best = min(tried, key=lambda name: min(samples[name]))
    link = size / summary(samples["raw"]).p50
    limit = f"{max(1, int(link / 2) // MIB)}MiB/s"
    training = spawn.ranks(2, train_process, limit=limit)[0]
    _clean(spawn)
    return [
        ratio_row(
            "replication",
            f"a save's copy on another host ({size / MIB:.0f} MiB), from commit to k of k",
            samples,
            ours="lag",
            limit="raw",
            limit_name=f"best raw sendfile/send -> recv_into, {CONNECTIONS} sockets",
            work_bytes=size,
            target=0.7,
            note=best,
            detail=tried,
        ),
        ratio_row(
            "replication",
            f"training step while a copy is pulled at {limit} (half the link)",
            training,
            ours="copying",
            limit="alone",
            limit_name="the same step alone",
            work_bytes=0,
            note="1.0: training does not feel it; both hosts share this machine's cores",
        ),
    ]
