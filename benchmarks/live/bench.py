"""What a scenario works with, and what comes out of it."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from benchmarks.live.runs import Job, Run, follow
from benchmarks.machine import Machine
from benchmarks.measure import RATIO_UNIT, Row, summary

FORMAT_VERSION = 1


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Details of a scenario, as text."""

    title: str
    headings: list[str]
    rows: list[list[str]]


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a plot; all series of the same ``plot`` are drawn into one."""

    plot: str
    label: str
    points: list[tuple[float, float]]


class Outcome(msgspec.Struct, kw_only=True):
    """What became of one scenario; rows that were measured before it failed are kept."""

    name: str
    title: str
    seconds: float = 0.0
    rows: list[Row] = []
    tables: list[Table] = []
    series: list[Series] = []
    error: str | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run, as it is written to the JSON file."""

    format_version: int
    date: str
    machine: Machine
    quick: bool
    outcomes: list[Outcome]

    @property
    def failed(self) -> list[Outcome]:
        """Scenarios that did not end well."""
        return [outcome for outcome in self.outcomes if outcome.error is not None]

    @property
    def rows(self) -> list[Row]:
        """All rows of all scenarios."""
        return [row for outcome in self.outcomes for row in outcome.rows]


@dataclass(kw_only=True)
class Bench:
    """One scenario's folders, deadline and outcome."""

    outcome: Outcome
    shm: Path
    disk: Path
    timeout_s: float
    quick: bool
    report: Callable[[str, int, int], None]
    device: str = "cpu"
    started_s: float = field(default_factory=time.monotonic)
    count: int = 0

    def run(self, name: str, job: Job, *, limit_s: float = 300.0, may_exceed: bool = False) -> Run:
        """Train within ``limit_s`` and the scenario's deadline. Raises RunError."""
        self.count += 1
        left_s = self.started_s + self.timeout_s - time.monotonic()
        with self._folders(f"{self.count:02d}") as (shm, disk):
            return follow(
                replace(job, device=self.device),
                shm,
                disk,
                limit_s=min(limit_s, max(1.0, left_s)),
                report=lambda done, total: self.report(name, done, total),
                may_exceed=may_exceed and left_s > limit_s,
            )

    @contextlib.contextmanager
    def _folders(self, name: str) -> Iterator[tuple[Path, Path]]:
        found = self.shm / name, self.disk / name
        try:
            yield found
        finally:
            for folder in found:
                shutil.rmtree(folder, ignore_errors=True)

    def at_most(
        self,
        what: str,
        samples: Sequence[float],
        *,
        value: float | None = None,
        unit: str = "",
        target: float | None,
        note: str = "",
    ) -> None:
        """A row whose value, by default the median of the samples, must not pass a target."""
        ours = summary(samples)
        self.outcome.rows.append(
            Row(
                scenario=self.outcome.name,
                what=what,
                kind="report" if target is None else "at_most",
                value=ours.p50 if value is None else value,
                unit=unit,
                ours=ours,
                ours_unit=unit,
                target=target,
                note=note,
            )
        )

    def ratio(
        self,
        what: str,
        samples: Sequence[float],
        limit: Sequence[float],
        *,
        limit_name: str,
        target: float | None,
        unit: str = "s",
        note: str = "",
    ) -> None:
        """A row of our median divided by the other's, which must not pass a target."""
        ours, theirs = summary(samples), summary(limit)
        self.outcome.rows.append(
            Row(
                scenario=self.outcome.name,
                what=what,
                kind="report" if target is None else "at_most",
                value=ours.p50 / theirs.p50,
                unit=RATIO_UNIT,
                ours=ours,
                ours_unit=unit,
                limit=theirs,
                limit_name=limit_name,
                target=target,
                note=note,
            )
        )

    def table(self, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show details."""
        self.outcome.tables.append(
            Table(title=title, headings=list(headings), rows=[list(row) for row in rows])
        )

    def plot(self, plot: str, label: str, points: Sequence[tuple[float, float]]) -> None:
        """Draw a line."""
        self.outcome.series.append(Series(plot=plot, label=label, points=list(points)))
