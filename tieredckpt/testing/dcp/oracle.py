"""What every value of a scenario must be, computed from (name, step, index) alone.

A load is compared with these, never with what was saved or with what another load gave: a plug-in
that swaps two tensors, or two steps, or returns the destination untouched, is found out.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, distribute_tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def whole(
    name: str, step: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The tensor ``name`` of ``step``: arbitrary bits, also those of NaNs and denormal numbers."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    words = -(-count * dtype.itemsize // 8)
    seed = np.uint64(zlib.crc32(f"{name}@{step}".encode()))
    with np.errstate(over="ignore"):
        value = (np.arange(1, words + 1, dtype=np.uint64) + (seed << np.uint64(20))) * _GOLDEN
        value = (value ^ (value >> np.uint64(30))) * _MIX
        value ^= value >> np.uint64(27)
    data = value.view(np.uint8)[: count * dtype.itemsize].copy()
    if dtype == torch.bool:
        data &= 1
    return torch.from_numpy(data).view(dtype).reshape(shape)


def tame(
    name: str, step: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Small integers, which every dtype of numbers represents exactly: for scenarios that cast."""
    return (whole(name, step, shape, torch.uint8) % 120).to(dtype)


def local_of(like: DTensor, name: str, step: int) -> torch.Tensor:
    """This rank's piece of ``whole`` for a DTensor of that mesh and those placements."""
    full = whole(name, step, tuple(like.shape), like.dtype)
    # src_data_rank=None: everybody cuts its own copy; nothing is sent.
    piece = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    return piece.to_local()


def value(name: str, step: int) -> dict[str, Any]:
    """A nest of plain values."""
    number = zlib.crc32(f"{name}@{step}".encode())
    return {
        "int": number << 40,
        "float": number / 7,
        "text": f"{name}@{step} größer 数",
        "none": None,
        "flag": number % 2 == 0,
        "bytes": bytes(number % 251 for _ in range(9)),
        "list": [number, [step, {"deep": f"{name}!"}], ()],
        "tuple": (step, name, (number,)),
        "empty": {},
    }


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a nested state, and its name."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, dict):
        for key, inner in state.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(state, list | tuple):
        for number, inner in enumerate(state):
            yield from leaves(inner, f"{path}.{number}")


def fill(state: Any, step: int) -> None:
    """Write into every tensor of ``state`` what it must be at ``step``."""
    with torch.no_grad():
        for name, tensor in leaves(state):
            if isinstance(tensor, DTensor):
                copy_bits(tensor.to_local(), local_of(tensor, name, step))
            elif isinstance(tensor, ShardedTensor):
                full = whole(name, step, tuple(tensor.size()), tensor.dtype)
                for shard in tensor.local_shards():
                    copy_bits(shard.tensor, cut(full, shard.metadata))
            else:
                shape = tuple(tensor.shape)
                copy_bits(tensor.detach(), whole(name, step, shape, tensor.dtype))


def check(state: Any, step: int) -> int:
    """Compare every tensor of ``state``, bit for bit.

    Returns:
        How many tensors were compared.

    Raises:
        AssertionError: One differs; says where first.
    """
    count = 0
    for name, tensor in leaves(state):
        count += 1
        if isinstance(tensor, DTensor):
            assert_same(name, tensor.to_local().detach(), local_of(tensor, name, step))
        elif isinstance(tensor, ShardedTensor):
            full = whole(name, step, tuple(tensor.size()), tensor.dtype)
            for shard in tensor.local_shards():
                assert_same(name, shard.tensor, cut(full, shard.metadata))
        else:
            expected = whole(name, step, tuple(tensor.shape), tensor.dtype)
            assert_same(name, tensor.detach(), expected)
    return count


def cut(full: torch.Tensor, shard: Any) -> torch.Tensor:
    """The part of ``full`` that a ShardMetadata describes."""
    slices = [
        slice(start, start + size)
        for start, size in zip(shard.shard_offsets, shard.shard_sizes, strict=True)
    ]
    return full[tuple(slices)]


def copy_bits(into: torch.Tensor, source: torch.Tensor) -> None:
    """Copy without looking at values, for dtypes that torch does not compute with as well."""
    assert into.dtype == source.dtype
    into.copy_(source)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in the order of its elements."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def assert_same(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Same dtype, shape and bits.

    Raises:
        AssertionError: They differ; says where first.
    """
    assert got.dtype == expected.dtype, f"{name}: dtype {got.dtype}, not {expected.dtype}"
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, not {expected.shape}"
    wrong = (bits(got) != bits(expected)).nonzero()
    if len(wrong):
        where = int(wrong[0]) // got.dtype.itemsize
        raise AssertionError(
            f"{name}: {len(wrong)} of {bits(got).numel()} bytes differ, first in element {where}: "
            f"{got.reshape(-1)[where]} instead of {expected.reshape(-1)[where]}"
        )
