"""Saves through DCP's collectives: the coordinator commits one manifest for all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from tieredckpt import failpoints
from tieredckpt.dcp.load.sources import fetcher_of
from tieredckpt.dcp.save.mode import SaveMode
from tieredckpt.dcp.save.receipt import MirrorSegment, Receipt, Refusal
from tieredckpt.dcp.state.consistency import NamesSeen, check_consistent, planned_items
from tieredckpt.dcp.state.items import planned_layout
from tieredckpt.dcp.state.metadata import EncodedPlan, Places, PlanCache
from tieredckpt.errors import (
    BackgroundSaveError,
    ProtocolError,
    StaleAttemptError,
    TierUnavailableError,
    UsageError,
    WaitError,
)
from tieredckpt.format.manifest import Manifest, SegmentRef, encode_manifest
from tieredckpt.format.nested import merge_nested
from tieredckpt.format.segment import Item, structure_digest
from tieredckpt.recovery.plan import SourceRef

if TYPE_CHECKING:
    from tieredckpt.dcp.job.session import Session, Writing
    from tieredckpt.dcp.job.unreported import Ending
    from tieredckpt.dcp.save.state import SaveState

ADOPTIONS_MAX = 8
"""How often one commit is repeated because other ranks of the run opened an attempt just then."""


class Collective(SaveMode):
    """DCP's collectives bring plans and receipts of all ranks to the coordinator, which commits.

    Args:
        session: The rank's.
        stream: The stream to be saved.
        members: Ranks of DCP's group; None: unknown.
        tags: Of the checkpoint.
    """

    def __init__(
        self,
        session: SaveState,
        stream: str,
        members: Sequence[int] | None,
        tags: Mapping[str, str],
    ) -> None:
        super().__init__(session.failures, session.mirrors_of(stream))
        self._session, self._members, self._tags = session, members, tags
        session.dcp_plans.use(stream)

    def local_plan(self, plan: SavePlan) -> SavePlan:
        if self.mirrors is None:
            return plan
        return self.mirrors.declare(plan, self._session.host_id)

    def global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        expected = len(plans) if self._members is None else len(self._members)
        if expected != len(plans):
            raise UsageError(
                f"DCP plans for {len(plans)} rank(s), and the save is of {expected}: was "
                "the process group destroyed while it was under way?"
            )
        return plans if self.mirrors is None else self.mirrors.assign(plans, self._session)

    def write_mirrors(
        self, plan: SavePlan, local_plan: SavePlan | None, planner: SavePlanner, step: int
    ) -> tuple[MirrorSegment, ...]:
        if self.mirrors is None:
            return ()
        items = planned_items(local_plan, planner)
        return self.mirrors.write(plan, items, planner, self._session, step)

    def refused(self, stream: str) -> None:
        self.failures.count(stream)

    def refusals(self, receipts: Sequence[Receipt]) -> Sequence[Refusal]:
        check_agreement(receipts)
        return [each.refusal for each in receipts if each.refusal is not None]

    def commit(
        self,
        metadata: Metadata,
        receipts: Sequence[Receipt],
        plans: Sequence[SavePlan],
        encoded: EncodedPlan | None,
        ending: Ending,
    ) -> tuple[str, Sequence[str]]:
        """Also raises UsageError: per-rank values of one coordinate differ, or another process
        group saves into the stream; and StaleAttemptError: a newer run has superseded this one.
        """
        session, stream = self._session, receipts[0].stream
        sealed = [receipt for receipt in receipts if receipt.segment_id is not None]
        with session.saving, ending.committing():
            plan = encoded or encode_save(
                session, metadata, receipts, plans, partial(stored_items, session)
            )
            seen = session.names_seen.setdefault(stream, NamesSeen())
            reported = ((each.rank, each.values) for each in receipts)
            check_consistent(seen, reported, metadata.state_dict_metadata)
            manifest = session.history.begin_save(
                stream,
                receipts[0].step,
                time.time(),
                plan=plan.id,
                segments=tuple(map(_ref_of, sealed)),
                world_size=len(receipts),
                tags=dict(self._tags),
                replicas=session.hosts.replicas_of(
                    (receipt.host_id for receipt in sealed),
                    {} if self.mirrors is None else self.mirrors.hosts_with_mirrors(receipts),
                ),
            )
            manifest = _commit(session, manifest, plan)
        return manifest.save_id, [each.host for each in manifest.segments]

    def unreplicated(self, stream: str, error: WaitError) -> str:
        return self.failures.unreplicated(stream, error)

    def missed(self, error: BackgroundSaveError) -> None:
        raise error  # after the commit: reporting a lost checkpoint must not cost another one


def check_agreement(receipts: Sequence[Receipt]) -> None:
    """Whether all ranks save the same checkpoint.

    Raises:
        UsageError: The ranks named different steps or streams, or opened their engines apart.
    """
    first = receipts[0]
    for receipt in receipts:
        if (receipt.stream, receipt.step) != (first.stream, first.step):
            raise UsageError(
                f"the ranks name different checkpoints: rank {first.rank} step {first.step} of "
                f"stream {first.stream!r}, rank {receipt.rank} step {receipt.step} of stream "
                f"{receipt.stream!r}"
            )
    if len({receipt.run_id for receipt in receipts}) > 1:
        raise UsageError(
            "the ranks have opened their engines apart: call Engine.open on all ranks together, "
            "after init_process_group"
        )


def encode_save(
    own: Writing,
    metadata: Metadata,
    receipts: Sequence[Receipt],
    plans: Sequence[SavePlan],
    stored: Callable[[Receipt], Sequence[Item]],
) -> EncodedPlan:
    """The plan of a save. Called on the coordinator only.

    Args:
        own: The coordinator's.
        metadata: What DCP's planner made of all ranks' plans.
        receipts: One per rank, none with a refusal.
        plans: All ranks' plans as far as they were seen; empty ones where DCP cached them.
        stored: As :func:`stored_items`.

    Raises:
        UsageError: The state cannot be described.
    """
    written = [receipt for receipt in receipts if receipt.segment_id is not None]
    return own.plans.setdefault(receipts[0].stream, PlanCache()).plan_for(
        metadata,
        [receipt.structure for receipt in written],
        lambda: Places.of_segments(
            [items_of(each, _plan_of(each.rank, plans), stored) for each in written]
        ),
        nested=merge_nested(each.nested for each in receipts),
    )


def _plan_of(rank: int, plans: Sequence[SavePlan]) -> SavePlan | None:
    return plans[rank] if rank < len(plans) else None


def items_of(
    receipt: Receipt, plan: SavePlan | None, stored: Callable[[Receipt], Sequence[Item]]
) -> Sequence[Item]:
    """The items of a rank's segment: as planned if that is what was written, else as stored."""
    if plan is not None and plan.items:
        planned = planned_layout(plan.items).items
        if structure_digest(planned) == receipt.structure:
            return planned
    # DCP cached the plan, or a planner changed it after global planning: the segment is the truth.
    return stored(receipt)


