"""The contract of a tier: a place for immutable bytes by key.

Keys are built only by :mod:`tieredckpt.tiers.catalog`; a tier sees validated relative paths
such as ``manifests/default/<save id>`` or ``segments/<segment id>``. A tier knows nothing of
checkpoints, steps or policy. Objects are immutable: a key is written once, and a second ``put``
of a key that exists either finds identical bytes or raises.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


class Scope(enum.Enum):
    """Who sees what a tier holds."""

    HOST = "host"
    """This host only; losing the host loses it."""
    SHARED = "shared"
    """Every host of the job."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object: its key (relative, ``/``-separated) and size in bytes."""

    key: str
    size: int


class ByteSource(Protocol):
    """Where a large object's bytes come from while it is put."""

    size: int
    """Bytes in total; a multiple of 4096 for segments."""

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with verified bytes from ``offset``.

        Called once for every byte, in ascending order, in runs that start on a block boundary.

        Raises:
            IntegrityError: The source is damaged; the put must fail and leave nothing.
        """


class OpenObject(ABC):
    """An object opened for reading. Holds a lease: it is not recycled while open. Thread-safe."""

    size: int

    @abstractmethod
    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset``, or raise.

        Raises:
            IntegrityError: The object is shorter than it was (truncated).
            TierUnavailableError: The medium failed (EIO and the like).
        """

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor to pass to a trainer; valid until :meth:`close`."""

    @property
    @abstractmethod
    def direct(self) -> bool:
        """Whether the descriptor is open with O_DIRECT (4096-aligned offset, size and memory)."""

    @abstractmethod
    def close(self) -> None:
        """Release the lease. Idempotent."""

    def __enter__(self) -> OpenObject:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Tier(ABC):
    """A place for immutable bytes by key. All methods block and are thread-safe."""

    name: str
    scope: Scope

    def close(self) -> None:  # noqa: B027 (most tiers hold nothing)
        """Release what the tier itself holds (locks, connections). Idempotent."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Store a small object atomically and durably; visible wholly or not at all.

        A key that exists with identical bytes is success; with others it is an error.

        Raises:
            UsageError: The key exists with other bytes; nothing was changed.
            CapacityError: No space; nothing is visible under the key.
            TierUnavailableError: The medium failed; ``outcome`` says what is known.
        """

    @abstractmethod
    def put_from(self, key: str, source: ByteSource) -> None:
        """Store a large object (a segment) from ``source``, like :meth:`put`.

        A key that exists with the same size is taken for the same object (segments are
        verified by their digests when read). Raises as :meth:`put`, and what the source raises.
        """

    @abstractmethod
    def get(self, key: str, *, limit: int) -> bytes:
        """The whole object.

        Raises:
            NotFoundError: No such key.
            IntegrityError: It is larger than ``limit`` bytes, so it cannot be what was asked for.
            TierUnavailableError: The medium failed.
        """

    @abstractmethod
    def open(self, key: str) -> OpenObject:
        """Open an object for ranged reads; a damaged one opens with the size that it has left.

        Raises:
            NotFoundError: No such key.
            IntegrityError: Something that cannot be read at all lies there.
            TierUnavailableError: The medium failed, or a writer has not let go of it yet.
        """

    @abstractmethod
    def info(self, key: str) -> ObjectInfo:
        """Its size. Raises NotFoundError or TierUnavailableError."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key starts with ``prefix`` (a folder, ending in ``/``), any order.

        Objects that are still being written are never listed.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete durably. Deleting what does not exist is success.

        Raises TierUnavailableError with ``outcome="unknown"``.
        """
