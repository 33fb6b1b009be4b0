"""The benchmarks run, and their harness tells the truth when something in them fails."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import engines, limits, measure, runner
from benchmarks.processes import ROOT, ChildError, Setup, Spawner
from benchmarks.registry import SCENARIOS, Scenario
from benchmarks.shapes import FULL, GIB, QUICK, Shape
from tests.support.measured import breaks, hangs, works

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


@pytest.mark.slow
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


def test_a_scenario_without_room_is_refused_before_it_starts(tmp_path: Path):
    huge = Shape(vocab=1 << 30, dim=1 << 20, kv_dim=1, ffn=1, layers=1)
    plan = msgspec.structs.replace(make_plan(tmp_path), shape=huge)
    (outcome,) = run_all(plan, scenario("huge", row_of))
    assert "GiB of memory" in outcome.error


def make_spawner(tmp_path: Path, timeout_s: float) -> Spawner:
    setup = Setup(shape=TINY, shm=str(tmp_path), disk=str(tmp_path), repeat=1, repeat_slow=1)
    return Spawner(setup=setup, timeout_s=timeout_s, report=lambda *_: None)


def test_each_call_is_a_fresh_process(tmp_path: Path):
    spawn = make_spawner(tmp_path, 60)
    pids = {spawn.one(works)["pid"][0] for _ in range(2)}
    assert len(pids) == 2
    assert float(os.getpid()) not in pids


def test_a_hanging_process_is_killed_at_the_deadline(tmp_path: Path):
    with pytest.raises(ChildError, match=r"hangs: not done within 3 s"):
        make_spawner(tmp_path, 3).one(hangs)


def test_shapes_are_what_the_documentation_says():
    assert len(FULL.tensors()) == len(QUICK.tensors()) == 117
    assert 0.99 < FULL.size_bytes / (2 * GIB) <= 1.0


def test_percentiles_are_samples_and_p99_of_few_is_the_worst():
    assert measure.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert measure.percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert measure.percentile([float(n) for n in range(1, 201)], 0.99) == 198.0


def test_slowest_rank_counts_save_by_save():
    assert measure.slowest([{"s": [1.0, 5.0]}, {"s": [2.0, 3.0]}]) == {"s": [2.0, 5.0]}


def test_interleaving_alternates():
    order = []

    def part(name: str):
        return lambda number: order.append((number, name)) or 1.0

    measure.interleave(2, lambda *_: None, {"a": part("a"), "b": part("b")})
    assert order == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]


def test_exploring_leaves_out_the_slower_half_and_finds_the_fastest():
    calls = []

    def variant(seconds: float):
        return lambda: calls.append(seconds) or seconds

    best, tried = measure.explore({str(n): variant(n) for n in (4.0, 1.0, 3.0, 2.0)}, rounds=2)
    assert best == "1.0"
    assert calls == [4.0, 1.0, 3.0, 2.0, 1.0, 2.0]
    assert tried["1.0"] == [1.0, 1.0]


@pytest.mark.nightly
def test_a_terminated_run_leaves_nothing_behind(tmp_path: Path, runtime_dir: Path):
    command = [
        *(sys.executable, "-m", "benchmarks", "--quick", "--repeat", "10000", "--only", "small"),
        *("--disk", str(tmp_path / "disk"), "--shm", str(runtime_dir)),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        # Until its agent serves: the deadline is the test's own.
        while not list(runtime_dir.glob("*/small/agent/agent.sock")):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=200) == 143
    assert not list(runtime_dir.iterdir())
    assert not engines.agents(runtime_dir)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("method", limits.READ_METHODS)
def test_raw_reads_bring_the_bytes(tmp_path: Path, monkeypatch, method: str, threads: int):
    sizes = [5 * 4096, 100, 3 << 20, 4097]
    data = os.urandom(sum(sizes))
    (tmp_path / "slot").write_bytes(data)
    targets = limits.cold_targets(sizes)
    monkeypatch.setattr(limits, "cold_targets", lambda _sizes: targets)
    assert limits.raw_read(str(tmp_path / "slot"), sizes, method, threads) > 0
    assert b"".join(bytes(target) for target in targets) == data


def test_direct_io_moves_all_bytes(tmp_path: Path):
    size = (9 << 20) + 4096
    for threads, piece_bytes in limits.DIRECT_VARIANTS.values():
        path = tmp_path / "direct"
        try:
            assert (
                limits.direct_write(str(path), size, threads=threads, piece_bytes=piece_bytes) > 0
            )
        except OSError as error:
            pytest.skip(f"this file system refuses direct I/O: {error}")
        assert path.stat().st_size == size
        assert limits.direct_read(str(path), size, threads=threads, piece_bytes=piece_bytes) > 0
