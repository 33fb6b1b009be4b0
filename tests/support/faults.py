"""Trainers and agents as real processes that tests kill, stop and starve, and what must come back.

A :class:`Trainer` is a process forked from a server that has torch imported; it carries out one
command after another and dies wherever a failpoint says so. What a load must bring is computed here
from (step, seed) alone, so that it does not depend on anything that is under test.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import pickle
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import processes_naming, stop_processes_of
from tests.support.leftovers import shm
from tests.support.preloaded import context, show_stacks

MIB = 1 << 20
DEADLINE_S = 90.0
_numbers = itertools.count()


# --- the oracle ----------------------------------------------------------------------------------


def _fill(shape: tuple[int, ...], dtype: str, *key: int) -> Any:
    """A tensor of random bits that depends on ``key`` alone."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    count = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if not count:
        return torch.empty(shape, dtype=kind)
    bits = np.random.Generator(np.random.PCG64(list(key))).integers(0, 256, count, dtype=np.uint8)
    if kind is torch.bool:
        bits &= 1
    return torch.from_numpy(bits).view(kind).reshape(shape)


def _shapes(mib: float) -> dict[str, tuple[tuple[int, ...], str]]:
    rows = max(1, int(mib * MIB / 4 / 250))
    return {
        "embed": ((rows, 100), "float32"),
        "moment": ((2 * rows, 50), "float32"),
        "half": ((rows, 99), "bfloat16"),
        "odd": ((7, 3, 11), "float64"),
        "flags": ((33,), "bool"),
        "scalar": ((), "int64"),
        "empty": ((0, 5), "float32"),
    }


def expected(step: int, seed: int, mib: float, world: int) -> dict[str, Any]:
    """The whole state of a step: model tensors, and what each rank keeps under its own keys."""
    model = {
        name: _fill(shape, dtype, seed, step, i)
        for i, (name, (shape, dtype)) in enumerate(_shapes(mib).items())
    }
    own = {
        f"rank{rank}": {
            "noise": _fill((int(mib * MIB / 16 / world),), "int16", seed, step, 100 + rank),
            "rng": _fill((64,), "uint8", seed, step, 200 + rank),
            "place": f"step {step} rank {rank} " + "x" * (step % 7),
            "history": [step, {"seed": seed}, None, 0.1 * step],
        }
        for rank in range(world)
    }
    return {"model": model, "meta": {"step": step, "name": f"run {seed}"}, **own}


