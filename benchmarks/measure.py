"""Numbers: samples, percentiles, interleaving, page faults, and the rows of the result."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

Samples = dict[str, list[float]]
"""What a measured process hands back: named lists of numbers, mostly seconds."""

Report = Callable[[int, int], None]
"""Called with (done, total) while a process measures, for the progress bar."""

RATIO_UNIT = "x"
"""Unit of a row's value that is a share of the limit's speed."""

Kind = Literal["ratio", "at_most", "report"]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A list of samples, summed up."""

    p50: float
    p99: float
    least: float
    most: float
    count: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the result.

    ``value`` is compared with ``target``: a "ratio" is the limit's median time divided by ours
    and must reach it, an "at_most" must not pass it, a "report" has none.
    """

    scenario: str
    what: str
    kind: Kind
    value: float
    unit: str
    ours: Summary
    limit: Summary | None = None
    limit_name: str = ""
    target: float | None = None
    work_bytes: int = 0
    """Bytes that one sample moves; 0 where bytes are not the point."""
    note: str = ""
    detail: dict[str, Summary] = {}
    """Everything else that was tried, by name, in the unit of ``ours``."""
    ours_unit: str = "s"

    @property
    def reached(self) -> bool | None:
        """Whether the target was met; None without a target."""
        if self.target is None:
            return None
        return self.value <= self.target if self.kind == "at_most" else self.value >= self.target


def memory_row(
    scenario: str, what: str, used: Sequence[float], unit: str, target: float, note: str = ""
) -> Row:
    """The most resident memory that was seen, which must not pass ``target``."""
    seen = summary(used)
    return Row(
        scenario=scenario, what=what, kind="at_most", value=seen.most, unit=unit, ours=seen,
        ours_unit=unit, target=target, note=note,
    )  # fmt: skip


def percentile(samples: Sequence[float], share: float) -> float:
    """Nearest-rank percentile: always one of the samples, and for few of them p99 is the worst."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(samples: Sequence[float]) -> Summary:
    """Sum up at least one sample."""
    return Summary(
        p50=percentile(samples, 0.5),
        p99=percentile(samples, 0.99),
        least=min(samples),
        most=max(samples),
        count=len(samples),
    )


def ratio_row(
    scenario: str,
    what: str,
    samples: Samples,
    *,
    ours: str,
    limit: str,
    limit_name: str,
    work_bytes: int,
    target: float | None = None,
    note: str = "",
    detail: Sequence[str] = (),
) -> Row:
    """A row whose value is p50 of ``limit`` by p50 of ``ours``: 1.0 is the limit's speed."""
    mine, theirs = summary(samples[ours]), summary(samples[limit])
    return Row(
        scenario=scenario,
        what=what,
        kind="report" if target is None else "ratio",
        value=theirs.p50 / mine.p50,
        unit=RATIO_UNIT,
        ours=mine,
        limit=theirs,
        limit_name=limit_name,
        target=target,
        work_bytes=work_bytes,
        note=note,
        detail={name: summary(samples[name]) for name in detail},
    )


def slowest(ranks: Sequence[Samples]) -> Samples:
    """The maximum over ranks, sample by sample: a save ends when its last rank has ended."""
    return {
        name: [max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }


def timed(action: Callable[[], object]) -> float:
    """Seconds that ``action`` takes."""
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def interleave(repeat: int, report: Report, parts: Mapping[str, Callable[[int], float]]) -> Samples:
    """Run all parts in turn, ``repeat`` times over: drift of the machine meets all alike.

    Each part gets the round's number and returns what it measured; it may prepare and clean
    up outside of what it counts.
    """
    samples: Samples = {name: [] for name in parts}
    for number in range(repeat):
        for name, part in parts.items():
            samples[name].append(part(number))
        report(number + 1, repeat)
    return samples


def explore(variants: Mapping[str, Callable[[], float]], *, rounds: int) -> tuple[str, Samples]:
    """Try each variant of a limit; the name of the fastest, and all that was measured.

    A limit that was measured by one method only could flatter us by being a bad method. The
    slower half is left out of each following round.
    """
    tried: Samples = {name: [] for name in variants}
    for number in range(rounds):
        ranked = sorted(tried, key=lambda name: min(tried[name], default=0.0))
        for name in ranked[: max(2, len(ranked) >> number)]:
            tried[name].append(variants[name]())
    return min(tried, key=lambda name: min(tried[name])), tried


def minor_faults() -> int:
    """Page faults of this process, all threads, that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
