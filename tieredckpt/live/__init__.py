"""Replaces a failed rank while the other ranks keep their processes and state.

``tieredckpt.live.run(train, config)`` calls ``train(world)`` once per generation; see
docs/use/live.md.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Restored", "State", "World", "WorldChanged", "run"]

_LAZY = {
    "Restored": "tieredckpt.live.world",
    "State": "tieredckpt.live.rank",
    "World": "tieredckpt.live.world",
    "WorldChanged": "tieredckpt.live.world",
    "run": "tieredckpt.live.rank",
}


def __getattr__(name: str) -> Any:
    # The supervisor imports this package and never imports torch.
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
