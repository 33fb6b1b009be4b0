"""Live recovery with BatchNorm.

    tieredckpt run --nproc-per-node 2 --standby 1 examples/live/batch_norm.py

A checkpoint has the running means and variances of one rank. They are averaged before each update,
so that those of all ranks are equal, as with DDP, and a fault changes no rank's.
"""

from __future__ import annotations

import argparse
import json
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
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Linear(128, 64))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"learner": Learner(model, optimizer)}
    world.load(state)
    for step in world.steps(args.steps):
        rows = torch.randn(8, 64)  # a function of step and rank: world.steps has seeded torch
        loss = (model(rows) - rows).square().mean()
        loss.backward()
        mean = loss.detach().clone()
        for each in (mean, *(each for each in model.buffers() if each.is_floating_point())):
            dist.all_reduce(each)
            each /= world.size
        if world.rank == 0:  # before the update: none is missed, and the last row of a step counts
            with args.journal.open("a") as file:
                file.write(json.dumps({"step": step, "loss": mean.item()}) + "\n")
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
    parser.add_argument("--journal", type=Path, default=Path("losses.jsonl"))
    args = parser.parse_args()
    live.run(lambda world: train(world, args), args.config)


if __name__ == "__main__":
    main()
