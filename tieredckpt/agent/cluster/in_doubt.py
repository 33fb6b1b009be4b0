"""Sealed segments that no manifest here names, and what this host alone can know of them.

A rank seals at its own host, and the commit happens at the coordinator's, whose agent may not be
reached; so a sealed segment may be part of a checkpoint that this host never heard of. Nobody else
is asked, since who does not know of a checkpoint cannot say that there is none. A segment goes

- if the coordinator of its save, or its own rank, says that the save failed: it is *disowned*, and
  no commit may name it any more, or a checkpoint would appear whose bytes were given back;
- if its process ended, and the next run has begun with what this host knows (:meth:`run_began`);
- if its rank needs room, and manifests here name later ones of its (:meth:`give_overtaken`).

On an agent that knows no other host nothing is ever undecided. All but :meth:`Fates.named` expect
the node's lock to be held.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tieredckpt.agent.cluster.members import Peers
from tieredckpt.errors import NotFoundError
from tieredckpt.format.manifest import SegmentRef
from tieredckpt.rpc.messages.agent import SealedBefore
from tieredckpt.storage.catalog import Catalog
from tieredckpt.storage.memory.pool import SlotPool

DISOWNED_MAX = 1 << 16
"""Remembered; older ones were freed long ago, and a commit that names one finds no slot."""

RUNS_MAX = 16
"""Runs of which is remembered what was there when they began: some only look."""

log = logging.getLogger(__name__)


class Fates:
    """Of one namespace.

    Args:
        namespace: Its name.
        pool: The host's slots.
        catalog: Of the memory tier.
        peers: Other hosts, and the run that they and this one are of.
    """

    def __init__(self, namespace: str, pool: SlotPool, catalog: Catalog, peers: Peers) -> None:
        self._namespace = namespace
        self._pool = pool
        self._catalog = catalog
        self._peers = peers
        self._disowned: dict[str, None] = {}
        self._left: dict[str, frozenset[str]] = {}
        """By run, what processes had sealed that had ended when it began."""

    def named(self) -> set[str]:
        """Segments that a manifest in memory names."""
        return {ref.id for each in self._catalog.manifests() for ref in each.segments}

    def undecided(self) -> dict[str, str]:
        """Segments sealed here that may be part of a checkpoint, and the session of each."""
        if not self._peers.active:
            return {}
        gone = self.named() | self._disowned.keys()
        left = self._left.get(self._peers.run)
        if left and self._has_taken_over():
            gone |= left
        return {
            slot.label.segment_id: slot.label.session_id
            for slot in self._pool.slots()
            if slot.label.state == "sealed"
            and slot.label.namespace == self._namespace
            and slot.label.segment_id not in gone
        }

    # --- what is said to have failed --------------------------------------------------------------

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

    def is_disowned(self, segment_id: str) -> bool:
        """Whether it was said that it belongs to no checkpoint."""
        return segment_id in self._disowned

    def check(self, refs: Iterable[SegmentRef]) -> None:
        """Raise NotFoundError if one of them was disowned."""
        for ref in refs:
            if ref.id in self._disowned:
                raise NotFoundError(
                    f"segment {ref.id} of host {ref.host} was released, because its save was "
                    "reported as failed: nothing was committed",
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

    # --- what nobody vouches for ------------------------------------------------------------------

    def run_began(self, run: str, is_live: Callable[[str], bool]) -> None:
        """A run that has sealed nothing yet begins: what ended processes left is of earlier ones.

        It stays until that run has saved, and this host knows what it goes on from, and has caught
        up with the run's hosts: what it had not heard of may have been committed.
        """
        owners = self.undecided()
        self._left.pop(run, None)
        self._left[run] = frozenset(e for e, session in owners.items() if not is_live(session))
        while len(self._left) > RUNS_MAX:
            del self._left[next(iter(self._left))]

    def _has_taken_over(self) -> bool:
        """Whether this host knows what the present run goes on from, or a checkpoint of it."""
        opened = [each for each in self._catalog.attempts() if each.run == self._peers.run]
        if not opened or not self._peers.has_caught_up():
            return False
        manifests = self._catalog.manifests()
        bases = {base.parent for each in opened for base in each.bases} - {None}
        if bases <= {manifest.save_id for manifest in manifests}:
            return True
        ids = {each.id for each in opened}
        return any(manifest.attempt.id in ids for manifest in manifests)

    def give_overtaken(
        self, session_id: str, before: Sequence[SealedBefore], keep_last: int
    ) -> bool:
        """Give back the oldest segment of a session that may go for room; False: none may.

        One of unknown fate if a newer checkpoint of its stream is known here, so that it cannot be
        the newest one; a committed one if retention would have deleted it.

        Args:
            session_id: Who needs room.
            before: What it has sealed, oldest first.
            keep_last: How many checkpoints memory keeps.
        """
        if self._catalog.unreadable():  # it may name any of them
            return False
        named, mine = self.named(), self.undecided()
        newer: Counter[str] = Counter()
        found = None
        for each in reversed(before):
            if each.segment_id in named:
                newer[each.stream] += 1
            elif mine.get(each.segment_id) == session_id:
                wanted = keep_last if each.fate == "committed" else 1
                found = each.segment_id if newer[each.stream] >= wanted else found
        slot = self._pool.find(found) if found is not None else None
        if slot is None:
            return False
        log.info("namespace %s: segment %s has been superseded", self._namespace, found)
        return self._pool.free(slot.slot_id)
