"""PyTorch Lightning's ``ModelParallelStrategy``, saving into tieredckpt and loading from it.

Lightning's strategies save and load checkpoints, so this is a subclass and patches nothing. Model,
optimizers and the contents of Lightning's ``meta.pt`` (loops, callbacks, schedulers,
hyper-parameters) are one checkpoint with one commit. No file is written; the folder that would
contain it is made, as ``ModelCheckpoint`` puts its links there.
"""

from __future__ import annotations

import io
import os
import re
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tieredckpt.dcp.state.checkpoint_id import DEFAULT_STREAM
from tieredckpt.dcp.state.planner import SafeLoadPlanner, safe_loads
from tieredckpt.dcp.state.value_archive import BadValueError
from tieredckpt.dcp.state.values import rebuild
from tieredckpt.engine import Engine
from tieredckpt.errors import UsageError

try:
    import lightning.pytorch as pl
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError(
        "tieredckpt.integrations.lightning needs lightning 2.6 or newer, which cannot be "
        f"imported: {error}"
    ) from error

NEWEST = "tieredckpt:newest"
"""As ``ckpt_path``: the newest recoverable checkpoint. A fit without any starts from scratch."""

_STEP = re.compile(r"(?<![A-Za-z0-9_])step[=_-]([0-9]{1,18})(?!\.?[0-9])", re.ASCII)
_META = "lightning"


