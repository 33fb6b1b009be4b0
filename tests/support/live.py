"""A supervised training whose processes are forked with torch imported, and a script for it.

The script has what live recovery must get right: HSDP, dropout, buffers of BatchNorm that forward
passes change, a loader whose position each step changes, a GradScaler. Faults happen once each.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.live.rotated import rotate
from tests.support.preloaded import context
from tieredckpt.live import decide
from tieredckpt.live.supervisor import Supervisor

WIDTH = 32
"""Large enough that survivors keep the model by reference, and do not copy it at each update."""
ROWS = 1000
BATCH = 16
STEPS = 12
SAVE_EVERY = 4


class Fault(NamedTuple):
    """``kind``: kill, raise or hang, once, or always (raise), in the forward pass of a step; or
    kill-with-2: both it and rank 2; or kill-init, kill-save, kill-load: while a world is made, with
    ``step`` as the generation; or break: the device fails, and with break-later nobody waits for it
    in the forward pass.
    """

    step: int
    rank: int
    kind: str


Script = Callable[[str, int, list[Fault]], None]
"""Gets a folder, the last step and the faults; runs in each process."""


class Row(NamedTuple):
    """What rank 0 saw of one update, exact."""

    step: int
    loss: str
    ids: list[int]
    scale: float
    buffers: str


class Outcome(NamedTuple):
    """What a supervised training came to."""

    code: int
    rows: list[Row]
    lines: list[str]
    """The supervisor's and all processes' output."""

    def said(self, text: str) -> list[str]:
        """The supervisor's lines that contain ``text``."""
        return [line for line in self.lines if line.startswith("[tieredckpt]") and text in line]


class Forked:
    """A forked process as :class:`subprocess.Popen` has it."""

    def __init__(self, target: Callable[[], None], env: Mapping[str, str], keep: int) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_DFL)
                os.setsid()
                os.dup2(write, 1)
                os.dup2(write, 2)
                os.closerange(3, keep)
                os.closerange(keep + 1, 1 << 10)
                # As in a new process: else loader workers would be new interpreters, and
                # multiprocessing would close what it takes for its tracker's pipe.
                multiprocessing.set_start_method(None, force=True)
                resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
                resource_tracker._resource_tracker._pid = None  # type: ignore[attr-defined]
                sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
                os.environ.clear()
                os.environ.update(env)
                target()
                code = 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write)
        self.stdout = os.fdopen(read, "rb", buffering=0)

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


class Started:
    """A supervised training that runs in ``folder``."""

    def __init__(self, folder: Path, process: Any) -> None:
        self.folder, self._process = folder, process

    @property
    def pid(self) -> int:
        """The supervisor's."""
        return int(self._process.pid)

    def lines(self) -> list[str]:
        """The output so far."""
        path = self.folder / "output"
        return path.read_text().splitlines() if path.exists() else []

    def rows(self) -> list[Row]:
        """What rank 0 has seen so far."""
        path = self.folder / "rows"
        text = path.read_text() if path.exists() else ""
        return [Row(*json.loads(line)) for line in text.splitlines(True) if line.endswith("\n")]

    def outcome(self, timeout_s: float = 120.0) -> Outcome:
        """Wait for its end."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            self._process.terminate()
            self._process.join(30)
        assert code is not None, "\n".join(self.lines())
        return Outcome(code, self.rows(), self.lines())


def start(
    folder: Path,
    faults: Sequence[Fault] = (),
    *,
    size: int = 4,
    standby: int = 1,
    max_restarts: int = 8,
    hang_s: float | None = 0.0,
    unwind_s: float = 20.0,
    grace_s: float = 5.0,
    rotated: bool = False,
    steps: int = STEPS,
    script: str | Script = "train",
) -> Started:
    """Train in ``folder``; see :class:`Supervisor`. ``script``: picklable, or one of SCRIPTS."""
    folder.mkdir(parents=True, exist_ok=True)
    policy = decide.Policy(per_host=size, standby=standby, hang_s=hang_s, unwind_s=unwind_s)
    process = context.Process(
        target=_supervise,
        args=(str(folder), policy, max_restarts, grace_s, rotated, steps, list(faults), script),
    )
    process.start()
    return Started(folder, process)


def supervised(
    folder: Path, faults: Sequence[Fault] = (), *, timeout_s: float = 120.0, **options: Any
) -> Outcome:
    """Train in ``folder`` until the end; ``options`` as for :func:`start`."""
    return start(folder, faults, **options).outcome(timeout_s)


def _supervise(
    folder: str,
    policy: decide.Policy,
    max_restarts: int,
    grace_s: float,
    rotated: bool,
    steps: int,
    faults: list[Fault],
    script: str | Script,
) -> None:
    assert threading.active_count() == 1  # it forks
    output = open(f"{folder}/output", "a", buffering=1)  # noqa: SIM115  (until it ends)
    if rotated:
        rotate()
    target = SCRIPTS[script] if isinstance(script, str) else script

    def spawn(env: Mapping[str, str], descriptor: int) -> subprocess.Popen[bytes]:
        found: Any = Forked(lambda: target(folder, steps, faults), env, descriptor)
        return found  # type: ignore[no-any-return]

    supervisor = Supervisor(
        policy, spawn, Path(folder), max_restarts=max_restarts, grace_s=grace_s,
        write=lambda line: print(line, file=output),
    )  # fmt: skip
    sys.exit(supervisor.run())


# --- the script -----------------------------------------------------------------------------------


def config_of(folder: str) -> dict[str, Any]:
    return {
        "namespace": "live",
        "memory": {"capacity": "512MiB", "keep": {"last": 2}},
        "agent": {"runtime_dir": f"{folder}/rt", "idle_timeout": "1 min"},
    }


def ids_of(step: int) -> list[int]:
    """Ids of the rows of a step's batch."""
    return [((step - 1) * BATCH + row) * 7 % ROWS for row in range(BATCH)]


