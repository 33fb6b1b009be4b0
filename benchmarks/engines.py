"""The only place that knows how tieredckpt is opened, watched and stopped from the outside."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from benchmarks.measure import minor_faults
from benchmarks.processes import Setup
from benchmarks.shapes import MIB
from benchmarks.state import State
from tieredckpt import Engine

TIER = "nvme"
WAIT_S = 120.0
"""Deadline of anything that happens in the background."""
IDLE_POLL_S = 0.02


def runtime_dir(setup: Setup) -> Path:
    """Where the agent and its slots live."""
    return Path(setup.shm) / "agent"


def tier_dir(setup: Setup) -> Path:
    """What the file tier writes to."""
    return Path(setup.disk) / "tier"


def config(setup: Setup, *, spill: bool) -> dict[str, object]:
    """The configuration: keep one checkpoint, and a file tier for every save if ``spill``."""
    tier = {
        "name": TIER,
        "url": tier_dir(setup).as_uri(),
        "every": "save",
        "keep": {"last": 1},
    }
    return {
        "namespace": "benchmark",
        # Kept + in flight + spill source, each up to an eighth larger than the state; and some.
        "memory": {"capacity": f"{setup.work_bytes * 4 // MIB + 64}MiB", "keep": {"last": 1}},
        "tiers": [tier] if spill else [],
        "agent": {"runtime_dir": str(runtime_dir(setup))},
    }


@contextlib.contextmanager
def opened(setup: Setup, *, spill: bool = False) -> Iterator[Engine]:
    """An engine, closed at the end; the agent that it started goes on."""
    with Engine.open(config(setup, spill=spill)) as engine:
        yield engine


def save(engine: Engine, state: State, step: int) -> float:
    """Seconds that ``dcp.save`` holds up training."""
    start_s = time.perf_counter()
    state_dict_saver.save(state, storage_writer=engine.writer(step))
    return time.perf_counter() - start_s


def save_counting_faults(engine: Engine, state: State, step: int) -> tuple[float, int]:
    """As :func:`save`, and the page faults that this process took meanwhile."""
    before = minor_faults()
    return save(engine, state, step), minor_faults() - before


def load(engine: Engine, state: State) -> float:
    """Seconds of ``dcp.load`` of the newest checkpoint into ``state``."""
    start_s = time.perf_counter()
    state_dict_loader.load(state, storage_reader=engine.reader())
    return time.perf_counter() - start_s


def wait_prefaulted(engine: Engine) -> float:
    """Wait until this process has mapped and populated its whole ring; the seconds it took."""
    start_s = time.perf_counter()
    if (task := engine._session.ring._task) is not None:
        task.thread.join(WAIT_S)
        if task.thread.is_alive():
            raise TimeoutError(f"slots are still being prefaulted after {WAIT_S:.0f} s")
    return time.perf_counter() - start_s


def spill_counters(engine: Engine) -> tuple[int, float]:
    """Bytes and seconds that the agent has spent on spills to the file tier so far."""
    (namespace,) = engine.status().namespaces
    (tier,) = namespace.tiers
    return tier.spilled_bytes_total, tier.spill_seconds_total


def wait_idle(engine: Engine) -> None:
    """Wait until the file tier neither copies nor deletes: the disk is free for the next sample.

    Deleting the checkpoint before goes on after a spill has been reported, and takes the file
    system a quarter of the time of writing it; a raw write beside it would be no limit.
    """
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        (tier,) = engine.status().namespaces[0].tiers
        if not (tier.retaining or tier.queued or tier.active_save_id):
            return
        time.sleep(IDLE_POLL_S)
    raise TimeoutError(f"the tier {TIER} is still busy after {WAIT_S:.0f} s")


@contextlib.contextmanager
def timed_requests(engine: Engine) -> Iterator[dict[str, list[float]]]:
    """Time each "seal" and "commit" request of the engine's client while the context lasts."""
    client = engine._session.client
    samples: dict[str, list[float]] = {"seal": [], "commit": []}

    def timing(name: str, method: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            start_s = time.perf_counter()
            result = method(*args, **kwargs)
            samples[name].append(time.perf_counter() - start_s)
            return result

        return call

    for name in samples:
        setattr(client, name, timing(name, getattr(client, name)))
    try:
        yield samples
    finally:
        for name in samples:
            delattr(client, name)


def newest_slot(setup: Setup) -> Path:
    """The slot file that a single save has filled."""
    for path in sorted((runtime_dir(setup) / "slots").iterdir()):
        with path.open("rb") as file:
            if any(file.read(4096)):
                return path
    raise FileNotFoundError("no slot holds anything")


def newest_segment(setup: Setup) -> Path:
    """The segment file in the file tier: the largest file there."""
    files = [path for path in tier_dir(setup).rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def stop_agents(folder: Path, *, limit_s: float = 10.0) -> None:
    """End each process whose command line names ``folder``: SIGTERM, then SIGKILL.

    Nothing else can be met: the folder's name is unique to one scenario of one run.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        pidfds = [os.pidfd_open(pid) for pid in agents(folder)]
        for pidfd in pidfds:
            signal.pidfd_send_signal(pidfd, number)
        deadline_s = time.monotonic() + limit_s
        for pidfd in pidfds:
            select.select([pidfd], [], [], max(0.0, deadline_s - time.monotonic()))
            os.close(pidfd)


def agents(folder: Path) -> list[int]:
    """Ids of other processes that name ``folder`` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if str(folder).encode() in command:
            found.append(int(entry.name))
    return found
