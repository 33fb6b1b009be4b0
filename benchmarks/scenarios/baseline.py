"""Stock DCP on this machine, against the same memcpy as ours."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks import limits, stock
from benchmarks import state as states
from benchmarks.measure import Report, Row, Samples, interleave, ratio_row
from benchmarks.processes import Setup, Spawner
from benchmarks.scenarios.save import MEMCPY


def stock_process(setup: Setup, report: Report) -> Samples:
    """Saves and loads by FileSystemWriter and -Reader, on the disk and in tmpfs."""
    state = states.filled(setup.shape)
    before = states.digest(state)
    sources = [states.octets(tensor) for tensor in state.values()]
    targets = states.resident_copy(state)
    disk, shm = Path(setup.disk) / "stock", Path(setup.shm) / "stock"
    durable: list[float] = []

    def memcpy(_number: int) -> float:
        return limits.memcpy(sources, targets)

    def stall(_number: int) -> float:
        seconds, whole = stock.async_save(state, disk)
        durable.append(whole)
        return seconds

    def load_shm(_number: int) -> float:
        seconds = stock.load(state, shm)
        shutil.rmtree(shm)  # the next part needs the memory
        return seconds

    samples = interleave(
        setup.repeat_slow,
        report,
        {
            "memcpy": memcpy,
            "save tmpfs": lambda _number: stock.save(state, shm),
            "load tmpfs": load_shm,
            "save disk": lambda _number: stock.save(state, disk),
            "load disk": lambda _number: stock.load(state, disk),
            "async stall": stall,
            "memcpy again": memcpy,
        },
    )
    assert states.digest(state) == before, "stock DCP loaded something else than it saved"
    samples["memcpy"] += samples.pop("memcpy again")
    return samples | {"async durable": durable}


def baseline(spawn: Spawner) -> list[Row]:
    """Rows of stock DCP; none has a target."""
    samples = spawn.one(stock_process)
    named = {
        "save disk": "stock FileSystemWriter, disk: stall",
        "save tmpfs": "stock FileSystemWriter, tmpfs: stall",
        "async stall": "stock async_save, disk: stall",
        "async durable": "stock async_save, disk: until it is durable",
        "load disk": "stock FileSystemReader, page cache, not verified",
        "load tmpfs": "stock FileSystemReader, tmpfs, not verified",
    }
    return [
        ratio_row(
            "stock",
            what,
            samples,
            ours=name,
            limit="memcpy",
            limit_name=MEMCPY,
            work_bytes=spawn.setup.work_bytes,
        )
        for name, what in named.items()
    ]
