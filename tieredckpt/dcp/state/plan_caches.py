"""DCP's plan caches, one set for each stream of an engine instead of one for the process.

DCP keeps the plans of planners with ``enable_plan_caching=True`` in class attributes, under the
name of the planner's class. All saves of the process share them, also saves of another state or
with another number of ranks. Then ranks disagree about the cached plans, and DCP combines those of
different saves: after an elastic restart inside of a process, it leaves out the parts of ranks that
are gone. All ranks open an engine together, so its caches are empty on all of them, or on none.

DCP plans a save in one thread, but another thread may plan another save at the same time
(``async_save``, a second engine). So the class attributes have mappings that depend on the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

NAMES = (
    "_cached_save_plan",
    "_cached_final_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
)

_CacheSet = dict[str, dict[str, Any]]


class _Using(threading.local):
    """The caches for the planners of this thread; None: DCP's own caches."""

    caches: _CacheSet | None = None


_using = _Using()


class _Cache(MutableMapping[str, Any]):
    """Replaces one of DCP's dicts: that dict, or the one that this thread uses."""

    def __init__(self, name: str, own: dict[str, Any]) -> None:
        self._name = name
        self._own = own

    def _now(self) -> dict[str, Any]:
        return self._own if _using.caches is None else _using.caches[self._name]

    def __getitem__(self, key: str) -> Any:
        return self._now()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._now()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._now()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


class PlanCaches:
    """The caches of one engine."""

    def __init__(self) -> None:
        self._by_stream: dict[str, _CacheSet] = {}

    def use(self, stream: str) -> None:
        """Let DCP's planners in this thread use those of ``stream``, until :func:`put_back`."""
        # Each time: a torch without plan caching has none of them, and other code may have put a
        # new dict there to empty the cache.
        for name in NAMES:
            own = vars(SavePlanner).get(name)
            if isinstance(own, dict):
                setattr(SavePlanner, name, _Cache(name, own))
        _using.caches = self._by_stream.setdefault(stream, {name: {} for name in NAMES})

    def local_plans(self, stream: str) -> list[Sequence[SavePlan]]:
        """On a coordinator: the ranks' local plans as cached last, for each class of planners."""
        cached = self._by_stream.get(stream, {}).get("_cached_all_plans", {})
        return list(cached.values())


def put_back() -> None:
    """Let DCP's planners in this thread use DCP's own caches again: planning is over."""
    _using.caches = None
