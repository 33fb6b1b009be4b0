"""What the pool does to one slot file: each a few system calls through a fresh descriptor.

Stateless. OSError and IntegrityError are passed on as they are; the pool knows what they mean for
the slot.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tieredckpt.errors import IntegrityError
from tieredckpt.format.segment import TRAILER_BYTES, decode_trailer
from tieredckpt.storage.file_io import open_regular
from tieredckpt.storage.memory.slot import (
    LABEL_BYTES,
    NO_ID,
    Label,
    check_slot,
    read_label,
    slot_capacity_of,
    try_lock_exclusive,
    try_lock_shared,
    write_label,
)


def open_file(path: Path, flags: int) -> int:
    """A fresh descriptor of a slot file; see :func:`open_regular`."""
    return open_regular(path, flags, "slot")


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """:func:`open_file`, closed at the end."""
    fd = open_file(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def adopt(path: Path) -> tuple[int, Label | None, str | None]:
    """Capacity, label and what is wrong with a slot file that lies there; never raises for damage.

    The label is None if it cannot be read; the capacity is then what the size suggests.

    Raises:
        OSError: Not even its size can be had.
    """
    # Before it is opened: of one that cannot be (no descriptor is left), the size still says that
    # it may hold something.
    capacity = max(0, os.stat(path, follow_symlinks=False).st_size - LABEL_BYTES)
    try:
        with opened(path, os.O_RDONLY) as fd:
            capacity = slot_capacity_of(fd)
            label = read_label(fd, capacity)
            if label.slot_id not in (NO_ID, path.name):
                raise IntegrityError(f"slot file was replaced by that of slot {label.slot_id}")
            return capacity, label, None
    except (IntegrityError, OSError) as error:
        return capacity, None, str(error)


def open_for_mapping(path: Path, capacity: int) -> int:
    """A descriptor to read and write, without a lock, of a file that is safe to map."""
    fd = open_file(path, os.O_RDWR)
    try:
        check_slot(fd, capacity)
        fd, checked = -1, fd
    finally:
        if fd >= 0:
            os.close(fd)
    return checked


def lock_and_label(path: Path, capacity: int, label: Label) -> int | None:
    """Lock the slot exclusively and replace its label; None if anybody has it locked.

    The old label is gone before the descriptor, and with it the slot, is in anyone's hands.
    """
    fd = open_file(path, os.O_RDWR)
    try:
        if not try_lock_exclusive(fd):
            return None
        write_label(fd, capacity, label)
        fd, taken = -1, fd
    finally:
        if fd >= 0:
            os.close(fd)
    return taken


def relabel(path: Path, capacity: int, label: Label, *, exclusively: bool) -> bool:
    """Replace the label; if ``exclusively``, under ``LOCK_EX``, or False if somebody has a lock."""
    with opened(path, os.O_RDWR) as fd:
        # A writer that claims the slot at this moment either has the lock already, or will find a
        # label that is not its own.
        if exclusively and not try_lock_exclusive(fd):
            return False
        write_label(fd, capacity, label)
    return True


def is_locked(path: Path) -> bool:
    """Whether anybody has the slot locked."""
    with opened(path, os.O_RDONLY) as fd:
        return not try_lock_exclusive(fd)


def unlink(path: Path, *, even_if_locked: bool) -> bool:
    """Unlink what lies at ``path``; False if somebody has it locked. What is gone is success."""
    try:
        with opened(path, os.O_RDONLY) as fd:
            if not try_lock_exclusive(fd) and not even_if_locked:
                return False
            # Under the lock, so nobody can have begun to use it in between.
            os.unlink(path)
    except FileNotFoundError:
        pass
    except IntegrityError:
        os.unlink(path)  # a link or a pipe: nobody can have mapped it as a slot
    return True


def seal(path: Path, capacity: int, label: Label, *, unless_written: bool = False) -> bool:
    """Label the slot as sealed after comparing ``label`` with the trailer that lies in it.

    With ``unless_written`` False is returned, and nothing done, if a writer has it locked.

    Raises:
        IntegrityError: They differ; with field ``key`` if it is the segment that is wrong, without
            it if it is the slot. The label is unchanged.
    """
    with opened(path, os.O_RDWR) as fd:
        if unless_written and not try_lock_shared(fd):
            return False
        checked_trailer(fd, capacity, label)
        write_label(fd, capacity, label)
    return True


def checked_trailer(fd: int, capacity: int, label: Label) -> bytes:
    """The trailer that lies in a slot, if it is that of the segment that ``label`` says.

    Raises:
        IntegrityError: As :func:`seal`.
    """
    check_slot(fd, capacity)
    size = label.segment_bytes
    if not TRAILER_BYTES <= size <= capacity:
        raise IntegrityError(
            f"a segment of {size} bytes cannot be in a slot of {capacity}", key=label.segment_id
        )
    data = os.pread(fd, TRAILER_BYTES, size - TRAILER_BYTES)
    try:
        trailer = decode_trailer(data)
    except IntegrityError as error:
        raise type(error)(
            f"segment {label.segment_id} cannot be sealed: {error}", key=label.segment_id
        ) from error
    found = (trailer.segment_id.hex(), trailer.segment_bytes, trailer.root.hex())
    if found != (label.segment_id, size, label.root):
        raise IntegrityError(
            f"segment {label.segment_id} cannot be sealed: its trailer says id, size and root "
            f"{found}, the writer says {(label.segment_id, size, label.root)}",
            key=label.segment_id,
            expected=label.root,
            actual=trailer.root.hex(),
        )
    return data
