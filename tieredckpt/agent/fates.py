"""Sealed segments whose fate is unknown: no manifest here names them, and one may exist elsewhere.

A rank seals at its own host, and the commit happens at the coordinator's. Until the manifest came,
the coordinator said that its save failed, or the leader answered that nothing refers to it, a
sealed segment may be part of a checkpoint, so it stays. Whoever said that a segment belongs to
nothing has *disowned* it: from then on no commit may name it, or a checkpoint would appear whose
bytes were given back.

On an agent that knows no other host nothing is ever undecided. All but :meth:`Fates.named` expect
the node's lock to be held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tieredckpt.errors import NotFoundError
from tieredckpt.format.manifest import Manifest, SegmentRef
from tieredckpt.tiers.pool import SlotPool

DISOWNED_MAX = 1 << 16
"""Remembered; older ones were freed long ago, and a commit that names one finds no slot."""


class Fates:
    """Of one namespace.

    Args:
        namespace: Its name.
        pool: The host's slots.
        manifests: What is committed in memory.
        active: Whether other hosts are known.
    """

    def __init__(
        self,
        namespace: str,
        pool: SlotPool,
        manifests: Callable[[], tuple[Manifest, ...]],
        active: Callable[[], bool],
    ) -> None:
        self._namespace = namespace
        self._pool = pool
        self._manifests = manifests
        self._active = active
        self._disowned: dict[str, None] = {}

    def named(self) -> set[str]:
        """Segments that a manifest in memory names."""
        return {ref.id for each in self._manifests() for ref in each.segments}

    def undecided(self) -> dict[str, str]:
        """Segments sealed here whose fate is unknown, and the session of each."""
        if not self._active():
            return {}
        named = self.named()
        return {
            slot.label.segment_id: slot.label.session_id
            for slot in self._pool.slots()
            if slot.label.state == "sealed"
            and slot.label.namespace == self._namespace
            and slot.label.segment_id not in named
            and slot.label.segment_id not in self._disowned
        }

    def disown(self, segments: Iterable[str]) -> set[str]:
        """These belong to no checkpoint, and never will; what a manifest names is left out.

        Returns those that were disowned.
        """
        gone = set(segments) - self.named()
        for segment_id in gone:
            self._disowned.pop(segment_id, None)
            self._disowned[segment_id] = None
        while len(self._disowned) > DISOWNED_MAX:
            del self._disowned[next(iter(self._disowned))]
        return gone

    def fence(self, segments: Iterable[str]) -> None:
        """No commit here names these from now on; of those that lie here their fate stays open,
        since whoever asked for all members' word has not spoken yet.
        """
        self.disown(each for each in segments if self._pool.find(each) is None)

    def is_disowned(self, segment_id: str) -> bool:
        """Whether it was said that it belongs to no checkpoint."""
        return segment_id in self._disowned

    def check(self, refs: Iterable[SegmentRef]) -> None:
        """Raise NotFoundError if one of them was disowned."""
        for ref in refs:
            if ref.id in self._disowned:
                raise NotFoundError(
                    f"segment {ref.id} of host {ref.host} was given back, since its save was said "
                    "to have failed: nothing was committed",
                    key=ref.id,
                    what="segment",
                )

    def free(self, segments: Iterable[str]) -> bool:
        """Give the slots of disowned segments back; True if any became free."""
        freed = False
        for segment_id in segments:
            slot = self._pool.find(segment_id)
            if slot is None or slot.label.namespace != self._namespace:
                continue
            if slot.label.state == "sealed" and segment_id in self._disowned:
                freed |= self._pool.free(slot.slot_id)
        return freed
