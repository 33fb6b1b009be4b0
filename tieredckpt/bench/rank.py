"""One rank of a benchmark: process group, state, clocks, and what it deletes at the end."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tieredckpt.bench import state as states
from tieredckpt.bench.clean import clean
from tieredckpt.bench.settings import Result, Settings
from tieredckpt.rpc.messages.base import package_version

_T = TypeVar("_T")


class Rank:
    """One rank: its process group and the state that it saves.

    Attributes:
        settings: Of the benchmark, with rank 0's namespace.
        number, size: Of the ranks.
        device: Of the tensors.
        generation: How often torchrun has started the ranks anew.
        state: The tensors; zeros, if the ranks were started anew.
        started_s: By monotonic clock, when this process had imported everything.
    """

    def __init__(self, settings: Settings) -> None:
        self.started_s = time.monotonic()
        self.generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device(settings.device, local if settings.device == "cuda" else 0)
        backend = "cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(backend)
        self.number, self.size, self.local = dist.get_rank(), dist.get_world_size(), local
        self.settings: Settings = self.gather(settings)[0]
        found = states.specs(self.settings)
        os.environ["TIEREDCKPT_NAMESPACE"] = self.settings.namespace
        os.environ["TIEREDCKPT_AGENT__RUNTIME_DIR"] = self.settings.runtime_dir
        mesh: DeviceMesh | None = None
        if self.size > 1:
            mesh = init_device_mesh(settings.device, (self.size,))
        self.state = states.make(found, self.device, mesh)
        if self.generation == 0:
            states.fill(self.state)
        self.state_bytes = states.total_bytes(found)

    def gather(self, value: _T) -> list[_T]:
        """The value of each rank. Collective."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def worst(self, seconds: float) -> float:
        """The longest of all ranks. Collective."""
        return max(self.gather(seconds))

    @contextmanager
    def timed(self) -> Iterator[list[float]]:
        """Append the seconds that the slowest rank takes, after all have begun together."""
        found: list[float] = []
        self.synchronize()
        dist.barrier()
        began_s = time.perf_counter()
        yield found
        self.synchronize()
        found.append(self.worst(time.perf_counter() - began_s))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def track(self, items: Iterable[_T], text: str) -> Iterable[_T]:
        """With progress on rank 0's standard error."""
        if self.number or not sys.stderr.isatty():
            return items
        return track(items, text, console=Console(stderr=True), transient=True)

    def result(self, **found: Any) -> Result:
        """With what is known of the state and the machine. Collective."""
        machine = {
            "tieredckpt": package_version(), "torch": str(torch.__version__),
            "python": platform.python_version(), "system": platform.platform(),
            "cpus": str(os.cpu_count()), "device": self.settings.device,
        }  # fmt: skip
        if self.device.type == "cuda":
            machine["device"] = torch.cuda.get_device_name(self.device)
        return Result(
            mode=self.settings.mode, machine=machine, ranks=self.size,
            state_bytes=self.state_bytes, rank_bytes=max(self.gather(states.num_bytes(self.state))),
            tensors=len(self.state), step_s=self.settings.step_s, **found,
        )  # fmt: skip

    def clean(self) -> None:
        """Delete everything of the benchmark. Collective; no engine is open."""
        dist.barrier()
        if self.local == 0:
            clean(self.settings)
        dist.barrier()
