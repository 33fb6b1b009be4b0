"""Several ranks: one checkpoint for all of them, or an error on all of them."""

from __future__ import annotations

import logging
import math
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.ranks import run_ranks
from tests.support.slots import is_warm
from tests.support.states import blank, config, flip, load, manifest_of, same, save, slot_of
from tieredckpt.engine import Engine
from tieredckpt.errors import (
    ConfigError,
    NoRecoverableCheckpointError,
    NotFoundError,
    RankError,
    StaleAttemptError,
    UsageError,
)
from tieredckpt.format.segment import decode_trailer

pytestmark = pytest.mark.usefixtures("served")


def full(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = math.prod(shape)
    return (torch.arange(count, dtype=torch.int64) * 7919 + seed).reshape(shape).to(dtype)


SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "even": ((12, 50), torch.float32),
    "odd": ((7, 3), torch.bfloat16),
    "short": ((1, 9), torch.float32),  # some ranks have nothing of it
    "long": ((700_001,), torch.int64),
    "cube": ((5, 6, 7), torch.float64),
}


def sharded_state(step: int, *, content: bool = True) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for name, (shape, dtype) in SHAPES.items():
        value = full(shape, step, dtype) if content else torch.zeros(shape, dtype=dtype)
        dims = (0, 1) if len(shape) > 1 else (0,)
        for dim in dims:
            state[f"{name}.{dim}"] = distribute_tensor(value, mesh, [Shard(dim)])
    value = full((20, 20), step) if content else torch.zeros(20, 20)
    state["replicated"] = distribute_tensor(value, mesh, [Replicate()])
    state["plain"] = full((33,), step) if content else torch.zeros(33)
    state["nested"] = {"step": step if content else -1, "name": "x" if content else None}
    return state


def assert_is(state: dict[str, Any], step: int) -> None:
    for name, (shape, dtype) in SHAPES.items():
        for dim in range(min(2, len(shape))):
            got = state[f"{name}.{dim}"]
            assert isinstance(got, DTensor)
            assert torch.equal(got.full_tensor(), full(shape, step, dtype)), (name, dim)
    assert torch.equal(state["replicated"].to_local(), full((20, 20), step))
    assert torch.equal(state["plain"], full((33,), step))
    assert state["nested"] == {"step": step, "name": "x"}


def opened(runtime_dir: str, **more: Any) -> Engine:
    return Engine.open(config(Path(runtime_dir), **more))


def failures_of(call: Any) -> dict[int, BaseException]:
    with pytest.raises(CheckpointException) as caught:
        call()
    return {rank: failure[0] for rank, failure in caught.value.failures.items()}


# --- resharding ---------------------------------------------------------------------------------


def go_on(rank: int, runtime_dir: str, expected: int | None, step: int) -> dict[str, int]:
    complaints: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tieredckpt").addHandler(handler)
    with opened(runtime_dir) as engine:
        state = sharded_state(0, content=False)
        assert engine.load(state) == expected
        assert is_warm(engine._session.ring)
        assert not complaints  # the slots of the first save are prepared, whatever its size is now
        if expected is not None:
            assert_is(state, expected)
        save(engine, step, sharded_state(step))
        state = sharded_state(0, content=False)
        load(state, engine.reader())
        assert_is(state, step)
        manifest = manifest_of(engine, step)
        assert manifest.world_size == dist.get_world_size()
        return engine.last_restore.bytes_by_tier if engine.last_restore else {}


def test_reshard_over_the_life_of_a_run(runtime_dir: Path):
    """2, 3 and 1 ranks in turn: each loads what the last ones saved, in another layout."""
    before = None
    for step, world_size in enumerate((2, 3, 1)):
        run_ranks(go_on, world_size, str(runtime_dir), before, step)
        before = step


