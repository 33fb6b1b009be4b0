"""torchtitan's own checkpoint manager, optimizers, schedulers and data loader, on tieredckpt."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.frameworks import Workshop, place, snippet, workshop
from tests.support.ranks import RankFailed

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None,
    reason="torchtitan is not installed here (`make test` installs it)",
)


@pytest.fixture(scope="module")
def titan() -> Iterator[Workshop]:
    with workshop("tieredckpt.engine", "tieredckpt.integrations.torchtitan") as found:
        yield found


class Trainer:
    """What torchtitan's trainer hands to its checkpoint manager, and how it calls it."""

    def __init__(self, rank: int, folder: str, **settings: Any) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.components.optimizer import (
            LRSchedulersContainer,
            OptimizersContainer,
            ParamGroupConfig,
        )

        os.chdir(folder)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 17), torch.nn.ReLU(), torch.nn.Linear(17, 4)
        )
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(self.model, mesh=mesh)
        self.optimizers = OptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(
                    pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}
                )
            ],
            implementation="for-loop",
        ).build(model_parts=[self.model])
        self.lr_schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(
            optimizers=self.optimizers, training_steps=20
        )
        self.dataloader = ParallelAwareDataloader(
            Numbers(rank), rank, dist.get_world_size(), batch_size=4
        )
        self.step = 0
        self.ntokens_seen = 0
        names: dict[str, Any] = {}
        exec(snippet("torchtitan"), names)
        config = names["checkpoint"]
        config.interval = 1
        for key, value in settings.items():
            setattr(config, key, value)
        self.checkpointer = config.build(
            dataloader=self.dataloader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder="outputs",
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.ntokens_seen = state["ntokens_seen"]

    def train(self, until: int, *, last: int | None = None) -> dict[int, str]:
        losses = {}
        batches = iter(self.dataloader)
        while self.step < until:
            self.step += 1
            loss = self.model(next(batches)).square().mean()
            loss.backward()
            self.optimizers.step()
            self.lr_schedulers.step()
            self.optimizers.zero_grad()
            self.ntokens_seen += 4
            losses[self.step] = loss.item().hex()
            self.checkpointer.save(self.step, last_step=self.step == last)
        return losses

    def steps(self, stream: str = "checkpoint") -> list[int]:
        return [each.step for each in self.checkpointer.engine.checkpoints(stream)]


class Numbers:
    """Batches that depend on the position alone, which is saved and restored."""

    def __new__(cls, rank: int) -> Any:
        import torch
        from torch.utils.data import IterableDataset

        class Data(IterableDataset):  # type: ignore[type-arg]
            def __init__(self) -> None:
                self.at = 0

            def __iter__(self) -> Iterator[torch.Tensor]:
                while True:
                    generator = torch.Generator().manual_seed(1000 * rank + self.at)
                    self.at += 1
                    yield torch.randn(8, generator=generator)

            def state_dict(self) -> dict[str, int]:
                return {"at": self.at}

            def load_state_dict(self, state: dict[str, int]) -> None:
                self.at = state["at"]

        return Data()


def start(
    rank: int, folder: str, until: int, failpoints: str = "", settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One start of training: load, train, close."""
    from tieredckpt import failpoints as points

    trainer = Trainer(rank, folder, **(settings or {}))
    loaded = trainer.checkpointer.load()
    begun = trainer.step
    if failpoints and rank == 0:
        points.arm(failpoints)
    losses = trainer.train(until)
    found = {
        "loaded": loaded,
        "from": begun,
        "losses": losses,
        "weights": {
            name: value.full_tensor().numpy().tobytes()
            for name, value in trainer.model.state_dict().items()
        },
        "lr": [scheduler.get_last_lr() for scheduler in trainer.lr_schedulers],
        "tokens": trainer.ntokens_seen,
        "steps": trainer.steps(),
    }
    trainer.checkpointer.close()
    return found


def test_a_killed_training_goes_on_bit_identically(
    titan: Workshop, runtime_dir: Path, tmp_path: Path
):
    whole = titan.run(start, 2, place(tmp_path / "whole", runtime_dir, "whole"), 6)
    folder = place(tmp_path / "cut", runtime_dir, "cut")
    with pytest.raises(RankFailed, match="died without an answer"):
        titan.run(start, 2, folder, 6, "save.commit.before=kill@4")
    again = titan.run(start, 2, folder, 6)
    for rank in range(2):
        assert whole[rank]["loaded"] is False
        assert (again[rank]["loaded"], again[rank]["from"]) == (True, 3)
        assert again[rank]["losses"] == {
            step: loss for step, loss in whole[rank]["losses"].items() if step > 3
        }
        for what in ("weights", "lr", "tokens"):
            assert again[rank][what] == whole[rank][what]
        # Ours decides what is kept (2), whatever keep_latest_k says (10).
        assert again[rank]["steps"] == whole[rank]["steps"] == [6, 5]
    assert not (tmp_path / "cut" / "outputs").exists()
