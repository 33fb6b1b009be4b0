"""What all tests share: Hypothesis profiles, a runtime folder of their own, visible GPU skips."""

from __future__ import annotations

import itertools
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.counts import as_json, counts, of, table
from tests.support.leftovers import shm
from tests.support.order import longest_first

pytest_plugins = [
    "tests.support.limits",
    "tests.support.progress",
    "tests.support.budget",
    "tests.support.s3",
]

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# The gate must not fail by chance on a change that did not cause it: the same examples every time.
settings.register_profile("gate", max_examples=50, derandomize=True, database=None, **_COMMON)
settings.register_profile("full", max_examples=100, **_COMMON)
settings.register_profile("nightly", max_examples=3000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "gate")

_numbers = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files for several workers; skip what needs a GPU where there is none."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        longest_first(items)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch  # only if it matters

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, this machine has none"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist sends what it counted to the process that prints."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["counts"] = [
            [layer, *key, number]
            for layer, found in counts.items()
            for key, number in found.items()
        ]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker ended: add what it counted."""
    for layer, operation, fault, number in getattr(node, "workeroutput", {}).get("counts", ()):
        of(layer)[operation, fault] += number


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was tried, per operation and fault."""
    for layer, found in sorted(counts.items()):
        terminalreporter.section(f"faults: {layer}")
        for line in table(found):
            terminalreporter.write_line(line)
    if counts and (path := os.environ.get("FAULT_JSON")):
        Path(path).write_text(as_json())


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the machine that runs the tests may decide their outcome."""
    for name in list(os.environ):
        if name.startswith("TIEREDCKPT_") or name in (
            "SLURM_JOB_ID",
            "JOBSET_NAME",
            "TORCHELASTIC_RUN_ID",
        ):
            monkeypatch.delenv(name)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """An empty runtime folder in tmpfs; agents that were started in it are stopped afterwards."""
    folder = shm() / f"tck-test-{os.getpid()}-{next(_numbers)}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        stop_processes_of(folder)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def starts_agent() -> None:
    """For a test that wants its agent started by the engine, where others are :func:`served`."""


@pytest.fixture
def served(runtime_dir: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """An agent that serves ``runtime_dir`` already: forked, so a tenth of what a new one costs."""
    if "starts_agent" in request.fixturenames:
        yield
        return
    from tests.support.faults import ForkedAgent  # only who uses it pays for importing numpy

    agent = ForkedAgent(runtime_dir)
    try:
        yield
    finally:
        agent.kill()


def stop_processes_of(folder: Path, *, deadline_s: float = 10.0) -> None:
    """End each process whose command line names ``folder``: SIGTERM, then SIGKILL.

    The folder's name is unique to one test, so only what that test started is met.
    """
    open_fds = {pid: fd for pid in processes_naming(folder) if (fd := _pidfd(pid)) is not None}
    try:
        for number, patience_s in ((signal.SIGTERM, deadline_s), (signal.SIGKILL, deadline_s)):
            for fd in open_fds.values():
                for each in (signal.SIGCONT, number) if number == signal.SIGKILL else (number,):
                    try:
                        signal.pidfd_send_signal(fd, each)
                    except ProcessLookupError:
                        break
            limit_s = time.monotonic() + patience_s
            while open_fds and (left_s := limit_s - time.monotonic()) > 0:
                done, _, _ = select.select(list(open_fds.values()), [], [], left_s)
                for pid in [pid for pid, fd in open_fds.items() if fd in done]:
                    os.close(open_fds.pop(pid))
    finally:
        for fd in open_fds.values():
            os.close(fd)


def processes_naming(folder: Path) -> list[int]:
    """Process ids, other than ours, that have ``folder`` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if str(folder).encode() in command:
            found.append(int(entry.name))
    return found


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
