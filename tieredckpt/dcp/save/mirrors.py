"""``memory.copies: local``: ranks mirror the segments that other hosts write of the same content.

DCP assigns each piece that several ranks hold to one of them. With local copies each rank declares
its items in its local plan, as digests. The coordinator answers in the global plan which segments
the rank mirrors (:mod:`tieredckpt.policy.placement`). After its own segment the rank writes those
mirrors in their owners' layout. Data, index and digest table then have the same bytes, which the
receipts show, and the agents turn equal mirrors into copies (``agent/slots/replicas.py``). A rank
may not have all of an owner's bytes items (each rank's random state, for example): they come last,
and only their blocks are sent over the network. A mirror never fails a save.

Declaration and answer travel in ``SavePlan.storage_data``. With plan caching those of the first
save stay valid, as the plans do.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import xxhash
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from tieredckpt.dcp.save.receipt import MirrorSegment, Receipt
from tieredckpt.dcp.slots.copy import write_segment
from tieredckpt.dcp.state.items import LayoutCache, resolve_all, tensors_first
from tieredckpt.errors import TieredCkptError
from tieredckpt.format.segment import TRAILER_BYTES, decode_trailer
from tieredckpt.policy.placement import RankItems, assign_drafts, digests_of
from tieredckpt.rpc.messages.agent import ReserveDraft, SealDraft

if TYPE_CHECKING:
    from tieredckpt.dcp.job.session import Session
    from tieredckpt.dcp.slots.slot_ring import WritableSlot

RANKS_SHOWN = 8

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeclaredItems:
    """To the coordinator, in a local plan: a rank's host, and digests of all items it has."""

    host: str
    digests: bytes


@dataclass(frozen=True, slots=True)
class MirrorWork:
    """To a rank, in its global plan: the segments to mirror."""

    segments: tuple[tuple[int, int, bytes], ...]
    """Of each: the owner's rank, its number among the segments, digests of its items in order."""


def item_digest(item: WriteItem) -> bytes:
    """Equal for items that are laid out equally, of equal name; 8 bytes."""
    text: tuple[object, ...] = (item.index.fqn,)
    data = item.tensor_data
    if item.type != WriteItemType.BYTE_IO and data is not None:
        chunk = data.chunk
        pieces = tuple(chunk.offsets), tuple(chunk.sizes)
        text = (item.index.fqn, str(data.properties.dtype), tuple(data.size), pieces)
    return xxhash.xxh3_64_digest(repr(text).encode("utf-8", "surrogatepass"))


def footer_digest(slot: WritableSlot, size: int) -> bytes:
    """Of the segment that was just written there: the digest of its index and digest table."""
    return decode_trailer(bytes(slot.view[size - TRAILER_BYTES : size])).footer_digest


