"""The state that is saved: tensors of given shapes, sharded over all ranks by rows."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, zeros

from tieredckpt.bench.settings import Settings
from tieredckpt.engine import Engine
from tieredckpt.errors import UsageError
from tieredckpt.format.digest import Hasher
from tieredckpt.storage.file_io import open_regular

State = dict[str, torch.Tensor]
COLUMNS = 1024
_PATTERN_BYTES = 16 << 20
_HEADER_BYTES_MAX = 100 << 20
"""As the safetensors library."""
_SAFETENSORS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class Spec(NamedTuple):
    """A tensor, of all ranks."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def specs(settings: Settings) -> list[Spec]:
    """The tensors of the benchmark. Collective, as it may open an engine.

    Raises:
        UsageError: ``like`` names nothing that has tensors.
        TieredCkptError: The checkpoint of that step cannot be read.
    """
    if not settings.like:
        rows = max(1, settings.size_bytes // (4 * COLUMNS * settings.tensors))
        return [
            Spec(f"tensor.{number:05d}", torch.float32, (rows, COLUMNS))
            for number in range(settings.tensors)
        ]
    path = Path(settings.like)
    if path.exists():
        found = _of_file(path)
    else:
        step = None if settings.like == "latest" else _number(settings.like)
        with Engine.open(settings.config or None, read_only=True) as engine:
            found = _of_metadata(engine.reader(step).read_metadata())
    if not found:
        raise UsageError(f"{settings.like} has no tensors")
    return found


def _number(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"--like {text}: neither a path that exists, nor a step, nor latest")
    return int(text)


def _of_file(path: Path) -> list[Spec]:
    if (path / ".metadata").exists():
        return _of_metadata(FileSystemReader(path).read_metadata())
    try:
        if path.is_dir():
            files = sorted(path.glob("*.safetensors"))
        elif path.suffix == ".json":
            names = json.loads(_first_bytes(path, _HEADER_BYTES_MAX))["weight_map"].values()
            files = [path.parent / name for name in sorted(set(names))]
        else:
            files = [path]
        return [spec for file in files for spec in _of_safetensors(file)]
    except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
            ValueError) as error:  # fmt: skip
        raise UsageError(
            f"{path} is no safetensors file, and neither a folder of such, their index, nor a "
            f"stock DCP folder: {type(error).__name__} {str(error)!r:.200}"
        ) from error


def _of_metadata(metadata: Metadata) -> list[Spec]:
    return [
        Spec(name, each.properties.dtype, tuple(each.size))
        for name, each in metadata.state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    ]


def _of_safetensors(path: Path) -> list[Spec]:
    """From the header: its length in 8 bytes, and JSON (the format's own page)."""
    size = int.from_bytes(_first_bytes(path, 8), "little")
    if not 0 < size <= _HEADER_BYTES_MAX:
        raise ValueError(f"a header of {size} bytes")
    header: dict[str, Any] = json.loads(_first_bytes(path, 8 + size)[8:])
    header.pop("__metadata__", None)
    found = [
        Spec(name, _SAFETENSORS[about["dtype"]], tuple(about["shape"]))
        for name, about in header.items()
    ]
    for each in found:
        if not all(type(n) is int and n >= 0 for n in each.shape):
            raise ValueError(f"the shape of {each.name}")
    return found


def _first_bytes(path: Path, size: int) -> bytes:
    """The first bytes of a regular file: a pipe is not waited for."""
    with io.FileIO(open_regular(path, os.O_RDONLY, str(path))) as file:
        return file.read(size)


def make(found: list[Spec], device: torch.device, mesh: DeviceMesh | None) -> State:
    """The tensors, all zeros; with a mesh, as shards by rows."""
    state: State = {}
    for spec in found:
        if mesh is None or not spec.shape or spec.shape[0] < mesh.size():
            state[spec.name] = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        else:
            state[spec.name] = zeros(
                spec.shape, dtype=spec.dtype, device_mesh=mesh, placements=[Shard(0)]
            )
    return state


def fill(state: State) -> None:
    """Random bytes, repeated; no two tensors are equal. A bool stays False."""
    random = torch.Generator().manual_seed(0)
    pattern = torch.randint(0, 256, (_PATTERN_BYTES,), dtype=torch.uint8, generator=random)
    for tensor in state.values():
        flat = octets(tensor)
        for start in range(0, flat.numel() * (tensor.dtype is not torch.bool), _PATTERN_BYTES):
            piece = flat[start : start + _PATTERN_BYTES]
            piece.copy_(pattern[: piece.numel()])
    change(state, 0)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part as flat bytes, in place."""
    return local(tensor).view(-1).view(torch.uint8)


def num_bytes(state: State) -> int:
    """Of this rank's parts."""
    return sum(local(each).nbytes for each in state.values())


def change(state: State, step: int) -> None:
    """As an update of all tensors would: no two saves and no two tensors are of the same bytes."""
    for number, tensor in enumerate(state.values()):
        flat, value = octets(tensor), (step * 131 + number) % (1 << 16)
        if tensor.dtype is not torch.bool and flat.numel() >= 2:
            flat[0], flat[1] = value & 255, value >> 8


def forget(state: State) -> None:
    """Overwrite everything, so that only a load can bring it back."""
    for tensor in state.values():
        octets(tensor).zero_()


def content(state: State) -> str:
    """A digest of this rank's parts."""
    hasher = Hasher()
    for tensor in state.values():
        flat = octets(tensor)
        for start in range(0, flat.numel(), _PATTERN_BYTES):
            hasher.update(flat[start : start + _PATTERN_BYTES].cpu().numpy().data)
    return hasher.hexdigest()


def total_bytes(found: list[Spec]) -> int:
    """Of all ranks."""
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in found)