def _blank(value: Any) -> Any:
    """The same structure with content that no step has."""
    import torch

    if isinstance(value, torch.Tensor):
        other = torch.empty_like(value)
        if other.numel():
            other.reshape(-1).view(torch.uint8).fill_(0x5A)
        return other
    if isinstance(value, dict):
        return {key: _blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_blank(item) for item in value]
    return "not loaded"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{i}]")
    else:
        yield path, value


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def _bits(tensor: Any) -> bytes:
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def _differences(found: Any, wanted: Any) -> list[str]:
    """The keys at which two states are not the same, bit for bit and type for type."""
    import torch

    one, other = dict(_leaves(found)), dict(_leaves(wanted))
    wrong = [f"{key}: only in one" for key in one.keys() ^ other.keys()]
    for key in one.keys() & other.keys():
        a, b = _local(one[key]), _local(other[key])
        if isinstance(b, torch.Tensor):
            if not isinstance(a, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
                wrong.append(f"{key}: {a!r} is no {b.dtype} {b.shape}")
            elif (x := _bits(a)) != (y := _bits(b)):
                at = next(i for i, pair in enumerate(zip(x, y, strict=True)) if pair[0] != pair[1])
                wrong.append(f"{key}: differs from byte {at} on")
        elif type(a) is not type(b) or a != b:
            wrong.append(f"{key}: {a!r} is not {b!r}")
    return sorted(wrong)


# --- a trainer -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """What ``engine.load`` did in a trainer.

    Attributes:
        wrong: Keys whose content is not what the oracle says for ``step``.
    """

    step: int | None
    wrong: list[str]
    save_id: str = ""
    refused: tuple[tuple[str, int | None, str], ...] = ()
    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    repaired_blocks: int = 0
    segments: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of each segment that something was read of, bytes by place."""


class Died(AssertionError):
    """The trainer ended without an answer; ``status`` is minus the number of the signal."""

    def __init__(self, status: int | None) -> None:
        super().__init__(f"the trainer died: {status}")
        self.status = status


class NoAnswerError(AssertionError):
    """The trainer did not answer in time, and was killed."""


class _Child:
    """The commands of a trainer, carried out in its process."""

    def __init__(self, seed: int, mib: float, saved_by: int) -> None:
        self.seed = seed
        self.mib = mib
        self.saved_by = saved_by
        self.engine: Any = None
        self.others: list[Any] = []
        self.rank, self.world = 0, 1
        self.part: Any = None

    def join(self, rank: int, world: int, store: str) -> None:
        import torch.distributed as dist

        self.rank, self.world = rank, world
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
            timeout=timedelta(seconds=60),
        )  # fmt: skip

    def join_over(self, environ: dict[str, str], timeout_s: float) -> None:
        """Join a group of several hosts, as torchrun describes it."""
        import torch.distributed as dist

        os.environ.update(environ)
        self.rank, self.world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))

    def open(self, config: dict[str, Any], armed: str = "", *, again: bool = False) -> int:
        """Open the engine; the agent that it starts is ``armed``, later ones only if ``again``."""
        from tieredckpt import failpoints
        from tieredckpt.engine import Engine

        os.environ["TIEREDCKPT_FAILPOINTS"] = armed
        failpoints.arm(armed)
        try:
            self.engine = Engine.open(config)
        finally:
            if not again:
                del os.environ["TIEREDCKPT_FAILPOINTS"]
        return int(self.engine.status().health.pid)

    def look(self, config: dict[str, Any], armed: str = "") -> None:
        """Open an engine that only reads, in the place of :meth:`open`."""
        from tieredckpt import failpoints
        from tieredckpt.engine import Engine

        failpoints.arm(armed)
        self.engine = Engine.open(config, read_only=True)

    def arm(self, armed: str) -> None:
        from tieredckpt import failpoints

        failpoints.arm(armed)

    def state(self, step: int) -> dict[str, Any]:
        """This rank's part of a step."""
        whole = expected(step, self.seed, self.mib, self.saved_by)
        if self.world == 1:
            return whole
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (self.world,))
        for name in ("embed", "moment", "half"):
            whole["model"][name] = distribute_tensor(
                whole["model"][name], mesh, [Shard(0)], src_data_rank=None
            )
        if self.world == self.saved_by:
            for rank in range(self.world):
                if rank != self.rank:
                    del whole[f"rank{rank}"]
        return whole

    def save(self, step: int, stream: str = "default") -> str | None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state(step), storage_writer=self.engine.writer(step, stream))
        return self.engine.last_save.save_id  # type: ignore[no-any-return]

    def form(self, members: list[int]) -> None:
        """A process group of some of the ranks; all ranks call this."""
        import torch.distributed as dist

        self.part = dist.new_group(members)

    def save_part(self, step: int, *, fails_on: int | None = None) -> str | None:
        """What the ranks of that group keep under their own keys, as a stream of its own.

        ``fails_on``: this rank's planner breaks, after the others have written.
        """
        import torch.distributed.checkpoint as dcp

        state = {f"rank{self.rank}": expected(step, self.seed, self.mib, self.world)}
        planner = _breaking_planner() if fails_on == self.rank else dcp.DefaultSavePlanner()
        writer = self.engine.writer(step, "part")
        dcp.save(state, storage_writer=writer, planner=planner, process_group=self.part)
        return self.engine.last_save.save_id  # type: ignore[no-any-return]

    def load_part(self) -> Loaded:
        """The newest of these."""
        state = {f"rank{self.rank}": _blank(expected(0, self.seed, self.mib, self.world))}
        step = self.engine.load(state, stream="part", process_group=self.part)
        if step is None:
            return Loaded(None, [])
        wanted = expected(step, self.seed, self.mib, self.world)
        return Loaded(step, _differences(state[f"rank{self.rank}"], wanted))

    def async_save(self, step: int) -> str | None:
        """In the background, while training overwrites the state at once."""
        state = self.state(step)
        future = self.engine.async_save(state, step)
        for _, value in _leaves(state):
            if hasattr(value, "copy_"):
                local = _local(value)
                local.copy_(_blank(local))
        future.result(DEADLINE_S)
        report = self.engine.last_save
        assert report.step == step, report
        return report.save_id  # type: ignore[no-any-return]

    def load(self, *, seeds: dict[int, int] | None = None, **options: Any) -> Loaded:
        """``engine.load``; ``seeds``: of steps that were saved with another seed than ours."""
        state = self._blank_state()
        step = self.engine.load(state, **options)
        if step is None:
            return Loaded(None, [])
        report = self.engine.last_restore
        return Loaded(
            step,
            _differences(state, self._state_of(step, seeds)),
            report.save_id,
            tuple(report.refused),
            dict(report.bytes_by_tier),
            report.repaired_blocks,
            dict(report.segments),
        )

    def _state_of(self, step: int, seeds: dict[int, int] | None) -> dict[str, Any]:
        own, self.seed = self.seed, (seeds or {}).get(step, self.seed)
        try:
            return self.state(step)
        finally:
            self.seed = own

    def load_save(self, save_id: str, step: int, seeds: dict[int, int] | None = None) -> Loaded:
        """A plain ``dcp.load`` of one checkpoint, abandoned or not."""
        import torch.distributed.checkpoint as dcp

        state = self._blank_state()
        dcp.load(state, storage_reader=self.engine.reader(save_id=save_id))
        return Loaded(step, _differences(state, self._state_of(step, seeds)))

    def _blank_state(self) -> dict[str, Any]:
        like = self.state(0)
        blank = _blank({k: v for k, v in like.items() if k != "model"})
        model = {}
        for name, value in like["model"].items():
            model[name] = value
            local = _local(value)
            local.copy_(_blank(local))
        return {"model": model, **blank}

    def wait(self, step: int, level: str, timeout: float = 60.0) -> None:
        """Until the step is there, and what the tier need not keep any more is deleted."""
        self.engine.wait(step, level, timeout)
        until_s = time.monotonic() + timeout
        while any(tier.retaining for tier in self.status().tiers if tier.name == level):
            assert time.monotonic() < until_s, f"{level} is still deleting"
            time.sleep(0.01)

    def checkpoints(self) -> list[tuple[int, str, tuple[str, ...]]]:
        return [(c.step, c.save_id, c.tiers) for c in self.engine.checkpoints()]

    def status(self) -> Any:
        """The agent's status, of our namespace."""
        name = self.engine.namespace
        return next(each for each in self.engine.status().namespaces if each.name == name)

    def placed(self, step: int) -> list[tuple[str, tuple[str, ...]]]:
        """Who keeps copies of whom, as the manifest in this host's memory says."""
        from tieredckpt.format.manifest import decode_manifest
        from tieredckpt.storage.holdings import decode_holdings

        held = decode_holdings(self.engine._session.client.holdings())
        manifests = [decode_manifest(f.manifest) for f in held.tiers[0].manifests if f.manifest]
        (found,) = (each for each in manifests if each.step == step)
        return [(each.host, each.holders) for each in found.replicas]

    def copies(self, step: int, stream: str = "default") -> tuple[list[str], list[str]]:
        """The segments of a step, if its manifest is here, and all segments in this memory."""
        from tieredckpt.format.manifest import decode_manifest
        from tieredckpt.storage.holdings import decode_holdings

        memory = decode_holdings(self.engine._session.client.holdings()).tiers[0]
        manifests = [decode_manifest(f.manifest) for f in memory.manifests if f.manifest]
        wanted = [
            ref.id
            for each in manifests
            if (each.stream, each.step) == (stream, step)
            for ref in each.segments
        ]
        return wanted, [fact.id for fact in memory.segments if fact.root is not None]

    def close(self) -> None:
        self.engine.close()

    def call(self, name: str, *args: Any) -> Any:
        """A function of :mod:`tests.support.faulty_os`, in this process."""
        from tests.support import faulty_os

        return getattr(faulty_os, name)(*args)