class Mirrors:
    """The mirrors of one stream of an engine, on one rank. One save at a time."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._plans: list[SavePlan] = []
        """On the coordinator: each rank's plan; DCP leaves out plans that did not change."""
        self._digests: list[bytes] = []
        self._hosts: list[str] = []
        self._work: list[MirrorWork] = []
        self._ranks: list[RankItems] = []
        self._assignment: tuple[tuple[int, ...], ...] = ()
        self._layouts: dict[int, LayoutCache] = {}
        self._warned = False

    # --- planning ---------------------------------------------------------------------------------

    @staticmethod
    def declare(plan: SavePlan, host: str) -> SavePlan:
        """The local plan with the digests of this rank's items."""
        if not getattr(plan, "usable", True):
            return plan  # as cached
        return replace(
            plan, storage_data=DeclaredItems(host, b"".join(map(item_digest, plan.items)))
        )

    def assign(self, plans: Sequence[SavePlan], session: Session) -> list[SavePlan]:
        """The global plans with the mirrors that each rank is to write. On the coordinator."""
        changed = [getattr(plan, "usable", True) for plan in plans]
        if not any(changed):
            return list(plans)
        if len(self._plans) != len(plans):
            if not all(changed):  # another coordinator knows the ranks' items
                return list(plans)
            self._plans, self._work = list(plans), [MirrorWork(())] * len(plans)
            self._digests, self._hosts = [b""] * len(plans), [""] * len(plans)
        local = _local_plans(plans, session.dcp_plans.local_plans(self._stream))
        for rank, plan in enumerate(plans):
            if changed[rank]:
                self._plans[rank] = plan
            declared = local[rank].storage_data
            if isinstance(declared, DeclaredItems):
                self._digests[rank], self._hosts[rank] = declared.digests, declared.host
            elif changed[rank]:
                self._digests[rank], self._hosts[rank] = b"", ""
        return self._assigned(plans, changed)

    def _assigned(self, plans: Sequence[SavePlan], changed: Sequence[bool]) -> list[SavePlan]:
        written = [_written(plan) for plan in self._plans]
        ordinals = list(accumulate((bool(each) for each in written), initial=0))
        ranks = [
            RankItems(host=host, held=digests, needed=_needed(plan), size=_size(plan))
            for host, digests, plan in zip(self._hosts, self._digests, self._plans, strict=True)
        ]
        if ranks != self._ranks:  # assigning for many hosts takes longer than comparing
            self._ranks, self._assignment = ranks, assign_drafts(ranks)
        found = []
        for rank, owners in enumerate(self._assignment):
            work = MirrorWork(tuple((each, ordinals[each], written[each]) for each in owners))
            plan = plans[rank]
            if work != self._work[rank] and not changed[rank]:
                plan = self._plans[rank]  # its own part did not change, and must be sent again
            self._work[rank] = work
            usable = getattr(plan, "usable", True)
            found.append(replace(plan, storage_data=work) if usable else plan)
        return found

    # --- writing ----------------------------------------------------------------------------------

    def write(
        self,
        plan: SavePlan,
        local_items: Sequence[WriteItem],
        planner: SavePlanner,
        session: Session,
        step: int,
    ) -> tuple[MirrorSegment, ...]:
        """Write this rank's mirrors. Returns those that were written; never raises for the rest."""
        work = plan.storage_data
        if not isinstance(work, MirrorWork) or not work.segments:
            return ()
        client, ring = session.client, session.ring
        mine = {item_digest(item): item for item in local_items}
        written = []
        for owner, ordinal, digests in work.segments:
            wanted = list(digests_of(digests))
            items = [mine[each] for each in wanted if each in mine]
            complete = len(items) == len(wanted)
            layouts = self._layouts.setdefault(owner, LayoutCache())
            try:
                specs, tensors, blobs = resolve_all(planner, items)
                layout, _ = layouts.lay_out(specs)
                size = layout.segment_bytes
                grant = client.call(
                    ReserveDraft(
                        session_id=client.session_id, segment_bytes=size, stream=self._stream,
                        step=step, drafts=len(work.segments),
                    )
                )  # fmt: skip
                slot = ring.map_grant(grant)
                try:
                    root = write_segment(slot, layout, tensors, blobs, ring.pool)
                    client.call(
                        SealDraft(
                            session_id=client.session_id, segment_id=slot.segment_id,
                            slot_id=slot.slot_id, segment_bytes=size, root=root.hex(),
                            stream=self._stream, step=step, ordinal=ordinal,
                        )
                    )  # fmt: skip
                    written.append(MirrorSegment(owner, footer_digest(slot, size), complete))
                finally:
                    ring.abandon(slot)  # sealed or not, this rank writes no more into it
            except (TieredCkptError, OSError, LookupError, ValueError) as error:
                # The copy is then made over the network.
                log.info("no mirror of the segment of rank %d: %s", owner, error)
        return tuple(written)

    @staticmethod
    def mirrored(plan: SavePlan) -> Callable[[WriteItem], bool]:
        """Returns whether this rank writes an item in a mirror."""
        work = plan.storage_data
        segments = work.segments if isinstance(work, MirrorWork) else ()
        wanted = {each for _, _, digests in segments for each in digests_of(digests)}
        return lambda item: item_digest(item) in wanted

    # --- after it ---------------------------------------------------------------------------------

    def hosts_with_mirrors(self, receipts: Sequence[Receipt]) -> Mapping[str, tuple[str, ...]]:
        """By host, the hosts that have mirrors of all segments that it wrote.

        Warns once if mirrors differ from the segments that they mirror.
        """
        owners = {each.rank: each for each in receipts if each.segment_id is not None}
        having: dict[int, set[str]] = {rank: set() for rank in owners}
        differing = []
        for receipt in receipts:
            for mirror in receipt.mirrors:
                owner = owners.get(mirror.owner)
                if owner is None:
                    continue
                having[mirror.owner].add(receipt.host_id)
                if mirror.complete and mirror.footer != owner.footer:
                    differing.append((mirror.owner, receipt.rank))
        found: dict[str, set[str]] = {}
        for rank, receipt in owners.items():
            mine = found.setdefault(receipt.host_id, set(having[rank]))
            mine &= having[rank]
        if differing:
            self._warn(differing)
        return {host: tuple(sorted(them)) for host, them in found.items() if them}

    def _warn(self, differing: Sequence[tuple[int, int]]) -> None:
        if self._warned:
            return
        self._warned = True
        pairs = ", ".join(f"{owner} and {rank}" for owner, rank in differing[:RANKS_SHOWN])
        more = "..." if len(differing) > RANKS_SHOWN else ""
        text = (
            f"memory.copies: ranks {pairs}{more} have different values for what should be the same "
            "(tensors that are replicated, or plain values of one name): the replicas have "
            "diverged, or a value is each rank's own. The checkpoint has the values of the first "
            "rank of each pair; blocks that differ are sent over the network (logged once)"
        )
        log.warning("%s", text)
        warnings.warn(text, stacklevel=4)


def _local_plans(
    plans: Sequence[SavePlan], cached: Iterable[Sequence[SavePlan]]
) -> Sequence[SavePlan]:
    """The plans that declare the ranks' items, as far as there are any.

    The plan of a rank whose own part did not change declares nothing, though its items may have
    changed.
    """
    known = [
        id(plan.storage_data) for plan in plans if isinstance(plan.storage_data, DeclaredItems)
    ]
    for each in cached:
        if len(each) == len(plans) and any(id(plan.storage_data) in known for plan in each):
            return each
    return plans


def _written(plan: SavePlan) -> bytes:
    return b"".join(item_digest(item) for part in tensors_first(plan.items) for item in part)


def _needed(plan: SavePlan) -> bytes:
    """The tensors; a segment without tensors is not worth a mirror."""
    return b"".join(map(item_digest, tensors_first(plan.items)[0]))


def _size(plan: SavePlan) -> int:
    tensors, blobs = tensors_first(plan.items)
    return sum(item.tensor_storage_size() or 1 for item in tensors) + len(blobs)
