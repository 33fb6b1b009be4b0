"""Scenarios ``generations`` and ``step-time``: what live recovery costs when all goes well."""

from __future__ import annotations

from benchmarks.live.bench import Bench
from benchmarks.live.journal import least_times, samples_of, slope, step_times
from benchmarks.live.runs import Fault, Job
from benchmarks.measure import percentile

SIZE = 4
GENERATIONS = 50
FIRST_IGNORED = 10
"""Generations that still fill caches."""
COMPARED = 10
"""Generations at either end whose highest counts are compared."""
UPDATES = 2
"""Of each generation."""

STEP_SLEEP_S = 0.05
STEP_STEPS = 300
STEP_SKIPPED = 20
PAIRS = 2


def generations(bench: Bench) -> None:
    """An exception in one rank ends each generation, and all processes go on in the next one."""
    count, ignored, size = (GENERATIONS, FIRST_IGNORED, SIZE)
    if bench.quick:
        count, ignored, size = 6, 2, 2
    faults: tuple[Fault, ...] = tuple(
        (UPDATES * number + 1, number % size, "raise") for number in range(1, count)
    )
    job = Job(loop="live", steps=UPDATES * count, ranks=size, faults=faults, sample=True)
    run = bench.run("generations", job)
    pids = {each["pid"] for each in run.updates}
    if len(pids) != size or max(each["generation"] for each in run.events) != count:
        raise RuntimeError(f"{len(pids)} processes, and not {count} generations")
    rows = []
    for name in ("descriptors", "threads", "children"):
        growth = [_growth(points, ignored) for points in samples_of(run.events, name).values()]
        bench.at_most(
            f"{name} more after {count} generations", growth, value=max(growth), target=0,
            note=f"The most of the last {COMPARED} generations less that of {COMPARED} after the "
            f"first {ignored}; the worst of {size} processes.",
        )  # fmt: skip
        for pid, points in samples_of(run.events, name).items():
            rows.append([name, str(pid), *(f"{value:g}" for value in _shown(points, ignored))])
    memory = samples_of(run.events, "pss_mib")
    slopes = [
        slope([point for point in points if point[0] > ignored]) for points in memory.values()
    ]
    bench.at_most(
        "memory per generation", slopes, value=max(slopes), unit="MiB", target=2.0,
        note=f"Slope of the proportional set size after {ignored} generations; the worst process.",
    )  # fmt: skip
    for pid, points in memory.items():
        rows.append(
            ["memory (MiB)", str(pid), *(f"{value:.1f}" for value in _shown(points, ignored))]
        )
        bench.plot("memory of a process (MiB) over generations", f"process {pid}", points)
    if bench.device != "cpu":
        rows += _device_memory(bench, samples_of(run.events, "allocated_mib"), "tensors", ignored)
        rows += _device_memory(bench, samples_of(run.events, "device_mib"), "device", ignored)
    bench.table(
        f"{count} generations, after the second update of each",
        ("what", "process", "first", f"after {ignored}", "least", "most", "last"),
        rows,
    )


def _device_memory(
    bench: Bench, found: dict[int, list[tuple[float, float]]], what: str, ignored: int
) -> list[list[str]]:
    growth = [_growth(points, ignored) for points in found.values()]
    bench.at_most(
        f"memory of the device more after all generations, {what}", growth, value=max(growth),
        unit="MiB", target=0,
        note="Of the tensors of the worst process." if what == "tensors" else "By all processes.",
    )  # fmt: skip
    return [
        [f"{what} (MiB)", str(pid), *(f"{value:.1f}" for value in _shown(points, ignored))]
        for pid, points in found.items()
    ]


def _growth(points: list[tuple[float, float]], ignored: int) -> float:
    counted = [value for generation, value in points if generation > ignored]
    return max(counted[-COMPARED:]) - max(counted[:COMPARED])


def _shown(points: list[tuple[float, float]], ignored: int) -> list[float]:
    values = [value for _, value in points]
    return [values[0], values[ignored], min(values), max(values), values[-1]]


def step_time(bench: Bench) -> None:
    """The same loop under torchrun and with live recovery, A B A B; nothing fails."""
    steps, pairs = (60, 1) if bench.quick else (STEP_STEPS, PAIRS)
    skipped = min(STEP_SKIPPED, steps // 3)
    times: dict[str, list[float]] = {"plain": [], "live": []}
    own: list[float] = []
    begin: list[float] = []
    rows = []
    for turn in range(pairs):
        for loop in ("plain", "live"):
            job = Job(loop=loop, steps=steps, ranks=2, sleep_s=STEP_SLEEP_S)
            run = bench.run(f"{loop}, turn {turn + 1}", job)
            found = step_times(run.events, skipped)
            times[loop] += found
            if loop == "live":
                own += least_times(run.events, "own_s", skipped)
                begin += least_times(run.events, "begin_s", skipped)
            rows.append(
                [loop, str(turn + 1), str(len(found)), f"{percentile(found, 0.5) * 1e3:.2f}",
                 f"{sum(found) / len(found) * 1e3:.2f}", f"{percentile(found, 0.99) * 1e3:.2f}"]
            )  # fmt: skip
    mean = {name: sum(each) / len(each) for name, each in times.items()}
    bench.ratio(
        "step of 50 ms with live recovery, 2 ranks", times["live"], times["plain"], target=1.03,
        limit_name="the same loop under torchrun",
        note=f"{percentile(times['live'], 0.5) / percentile(times['plain'], 0.5):.4f} by the "
        f"medians, {mean['live'] / mean['plain']:.4f} by the means.",
    )  # fmt: skip
    bench.at_most(
        "update but for its body", [each * 1e6 for each in own], unit="us", target=None,
        note="Of the rank that came last, so without the wait for another rank.",
    )  # fmt: skip
    bench.at_most("begin", [each * 1e6 for each in begin], unit="us", target=None)
    bench.table(
        "Milliseconds per step",
        ("loop", "turn", "steps", "median", "mean", "p99"),
        rows,
    )
