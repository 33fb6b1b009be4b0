"""A rank's receipt: what it reports of its part of a save. DCP pickles it for the coordinator."""

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
class Draft:
    """In a receipt: a draft that was written. Equal to the owner's segment if the digests are."""

    owner: int
    """A rank of DCP's group."""
    footer: bytes
    whole: bool
    """It has all items of the owner's; else its bytes items (each rank's own) may be missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a rank says of its part: the ``storage_data`` of its one WriteResult. Pickled by DCP."""

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
    cold: bool = False
    refusal: Refusal | None = None
    """Why the rank could not write; then nothing is committed."""
    values: Digests = ()
    """What the rank would have saved under names that other ranks may have too."""
    footer: bytes = b""
    """With local copies: the digest of its segment's index and digest table."""
    drafts: tuple[Draft, ...] = ()
    """Likewise: what it wrote of other ranks' segments."""
