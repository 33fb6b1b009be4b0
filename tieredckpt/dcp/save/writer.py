"""DCP's storage writer: each rank fills one slot, the coordinator binds the segments to a save.

One ``WriteResult`` per rank, since DCP gathers all of them at every save. Nothing that changes per
save travels in a DCP plan, which may be cached: step, stream and segment come back in the receipt.
What a save costs on top of DCP's planning: one request per rank (seal) and one commit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tieredckpt.dcp.save.collective import Collective
from tieredckpt.dcp.save.failures import portable
from tieredckpt.dcp.save.mode import SaveMode
from tieredckpt.dcp.save.no_collectives import NoCollectives
from tieredckpt.dcp.save.part import receipts_in, written
from tieredckpt.dcp.save.rank_save import RankSave
from tieredckpt.dcp.slots.background_saves import in_executor_thread
from tieredckpt.dcp.slots.stager import Stage, StagedState, materialized
from tieredckpt.dcp.state.checkpoint_id import DEFAULT_STREAM, Named, checked_target
from tieredckpt.errors import UsageError, WaitError
from tieredckpt.format.nested import nested_of

if TYPE_CHECKING:
    from tieredckpt.dcp.save.state import SaveState
    from tieredckpt.dcp.slots.background_saves import BackgroundSave


class Writer(Named, StorageWriter):
    """A ``StorageWriter`` for ``dcp.save`` and ``dcp.async_save``. Made by ``Engine.writer``.

    It is also DCP's ``AsyncStager``: ``stage()`` runs in the caller's thread and outside of DCP's
    collectives, so its errors are kept until the first call inside of them. Everything else of
    ``dcp.async_save`` runs in the background.

    Errors reach every rank inside DCP's ``CheckpointException`` (``failures``). A save that raised
    has an unknown outcome: the checkpoint may exist, and then it is complete. With
    ``save.on_error: skip`` a failure of the engine does not raise: the save returns on all ranks
    without a checkpoint, see docs/understand/failures.md.
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
        self._members = members
        self.background: BackgroundSave | None = None
        """Of the last ``stage()``."""
        self.objects: Mapping[str, Any] | None = None
        """The state that ``stage()`` copies, with its Stateful objects; None: what DCP passes."""
        self._staged: Stage | None = None
        """By ``stage()``, for the save that begins next."""
        self._stage: Stage | None = None
        """Of the save that runs now."""
        self.nested = b""
        """The keys that are no text, of the state that is saved next (format/nested.py)."""
        self._in_background = False
        self._save: RankSave | None = None
        """The save that runs now, or ran last; None: its set-up failed."""
        self._written: tuple[str, int] | None = None
        """Stream and step of the last save that wrote, before that one."""

    @property
    def tags(self) -> dict[str, str]:
        """Of the checkpoints that it makes."""
        return dict(self._made_for.tags)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state, so that training can change it as soon as this returns.

        Part of DCP's AsyncStager: ``dcp.async_save`` calls it in the thread of its caller. Waits
        for an earlier save in the background, at most ``save.wait_timeout``.

        Returns:
            A state of the same structure, in memory of the engine: save it once, with this writer.

        Raises:
            UsageError: The engine is closed or was opened before a fork. Everything else is
                raised by the save, on all ranks.
        """
        started_s = time.perf_counter()
        session = self._session
        session.check()
        self.background = background = session.background_saves.begin(*self.what())
        objects, self.objects = self.objects, None
        try:
            # First, or a rank that fails below leaves the others inside a state_dict() that has
            # collectives of its own.
            if objects is not None:
                state_dict = materialized(objects)
            saves = session.background_saves
            saves.wait_idle(session.config.save.wait_timeout_s, before=background)
            saves.supersede(background)
            with self._not_writing():
                staged = session.stager.stage(state_dict, self._made_for.stream or "", background)
            self.nested = nested_of(state_dict)
        except Exception as error:  # noqa: BLE001  (see below; raised again by the save)
            # DCP does not send an error of this call to the other ranks, which would wait for this
            # one: the save raises it, in its first collective call.
            staged = StagedState({}, Stage(background_save=background, error=portable(error)))
            background.watch(staged)
        if (bridge := session.executor_bridge) is not None:
            staged.pickled_as = bridge.reduce_state
        staged.stage.seconds = time.perf_counter() - started_s
        self._staged = staged.stage
        return staged

    @contextlib.contextmanager
    def _not_writing(self) -> Iterator[None]:
        """Keep other threads from writing a save, which would share its slot with this one."""
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
        """Nothing: :meth:`stage` has staged everything."""

    def close(self) -> None:
        """Nothing to release: the engine owns everything."""

    def __reduce__(self) -> Any:
        # DCP's process executor sends the writer to another process, where none of this is valid.
        assert self._session.executor_bridge is not None, "an engine that only reads has no writers"
        return self._session.executor_bridge.reduce_writer(self)

    def storage_meta(self) -> StorageMeta | None:
        """The first call of each save, before its first collective.

        Raises:
            WaitError: As :meth:`start`. DCP informs all ranks.
        """
        self.start(in_background=in_executor_thread())
        return super().storage_meta()

    def start(self, *, in_background: bool) -> tuple[BackgroundSave | None, Stage | None]:
        """Start the save in this thread, after the save before. Returns what was staged for it.

        Raises:
            WaitError: The save before does not end in time.
        """
        self._stage, self._staged = self._staged, None
        background_saves, save = self._session.background_saves, self._session.config.save
        background = self._stage.background_save if self._stage is not None else None
        if background is None and in_background:
            background = background_saves.begin(*self.what())
        self._in_background = background is not None
        if background is not None:
            background_saves.enter_here(background)
        try:
            background_saves.wait_idle(save.wait_timeout_s, before=background)
        except WaitError:
            if background is not None:
                # The other save may be inside a collective of the group that this one is to use,
                # so no rank can be informed before it ends. If it never ends, this rank cannot
                # go on either way.
                background_saves.wait_idle(save.timeout_s, before=background)
            raise
        background_saves.supersede(background)
        return background, self._stage

    def what(self) -> tuple[str, int | None]:
        """The name of the next save for messages, and its step as far as it is known."""
        target = self._made_for
        if target.step is None:
            return "a step that its checkpoint_id names", None
        return f"step {target.step} of stream {target.stream or DEFAULT_STREAM!r}", target.step

    # --- what dcp.save calls then, in this order -------------------------------------------------

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        started_s = time.perf_counter()
        self._session.check()
        if not is_coordinator:
            self._session.background_saves.finished()  # the coordinator remembers, and informs all
        with self._session.background_saves.recording_cause():
            self._session.ranks.check_group()
            if self._reset_error is not None:
                raise self._reset_error
            (stream, step), rank = self._target(), kwargs.get("rank", 0)
            self._save, nested, self.nested = None, self.nested, b""
            save = RankSave(
                session=self._session,
                mode=self._mode(stream, step, rank, kwargs.get("use_collectives", True)),
                stage=self._stage,
                stream=stream,
                step=step,
                rank=rank,
                is_coordinator=is_coordinator,
                in_background=self._in_background,
                started_s=started_s,
                nested=nested,
            )
            save.begin()
        self._save = save

    def _mode(self, stream: str, step: int, rank: int, use_collectives: bool) -> SaveMode:
        if use_collectives:
            return Collective(self._session, stream, self._members, self.tags)
        return NoCollectives(self._session, stream, step, rank, self._members, self.tags)

    def _target(self) -> tuple[str, int]:
        target = self._made_for.merged(self._named)
        if target.step is None:
            raise UsageError(
                "no step was named: use engine.writer(step) or dcp.save(checkpoint_id='.../step-N')"
            )
        found = target.stream or DEFAULT_STREAM, target.step
        if self._save is not None and self._save.receipt is not None:
            self._written = self._save.stream, self._save.step
        if found == self._written:
            raise UsageError(
                f"this writer has saved step {target.step} already: make a writer for each step, "
                "or name a new step in checkpoint_id (to repeat a failed save, make a new writer)"
            )
        return found

    @property
    def save(self) -> RankSave:
        """The save that DCP began last. Raises UsageError if it began none, or could not."""
        if self._save is None:
            raise UsageError("no save has begun: dcp.save calls set_up_storage_writer() first")
        return self._save

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.save.local_plan = plan
        return self.save.mode.local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.save.plans = plans
        return self.save.mode.global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        return written(self.save.write(plan, planner))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.save.finish(metadata, receipts_in(results))
