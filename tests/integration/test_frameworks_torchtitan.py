"""torchtitan's own checkpoint manager, optimizers, schedulers and data loader, on tieredckpt."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

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

    kind: Any = None
    """The manager; None: the one of the documentation."""
    more: ClassVar[dict[str, Any]] = {}

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
        config = self.kind.Config(enable=True) if self.kind else names["checkpoint"]
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
            **self.more,
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


def odd_cases(rank: int, folder: str) -> None:
    """Taking over from torchtitan, what it can be told to load, and that nothing is deleted."""
    import torch.distributed as dist
    from torchtitan.components.checkpointer import CheckpointManager

    from tieredckpt import failpoints as points
    from tieredckpt.errors import NotFoundError, UsageError
    from tieredckpt.integrations.torchtitan import TieredCheckpointManager

    class Stock(Trainer):
        kind = CheckpointManager

    # torchtitan alone, with its own purge: it keeps the last two of four.
    stock = Stock(rank, folder, keep_latest_k=2)
    stock.train(4)
    stock.checkpointer.close()  # ends the purge when its queue is empty
    dist.barrier()
    checkpoints = Path("outputs/checkpoint")
    before = sorted(checkpoints.rglob("*"))
    assert sorted(os.listdir(checkpoints)) == ["step-3", "step-4"]

    # Its newest one is taken over; from then on ours counts, and its files stay as they are.
    trainer = Trainer(rank, folder, keep_latest_k=2)
    with pytest.raises(NotFoundError) as caught:
        trainer.checkpointer.load(step=4)
    assert "initial_load_path" in caught.value.__notes__[-1]
    assert trainer.checkpointer.load() is True
    assert trainer.step == 4
    trainer.train(7)
    assert trainer.steps() == [7, 6]
    trainer.checkpointer.close()
    assert sorted(checkpoints.rglob("*")) == before

    # A certain step, which abandons the newer one with the next save; and one that does not exist.
    trainer = Trainer(rank, folder, abandon_newer=True)
    with pytest.raises(NotFoundError):
        trainer.checkpointer.load(step=5)
    assert trainer.checkpointer.load(step=6) is True
    assert trainer.step == 6
    trainer.checkpointer.close()

    # A save that is skipped, for lack of room on one rank, is not reported as written.
    trainer = Trainer(rank, folder)
    assert trainer.checkpointer.load() is True
    assert trainer.step == 7, "nothing was saved after step 6, so nothing was abandoned"
    trainer.train(8)
    if rank == 1:
        points.arm("save.reserve.before=enospc")
    trainer.step = 9
    assert trainer.checkpointer.save(9) is False
    points.arm("")
    assert trainer.steps() == [8, 7]
    trainer.checkpointer.close()

    # Some states left out; and one last save of the model alone, which is not a whole state.
    trainer = Trainer(rank, folder, exclude_from_loading=["dataloader", "train_state"])
    assert trainer.checkpointer.load() is True
    assert trainer.step == 0
    assert [scheduler.last_epoch for scheduler in trainer.lr_schedulers] == [8]
    trainer.step = 8
    trainer.train(9, last=9)
    trainer.checkpointer.close()
    trainer = Trainer(rank, folder)
    with pytest.raises(BaseException, match=r"Missing key|optimizer"):
        trainer.checkpointer.load()
    assert trainer.step == 0
    trainer.checkpointer.close()

    # torchtitan's own manager does not mistake anything of ours for a checkpoint.
    stock = Stock(rank, folder)
    assert stock.checkpointer.load() is True
    assert stock.step == 4
    stock.checkpointer.close()
    with pytest.raises(UsageError, match="async_with_pinned_mem"):
        Trainer(rank, folder, async_mode="async_with_pinned_mem")
    disabled = TieredCheckpointManager.Config(enable=False).build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={},
        sd_adapter=None,
    )  # fmt: skip
    assert disabled.load() is False
    disabled.close()


def seed(rank: int, folder: str, *, save: bool) -> bytes:
    """torchtitan's seed checkpoint: the model alone, as step 0, saved by one rank for all."""
    import torch

    trainer = Trainer(rank, folder)
    if save:
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.fill_(0.25)
        assert trainer.checkpointer.load() is False
        trainer.checkpointer.save(0, last_step=True)
    else:
        assert trainer.checkpointer.load() is True
    assert trainer.step == 0
    trainer.checkpointer.close()
    return b"".join(p.detach().full_tensor().numpy().tobytes() for p in trainer.model.parameters())


