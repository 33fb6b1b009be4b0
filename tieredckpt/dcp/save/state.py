"""What an open engine's saves share, besides its session."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tieredckpt.dcp.job.session import Session
from tieredckpt.dcp.save.failures import SaveFailures
from tieredckpt.dcp.save.mirrors import LocalCopies
from tieredckpt.dcp.save.no_collectives import GatheredSaves

if TYPE_CHECKING:
    from tieredckpt.dcp.slots.stager import StagedState


class SendsSaves(Protocol):
    """Sends saves to DCP's process executor."""

    def lend_state(self, staged: StagedState) -> Any:
        """What the executor's thread pickles instead of a staged state."""

    def lend_writer(self, writer: Any) -> Any:
        """What the executor's thread pickles instead of a writer."""


@dataclass(slots=True, kw_only=True)
class SaveState(Session):
    """A session, and what its writers share."""

    failures: SaveFailures = field(init=False)
    gathered: GatheredSaves = field(init=False)
    """Saves without collectives."""
    local_copies: dict[str, LocalCopies] = field(default_factory=dict)
    """Per stream, with ``memory.copies: local``."""
    executor_bridge: SendsSaves | None = None
    """For saves in DCP's process executor; None: the engine only reads."""

    def __post_init__(self) -> None:
        Session.__post_init__(self)  # super() does not work in a dataclass with slots
        self.failures = SaveFailures(self.config.save)
        self.gathered = GatheredSaves(self.config.save, self.client.run_id)

    def copies_of(self, stream: str) -> LocalCopies | None:
        """Of a stream whose saves also write what other hosts write; None: they do not."""
        if self.config.memory.copies != "local" or len(self.hosts.hosts) < 2:
            return None
        return self.local_copies.setdefault(stream, LocalCopies(stream))

    @property
    def skipped_saves(self) -> int:
        """Saves that were skipped since the engine was opened."""
        return self.failures.skipped + self.gathered.failures.skipped

    def resumed_at(self, streams: Iterable[str], load_id: str) -> None:
        self.gathered.begin(streams, load_id)
