"""Shows the test files that take twice their budget: a pytest plugin.

The budgets are tests/seconds.txt. A quiet run writes it anew:

    TEST_SECONDS=tests/seconds.txt make test
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.order import Budget, budgets
from tests.support.processor import Processor

UNKNOWN = Budget(worker_s=5.0, processor_s=5.0)
"""The budget of a file that has none."""
FACTOR = 2.0
SLACK_S = 5.0
"""A file is shown if it takes ``FACTOR`` times its budget and at least so much more."""
LEAST_S = 1.0
"""Files that take less are not written down."""
GATE = "not full and not nightly"
"""What `make test` runs, and `make check` a part of."""
HEAD = """\
# The budget of each test file in `make test` (docs/understand/testing.md): seconds of one worker,
# and processor seconds of all processes. The longest first, as they start. A quiet run writes it:
# TEST_SECONDS=tests/seconds.txt make test
"""

worker_s: Counter[str] = Counter()
"""Seconds of set-up, call and tear-down by file, in all workers together."""
processor_s: Counter[str] = Counter()
"""Processor seconds by file, where this machine lets us count them."""
_asked: list[Path] = []


def pytest_configure(config: pytest.Config) -> None:
    """Take the request to write budgets out of the environment: workers, and runs of pytest inside
    of tests, would write theirs into the same file.
    """
    if path := os.environ.pop("TEST_SECONDS", ""):
        _asked.append(Path(path).absolute())
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(_Meter(), "processor-seconds")


class _Meter:
    """In the process that runs tests."""

    def __init__(self) -> None:
        self._processor = Processor()
        self._last_s = self._processor.seconds()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        now_s = self._processor.seconds()
        if now_s is not None and self._last_s is not None:
            processor_s[nodeid.partition("::")[0]] += now_s - self._last_s
        self._last_s = now_s

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["processor_s"] = dict(processor_s)

    def pytest_unconfigure(self) -> None:
        self._processor.close()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker ended: add what it counted."""
    processor_s.update(getattr(node, "workeroutput", {}).get("processor_s", {}))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One phase of a test is over. The process that prints gets all, whichever worker ran it."""
    worker_s[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what exceeds its budget, and write new budgets where that was asked for."""
    spent = {
        name: Budget(worker_s=taken_s, processor_s=processor_s.get(name))
        for name, taken_s in worker_s.items()
    }
    if terminalreporter.config.option.markexpr == GATE:
        sums = (
            f"{worker_s.total():,.0f} worker-seconds, {processor_s.total():,.0f} processor-seconds"
        )
        terminalreporter.write_line(f"\n{sums}")
        if lines := exceeded(spent, budgets()):
            terminalreporter.section("over twice the budget of tests/seconds.txt")
            for line in lines:
                terminalreporter.write_line(line)
        for path in _asked:
            path.write_text(table({**budgets(), **spent}), "utf-8")


def exceeded(spent: dict[str, Budget], allowed: dict[str, Budget]) -> list[str]:
    """A line for each file far over its budget, the worst first.

    Processor seconds count where they are known: waiting takes longer on a busy machine.
    """
    over = []
    for name, found in spent.items():
        budget = allowed.get(name, UNKNOWN)
        spent_s, allowed_s, what = found.worker_s, budget.worker_s, "s"
        if found.processor_s is not None and budget.processor_s is not None:
            spent_s, allowed_s, what = found.processor_s, budget.processor_s, "processor s"
        if spent_s > FACTOR * allowed_s and spent_s > allowed_s + SLACK_S:
            line = f"{spent_s:7.1f} {what} instead of {allowed_s:.1f}  {name}"
            over.append((allowed_s - spent_s, line))
    return [line for _, line in sorted(over)]


def table(spent: dict[str, Budget]) -> str:
    """The text of tests/seconds.txt; files that are gone are left out."""
    lines = []
    for name, each in sorted(spent.items(), key=lambda item: (-item[1].worker_s, item[0])):
        if each.worker_s >= LEAST_S and Path(name).exists():
            processor = "-" if each.processor_s is None else f"{each.processor_s:.1f}"
            lines.append(f"{each.worker_s:7.1f} {processor:>7} {name}\n")
    return HEAD + "".join(lines)