def plant(rank: int, folder: str) -> bytes:
    return seed(rank, folder, save=True)


def grow(rank: int, folder: str) -> bytes:
    return seed(rank, folder, save=False)


def test_taking_over_loading_a_step_and_deleting_nothing(
    titan: Workshop, runtime_dir: Path, tmp_path: Path
):
    titan.run(odd_cases, 3, place(tmp_path / "odd", runtime_dir, "odd"))


@pytest.mark.full
def test_seed_checkpoint(titan: Workshop, runtime_dir: Path, tmp_path: Path):
    folder = place(tmp_path / "seed", runtime_dir, "seed")
    planted = titan.run(plant, 1, folder)
    assert titan.run(grow, 2, folder) == planted * 2


class ReplicaManager:
    """As torchtitan's own tests have it: one replica group, which takes part."""

    enabled = True
    replica_id = 0

    def __init__(self) -> None:
        self.manager = self

    def participating_rank(self) -> int:
        return 0

    def set_state_dict_fns(self, *functions: Any) -> None:
        pass


def fault_tolerant(rank: int, folder: str, until: int) -> dict[str, Any]:
    """torchtitan's manager for torchft: the data loader's position is saved at every step."""
    from tieredckpt.integrations.torchtitan_ft import TieredTorchFTCheckpointManager

    class Replica(Trainer):
        kind = TieredTorchFTCheckpointManager
        more: ClassVar[dict[str, Any]] = {"ft_manager": ReplicaManager()}

    trainer = Replica(rank, folder, interval=2)
    loaded = trainer.checkpointer.load()
    begun = trainer.step
    trainer.train(until)
    trainer.checkpointer.maybe_wait_for_saving()
    found = {
        "loaded": loaded,
        "from": begun,
        "at": trainer.dataloader.dataset.at,
        "steps": trainer.steps(),
        "replica": trainer.steps("ft-replicat-0"),
    }
    trainer.checkpointer.close()
    return found


@pytest.mark.full
def test_replica_groups_of_torchft(titan: Workshop, runtime_dir: Path, tmp_path: Path):
    folder = place(tmp_path / "ft", runtime_dir, "ft")
    for found in titan.run(fault_tolerant, 2, folder, 3):
        assert (found["loaded"], found["at"]) == (False, 3 * 4)
        assert (found["steps"], found["replica"]) == ([2], [3, 2])
    for found in titan.run(fault_tolerant, 2, folder, 5):
        # The job goes on from step 2, and the data from where it was after step 3.
        assert (found["loaded"], found["from"], found["at"]) == (True, 2, 3 * 4 + 3 * 4)
        assert (found["steps"], found["replica"]) == ([4, 2], [5, 4])
    assert not (tmp_path / "ft" / "outputs").exists()


@pytest.mark.full
def test_async_mode(titan: Workshop, runtime_dir: Path, tmp_path: Path):
    folder = place(tmp_path / "async", runtime_dir, "async")
    whole = titan.run(start, 2, place(tmp_path / "whole", runtime_dir, "sync"), 4)
    settings = {"async_mode": "async"}
    titan.run(start, 2, folder, 2, "", settings)
    again = titan.run(start, 2, folder, 4, "", settings)
    for rank in range(2):
        assert (again[rank]["loaded"], again[rank]["from"]) == (True, 2)
        assert again[rank]["losses"].items() <= whole[rank]["losses"].items()
        assert again[rank]["weights"] == whole[rank]["weights"]
