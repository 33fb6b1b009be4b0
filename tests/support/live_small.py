"""The smallest training for live recovery, in scripts that misuse it, each in its own way.

The model is on every rank; gradients are averaged by all-reduces.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tests.support.live import Fault, Faults, config_of

WIDTH = 160
"""Of a square: more than survivors copy at each update, so the model is kept by reference."""


LARGE_BYTES = 16 << 20


class Job:
    """What all scripts here build in ``train``; ``state`` is for ``world.load``."""

    def __init__(self, world: Any, folder: str, faults: Faults) -> None:
        import torch

        torch.set_num_threads(1)
        world.init_process_group("gloo")
        torch.manual_seed(0)
        self.world, self.folder, self.faults = world, folder, faults
        self.group: Any = None
        self.prepare: Callable[[Any], Any] = lambda rows: rows
        self.model = torch.nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state: dict[str, Any] = {"model": self.model, "step": 0}

    def gradients(self, step: int) -> Any:
        """The mean loss, with averaged gradients. Faults happen before it is averaged."""
        import torch
        import torch.distributed as dist

        rows = self.prepare(torch.randn(4, WIDTH))
        loss = (self.model(rows) - rows).square().mean()
        loss.backward()
        self.faults.meet(step, self.world.rank, "kill", "raise", "hang", "always")
        mean = loss.detach().clone()
        for each in (mean, *(p.grad for p in self.model.parameters())):
            dist.all_reduce(each, group=self.group)
            each /= self.world.size
        return mean

    def update(self, step: int) -> None:
        """The update and what follows it."""
        import torch.distributed.checkpoint as dcp

        with self.world.update(step):
            self.optimizer.step()
            self.state["step"] = step
        self.optimizer.zero_grad()
        if step % 4 == 0:
            dcp.save(self.state, storage_writer=self.world.engine.writer(step))

    def log(self, step: int, loss: Any) -> None:
        """A row of rank 0, before the update."""
        if self.world.rank == 0:
            with open(f"{self.folder}/rows", "a") as file:
                file.write(json.dumps([step, float(loss).hex(), [], 1.0, ""]) + "\n")

    def do(self, step: int) -> None:
        """One whole step."""
        loss = self.gradients(step)
        self.log(step, loss)
        self.update(step)


def plain(world: Any, folder: str, steps: int, faults: Faults) -> None:
    job = Job(world, folder, faults)
    world.load(job.state)
    for step in world.steps(steps):
        job.do(step)


def swallows(world: Any, folder: str, steps: int, faults: Faults) -> None:
    """``except BaseException`` around each step."""
    job = Job(world, folder, faults)
    world.load(job.state)
    for step in world.steps(steps):
        with contextlib.suppress(BaseException):
            job.do(step)


def never_leaves(world: Any, folder: str, steps: int, faults: Faults) -> None:
    """Tries a step again until it succeeds, whatever is raised."""
    job = Job(world, folder, faults)
    step = world.load(job.state)
    while step < steps:
        with contextlib.suppress(BaseException):
            world.begin(step + 1)
            job.do(step + 1)
            step += 1


def ignores_signals(world: Any, folder: str, steps: int, faults: Faults) -> None:
    """SIGTERM and SIGINT leave a mark and nothing else."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: open(f"{folder}/ignored", "w").close())
    plain(world, folder, steps, faults)


_old: Any = None


def old_group(world: Any, folder: str, steps: int, faults: Faults) -> None:
    """A group is made once per process."""
    import torch.distributed as dist

    global _old
    job = Job(world, folder, faults)
    if _old is None:
        _old = dist.new_group(backend="gloo")
    job.group = _old
    world.load(job.state)
    for step in world.steps(steps):
        job.do(step)


class Communicating:
    """A ``state_dict`` that averages what it returns, as if ranks differed."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        import torch.distributed as dist

        found = {key: value.clone() for key, value in self.model.state_dict().items()}
        for value in found.values():
            dist.all_reduce(value, dist.ReduceOp.MAX)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)


def communicating_state(world: Any, folder: str, steps: int, faults: Faults) -> None:
    job = Job(world, folder, faults)
    job.state["model"] = Communicating(job.model)
    world.load(job.state)
    for step in world.steps(steps):
        job.do(step)


def superseded(world: Any, folder: str, steps: int, faults: Faults) -> None:
    """An ordered exception becomes that of a run that another one has superseded."""
    from tieredckpt import StaleAttemptError

    try:
        plain(world, folder, steps, faults)
    except MemoryError:
        raise StaleAttemptError("another run has taken over") from None


def other_weights(world: Any, folder: str, steps: int, faults: Faults) -> None:
    """Each step evaluates with other weights, and does not put the own ones back at an error."""
    import torch

    job = Job(world, folder, faults)
    world.load(job.state)
    for step in world.steps(steps):
        job.do(step)
        own = job.model.weight.detach().clone()
        with torch.no_grad():
            job.model.weight.zero_()
        faults.meet(step, world.rank, "raise-in-evaluation")
        torch.distributed.barrier()
        with torch.no_grad():
            job.model.weight.copy_(own)


def ends_at_sigterm(world: Any, folder: str, steps: int, faults: Faults) -> None:
    """SIGTERM ends the loop, as after the last step."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    job = Job(world, folder, faults)
    world.load(job.state)
    for step in world.steps(1 << 30):
        job.do(step)
        import torch

        flag = torch.tensor(float(bool(asked)))
        torch.distributed.all_reduce(flag)
        if flag:
            break


