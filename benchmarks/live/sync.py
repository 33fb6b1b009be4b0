"""Scenario ``sync``: what ``begin`` and ``update`` add to a step that keeps the device busy.

One rank without communication: a loop without live recovery prepares its next step while the device
computes, and ``update`` waits for the device first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import engines
from benchmarks.live.bench import Bench
from benchmarks.live.runs import TAIL_CHARS, RunError, environment
from benchmarks.processes import ROOT
from tieredckpt import live

LAYERS = 8
SIZES = {"cuda": ((4096, 4096), (4096, 32768)), "cpu": ((128, 128), (256, 512))}
"""Widths and rows of the model's batch, for a short step and a long one."""
BLOCK_STEPS = 20
ROUNDS = 6
LIMIT_S = 120.0


def sync(bench: Bench) -> None:
    """Steps with and without live recovery, by blocks that take turns in one process."""
    rows = []
    for number, (width, batch) in enumerate(SIZES[bench.device]):
        bench.report(f"batch of {batch}", number, len(SIZES[bench.device]))
        folder = bench.shm / str(batch)
        folder.mkdir(mode=0o700)
        command = [sys.executable, "-m", "benchmarks.live.sync", "--device", bench.device]
        command += ["--width", str(width), "--batch", str(batch), "--folder", str(folder)]
        if bench.quick:
            command.append("--quick")
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment(folder), capture_output=True, text=True,
                timeout=LIMIT_S, check=False,
            )  # fmt: skip
        finally:
            engines.stop_agents(folder)
        if done.returncode:
            raise RunError(done.stderr[-TAIL_CHARS:])
        found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
        plain, ours = sorted(found["plain"]), sorted(found["live"])
        step_s = plain[len(plain) // 2]
        bench.ratio(
            f"step of {step_s * 1e3:.1f} ms without communication, 1 rank", ours, plain,
            target=None, limit_name="the same step, not in world.update",
            note=f"{(ours[len(ours) // 2] - step_s) * 1e6:.0f} us more; {LAYERS} linear layers of "
            f"{width}, {batch} rows, blocks of {BLOCK_STEPS} steps.",
        )  # fmt: skip
        for name, each in found.items():
            rows.append([str(batch), name, *(f"{value * 1e3:.3f}" for value in each)])
    headings = ("rows", "loop", *(str(number + 1) for number in range(len(rows[0]) - 2)))
    bench.table("Milliseconds per step, by block", headings, rows)


def blocks(world: Any, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per step of each block, by loop."""
    world.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(args.width, args.width, device=args.device) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows = torch.randn(args.batch, args.width, device=args.device)
    world.load({"model": model, "optimizer": optimizer})
    count, steps = (2, 4) if args.quick else (ROUNDS, BLOCK_STEPS)
    found: dict[str, list[float]] = {"plain": [], "live": []}
    step = 0
    for number in range(count + 1):  # the first block is to warm up
        for name in found:
            wait(args.device)
            started_s = time.perf_counter()
            for _ in range(steps):
                with update(world, name, step := step + 1):
                    optimizer.step()
                optimizer.zero_grad()
                with torch.autocast(args.device, torch.bfloat16):
                    loss = model(rows).float().square().mean()
                loss.backward()
            wait(args.device)
            if number:
                found[name].append((time.perf_counter() - started_s) / steps)
    return found


@contextlib.contextmanager
def _begun(world: Any, step: int) -> Iterator[None]:
    world.begin(step)
    with world.update(step):
        yield


def update(world: Any, name: str, step: int) -> AbstractContextManager[None]:
    """The update of a step, with live recovery or without."""
    return _begun(world, step) if name == "live" else contextlib.nullcontext()


def wait(device: str) -> None:
    """For the device, if there is one."""
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    """One process, without a supervisor: one generation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    config = {
        "namespace": "benchmark-live",
        "memory": {"capacity": "8GiB"},
        "agent": {"runtime_dir": str(args.folder / "rt"), "idle_timeout": "1 min"},
    }
    print(json.dumps(live.run(lambda world: blocks(world, args), config)))


if __name__ == "__main__":
    main()
