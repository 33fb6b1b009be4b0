"""A run of the tests ends when one of them hangs, and names it: tests/support/limits.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

HANGS_IN_PYTHON = """
import threading

def test_hangs_in_python():
    threading.Event().wait()
"""
# A mutex that its own thread has locked already: no signal brings the call to an end.
HANGS_IN_C = """
import ctypes

def test_hangs_in_c():
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(256)
    while True:
        libc.pthread_mutex_lock(mutex)
"""
FAILS_THEN_HANGS_IN_C = (
    HANGS_IN_C.replace("def test_hangs_in_c", "def hang")
    + """
import pytest

@pytest.fixture
def stuck():
    yield
    hang()

def test_fails(stuck):
    assert False
"""
)
PASSES = "def test_passes(): pass"
WAITS = HANGS_IN_PYTHON.replace("def test", "import pytest\n\n@pytest.mark.timeout(0)\ndef test")
"""A test without a limit, such as a long one of another worker."""


def run(folder: Path, *options: str, **files: str) -> tuple[int, str]:
    """Exit code and output of a run of ``files``, with the settings of pyproject.toml."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
    command += ["-p", "tests.support.limits", "-p", "no:cacheprovider", *options, str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def test_hang_in_python_fails_that_test_alone(tmp_path: Path):
    options = ("-n", "1", "--dist", "loadfile", "-o", "timeout=1")
    code, output = run(tmp_path, *options, a=HANGS_IN_PYTHON, b=PASSES)
    assert code == 1, output
    assert "test_a.py::test_hangs_in_python - Failed: Timeout" in output
    assert "1 failed, 1 passed" in output


def test_hang_in_c_ends_its_worker_and_the_run(tmp_path: Path):
    options = ("-n", "2", "--dist", "loadfile", "-o", "timeout=1", "-o", "timeout_grace=1")
    code, output = run(tmp_path, *options, a=HANGS_IN_C, b=WAITS)
    assert code == 1, output
    assert "crashed while running" in output
    assert "test_a.py::test_hangs_in_c" in output
    assert 'test_a.py", line 8 in test_hangs_in_c' in output, "no stack of it"


def test_hang_in_the_teardown_of_a_failed_test_ends_the_run(tmp_path: Path):
    options = ("-n", "1", "--dist", "loadfile", "-o", "timeout=1", "-o", "timeout_grace=1")
    code, output = run(tmp_path, *options, a=FAILS_THEN_HANGS_IN_C)
    assert code == 1, output
    assert "crashed while running" in output
    assert "test_a.py::test_fails" in output
    assert 'test_a.py", line 8 in hang' in output, "no stack of it"


def test_run_that_takes_too_long_prints_what_is_running(tmp_path: Path):
    options = ("-n", "1", "--dist", "loadfile", "-o", "run_timeout=5")
    code, output = run(tmp_path, *options, a=WAITS)
    assert code == 2, output
    assert "the run took 5 s, its limit; running:" in output
    assert "test_a.py::test_hangs_in_python (" in output
