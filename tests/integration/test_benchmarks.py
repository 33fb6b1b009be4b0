"""The benchmarks run, and their harness tells the truth when something in them fails."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measure, runner
from benchmarks.processes import ROOT, Spawner
from benchmarks.registry import SCENARIOS, Scenario
from benchmarks.shapes import Shape
from tests.support.measured import breaks, works

TINY = Shape(vocab=64, dim=8, kv_dim=4, ffn=16, layers=1)


def quick_run(folder: Path, runtime_dir: Path, *options: str) -> dict[str, Any]:
    """The answer of a run of tiny sizes, which leaves nothing behind but results."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks", "--quick", "--repeat", "2", "--json", *options),
            *("--disk", str(folder / "disk"), "--shm", str(runtime_dir)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    for each in (folder / "disk", runtime_dir):
        assert not list(each.iterdir()), "the run left something behind"
    result: dict[str, Any] = json.loads(done.stdout)
    for outcome in result["outcomes"]:
        assert outcome["rows"], outcome["name"]
        for row in outcome["rows"]:
            assert math.isfinite(row["value"]), row
            assert 0 <= row["ours"]["least"] <= row["ours"]["p50"] <= row["ours"]["p99"], row
    return result


def test_quick_run_of_one_scenario(tmp_path: Path, runtime_dir: Path):
    result = quick_run(tmp_path, runtime_dir, "--only", "small")
    assert [outcome["name"] for outcome in result["outcomes"]] == ["small"]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_quick_run_measures_every_row_and_writes_all_files(tmp_path: Path, runtime_dir: Path):
    result = quick_run(tmp_path, runtime_dir, "--output", str(tmp_path / "results"))
    assert [outcome["name"] for outcome in result["outcomes"]] == [s.name for s in SCENARIOS]
    rows = [row for outcome in result["outcomes"] for row in outcome["rows"]]
    assert sum(row["target"] is not None for row in rows) >= 9
    suffixes = sorted(path.suffix for path in (tmp_path / "results").iterdir())
    assert suffixes in ([".json", ".md", ".png"], [".json", ".md"])  # the plot is an extra


def make_plan(tmp_path: Path) -> runner.Plan:
    for name in ("shm", "disk"):
        (tmp_path / name).mkdir()
    return runner.Plan(
        shape=TINY, repeat=2, repeat_slow=1, shm=str(tmp_path / "shm"), disk=str(tmp_path / "disk")
    )


def scenario(name: str, run) -> Scenario:
    return Scenario(name=name, title=name, run=run, memory_states=1.0, timeout_s=20.0)


def run_all(plan: runner.Plan, *scenarios: Scenario) -> list[runner.Outcome]:
    ignore = lambda *_args: None  # noqa: E731
    return runner.run_all(scenarios, plan, on_start=ignore, on_progress=ignore, on_end=ignore)


def row_of(spawn: Spawner) -> list[measure.Row]:
    samples = spawn.one(works)
    return [
        measure.ratio_row(
            "x", "x", samples, ours="pid", limit="pid", limit_name="itself", work_bytes=0, target=1
        )
    ]


def test_a_failed_scenario_is_shown_and_the_others_go_on(tmp_path: Path):
    broken = scenario("broken", lambda spawn: spawn.one(breaks))
    outcomes = run_all(make_plan(tmp_path), broken, scenario("sound", row_of))
    assert "the disk said no" in outcomes[0].error
    assert outcomes[1].error is None
    assert outcomes[1].rows[0].value == 1.0
    assert outcomes[1].rows[0].reached
    assert not list((tmp_path / "shm").iterdir())
    assert not list((tmp_path / "disk").iterdir())
