"""What depends on the number of ranks of a job whose world changes: pure functions.

The rows of a step depend on the step alone, and the share of a rank on the world alone. So every
row is seen once over any sequence of resizes, faults and steps that are done once more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tieredckpt.errors import UsageError

Rule = Literal["constant", "linear", "sqrt"]


def worlds(smallest: int, largest: int, group: int = 1) -> tuple[int, ...]:
    """The numbers of ranks that a job may have, in increasing order.

    Args:
        smallest, largest: Bounds, both allowed.
        group: Ranks that hold one whole state together, such as those of a dimension ``shard``.
    """
    return tuple(size for size in range(group, largest + 1, group) if size >= smallest)


def largest_world(allowed: Sequence[int], available: int) -> int:
    """The largest allowed number of ranks for so many processes; 0: there are too few."""
    return max((size for size in allowed if size <= available), default=0)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that go through the model together.

    Attributes:
        start, stop: Rows of the global batch, counted from 0.
        weight: Factor of their mean loss before ``backward``. The mean over all ranks of the
            gradients, as FSDP and DDP compute it, is then that of the mean loss of all rows.
    """

    start: int
    stop: int
    weight: float


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's rows of a global batch: ``start`` to ``stop``, in ``parts``."""

    parts: tuple[Part, ...]

    @property
    def start(self) -> int:
        """Its first row."""
        return self.parts[0].start

    @property
    def stop(self) -> int:
        """The row after its last one."""
        return self.parts[-1].stop


def share(global_batch: int, size: int, rank: int, micro: int | None = None) -> Share:
    """The share of a rank.

    The shares of all ranks divide the batch in the order of the ranks, the first ones with one row
    more if it does not divide evenly. All have the same number of parts, since a forward pass of a
    sharded model is collective.

    Args:
        global_batch: Rows of one update of all ranks.
        size, rank: Of the world.
        micro: Most rows of a part; None: there is one part.

    Raises:
        UsageError: There are fewer rows than ranks, or no equal number of parts.
    """
    if not 0 <= rank < size or (micro is not None and micro < 1):
        raise UsageError(f"there is no share of rank {rank} of {size} with micro={micro}")
    if global_batch < size:
        raise UsageError(f"a global batch of {global_batch} rows has none for some of {size} ranks")
    count = math.ceil(math.ceil(global_batch / size) / (micro or global_batch))
    if global_batch // size < count:
        raise UsageError(
            f"{global_batch} rows cannot be divided among {size} ranks in equally many parts of "
            f"at most {micro} rows: allow 2 rows"
        )
    start, stop = _cut(global_batch, size, rank)
    bounds = [_cut(stop - start, count, number) for number in range(count)]
    return Share(
        tuple(
            Part(start + first, start + last, (last - first) * size / global_batch)
            for first, last in bounds
        )
    )


def _cut(rows: int, count: int, number: int) -> tuple[int, int]:
    """The bounds of one of ``count`` pieces, the first of which have one row more."""
    least, more = divmod(rows, count)
    start = number * least + min(number, more)
    return start, start + least + (number < more)


def rows(step: int, global_batch: int) -> range:
    """The rows of a step, from 1, in the order in which a run sees them.

    Row ``n`` is sample ``n % samples`` of epoch ``n // samples``. This holds while ``global_batch``
    does not change; if it does, keep the number of rows seen in the state.
    """
    return range((step - 1) * global_batch, step * global_batch)


def learning_rate(base: float, batch: int, reference: int, rule: Rule = "constant") -> float:
    """The learning rate for a global batch, given that of a ``reference`` batch.

    ``linear``: Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv 1706.02677. ``sqrt``: for
    adaptive optimizers, Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient
    Algorithms", arXiv 2205.10287.

    Raises:
        UsageError: There is no such rule, or a batch is empty.
    """
    if min(batch, reference) < 1:
        raise UsageError(f"a batch of {min(batch, reference)} rows")
    scale = batch / reference
    match rule:
        case "constant":
            return base
        case "linear":
            return base * scale
        case "sqrt":
            return base * math.sqrt(scale)
    raise UsageError(f"learning rate {rule!r}: constant, linear or sqrt")
