"""``tieredckpt`` whose supervisor gives each process another rank in each generation."""

from __future__ import annotations

import itertools
from typing import Any

from tieredckpt.cli.main import main
from tieredckpt.live import decide


def rotate() -> None:
    """Replace the assignment of ranks, which keeps ranks where it can."""
    plain = decide.assign
    turns = itertools.count(1)

    def assign(*args: Any) -> tuple[decide.Member, ...]:
        members, turn = plain(*args), next(turns)
        return tuple(members[(rank + turn) % len(members)] for rank in range(len(members)))

    decide.assign = assign  # type: ignore[assignment]


if __name__ == "__main__":
    rotate()
    main()
