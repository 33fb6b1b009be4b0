"""Waits for collectives that look at the end of the generation, and groups of ended ones."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.preloaded import context
from tieredckpt.live.torch_private import SlicedWaits, drop_groups, forget_last_world

ENDED_AFTER = 100
"""Looks at the generation before it ends; each is after a wait of 50 ms."""


def joins_and_dies(store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=1, world_size=2)
    os._exit(0)


@pytest.mark.parametrize(
    ("operation", "tensors"),
    [
        ("allreduce", (torch.ones(8),)),
        ("_reduce_scatter_base", (torch.zeros(4), torch.ones(8))),
    ],
)
def test_a_collective_that_fails_raises_though_the_generation_goes_on(
    tmp_path: Path, operation: str, tensors: tuple[torch.Tensor, ...]
):
    """Nobody has seen the peer's death yet; a reduce-scatter never says that it is completed."""
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        assert looks < ENDED_AFTER, "the collective's error was taken for a time-out"

    process = context.Process(target=joins_and_dies, args=(str(tmp_path / "store"),))
    process.start()
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)
    process.join()
    group: Any = dist.group.WORLD
    try:
        with SlicedWaits(check):
            work = getattr(group, operation)(*tensors)
            with pytest.raises(RuntimeError, match=r"(?i)connection|socket"):
                work.wait()
    finally:
        dist.destroy_process_group()


def worlds(folder: str) -> None:
    """Models of ended worlds, one after the other: their groups' threads end."""
    threads = []
    for number in range(4):
        store = dist.FileStore(f"{folder}/store-{number}", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        forget_last_world()
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        model = torch.nn.Linear(8, 8)
        fully_shard(model, mesh=mesh)
        model(torch.ones(2, 8)).sum().backward()
        del model, mesh, store
        gc.collect()
        drop_groups(wait_s=5.0)
        threads.append(len(os.listdir("/proc/self/task")))
    assert threads[-1] <= threads[1] + 2, threads  # each world had three


def test_groups_of_ended_worlds_leave_no_threads(tmp_path: Path):
    """torch 2.11 keeps device meshes, which hold their groups."""
    process = context.Process(target=worlds, args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode == 0
