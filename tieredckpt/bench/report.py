"""A result as tables, JSON and plots. Pure, but for what it prints and the file of the plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import click
import msgspec
from rich.console import Console
from rich.table import Table

from tieredckpt.bench.plot import by_source, draw, stages
from tieredckpt.bench.settings import STAGES, Result, Settings, Way

GB = 1e9


def show(result: Result, settings: Settings) -> None:
    """Print the result as the settings want it, and draw the plot.

    Raises UsageError: the plot needs matplotlib.
    """
    if settings.plot:
        draw(result, settings.plot)
    if settings.as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(result), indent=2))
        return
    console = Console(highlight=False)
    console.print(heading(result))
    for table in {"save": of_saves, "recover": of_recoveries, "compare": of_ways}[result.mode](
        result
    ):
        console.print(table)
    for text in comparisons(result):
        console.print(text)
    if settings.plot:
        console.print(f"plot: {settings.plot}")


def heading(result: Result) -> str:
    """What was measured, on what."""
    machine = result.machine
    return (
        f"{result.state_bytes / GB:.3g} GB in {result.tensors} tensors on {result.ranks} ranks "
        f"({result.rank_bytes / GB:.3g} GB on one at most); {machine['device']}, "
        f"{machine['cpus']} CPUs; torch {machine['torch']}, tieredckpt {machine['tieredckpt']}.\n"
        "Durations are the slowest rank's, throughputs the slowest rank's bytes by its time."
    )


def seconds(value: float) -> str:
    """With three digits."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def speed(num_bytes: int, value: float) -> str:
    """Of a rank, in GB/s."""
    return f"{num_bytes / GB / value:.3g} GB/s" if value else "-"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def of_saves(result: Result) -> list[Table]:
    """Stall per save, and the way through the tiers."""
    first, later = result.stall_s[0], sorted(result.stall_s[1:]) or result.stall_s
    rows = [
        ("first save (memory is taken)", first),
        ("median of the others", statistics.median(later)),
        ("90th percentile", later[-(-9 * len(later) // 10) - 1]),
        ("longest", later[-1]),
    ]
    stall = _table(
        "How long a save holds up training",
        ("", "stall", "throughput"),
        [(name, seconds(value), speed(result.rank_bytes, value)) for name, value in rows],
    )
    ways = [
        (
            level.name,
            f"{len(level.seconds)} of {len(result.stall_s)}",
            seconds(statistics.median(level.seconds.values())) if level.seconds else "-",
            seconds(max(level.seconds.values())) if level.seconds else "-",
        )
        for level in result.levels
    ]
    columns = ("", "checkpoints", "complete after (median)", "longest")
    return [stall, _table("The way of a checkpoint, from the begin of its save", columns, ways)]


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
    title = "Recovery by torchrun: medians, and the share of each stage"
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
