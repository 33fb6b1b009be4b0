"""The GPT of ``train_gpt.py`` with live recovery: HSDP on CPU, ranks that fail are replaced.

    tieredckpt run --nproc-per-node 4 --standby 1 examples/train_live.py --config tieredckpt.yaml

What differs from a script for torchrun: ``live.run``, ``world.init_process_group``, ``world.load``,
``world.steps`` and ``with world.update(step)``.
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from train_gpt import GPT, Journal, Learner, Loader, Shape, learning_rate, standard_library_text

from tieredckpt import live


def train(world: live.World, args: argparse.Namespace) -> None:
    """Called once per generation, in the same process."""
    world.init_process_group("gloo")
    shards = 2 if world.size % 2 == 0 else 1
    mesh = init_device_mesh(
        "cpu", (world.size // shards, shards), mesh_dim_names=("replicate", "shard")
    )
    torch.manual_seed(args.seed)
    shape = Shape(layers=4, width=128, heads=4, context=64, batch=2)
    model = GPT(shape)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = LambdaLR(optimizer, functools.partial(learning_rate, warmup=10, total=args.steps))
    loader = Loader(
        standard_library_text(1 << 20), shape, seed=args.seed, rank=world.rank, ranks=world.size
    )
    state = {"learner": Learner(model, optimizer), "schedule": schedule, "loader": loader}
    world.load(state)
    journal = Journal(args.journal, world.rank)
    for step in world.steps(args.steps):
        tokens, targets = loader.next()
        loss = model(tokens, targets)
        fault(args, step, world.rank)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # it communicates: before the update
        total = loss.detach().clone()
        dist.all_reduce(total)
        with world.update(step):
            optimizer.step()
            schedule.step()
        optimizer.zero_grad(set_to_none=True)
        mean = float(total) / world.size
        journal.write("step", step=step, loss=mean.hex(), loss_approx=round(mean, 4))
        if step % args.save_every == 0:
            dcp.save(state, storage_writer=world.engine.writer(step))


def fault(args: argparse.Namespace, step: int, rank: int) -> None:
    """The faults that the demo orders, once each."""
    for each in args.fault:
        at, who, kind = each.split(":")
        if (int(at), int(who)) != (step, rank):
            continue
        with contextlib.suppress(FileExistsError):
            os.close(os.open(args.journal.parent / f"did-{each}", os.O_CREAT | os.O_EXCL))
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "hang":
                signal.pause()
            raise MemoryError("a fault that the demo ordered")


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
        "--fault", action="append", default=[], metavar="STEP:RANK:KIND",
        help="kill, raise or hang, once (with --journal)",
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
