"""How many slots a session needs for what it writes itself: its ring."""

from __future__ import annotations

from dataclasses import dataclass

from tieredckpt.policy.memory import ring_slots
from tieredckpt.transport.messages import NamespaceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RingShape:
    """What decides how many slots a session needs."""

    namespace: str
    spec: NamespaceSpec
    num_streams: int
    replicas: int = 0
    """Copies that other hosts keep of what is written here; 0: there are none to keep them."""

    @property
    def slots(self) -> int:
        """What is kept of each stream, one in flight, one source of a spill per tier.

        With replicas also the newest replicated checkpoint of each stream, and the one of all
        streams that is being replicated.
        """
        streams = max(1, self.num_streams)
        slots = ring_slots(self.spec.keep_last * streams, self.sources, self.replicas)
        return slots + (streams - 1 if self.replicas else 0)

    @property
    def slots_min(self) -> int:
        """What one stream needs: less than this can never work."""
        return ring_slots(self.spec.keep_last, self.sources, self.replicas)

    @property
    def sources(self) -> int:
        """Tiers that are filled from memory; the others are filled from what those hold."""
        return sum(tier.source == "memory" for tier in self.spec.tiers)

    @property
    def parts(self) -> str:
        """The smallest ring in words."""
        replicas = ", 2 for replication" if self.replicas else ""
        return f"{self.spec.keep_last} kept, 1 in flight, {self.sources} for spills{replicas}"
