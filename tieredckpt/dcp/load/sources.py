"""How this process reads copies: on this host by a descriptor of its agent, on others over TCP.

Each rank reads object stores with a client of its own: an agent in between would copy every byte
once more, and one host's agent would have to feed all of its ranks. The agent only reports which
copies a store has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tieredckpt.errors import IntegrityError, NotFoundError, TieredCkptError, TierUnavailableError
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import SegmentRef
from tieredckpt.format.plan import Plan, decode_plan, rebuild_plan
from tieredckpt.format.plan_record import encoded_plan_id
from tieredckpt.recovery.copies import OpenedSource
from tieredckpt.recovery.fetch import SegmentFetcher
from tieredckpt.recovery.other_hosts import OtherHosts
from tieredckpt.recovery.plan import Candidate, SourceRef
from tieredckpt.recovery.remote import DONOR_STREAMS, Peer
from tieredckpt.rpc.messages.peer import AskPlan

if TYPE_CHECKING:
    from tieredckpt.dcp.job.session import Session

log = logging.getLogger(__name__)


PLAN_HOSTS_MAX = 8
"""Other hosts that are asked for a plan before it is rebuilt from the segments."""


def fetcher_of(session: Session, ref: SegmentRef, sources: Sequence[SourceRef]) -> SegmentFetcher:
    """Reads a segment from these copies, the nearest to this host first. Close it."""
    others = session.history.others()

    def find_peer(source: SourceRef) -> Peer:
        if source.kind == "object":
            return session.stores.find_peer(source)
        if others is None:
            raise TierUnavailableError(
                f"the agent of this host knows no other hosts, so not {source.host}"
            )
        return others.client(source.host)

    return SegmentFetcher(
        ref,
        sources if others is None else others.in_order(sources, session.host_id),
        partial(_opened, session),
        partial(_report, session),
        find_peer=find_peer,
        host_id=session.host_id,
        streams_of=lambda source: (
            session.stores.streams(source) if source.kind == "object" else DONOR_STREAMS
        ),
    )


def _opened(session: Session, source: SourceRef) -> OpenedSource:
    """Open a copy on this host; a slot that the ring has mapped is read from the mapping."""
    reply, fd = session.client.open_segment(source.tier, source.segment_id)
    view = session.ring.view(reply.slot_id, fd) if reply.slot_id is not None else None
    return OpenedSource(fd=fd, direct=reply.direct, view=view)


def _report(session: Session, source: SourceRef, blocks: tuple[int, ...], reason: str) -> None:
    """Report bad blocks to the agent that owns the copy, so that it quarantines them."""
    if session.read_only:
        log.warning("segment %s in %s is damaged: %s", source.segment_id, source.place, reason)
        return
    others = session.history.others()
    try:
        if others is None or source.shared or source.host == session.host_id:
            session.client.report_damage(source.tier, source.segment_id, blocks, reason)
        else:
            peer = others.client(source.host)
            peer.report_damage(source.tier, source.segment_id, blocks, reason)
    except TieredCkptError as error:
        # The read continues from another copy; the next reader of this one finds the damage again.
        log.warning("damage of segment %s in tier %s on %s could not be reported: %s",
                    source.segment_id, source.tier, source.host, error)  # fmt: skip


def find_plan(session: Session, candidate: Candidate) -> Plan:
    """The plan of a checkpoint, from the first intact copy, else rebuilt from the segments.

    Raises:
        IntegrityError: No copy is intact, and the segments are damaged, too.
    """
    wanted = candidate.manifest.plan
    for where, read in _plan_readers(session, candidate):
        try:
            data = read()
            if encoded_plan_id(data) == wanted:
                return decode_plan(data)
        except (NotFoundError, IntegrityError, TierUnavailableError) as error:
            log.warning("the plan %s cannot be read from tier %s: %s", wanted, where, error)
    # Everything but the planner's own data is in the segments' indexes too.
    footers = []
    for ref, sources in zip(candidate.manifest.segments, candidate.sources, strict=True):
        with fetcher_of(session, ref, sources) as fetcher:
            footers.append(fetcher.footer())
    return rebuild_plan(footers)


def _plan_readers(
    session: Session, candidate: Candidate
) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The places that should have the plan, nearest first, and how to read it there."""
    wanted = candidate.manifest.plan
    for host, tier in candidate.plan_sources:
        if host == session.host_id:
            yield tier, partial(session.client.plan, wanted, tier=tier)
    others = session.history.others()
    if others is None:
        return
    away = [place for place in candidate.plan_sources if place[0] != session.host_id]
    # Each reader begins with another host: a plan may be large, and a thousand may want it.
    away.sort(key=lambda place: digest(f"{session.host_id} {place[0]}".encode()))
    for host, tier in away[:PLAN_HOSTS_MAX]:
        yield f"{tier} on {host}", partial(_plan_of, others, host, wanted, tier)


def _plan_of(others: OtherHosts, host: str, wanted: str, tier: str) -> bytes:
    return others.client(host).ask(AskPlan(plan_id=wanted, tier=tier))
