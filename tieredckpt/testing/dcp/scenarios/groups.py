"""Saves and loads in a part of the ranks, in several parts at once, and without collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from tieredckpt.testing.dcp import oracle
from tieredckpt.testing.dcp.job import Job
from tieredckpt.testing.dcp.scenario import scenario
from tieredckpt.testing.dcp.scenarios.sharding import cut, mesh_of


def _in_group(job: Job, *ranks: int) -> None:
    group = dist.new_group(list(ranks))
    mesh = DeviceMesh("cpu", list(ranks))

    def state() -> dict[str, Any]:
        return {"shards": cut(mesh, (7, 3), Shard(0)), "plain": torch.zeros(5)}

    if job.rank in ranks:
        job.save_filled(state(), 1, process_group=group)
        job.load_checked(state(), 1, process_group=group)
    job.restart()
    if job.rank in ranks:
        job.load_checked(state(), 1, process_group=group)
        job.save_filled(state(), 2, process_group=group)
        job.load_checked(state(), 2, process_group=group)
    job.meet()
    job.load_checked({"plain": torch.zeros(5)}, 2)


@scenario(3)
def group_of_the_first_ranks(job: Job) -> None:
    """Ranks 0 and 1 of three save and load in a group of theirs; then all three load"""
    _in_group(job, 0, 1)


@scenario(4)
def group_of_the_last_ranks(job: Job) -> None:
    """Ranks 2 and 3 of four save in a group of theirs, whose coordinator is not rank 0"""
    _in_group(job, 2, 3)


@scenario(3)
def group_of_one_rank(job: Job) -> None:
    """Rank 2 of three saves in a group of its own"""
    _in_group(job, 2)


@scenario(2)
def second_group_of_all_ranks(job: Job) -> None:
    """All ranks, but through another process group than the default one"""
    group = dist.new_group([0, 1])
    mesh = mesh_of(2)
    job.save_filled({"x": cut(mesh, (5, 3), Shard(0))}, 1, process_group=group)
    job.restart()
    job.load_checked({"x": cut(mesh, (5, 3), Shard(1))}, 1, process_group=group)


@scenario(4)
def everybody_then_a_group(job: Job) -> None:
    """All ranks save, ranks 2 and 3 load that in a group of theirs, and save another stream"""
    group = dist.new_group([2, 3])
    everybody, pair = mesh_of(4), DeviceMesh("cpu", [2, 3])
    job.save_filled({"x": cut(everybody, (9, 2), Shard(0)), "y": torch.zeros(4)}, 1)

    def state() -> dict[str, Any]:
        return {"x": cut(pair, (9, 2), Shard(1)), "y": torch.zeros(4)}

    if job.rank >= 2:
        job.load_checked(state(), 1, process_group=group)
        job.save_filled(state(), 5, stream="pair", process_group=group)
    job.meet()
    job.save_filled({"x": cut(everybody, (9, 2), Shard(1)), "y": torch.zeros(4)}, 2)
    job.restart()
    job.load_checked({"x": cut(everybody, (9, 2), Shard(0))}, 2)
    job.load_checked({"x": cut(everybody, (9, 2), Shard(0))}, 5, stream="pair")


@scenario(4)
def a_group_into_the_stream_of_all(job: Job) -> None:
    """All ranks save a stream, then ranks 2 and 3 alone save the next step of it, then all"""
    group = dist.new_group([2, 3])
    everybody, pair = mesh_of(4), DeviceMesh("cpu", [2, 3])
    for step in (1, 2, 3):
        if step != 2:
            job.save_filled({"x": cut(everybody, (9, 2), Shard(0))}, step)
        elif job.rank >= 2:
            job.save_filled({"x": cut(pair, (9, 2), Shard(0))}, step, process_group=group)
        job.meet()
        job.load_checked({"x": cut(everybody, (9, 2), Shard(1))}, step)
    job.restart()
    job.load_checked({"x": cut(everybody, (9, 2), Shard(0))}, 3)


@scenario(4)
def groups_at_once(job: Job) -> None:
    """Actor (ranks 0, 1) and critic (2, 3) each save and load a stream of their own, at once"""
    halves = ((0, 1), (2, 3))
    groups = [dist.new_group(list(ranks)) for ranks in halves]
    meshes = [DeviceMesh("cpu", list(ranks)) for ranks in halves]
    mine = job.rank // 2
    stream, group = ("actor", "critic")[mine], groups[mine]

    def state(shift: int = 0) -> dict[str, Any]:
        return {
            stream: cut(meshes[mine], (9, 2 + mine), Shard(shift)),
            "both": torch.zeros(3 + mine),
        }

    for step in (1, 2):
        job.save_filled(state(), step, stream=stream, process_group=group)
    job.load_checked(state(1), 2, stream=stream, process_group=group)
    job.restart()
    job.load_checked(state(1), 2, stream=stream, process_group=group)
    job.save_filled(state(), 3, stream=stream, process_group=group)
    job.load_checked(state(), 3, stream=stream, process_group=group)
    # And everybody can read what the other half saved.
    job.meet()
    other = ("actor", "critic")[1 - mine]
    job.load_checked({other: torch.zeros(9, 2 + 1 - mine)}, 3, stream=other, process_group=group)


@scenario(2)
def two_streams(job: Job) -> None:
    """Two streams with equal step numbers do not mix"""

    def state(stream: str) -> dict[str, Any]:
        return {f"{stream}.x": torch.zeros(8)}

    for stream in ("weights", "optimizer"):
        job.save_filled(state(stream), 1, stream=stream)
    job.restart()
    for stream in ("weights", "optimizer"):
        job.load_checked(state(stream), 1, stream=stream)
    job.not_visible({"weights.x": torch.zeros(8)}, 1, "optimizer")


@scenario(2)
def no_dist_on_one_rank(job: Job) -> None:
    """no_dist=True on rank 0 alone saves what it has; both ranks load it"""
    if job.rank == 0:
        job.save_filled({"x": torch.zeros(12)}, 1, no_dist=True)
        job.load_checked({"x": torch.zeros(12)}, 1, no_dist=True)
    job.restart()
    job.load_checked({"x": torch.zeros(12)}, 1)


@scenario(2)
def no_dist_loads(job: Job) -> None:
    """Each rank loads with no_dist=True what all have saved, each another part of it"""
    mesh = mesh_of(2)
    job.save_filled({"a": cut(mesh, (7, 2), Shard(0)), "b": torch.zeros(4)}, 1)
    job.restart()
    wanted: dict[str, Any] = {"a": torch.zeros(7, 2)} if job.rank else {"b": torch.zeros(4)}
    job.load_checked(wanted, 1, no_dist=True)


@scenario(2)
def no_dist_on_each_rank(job: Job) -> None:
    """no_dist=True on both ranks at once, each into a stream of its own, as replicas save"""
    mine, other = f"replica-{job.rank}", f"replica-{1 - job.rank}"

    def state(stream: str) -> dict[str, Any]:
        return {f"{stream}.x": torch.zeros(6), "step": 0}

    for step in (1, 2):
        job.save_filled(state(mine), step, stream=mine, no_dist=True)
    job.load_checked(state(mine), 2, stream=mine, no_dist=True)
    job.restart()
    job.load_checked(state(mine), 2, stream=mine, no_dist=True)
    job.load_checked(state(other), 2, stream=other, no_dist=True)
    job.load_checked(state("replica-0"), 2, stream="replica-0")


@scenario(2)
def no_collectives(job: Job) -> None:
    """use_collectives=False: each rank saves its part, both load theirs again"""

    def state() -> dict[str, Any]:
        return {f"of.{job.rank}": torch.zeros(5 + job.rank), f"text.{job.rank}": "mine"}

    job.save_filled(state(), 1, use_collectives=False)
    job.restart()
    got = state()
    got[f"text.{job.rank}"] = ""
    job.load_checked(got, 1)
    assert got[f"text.{job.rank}"] == "mine"


@scenario(2)
def no_collectives_sharded(job: Job) -> None:
    """use_collectives=False with DTensors, loaded in the same layout"""
    mesh = mesh_of(2)
    job.save_filled({"x": cut(mesh, (7, 3), Shard(0))}, 1, use_collectives=False)
    job.restart()
    job.load_checked({"x": cut(mesh, (7, 3), Shard(0))}, 1)


@scenario(2, 3)
def no_collectives_resharded(job: Job) -> None:
    """use_collectives=False with DTensors, loaded as one checkpoint by another number of ranks"""
    mesh = mesh_of(job.world)
    if job.stage == 0:
        job.save_filled({"x": cut(mesh, (7, 3), Shard(0)), "y": torch.zeros(3)}, 1,
                        use_collectives=False)  # fmt: skip
    else:
        job.load_checked({"x": cut(mesh, (7, 3), Shard(1)), "y": torch.zeros(3)}, 1)


@scenario(2)
def no_collectives_one_rank_missing(job: Job) -> None:
    """use_collectives=False: what only one rank has saved is no checkpoint for both"""
    mesh = mesh_of(2)

    def state() -> dict[str, Any]:
        return {"x": cut(mesh, (8, 3), Shard(0))}

    job.save_filled(state(), 1, use_collectives=False)
    if job.rank == 0:
        job.storage.wait_at_most(2)
        writer = job.storage.writer(2)
        finish = writer.finish

        def finish_and_stop(*args: Any, **options: Any) -> None:
            finish(*args, **options)
            raise _Stopped  # or DCP would wait for the other rank, for ever

        writer.finish = finish_and_stop  # type: ignore[method-assign]
        oracle.fill(local := state(), 2)
        try:
            dcp.save(local, storage_writer=writer, use_collectives=False)
        except Exception as error:  # noqa: BLE001 (a writer may notice that the other is missing)
            print(f"as it should be, the save of one rank raised {error!r}")  # noqa: T201
    job.meet()
    job.restart()
    job.not_visible(state(), 2)
    job.load_checked(state(), 1)


class _Stopped(Exception):
    """Raised where this rank's part of the save is over."""
