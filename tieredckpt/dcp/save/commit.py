"""The coordinator's end of a save: segments, plan and identity become one committed manifest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from tieredckpt import failpoints
from tieredckpt.dcp.job.checkpoints import ARRIVAL_S, wait_for_save
from tieredckpt.dcp.load.sources import fetcher_of
from tieredckpt.dcp.save.failures import SaveFailures
from tieredckpt.dcp.save.mirrors import LocalCopies
from tieredckpt.dcp.save.receipt import Receipt
from tieredckpt.dcp.state.consistency import NamesSeen, check_consistent
from tieredckpt.dcp.state.items import planned_layout
from tieredckpt.dcp.state.metadata import EncodedPlan, Places, PlanCache
from tieredckpt.errors import (
    NotFoundError,
    ProtocolError,
    StaleAttemptError,
    TierUnavailableError,
    UsageError,
    WaitError,
)
from tieredckpt.format.manifest import Manifest, SegmentRef, encode_manifest
from tieredckpt.format.segment import Item, structure_digest
from tieredckpt.recovery.plan import SourceRef

if TYPE_CHECKING:
    from tieredckpt.dcp.job.session import Session, Writing

log = logging.getLogger(__name__)

ADOPTIONS_MAX = 8
"""How often one commit is repeated because other ranks of the run opened an attempt just then."""


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
    )


def commit_save(
    session: Session,
    receipts: Sequence[Receipt],
    plan: EncodedPlan,
    tags: Mapping[str, str],
    copies: LocalCopies | None,
) -> Manifest:
    """Make the checkpoint exist in memory. Called on the coordinator only.

    Args:
        session: The coordinator's.
        receipts: One per rank, none with a refusal, after :func:`check_agreement`.
        plan: Of :func:`encode_save`.
        tags: Of the checkpoint.
        copies: Of the stream, with ``memory.copies: local``.

    Raises:
        UsageError: Per-rank values of one coordinate differ, or another process group saves into
            the stream.
        StaleAttemptError: A newer start of this training run has taken over; nothing was committed.
        AgentError: With ``outcome="unknown"``, the checkpoint may exist.
    """
    written = [receipt for receipt in receipts if receipt.segment_id is not None]
    stream, step = receipts[0].stream, receipts[0].step
    seen = session.names_seen.setdefault(stream, NamesSeen())
    check_consistent(seen, ((each.rank, each.values) for each in receipts))
    manifest = session.history.begin_save(
        stream,
        step,
        time.time(),
        plan=plan.id,
        segments=tuple(
            SegmentRef(receipt.segment_id or "", receipt.size, receipt.root.hex(), receipt.host_id)
            for receipt in written
        ),
        world_size=len(receipts),
        tags=dict(tags),
        replicas=session.hosts.replicas_of(
            (receipt.host_id for receipt in written),
            copies.hosts_with_drafts(receipts) if copies is not None else {},
        ),
    )
    return _commit(session, manifest, plan)


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
    ref = SegmentRef(receipt.segment_id, receipt.size, receipt.root.hex(), receipt.host_id)
    source = SourceRef(
        host=receipt.host_id,
        tier="memory",
        segment_id=receipt.segment_id,
        size=receipt.size,
        intact=True,
        kind="memory",
    )
    fetcher = fetcher_of(session, ref, [source])
    try:
        return fetcher.footer().items
    finally:
        fetcher.close()


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


def acknowledge(
    session: Session,
    failures: SaveFailures,
    save_id: str,
    stream: str,
    step: int,
    hosts: Iterable[str],
    *,
    gathered: bool,
) -> str | None:
    """After a commit: wait, if ``save.ack`` says so, until the other hosts have their copies.

    Args:
        session: Ours.
        failures: Of the session.
        save_id: What was committed.
        stream, step: Likewise.
        hosts: Those that wrote segments of it.
        gathered: All ranks wait, each for itself, and one that raised alone would leave the others
            in a barrier: then this never raises.

    Returns:
        Why the checkpoint, which exists, was not replicated in time; None: it was, or need not be.

    Raises:
        WaitError: Likewise, and it may not be passed over: see docs/understand/failures.md.
    """
    save = session.config.save
    if save.ack != "replicated" or not session.hosts.replicas_of(hosts):
        return None
    what = f"step {step} of stream {stream!r}"
    try:
        now_s = time.monotonic()
        wait_for_save(
            session, save_id, what, "replicated", now_s + save.timeout_s,
            arrives_s=now_s + ARRIVAL_S,
        )  # fmt: skip
        failures.replicated(stream)
        return None
    except WaitError as error:
        found = error
    except (TierUnavailableError, NotFoundError) as error:
        text = f"whether {what} is replicated cannot be learnt: {error}"
        found = WaitError(text, reason="failed")
    if gathered:
        log.warning("%s; the checkpoint is committed in memory", found)
        return found.message
    return failures.unreplicated(stream, found)
