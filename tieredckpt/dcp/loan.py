"""What travels between a trainer and the process that saves in its stead, both ways.

DCP's process executor pickles the staged state and the writer to its process, and brings back only
DCP's ``Metadata``, or an exception. So an :class:`Outcome` travels in the ``Metadata``, through the
processes of all ranks, and finds its way by itself when a trainer unpickles it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tieredckpt.dcp.checkpoint_id import Target
    from tieredckpt.dcp.failure import SaveFailures
    from tieredckpt.dcp.fates import Fate
    from tieredckpt.dcp.history_state import HistoryLoan
    from tieredckpt.dcp.job_hosts import JobHosts
    from tieredckpt.errors import BackgroundSaveError, TieredCkptError
    from tieredckpt.policy.config import Config
    from tieredckpt.transport.messages import PeerTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Loan:
    """One rank's session and writer, for one save.

    Attributes:
        token: Of this loan: 32 hex digits.
        staged: Of the loan of the state, if our stager made it.
        ranks: Rank, world size, local rank, local world size of the trainer.
        made_for, last: As the writer has them.
        error: Why the save must fail, if it is known already.
        history_error: Why it is not known what there is to save on; matters to the coordinator.
        missed: The earlier saves in the background that failed.
        apart: The trainer takes notice of signals, which the process is not to die of when they
            are sent to the whole process group (torchrun and Slurm do so, and a terminal).
    """

    token: str
    staged: str | None
    session_id: str
    runtime_dir: str
    namespace: str
    run_id: str
    host_id: str
    hosts: JobHosts
    peers: PeerTable | None = field(repr=False)
    config: Config
    ranks: tuple[int, int, int, int]
    unsafe_pickle: bool
    history: HistoryLoan
    failures: SaveFailures
    made_for: Target
    last: Target | None
    error: Exception | None
    history_error: Exception | None
    missed: BackgroundSaveError | None
    apart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LentState:
    """A staged state.

    Attributes:
        token: Tells the writer which state is its own.
        what, step: Of the flight.
        data: See :mod:`tieredckpt.dcp.staged_pickle`.
        slot: Descriptor (to be detached), slot id, segment id, capacity; None: no slot.
        shared: Descriptor (to be detached) and size of shared memory; None: none is needed.
        error, refused, without_data: As in the stage.
        places, segment_bytes: The layout that it was staged by, if there was one.
    """

    token: str
    what: str
    step: int | None
    data: bytes = b""
    slot: tuple[Any, str, str, int] | None = None
    shared: tuple[Any, int] | None = None
    error: Exception | None = None
    refused: TieredCkptError | OSError | None = None
    without_data: Sequence[int] = ()
    places: Sequence[int] | None = None
    segment_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part in a save.

    Attributes:
        segment_id: What it sealed, if anything.
        refusal: Why it could not write.
        places: Where its leaves went, if that is not where they were staged.
    """

    size: int
    cold: bool
    segment_id: str | None
    refusal: str | None
    places: Sequence[int] | None


class _Lender(Protocol):
    def take_back(self, outcome: Outcome, token: str) -> None:
        """The save has ended."""


lent: dict[str, _Lender] = {}
"""By token: the loans of this process that are out."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a save that did not raise; reaches the trainers of all ranks.

    Attributes:
        coordinator: The token of its loan; history and failures are that rank's.
        save_id: None: it was skipped.
        fate: Whether it was committed.
        parts: By token.
    """

    stream: str
    step: int
    coordinator: str
    save_id: str | None
    skipped: str | None
    history: HistoryLoan
    failures: SaveFailures
    fate: Fate
    parts: Mapping[str, Part]

    def __reduce__(self) -> Any:
        values = (self.stream, self.step, self.coordinator, self.save_id, self.skipped)
        return _arrived, (*values, self.history, self.failures, self.fate, self.parts)


def _arrived(*values: Any) -> Outcome:
    outcome = Outcome(*values)
    for token in outcome.parts:
        # Once: the Metadata may be pickled and unpickled by anybody later on.
        lender = lent.pop(token, None)
        if lender is not None:
            lender.take_back(outcome, token)
    return outcome
