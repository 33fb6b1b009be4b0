"""A rank raises: all ranks must raise, nothing must be visible, and the next save must work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItem,
)
from torch.distributed.tensor import Shard

from tieredckpt.testing.dcp.job import Job
from tieredckpt.testing.dcp.scenario import scenario
from tieredckpt.testing.dcp.scenarios.sharding import cut, mesh_of


class Boom(RuntimeError):
    """What a scenario raises."""


def boom() -> None:
    """Raise it."""
    raise Boom("on purpose")


class SaveHooks(DefaultSavePlanner):
    """Calls ``act`` at one place of a save.

    Args:
        place: "local", "global", "finish" or "resolve".
        act: What to do there.
    """

    def __init__(self, place: str, act: Callable[[], None]) -> None:
        super().__init__()
        self._place = place
        self._act = act

    def _at(self, place: str) -> None:
        if place == self._place:
            self._act()

    def create_local_plan(self) -> SavePlan:
        self._at("local")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self._at("global")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._at("finish")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        """As DCP's own, and a hook before it."""
        self._at("resolve")
        return super().resolve_data(write_item)


class LoadHooks(DefaultLoadPlanner):
    """Calls ``act`` at one place of a load.

    Args:
        place: "local", "global", "finish", "resolve", "commit" or "bytes".
        act: What to do there.
    """

    def __init__(self, place: str, act: Callable[[], None]) -> None:
        super().__init__()
        self._place = place
        self._act = act

    def _at(self, place: str) -> None:
        if place == self._place:
            self._act()

    def create_local_plan(self) -> LoadPlan:
        self._at("local")
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self._at("global")
        return super().create_global_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self._at("finish")
        return super().finish_plan(new_plan)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self._at("resolve")
        tensor: torch.Tensor = super().resolve_tensor(read_item)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._at("commit")
        super().commit_tensor(read_item, tensor)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self._at("bytes")
        super().load_bytes(read_item, value)


def state_of(job: Job) -> dict[str, Any]:
    """Something of every kind on every rank."""
    mesh = mesh_of(job.world)
    return {
        "shards": cut(mesh, (7, 3), Shard(0)),
        "plain": torch.zeros(5),
        f"text.{job.rank}": f"rank {job.rank}",
    }


def _a_save_that_fails(job: Job, place: str, on: int) -> None:
    job.save_filled(state_of(job), 1)
    planner = SaveHooks(place, boom) if job.rank == on else DefaultSavePlanner()
    job.all_raise(lambda: job.save_filled(state_of(job), 2, planner=planner))
    job.not_visible(state_of(job), 2)
    job.load_checked(state_of(job), 1)
    job.save_filled(state_of(job), 3)
    job.load_checked(state_of(job), 3)
    job.restart()
    job.not_visible(state_of(job), 2)
    job.load_checked(state_of(job), 3)


@scenario(2)
def save_fails_in_local_planning(job: Job) -> None:
    """One rank raises while it plans a save"""
    _a_save_that_fails(job, "local", 1)


@scenario(2)
def save_fails_in_global_planning(job: Job) -> None:
    """The coordinator raises while it makes the plan of all"""
    _a_save_that_fails(job, "global", 0)


@scenario(3)
def save_fails_before_writing(job: Job) -> None:
    """One rank raises after planning, before it writes"""
    _a_save_that_fails(job, "finish", 2)


@scenario(3)
def save_fails_while_writing(job: Job) -> None:
    """One rank raises in the middle of its writes"""
    _a_save_that_fails(job, "resolve", 1)


@scenario(2)
def save_fails_while_the_coordinator_writes(job: Job) -> None:
    """The coordinator raises in the middle of its writes"""
    _a_save_that_fails(job, "resolve", 0)


@scenario(2)
def failed_save_of_an_existing_step(job: Job) -> None:
    """A step saved again fails on one rank: the first one is still whole"""
    job.save_filled(state_of(job), 1)
    planner = SaveHooks("resolve", boom) if job.rank == 1 else DefaultSavePlanner()
    other = state_of(job)
    other["plain"].fill_(3.0)
    job.all_raise(lambda: job.save(other, 1, planner=planner))
    job.load_checked(state_of(job), 1)
    job.restart()
    job.load_checked(state_of(job), 1)


@scenario(2)
def three_failures_in_a_row(job: Job) -> None:
    """Several failed saves one after the other leave room for one that works"""
    job.save_filled(state_of(job), 1)
    for step in (2, 3, 4):
        planner = SaveHooks("resolve", boom) if job.rank == step % 2 else DefaultSavePlanner()
        job.all_raise(partial(job.save_filled, state_of(job), step, planner=planner))
    job.save_filled(state_of(job), 5)
    job.load_checked(state_of(job), 5)


def _a_load_that_fails(job: Job, place: str, on: int) -> None:
    job.save_filled(state_of(job), 1)
    planner = LoadHooks(place, boom) if job.rank == on else DefaultLoadPlanner()
    job.all_raise(lambda: job.load(state_of(job), 1, planner=planner))
    job.load_checked(state_of(job), 1)
    job.save_filled(state_of(job), 2)
    job.load_checked(state_of(job), 2)


@scenario(2)
def load_fails_in_local_planning(job: Job) -> None:
    """One rank raises while it plans a load"""
    _a_load_that_fails(job, "local", 1)


@scenario(2)
def load_fails_in_global_planning(job: Job) -> None:
    """The coordinator raises while it makes the plan of all"""
    _a_load_that_fails(job, "global", 0)


@scenario(2)
def load_fails_while_resolving(job: Job) -> None:
    """One rank has no destination for a tensor"""
    _a_load_that_fails(job, "resolve", 1)


@scenario(2)
def load_fails_while_committing(job: Job) -> None:
    """One rank raises when a tensor has arrived"""
    _a_load_that_fails(job, "commit", 0)


@scenario(2)
def load_fails_in_a_value(job: Job) -> None:
    """One rank raises when a value has arrived"""
    _a_load_that_fails(job, "bytes", 1)


@scenario(2)
def the_reason_arrives(job: Job) -> None:
    """The exception says on every rank which one failed, and why"""
    planner = SaveHooks("resolve", boom) if job.rank == 1 else DefaultSavePlanner()
    error = job.all_raise(lambda: job.save_filled(state_of(job), 1, planner=planner))
    failures = getattr(error, "failures", {})
    assert set(failures) == {1}, failures
    assert isinstance(failures[1][0], Boom), failures


@scenario(2)
def unpicklable_value(job: Job) -> None:
    """A value that cannot be pickled fails on all ranks, and the next save works"""
    job.save_filled(state_of(job), 1)
    bad = {**state_of(job), f"bad.{job.rank}": (lambda: None) if job.rank else 1}
    job.all_raise(lambda: job.save(bad, 2))
    job.not_visible(state_of(job), 2)
    job.save_filled(state_of(job), 3)
    job.load_checked(state_of(job), 3)
