"""Shows a result: tables for the terminal, a page of Markdown, and a plot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rich.table

from benchmarks.live.bench import Outcome, Result, Series, Table
from benchmarks.live.kills import LIVE, UNDISTURBED
from benchmarks.measure import Row
from benchmarks.report import HEADINGS, VERDICT, cells, machine_lines

AXES = {
    "step over time": ("seconds since the start", "step"),
    "memory of a process (MiB) over generations": ("generation", "MiB"),
}
COLOURS = {UNDISTURBED: "0.75", LIVE: "tab:green"}


def title(result: Result) -> str:
    """One line: what was measured, where."""
    return (
        f"tieredckpt {result.machine.commit}, live recovery, "
        f"{result.machine.cpu}, {result.machine.cores} cores, {result.date}"
        + (" (quick: figures say nothing about speed)" if result.quick else "")
    )


def tables(result: Result) -> Iterator[rich.table.Table]:
    """For the terminal: the rows with their targets, then the details of each scenario."""
    shown = rich.table.Table(title=title(result), title_justify="left", padding=(0, 1, 0, 0))
    shown.add_column("what", ratio=1)
    for heading in ("p50", "against", "value", "target"):
        shown.add_column(heading, justify="right")
    shown.expand = True
    for outcome in result.outcomes:
        for row in outcome.rows:
            what, p50, _, _, limit, value, target, reached = cells(row, judged=not result.quick)
            style = "red" if reached == VERDICT[False] else None
            shown.add_row(what, p50, limit, value, target, style=style)
        if outcome.error is not None:
            shown.add_row(f"{outcome.title}: FAILED", style="bold red")
        shown.add_section()
    yield shown
    for outcome in result.outcomes:
        for each in outcome.tables:
            yield _detail(each)


def _detail(table: Table) -> rich.table.Table:
    shown = rich.table.Table(title=table.title, title_justify="left", padding=(0, 1, 0, 0))
    for heading in table.headings:
        shown.add_column(heading)
    for row in table.rows:
        shown.add_row(*row)
    return shown


def markdown(result: Result, plot: str | None) -> str:
    """The page that is committed next to the JSON file."""
    lines = [f"# {title(result)}", ""]
    if plot is not None:
        lines += [f"![step over time, and more]({plot})", ""]
    lines += _table(HEADINGS, [cells(row, judged=not result.quick) for row in result.rows])
    lines += ["", "## Compared with what, and notes", ""]
    lines += [_footnote(row) for row in result.rows if row.limit_name or row.note]
    for outcome in result.outcomes:
        lines += _outcome(outcome)
    lines += ["", "## Scenarios", ""]
    lines += _table(("name", "seconds"), [(o.name, f"{o.seconds:.0f}") for o in result.outcomes])
    lines += ["", "## Machine", "", *machine_lines(result.machine)]
    return "\n".join(lines) + "\n"


def _table(headings: tuple[str, ...] | list[str], rows: Any) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _footnote(row: Row) -> str:
    limit = f" against {row.limit_name}." if row.limit_name else ""
    return f"- **{row.what}**:{limit}" + (f" {row.note}" if row.note else "")


def _outcome(outcome: Outcome) -> list[str]:
    lines = []
    for each in outcome.tables:
        lines += ["", f"## {each.title}", "", *_table(each.headings, each.rows)]
    if outcome.error is not None:
        lines += ["", f"**{outcome.title} failed**", "", "```", outcome.error, "```"]
    return lines


def draw(result: Result, path: Path) -> None:
    """One plot per group of series; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    plots: dict[str, list[Series]] = {}
    for outcome in result.outcomes:
        for each in outcome.series:
            plots.setdefault(each.plot, []).append(each)
    if not plots:
        return
    figure, axes = pyplot.subplots(
        len(plots), 1, figsize=(10, 4.6 * len(plots)), layout="constrained", squeeze=False
    )
    for axis, (name, series) in zip(axes[:, 0], plots.items(), strict=True):
        for each in series:
            width = 5.0 if each.label == UNDISTURBED else 1.6
            axis.plot(
                [x for x, _ in each.points],
                [y for _, y in each.points],
                color=COLOURS.get(each.label),
                linewidth=width,
                label=each.label,
            )
        x, y = AXES.get(name, ("", ""))
        axis.set(xlabel=x, ylabel=y, title=name)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(title(result), fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
