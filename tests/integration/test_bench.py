"""``tieredckpt bench`` with real ranks below torchrun; nothing of it is left behind."""

from __future__ import annotations

import functools
import json
import os
import runpy
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import tieredckpt
from tests.support.states import config, save
from tieredckpt.engine import Engine

pytestmark = pytest.mark.timeout(600)
SMALL = ("--size", "2MiB", "--tensors", "4")


@pytest.fixture
def place(runtime_dir: Path, tmp_path: Path) -> Path:
    """A configuration with a tier, whose runtime folder has another one's agent."""
    tier = {"name": "disk", "url": f"file://{tmp_path}/tier", "every": "save"}
    found = {**config(runtime_dir / "agent"), "tiers": [tier]}
    (tmp_path / "c.yaml").write_text(json.dumps(found))
    return tmp_path


def bench(
    place: Path, *words: str, first: Callable[[], object] | None = None, code: int = 0
) -> Any:
    """The result of a benchmark, or the error."""
    found = tieredckpt("bench", *words, "--config", f"{place}/c.yaml", first=first)
    assert found.returncode == code, found.stderr
    return json.loads(found.stdout) if code == 0 else found.stderr


def as_rank(rank: int = 0, ranks: int = 1, port: int = 0) -> None:
    """As below another launcher, whose process becomes the rank: here without a new one."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

    def become(_: str, command: list[str]) -> None:
        sys.argv = command[2:]
        runpy.run_module("tieredckpt.bench", run_name="__main__")
        sys.stdout.flush()
        sys.exit(0)

    os.execv = become  # type: ignore[assignment]


def assert_nothing_is_left(place: Path, runtime_dir: Path) -> None:
    assert not list((place / "tier").glob("bench-*"))
    assert not list(runtime_dir.glob("tieredckpt-bench-*"))


def test_saves_of_two_ranks(place: Path, runtime_dir: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("save", *SMALL, "--saves", "3", "--every", "1ms", "--json", "--config")
    with ThreadPoolExecutor(2) as pool:
        second, first = pool.map(
            lambda rank: tieredckpt(
                "bench", *words, f"{place}/c.yaml", first=functools.partial(as_rank, rank, 2, port)
            ),
            (1, 0),
        )
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert not second.stdout
    found = json.loads(first.stdout)
    assert (found["ranks"], found["tensors"]) == (2, 4)
    assert (found["state_bytes"], found["rank_bytes"]) == (2 << 20, 1 << 20)
    assert {call: len(each) for call, each in found["stall_s"].items()} == {
        "async_save": 3, "dcp.save": 3,
    }  # fmt: skip
    levels = {each["name"]: each["seconds"] for each in found["levels"]}
    assert "3" in levels["memory"]
    assert "3" in levels["disk"], "the last one gets there"
    assert_nothing_is_left(place, runtime_dir)


@pytest.mark.full
def test_recoveries_from_memory_and_from_a_tier(place: Path, runtime_dir: Path):
    found = bench(place, "recover", *SMALL, "--ranks", "1", "--times", "1", "--json")
    assert [each["source"] for each in found["recoveries"]] == ["memory", "disk"]
    for each in found["recoveries"]:
        assert list(each["bytes_by_tier"]) == [each["source"]], "from nowhere else"
        assert sum(each["stages"].values()) == pytest.approx(each["total_s"], abs=0.05)
    assert_nothing_is_left(place, runtime_dir)


def test_a_comparison_with_the_shapes_of_a_checkpoint(place: Path, runtime_dir: Path):
    with Engine.open(str(place / "c.yaml")) as engine:
        save(engine, 3, {"a": torch.zeros(5, 3), "n": torch.arange(4), "x": 3})
        engine.wait(3, "disk")
    words = ("--like", "3", "--rounds", "2", "--folder", f"{place}/d", "--json")
    found = bench(place, "compare", *words, first=as_rank)
    assert (found["tensors"], found["state_bytes"]) == (2, 5 * 3 * 4 + 4 * 8)
    ours = ["tieredckpt async", "tieredckpt sync"]
    others = [f"DCP {kind} to {place}/d" for kind in ("async", "sync")]
    assert [each["name"] for each in found["ways"]] == ours + others
    for each in found["ways"]:
        assert [len(each[name]) for name in ("stall_s", "done_s", "load_s")] == [2] * 3
    assert not list((place / "d").iterdir())
    assert_nothing_is_left(place, runtime_dir)
    with Engine.open(str(place / "c.yaml"), read_only=True) as engine:
        assert [each.step for each in engine.checkpoints()] == [3], "of the job, untouched"


def test_what_is_refused(place: Path, runtime_dir: Path):
    assert "no such source: s4; there are memory, disk" in bench(
        place, "recover", *SMALL, "--source", "s4", code=2
    )
    assert "give a smaller --size" in bench(place, "save", "--size", "1PiB", code=2)
    (place / "x.safetensors").write_text("no header")
    refused = bench(place, "save", "--like", f"{place}/x.safetensors", code=2)
    assert "x.safetensors is no safetensors file" in refused
    assert len(refused.splitlines()) == 1, "nothing of torchrun's"
    assert_nothing_is_left(place, runtime_dir)


def test_a_rank_of_another_launcher_that_fails_leaves_no_agent(place: Path, runtime_dir: Path):
    (place / "tier").write_text("a file where the tier's folder should be")
    found = bench(place, "save", *SMALL, first=as_rank, code=1)
    assert "error: rank 0: whether this namespace holds checkpoints is not known" in found
    assert not list(runtime_dir.glob("tieredckpt-bench-*"))
