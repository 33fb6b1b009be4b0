"""What the pool knows of its slots, and how it notes that one turned out damaged or deleted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from tieredckpt.errors import IntegrityError, NotFoundError
from tieredckpt.tiers.medium import medium
from tieredckpt.tiers.slot import Label, SlotInfo

TIER = "memory"
"""The memory tier's name, fixed: a configuration cannot name another tier like this."""


class SlotTable:
    """The base of :class:`tieredckpt.tiers.pool.SlotPool`; all of it expects the lock to be held.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._slots: dict[str, SlotInfo] = {}
        """Changed by :meth:`_put` and :meth:`_drop` alone."""
        self._holding: dict[str, dict[str, None]] = {}
        """By segment, the slots that are reserved for it or hold it: one, or damaged ones more."""

    def _get(self, slot_id: str) -> SlotInfo:
        if slot_id not in self._slots:
            raise NotFoundError(f"there is no slot {slot_id}", key=slot_id)
        return self._slots[slot_id]

    def _find(self, segment_id: str) -> SlotInfo | None:
        found = self._holding.get(segment_id)
        return self._slots[next(iter(found))] if found else None

    def _put(self, slot: SlotInfo) -> SlotInfo:
        before = self._slots.get(slot.slot_id)
        self._slots[slot.slot_id] = slot
        now = slot.label.segment_id if slot.label.state != "free" else None
        if before is not None and before.label.segment_id != now:
            self._unlist(before)
        if now is not None:
            self._holding.setdefault(now, {})[slot.slot_id] = None
        return slot

    def _drop(self, slot_id: str) -> None:
        slot = self._slots.pop(slot_id, None)
        if slot is not None:
            self._unlist(slot)

    def _unlist(self, slot: SlotInfo) -> None:
        holding = self._holding.get(slot.label.segment_id, {})
        holding.pop(slot.slot_id, None)
        if not holding:
            self._holding.pop(slot.label.segment_id, None)

    def _now(self, slot: SlotInfo, label: Label) -> SlotInfo:
        return self._put(replace(slot, label=label, since_s=self._clock()))

    @contextlib.contextmanager
    def _touching(self, slot: SlotInfo, verb: str, *, reraise: bool = False) -> Iterator[None]:
        """Run system calls on a slot; record it if it turns out to be damaged or deleted.

        Without ``reraise`` that is all: one bad slot must not fail what others can do.
        """
        doing = f"{verb} slot {slot.slot_id}"
        try:
            with medium(TIER, doing, outcome="unknown", missing_key=f"slot {slot.slot_id}"):
                yield
        except IntegrityError as error:
            # With a key it is the segment that is wrong, not the slot.
            if "key" not in error.fields:
                self._put(replace(slot, error=str(error), since_s=self._clock()))
            if reraise:
                raise
        except NotFoundError:
            self._drop(slot.slot_id)
            if reraise:
                raise
