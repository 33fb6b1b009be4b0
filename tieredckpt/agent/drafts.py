"""Drafts: what this host's ranks wrote a second time of what other hosts' ranks write.

A draft is a slot for copies that a trainer has filled (:mod:`tieredckpt.dcp.local_copies`), sealed
by it under an id of its own and labelled ``reserved`` still, so that it counts as nothing. When the
manifest of its save comes, its trailer with the owner's id tells by the root whether it is the
owner's segment. If so it becomes that, without a byte sent: the label names the owner's segment,
still reserved; the trailer is written; the label says sealed. An agent that dies in between leaves
what an interrupted pull leaves. A draft that is not equal stays until that segment is pulled, and
then the blocks that are equal need not come.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tieredckpt import failpoints
from tieredckpt.errors import NotFoundError, TieredCkptError
from tieredckpt.format.manifest import Manifest, SegmentRef
from tieredckpt.format.segment import TRAILER_BYTES, decode_trailer, retitled
from tieredckpt.tiers.pool import SlotPool
from tieredckpt.tiers.slot import REPLICA_ID, Reservation
from tieredckpt.tiers.slot_file import checked_trailer
from tieredckpt.transport.messages import ReserveDraft, SealDraft

if TYPE_CHECKING:
    from tieredckpt.agent.replica_slots import ReplicaRoom

DRAFTS_MAX = 1 << 14
"""Remembered at once; a draft beyond is not taken."""
WAIT_S = 60.0
"""How long a draft waits for its manifest once the session that wrote it has ended."""
SAVES_WAITING = 2
"""Saves of one session whose manifest may be on its way."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    slot_id: str
    namespace: str
    session_id: str
    save: tuple[str, int]
    """Stream and step."""
    ordinal: int
    """Which of the manifest's segments it is meant to be."""
    since_s: float
    trailer: bytes = b""
    """Once it is sealed."""
    ref: SegmentRef | None = None
    """Once the manifest came and it was not equal: what it may be a part of."""


