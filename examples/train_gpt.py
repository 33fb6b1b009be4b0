"""Train a small GPT on the Python standard library's own sources, checkpointed by tieredckpt.

Two ranks on CPU, sharded by FSDP2 (a CUDA device per rank is used where there is one):

    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py --config tieredckpt.yaml

One rank, no torchrun:

    python examples/train_gpt.py --config tieredckpt.yaml

Kill it at any moment and start it again: it goes on from the newest recoverable checkpoint, and
every loss that it then writes is, bit for bit, the loss of a run that was never interrupted.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

import tieredckpt

VOCABULARY = 256
"""Bytes are the tokens."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of the model and of a batch."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    dropout: float = 0.1


# --- model --------------------------------------------------------------------------------------


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the feed-forward part, each added to its input."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        fed: Tensor = self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return x + fed


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of ``targets`` in nats per byte."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- data ---------------------------------------------------------------------------------------


def standard_library_text(limit_bytes: int = 8 << 20) -> Tensor:
    """The standard library's sources, in a fixed order, as a tensor of bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    parts, size = [], 0
    for path in sorted(folder.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(folder).parts):
            parts.append(path.read_bytes())
            size += len(parts[-1])
            if size >= limit_bytes:
                break
    return torch.frombuffer(bytearray(b"".join(parts)[:limit_bytes]), dtype=torch.uint8)


class Loader:
    """Endless batches: each epoch is a new permutation of all windows, dealt out to the ranks.

    Its position counts windows of all ranks together, so it means the same for any number of ranks.
    """

    def __init__(self, text: Tensor, shape: Shape, *, seed: int, rank: int, ranks: int) -> None:
        self.text, self.shape, self.seed = text, shape, seed
        self.rank, self.ranks = rank, ranks
        self.windows = (len(text) - 1) // shape.context
        self.epoch = 0
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.epoch, self.position = state["epoch"], state["position"]

    @functools.lru_cache(maxsize=1)  # noqa: B019 - one loader per process, one epoch at a time
    def _order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.windows, generator=generator)

    def next(self) -> tuple[Tensor, Tensor]:
        """This rank's share of the next global batch: tokens and the bytes that follow them."""
        context, batch = self.shape.context, self.shape.batch
        if self.position + batch * self.ranks > self.windows:
            self.epoch, self.position = self.epoch + 1, 0
        first = self.position + self.rank * batch
        starts = self._order(self.epoch)[first : first + batch] * context
        rows = torch.stack([self.text[s : s + context + 1] for s in starts.tolist()]).long()
        self.position += batch * self.ranks
        return rows[:, :-1], rows[:, 1:]


# --- what is checkpointed -----------------------------------------------------------------------


class Learner(Stateful):
    """Model and optimizer, named by parameter, so that any number of ranks can load them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """DCP's form of both."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put both back."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class RandomState(Stateful):
    """The generators that dropout draws from, of one rank."""

    def state_dict(self) -> dict[str, Any]:
        """All of them, as tensors."""
        state = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put them back."""
        torch.set_rng_state(state["cpu"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


# --- training -----------------------------------------------------------------------------------


def learning_rate(step: int, *, warmup: int, total: int) -> float:
    """Linear warm-up, then a cosine down to a tenth; a factor of the peak."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


