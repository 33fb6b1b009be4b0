"""Whether the pieces of each tensor of a plan make it up: all of it, each element once.

A piece from a to b stands for the polynomial that is the product over its dimensions d of
x[d, a[d]] - x[d, b[d]], with a variable for each coordinate of each dimension. The polynomials of
the pieces add up to that of the tensor if and only if each element is in exactly one piece (they
are the differences of the pieces' indicator functions), and an empty piece adds nothing. They are
compared at random points modulo a prime, for all tensors at once: a sort, in any number of
dimensions. Other polynomials of at most 64 dimensions pass with a probability below 2**-74.
"""

from __future__ import annotations

import math

import numpy as np

from tieredckpt.errors import UsageError
from tieredckpt.format.parts import MARK, join_parts
from tieredckpt.format.plan import Column, Plan, TensorEntry, build_plan

NAME_CHARS_MAX = 200
"""Of a key in an error."""

_PRIME = (1 << 31) - 1
_POINTS = 3


def check_cover(plan: Plan) -> None:
    """Make sure that the pieces make up each tensor; those of a wrapper by their places in it.

    Args:
        plan: Of a whole checkpoint, not of one rank's part.

    Raises:
        UsageError: Pieces leave a hole or overlap; field ``state_key`` names the tensor.
        IntegrityError: The parts of a wrapper are malformed.
    """
    if any(MARK in name for name in plan.names):
        try:
            plan = build_plan(join_parts(plan.entries())[0], structures=plan.structures)
        except ValueError as error:
            raise UsageError(f"the parts of wrappers do not fit together: {error}") from error
    wrong = _not_once(plan).tolist()
    if wrong:
        entry = [each for each in plan.entries() if isinstance(each, TensorEntry)][wrong[0]]
        name, whole = entry.name[:NAME_CHARS_MAX], math.prod(entry.shape)
        volume = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        what = f"the pieces of {name!r} have {volume} elements together, the tensor {whole}"
        if volume == whole:
            what = f"there are overlapping pieces of {name!r}, which leave a hole elsewhere"
        raise UsageError(
            f"{what}: a sharded tensor must be saved by all of its ranks, each element once",
            state_key=name,
        )


def _not_once(plan: Plan) -> Column:
    """The numbers of the tensors of which some element is in no piece or in several."""
    # The tensors follow their pieces, as boxes of their own.
    dims = np.concatenate((np.repeat(plan.num_dims, plan.num_chunks), plan.num_dims))
    lows = np.concatenate((plan.chunk_offsets, np.zeros_like(plan.shapes)))
    highs = np.concatenate((plan.chunk_offsets + plan.chunk_sizes, plan.shapes))
    firsts = np.cumsum(dims) - dims
    axes = np.arange(len(lows)) - np.repeat(firsts, dims)
    coordinates, places = np.unique(np.concatenate((lows, highs)), return_inverse=True)
    both = np.tile(axes, 2) * len(coordinates) + places
    variables, which = np.unique(both, return_inverse=True)
    low, high = which[: len(lows)], which[len(lows) :]
    ends = np.cumsum(plan.num_chunks)
    once = np.ones(len(ends), np.bool_)
    random = np.random.default_rng()
    for _ in range(_POINTS):
        point = random.integers(_PRIME, size=len(variables))
        factors = (point[low] - point[high]) % _PRIME
        values = np.ones(len(dims), np.int64)
        for axis in range(int(dims.max(initial=0))):
            deep = np.flatnonzero(dims > axis)
            values[deep] = values[deep] * factors[firsts[deep] + axis] % _PRIME
        sums = np.concatenate(([0], np.cumsum(values[: len(values) - len(ends)])))
        own = sums[ends] - sums[ends - plan.num_chunks]
        once &= (own - values[len(values) - len(ends) :]) % _PRIME == 0
    return np.flatnonzero(~once)
