"""``dcp.save(use_collectives=False)``: the ranks meet in an agent, which commits for all of them.

Each rank plans alone, seals its segment and posts its part to its own host's agent. Then it waits
in ``finish`` for the outcome of all parts. The agent of rank 0 decides. DCP's own barrier comes
right after, so the wait costs nothing, and all ranks receive the same outcome: the save id, or the
error of the rank that failed.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from tieredckpt import failpoints
from tieredckpt.dcp.save.collective import ADOPTIONS_MAX, items_of, stored_items
from tieredckpt.dcp.save.mode import SaveMode
from tieredckpt.dcp.save.receipt import Receipt
from tieredckpt.dcp.state.consistency import NamesSeen, warn_of_names
from tieredckpt.dcp.state.metadata import Places, PlanCache
from tieredckpt.dcp.state.per_rank_keys import parse_key
from tieredckpt.errors import (
    BackgroundSaveError,
    NotFoundError,
    RankError,
    StaleAttemptError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
    WaitError,
)
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import Manifest, encode_manifest
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.base import describe_error, described_error

if TYPE_CHECKING:
    from tieredckpt.dcp.job.unreported import Ending
    from tieredckpt.dcp.save.state import SaveState
    from tieredckpt.dcp.state.metadata import EncodedPlan

POLL_S_MIN = 0.001
POLL_S_MAX = 0.02
"""How often the agent is asked; ranks that train in step arrive within milliseconds."""

NO_PLAN = "0" * 32
"""In a posted manifest; the agent puts the plan's id there."""

log = logging.getLogger(__name__)


def _digest_of(members: Sequence[int]) -> str:
    return digest(",".join(map(str, members)).encode("ascii")).hex()


def _values_of(receipt: Receipt) -> tuple[m.RankValue, ...]:
    return tuple(
        m.RankValue(name=name, digest=value, must_agree=parse_key(name) is not None)
        for name, value in receipt.values[: m.RANK_VALUES_MAX]
    )


