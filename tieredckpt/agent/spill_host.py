"""Between a namespace and the spill threads of its tiers: what each side says to the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tieredckpt.format.manifest import AttemptRecord, Manifest
from tieredckpt.tiers.base import OpenObject
from tieredckpt.transport.messages import Level


class SpillHost(Protocol):
    """What a worker needs of its namespace. All methods block and are thread-safe."""

    def open_memory(self, segment_id: str) -> OpenObject:
        """Open a segment in memory under a lease. Raises NotFoundError."""

    def read_plan(self, plan_id: str) -> bytes:
        """An intact plan. Raises TierUnavailableError: there is none, until it is sent again."""

    def read_manifest(self, manifest: Manifest) -> bytes:
        """The encoded manifest. Raises NotFoundError."""

    def known_attempts(self) -> tuple[AttemptRecord, ...]:
        """Attempt records that memory holds."""

    def wanted_by(self, tier: str) -> tuple[Manifest, ...]:
        """Newest candidate of each stream in memory that is destined for ``tier``."""

    def quarantine(self, tier: str, segment_id: str, blocks: Sequence[int], reason: str) -> None:
        """Remember a bad copy."""

    def forget(self, tier: str, segment_ids: Sequence[str]) -> None:
        """These copies are deleted: their marks go too."""

    def spilled(self) -> None:
        """A spill ended: memory may be freed that it held."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a checkpoint has come in a tier, and why not further."""

    level: Level
    error: str | None = None