class Loader:
    """Its state is a count, the same on all ranks; fetching a batch changes it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size, self._position = rank, size, 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]

    def next(self) -> tuple[Any, Any]:
        """Ids and rows of this rank's share."""
        import torch

        self._position += 1
        ids = ids_of(self._position)
        rows = [torch.randn(WIDTH, generator=torch.Generator().manual_seed(i)) for i in ids]
        share = slice(self._rank * BATCH // self._size, (self._rank + 1) * BATCH // self._size)
        return torch.tensor(ids[share]), torch.stack(rows[share])


class Faults:
    """Each happens once, whatever process meets it."""

    def __init__(self, folder: str, faults: Sequence[Fault]) -> None:
        self._folder, self._faults = folder, faults

    def any_at(self, step: int) -> bool:
        """Whether a rank fails in the forward pass of this step."""
        return any(each.step == step for each in self._faults)

    def meet(self, step: int, rank: int, *kinds: str) -> None:
        for each in self._faults:
            if (each.step, each.rank) != (step, rank) or each.kind.partition("-with-")[
                0
            ] not in kinds:
                continue
            if each.kind == "always":
                raise MemoryError("a fault of the test")
            name = f"{self._folder}/did-{each.step}-{each.rank}-{each.kind}"
            try:
                os.close(os.open(name, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            if each.kind == "raise":
                raise MemoryError("a fault of the test")
            if each.kind.startswith("break"):
                break_device(wait=each.kind == "break")
                return
            while each.kind == "hang":
                signal.pause()
            if each.kind.startswith("kill-with-"):
                other = each.kind.removeprefix("kill-with-")
                os.kill(int(Path(self._folder, f"pid-{other}").read_text()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def break_device(*, wait: bool) -> None:
    """An assertion fails on the device: nothing works in this process's context any more."""
    import torch

    beyond = torch.tensor([1 << 20], device="cuda")
    torch.zeros(1, device="cuda")[beyond]
    if wait:
        torch.cuda.synchronize()


def device_script(device: str, backend: str, folder: str, steps: int, faults: list[Fault]) -> None:
    """The same training on a device, with what it uses of the device's memory."""
    import torch

    from tieredckpt import live

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if device == "cuda":
        torch.cuda.set_device(0)  # or a mesh takes the device of the local rank
    torch.use_deterministic_algorithms(True)

    def on_device(world: Any) -> None:
        train(world, folder, steps, Faults(folder, faults), device=device, backend=backend)

    live.run(on_device, config_of(folder))


def failing_device_script(folder: str, steps: int, faults: list[Fault]) -> None:
    """A rank that raises has a device that has failed."""
    import torch

    from tieredckpt import live

    def failed(*_: object) -> None:
        raise RuntimeError("the device is gone")

    def with_device(world: Any) -> None:
        try:
            train(world, folder, steps, Faults(folder, faults))
        except MemoryError:
            torch.cuda.is_initialized = lambda: True
            torch.cuda.synchronize = failed
            raise

    live.run(with_device, config_of(folder))


def train_script(folder: str, steps: int, faults: list[Fault]) -> None:
    """A user's script: everything up to ``live.run`` is imported."""
    from tieredckpt import live

    live.run(lambda world: train(world, folder, steps, Faults(folder, faults)), config_of(folder))


def late_script(folder: str, steps: int, faults: list[Fault]) -> None:
    """A process that replaces another one is ready once the surviving ranks have saved."""
    deaths = len(list(Path(folder).glob("did-*")))
    until_s = time.monotonic() + 60
    while Path(folder, "output").read_text().count("have saved what they kept") < deaths:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    train_script(folder, steps, faults)


def own_script(folder: str, steps: int, faults: list[Fault]) -> None:
    """Each rank has a value that no other rank has."""
    from tieredckpt import live

    def with_own(world: Any) -> None:
        train(world, folder, steps, Faults(folder, faults), own=True)

    live.run(with_own, config_of(folder))


def background_script(folder: str, steps: int, faults: list[Fault]) -> None:
    """Each step begins a save in the background, which ends with its world if that has a fault."""
    from tieredckpt import live

    def with_saves(world: Any) -> None:
        train(world, folder, steps, Faults(folder, faults), in_background=True)

    live.run(with_saves, config_of(folder))


def train(
    world: Any,
    folder: str,
    steps: int,
    faults: Faults,
    *,
    own: bool = False,
    in_background: bool = False,
    replicas: int = 2,
    after_update: Callable[[Any], None] = lambda _: None,
    device: str = "cpu",
    backend: str = "gloo",
) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from tieredckpt import per_rank

    torch.set_num_threads(1)
    Path(folder, f"pid-{world.rank}").write_text(str(os.getpid()))
    faults.meet(world.generation, world.rank, "kill-init")
    real = dcp.save

    def save(*args: Any, **kwargs: Any) -> Any:
        faults.meet(world.generation, world.rank, "kill-save")
        return real(*args, **kwargs)

    dcp.save = save  # type: ignore[assignment]
    try:
        world.init_process_group(backend)
    finally:
        dcp.save = real
    replicas = min(replicas, world.size)
    shape = (replicas, world.size // replicas)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH),
        torch.nn.BatchNorm1d(4 * WIDTH),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(4 * WIDTH, WIDTH),
    ).to(device)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    class Learner:
        def state_dict(self) -> dict[str, Any]:
            first, second = get_state_dict(model, optimizer)
            return {"model": first, "optimizer": second}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            faults.meet(world.generation, world.rank, "kill-load")
            set_state_dict(
                model, optimizer, model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )  # fmt: skip

    loader = Loader(world.rank, world.size)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=3)
    state: dict[str, Any] = {"learner": Learner(), "loader": loader, "scaler": scaler, "step": 0}
    if own:
        state["own"] = per_rank(Loader(world.rank, world.size))
    world.load(state)
    norm = model[1]
    for step in world.steps(steps):
        ids, rows = (each.to(device) for each in loader.next())
        loss = (model(rows) - rows).square().mean()
        if faults.any_at(step):
            dist.barrier()  # so that each rank has finished the update before
        faults.meet(step, world.rank, "kill", "raise", "hang", "always", "break", "break-later")
        scaler.scale(loss).backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        seen = [torch.zeros_like(ids) for _ in range(world.size)]
        dist.all_gather(seen, ids)
        for buffer in (norm.running_mean, norm.running_var):  # as DDP's broadcast_buffers
            dist.all_reduce(buffer)
            buffer /= world.size
        scaler.unscale_(optimizer)
        with world.update(step):
            scaler.step(optimizer)
            scaler.update()
            state["step"] = step
        optimizer.zero_grad()
        if world.rank == 0:
            sums = norm.running_mean.double().sum() + norm.running_var.double().sum()
            row = [step, float(total).hex(), torch.cat(seen).tolist(), scaler.get_scale(),
                   float(sums).hex()]  # fmt: skip
            with open(f"{folder}/rows", "a") as file:
                file.write(json.dumps(row) + "\n")
            if device == "cuda":
                note_memory(folder, world.generation)
        after_update(model)
        if in_background:
            world.engine.async_save(state, step)
        elif step % SAVE_EVERY == 0:
            dcp.save(state, storage_writer=world.engine.writer(step))


def note_memory(folder: str, generation: int) -> None:
    """Bytes that live tensors have, that torch holds, and that the device has not free; threads."""
    import torch

    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    with open(f"{folder}/memory", "a") as file:
        allocated, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        threads = len(os.listdir("/proc/self/task"))
        file.write(f"{generation} {allocated} {held} {total - free} {threads}\n")


SCRIPTS: dict[str, Script] = {"train": train_script}


@contextlib.contextmanager
def stopped_agent(folder: Path) -> Iterator[None]:
    """Stop the agent that a training started, at the end."""
    from tieredckpt.rpc.agent_client import AgentClient

    try:
        yield
    finally:
        with (
            contextlib.suppress(Exception),
            contextlib.closing(AgentClient(folder / "rt")) as client,
        ):
            client.shutdown()
