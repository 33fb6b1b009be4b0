"""Lightning's own Trainer, ModelCheckpoint and ModelParallelStrategy, on tieredckpt."""

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
    importlib.util.find_spec("lightning") is None,
    reason="lightning is not installed here (`make test` installs it)",
)


@pytest.fixture(scope="module")
def shop() -> Iterator[Workshop]:
    with workshop("tieredckpt.engine", "tieredckpt.integrations.lightning") as found:
        yield found


def make_model() -> Any:
    import torch
    from lightning.pytorch import LightningModule
    from torch.distributed.fsdp import fully_shard

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 17})
            self.losses: dict[int, str] = {}
            self.extra: list[int] = []

        def configure_model(self) -> None:
            if hasattr(self, "net"):
                return
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(8, 17), torch.nn.ReLU(), torch.nn.Linear(17, 4)
            )
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, number: int) -> Any:
            loss = self.net(batch).square().mean()
            self.losses[self.global_step + 1] = loss.item().hex()
            return loss

        def test_step(self, batch: Any, number: int) -> None:
            self.losses[-number - 1] = self.net(batch).square().mean().item().hex()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["extra"] = self.extra

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.extra = checkpoint["extra"]

        def on_train_epoch_start(self) -> None:
            self.extra = [*self.extra, self.current_epoch]

    return Model()


def data() -> Any:
    import torch
    from torch.utils.data import DataLoader

    return DataLoader(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), batch_size=4)


def options(epochs: int) -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": epochs,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def weights(model: Any) -> dict[str, bytes]:
    return {
        name: value.detach().full_tensor().numpy().tobytes()
        for name, value in model.named_parameters()
    }


def train(rank: int, folder: str, epochs: int, failpoints: str = "") -> dict[str, Any]:
    """One start of training: the documentation's lines."""
    from tieredckpt import failpoints as points

    os.chdir(folder)
    names: dict[str, Any] = {}
    exec(snippet("Lightning"), names)
    model = make_model()
    if failpoints and rank == 0:
        points.arm(failpoints)
    trainer = names["train"](model, data(), **options(epochs))
    engine = trainer.strategy.engine
    return {
        "losses": model.losses,
        "weights": weights(model),
        "lr": trainer.lr_scheduler_configs[0].scheduler.get_last_lr(),
        "extra": model.extra,
        "steps": [each.step for each in engine.checkpoints()],
        "best": trainer.checkpoint_callback.best_model_path,
    }


def test_a_killed_training_goes_on_bit_identically(
    shop: Workshop, runtime_dir: Path, tmp_path: Path
):
    whole = shop.run(train, 2, place(tmp_path / "whole", runtime_dir, "whole"), 4)
    folder = place(tmp_path / "cut", runtime_dir, "cut")
    with pytest.raises(RankFailed, match="died without an answer"):
        shop.run(train, 2, folder, 4, "save.commit.before=kill@3")
    again = shop.run(train, 2, folder, 4)
    for rank in range(2):
        assert sorted(whole[rank]["losses"]) == list(range(1, 9))
        assert sorted(again[rank]["losses"]) == [5, 6, 7, 8]
        assert again[rank]["losses"].items() <= whole[rank]["losses"].items()
        for what in ("weights", "lr", "extra"):
            assert again[rank][what] == whole[rank][what], what
        # Ours decides what is kept (2), not ModelCheckpoint (1).
        assert again[rank]["steps"] == whole[rank]["steps"] == [8, 6]
        assert not os.path.exists(again[rank]["best"])


