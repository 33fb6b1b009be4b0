"""Agreement among the ranks: their numbers, and calls that succeed or raise on all ranks alike.

Only small control values travel here, over a CPU process group. A rank without a process group is
a group of one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from tieredckpt.dcp.state.per_rank_keys import launched_ranks
from tieredckpt.errors import RankError, TieredCkptError, UsageError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Failed:
    """A rank's failure, in a form that certainly pickles."""

    rank: int
    error: BaseException | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that open or load together: all of them, or a sub-group of them.

    Attributes:
        group: Process group with a CPU backend for control values; None: the default group, or no
            group at all if there is only this process.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group: dist.ProcessGroup | None

    @classmethod
    def find(cls, process_group: dist.ProcessGroup | None, *, read_only: bool) -> Ranks:
        """This process's ranks. Collective over the default group if one is initialised.

        Raises:
            UsageError: The given group has no CPU backend, or is not of all ranks. Or there is no
                group, the launcher started several ranks, and not all is ``read_only``.
        """
        if not _group_exists():
            if not read_only and (launched := launched_ranks()) > 1:
                # Each rank would be a run of its own, and its part a checkpoint.
                raise UsageError(
                    f"the launcher started {launched} ranks (WORLD_SIZE), and there is no process "
                    "group: call torch.distributed.init_process_group(...) on all ranks before "
                    "Engine.open; to look at checkpoints, Engine.open(..., read_only=True); a "
                    "process that saves by itself, on purpose, unsets WORLD_SIZE"
                )
            return cls(rank=0, world_size=1, local_rank=0, local_world_size=1, group=None)
        world_size, rank = dist.get_world_size(), dist.get_rank()
        group = process_group
        if group is not None:
            if dist.get_world_size(group) != world_size or dist.get_rank(group) != rank:
                raise UsageError(
                    "Engine.open is called on all ranks, and takes a process group of all of them "
                    "in their order; a sub-group is given to engine.load or dcp.save"
                )
            _check_cpu_backend(group)
        elif not has_cpu_backend(dist.group.WORLD):
            group = dist.new_group(backend="gloo")
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=int(os.environ.get("LOCAL_RANK", rank % max(local_world_size, 1))),
            local_world_size=local_world_size,
            group=group,
        )

    def members(self, group: dist.ProcessGroup | Sequence[int]) -> tuple[int, ...]:
        """The ranks of a process group, or those that are named, this one among them.

        Raises:
            UsageError: They are no ranks, or this one is not among them.
        """
        if isinstance(group, Sequence):
            found = tuple(group)
        else:
            found = tuple(dist.get_process_group_ranks(group))
        if len(set(found)) < len(found) or self.rank not in found:
            raise UsageError(
                f"a group is a process group or its ranks, this one (rank {self.rank}) among them, "
                f"not {group!r}"
            )
        return found

    def of(self, group: dist.ProcessGroup | None) -> Ranks:
        """These ranks as members of ``group``, which may be a sub-group; None: as they are.

        Raises:
            UsageError: This rank is not in it, or it has no CPU backend.
        """
        if group is None:
            return self
        if not _group_exists() or dist.get_rank(group) < 0:
            raise UsageError(
                "this rank is not in the given process group: call engine.load and dcp.save on the "
                "group's ranks only, and the other ranks load and save in groups of their own"
            )
        _check_cpu_backend(group)
        return replace(
            self, rank=dist.get_rank(group), world_size=dist.get_world_size(group), group=group
        )

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the group's rank 0."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no process group: nothing here is a collective then."""
        return self.world_size == 1 and not _group_exists()

    def check_group(self) -> None:
        """Check that these are still the ranks of the process group.

        Raises:
            UsageError: The group of several ranks was made, or destroyed, since these were found.
                DCP takes each rank for the only one without a group, and its part for the whole.
        """
        if self.world_size > 1 and not _group_exists():
            raise UsageError(
                "the process group of this engine was destroyed: nothing was saved or loaded; wait "
                "for saves in the background (engine.close() does) before destroy_process_group"
            )
        alone = self.world_size == 1 and self.group is None
        if alone and _group_exists() and dist.get_world_size() > 1:
            raise UsageError(
                "this engine was opened before init_process_group, by this rank alone: open it "
                "afterwards, on all ranks together"
            )

    def gather(self, call: Callable[[], _T]) -> list[_T]:
        """What ``call`` returns on each rank, in rank order. Collective.

        Raises:
            TieredCkptError, RankError: It failed somewhere: the own error on a rank where it
                failed, elsewhere that of the lowest rank. Or as :meth:`check_group`.
        """
        self.check_group()
        if self.alone:
            return [call()]
        outcome: _T | _Failed = _Failed(self.rank, "")
        succeeded = False
        try:
            outcome = call()
            succeeded = True
        finally:
            # Also when this rank failed: the other ranks wait here. Then it raises its own error.
            if not succeeded:
                error = sys.exception()
                assert error is not None
                ours = isinstance(error, TieredCkptError)
                outcome = _Failed(self.rank, error if ours else f"{type(error).__name__}: {error}")
            everyone: list[_T | _Failed] = [outcome] * self.world_size
            dist.all_gather_object(everyone, outcome, group=self.group)
        for each in everyone:
            if isinstance(each, _Failed):
                raise _error_of(each)
        return [each for each in everyone if not isinstance(each, _Failed)]

    def run(self, call: Callable[[], _T]) -> _T:
        """What ``call`` returns on this rank, once it succeeded on all. Collective.

        Raises as :meth:`gather`. The value stays here: it need not pickle.
        """
        kept: list[_T] = []
        self.gather(lambda: kept.append(call()))
        return kept[0]

    def from_coordinator(self, call: Callable[[], _T]) -> _T:
        """What ``call`` returns on the group's rank 0; it runs only there. Collective.

        Raises as :meth:`gather`.
        """
        if self.alone:
            return call()
        everyone = self.gather(lambda: [call()] if self.is_coordinator else [])
        return everyone[0][0]


def _error_of(failed: _Failed) -> BaseException:
    if isinstance(failed.error, str):
        return RankError(f"rank {failed.rank} failed: {failed.error}", rank=failed.rank)
    failed.error.add_note(f"(raised on rank {failed.rank})")
    return failed.error


def _group_exists() -> bool:
    return dist.is_available() and dist.is_initialized()


def _check_cpu_backend(group: dist.ProcessGroup) -> None:
    if not has_cpu_backend(group):
        raise UsageError("the given process group has no CPU backend: make one with gloo")


def has_cpu_backend(group: dist.ProcessGroup | None) -> bool:
    """Whether values in host memory can be sent over ``group`` (None: the default group)."""
    actual = group if group is not None else dist.group.WORLD
    assert actual is not None
    return torch.device("cpu") in actual._device_types
