"""What one fetch brought, for those who ask where a restore came from."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class FetchReport:
    """What came from where, summed over all fetches of one fetcher."""

    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    """Bytes of the blocks that were read and accepted."""
    bytes_by_place: dict[tuple[str, str], int] = field(default_factory=dict)
    """The same by tier and host; of a tier that all hosts share, without a host."""
    damaged: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By tier: blocks that did not match their digest or could not be read."""
