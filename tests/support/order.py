"""The order of test files for several workers: the longest first, so that none ends alone."""

from __future__ import annotations

from pathlib import Path

import pytest

SECONDS = Path(__file__).parents[1] / "seconds.txt"
"""What each file takes; tests/support/budget.py writes it, and shows who takes more."""


def budgets() -> dict[str, float]:
    """Worker seconds by test file; a file that takes less than one is not there.

    Raises ValueError if a line is not one of ours.
    """
    found = {}
    for line in SECONDS.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            seconds, name = line.split()
            found[name] = float(seconds)
    return found


def longest_first(items: list[pytest.Item]) -> None:
    """Sort ``items`` by their file's budget; the same in every worker."""
    budget = budgets()
    items.sort(key=lambda item: -budget.get(item.nodeid.partition("::")[0], 0.0))
