"""The order of test files for several workers: the longest first, so that none ends alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

SECONDS = Path(__file__).parents[1] / "seconds.txt"
"""What each file takes; tests/support/budget.py writes it, and shows those that take more."""


@dataclass(frozen=True)
class Budget:
    """What one test file takes."""

    worker_s: float
    """Seconds of the process that runs it, waiting included."""
    processor_s: float | None
    """Of all processes that it starts; None: the machine did not let us count."""


def budgets() -> dict[str, Budget]:
    """By test file; a file that takes less than a second of a worker is not there.

    Raises ValueError if a line is not one of ours.
    """
    found = {}
    for line in SECONDS.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            worker, processor, name = line.split()
            processor_s = None if processor == "-" else float(processor)
            found[name] = Budget(worker_s=float(worker), processor_s=processor_s)
    return found


def longest_first(items: list[pytest.Item]) -> None:
    """Sort ``items`` by their file's budget; the same in every worker."""
    takes = {name: budget.worker_s for name, budget in budgets().items()}
    items.sort(key=lambda item: -takes.get(item.nodeid.partition("::")[0], 0.0))
