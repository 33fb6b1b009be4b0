"""``dcp.save(use_collectives=False)``: ranks that meet in the agent, which commits for all of them.

Each rank plans alone, seals its segment and hands in its part; then it waits in ``finish`` for what
becomes of all of them together. DCP's own barrier comes right after, so nothing is lost by that,
and all ranks learn the same outcome: the save id, or the error, of whichever rank it was. Of ranks
on several hosts one agent decides, that of rank 0; each rank asks its own.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from tieredckpt import failpoints
from tieredckpt.dcp.save.commit import ADOPTIONS_MAX, items_of, stored_items
from tieredckpt.dcp.save.failures import SaveFailures
from tieredckpt.dcp.save.receipt import Receipt
from tieredckpt.dcp.state.consistency import NamesSeen, warn_of_names
from tieredckpt.dcp.state.metadata import Places, PlanCache
from tieredckpt.dcp.state.per_rank_keys import parse_key
from tieredckpt.errors import (
    NotFoundError,
    RankError,
    StaleAttemptError,
    TieredCkptError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import Manifest, encode_manifest
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages.base import describe_error, described_error

if TYPE_CHECKING:
    from tieredckpt.config.schema import SaveConfig
    from tieredckpt.dcp.job.session import Session

POLL_S_MIN = 0.001
POLL_S_MAX = 0.02
"""How often the agent is asked; ranks that train in step arrive within milliseconds."""

NO_PLAN = "0" * 32
"""In a draft; the agent puts the plan's id there."""

log = logging.getLogger(__name__)


def _digest_of(members: Sequence[int]) -> str:
    return digest(",".join(map(str, members)).encode("ascii")).hex()


class GatheredSaves:
    """What this process remembers of its saves without collectives.

    Args:
        config: Of saves.
        run_id: The epoch until a load begins a new one.
    """

    def __init__(self, config: SaveConfig, run_id: str) -> None:
        self.failures = SaveFailures(config)
        """Apart from those of other saves: here all ranks know of all, so they decide alike."""
        self.plans: dict[str, PlanCache] = {}
        self.unresolved: dict[str, m.GatheringKey] = {}
        """By stream: the last one, unless its outcome was learnt."""
        self._run_id = run_id
        self._epochs: dict[str, str] = {}
        self._ordinals: dict[str, int] = {}

    def begin(self, streams: Iterable[str], load_id: str) -> None:
        """All ranks have loaded these streams, by this load."""
        for stream in streams:
            self._epochs[stream], self._ordinals[stream] = load_id, 0

    def next_key(self, stream: str) -> m.GatheringKey:
        """The key of this rank's next save of ``stream``; counts it."""
        ordinal = self._ordinals.get(stream, 0)
        self._ordinals[stream] = ordinal + 1
        epoch = self._epochs.get(stream, self._run_id)
        return m.GatheringKey(stream=stream, epoch=epoch, ordinal=ordinal)


def _values_of(receipt: Receipt) -> tuple[m.RankValue, ...]:
    return tuple(
        m.RankValue(name=name, digest=value, must_agree=parse_key(name) is not None)
        for name, value in receipt.values[: m.RANK_VALUES_MAX]
    )


