"""The state that a surviving rank keeps from one generation to the next.

Values that may also change outside of an update (a loader's position, random states, a scaler,
buffers such as BatchNorm's means) are copied at the end of each update. Parameters and optimizer
moments change in updates alone; they are read, by reference, when the generation is left.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

HEAVY_BYTES = 64 << 10
"""A Stateful object with more bytes of tensors is not copied at each update."""


def map_values(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change`` applied to its leaves; dicts, lists and tuples are new."""
    if isinstance(value, dict):
        return {key: map_values(each, change) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_values(each, change) for each in value)
    return change(value)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    if isinstance(leaf, bytes | str | int | float | bool | None):
        return leaf
    return copy.deepcopy(leaf)


class SurvivorState:
    """Follows one state over the updates of a generation.

    Args:
        state: The mapping that was given to ``world.load``.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._heavy: set[str] = set()
        self._light: dict[str, Any] = {}
        # Most scripts wrap the model, so its modules cannot be found from the state.
        self._modules = [
            each
            for each in gc.get_objects()
            if issubclass(type(each), torch.nn.Module) and each._buffers
        ]
        self._buffers: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
        self.version: int | None = None
        """The update that was recorded last; None: none."""

    def record(self, version: int) -> None:
        """Copy what may change before the next update ends. Called at the end of update."""
        light = {}
        for key, value in self._state.items():
            if key in self._heavy:
                continue
            content = value.state_dict() if isinstance(value, Stateful) else value
            if isinstance(value, Stateful) and _tensor_bytes(content) > HEAVY_BYTES:
                self._heavy.add(key)
            else:
                light[key] = map_values(content, _copied)
        # By module and name: a forward pass may assign a new tensor.
        self._buffers = [
            (module, name, buffer.detach().clone())
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._light, self.version = light, version

    def read(self) -> dict[str, Any]:
        """The state as of the last :meth:`record`. Raises what ``state_dict()`` raises."""
        recorded = {
            current.untyped_storage().data_ptr(): copied
            for module, name, copied in self._buffers
            if (current := module._buffers[name]) is not None
        }

        def as_recorded(leaf: Any) -> Any:
            if isinstance(leaf, DTensor) or not isinstance(leaf, torch.Tensor):
                return leaf
            return recorded.get(leaf.untyped_storage().data_ptr(), leaf)

        return {
            key: self._light[key]
            if key in self._light
            else map_values(value.state_dict(), as_recorded)
            for key, value in self._state.items()
        }


def _tensor_bytes(content: Any) -> int:
    total = 0

    def add(leaf: Any) -> None:
        nonlocal total
        total += leaf.nbytes if isinstance(leaf, torch.Tensor) else 0

    map_values(content, add)
    return total


@dataclass(frozen=True, slots=True)
class Kept:
    """A state without a world, until all ranks of a next world are past the save of it."""

    version: int
    state: dict[str, Any]
