"""DCP's storage writer: each rank fills one slot, the coordinator binds the segments to a save.

One ``WriteResult`` per rank, since DCP gathers all of them at every save. Nothing that changes per
save travels in a DCP plan, which may be cached: step, stream and segment come back in the receipt.
What a save costs on top of DCP's planning: one request per rank (seal) and one commit.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tieredckpt.dcp.checkpoint_id import (
    DEFAULT_STREAM,
    Named,
    Target,
    checked_target,
)
from tieredckpt.dcp.commit import Receipt, check_agreement, commit_save
from tieredckpt.dcp.dcp_plan_caches import put_back
from tieredckpt.dcp.equal_names import (
    NamesSeen,
    digests_to_compare,
    planned_items,
    planned_tensors,
    written_values,
)
from tieredckpt.dcp.failure import BEGINNING, WRITING, Refusal, SaveFailures, give_back
from tieredckpt.dcp.fates import telling
from tieredckpt.dcp.gathered import GatheredSave
from tieredckpt.dcp.items import (
    LayoutCache,
    blob_spec,
    resolve_blob,
    resolve_tensor,
    tensor_spec,
    tensors_first,
)
from tieredckpt.dcp.local_copies import LocalCopies, footer_digest
from tieredckpt.dcp.looking import acknowledge
from tieredckpt.dcp.planner import warn_of_refused
from tieredckpt.dcp.session import SaveReport, Session
from tieredckpt.dcp.staging_writer import StagingWriter, fill_slot
from tieredckpt.errors import TieredCkptError, TierUnavailableError, UsageError
from tieredckpt.format.segment import Item

log = logging.getLogger(__name__)


class Writer(Named, StagingWriter):
    """A ``StorageWriter`` for ``dcp.save`` and ``dcp.async_save``. Made by ``Engine.writer``.

    Errors reach every rank inside DCP's ``CheckpointException`` (``failures``). A save that raised
    has an unknown outcome: the checkpoint may exist, whole; it is never half there. With
    ``save.on_error: skip`` a failure of ours does not raise: the save returns on all ranks without
    a checkpoint, see docs/failures.md.
    """

    def __init__(
        self,
        session: Session,
        step: int | None,
        stream: str,
        members: Sequence[int] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(session, checked_target(step, stream, tags))
        self._now = Target(None, None)
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

    # --- what dcp.save calls, in this order ------------------------------------------------------

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._started_s = time.perf_counter()
        self._session.check()
        if not is_coordinator:
            self._session.in_flight.finished()  # the coordinator remembers, and tells all
        with self._session.in_flight.noting():
            self._set_up(is_coordinator, kwargs)

    def _set_up(self, is_coordinator: bool, kwargs: dict[str, Any]) -> None:
        if self._session.ranks.alone_no_more:
            raise UsageError(
                "this engine was opened before init_process_group, by this rank alone: open it "
                "afterwards, on all ranks together"
            )
        if self._session.ranks.group_is_gone:
            # DCP would take each rank for the only one, and its part for the whole.
            raise UsageError(
                "the process group of this engine was destroyed: nothing was saved; wait for saves "
                "in the background (engine.close() does) before destroy_process_group"
            )
        self._rank = kwargs.get("rank", 0)
        if self._reset_error is not None:
            raise self._reset_error
        self._now = self._target()
        self._is_coordinator = is_coordinator
        self._refusal = self._local_plan = self._gathered = self._copies = None
        stream, step = self._now.stream, self._now.step
        assert stream is not None and step is not None  # noqa: PT018
        if kwargs.get("use_collectives", True):
            if self._stage is None or self._drafts_what_is_staged:
                self._copies = self._session.copies_of(stream)
            self._session.dcp_plans.use(stream)
        else:
            # Cached plans of all ranks are of no use to one that plans alone.
            self._session.dcp_plans.use(f"{stream} without collectives")
            self._gathered = GatheredSave(self._session, stream, step, self._rank, self._members)
            self._gathered.tags = self.tags
        if self._stage is not None and self._stage.error is not None:
            with self._telling():
                raise self._stage.error
        if is_coordinator:
            try:
                with self._telling():
                    self._check_may_save(stream)
            except BEGINNING as error:
                if self._failures.must_raise(stream):
                    raise
                # The others do not know: they write, and finish finds this in our receipt.
                self._refusal = Refusal.of(self._rank, error)

    def _check_may_save(self, stream: str) -> None:
        if self._session.lender is not None:
            self._session.lender.settle()
        self._session.history.check_may_save(stream)

    @property
    def _failures(self) -> SaveFailures:
        session = self._session
        return session.failures if self._gathered is None else session.gathered.failures

    def _telling(self) -> contextlib.AbstractContextManager[None]:
        """Where no collective tells the other ranks of a failure on this one."""
        return contextlib.nullcontext() if self._gathered is None else self._gathered.telling()

    def _target(self) -> Target:
        target = self._made_for.merged(self._named)
        if target.step is None:
            raise UsageError(
                "no step was named: use engine.writer(step) or dcp.save(checkpoint_id='.../step-N')"
            )
        target = replace(target, stream=target.stream or DEFAULT_STREAM)
        if target == self._last:
            raise UsageError(
                f"this writer has saved step {target.step} already: make a writer for each step, "
                "or name a new step in checkpoint_id (to repeat a failed save, make a new writer)"
            )
        return target

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
        self._last = self._now
        try:
            in_flight = self._session.in_flight
            with self._session.saving, in_flight.noting(), self._telling():
                self._receipt = self._write(plan, planner)
        finally:
            put_back()
            if self._stage is not None and self._stage.slot is not None:
                self._session.ring.abandon(self._stage.slot)  # nothing, if it was sealed
        refusal = self._receipt.refusal
        if refusal is not None and not self._is_coordinator and self._gathered is None:
            assert self._now.stream is not None
            self._session.failures.count(self._now.stream)
        self._report(None, None if refusal is None else str(refusal))
        result = WriteResult(
            index=MetadataIndex(f"segment of rank {self._receipt.rank}"),
            size_in_bytes=self._receipt.size,
            storage_data=self._receipt,
        )
        future: Future[list[WriteResult]] = Future()
        future.set_result([result])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        receipts = [result.storage_data for rank in results for result in rank]
        with telling(self._session, metadata, receipts) as self._ending:
            self._end(metadata, receipts)

    def _end(self, metadata: Metadata, receipts: Sequence[Receipt]) -> None:
        plans, self._plans = self._plans, ()
        in_flight = self._session.in_flight
        with in_flight.noting():
            if self._gathered is not None:
                self._finish_gathered(metadata, receipts[0], plans[0] if plans else None)
            else:
                self._finish(metadata, receipts, plans)
        if self._in_background:
            in_flight.finished()
        missed = in_flight.take_missed()
        if missed is None:
            return
        if self._gathered is not None:
            # The other ranks know nothing of this, and wait in DCP's barrier.
            log.warning("%s", missed)
            return
        # After the commit: to tell of one lost checkpoint must not cost another one.
        raise missed

    def _finish(
        self, metadata: Metadata, receipts: Sequence[Receipt], plans: Sequence[SavePlan]
    ) -> None:
        check_agreement(receipts)
        refusals = [each.refusal for each in receipts if each.refusal is not None]
        if not refusals:
            try:
                with self._session.saving, self._ending.committing():
                    manifest = commit_save(self._session, metadata, receipts, plans, self.tags)
            except WRITING as error:
                refusal = Refusal.of(self._rank, error)
                self._fail(receipts, [refusal], committing=True)
            else:
                self._session.failures.succeeded(manifest.stream)
                self._committed(manifest.save_id, [each.host for each in manifest.segments])
        else:
            self._fail(receipts, refusals)

    def _finish_gathered(self, metadata: Metadata, receipt: Receipt, plan: SavePlan | None) -> None:
        gathered = self._gathered
        assert gathered is not None
        try:
            with self._ending.committing():
                save_id = gathered.finish(metadata, receipt, plan)
        except WRITING as error:
            rank = error.fields.get("rank") if isinstance(error, TieredCkptError) else None
            refusal = Refusal.of(self._rank if rank is None else rank, error)
            self._fail([receipt], [refusal], committing=True)
        else:
            self._failures.succeeded(receipt.stream)
            self._committed(save_id, gathered.hosts)

    def _committed(self, save_id: str, hosts: Sequence[str]) -> None:
        self._report(save_id)  # there it is, whatever becomes of its copies
        stream, step = self._now.stream, self._now.step
        assert stream is not None and step is not None  # noqa: PT018
        why = acknowledge(
            self._session, save_id, stream, step, hosts, gathered=self._gathered is not None
        )
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

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Receipt:
        assert self._now.step is not None
        assert self._now.stream is not None
        session = self._session
        receipt = Receipt(
            rank=self._rank,
            run_id=session.run_id,
            host_id=session.host_id,
            stream=self._now.stream,
            step=self._now.step,
        )
        if self._refusal is not None:
            return replace(receipt, refusal=self._refusal)
        stage = self._stage
        if stage is not None and stage.refused is not None:
            return replace(receipt, refusal=Refusal.of(receipt.rank, stage.refused))
        try:
            tensor_items, blob_items = tensors_first(plan.items)
            specs = [tensor_spec(item) for item in tensor_items]
            left_out = stage is not None and bool(stage.without_data)
            tensors = [
                resolve_tensor(planner, item, spec, left_out=left_out)
                for item, spec in zip(tensor_items, specs, strict=True)
            ]
            blobs = [resolve_blob(planner, item) for item in blob_items]
            receipt = replace(
                receipt,
                values=digests_to_compare(
                    session.names_seen.setdefault(receipt.stream, NamesSeen()),
                    self._local_plan,
                    planner,
                    written_values(blob_items, blobs),
                    alone=session.ranks.world_size == 1,
                ),
            )
        except TierUnavailableError as error:  # a tensor that was left to another rank
            return replace(receipt, refusal=Refusal.of(receipt.rank, error))
        if not plan.items:
            self._learn(plan, planner, (), (), 0)
            return self._with_drafts(receipt, plan, planner)
        if not session.unsafe_pickle:
            warn_of_refused(session.checked_keys, [item.index.fqn for item in blob_items], blobs)
        specs += [blob_spec(item, len(blob)) for item, blob in zip(blob_items, blobs, strict=True)]
        layouts = session.layouts.setdefault(receipt.stream, LayoutCache())
        layout, structure = layouts.lay_out(specs)
        size = layout.segment_bytes
        try:
            slot, root = fill_slot(session, receipt.stream, stage, layout, tensors, blobs)
        except WRITING as error:
            return replace(receipt, refusal=Refusal.of(receipt.rank, error))
        self._learn(plan, planner, layout.items, tensors, size)
        receipt = replace(
            receipt,
            segment_id=slot.segment_id,
            size=size,
            root=root,
            structure=structure,
            cold=slot.cold,
            footer=footer_digest(slot, size) if self._copies is not None else b"",
        )
        return self._with_drafts(receipt, plan, planner)

    def _with_drafts(self, receipt: Receipt, plan: SavePlan, planner: SavePlanner) -> Receipt:
        if self._copies is None:
            return receipt
        items = planned_items(self._local_plan, planner)
        drafts = self._copies.write(plan, items, planner, self._session, receipt.step)
        return replace(receipt, drafts=drafts)

    def _learn(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        items: Sequence[Item],
        tensors: Sequence[torch.Tensor],
        size: int,
    ) -> None:
        """For the next stage(): where the staged tensors went, and which ones others write."""
        if self._stage is not None and self._now.stream is not None:
            which = self._copies.drafted(plan) if self._copies is not None else lambda _: False
            self._session.stager.learn(
                self._stage, self._now.stream, items, tensors,
                planned_tensors(self._local_plan, plan, planner), size,
                list(planned_tensors(self._local_plan, plan, planner, which)),
            )  # fmt: skip

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
