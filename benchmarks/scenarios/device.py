"""Saves and loads of tensors on a device, through host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks import engines
from benchmarks import state as states
from benchmarks.measure import Report, Row, Samples, interleave, ratio_row, timed
from benchmarks.processes import Setup, Spawner
from benchmarks.shapes import GIB, Shape
from benchmarks.state import State

LAYERS = (1.0, 6.5)
"""Times the layers of the shape: states of 2 and of 8 GiB."""
WARM_UP = 3
"""Saves before the first that counts: by then each of the two slots has been written."""
ROUNDS = 8
PINNED = "copies of the tensors, one after the other, from and to pinned memory"


def missing() -> str | None:
    """Why it cannot be measured here."""
    return None if torch.cuda.is_available() else "there is no CUDA device"


def device_process(setup: Setup, report: Report, *, device: str) -> Samples:
    """Saves and loads in turn with raw copies of the same tensors."""
    on_host = states.filled(setup.shape)
    state = {name: tensor.to(device) for name, tensor in on_host.items()}
    pinned = {
        name: torch.empty_like(tensor, pin_memory=device != "cpu")
        for name, tensor in on_host.items()
    }
    saved: State = {}

    with engines.opened(setup) as engine:
        for step in range(WARM_UP):
            engines.save(engine, state, step)
        engines.wait_prefaulted(engine)

        def save(number: int) -> float:
            _touch(state, number)
            saved.update({name: tensor.clone() for name, tensor in state.items()})
            _wait(device)
            return engines.save(engine, state, WARM_UP + 2 * number)

        def load(_number: int) -> float:
            for tensor in state.values():
                _octets(tensor).zero_()
            _wait(device)
            seconds = engines.load(engine, state)
            _wait(device)
            wrong = [name for name in state if not _same(state[name], saved[name])]
            assert not wrong, f"loaded something else than was saved: {wrong[:3]}"
            return seconds

        def save_host(number: int) -> float:
            _touch(on_host, number)
            return engines.save(engine, on_host, WARM_UP + 2 * number + 1)

        return interleave(
            min(setup.repeat, ROUNDS),
            report,
            {
                "to_pinned": lambda _: timed(lambda: _copy(state, pinned, device)),
                "to_host": lambda _: timed(lambda: _copy(state, on_host, device)),
                "save": save,
                "from_pinned": lambda _: timed(lambda: _copy(pinned, state, device)),
                "from_host": lambda _: timed(lambda: _copy(on_host, state, device)),
                "load": load,
                "save_host": save_host,
            },
        )


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(_octets(one), _octets(other))  # as numbers, NaNs would differ


def _touch(state: Mapping[str, torch.Tensor], number: int) -> None:
    for tensor in state.values():
        _octets(tensor)[:2].fill_(number % 251)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _copy(sources: State, targets: State, device: str) -> None:
    for name, source in sources.items():
        targets[name].copy_(source, non_blocking=True)
    _wait(device)


def device(spawn: Spawner) -> list[Row]:
    """Two sizes of state."""
    rows: list[Row] = []
    for times in LAYERS:
        layers = int(times * spawn.setup.shape.layers)
        shape = msgspec.structs.replace(spawn.setup.shape, layers=layers)
        folder = Path(spawn.setup.shm) / f"{layers}-layers"  # an agent of its own: other slots
        folder.mkdir(mode=0o700)
        setup = msgspec.structs.replace(spawn.setup, shape=shape, shm=str(folder))
        samples = dataclasses.replace(spawn, setup=setup).one(device_process, device="cuda")
        rows += _rows(samples, shape)
    return rows


def _rows(samples: Samples, shape: Shape) -> Sequence[Row]:
    size = f"{shape.size_bytes / GIB:.1f} GiB"
    return [
        ratio_row(
            "device", f"dcp.{what} of {size} on the device", samples, ours=what, limit=limit,
            limit_name=PINNED, work_bytes=shape.size_bytes, detail=detail,
            note="Details: copies from and to pageable memory; a save of the same on the host.",
        )
        for what, limit, detail in (
            ("save", "to_pinned", ("to_host", "save_host")),
            ("load", "from_pinned", ("from_host",)),
        )
    ]  # fmt: skip
