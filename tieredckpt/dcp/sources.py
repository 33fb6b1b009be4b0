"""How this process opens copies of segments: by asking its agent for a descriptor."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tieredckpt.dcp.session import Session
from tieredckpt.errors import (
    IntegrityError,
    NotFoundError,
    TieredCkptError,
    TierUnavailableError,
)
from tieredckpt.format.plan import Plan, decode_plan, plan_id, rebuild_plan
from tieredckpt.recovery.fetch import OpenedSource, SegmentFetcher
from tieredckpt.recovery.plan import Candidate, SourceRef

log = logging.getLogger(__name__)


def open_source(session: Session) -> Callable[[SourceRef], OpenedSource]:
    """Opens a copy on this host; a slot that the ring has mapped is read through the mapping."""

    def opened(source: SourceRef) -> OpenedSource:
        if source.host != session.host_id:
            raise TierUnavailableError(f"host {source.host} cannot be read from in this release")
        reply, fd = session.client.open_segment(source.tier, source.segment_id)
        view = session.ring.view(reply.slot_id, fd) if reply.slot_id is not None else None
        return OpenedSource(fd=fd, direct=reply.direct, view=view)

    return opened


def report_damage(session: Session) -> Callable[[SourceRef, tuple[int, ...], str], None]:
    """Tells the agent of bad blocks, so that it quarantines them."""

    def report(source: SourceRef, blocks: tuple[int, ...], reason: str) -> None:
        try:
            session.client.report_damage(source.tier, source.segment_id, blocks, reason)
        except TieredCkptError as error:
            # The read goes on from another copy; whoever reads this one next finds it again.
            log.warning("damage of segment %s in tier %s could not be reported: %s",
                        source.segment_id, source.tier, error)  # fmt: skip

    return report


def find_plan(session: Session, candidate: Candidate) -> Plan:
    """The plan of a checkpoint, from the first tier whose copy is intact, else made anew.

    Raises:
        IntegrityError: No copy is intact, and the segments cannot say it either.
    """
    wanted = candidate.manifest.plan
    for host, tier in candidate.plan_sources:
        if host != session.host_id:
            continue
        try:
            data = session.client.plan(wanted, tier=tier)
            if plan_id(data) == wanted:
                return decode_plan(data)
        except (NotFoundError, IntegrityError, TierUnavailableError) as error:
            log.warning("the plan %s cannot be read from tier %s: %s", wanted, tier, error)
    # Everything but the planner's own data is in the segments' indexes too.
    footers = []
    for ref, sources in zip(candidate.manifest.segments, candidate.sources, strict=True):
        fetcher = SegmentFetcher(ref, sources, open_source(session), report_damage(session))
        try:
            footers.append(fetcher.footer())
        finally:
            fetcher.close()
    return rebuild_plan(footers)
