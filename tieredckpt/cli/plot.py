"""Plots of the command line; matplotlib (extra ``plot``) is imported only here, when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tieredckpt.errors import UsageError, how_to_install
from tieredckpt.policy.forecast import TierForecast


def draw_forecast(result: Sequence[TierForecast], path: Path) -> None:
    """Bytes per tier over the steps of a simulated run.

    Raises:
        UsageError: matplotlib is missing, or does not know the file's type.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise UsageError(f"--plot needs matplotlib: {how_to_install('plot')}") from error
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    try:
        for each in result:
            steps = [point.step for point in each.curve]
            gib = [point.stored_bytes / (1 << 30) for point in each.curve]
            axes.step(steps, gib, where="post", label=each.tier)
        axes.set_xlabel("step")
        axes.set_ylabel("GiB")
        axes.legend()
        axes.grid(alpha=0.3)
        figure.tight_layout()
        figure.savefig(path, dpi=130)
    except ValueError as error:
        raise UsageError(f"--plot {path}: {error}") from error
    finally:
        pyplot.close(figure)
