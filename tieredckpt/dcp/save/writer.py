"""DCP's storage writer: each rank fills one slot, the coordinator binds the segments to a save.

One ``WriteResult`` per rank, since DCP gathers all of them at every save. Nothing that changes per
save travels in a DCP plan, which may be cached: step, stream and segment come back in the receipt.
What a save costs on top of DCP's planning: one request per rank (seal) and one commit.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tieredckpt.dcp.job.fates import Ending
from tieredckpt.dcp.job.session import SaveReport, Writing
from tieredckpt.dcp.save.commit import (
    acknowledge,
    check_agreement,
    commit_save,
    encode_save,
    stored_items,
)
from tieredckpt.dcp.save.failures import (
    BEGINNING,
    WRITING,
    SaveFailures,
    give_back,
    portable,
    telling,
)
from tieredckpt.dcp.save.mirrors import LocalCopies, footer_digest
from tieredckpt.dcp.save.no_collectives import GatheredSave
from tieredckpt.dcp.save.receipt import Receipt, Refusal
from tieredckpt.dcp.slots.background_saves import in_executor_thread
from tieredckpt.dcp.slots.copy import outside, write_segment
from tieredckpt.dcp.slots.stager import Stage, StagedState, StageLayout, match_leaves, materialized
from tieredckpt.dcp.state.checkpoint_id import DEFAULT_STREAM, Named, checked_target
from tieredckpt.dcp.state.consistency import (
    NamesSeen,
    digests_to_compare,
    planned_items,
    planned_tensors,
)
from tieredckpt.dcp.state.items import LayoutCache, resolve_all
from tieredckpt.dcp.state.plan_caches import put_back
from tieredckpt.dcp.state.planner import warn_of_refused
from tieredckpt.errors import TieredCkptError, TierUnavailableError, UsageError, WaitError
from tieredckpt.format.segment import Item

if TYPE_CHECKING:
    from tieredckpt.dcp.save.state import SaveState
    from tieredckpt.dcp.slots.background_saves import BackgroundSave
    from tieredckpt.dcp.slots.slot_ring import WritableSlot
    from tieredckpt.dcp.state.metadata import EncodedPlan
    from tieredckpt.format.segment import SegmentLayout
    from tieredckpt.storage.file_io import CopyPool

log = logging.getLogger(__name__)


class Writer(Named, StorageWriter):
    """A ``StorageWriter`` for ``dcp.save`` and ``dcp.async_save``. Made by ``Engine.writer``.

    It is also what DCP calls an ``AsyncStager``: ``stage()`` runs in the caller's thread and
    outside of DCP's collectives, so what goes wrong there is kept until the first call inside of
    them. Everything else of ``dcp.async_save`` runs in the background.

    Errors reach every rank inside DCP's ``CheckpointException`` (``failures``). A save that raised
    has an unknown outcome: the checkpoint may exist, whole; it is never half there. With
    ``save.on_error: skip`` a failure of ours does not raise: the save returns on all ranks without
    a checkpoint, see docs/understand/failures.md.
    """

    # Part of the AsyncStager: stage() has copied all when it returns.
    _synchronize_after_execute = should_synchronize_after_execute = False

    def __init__(
        self,
        session: SaveState,
        step: int | None,
        stream: str,
        members: Sequence[int] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._session = session
        self._made_for = checked_target(step, stream, tags)
        self._last: tuple[str, int] | None = None
        """Stream and step of the save before."""
        self._now = DEFAULT_STREAM, 0
        """Stream and step of the save that runs now."""
        self.flight: BackgroundSave | None = None
        """Of the last ``stage()``."""
        self.objects: Mapping[str, Any] | None = None
        """The state that ``stage()`` copies, with its Stateful objects; None: what DCP passes."""
        self._staged: Stage | None = None
        """By stage(), for the save that begins next."""
        self._stage: Stage | None = None
        """Of the save that runs now."""
        self._in_background = False
        self._ending = Ending()
        """What becomes of the save that ends now, or ended last."""
        self._rank = 0  # inside of DCP's group
        self._started_s = 0.0
        self._plans: Sequence[SavePlan] = ()
        self._local_plan: SavePlan | None = None
        self._receipt: Receipt | None = None
        self._refusal: Refusal | None = None
        self._is_coordinator = False
        self._members = members
        self._gathered: GatheredSave | None = None
        """Of a save without collectives."""
        self._copies: LocalCopies | None = None

    @property
    def tags(self) -> dict[str, str]:
        """Of the checkpoints that it makes."""
        return dict(self._made_for.tags)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state, so that training can change it as soon as this returns.

        Part of DCP's AsyncStager: ``dcp.async_save`` calls it in the thread of its caller. Waits
        for an earlier save in the background, at most ``save.wait_timeout``.

        Returns:
            A state of the same structure. What it lies in belongs to the engine: save it with this
            writer, once.

        Raises:
            UsageError: The engine is closed or was opened before a fork. Everything else is
                raised by the save, on all ranks.
        """
        started_s = time.perf_counter()
        session = self._session
        session.check()
        self.flight = flight = session.background_saves.begin(*self.what())
        objects, self.objects = self.objects, None
        try:
            # First, or a rank that fails below leaves the others inside a state_dict() that has
            # collectives of its own.
            if objects is not None:
                state_dict = materialized(objects)
            session.background_saves.wait_idle(session.config.save.wait_timeout_s, before=flight)
            session.background_saves.supersede(flight)
            with self._not_writing():
                staged = session.stager.stage(state_dict, self._made_for.stream or "", flight)
        except Exception as error:  # noqa: BLE001  (see below; raised again by the save)
            # DCP tells the other ranks nothing of what is raised here, and they would wait for
            # this one: the save raises it, in its first collective call.
            staged = StagedState({}, Stage(background_save=flight, error=portable(error)))
            flight.watch(staged)
        if (bridge := session.executor_bridge) is not None:
            staged.pickled_as = bridge.lend_state
        staged.stage.seconds = time.perf_counter() - started_s
        self._staged = staged.stage
        return staged

    @contextlib.contextmanager
    def _not_writing(self) -> Iterator[None]:
        """While no other thread writes a save of its own, which would share its slot with ours."""
        saving, timeout_s = self._session.saving, self._session.config.save.wait_timeout_s
        if not saving.acquire(timeout=timeout_s):
            raise WaitError(
                f"another thread is still writing a save of its own after {timeout_s:g} s "
                "(save.wait_timeout)",
                reason="timeout",
            )
        try:
            yield
        finally:
            saving.release()

    def synchronize_staging(self) -> None:
        """Nothing is left to be staged when :meth:`stage` has returned."""

    def close(self) -> None:
        """Nothing to release: the engine owns everything."""

    def __reduce__(self) -> Any:
        # DCP's process executor sends the writer to another process, where none of this is valid.
        assert self._session.executor_bridge is not None, "an engine that only reads has no writers"
        return self._session.executor_bridge.lend_writer(self)

    def storage_meta(self) -> StorageMeta | None:
        """The first call of each save, before its first collective.

        Raises:
            WaitError: As :meth:`take_up`. DCP tells all ranks.
        """
        self.take_up(in_background=in_executor_thread())
        return super().storage_meta()

    def take_up(self, *, in_background: bool) -> tuple[BackgroundSave | None, Stage | None]:
        """Begin the save in this thread: wait for the save before. What was staged for it.

        Raises:
            WaitError: The one before does not end in time.
        """
        self._stage, self._staged = self._staged, None
        background_saves, save = self._session.background_saves, self._session.config.save
        flight = self._stage.background_save if self._stage is not None else None
        if flight is None and in_background:
            flight = background_saves.begin(*self.what())
        self._in_background = flight is not None
        if flight is not None:
            background_saves.enter_here(flight)
        try:
            background_saves.wait_idle(save.wait_timeout_s, before=flight)
        except WaitError:
            if flight is not None:
                # The other save may be inside a collective of the very group that this one is to
                # use, so no rank can be told anything before it ends. If it never does, then this
                # rank is stuck with it whatever it does here.
                background_saves.wait_idle(save.timeout_s, before=flight)
            raise
        background_saves.supersede(flight)
        return flight, self._stage

    def what(self) -> tuple[str, int | None]:
        """Which save this is, as far as it is known: for messages, and the step."""
        target = self._made_for
        if target.step is None:
            return "a step that its checkpoint_id names", None
        return f"step {target.step} of stream {target.stream or DEFAULT_STREAM!r}", target.step

    # --- what dcp.save calls then, in this order -------------------------------------------------

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._started_s = time.perf_counter()
        self._session.check()
        if not is_coordinator:
            self._session.background_saves.finished()  # the coordinator remembers, and tells all
        with self._session.background_saves.recording_cause():
            self._set_up(is_coordinator, kwargs)

    def _set_up(self, is_coordinator: bool, kwargs: dict[str, Any]) -> None:
        self._session.ranks.check_group()
        self._rank = kwargs.get("rank", 0)
        if self._reset_error is not None:
            raise self._reset_error
        stream, step = self._now = self._target()
        self._is_coordinator = is_coordinator
        self._refusal = self._local_plan = self._gathered = self._copies = None
        if kwargs.get("use_collectives", True):
            self._copies = self._session.copies_of(stream)
            self._session.dcp_plans.use(stream)
        else:
            # Cached plans of all ranks are of no use to one that plans alone.
            self._session.dcp_plans.use(f"{stream} without collectives")
            self._gathered = GatheredSave(
                self._session, self._session.gathered, stream, step, self._rank, self._members
            )
            self._gathered.tags = self.tags
        if self._stage is not None and self._stage.error is not None:
            with self._telling():
                raise self._stage.error
        if is_coordinator:
            try:
                with self._telling():
                    self._session.history.check_may_save(stream)
            except BEGINNING as error:
                if self._failures.must_raise(stream):
                    raise
                # The others do not know: they write, and finish finds this in our receipt.
                self._refusal = Refusal.of(self._rank, error)

    @property
    def _failures(self) -> SaveFailures:
        session = self._session
        return session.failures if self._gathered is None else session.gathered.failures

    def _telling(self) -> contextlib.AbstractContextManager[None]:
        """Where no collective tells the other ranks of a failure on this one."""
        return contextlib.nullcontext() if self._gathered is None else self._gathered.telling()

    def _target(self) -> tuple[str, int]:
        target = self._made_for.merged(self._named)
        if target.step is None:
            raise UsageError(
                "no step was named: use engine.writer(step) or dcp.save(checkpoint_id='.../step-N')"
            )
        found = target.stream or DEFAULT_STREAM, target.step
        if found == self._last:
            raise UsageError(
                f"this writer has saved step {target.step} already: make a writer for each step, "
                "or name a new step in checkpoint_id (to repeat a failed save, make a new writer)"
            )
        return found

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._local_plan = plan
        return plan if self._copies is None else self._copies.say_held(plan, self._session.host_id)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        expected = len(plans) if self._members is None else len(self._members)
        if self._gathered is None and expected != len(plans):
            raise UsageError(
                f"DCP plans for {len(plans)} rank(s), and the save is of {expected}: was "
                "the process group destroyed while it was under way?"
            )
        self._plans = plans
        return plans if self._copies is None else self._copies.assign(plans, self._session)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        receipt = self.blank()
        try:
            background_saves = self._session.background_saves
            with self._session.saving, background_saves.recording_cause(), self._telling():
                receipt, places = self._write(receipt, plan, planner)
        finally:
            put_back()
            if self._stage is not None and self._stage.slot is not None:
                self._session.ring.abandon(self._stage.slot)  # nothing, if it was sealed
        self.wrote(receipt, places)
        return written(receipt)

    def blank(self) -> Receipt:
        """This rank's receipt, before anything is written; with why it cannot be, if it cannot."""
        self._last = self._now
        (stream, step), refusal, stage = self._now, self._refusal, self._stage
        if refusal is None and stage is not None and stage.refused is not None:
            refusal = Refusal.of(self._rank, stage.refused)
        return Receipt(
            rank=self._rank,
            run_id=self._session.run_id,
            host_id=self._session.host_id,
            stream=stream,
            step=step,
            refusal=refusal,
        )

    def wrote(self, receipt: Receipt, places: list[int] | None) -> None:
        """Note what this rank wrote, and where what was staged for it went."""
        self._receipt, refusal, stage = receipt, receipt.refusal, self._stage
        if stage is not None and refusal is None:
            layout = None
            if places is not None:
                layout = StageLayout(stage.signature, places, receipt.size)
            self._session.stager.remember(receipt.stream, layout)
        if refusal is not None and not self._is_coordinator and self._gathered is None:
            self._session.failures.count(receipt.stream)
        self._report(None, None if refusal is None else str(refusal))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.end(metadata, receipts_in(results))

    def end(
        self, metadata: Metadata, receipts: Sequence[Receipt], encoded: EncodedPlan | None = None
    ) -> None:
        """Commit the save; ``encoded`` is its plan, if that is known."""
        background_saves = self._session.background_saves
        with telling(self._session, metadata, receipts) as self._ending:
            with background_saves.recording_cause():
                self._finish(metadata, receipts, encoded)
            if self._in_background:
                background_saves.finished()
            missed = background_saves.pop_missed()
            if missed is not None and self._gathered is None:
                # After the commit: to tell of one lost checkpoint must not cost another one.
                raise missed
        if missed is not None:
            # The other ranks know nothing of this, and wait in DCP's barrier.
            log.warning("%s", missed)

    def _finish(
        self, metadata: Metadata, receipts: Sequence[Receipt], encoded: EncodedPlan | None
    ) -> None:
        session, gathered = self._session, self._gathered
        plans, self._plans = self._plans, ()
        if gathered is None:
            check_agreement(receipts)
            refusals = [each.refusal for each in receipts if each.refusal is not None]
            if refusals:
                self._fail(receipts, refusals)
                return
        try:
            if gathered is None:
                with session.saving, self._ending.committing():
                    stored = partial(stored_items, session)
                    plan = encoded or encode_save(session, metadata, receipts, plans, stored)
                    copies = session.copies_of(receipts[0].stream)
                    manifest = commit_save(session, receipts, plan, self.tags, copies)
                save_id, hosts = manifest.save_id, [each.host for each in manifest.segments]
            else:
                with self._ending.committing():
                    save_id = gathered.finish(metadata, receipts[0], plans[0] if plans else None)
                hosts = list(gathered.hosts)
        except WRITING as error:
            # Without collectives it may be another rank's, which then says so.
            rank = error.fields.get("rank") if isinstance(error, TieredCkptError) else None
            refusal = Refusal.of(self._rank if rank is None else rank, error)
            self._fail(receipts, [refusal], committing=True)
        else:
            self._failures.succeeded(receipts[0].stream)
            self._report(save_id)  # there it is, whatever becomes of its copies
            alone = gathered is not None
            why = acknowledge(session, session.failures, save_id, *self._now, hosts, gathered=alone)
            self._report(save_id, not_replicated=why)

    def _fail(
        self, receipts: Sequence[Receipt], refusals: Sequence[Refusal], *, committing: bool = False
    ) -> None:
        failures, first = self._failures, receipts[0]
        sealed = [each.segment_id for each in receipts if each.segment_id is not None]
        try:
            reason = failures.settle(
                first.stream,
                first.step,
                refusals,
                committing=committing,
                loud=self._is_coordinator,
            )
            self._report(None, reason)
        finally:
            # Each save is counted once, though without collectives all ranks know of it.
            skipped = self._session.skipped_saves if self._is_coordinator else 0
            give_back(self._session.client, sealed, skipped, refusals)

    # --- one rank's part -------------------------------------------------------------------------

    def _write(
        self, receipt: Receipt, plan: SavePlan, planner: SavePlanner
    ) -> tuple[Receipt, list[int] | None]:
        session, local_plan, copies = self._session, self._local_plan, self._copies
        receipt, places = write_part(
            session, session.ring, receipt, self._stage, plan, planner, local_plan, copies
        )
        if copies is not None and receipt.refusal is None:
            items = planned_items(local_plan, planner)
            drafts = copies.write(plan, items, planner, session, receipt.step)
            receipt = replace(receipt, drafts=drafts)
        return receipt, places

    def _report(
        self, save_id: str | None, skipped: str | None = None, not_replicated: str | None = None
    ) -> None:
        receipt = self._receipt
        assert receipt is not None
        elapsed_s = time.perf_counter() - self._started_s
        self._session.last_save = SaveReport(
            save_id=save_id,
            stream=receipt.stream,
            step=receipt.step,
            stall_s=self._stage.seconds if self._stage is not None else elapsed_s,
            bytes_written=receipt.size,
            cold=receipt.cold,
            skipped=skipped,
            not_replicated=not_replicated,
        )


