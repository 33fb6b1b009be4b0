"""The state that a surviving rank keeps from one generation to the next.

Values that may also change outside of an update (a loader's position, random states, a scaler,
buffers such as BatchNorm's means) are copied at the end of each update. Parameters and optimizer
moments change in updates alone; they are read, by reference, when the generation is left.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from tieredckpt.dcp.slots.leaves import find_leaves, has_own_plan, rebuild
from tieredckpt.dcp.state.per_rank import PerRank
from tieredckpt.dcp.state.wrappers import is_wrapper, plain_parts
from tieredckpt.errors import UsageError
from tieredckpt.live.torch_private import Parts, flat

HEAVY_BYTES = 64 << 10
"""A Stateful object with more bytes of tensors is not copied at each update."""
WATCHED_FIRST = 3
WATCHED_EVERY = 1000
"""After so many first updates, and at every so many, the state must not change until the next."""


class StateChangedError(UsageError):
    """The script changes state outside of ``update``: no later generation mends that."""


def modules_with_buffers() -> list[torch.nn.Module]:
    """All of this process: most scripts wrap the model, so its state does not lead to them."""
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), torch.nn.Module) and each._buffers
    ]


def map_values(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change`` applied to its leaves; dicts, lists and tuples are new."""
    if isinstance(value, dict):
        return {key: map_values(each, change) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_values(each, change) for each in value)
    return change(value)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        if not (has_own_plan(leaf) or is_wrapper(local)):
            return leaf.detach().clone()
        leaves = find_leaves({"": leaf})  # these have no clone(), or lose their plan in it
        return rebuild({"": leaf}, leaves, [each.local.clone() for each in leaves])[""]
    if isinstance(leaf, bytes | str | int | float | bool | None):
        return leaf
    return copy.deepcopy(leaf)


class SurvivorState:
    """Follows one state over the updates of a generation.

    Args:
        state: The mapping that was given to ``world.load``.

    Attributes:
        needed: Names of the whole state: those of all ranks.
        version: The update that was recorded last; None: none.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._heavy: set[str] = set()
        self._light: dict[str, Any] = {}
        self._modules = modules_with_buffers()
        self._buffers: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
        self._records = 0
        self._digests: dict[bool, dict[str, int]] = {}
        self.needed: frozenset[str] = frozenset()
        self.version: int | None = None

    def names(self) -> frozenset[str]:
        """The keys of this rank's state, as DCP names them."""
        return frozenset(flat({key: self._read(key) for key in self._state}))

    def record(self, version: int) -> None:
        """Copy what may change before the next update ends. Called at the end of update."""
        light = {}
        for key, value in self._state.items():
            if key in self._heavy:
                continue
            content = value.state_dict() if isinstance(value, Stateful) else value
            leaves = flat({key: content}).values()
            tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
            size = sum(each.numel() * each.element_size() for each in tensors)
            if isinstance(value, Stateful) and size > HEAVY_BYTES and not _is_position(value):
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
        self._records += 1
        watched = self._records <= WATCHED_FIRST or version % WATCHED_EVERY == 0
        self._digests = {each: self._digests_now(each) for each in (True, False) if watched}

    def check_unchanged(self, *, heavy: bool) -> None:
        """After a watched update: nothing has changed since that has to be kept as it was then.

        Args:
            heavy: What is kept by reference; else what is copied, but for positions of loaders and
                values of one rank, which a step may change before it begins.

        Raises:
            StateChangedError: It has; the error names the key.
        """
        before = self._digests.get(heavy, {})
        now = self._digests_now(heavy) if before else {}
        changed = [key for key, digest in before.items() if now.get(key) != digest]
        if changed:
            raise StateChangedError(
                f"{changed[0]!r} changed outside of world.update, so that a surviving rank would "
                f"keep the wrong state ({len(changed)} keys in all): change it inside"
            )

    def read(self) -> dict[str, Any]:
        """The state as of the last :meth:`record`.

        Raises:
            UsageError: A ``state_dict()`` failed; the error names the key.
        """
        recorded = self._recorded()

        def as_recorded(leaf: Any) -> Any:
            return recorded.get(_place(leaf), leaf)

        return {
            key: self._light[key]
            if key in self._light
            else map_values(self._read(key), as_recorded)
            for key in self._state
        }

    def _read(self, key: str) -> Any:
        value = self._state[key]
        if not isinstance(value, Stateful):
            return value
        try:
            return value.state_dict()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise UsageError(
                f"state_dict() of {key!r} failed ({type(error).__name__}: {error}); it is called "
                "after its world has ended, so it must not communicate"
            ) from error

    def _recorded(self) -> dict[Hashable, torch.Tensor]:
        """Copies of buffers, by place."""
        found = {
            _place(module._buffers.get(name)): copied for module, name, copied in self._buffers
        }
        found.pop(None, None)
        return found

    def _digests_now(self, heavy: bool) -> dict[str, int]:
        """Of what must not change now, but for buffers."""
        recorded = self._recorded()
        return {
            name: _digest(leaf)
            for key, value in self._state.items()
            if (key in self._heavy) is heavy and not _is_position(value)
            for name, leaf in flat({key: self._read(key)}).items()
            if _place(leaf) not in recorded
        }


