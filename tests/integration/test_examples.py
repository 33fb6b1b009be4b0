"""The examples, run as users run them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import processes_naming
from tests.support.agent import ROOT, wait_until
from tests.support.scripts import run_script
from tieredckpt.testing import netns
from tieredckpt.testing.s3_server import missing

SMALL = (
    "--layers=1", "--width=32", "--heads=2", "--context=32", "--save-every=2", "--warmup=2",
)  # fmt: skip


def test_a_killed_training_goes_on_bit_identically(runtime_dir: Path, tmp_path: Path):
    config = tmp_path / "tieredckpt.yaml"
    config.write_text(
        f"namespace: cut\nagent: {{runtime_dir: {runtime_dir}}}\nmemory: {{capacity: 256MiB}}\n"
        f"tiers: [{{name: disk, url: 'file://{tmp_path}/disk', every: 4 steps}}]\n"
    )

    def start(number: int, failpoints: str = "") -> list[dict[str, Any]]:
        """Events of one start."""
        journal = tmp_path / f"{number}.jsonl"
        words = f"--config={config}", *SMALL, "--steps=8", f"--journal={journal}"
        environ = {"TIEREDCKPT_FAILPOINTS": failpoints}
        is_done, output = run_script(
            ROOT / "examples" / "train_gpt.py", *words, folder=tmp_path, environ=environ
        )
        assert is_done == (not failpoints), output
        return [json.loads(line) for line in journal.read_text().splitlines()]

    def losses(events: list[dict[str, Any]]) -> dict[int, str]:
        return {each["step"]: each["loss"] for each in events if each["event"] == "step"}

    first, second = start(1, "save.commit.before=kill@3"), start(2)
    assert max(losses(first)) == 6
    assert second[0]["step"] == 4
    assert set(second[0]["bytes_by_tier"]) == {"memory"}
    assert losses(second).keys() == {5, 6, 7, 8}
    # Two steps that the first run had done, too, without a restart before them.
    undisturbed, resumed = losses(first), losses(second)
    assert [resumed[step] for step in (5, 6)] == [undisturbed[step] for step in (5, 6)]


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


def lose_a_host(*options: str) -> list[str]:
    small = ["--layers=1", "--width=64", "--context=32", "--steps=32", "--save-every=4"]
    return [sys.executable, str(ROOT / "examples" / "lose_a_host.py"), *small, *options]


def demo_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def lost_host_is_made_up_for(*options: str) -> dict[str, Any]:
    done = subprocess.run(
        lose_a_host("--json", *options),
        env=demo_environment(), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["ok"] is True
    assert result["problems"] == result["losses_different"] == []
    assert result["losses_compared"] >= 16
    assert result["restored_step"] >= result["replicated_step"] >= 2
    assert all(place.startswith("memory on host") for place in result["bytes_by_source"])
    assert f"memory on {result['lost']}" not in result["bytes_by_source"]
    assert "bit-identical" in done.stderr
    return result


@pytest.mark.nightly
def test_a_lost_host():
    """With network namespaces where the machine has them; the leader's host is lost."""
    result = lost_host_is_made_up_for("--hosts=2", "--lose=1")
    assert result["lost"] == "host1"
    wanted = "network namespaces" if netns.missing() is None else "loopback addresses"
    assert result["hosts"].startswith(wanted)


@pytest.mark.nightly
def test_a_lost_host_on_loopback(tmp_path: Path):
    result = lost_host_is_made_up_for("--loopback", f"--keep={tmp_path}")
    assert result["hosts"] == "loopback addresses (no network namespaces: asked for)"
    kept = {path.name for path in tmp_path.iterdir()}
    assert {"reference.jsonl", "first-start.jsonl", "second-start-host1.log"} <= kept


@pytest.mark.nightly
@pytest.mark.parametrize("loopback", [[], ["--loopback"]])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, loopback: list[str]):
    output = tmp_path / "output"
    with output.open("wb") as file:
        demo = subprocess.Popen(
            lose_a_host(f"--keep={tmp_path}", *loopback),
            env=demo_environment(), stdout=file, stderr=file,
        )  # fmt: skip
    memory = Path(f"/dev/shm/tieredckpt-hosts-{demo.pid}")
    journal = tmp_path / "first-start.jsonl"
    wait_until(
        lambda: demo.poll() is not None or (journal.exists() and journal.stat().st_size > 0),
        deadline_s=250,
    )
    assert demo.poll() is None, output.read_text()
    assert len(processes_naming(memory)) == 4
    demo.send_signal(signal.SIGINT)
    assert demo.wait(60) == 130
    assert processes_naming(memory) == processes_naming(tmp_path) == []
    assert not memory.exists()
    assert not list(Path("/run/netns").glob(f"tcknet-{demo.pid}-*"))


@pytest.mark.nightly
def test_a_bucket_outlives_memory_and_disk(tmp_path: Path):
    if why := missing():
        pytest.skip(why)
    command = [sys.executable, str(ROOT / "examples" / "spill_to_s3.py"), "--json"]
    command += ["--layers=1", "--width=32", "--context=32", "--steps=18", "--save-every=2"]
    done = subprocess.run(
        [*command, f"--keep={tmp_path}"],
        env=demo_environment(), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["problems"] == result["losses_different"] == []
    assert result["losses_compared"] >= 18
    assert result["restored_step"] >= result["spilled_step"] >= 12
    assert set(result["bytes_by_source"]) == {"s3"}
    for shown in ("$ tieredckpt retention plan", "$ tieredckpt status", "bit-identical"):
        assert shown in done.stderr


def test_from_torch_save(runtime_dir: Path, tmp_path: Path):
    """It takes a file of torch.save at the first start, and its own save at the next one."""
    config, old = tmp_path / "tieredckpt.yaml", tmp_path / "old.pt"
    memory = "memory: {capacity: 64MiB}"
    config.write_text(f"namespace: x\n{memory}\nagent: {{runtime_dir: {runtime_dir}}}\n")
    script = ROOT / "examples" / "from_torch_save.py"

    def run(*more: object) -> list[str]:
        is_done, output = run_script(
            script, "--config", config, *more, folder=tmp_path, environ={"OMP_NUM_THREADS": "1"}
        )
        assert is_done, output
        return [line for line in output.splitlines() if line.startswith(("begins ", "step "))]

    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
    content = {name: each.state_dict() for name, each in objects.items()}
    torch.save({**content, "step": 40}, old)
    whole = run("--old", old, "--steps", 44, "--every", 2)
    assert whole[:2] == ["begins after step 40", whole[1]]
    again = run("--old", old, "--steps", 46, "--every", 2)
    assert again[0] == "begins after step 44"
    assert again[1].startswith("step 45 ")
