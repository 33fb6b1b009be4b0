"""A result as tables, and the figures in them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rich.table import Table

from tieredckpt.bench.settings import ASYNC, CALLS, STAGES, Recovery, Result, Way

GB = 1e9


def subject(result: Result) -> str:
    """What was measured, in a few words."""
    return (
        f"{result.state_bytes / GB:.3g} GB in {result.tensors} tensors on {result.ranks} "
        f"rank{'s' * (result.ranks != 1)}"
    )


def seconds(value: float) -> str:
    """With three digits."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def speed(num_bytes: int, value: float) -> str:
    """Of a rank, in GB/s."""
    return f"{num_bytes / GB / value:.3g} GB/s" if value else "-"


def later_saves(result: Result, call: str) -> list[float]:
    """The stalls of a call, less the first save of all, which takes memory."""
    found = result.stall_s[call]
    return found[1:] if call == CALLS[0] and len(found) > 1 else found


def by_source(result: Result) -> dict[str, list[Recovery]]:
    """Recoveries by source, in the order of the tiers."""
    found: dict[str, list[Recovery]] = {}
    for each in result.recoveries:
        found.setdefault(each.source, []).append(each)
    return found


def stages(found: list[Recovery]) -> dict[str, float]:
    """The median of each stage."""
    names = found[0].stages
    return {name: statistics.median(each.stages[name] for each in found) for name in names}


def heading(result: Result) -> str:
    """What was measured, on what."""
    machine = result.machine
    return (
        f"{subject(result)} ({result.rank_bytes / GB:.3g} GB on one at most); {machine['device']}, "
        f"{machine['cpus']} CPUs; torch {machine['torch']}, tieredckpt {machine['tieredckpt']}.\n"
        "Durations are the slowest rank's, throughputs the slowest rank's bytes by its time."
    )


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def of_saves(result: Result) -> list[Table]:
    """Stall per save of each call, and the way of those of ``async_save`` through the tiers."""
    found = [_stalls(result, call) for call in CALLS]
    rows = [(name, *(each[name] for each in found)) for name in found[0]]
    stall = _table("How long a save holds up training, by the call that saves", ("", *CALLS), rows)
    ways = [
        (
            level.name,
            f"{len(level.seconds)} of {len(result.stall_s[ASYNC])}",
            seconds(statistics.median(level.seconds.values())) if level.seconds else "-",
            seconds(max(level.seconds.values())) if level.seconds else "-",
        )
        for level in result.levels
    ]
    columns = ("", "checkpoints", "complete after (median)", "longest")
    title = f"The way of a checkpoint, from the start of its {ASYNC}"
    return [stall, _table(title, columns, ways)]


def _stalls(result: Result, call: str) -> dict[str, str]:
    later = sorted(later_saves(result, call))
    median = statistics.median(later)
    return {
        "first save (memory is taken)": seconds(result.stall_s[call][0])
        if call == CALLS[0]
        else "-",
        "later saves": str(len(later)),
        "median": seconds(median),
        "throughput": speed(result.rank_bytes, median),
        "90th percentile": seconds(later[-(-9 * len(later) // 10) - 1]),
        "longest": seconds(later[-1]),
    }


def of_recoveries(result: Result) -> list[Table]:
    """From SIGKILL to the first step, by source."""
    rows = [[text] for text in ("from SIGKILL to the first step", *STAGES.values())]
    for found in by_source(result).values():
        median = stages(found)
        whole = sum(median.values()) or 1.0
        rows[0].append(seconds(statistics.median(each.total_s for each in found)))
        for row, value in zip(rows[1:], median.values(), strict=True):
            row.append(f"{seconds(value)} {value / whole:4.0%}")
    columns = ["from", *by_source(result)]
    number = len(result.recoveries) // len(by_source(result))
    title = f"Recovery by torchrun: medians of {number}, and the share of each stage"
    return [_table(title, columns, rows)]


def of_ways(result: Result) -> list[Table]:
    """All ways, medians."""
    rows = [
        [
            way.name,
            *(seconds(statistics.median(each)) for each in (way.stall_s, way.done_s, way.load_s)),
        ]
        for way in result.ways
    ]
    columns = ("", "stall per save", "complete after", "load")
    title = f"Medians of {len(result.ways[0].stall_s)} rounds, in turns"
    return [_table(title, columns, rows)]


def comparisons(result: Result) -> list[str]:
    """Lines under a comparison: for each figure, the fastest of ours against the fastest other."""
    if result.mode != "compare":
        return []
    ours = [way for way in result.ways if way.name.startswith("tieredckpt")]
    others = [way for way in result.ways if way not in ours]
    found = []
    for title, field in (("stall", "stall_s"), ("complete", "done_s"), ("load", "load_s")):
        mine, its = (_fastest(each, field) for each in (ours, others))
        ratio = its[1] / mine[1]
        faster, slower = (mine, its) if ratio >= 1 else (its, mine)
        found.append(
            f"{title}: {faster[0]} is {max(ratio, 1 / ratio):.2f} times as fast as {slower[0]}"
        )
    found.append(
        "Complete: tieredckpt's are in host memory, and outlive the process; a tier gets them later"
        " (bench save). DCP's to a tmpfs outlive the process, those to a disk the host. Loads are"
        " from memory and from the page cache."
    )
    return found


def _fastest(ways: list[Way], field: str) -> tuple[str, float]:
    found = [(way.name, statistics.median(getattr(way, field))) for way in ways]
    return min(found, key=lambda each: each[1])
