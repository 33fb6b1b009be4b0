"""Plots of results; needs matplotlib, of the extra ``plot``."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from tieredckpt.bench.settings import Recovery, Result
from tieredckpt.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    steps = range(1, len(result.stall_s) + 1)
    axes.bar(steps, result.stall_s, color="0.7", label="stall of training")
    for level in result.levels:
        found = sorted(level.seconds.items())
        axes.plot([n for n, _ in found], [s for _, s in found], marker="o", label=level.name)
    axes.set(xlabel="save", ylabel="seconds from its begin", title="Stall, and where it arrives")
    axes.set_yscale("log")
    axes.legend()


def _recoveries(axes: Axes, result: Result) -> None:
    found = by_source(result)
    left = [0.0] * len(found)
    medians = [stages(each) for each in found.values()]
    for name in medians[0]:
        widths = [each[name] for each in medians]
        axes.barh(list(found), widths, left=left, label=name)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="seconds since SIGKILL", title="Recovery until the first step, by source")
    axes.legend()


def _ways(axes: Axes, result: Result) -> None:
    names = [way.name for way in result.ways]
    for shift, (title, field) in enumerate(
        (("stall", "stall_s"), ("complete", "done_s"), ("load", "load_s"))
    ):
        values = [statistics.median(getattr(way, field)) for way in result.ways]
        places = [number + shift * 0.27 for number in range(len(names))]
        axes.barh(places, values, height=0.25, label=title)
    axes.set_yticks([number + 0.27 for number in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set(xlabel="seconds", title="Against stock DCP, medians")
    axes.legend()


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
