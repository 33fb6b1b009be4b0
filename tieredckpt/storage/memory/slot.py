"""One slot: a recycled tmpfs file with at most one segment, its label, and the locks on it.

A slot file has ``capacity`` usable bytes and then one label page; offsets in the slot are
offsets in the segment. This module is shared by the agent and the trainers: it works on
descriptors, keeps no state, and never maps anything, so a truncated file is an error here and
never a SIGBUS. Normative layout: ``docs/reference/format/slot.md``.

Rules for every change of a label:

- RESERVED is written, and cancelled, only under ``LOCK_EX`` on an open file description of one's
  own. So a process with ``LOCK_EX`` that reads "RESERVED for my segment" is the only writer.
- SEALED is written by the agent while the requesting writer still has its lock; or over a damaged
  label, under ``LOCK_SH``, if the trailer in the slot is that of a committed segment.
- FREE may be written over SEALED at any time: readers have ``LOCK_SH``, and reserving the slot
  again needs ``LOCK_EX``. The label decides what a slot contains, the lock decides who uses it.

A lock (flock) belongs to the open file description: it travels with a descriptor in SCM_RIGHTS,
outlives the process that took it, and ends with the last descriptor or mapping of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from dataclasses import dataclass
from typing import Literal, get_args

from tieredckpt.errors import IntegrityError
from tieredckpt.format.envelope import open_record, seal_record
from tieredckpt.format.manifest import check_id, check_name

LABEL_BYTES = 4096
"""The label page at the end of a slot file. One page, so that one pwrite replaces it."""

LABEL_KIND = b"TCKSLOT\0"
LABEL_VERSION = 1

NO_ID = "0" * 32
"""Stands for "none" where a label has no segment, session or root."""

REPLICA_ID = "f" * 32
"""Stands for the session where a slot is for copies of other hosts' segments."""

SlotState = Literal["free", "reserved", "sealed"]

