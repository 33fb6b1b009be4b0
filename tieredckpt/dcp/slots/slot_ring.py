"""The trainer's side of its slots: mapped once, prefaulted in the background, written in turn.

A save must take no page fault in steady state. So the ring of slots that the agent will grant in
turn is mapped and populated when the size of a segment is known, by a background thread, and a
mapping is kept as long as its slot file exists. A slot that is written is locked (``LOCK_EX`` on
an open file description of ours, see :mod:`tieredckpt.storage.memory.slot`), from acquire to seal.
The reply to a seal says which tiers get nothing, and training's log is what people look at: it is
told here.

Nothing here survives a fork: the child's copies of the descriptors are closed at once, since they
would keep a slot's lock alive after its trainer has died, and mappings are not inherited.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
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
from tieredckpt.rpc.messages.agent import TierTrouble
from tieredckpt.storage.file_io import CopyPool
from tieredckpt.storage.memory.mapping import Mapping
from tieredckpt.storage.memory.slot import check_slot, lock_reserved, unlock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tieredckpt.rpc.agent_client import AgentClient
    from tieredckpt.rpc.messages.agent import Grant, SlotHandle

log = logging.getLogger(__name__)
_troubles_log = logging.getLogger(
    "tieredckpt.dcp.troubles"
)  # docs/operate/tiers.md says so to users

PREFAULT_BYTES = 64 << 20
"""Populated per call: what stopping may have to wait for (0.1 s), and what helpers share."""

HOLD_POLL_S = 0.05
"""How soon a prefault that is held notices that it is to stop."""


class Prefault:
    """Populates one mapping, piece by piece; any number of threads may help."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self._starts = itertools.count(0, PREFAULT_BYTES)
        self._left = -(-mapping.capacity_bytes // PREFAULT_BYTES)
        self._lock = threading.Lock()
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether all of the slot is populated."""
        return self._done.is_set()

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
                        self._done.set()

    def wait(self, timeout_s: float) -> None:
        """Wait for pieces that other threads are populating."""
        self._done.wait(timeout_s)


class MappedSlot:
    """A slot of ours: one mapping, and the descriptor that it is locked by."""

    def __init__(self, slot_id: str, fd: int, capacity_bytes: int) -> None:
        self.slot_id = slot_id
        self.fd = fd
        self.mapping = Mapping(fd, capacity_bytes)
        self.prefault = Prefault(self.mapping)

    @property
    def capacity_bytes(self) -> int:
        """Usable bytes, without the label page."""
        return self.mapping.capacity_bytes

    def is_gone(self) -> bool:
        """Whether the file was deleted, or changed its size under us."""
        try:
            check_slot(self.fd, self.capacity_bytes)
        except IntegrityError:
            return True
        return os.fstat(self.fd).st_nlink == 0

    def close(self) -> None:
        """Give up lock and descriptor; the mapping goes with its last view."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            # By hand: the mapping shares the open file description and would keep the lock.
            with contextlib.suppress(OSError):
                unlock(fd)
            os.close(fd)


@dataclass(slots=True, eq=False)
class WritableSlot:
    """A slot granted for one segment, locked and mapped; ours from acquire to seal or abandon."""

    segment_id: str
    """32 hex digits, minted by the agent."""
    slot_id: str
    capacity_bytes: int
    view: memoryview
    """The slot's usable bytes, writable."""
    address: int
    """Where they lie; valid as long as ``view`` is alive."""
    cold: bool
    """The slot was not prefaulted when the save asked for it."""


class Behind:
    """Work in a background thread that can be asked to stop.

    Args:
        work: Is given the event that asks it to stop.
        before: Work that is stopped, and has ended before this one begins.
    """

    def __init__(self, work: Callable[[threading.Event], None], before: Behind | None) -> None:
        self.stop = threading.Event()

        def run() -> None:
            if before is not None:
                before.stop.set()
                before.thread.join()
            if not self.stop.is_set():
                work(self.stop)

        self.thread = threading.Thread(target=run, name="tieredckpt-prefault", daemon=True)
        self.thread.start()


AGAIN_S = 600.0
"""What goes on is told again after this time."""
QUIET_S = 120.0
"""What is back sooner was not over: a tier that almost keeps up, an agent that began anew."""
_OVER = {"failing": "it works again", "full": "it keeps up again"}


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

    def tell(self, found: dict[str, TierTrouble]) -> None:
        """Log what is new in what the agent says of its tiers, by name, and what is over."""
        with self._lock:
            now_s = self._clock()
            for tier, trouble in found.items():
                key = (tier, trouble.kind)
                self._heard[key] = now_s
                if key not in self._told or now_s - self._told[key] >= AGAIN_S:
                    self._told[key] = now_s
                    _troubles_log.warning("tier %s: %s", tier, trouble.text)
            for tier, kind in [k for k in self._told if now_s - self._heard[k] >= QUIET_S]:
                del self._told[tier, kind], self._heard[tier, kind]
                if all(tier != other for other, _ in self._told):
                    _troubles_log.warning("tier %s: %s", tier, _OVER[kind])


PREFAULT_WAIT_S = 120.0
"""Longest wait for another thread's last piece; afterwards the save goes on, cold."""

CLOSE_WAIT_S = 10.0


class SlotRing:
    """This process's slots with one agent. One save at a time; methods are thread-safe.

    Args:
        client: The agent, with an open session.
        copy_threads: Threads of :attr:`pool`, see :func:`.copying.default_copy_threads`.
    """

    def __init__(self, client: AgentClient, copy_threads: int) -> None:
        self.pool = CopyPool(copy_threads)
        """For :func:`.copying.write_segment`."""
        self.cold_saves = 0
        """How many saves found no prefaulted slot; the first one of a run is such a save."""
        self._client = client
        self._troubles = TierTroubles()
        self._lock = threading.RLock()
        self._slots: dict[str, MappedSlot] = {}
        self._writing: dict[str, MappedSlot] = {}
        self._held: dict[str, Callable[[], bool]] = {}
        self._next: Grant | None = None
        self._asked_bytes = 0
        """For what segments :meth:`prepare` was called."""
        self._prepared_bytes = 0
        self._behind: Behind | None = None
        self._closed = False
        self._loads = 0
        self._may_prefault = threading.Event()
        self._may_prefault.set()
        self._pid = os.getpid()
        _rings.add(self)

    # --- making the ring ready --------------------------------------------------------------------

    def prepare(self, segment_bytes: int) -> None:
        """Have the whole ring made for segments of this size, mapped and prefaulted, all behind.

        What was asked for once is not asked for again. What fails is only logged: nobody waits for
        it, and the save that finds no slot asks for one itself, and raises.
        """
        with self._lock:
            new = segment_bytes > self._asked_bytes
            self._asked_bytes = max(self._asked_bytes, segment_bytes)
        if new:
            self._prepare_behind(segment_bytes)

    def _prepare_behind(self, segment_bytes: int) -> None:
        with self._lock:
            if not self._closed:
                self._behind = Behind(
                    lambda stop: self._make_ring(segment_bytes, stop), self._behind
                )

    def _make_ring(self, segment_bytes: int, stop: threading.Event) -> None:
        try:
            slots = self._open_ring(segment_bytes)
        except (TieredCkptError, OSError) as error:
            if not self._closed:
                log.warning("cannot prepare slots of %d bytes ahead: %s", segment_bytes, error)
            return
        for slot in slots:
            try:
                slot.prefault.help(stop, self._may_prefault)
            except OSError as error:  # the save that meets this slot finds it damaged and says so
                log.warning("slot %s cannot be prefaulted: %s", slot.slot_id, error)

    def _open_ring(self, segment_bytes: int) -> list[MappedSlot]:
        prepared = self._client.prepare(segment_bytes)
        slots = []
        for handle in prepared.slots:
            with self._lock:
                slot = self._slots.get(handle.slot_id)
            if slot is None or slot.is_gone():
                slot = self._adopt(handle, locked=False)
            slots.append(slot)
        with self._lock:
            self._prepared_bytes = max(self._prepared_bytes, slot_capacity(segment_bytes))
        return slots

    def wait_warm(self, timeout_s: float) -> bool:
        """Wait until the background thread is through; False if it is not by then."""
        with self._lock:
            behind = self._behind
        if behind is not None:
            behind.thread.join(timeout_s)
        return behind is None or not behind.thread.is_alive()

    # --- a save -----------------------------------------------------------------------------------

    def acquire(self, segment_bytes: int) -> WritableSlot:
        """A slot for one segment of at most ``segment_bytes``, locked for us and populated.

        In steady state this is no request: the grant came with the reply to the last seal.

        Raises:
            CapacityError: No slot became free in time.
            AgentError: The agent does not answer.
            IntegrityError: The slot that was granted is damaged.
        """
        self._check_process()
        failpoints.reach("save.reserve.before")
        with self._lock:
            self._drop_deleted()
            self._settle_interrupted()
            granted, self._next = self._next, None
            slot = self._claim(granted, segment_bytes) if granted is not None else None
        if slot is not None and granted is not None:
            segment_id = granted.segment_id
        else:
            segment_id, slot = self._reserve(segment_bytes)
        failpoints.reach("save.reserve.after")
        return self._writable(segment_id, slot)

    def take(self, grant: Grant) -> WritableSlot:
        """A slot that was granted beside the ring's own; :meth:`abandon` lets go of it."""
        self._check_process()
        return self._writable(grant.segment_id, self._adopt(grant, locked=True))

    def _writable(self, segment_id: str, slot: MappedSlot) -> WritableSlot:
        cold = not slot.prefault.done
        with self._lock:
            self._writing[segment_id] = slot
            self.cold_saves += cold
        mapping = slot.mapping
        writable = WritableSlot(
            segment_id, slot.slot_id, mapping.capacity_bytes, mapping.view, mapping.address, cold
        )
        if cold:
            self._warm(slot, writable)
        return writable

    def _settle_interrupted(self) -> None:
        """Let go of slots that an earlier save left locked.

        Ctrl-C strikes between any two instructions, also where no ``finally`` is in force yet; a
        slot that stayed locked by that would be lost until the engine is closed. There is one save
        at a time, so nothing is being written now, except for what is held for one that goes on.
        """
        for segment_id in [key for key, is_over in self._held.items() if is_over()]:
            self._let_go(segment_id)
        self._writing = {key: slot for key, slot in self._writing.items() if key in self._held}
        held = list(self._writing.values())
        for slot in self._slots.values():
            if slot.fd >= 0 and slot not in held:
                unlock(slot.fd)

    def hold(self, slot: WritableSlot, is_over: Callable[[], bool]) -> None:
        """Keep an acquired slot for a save that goes on in the background, until that is over."""
        with self._lock:
            self._held[slot.segment_id] = is_over

    def descriptor(self, slot: WritableSlot) -> int:
        """The descriptor that an acquired slot is locked by; it stays the ring's.

        Raises:
            UsageError: It is held no more.
        """
        with self._lock:
            mapped = self._writing.get(slot.segment_id)
        if mapped is None or mapped.fd < 0:
            raise UsageError("a slot that was given back cannot be sent to another process")
        return mapped.fd

    def settle_held(self) -> None:
        """Let go of all held slots: no save is in flight that could still write or read them."""
        with self._lock:
            for segment_id in list(self._held):
                self._let_go(segment_id)

    def _claim(self, grant: Grant, segment_bytes: int) -> MappedSlot | None:
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
                if is_last:  # once: the agent died in between, or we slept
                    raise
        raise AssertionError  # the loop returns or raises

    def _adopt(self, given: Grant | SlotHandle, *, locked: bool) -> MappedSlot:
        """Take over a slot's descriptor, and map it unless that very file is mapped already."""
        assert given.ticket is not None
        slot_id, capacity_bytes = given.slot_id, given.capacity_bytes
        fd = self._client.redeem(given.ticket)
        try:
            check_slot(fd, capacity_bytes)
            with self._lock:
                known = self._slots.get(slot_id)
                if known is not None and known.mapping.is_of(fd):
                    if locked:  # else ours may be the one that holds the lock of a running save
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
        slot.prefault.wait(PREFAULT_WAIT_S)

    def seal(self, slot: WritableSlot, segment_bytes: int, root: bytes) -> None:
        """Hand the written segment to the agent. The slot must not be written afterwards.

        Args:
            slot: From :meth:`acquire`.
            segment_bytes: Size of the segment in it.
            root: Its root digest, from :func:`.copying.write_segment`.

        Raises:
            AgentError, IntegrityError, NotFoundError: It is not known to be sealed; abandon it.
        """
        failpoints.reach("save.seal.before")
        reply = self._client.seal(slot.segment_id, slot.slot_id, segment_bytes, root.hex())
        failpoints.reach("save.seal.after")
        self._troubles.tell(reply.troubles)
        with self._lock:
            self._next = reply.next
            self._let_go(slot.segment_id)
            behind = segment_bytes > self._prepared_bytes
            self._prepared_bytes = max(self._prepared_bytes, slot_capacity(segment_bytes))
        if behind:
            # The first save tells how large segments are: have the other slots ready for the next.
            self._prepare_behind(segment_bytes)

    def abandon(self, slot: WritableSlot) -> None:
        """Give a slot back unsealed, after a failed save; the agent frees it. Never raises."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._let_go(slot.segment_id)

    def _let_go(self, segment_id: str) -> None:
        self._held.pop(segment_id, None)
        slot = self._writing.pop(segment_id, None)
        if slot is not None and slot.fd >= 0:
            with contextlib.suppress(OSError):
                unlock(slot.fd)
            if self._closed:
                self._forget(slot)

    # --- reading ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Hold the background prefault while a load lasts.

        A restarted trainer opens the engine and loads: for the load it waits, for the slots of its
        next save it does not yet, and both are page faults of one process.
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
            fd: The reader's descriptor, which holds the lease; the view is of this very file, and
                good as long as the lease is held.
        """
        with self._lock:
            slot = self._slots.get(slot_id)
        if slot is None or not slot.prefault.done:
            return None
        try:
            check_slot(fd, slot.capacity_bytes)
        except IntegrityError:
            return None
        return slot.mapping.view.toreadonly() if slot.mapping.is_of(fd) else None

    # --- ending -----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads, give up locks and descriptors. Views that are alive stay valid.

        A slot that another thread is writing at this moment stays locked until that save ends: who
        let go of it earlier would share it with the next writer.
        """
        if os.getpid() != self._pid:
            return  # a forked child has nothing of it, and the lock may have been held at the fork
        with self._lock:
            self._closed = True
            behind, self._behind = self._behind, None
        if behind is not None:
            # It uses the client too. What hangs in a request ends with that request's deadline.
            behind.stop.set()
            behind.thread.join(CLOSE_WAIT_S)
        self.pool.close()
        with self._lock:
            being_written = {slot.slot_id for slot in self._writing.values()}
            for slot in list(self._slots.values()):
                if slot.slot_id not in being_written:
                    self._forget(slot)
            self._next = None

    def _drop_deleted(self) -> None:
        # A deleted file's pages stay allocated as long as somebody has them mapped.
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
