"""The training of all runs: HSDP over gloo, under ``tieredckpt run`` or torchrun.

The same loop with four ways to survive: live recovery, ``engine.load`` after a restart, stock DCP
on a disk after a restart, or none. Each rank appends what it does to one journal, with the time of
day, so that the benchmark can compare processes. Faults happen once each, whatever process meets
them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tieredckpt import Engine, live

if TYPE_CHECKING:
    from tieredckpt.live.world import World as LiveWorld

    World: TypeAlias = "LiveWorld | Launched"

WIDTH = 64
ROWS = 1000
BATCH = 16
TIMEOUT = timedelta(minutes=5)
STARTED_LIMIT_S = 120.0
SAMPLED_UPDATE = 2
"""Update of each generation after which a process counts its descriptors, threads and memory."""


class Block(nn.Module):
    """At the top of the module: compiled code of it outlives a generation."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.norm = nn.BatchNorm1d(4 * WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The rank is a constant in compiled code: code of another rank would show.
        x = x + 0.01 * dist.get_rank()
        found: torch.Tensor = self.down(self.dropout(torch.relu(self.norm(self.up(x)))))
        return found


class Loader:
    """Its state is a count, the same on all ranks; fetching a batch changes it."""

    def __init__(self, rank: int, size: int) -> None:
        self._share = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        self._rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        self._position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and rows of this rank's share."""
        first = self._position * BATCH
        self._position += 1
        ids = (torch.arange(first, first + BATCH) * 7 % ROWS)[self._share]
        return ids, self._rows[ids]


class Learner:
    """Model and optimizer, as one part of the state."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class Journal:
    """JSON lines of all ranks in one file."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, kind: str, world: World, **fields: Any) -> None:
        line = {
            "kind": kind,
            "at": time.time(),
            "pid": os.getpid(),
            "rank": world.rank,
            "generation": world.generation,
            **fields,
        }
        os.write(self._fd, json.dumps(line).encode() + b"\n")


class Launched:
    """What the loop needs of a world, without live recovery: one start by torchrun."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self.generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + args.first_generation
        self._loop: str = args.loop
        self._config = args.config or config_of(args.folder)
        self._disk: Path = args.disk
        self._first = 1
        self._engine: Engine | None = None

    def init_process_group(self, backend: str) -> None:
        dist.init_process_group(backend, timeout=TIMEOUT)
        if self._loop == "engine":
            self._engine = Engine.open(self._config)

    def load(self, state: dict[str, Any]) -> int:
        step = 0
        if self._engine is not None:
            step = self._engine.load(state) or 0
        elif self._loop == "dcp":
            # DCP renames its metadata into place last: with it a checkpoint is complete.
            steps = [int(path.parent.name) for path in self._disk.glob("*/.metadata")]
            if steps:
                step = max(steps)
                dcp.load(state, checkpoint_id=self._disk / str(step))
        self._first = step + 1
        return step

    def save(self, state: dict[str, Any], step: int) -> None:
        if self._engine is not None:
            dcp.save(state, storage_writer=self._engine.writer(step))
        elif self._loop == "dcp":
            dcp.save(state, checkpoint_id=self._disk / str(step))

    def steps(self, last: int) -> Iterator[int]:
        return iter(range(self._first, last + 1))

    def update(self, step: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


def config_of(folder: Path) -> dict[str, Any]:
    return {
        "namespace": "benchmark-live",
        "memory": {"capacity": "512MiB", "keep": {"last": 2}},
        "agent": {"runtime_dir": str(folder / "rt"), "idle_timeout": "2 min"},
    }


def train(world: World, args: argparse.Namespace, journal: Journal) -> None:
    """Called once per generation; under torchrun, once per process."""
    journal.write("begun", world)
    world.init_process_group("gloo")
    mesh = init_device_mesh(
        args.device, (world.size // 2, 2), mesh_dim_names=("replicate", "shard")
    )
    torch.manual_seed(0)
    blocks = [Block().to(args.device) for _ in range(2)]
    model = nn.Sequential(*blocks)
    for block in blocks:
        if args.compiled:
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    loader = Loader(world.rank, world.size)
    scaler = torch.amp.GradScaler(
        args.device, init_scale=2.0**10, growth_interval=7, enabled=args.exact
    )
    state = {"learner": Learner(model, optimizer), "loader": loader, "scaler": scaler, "step": 0}
    journal.write("loaded", world, step=world.load(state))
    wait_started(args)
    buffers = [
        each for block in blocks for each in (block.norm.running_mean, block.norm.running_var)
    ]
    ended_s = time.perf_counter()
    for updates, step in enumerate(world.steps(args.steps), start=1):
        begin_s = time.perf_counter() - ended_s
        ids, rows = (each.to(args.device) for each in loader.next())
        loss = (model(rows) - rows).square().mean()
        if args.sleep:
            time.sleep(args.sleep)
        meet_faults(world, args, step, journal)
        scaler.scale(loss).backward()
        average(buffers, world.size)
        scaler.unscale_(optimizer)
        seen = exact(world, loss, ids, buffers) if args.exact else {}
        entered_s = time.perf_counter()
        with world.update(step):
            own_s = time.perf_counter() - entered_s
            scaler.step(optimizer)
            scaler.update()
            state["step"] = step
            left_s = time.perf_counter()
        own_s += time.perf_counter() - left_s
        if args.exact:
            seen["scale"] = scaler.get_scale()
        if args.compiled:
            seen["compiled"] = torch._dynamo.utils.counters["frames"]["ok"]
        journal.write("update", world, step=step, own_s=own_s, begin_s=begin_s, **seen)
        optimizer.zero_grad()
        if args.sample and updates == SAMPLED_UPDATE:
            journal.write("sample", world, **counts(args.device))
        if args.save_every and step % args.save_every == 0:
            if isinstance(world, Launched):
                world.save(state, step)
            else:
                dcp.save(state, storage_writer=world.engine.writer(step))
        ended_s = time.perf_counter()


def average(buffers: list[Any], size: int) -> None:
    """Equal ones, as by DDP's broadcast_buffers: a checkpoint has one rank's for all."""
    flat = torch.cat(buffers)
    dist.all_reduce(flat)
    flat /= size
    for buffer, each in zip(buffers, flat.chunk(len(buffers)), strict=True):
        buffer.copy_(each)


def exact(
    world: World, loss: torch.Tensor, ids: torch.Tensor, buffers: list[Any]
) -> dict[str, Any]:
    """What must be equal, to the bit: the same on all ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    everybody = [torch.zeros_like(ids) for _ in range(world.size)]
    dist.all_gather(everybody, ids)
    return {
        "loss": float(total).hex(),
        "ids": torch.cat(everybody).tolist(),
        "buffers": [float(each.double().sum()).hex() for each in buffers],
    }


