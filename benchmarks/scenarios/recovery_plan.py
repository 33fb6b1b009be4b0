"""How long the recovery plan of a large job takes, and how that grows."""

from __future__ import annotations

import gc
import time
from functools import partial

from benchmarks.hosts import encoded_holdings
from benchmarks.measure import Report, Row, Samples, interleave, summary
from benchmarks.processes import Setup, Spawner
from tieredckpt.recovery.plan import plan_recovery
from tieredckpt.storage.holdings import Holdings, decode_holdings

RANKS_PER_HOST = 8
CHECKPOINTS = 5
LARGE = 1000
SMALL = 250
PLAN_S_MAX = 1.0
RATIO_MAX = 6.0
"""4 if it is linear, 16 if it is quadratic; the larger one also leaves the processor's cache."""


def plan_process(setup: Setup, report: Report) -> Samples:
    """Decode what the hosts say, and plan, for both sizes in turn."""
    said = {hosts: encoded_holdings(hosts, RANKS_PER_HOST, CHECKPOINTS) for hosts in (SMALL, LARGE)}
    held = {hosts: [decode_holdings(data) for data in each] for hosts, each in said.items()}
    parts = {f"plan {hosts}": partial(_plan_s, held[hosts]) for hosts in said}
    parts |= {f"decode {hosts}": partial(_decode_s, said[hosts]) for hosts in said}
    return interleave(max(setup.repeat // 4, 5), report, parts)


def _plan_s(holdings: list[Holdings], _number: int) -> float:
    gc.collect()
    begun_s = time.process_time()
    plan = plan_recovery(holdings, unreachable={})
    seconds = time.process_time() - begun_s
    assert plan.chosen is not None
    assert len(plan.chosen.sources) == len(holdings) * RANKS_PER_HOST
    return seconds


def _decode_s(said: list[bytes], _number: int) -> float:
    gc.collect()
    begun_s = time.process_time()
    for data in said:
        decode_holdings(data)
    return time.process_time() - begun_s


def plan_1000(spawn: Spawner) -> list[Row]:
    """1,000 hosts with 8 segments and 5 checkpoints each, and each one's copies at another."""
    samples = spawn.one(plan_process)
    samples["all"] = [
        plan + decode
        for plan, decode in zip(samples[f"plan {LARGE}"], samples[f"decode {LARGE}"], strict=True)
    ]
    large, small = summary(samples[f"plan {LARGE}"]), summary(samples[f"plan {SMALL}"])
    both = summary(samples["all"])
    what = f"{LARGE} hosts x {RANKS_PER_HOST} segments x {CHECKPOINTS} checkpoints"
    return [
        Row(
            scenario="plan-1000",
            what=f"recovery plan, {what}",
            kind="at_most",
            value=both.p50,
            unit="s",
            ours=both,
            target=PLAN_S_MAX,
            note="processor time of the one thread that decodes the hosts' holdings, and plans; "
            f"the plan alone {large.p50:.2f} s",
            detail={name: summary(samples[name]) for name in samples if name != "all"},
        ),
        Row(
            scenario="plan-1000",
            what=f"the same, growth from {SMALL} to {LARGE} hosts",
            kind="at_most",
            value=large.least / small.least,
            unit="x",
            ours=large,
            limit=small,
            limit_name=f"{SMALL} hosts",
            target=RATIO_MAX,
            note="4 is linear; the fastest of each",
        ),
    ]
