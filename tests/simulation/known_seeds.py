"""Each mutation of the product has a known seed that finds it; only that one is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable

WITHIN = 200
"""Seeds that are tried to say which one to write down."""

FirstFound = Callable[[Iterable[int]], tuple[int, str] | None]
"""The first of some seeds that finds it, and how."""


def check_known_seed(known: int, first_found: FirstFound, where: str) -> None:
    """Fail if that seed does not find it; ``where`` is the list that has it."""
    if first_found([known]) is not None:
        return
    found = first_found(range(WITHIN))
    assert found is not None, f"neither seed {known} of {where} nor any below {WITHIN} finds it"
    raise AssertionError(
        f"seed {known} of {where} does not find it any more: write {found[0]} there ({found[1]})"
    )
