"""Hooks of ``live.run``: when they are called, and with what. Their shape is that of NVRx.

The hooks of nvidia-resiliency-ext (NVRx) itself are tried, too, where it is installed.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import live_small
from tests.support.live import Fault, Faults, config_of, stopped_agent, supervised
from tests.support.live_small import script_of

STEPS = 10
FAULTS = [Fault(3, 1, "raise"), Fault(6, 0, "kill"), Fault(9, 1, "raise")]


class Noting:
    """A hook that writes what it gets, and hands it on, as ``Compose`` demands."""

    def __init__(self, name: str, folder: str) -> None:
        self._name, self._path = name, Path(folder, "hooks")

    def __call__(self, state: Any) -> Any:
        row = {
            "hook": self._name,
            "rank": state.rank,
            "iteration": state.iteration,
            "size": [state.world_size, state.active_world_size, state.initial_world_size],
            "ranks": [state.active_rank, state.initial_rank],
            "error": type(state.fn_exception).__name__,
            "main": threading.current_thread() is threading.main_thread(),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return state


class Compose:
    """Calls hooks from the last to the first, each with the result of the one before."""

    def __init__(self, *hooks: Callable[[Any], Any]) -> None:
        self._hooks = hooks

    def __call__(self, state: Any) -> Any:
        for hook in reversed(self._hooks):
            state = hook(state)
        return state


class DestroyGroups:
    """As AbortTorchDistributed does."""

    def __call__(self, state: Any) -> Any:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        return state


class Unhealthy:
    """Fails once in a job."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder, "unhealthy")

    def __call__(self, state: Any) -> Any:
        if state.iteration == 2 and state.rank == 0 and not self._path.exists():
            self._path.touch()
            raise RuntimeError("a fault of the device")
        return state


def hooked(theirs: bool, folder: str, steps: int, faults: list[Fault]) -> None:
    """A rank's process."""
    from tieredckpt import live

    compose: Any = Compose
    abort: Any = DestroyGroups()
    check: Any = Unhealthy(folder)
    if theirs:
        from nvidia_resiliency_ext import inprocess
        from nvidia_resiliency_ext.inprocess.abort import AbortTorchDistributed
        from nvidia_resiliency_ext.inprocess.health_check import CudaHealthCheck

        compose, abort = inprocess.Compose, AbortTorchDistributed()
        check = compose(CudaHealthCheck(), check)
    met = Faults(folder, faults)
    live.run(
        lambda world: live_small.plain(world, folder, steps, met),
        config_of(folder),
        abort=compose(abort, Noting("abort", folder)),
        finalize=Noting("finalize", folder),
        health_check=compose(check, Noting("check", folder)),
    )


@pytest.fixture
def folder(runtime_dir: Path) -> Iterator[Path]:
    with stopped_agent(runtime_dir / "undisturbed"), stopped_agent(runtime_dir / "faults"):
        yield runtime_dir


@pytest.mark.parametrize("theirs", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_hooks(folder: Path, theirs: bool):
    if theirs:
        pytest.importorskip("nvidia_resiliency_ext.inprocess")
    undisturbed = supervised(
        folder / "undisturbed", size=2, standby=0, steps=STEPS, script=script_of("plain")
    )
    found = supervised(
        folder / "faults", FAULTS, size=2, standby=3, steps=STEPS,  # no world of survivors alone
        script=functools.partial(hooked, theirs),
    )  # fmt: skip
    text = "\n".join(found.lines)
    assert undisturbed.code == found.code == 0, text
    rows = {row.step: row for row in undisturbed.rows}
    assert {row.step: row for row in found.rows} == rows, text
    assert "a hook failed" not in text
    # The rank whose health check failed is replaced.
    assert len(found.said("is gone: exit code 18")) == 1, text

    calls = [json.loads(line) for line in (folder / "faults" / "hooks").read_text().splitlines()]
    assert all(call["size"] == [2, 2, 2] for call in calls)
    assert all(call["ranks"][0] == call["rank"] for call in calls)
    order = {
        (iteration, rank): [
            call["hook"] for call in calls if (call["iteration"], call["rank"]) == (iteration, rank)
        ]
        for iteration in range(4)
        for rank in range(2)
    }
    ended = ["abort", "finalize", "check"]
    assert order[0, 0] == order[0, 1] == order[1, 1] == order[2, 0] == order[2, 1] == ended, text
    assert order[1, 0] == [], "the rank that was killed"
    assert order[3, 0] == order[3, 1] == ["finalize"], "training is done"
    raised = {(c["iteration"], c["rank"]) for c in calls if c["error"] == "MemoryError"}
    assert raised == {(0, 1), (2, 1)}
    assert {call["hook"]: call["main"] for call in calls} == {
        "abort": False, "finalize": True, "check": True,
    }  # fmt: skip
