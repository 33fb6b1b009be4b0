"""The benchmarks of live recovery run, and what they compute from journals and logs is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from benchmarks import engines
from benchmarks.live import cli, kills, registry, report
from benchmarks.live import journal as j
from benchmarks.live.bench import Bench, Result
from benchmarks.live.runs import RunError
from benchmarks.machine import describe


def quick_run(folder: Path, runtime_dir: Path, *options: str) -> dict[str, Any]:
    """The answer of a run of few steps, which leaves nothing behind but results."""
    command = ["--quick", "--json", *options, "--disk", str(folder / "disk")]
    with mock.patch("signal.signal"):  # it is this process's
        done = CliRunner().invoke(cli.main, [*command, "--shm", str(runtime_dir)])
    assert done.exit_code == 0, done.output[-6000:]
    for each in (folder / "disk", runtime_dir):
        assert not list(each.iterdir()), "the run left something behind"
    assert not engines.agents(runtime_dir)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.full
def test_quick_run_of_one_scenario(tmp_path: Path, runtime_dir: Path):
    output = tmp_path / "results"
    result = quick_run(tmp_path, runtime_dir, "--only", "generations", "--output", str(output))
    (outcome,) = result["outcomes"]
    assert outcome["name"] == "generations"
    assert [row["target"] for row in outcome["rows"]] == [0, 0, 0, 2]
    (table,) = outcome["tables"]
    assert len(table["rows"]) == 4 * 2
    assert {path.name.rpartition("-")[2] for path in output.iterdir()} >= {"live.json", "live.md"}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_quick_run_measures_every_row(tmp_path: Path, runtime_dir: Path):
    result = quick_run(tmp_path, runtime_dir)
    assert [each["name"] for each in result["outcomes"]] == [
        each.name for each in registry.SCENARIOS
    ]
    rows = [row for outcome in result["outcomes"] for row in outcome["rows"]]
    bits = [row for row in rows if row["scenario"] == "identical"]
    assert bits
    assert not [row for row in bits if row["value"] != 0], bits


def run_all(tmp_path: Path, *scenarios: registry.Scenario) -> list[registry.Outcome]:
    for name in ("shm", "disk"):
        (tmp_path / name).mkdir()
    ignore = lambda *_args: None  # noqa: E731
    return registry.run_all(
        scenarios, tmp_path / "shm", tmp_path / "disk", quick=True,
        on_start=ignore, on_progress=ignore, on_end=ignore,
    )  # fmt: skip


def scenario(name: str, run) -> registry.Scenario:
    return registry.Scenario(name=name, title=name, run=run, timeout_s=20.0)


def test_a_failed_scenario_keeps_its_rows_and_the_others_go_on(tmp_path: Path):
    def breaks(bench: Bench) -> None:
        bench.at_most("measured before", [4.0, 1.0, 2.0], unit="s", target=3.0)
        raise RunError("the training failed")

    def works(bench: Bench) -> None:
        bench.ratio("twice as slow", [2.0], [1.0], limit_name="itself", target=1.5)
        bench.plot("step over time", kills.LIVE, [(0.0, 1.0), (1.0, 2.0)])

    outcomes = run_all(tmp_path, scenario("broken", breaks), scenario("sound", works))
    broken, sound = outcomes
    assert broken.error == "RunError: the training failed"
    assert [(row.value, row.reached) for row in broken.rows] == [(2.0, True)]
    assert sound.error is None
    assert [(row.value, row.reached) for row in sound.rows] == [(2.0, False)]
    assert not list((tmp_path / "shm").iterdir())
    result = Result(
        format_version=1, date="today", machine=describe(tmp_path, tmp_path), quick=False,
        outcomes=outcomes,
    )  # fmt: skip
    page = report.markdown(result, None)
    assert "| twice as slow | 2 s | 2 s | 1 | 1 s | 2 x | <= 1.5 | NO |" in page
    assert "**broken failed**\n\n```\nRunError: the training failed\n```" in page


def event(kind: str, at: float, rank: int, generation: int, step: int, **more: Any) -> j.Event:
    return {
        "kind": kind, "at": at, "rank": rank, "pid": 10 + rank, "generation": generation,
        "step": step, **more,
    }  # fmt: skip


def updates(generation: int, steps: range, at: float, **more: Any) -> list[j.Event]:
    return [
        event("update", at + step + rank / 10, rank, generation, step, **more)
        for step in steps
        for rank in range(2)
    ]


def test_updates_that_differ_or_are_missing_are_found():
    same = {"loss": "0x1p+0", "ids": [1], "scale": 2.0, "buffers": ["0x0p+0"]}
    reference = updates(1, range(1, 6), 0.0, **same)
    found = [*updates(1, range(1, 4), 0.0, **same), *updates(2, range(3, 5), 9.0, **same)]
    result = j.compared(reference, found, 5)
    assert (result.rows, result.executed, result.missing) == (10, 5, [5])
    assert not result.differing
    for name in j.EXACT:
        wrong = [*found[:-1], {**found[-1], name: "other"}]
        assert j.compared(reference, wrong, 5).differing == [
            f"step 4, rank 1, generation 2: {name}"
        ]
