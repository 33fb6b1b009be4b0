"""``engine.async_save``: keeps the future, so a failure that nobody asks for is not lost."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from tieredckpt.dcp.save.writer import Writer
from tieredckpt.errors import UsageError

if TYPE_CHECKING:
    from tieredckpt.dcp.save.state import SaveState
    from tieredckpt.dcp.slots.background_saves import BackgroundSaves

_TYPES = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}


class PendingSave(Future[Metadata]):
    """The future of a save in the background; remembers whether its outcome was asked for.

    Args:
        background_saves: Of the engine; their next save does not report an outcome that was seen.
        writer: Of the save.
    """

    def __init__(self, background_saves: BackgroundSaves, writer: Writer) -> None:
        super().__init__()
        self.was_seen = False
        self._saves = background_saves
        self._writer = writer

    def result(self, timeout: float | None = None) -> Metadata:
        """DCP's ``Metadata``; raises what the save failed with."""
        try:
            return super().result(timeout)
        finally:
            self._mark_seen()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the save failed with, or None."""
        try:
            return super().exception(timeout)
        finally:
            self._mark_seen()

    def _mark_seen(self) -> None:
        if self.done():
            self.was_seen = True
            if self._writer.background is not None:
                self._saves.mark_reported(self._writer.background)

    def end_as(self, future: Future[Metadata]) -> None:
        """End as ``future`` has."""
        error = future.exception()
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(future.result())


class Background:
    """The saves that one engine began itself, one after the other."""

    def __init__(self, session: SaveState) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._pending: PendingSave | None = None
        self._group: dist.ProcessGroup | None = None

    def group(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks for saves in the background. Collective at the first call."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group

    def raise_missed(self) -> None:
        """Raise the failure of the last save, once, unless the script has seen it."""
        with self._lock:
            pending = self._pending
            if pending is None or not pending.done():
                return
            self._pending = None
            was_seen, error = pending.was_seen, pending.exception()
        if error is not None:
            self._session.background_saves.pop_missed()  # the next save does not report it again
            if not was_seen:
                raise error

    def save(
        self,
        state: dict[str, Any],
        step: int,
        stream: str,
        planner: SavePlanner | None,
        process_group: dist.ProcessGroup | None,
        executor: str,
        tags: Mapping[str, str] | None = None,
    ) -> PendingSave:
        """See ``Engine.async_save``. Collective."""
        session = self._session
        ranks = session.ranks.of(process_group)

        def ready() -> Writer:
            if executor not in _TYPES:
                raise UsageError(f"executor is {executor!r}: write 'thread' or 'process'")
            if executor == "process" and ranks.alone:
                raise UsageError(
                    "executor='process' needs a process group, as DCP's processes form one of "
                    "the same ranks: call torch.distributed.init_process_group(...) before "
                    "Engine.open, also for a single rank, or write executor='thread'"
                )
            members = session.ranks.members(process_group or range(ranks.world_size))
            writer = Writer(session, step, stream, members, tags)
            session.background_saves.wait_idle(session.config.save.wait_timeout_s)
            self.raise_missed()
            return writer

        writer = ranks.run(ready)
        writer.objects = state
        pending = PendingSave(session.background_saves, writer)
        future = state_dict_saver.async_save(
            {},  # DCP calls state_dict() where a failure leaves the other ranks waiting
            storage_writer=writer,
            planner=planner,
            process_group=process_group or self.group(),
            async_checkpointer_type=_TYPES[executor],
        )
        assert isinstance(future, Future)
        with self._lock:
            self._pending = pending
        future.add_done_callback(pending.end_as)
        return pending
