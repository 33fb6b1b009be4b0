"""Tiered checkpoint storage for PyTorch.

Importing this package does not import torch: the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tieredckpt import errors
from tieredckpt.errors import (
    AgentError,
    BackgroundSaveError,
    CapacityError,
    ConfigError,
    IntegrityError,
    NamespaceInUseError,
    NoRecoverableCheckpointError,
    NotFoundError,
    RankError,
    StaleAttemptError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
    WaitError,
)

if TYPE_CHECKING:
    from tieredckpt.dcp.state.per_rank import PerRank, RandomState, per_rank
    from tieredckpt.dcp.state.planner import SafeLoadPlanner
    from tieredckpt.engine import CheckpointInfo, Engine, RestoreReport, SaveReport

__version__ = "0.1.0"

__all__ = [
    "AgentError",
    "BackgroundSaveError",
    "CapacityError",
    "CheckpointInfo",
    "ConfigError",
    "Engine",
    "IntegrityError",
    "NamespaceInUseError",
    "NoRecoverableCheckpointError",
    "NotFoundError",
    "PerRank",
    "RandomState",
    "RankError",
    "RestoreReport",
    "SafeLoadPlanner",
    "SaveReport",
    "StaleAttemptError",
    "TierUnavailableError",
    "TieredCkptError",
    "UsageError",
    "WaitError",
    "errors",
    "per_rank",
]

_LAZY = {
    "CheckpointInfo": "tieredckpt.engine",
    "Engine": "tieredckpt.engine",
    "PerRank": "tieredckpt.dcp.state.per_rank",
    "RandomState": "tieredckpt.dcp.state.per_rank",
    "RestoreReport": "tieredckpt.engine",
    "SafeLoadPlanner": "tieredckpt.dcp.state.planner",
    "SaveReport": "tieredckpt.engine",
    "per_rank": "tieredckpt.dcp.state.per_rank",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