def _breaking_planner() -> Any:
    from torch.distributed.checkpoint import DefaultSavePlanner

    class Breaking(DefaultSavePlanner):  # type: ignore[misc]
        def resolve_data(self, write_item: Any) -> Any:
            raise ValueError("this planner breaks")

    return Breaking()


def _failure(error: BaseException) -> BaseException:
    """Our error out of DCP's collection of the failures of all ranks."""
    from torch.distributed.checkpoint.api import CheckpointException

    if isinstance(error, CheckpointException):
        for each, _ in error.failures.values():
            return each
    return error


def _serve(pipe: Any, seed: int, mib: float, saved_by: int, first: Any) -> None:
    import torch

    if first is not None:
        first()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    child = _Child(seed, mib, saved_by)
    while True:
        try:
            command, args, options = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer: tuple[Any, ...] = ("done", getattr(child, command)(*args, **options))
        except BaseException as caught:
            error = _failure(caught)
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:
                error = RuntimeError(f"{type(error).__name__}: {error}")
            answer = ("raised", error, "".join(traceback.format_exception(caught)))
        pipe.send(answer)


def _agent(ready: Any, control: Any, runtime_dir: str, armed: str, broken: Any, first: Any) -> None:
    from tests.support import faulty_os
    from tieredckpt import failpoints
    from tieredckpt.agent.daemon import main

    if first is not None:
        first()
    name_process(f"agent --runtime-dir {runtime_dir}")

    def obey() -> None:
        while True:
            try:
                name, args = control.recv()
            except EOFError:  # who started us has died
                os._exit(1)
            control.send((failpoints.arm if name == "arm" else getattr(faulty_os, name))(*args))

    failpoints.arm(armed)
    if broken is not None:
        faulty_os.break_os(*broken)
    threading.Thread(target=obey, name="control", daemon=True).start()
    os.set_inheritable(ready.fileno(), True)
    main(
        [
            "--runtime-dir", runtime_dir, "--ready-fd", str(ready.fileno()),
            "--log-file", f"{runtime_dir}/agent.log",
        ]
    )  # fmt: skip


