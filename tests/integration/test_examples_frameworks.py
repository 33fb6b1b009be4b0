"""The examples for training frameworks, run as users run them, with the frameworks' own code."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.agent import ROOT
from tests.support.frameworks import snippet, workshop
from tests.support.scripts import run_script


@pytest.mark.parametrize(
    ("framework", "example", "every", "saved"),
    [
        ("transformers", "hf_trainer.py", 5, 10),
        pytest.param("transformers", "hf_trainer.py", 15, 15, marks=pytest.mark.full),
        pytest.param("lightning", "lightning_module.py", 8, 16, marks=pytest.mark.full),
    ],
)
def test_a_killed_training_goes_on_with_the_same_losses(
    runtime_dir: Path, tmp_path: Path, framework: str, example: str, every: int, saved: int
):
    """Killed in the next save: on from step 10, from before an epoch's last step, or from its end.

    The rows of the Trainer's example draw from the generators of torch, Python and NumPy.
    """
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed here (`make test` installs it)")
    memory = "memory: {capacity: 64MiB, keep: {last: 2}}"
    agent = f"agent: {{runtime_dir: {runtime_dir}, start_timeout: 60s}}"
    (tmp_path / "tieredckpt.yaml").write_text(f"{memory}\n{agent}\n")
    options = ("--every", every) if framework == "transformers" else ()
    with workshop("tieredckpt.engine", framework) as shop:

        def run(failpoints: str = "") -> list[str]:
            """One start: what it printed of each step."""
            environ = {"TIEREDCKPT_NAMESPACE": "cut", "TIEREDCKPT_FAILPOINTS": failpoints}
            is_done, output = run_script(
                ROOT / "examples" / example, "--epochs", 3, *options, folder=tmp_path,
                environ=environ, start=shop.run,
            )  # fmt: skip
            assert is_done == (not failpoints), output
            return [line for line in output.splitlines() if line.startswith("step ")]

        first, again = run(f"save.commit.before=kill@{saved // every + 1}"), run()
    assert [line.split()[1] for line in again] == [*map(str, range(saved + 1, 25))]
    # The first run had done these steps, too, without a restart before them.
    undisturbed = first[saved:]
    assert len(undisturbed) >= 4
    assert again[: len(undisturbed)] == undisturbed
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
