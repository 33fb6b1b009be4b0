"""DCP's plan caches, one set for each stream of an engine instead of one for the process.

DCP keeps the plans of planners with ``enable_plan_caching=True`` in class attributes, under the
name of the planner's class. All who save in the process share them, also those who save another
state, or did so with another number of ranks. Ranks then disagree about what is cached, and a plan
is put together from those of others: after an elastic restart inside of a process DCP leaves out
what the ranks that are gone would have written. An engine is opened by all ranks together, so its
caches are empty or filled on all of them.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner

_NAMES = (
    "_cached_save_plan",
    "_cached_final_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
)

_CacheSet = dict[str, dict[str, Any]]

_replaced: _CacheSet = {}
"""DCP's own dicts, while those of a stream are in their place."""


class PlanCaches:
    """The caches of one engine."""

    def __init__(self) -> None:
        self._by_stream: dict[str, _CacheSet] = {}

    def use(self, stream: str) -> None:
        """Let DCP's planners use those of ``stream``, until :func:`put_back`."""
        put_back()
        # Read by name at every use. A torch without plan caching, or with another kind, has none.
        names = [name for name in _NAMES if isinstance(vars(SavePlanner).get(name), dict)]
        ours = self._by_stream.setdefault(stream, {name: {} for name in names})
        for name in names:
            _replaced[name] = vars(SavePlanner)[name]
            setattr(SavePlanner, name, ours[name])


def put_back() -> None:
    """Give DCP its own caches back: planning is over."""
    for name in list(_replaced):
        setattr(SavePlanner, name, _replaced.pop(name))