def name_process(command: str) -> None:
    """Show ``command`` as our command line, so that who looks for an agent's folder finds it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, numbers 48 and 49
    text = command.encode()[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def state_of(pid: int) -> str:
    """One letter, "" if the process is gone or only waits to be reaped."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if letter in "ZX" else letter


class ForkedAgent:
    """An agent that is forked where its modules are imported: twenty times faster than a new one.

    Args:
        runtime_dir: Its folder.
        armed: Failpoints from its first instruction on.
        broken: Arguments of :func:`tests.support.faulty_os.break_os`, likewise.
        first: Called in the process before anything else.
        wait: Return only when it serves.
    """

    def __init__(
        self,
        runtime_dir: Path,
        armed: str = "",
        *,
        broken: Any = None,
        first: Callable[[], object] | None = None,
        wait: bool = True,
    ) -> None:
        self._ready, ready = context.Pipe(duplex=False)
        self._control, control = context.Pipe()
        self._owed = 0
        """Answers that have not come: of a stopped one they come when it goes on."""
        self.process = context.Process(
            target=_agent,
            args=(ready, control, str(runtime_dir), armed, broken, first),
            daemon=True,
        )
        self.process.start()
        ready.close()
        control.close()
        if wait:
            assert self.wait_ready(), "the agent did not start"

    def wait_ready(self) -> bool:
        """Whether it serves; False if it ended, or said why it does not."""
        assert select.select([self._ready], [], [], DEADLINE_S)[0], "the agent said nothing"
        return os.read(self._ready.fileno(), 1000) == b"ready\n"

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def call(self, name: str, *args: Any) -> Any:
        """A function of :mod:`tests.support.faulty_os`, in the agent."""
        self._control.send((name, args))
        self._owed += 1
        answer = None
        while self._owed:  # the last one is of this call
            assert self._control.poll(DEADLINE_S), "the agent does not obey"
            answer = self._control.recv()
            self._owed -= 1
        return answer

    def arm(self, spec: str) -> None:
        """Arm failpoints in the agent. It may stand still or be dead when this returns: something
        that it was still doing may have reached one before it could answer.
        """
        self._control.send(("arm", (spec,)))
        self._owed += 1
        until_s = time.monotonic() + DEADLINE_S
        while self._owed:
            state = state_of(self.pid)  # looked at first: it may answer and then reach one
            if self._control.poll(0.01):
                try:
                    self._control.recv()
                except (EOFError, ConnectionError):
                    return
                self._owed -= 1
            elif state in ("", "T"):
                return
            assert time.monotonic() < until_s, "the agent does not obey"

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end. Idempotent."""
        self.process.kill()
        self.process.join(10)
        assert not self.process.is_alive()
        for pipe in (self._ready, self._control):
            pipe.close()


class Trainer:
    """A training process that does what it is told, until it is killed.

    Args:
        seed: Of all contents.
        mib: Size of its state, about.
        saved_by: How many ranks saved what it loads.
        first: Called in the process before anything else.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        mib: float = 1.0,
        saved_by: int = 1,
        first: Callable[[], object] | None = None,
    ) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, seed, mib, saved_by, first), daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self._process.is_alive()

    def start(self, command: str, *args: Any, **options: Any) -> None:
        """Begin a command; :meth:`result` has its outcome."""
        self._pipe.send((command, args, options))

    def result(self, *, deadline_s: float = DEADLINE_S) -> Any:
        """What the command returns or raises; :class:`Died` if it took the process with it."""
        if not self._pipe.poll(deadline_s):
            show_stacks(self._process)
            self.kill()
            raise NoAnswerError(f"the trainer did not answer within {deadline_s} s")
        try:
            kind, value, *note = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(10)
            raise Died(self._process.exitcode) from None
        if kind == "raised":
            value.add_note(f"--- in the trainer ---\n{note[0]}")
            raise value
        return value

    def __getattr__(self, command: str) -> Callable[..., Any]:
        if command.startswith("_"):
            raise AttributeError(command)

        def call(*args: Any, deadline_s: float = DEADLINE_S, **options: Any) -> Any:
            self.start(command, *args, **options)
            return self.result(deadline_s=deadline_s)

        return call

    def dies(self, *, deadline_s: float = DEADLINE_S) -> None:
        """Wait for a SIGKILL that a failpoint gives it."""
        try:
            answer = self.result(deadline_s=deadline_s)
        except Died as found:
            if found.status != -signal.SIGKILL:
                raise
        else:
            raise AssertionError(f"the trainer lives and says {answer!r}")

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.join(10)
        assert not self._process.is_alive()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self._pipe.close()


