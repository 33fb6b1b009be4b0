"""The examples, run as users run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent import ROOT

SMALL = (
    "--layers=1", "--width=32", "--heads=2", "--context=32", "--save-every=2", "--warmup=2",
)  # fmt: skip


class Training:
    """Starts of ``train_gpt.py`` with one configuration."""

    def __init__(self, runtime_dir: Path, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "tieredckpt.yaml"
        self.config.write_text(
            f"agent: {{runtime_dir: {runtime_dir}}}\nmemory: {{capacity: 256MiB}}\n"
            f"tiers: [{{name: disk, url: 'file://{folder}/disk', every: 4 steps}}]\n"
        )
        self.starts = 0

    def start(
        self, namespace: str, *, steps: int, ranks: int = 1, failpoints: str = ""
    ) -> tuple[int, list[dict[str, Any]]]:
        """One start: exit status and events."""
        self.starts += 1
        journal = self.folder / f"{self.starts}.jsonl"
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(ROOT / "examples" / "train_gpt.py"), f"--config={self.config}", *SMALL]
        command += [f"--steps={steps}", f"--journal={journal}"]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TIEREDCKPT_NAMESPACE": namespace,
            "TIEREDCKPT_FAILPOINTS": failpoints,
        }
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert failpoints or done.returncode == 0, done.stderr[-3000:]
        return done.returncode, [json.loads(line) for line in journal.read_text().splitlines()]


def losses(events: list[dict[str, Any]]) -> dict[int, str]:
    return {each["step"]: each["loss"] for each in events if each["event"] == "step"}


@pytest.mark.slow
def test_a_killed_training_goes_on_bit_identically_and_on_more_ranks(
    runtime_dir: Path, tmp_path: Path
):
    training = Training(runtime_dir, tmp_path)
    _, whole = training.start("whole", steps=8)
    code, first = training.start("cut", steps=8, failpoints="save.commit.before=kill@3")
    assert code == -9
    assert max(losses(first)) == 6
    _, second = training.start("cut", steps=8)
    assert second[0]["step"] == 4
    assert set(second[0]["bytes_by_tier"]) == {"memory"}
    assert losses(second).keys() == {5, 6, 7, 8}
    expected = losses(whole)
    assert {step: expected[step] for step in losses(first)} == losses(first)
    assert {step: expected[step] for step in losses(second)} == losses(second)

    _, resharded = training.start("cut", steps=10, ranks=2)
    assert resharded[0]["step"] == 8
    assert losses(resharded).keys() == {9, 10}
    assert all(float.fromhex(loss) < 6 for loss in losses(resharded).values())


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_demo(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), f"--out={tmp_path / 'demo'}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every one bit-identical" in done.stdout.replace("\n", " ")
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 10_000
