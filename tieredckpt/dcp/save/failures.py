"""Failed saves: whether a save is skipped or raises, and how ranks receive the outcome of a save.

A rank that cannot write because of the engine does not raise. It sends a refusal in its receipt,
so that the coordinator decides once for all ranks. Then nothing is committed, and the checkpoint
before is kept. Errors of the calling code, of a planner or of the state are never skipped, nor are
errors after which this process must not save any more.

Only the coordinator of a save knows whether the save was committed; each rank reports the outcome
to its own agent. DCP sends the coordinator's ``Metadata``, or its exception, to all ranks. An
:class:`Ended` is part of it, and takes effect when a rank unpickles it. So the outcome costs no
message and is in no plan, and a rank that does not receive it reports nothing.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tieredckpt.dcp.job.unreported import Ended, Ending
from tieredckpt.dcp.save.receipt import Receipt, Refusal
from tieredckpt.errors import (
    AgentError,
    CapacityError,
    IntegrityError,
    NotFoundError,
    TieredCkptError,
    TierUnavailableError,
    WaitError,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from tieredckpt.config.schema import SaveConfig
    from tieredckpt.dcp.job.session import Session
    from tieredckpt.rpc.agent_client import AgentClient

BEGINNING = (CapacityError, TierUnavailableError, IntegrityError, OSError)
"""Errors that may be skipped where a save begins. A checkpoint that is not found there is none."""
WRITING = (*BEGINNING, NotFoundError)
"""Errors that may be skipped where a save writes and commits: there NotFoundError means that a
slot or segment is gone."""

RANKS_SHOWN = 8

log = logging.getLogger(__name__)


class SaveFailures:
    """Counts of failed saves, per stream, that this process decided or refused.

    Args:
        config: ``on_error`` and ``max_skipped``.
    """

    def __init__(self, config: SaveConfig) -> None:
        self._config = config
        self._worked: set[str] = set()
        self._in_a_row: dict[str, int] = {}
        self._replicated: set[str] = set()
        self._unreplicated_in_a_row: dict[str, int] = {}
        self.skipped = 0
        """How many saves were skipped since the engine was opened."""

    def must_raise(self, stream: str) -> str | None:
        """Why a failure of the next save of ``stream`` would raise; None: it would be skipped."""
        return self._forbidden(stream, self._worked, "worked", self._in_a_row, "skipped")

    def _forbidden(
        self, stream: str, well: set[str], done: str, in_a_row: Mapping[str, int], failed: str
    ) -> str | None:
        """Why training must not go on; None: it may, since ``stream`` is in ``well``."""
        if self._config.on_error == "raise":
            return "save.on_error is raise"
        if stream not in well:
            return f"no save of stream {stream!r} has {done} yet in this process"
        count = in_a_row.get(stream, 0)
        if count >= self._config.max_skipped:
            return (
                f"{count} saves before it were {failed} in a row, "
                f"save.max_skipped is {self._config.max_skipped}"
            )
        return None

    def succeeded(self, stream: str) -> None:
        """A save of ``stream`` was committed."""
        self._worked.add(stream)
        self._in_a_row.pop(stream, None)

    def replicated(self, stream: str) -> None:
        """A save of ``stream`` was replicated before it returned (``save.ack: replicated``)."""
        self._replicated.add(stream)
        self._unreplicated_in_a_row.pop(stream, None)

    def unreplicated(self, stream: str, error: WaitError) -> str:
        """A save of ``stream`` is committed, but not replicated in time: go on, or raise.

        It was not skipped: the checkpoint exists and counts, and is lost only with its host. The
        rules are those of failed saves, with a count of its own.

        Returns:
            The reason, for ``last_save.not_replicated``.

        Raises:
            WaitError: It may not be passed over.
        """
        in_a_row = self._unreplicated_in_a_row
        exists = "the checkpoint is committed in memory, and a lost host may lose it"
        why = self._forbidden(stream, self._replicated, "been replicated", in_a_row, "not")
        if why is None:
            in_a_row[stream] = in_a_row.get(stream, 0) + 1
            log.warning("%s; %s (%d in a row)", error.message, exists, in_a_row[stream])
            return error.message
        raise WaitError(
            f"{error.message}; {exists} (save.ack is replicated; raised, as {why})", **error.fields
        ) from None

    def count(self, stream: str) -> None:
        """A save of ``stream`` is skipped."""
        self._in_a_row[stream] = self._in_a_row.get(stream, 0) + 1
        self.skipped += 1

    def resolve(
        self,
        stream: str,
        step: int,
        refusals: Sequence[Refusal],
        *,
        committing: bool = False,
        loud: bool = True,
    ) -> str:
        """Skip a failed save, with one warning for all ranks, or raise. On the coordinator.

        Args:
            stream, step: What was to be saved.
            refusals: Why not; of at least one rank.
            committing: The commit failed, and its outcome may be unknown.
            loud: False on ranks for which another rank warns.

        Returns:
            The reason, for ``last_save.skipped``.

        Raises:
            TieredCkptError: The lowest rank's error, if the save may not be skipped.
        """
        reason = "; ".join(map(str, refusals[:RANKS_SHOWN]))
        if len(refusals) > RANKS_SHOWN:
            reason += f"; and {len(refusals) - RANKS_SHOWN} more ranks"
        unknown = committing and any(each.is_unknown for each in refusals)
        kept = (
            "whether it was committed is not known, the next save finds out; the checkpoint before "
            "is kept in any case"
            if unknown
            else "nothing was committed, the checkpoint before is kept"
        )
        why = self.must_raise(stream)
        if why is not None:
            first = refusals[0]
            raise type(first.error)(
                f"{first.error.message} (step {step} of stream {stream!r}, {len(refusals)} rank(s) "
                f"failed, first rank {first.rank}: {kept}; not skipped, as {why})",
                **first.error.fields,
            )
        self.count(stream)
        log.log(
            logging.WARNING if loud else logging.DEBUG,
            "step %d of stream %r was skipped (%d in a row, %d in all); %s: %s",
            step, stream, self._in_a_row[stream], self.skipped, kept, reason,
        )  # fmt: skip
        return reason


def free_segments(
    client: AgentClient, segments: Sequence[str], skipped: int, refusals: Sequence[Refusal]
) -> None:
    """Report a failed save to the agent: its sealed segments are free, and it is counted.

    Optional, since the next reservation of each rank frees the same. So an agent that is itself the
    cause is not asked, which would cost its deadline once more: it is sent the count with the next
    request. And segments that may be in a checkpoint are not freed.
    """
    if any(isinstance(each.error, AgentError) or each.is_unknown for each in refusals):
        client.report_skipped(skipped)
        return
    try:
        client.save_failed(segments, skipped)
    except (TieredCkptError, OSError) as error:
        log.warning("the agent was not informed of a failed save: %s", error)


def portable(error: Exception) -> Exception:
    """``error``, or its text if another process could not unpickle it."""
    if isinstance(error, TieredCkptError) or type(error).__module__ == "builtins":
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301  (what was pickled just now)
        except Exception as why:  # noqa: BLE001  (an argument's own pickling raises what it likes)
            log.debug("sent as text, since it cannot be pickled (%r): %r", why, error)
        else:
            return error
    return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


@contextlib.contextmanager
def reporting_outcome(
    session: Session, metadata: Metadata, receipts: Sequence[Receipt]
) -> Iterator[Ending]:
    """Around the end of a save: on several hosts all its ranks receive the outcome, if the block
    returns or raises one of our errors.
    """
    ending = Ending()
    ids = [each.segment_id for each in receipts if each.segment_id is not None]
    # The agent decides alone about saves of one host, and needs no report.
    several = len(session.hosts.hosts) > 1
    try:
        yield ending
        if several:
            metadata.storage_data = Ended((ending.outcome, *ids))
    except TieredCkptError as error:
        if several:
            error.fields["ended"] = Ended((ending.outcome, *ids))
        raise
    finally:
        session.unreported.end(ids, ending.outcome)
