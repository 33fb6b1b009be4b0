"""One rank's side of one save: begin, write its part, commit or skip, report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from tieredckpt.dcp.job.checkpoints import ARRIVAL_S, wait_for_save
from tieredckpt.dcp.job.session import SaveReport
from tieredckpt.dcp.save.failures import BEGINNING, WRITING, free_segments, reporting_outcome
from tieredckpt.dcp.save.part import write_part
from tieredckpt.dcp.save.receipt import Receipt, Refusal
from tieredckpt.dcp.slots.stager import StageLayout
from tieredckpt.dcp.state.plan_caches import put_back
from tieredckpt.errors import NotFoundError, TieredCkptError, TierUnavailableError, WaitError

if TYPE_CHECKING:
    from tieredckpt.dcp.job.unreported import Ending
    from tieredckpt.dcp.save.mode import SaveMode
    from tieredckpt.dcp.save.state import SaveState
    from tieredckpt.dcp.slots.stager import Stage
    from tieredckpt.dcp.state.metadata import EncodedPlan


@dataclass(slots=True, kw_only=True)
class RankSave:
    """One save on one rank.

    Attributes:
        session: The rank's.
        mode: How the ranks reach one decision.
        stage: What was staged for the save; None: it is written from the state itself.
        stream, step: The checkpoint to be made.
        rank: Inside of DCP's group.
        is_coordinator: Whether this rank is DCP's coordinator.
        in_background: Whether the save runs in the background.
        nested: The keys of the state that are no text, as far as the engine saw it.
        started_s: When the save reached the writer, on ``time.perf_counter``.
        local_plan: This rank's plan before global planning.
        plans: All ranks' plans, on the coordinator.
        receipt: None until this rank writes.
    """

    session: SaveState
    mode: SaveMode
    stage: Stage | None
    stream: str
    step: int
    rank: int
    is_coordinator: bool
    in_background: bool
    started_s: float
    nested: bytes = b""
    local_plan: SavePlan | None = None
    plans: Sequence[SavePlan] = ()
    receipt: Receipt | None = None
    _refusal: Refusal | None = field(default=None, init=False)

    def begin(self) -> None:
        """Check that this rank may save.

        Raises:
            Exception: What ``stage()`` failed with.
            TieredCkptError: The save may neither begin nor be skipped.
        """
        if self.stage is not None and self.stage.error is not None:
            with self.mode.reporting():
                raise self.stage.error
        if not self.is_coordinator:
            return
        try:
            with self.mode.reporting():
                self.session.history.check_may_save(self.stream)
        except BEGINNING as error:
            if self.mode.failures.must_raise(self.stream):
                raise
            # The other ranks do not know: they write, and finish() finds this in our receipt.
            self._refusal = Refusal.of(self.rank, error)

    def blank_receipt(self) -> Receipt:
        """This rank's receipt before it writes, with the reason if it cannot write."""
        refusal, stage = self._refusal, self.stage
        if refusal is None and stage is not None and stage.refused is not None:
            refusal = Refusal.of(self.rank, stage.refused)
        self.receipt = Receipt(
            rank=self.rank,
            run_id=self.session.run_id,
            host_id=self.session.host_id,
            stream=self.stream,
            step=self.step,
            nested=self.nested,
            refusal=refusal,
        )
        return self.receipt

    def write(self, plan: SavePlan, planner: SavePlanner) -> Receipt:
        """Write and seal this rank's segment, then its mirrors of other ranks' segments."""
        session, mode, receipt = self.session, self.mode, self.blank_receipt()
        try:
            with session.saving, session.background_saves.recording_cause(), mode.reporting():
                receipt, places = write_part(
                    session, session.ring, receipt, self.stage, plan, planner,
                    self.local_plan, mode.mirrors,
                )  # fmt: skip
                if receipt.refusal is None:
                    mirrors = mode.write_mirrors(plan, self.local_plan, planner, self.step)
                    receipt = replace(receipt, mirrors=mirrors)
        finally:
            put_back()
            if self.stage is not None and self.stage.slot is not None:
                session.ring.abandon(self.stage.slot)  # nothing, if it was sealed
        self.wrote(receipt, places)
        return receipt

    def wrote(self, receipt: Receipt, places: list[int] | None) -> None:
        """Record this rank's receipt, and the places of its leaves for the next ``stage()``."""
        self.receipt, refusal = receipt, receipt.refusal
        if self.stage is not None and refusal is None:
            layout = None
            if places is not None:
                layout = StageLayout(self.stage.signature, places, receipt.size)
            self.session.stager.remember(receipt.stream, layout)
        if refusal is not None and not self.is_coordinator:
            self.mode.refused(receipt.stream)
        self._report(None, skipped=None if refusal is None else str(refusal))

    def finish(
        self, metadata: Metadata, receipts: Sequence[Receipt], encoded: EncodedPlan | None = None
    ) -> None:
        """Commit the save, or skip it. Called on each rank that decides.

        Args:
            metadata: What DCP's planner made of the plans.
            receipts: Of all ranks that this rank decides for.
            encoded: The plan of the save, if it is encoded already.

        Raises:
            TieredCkptError: The save failed, and may not be skipped.
        """
        background_saves = self.session.background_saves
        with reporting_outcome(self.session, metadata, receipts) as ending:
            with background_saves.recording_cause():
                self._commit(ending, metadata, receipts, encoded)
            if self.in_background:
                background_saves.finished()
            missed = background_saves.pop_missed()
            if missed is not None:
                self.mode.missed(missed)

    def _commit(
        self,
        ending: Ending,
        metadata: Metadata,
        receipts: Sequence[Receipt],
        encoded: EncodedPlan | None,
    ) -> None:
        plans, self.plans = self.plans, ()
        refusals = self.mode.refusals(receipts)
        if refusals:
            self._skip(receipts, refusals)
            return
        try:
            save_id, hosts = self.mode.commit(metadata, receipts, plans, encoded, ending)
        except WRITING as error:
            # Without collectives it may be another rank's error, which names that rank.
            rank = error.fields.get("rank") if isinstance(error, TieredCkptError) else None
            refusal = Refusal.of(self.rank if rank is None else rank, error)
            self._skip(receipts, [refusal], committing=True)
            return
        self.mode.failures.succeeded(self.stream)
        self._report(save_id)  # the checkpoint exists, whatever becomes of its copies
        self._report(save_id, not_replicated=self._await_copies(save_id, hosts))

    def _await_copies(self, save_id: str, hosts: Sequence[str]) -> str | None:
        """If ``save.ack`` asks for it, wait until the other hosts have their copies.

        Returns:
            Why the checkpoint, which exists, was not replicated in time; None: it was, or need not
            be.

        Raises:
            WaitError: It was not, and training must not go on: see docs/understand/failures.md.
        """
        session, config = self.session, self.session.config.save
        if config.ack != "replicated" or not session.hosts.replicas_of(hosts):
            return None
        what, now_s = f"step {self.step} of stream {self.stream!r}", time.monotonic()
        until_s, arrives_s = now_s + config.timeout_s, now_s + ARRIVAL_S
        try:
            wait_for_save(session, save_id, what, "replicated", until_s, arrives_s=arrives_s)
        except WaitError as error:
            return self.mode.unreplicated(self.stream, error)
        except (TierUnavailableError, NotFoundError) as error:
            text = f"whether {what} is replicated cannot be found out: {error}"
            return self.mode.unreplicated(self.stream, WaitError(text, reason="failed"))
        session.failures.replicated(self.stream)
        return None

    def _skip(
        self, receipts: Sequence[Receipt], refusals: Sequence[Refusal], *, committing: bool = False
    ) -> None:
        sealed = [each.segment_id for each in receipts if each.segment_id is not None]
        try:
            reason = self.mode.failures.resolve(
                self.stream,
                self.step,
                refusals,
                committing=committing,
                loud=self.is_coordinator,
            )
            self._report(None, skipped=reason)
        finally:
            # Each save is counted once, though without collectives all ranks know of it.
            skipped = self.session.skipped_saves if self.is_coordinator else 0
            free_segments(self.session.client, sealed, skipped, refusals)

    def _report(
        self, save_id: str | None, *, skipped: str | None = None, not_replicated: str | None = None
    ) -> None:
        assert self.receipt is not None
        elapsed_s = time.perf_counter() - self.started_s
        self.session.last_save = SaveReport(
            save_id=save_id,
            stream=self.stream,
            step=self.step,
            stall_s=self.stage.seconds if self.stage is not None else elapsed_s,
            bytes_written=self.receipt.size,
            cold=self.receipt.cold,
            skipped=skipped,
            not_replicated=not_replicated,
        )