class Slots(Protocol):
    """Where a rank gets a slot to write its segment into: the ring, or a trainer's over a pipe."""

    pool: CopyPool

    def acquire(self, segment_bytes: int) -> WritableSlot:
        """A slot with room for a segment of this size."""

    def seal(self, slot: WritableSlot, segment_bytes: int, root: bytes) -> None:
        """Pass the written segment to the agent."""

    def abandon(self, slot: WritableSlot) -> None:
        """Return a slot whose segment is not sealed."""


def receipts_in(results: list[list[WriteResult]]) -> list[Receipt]:
    """All ranks' receipts, as DCP has gathered them."""
    return [result.storage_data for rank in results for result in rank]


def written(receipt: Receipt) -> Future[list[WriteResult]]:
    """What a rank that has this receipt tells DCP."""
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
    copies: LocalCopies | None = None,
) -> tuple[Receipt, list[int] | None]:
    """Write and seal what the plan gives to this rank.

    Args:
        own: What it is written with.
        slots: Where to.
        receipt: A blank one.
        stage: What was staged for the save.
        plan, planner: DCP's.
        local_plan: What the planner gave to ``prepare_local_plan``.
        copies: Of the stream, with ``memory.copies: local``.

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
            footer=footer_digest(slot, size) if copies is not None else b"",
        )
    if stage is None:
        return receipt, None
    # For the next stage(): where the staged tensors went, and which ones others write.
    which = copies.drafted(plan) if copies is not None else lambda _: False
    left = planned_tensors(local_plan, plan, planner)
    drafted = list(planned_tensors(local_plan, plan, planner, which))
    if any(tensor.is_meta for tensor in drafted):
        return receipt, None  # the plan before had another rank write that copy
    return receipt, match_leaves(stage, items, tensors, left, drafted)


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
    fates, size = own.fates, layout.segment_bytes
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
        on_failure.callback(fates.end, [slot.segment_id], "failed")
        on_failure.callback(slots.abandon, slot)
        fates.begin(slot.segment_id, stream)
        root = write_segment(slot, layout, tensors, blobs, slots.pool)
        slots.seal(slot, size, root)
        on_failure.pop_all()
    return slot, root
