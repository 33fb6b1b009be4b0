"""Scenario ``many-kills``: the time of a long training whose ranks are killed again and again."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from benchmarks.live.bench import Bench
from benchmarks.live.journal import progress_of
from benchmarks.live.runs import Fault, Job, Run

STEPS = 1200
SLEEP_S = 0.05
FIRST, APART = 150, 200
SAVE_EVERY = 50
CAP_S = 600.0
SEED = 30
SIZE = 4
POINTS = 400
"""Of each line of the plot."""

UNDISTURBED, LIVE = "undisturbed", "live"
ON_DISK, IN_MEMORY = "torchrun + DCP on disk", "torchrun + engine.load"


def kills(steps: Sequence[int], seed: int, size: int) -> tuple[Fault, ...]:
    """A kill in the step after each of ``steps``, of ranks that are drawn; rank 0 is among them."""
    random = Random(seed)
    ranks = [random.randrange(size) for _ in steps]
    if 0 not in ranks:
        ranks[random.randrange(len(ranks))] = 0
    return tuple((step + 1, rank, "kill") for step, rank in zip(steps, ranks, strict=True))


def many_kills(bench: Bench) -> None:
    """Four runs of the same training, three of them with the same kills."""
    steps, after = STEPS, list(range(FIRST, STEPS, APART))
    if bench.quick:
        steps, after = 90, [30, 60]
    faults = kills(after, SEED, SIZE)
    jobs = {
        UNDISTURBED: Job(loop="plain", steps=steps, sleep_s=SLEEP_S),
        LIVE: Job(
            loop="live", steps=steps, sleep_s=SLEEP_S, standby=1, save_every=SAVE_EVERY,
            faults=faults,
        ),
        ON_DISK: Job(
            loop="dcp", steps=steps, sleep_s=SLEEP_S, save_every=SAVE_EVERY, faults=faults
        ),
        IN_MEMORY: Job(
            loop="engine", steps=steps, sleep_s=SLEEP_S, save_every=SAVE_EVERY, faults=faults
        ),
    }  # fmt: skip
    runs: dict[str, Run] = {}
    for name, job in jobs.items():
        run = bench.run(name, job, limit_s=CAP_S, may_exceed=True)
        runs[name] = run
        bench.plot("step over time", name, _thinned(progress_of(run.events, run.begun_s)))
    seconds = {name: [run.seconds] for name, run in runs.items()}
    killed = ", ".join(f"rank {rank} in step {step}" for step, rank, _ in faults)
    bench.ratio(
        f"{steps} steps, {len(faults)} kills", seconds[LIVE], seconds[UNDISTURBED],
        limit_name="an undisturbed run under torchrun that saves nothing", target=1.4,
        note=f"Killed: {killed}.{_stopped(runs)}",
    )  # fmt: skip
    for name in (ON_DISK, IN_MEMORY):
        bench.ratio(
            f"the same, against {name}", seconds[LIVE], seconds[name], target=1.0,
            limit_name=f"{name}, all ranks restarted, a save every {SAVE_EVERY} steps",
        )  # fmt: skip
    bench.table(
        f"{steps} steps of {SLEEP_S * 1e3:.0f} ms and their work, {len(faults)} kills",
        ("run", "seconds", "of undisturbed", "kills", "steps done twice", "last step"),
        [_shown(name, run, runs[UNDISTURBED]) for name, run in runs.items()],
    )
    _check(runs, steps, len(faults))


def _shown(name: str, run: Run, undisturbed: Run) -> list[str]:
    updates = [each["step"] for each in run.updates if each["rank"] == 0]
    return [
        name,
        f"{run.seconds:.1f}" + ("" if run.done else " (stopped)"),
        f"{run.seconds / undisturbed.seconds:.2f}",
        str(sum(each["kind"] == "kill" for each in run.events)),
        str(len(updates) - len(set(updates))),
        str(max(updates)),
    ]


def _check(runs: dict[str, Run], steps: int, faults: int) -> None:
    """A run that is compared must have done all steps, and met all faults."""
    for name, run in runs.items():
        last = max(each["step"] for each in run.updates)
        killed = sum(each["kind"] == "kill" for each in run.events)
        if run.done and (last != steps or killed != (0 if name == UNDISTURBED else faults)):
            raise RuntimeError(f"{name}: ended at step {last} of {steps} with {killed} kills")


def _stopped(runs: dict[str, Run]) -> str:
    stopped = [name for name, run in runs.items() if not run.done]
    return f" Stopped after {CAP_S:.0f} s: {', '.join(stopped)}." if stopped else ""


def _thinned(points: list[tuple[float, int]]) -> list[tuple[float, float]]:
    """Fewer points, with all turns of the line."""
    stride = max(1, len(points) // POINTS)
    return [
        (round(x, 3), y)
        for i, (x, y) in enumerate(points)
        if i % stride == 0
        or y != points[i - 1][1] + 1
        or i + 1 == len(points)
        or points[i + 1][0] - x > 1.0
        or x - points[i - 1][0] > 1.0
    ]
