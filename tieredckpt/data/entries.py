"""Entries of the data cache: batches, with the loader's state after each, as segments in files.

The items of a segment are the tensors, named by their numbers, and one bytes item: all else as
plain data, with tags that refer to tensors. No pickle. A file is named by its step; files of one
stream are in one folder. A stream is what ranks with the same rows share. Its name is a digest of
the loader's settings and of the ranks' coordinate, so that another data set, or another world, has
other entries. docs/design/010-data-cache.md has the reasons.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tieredckpt import failpoints
from tieredckpt.dcp.job.session import Session
from tieredckpt.dcp.state.items import check_kind, checked_layout, dtype_name
from tieredckpt.errors import IntegrityError, TieredCkptError
from tieredckpt.format import segment
from tieredckpt.format.digest import BlockDigests, digest
from tieredckpt.format.plain import decode_plain, encode_plain
from tieredckpt.rpc.messages.agent import ReserveData
from tieredckpt.storage.file_io import open_regular

VERSION = 1
RESERVE_S = 5.0
"""How long the agent may take to free space."""
RETRY_S = 30.0
"""An agent that failed is not asked again for so long."""
_BUFFER_BYTES = 1 << 20

log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """One step.

    Attributes:
        before, after: Marks of the loader's state before and after the batch.
        state: That state after it.
        batch: What the loader returned.
    """

    before: bytes
    after: bytes
    state: Any
    batch: Any


class Encoded(NamedTuple):
    """The items of an entry's segment."""

    layout: segment.SegmentLayout
    tensors: Sequence[torch.Tensor]
    rest: bytes


def mark_of(value: Any, name: str = "state") -> bytes:
    """Identifies the state of a loader, or what is named, such as a batch.

    Raises:
        UsageError: It holds other things than plain data and CPU tensors that require no gradients;
            the message names them.
    """

    def content(part: Any) -> tuple[str, Any] | None:
        if (plain := _plain_tensor(part)) is None:
            return None
        raw = plain.contiguous().reshape(-1).view(torch.uint8).numpy().data
        return dtype_name(plain.dtype), [tuple(plain.shape), digest(raw)]

    return digest(encode_plain({name: value}, content))


def _plain_tensor(value: Any) -> torch.Tensor | None:
    """A tensor whose bytes are its values; None: it is none that can be stored."""
    if type(value) is not torch.Tensor or value.is_cuda or value.requires_grad:
        return None
    check_kind("of a batch", value)
    return value.resolve_conj().resolve_neg()


def encode(entry: Entry) -> Encoded:
    """Lay out an entry.

    Raises:
        UsageError: The batch holds other things than plain data and CPU tensors that require no
            gradients; the message names the type and its place.
    """
    tensors: list[torch.Tensor] = []

    def reference(value: Any) -> tuple[str, Any] | None:
        if (plain := _plain_tensor(value)) is None:
            return None
        # A copy, as the loader may use its memory again, and a script may change the batch.
        # Contiguous: a rank that reads it again must compute the same bits.
        tensors.append(plain.clone(memory_format=torch.contiguous_format))
        return "tensor", len(tensors) - 1

    rest = encode_plain({"version": VERSION, **entry._asdict()}, reference)
    specs = []
    for number, each in enumerate(tensors):
        shape, dtype = tuple(each.shape), dtype_name(each.dtype)
        place = (shape, (0,) * len(shape), shape)
        specs.append(segment.ItemSpec(str(number), "tensor", each.nbytes, dtype, *place))
    specs.append(segment.ItemSpec("", "bytes", len(rest)))
    return Encoded(checked_layout(specs), tensors, rest)


def decode(rest: bytes, tensors: Sequence[torch.Tensor]) -> Entry:
    """The entry with these items. Raises IntegrityError."""
    found = decode_plain(rest, extra=lambda _tag, number: tensors[number])
    names = {"version", *Entry._fields}
    if type(found) is not dict or found.keys() != names or found.pop("version") != VERSION:
        raise IntegrityError("no entry of the data cache that this release can read")
    return Entry(**found)


def write(fd: int, encoded: Encoded, segment_id: bytes) -> None:
    """Write the segment to a file, and close it. Raises OSError, as if memory is full."""
    layout = encoded.layout
    flat = [each.reshape(-1).view(torch.uint8).numpy().data for each in encoded.tensors]
    digests, at = BlockDigests(layout.block_bytes), 0
    with open(fd, "wb", buffering=_BUFFER_BYTES) as file:
        for item, source in zip(layout.items, [*flat, memoryview(encoded.rest)], strict=True):
            for piece in (memoryview(bytes(item.offset - at)), source):
                digests.update(piece)
                file.write(piece)
            at = item.offset + item.size_bytes
            failpoints.reach("data.write")
        padding = bytes(layout.data_bytes - at)
        digests.update(memoryview(padding))
        footer = segment.encode_footer(layout, digests.finish(), segment_id)
        file.write(padding + footer)


