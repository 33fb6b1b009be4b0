"""Telling training of tiers that get nothing: its log is what people look at, not the agent's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from tieredckpt.transport.messages import TierTrouble

AGAIN_S = 600.0
"""What goes on is told again after this time."""

log = logging.getLogger(__name__)


class TierTroubles:
    """What this process has told of tiers. One thread at a time.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[tuple[str, str], float] = {}

    def tell(self, found: Mapping[str, TierTrouble]) -> None:
        """Log what is new in what the agent says of its tiers, by name, and what is over."""
        now_s = self._clock()
        current = {(tier, trouble.kind): trouble.text for tier, trouble in found.items()}
        for key, text in current.items():
            if key not in self._told or now_s - self._told[key] >= AGAIN_S:
                self._told[key] = now_s
                log.warning("tier %s: %s", key[0], text)
        for told in self._told.keys() - current.keys():
            del self._told[told]
            if told[0] not in found:
                log.warning("tier %s: it gets checkpoints again", told[0])
