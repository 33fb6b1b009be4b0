"""``stage()`` copies the state into a slot, so that training can continue during the save.

DCP's planner decides the layout of a segment in the background, after ``stage()``. So each
background save records where its staged tensors ended up, and the next save of a state with the
same structure copies each tensor directly to that place. Tensors that the last plan assigned to
other ranks (one rank writes a replicated tensor) are not copied: they are staged without data, on
the meta device, which no planner can turn into bytes by mistake.

The recorded layout only saves time. The new plan decides where each tensor is written: a tensor
that is staged elsewhere is copied once more, and one without data fails the save.

A rank writes the *local* tensor of each tensor, a leaf of the state: itself, or its shard of a
DTensor. Of a wrapper subclass, each inner tensor is a leaf, and of a tensor that DCP plans by hooks
each piece. The copy keeps the structure, the types of containers and each tensor's plan, which is
checked when a structure is new. Values without tensors are deep-copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from tieredckpt import failpoints
from tieredckpt.dcp.slots.background_saves import BackgroundSave
from tieredckpt.dcp.slots.copy import goes_by_bytes, place_tensors
from tieredckpt.dcp.slots.leaves import Leaf, check_plans, find_leaves, rebuild, without_data
from tieredckpt.dcp.state.consistency import Turns, sample_digest
from tieredckpt.errors import TieredCkptError

if TYPE_CHECKING:
    from tieredckpt.dcp.slots.slot_ring import SlotRing, WritableSlot
    from tieredckpt.format.segment import Item

_PRIVATE = -1
_OTHER_RANK = -2
_MIRRORED = -3
"""Another rank writes it, and this one a mirror: staged in private memory that is reused."""


@dataclass(frozen=True)
class StageLayout:
    """Where the leaves of one structure are written.

    Attributes:
        signature: Of the structure.
        places: Per leaf its offset in the segment, or one of the constants above.
        segment_bytes: Size of the segment.
    """

    signature: list[tuple[Any, ...]]
    places: list[int]
    segment_bytes: int

    @cached_property
    def left(self) -> dict[str, int]:
        """Numbers of the whole tensors that are left to other ranks, by DCP's names of them."""
        found = {}
        for number, (path, inner, shape, whole, *_) in enumerate(self.signature):
            if self.places[number] == _OTHER_RANK and not inner and shape == whole:
                found[".".join(map(str, path))] = number
        return found

    @cached_property
    def turns(self) -> Turns:
        """When those are compared with the tensors of other ranks."""
        return Turns(self.left)


@dataclass(slots=True, eq=False, kw_only=True)
class Stage:
    """One staged state.

    Attributes:
        background_save: The save that it is for.
        slot: Has (some of) its tensors; locked until the save seals or abandons it.
        locals: The staged tensors, one per leaf.
        signature: Of the leaves.
        error: What ``stage()`` failed with; the save raises it on all ranks.
        refused: No slot could be acquired, so the state has no data: raised when it would be
            written.
        without_data: Numbers of the leaves that were left to other ranks.
        seconds: How long it took, which is how long training was held up.
    """

    background_save: BackgroundSave
    slot: WritableSlot | None = None
    locals: list[torch.Tensor] = field(default_factory=list)
    signature: list[tuple[Any, ...]] = field(default_factory=list)
    error: Exception | None = None
    refused: TieredCkptError | OSError | None = None
    without_data: list[int] = field(default_factory=list)
    seconds: float = 0.0


class StagedState(dict[str, Any]):
    """A staged state dict; the save it is made for lives no longer than this."""

    def __init__(self, content: Mapping[str, Any], stage: Stage) -> None:
        super().__init__(content)
        self.stage = stage
        self.pickled_as: Callable[[StagedState], Any] | None = None

    def __reduce__(self) -> Any:
        # DCP's process executor pickles it; its slot would be another save's before it is read.
        if self.pickled_as is None:
            raise TypeError("a staged state cannot be sent to another process")
        return self.pickled_as(self)


