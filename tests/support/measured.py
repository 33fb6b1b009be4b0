"""What the benchmarks' harness is told to measure in its own tests: imports no torch."""

from __future__ import annotations

import os

from benchmarks.measure import Report, Samples
from benchmarks.processes import Setup


def works(setup: Setup, report: Report) -> Samples:
    report(1, 1)
    return {"pid": [float(os.getpid())], "rank": [float(os.environ["RANK"])]}


def breaks(_setup: Setup, _report: Report) -> Samples:
    raise OSError("the disk said no")