def read(path: Path, segment_id: bytes) -> Entry:
    """The entry in a file, every block verified.

    Its tensors are the file's pages, mapped privately: they outlive the file's name, and a change
    of them is seen by no other process.

    Raises:
        IntegrityError: Not the segment of this id, or not as it was written.
        OSError: There is no such file, or it cannot be mapped.
    """
    with open(open_regular(path, os.O_RDONLY, "entry"), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size < segment.TRAILER_BYTES:
            raise IntegrityError(f"an entry of {size} bytes")
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        pages = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, protection)
    view = memoryview(pages)
    trailer = segment.decode_trailer(bytes(view[-segment.TRAILER_BYTES :]))
    if (trailer.segment_id, trailer.segment_bytes) != (segment_id, size):
        raise IntegrityError("the segment of another step, or one that is cut off")
    footer = segment.decode_footer(trailer, bytes(view[trailer.index_offset :]))
    for block in range(trailer.num_blocks):
        start, stop = footer.block_range(block)
        if digest(view[start:stop]) != footer.block_digest(block):
            raise IntegrityError(f"block {block} is damaged")
    tensors, rest = [], b""
    for item in footer.items:
        if item.kind == "bytes":
            rest = bytes(view[item.offset : item.offset + item.size_bytes])
            continue
        dtype = getattr(torch, item.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise IntegrityError(f"a tensor of {item.dtype}")
        flat = torch.empty(0, dtype=dtype)
        if count := item.size_bytes // dtype.itemsize:
            flat = torch.frombuffer(pages, dtype=dtype, count=count, offset=item.offset)
        tensors.append(flat.view(item.chunk_sizes))
    return decode(rest, tensors)


class Store:
    """The entries of one stream.

    Args:
        session: An open engine's.
        stream: 32 hex digits.
    """

    def __init__(self, session: Session, stream: str) -> None:
        self._client, self.limits = session.client, session.config.data
        info = os.statvfs(self._client.runtime_dir)
        self._capacity_bytes = self.limits.capacity_bytes or info.f_blocks * info.f_frsize // 8
        self.folder = self._client.runtime_dir / "data" / session.namespace / stream
        self._lock_fd = -1
        self._not_before_s = 0.0

    def has(self, step: int) -> bool:
        """Whether there is a file for a step; what is in it is not known."""
        return os.path.lexists(self.folder / str(step))

    def read(self, step: int) -> Entry | None:
        """The entry of a step, verified; None: it cannot be had. A damaged one is deleted."""
        try:
            return read(self.folder / str(step), self._id(step))
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001  whatever it is, the loader has the batch
            log.warning("step %d in the data cache is loaded again: %s", step, error)
            if not isinstance(error, OSError):  # such as too many open files
                self.drop(step)
            return None

    def _id(self, step: int) -> bytes:
        return digest(f"{self.folder.parent.name}/{self.folder.name}/{step}".encode())

    def drop(self, step: int) -> None:
        """Delete the entry of a step, if there is one."""
        with contextlib.suppress(OSError):
            (self.folder / str(step)).unlink()

    def write(self, step: int, position: int, encoded: Encoded) -> bool:
        """Store an entry for all ranks; False: the cache is full, or there is no agent.

        Args:
            step: Its step.
            position: The last step that this rank has used.
            encoded: The entry.
        """
        if time.monotonic() < self._not_before_s:
            return False
        request = ReserveData(
            session_id=self._client.session_id, stream=self.folder.name, step=step,
            size_bytes=encoded.layout.segment_bytes, position=position,
            behind=self.limits.behind, ahead=self.limits.ahead,
            capacity_bytes=self._capacity_bytes,
        )  # fmt: skip
        temporary = self.folder / f"{step}.{request.session_id}"
        try:
            if not self._client.call(request, within_s=RESERVE_S).granted:
                return False
            failpoints.reach("data.reserved")
            # Not made here, as the agent would not count it.
            fd = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            os.fchmod(fd, 0o400)  # what others have mapped does not change
            write(fd, encoded, self._id(step))
            failpoints.reach("data.written")
            # Readers see all of it or nothing. No sync: it is to survive processes only.
            temporary.rename(self.folder / str(step))
        except (OSError, TieredCkptError) as error:
            log.warning("step %d is not in the data cache: %s", step, error)
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._not_before_s = time.monotonic() + RETRY_S
            return False
        return True

    def lock(self) -> bool:
        """Become the one process of the stream that loads, unless another one is."""
        try:
            if self._lock_fd >= 0 and not os.fstat(self._lock_fd).st_nlink:
                self.unlock()  # the folder was purged
            if self._lock_fd < 0:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._lock_fd = os.open(self.folder / "lock", flags, 0o600)
            # A lock of the process: forked loader workers do not keep it when their parent dies.
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def unlock(self) -> None:
        """Let another process load. Idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = unlock