class Stager:
    """Stages the states of one engine, one save at a time."""

    def __init__(self, ring: SlotRing) -> None:
        self._ring = ring
        self._lock = threading.Lock()
        self._layouts: dict[str, StageLayout] = {}
        self._kept: dict[int, torch.Tensor] = {}
        """By leaf, the private memory of mirrored tensors; of the save before, which is over."""
        self._on_trial: str | None = None
        """The stream whose layout the last stage relied on, until a save confirmed it."""
        self.last_bytes = 0
        """How much the last ``stage()`` of this rank copied, for tests that watch memory."""

    def stage(self, state: Mapping[str, Any], stream: str, save: BackgroundSave) -> StagedState:
        """Copy ``state``, into a slot if a state of its structure was saved before.

        No other save may be under way: the caller has waited for those in the background, and
        holds the lock of those in threads.

        Args:
            state: As for ``dcp.save``.
            stream: Its layout is tried first.
            save: The save that it is for.

        Raises:
            UsageError: A tensor's storage was freed.
            Exception: Copying a value that is not a tensor failed.
        """
        failpoints.reach("save.stage.before")
        self._ring.release_holds()
        leaves = find_leaves(state)
        stage = Stage(background_save=save, signature=[leaf.signature for leaf in leaves])
        layout = self._layout_of(stage.signature, stream)
        if layout is None:
            check_plans(state, leaves)
        complete = False
        try:
            stage.locals = self._copied(leaves, layout, stage)
            staged = StagedState(rebuild(state, leaves, stage.locals), stage)
            if any(not leaf.local.is_cpu for leaf in leaves):
                torch.accelerator.synchronize()  # training may change the originals after this
            complete = True
        finally:
            if not complete and stage.slot is not None:
                self._ring.abandon(stage.slot)
        failpoints.reach("save.stage.after")
        save.watch(staged)
        return staged

    def _layout_of(self, signature: list[tuple[Any, ...]], stream: str) -> StageLayout | None:
        with self._lock:
            # A save that relied on a layout and never wrote: perhaps because of the layout.
            trial, self._on_trial = self._on_trial, None
            if trial is not None:
                self._layouts.pop(trial, None)
            names = sorted(self._layouts, key=lambda name: name != stream)
            for name in names:
                if self._layouts[name].signature == signature:
                    self._on_trial = name
                    return self._layouts[name]
        return None

    def _copied(
        self, leaves: Sequence[Leaf], layout: StageLayout | None, stage: Stage
    ) -> list[torch.Tensor]:
        places = layout.places if layout is not None else [_PRIVATE] * len(leaves)
        placed = [number for number, place in enumerate(places) if place >= 0]
        found: dict[int, Any] = {}
        self.last_bytes = 0
        if layout is None:
            self._kept.clear()
        if layout is not None and placed:
            try:
                stage.slot = self._ring.acquire(layout.segment_bytes)
                self._ring.hold(stage.slot, stage.background_save.is_done_with_slot)
            except (TieredCkptError, OSError) as error:
                # No slot is free, or no agent answers. A private copy could exhaust the memory, so
                # none is made: the ranks agree on the failure when they would write.
                stage.refused = error
                return [without_data(leaf.local) for leaf in leaves]
            pairs = [(places[number], leaves[number].local) for number in placed]
            copies = place_tensors(stage.slot, pairs, self._ring.pool)
            found = dict(zip(placed, copies, strict=True))
        for number, place in enumerate(places):
            local = leaves[number].local
            if place == _OTHER_RANK:
                found[number] = without_data(local)
                stage.without_data.append(number)
            elif place == _PRIVATE:
                found[number] = _private(local)
            elif place == _MIRRORED:
                found[number] = self._kept[number] = _private(local, self._kept.get(number))
            if place != _OTHER_RANK:
                self.last_bytes += local.nbytes
        step = stage.background_save.step
        if layout is not None and step is not None:
            for name in layout.turns.at(step):
                number = layout.left[name]
                found[number].sample = sample_digest(name, leaves[number].local, step)
        return [found[number] for number in range(len(leaves))]

    def remember(self, stream: str, layout: StageLayout | None) -> None:
        """Record the layout of a save that succeeded; None: stage everything the next time."""
        with self._lock:
            self._on_trial = None
            if layout is not None:
                if layout != self._layouts.get(stream):  # else it keeps what it has derived
                    self._layouts[stream] = layout
            else:
                self._layouts.clear()
                self._kept.clear()


def materialized(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with the ``state_dict()`` of each Stateful object on its top level, as DCP does."""
    return {
        key: each.state_dict() if isinstance(each, Stateful) else each
        for key, each in state.items()
    }


def match_leaves(
    stage: Stage,
    items: Sequence[Item],
    tensors: Sequence[torch.Tensor],
    left: Iterable[torch.Tensor],
    mirrored: Sequence[torch.Tensor] = (),
) -> list[int]:
    """Find the leaves' places in a segment that was written, by their addresses in memory.

    Args:
        stage: The staged state.
        items: Of the segment; the first are those of ``tensors``.
        tensors: The planner's tensor for each tensor item.
        left: The planner's tensors that other ranks write.
        mirrored: Those of ``left`` that this rank writes mirrors of.

    Returns:
        The places of a :class:`StageLayout`.
    """
    numbers = {
        local.data_ptr(): number
        for number, local in enumerate(stage.locals)
        if not local.is_meta and local.numel() and goes_by_bytes(local)
    }

    def leaf_of(tensor: torch.Tensor) -> int | None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        number = numbers.get(local.data_ptr()) if goes_by_bytes(local.detach()) else None
        same = number is not None and local.nbytes == stage.locals[number].nbytes
        return number if same else None

    places = [_PRIVATE] * len(stage.locals)
    complete = True
    for item, tensor in zip(items, tensors, strict=False):  # bytes items follow the tensors
        number = leaf_of(tensor) if item.size_bytes else None
        if number is not None:
            places[number] = item.offset
        elif item.size_bytes:
            complete = False
    if complete:  # else a planner makes own tensors, and may need some that it does not write
        others = [number for tensor in left if (number := leaf_of(tensor)) is not None]
        for number in (*others, *stage.without_data):
            if places[number] == _PRIVATE:
                places[number] = _OTHER_RANK
        for tensor in mirrored:
            if (number := leaf_of(tensor)) is not None and places[number] == _OTHER_RANK:
                places[number] = _MIRRORED
    return places


def _private(local: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
    fits = kept is not None and (kept.shape, kept.dtype) == (local.shape, local.dtype)
    copied = kept if kept is not None and fits else torch.empty(local.shape, dtype=local.dtype)
    with torch.no_grad():
        copied.copy_(local)  # its result may be of the local tensor's class
    return copied
