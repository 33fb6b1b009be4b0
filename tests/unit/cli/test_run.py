"""``tieredckpt run``: its options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tieredckpt.cli.main import cli


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nnodes=2"], "--nnodes needs --rdzv-id"),
        (["--nnodes=1:2"], "--nnodes needs --rdzv-id"),
        (["--nnodes=3:2"], "'3:2' is neither N nor MIN:MAX"),
        (["--nnodes=:2"], "':2' is neither N nor MIN:MAX"),
        (["--nnodes=0"], "'0' is neither N nor MIN:MAX"),
        (["--nnodes=2:2", "--sharding-group=2"], "--sharding-group needs --nnodes MIN:MAX"),
        (["--nnodes=2", "--rdzv-id=a b"], "--nnodes needs --rdzv-id"),
        (["--standby-host"], "--standby-host"),
        (["--rdzv_backend", "c10d"], "--rdzv-backend of torchrun: there is no rendezvous server"),
        (["--standalone"], "--standalone of torchrun"),
        (["--hang", "soon"], "neither auto nor seconds"),
        (["--hang", "-1"], "neither auto nor seconds"),
        (["-m", "--no-python"], "--module and --no-python exclude each other"),
        (["--unknown"], "No such option"),
    ],
)
def test_what_is_refused(options: list[str], message: str):
    command = ["run", "--nproc_per_node", "2", *options, "train.py"]
    found = CliRunner().invoke(cli, command)
    assert found.exit_code == 2, found.output
    assert message in found.output


def run(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tieredckpt", "run", "--nproc-per-node", "1", "--standby", "0"]
    found = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return found.returncode, found.stdout


def test_output_has_a_file_for_each_rank_and_a_failing_script_its_code(tmp_path: Path):
    script = ("--no-python", "/bin/sh", "-c", "echo one; echo two >&2; exit 7")
    code, output = run("--max-restarts", "0", "--log-dir", str(tmp_path / "logs"), *script)
    assert code == 7
    assert "[standby]: one\n[standby]: two\n" in output
    assert (tmp_path / "logs/standby.log").read_text() == "one\ntwo\n"
    assert "is gone: exit code 7" in (tmp_path / "logs/tieredckpt.log").read_text()


def test_a_progress_bar_is_written_as_it_comes():
    script = "printf '10%%\\r20%%\\r\\n'; head -c 200000 /dev/zero | tr '\\0' x; kill -35 $$"
    code, output = run("--max-restarts", "0", "--no-python", "/bin/sh", "-c", script)
    assert code == 1
    assert "[standby]: 10%\n[standby]: 20%\n" in output
    assert output.count("x" * 30000) >= 3
    assert "is gone: signal 35" in output


def test_a_program_that_does_not_exist():
    code, output = run("--no-python", "/no/such/program")
    assert code == 1
    assert "cannot start a process: [Errno 2] No such file or directory" in output
    assert "0 of 1 processes are left, and no restarts: exit 1" in output


def test_a_rank_variable_outside_of_train_is_explained(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("import os\nos.environ['WORLD_SIZE']\n")
    code, output = run("--max-restarts", "0", str(script))
    assert code == 1
    assert "WORLD_SIZE is set inside of train(world) only" in output