def stored_items(session: Session, receipt: Receipt) -> Sequence[Item]:
    """The items of a rank's segment, as they are in it."""
    assert receipt.segment_id is not None
    source = SourceRef(
        host=receipt.host_id,
        tier="memory",
        segment_id=receipt.segment_id,
        size=receipt.size,
        intact=True,
        kind="memory",
    )
    fetcher = fetcher_of(session, _ref_of(receipt), [source])
    try:
        return fetcher.footer().items
    finally:
        fetcher.close()


def _ref_of(receipt: Receipt) -> SegmentRef:
    return SegmentRef(receipt.segment_id or "", receipt.size, receipt.root.hex(), receipt.host_id)


def _commit(session: Session, manifest: Manifest, plan: EncodedPlan) -> Manifest:
    history = session.history
    failpoints.reach("save.commit.before")
    for left in reversed(range(ADOPTIONS_MAX)):
        try:
            _send(session, manifest, plan)
            break
        except StaleAttemptError as error:
            if not error.fields.get("same_run") or not left:
                raise
        # Other ranks of this run have loaded or begun something: nothing of this one's changed.
        manifest = history.moved(manifest)
    failpoints.reach("save.commit.after")
    history.plans_sent = {plan.id}
    history.saved(manifest)
    return manifest


def _send(session: Session, manifest: Manifest, plan: EncodedPlan) -> None:
    data = encode_manifest(manifest)
    try:
        known, attempt = plan.id in session.history.plans_sent, session.history.attempt
        for content in (None if known else plan.data, plan.data):
            if not session.client.commit(data, content, attempt=attempt).need_plan:
                return
        raise ProtocolError("the agent asks for a plan that it was just sent")
    except TierUnavailableError:
        session.history.save_unknown(manifest)
        raise
