"""Runs a script of ``examples/live`` with faults that it does not know of, and watches its state.

Faults happen at the first ``backward`` of a step, when the forward pass has moved the loader and
the buffers. After each update every rank writes a digest of each part of its state.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash
import yaml

from tests.support.agent import ROOT
from tests.support.faults import _bits, _leaves, _local
from tests.support.live import Fault, Faults, Outcome, config_of, supervised

RECIPES = ROOT / "examples" / "live"


class Seen(NamedTuple):
    """A training: how it ended, what rank 0 wrote, and each rank's state after each update."""

    outcome: Outcome
    journal: list[dict[str, Any]]
    digests: list[dict[str, Any]]


def train(
    name: str,
    folder: Path,
    faults: Sequence[Fault] = (),
    *,
    steps: int = 8,
    standby: int = 1,
    options: Sequence[str] = (),
    **more: Any,
) -> Seen:
    """Train ``examples/live/{name}.py`` on two ranks in ``folder``."""
    script = functools.partial(run, name, tuple(options))
    outcome = supervised(
        folder, faults, size=2, standby=standby, steps=steps, script=script, **more
    )  # fmt: skip
    journal = [] if name == "logged" else _rows(folder / "journal")  # a file of SQLite
    return Seen(outcome, journal, _rows(folder / "digests"))


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(name: str, options: Sequence[str], folder: str, steps: int, faults: list[Fault]) -> None:
    """In a rank's process: the script as ``python examples/live/{name}.py`` runs it."""
    config = Path(folder) / "tieredckpt.yaml"
    config.write_text(yaml.safe_dump(config_of(folder)))
    watch(folder, Faults(folder, faults))
    path = str(RECIPES / f"{name}.py")
    sys.argv = [path, f"--config={config}", f"--steps={steps}", f"--journal={folder}/journal"]
    sys.argv += options
    runpy.run_path(path, run_name="__main__")


def watch(folder: str, faults: Faults) -> None:
    """Meet faults in ``backward``, and write digests after updates. For this process's life."""
    import torch
    import torch.distributed as dist

    from tieredckpt import live

    now: dict[str, Any] = {}
    begin, load, update, backward = (
        live.World.begin, live.World.load, live.World.update, torch.Tensor.backward,
    )  # fmt: skip

    def watched_begin(world: live.World, step: int) -> None:
        now.update(step=step, rank=world.rank, first=True)
        begin(world, step)

    def watched_load(world: live.World, state: dict[str, Any]) -> int:
        now["state"] = state
        Path(folder, f"pid-{world.rank}").write_text(str(os.getpid()))
        return load(world, state)

    @contextlib.contextmanager
    def watched_update(world: live.World, step: int) -> Iterator[None]:
        with update(world, step):
            yield
        row = {"step": step, "rank": world.rank}
        row |= {key: digest(value) for key, value in now["state"].items()}
        with open(f"{folder}/digests", "a") as file:
            file.write(json.dumps(row) + "\n")

    def watched_backward(*args: Any, **kwargs: Any) -> None:
        if now["first"] and faults.any_at(now["step"]):
            dist.barrier()  # so that each rank has finished the update before
            faults.meet(now["step"], now["rank"], "kill", "raise", "hang", "always")
        now["first"] = False
        backward(*args, **kwargs)

    live.World.begin = watched_begin  # type: ignore[method-assign]
    live.World.load = watched_load  # type: ignore[method-assign]
    live.World.update = watched_update  # type: ignore[method-assign]
    torch.Tensor.backward = watched_backward  # type: ignore[method-assign,assignment]


def digest(value: Any) -> str:
    """Of all bits of a value or of what a Stateful object would save; this rank's shards."""
    import torch

    content = value.state_dict() if hasattr(value, "state_dict") else value
    found = xxhash.xxh3_128()
    for key, leaf in sorted(_leaves(content)):
        local = _local(leaf)
        found.update(key.encode())
        found.update(_bits(local) if isinstance(local, torch.Tensor) else repr(local).encode())
    return found.hexdigest()
