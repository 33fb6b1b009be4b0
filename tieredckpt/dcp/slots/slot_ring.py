"""A trainer's ring of slots: mapped once, prefaulted in the background, written in turn.

A save must take no page fault in steady state. So once the size of a segment is known, a background
thread maps and populates all slots that the agent will grant in turn. A mapping is kept as long as
its slot file exists. A slot is locked (``LOCK_EX`` on an open file description of this process, see
:mod:`tieredckpt.storage.memory.slot`) from acquire to seal.

A forked child has no slots: it closes its copies of the descriptors at once, since they would keep
a slot's lock after its trainer has died, and it does not inherit mappings.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieredckpt import failpoints
from tieredckpt.errors import (
    AgentError,
    IntegrityError,
    RemoteProtocolError,
    TieredCkptError,
    UsageError,
)
from tieredckpt.format.segment import slot_capacity
from tieredckpt.storage.file_io import CopyPool
from tieredckpt.storage.memory.mapping import Mapping
from tieredckpt.storage.memory.slot import check_slot, lock_reserved, unlock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tieredckpt.rpc.agent_client import AgentClient
    from tieredckpt.rpc.messages.agent import Grant, SlotHandle

log = logging.getLogger(__name__)

PREFAULT_BYTES = 64 << 20
"""Populated per call: the unit that helpers share; to stop, a thread must finish one (0.1 s)."""

HOLD_POLL_S = 0.05
"""How soon a paused prefault finds out that it is to stop."""


class Prefault:
    """Populates one mapping, piece by piece; any number of threads may help."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self._starts = itertools.count(0, PREFAULT_BYTES)
        self._left = -(-mapping.capacity_bytes // PREFAULT_BYTES)
        self._lock = threading.Lock()
        self.done = threading.Event()
        """Set once all of the slot is populated."""

    def help(
        self, stop: threading.Event | None = None, may_run: threading.Event | None = None
    ) -> None:
        """Populate pieces until none is left to begin. Raises OSError if the slot is damaged.

        Args:
            stop: Once set, no further piece is begun.
            may_run: While it is not set, no piece is begun.
        """
        size = self._mapping.capacity_bytes
        while stop is None or not stop.is_set():
            if may_run is not None and not may_run.wait(HOLD_POLL_S):
                continue  # asked to stop meanwhile?
            if (start := next(self._starts)) >= size:
                break
            try:
                self._mapping.populate(start, min(start + PREFAULT_BYTES, size))
            finally:
                with self._lock:
                    self._left -= 1
                    if not self._left:
                        self.done.set()


class MappedSlot:
    """A slot of this process: one mapping, and the descriptor that it is locked by."""

    def __init__(self, slot_id: str, fd: int, capacity_bytes: int) -> None:
        self.slot_id = slot_id
        self.fd = fd
        self.capacity_bytes = capacity_bytes
        """Usable bytes, without the label page."""
        self.mapping = Mapping(fd, capacity_bytes)
        self.prefault = Prefault(self.mapping)

    def is_gone(self) -> bool:
        """Whether the file was deleted, or its size changed."""
        try:
            check_slot(self.fd, self.capacity_bytes)
        except IntegrityError:
            return True
        return os.fstat(self.fd).st_nlink == 0

    def close(self) -> None:
        """Release lock and descriptor; the mapping ends with its last view."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            # By hand: the mapping shares the open file description and would keep the lock.
            with contextlib.suppress(OSError):
                unlock(fd)
            os.close(fd)


@dataclass(slots=True, eq=False)
class WritableSlot:
    """A slot granted for one segment, locked and mapped from acquire to seal or abandon."""

    segment_id: str
    """32 hex digits, minted by the agent."""
    slot_id: str
    capacity_bytes: int
    view: memoryview
    """The slot's usable bytes, writable."""
    address: int
    """Of the first of them; valid as long as ``view`` is alive."""
    cold: bool
    """The slot was not prefaulted when the save asked for it."""


class BackgroundTask:
    """Work in a background thread that can be asked to stop.

    Args:
        work: Is given the event that asks it to stop.
        before: Work that is stopped, and has ended before this one begins.
    """

    def __init__(
        self, work: Callable[[threading.Event], None], before: BackgroundTask | None
    ) -> None:
        self.stop = threading.Event()

        def run() -> None:
            if before is not None:
                before.stop.set()
                before.thread.join()
            if not self.stop.is_set():
                work(self.stop)

        self.thread = threading.Thread(target=run, name="tieredckpt-prefault", daemon=True)
        self.thread.start()


PREFAULT_WAIT_S = 120.0
"""Longest wait for another thread's last piece; afterwards the save continues, cold."""

CLOSE_WAIT_S = 10.0


class SlotRing:
    """This process's slots with one agent. One save at a time; methods are thread-safe.

    Args:
        client: The agent, with an open session.
        copy_threads: Threads of :attr:`pool`, see :func:`.copy.default_copy_threads`.
    """

    def __init__(self, client: AgentClient, copy_threads: int) -> None:
        self.pool = CopyPool(copy_threads)
        """For :func:`.copy.write_segment`."""
        self._client = client
        self._lock = threading.RLock()
        self._slots: dict[str, MappedSlot] = {}
        self._writing: dict[str, MappedSlot] = {}
        self._holds: dict[str, Callable[[], bool]] = {}
        """By segment id, whether the background save that has the slot is done with it."""
        self._next: Grant | None = None
        self._asked_bytes = 0
        """The largest size that :meth:`prepare` was called for."""
        self._prepared_bytes = 0
        self._task: BackgroundTask | None = None
        self._closed = False
        self._loads = 0
        self._may_prefault = threading.Event()
        self._may_prefault.set()
        self._pid = os.getpid()
        _rings.add(self)

    # --- making the ring ready --------------------------------------------------------------------

    def prepare(self, segment_bytes: int) -> None:
        """Map and prefault the whole ring for segments of this size, in the background.

        A size that was prepared before does nothing. Errors are only logged: a save that finds no
        slot asks the agent for one, and raises.
        """
        with self._lock:
            new = segment_bytes > self._asked_bytes
            self._asked_bytes = max(self._asked_bytes, segment_bytes)
        if new:
            self._start_preparing(segment_bytes)

    def _start_preparing(self, segment_bytes: int) -> None:
        with self._lock:
            if not self._closed:
                self._task = BackgroundTask(
                    lambda stop: self._make_ring(segment_bytes, stop), self._task
                )

    def _make_ring(self, segment_bytes: int, stop: threading.Event) -> None:
        slots = []
        try:
            for handle in self._client.prepare(segment_bytes).slots:
                with self._lock:
                    slot = self._slots.get(handle.slot_id)
                if slot is None or slot.is_gone():
                    slot = self._adopt(handle, locked=False)
                slots.append(slot)
        except (TieredCkptError, OSError) as error:
            if not self._closed:
                log.warning("cannot prepare slots of %d bytes ahead: %s", segment_bytes, error)
            return
        with self._lock:
            self._prepared_bytes = max(self._prepared_bytes, slot_capacity(segment_bytes))
        for slot in slots:
            try:
                slot.prefault.help(stop, self._may_prefault)
            except OSError as error:  # the save that gets this slot raises IntegrityError
                log.warning("slot %s cannot be prefaulted: %s", slot.slot_id, error)

    # --- a save -----------------------------------------------------------------------------------

    def acquire(self, segment_bytes: int) -> WritableSlot:
        """Acquire a slot for one segment of at most ``segment_bytes``, locked and populated.

        In steady state this needs no request: the reply to the last seal had the grant.

        Raises:
            CapacityError: No slot became free in time.
            AgentError: The agent does not answer.
            IntegrityError: The slot that was granted is damaged.
        """
        self._check_process()
        failpoints.reach("save.reserve.before")
        with self._lock:
            self._drop_deleted()
            self._release_interrupted()
            granted, self._next = self._next, None
            slot = self._lock_granted(granted, segment_bytes) if granted is not None else None
        if slot is not None and granted is not None:
            segment_id = granted.segment_id
        else:
            segment_id, slot = self._reserve(segment_bytes)
        failpoints.reach("save.reserve.after")
        return self._writable(segment_id, slot)

    def map_grant(self, grant: Grant) -> WritableSlot:
        """Map a slot that was granted in addition to the ring's; :meth:`abandon` releases it."""
        self._check_process()
        return self._writable(grant.segment_id, self._adopt(grant, locked=True))

    def _writable(self, segment_id: str, slot: MappedSlot) -> WritableSlot:
        cold = not slot.prefault.done.is_set()
        with self._lock:
            self._writing[segment_id] = slot
        mapping = slot.mapping
        writable = WritableSlot(
            segment_id, slot.slot_id, mapping.capacity_bytes, mapping.view, mapping.address, cold
        )
        if cold:
            self._warm(slot, writable)
        return writable

    def _release_interrupted(self) -> None:
        """Release slots that an interrupted save left locked.

        Ctrl-C can strike before a ``finally`` is in force, and a slot that is kept locked would be
        lost until the engine is closed. There is one save at a time, so no slot is being written
        now, except for those on hold for a background save.
        """
        for segment_id in [key for key, is_over in self._holds.items() if is_over()]:
            self._release(segment_id)
        self._writing = {key: slot for key, slot in self._writing.items() if key in self._holds}
        on_hold = list(self._writing.values())
        for slot in self._slots.values():
            if slot.fd >= 0 and slot not in on_hold:
                unlock(slot.fd)

    def hold(self, slot: WritableSlot, is_over: Callable[[], bool]) -> None:
        """Keep an acquired slot for a save in the background, until ``is_over()``."""
        with self._lock:
            self._holds[slot.segment_id] = is_over

    def descriptor(self, slot: WritableSlot) -> int:
        """The descriptor that an acquired slot is locked by; the ring keeps it.

        Raises:
            UsageError: The slot was sealed or abandoned.
        """
        with self._lock:
            mapped = self._writing.get(slot.segment_id)
        if mapped is None or mapped.fd < 0:
            raise UsageError("a slot that was given back cannot be sent to another process")
        return mapped.fd

    def release_holds(self) -> None:
        """Release all slots on hold, because no background save can use them any more."""
        with self._lock:
            for segment_id in list(self._holds):
                self._release(segment_id)

    def _lock_granted(self, grant: Grant, segment_bytes: int) -> MappedSlot | None:
        slot = self._slots.get(grant.slot_id)
        if slot is None or slot.capacity_bytes < segment_bytes:
            return None
        try:
            if lock_reserved(slot.fd, slot.capacity_bytes, grant.segment_id):
                return slot
        except IntegrityError:
            # Asking with Reserve lets the agent find the damage and grant another one.
            self._forget(slot)
        return None

    def _reserve(self, segment_bytes: int) -> tuple[str, MappedSlot]:
        for is_last in (False, True):
            grant = self._client.reserve(segment_bytes)
            if grant.ticket is None or grant.capacity_bytes < segment_bytes:
                raise RemoteProtocolError(
                    f"the agent granted {grant.capacity_bytes} bytes for {segment_bytes}"
                )
            try:
                return grant.segment_id, self._adopt(grant, locked=True)
            except (AgentError, RemoteProtocolError):
                if is_last:  # once: the agent died in between, or this process was stopped
                    raise
        raise AssertionError  # the loop returns or raises

    def _adopt(self, given: Grant | SlotHandle, *, locked: bool) -> MappedSlot:
        """Fetch a slot's descriptor, and map it unless that very file is mapped already."""
        assert given.ticket is not None
        slot_id, capacity_bytes = given.slot_id, given.capacity_bytes
        fd = self._client.redeem(given.ticket)
        try:
            check_slot(fd, capacity_bytes)
            with self._lock:
                known = self._slots.get(slot_id)
                if known is not None and known.mapping.is_of(fd):
                    if locked:  # else the known one may have the lock of a running save
                        known.fd, fd = fd, known.fd
                    return known
                if known is not None:
                    self._forget(known)
                if self._closed:
                    raise UsageError("the slot ring was closed")
                slot = self._slots[slot_id] = MappedSlot(slot_id, fd, capacity_bytes)
                fd = -1
                return slot
        finally:
            if fd >= 0:
                os.close(fd)

    def _warm(self, slot: MappedSlot, writable: WritableSlot) -> None:
        try:
            self.pool.run(lambda _: slot.prefault.help(), self.pool.threads)
        except OSError as error:
            self.abandon(writable)
            with self._lock:
                self._forget(slot)
            raise IntegrityError(f"slot {slot.slot_id} is damaged: {error}") from error
        slot.prefault.done.wait(PREFAULT_WAIT_S)

    def seal(self, slot: WritableSlot, segment_bytes: int, root: bytes) -> None:
        """Have the agent seal the written segment. The slot must not be written afterwards.

        Args:
            slot: From :meth:`acquire`.
            segment_bytes: Size of the segment in it.
            root: Its root digest, from :func:`.copy.write_segment`.

        Raises:
            AgentError, IntegrityError, NotFoundError: It is not known to be sealed; abandon it.
        """
        failpoints.reach("save.seal.before")
        reply = self._client.seal(slot.segment_id, slot.slot_id, segment_bytes, root.hex())
        failpoints.reach("save.seal.after")
        with self._lock:
            self._next = reply.next
            self._release(slot.segment_id)
            is_larger = segment_bytes > self._prepared_bytes
            self._prepared_bytes = max(self._prepared_bytes, slot_capacity(segment_bytes))
        if is_larger:
            # The first save shows how large segments are: prepare the other slots for the next.
            self._start_preparing(segment_bytes)

    def abandon(self, slot: WritableSlot) -> None:
        """Release a slot unsealed, after a failed save; the agent frees it. Never raises."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._release(slot.segment_id)

    def _release(self, segment_id: str) -> None:
        self._holds.pop(segment_id, None)
        slot = self._writing.pop(segment_id, None)
        if slot is not None and slot.fd >= 0:
            with contextlib.suppress(OSError):
                unlock(slot.fd)
            if self._closed:
                self._forget(slot)

    # --- reading ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Pause the background prefault during a load.

        A restarted trainer waits for its load and not yet for the slots of its next save, and the
        page faults of both compete within the process.
        """
        with self._lock:
            self._loads += 1
            self._may_prefault.clear()
        try:
            yield
        finally:
            with self._lock:
                self._loads -= 1
                if not self._loads:
                    self._may_prefault.set()

    def view(self, slot_id: str, fd: int) -> memoryview | None:
        """A read-only view of a slot that this process has mapped and populated, or None.

        Args:
            slot_id: As ``SegmentOpened.slot_id``.
            fd: The reader's descriptor, which has the lease; the view is of this very file, and
                valid as long as the lease.
        """
        with self._lock:
            slot = self._slots.get(slot_id)
        if slot is None or not slot.prefault.done.is_set():
            return None
        try:
            check_slot(fd, slot.capacity_bytes)
        except IntegrityError:
            return None
        return slot.mapping.view.toreadonly() if slot.mapping.is_of(fd) else None

    # --- ending -----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads, release locks and descriptors. Views that are alive remain valid.

        A slot that another thread is writing now remains locked until that save ends, since its
        next writer would share it.
        """
        if os.getpid() != self._pid:
            return  # a forked child has no slots, and the lock may have been taken at the fork
        with self._lock:
            self._closed = True
            task, self._task = self._task, None
        if task is not None:
            # It uses the client, too. A request that hangs ends at its deadline.
            task.stop.set()
            task.thread.join(CLOSE_WAIT_S)
        self.pool.close()
        with self._lock:
            being_written = {slot.slot_id for slot in self._writing.values()}
            for slot in list(self._slots.values()):
                if slot.slot_id not in being_written:
                    self._forget(slot)
            self._next = None

    def _drop_deleted(self) -> None:
        # A deleted file's pages are not freed before their last mapping ends.
        for slot in list(self._slots.values()):
            if slot.is_gone():
                self._forget(slot)

    def _forget(self, slot: MappedSlot) -> None:
        slot.close()
        if self._slots.get(slot.slot_id) is slot:
            del self._slots[slot.slot_id]

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("slots cannot be used after a fork: open an engine in the child")

    def _after_fork(self) -> None:
        for slot in self._slots.values():
            # Not unlocked: the lock belongs to the parent too.
            if slot.fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(slot.fd)
                slot.fd = -1


_rings: weakref.WeakSet[SlotRing] = weakref.WeakSet()


def _close_in_child() -> None:
    for ring in list(_rings):
        ring._after_fork()


os.register_at_fork(after_in_child=_close_in_child)
