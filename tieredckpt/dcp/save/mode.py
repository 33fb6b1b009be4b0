"""How the ranks of a save reach one decision: through DCP's collectives, or without collectives."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from tieredckpt.dcp.save.receipt import MirrorSegment, Receipt, Refusal
from tieredckpt.errors import BackgroundSaveError, WaitError

if TYPE_CHECKING:
    from tieredckpt.dcp.job.unreported import Ending
    from tieredckpt.dcp.save.failures import SaveFailures
    from tieredckpt.dcp.save.mirrors import Mirrors
    from tieredckpt.dcp.state.metadata import EncodedPlan


class SaveMode(abc.ABC):
    """What depends on ``use_collectives``. One object per save and rank.

    Args:
        failures: The counts of failed saves that this save belongs to.
        mirrors: With ``memory.copies: local``, those of the stream.
    """

    def __init__(self, failures: SaveFailures, mirrors: Mirrors | None = None) -> None:
        self.failures = failures
        self.mirrors = mirrors

    def reporting(self) -> contextlib.AbstractContextManager[None]:
        """Report an error that leaves the block to the other ranks, unless DCP does so."""
        return contextlib.nullcontext()

    def local_plan(self, plan: SavePlan) -> SavePlan:
        """This rank's plan, as DCP sends it to the coordinator."""
        return plan

    def global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """All ranks' plans, as DCP sends them to the ranks. On the coordinator."""
        return plans

    def write_mirrors(
        self, plan: SavePlan, local_plan: SavePlan | None, planner: SavePlanner, step: int
    ) -> tuple[MirrorSegment, ...]:
        """Write mirrors of other ranks' segments, after this rank's own segment."""
        return ()

    def refusals(self, receipts: Sequence[Receipt]) -> Sequence[Refusal]:
        """Why ranks could not write; if there is a reason, the save is not committed.

        Raises:
            UsageError: The ranks do not save the same checkpoint.
        """
        return ()

    def refused(self, stream: str) -> None:  # noqa: B027  (nothing to count where all ranks decide)
        """Count that this rank, which is not the coordinator, could not write."""

    @abc.abstractmethod
    def commit(
        self,
        metadata: Metadata,
        receipts: Sequence[Receipt],
        plans: Sequence[SavePlan],
        encoded: EncodedPlan | None,
        ending: Ending,
    ) -> tuple[str, Sequence[str]]:
        """Commit the save.

        Args:
            metadata: What DCP's planner made of the plans.
            receipts: One per rank that this rank decides for, none with a refusal unless
                :meth:`refusals` passes it over.
            plans: Their plans as far as they were seen.
            encoded: The plan of the save, if it is encoded already.
            ending: The end of the save; records the outcome from when the agent is asked.

        Returns:
            The save id, and the hosts that wrote segments of it (without collectives: all hosts of
            the group).

        Raises:
            TieredCkptError: There is no checkpoint; with ``outcome="unknown"`` there may be one.
        """

    @abc.abstractmethod
    def unreplicated(self, stream: str, error: WaitError) -> str:
        """Why the committed checkpoint was not replicated in time.

        Raises:
            WaitError: Training must not go on without the copies.
        """

    @abc.abstractmethod
    def missed(self, error: BackgroundSaveError) -> None:
        """Raise or log that an earlier save in the background failed unseen."""
