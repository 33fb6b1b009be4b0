"""Live recovery with a log of metrics.

    tieredckpt run --nproc-per-node 2 --standby 1 examples/live/logged.py

A step is logged before its update. If it is done again, its row is replaced; if it was logged after
the update, a rank that leaves in between would miss it. A later rank 0 may be another process,
which goes on with the same log: with Weights & Biases that is
``wandb.init(id=os.environ["TORCHELASTIC_RUN_ID"], resume="allow")``.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tieredckpt import live


class Log:
    """Metrics by step, in a file of SQLite."""

    def __init__(self, path: Path) -> None:
        self._rows = sqlite3.connect(path, isolation_level=None)
        self._rows.execute("CREATE TABLE IF NOT EXISTS rows (step INTEGER PRIMARY KEY, row TEXT)")

    def log(self, row: dict[str, Any], *, step: int) -> None:
        """Replaces the row of a step that is done again."""
        self._rows.execute("INSERT OR REPLACE INTO rows VALUES (?, ?)", (step, json.dumps(row)))


class Learner:
    """Model and optimizer, as DCP saves them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What was saved, put back."""
        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip


def train(world: live.World, args: argparse.Namespace) -> None:
    """Called once per generation, in the same process."""
    world.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"learner": Learner(model, optimizer)}
    world.load(state)
    log = Log(args.journal) if world.rank == 0 else None
    for step in world.steps(args.steps):
        rows = torch.randn(8, 64)  # a function of step and rank: world.steps has seeded torch
        loss = (model(rows) - rows).square().mean()
        loss.backward()
        mean = loss.detach() / world.size
        dist.all_reduce(mean)
        if log is not None:
            log.log({"loss": mean.item(), "generation": world.generation}, step=step)
        with world.update(step):
            optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            dcp.save(state, storage_writer=world.engine.writer(step))


def main() -> None:
    """Standbys have run everything before live.run, too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="tieredckpt.yaml")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--journal", type=Path, default=Path("log.sqlite"))
    args = parser.parse_args()
    live.run(lambda world: train(world, args), args.config)


if __name__ == "__main__":
    main()
