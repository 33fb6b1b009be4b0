"""What the saves of an open engine share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tieredckpt.dcp.job.session import Session
from tieredckpt.dcp.save.failures import SaveFailures
from tieredckpt.dcp.save.mirrors import Mirrors
from tieredckpt.dcp.state.metadata import PlanCache
from tieredckpt.rpc.messages.agent import GatheringKey

if TYPE_CHECKING:
    from tieredckpt.config.schema import SaveConfig
    from tieredckpt.dcp.slots.stager import StagedState


class SendsSaves(Protocol):
    """Sends saves to DCP's process executor."""

    def reduce_state(self, staged: StagedState) -> Any:
        """What the executor's thread pickles instead of a staged state."""

    def reduce_writer(self, writer: Any) -> Any:
        """What the executor's thread pickles instead of a writer."""


class NoCollectivesState:
    """What the saves without collectives of this process share.

    Args:
        config: Of saves.
        run_id: The epoch until a load begins a new one.
    """

    def __init__(self, config: SaveConfig, run_id: str) -> None:
        self.failures = SaveFailures(config)
        """Apart from other saves: all ranks know all failures here, so they decide alike."""
        self.plans: dict[str, PlanCache] = {}
        self.unresolved: dict[str, GatheringKey] = {}
        """By stream: the last save, unless its outcome is known."""
        self._run_id = run_id
        self._epochs: dict[str, str] = {}
        self._ordinals: dict[str, int] = {}

    def begin(self, streams: Iterable[str], load_id: str) -> None:
        """All ranks have loaded these streams, by this load."""
        for stream in streams:
            self._epochs[stream], self._ordinals[stream] = load_id, 0

    def next_key(self, stream: str) -> GatheringKey:
        """The key of this rank's next save of ``stream``; counts it."""
        ordinal = self._ordinals.get(stream, 0)
        self._ordinals[stream] = ordinal + 1
        epoch = self._epochs.get(stream, self._run_id)
        return GatheringKey(stream=stream, epoch=epoch, ordinal=ordinal)


@dataclass(slots=True, kw_only=True)
class SaveState(Session):
    """A session, and what its writers share."""

    failures: SaveFailures = field(init=False)
    no_collectives: NoCollectivesState = field(init=False)
    mirrors: dict[str, Mirrors] = field(default_factory=dict)
    """Per stream, with ``memory.copies: local``."""
    executor_bridge: SendsSaves | None = None
    """For saves in DCP's process executor; None: the engine only reads."""

    def __post_init__(self) -> None:
        Session.__post_init__(self)  # super() does not work in a dataclass with slots
        self.failures = SaveFailures(self.config.save)
        self.no_collectives = NoCollectivesState(self.config.save, self.client.run_id)

    def mirrors_of(self, stream: str) -> Mirrors | None:
        """Those of a stream, or None unless ``memory.copies`` is local and there are two hosts."""
        if self.config.memory.copies != "local" or len(self.hosts.hosts) < 2:
            return None
        return self.mirrors.setdefault(stream, Mirrors(stream))

    @property
    def skipped_saves(self) -> int:
        """Saves that were skipped since the engine was opened."""
        return self.failures.skipped + self.no_collectives.failures.skipped

    def resumed_at(self, streams: Iterable[str], load_id: str) -> None:
        self.no_collectives.begin(streams, load_id)