def _is_position(value: Any) -> bool:
    """Whether it is a loader, or another value of one rank: fetching a batch changes it."""
    is_loader = isinstance(value, Stateful) and hasattr(value, "__iter__")
    return isinstance(value, PerRank) or (is_loader and not isinstance(value, torch.nn.Module))


def _place(leaf: Any) -> Hashable:
    """What identifies a tensor in memory; None: nothing does."""
    if isinstance(leaf, DTensor):
        leaf = leaf.to_local()
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or not leaf.numel():
        return None
    try:
        address = leaf.data_ptr()
    except RuntimeError:
        return None
    # A wrapper has no memory of its own, and perhaps an address that others have, too.
    return None if is_wrapper(leaf) else (address, leaf.shape, leaf.stride(), leaf.dtype)


def _digest(leaf: Any) -> int:
    """The same for all that cannot be digested, such as tensors without memory of their own."""
    try:
        if isinstance(leaf, DTensor):
            leaf = leaf.to_local()
        if not isinstance(leaf, torch.Tensor):
            data = leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode()
            return xxhash.xxh3_64_intdigest(data)
        digest = xxhash.xxh3_64()
        for part in plain_parts(leaf):
            digest.update(part.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return digest.intdigest()
    except (RuntimeError, NotImplementedError, TypeError):
        return 0


SAVED = -1
"""Of a rank that has left its world with all others: it keeps no state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one rank of a new world can save.

    Attributes:
        version: Its last update; SAVED: its state is in the newest checkpoint.
        parts: This rank's part of the state; see :func:`~tieredckpt.live.torch_private.parts`.
        needed: Names of the whole state.
        loaded: Save id of the checkpoint that its world had loaded.
    """

    version: int
    parts: Mapping[str, Parts]
    needed: frozenset[str]
    loaded: str | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """A state without a world, until all ranks of a next world are past the save of it."""

    offer: Offer
    state: dict[str, Any]


def to_save(offers: Sequence[Offer], saved: int) -> list[tuple[int, tuple[str, ...]]]:
    """The versions newer than the ``saved`` step, newest first, with the missing names of each.

    A name is missing if no rank has it, such as those of a pipeline stage that is lost, or if the
    ranks have a part of its tensor only.
    """
    found = []
    for version in sorted({each.version for each in offers if each.version > saved}, reverse=True):
        mine = [each for each in offers if each.version == version]
        needed = frozenset().union(*(each.needed for each in mine))
        found.append((version, tuple(name for name in sorted(needed) if _is_missing(mine, name))))
    return found


def _is_missing(offers: Sequence[Offer], name: str) -> bool:
    known = [each.parts[name] for each in offers if name in each.parts]
    boxes = frozenset().union(*(boxes for _, boxes in known))
    return not known or sum(math.prod(sizes) for _, sizes in boxes) < max(
        whole for whole, _ in known
    )
