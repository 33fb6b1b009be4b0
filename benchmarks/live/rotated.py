"""``tieredckpt`` whose supervisor gives each process another rank in each generation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tieredckpt.cli.main import main
from tieredckpt.live import decide


def rotate() -> None:
    """Replace the assignment of ranks, which keeps ranks where it can."""
    plain = decide.assign
    turns = itertools.count(1)

    def assign(processes: Sequence[decide.ProcessFacts], size: int) -> tuple[int, ...]:
        pids, turn = plain(processes, size), next(turns)
        return tuple(pids[(rank + turn) % size] for rank in range(size))

    decide.assign = assign


if __name__ == "__main__":
    rotate()
    main()
