"""``tieredckpt`` whose supervisor gives each process another rank in each generation."""

from __future__ import annotations

import itertools
from typing import Any

from tieredckpt.cli.main import main
from tieredckpt.live import decide
from tieredckpt.policy import ranks


def rotate() -> None:
    """Replace the assignment of ranks, which keeps ranks where it can."""
    plain = ranks.assign
    turns = itertools.count(1)

    def assign(*args: Any) -> tuple[ranks.Member, ...]:
        members, turn = plain(*args), next(turns)
        return tuple(members[(rank + turn) % len(members)] for rank in range(len(members)))

    decide.assign = assign  # type: ignore[attr-defined, assignment]


if __name__ == "__main__":
    rotate()
    main()
