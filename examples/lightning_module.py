"""A LightningModule, checkpointed by tieredckpt: docs/use/frameworks.md, "Lightning".

    python examples/lightning_module.py --config tieredckpt.yaml
    torchrun --standalone --nproc-per-node=2 examples/lightning_module.py

Kill it at any moment and start it again: it continues from the last epoch that was saved, and its
losses are those of a run that was not interrupted. Rows come in an order that follows from the
epoch, and nothing draws random numbers while it trains: Lightning does not save random states.
"""

from __future__ import annotations

import argparse
import os

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from tieredckpt.integrations.lightning import NEWEST, TieredModelParallelStrategy


class Regression(LightningModule):  # type: ignore[misc]  # lightning is not type-checked here
    """Learns the sum of a row."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        (rows,) = batch
        loss: torch.Tensor = (self.net(rows) - rows.sum(1, keepdim=True)).square().mean()
        if self.global_rank == 0:
            print(f"step {self.global_step + 1} loss {loss.item()!r}", flush=True)
        return loss

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[object]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams["epochs"])
        return [optimizer], [schedule]


def main() -> None:
    """Train, with a save at the end of each epoch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="tieredckpt.yaml")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    seed_everything(0, verbose=False)
    rows = TensorDataset(torch.randn(128, 16))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=TieredModelParallelStrategy(
            args.config, data_parallel_size=ranks, tensor_parallel_size=1
        ),
        callbacks=[ModelCheckpoint(every_n_epochs=1)],
        max_epochs=args.epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression(args.epochs)
    trainer.fit(model, DataLoader(rows, batch_size=16, shuffle=True), ckpt_path=NEWEST)


if __name__ == "__main__":
    main()
