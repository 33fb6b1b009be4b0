"""The scenarios of live recovery, and how they are run: one that fails does not end the others."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.live import data, death, hosts, identical, kills, resize, steady, store, sync
from benchmarks.live.bench import Bench, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario, with its deadline."""

    name: str
    title: str
    run: Callable[[Bench], None]
    timeout_s: float


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(name="death", title="death of a rank", run=death.death, timeout_s=900.0),
    Scenario(name="host-lost", title="loss of a host", run=hosts.host_lost, timeout_s=600.0),
    Scenario(name="resize", title="another number of ranks", run=resize.resize, timeout_s=600.0),
    Scenario(
        name="hosts-identical",
        title="bits, hosts and ranks lost",
        run=hosts.hosts_identical,
        timeout_s=900.0,
    ),
    Scenario(
        name="many-kills",
        title="a training with many kills",
        run=kills.many_kills,
        timeout_s=4 * kills.CAP_S + 60.0,
    ),
    Scenario(name="identical", title="bits", run=identical.identical, timeout_s=1200.0),
    Scenario(name="generations", title="many generations", run=steady.generations, timeout_s=600.0),
    Scenario(name="store", title="the store of several hosts", run=store.store, timeout_s=300.0),
    Scenario(name="data", title="the data cache", run=data.data, timeout_s=300.0),
    Scenario(name="step-time", title="time of a step", run=steady.step_time, timeout_s=300.0),
    Scenario(name="sync", title="a step without communication", run=sync.sync, timeout_s=300.0),
)


def run_all(
    scenarios: Sequence[Scenario],
    shm: Path,
    disk: Path,
    *,
    quick: bool,
    device: str = "cpu",
    on_start: Callable[[Scenario], None],
    on_progress: Callable[[str, int, int], None],
    on_end: Callable[[Outcome], None],
) -> list[Outcome]:
    """Run all; never raises for a scenario's sake."""
    outcomes = []
    for scenario in scenarios:
        on_start(scenario)
        outcome = Outcome(name=scenario.name, title=scenario.title)
        bench = Bench(
            outcome=outcome,
            shm=shm / scenario.name,
            disk=disk / scenario.name,
            timeout_s=scenario.timeout_s,
            quick=quick,
            device=device,
            report=on_progress,
        )
        try:
            for folder in (bench.shm, bench.disk):
                folder.mkdir(mode=0o700)
            scenario.run(bench)
        except Exception as failure:  # noqa: BLE001  one scenario's failure must not end the others
            outcome.error = f"{type(failure).__name__}: {failure}"
        finally:
            for folder in (bench.shm, bench.disk):
                shutil.rmtree(folder, ignore_errors=True)
        outcome.seconds = round(time.monotonic() - bench.started_s, 2)
        outcomes.append(outcome)
        on_end(outcome)
    return outcomes