class Run:
    """One process of a training run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank, self.ranks = (
            int(os.environ.get("RANK", "0")),
            int(os.environ.get("WORLD_SIZE", "1")),
        )
        cuda = torch.cuda.is_available()
        self.device = (
            torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            if cuda
            else torch.device("cpu")
        )
        if cuda:
            torch.cuda.set_device(self.device)
        if "RANK" in os.environ:
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        shape = Shape(
            layers=args.layers,
            width=args.width,
            heads=args.heads,
            context=args.context,
            batch=args.batch,
        )
        torch.manual_seed(args.seed)  # the same weights on every rank, then sharded
        self.model = GPT(shape).to(self.device)
        if dist.is_initialized():
            for block in self.model.blocks:
                fully_shard(block, reshard_after_forward=False)
            fully_shard(self.model, reshard_after_forward=False)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=args.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
        )
        rate = functools.partial(learning_rate, warmup=args.warmup, total=args.steps)
        self.schedule = LambdaLR(self.optimizer, rate)
        self.loader = Loader(
            standard_library_text(), shape, seed=args.seed, rank=self.rank, ranks=self.ranks
        )
        torch.manual_seed(args.seed + 1 + self.rank)  # every rank drops other units

    def state(self, saved_ranks: int | None = None) -> dict[str, Any]:
        """What a checkpoint holds, or what to load from one that ``saved_ranks`` ranks saved.

        Equal keys of several ranks would be saved once, so what is each rank's own has the rank in
        its key. A rank that did not exist then takes rank 0's position, which counts all ranks'
        windows, and keeps its own fresh random state.
        """
        same = saved_ranks in (None, self.ranks)
        owner = self.rank if same or self.rank < (saved_ranks or 0) else 0
        state = {
            "learner": Learner(self.model, self.optimizer),
            "schedule": self.schedule,
            f"loader/rank{owner}": self.loader,
        }
        if same:
            state[f"random/rank{self.rank}"] = RandomState()
        return state

    def resume(self, engine: tieredckpt.Engine) -> int | None:
        """Load the newest recoverable checkpoint, whatever number of ranks saved it."""
        newest = engine.latest()
        saved_ranks = newest.world_size if newest is not None else self.ranks
        # With another number of ranks some ranks' own keys are left over, and that is right.
        return engine.load(self.state(saved_ranks), strict=saved_ranks == self.ranks)

    def totals(self, report: tieredckpt.RestoreReport | None) -> dict[str, Any]:
        """A restore's figures, summed over all ranks; the time is the slowest one's."""
        reports = [report] * self.ranks
        if dist.is_initialized():
            dist.all_gather_object(reports, report)
        tiers: dict[str, int] = {}
        places: dict[str, int] = {}
        for each in filter(None, reports):
            for counts, total in ((each.bytes_by_tier, tiers), (each.bytes_by_source, places)):
                for name, count in counts.items():
                    total[name] = total.get(name, 0) + count
        return {
            "bytes_by_tier": tiers,
            "bytes_by_source": places,
            "segments": [
                {"id": segment, "reader": rank, "bytes_by_source": sources}
                for rank, each in enumerate(reports)
                for segment, sources in (each.segments if each is not None else ())
            ],
            "repaired_blocks": sum(each.repaired_blocks for each in filter(None, reports)),
            "seconds": max((each.seconds for each in filter(None, reports)), default=0.0),
        }

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def step(self) -> float:
        """One step of training; the mean loss over all ranks, the same number on each."""
        self.model.train()
        tokens, targets = (part.to(self.device) for part in self.loader.next())
        loss = self.model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return float(total.item()) / self.ranks


class Journal:
    """What happened, one JSON object per line, written by rank 0; nothing on the others."""

    def __init__(self, path: Path | None, rank: int) -> None:
        self.file: TextIO | None = None
        if path is not None and rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("a", buffering=1)  # a line is out before the next step begins

    def write(self, event: str, **facts: Any) -> None:
        """Append one event; ``at_s`` is the wall clock, for plots only."""
        if self.file is not None:
            self.file.write(json.dumps({"event": event, "at_s": time.time(), **facts}) + "\n")


@contextmanager
def progress_bar(run: Run, start: int, total: int) -> Iterator[Any]:
    """A bar on rank 0's terminal; a callable that takes the step and the loss."""
    if run.rank != 0 or not sys.stderr.isatty():
        yield lambda step, loss: None
        return
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, completed=start)
        yield lambda step, loss: bar.update(task, completed=step, description=f"loss {loss:.4f}")


def train(run: Run, args: argparse.Namespace) -> None:
    """Load, then train and save to the end."""
    journal = Journal(args.journal, run.rank)
    state = run.state()
    run.say(f"{run.parameters / 1e6:.1f} million parameters on {run.ranks} ranks")
    with tieredckpt.Engine.open(args.config) as engine:
        restored = run.resume(engine)
        report = run.totals(engine.last_restore)
        journal.write("start", step=restored, ranks=run.ranks, **report)
        if restored is None:
            run.say("no checkpoint: a new run")
        else:
            tiers = ", ".join(
                f"{n / 2**20:.0f} MiB from {t}" for t, n in report["bytes_by_tier"].items()
            )
            run.say(f"recovered step {restored} in {report['seconds']:.2f} s: {tiers}")
        with progress_bar(run, restored or 0, args.steps) as show:
            for step in range((restored or 0) + 1, args.steps + 1):
                loss = run.step()
                journal.write("step", step=step, loss=loss.hex(), loss_approx=round(loss, 4))
                show(step, loss)
                if step % args.save_every == 0:
                    began_s = time.perf_counter()
                    dcp.save(state, storage_writer=engine.writer(step))
                    stall_s = time.perf_counter() - began_s
                    assert engine.last_save is not None
                    writer_s = engine.last_save.stall_s
                    journal.write("save", step=step, stall_s=stall_s, writer_s=writer_s)
    journal.write("end", step=args.steps)


def parse() -> argparse.Namespace:
    """Command line; the defaults train 4.9 million parameters in a fifth of a second per step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", help="tieredckpt's YAML file")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--journal", type=Path, help="append events to this file, as JSON lines")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=20, metavar="STEPS")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2, help="windows per rank and step")
    return parser.parse_args()


def main() -> None:
    """Entry point of every rank."""
    args = parse()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    run = Run(args)
    train(run, args)
    if dist.is_initialized():
        # Without it gloo's threads abort a rank whose peer has left already (torch 2.13).
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
