"""Builds the tensors, and proves that a load brought back what was saved."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import xxhash
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.limits import Octets
from benchmarks.shapes import MIB, Shape

State = dict[str, torch.Tensor]
PATTERN_BYTES = 16 * MIB


def empty(shape: Shape, *, parts: int = 1) -> State:
    """The tensors, uninitialised: their pages are not there until they are touched.

    With ``parts``, one rank's share of rows of each.
    """
    return {
        spec.name: torch.empty(
            (spec.shape[0] // parts, *spec.shape[1:]), dtype=getattr(torch, spec.dtype)
        )
        for spec in shape.tensors()
    }


def filled(shape: Shape, *, parts: int = 1, seed: int = 0) -> State:
    """The tensors full of random bits, made in place: no second copy of the state ever exists.

    One random pattern is repeated, which costs a copy and not a generator run; :func:`touch`
    makes every tensor distinct.
    """
    state = empty(shape, parts=parts)
    pattern = np.random.default_rng(seed).integers(0, 256, PATTERN_BYTES, dtype=np.uint8)
    for tensor in state.values():
        view = octets(tensor)
        for start in range(0, view.size, PATTERN_BYTES):
            piece = view[start : start + PATTERN_BYTES]
            np.copyto(piece, pattern[: piece.size])
    touch(state, 0)
    return state


def sharded(state: State, mesh: DeviceMesh) -> State:
    """The same memory as this rank's shards (by rows) of tensors ``mesh.size()`` times as tall."""
    return {
        name: DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
        for name, tensor in state.items()
    }


def small(count: int = 100, total_bytes: int = 1_000_000) -> State:
    """Many small fp32 tensors, so that what is measured is the cost per save, not per byte."""
    return {
        f"small.{number:03d}": torch.full((total_bytes // count // 4,), float(number))
        for number in range(count)
    }


def touch(state: Mapping[str, torch.Tensor], step: int) -> None:
    """Write ``step`` into the first element of each tensor: no two saves are of the same bytes."""
    for number, tensor in enumerate(state.values()):
        octets(tensor)[:2] = np.frombuffer(
            ((step * 131 + number) % 65536).to_bytes(2, "little"), np.uint8
        )


def resident_copy(state: Mapping[str, torch.Tensor]) -> list[Octets]:
    """Memory like the tensors', with all pages there: the target of the memcpy limit."""
    return [octets(tensor.clone()) for tensor in state.values()]


def octets(tensor: torch.Tensor) -> Octets:
    """The tensor's own memory as flat bytes."""
    view: Octets = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return view


def size_bytes(state: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def digest(state: Mapping[str, torch.Tensor]) -> str:
    """One digest over names and bytes, so that a load can be checked without a second copy."""
    whole = xxhash.xxh3_128()
    for name, tensor in state.items():
        whole.update(name.encode())
        whole.update(octets(tensor).data)
    return whole.hexdigest()


def spoil(state: Mapping[str, torch.Tensor]) -> None:
    """Change each tensor, so that a load that skipped one cannot pass :func:`digest`."""
    for tensor in state.values():
        view = octets(tensor)
        view[:4096] ^= 255
        view[-1:] ^= 255
