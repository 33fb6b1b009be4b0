"""An FSDP2 script that checkpoints with plain DCP. docs/start/tutorial.md converts it step by step.

torchrun --standalone --nproc-per-node=2 examples/tutorial/before.py
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader


class TrainState(Stateful):
    """Model, optimizer and step, as DCP saves them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What was saved, put back."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


def main() -> None:
    """Train, saving every few steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20, help="how many more to train")
    parser.add_argument("--folder", type=Path, default=Path("ckpt"))
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    loader = StatefulDataLoader(
        rows[dist.get_rank() :: dist.get_world_size()],
        batch_size=32,
        shuffle=True,
        num_workers=1,
        generator=torch.Generator().manual_seed(dist.get_rank()),
    )
    train = TrainState(model, optimizer)
    state = {"train": train}

    saved = sorted(options.folder.glob("step-*"), key=lambda path: int(path.name[5:]))
    if saved:
        dcp.load(state, checkpoint_id=saved[-1])

    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for batch in itertools.islice(epochs, options.steps):
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        train.step += 1
        print(f"rank {dist.get_rank()} step {train.step} loss {loss.item():.6f}", flush=True)
        if train.step % 5 == 0:
            dcp.save(state, checkpoint_id=options.folder / f"step-{train.step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
