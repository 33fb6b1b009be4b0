"""The benchmarks of live recovery run, and what they compute from journals and logs is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from benchmarks import engines
from benchmarks.live import cli, identical, kills, registry, report, steady
from benchmarks.live import journal as j
from benchmarks.live.bench import Bench, Result
from benchmarks.live.runs import Job, RunError, follow
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


@pytest.mark.slow
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


def test_a_training_that_fails_or_takes_too_long(tmp_path: Path, runtime_dir: Path):
    """The launcher refuses its arguments at once; then its limit has passed before it begins."""
    ignore = lambda *_args: None  # noqa: E731
    with pytest.raises(RunError, match=r"(?s)ended with exit code 2 .*--nproc-per-node"):
        follow(
            Job(loop="live", steps=1, ranks=0), runtime_dir / "a", tmp_path / "a",
            limit_s=60, report=ignore,
        )  # fmt: skip
    with pytest.raises(RunError, match="was not done after"):
        follow(
            Job(loop="live", steps=1), runtime_dir / "b", tmp_path / "b", limit_s=0.0, report=ignore
        )
    assert not engines.agents(runtime_dir)


OUTPUT = """\
[rank0]: generation 9: resumed at step 1 from the moon, no step lost (init 9.00 s)
[tieredckpt]     3.10 s  generation 1: training begins
[tieredckpt]     4.00 s  generation 1 ended: rank 3 died (SIGKILL)
[tieredckpt]     4.30 s  generation 2: resumed at step 12 from the state of the surviving ranks, \
no step lost (init 0.01 s, open 0.05 s, save 0.12 s, load 0.27 s)
[tieredckpt]     4.70 s  first update after the fault: step 13, 0.70 s
[tieredckpt]     5.00 s  generation 2 ended: rank 0 died (SIGKILL)
[tieredckpt]     6.30 s  generation 3: resumed at step 10 from the newest checkpoint, 3 steps lost \
(init 0.01 s)
[tieredckpt]     7.00 s  generation 3 ended: rank 1 raised MemoryError: x
[tieredckpt]     8.30 s  generation 4: training begins
"""


def test_what_the_supervisor_reports():
    first, second, third = j.recoveries_of(OUTPUT.splitlines())
    assert first == j.Recovery(
        generation=2, step=12, source="state of the surviving ranks", lost=0,
        stages={"init": 0.01, "open": 0.05, "save": 0.12, "load": 0.27},
        seconds=0.7, cause="rank 3 died (SIGKILL)",
    )  # fmt: skip
    assert (second.source, second.lost, second.seconds) == ("newest checkpoint", 3, None)
    assert (third.generation, third.step, third.cause) == (4, 0, "rank 1 raised MemoryError: x")


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


def test_the_way_from_a_fault_to_the_first_update_of_all_ranks():
    fault = event("kill", 103.5, 1, 1, 4)
    events = [
        *updates(1, range(1, 4), 100.0),
        fault,
        *(event(kind, 105.0 + rank + more, rank, 2, 2) for rank in range(2)
          for kind, more in (("begun", 0.0), ("loaded", 0.5))),
        *updates(2, range(3, 5), 110.0),
    ]  # fmt: skip
    text = "".join(json.dumps(each) + "\n" for each in reversed(events)) + '{"kind": "upd'
    restart = j.restart_after(j.events_of(text), fault)
    assert (restart.begun, restart.loaded) == (2.5, 3.0)
    assert restart.updated == pytest.approx(9.6)  # rank 1 in step 3
    assert restart.lost == 1
    with pytest.raises(ValueError, match="no update followed"):
        j.restart_after(events[:7], fault)


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


def test_slopes_and_growth():
    assert j.slope([(1.0, 5.0), (2.0, 7.0), (4.0, 11.0)]) == pytest.approx(2.0)
    flat = [(float(n), 7.0 + n % 2) for n in range(1, 51)]
    assert steady._growth(flat, 10) == 0
    assert steady._growth([(n, y + n // 10) for n, y in flat], 10) > 0


def test_times_of_steps_and_of_update():
    """Rank 0's steps; of each step, what the last rank spent in update."""
    events = [
        {**each, "own_s": 0.001 * (1 + 4 * each["rank"])} for each in updates(1, range(1, 6), 0.0)
    ]
    assert j.step_times(events, 1) == [1.0, 1.0, 1.0]
    assert j.least_times(events, "own_s", 2) == [0.001] * 3
    assert j.progress_of(events, -1.0)[:2] == [(2.0, 1), (3.0, 2)]


def test_faults_are_drawn_the_same_each_time():
    for seed in range(20):
        drawn = kills.kills([150, 350, 550], seed, 4)
        assert drawn == kills.kills([150, 350, 550], seed, 4)
        assert [step for step, _, _ in drawn] == [151, 351, 551]
        assert 0 in [rank for _, rank, _ in drawn]
        random = identical.random_kills(30, 120, seed)
        assert random == identical.random_kills(30, 120, seed)
        assert len(set(random)) == 30
        assert all(2 <= step <= 120 for step, _, _ in random)
        at = {(step, rank) for step, rank, _ in random}
        both = [step for step, rank in at if (step, (rank + 2) % 4) in at]
        assert max(both) > identical.SAVE_EVERY, "no shard is lost that was saved"


def test_a_thinned_line_keeps_its_turns():
    points = [(n / 10, n) for n in range(1, 2000)] + [(300.0 + n / 10, 1950 + n) for n in range(9)]
    thin = kills._thinned(points)
    assert len(thin) < 500
    assert {(199.9, 1999), (300.0, 1950), (300.8, 1958)} <= set(thin)
