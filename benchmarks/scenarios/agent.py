"""What the node agent itself costs: starting, memory, and the two requests of every save."""

from __future__ import annotations

import time

from benchmarks import engines
from benchmarks import state as states
from benchmarks.machine import resident_bytes
from benchmarks.measure import Report, Row, Samples, memory_row, summary
from benchmarks.processes import Setup, Spawner


def agent_process(setup: Setup, report: Report) -> Samples:
    """Open without and with a running agent, then time the requests of small saves."""
    folder = engines.runtime_dir(setup)
    samples: Samples = {"cold open": [], "warm open": [], "rss": []}
    for number in range(setup.repeat_slow):
        engines.stop_agents(folder)
        for name in ("cold open", "warm open"):
            start_s = time.perf_counter()
            with engines.opened(setup):
                samples[name].append(time.perf_counter() - start_s)
        report(number + 1, setup.repeat_slow + 1)
    state = states.small()
    with engines.opened(setup) as engine:
        with engines.timed_requests(engine) as requests:
            for step in range(max(setup.repeat, 10)):
                engines.save(engine, state, step)
        (pid,) = engines.agents(folder)
        samples["rss"].append(resident_bytes(pid) / 1e6)
    # The first saves send the plan and make the ring.
    return samples | {name: seconds[4:] for name, seconds in requests.items()}


def agent(spawn: Spawner) -> list[Row]:
    """Start, memory, seal and commit."""
    samples = spawn.one(agent_process)
    pairs = [a + b for a, b in zip(samples["seal"], samples["commit"], strict=True)]
    start, warm = summary(samples["cold open"]), summary(samples["warm open"])
    both = summary(pairs)
    return [
        Row(
            scenario="agent",
            what="Engine.open that starts the agent",
            kind="at_most",
            value=start.p50,
            unit="s",
            ours=start,
            target=1.0,
            note=f"with an agent running: {warm.p50 * 1e3:.1f} ms",
            detail={"agent running": warm},
        ),
        memory_row("agent", "agent's own resident memory, small state", samples["rss"], "MB", 80.0),
        Row(
            scenario="agent",
            what="seal + commit round trip",
            kind="report",
            value=both.p50 * 1e3,
            unit="ms",
            ours=both,
            note="the two requests of a steady-state save of one rank",
            detail={name: summary(samples[name]) for name in ("seal", "commit")},
        ),
    ]
