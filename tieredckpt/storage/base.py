"""The contract of a tier: a place for immutable bytes by key.

Keys are validated relative paths such as ``manifests/default/<save id>`` or
``segments/<segment id>``. A tier knows nothing of checkpoints, steps or policy. Objects are
immutable: a key is written once, and a second ``put`` of an existing key either finds identical
bytes or raises.

All keys are built here.
"""

from __future__ import annotations

import enum
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tieredckpt.errors import IntegrityError, NotFoundError, TierUnavailableError, UsageError
from tieredckpt.format.manifest import ID_PATTERN, NAME_PATTERN, check_id, check_name

_DELETIONS = re.compile(r"[1-9][0-9]{0,5}")


def manifest_key(stream: str, save_id: str, deletions: int = 0) -> str:
    """``manifests/<stream>/<save id>``. Like the next three: ValueError on an impossible name.

    In shared tiers ``.<deletions>`` is appended to the key after so many deletions were undone.
    """
    key = f"manifests/{check_name(stream, 'stream')}/{check_id(save_id, 'save id')}"
    return f"{key}.{deletions}" if deletions else key


def save_of(key: str) -> tuple[tuple[str, str], int] | None:
    """Stream, save id and number of deletions of a manifest's key; None: it is another key."""
    _, stream, name = key.split("/") if key.count("/") == 2 else ("", "", "")
    save_id, dot, deletions = name.partition(".")
    valid = NAME_PATTERN.fullmatch(stream) and ID_PATTERN.fullmatch(save_id)
    if not valid or (dot and not _DELETIONS.fullmatch(deletions)):
        return None
    return (stream, save_id), int(deletions or 0)


def plan_key(plan_id: str) -> str:
    """``plans/<plan id>``."""
    return f"plans/{check_id(plan_id, 'plan id')}"


def segment_key(segment_id: str) -> str:
    """``segments/<segment id>``."""
    return f"segments/{check_id(segment_id, 'segment id')}"


def attempt_key(number: int, attempt_id: str) -> str:
    """``attempts/<number, at least 8 digits>-<attempt id>``."""
    if not 0 <= number < 1 << 63:
        raise ValueError(f"attempt number {number}")
    return f"attempts/{number:08d}-{check_id(attempt_id, 'attempt id')}"


def record_key(save_id: str, record_id: str) -> str:
    """``records/<save id>/<record id>``."""
    return f"records/{check_id(save_id, 'save id')}/{check_id(record_id, 'record id')}"


def lease_key(number: int) -> str:
    """``claims/<attempt number, at least 8 digits>``, in shared tiers."""
    if not 0 <= number < 1 << 63:
        raise ValueError(f"attempt number {number}")
    return f"claims/{number:08d}"


def pending_key(stream: str, save_id: str) -> str:
    """``pending/<stream>/<save id>``, in shared tiers."""
    return f"pending/{check_name(stream, 'stream')}/{check_id(save_id, 'save id')}"


def plan_copy_key(plan_id: str, nonce: str) -> str:
    """``plans/<plan id>.<nonce>``, in shared tiers: each copy is written once."""
    return f"plans/{check_id(plan_id, 'plan id')}.{check_name(nonce, 'nonce')}"


def intent_key(nonce: str) -> str:
    """``notices/<nonce>``, in shared tiers: checkpoints that a host is about to delete."""
    return f"notices/{check_name(nonce, 'nonce')}"


def decision_key(nonce: str) -> str:
    """``verdicts/<nonce of the intent>``, in shared tiers: whether they are deleted."""
    return f"verdicts/{check_name(nonce, 'nonce')}"


AHEAD_BYTES = 8 << 20
"""Bytes per read of a stream, if a tier has no better way."""
READERS = 32
"""Objects that are read at the same time."""
_CHUNK = 1024
"""Objects whose reads are queued at the same time: each costs a kilobyte until it is read."""

T = TypeVar("T")