@contextmanager
def ranks(world: int, *, seed: int = 0, mib: float = 1.0) -> Iterator[list[Trainer]]:
    """Trainers with a gloo group."""
    with tempfile.TemporaryDirectory(prefix="tck-faults-") as folder:
        group = [Trainer(seed=seed, mib=mib, saved_by=world) for _ in range(world)]
        try:
            on_all(group, lambda rank: ("join", rank, world, f"{folder}/store"))
            yield group
        finally:
            for each in group:
                each.__exit__()


def on_all(group: list[Trainer], command: Callable[[int], tuple[Any, ...]]) -> list[Any]:
    """The same command on all ranks at once; their answers."""
    for rank, each in enumerate(group):
        each.start(*command(rank))
    return [each.result() for each in group]


# --- a place to train ----------------------------------------------------------------------------


class Site:
    """A runtime folder in tmpfs and a folder on disk, for one run.

    Args:
        runtime_dir: Of the agent.
        disk: Of the file tier "disk"; None: no tier.
        keep: Checkpoints that memory keeps.
        disk_keep: Checkpoints that the disk keeps.
        more: Further keys of the configuration.
    """

    def __init__(
        self,
        runtime_dir: Path,
        disk: Path | None,
        *,
        namespace: str = "run",
        keep: int = 2,
        disk_keep: int = 3,
        capacity: str = "512MiB",
        every: str = "save",
        timeout: str = "30s",
        more: dict[str, Any] | None = None,
    ) -> None:
        self.runtime_dir = runtime_dir
        self.disk = disk
        self.namespace = namespace
        self.keep = keep
        self._forked: list[Any] = []
        tier = {
            "name": "disk", "url": f"file://{disk}", "every": every, "keep": {"last": disk_keep},
        }  # fmt: skip
        self.config: dict[str, Any] = {
            "namespace": namespace,
            "take_over": True,
            "memory": {"capacity": capacity, "keep": {"last": keep}},
            "tiers": [tier] if disk else [],
            "agent": {"runtime_dir": str(runtime_dir), "start_timeout": "60s"},
            "recovery": {"wait": "0s"},
            "save": {"timeout": timeout, "on_error": "raise"},
            **(more or {}),
        }

    def agents(self) -> list[int]:
        """The process ids of the agents that serve it."""
        forked = [each.pid for each in self._forked if each.is_alive() and each.pid]
        return sorted({*processes_naming(self.runtime_dir), *forked})

    @contextmanager
    def forked_agent(self) -> Iterator[None]:
        """An agent that is there already, forked where its modules are imported: saves time."""
        agent = ForkedAgent(self.runtime_dir)
        self._forked.append(agent.process)
        try:
            yield
        finally:
            agent.kill()

    def agent(self) -> int:
        (pid,) = self.agents()
        return pid

    def kill_agent(self) -> None:
        """SIGKILL, and wait for the end."""
        for pid in self.agents():
            with death(pid):
                os.kill(pid, signal.SIGKILL)

    def lose_memory(self) -> None:
        """What a reboot does: no agent, no slots, no records in tmpfs; trainers may live on."""
        self.kill_agent()
        for folder in ("slots", "ns"):
            for path in sorted((self.runtime_dir / folder).rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()

    @contextmanager
    def opened(self, armed: str = "", *, again: bool = False, **options: Any) -> Iterator[Trainer]:
        """A trainer with an open engine."""
        with Trainer(**options) as trainer:
            trainer.open(self.config, armed, again=again)
            yield trainer


@contextmanager
def death(pid: int, *, deadline_s: float = 60.0) -> Iterator[None]:
    """Wait until a process that is not our child has ended; what ends it may happen inside."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield
        return
    try:
        yield
        assert select.select([fd], [], [], deadline_s)[0], f"process {pid} did not end"
    finally:
        os.close(fd)


def new_runtime_dir() -> Path:
    """An empty folder in tmpfs, for fixtures that outlive one test."""
    folder = shm() / f"tck-test-faults-{os.getpid()}-{next(_numbers)}"
    folder.mkdir(mode=0o700)
    return folder


def remove_runtime_dir(folder: Path) -> None:
    stop_processes_of(folder)
    shutil.rmtree(folder, ignore_errors=True)


def eventually(check: Callable[[], bool | None], *, deadline_s: float = 90.0) -> None:
    """Poll until ``check`` is true or stops to assert: for what another process does by itself.

    Raises TypeError for an answer that is neither a bool nor None: an empty list is not True.
    """
    until_s = time.monotonic() + deadline_s
    while True:
        try:
            if (found := check()) is None or found is True:
                return
            if found is not False:
                raise TypeError(f"a check says True or False, or asserts; this one says {found!r}")
        except AssertionError:
            if time.monotonic() > until_s:
                raise
        assert time.monotonic() < until_s, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def small_tmpfs(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A tmpfs of a certain size at ``folder``; PermissionError where we may not mount."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise PermissionError("no mount command") from error
    if done.returncode:
        raise PermissionError(done.stderr.strip())
    try:
        yield folder
    finally:
        stop_processes_of(folder)
        subprocess.run(["umount", "-l", str(folder)], check=True)