class Drafts:
    """Of all namespaces of a node. Thread-safe.

    Args:
        pool: The host's slots.
        is_live: Whether a session lives.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        pool: SlotPool,
        is_live: Callable[[str], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._is_live = is_live
        self._clock = clock
        self._lock = threading.Lock()
        self._settling = threading.Lock()  # two that adopt one draft would free each other's
        self._drafts: dict[str, _Draft] = {}
        self._begun: dict[str, str] = {}
        """Drafts by the id of the segment that they may be a part of."""
        self._per_save: dict[str, tuple[str, int]] = {}
        """By session, its namespace and how many drafts it writes of each save."""
        self._now: dict[str, tuple[tuple[str, int], ReplicaRoom]] = {}
        """By session, the save that it writes now, and the room for its drafts."""

    # --- what a session writes --------------------------------------------------------------------

    def begin(
        self, namespace: str, request: ReserveDraft, room: Callable[[], ReplicaRoom]
    ) -> ReplicaRoom:
        """A session writes a draft; how much room there is. Looked at once per save.

        Raises:
            CapacityError: Nobody has said how much memory copies may take.
        """
        save = (request.stream, request.step)
        with self._lock:
            known = self._now.get(request.session_id)
        if known is not None and known[0] == save:
            return known[1]
        self._drop_late(request)
        with self._lock:
            self._per_save[request.session_id] = (namespace, request.drafts)
        found = room()
        with self._lock:
            self._now[request.session_id] = (save, found)
        return found

    def _drop_late(self, request: ReserveDraft) -> None:
        """Drafts of saves long before have no use."""
        with self._lock:
            mine = [
                (draft_id, each.save)
                for draft_id, each in self._drafts.items()
                if each.session_id == request.session_id
            ]
        saves = list(dict.fromkeys(save for _, save in mine))
        saves = [save for save in saves if save != (request.stream, request.step)]
        late = set(saves[: max(0, len(saves) - SAVES_WAITING + 1)])
        self._drop([draft_id for draft_id, save in mine if save in late])

    def seal(self, namespace: str, request: SealDraft) -> None:
        """The draft is whole. Idempotent.

        Raises:
            NotFoundError: The slot is not reserved for it (any more).
            IntegrityError: Its trailer does not say what the request says.
        """
        slot = self._pool.slot(request.slot_id)
        label = slot.label
        if (
            slot.error
            or (label.segment_id, label.session_id) != (request.segment_id, REPLICA_ID)
            or (label.state, label.namespace) != ("reserved", namespace)
            or request.segment_bytes > slot.capacity
        ):
            raise NotFoundError(
                f"no slot is reserved for draft {request.segment_id}", key=request.segment_id
            )
        label = replace(label, segment_bytes=request.segment_bytes, root=request.root)
        fd = self._pool.open_slot(slot.slot_id)
        try:
            trailer = checked_trailer(fd, slot.capacity, label)
        finally:
            os.close(fd)
        draft = _Draft(
            slot_id=slot.slot_id,
            namespace=namespace,
            session_id=request.session_id,
            save=(request.stream, request.step),
            ordinal=request.ordinal,
            since_s=self._clock(),
            trailer=trailer,
        )
        with self._lock:
            if len(self._drafts) < DRAFTS_MAX:
                self._drafts[request.segment_id] = draft

    # --- what becomes of them ---------------------------------------------------------------------

    def settle(self, manifest: Manifest, host_id: str) -> None:
        """A manifest came: its drafts become copies, wait to be completed, or are given back.

        Idempotent: who is to pull a segment calls it, too, for the thread that took the manifest
        over may not have come here yet, and a pull without the draft would fetch all of it.
        """
        with self._settling:
            self._settle(manifest, host_id)

    def _settle(self, manifest: Manifest, host_id: str) -> None:
        save = (manifest.stream, manifest.step)
        with self._lock:
            waiting = {
                draft_id: each
                for draft_id, each in self._drafts.items()
                if each.namespace == manifest.namespace and each.save == save and each.ref is None
            }
        if not waiting:
            return
        useless = []
        here = {s.label.segment_id for s in self._pool.slots() if s.label.state != "free"}
        for draft_id, draft in waiting.items():
            ref = (
                manifest.segments[draft.ordinal] if draft.ordinal < len(manifest.segments) else None
            )
            if ref is None or ref.host == host_id or ref.id in here:
                useless.append(draft_id)
                continue
            try:
                adopted = self._adopt(draft, ref)
            except (TieredCkptError, OSError) as error:
                log.warning("draft of segment %s: %s", ref.id, error)
                useless.append(draft_id)
                continue
            here.add(ref.id)
            with self._lock:
                if adopted:
                    self._drafts.pop(draft_id, None)
                elif draft_id in self._drafts:
                    self._drafts[draft_id] = replace(draft, ref=ref)
                    self._begun[ref.id] = draft_id
        self._drop(useless)

    def _adopt(self, draft: _Draft, ref: SegmentRef) -> bool:
        """Make the draft the segment if it is equal to it; else False."""
        trailer = retitled(draft.trailer, bytes.fromhex(ref.id))
        decoded = decode_trailer(trailer)
        if (decoded.root.hex(), decoded.segment_bytes) != (ref.root, ref.size):
            return False
        taken = self._pool.take_over(draft.slot_id, ref.id, ref.size)
        if taken is None:
            raise NotFoundError(f"slot {draft.slot_id} is in use, or gone", key=ref.id)
        try:
            failpoints.reach("agent.draft.labelled")
            os.pwrite(taken.fd, trailer, ref.size - TRAILER_BYTES)
            failpoints.reach("agent.draft.trailer")
            self._pool.seal(draft.slot_id, segment_id=ref.id, segment_bytes=ref.size, root=ref.root)
        finally:
            os.close(taken.fd)
        return True

    def take_up(self, ref: SegmentRef) -> Reservation | None:
        """The slot of a draft that may be a part of ``ref``, locked and labelled as that."""
        with self._lock:
            draft = self._drafts.pop(self._begun.pop(ref.id, ""), None)
        if draft is None:
            return None
        return self._pool.take_over(draft.slot_id, ref.id, ref.size)

    def parts_of(self, manifest: Manifest) -> Sequence[SegmentRef]:
        """Segments of other hosts of which a draft here is a part."""
        with self._lock:
            if not self._begun:
                return ()
            return [ref for ref in manifest.segments if ref.id in self._begun]

    def ids(self, namespace: str | None = None) -> set[str]:
        """What the slots of waiting drafts are labelled with; those of no use are given back."""
        now_s = self._clock()
        with self._lock:
            old = [
                draft_id
                for draft_id, each in self._drafts.items()
                if now_s - each.since_s > WAIT_S and not self._is_live(each.session_id)
            ]
        self._drop(old)
        with self._lock:
            return {i for i, each in self._drafts.items() if namespace in (None, each.namespace)}

    def slots_max(self, namespace: str, ring_slots: int) -> int:
        """The most slots that drafts, and copies that came of them, may take."""
        with self._lock:
            for session_id in [each for each in self._per_save if not self._is_live(each)]:
                del self._per_save[session_id]
                self._now.pop(session_id, None)
            return sum(
                count * ring_slots for name, count in self._per_save.values() if name == namespace
            )

    def _drop(self, draft_ids: Sequence[str]) -> None:
        for draft_id in draft_ids:
            with self._lock:
                draft = self._drafts.pop(draft_id, None)
                if draft is not None and draft.ref is not None:
                    self._begun.pop(draft.ref.id, None)
            if draft is None:
                continue
            try:
                self._pool.release(draft.slot_id)
            except TieredCkptError as error:  # the reaper tries again
                log.info("draft %s: %s", draft_id, error)
