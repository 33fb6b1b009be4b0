"""How long ``engine.async_save`` holds up training; the rest of it is in the background."""

from __future__ import annotations

import time
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import engines, limits
from benchmarks import state as states
from benchmarks.measure import Report, Row, Samples, interleave, ratio_row, slowest
from benchmarks.processes import Setup, Spawner
from tieredckpt.testing.dcp.process_executor import meet_on_loopback

WARM_UP = 4
"""Saves before the first that counts: the first is staged in private memory, and by the last each
slot of the ring has been written once."""


def stall_process(
    setup: Setup, report: Report, *, executor: Literal["thread", "process"] = "thread"
) -> Samples:
    """One of the ranks: memcpy, stall, memcpy, stall, ... with nothing in the background."""
    if executor == "process":
        meet_on_loopback()
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if ranks > 1 else 0
    local = states.filled(setup.shape, parts=ranks, seed=rank)
    state = states.sharded(local, init_device_mesh("cpu", (ranks,))) if ranks > 1 else local
    sources = [states.octets(tensor) for tensor in local.values()]
    targets = states.resident_copy(local)
    ended: list[float] = []

    def together() -> None:
        if ranks > 1:
            dist.barrier()

    def memcpy(_number: int) -> float:
        together()
        return limits.memcpy(sources, targets)

    with engines.opened(setup) as engine:
        for step in range(WARM_UP):
            engine.async_save(state, step, executor=executor).result(engines.WAIT_S)
        engines.wait_prefaulted(engine)

        def stall(number: int) -> float:
            states.touch(local, number)
            together()
            start_s = time.perf_counter()
            future = engine.async_save(state, WARM_UP + number, executor=executor)
            stall_s = time.perf_counter() - start_s
            future.result(engines.WAIT_S)
            ended.append(time.perf_counter() - start_s)
            return stall_s

        samples = interleave(setup.repeat, report, {"memcpy": memcpy, "stall": stall})
        together()
    return samples | {"ended": ended}


def _stall(spawn: Spawner, ranks: int, executor: str = "thread") -> list[Row]:
    samples = slowest(spawn.ranks(ranks, stall_process, executor=executor))
    many = "1 rank" if ranks == 1 else f"{ranks} ranks at once (slowest rank)"
    limit = "warm memcpy, 1 thread" if ranks == 1 else f"{ranks} memcpys at once (slowest one)"
    return [
        ratio_row(
            "async",
            f"engine.async_save stall, {executor} executor, {many}",
            samples,
            ours="stall",
            limit="memcpy",
            limit_name=limit,
            work_bytes=spawn.setup.work_bytes,
            target=0.75 if ranks == 1 and executor == "thread" else None,
            detail=("ended",),
        )
    ]


def one_rank(spawn: Spawner) -> list[Row]:
    """The stall with the thread executor."""
    return _stall(spawn, 1)


def in_a_process(spawn: Spawner) -> list[Row]:
    """The stall with the process executor."""
    return _stall(spawn, 1, "process")


def two_ranks(spawn: Spawner) -> list[Row]:
    """The same of two ranks that have half of the state each."""
    return _stall(spawn, 2)


def four_ranks(spawn: Spawner) -> list[Row]:
    """The same of four ranks that have a quarter each."""
    return _stall(spawn, 4)
