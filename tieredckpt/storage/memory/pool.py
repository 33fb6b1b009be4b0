"""The slots of one runtime folder: made, adopted, reserved, sealed, freed, removed.

The pool decides nothing about sessions, rings or quotas. It guarantees that a slot is assigned for
writing only if no process has it locked, and that its old label is replaced before the new owner
gets it. One pool makes all label changes of a host (the agent locks the runtime folder), under the
pool's lock; each is a few system calls on tmpfs. Only the allocation of pages takes long, and it is
done without the lock.

Slots are accessed through fresh descriptors and pread/pwrite, never through a mapping, so damage to
a slot's file is an error here and never a signal.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tieredckpt.errors import IntegrityError, NotFoundError, UsageError
from tieredckpt.storage.base import OpenObject, unavailable
from tieredckpt.storage.file_io import OpenFile
from tieredckpt.storage.folder import medium
from tieredckpt.storage.headroom import Headroom, headroom_of
from tieredckpt.storage.memory import slot_file
from tieredckpt.storage.memory.slot import (
    LABEL_BYTES,
    NO_ID,
    Label,
    Reservation,
    SlotInfo,
    try_lock_shared,
    write_label,
)

TIER = "memory"
"""The memory tier's name, fixed: a configuration cannot name another tier like this."""

ALLOCATE_STEP_BYTES = 256 << 20
"""Pages allocated per system call: between two, the limits are asked again."""

UNFINISHED = "new-"
"""Prefix of a slot's file name until it is complete."""

_SLOT_NAME = re.compile(r"[0-9a-f]{32}", re.ASCII)
_ADVICE = (
    "the tmpfs is full: enlarge it (docker run --shm-size=..., mount -o remount,size=...), or keep "
    "less (memory.capacity, memory.keep)"
)


