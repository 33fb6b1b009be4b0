"""Shows a result: a table for the terminal, a page of Markdown, and a plot."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from benchmarks.machine import Machine
from benchmarks.measure import RATIO_UNIT, Row, Summary
from benchmarks.runner import Result
from benchmarks.shapes import GIB, MIB

VERDICT = {True: "yes", False: "NO", None: ""}
HEADINGS = ("what", "p50", "p99", "n", "limit p50", "value", "target", "reached")


def figure(value: float, unit: str) -> str:
    """A number with its unit, with as many digits as mean something."""
    if unit != "s":
        return f"{value:.3g} {unit}".rstrip()
    if value < 0.1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s"


def speed(row: Row, summed: Summary) -> str:
    """Gigabytes per second at the median, in brackets, where bytes are the point."""
    return f" ({row.work_bytes / summed.p50 / 1e9:.2f} GB/s)" if row.work_bytes else ""


def cells(row: Row, *, judged: bool) -> tuple[str, ...]:
    """The row as text; ``judged`` is false where the state is too small for targets."""
    target = ""
    if row.target is not None:
        target = f"{'<=' if row.kind == 'at_most' else '>='} {row.target:g}"
    return (
        row.what,
        figure(row.ours.p50, row.ours_unit) + speed(row, row.ours),
        figure(row.ours.p99, row.ours_unit),
        str(row.ours.count),
        f"{figure(row.limit.p50, 's')}{speed(row, row.limit)}" if row.limit else "",
        f"{row.value:.3g} {row.unit}".rstrip(),
        target,
        VERDICT[row.reached] if judged else "",
    )


def table(result: Result) -> Table:
    """For the terminal: what fits into 80 columns; the page has the rest."""
    shown = Table(title=title(result), title_justify="left", padding=(0, 1, 0, 0))
    shown.add_column("what", ratio=1)
    for heading in ("p50", "p99", "value", "target"):
        shown.add_column(heading, justify="right")
    shown.expand = True
    for outcome in result.outcomes:
        for row in outcome.rows:
            what, p50, p99, _, _, value, target, reached = cells(row, judged=not result.quick)
            style = "red" if reached == VERDICT[False] else None
            shown.add_row(what, p50.replace(" (", "\n("), p99, value, target, style=style)
        if outcome.error is not None:
            shown.add_row(f"{outcome.title}: FAILED", style="bold red")
        shown.add_section()
    return shown


def title(result: Result) -> str:
    """One line: what was measured, where."""
    size = result.state_bytes
    shown = f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
    return (
        f"tieredckpt {result.machine.commit}, {shown} in {result.state_tensors} tensors, "
        f"{result.machine.cpu}, {result.machine.cores} cores, {result.date}"
        + (" (quick: figures say nothing about speed)" if result.quick else "")
    )


def markdown(result: Result, plot: str | None) -> str:
    """The page that is committed next to the JSON file."""
    lines = [f"# {title(result)}", ""]
    if plot is not None:
        lines += [f"![ratios to the limits]({plot})", ""]
    lines += ["| " + " | ".join(HEADINGS) + " |", "|" + " --- |" * len(HEADINGS)]
    for row in result.rows:
        lines.append("| " + " | ".join(cells(row, judged=not result.quick)) + " |")
    for outcome in result.failed:
        lines += ["", f"**{outcome.title} failed**", "", "```", outcome.error or "", "```"]
    lines += ["", "## Limits, notes, and what else was tried", ""]
    for row in result.rows:
        if row.limit_name or row.note or row.detail:
            lines += _footnotes(row)
    lines += ["", "## Scenarios", "", "| name | seconds | peak memory |", "| --- | --- | --- |"]
    lines += [
        f"| {outcome.name} | {outcome.seconds:.0f} | {outcome.peak_bytes / GIB:.1f} GiB |"
        for outcome in result.outcomes
    ]
    lines += ["", "## Machine", "", *machine_lines(result.machine)]
    return "\n".join(lines) + "\n"


def machine_lines(machine: Machine) -> list[str]:
    """What the figures depend on, as a list of Markdown."""
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    return [
        f"- CPU: {machine.cpu}, {machine.cores} cores; memory: {machine.memory_gib} GiB",
        *([f"- device: {machine.device}"] if machine.device else []),
        f"- kernel: {machine.kernel}; transparent huge pages: {machine.huge_pages}",
        f"- disk: {machine.disk}",
        f"- memory tier: {machine.shm}",
        f"- Python {machine.python}; {packages}",
        f"- commit: {machine.commit}",
        f"- load average before the run: {machine.load_1min}",
    ]


def _footnotes(row: Row) -> list[str]:
    first = f"- **{row.what}**:"
    if row.limit_name:
        first += f" limit is {row.limit_name}."
    lines = [first + (f" {row.note}" if row.note else "")]
    lines += [
        f"  - {name}: {figure(summed.p50, row.ours_unit)}{speed(row, summed)}"
        for name, summed in row.detail.items()
    ]
    return lines


def draw(result: Result, path: Path) -> None:
    """Bars of all ratios, with their targets; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result.rows if row.unit == RATIO_UNIT][::-1]
    if not rows:
        return
    colours = {True: "tab:green", False: "tab:red", None: "tab:grey"}
    figure_, axes = pyplot.subplots(figsize=(11, 0.42 * len(rows) + 1.6))
    positions = range(len(rows))
    axes.barh(
        positions,
        [row.value for row in rows],
        color=[colours[None if result.quick else row.reached] for row in rows],
    )
    for position, row in zip(positions, rows, strict=True):
        axes.text(row.value + 0.01, position, f"{row.value:.2f}", va="center", fontsize=8)
        if row.target is not None:
            axes.plot([row.target] * 2, [position - 0.45, position + 0.45], color="black", lw=2)
    axes.axvline(1.0, color="black", lw=0.8, ls="--")
    axes.set_yticks(list(positions), [row.what for row in rows], fontsize=8)
    axes.set_xlabel("speed as a share of the limit named in the table (1.0: as fast as raw)")
    axes.set_title(title(result), fontsize=8, loc="left")
    figure_.tight_layout()
    figure_.savefig(path, dpi=130)
    pyplot.close(figure_)