def odd_cases(rank: int, folder: str) -> None:
    """What else a user may do with a trainer, in one start."""
    import warnings
    from fractions import Fraction

    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.checkpoint.api import CheckpointException

    from tieredckpt.errors import RankError, UsageError
    from tieredckpt.integrations.lightning import NEWEST, TieredModelParallelStrategy

    os.chdir(folder)
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    with pytest.raises(UsageError, match="save_distributed_checkpoint"):
        TieredModelParallelStrategy(save_distributed_checkpoint=False, **sizes)

    # A checkpoint that Lightning itself wrote before is taken over.
    model = make_model()
    Trainer(
        strategy=ModelParallelStrategy(**sizes),
        callbacks=[ModelCheckpoint(dirpath="stock", filename="old")],
        **options(1),
    ).fit(model, data())
    old = weights(model)
    strategy = TieredModelParallelStrategy("tieredckpt.yaml", **sizes)
    with pytest.raises(UsageError, match="opens when the trainer runs"):
        _ = strategy.engine
    model = make_model()
    trainer = Trainer(
        strategy=strategy,
        callbacks=[ModelCheckpoint(dirpath="ours", save_last="link", filename="{epoch}-{step}")],
        **options(2),
    )
    for path in ("nowhere.ckpt", "val_step=4.ckpt", "step=4.5.ckpt", "step=1-step=2.ckpt"):
        with pytest.raises(UsageError, match="names no step"):
            trainer.test(model, data(), ckpt_path=path, verbose=False)
    with pytest.raises(CheckpointException, match="there is no checkpoint"):
        trainer.test(model, data(), ckpt_path=NEWEST, verbose=False)
    trainer.fit(model, data(), ckpt_path="stock/old.ckpt")
    if rank == 0:  # it was due there only after 1000 steps: at the end of fit it was brought
        assert len(os.listdir("disk/odd/manifests/default")) == 1
    assert model.extra == [0, 1]
    assert sorted(model.losses) == [3, 4]
    engine = strategy.engine
    assert [each.step for each in engine.checkpoints()] == [4]

    # After fit; without the optimizer, which training could not go on from: another stream.
    trained = weights(model)
    assert trained != old
    trainer.save_checkpoint("ours/final-step=4.ckpt", weights_only=True)
    assert [each.step for each in engine.checkpoints("default-weights")] == [4]
    assert [each.step for each in engine.checkpoints()] == [4]
    with pytest.raises(TypeError, match="storage_options"):
        trainer.save_checkpoint("x", storage_options={})
    # What cannot be pickled fails on rank 0, and all ranks are told.
    model.extra = [lambda: 0]  # type: ignore[list-item]
    with pytest.raises(AttributeError if rank == 0 else RankError):
        trainer.save_checkpoint("ours/bad-step=4.ckpt")
    model.extra = []
    strategy._checked = False
    model.extra = [Fraction(1, 2)]  # type: ignore[list-item]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.save_checkpoint("ours/fraction-step=4.ckpt")
    assert [each for each in told if "fractions.Fraction" in str(each.message)] or rank != 0

    # Looking at one for a test does not change what training goes on from.
    with pytest.raises(Exception, match=r"fractions\.Fraction"):
        trainer.test(model, data(), ckpt_path=NEWEST, verbose=False)
    model.extra = []
    trainer.save_checkpoint("ours/plain-step=4.ckpt")
    before = engine.checkpoints()
    for path in (NEWEST, "best", "ours/other-step=4.ckpt"):
        model.losses.clear()
        for parameter in model.parameters():
            parameter.data.zero_()
        trainer.test(model, data(), ckpt_path=path, verbose=False)
        model.net.reshard()
        assert weights(model) == trained, path
        assert len(model.losses) == 2
    assert engine.checkpoints() == before
    assert {each.attempt for each in before} == {1}
    if rank == 0:
        assert sorted(os.listdir("ours")) == ["last.ckpt"]
        assert os.path.islink("ours/last.ckpt")
        assert not os.path.exists("ours/last.ckpt")
    strategy.close()
    strategy.close()


def test_taking_over_evaluation_and_refusals(shop: Workshop, runtime_dir: Path, tmp_path: Path):
    folder = place(tmp_path / "odd", runtime_dir, "odd")
    with (tmp_path / "odd" / "tieredckpt.yaml").open("a") as file:
        file.write(f"tiers: [{{name: disk, url: 'file://{folder}/disk', every: 1000 steps}}]\n")
    shop.run(odd_cases, 2, folder)