class GatheredSave:
    """One rank's side of one save.

    Args:
        session: The rank's.
        gathered: What its saves without collectives share.
        stream, step: What is saved.
        rank: Inside of DCP's group.
        members: The ranks of that group, if the caller said it; None: all of the engine's.

    Raises:
        UsageError: The group is not the engine's, and was not said.
    """

    def __init__(
        self,
        session: Session,
        gathered: GatheredSaves,
        stream: str,
        step: int,
        rank: int,
        members: Sequence[int] | None,
    ) -> None:
        ranks = session.ranks
        self.tags: dict[str, str] = {}
        if members is None and rank != ranks.rank:
            raise UsageError(
                f"use_collectives=False: this is rank {rank} of DCP's process group and rank "
                f"{ranks.rank} of the engine's; DCP does not tell its storage which ranks save, "
                "so say it: engine.writer(step, group=...)"
            )
        members = range(ranks.world_size) if members is None else members
        self._world_size, self._members = len(members), _digest_of(members)
        if rank >= self._world_size or members[rank] != ranks.rank:
            raise UsageError(
                f"the group of the writer is {list(members)}, but DCP calls this rank "
                f"{ranks.rank} its rank {rank}: give both the same process group"
            )
        hosts = [session.hosts.by_rank[each] for each in members]
        self.hosts = tuple(dict.fromkeys(hosts))
        """Those of the group; the agent of the first, where its rank 0 is, commits."""
        self._here = hosts.count(session.host_id)
        self._session = session
        self._stream, self._step, self._rank = stream, step, rank
        self._gathered = gathered
        self._leave_last()
        self._key = self._gathered.next_key(stream)

    def _leave_last(self) -> None:
        """An agent that did not answer may still wait for the last save of the stream."""
        key = self._gathered.unresolved.pop(self._stream, None)
        if key is None:
            return
        gone = TierUnavailableError(
            f"rank {self._rank} has gone on", tier="memory", outcome="not_applied"
        )
        try:
            self._session.client.poll_save(key, give_up=describe_error(gone))
        except (TieredCkptError, OSError) as error:
            # This save meets the same trouble, and reports it.
            log.info("a save without collectives could not be given up: %s", error)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell all ranks if this fails here, for they wait for us outside of any collective."""
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            if not succeeded:
                error = sys.exception()
                assert error is not None
                self._tell(error)

    def _tell(self, error: BaseException) -> None:
        if isinstance(error, TieredCkptError):
            ours = type(error)(error.message, **{**error.fields, "rank": self._rank})
        else:
            text = f"rank {self._rank} failed: {type(error).__name__}: {error}"
            ours = RankError(text, rank=self._rank)
        try:
            self._contribute(None, b"", None, ours)
        except (TieredCkptError, OSError) as failed:
            # They wait no longer than save.timeout; here the error itself is what counts.
            log.warning("the other ranks were not told that this one failed: %s", failed)

    def _contribute(
        self,
        receipt: Receipt | None,
        plan: bytes,
        draft: Manifest | None,
        error: TieredCkptError | None = None,
    ) -> m.Gathered:
        part = None
        if receipt is not None and receipt.segment_id is not None:
            part = m.SealedPart(
                segment_id=receipt.segment_id, size=receipt.size, root=receipt.root.hex()
            )
        client, several = self._session.client, len(self.hosts) > 1
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
                draft=encode_manifest(draft) if draft is not None else None,
                attempt=self._session.history.attempt if draft is not None else b"",
                error=describe_error(error) if error is not None else None,
                decider=self.hosts[0] if several else "",
                here=self._here if several else 0,
                hosts=self.hosts if several and self._rank == 0 else (),
            )
        )

    def finish(self, metadata: Metadata, receipt: Receipt, planned: SavePlan | None) -> str:
        """Hand this rank's part in, and wait for what becomes of all parts.

        Args:
            metadata: What DCP's planner made of this rank's plan alone.
            receipt: Of this rank.
            planned: That plan, as far as it was seen.

        Returns:
            The save id; the checkpoint is committed.

        Raises:
            TieredCkptError: There is no checkpoint. The same error on all ranks, whichever failed;
                if it says ``outcome="unknown"`` there may be one.
        """
        if receipt.refusal is not None:
            self._tell(receipt.refusal.error)
            raise receipt.refusal.error
        history = self._session.history
        with self.telling():
            plan = self._plan(metadata, receipt, planned)
            draft = self._draft() if self._rank == 0 else None
        for left in reversed(range(ADOPTIONS_MAX)):
            failpoints.reach("save.contribute.before")
            outcome = self._meet(receipt, plan, draft)
            if outcome.state == "committed":
                if draft is not None:
                    history.saved(draft)
                    seen = self._session.names_seen.setdefault(self._stream, NamesSeen())
                    warn_of_names(seen, outcome.differing)
                assert outcome.save_id is not None
                return outcome.save_id
            assert outcome.error is not None
            error = described_error(outcome.error)
            moved = isinstance(error, StaleAttemptError) and error.fields.get("same_run")
            if not (moved and left):
                raise error
            # Other ranks of this run opened an attempt just then. All of us know, and try again.
            self._key = self._gathered.next_key(self._stream)
            if draft is not None:
                with self.telling():
                    draft = history.moved(draft)
        raise AssertionError  # the loop returns or raises

    def _plan(self, metadata: Metadata, receipt: Receipt, planned: SavePlan | None) -> bytes:
        written = [receipt] if receipt.segment_id is not None else []
        cache = self._gathered.plans.setdefault(self._stream, PlanCache())
        stored = partial(stored_items, self._session)
        plan = cache.plan_for(
            metadata,
            [each.structure for each in written],
            lambda: Places.of_segments([items_of(e, planned, stored) for e in written]),
            partial=True,
        )
        return plan.data

    def _draft(self) -> Manifest:
        return self._session.history.begin_save(
            self._stream,
            self._step,
            time.time(),
            plan=NO_PLAN,
            segments=(),
            world_size=self._world_size,
            tags=self.tags,
            replicas=self._session.hosts.replicas_of(self.hosts),
        )

    def _meet(self, receipt: Receipt, plan: bytes, draft: Manifest | None) -> m.Gathered:
        """The outcome, which is "committed" or "failed"."""
        self._gathered.unresolved[self._stream] = self._key
        try:
            outcome = self._wait(receipt, plan, draft)
        except (TierUnavailableError, NotFoundError):
            if draft is not None:
                self._session.history.save_unknown(draft)
            raise
        self._gathered.unresolved.pop(self._stream, None)
        return outcome

    def _wait(self, receipt: Receipt, plan: bytes, draft: Manifest | None) -> m.Gathered:
        client, timeout_s = self._session.client, self._session.config.save.timeout_s
        until_s = time.monotonic() + timeout_s
        outcome = self._contribute(receipt, plan, draft)
        failpoints.reach("save.contribute.after")
        pause_s, gave_up = POLL_S_MIN, False
        while outcome.state in ("open", "unknown"):
            late = time.monotonic() >= until_s
            if late and gave_up:  # it was being committed when we gave up, and still is
                raise TierUnavailableError(
                    f"the agent has not committed step {self._step} within {timeout_s:g} s",
                    tier="memory",
                    outcome="unknown",
                )
            give_up = None
            if late:
                give_up = describe_error(self._too_late(outcome, timeout_s))
                until_s, gave_up = time.monotonic() + timeout_s, True
            else:
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, POLL_S_MAX)
            outcome = client.poll_save(self._key, self._rank, give_up)
            if outcome.state == "unknown":  # another agent: the one that we told is gone
                outcome = self._contribute(receipt, plan, draft)
        return outcome

    def _too_late(self, outcome: m.Gathered, timeout_s: float) -> TierUnavailableError:
        ranks = ", ".join(map(str, outcome.missing)) or "?"
        return TierUnavailableError(
            f"rank(s) {ranks} of {self._world_size} have not sealed their part of step "
            f"{self._step} within {timeout_s:g} s (save.timeout), rank {self._rank} waited: call "
            "dcp.save on all ranks; if the group has fewer, say so: engine.writer(step, "
            "group=...)",
            tier="memory",
            outcome="not_applied",
            rank=self._rank,
        )