class TieredModelParallelStrategy(ModelParallelStrategy):
    """``ModelParallelStrategy`` whose checkpoints are tieredckpt's.

    The engine opens when the trainer sets up the strategy. It closes with :meth:`close` or with the
    process, so that ``trainer.save_checkpoint`` works after ``fit``, too.

    Args:
        config: As for ``Engine.open``: a YAML file, the same as a dict, or None.
        stream: The sequence of checkpoints. Checkpoints without optimizers (``save_weights_only``)
            are saved in ``<stream>-weights``, as training cannot continue from them.
        unsafe_pickle: Allow DCP's values and Lightning's own state to unpickle to anything.
        credentials: As for ``Engine.open``.
        abandon_newer: After a fit from an older step, saves may abandon newer checkpoints.
        options: Options of ``ModelParallelStrategy``.

    Raises:
        UsageError: ``save_distributed_checkpoint`` is off.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        stream: str = DEFAULT_STREAM,
        unsafe_pickle: bool = False,
        credentials: object = None,
        abandon_newer: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not self._save_distributed_checkpoint:
            raise UsageError(
                "save_distributed_checkpoint=False collects the state on one rank, and tieredckpt "
                "saves each rank's shards: set it to True"
            )
        self._config = config
        self._stream = stream
        self._unsafe_pickle = unsafe_pickle
        self._credentials = credentials
        self._abandon_newer = abandon_newer
        self._engine: Engine | None = None
        self._saved: dict[str, tuple[int, str]] = {}
        self._checked = False

    @property
    def engine(self) -> Engine:
        """The open engine. Raises UsageError before the trainer has set the strategy up."""
        if self._engine is None:
            raise UsageError("the engine is not open: it opens when the trainer runs")
        return self._engine

    def setup_environment(self) -> None:
        """Set up the environment, then open the engine. Collective."""
        super().setup_environment()
        if self._engine is None:
            self._engine = Engine.open(
                self._config, unsafe_pickle=self._unsafe_pickle, credentials=self._credentials
            )
            weakref.finalize(self, self._engine.close, flush=False)

    def teardown(self) -> None:
        """Tear down; at the end of a fit, bring the newest checkpoint to the tiers before."""
        module = self.lightning_module
        fitting = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        if self._engine is not None and fitting:
            self._engine.finish()
        super().teardown()

    def close(self) -> None:
        """Close the engine. Idempotent; the next run of a trainer opens it again."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    # --- saving ----------------------------------------------------------------------------------

    # Lightning's methods copy the state to the CPU first; the writer copies it anyway.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's shards, not copied."""
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's shards, not copied."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return get_optimizer_state_dict(self.model, optimizer)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Save as step ``global_step``; ``filepath`` is only a name for it. Collective.

        Raises:
            TypeError: ``storage_options`` are given, which are not supported.
            CheckpointException: As ``dcp.save``.
        """
        if storage_options is not None:
            raise TypeError("storage_options are not supported: set tiers in tieredckpt.yaml")
        path = os.fspath(self.broadcast(filepath))
        step = int(checkpoint["global_step"])
        full = "optimizer_states" in checkpoint
        state = {"state_dict": checkpoint.pop("state_dict")}
        for number, optimizer in enumerate(checkpoint.pop("optimizer_states", [])):
            state[f"optimizer_{number}"] = optimizer
        # Rank 0's, as in Lightning. DCP may store any rank's, so all ranks get the same.
        state[_META] = self.engine._session.ranks.from_coordinator(
            lambda: self._dump(checkpoint, path)
        )
        stream = self._stream if full else f"{self._stream}-weights"
        dcp.save(state, storage_writer=self.engine.writer(step, stream))
        self._saved[path] = (step, stream)

    def _dump(self, checkpoint: dict[str, Any], path: str) -> bytes:
        # Where ModelCheckpoint makes its links (save_last="link"): failing there, on rank 0 alone,
        # would leave the other ranks in a barrier.
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        if not (self._unsafe_pickle or self._checked):
            # A warning at the first save is better than an error at the first restart.
            self._checked = True
            try:
                rebuild(buffer.getbuffer())
            except BadValueError as error:
                warnings.warn(
                    "Lightning's state other than model and optimizers (hyper-parameters, "
                    "callbacks, on_save_checkpoint) will not load again by default: save plain "
                    "values, or give the strategy unsafe_pickle=True if you trust the writer of "
                    f"the checkpoint: {error}",
                    stacklevel=2,
                )
        return buffer.getvalue()

    # --- loading ---------------------------------------------------------------------------------

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load :data:`NEWEST`, or a checkpoint by the path that it was saved to. Collective.

        Lightning loads a path that exists. A fit continues from the loaded checkpoint
        (``Engine.load``); other uses only read it.

        Raises:
            UsageError: ``checkpoint_path`` does not determine a step.
            NoRecoverableCheckpointError, NotFoundError, CheckpointException: As ``Engine.load``.
        """
        path = os.fspath(self.broadcast(checkpoint_path))
        if path != NEWEST and self.broadcast(Path(path).exists()):
            return super().load_checkpoint(path, weights_only)
        step, stream = self._named(path)
        trainer = self.lightning_module.trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        optimizers = {f"optimizer_{n}": each for n, each in enumerate(self.optimizers) if fitting}
        state: dict[str, Any] = {"state_dict": get_model_state_dict(self.model), _META: b""}
        for key, optimizer in optimizers.items():
            state[key] = get_optimizer_state_dict(self.model, optimizer)
        strict = self.lightning_module.strict_loading
        if not fitting:
            planner = SafeLoadPlanner(
                unsafe_pickle=self._unsafe_pickle, allow_partial_load=not strict
            )
            dcp.load(state, storage_reader=self.engine.reader(step, stream), planner=planner)
        elif self.engine.load(
            state, step=step, stream=stream, strict=strict, abandon_newer=self._abandon_newer
        ) is None:  # fmt: skip
            trainer.ckpt_path = None  # or Lightning reports that it has restored something
            return _Nothing({"pytorch-lightning_version": pl.__version__})
        self.model.load_state_dict(state["state_dict"], strict=strict)
        for key, optimizer in optimizers.items():
            set_optimizer_state_dict(
                self.model,
                optimizer,
                optim_state_dict=state[key],
                options=StateDictOptions(cpu_offload=True),
            )
        meta = io.BytesIO(state[_META])
        unsafe = self._unsafe_pickle if weights_only is None else not weights_only
        kept: dict[str, Any] = safe_loads("Lightning's state", meta, unsafe_pickle=unsafe)
        return kept

    def _named(self, path: str) -> tuple[int | None, str]:
        """Step (None: the newest) and stream that ``path`` names."""
        if path == NEWEST:
            return None, self._stream
        if path in self._saved:
            return self._saved[path]
        steps = set(_STEP.findall(os.path.basename(path)))
        if len(steps) != 1:
            raise UsageError(
                f"ckpt_path {path!r} does not exist and names no step: use {NEWEST!r} for the "
                "newest checkpoint, or a name that contains the step, like 'epoch=1-step=100.ckpt'"
            )
        return int(steps.pop()), self._stream


class _Nothing(dict[str, Any]):
    """A checkpoint that restores nothing: false, so that Lightning skips it, but with a version."""

    def __bool__(self) -> bool:
        return False
