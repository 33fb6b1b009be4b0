"""A run shows the test files that exceed their budget, and can write the budgets anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import budget
from tests.support.order import SECONDS, budgets

ROOT = Path(__file__).parents[1]
TWELVE_SECONDS = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.duration = 12.0 if call.when == "call" else 0.0
    return report
"""


def test_a_run_of_several_workers_shows_what_exceeds_its_budget(tmp_path: Path):
    """Twelve seconds are over twice the five that a file has which nobody has measured."""
    (tmp_path / "conftest.py").write_text(TWELVE_SECONDS)
    (tmp_path / "test_new.py").write_text("def test_it():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.budget", "-n", "1"]
    command += ["-m", "not nightly", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    written = tmp_path / "seconds.txt"
    done = subprocess.run(
        [*command, "test_new.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TEST_SECONDS": str(written)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12.0 s instead of 5.0 s  test_new.py" in done.stdout
    assert "12.0 test_new.py" in written.read_text()


def test_what_counts_as_exceeded():
    allowed = {"a.py": 10.0, "b.py": 1.0}
    assert not budget.exceeded({"a.py": 20.0, "b.py": 6.0, "new.py": 10.0}, allowed)
    spent = {"a.py": 20.1, "b.py": 6.1, "new.py": 10.1}
    assert [line.split()[-1] for line in budget.exceeded(spent, allowed)] == [
        "a.py", "b.py", "new.py",
    ]  # fmt: skip


def test_the_budgets_are_of_files_that_are_there():
    assert budgets(), SECONDS
    assert not [name for name in budgets() if not (ROOT / name).exists()]
