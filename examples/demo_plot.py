"""The picture of ``demo.py``: losses of all starts over each other, and what each save cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starts import Start

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple")


def write_plot(path: Path, starts: Sequence[Start], verdict: str) -> None:
    """Write a PNG with ``verdict`` as its title. The first of ``starts`` is the reference."""
    reference, *others = starts
    figure, (losses, stalls) = plt.subplots(
        2, 1, figsize=(10, 7), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    steps = [event["step"] for event in reference.of("step")]
    values = [event["loss_approx"] for event in reference.of("step")]
    losses.plot(
        steps, values, color="0.8", linewidth=7, label="uninterrupted", solid_capstyle="round"
    )
    top = max(values)
    for colour, start in zip(COLOURS, others, strict=False):
        xs = [event["step"] for event in start.of("step")]
        ys = [event["loss_approx"] for event in start.of("step")]
        restored = start.of("start")[0]
        origin = "from the beginning"
        if restored["step"] is not None:
            origin = f"step {restored['step']} from {' + '.join(restored['bytes_by_tier'])}"
            losses.plot(xs[0] - 1, top, marker="v", markersize=9, color=colour, clip_on=False)
        losses.plot(xs, ys, color=colour, linewidth=1.6, label=f"{start.name}: {origin}")
        if start.ended != "finished":
            for axes in (losses, stalls):
                axes.axvline(xs[-1], color=colour, linestyle=":", linewidth=1.2)
            losses.annotate(
                start.ended, (xs[-1], top - 0.2), rotation=90, fontsize=8, color=colour,
                horizontalalignment="right", verticalalignment="top",
            )  # fmt: skip
    losses.set_ylabel("loss (nats per byte)")
    losses.set_title(f"Killed three times, recovered three times: {verdict}")
    figure.legend(title="▼ recovered", loc="outside lower center", ncols=3)
    for colour, start in zip(("0.6", *COLOURS), starts, strict=False):
        saves = start.of("save")
        if saves:
            stalls.plot(
                [event["step"] for event in saves],
                [event["stall_s"] * 1e3 for event in saves],
                "o",
                color=colour,
                markersize=5,
            )
    stalls.set_ylim(bottom=0)
    stalls.set_ylabel("stall of a save (ms)")
    stalls.set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)
