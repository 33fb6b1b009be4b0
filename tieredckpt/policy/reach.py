"""Which tier the newest checkpoint can still reach in the time that is left: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachable:
    """One tier, as a host finds it. In a sequence of them, the nearest comes first."""

    tier: str
    outlives_host: bool
    """Whether what it holds is there when this host is given back (scope shared)."""
    available: bool
    remaining_bytes: int
    """Of this host: what is being copied now, and what is then to be copied; 0: it is there."""
    bytes_per_s: float | None
    """Measured; None: nothing was copied yet."""
    failing: bool = False
    """It has answered, but the last thing that was tried there failed."""

    @property
    def estimate_s(self) -> float | None:
        """How long it takes; None: not known."""
        if self.remaining_bytes == 0:
            return 0.0
        return self.remaining_bytes / self.bytes_per_s if self.bytes_per_s else None


def choose_tier(tiers: Sequence[Reachable], left_s: float | None) -> Reachable | None:
    """The tier to bring the newest checkpoint to; None: there is none that answers.

    Of those that can be reached in time, one that outlives the host before one that does not, and
    the nearest of several. Where a speed is not known, it comes after those that are known to be
    reached. If none can be reached, the one that takes the shortest time. What fails at this moment
    comes after all others: it may be over soon, and there may be nothing else.

    Args:
        tiers: The nearest first.
        left_s: Seconds; None: as long as it takes.
    """
    found = [each for each in tiers if each.available]
    if not found:
        return None

    def rank(each: Reachable) -> tuple[int, bool, float]:
        estimate = each.estimate_s
        if each.failing:
            return (3, not each.outlives_host, 0.0)
        if estimate is None:
            return (1 if left_s is not None else 0, not each.outlives_host, 0.0)
        if left_s is None or estimate <= left_s:
            return (0, not each.outlives_host, 0.0)
        return (2, False, estimate)

    return min(found, key=rank)  # the first of equals is the nearest