def meet_faults(world: World, args: argparse.Namespace, step: int, journal: Journal) -> None:
    """The ordered faults of this step and rank, once each, in the middle of the step."""
    for at, rank, kind in args.faults:
        if (at, rank) != (step, world.rank):
            continue
        try:
            os.close(os.open(args.folder / f"did-{at}-{rank}-{kind}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        journal.write(kind, world, step=step)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError("a fault that the benchmark ordered")


def wait_started(args: argparse.Namespace) -> None:
    """Until so many processes have imported everything: a standby is ready, then."""
    until_s = time.monotonic() + STARTED_LIMIT_S
    while len(list(args.folder.glob("started-*"))) < args.wait_started:
        if time.monotonic() > until_s:
            raise TimeoutError(f"no {args.wait_started} processes within {STARTED_LIMIT_S:g} s")
        time.sleep(0.02)


def counts(device: str) -> dict[str, float]:
    """What a process must not use more of with each generation."""
    memory: dict[str, float] = {}
    if device != "cpu":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        allocated = torch.cuda.memory_allocated()
        memory = {"allocated_mib": allocated / 2**20, "device_mib": (total - free) / 2**20}
    pid = os.getpid()
    children = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                stat = (entry / "stat").read_text()
                children += int(stat.rpartition(")")[2].split()[1]) == pid
    rollup = dict(
        line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    )
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "children": children,
        "pss_mib": int(rollup["Pss"].split()[0]) / 1024,
        **memory,
    }


def parse() -> argparse.Namespace:
    """Command line, made by ``benchmarks/live/runs.py``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="journal and agent")
    parser.add_argument("--config", type=Path, help="of this host; else of one host")
    parser.add_argument("--first-generation", type=int, default=1, help="of a start by torchrun")
    parser.add_argument("--disk", type=Path, required=True, help="checkpoints of stock DCP")
    parser.add_argument("--loop", choices=("live", "engine", "dcp", "plain"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds in each step")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--faults", type=json.loads, default=[], help="[[step, rank, kind], ...]")
    parser.add_argument("--wait-started", type=int, default=0)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sample", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Everything before ``live.run`` is done by standbys, too."""
    args = parse()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    if args.device == "cuda":
        torch.cuda.set_device(0)  # of all ranks; or a mesh takes the device of the local rank
        torch.zeros(1, device=args.device)  # a standby has its context, too
    journal = Journal(args.folder)
    (args.folder / f"started-{os.getpid()}").touch()
    if args.loop == "live":
        live.run(lambda world: train(world, args, journal), args.config or config_of(args.folder))
    else:
        train(Launched(args), args, journal)
        dist.barrier()  # a rank whose peer has left already would be aborted by gloo's threads
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