class Scope(enum.Enum):
    """The hosts that see a tier's objects."""

    HOST = "host"
    """This host only; losing the host loses it."""
    SHARED = "shared"
    """Every host of the job."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object: its key (relative, ``/``-separated) and size in bytes."""

    key: str
    size: int
    modified_s: float | None = None
    """When it was written, in seconds since 1970 by the store's clock; None: unknown."""


class ByteSource(Protocol):
    """The source of a large object's bytes while it is put."""

    size: int
    """Bytes in total; a multiple of 4096 for segments."""

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with verified bytes from ``offset``.

        Called once for every byte, in ascending order, in runs that start on a block boundary.

        Raises:
            IntegrityError: The source is damaged; the put must fail and leave nothing.
        """


class RangeStream(Protocol):
    """The bytes of one range, in order. Used by one thread at a time, except :meth:`abort`."""

    def read_into(self, into: memoryview) -> None:
        """Fill ``into`` with the next bytes. Raises as :meth:`OpenObject.read_into`."""

    def abort(self) -> None:
        """End it from any thread: a blocked read fails."""

    def close(self) -> None:
        """End it; unread bytes are lost."""


class OpenObject(ABC):
    """An object opened for reading. Thread-safe.

    It holds a lease, so that it is not recycled while open, if the tier has leases.
    """

    size: int

    has_descriptor: bool = True
    """Whether :meth:`fileno` returns one; else only :meth:`read_into` reads the bytes."""

    @abstractmethod
    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset``, or raise.

        Raises:
            IntegrityError: The object was truncated or replaced.
            NotFoundError: It was deleted meanwhile, in a tier without leases.
            TierUnavailableError: The medium failed (EIO and the like).
        """

    def stream(self, start: int, stop: int) -> RangeStream:
        """The bytes from ``start`` to ``stop``, in one request if the tier can do that.

        Nothing is repeated after a failure: the reader requests the rest, from here or from another
        copy. Raises as :meth:`read_into`.
        """
        return _PieceRange(self, start, stop)

    def fileno(self) -> int:
        """A descriptor to pass to a trainer; valid until :meth:`close`.

        Raises:
            UsageError: There is none (:attr:`has_descriptor`).
        """
        raise UsageError("an object in this tier has no descriptor: read it by ranges")

    @property
    def direct(self) -> bool:
        """Whether the descriptor is open with O_DIRECT (4096-aligned offset, size and memory)."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Release the lease. Idempotent."""

    def __enter__(self) -> OpenObject:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _PieceRange:
    """A range of any opened object, read in pieces of :data:`AHEAD_BYTES`.

    Args:
        opened: The object; it is not closed.
        start: First byte.
        stop: One past the last.
    """

    def __init__(self, opened: OpenObject, start: int, stop: int) -> None:
        self._opened = opened
        self._next = start
        self._stop = stop
        self._piece = memoryview(b"")
        self._aborted = threading.Event()

    def read_into(self, into: memoryview) -> None:
        got = 0
        while got < len(into):
            if self._aborted.is_set():
                raise TierUnavailableError("the transfer was aborted")
            if not len(self._piece):
                self._piece = memoryview(bytearray(min(AHEAD_BYTES, self._stop - self._next)))
                self._opened.read_into(self._next, self._piece)
                self._next += len(self._piece)
            count = min(len(self._piece), len(into) - got)
            into[got : got + count] = self._piece[:count]
            self._piece = self._piece[count:]
            got += count

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        self._piece = memoryview(b"")


