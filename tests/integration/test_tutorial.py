"""docs/start/tutorial.md as a newcomer follows it: its snippets are the script's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.agent import ROOT
from tests.support.scripts import run_script

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
        self.environ = {"TIEREDCKPT_RUNTIME_DIR": str(runtime_dir)}
        (configuration,) = blocks("yaml")
        disk = "/tmp/tieredckpt-tutorial"
        assert disk in configuration
        (folder / "tieredckpt.yaml").write_text(configuration.replace(disk, f"{folder}/disk"))

    def run(self, script: str, *options: str, failpoints: str = "") -> tuple[bool, str]:
        environ = {**self.environ, "TIEREDCKPT_FAILPOINTS": failpoints}
        return run_script(SCRIPTS / script, *options, folder=self.folder, environ=environ, ranks=2)


def losses(output: str, after: int = 0) -> set[str]:
    """The lines of steps after ``after``; two ranks may write into one line."""
    lines = re.findall(r"rank \d+ step \d+ loss \d+\.\d{6}", output)
    assert lines, output[-3000:]
    return {line for line in lines if int(line.split()[3]) > after}


@pytest.mark.nightly
def test_the_script_before(runtime_dir: Path, tmp_path: Path):
    is_done, output = Newcomer(tmp_path, runtime_dir).run("before.py", "--steps=6")
    assert is_done, output
    assert (tmp_path / "ckpt" / "step-5").is_dir()


def test_a_newcomer_gets_through(runtime_dir: Path, tmp_path: Path):
    newcomer = Newcomer(tmp_path, runtime_dir)
    # The save of step 10 dies before its commit; nobody cleans up.
    is_done, killed = newcomer.run("after.py", "--steps=12", failpoints="save.commit.before=kill@2")
    assert not is_done
    assert "starts from None" in killed
    is_done, second = newcomer.run("after.py", "--steps=5")
    assert is_done, second
    assert "starts from 5" in second
    # The first run had done steps 6 to 10, too, without a restart before them.
    assert losses(second) == losses(killed, after=5)
