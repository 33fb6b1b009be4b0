"""Shows a result: its tables or JSON on standard output, and a plot.

A plot needs matplotlib, of the extra ``plot``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console

from tieredckpt.bench import report
from tieredckpt.bench.report import by_source, later_saves, seconds, stages, subject
from tieredckpt.bench.settings import CALLS, STAGES, Result, Settings
from tieredckpt.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINEAR_MAX = 100


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
    console.print(report.heading(result))
    for table in {
        "save": report.of_saves,
        "recover": report.of_recoveries,
        "compare": report.of_ways,
    }[result.mode](result):
        console.print(table)
    for text in report.comparisons(result):
        console.print(text)
    if settings.plot:
        console.print(f"plot: {settings.plot}")


def draw(result: Result, path: str) -> None:
    """Write the plot to a file, of which the suffix is the format.

    Raises UsageError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: install it, or the extra plot") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    {"save": _saves, "recover": _recoveries, "compare": _ways}[result.mode](axes, result)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"the plot cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


def _saves(axes: Axes, result: Result) -> None:
    drawn = []
    for number, call in enumerate(CALLS):
        stalls = result.stall_s[call]
        places = [save + number * 0.4 for save in range(1, len(stalls) + 1)]
        median = seconds(statistics.median(later_saves(result, call)))
        label = f"stall of {call}: median of the later saves {median}"
        axes.bar(places, stalls, width=0.4, label=label, color=("0.45", "0.75")[number])
        drawn += stalls
    for level in result.levels:
        if not level.seconds:
            continue
        found = sorted(level.seconds.items())
        median = seconds(statistics.median(level.seconds.values()))
        label = f"complete in {level.name}: median {median}"
        axes.plot([n for n, _ in found], [s for _, s in found], marker="o", label=label)
        drawn += level.seconds.values()
    axes.set(xlabel="save", ylabel="seconds from the call")
    axes.set_title(f"How long a save holds up training, and its way: {subject(result)}")
    axes.set_yscale(_scale(drawn))
    axes.legend()


def _recoveries(axes: Axes, result: Result) -> None:
    found = by_source(result)
    names = [
        f"{name}\n{seconds(statistics.median(each.total_s for each in recoveries))}"
        for name, recoveries in found.items()
    ]
    left = [0.0] * len(found)
    medians = [stages(each) for each in found.values()]
    for name in medians[0]:
        widths = [each[name] for each in medians]
        axes.barh(names, widths, left=left, label=STAGES[name])
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="seconds since SIGKILL, medians")
    axes.set_title(f"Recovery until the first step, by source: {subject(result)}")
    axes.legend()


def _ways(axes: Axes, result: Result) -> None:
    names, drawn = [way.name for way in result.ways], []
    for shift, (title, field) in enumerate(
        (("stall per save", "stall_s"), ("complete after", "done_s"), ("load", "load_s"))
    ):
        values = [statistics.median(getattr(way, field)) for way in result.ways]
        places = [number + shift * 0.27 for number in range(len(names))]
        bars = axes.barh(places, values, height=0.25, label=title)
        axes.bar_label(bars, [seconds(value) for value in values], padding=2)
        drawn += values
    axes.set_yticks([number + 0.27 for number in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xscale(_scale(drawn))
    axes.margins(x=0.12)
    axes.set(xlabel="seconds, medians", title=f"Against stock DCP: {subject(result)}")
    axes.legend()


def _scale(values: Iterable[float]) -> str:
    """Linear, unless the small ones could not be seen beside the large ones."""
    found = [value for value in values if value > 0]
    return "log" if found and max(found) > LINEAR_MAX * min(found) else "linear"
