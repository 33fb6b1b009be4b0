"""Everything that live recovery needs of torch and gloo beyond their public interfaces.

Each function states its reason. :func:`check_release` tests a release of torch that was not tried,
since a changed internal could load another rank's shard without an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import multiprocessing
import os
import socket
import stat
import struct
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._async_process_executor import (
    _ProcessBasedAsyncCheckpointExecutor,
)
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tieredckpt.dcp.slots.leaves import planned
from tieredckpt.dcp.torch_release import LIVE, TRIED, changed, is_tried
from tieredckpt.errors import UsageError

SELF_TEST_S = 60.0
"""Longest self-test of another release; it takes about 0.3 s."""

SLICE_S = 0.05
"""A rank that waits in a collective ends with its generation within this time."""
QUIET_S_MAX = 0.5
"""Longest wait for the messages under way before connections are cut."""
_QUIET_CHECKS = 4
_CHECK_S = 0.005
_NO_LIMIT = timedelta(0)
_OPERATIONS: Any = _distributed_c10d
_BETWEEN_TWO = [
    int(getattr(_OPERATIONS.OpType, name)) for name in ("SEND", "RECV", "RECVANYSOURCE")
]


def check_release() -> None:
    """Raises UsageError if a process that changes its rank could restore another rank's shard.

    A release that was tried passes if it has the private parts. Another one could keep a rank in a
    cache that :func:`forget_last_world` does not clear. Its self-test: two forked processes
    have the same two ranks of four, in opposite order, without communication. In its second world
    each process must have the shards that the other one had in its first, when no cache was filled.
    Compiled functions are not among what it tests: ``torch._dynamo.reset`` is a public function.
    """
    cause: Exception | None = None
    try:
        reason = "; ".join(changed(LIVE))
        if not (reason or is_tried()):
            forget_last_world()  # here, as its imports then serve both processes
            reason = _self_test()
    except (ImportError, AttributeError, OSError) as error:
        cause, reason = error, f"{type(error).__name__}: {error}"
    if reason:
        raise UsageError(
            f"live recovery does not run with torch {torch.__version__}, which fails its "
            f"self-test: {reason}; install torch {TRIED[-1]}, or train without "
            "tieredckpt run (engine.load after a restart)"
        ) from cause


def _self_test() -> str:
    """Return why this release is not safe, or "" if it is."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="tieredckpt-") as folder:
        both = [fork.Process(target=_change_rank, args=(folder, each)) for each in ((0, 3), (3, 0))]
        for each in both:
            each.start()
        until_s = time.monotonic() + SELF_TEST_S
        for each in both:
            each.join(max(0.0, until_s - time.monotonic()))
            each.kill()
            each.join()
        if code := both[0].exitcode or both[1].exitcode:
            return f"a process that changed its rank ended with code {code} (see its output)"
        found = {path.name: path.read_text() for path in Path(folder).iterdir()}
    if found["0-first"] == found["3-first"]:
        return "two ranks have the same shards"
    unchanged = all(found[f"{rank}-first"] == found[f"{rank}-second"] for rank in (0, 3))
    return "" if unchanged else "a process that changed its rank has other shards than a new one"


def _change_rank(folder: str, ranks: tuple[int, int]) -> None:
    """Write which shards this process has with each rank. Runs in a process of its own."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers "fake"

    dist.set_debug_level(dist.DebugLevel.OFF)  # DETAIL adds a group that communicates
    gc.freeze()  # drop_groups has less to look at
    for world, rank in zip(("first", "second"), ranks, strict=True):
        drop_groups()
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=4)
        forget_last_world()
        Path(folder, f"{rank}-{world}").write_text(_shards())


def _shards() -> str:
    """Return this rank's parts of a model, an optimizer and tensors, on a mesh of 2 x 2."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(35.0).view(7, 5)
    # Uneven in both dimensions of the mesh: what a redistribution knows differs between ranks.
    rows = distribute_tensor(whole, mesh, [Shard(0), Shard(0)], src_data_rank=None)
    half = rows.redistribute(mesh, [Shard(0), Replicate()])
    zeros = torch.zeros_like(half)  # what half has is arbitrary without communication
    model = torch.nn.Linear(5, 7)
    model.load_state_dict({"weight": whole, "bias": whole[:, 0]})
    fully_shard(model, mesh=mesh)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    state = {"rows": rows + torch.zeros_like(rows), "half": zeros, "model": model.state_dict()}
    state["optimizer"] = list(optimizer.state.values())
    found = []
    for name, leaf in flat(state).items():
        local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        found.append((name, sorted(parts({name: leaf})[name][1]), local.shape, local.tolist()))
    return repr(found)


