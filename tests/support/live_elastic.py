"""A user's script whose world may have another size: what its ranks see, step by step.

Files in its folder ask for faults and limits, and get rows.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.support.live import config_of
from tieredckpt.policy.elastic import rows

WIDTH, SAMPLES, BATCH, STEPS = 32, 1000, 10, 12


def script(folder: str, steps: int, _: Any, device: str = "cpu") -> None:
    import torch

    from tieredckpt import live

    def on_event(event: live.ChangeEvent) -> None:
        note(Path(folder, "events"), [event.step, event.old_size, event.new_size, event.deadline_s])

    if device == "cuda":
        torch.cuda.set_device(0)  # or a mesh takes the device of the local rank
    live.run(
        lambda world: train(world, Path(folder), steps, device),
        config_of(folder),
        on_event=on_event,
        resize="manual" if Path(folder, "manual").exists() else "auto",
    )


def train(world: Any, folder: Path, steps: int, device: str = "cpu") -> None:
    """A batch of 10 rows, which four ranks do not divide evenly, in parts of at most 2."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
    real = dcp.save

    def save(*args: Any, **kwargs: Any) -> Any:
        meet(folder, f"save-{world.generation}-{world.rank}")
        return real(*args, **kwargs)

    dcp.save = save  # type: ignore[assignment]
    world.init_process_group("gloo")
    replicas = 2 if (folder / "replicas").exists() else 1
    if (folder / "replicated").exists():
        replicas = world.size
    if world.size % 2 and replicas < world.size:
        raise ValueError("the script has no mesh of an odd number of ranks")
    mesh = init_device_mesh(
        device, (replicas, world.size // replicas), mesh_dim_names=("replicate", "shard")
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
    ).to(device)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    class Learner:
        def state_dict(self) -> dict[str, Any]:
            first, second = get_state_dict(model, optimizer)
            return {"model": first, "optimizer": second}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            meet(folder, f"load-{world.generation}-{world.rank}")
            set_state_dict(
                model, optimizer, model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )  # fmt: skip

    saves = (folder / "saves").exists()
    state: dict[str, Any] = {"learner": Learner()}
    world.load(state)
    if world.rank == 0:
        note(folder / "restored", [world.generation, world.size, dict(world.restored.source)])
    share = world.share(BATCH, micro=2)
    for step in world.steps(steps):
        if world.change is not None:
            assert (folder / "manual").exists()
            world.leave()
        ids = [row * 7 % SAMPLES for row in rows(step, BATCH)]
        mean = torch.zeros((), device=device)
        for part in share.parts:
            inputs = torch.stack([sample(i) for i in ids[part.start : part.stop]]).to(device)
            loss = (model(inputs) - inputs).square().mean() * part.weight
            loss.backward()
            mean += loss.detach()
        meet(folder, f"raise-{step}-{world.rank}")
        seen: list[Any] = [None] * world.size
        dist.all_gather_object(seen, ids[share.start : share.stop])
        dist.all_reduce(mean)
        with world.update(step):
            optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0:
            mean /= world.size
            note(folder / "seen", [step, float(mean), [*itertools.chain(*seen)], world.size])
        if saves:
            dcp.save(state, storage_writer=world.engine.writer(step))
        while world.version >= int((folder / "limit").read_text()):
            world.ping()
            time.sleep(0.005)


def sample(number: int) -> Any:
    import torch

    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))


def note(path: Path, what: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(what) + "\n")


def meet(folder: Path, name: str) -> None:
    """Die or raise here, once, if the test has asked for it."""
    fault = folder / f"fault-{name}"
    if fault.exists():
        fault.unlink()
        if name.startswith("raise"):
            raise MemoryError("a fault of the test")
        os.kill(os.getpid(), signal.SIGKILL)


def read(path: Path) -> list[Any]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]
