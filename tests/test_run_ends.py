"""A run of the tests ends when one of them hangs, and names it: tests/support/limits.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support.agent import wait_until
from tests.support.faults import state_of
from tieredckpt.testing import s3_server

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
PASSES = "def test_passes(): pass"
WAITS = HANGS_IN_PYTHON.replace("def test", "import pytest\n\n@pytest.mark.timeout(0)\ndef test")
"""A test without a limit, such as a long one of another worker."""
LEAVES = ROOT / "tests" / "support" / "run_that_leaves.py"


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


def test_run_that_takes_too_long_prints_what_is_running(tmp_path: Path):
    options = ("-n", "1", "--dist", "loadfile", "-o", "run_timeout=5")
    code, output = run(tmp_path, *options, a=WAITS)
    assert code == 2, output
    assert "the run took 5 s, its limit; running:" in output
    assert "test_a.py::test_hangs_in_python (" in output


@pytest.mark.parametrize("ended", ["make by SIGTERM", "its group by SIGINT, in the background"])
def test_run_that_is_stopped_leaves_nothing_but_what_failed(ended: str, tmp_path: Path):
    """As ``kill``, and as ``&`` in a shell, where SIGINT is ignored until somebody handles it."""
    by_make = ended.startswith("make")
    report = tmp_path / "report"
    # An environment that looks old to make is not replaced under the tests that run in it.
    command = [
        "make",
        "-o",
        ".venv/.installed",
        "test",
        "WORKERS=1",
        f"PYTEST_ARGS=-o testpaths= {LEAVES}",
    ]
    if not by_make:
        command = [sys.executable, "-m", "pytest", "-n", "1", str(LEAVES)]
    with (tmp_path / "output").open("wb") as output:
        running = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "TEST_REPORT": str(report)},
            preexec_fn=None if by_make else partial(signal.signal, signal.SIGINT, signal.SIG_IGN),
        )  # fmt: skip
    try:
        wait_until(lambda: report.exists() or running.poll() is not None, deadline_s=200)
        assert running.poll() is None, (tmp_path / "output").read_text()
        if by_make:
            running.terminate()
        else:
            os.killpg(running.pid, signal.SIGINT)
        running.wait(60)
    finally:
        running.kill()
    said = (tmp_path / "output").read_text()
    assert running.returncode in (2, -signal.SIGTERM), said
    assert f"stopped by {'SIGTERM' if by_make else 'SIGINT'}" in said
    assert f"-m pytest {LEAVES.relative_to(ROOT)}::test_fails_and_keeps_its_folder" in said
    left = json.loads(report.read_text())
    assert len(left["pids"]) == 4 + (s3_server.missing() is None)
    wait_until(lambda: all(state_of(pid) in ("", "Z") for pid in left["pids"]))
    assert not [path for path in left["paths"] if Path(path).exists()]
    assert Path(left["kept"]).exists()
