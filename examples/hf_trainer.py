"""Hugging Face's Trainer, checkpointed by tieredckpt: docs/use/frameworks.md.

    python examples/hf_trainer.py --config tieredckpt.yaml
    torchrun --standalone --nproc-per-node=2 examples/hf_trainer.py

Kill it at any moment and start it again: it continues from its last save, within an epoch too, and
its losses are those of a run that was not interrupted. `Files` and `TieredTrainer` may be copied.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import broadcast_object_list
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import tieredckpt


class Files:
    """The small files of a Trainer's checkpoint: trainer state, schedule, scaler, random states.

    "random" is no file. It has the random states from before the batch that the loader has drawn in
    advance, and those of the save.
    """

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = state


class TieredTrainer(Trainer):  # type: ignore[misc]  # transformers is not type-checked here
    """``Trainer`` on CPUs or GPUs, alone or with DDP, whose checkpoints are tieredckpt's.

    Model and optimizer are saved as tensors. The rest is small, and is what Trainer writes to a
    temporary folder at a save and reads from one when it continues. ``memory.keep`` decides what
    is kept, not ``save_total_limit``.
    """

    engine: tieredckpt.Engine
    """Set it before ``train``; opened after the ``TrainingArguments`` were made."""
    _before: dict[str, Any] | None = None
    """The random states from before the last batch that was drawn."""
    _replay: list[dict[str, Any]] | None = None
    """The random states to set before each of the next batches; empty: all of them are set."""

    def train(self) -> Any:
        """Train, from the newest checkpoint that can be recovered."""
        args = self.args
        other = args.load_best_model_at_end or args.save_only_model or args.auto_find_batch_size
        if other or args.push_to_hub or self.model_init or args.n_gpu > 1:
            raise ValueError("an option of this Trainer needs checkpoints in folders")
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError("this Trainer is for one process or DDP")
        self.create_optimizer()
        state = self._state(files := Files())
        with tempfile.TemporaryDirectory(prefix="tieredckpt-") as folder:
            self._folder = Path(folder)
            if self.engine.load(state) is None:
                return super().train()
            self._replay = files.content.pop("random", None)
            start = self._folder / "start"
            start.mkdir()
            for name, content in files.content.items():
                (start / Path(name).name).write_bytes(content)
            return super().train(resume_from_checkpoint=str(start))

    def _state(self, files: Files) -> dict[str, Any]:
        return {"train": self, "files": tieredckpt.per_rank(files)}

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer; not asked for, and so no optimizer filled, without a checkpoint."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        # Without its param_groups, which get further keys when the schedule is made.
        return {"model": model, "optimizer": optimizer["state"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what was loaded until Trainer asks for it."""
        self.loaded = state

    # --- what Trainer calls to save --------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model into a folder, if that is not part of a checkpoint."""
        if output_dir is None or not _internal_call:
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        groups = get_state_dict(self.model, self.optimizer)[1]["param_groups"]
        torch.save((groups, self.lr_scheduler.state_dict()), Path(output_dir, "scheduler.pt"))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        folder = self._folder / f"checkpoint-{step}"
        super()._save_checkpoint(model, trial)
        files = Files()
        files.content = {path.name: path.read_bytes() for path in folder.iterdir()}
        # Only rank 0 writes the trainer's state, and each rank its random states.
        files.content = broadcast_object_list([files.content])[0] | files.content
        if self._before is not None:
            files.content["random"] = [self._before, tieredckpt.RandomState().state_dict()]
        shutil.rmtree(folder)
        dcp.save(self._state(files), storage_writer=self.engine.writer(step))

    # --- random numbers of the data set and of the collator ---------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return Trainer's loader. Its data set notes the random states from before each batch.

        The loader draws one batch in advance. So the batch after a save is drawn again when
        training continues, from the states that it was drawn from, and the next one from those of
        the save. Loader workers have generators of their own, which are not restored.
        """
        loader = super().get_train_dataloader()
        data = loader.dataset
        generators = tieredckpt.RandomState(cuda=torch.cuda.is_available())

        def draw(indices: list[int]) -> Any:
            if self._replay:
                generators.load_state_dict(self._replay.pop(0))
            self._before = generators.state_dict()
            if hasattr(type(data), "__getitems__"):
                return type(data).__getitems__(data, indices)
            return [data[index] for index in indices]

        other = isinstance(data, IterableDataset) or data is self.eval_dataset
        if not loader.num_workers and not other and hasattr(data, "__dict__"):
            data.__getitems__ = draw  # which a loader calls for each of its batches
        return loader

    def _load_rng_state(self, checkpoint: str | None) -> None:
        generators = tieredckpt.RandomState()
        drawn = generators.state_dict() if self._replay == [] else None
        self._replay = None
        super()._load_rng_state(checkpoint)
        if drawn is not None:  # the batch after the next is drawn, too
            generators.load_state_dict(drawn)

    # --- what Trainer calls to continue ----------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        pass  # with the optimizer, below

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        groups, schedule = torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True)
        # After the schedule was made, which sets the learning rate of its first step.
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=self.loaded["model"],
            optim_state_dict={"state": self.loaded["optimizer"], "param_groups": groups},
        )
        self.lr_scheduler.load_state_dict(schedule)


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of numbers that count up, each from a start that is drawn when the row is read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = random.randrange(4) + int(np.random.randint(4)) + int(torch.randint(4, ()))
        row = (torch.arange(32) + index + drawn) % 64
        return {"input_ids": row, "labels": row}


class Report(TrainerCallback):  # type: ignore[misc]
    """Prints the loss and the learning rate of each step."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **options: Any
    ) -> None:
        logs = options["logs"]
        if "loss" in logs and state.is_world_process_zero:
            rate = logs["learning_rate"]
            print(f"step {state.global_step} loss {logs['loss']!r} rate {rate!r}", flush=True)


def main() -> None:
    """Train a small language model with random weights, on the CPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="tieredckpt.yaml")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--every", type=int, default=5, help="steps from one save to the next")
    args = parser.parse_args()

    options = TrainingArguments(
        output_dir="trainer",  # where save_model() writes: no checkpoint
        num_train_epochs=args.epochs,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        save_steps=args.every,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    trainer = TieredTrainer(model, options, train_dataset=Rows(), callbacks=[Report()])
    trainer.remove_callback(PrinterCallback)
    with tieredckpt.Engine.open(args.config) as trainer.engine:
        trainer.train()


if __name__ == "__main__":
    main()
