"""Casts of a load: which of them may change values, and whether they did.

A cast between floating types may round: a value survives if it is in the range of the new type, or
infinite or NaN in both. In all other casts a value survives if it is the same number.
"""

from __future__ import annotations

import functools

import torch

from tieredckpt.errors import UsageError


@functools.cache
def may_lose(stored: torch.dtype, target: torch.dtype) -> bool:
    """Whether ``stored`` has numbers that ``target`` has not; True if torch does not know."""
    if stored in (target, torch.bool):
        return False
    if stored.is_complex and not target.is_complex:
        return True
    stored, target = stored.to_real(), target.to_real()
    try:
        if not target.is_floating_point:
            one, other = torch.iinfo(stored), torch.iinfo(target)
            return one.min < other.min or one.max > other.max
        to = torch.finfo(target)
        if not stored.is_floating_point:
            return torch.iinfo(stored).max > 2 / to.eps  # up to there it has each whole number
        of = torch.finfo(stored)
        return of.max > to.max or of.eps < to.eps or of.tiny < to.tiny
    except (TypeError, RuntimeError):  # such as a float to an integer, or types below a byte
        return True


def put_unchanged(key: str, target: torch.Tensor, stored: torch.Tensor) -> None:
    """Copy ``stored``, a host tensor, into ``target``.

    Raises:
        UsageError: A value of it does not survive the cast; ``target`` is as it was.
    """
    if may_lose(stored.dtype, target.dtype) and not _survives(stored, target.dtype):
        raise UsageError(
            f"{key!r} is {stored.dtype} in the checkpoint and {target.dtype} in the state, and not "
            f"every value survives that: make the tensor {stored.dtype}, or load with strict=False",
            state_key=key,
        )
    target.copy_(stored)


def _survives(stored: torch.Tensor, dtype: torch.dtype) -> bool:
    if stored.is_complex():
        if not dtype.is_complex:
            return False
        stored = torch.view_as_real(stored)
    dtype = dtype.to_real()
    floats = stored.is_floating_point() and dtype.is_floating_point
    if floats and stored.itemsize > 1:  # torch has no aminmax of float8
        low, high = map(float, stored.aminmax())
        if torch.finfo(dtype).min <= low and high <= torch.finfo(dtype).max:
            return True
    cast = stored.to(dtype)
    before, after = stored.double(), cast.double()
    if floats:
        inside = (before >= torch.finfo(dtype).min) & (before <= torch.finfo(dtype).max)
        return bool((inside | (after == before) | (after.isnan() & before.isnan())).all())
    # Both tests: an integer that wraps is equal after the way back; a double may be rounded.
    return bool(((after == before) & (cast.to(stored.dtype) == stored)).all())
