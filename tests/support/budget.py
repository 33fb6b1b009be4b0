"""Shows the test files that take twice their budget: a pytest plugin.

The budgets are tests/seconds.txt. A quiet run writes it anew:

    TEST_SECONDS=tests/seconds.txt make test
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.support.order import budgets

UNKNOWN_S = 5.0
"""The budget of a file that has none."""
FACTOR = 2.0
SLACK_S = 5.0
"""A file is shown if it takes ``FACTOR`` times its budget and at least so much more."""
LEAST_S = 1.0
"""Files that take less are not written down."""
HEAD = """\
# Seconds of one worker for each test file in a quiet run of `make test`, the longest first. They
# are the budgets (docs/understand/testing.md), and the order in which files start. Written anew by
# TEST_SECONDS=tests/seconds.txt make test
"""

taken: Counter[str] = Counter()
"""Seconds of set-up, call and tear-down by file, in all workers together."""
_asked: list[Path] = []


def pytest_configure() -> None:
    """Take the request to write budgets out of the environment: workers, and runs of pytest inside
    of tests, would write theirs into the same file.
    """
    if path := os.environ.pop("TEST_SECONDS", ""):
        _asked.append(Path(path).absolute())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One phase of a test is over. The process that prints gets all, whichever worker ran it."""
    taken[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what exceeds its budget, and write new budgets where that was asked for."""
    if terminalreporter.config.option.markexpr != "not nightly":
        return  # the budgets are those of `make test`
    budget = budgets()
    if lines := exceeded(taken, budget):
        terminalreporter.section("over twice the budget of tests/seconds.txt")
        for line in lines:
            terminalreporter.write_line(line)
    for path in _asked:
        path.write_text(table({**budget, **taken}), "utf-8")


def exceeded(seconds: dict[str, float], budget: dict[str, float]) -> list[str]:
    """A line for each file far over its budget, the worst first."""
    over = []
    for name, spent_s in seconds.items():
        allowed_s = budget.get(name, UNKNOWN_S)
        if spent_s > FACTOR * allowed_s and spent_s > allowed_s + SLACK_S:
            line = f"{spent_s:7.1f} s instead of {allowed_s:.1f} s  {name}"
            over.append((allowed_s - spent_s, line))
    return [line for _, line in sorted(over)]


def table(seconds: dict[str, float]) -> str:
    """The text of tests/seconds.txt; files that are gone are left out."""
    lines = [
        f"{spent_s:7.1f} {name}\n"
        for name, spent_s in seconds.items()
        if spent_s >= LEAST_S and Path(name).exists()
    ]
    return HEAD + "".join(sorted(lines, reverse=True))
