"""Between a namespace and the spill threads of its tiers: what each side says to the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tieredckpt.agent.cluster.authority import Ruling
from tieredckpt.format.manifest import AttemptRecord, Manifest, SegmentRef
from tieredckpt.format.records import SaveRecord
from tieredckpt.policy.completeness import Whole
from tieredckpt.rpc.messages.agent import Level
from tieredckpt.storage.base import OpenObject
from tieredckpt.storage.catalog import Catalog


@dataclass(frozen=True, slots=True)
class Needs:
    """By save id; see :func:`tieredckpt.policy.retention.protections`."""

    wanted_by: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Tiers that are still to be filled from there."""
    in_use: Mapping[str, str] = field(default_factory=dict)
    copied: frozenset[str] = frozenset()
    """Into another tier, at this moment."""
    bad: frozenset[str] = frozenset()
    """Known to be damaged there."""


class WhatStays(Protocol):
    """What retention in a tier asks: :class:`tieredckpt.agent.leader.holds.Keeping`."""

    def needs_of(self, tier: str, manifests: Sequence[Manifest]) -> Needs:
        """What speaks against deleting these checkpoints from ``tier``."""

    def pins_of(self, save_id: str) -> tuple[bytes, ...]:
        """The encoded pins and unpins of a checkpoint: they go into every tier that holds it."""

    def records_of(self, save_id: str) -> tuple[SaveRecord, ...]:
        """The same, decoded."""

    def attached(self, tier: str, catalog: Catalog) -> None:
        """``tier`` was read: pins that it lacks are written into it."""


class SpillHost(Protocol):
    """What a worker needs of its namespace. All methods block and are thread-safe."""

    host_id: str
    """This host, as segments name it."""

    @property
    def ruling(self) -> Ruling:
        """Whose rules hold."""

    @property
    def keeping(self) -> WhatStays:
        """What speaks against deleting."""

    def is_in(self, tier: str, save_id: str) -> bool:
        """Whether a tier below memory holds this host's part of a checkpoint; never memory."""

    def level_in(self, tier: str, save_id: str) -> Level:
        """How far a checkpoint has come in another tier of this host."""

    def attached(self, tier: str) -> None:
        """``tier`` was read: the tiers below it may be filled from what it holds."""

    def whole_in(self, tier: str, line: Sequence[Manifest]) -> Whole:
        """What is known to be on the disks of all hosts, of what ``tier`` holds here; may wait for
        another host. See :meth:`tieredckpt.agent.leader.shedding.HostDisks.ask`.
        """

    def make_room_in(self, tier: str, beyond: Collection[str]) -> bool:
        """``tier`` is full, and these may go once no other tier is to be filled from them: give up
        the oldest of them that waits there. Whether it was given up now.
        """

    def is_destined(self, manifest: Manifest, tier: str) -> bool:
        """Whether it is still to reach ``tier``: it was not given up."""

    def open_memory(self, segment_id: str) -> OpenObject:
        """Open a segment in memory under a lease. Raises NotFoundError."""

    def open_above(self, tier: str, segment_id: str) -> OpenObject:
        """Open a segment in a tier below memory. Raises NotFoundError, TierUnavailableError."""

    def own_segments(self, manifest: Manifest) -> tuple[SegmentRef, ...]:
        """Those of a checkpoint that this host's ranks wrote."""

    def read_plan(self, plan_id: str) -> bytes:
        """An intact plan. Raises TierUnavailableError: there is none, until it is sent again."""

    def read_manifest(self, manifest: Manifest) -> bytes:
        """The encoded manifest. Raises NotFoundError."""

    def known_attempts(self) -> tuple[AttemptRecord, ...]:
        """Attempt records that memory holds."""

    def wanted_by(self, tier: str) -> tuple[Manifest, ...]:
        """The candidates of all streams that are destined for ``tier`` and still here, in memory or
        in the tier that it is filled from; oldest first.
        """

    def quarantine(self, tier: str, segment_id: str, blocks: Sequence[int], reason: str) -> None:
        """Remember a bad copy."""

    def forget(self, tier: str, segment_ids: Sequence[str]) -> None:
        """These copies are deleted: their marks go too."""

    def spilled(self) -> None:
        """A spill ended: memory may be freed that it held."""


Stopping = Callable[[], bool]
Count = Callable[[int], None]
"""Told of bytes that were copied."""
ON_ITS_WAY: tuple[Level, ...] = ("queued", "active", "waiting")
"""Levels of a checkpoint that a tier is still to be given."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a checkpoint has come in a tier, and why not further."""

    level: Level
    error: str | None = None


@dataclass(slots=True)
class SpillCounts:
    """Since the agent started."""

    bytes: int = 0
    seconds: float = 0.0
    dropped: int = 0
    """Checkpoints that were given up, or deleted from memory before their turn."""
