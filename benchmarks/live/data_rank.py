"""A rank that uses a loader, with or without the data cache: ``python -m ... MODE FOLDER [...]``.

It prints one line of JSON. Each mode is a function here.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tieredckpt import data
from tieredckpt.engine import Engine

ROWS = 1 << 20
READY = "ready"


class Rows(Dataset[torch.Tensor]):
    """Rows of so many KiB that take as long to make as a copy."""

    def __init__(self, kib: int) -> None:
        self.kib = kib

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.kib * 256,), float(index))


def loader(kib: int, method: str | None = None, workers: int = 2) -> Any:
    """Batches of eight rows."""
    return StatefulDataLoader(
        Rows(kib), batch_size=8, num_workers=workers, multiprocessing_context=method,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip


def opened(folder: str) -> Engine:
    """An engine of one process, whose agent all ranks of the folder share."""
    return Engine.open(
        {
            "namespace": "bench",
            "memory": {"capacity": "64MiB"},
            "agent": {"runtime_dir": f"{folder}/rt", "idle_timeout": "20s"},
            "data": {"capacity": "1GiB", "ahead": 2, "behind": 2},
        }
    )


def restart(folder: str, kib: int, repeat: int) -> dict[str, list[float]]:
    """Seconds from a new loader to its first batch, with the loader's state of a checkpoint."""
    found: dict[str, list[float]] = {"fork": [], "spawn": [], "cache": []}
    with opened(folder) as engine:
        with closing(data.cached(loader(kib), engine)) as batches:
            next(batches)
            state = batches.state_dict()
            next(batches)
        first = loader(kib)
        next(iter(first))
        before = first.state_dict()
        del first
        for _ in range(repeat):
            began_s = time.perf_counter()
            batches = data.cached(loader(kib), engine)
            batches.load_state_dict(state)
            assert next(batches)[0, 0] == 8.0
            found["cache"].append(time.perf_counter() - began_s)
            batches.close()
            for method in ("fork", "spawn"):
                began_s = time.perf_counter()
                plain = loader(kib, method)
                plain.load_state_dict(before)
                assert next(iter(plain))[0, 0] == 8.0
                found[method].append(time.perf_counter() - began_s)
                del plain
    return found


def steps(folder: str, kib: int, repeat: int) -> dict[str, list[float]]:
    """Seconds of steps of about 50 ms of one core, with the same loader, in turns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    a, b = torch.randn(1000, 1000), torch.randn(1000, 1000)
    began_s = time.perf_counter()
    for _ in range(20):
        (a @ b).sum()
    work = max(1, round(0.05 / (time.perf_counter() - began_s) * 20))
    found: dict[str, list[float]] = {"without": [], "with": []}
    with opened(folder) as engine, closing(data.cached(loader(kib), engine)) as cached:
        plain = iter(loader(kib))
        for number in range(2 * repeat):
            name = ("without", "with")[number // 20 % 2]
            batches = cached if name == "with" else plain
            began_s = time.perf_counter()
            total = next(batches).sum()
            for _ in range(work):
                total = total + (a @ b).sum()
            if number % 20 >= 5:  # the other one has just refilled its buffers
                found[name].append(time.perf_counter() - began_s)
    return found


def memory(folder: str, kib: int, cache: int) -> dict[str, list[float]]:
    """Use batches until the file ``enough`` exists; ``cache``: 0 loader, 1 cache, 2 none."""
    torch.set_num_threads(1)
    with opened(folder) as engine:
        own = loader(kib, workers=4)
        batches: Any = ()
        if cache < 2:
            batches = data.cached(own, engine, coordinate=("dp", 0, 1)) if cache else iter(own)
        number = 0
        while not Path(folder, "enough").exists():
            batch = next(batches) if cache < 2 else None
            number += 1
            if number == 12:
                print(READY, flush=True)
            time.sleep(0.05)
            del batch
        if isinstance(batches, data.Cached):
            batches.close()
    return {}


def main() -> None:
    """``MODE FOLDER NUMBERS...``"""
    mode, folder, *numbers = sys.argv[1:]
    run = {"restart": restart, "steps": steps, "memory": memory}[mode]
    print(json.dumps(run(folder, *map(int, numbers))), flush=True)


if __name__ == "__main__":
    main()