def forget_last_world() -> None:
    """Clear caches that know this process's rank.

    Equal device meshes of different ranks are one key of DTensor's caches, which hand out the old
    mesh with its old coordinate: a process with a new rank would load and save another rank's
    shard. Dynamo compiles ``dist.get_rank()`` into a constant.
    """
    from torch.distributed.tensor import _redistribute, debug

    caches: Any = debug
    caches._clear_sharding_prop_cache()
    caches._clear_fast_path_sharding_prop_cache()
    caches._clear_python_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """The leaves of a state without Stateful objects, by DCP's names."""
    return dict(flatten_state_dict(state)[0])


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor."""
Parts = tuple[int, frozenset[Box]]
"""Elements of a whole tensor, and one rank's parts of it; of other values 0 and none."""


def parts(state: dict[str, Any]) -> dict[str, Parts]:
    """By name, what of a state a rank has, as DCP would plan the save of it."""
    found: dict[str, Parts] = {}
    for name, leaf in flat(state).items():
        found[name] = 0, frozenset()
        if isinstance(leaf, torch.Tensor | ShardedTensor):
            data = [item.tensor_data for item in planned(name, leaf) if item.tensor_data]
            # A hook may plan a local tensor as a part of a larger one.
            whole = max([leaf.size().numel(), *(each.size.numel() for each in data)])
            boxes = [(tuple(each.chunk.offsets), tuple(each.chunk.sizes)) for each in data]
            found[name] = whole, frozenset(boxes)
    return found


# --- leaving a collective -------------------------------------------------------------------------