_STATES: tuple[SlotState, ...] = get_args(SlotState)
# state, length of namespace, capacity, generation, segment bytes, segment, session, root,
# namespace, slot (zero in what was written before it was stated)
_LABEL = struct.Struct("<BB6xQQQ16s16s16s128s16s")
# The envelope's header and digest take 48 bytes; the payload is padded so that the record is
# exactly one page and each byte of the page is covered by the digest.
_PAYLOAD_BYTES = LABEL_BYTES - 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """State and content of a slot.

    ``free``: empty; namespace and session name the last owner (for affinity), or are empty and
    :data:`NO_ID`. ``reserved``: being written by ``session_id`` as ``segment_id``, of at most
    ``segment_bytes``; ``root`` is :data:`NO_ID`. ``sealed``: contains the complete segment.
    """

    state: SlotState
    namespace: str = ""
    segment_id: str = NO_ID
    session_id: str = NO_ID
    segment_bytes: int = 0
    root: str = NO_ID
    generation: int = 0
    """Raised by one at each reservation: distinguishes two uses of one slot."""
    slot_id: str = NO_ID
    """Id of the slot; :data:`NO_ID` in labels of earlier releases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotInfo:
    """The pool's knowledge of one slot at one moment."""

    slot_id: str
    capacity: int
    label: Label
    """As last read or written; of a damaged slot, the label before the damage, if known."""
    error: str | None = None
    """Why the slot is damaged (truncated, emptied, label unreadable); it is never assigned."""
    label_lost: bool = False
    """The label could not be read at adoption: the slot's content is unknown."""
    since_s: float = 0.0
    """Start of this state on the pool's monotonic clock; adoption starts a state."""

    @property
    def file_bytes(self) -> int:
        """Bytes of tmpfs that the slot occupies."""
        return self.capacity + LABEL_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A slot for writing; close ``fd`` after passing it on."""

    slot: SlotInfo
    fd: int
    """A fresh open file description with ``LOCK_EX``; the caller owns it."""


def encode_label(label: Label, capacity: int) -> bytes:
    """The label page of a slot with ``capacity`` usable bytes. Raises ValueError on bad fields."""
    namespace = label.namespace.encode("ascii")
    if label.namespace:
        check_name(label.namespace, "namespace")
    if not 0 <= label.segment_bytes <= capacity:
        raise ValueError(f"a segment of {label.segment_bytes} bytes in a slot of {capacity}")
    ids = (label.segment_id, label.session_id, label.root)
    payload = _LABEL.pack(
        _STATES.index(label.state),
        len(namespace),
        capacity,
        label.generation,
        label.segment_bytes,
        *(bytes.fromhex(check_id(each, "label")) for each in ids),
        namespace,
        bytes.fromhex(check_id(label.slot_id, "label")),
    )
    page = seal_record(
        LABEL_KIND, LABEL_VERSION, payload.ljust(_PAYLOAD_BYTES, b"\0"), compress=False
    )
    assert len(page) == LABEL_BYTES, len(page)
    return page


def decode_label(page: bytes, capacity: int) -> Label:
    """Inverse of :func:`encode_label`.

    Raises:
        IntegrityError: The page is not the label of a slot of this capacity (FormatVersionError
            if it is one of a later release).
    """
    payload = open_record(page, LABEL_KIND, max_version=LABEL_VERSION, limit_bytes=_PAYLOAD_BYTES)
    if len(payload) != _PAYLOAD_BYTES:
        raise IntegrityError("slot label has another length", actual=len(payload))
    state, length, stated, generation, size, *ids, name, slot = _LABEL.unpack_from(payload)
    if state >= len(_STATES) or length > len(name) or stated != capacity or size > capacity:
        raise IntegrityError(
            f"slot label has state {state}, capacity {stated}, segment of {size} bytes "
            f"in a slot of {capacity}"
        )
    try:
        namespace = name[:length].decode("ascii")
        if namespace:
            check_name(namespace, "namespace")
    except ValueError as error:
        raise IntegrityError(f"slot label names an impossible namespace: {error}") from error
    segment_id, session_id, root = (each.hex() for each in ids)
    return Label(
        state=_STATES[state],
        namespace=namespace,
        segment_id=segment_id,
        session_id=session_id,
        segment_bytes=size,
        root=root,
        generation=generation,
        slot_id=slot.hex(),
    )


def slot_capacity_of(fd: int) -> int:
    """Usable bytes of the slot behind ``fd``, after checking that it is safe to map.

    Required before every mapping: touching a mapping beyond the end of its file, or in a hole of a
    full tmpfs, is SIGBUS.

    Raises:
        IntegrityError: The file is too short, not made of pages, or not fully allocated: it was
            truncated, emptied, punched or is no slot.
        OSError: The descriptor is bad.
    """
    stat = os.fstat(fd)
    if stat.st_size <= LABEL_BYTES or stat.st_size % LABEL_BYTES:
        raise IntegrityError(f"slot file of {stat.st_size} bytes", actual=stat.st_size)
    if stat.st_blocks * 512 < stat.st_size:
        raise IntegrityError(
            f"slot file has holes: {stat.st_blocks * 512} of {stat.st_size} bytes are allocated",
            expected=stat.st_size,
            actual=stat.st_blocks * 512,
        )
    return stat.st_size - LABEL_BYTES


def check_slot(fd: int, capacity: int) -> None:
    """Check that ``fd`` is still a slot of ``capacity`` bytes, or raise IntegrityError."""
    actual = slot_capacity_of(fd)
    if actual != capacity:
        raise IntegrityError(
            f"slot of {capacity} bytes now has {actual}", expected=capacity, actual=actual
        )


def write_label(fd: int, capacity: int, label: Label) -> None:
    """Replace the label, in one write of a whole page.

    Raises:
        IntegrityError: The file is not a slot of ``capacity`` bytes any more; nothing was written
            (a write would lengthen a truncated file again and hide the damage).
        OSError: The write failed; the label is the old or the new one, or damaged.
    """
    page = encode_label(label, capacity)
    check_slot(fd, capacity)
    written = os.pwrite(fd, page, capacity)
    if written != LABEL_BYTES:
        raise OSError(errno.EIO, f"wrote {written} of {LABEL_BYTES} bytes of a slot label")


def read_label(fd: int, capacity: int) -> Label:
    """The label of the slot behind ``fd``; needs no lock.

    Raises:
        IntegrityError: The page is missing, damaged or has another capacity.
        OSError: The read failed.
    """
    page = os.pread(fd, LABEL_BYTES, capacity)
    if len(page) != LABEL_BYTES:
        raise IntegrityError("slot file was truncated: no label page", actual=len(page))
    return decode_label(page, capacity)


def try_lock_exclusive(fd: int) -> bool:
    """Acquire ``LOCK_EX`` without waiting; True if ``fd``'s open file description has it now.

    A shared lock on the same description is converted, and is lost if that fails.
    """
    return _try_lock(fd, fcntl.LOCK_EX)


def try_lock_shared(fd: int) -> bool:
    """Acquire ``LOCK_SH`` without waiting; True if ``fd``'s open file description has it now.

    Right after sealing, a writer calls this to turn its own ``LOCK_EX`` into a reader's lock.
    """
    return _try_lock(fd, fcntl.LOCK_SH)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Release the lock of ``fd``'s open file description, if any."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def lock_reserved(fd: int, capacity: int, segment_id: str) -> bool:
    """Become the writer of a slot that was granted provisionally (``Sealed.next``).

    True: ``fd`` has ``LOCK_EX`` and the label is RESERVED for ``segment_id``. False: there is no
    such grant, or it was cancelled; the slot is not locked; request one with Reserve.

    Raises:
        IntegrityError: The slot is damaged; it is not locked.
    """
    if not try_lock_exclusive(fd):
        return False
    reserved = False
    try:
        check_slot(fd, capacity)
        label = read_label(fd, capacity)
        reserved = label.state == "reserved" and label.segment_id == segment_id
    finally:
        if not reserved:
            unlock(fd)
    return reserved
