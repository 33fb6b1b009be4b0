"""Live recovery with epochs of a StatefulDataLoader of two workers.

    tieredckpt run --nproc-per-node 2 --standby 1 examples/live/loader.py

The epochs are parts of one endless order of rows, so the loader's state is a position alone. It is
the same on all ranks, which ``coordinate=`` declares: any surviving rank has the state of a lost
one, and each rank's share of the rows follows from position and rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

import tieredckpt
from tieredckpt import live


class Rows(Dataset[tuple[int, torch.Tensor]]):
    """A dataset by index."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(64, generator=torch.Generator().manual_seed(index))


class Epochs(Sampler[int]):
    """This rank's rows of all epochs, each in an order of its own."""

    def __init__(self, rows: int, rank: int, size: int) -> None:
        self._rows, self._rank, self._size = rows, rank, size

    def __iter__(self) -> Iterator[int]:
        for epoch in itertools.count():
            order = torch.randperm(self._rows, generator=torch.Generator().manual_seed(epoch))
            yield from order[self._rank :: self._size].tolist()


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
    dataset = Rows()
    loader = StatefulDataLoader(
        dataset, batch_size=8, sampler=Epochs(len(dataset), world.rank, world.size), num_workers=2,
        generator=torch.Generator().manual_seed(1),  # else its state has a seed of this rank's
    )  # fmt: skip
    state = {
        "learner": Learner(model, optimizer),
        "loader": tieredckpt.per_rank(loader, coordinate=("all", 0, 1)),
    }
    world.load(state)
    batches = iter(loader)
    for step in world.steps(args.steps):
        ids, rows = next(batches)
        loss = (model(rows) - rows).square().mean()
        loss.backward()
        mean = loss.detach() / world.size
        dist.all_reduce(mean)
        seen = [torch.empty_like(ids) for _ in range(world.size)]
        dist.all_gather(seen, ids)
        if world.rank == 0:  # before the update: none is missed, and the last row of a step counts
            with args.journal.open("a") as file:
                row = {"step": step, "loss": mean.item(), "ids": torch.cat(seen).tolist()}
                file.write(json.dumps(row) + "\n")
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