def reads(rank: int, runtime_dir: str) -> int:
    mesh = init_device_mesh("cpu", (2,))
    big = full((8 << 20,), 3, torch.uint8)
    with opened(runtime_dir) as engine:
        engine.load({})
        save(engine, 1, {"big": distribute_tensor(big, mesh, [Shard(0)])})
        state = {"big": distribute_tensor(torch.zeros_like(big), mesh, [Shard(0)])}
        engine.load(state)
        assert torch.equal(state["big"].to_local(), big.chunk(2)[rank])
        assert engine.last_restore is not None
        read = sum(engine.last_restore.bytes_by_tier.values())
        unlike_ranks(rank, Path(runtime_dir), engine)
        return read


def unlike_ranks(rank: int, runtime_dir: Path, engine: Engine) -> None:
    """One has a large tensor, the other many small ones: blocks of two sizes in one checkpoint."""
    one = {"one": full((3 << 20,), 5, torch.uint8)}
    many = {f"many{n}": full((77_777,), n) for n in range(20)}
    save(engine, 2, many if rank else one)
    back = blank(one | many)
    assert engine.load(back) == 2
    assert same(back, one | many)
    for ref, expected in zip(manifest_of(engine, 2).segments, (128 << 10, 4 << 20), strict=True):
        data = slot_of(runtime_dir, ref.id).read_bytes()[ref.size - 128 : ref.size]
        assert decode_trailer(data).block_bytes == expected


def test_a_rank_reads_only_the_blocks_it_needs(runtime_dir: Path):
    assert run_ranks(reads, 2, str(runtime_dir)) == [4 << 20, 4 << 20]


# --- FSDP2 --------------------------------------------------------------------------------------


