"""The examples for training frameworks, run as users run them, with the frameworks' own code."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.agent import ROOT
from tests.support.frameworks import snippet

EXAMPLES = {"transformers": "hf_trainer.py", "lightning": "lightning_module.py"}


@pytest.mark.slow
@pytest.mark.parametrize("framework", EXAMPLES)
def test_a_killed_training_goes_on_with_the_same_losses(
    runtime_dir: Path, tmp_path: Path, framework: str
):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed here (`make test` installs it)")
    memory = "memory: {capacity: 64MiB, keep: {last: 2}}"
    agent = f"agent: {{runtime_dir: {runtime_dir}, start_timeout: 60s}}"
    (tmp_path / "tieredckpt.yaml").write_text(f"{memory}\n{agent}\n")
    command = [sys.executable, str(ROOT / "examples" / EXAMPLES[framework]), "--epochs", "3"]

    def run(namespace: str, failpoints: str = "") -> tuple[int, list[str]]:
        """One start: exit status, and what it printed of each step."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TIEREDCKPT_NAMESPACE": namespace,
            "TIEREDCKPT_FAILPOINTS": failpoints,
        }
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240,
            check=False,
        )  # fmt: skip
        assert failpoints or done.returncode == 0, done.stderr[-3000:]
        return done.returncode, [x for x in done.stdout.splitlines() if x.startswith("step ")]

    with ThreadPoolExecutor() as both:
        undisturbed = both.submit(run, "whole")
        code, first = run("cut", "save.commit.before=kill@3")
        _, whole = undisturbed.result()
    assert [line.split()[1] for line in whole] == [*map(str, range(1, 25))]
    assert code == -9
    assert first == whole[: len(first)]
    _, again = run("cut")
    # After the second save: step 10 of 8 an epoch, and the end of the second epoch.
    saved = {"transformers": 10, "lightning": 16}[framework]
    assert saved < len(first)
    assert again == whole[saved:]
    # Neither framework has written a checkpoint of its own.
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [tmp_path / "tieredckpt.yaml"]


def test_the_page_shows_lines_of_the_example():
    example = {line.strip() for line in (ROOT / "examples/hf_trainer.py").read_text().splitlines()}
    shown = [
        line.partition("  #")[0].strip() for line in snippet("Hugging Face Trainer").split("\n")
    ]
    assert len(shown) > 2
    assert [line for line in shown if line and line not in example] == []
