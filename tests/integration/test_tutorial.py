"""docs/start/tutorial.md as a newcomer follows it: its snippets are the script's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.agent import ROOT

PAGE = (ROOT / "docs" / "start" / "tutorial.md").read_text()
SCRIPTS = ROOT / "examples" / "tutorial"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_snippets_are_the_script():
    script = (SCRIPTS / "after.py").read_text()
    assert len(blocks("python")) == 4
    for snippet in blocks("python"):
        assert snippet in script


class Newcomer:
    """Runs the scripts in an empty folder with the page's configuration."""

    def __init__(self, folder: Path, runtime_dir: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TIEREDCKPT_RUNTIME_DIR": str(runtime_dir),
        }
        (configuration,) = blocks("yaml")
        disk = "/tmp/tieredckpt-tutorial"
        assert disk in configuration
        (folder / "tieredckpt.yaml").write_text(configuration.replace(disk, f"{folder}/disk"))

    def run(
        self, script: str, *options: str, ranks: int = 2, failpoints: str = ""
    ) -> tuple[int, str]:
        done = subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                f"--nproc-per-node={ranks}", str(SCRIPTS / script), *options,
            ],
            cwd=self.folder,
            env={**self.environment, "TIEREDCKPT_FAILPOINTS": failpoints},
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr


def losses(output: str, after: int = 0) -> set[str]:
    """The lines of steps after ``after``; two ranks may write into one line."""
    lines = re.findall(r"rank \d+ step \d+ loss \d+\.\d{6}", output)
    assert lines, output[-3000:]
    return {line for line in lines if int(line.split()[3]) > after}


@pytest.mark.nightly
def test_the_script_before(runtime_dir: Path, tmp_path: Path):
    code, output = Newcomer(tmp_path, runtime_dir).run("before.py", "--steps=6")
    assert code == 0, output
    assert (tmp_path / "ckpt" / "step-5").is_dir()


@pytest.mark.slow
def test_a_newcomer_gets_through(runtime_dir: Path, tmp_path: Path):
    newcomer = Newcomer(tmp_path, runtime_dir)
    # The save of step 10 dies before its commit; nobody cleans up.
    code, killed = newcomer.run("after.py", "--steps=12", failpoints="save.commit.before=kill@2")
    assert code != 0
    assert "starts from None" in killed
    code, second = newcomer.run("after.py", "--steps=5")
    assert code == 0, second
    assert "starts from 5" in second
    # The first run had done steps 6 to 10, too, without a restart before them.
    assert losses(second) == losses(killed, after=5)