def fsdp(rank: int, runtime_dir: str, start: int | None) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 33), torch.nn.ReLU(), torch.nn.Linear(33, 8, bias=False)
    )
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with opened(runtime_dir) as engine:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        rng = f"rng{rank}"
        state = {"model": model_state, "optimizer": optimizer_state, rng: torch.get_rng_state()}
        step = engine.load(state)
        assert step == start
        if step is not None:
            set_state_dict(
                model, optimizer, model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )  # fmt: skip
            torch.set_rng_state(state[rng])
        else:
            torch.manual_seed(5)  # the same data on both ranks keeps losses comparable
        for now in range(0 if step is None else step + 1, 6):
            loss = model(torch.randn(4, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if now < 4:
                model_state, optimizer_state = get_state_dict(model, optimizer)
                state = {"model": model_state, "optimizer": optimizer_state}
                save(engine, now, {**state, rng: torch.get_rng_state()})
    return losses


def test_fsdp2_training_goes_on_bit_identically(runtime_dir: Path):
    whole = run_ranks(fsdp, 2, str(runtime_dir), None)
    assert run_ranks(fsdp, 2, str(runtime_dir), 3) == [losses[4:] for losses in whole]


# --- an error on one rank is an error on all ------------------------------------------------------


class Broken(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("rank 1 cannot")
        return super().resolve_data(write_item)


def errors(rank: int, runtime_dir: str) -> None:
    with pytest.raises(ConfigError, match="memry"):
        opened(runtime_dir, **({"memry": 1} if rank else {}))
    with opened(runtime_dir) as engine:
        engine.load({})
        state = sharded_state(1)
        # Ranks that name different steps.
        found = failures_of(lambda: save(engine, rank, state))
        assert list(found) == [0]
        assert isinstance(found[0], UsageError)
        assert "rank 1 step 1" in str(found[0])
        # One rank whose checkpoint_id is wrong: the error is on all, nobody waits for ever.
        writer = engine.writer()
        found = failures_of(
            lambda: dcp.save(
                state, checkpoint_id="step-1" if rank else "latest", storage_writer=writer
            )
        )
        assert list(found) == [0]
        assert isinstance(found[0], UsageError)
        # One rank that fails to write.
        found = failures_of(lambda: save(engine, 2, state, planner=Broken()))
        assert list(found) == [1]
        assert "rank 1 cannot" in str(found[1])
        assert engine.checkpoints() == []
        save(engine, 3, state)
        save(engine, 4, state)
        # Ranks whose readers name different steps.
        found = failures_of(
            lambda: load(sharded_state(0, content=False), engine.reader(step=3 + rank))
        )
        assert isinstance(found[0], UsageError)
        assert "different checkpoints" in str(found[0])
        found = failures_of(lambda: load(sharded_state(0), engine.reader(step=3 + 9 * rank)))
        assert isinstance(found[1], NotFoundError)
        with pytest.raises(UsageError, match=r"rank 0 for step 3 .*rank 1 for step 4 "):
            engine.load(sharded_state(0, content=False), step=3 + rank)
        # A key that only one rank asks for is asked for.
        save(engine, 5, {"a": torch.ones(2), "b": torch.ones(2)})
        assert engine.load({"ab"[rank]: torch.zeros(2)}) == 5
        with pytest.raises(UsageError, match="'b'"):
            engine.load({"a": torch.zeros(2)})
        # A rank whose tensors are all new is refused only if no rank restores any.
        with pytest.raises(UsageError, match=r"the keys of the state have the prefix 'module\.'"):
            engine.load({"module.a": torch.zeros(2)} if rank else {}, strict=False)
        with pytest.warns(UserWarning, match="not loaded"):
            assert engine.load({"ac"[rank]: torch.zeros(2)}, strict=False) == 5
        try:
            raise KeyError("users load inside of their own handlers too")
        except KeyError:
            assert engine.load({"ab"[rank]: torch.zeros(2)}) == 5
        # A Stateful that fails on one rank, before and after reading.
        for method in ("state_dict", "load_state_dict"):
            with pytest.raises(RankError if rank == 0 else ZeroDivisionError, match="division"):
                engine.load({"p": Picky(method), "b": torch.zeros(2)}, strict=False)


class Picky:
    def __init__(self, fails_in: str) -> None:
        self.fails_in = fails_in

    def state_dict(self) -> dict[str, Any]:
        if self.fails_in == "state_dict" and dist.get_rank() == 1:
            _ = 1 // 0
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails_in == "load_state_dict" and dist.get_rank() == 1:
            _ = 1 // 0


def test_errors_reach_all_ranks(runtime_dir: Path):
    run_ranks(errors, 2, str(runtime_dir))


# --- damage and time line -------------------------------------------------------------------------


def damaged(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir) as engine:
        engine.load({})
        for step in (1, 2, 3):
            save(engine, step, sharded_state(step))
        if rank == 0:
            # Only what rank 1 wrote is damaged, and it reads most of it: rank 0 walks back too.
            refs = manifest_of(engine, 3).segments
            flip(slot_of(Path(runtime_dir), refs[1].id), 64)
        dist.barrier()
        state = sharded_state(0, content=False)
        assert engine.load(state) == 2
        assert_is(state, 2)
        assert engine.last_restore is not None
        assert [step for _, step, _ in engine.last_restore.refused] == [3]
        if rank == 0:
            for step in (1, 2):
                flip(slot_of(Path(runtime_dir), manifest_of(engine, step).segments[1].id), 64)
        dist.barrier()
        with pytest.raises(NoRecoverableCheckpointError, match="undefined"):
            engine.load(sharded_state(0))


def test_all_ranks_walk_back_together(runtime_dir: Path):
    run_ranks(damaged, 2, str(runtime_dir))


def saves_without_its_group(rank: int, runtime_dir: str) -> None:
    engine = opened(runtime_dir)
    engine.load({})
    save(engine, 1, sharded_state(1))
    dist.destroy_process_group()
    # DCP now takes each rank for the only one, as it does in the thread of an async_save.
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"part": torch.ones(7)}, storage_writer=engine.writer(2))
    assert "process group of this engine was destroyed" in str(caught.value)
    for collective in (lambda: engine.load({}), lambda: engine.async_save({}, 2)):
        with pytest.raises(UsageError, match="was destroyed"):
            collective()
    assert [each.step for each in engine.checkpoints()] == [1]
    engine.close()


def test_a_save_after_the_process_group_was_destroyed(runtime_dir: Path):
    """Else one rank's part would be the newest checkpoint, and no restart would get past it."""
    run_ranks(saves_without_its_group, 2, str(runtime_dir))


def without_a_group(rank: int, runtime_dir: str, store: str) -> None:
    with opened(runtime_dir) as engine:
        engine.load({})
        save(engine, 1, {"a": torch.ones(3)})
    dist.destroy_process_group()
    with pytest.raises(UsageError, match=r"torch\.distributed\.init_process_group\(.*read_only"):
        opened(runtime_dir)  # torchrun says that there are two
    with Engine.open(config(Path(runtime_dir)), read_only=True) as engine:
        state = {"a": torch.zeros(3)}
        assert engine.load(state) == 1
        assert torch.equal(state["a"], torch.ones(3))
        # Opened too early for what all ranks do together.
        join(rank, store)
        with pytest.raises(UsageError, match="opened before init_process_group"):
            engine.load(state)
    dist.barrier()  # the other rank may still be connecting
    dist.destroy_process_group()
    os.environ["WORLD_SIZE"] = "1"
    with opened(runtime_dir, namespace=f"alone{rank}") as engine:
        engine.load({})
        save(engine, 1, {"a": torch.ones(3)})


def join(rank: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)


def test_under_torchrun_without_a_process_group(runtime_dir: Path, tmp_path: Path):
    """Else each rank saves its part as the whole, and the newest checkpoint is one of them."""
    run_ranks(without_a_group, 2, str(runtime_dir), str(tmp_path / "store"))


def zombies(rank: int, runtime_dir: str) -> None:
    with opened(runtime_dir) as old:
        old.load({})
        save(old, 1, sharded_state(1))
        with opened(runtime_dir) as new:
            assert new.load(sharded_state(0)) == 1
            save(old, 2, sharded_state(2))  # who only loads takes nothing over
            save(new, 2, sharded_state(7))
            found = failures_of(lambda: save(old, 3, sharded_state(2)))
            assert isinstance(found[0], StaleAttemptError)
            state = sharded_state(0, content=False)
            assert new.load(state) == 2
            assert_is(state, 7)


def test_zombie_ranks_are_refused(runtime_dir: Path):
    run_ranks(zombies, 2, str(runtime_dir))


def mistyped(rank: int, runtime_dir: str, disk: str) -> list[str]:
    tiers = [{"name": "disk", "url": f"file://{disk}"}]
    with opened(runtime_dir, namespace="llama-7B", tiers=tiers) as engine:
        assert engine.load({}) is None
        save(engine, 1, {"x": torch.ones(3)})
        engine.wait(1, "disk")
    said = []
    for tiers_now, runtime in (([], runtime_dir), (tiers, f"{runtime_dir}/other")):
        with (
            opened(runtime, namespace="Lama-7b", tiers=tiers_now, agent=STARTED) as engine,
            warnings.catch_warnings(record=True) as found,
        ):
            warnings.simplefilter("always")
            assert engine.load({}) is None
        said += [str(each.message) for each in found if "similar" in str(each.message)]
    return said


STARTED = {"idle_timeout": "5s"}


@pytest.mark.full
def test_a_mistyped_namespace_is_warned_of(runtime_dir: Path, tmp_path: Path):
    """Once, on one rank; by what the agent holds, or a tier's folder alone."""
    said, others = run_ranks(mistyped, 2, str(runtime_dir), str(tmp_path / "disk"))
    assert ["of a similar name: 'llama-7B'." in each for each in said] == [True, True]
    assert others == []