class NoCollectives(SaveMode):
    """Each rank posts its part to an agent, waits for all parts, and decides by their outcome.

    Args:
        session: The rank's.
        stream, step: The checkpoint to be made.
        rank: Inside of DCP's group.
        members: The ranks of that group, if the caller named it; None: all ranks of the engine.
        tags: Of the checkpoint.

    Raises:
        UsageError: DCP's group is not the engine's, and the caller did not name it.
    """

    def __init__(
        self,
        session: SaveState,
        stream: str,
        step: int,
        rank: int,
        members: Sequence[int] | None,
        tags: Mapping[str, str],
    ) -> None:
        super().__init__(session.no_collectives.failures)
        ranks = session.ranks
        if members is None and rank != ranks.rank:
            raise UsageError(
                f"use_collectives=False: this is rank {rank} of DCP's process group and rank "
                f"{ranks.rank} of the engine's; DCP does not name the ranks that save to its "
                "storage, so name them: engine.writer(step, group=...)"
            )
        members = range(ranks.world_size) if members is None else members
        self._world_size, self._members = len(members), _digest_of(members)
        if rank >= self._world_size or members[rank] != ranks.rank:
            raise UsageError(
                f"the group of the writer is {list(members)}, but DCP calls this rank "
                f"{ranks.rank} its rank {rank}: give both the same process group"
            )
        hosts = [session.hosts.by_rank[each] for each in members]
        self._hosts = tuple(dict.fromkeys(hosts))
        """Those of the group; the agent of the first, where its rank 0 is, commits."""
        self._here = hosts.count(session.host_id)
        self._session, self._tags = session, tags
        self._stream, self._step, self._rank = stream, step, rank
        self._shared = session.no_collectives
        # Cached plans of all ranks are of no use to a rank that plans alone.
        session.dcp_plans.use(f"{stream} without collectives")
        self._withdraw_last()
        self._key = self._shared.next_key(stream)

    def _withdraw_last(self) -> None:
        """An agent that did not answer may still wait for the last save of the stream."""
        key = self._shared.unresolved.pop(self._stream, None)
        if key is None:
            return
        gone = TierUnavailableError(
            f"rank {self._rank} has gone on", tier="memory", outcome="not_applied"
        )
        try:
            self._session.client.poll_save(key, give_up=describe_error(gone))
        except (TieredCkptError, OSError) as error:
            # This save meets the same fault, and reports it.
            log.info("a save without collectives could not be withdrawn: %s", error)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error that leaves the block: the other ranks wait outside of any collective."""
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            if not succeeded:
                error = sys.exception()
                assert error is not None
                self._report(error)

    def _report(self, error: BaseException) -> None:
        if isinstance(error, TieredCkptError):
            ours = type(error)(error.message, **{**error.fields, "rank": self._rank})
        else:
            text = f"rank {self._rank} failed: {type(error).__name__}: {error}"
            ours = RankError(text, rank=self._rank)
        try:
            self._post(None, b"", None, ours)
        except (TieredCkptError, OSError) as failed:
            # They wait no longer than save.timeout; here the error itself counts.
            log.warning("the other ranks were not informed that this one failed: %s", failed)

    def _post(
        self,
        receipt: Receipt | None,
        plan: bytes,
        manifest: Manifest | None,
        error: TieredCkptError | None = None,
    ) -> m.Gathered:
        part = None
        if receipt is not None and receipt.segment_id is not None:
            part = m.SealedPart(
                segment_id=receipt.segment_id, size=receipt.size, root=receipt.root.hex()
            )
        client, several = self._session.client, len(self._hosts) > 1
        return client.call(
            m.Contribute(
                session_id=client.session_id,
                run=self._session.run_id,
                key=self._key,
                step=self._step,
                world_size=self._world_size,
                members=self._members,
                rank=self._rank,
                part=part,
                values=() if receipt is None else _values_of(receipt),
                plan=plan,
                draft=encode_manifest(manifest) if manifest is not None else None,
                attempt=self._session.history.attempt if manifest is not None else b"",
                error=describe_error(error) if error is not None else None,
                decider=self._hosts[0] if several else "",
                here=self._here if several else 0,
                hosts=self._hosts if several and self._rank == 0 else (),
            )
        )

    def unreplicated(self, stream: str, error: WaitError) -> str:
        # Each rank waits by itself; one that raised alone would leave the others in a barrier.
        log.warning("%s; the checkpoint is committed in memory", error)
        return error.message

    def missed(self, error: BackgroundSaveError) -> None:
        log.warning("%s", error)  # the other ranks know nothing of it, and wait in DCP's barrier

    def commit(
        self,
        metadata: Metadata,
        receipts: Sequence[Receipt],
        plans: Sequence[SavePlan],
        encoded: EncodedPlan | None,
        ending: Ending,
    ) -> tuple[str, Sequence[str]]:
        """``plans`` has at most this rank's own plan. All ranks raise the error of the rank that
        failed.
        """
        with ending.committing():
            save_id = self._commit(metadata, receipts[0], plans[0] if plans else None)
        return save_id, self._hosts

    def _commit(self, metadata: Metadata, receipt: Receipt, planned: SavePlan | None) -> str:
        """Post this rank's part, and wait for the outcome of all parts; the save id."""
        if receipt.refusal is not None:
            self._report(receipt.refusal.error)
            raise receipt.refusal.error
        history = self._session.history
        with self.reporting():
            plan = self._plan(metadata, receipt, planned)
            manifest = self._manifest() if self._rank == 0 else None
        for left in reversed(range(ADOPTIONS_MAX)):
            failpoints.reach("save.contribute.before")
            outcome = self._meet(receipt, plan, manifest)
            if outcome.state == "committed":
                if manifest is not None:
                    history.saved(manifest)
                    seen = self._session.names_seen.setdefault(self._stream, NamesSeen())
                    warn_of_names(seen, outcome.differing)
                assert outcome.save_id is not None
                return outcome.save_id
            assert outcome.error is not None
            error = described_error(outcome.error)
            moved = isinstance(error, StaleAttemptError) and error.fields.get("same_run")
            if not (moved and left):
                raise error
            # Other ranks of this run opened an attempt just then. All ranks know, and try again.
            self._key = self._shared.next_key(self._stream)
            if manifest is not None:
                with self.reporting():
                    manifest = history.moved(manifest)
        raise AssertionError  # the loop returns or raises

    def _plan(self, metadata: Metadata, receipt: Receipt, planned: SavePlan | None) -> bytes:
        written = [receipt] if receipt.segment_id is not None else []
        cache = self._shared.plans.setdefault(self._stream, PlanCache())
        stored = partial(stored_items, self._session)
        plan = cache.plan_for(
            metadata,
            [each.structure for each in written],
            lambda: Places.of_segments([items_of(e, planned, stored) for e in written]),
            partial=True,
            nested=receipt.nested,
        )
        return plan.data

    def _manifest(self) -> Manifest:
        return self._session.history.begin_save(
            self._stream,
            self._step,
            time.time(),
            plan=NO_PLAN,
            segments=(),
            world_size=self._world_size,
            tags=dict(self._tags),
            replicas=self._session.hosts.replicas_of(self._hosts),
        )

    def _meet(self, receipt: Receipt, plan: bytes, manifest: Manifest | None) -> m.Gathered:
        """The outcome, which is "committed" or "failed"."""
        self._shared.unresolved[self._stream] = self._key
        try:
            outcome = self._wait(receipt, plan, manifest)
        except (TierUnavailableError, NotFoundError):
            if manifest is not None:
                self._session.history.save_unknown(manifest)
            raise
        self._shared.unresolved.pop(self._stream, None)
        return outcome

    def _wait(self, receipt: Receipt, plan: bytes, manifest: Manifest | None) -> m.Gathered:
        client, timeout_s = self._session.client, self._session.config.save.timeout_s
        until_s = time.monotonic() + timeout_s
        outcome = self._post(receipt, plan, manifest)
        failpoints.reach("save.contribute.after")
        pause_s, withdrawn = POLL_S_MIN, False
        while outcome.state in ("open", "unknown"):
            late = time.monotonic() >= until_s
            if late and withdrawn:  # it was being committed when we withdrew, and still is
                raise TierUnavailableError(
                    f"the agent has not committed step {self._step} within {timeout_s:g} s",
                    tier="memory",
                    outcome="unknown",
                )
            withdrawal = None
            if late:
                withdrawal = describe_error(self._too_late(outcome, timeout_s))
                until_s, withdrawn = time.monotonic() + timeout_s, True
            else:
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, POLL_S_MAX)
            outcome = client.poll_save(self._key, self._rank, withdrawal)
            if outcome.state == "unknown":  # another agent: the one we posted to is gone
                outcome = self._post(receipt, plan, manifest)
        return outcome

    def _too_late(self, outcome: m.Gathered, timeout_s: float) -> TierUnavailableError:
        ranks = ", ".join(map(str, outcome.missing)) or "?"
        return TierUnavailableError(
            f"rank(s) {ranks} of {self._world_size} have not sealed their part of step "
            f"{self._step} within {timeout_s:g} s (save.timeout), rank {self._rank} waited: call "
            "dcp.save on all ranks; if the group has fewer, name them: engine.writer(step, "
            "group=...)",
            tier="memory",
            outcome="not_applied",
            rank=self._rank,
        )
