"""A run shows the test files that exceed their budget, and can write the budgets anew."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support import budget, preloaded
from tests.support.order import SECONDS, Budget, budgets

ROOT = Path(__file__).parents[1]
TWELVE_SECONDS = """
import pytest
from tests.support.processor import Processor

Processor.seconds = lambda self: None

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
    command += ["-m", budget.GATE, "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
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
    assert "12.0 s instead of 5.0  test_new.py" in done.stdout
    assert "12.0" in written.read_text()


def of(worker_s: float, processor_s: float | None = None) -> Budget:
    return Budget(worker_s=worker_s, processor_s=processor_s)


def test_what_counts_as_exceeded():
    allowed = {"a.py": of(10.0), "b.py": of(1.0), "busy.py": of(10.0, 3.0)}
    within = {"a.py": of(20.0), "b.py": of(6.0), "new.py": of(10.0), "busy.py": of(90.0, 6.0)}
    assert not budget.exceeded(within, allowed)
    spent = {"a.py": of(20.1), "b.py": of(6.1), "new.py": of(10.1), "busy.py": of(10.0, 20.0)}
    assert [line.split()[-1] for line in budget.exceeded(spent, allowed)] == [
        "busy.py", "a.py", "b.py", "new.py",
    ]  # fmt: skip


def test_the_budgets_are_of_files_that_are_there():
    assert budgets(), SECONDS
    assert not [name for name in budgets() if not (ROOT / name).exists()]


def imported(pipe: Connection, names: list[str]) -> None:
    pipe.send([name for name in names if name not in sys.modules])


def test_a_fork_has_all_modules_that_it_is_made_for():
    """Else each fork of each test imports torch: four times the processor time of the whole run.

    Other code, such as the benchmarks', has the fork server import something else.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["json"])
    mine, theirs = preloaded.context.Pipe()
    process = preloaded.context.Process(target=imported, args=(theirs, preloaded.MODULES))
    process.start()
    assert mine.recv() == []
    process.join(60)
