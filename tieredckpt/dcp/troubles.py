"""Telling training of tiers that get nothing: its log is what people look at, not the agent's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from tieredckpt.transport.messages import TierTrouble

AGAIN_S = 600.0
"""What goes on is told again after this time."""
QUIET_S = 120.0
"""What is back sooner was not over: a tier that almost keeps up, an agent that began anew."""
_OVER = {"failing": "it works again", "full": "it keeps up again"}

log = logging.getLogger(__name__)


class TierTroubles:
    """What this process has told of tiers. Thread-safe.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._told: dict[tuple[str, str], float] = {}
        """By tier and kind, when."""
        self._heard: dict[tuple[str, str], float] = {}
        """When the agent said so last."""

    def tell(self, found: Mapping[str, TierTrouble]) -> None:
        """Log what is new in what the agent says of its tiers, by name, and what is over."""
        with self._lock:
            now_s = self._clock()
            for tier, trouble in found.items():
                key = (tier, trouble.kind)
                self._heard[key] = now_s
                if key not in self._told or now_s - self._told[key] >= AGAIN_S:
                    self._told[key] = now_s
                    log.warning("tier %s: %s", tier, trouble.text)
            for tier, kind in [k for k in self._told if now_s - self._heard[k] >= QUIET_S]:
                del self._told[tier, kind], self._heard[tier, kind]
                if all(tier != other for other, _ in self._told):
                    log.warning("tier %s: %s", tier, _OVER[kind])
