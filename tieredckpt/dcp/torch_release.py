"""Releases of torch that were tried, and the private parts of torch that are used by attribute.

A part that is imported by its name needs no entry here: Python's ImportError names it.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, NamedTuple

import torch

from tieredckpt.dcp.state.plan_caches import NAMES

TRIED = ("2.10", "2.11", "2.13", "2.14", "2.15")
"""Releases of torch with which the tests of `make test-torch` passed, but for those that a release
cannot pass (`tests/support/other_torch.py` names them): live recovery refuses 2.10."""


class Part(NamedTuple):
    """A private part of torch.

    Attributes:
        name: ``module:attribute``, as for ``pkgutil.resolve_name``.
        expected: Its type; or, of a function, the names of its first parameters.
        lost: What does not work without it.
    """

    name: str
    expected: Any
    lost: str


_DCP = "torch.distributed.checkpoint"
_C10D = "torch.distributed.distributed_c10d:_world"
_DEBUG = "torch.distributed.tensor.debug"
_MOVES = "torch.distributed.tensor._redistribute"
_OLD_SHARD = "a process that changes its rank restores another rank's shard"
_STUCK = "ranks cannot leave the process groups of a lost rank"

ENGINE = (
    *(
        # A dict, or what an engine of this process has put in its place.
        Part(f"{_DCP}.planner:SavePlanner.{name}", MutableMapping,
             "streams share their cached plans")
        for name in NAMES
    ),
    Part(f"{_DCP}.planner_helpers:_create_write_items", ("fqn", "object"),
         "wrapper subclasses and tensors with hooks cannot be saved in the background"),
    Part("torch.distributed:ProcessGroup._device_types", property,
         "no process group can be used"),
    Part("torch.distributed._shard.sharded_tensor:"
         "ShardedTensor._init_from_local_shards_and_global_metadata",
         ("local_shards", "sharded_tensor_metadata", "process_group"),
         "a ShardedTensor cannot be saved in the background"),
    Part("torch.distributed.tensor:DTensor._local_tensor", object,
         "a DTensor cannot be saved in the background"),
    Part("torch:UntypedStorage._cdata", object, "export --format torch"),
    Part("torch:_neg_view", Callable, "values with a negated view cannot be loaded"),
)  # fmt: skip
"""Of the engine: without one of them the rest works."""

LIVE = (
    Part(f"{_DEBUG}:_clear_sharding_prop_cache", (), _OLD_SHARD),
    Part(f"{_DEBUG}:_clear_fast_path_sharding_prop_cache", (), _OLD_SHARD),
    Part(f"{_DEBUG}:_clear_python_sharding_prop_cache", (), _OLD_SHARD),
    Part(f"{_MOVES}:_gen_transform_infos.cache_clear", Callable, _OLD_SHARD),
    Part(f"{_MOVES}:clear_redistribute_planner_cache", (), _OLD_SHARD),
    Part(f"{_C10D}.pg_map", dict, _STUCK),
    Part(f"{_C10D}.pg_backend_config", dict, _STUCK),
    Part(f"{_C10D}.group_count", int, "a new world would use the keys of the one before it"),
    Part("torch.distributed:Work._get_op_type", Callable, _STUCK),
    Part("torch.distributed:ProcessGroup._get_backend", Callable, _STUCK),
    Part(f"{_DCP}._async_process_executor:_ProcessBasedAsyncCheckpointExecutor.execute_save",
         Callable, "a save in a process would outlive its world"),
    Part(f"{_DCP}.planner_helpers:_create_write_items", ("fqn", "object"),
         "survivors cannot offer their state"),
)  # fmt: skip
"""Of live recovery, which needs all of them."""


def changed(parts: Iterable[Part]) -> list[str]:
    """Describe each of ``parts`` that this torch has not, or has in another form."""
    return [f"{part.name} is not as expected ({part.lost})" for part in parts if not _is(part)]


def _is(part: Part) -> bool:
    try:
        found = pkgutil.resolve_name(part.name)
        if isinstance(part.expected, tuple):
            names = tuple(inspect.signature(found).parameters)
            return names[: len(part.expected)] == part.expected
    except (ImportError, AttributeError, TypeError, ValueError):  # no such part, or no function
        return False
    return isinstance(found, part.expected)


def is_tried() -> bool:
    """Whether this torch, apart from the last number of its version, is one of :data:`TRIED`."""
    return ".".join(torch.__version__.split(".")[:2]) in TRIED


@functools.cache
def warn_of_release() -> None:
    """Warn, once in a process, of a release that was not tried, or without parts of the engine."""
    found = changed(ENGINE)
    if not is_tried():
        release = torch.__version__.split("+")[0]
        found.insert(0, f"it was not tried with tieredckpt (tried: {', '.join(TRIED)}); "
                        f"make test-torch TORCH={release} in a clone tries it")  # fmt: skip
    if found:
        warnings.warn(f"torch {torch.__version__}: {'; '.join(found)}", stacklevel=4)
