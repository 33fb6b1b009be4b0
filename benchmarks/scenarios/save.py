"""How long ``dcp.save`` holds up training, and what it costs the kernel."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import engines, limits, stock
from benchmarks import state as states
from benchmarks.measure import Report, Row, Samples, interleave, ratio_row, slowest, summary
from benchmarks.processes import Setup, Spawner
from benchmarks.shapes import MIB

MEMCPY = "warm memcpy, 1 thread"
WARM_UP = 4
"""Saves before the first that counts: by then each slot of the ring has been written once."""


def _alternate(
    setup: Setup, report: Report, state: states.State, local: states.State, ranks: int
) -> Samples:
    """Memcpy, save, memcpy, save, ...: ``local`` is the memory behind ``state``."""
    sources = [states.octets(tensor) for tensor in local.values()]
    targets = states.resident_copy(local)
    faults: list[float] = []

    def together() -> None:
        if ranks > 1:
            dist.barrier()

    def memcpy(_number: int) -> float:
        together()
        return limits.memcpy(sources, targets)

    with engines.opened(setup) as engine:
        for step in range(WARM_UP):
            engines.save(engine, state, step)
        engines.wait_prefaulted(engine)

        def save(number: int) -> float:
            states.touch(local, number)
            together()
            seconds, count = engines.save_counting_faults(engine, state, WARM_UP + number)
            faults.append(count / (states.size_bytes(local) / MIB))
            return seconds

        samples = interleave(setup.repeat, report, {"memcpy": memcpy, "save": save})
        together()
    return samples | {"faults_per_mib": faults}


def steady_process(setup: Setup, report: Report) -> Samples:
    """One rank in its steady state."""
    state = states.filled(setup.shape)
    return _alternate(setup, report, state, state, 1)


def steady(spawn: Spawner) -> list[Row]:
    """Stall and page faults of a save in steady state, one rank."""
    samples = spawn.one(steady_process)
    work = spawn.setup.work_bytes
    return [
        ratio_row(
            "save",
            "dcp.save stall, steady state, 1 rank",
            samples,
            ours="save",
            limit="memcpy",
            limit_name=MEMCPY,
            work_bytes=work,
            target=0.75,
        ),
        Row(
            scenario="save",
            what="page faults per MiB in a steady-state save, p99",
            kind="at_most",
            value=summary(samples["faults_per_mib"]).p99,
            unit="",
            ours=summary(samples["faults_per_mib"]),
            ours_unit="",
            target=1.0,
        ),
    ]


def ranks_process(setup: Setup, report: Report) -> Samples:
    """One of several ranks, each with its rows of every tensor."""
    ranks = dist.get_world_size()
    local = states.filled(setup.shape, parts=ranks, seed=dist.get_rank())
    mesh = init_device_mesh("cpu", (ranks,))
    return _alternate(setup, report, states.sharded(local, mesh), local, ranks)


def two_ranks(spawn: Spawner) -> list[Row]:
    """Two ranks that save half of the state each, at the same time."""
    samples = slowest(spawn.ranks(2, ranks_process))
    return [
        ratio_row(
            "ranks",
            "dcp.save stall, 2 ranks at once (slower rank)",
            samples,
            ours="save",
            limit="memcpy",
            limit_name="2 memcpys at once (slower one)",
            work_bytes=spawn.setup.work_bytes,
            target=0.7,
            note=f"page faults per MiB, p99: {summary(samples['faults_per_mib']).p99:.2f}",
        )
    ]


def first_process(setup: Setup, report: Report, *, restart: bool, wait: bool) -> Samples:
    """The first save of a process, after a load if it is a restart.

    A process that never saved cannot know its size, so the very first save has nothing that
    could have been prefaulted unless the engine was told of the state beforehand.
    """
    state = states.empty(setup.shape) if restart else states.filled(setup.shape)
    samples: Samples = {}
    start_s = time.perf_counter()
    with engines.opened(setup) as engine:
        samples["open"] = [time.perf_counter() - start_s]
        if restart:
            samples["load"] = [engines.load(engine, state)]
        report(1, 3)
        if wait:
            samples["prefault"] = [engines.wait_prefaulted(engine)]
        step = 100 if restart else 0
        samples["first"] = [engines.save(engine, state, step)]
        report(2, 3)
        samples["second"] = [engines.save(engine, state, step + 1)]
        engines.wait_prefaulted(engine)
        for number in range(WARM_UP):
            engines.save(engine, state, step + 2 + number)
        samples["steady"] = [engines.save(engine, state, step + 2 + WARM_UP)]
        report(3, 3)
    return samples


def first(spawn: Spawner) -> list[Row]:
    """First saves: with new slots, and by a restarted trainer whose slots are still there."""
    cases = (
        ("first save ever", False, False),
        ("first save after a restart and a load", True, False),
        ("the same, prefault waited for", True, True),
    )
    rows = []
    for what, restart, wait in cases:
        samples = spawn.one(first_process, restart=restart, wait=wait)
        waited = f", waited {samples['prefault'][0]:.2f} s for it" if wait else ""
        rows.append(
            ratio_row(
                "first",
                what,
                samples,
                ours="first",
                limit="steady",
                limit_name="steady-state save, same process",
                work_bytes=spawn.setup.work_bytes,
                note=f"Engine.open {samples['open'][0]:.2f} s{waited}, "
                f"second save {samples['second'][0]:.2f} s",
                detail=("second",),
            )
        )
    return rows


def small_process(setup: Setup, report: Report) -> Samples:
    """Many small tensors, where only the cost per save counts."""
    torch.set_num_threads(1)  # starting threads for a few kilobytes is torch's cost, not a save's
    state = states.small()
    with engines.opened(setup) as engine:
        for step in range(WARM_UP):
            engines.save(engine, state, step)
            stock.planning(state)
        return interleave(
            5 * setup.repeat,
            report,
            {
                "planning": lambda _number: stock.planning(state),
                "save": lambda number: engines.save(engine, state, WARM_UP + number),
            },
        )


def small(spawn: Spawner) -> list[Row]:
    """Cost per save that does not depend on size: planning, requests, commit."""
    samples = spawn.one(small_process)
    ours, limit = summary(samples["save"]), summary(samples["planning"])
    return [
        Row(
            scenario="small",
            what="dcp.save of 100 small tensors (1 MB), beyond DCP's planning",
            kind="at_most",
            value=(ours.p50 - limit.p50) * 1e3,
            unit="ms",
            ours=ours,
            limit=limit,
            limit_name="stock DCP with a writer that writes nothing",
            target=3.0,
        )
    ]
