"""Accelerate's own save_state and load_state with FSDP2, on tieredckpt."""

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
    importlib.util.find_spec("accelerate") is None,
    reason="accelerate is not installed here (`make test` installs it)",
)


@pytest.fixture(scope="module")
def shop() -> Iterator[Workshop]:
    with workshop("tieredckpt.engine", "tieredckpt.integrations.accelerate") as found:
        yield found


class Counter:
    """An object that is registered for checkpointing."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Job:
    """A training script with an accelerator, up to ``prepare``."""

    def __init__(self, rank: int, folder: str, *, kind: str = "SHARDED_STATE_DICT") -> None:
        import torch
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        os.chdir(folder)
        accelerator = Accelerator(cpu=True)
        # Accelerate turns FSDP on only where it finds GPUs; its code for FSDP2 runs on CPUs, too.
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type=kind
        )
        assert accelerator.is_fsdp2
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 17), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(17, 4)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.accelerator = accelerator
        self.parts = accelerator.prepare(model, optimizer, scheduler)
        self.counter = Counter()
        accelerator.register_for_checkpointing(self.counter)
        torch.manual_seed(100 + rank)  # each rank drops out other units, in a sequence of its own

    def batches(self, step: int) -> Any:
        import torch

        self.counter.count += 1
        generator = torch.Generator().manual_seed(step)
        return torch.randn(4, 8, generator=generator)


def train(rank: int, folder: str, steps: int, failpoints: str = "") -> dict[str, Any]:
    """One start of training: the documentation's loop, with all it says."""
    import torch.distributed.checkpoint as dcp

    from tieredckpt import failpoints as points

    job = Job(rank, folder)
    before = dcp.save, dcp.load
    names: dict[str, Any] = {}
    exec(snippet("Accelerate"), names)
    if failpoints and rank == 0:
        points.arm(failpoints)
    losses = {}
    for step, loss in names["train"](job.accelerator, *job.parts, job.batches, steps):
        losses[step] = loss.hex()
    assert (dcp.save, dcp.load) == before
    model, _, scheduler = job.parts
    return {
        "losses": losses,
        "weights": {
            name: value.full_tensor().numpy().tobytes()
            for name, value in model.state_dict().items()
        },
        "lr": scheduler.get_last_lr(),
        "count": job.counter.count,
    }


def test_a_killed_training_goes_on_bit_identically(
    shop: Workshop, runtime_dir: Path, tmp_path: Path
):
    whole = shop.run(train, 2, place(tmp_path / "whole", runtime_dir, "whole"), 5)
    folder = place(tmp_path / "cut", runtime_dir, "cut")
    with pytest.raises(RankFailed, match="died without an answer"):
        shop.run(train, 2, folder, 5, "save.commit.before=kill@4")
    again = shop.run(train, 2, folder, 5)
    for rank in range(2):
        assert list(whole[rank]["losses"]) == [1, 2, 3, 4, 5]
        assert list(again[rank]["losses"]) == [4, 5]
        assert again[rank]["losses"].items() <= whole[rank]["losses"].items()
        for what in ("weights", "lr", "count"):
            assert again[rank][what] == whole[rank][what], what
    assert whole[0]["losses"] != whole[1]["losses"]  # so each rank has its own random state
    assert sorted(os.listdir(folder)) == ["tieredckpt.yaml"]


def odd_cases(rank: int, folder: str, runtime_dir: str) -> None:
    """Refusals on all ranks, and a newest checkpoint that is damaged."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import tieredckpt
    from tests.support.states import flip, manifest_of, slot_of
    from tieredckpt.errors import NotFoundError, RankError, UsageError
    from tieredckpt.integrations import accelerate as ours

    job = Job(rank, folder)
    model, optimizer, _ = job.parts
    real = dcp.save, dcp.load
    with tieredckpt.Engine.open("tieredckpt.yaml") as engine:
        assert ours.load_state(job.accelerator, engine) is None
        weights = {}
        for step in (1, 2):
            job.accelerator.backward(model(job.batches(step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            weights[step] = [p.to_local().clone() for p in model.parameters()]
            ours.save_state(job.accelerator, engine, step)
        if rank == 0:
            slot = slot_of(Path(runtime_dir), manifest_of(engine, 2).segments[1].id)
            flip(slot, 0, 64)
        dist.barrier()
        job.counter.count = 99
        assert ours.load_state(job.accelerator, engine) == 1
        assert job.counter.count == 1
        for got, saved in zip(model.parameters(), weights[1], strict=True):
            assert torch.equal(got.to_local(), saved)
        assert engine.last_restore is not None
        assert [step for _, step, _ in engine.last_restore.refused] == [2]
        with pytest.raises(NotFoundError):
            ours.load_state(job.accelerator, engine, step=7)

        # One rank alone has too many files: all ranks are told.
        if rank == 1:
            ours.FILES_BYTES_MAX = 10
        with pytest.raises(UsageError, match=r"random_states_1\.pkl"):
            ours.save_state(job.accelerator, engine, 3)
        ours.FILES_BYTES_MAX = 1 << 20
        # What fails inside of Accelerate leaves DCP as it was, and all ranks are told.
        if rank == 1:
            job.counter.state_dict = lambda: 1 // 0  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError if rank == 1 else RankError):
            ours.save_state(job.accelerator, engine, 3)
        assert (dcp.save, dcp.load) == real
        # A save elsewhere goes where it always went, also from inside.
        with ours._redirected(Path(folder) / "here", save=lambda name, state: pytest.fail(name)):
            dcp.save({"a": torch.ones(1)}, checkpoint_id=Path(folder) / "elsewhere")
        job.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        for call in (ours.save_state, ours.load_state):
            with pytest.raises(UsageError, match="SHARDED_STATE_DICT"):
                call(job.accelerator, engine, step=3)
        job.accelerator.state.fsdp_plugin.set_state_dict_type("SHARDED_STATE_DICT")
        job.accelerator.project_configuration.automatic_checkpoint_naming = True
        with pytest.raises(UsageError, match="automatic_checkpoint_naming"):
            ours.save_state(job.accelerator, engine, 3)
        assert [each.step for each in engine.checkpoints()] == [1]


def reshape(rank: int, folder: str) -> list[bytes]:
    """Loaded by another number of ranks: refused, or all but the random states."""
    import torch
    from torch.distributed.checkpoint.api import CheckpointException

    import tieredckpt
    from tieredckpt.errors import UsageError
    from tieredckpt.integrations.accelerate import load_state

    job = Job(rank, folder)
    with tieredckpt.Engine.open("tieredckpt.yaml") as engine:
        with pytest.raises((UsageError, CheckpointException), match="files of rank") as caught:
            load_state(job.accelerator, engine)
        assert "other_world_size" in caught.value.__notes__[-1]
        torch.manual_seed(7)
        seed = torch.get_rng_state()
        assert load_state(job.accelerator, engine, other_world_size=True) == 1
        assert torch.equal(torch.get_rng_state(), seed)
    assert job.counter.count == 1
    return [p.detach().full_tensor().numpy().tobytes() for p in job.parts[0].parameters()]


def test_damage_refusals_and_another_number_of_ranks(
    shop: Workshop, runtime_dir: Path, tmp_path: Path
):
    folder = place(tmp_path / "odd", runtime_dir, "odd")
    shop.run(odd_cases, 2, folder, str(runtime_dir))
    one, three = shop.run(reshape, 1, folder), shop.run(reshape, 3, folder)
    assert one == three[:1]
