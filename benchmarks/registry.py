"""All scenarios by name, in the order in which they run, with what each needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.measure import Row
from benchmarks.processes import Spawner
from benchmarks.scenarios import (
    agent,
    async_save,
    baseline,
    device,
    disk,
    export,
    load,
    peer,
    peer_load,
    recovery_plan,
    replication,
    s3_load,
    s3_others,
    s3_upload,
    save,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario: it runs alone, with empty folders of its own and an agent of its own."""

    name: str
    title: str
    run: Callable[[Spawner], list[Row]]
    memory_states: float
    """Most memory that it needs at once, private and tmpfs, in sizes of the state.

    A slot counts 1.125, which is its size class: a process with its tensors and the target
    of the memcpy limit, and a ring of two slots (three with a spill).
    """
    timeout_s: float = 150.0
    s3: bool = False
    """It needs the S3 server, which all such scenarios of a run share."""
    missing: Callable[[], str | None] = lambda: None
    """Why it cannot run here; None: it can."""


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(name="save", title="steady-state save, 1 rank", run=save.steady, memory_states=4.3),
    Scenario(
        name="ranks", title="steady-state save, 2 ranks", run=save.two_ranks, memory_states=4.3
    ),
    Scenario(name="async", title="async_save, 1 rank", run=async_save.one_rank, memory_states=5.4),
    Scenario(
        name="async-process",
        title="async_save in a process",
        run=async_save.in_a_process,
        memory_states=5.4,
    ),
    Scenario(
        name="async-2", title="async_save, 2 ranks", run=async_save.two_ranks, memory_states=5.4
    ),
    Scenario(
        name="async-4", title="async_save, 4 ranks", run=async_save.four_ranks, memory_states=5.4
    ),
    Scenario(name="small", title="100 small tensors", run=save.small, memory_states=0.3),
    Scenario(name="first", title="first saves", run=save.first, memory_states=3.4),
    Scenario(name="load", title="load in the same process", run=load.warm, memory_states=4.3),
    Scenario(
        name="fresh",
        title="load in a fresh process",
        run=load.fresh,
        memory_states=4.4,
        timeout_s=300.0,
    ),
    Scenario(name="spill", title="spill to disk", run=disk.spill, memory_states=4.5),
    Scenario(name="disk", title="load from disk", run=disk.disk_load, memory_states=4.5),
    Scenario(
        name="export",
        title="export from memory and disk",
        run=export.export,
        memory_states=4.5,
        timeout_s=600.0,
    ),
    Scenario(name="train", title="training while a spill runs", run=disk.train, memory_states=4.5),
    Scenario(name="agent", title="the agent itself", run=agent.agent, memory_states=0.3),
    Scenario(
        name="peer",
        title="fetch from another host",
        run=peer.peer,
        memory_states=1.2,
        timeout_s=400.0,
    ),
    Scenario(
        name="peer-load",
        title="load from another host",
        run=peer_load.peer_load,
        memory_states=4.8,
        timeout_s=300.0,
    ),
    Scenario(
        name="plan-1000",
        title="recovery plan of 1,000 hosts",
        run=recovery_plan.plan_1000,
        memory_states=0.3,
    ),
    Scenario(
        name="replication",
        title="copies on another host",
        run=replication.replication,
        memory_states=9.0,
        timeout_s=400.0,
    ),
    Scenario(
        name="s3-upload",
        title="spill to S3",
        run=s3_upload.upload,
        memory_states=3.2,
        timeout_s=900.0,
        s3=True,
    ),
    Scenario(
        name="s3-load",
        title="load from S3, whole and in parts",
        run=s3_load.load,
        memory_states=4.4,
        timeout_s=600.0,
        s3=True,
    ),
    Scenario(
        name="s3-export",
        title="export from S3",
        run=export.s3_export,
        memory_states=4.4,
        timeout_s=600.0,
        s3=True,
    ),
    Scenario(
        name="s3-others",
        title="other writers to S3",
        run=s3_others.others,
        memory_states=5.0,
        timeout_s=1800.0,
        s3=True,
    ),
    Scenario(
        name="device",
        title="tensors on a device",
        run=device.device,
        missing=device.missing,
        memory_states=25.0,
        timeout_s=300.0,
    ),
    Scenario(name="stock", title="stock DCP", run=baseline.baseline, memory_states=4.2),
)
