"""How ``tieredckpt run`` ends by signals: with its code, and without a process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.conftest import processes_naming
from tests.support.agent import ROOT, wait_until
from tests.support.live import Fault, Started, config_of, start, stopped_agent, supervised
from tests.support.live_small import exits_after, script_of, then_notes

HANG = (Fault(3, 1, "hang"),)
"""Rank 1 waits in Python, and rank 0 for it in a collective."""


@pytest.fixture
def folder(runtime_dir: Path) -> Iterator[Path]:
    with stopped_agent(runtime_dir):
        yield runtime_dir


def hanging(folder: Path, script: str, grace_s: float) -> tuple[Started, list[int]]:
    """A training that hangs, and its processes."""
    found = start(folder, HANG, size=2, standby=1, grace_s=grace_s, script=script_of(script))
    wait_until(lambda: len(found.rows()) == 2 and (folder / "did-3-1-hang").exists())
    children = Path(f"/proc/{found.pid}/task/{found.pid}/children").read_text().split()
    assert len(children) == 3
    return found, [int(pid) for pid in children]


def is_gone(pid: int) -> bool:
    """Whether it ended; its parent may not have reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.full)],
)
def test_a_signal_is_forwarded_and_ends_the_training(folder: Path, number: int, code: int):
    found, children = hanging(folder, "plain", grace_s=60.0)
    os.kill(found.pid, number)
    outcome = found.outcome()
    assert outcome.code == code
    assert all(map(is_gone, children))
    assert len(outcome.said("is gone")) == 3


def test_a_rank_that_ends_by_itself_at_sigterm_runs_what_follows(folder: Path):
    found = start(folder, size=2, standby=1, grace_s=60.0, script=then_notes)
    wait_until(lambda: len(found.rows()) >= 2)
    os.kill(found.pid, signal.SIGTERM)
    assert found.outcome().code == 143
    assert sorted(path.name for path in folder.glob("after-*")) == ["after-0", "after-1"]


@pytest.mark.full
def test_a_notice_to_each_process_that_is_also_forwarded_is_one(folder: Path):
    script = script_of("leaves_on_notice")
    found = start(folder, size=2, standby=1, grace_s=60.0, script=script)
    wait_until(lambda: len(found.rows()) >= 2)
    text = Path(f"/proc/{found.pid}/task/{found.pid}/children").read_text()
    children = [int(pid) for pid in text.split()]
    for pid in [*children[:2], found.pid]:
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: any(map(is_gone, children)))  # the standby, which has no handler
    wait_until(lambda: len(list(folder.glob("asked-*"))) == 2)
    (folder / "standby-is-gone").touch()
    assert found.outcome().code == 143
    assert sorted(path.name for path in folder.glob("left-*")) == ["left-0-True", "left-1-True"]


@pytest.mark.full
def test_the_exit_code_of_what_follows_the_training(folder: Path):
    found = supervised(folder, size=2, standby=0, script=exits_after)
    assert found.code == 7
    assert found.said("rank 0 failed after live.run: exit code 7")


def test_a_second_signal_kills(folder: Path):
    found, children = hanging(folder, "ignores_signals", grace_s=60.0)
    os.kill(found.pid, signal.SIGTERM)
    wait_until(lambda: (folder / "ignored").exists())
    assert sum(map(is_gone, children)) <= 1, "others than the standby ended"
    os.kill(found.pid, signal.SIGTERM)
    assert found.outcome().code == 143
    assert all(map(is_gone, children))


@pytest.mark.parametrize(
    "script", [pytest.param("plain", marks=pytest.mark.full), "ignores_signals"]
)
def test_without_their_supervisor_processes_end(folder: Path, script: str):
    found, children = hanging(folder, script, grace_s=60.0)
    os.kill(found.pid, signal.SIGKILL)
    assert found.outcome().code == -signal.SIGKILL
    wait_until(lambda: all(map(is_gone, children)), deadline_s=120)


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_command(folder: Path, number: int, code: int):
    """A recipe as users run it, with new interpreters."""
    config, journal = folder / "tieredckpt.yaml", folder / "journal"
    config.write_text(yaml.safe_dump(config_of(str(folder))))
    command = [sys.executable, "-m", "tieredckpt", "run", "--nproc-per-node=2", "--standby=1"]
    command += [str(ROOT / "examples" / "live" / "accumulation.py"), f"--config={config}"]
    command += ["--steps=1000000", f"--journal={journal}"]
    temporary = folder / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(temporary)}
    with (folder / "output").open("wb") as output:
        found = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        wait_until(
            lambda: found.poll() is not None or (journal.exists() and journal.stat().st_size > 99),
            deadline_s=120,
        )
        assert len(processes_naming(config)) == 4, (folder / "output").read_text()
        found.send_signal(number)
        assert found.wait(60) == code, (folder / "output").read_text()
    finally:
        found.kill()
        found.wait()
    assert processes_naming(config) == []
    assert list(temporary.iterdir()) == [], "the folder of the socket and the keys is left"
