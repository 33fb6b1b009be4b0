"""Releases of torch that were not tried with live recovery: a self-test decides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.tensor import _redistribute, debug

from tieredckpt.dcp import torch_release
from tieredckpt.errors import UsageError
from tieredckpt.live import rank, torch_private
from tieredckpt.live.messages import SOCKET_VARIABLE


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_release, "TRIED", ())
    monkeypatch.setattr(rank, "warn_of_release", nothing)


def nothing() -> None:
    """In place of what clears a cache."""


class Uncleared:
    """A cached function whose cache is never cleared."""

    cache_clear = staticmethod(nothing)

    def __init__(self, cached: Callable[..., Any]) -> None:
        self.call = cached

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def keep_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch_private, "forget_last_world", nothing)


def keep_dispatch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(debug, "_clear_sharding_prop_cache", nothing)
    patch.setattr(debug, "_clear_fast_path_sharding_prop_cache", nothing)


def keep_plans(patch: pytest.MonkeyPatch) -> None:
    cached = Uncleared(_redistribute._gen_transform_infos)
    patch.setattr(_redistribute, "_gen_transform_infos", cached)


def keep_planners(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_redistribute, "clear_redistribute_planner_cache", nothing)


def new_cache(patch: pytest.MonkeyPatch) -> None:
    """A later release that keeps a part's offsets by mesh, which equals another rank's mesh."""
    plain = planner_helpers.compute_local_shape_and_global_offset
    cached = functools.cache(plain)
    patch.setattr(planner_helpers, "compute_local_shape_and_global_offset", cached)


def renamed(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(_redistribute, "clear_redistribute_planner_cache")


def test_a_release_whose_caches_are_cleared_passes():
    torch_private.check_release()


# torch refuses some stale groups and sizes, which ones depends on its release.
STALE = "(has other shards than a new one|ended with code 1)"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (keep_all, STALE),
        (keep_dispatch, STALE),
        (keep_plans, STALE),
        (keep_planners, STALE),
        (new_cache, STALE),
        (renamed, "clear_redistribute_planner_cache is not as expected"),
    ],
)
def test_a_release_with_a_cache_that_is_not_cleared_is_refused(
    spoil: Callable[[pytest.MonkeyPatch], None], reason: str, monkeypatch: pytest.MonkeyPatch
):
    """Else a process that changes its rank would restore another rank's shard, without an error."""
    spoil(monkeypatch)
    monkeypatch.setenv(SOCKET_VARIABLE, "0")
    with pytest.raises(UsageError, match=f"self-test: .*{reason}"):
        rank.run(lambda world: None)


def test_without_a_supervisor_any_release_runs(monkeypatch: pytest.MonkeyPatch):
    """There is one generation, in which a process keeps its rank."""
    keep_all(monkeypatch)
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    assert rank.run(lambda world: world.size) == 1