def then_notes(folder: str, steps: int, faults: list[Fault]) -> None:
    """What follows ``live.run`` is run on each rank."""
    from tieredckpt import live

    met = Faults(folder, faults)

    def train(world: Any) -> int:
        ends_at_sigterm(world, folder, steps, met)
        return int(world.rank)

    rank = live.run(train, config_of(folder))
    open(f"{folder}/after-{rank}", "w").close()


def leaves_on_notice(world: Any, folder: str, steps: int, faults: Faults) -> None:
    """SIGTERM is a notice. Once the standby is gone, the ranks flush and leave."""
    job = Job(world, folder, faults)
    leaving = world.engine.leave_on(signal.SIGTERM, deadline_s=60)
    world.load(job.state)
    for step in world.steps(1 << 30):
        job.do(step)
        if leaving.asked:
            open(f"{folder}/asked-{world.rank}", "w").close()
        if all(world.engine.gather(os.path.exists(f"{folder}/standby-is-gone"))):
            break
    open(f"{folder}/left-{world.rank}-{world.engine.should_leave()}", "w").close()


def exits_after(folder: str, steps: int, faults: list[Fault]) -> None:
    """The code of rank 0 is its own, after the training."""
    from tieredckpt import live

    def train(world: Any) -> int:
        plain(world, folder, steps, Faults(folder, faults))
        return int(world.rank)

    sys.exit(7 if live.run(train, config_of(folder)) == 0 else 0)


def shifted(rows: Any) -> Any:
    """By the rank, which dynamo compiles into a constant."""
    import torch.distributed as dist

    return rows + 0.01 * dist.get_rank()


def compiled(world: Any, folder: str, steps: int, faults: Faults) -> None:
    """The compiled function outlives the generation."""
    import torch

    job = Job(world, folder, faults)
    job.prepare = torch.compile(shifted, backend="aot_eager")
    world.load(job.state)
    for step in world.steps(steps):
        job.do(step)


def large_messages(
    gathers: int, device: str, world: Any, folder: str, steps: int, faults: Faults
) -> None:
    """Steps of all-gathers of 16 MB, until the file ``enough`` exists.

    SIGUSR2 raises wherever this rank is; ``now`` has a line for each step that a rank begins.
    """
    import torch
    import torch.distributed as dist

    def raise_now(*_: object) -> None:
        raise MemoryError("ordered from outside")

    signal.signal(signal.SIGUSR2, raise_now)
    job = Job(world, folder, faults)
    mine = torch.empty(LARGE_BYTES // 4, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(world.size)]
    world.load(job.state)
    for step in world.steps(steps):
        with open(f"{folder}/now", "a") as file:
            file.write(f"{world.generation} {world.rank} {os.getpid()} {step}\n")
        for number in range(gathers):
            mine.fill_(1000 * step + 10 * number + world.rank)
            dist.all_gather(all_of_them, mine)
            for rank, found in enumerate(all_of_them):
                wanted = 1000 * step + 10 * number + rank
                assert bool((found == wanted).all()), "a message is torn"
        loss = job.gradients(step)
        is_last = torch.tensor(float(world.rank == 0 and os.path.exists(f"{folder}/enough")))
        dist.all_reduce(is_last)
        job.log(step, loss)
        job.update(step)
        if is_last:
            break


def script(
    train: Callable[[Any, str, int, Faults], None], folder: str, steps: int, faults: list[Fault]
) -> None:
    """A rank's process."""
    from tieredckpt import live

    met = Faults(folder, faults)
    live.run(lambda world: train(world, folder, steps, met), config_of(folder))


def script_of(name: str, *args: Any) -> Any:
    """For :func:`tests.support.live.supervised`."""
    train = functools.partial(globals()[name], *args) if args else globals()[name]
    return functools.partial(script, train)
