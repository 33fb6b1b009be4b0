"""A training loop that used torch.save, with tieredckpt: docs/start/from-torch-save.md.

    python examples/from_torch_save.py --config tieredckpt.yaml --old checkpoint.pt

Kill it at any moment and start it again: it continues from its last save.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tieredckpt


class Train:
    """Model and optimizer. A fresh optimizer has no state to load into; DCP makes it here."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip


def main() -> None:
    """Train a small model on rows that follow from the step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="tieredckpt.yaml")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--old", type=Path, help="a file of torch.save, for the first start")
    parser.add_argument("--every", type=int, default=10, help="steps from one save to the next")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    # What was the dict of torch.save. Objects with state_dict() go in as they are.
    state = {
        "train": Train(model, optimizer),
        "schedule": schedule,
        "random": tieredckpt.RandomState(),
    }

    with tieredckpt.Engine.open(args.config) as engine:
        first = engine.load(state)  # was: torch.load(path), and load_state_dict of each
        if first is None and args.old:
            old = torch.load(args.old, weights_only=True)
            model.load_state_dict(old["model"])
            optimizer.load_state_dict(old["optimizer"])
            schedule.load_state_dict(old["schedule"])
            first = old["step"]
        first = first or 0
        print(f"begins after step {first}", flush=True)
        for step in range(first + 1, args.steps + 1):
            rows = torch.randn(32, 16)
            loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % args.every == 0:
                # was: torch.save({"model": model.state_dict(), ...}, path)
                dcp.save(state, storage_writer=engine.writer(step))
            print(f"step {step} loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
