"""torchtitan's checkpoint manager, saving into tieredckpt and loading from it.

torchtitan builds its manager from a ``Config`` and lets a subclass replace the methods that save
and load, so nothing is patched. Saves into the engine make no ``step-N`` folder, so that a scan of
the folder for ``.metadata`` finds none of them.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

from tieredckpt.dcp.state.planner import SafeLoadPlanner
from tieredckpt.engine import Engine
from tieredckpt.errors import NotFoundError, UsageError

try:
    from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager
    from torchtitan.tools.utils import GarbageCollection
except ImportError as error:
    raise ImportError(
        "tieredckpt.integrations.torchtitan needs torchtitan 0.3 or newer, which cannot be "
        f"imported: {error}"
    ) from error

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

log = logging.getLogger(__name__)


class TieredCheckpointManager(CheckpointManager):
    """torchtitan's ``CheckpointManager`` on tieredckpt: pass its ``Config`` as ``checkpoint``.

    The engine's stream is the last component of the folder, as in the ``checkpoint_id``
    ``outputs/checkpoint/step-100``: by default ``checkpoint``. torchtitan itself handles Hugging
    Face exports and imports, and ``initial_load_path``.

    Args:
        config: torchtitan's settings, and those of :class:`Config`. ``keep_latest_k`` is not used.
        parts: The arguments that torchtitan's trainer passes to its manager.

    Raises:
        UsageError: A setting is not supported; the message names the supported ones.
        ConfigError, AgentError: As ``Engine.open``, which this calls on all ranks.
    """

    engine: Engine

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's settings, and those of tieredckpt."""

        tieredckpt: str = "tieredckpt.yaml"
        """Path of tieredckpt's YAML file."""

        unsafe_pickle: bool = False
        """Allow a load to unpickle anything that a checkpoint contains."""

        abandon_newer: bool = False
        """After checkpoint.load_step, saves may abandon checkpoints newer than that step."""

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        if not self.enable:
            return
        if self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            raise UsageError(
                "checkpoint.async_mode 'async_with_pinned_mem' copies the state into memory that "
                "tieredckpt does not use: choose 'disabled' (one memory copy) or 'async'"
            )
        self.engine = Engine.open(config.tieredckpt, unsafe_pickle=config.unsafe_pickle)
        self._unsafe_pickle = config.unsafe_pickle
        self._abandon_newer = config.abandon_newer
        if self.keep_latest_k:
            log.info(
                "checkpoint.keep_latest_k=%d is not used: memory.keep and tiers[].keep in %s "
                "decide which checkpoints are kept",
                self.keep_latest_k,
                config.tieredckpt,
            )

    # --- saving ----------------------------------------------------------------------------------

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | AsyncSaveResponse | None:
        """Save into the engine; torchtitan writes a Hugging Face export to the folder."""
        saving: Future[Any] | AsyncSaveResponse | None = None
        if to_hf:
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, checkpoint_id=checkpoint_id, storage_writer=self.engine.writer())
        else:
            saving = dcp.async_save(
                state_dict,
                checkpoint_id=checkpoint_id,
                storage_writer=self.engine.writer(),
                process_group=self.pg,
            )
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saving

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        # A skipped save (save.on_error) was not written, which the coordinator knows.
        before = self.engine.last_save
        written = bool(super()._save(curr_step, last_step))
        if not written or self.async_mode != AsyncMode.DISABLED:
            return written

        def was_written() -> bool:
            last = self.engine.last_save  # the same as before: a Hugging Face export
            return last is None or last is before or last.skipped is None

        return self.engine._session.ranks.from_coordinator(was_written)

    def _should_purge(self) -> bool:
        # The folder contains exports and torchtitan's own checkpoints alone.
        return False

    # --- loading ---------------------------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        wanted = None if step == -1 else step
        if wanted is None:
            newest = self.engine.latest(_stream_of(self.folder))
            model_only = newest is not None and newest.step == 0
        else:
            model_only = step == 0  # torchtitan's seed checkpoint
        states = self._states_to_load(model_only)
        try:
            loaded = self._restore(states, self.folder, wanted)
        except NotFoundError as error:
            error.add_note(
                "(checkpoint.load_step is a step that tieredckpt holds; to continue from a "
                "checkpoint that torchtitan wrote itself, set checkpoint.initial_load_path)"
            )
            raise
        if loaded is None:
            return self._load_without_engine()
        self.states[MODEL].load_state_dict(states)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        log.info("restored step %d from tieredckpt", loaded)
        return True

    def _restore(self, states: dict[str, Any], folder: str, step: int | None) -> int | None:
        # As in torchtitan, the checkpoint must contain all keys of the state, and may contain more,
        # since keys may be excluded from loading. The engine warns of these.
        planner = SafeLoadPlanner(unsafe_pickle=self._unsafe_pickle)
        return self.engine.load(
            states, step=step, stream=_stream_of(folder), strict=False, planner=planner,
            abandon_newer=self._abandon_newer,
        )  # fmt: skip

    def _load_without_engine(self) -> bool:
        """Load torchtitan's own last checkpoint, or the initial weights."""
        if self._find_load_step() != -1:
            log.warning(
                "tieredckpt holds no checkpoint of stream %r: continuing from one that torchtitan "
                "wrote to %s",
                _stream_of(self.folder),
                self.folder,
            )
        return bool(CheckpointManager._load(self, -1))

    def _close(self) -> None:
        if not hasattr(self, "engine"):
            return  # closed while it is being made
        try:
            self.maybe_wait_for_saving()
        finally:
            super()._close()
            self.engine.close()


def _stream_of(folder: str) -> str:
    return os.path.basename(os.path.abspath(folder))
