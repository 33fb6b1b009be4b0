"""Replaces failed ranks, and changes their number, in living processes.

``tieredckpt.live.run(train, config)`` calls ``train(world)`` once per generation; see
docs/use/live.md and docs/use/elastic.md.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "ChangeEvent", "Part", "Restored", "Share", "State", "World", "WorldChanged",
    "learning_rate", "rows", "run",
]  # fmt: skip

_LAZY = {
    "ChangeEvent": "tieredckpt.live.world",
    "Part": "tieredckpt.policy.elastic",
    "Share": "tieredckpt.policy.elastic",
    "learning_rate": "tieredckpt.policy.elastic",
    "rows": "tieredckpt.policy.elastic",
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