class RangedObject(OpenObject):
    """Base of opened objects whose reads are checked against their size.

    Args:
        tier: Name of the tier, for errors.
        key: The object's.
        size: Its size in bytes when it was opened.
    """

    def __init__(self, tier: str, key: str, size: int) -> None:
        self.size = size
        self._tier = tier
        self._key = key
        self._closed = False

    def read_into(self, offset: int, into: memoryview) -> None:
        if self._closed:
            raise self._is_closed()
        stop = offset + len(into)
        if offset < 0 or stop > self.size:
            wanted = f"has {self.size} bytes, wanted {offset} to {stop}"
            raise self._damaged(wanted, expected=stop, actual=self.size)
        if len(into):
            self._read(offset, into.cast("B") if into.format != "B" else into)

    @abstractmethod
    def _read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` (not empty) with bytes of the object that was opened."""

    def _is_closed(self) -> TierUnavailableError:
        return unavailable(self._tier, f"{self._key} is closed")

    def _damaged(self, what: str, **fields: int) -> IntegrityError:
        return damaged(self._tier, self._key, what, **fields)

    def close(self) -> None:
        self._closed = True


def unavailable(tier: str, message: str, **fields: Any) -> TierUnavailableError:
    """The error of a tier that cannot serve a request now, and has changed nothing."""
    return TierUnavailableError(message, tier=tier, outcome="not_applied", **fields)


def short(tier: str, key: str, came: int, wanted: int) -> TierUnavailableError:
    """The error of a tier for an answer that is cut short, of an object that is not."""
    return unavailable(tier, f"cannot read {key}: {came} bytes came of {wanted}")


def damaged(tier: str, key: str, what: str, **fields: int) -> IntegrityError:
    """The error of a tier for an object that is not as it was put; ``what`` completes its name."""
    return IntegrityError(f"{key} in tier {tier} {what}", tier=tier, key=key, **fields)


def too_large(tier: str, key: str, *, limit: int, size: int) -> IntegrityError:
    """The error of :meth:`Tier.get` for an object of more than ``limit`` bytes."""
    what = f"has {size} bytes, at most {limit} are possible"
    return damaged(tier, key, what, expected=limit, actual=size)


class Tier(ABC):
    """A place for immutable bytes by key. All methods block and are thread-safe."""

    name: str
    scope: Scope

    leases: bool = True
    """Whether an open object can be read after its key was deleted. If not, a read then raises
    NotFoundError or IntegrityError; it never returns other bytes."""

    def close(self) -> None:  # noqa: B027 (most tiers hold nothing)
        """Release the tier's own locks and connections. Idempotent."""

    def beside(self) -> Sequence[str]:
        """The namespaces at this tier's URL, if it can list them. Raises TierUnavailableError."""
        return ()

    def check(self) -> None:  # noqa: B027 (a folder fails at once)
        """Find out within seconds whether the medium answers. Raises TierUnavailableError."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Store a small object atomically and durably; visible wholly or not at all.

        A key that exists with identical bytes is success; with others it is an error.

        Raises:
            UsageError: The key exists with other bytes; nothing was changed.
            CapacityError: No space; nothing is visible under the key.
            TierUnavailableError: The medium failed; ``outcome`` is "not_applied" or "unknown".
        """

    @abstractmethod
    def replace(self, key: str, data: bytes) -> None:
        """Store a small object as :meth:`put` does, and replace an existing one.

        A concurrent reader gets all of the old bytes or all of the new ones. Raises as :meth:`put`,
        but no UsageError for a key that exists.
        """

    @abstractmethod
    def put_from(self, key: str, source: ByteSource) -> None:
        """Store a large object (a segment) from ``source``, like :meth:`put`.

        A key that exists with the same size is taken for the same object (segments are
        verified by their digests when read). Raises as :meth:`put`, and what the source raises.
        """

    def get(self, key: str, *, limit: int) -> bytes:
        """The bytes of an object.

        Raises:
            NotFoundError: No such key.
            IntegrityError: It is larger than ``limit`` bytes, so it cannot be the expected object.
            TierUnavailableError: The medium failed.
        """
        with self.open(key) as opened:
            if opened.size > limit:
                raise too_large(self.name, key, limit=limit, size=opened.size)
            data = bytearray(opened.size)
            opened.read_into(0, memoryview(data))
            return bytes(data)

    @abstractmethod
    def open(self, key: str) -> OpenObject:
        """Open an object for ranged reads; a truncated one has the size that is left of it.

        Raises:
            NotFoundError: No such key.
            IntegrityError: The key is taken by something that cannot be read at all.
            TierUnavailableError: The medium failed, or the writer still has it locked.
        """

    @abstractmethod
    def info(self, key: str) -> ObjectInfo:
        """Its size. Raises NotFoundError or TierUnavailableError."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key starts with ``prefix`` (a folder, ending in ``/``), any order.

        Objects that are still being written are never listed.
        """

    def list_at_most(self, most: int, prefix: str) -> Iterator[ObjectInfo]:
        """As :meth:`list`; raises TierUnavailableError if there are more than ``most``."""
        for number, info in enumerate(self.list(prefix)):
            if number == most:
                more = f"tier {self.name} holds over {most} objects in {prefix} of one namespace"
                raise unavailable(self.name, more)
            yield info

    @abstractmethod
    def now_s(self) -> float:
        """The store's clock: ``modified_s`` of an object that would be put now.

        An object's age is the difference to its ``modified_s``: no host's clock is used.

        Raises:
            CapacityError, TierUnavailableError: The clock cannot be read now.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete durably. Deleting what does not exist is success.

        Raises TierUnavailableError with ``outcome="unknown"``.
        """

    def is_there(self, key: str, size: int) -> bool:
        """Whether an object of this size has the key. Raises as :meth:`info`.

        Raises:
            UsageError: One of another size has it.
        """
        try:
            found = self.info(key).size
        except NotFoundError:
            return False
        if found != size:
            raise UsageError(
                f"{key} exists in tier {self.name} with {found} bytes instead of {size}: it was "
                "damaged, delete it first",
                key=key,
            )
        return True

    def has_bytes(self, key: str, data: bytes) -> bool:
        """Whether a key that was found to be taken has exactly these bytes.

        Raises TierUnavailableError, also if the key is not taken any more.
        """
        try:
            return self.get(key, limit=len(data)) == data
        except IntegrityError:  # it is longer, or no file
            return False
        except NotFoundError as error:
            raise TierUnavailableError(
                f"{key} was put into tier {self.name} and deleted at the same time",
                tier=self.name,
                outcome="unknown",
            ) from error

    def other_bytes(self, key: str) -> UsageError:
        """The error of :meth:`put` for a key that has other bytes."""
        return UsageError(f"{key} exists in tier {self.name} with other bytes", key=key)

    def check_kept(self, key: str, size: int) -> None:
        """Check that the object that another writer put under ``key`` meanwhile exists.

        Raises as :meth:`is_there`, and TierUnavailableError: it was deleted again.
        """
        if not self.is_there(key, size):
            raise unavailable(
                self.name, f"{key} was put into tier {self.name} and deleted at the same time"
            )

    def each(self, call: Callable[[ObjectInfo], T], items: Sequence[ObjectInfo]) -> Iterable[T]:
        """Call a function that reads an object for each item; in parallel in shared tiers."""
        if self.scope is Scope.HOST or len(items) < 2:
            yield from map(call, items)
            return
        with ThreadPoolExecutor(min(READERS, len(items)), thread_name_prefix="tck-read") as pool:
            for at in range(0, len(items), _CHUNK):
                yield from pool.map(call, items[at : at + _CHUNK])

    def sweep_unfinished(self, older_than_s: float) -> int:
        """Abort uploads that were begun so long ago, by the store's clock, and not completed.

        Returns their number; 0 also if the store does not list any. Only for tiers of scope shared:
        others are swept when they are opened.

        Raises:
            TierUnavailableError: The store does not answer, or does not permit the listing.
        """
        return 0

    def retrying(self) -> str | None:
        """Why requests fail that are being repeated now; None: none has failed for a second."""
        return None

    def delete_many(self, keys: Iterable[str]) -> None:
        """Delete each of them, in as few requests as it takes. Raises as :meth:`delete`.

        After a failure any of them may be gone.
        """
        for key in keys:
            self.delete(key)
