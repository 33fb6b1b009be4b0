"""A rank's receipt: its report of its part of a save. DCP pickles it for the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from tieredckpt.dcp.state.consistency import Digests
from tieredckpt.errors import TieredCkptError, TierUnavailableError

REASON_CHARS_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why one rank could not write. Travels in a receipt, which DCP pickles."""

    rank: int
    error: TieredCkptError

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Refusal:
        """The refusal for ``error``, one of :data:`WRITING`."""
        if isinstance(error, TieredCkptError):
            return cls(rank=rank, error=error)
        text = f"{type(error).__name__}: {error}"
        found = TierUnavailableError(text, tier="memory", outcome="not_applied")
        return cls(rank=rank, error=found)

    def __str__(self) -> str:
        text = f"rank {self.rank}: {type(self.error).__name__}: {self.error}"
        return text[:REASON_CHARS_MAX]

    @property
    def is_unknown(self) -> bool:
        """Whether the checkpoint may exist all the same."""
        return bool(self.error.fields.get("outcome") == "unknown")


@dataclass(frozen=True, slots=True)
class MirrorSegment:
    """In a receipt: a mirror that was written. A copy of the owner's segment if the footers agree.

    Attributes:
        owner: A rank of DCP's group.
        footer: Digest of the mirror's index and digest table.
        complete: It has all items of the owner's segment; else bytes items, which are each rank's
            own, may be missing.
    """

    owner: int
    footer: bytes
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A rank's report of its part: the ``storage_data`` of its WriteResult. DCP pickles it."""

    rank: int
    """Inside of DCP's group."""
    run_id: str
    host_id: str
    stream: str
    step: int
    segment_id: str | None = None
    """None: the rank had nothing to write."""
    size: int = 0
    root: bytes = b""
    structure: bytes = b""
    nested: bytes = b""
    """The keys of its state that are no text (format/nested.py)."""
    cold: bool = False
    refusal: Refusal | None = None
    """Why the rank could not write; then nothing is committed."""
    values: Digests = ()
    """What the rank would have saved under names that other ranks may have too."""
    footer: bytes = b""
    """With local copies: the digest of its segment's index and digest table."""
    mirrors: tuple[MirrorSegment, ...] = ()
    """With local copies: the mirrors that it wrote of other ranks' segments."""
