"""The GPT of ``train_gpt.py`` on a number of ranks that changes while it trains.

    tieredckpt run --nproc-per-node 4 examples/train_elastic.py --config tieredckpt.yaml
    tieredckpt live resize 2        # in another terminal

What differs from ``train_live.py``: the batch is one of all ranks together, ``world.share`` has the
rows of each, and ``live.rows`` those of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from train_gpt import GPT, Journal, Learner, Shape, learning_rate, standard_library_text

from tieredckpt import live

BATCH = 10
"""Windows of one update of all ranks; four ranks do not divide it evenly."""


class Windows:
    """Pieces of the text; each epoch is another permutation of them."""

    def __init__(self, text: Tensor, context: int, seed: int) -> None:
        self._text, self._context, self._seed = text, context, seed
        self._count = (len(text) - 1) // context

    @functools.lru_cache(maxsize=2)  # noqa: B019 - one object per process
    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return [int(each) for each in torch.randperm(self._count, generator=generator)]

    def ids(self, rows: range) -> list[int]:
        """The windows at these rows of the run's order."""
        places = [divmod(row, self._count) for row in rows]
        return [self._order(epoch)[place] for epoch, place in places]

    def batch(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Tokens, and the bytes that follow them."""
        starts = [each * self._context for each in ids]
        rows = torch.stack([self._text[s : s + self._context + 1] for s in starts]).long()
        return rows[:, :-1], rows[:, 1:]


def train(world: live.World, args: argparse.Namespace) -> None:
    """Called once per generation, in the same process."""
    die_once(args, f"enter-{world.generation}-{world.rank}")
    world.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world.size,))
    torch.manual_seed(args.seed)
    shape = Shape(layers=4, width=128, heads=4, context=64, batch=BATCH, dropout=0.0)
    model = GPT(shape)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = LambdaLR(optimizer, functools.partial(learning_rate, warmup=10, total=args.steps))
    windows = Windows(standard_library_text(1 << 20), shape.context, args.seed)
    state = {"learner": Learner(model, optimizer), "schedule": schedule}
    world.load(state)
    restored = world.restored
    journal = Journal(args.journal, world.rank)
    if restored is not None:
        journal.write("world", size=world.size, step=restored.step, source=dict(restored.source))
    share = world.share(BATCH, micro=2)
    for step in world.steps(args.steps):
        rows = live.rows(step, BATCH)
        mean, seen = torch.zeros(()), list[int]()
        for part in share.parts:
            ids = windows.ids(rows[part.start : part.stop])
            loss = model(*windows.batch(ids)) * part.weight
            loss.backward()
            mean += loss.detach() / world.size
            seen += ids
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # it communicates: before the update
        dist.all_reduce(mean)
        of_all: list[Any] = [None] * world.size
        dist.all_gather_object(of_all, seen)
        with world.update(step):
            optimizer.step()
            schedule.step()
        optimizer.zero_grad(set_to_none=True)
        ids = [each for of_one in of_all for each in of_one]
        value = float(mean)
        journal.write(
            "step", step=step, loss=value.hex(), loss_approx=round(value, 4), ids=ids,
            size=world.size,
        )  # fmt: skip
        if step % args.save_every == 0:
            dcp.save(state, storage_writer=world.engine.writer(step))


def die_once(args: argparse.Namespace, name: str) -> None:
    """The deaths that the demo orders."""
    if name in args.die:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(args.journal.parent / f"did-{name}", os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", help="tieredckpt's YAML file")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--journal", type=Path, help="append events to this file, as JSON lines")
    parser.add_argument(
        "--die", action="append", default=[], metavar="enter-GENERATION-RANK",
        help="be killed there, once (with --journal)",
    )  # fmt: skip
    return parser.parse_args()


def main() -> Any:
    """Entry point of every process: everything before live.run is done by standbys, too."""
    args = parse()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    return live.run(lambda world: train(world, args), args.config)


if __name__ == "__main__":
    main()
