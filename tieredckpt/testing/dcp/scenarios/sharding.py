"""Sharded tensors: how they are cut when saved, and how otherwise when loaded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tieredckpt.testing.dcp import oracle
from tieredckpt.testing.dcp.job import Job
from tieredckpt.testing.dcp.scenario import scenario

SHAPES = {"even": (12, 24), "uneven": (7, 5), "short": (1, 9), "cube": (5, 6, 7), "one": (13,)}
"""On 2 to 4 ranks these give even pieces, uneven ones, and ranks without any piece."""


def mesh_of(*sizes: int) -> DeviceMesh:
    """A mesh over all ranks."""
    return init_device_mesh("cpu", sizes)


def cut(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    *placements: Placement,
    dtype: torch.dtype = torch.float32,
) -> DTensor:
    """A DTensor whose content does not matter yet."""
    empty = torch.zeros(shape, dtype=dtype)
    return distribute_tensor(empty, mesh, placements, src_data_rank=None)


def rows(mesh: DeviceMesh, dim: int = 0) -> dict[str, Any]:
    """Each shape, cut along ``dim`` (the last one that it has, at most), and some others."""
    state: dict[str, Any] = {
        name: cut(mesh, shape, Shard(min(dim, len(shape) - 1))) for name, shape in SHAPES.items()
    }
    state["replicated"] = cut(mesh, (4, 4), Replicate())
    state["plain"] = torch.zeros(11)
    state["nested"] = {"inner": [cut(mesh, (10,), Shard(0), dtype=torch.bfloat16)]}
    return state


@scenario(2)
def sharded(job: Job) -> None:
    """DTensors cut along one dimension, evenly, unevenly, and into less pieces than ranks"""
    job.save_filled(rows(mesh_of(2)), 1)
    job.restart()
    job.load_checked(rows(mesh_of(2)), 1)


@scenario(4)
def empty_local_shards(job: Job) -> None:
    """Tensors shorter than there are ranks: some ranks have nothing of them, or of anything"""

    def state() -> dict[str, Any]:
        mesh = mesh_of(4)
        return {name: cut(mesh, shape, Shard(0)) for name, shape in
                {"one": (1, 6), "two": (2,), "three": (3, 2), "five": (5,)}.items()}  # fmt: skip

    def least() -> dict[str, Any]:
        return {"least": cut(mesh_of(4), (1,), Shard(0))}

    job.save_filled(state(), 1)
    job.save_filled(least(), 1, stream="least")
    job.restart()
    job.load_checked(state(), 1)
    job.load_checked(least(), 1, stream="least")


@scenario(2)
def other_dimension(job: Job) -> None:
    """Saved cut by rows; loaded cut by columns, replicated, and into plain tensors"""
    job.save_filled(rows(mesh_of(2), dim=0), 1)
    job.restart()
    job.load_checked(rows(mesh_of(2), dim=1), 1)
    mesh = mesh_of(2)
    job.load_checked({name: cut(mesh, shape, Replicate()) for name, shape in SHAPES.items()}, 1)
    job.load_checked({name: torch.zeros(shape) for name, shape in SHAPES.items()}, 1)


@scenario(2)
def plain_into_sharded(job: Job) -> None:
    """Saved as plain tensors, loaded into DTensors"""
    job.save_filled({name: torch.zeros(shape) for name, shape in SHAPES.items()}, 1)
    job.restart()
    job.load_checked({name: cut(mesh_of(2), shape, Shard(0)) for name, shape in SHAPES.items()}, 1)


TWO_DIMENSIONAL: dict[str, tuple[Placement, Placement]] = {
    "rows_and_columns": (Shard(0), Shard(1)),
    "columns_and_rows": (Shard(1), Shard(0)),
    "rows_twice": (Shard(0), Shard(0)),
    "replicated_rows": (Replicate(), Shard(0)),
    "rows_replicated": (Shard(1), Replicate()),
    "replicated": (Replicate(), Replicate()),
}


def _two_dimensional(mesh: DeviceMesh) -> dict[str, Any]:
    return {
        f"{name}.{shape[0]}": cut(mesh, shape, *placements)
        for name, placements in TWO_DIMENSIONAL.items()
        for shape in ((8, 12), (7, 5), (1, 3))
    }


@scenario(4)
def two_dimensional_mesh(job: Job) -> None:
    """Every way of cutting over a 2 x 2 mesh, loaded in the same way and over 4 x 1 and 1 x 4"""
    job.save_filled(_two_dimensional(mesh_of(2, 2)), 1)
    job.restart()
    job.load_checked(_two_dimensional(mesh_of(2, 2)), 1)
    job.load_checked(_two_dimensional(mesh_of(4, 1)), 1)
    job.load_checked(_two_dimensional(mesh_of(1, 4)), 1)


@scenario(2, 3, 1, 4)
def resharding_chain(job: Job) -> None:
    """2, 3, 1 and 4 ranks in turn, each loads what the last ones saved, cut otherwise"""
    mesh = mesh_of(job.world)
    if job.stage:
        job.load_checked(rows(mesh, dim=job.stage % 2), job.stage)
    step = job.stage + 1
    job.save_filled(rows(mesh), step)
    job.load_checked(rows(mesh, dim=1), step)


@scenario(4, 2)
def fewer_ranks_in_part(job: Job) -> None:
    """Saved on four ranks; two load a part of the keys, in pieces that cross the old ones"""
    if job.stage == 0:
        job.save_filled({"a": cut(mesh_of(4), (1001, 3), Shard(0)), "b": torch.zeros(5)}, 1)
    else:
        job.load_checked({"a": cut(mesh_of(2), (1001, 3), Shard(0))}, 1)


@scenario(4)
def sharded_tensor(job: Job) -> None:
    """The older ShardedTensor, one and several pieces for each rank"""

    def state() -> dict[str, Any]:
        found = {}
        for name, count in (("one", 1), ("several", 3)):
            pieces = [
                LocalShard.from_tensor_and_offsets(
                    torch.zeros(1, 6), [job.rank * count + number, 0], job.rank
                )
                for number in range(count)
            ]
            found[name] = init_from_local_shards(pieces, (job.world * count, 6))
        return found

    job.save_filled(state(), 1)
    job.restart()
    job.load_checked(state(), 1)
    job.load_checked({"one": cut(mesh_of(2, 2), (4, 6), Shard(1), Shard(0))}, 1)


@scenario(2)
def mixed_with_values(job: Job) -> None:
    """Shards, plain tensors and values of one name each, and ranks with keys of their own"""

    def state() -> dict[str, Any]:
        return {
            "shards": cut(mesh_of(2), (9, 2), Shard(0)),
            f"only.{job.rank}": torch.zeros(3 + job.rank),
            f"text.{job.rank}": "",
        }

    first = state()
    first[f"text.{job.rank}"] = f"of rank {job.rank}"
    job.save_filled(first, 1)
    job.restart()
    got = state()
    job.load_checked(got, 1)
    assert got[f"text.{job.rank}"] == f"of rank {job.rank}"
    everything: dict[str, Any] = {"only.0": torch.zeros(3), "only.1": torch.zeros(4), "text.0": ""}
    job.load_checked(everything, 1)
    assert everything["text.0"] == "of rank 0"


@scenario(2)
def changing_structure(job: Job) -> None:
    """Keys that come and go, and other shapes, dtypes and placements from save to save"""
    mesh = mesh_of(2)
    states: list[dict[str, Any]] = [
        {"a": torch.zeros(5), "b": cut(mesh, (6, 4), Shard(0))},
        {"a": torch.zeros(6), "b": cut(mesh, (6, 4), Shard(1)), "c": torch.zeros(2)},
        {"a": torch.zeros(6, dtype=torch.int16), "b": cut(mesh, (7, 4), Shard(0))},
        {"b": cut(mesh, (7, 4), Replicate())},
    ]
    for step, state in enumerate(states, start=1):
        job.save_filled(state, step)
        job.load_checked(state, step)
    job.restart()
    job.load_checked(states[-1], len(states))


@scenario(2)
def partial_mesh_view(job: Job) -> None:
    """The whole tensor of a DTensor is right as well, not only this rank's piece"""
    mesh = mesh_of(2)
    job.save_filled({"x": cut(mesh, (7, 3), Shard(0))}, 1)
    job.restart()
    got = cut(mesh, (7, 3), Shard(1))
    job.load({"x": got}, 1)
    dist.barrier()
    oracle.assert_same("x", got.full_tensor(), oracle.whole("x", 1, (7, 3)))
