"""Scenario ``identical``: what was trained through faults has the bits of an undisturbed run."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from benchmarks.live.bench import Bench
from benchmarks.live.journal import Comparison, compared
from benchmarks.live.runs import Fault, Job, Run

SIZE = 4
SEED = 31
SAVE_EVERY = 10
KILLS, KILLS_COMPILED, ROTATIONS = 30, 4, 10
SHOWN = 5
"""Differing updates that are named."""


def random_kills(count: int, steps: int, seed: int) -> tuple[Fault, ...]:
    """Drawn steps and ranks, different ones; two are both replicas of one shard, in one step."""
    random = Random(seed)
    # After the first save: what is lost with both is trained again from there.
    step, rank = random.randrange(SAVE_EVERY + 1, steps), random.randrange(SIZE)
    drawn = {(step, rank), (step, (rank + SIZE // 2) % SIZE)}
    while len(drawn) < count:
        drawn.add((random.randrange(2, steps), random.randrange(SIZE)))
    return tuple((step, rank, "kill") for step, rank in sorted(drawn))


def identical(bench: Bench) -> None:
    """Each comparison has an undisturbed run of its own kind."""
    kills, compiled, rotations = KILLS, KILLS_COMPILED, ROTATIONS
    if bench.quick:
        kills, compiled, rotations = 3, 2, 3
    steps = 4 * kills
    rows: list[list[str]] = []
    eager = Job(loop="live", steps=steps, save_every=SAVE_EVERY, exact=True)
    reference = bench.run("undisturbed", eager)
    faults = random_kills(kills, steps, SEED)
    _compare(bench, f"{kills} random kills", reference, replace(eager, standby=2), faults, rows)

    # All processes live through them, and each has another rank in the next generation.
    raises: tuple[Fault, ...] = tuple(
        (step, step % SIZE, "raise") for step in range(3, 3 + rotations)
    )
    rotated = replace(eager, rotated=True)
    run = _compare(bench, f"{rotations} rotations of ranks", reference, rotated, raises, rows)
    _check_rotated(run)

    fewer = replace(eager, steps=8 * compiled, compiled=True)
    reference = bench.run("undisturbed, compiled", fewer)
    faults = random_kills(compiled, fewer.steps, SEED)
    _compare(
        bench,
        f"{compiled} random kills, compiled",
        reference,
        replace(fewer, standby=2),
        faults,
        rows,
    )
    raises = raises[:compiled]
    rotated = replace(fewer, rotated=True)
    run = _compare(bench, f"{compiled} rotations, compiled", reference, rotated, raises, rows)
    _check_rotated(run)
    bench.table(
        "Updates of all ranks, compared with an undisturbed run",
        ("faults", "generations", "compared", "differing", "steps", "executed", "reported as lost"),
        rows,
    )


def _compare(
    bench: Bench, name: str, reference: Run, job: Job, faults: tuple[Fault, ...],
    rows: list[list[str]],
) -> Run:  # fmt: skip
    run = bench.run(name, replace(job, faults=faults))
    if job.compiled and not all(each["compiled"] for each in run.updates):
        raise RuntimeError(f"{name}: nothing was compiled")
    met = [each for each in run.events if each["kind"] in ("kill", "raise")]
    if len(met) != len(faults):
        raise RuntimeError(f"{name}: {len(met)} of {len(faults)} faults happened")
    found = compared(reference.events, run.events, job.steps)
    lost = sum(each.lost for each in run.recoveries)
    bench.at_most(
        f"{name}: updates whose bits differ", [float(len(found.differing))], target=0,
        note=_note(found),
    )  # fmt: skip
    bench.at_most(
        f"{name}: steps executed beyond those reported as lost",
        [float(abs(found.executed - job.steps - lost) + len(found.missing))],
        target=0,
        note=f"{found.executed} executed = {job.steps} + {lost} lost."
        if found.executed == job.steps + lost
        else f"{found.executed} executed, {job.steps} + {lost} lost expected.",
    )
    generations = max(each["generation"] for each in run.events)
    rows.append(
        [name]
        + [str(n) for n in (generations, found.rows, len(found.differing), job.steps)]
        + [str(found.executed), str(lost)]
    )
    return run


def _note(found: Comparison) -> str:
    text = f"{found.rows} updates: loss, sample ids, buffers, scale."
    if found.differing:
        text += " Differing: " + "; ".join(found.differing[:SHOWN]) + "."
    return text


def _check_rotated(run: Run) -> None:
    """Else nothing was shown: each process had all ranks."""
    ranks: dict[int, set[int]] = {}
    for each in run.updates:
        ranks.setdefault(each["pid"], set()).add(each["rank"])
    if len(ranks) != SIZE or min(len(each) for each in ranks.values()) < 2:
        raise RuntimeError(f"the ranks did not rotate: {ranks}")
