"""Scenario ``death``: from the death of a rank to the first new update."""

from __future__ import annotations

from benchmarks.live.bench import Bench
from benchmarks.live.journal import Recovery, Restart, restart_after
from benchmarks.live.runs import Job
from benchmarks.measure import percentile

RANKS = (3, 0, 1)
"""That die, one per round."""
SLEEP_S = 0.05
SAVE_EVERY = 5
KILLED_STEP = 13
STEPS = 18
STANDBY, ALONE, TORCHRUN = "live, standby ready", "live, no standby", "torchrun + engine.load"
SIZE = 4


def death(bench: Bench) -> None:
    """The same script and kill three times, in turn."""
    ranks = RANKS[:1] if bench.quick else RANKS
    for loop in ("live", "engine"):  # so that torch is in the page cache, and ours is compiled
        bench.run("warming up", Job(loop=loop, steps=3))
    found: dict[str, list[tuple[Restart, Recovery | None]]] = {}
    rows = []
    for rank in ranks:
        for name in (STANDBY, TORCHRUN, ALONE):
            restart, recovery = _one(bench, name, rank)
            found.setdefault(name, []).append((restart, recovery))
            rows.append(_shown(name, rank, restart, recovery))
    seconds = {name: [each.updated for each, _ in of] for name, of in found.items()}
    lost = {name: [float(each.lost) for each, _ in of] for name, of in found.items()}
    against = "torchrun --standalone --monitor-interval 0.1, all ranks restarted, engine.load"
    bench.ratio(
        "death to first update, standby ready", seconds[STANDBY], seconds[TORCHRUN],
        limit_name=against, target=0.25,
    )  # fmt: skip
    bench.at_most(
        "death to first update, standby ready", seconds[STANDBY], unit="s", target=3.0
    )  # fmt: skip
    bench.at_most(
        "steps lost, standby ready", lost[STANDBY], value=max(lost[STANDBY]), unit="steps",
        target=0,
        note=f"torchrun lost {percentile(lost[TORCHRUN], 0.5):g}: it saves every {SAVE_EVERY}.",
    )  # fmt: skip
    bench.ratio(
        "death to first update, no standby", seconds[ALONE], seconds[TORCHRUN],
        limit_name=against, target=0.5,
    )  # fmt: skip
    bench.at_most("steps lost, no standby", lost[ALONE], value=max(lost[ALONE]), unit="steps",
                  target=0)  # fmt: skip
    bench.table(
        "Seconds since the death of a rank until all ranks ...",
        ("run", "rank", "are in train", "have their state", "have made an update", "steps lost",
         "stages of rank 0, by the supervisor"),
        rows,
    )  # fmt: skip


def _one(bench: Bench, name: str, rank: int) -> tuple[Restart, Recovery | None]:
    standby = 1 if name == STANDBY else 0
    job = Job(
        loop="engine" if name == TORCHRUN else "live",
        steps=STEPS,
        standby=standby,
        sleep_s=SLEEP_S,
        save_every=SAVE_EVERY,
        faults=((KILLED_STEP, rank, "kill"),),
        wait_started=SIZE + standby,
    )
    run = bench.run(f"{name}, rank {rank}", job)
    (fault,) = (each for each in run.events if each["kind"] == "kill")
    recovery = None
    if name != TORCHRUN:
        (recovery,) = run.recoveries
    return restart_after(run.events, fault), recovery


def _shown(name: str, rank: int, restart: Restart, recovery: Recovery | None) -> list[str]:
    stages = ""
    if recovery is not None:
        stages = ", ".join(f"{stage} {value:.2f}" for stage, value in recovery.stages.items())
        stages += f"; first update {recovery.seconds:.2f}"
    return [
        name, str(rank), f"{restart.begun:.2f}", f"{restart.loaded:.2f}",
        f"{restart.updated:.2f}", str(restart.lost), stages,
    ]  # fmt: skip
