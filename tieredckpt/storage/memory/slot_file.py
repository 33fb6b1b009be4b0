"""The pool's operations on one slot file: each a few system calls through a fresh descriptor.

Stateless. OSError and IntegrityError are raised as they are; the pool interprets them.
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
    """Capacity, label and error of an existing slot file; never raises for damage.

    The label is None if it cannot be read; the capacity is then derived from the size.

    Raises:
        OSError: Not even its size can be read.
    """
    # Before it is opened: a file that cannot be opened (no descriptor is left) may still have
    # content if its size permits it.
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
    with contextlib.ExitStack() as on_failure:
        fd = open_file(path, os.O_RDWR)
        on_failure.callback(os.close, fd)
        check_slot(fd, capacity)
        on_failure.pop_all()
    return fd


def lock_and_label(path: Path, capacity: int, label: Label) -> int | None:
    """Lock the slot exclusively and replace its label; None if it is locked already.

    The label is replaced before any caller gets the descriptor, and with it the slot.
    """
    with contextlib.ExitStack() as on_failure:
        fd = open_file(path, os.O_RDWR)
        on_failure.callback(os.close, fd)
        if not try_lock_exclusive(fd):
            return None
        write_label(fd, capacity, label)
        on_failure.pop_all()
    return fd


def relabel(path: Path, capacity: int, label: Label, *, exclusively: bool) -> bool:
    """Replace the label; if ``exclusively``, under ``LOCK_EX``, or False if it is locked."""
    with opened(path, os.O_RDWR) as fd:
        # A writer that locks the slot at this moment either has the lock already, or will find a
        # label that is not its own.
        if exclusively and not try_lock_exclusive(fd):
            return False
        write_label(fd, capacity, label)
    return True


def is_locked(path: Path) -> bool:
    """Whether a descriptor has the slot locked."""
    with opened(path, os.O_RDONLY) as fd:
        return not try_lock_exclusive(fd)


def unlink(path: Path, *, even_if_locked: bool) -> bool:
    """Unlink the file at ``path``; False if it is locked. A missing file is success."""
    try:
        with opened(path, os.O_RDONLY) as fd:
            if not try_lock_exclusive(fd) and not even_if_locked:
                return False
            # Under the lock, so no process can have begun to use it in between.
            os.unlink(path)
    except FileNotFoundError:
        pass
    except IntegrityError:
        os.unlink(path)  # a link or a pipe: no process can have mapped it as a slot
    return True


def seal(path: Path, capacity: int, label: Label, *, unless_written: bool = False) -> bool:
    """Label the slot as sealed after comparing ``label`` with the trailer in the slot.

    With ``unless_written`` returns False without a change if a writer has it locked.

    Raises:
        IntegrityError: They differ; with field ``key`` if the segment is wrong, without it if the
            slot is. The label is unchanged.
    """
    with opened(path, os.O_RDWR) as fd:
        if unless_written and not try_lock_shared(fd):
            return False
        checked_trailer(fd, capacity, label)
        write_label(fd, capacity, label)
    return True


def checked_trailer(fd: int, capacity: int, label: Label) -> bytes:
    """The trailer in a slot, if it is that of the segment in ``label``.

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
            f"segment {label.segment_id} cannot be sealed: its trailer has id, size and root "
            f"{found}, the writer reported {(label.segment_id, size, label.root)}",
            key=label.segment_id,
            expected=label.root,
            actual=trailer.root.hex(),
        )
    return data
