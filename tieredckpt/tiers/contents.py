"""What reading one tier found, and what sweeping it removed."""

from __future__ import annotations

from dataclasses import dataclass

from tieredckpt.format.manifest import AttemptRecord, Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredManifest:
    """A manifest as found: decoded, or with the reason why not.

    ``data`` may be None: it could not be read, or is not kept.
    """

    stream: str
    save_id: str
    data: bytes | None
    manifest: Manifest | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAttempt:
    """An attempt record as found: decoded, or with the reason why not."""

    key: str
    data: bytes | None
    record: AttemptRecord | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All that a tier holds of a namespace."""

    manifests: tuple[StoredManifest, ...]
    attempts: tuple[StoredAttempt, ...]
    plans: frozenset[str]
    """Intact ones only."""
    segments: dict[str, int]
    """Size in bytes by segment id, whether referred to or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What was removed, or why nothing was."""

    segments: tuple[str, ...] = ()
    plans: tuple[str, ...] = ()
    blocked_by: tuple[str, ...] = ()
    """Keys of unreadable manifests, which may refer to anything."""
