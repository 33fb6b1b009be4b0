"""``bench recover``, the ranks' part: load, step, save for the next recovery, wait to be killed.

torchrun starts all ranks again once one of them is killed. Each generation leaves two files per
rank: ``<generation>.<rank>.json`` with its times after the first step, and ``<generation>.ready``
of rank 0, once the next checkpoint is in all tiers and no engine is open.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import torch.distributed.checkpoint as dcp

from tieredckpt.bench import state as states
from tieredckpt.bench.clean import tiers
from tieredckpt.bench.rank import Rank
from tieredckpt.bench.settings import Result, Times
from tieredckpt.engine import Engine
from tieredckpt.errors import IntegrityError, WaitError

FLUSH_S = 3600.0


def born_s() -> float:
    """When this process was started, by the monotonic clock (proc(5): field 22, since boot)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)


def recover(rank: Rank) -> Result:
    """Run one generation, until the command ends torchrun."""
    settings, generation = rank.settings, rank.generation
    folder = Path(settings.events)
    ends_s = [born_s(), rank.started_s, time.monotonic()]
    with Engine.open(settings.config or None) as engine:
        ends_s.append(time.monotonic())
        step = engine.load(dict(rank.state)) or 0
        ends_s.append(time.monotonic())
        states.change(rank.state, step)  # an update that changes nothing
        rank.gather(None)
        ends_s.append(time.monotonic())
        report = engine.last_restore
        digest = folder / f"content.{step}.{rank.number}"
        if step and digest.read_text() != states.content(rank.state):
            raise IntegrityError(f"step {step} was restored with another content")
        found = dict(report.bytes_by_tier) if report is not None else {}
        states.change(rank.state, step + 1)
        (folder / f"content.{step + 1}.{rank.number}").write_text(states.content(rank.state))
        dcp.save(dict(rank.state), storage_writer=engine.writer(step + 1))
        engine.wait(step + 1, "memory")
        flush(rank, engine)
        rank.gather(None)
    times = Times(ends_s=ends_s, pid=os.getpid(), bytes_by_tier=found)
    store(folder / f"{generation}.{rank.number}.json", times)
    result = rank.result()
    if rank.number == 0:
        store(folder / f"{generation}.ready", result)
    while Path(f"/proc/{settings.parent}").exists():
        time.sleep(0.5)
    return result


def flush(rank: Rank, engine: Engine) -> None:
    """Have the newest checkpoint in all tiers. Raises WaitError: it does not get there."""
    for name in tiers(rank.settings) if rank.number == 0 else ():
        if not engine.flush(name, FLUSH_S).done:
            raise WaitError(f"the checkpoint is not in {name} after {FLUSH_S:.0f} s")


def store(path: Path, content: msgspec.Struct) -> None:
    """Write a file that is there as a whole or not at all."""
    path.with_suffix(".part").write_bytes(msgspec.json.encode(content))
    path.with_suffix(".part").rename(path)
