"""Our way to S3 and back beside others': the same state, the same server, in turn."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from benchmarks import buckets, engines
from benchmarks import state as states
from benchmarks.measure import Report, Row, Samples, ratio_row, summary, timed
from benchmarks.object_limits import empty
from benchmarks.processes import Setup, Spawner
from benchmarks.s3_peers import OTHERS, Other
from benchmarks.scenarios.s3_load import lose_all_but_bucket

ROUNDS_MAX = 2
"""Each takes five saves to S3 and three loads."""
OURS = "ours"
METRICS = {
    "stall": ("save: until training goes on", 1.0),
    "durable": ("save: until it is in S3", 1.0),
    "save cpu": ("save: processor time", None),
    "load": ("load", 1.0),
    "load cpu": ("load: processor time", None),
}


class _Cpu:
    """Processor seconds of this process, and of an agent, since it was made."""

    def __init__(self, agent: int | None = None) -> None:
        self._agent = agent
        self._before = self._now()

    def _now(self) -> float:
        own = resource.getrusage(resource.RUSAGE_SELF)
        found = own.ru_utime + own.ru_stime
        if self._agent is not None:
            # After the name, which may hold anything: utime and stime are fields 14 and 15.
            fields = Path(f"/proc/{self._agent}/stat").read_text().rpartition(")")[2].split()
            found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return found

    def used_s(self) -> float:
        return self._now() - self._before


class _Measured(dict[str, list[float]]):
    """Samples by contender and metric."""

    def add(self, who: str, metric: str, value: float) -> None:
        self.setdefault(f"{who}: {metric}", []).append(value)


def others_process(setup: Setup, report: Report, *, bucket: str) -> Samples:
    """Round by round: everybody saves, the server frees the room; then everybody loads."""
    where = buckets.told(bucket)
    installed = [other for other in OTHERS if other.version is not None]
    rounds = min(ROUNDS_MAX, setup.repeat_slow)
    state = states.filled(setup.shape)
    found = _Measured()
    with buckets.opened(where, setup) as engine:
        (pid,) = engines.agents(engines.runtime_dir(setup))
        for number in range(rounds + 1):
            states.touch(state, number)
            cpu = _Cpu(pid)
            start_s = time.perf_counter()
            stall_s = engines.save(engine, state, number)
            engine.wait(number, buckets.TIER, buckets.WAIT_S)
            if number or rounds == 1:  # the first save makes the slots
                found.add(OURS, "stall", stall_s)
                found.add(OURS, "durable", time.perf_counter() - start_s)
                found.add(OURS, "save cpu", cpu.used_s())
            where.wait_pruned()
            for other in installed if number else ():
                _save(other, where, state, found)
            report(number, rounds)
    digest = states.digest(state)
    lose_all_but_bucket(setup)
    with buckets.opened(where, setup) as engine:
        (pid,) = engines.agents(engines.runtime_dir(setup))
        for _ in range(rounds):
            loads: dict[str, tuple[Callable[[], object], int | None]] = {
                OURS: (partial(engines.load, engine, state), pid)
            }
            for other in installed:
                reader = other.reader(where.raw(other.package))
                loads[other.name] = (
                    partial(state_dict_loader.load, state, storage_reader=reader),
                    None,
                )
            for name, (load, agent) in loads.items():
                states.spoil(state)
                cpu = _Cpu(agent)
                found.add(name, "load", timed(load))
                found.add(name, "load cpu", cpu.used_s())
                assert states.digest(state) == digest, f"{name} loaded something else"
    return dict(found)


def _save(other: Other, where: buckets.Bucket, state: states.State, found: _Measured) -> None:
    """By ``dcp.save``, which is durable when it returns, and by ``async_save``, for its stall."""
    at = where.raw(other.package)
    start_s = time.perf_counter()
    done = state_dict_saver.async_save(state, storage_writer=other.writer(at))
    found.add(other.name, "stall", time.perf_counter() - start_s)
    cast("Future[Any]", done).result()
    empty(at)
    where.vacuum()
    cpu = _Cpu()
    found.add(
        other.name,
        "durable",
        timed(lambda: state_dict_saver.save(state, storage_writer=other.writer(at))),
    )
    found.add(other.name, "save cpu", cpu.used_s())


def others(spawn: Spawner) -> list[Row]:
    """How many times as long (or as much) they take."""
    rows: list[Row] = []
    samples: Samples = {}
    if any(other.version is not None for other in OTHERS):
        samples = spawn.one(others_process, bucket=spawn.bucket)
    for other in OTHERS:
        if other.version is None:
            rows.append(_not_installed(other))
            continue
        rows += [
            ratio_row(
                "s3-others",
                f"{other.name}, {what}",
                samples,
                ours=f"{OURS}: {metric}",
                limit=f"{other.name}: {metric}",
                limit_name=f"{other.package} {other.version}",
                work_bytes=0 if "cpu" in metric else spawn.setup.work_bytes,
                target=target,
                note=NOTES.get(metric, ""),
            )
            for metric, (what, target) in METRICS.items()
        ]
    return rows


NOTES = {
    "stall": "ours by dcp.save, theirs by async_save: their dcp.save stalls until it is in S3",
    "durable": "ours from the begin of dcp.save to engine.wait, theirs by dcp.save",
    "save cpu": "of this process and our agent, until it is in S3; the server's is not counted",
    "load": "ours is verified",
    "load cpu": "of this process and our agent",
}


def _not_installed(other: Other) -> Row:
    return Row(
        scenario="s3-others",
        what=f"{other.name}: {other.package} is not installed",
        kind="report",
        value=0.0,
        unit="",
        ours=summary([0.0]),
        note="docs/understand/benchmarks.md explains how to install it in addition",
    )
