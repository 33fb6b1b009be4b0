"""States to save, and where their bytes lie, for tests of saving and loading."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tieredckpt.engine import Engine
from tieredckpt.errors import IntegrityError
from tieredckpt.format.manifest import Manifest
from tieredckpt.storage.memory.slot import read_label

GIB = 1 << 30


def config(runtime_dir: Path, **more: Any) -> dict[str, Any]:
    """A configuration for a test: small, quick to give up."""
    found: dict[str, Any] = {
        "namespace": "test",
        "memory": {"capacity": "256MiB", "keep": {"last": 3}},
        "agent": {"runtime_dir": str(runtime_dir), "start_timeout": "60s"},
        "recovery": {"wait": "0s"},
        "save": {"timeout": "60s", "on_error": "raise"},
    }
    for key, value in more.items():
        found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    return found


def save(engine: Engine, step: int, state: dict[str, Any], **options: Any) -> None:
    """``dcp.save`` without the warning about a missing process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        stream = options.pop("stream", "default")
        dcp.save(state, storage_writer=engine.writer(step, stream), **options)


def load(state: dict[str, Any], reader: Any, **options: Any) -> None:
    """``dcp.load`` likewise."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.load(state, storage_reader=reader, **options)


def blank(state: Any) -> Any:
    """The same structure with other content."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return [blank(value) for value in state] if isinstance(state, list) else None


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in C order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def slot_of(runtime_dir: Path, segment_id: str) -> Path:
    """The slot file that holds a sealed segment."""
    for path in (runtime_dir / "slots").iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            if size <= 4096:  # the agent is making it just now
                continue
            label = read_label(fd, size - 4096)
        except IntegrityError:
            continue
        finally:
            os.close(fd)
        if label.state == "sealed" and label.segment_id == segment_id:
            return path
    raise AssertionError(f"no slot holds {segment_id}")


def manifest_of(engine: Engine, step: int, stream: str = "default") -> Manifest:
    """The newest restorable checkpoint of ``step``."""
    chosen = engine._session.history.recovery_plan(stream, step=step).chosen
    assert chosen is not None
    return chosen.manifest


def flip(path: Path, offset: int, count: int = 1) -> None:
    """Flip one bit in each of ``count`` bytes of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        data = bytes(byte ^ 1 for byte in file.read(count))
        file.seek(offset)
        file.write(data)