class SlotPool:
    """Slot files in ``folder``; thread-safe; one per runtime folder (the agent holds the lock).

    Args:
        folder: ``<runtime dir>/slots``, on a tmpfs; made if missing. Call :meth:`scan` once.
        headroom: Returns the limit on new pages; replaced by tests.
        clock: Monotonic seconds.

    Raises:
        TierUnavailableError: The folder cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        *,
        headroom: Callable[[Path], Headroom] = headroom_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._slots: dict[str, SlotInfo] = {}
        """Changed by :meth:`_put` and :meth:`_drop` alone."""
        self._holding: dict[str, dict[str, None]] = {}
        """By segment, the slots that are reserved for it or hold it: one, or damaged ones more."""
        self.folder = folder
        self._headroom = headroom
        self._allocating = threading.Lock()
        self._unallocated = 0
        """Bytes of the slots being made that are not allocated yet."""
        self._creating = 0
        """File bytes of the slots being made."""
        with medium(TIER, "make the slot folder"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    # --- the slots ----------------------------------------------------------------------------

    def scan(self, *, sweep: bool = True) -> tuple[SlotInfo, ...]:
        """Adopt the slots in the folder (once, at start).

        With ``sweep``, unfinished slots are removed; without, nothing is changed, so it can be used
        while an agent runs.

        Returns all slots. Damaged ones (truncated, emptied, holes, bad label, not a file) have
        ``error`` set and are kept until :meth:`remove`; nothing is mapped.

        Raises:
            TierUnavailableError: The folder cannot be read.
        """
        with self._lock, medium(TIER, "scan the slots"):
            for name in sorted(os.listdir(self.folder)):
                if _SLOT_NAME.fullmatch(name):
                    self._put(self._adopt(name))
                elif sweep and name.startswith(UNFINISHED):
                    # Its maker died before the slot had a name; no process can have it mapped.
                    slot_file.unlink(self.folder / name, even_if_locked=True)
            return tuple(self._slots.values())

    def _adopt(self, slot_id: str) -> SlotInfo:
        capacity, label, error = slot_file.adopt(self.folder / slot_id)
        if label is not None and (twin := self.find(label.segment_id)) is not None:
            error = f"slot {twin.slot_id} holds the same segment {label.segment_id}"
        return SlotInfo(
            slot_id=slot_id,
            capacity=capacity,
            label=label or Label(state="free"),
            error=error,
            label_lost=label is None,
            since_s=self._clock(),
        )

    def slots(self) -> tuple[SlotInfo, ...]:
        """All slots, in no particular order."""
        with self._lock:
            return tuple(self._slots.values())

    def slot(self, slot_id: str) -> SlotInfo:
        """One slot. Raises NotFoundError."""
        with self._lock:
            if slot_id not in self._slots:
                raise NotFoundError(f"there is no slot {slot_id}", key=slot_id)
            return self._slots[slot_id]

    def find(self, segment_id: str) -> SlotInfo | None:
        """The slot that is reserved for, or holds, ``segment_id``; damaged ones included."""
        with self._lock:
            found = self._holding.get(segment_id)
            return self._slots[next(iter(found))] if found else None

    def total_bytes(self) -> int:
        """Bytes of tmpfs that all slots use, including those being created."""
        with self._lock:
            return self._creating + sum(s.file_bytes for s in self._slots.values())

    # --- making and removing ------------------------------------------------------------------

    def create(self, capacity: int, *, namespace: str = "", session_id: str = NO_ID) -> SlotInfo:
        """Make a free slot, all its pages allocated, owned by ``session_id``.

        Takes long (about 0.3 s per GiB), without a lock. The limits of file system, memory cgroup
        and host are checked first, and again during the allocation.

        Raises:
            ValueError: ``capacity`` is not a positive multiple of 4096.
            CapacityError: Not enough free memory; the text has the remedy. No file is left.
            TierUnavailableError: The folder cannot be written. No file is left.
        """
        slot_id = secrets.token_hex(16)
        label = Label(state="free", namespace=namespace, session_id=session_id, slot_id=slot_id)
        self._make(slot_id, capacity, label)
        made = SlotInfo(slot_id=slot_id, capacity=capacity, label=label, since_s=self._clock())
        with self._lock:
            return self._put(made)

    def _make(self, slot_id: str, capacity: int, label: Label) -> None:
        """Make the file of one slot, labelled, without holes; it is named once it is complete.

        Concurrent creations count each other's unallocated pages, and the limits are checked again
        between two steps, because a tmpfs that reaches the memory cgroup's limit ends in the OOM
        killer, not in ENOSPC. Raises as :meth:`create`.
        """
        if capacity <= 0 or capacity % LABEL_BYTES:
            raise ValueError(f"a slot of {capacity} bytes: want a multiple of {LABEL_BYTES}")
        left = size = capacity + LABEL_BYTES
        with self._allocating:
            self._check_headroom(self._unallocated + size)
            self._unallocated += size
            self._creating += size
        unfinished = self.folder / (UNFINISHED + slot_id)
        try:
            with medium(TIER, f"make a slot of {size} bytes", needed_bytes=size, advice=_ADVICE):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                fd = os.open(unfinished, flags, 0o600)
                try:
                    while left:
                        step = min(left, ALLOCATE_STEP_BYTES)
                        self._check_headroom(left)
                        os.posix_fallocate(fd, size - left, step)
                        with self._allocating:
                            self._unallocated -= step
                        left -= step
                    write_label(fd, capacity, label)
                finally:
                    os.close(fd)
                # The name comes last, so that an agent adopts complete slots only.
                os.rename(unfinished, self.folder / slot_id)
        finally:
            with self._allocating:
                self._unallocated -= left
                self._creating -= size
            with contextlib.suppress(OSError):  # after success there is nothing to remove
                os.unlink(unfinished)

    def _check_headroom(self, wanted: int) -> None:
        with medium(TIER, "read the free memory"):
            headroom = self._headroom(self.folder)
        headroom.check(wanted, f"not enough free memory for a slot of {wanted} bytes")

    def remove(self, slot_id: str, *, even_if_locked: bool = False) -> bool:
        """Unlink a slot in any state; False if another descriptor has it locked.

        The kernel frees its memory when the last mapping ends, so ``even_if_locked`` does not harm
        processes that have it open, but their writes are lost. Removing a missing slot is success.

        Raises:
            TierUnavailableError: It cannot be unlinked.
        """
        with self._lock:
            if slot_id not in self._slots:
                return True
            with medium(TIER, "remove a slot"):
                removed = slot_file.unlink(self.folder / slot_id, even_if_locked=even_if_locked)
            if removed:
                self._drop(slot_id)
            return removed

    # --- life of a slot -----------------------------------------------------------------------

    def reserve(self, label: Label, among: Sequence[str]) -> Reservation | None:
        """Reserve a free, unlocked slot, and lock it for the caller.

        ``label``: the new label, "reserved" for a segment; its generation is ignored. ``among``:
        slot ids in the order of preference. Returns None if no slot qualifies (make one, wait, or
        skip the save). Never blocks. A slot that is found to be damaged is marked so and skipped.

        Raises:
            TierUnavailableError: The label could not be written.
        """
        with self._lock:
            for slot in [self._slots[each] for each in among if each in self._slots]:
                if slot.error or slot.label.state != "free" or slot.capacity < label.segment_bytes:
                    continue
                if (reserved := self._lock_and_label(slot, label)) is not None:
                    return reserved
        return None

    def _lock_and_label(self, slot: SlotInfo, label: Label) -> Reservation | None:
        own = replace(label, generation=slot.label.generation + 1, slot_id=slot.slot_id)
        fd = None
        with self._touching(slot, "reserve"):
            fd = slot_file.lock_and_label(self.folder / slot.slot_id, slot.capacity, own)
        return Reservation(slot=self._now(slot, own), fd=fd) if fd is not None else None

    def reassign(self, slot_id: str, segment_id: str, segment_bytes: int) -> Reservation | None:
        """Reserve an already reserved slot for another segment, with its content; lock it.

        None if it is not reserved, too small, damaged, gone or locked.

        Raises:
            TierUnavailableError: The label could not be written.
        """
        with self._lock:
            slot = self._slots.get(slot_id)
            if slot is None or slot.error or slot.label.state != "reserved":
                return None
            if segment_bytes > slot.capacity:
                return None
            label = replace(slot.label, segment_id=segment_id, segment_bytes=segment_bytes)
            return self._lock_and_label(slot, label)

    def grant(self, slot_id: str, label: Label) -> bool:
        """Reserve a free slot for a writer that has a descriptor of it already; leaves no lock.

        The writer then calls :func:`tieredckpt.storage.memory.slot.lock_reserved`. False if the
        slot is not free, too small, damaged, gone or locked.

        Raises:
            TierUnavailableError: The label could not be written.
        """
        if (reserved := self.reserve(label, (slot_id,))) is None:
            return False
        os.close(reserved.fd)
        return True

    def seal(self, slot_id: str, *, segment_id: str, segment_bytes: int, root: str) -> SlotInfo:
        """Make the content of a reserved slot a segment if its trailer matches. Idempotent.

        The writer still has its lock, and releases it after the reply.

        Raises:
            NotFoundError: The slot is not reserved for (nor holds) this segment, or is gone.
            IntegrityError: The trailer has another id, size or root, or the slot is damaged; the
                label is unchanged.
            TierUnavailableError: The label could not be written; it is the old or the new one.
        """
        with self._lock:
            slot = self.slot(slot_id)
            if slot.label.state == "free" or slot.label.segment_id != segment_id:
                raise NotFoundError(
                    f"slot {slot_id} is not reserved for segment {segment_id}", key=segment_id
                )
            sealed = replace(slot.label, state="sealed", segment_bytes=segment_bytes, root=root)
            if slot.label == sealed and not slot.error:
                return slot
            if slot.label.state == "sealed":
                raise IntegrityError(
                    f"segment {segment_id} is sealed already, damaged or with another size or root",
                    tier=TIER,
                    key=segment_id,
                    expected=slot.label.root,
                    actual=root,
                )
            with self._touching(slot, "seal", reraise=True):
                slot_file.seal(self.folder / slot_id, slot.capacity, sealed)
            return self._now(slot, sealed)

    def readopt(self, slot_id: str, label: Label) -> bool:
        """Label a slot with a lost label as sealed, if its trailer matches and it has no writer.

        False, NotFoundError or TierUnavailableError: it is still damaged.
        """
        with self._lock:
            slot, done = self.slot(slot_id), False
            label = replace(label, slot_id=slot_id)
            with self._touching(slot, "adopt"):
                done = slot.label_lost and slot_file.seal(
                    self.folder / slot_id, slot.capacity, label, unless_written=True
                )
            if done:
                self._now(replace(slot, error=None, label_lost=False), label)
            return done

    def free(self, slot_id: str) -> bool:
        """Label a sealed slot as free; readers that have it open keep their lock and bytes.

        True if it is free now. False: damaged or gone (use :meth:`remove`).

        Raises:
            UsageError: It is reserved (use :meth:`release`).
            TierUnavailableError: The label could not be written; it is the old or the new one.
        """
        with self._lock:
            slot = self._slots.get(slot_id)
            if slot is None or slot.error:
                return False
            if slot.label.state == "reserved":
                raise UsageError(f"slot {slot_id} is reserved: release it, do not free it")
            return slot.label.state == "free" or self._label_free(slot, "free", exclusively=False)

    def release(self, slot_id: str) -> bool:
        """Cancel a reservation that is not locked.

        True if the slot is free now (also if it was). False if it is locked, sealed, damaged or
        gone.

        Raises:
            TierUnavailableError: The label could not be written; it is the old or the new one.
        """
        with self._lock:
            slot = self._slots.get(slot_id)
            if slot is None or slot.error or slot.label.state == "sealed":
                return False
            return slot.label.state == "free" or self._label_free(slot, "release", exclusively=True)

    def _label_free(self, slot: SlotInfo, verb: str, *, exclusively: bool) -> bool:
        # The label keeps the session, which has the slot mapped.
        label = Label(
            state="free",
            namespace=slot.label.namespace,
            session_id=slot.label.session_id,
            generation=slot.label.generation,
            slot_id=slot.slot_id,
        )
        done = False
        with self._touching(slot, verb):
            done = slot_file.relabel(
                self.folder / slot.slot_id, slot.capacity, label, exclusively=exclusively
            )
        if done:
            self._now(slot, label)
        return done

    def is_locked(self, slot_id: str) -> bool:
        """Whether a descriptor has the slot locked; False if it is damaged or gone."""
        with self._lock:
            slot = self._slots.get(slot_id)
            found = False
            if slot is not None:
                with self._touching(slot, "probe"):
                    found = slot_file.is_locked(self.folder / slot_id)
            return found

    # --- descriptors --------------------------------------------------------------------------

    def open_slot(self, slot_id: str) -> int:
        """A fresh descriptor (read and write, no lock) to be mapped; the caller closes it.

        Raises:
            NotFoundError: No such slot.
            IntegrityError: The slot is damaged.
        """
        with self._lock:
            slot = self.slot(slot_id)
            if slot.error:
                raise IntegrityError(f"slot {slot_id} is damaged: {slot.error}", key=slot_id)
            with self._touching(slot, "open", reraise=True):
                return slot_file.open_for_mapping(self.folder / slot_id, slot.capacity)
            raise AssertionError("unreachable: the errors of opening are raised")

    def open_segment(self, segment_id: str) -> OpenObject:
        """Open a sealed segment under ``LOCK_SH``, read-only.

        Its ``size`` is less than the segment's if the slot was truncated: single blocks may still
        be good.

        Raises:
            NotFoundError: No slot holds it.
            IntegrityError: The slot's name belongs to something else.
            TierUnavailableError: Its writer still has it locked; try again.
        """
        with self._lock:
            slot = self.find(segment_id)
            if slot is None or slot.label.state != "sealed":
                raise NotFoundError(f"no slot holds segment {segment_id}", key=segment_id)
            with self._touching(slot, "open", reraise=True):
                fd = slot_file.open_file(self.folder / slot.slot_id, os.O_RDONLY)
            # The pool's lock, and later the shared lock, keep the sealed slot from being reserved.
            # The lock is refused only while the writer has not released its own.
            if not try_lock_shared(fd):
                os.close(fd)
                raise unavailable(TIER, f"segment {segment_id} is still locked by its writer")
            size = min(slot.label.segment_bytes, os.fstat(fd).st_size)
            return OpenFile(fd, size, tier=TIER, key=segment_id)

    # --- the table of slots, under the lock ---------------------------------------------------

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
        """Run system calls on a slot; record that it is damaged or deleted.

        Without ``reraise`` the error ends here: one bad slot must not fail operations on others.
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
