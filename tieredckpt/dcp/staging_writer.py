"""The half of the writer that ``dcp.async_save`` adds: staging, and one save in flight.

``stage()`` runs in the caller's thread and outside of DCP's collectives: what goes wrong there is
kept until the first call inside of them. Everything else runs in the background.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import StorageWriter

from tieredckpt.dcp.checkpoint_id import DEFAULT_STREAM, Target
from tieredckpt.dcp.copying import outside, write_segment
from tieredckpt.dcp.fates import Ending
from tieredckpt.dcp.in_flight import in_executor_thread
from tieredckpt.dcp.stager import Stage, StagedState
from tieredckpt.errors import WaitError

if TYPE_CHECKING:
    import torch

    from tieredckpt.dcp.in_flight import Flight
    from tieredckpt.dcp.mapped import WritableSlot
    from tieredckpt.dcp.session import Session
    from tieredckpt.format.segment import SegmentLayout


class StagingWriter(StorageWriter):
    """What :class:`tieredckpt.dcp.writer.Writer` is to DCP as an ``AsyncStager``."""

    # Part of the AsyncStager: stage() has copied all when it returns.
    _synchronize_after_execute = False
    _drafts_what_is_staged = True
    """With ``memory.copies: local``; a process of DCP's executor does not."""

    def __init__(self, session: Session, made_for: Target) -> None:
        super().__init__()
        self._session = session
        self._made_for = made_for
        self.flight: Flight | None = None
        """Of the last ``stage()``."""
        self._staged: Stage | None = None
        """By stage(), for the save that begins next."""
        self._stage: Stage | None = None
        """Of the save that runs now."""
        self._in_background = False
        self._ending = Ending()
        """What becomes of the save that ends now, or ended last."""
        self._last: Target | None = None

    @property
    def tags(self) -> dict[str, str]:
        """Of the checkpoints that it makes."""
        return dict(self._made_for.tags)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Part of DCP's AsyncStager."""
        return self._synchronize_after_execute

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
        self.flight = flight = session.in_flight.begin(*self.what())
        try:
            session.in_flight.wait_idle(session.config.save.wait_timeout_s, before=flight)
            session.in_flight.supersede(flight)
            with self._not_writing():
                staged = session.stager.stage(state_dict, self._made_for.stream or "", flight)
        except Exception as error:  # noqa: BLE001  (see below; raised again by the save)
            # DCP tells the other ranks nothing of what is raised here, and they would wait for
            # this one: the save raises it, in its first collective call.
            staged = StagedState({}, Stage(flight=flight, error=error))
            flight.carries(staged)
        staged.lend = session.lender.lend_state if session.lender is not None else None
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
        if self._session.lender is None:
            raise TypeError("this writer was sent here from another process, and goes no further")
        return self._session.lender.lend_writer(self)

    def lend(self) -> tuple[Stage | None, Target, Target | None]:
        """For the process executor: what was staged, what this was made for and saved last.

        The save is this writer's as if it had saved it itself.
        """
        staged, self._staged = self._staged, None
        last = self._last
        if self._made_for.step is not None:
            self._last = replace(self._made_for, stream=self._made_for.stream or DEFAULT_STREAM)
        return staged, self._made_for, last

    def storage_meta(self) -> StorageMeta | None:
        """The first call of each save, before its first collective: wait for the save before.

        Raises:
            WaitError: That one does not end in time. DCP tells all ranks.
        """
        self._stage, self._staged = self._staged, None
        in_flight, save = self._session.in_flight, self._session.config.save
        flight = self._stage.flight if self._stage is not None else None
        if flight is None and in_executor_thread():
            flight = in_flight.begin(*self.what())
        self._in_background = flight is not None
        if flight is not None:
            in_flight.take_up(flight)
            if flight.superseded:
                raise WaitError(
                    f"the save of {flight.what} was staged, but another one began before it did",
                    reason="superseded",
                )
        try:
            in_flight.wait_idle(save.wait_timeout_s, before=flight)
        except WaitError:
            if flight is not None:
                # The other save may be inside a collective of the very group that this one is to
                # use, so no rank can be told anything before it ends. If it never does, then this
                # rank is stuck with it whatever it does here.
                in_flight.wait_idle(save.timeout_s, before=flight)
            raise
        in_flight.supersede(flight)
        return super().storage_meta()

    def what(self) -> tuple[str, int | None]:
        """Which save this is, as far as it is known: for messages, and the step."""
        target = self._made_for
        if target.step is None:
            return "a step that its checkpoint_id names", None
        return f"step {target.step} of stream {target.stream or DEFAULT_STREAM!r}", target.step


def fill_slot(
    session: Session,
    stream: str,
    stage: Stage | None,
    layout: SegmentLayout,
    tensors: Sequence[torch.Tensor],
    blobs: Sequence[memoryview],
) -> tuple[WritableSlot, bytes]:
    """Write and seal one segment; the slot it is in, and its root digest.

    In ``stage`` some of the tensors may lie already.
    """
    ring, fates, size = session.ring, session.fates, layout.segment_bytes
    staged = stage.slot if stage is not None else None
    if staged is not None:
        fits = size <= staged.capacity_bytes
        tensors = outside(staged, layout.items if fits else None, tensors)
        if not fits:
            ring.abandon(staged)
            staged = None
    slot = staged if staged is not None else ring.acquire(size)
    sealed = False
    try:
        fates.begin(slot.segment_id, stream)
        root = write_segment(slot, layout, tensors, blobs, ring.pool)
        ring.seal(slot, size, root)
        sealed = True
    finally:
        if not sealed:  # or not known to be; it is in no receipt, and so in no checkpoint
            ring.abandon(slot)
            fates.end([slot.segment_id], "failed")
    return slot, root