class SlicedWaits:
    """While active, a wait for a collective ends when ``check`` raises.

    gloo does not wake a rank that waits for the rest of a message whose sender died. Three kinds of
    waits are as they were: between two ranks, where gloo closes all connections at a time-out; of
    compiled graphs (``_c10d_functional.wait_tensor``); and of a process that uses NCCL, whose
    communicators are aborted instead. A reduce-scatter of gloo ignores the limit of its wait.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._wait: Any = None

    def __enter__(self) -> None:
        self._wait = plain = dist.Work.wait
        check = self._check

        def wait(work: Any, timeout: timedelta = _NO_LIMIT) -> bool:
            sliced = work._get_op_type() not in _BETWEEN_TWO and timeout == _NO_LIMIT
            # A wait for NCCL with a limit would block the host, which without one it does not.
            while sliced and not (uses_cuda() and _has_nccl()):
                started_s = time.monotonic()
                try:
                    return bool(plain(work, timedelta(seconds=SLICE_S)))
                except RuntimeError:
                    if work.is_completed():
                        break  # the collective itself failed: raised below
                    # So has a reduce-scatter of gloo, which is never completed.
                    if time.monotonic() - started_s < SLICE_S / 2:
                        raise
                check()
            return bool(plain(work, timeout))

        dist.Work.wait = wait  # type: ignore[method-assign,assignment]

    def __exit__(self, *_: object) -> None:
        dist.Work.wait = self._wait  # type: ignore[method-assign]


class Connection(NamedTuple):
    """A TCP connection of this process: its descriptor, and the address at its other end."""

    descriptor: int
    address: str
    port: int


def connections() -> dict[int, Connection]:
    """All of them, by inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            info = os.stat(f"/proc/self/fd/{name}")
            if not stat.S_ISSOCK(info.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.type == socket.SOCK_STREAM and sock.family != socket.AF_UNIX:
                    address, port = sock.getpeername()[:2]
                    address = address.removeprefix("::ffff:")
                    found[info.st_ino] = Connection(int(name), address, port)
    return found


def cut(descriptors: Collection[int]) -> None:
    """Shut connections of gloo down once no message is under way, or after QUIET_S_MAX.

    The groups stay registered: a script that runs outside of a collective must not find itself
    without a group, because DCP would then save one rank's shard as a whole checkpoint.
    """
    until_s, quiet = time.monotonic() + QUIET_S_MAX, 0
    while quiet < _QUIET_CHECKS and time.monotonic() < until_s:
        time.sleep(_CHECK_S)
        quiet = 0 if any(map(_has_bytes_under_way, descriptors)) else quiet + 1
    for descriptor in descriptors:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
            sock.shutdown(socket.SHUT_RDWR)


def _has_bytes_under_way(descriptor: int) -> bool:
    try:
        counts = [
            struct.unpack("i", fcntl.ioctl(descriptor, request, bytes(4)))[0]
            for request in (termios.FIONREAD, termios.TIOCOUTQ)
        ]
    except OSError:  # closed meanwhile
        return False
    return any(counts)


def uses_cuda() -> bool:
    """Whether this process has a context on a device."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _has_nccl() -> bool:
    """Whether a process group of this process uses NCCL; a work does not know its backend."""
    return any("nccl" in config for config in list(c10d._world.pg_backend_config.values()))


def check_device() -> None:
    """Raises RuntimeError if the device of this process has failed.

    Some errors, such as a failed assertion on the device, break a process's context for good.
    """
    if uses_cuda():
        torch.cuda.synchronize()


def free_device_memory() -> None:
    """Return what no tensor uses to the device.

    Blocks are kept by stream, and each generation's model gets others of torch's 32 streams.
    """
    if uses_cuda():
        torch.cuda.empty_cache()


def abort_nccl() -> None:
    """Abort the NCCL communicators, whose kernels would wait for dead peers for ever."""
    for group in list(c10d._world.pg_map):
        with contextlib.suppress(Exception):
            backend = group._get_backend(torch.device("cuda"))
            if hasattr(backend, "abort"):
                backend.abort()


def drop_groups(wait_s: float = 0.0) -> None:
    """Destroy all process groups; waits at most ``wait_s`` for gloo's threads.

    A group's destructor joins them, and a thread in a dead connection ends at gloo's own timeout.
    A process must not exit meanwhile: C++ would abort it.
    """
    if dist.is_initialized():
        groups = list(c10d._world.pg_map)
        dist.destroy_process_group()
        _empty_meshes()
        dropping = threading.Thread(target=groups.clear, name="tck-live-drop", daemon=True)
        dropping.start()
        dropping.join(wait_s)
    c10d._world.group_count = 0  # an init that failed has counted: keys are named by it


def _empty_meshes() -> None:
    """Device meshes hold their groups, and torch 2.11 never frees those of which it knows specs."""
    for each in gc.get_objects():
        if issubclass(type(each), DeviceMesh):
            vars(each).get("_pg_registry", {}).clear()


@contextlib.contextmanager
def refusals() -> Iterator[Callable[..., None]]:
    """While active, what cannot survive a change of the world raises UsageError.

    That is a script's own ``init_process_group``, for which torch's is yielded, and saves in a
    process, whose group of their own nothing would wake.
    """
    init = dist.init_process_group
    executor: Any = _ProcessBasedAsyncCheckpointExecutor
    save = executor.execute_save
    dist.init_process_group = _refuse(
        "inside of live.run the process group belongs to the generation: call "
        "world.init_process_group(backend) instead of dist.init_process_group()"
    )
    executor.execute_save = _refuse(
        "inside of live.run a save in a process would outlive its world: leave out "
        'executor="process"'
    )
    try:
        yield init
    finally:
        dist.init_process_group, executor.execute_save = init, save


def _refuse(reason: str) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise UsageError(reason)

    return refuse
