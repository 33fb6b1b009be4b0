"""One rank's part of a save: its segment, written and sealed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tieredckpt.dcp.save.failures import WRITING
from tieredckpt.dcp.save.mirrors import Mirrors, footer_digest
from tieredckpt.dcp.save.receipt import Receipt, Refusal
from tieredckpt.dcp.slots.copy import outside, write_segment
from tieredckpt.dcp.slots.stager import Stage, match_leaves
from tieredckpt.dcp.state.consistency import NamesSeen, digests_to_compare, planned_tensors
from tieredckpt.dcp.state.items import LayoutCache, resolve_all
from tieredckpt.dcp.state.planner import warn_of_refused
from tieredckpt.errors import TierUnavailableError
from tieredckpt.format.segment import Item

if TYPE_CHECKING:
    from tieredckpt.dcp.job.session import Writing
    from tieredckpt.dcp.slots.slot_ring import WritableSlot
    from tieredckpt.format.segment import SegmentLayout
    from tieredckpt.storage.file_io import CopyPool


class Slots(Protocol):
    """Where a rank gets a slot to write its segment into: the ring, or a trainer's over a pipe."""

    pool: CopyPool

    def acquire(self, segment_bytes: int) -> WritableSlot:
        """A slot for a segment of this size."""

    def seal(self, slot: WritableSlot, segment_bytes: int, root: bytes) -> None:
        """Pass the written segment to the agent."""

    def abandon(self, slot: WritableSlot) -> None:
        """Return a slot whose segment is not sealed."""


def receipts_in(results: list[list[WriteResult]]) -> list[Receipt]:
    """All ranks' receipts, as DCP brings them to the coordinator."""
    return [result.storage_data for rank in results for result in rank]


def written(receipt: Receipt) -> Future[list[WriteResult]]:
    """A rank's answer to DCP."""
    result = WriteResult(
        index=MetadataIndex(f"segment of rank {receipt.rank}"),
        size_in_bytes=receipt.size,
        storage_data=receipt,
    )
    future: Future[list[WriteResult]] = Future()
    future.set_result([result])
    return future


def write_part(
    own: Writing,
    slots: Slots,
    receipt: Receipt,
    stage: Stage | None,
    plan: SavePlan,
    planner: SavePlanner,
    local_plan: SavePlan | None,
    mirrors: Mirrors | None = None,
) -> tuple[Receipt, list[int] | None]:
    """Write and seal what the plan gives to this rank.

    Args:
        own: What it is written with.
        slots: Where to.
        receipt: A blank one.
        stage: What was staged for the save.
        plan, planner: DCP's.
        local_plan: What the planner gave to ``prepare_local_plan``.
        mirrors: Of the stream, with ``memory.copies: local``.

    Returns:
        The receipt, maybe with a refusal; and where what was staged went, for the next
        ``stage()``: None if that is to stage everything.
    """
    if receipt.refusal is not None:
        return receipt, None
    try:
        left_out = stage is not None and bool(stage.without_data)
        specs, tensors, blobs = resolve_all(planner, plan.items, left_out=left_out)
        names = [spec.name for spec in specs[len(tensors) :]]
        values = digests_to_compare(
            own.names_seen.setdefault(receipt.stream, NamesSeen()),
            local_plan,
            planner,
            dict(zip(names, blobs, strict=True)),
            step=receipt.step,
            alone=own.ranks.world_size == 1,
        )
    except TierUnavailableError as error:  # a tensor that was left to another rank
        return replace(receipt, refusal=Refusal.of(receipt.rank, error)), None
    receipt = replace(receipt, values=values)
    items: Sequence[Item] = ()
    if plan.items:
        if not own.unsafe_pickle:
            warn_of_refused(own.checked_keys, names, blobs)
        layouts = own.layouts.setdefault(receipt.stream, LayoutCache())
        layout, structure = layouts.lay_out(specs)
        size, items = layout.segment_bytes, layout.items
        try:
            slot, root = fill_slot(own, slots, receipt.stream, stage, layout, tensors, blobs)
        except WRITING as error:
            return replace(receipt, refusal=Refusal.of(receipt.rank, error)), None
        receipt = replace(
            receipt,
            segment_id=slot.segment_id,
            size=size,
            root=root,
            structure=structure,
            cold=slot.cold,
            footer=footer_digest(slot, size) if mirrors is not None else b"",
        )
    if stage is None:
        return receipt, None
    # For the next stage(): where the staged tensors went, and which ones others write.
    which = mirrors.mirrored(plan) if mirrors is not None else lambda _: False
    left = planned_tensors(local_plan, plan, planner)
    mirrored = list(planned_tensors(local_plan, plan, planner, which))
    if any(tensor.is_meta for tensor in mirrored):
        return receipt, None  # the plan before had another rank write that copy
    return receipt, match_leaves(stage, items, tensors, left, mirrored)


def fill_slot(
    own: Writing,
    slots: Slots,
    stream: str,
    stage: Stage | None,
    layout: SegmentLayout,
    tensors: Sequence[torch.Tensor],
    blobs: Sequence[memoryview],
) -> tuple[WritableSlot, bytes]:
    """Write and seal one segment; the slot it is in, and its root digest.

    In ``stage`` some of the tensors may lie already.
    """
    unreported, size = own.unreported, layout.segment_bytes
    staged = stage.slot if stage is not None else None
    if staged is not None:
        fits = size <= staged.capacity_bytes
        tensors = outside(staged, layout.items if fits else None, tensors)
        if not fits:
            slots.abandon(staged)
            staged = None
    slot = staged if staged is not None else slots.acquire(size)
    with contextlib.ExitStack() as on_failure:
        # Or it is not known to be sealed: it is in no receipt, and so in no checkpoint.
        on_failure.callback(unreported.end, [slot.segment_id], "failed")
        on_failure.callback(slots.abandon, slot)
        unreported.begin(slot.segment_id, stream)
        root = write_segment(slot, layout, tensors, blobs, slots.pool)
        slots.seal(slot, size, root)
        on_failure.pop_all()
    return slot, root
