"""The facts in holdings about each tier, copy, manifest and attempt record, checked. Pure.

Everything in holdings was read from files that anyone may have damaged, so nothing is trusted:
manifests are decoded again, and copies are compared with the root that the manifest names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tieredckpt.errors import IntegrityError
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import (
    AttemptRecord,
    Manifest,
    SegmentRef,
    decode_attempt,
    decode_manifest,
)
from tieredckpt.format.records import SaveRecord, decode_save_record
from tieredckpt.format.segment import BLOCK_BYTES_LEAST
from tieredckpt.storage.holdings import (
    Holdings,
    ManifestFact,
    SegmentFact,
    TierFacts,
    TierKind,
    manifest_digest,
)

_Record = TypeVar("_Record", AttemptRecord, SaveRecord)

NAMED_ONLY = "named as a holder, but its address is not known"

KIND_COST: Mapping[TierKind, int] = {"memory": 0, "file": 1, "object": 2}


class SourceRef(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One copy of one segment, as it was when the facts were collected.

    ``size`` is the number of bytes that can be read. ``intact``: no damage is known; otherwise
    ``bad_blocks`` and ``error`` describe it. ``shared``: every host reads it by itself, and
    ``host`` is one that certainly can. (A struct, as a plan of a large job has 100,000.)
    """

    host: str
    tier: str
    segment_id: str
    size: int
    intact: bool
    bad_blocks: tuple[int, ...] = ()
    error: str | None = None
    kind: TierKind = "file"
    shared: bool = False

    @property
    def place(self) -> str:
        """Tier and host, for messages."""
        return self.tier if self.shared else f"{self.tier} on {self.host}"


@dataclass(frozen=True, slots=True)
class Place:
    """One tier as one host sees it; places are sorted by ``cost``, the nearest first."""

    host: str
    facts: TierFacts
    cost: tuple[int, int, int]

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.facts.tier} on {self.host}"


@dataclass(frozen=True, slots=True)
class SegmentCopy:
    """One copy of one segment, and the manifest's reference to the segment."""

    place: Place
    fact: SegmentFact
    ref: SegmentRef

    @property
    def usable(self) -> bool:
        """Not another segment under this name: single blocks may be worth reading."""
        return self.fact.root in (None, self.ref.root) and self.fact.size > 0

    def may_have(self, block: int, block_bytes: int) -> bool:
        """Whether it may hold this block undamaged."""
        readable = self.fact.size >= min((block + 1) * block_bytes, self.ref.size)
        return self.usable and readable and block not in self.fact.bad_blocks

    def problem(self) -> str:
        """Why it is not intact, with its place."""
        fact, ref = self.fact, self.ref
        if fact.root is not None and fact.root != ref.root:
            what = f"holds another segment (root {fact.root}, the manifest names {ref.root})"
        elif fact.size < ref.size:
            what = f"truncated to {fact.size} of {ref.size} bytes"
        elif fact.listed and fact.size != ref.size:
            what = f"it has {fact.size} bytes, the manifest names {ref.size}"
        elif fact.error is not None:
            what = fact.error
        elif fact.bad_blocks:
            what = "bad blocks " + ", ".join(map(str, fact.bad_blocks[:8]))
        else:
            what = "its trailer is damaged"
        return f"{self.place.name}: {what}"

    @property
    def is_complete(self) -> bool:
        """Whether it has all bytes, and the manifest's root in its footer if that was read."""
        fact, ref = self.fact, self.ref
        if fact.error is not None:
            return False
        if fact.listed:
            return fact.root is None and fact.size == ref.size
        return fact.root == ref.root and fact.size >= ref.size

    def source(self) -> SourceRef:
        """The copy as a reader gets it."""
        facts, bad_blocks, complete = self.place.facts, self.fact.bad_blocks, self.is_complete
        return SourceRef(
            host=self.place.host,
            tier=facts.tier,
            segment_id=self.fact.id,
            size=self.fact.size,
            intact=complete and not bad_blocks,
            bad_blocks=bad_blocks,
            error=None if complete else self.problem(),
            kind=facts.kind,
            shared=facts.scope == "shared",
        )


def missing_of(copies: list[SegmentCopy]) -> str | None:
    """Why the copies cannot restore their segment; None if together they have all blocks."""
    complete = [copy for copy in copies if copy.is_complete]
    if not complete:
        return "no complete copy"
    # The size of blocks is in footers only, which are not read from stores. The smallest size
    # refuses nothing: if it is wrong, that costs one more attempt to read.
    sizes = (copy.fact.block_bytes for copy in complete if copy.fact.block_bytes)
    block_bytes = next(sizes, BLOCK_BYTES_LEAST)
    # A complete copy has all blocks but its bad ones, so only these can be lost.
    lost = [
        block
        for block in sorted(set(complete[0].fact.bad_blocks))
        if not any(copy.may_have(block, block_bytes) for copy in copies)
    ]
    return f"no good copy of blocks {', '.join(map(str, lost[:8]))}" if lost else None


def places_of(holdings: Sequence[Holdings]) -> Iterator[Place]:
    """All tiers, nearest first. A shared tier is one place, seen through a host that reaches it."""
    places = [
        Place(each.host_id, facts, (KIND_COST[facts.kind], host, tier))
        for host, each in enumerate(holdings)
        for tier, facts in enumerate(each.tiers)
    ]
    shared: set[str] = set()
    for place in sorted(places, key=lambda place: (not place.facts.available, place.cost)):
        if place.facts.scope == "shared":
            if place.facts.tier in shared:
                continue
            shared.add(place.facts.tier)
        yield place


def manifest_of(
    fact: ManifestFact, namespaces: set[str], decoded: Mapping[str, Manifest | str] | None = None
) -> Manifest | str:
    """The manifest, or why it cannot be used.

    Args:
        fact: As a host reports it.
        namespaces: The manifest must belong to one of them.
        decoded: From :func:`decode_manifests` over all hosts; None: it is decoded here.
    """
    if fact.error is not None:
        return fact.error
    if decoded is None:
        decoded = decode_manifests([fact])
    # A digest that comes with bytes is not trusted: one host could rename another's manifest.
    name = fact.digest if fact.manifest is None else manifest_digest(fact.manifest)
    manifest = decoded.get(name, "it was not delivered") if name else "it was not delivered"
    if isinstance(manifest, str):
        return manifest
    if (manifest.save_id, manifest.stream) != (fact.save_id, fact.stream):
        return f"it is that of {manifest.save_id} in stream {manifest.stream}"
    if manifest.namespace not in namespaces:
        return f"it belongs to namespace {manifest.namespace}"
    return manifest


def decode_manifests(facts: Iterable[ManifestFact]) -> dict[str, Manifest | str]:
    """By digest, each manifest whose bytes some fact has, decoded once; or why it cannot be.

    A thousand hosts report the same manifest, which names all their segments: decoding each
    report would take a thousand times as long.
    """
    found: dict[str, Manifest | str] = {}
    for fact in facts:
        if fact.manifest is None or (name := manifest_digest(fact.manifest)) in found:
            continue
        try:
            found[name] = decode_manifest(fact.manifest)
        except IntegrityError as error:
            found[name] = str(error)
    return found


def known_manifests(holdings: Iterable[Holdings]) -> dict[str, Manifest]:
    """By digest, the readable manifests in ``holdings``, each once."""
    found = decode_manifests(
        fact for each in holdings for tier in each.tiers for fact in tier.manifests
    )
    return {name: each for name, each in found.items() if isinstance(each, Manifest)}


def read_attempts(
    holdings: Iterable[Holdings],
) -> tuple[tuple[AttemptRecord, ...], tuple[str, ...]]:
    """All attempt records, each once, and what is wrong with the unreadable ones."""
    reported = ((each, data) for each in holdings for data in each.attempts)
    return _read_each("an attempt record", reported, decode_attempt, lambda record: record)


def read_records(holdings: Iterable[Holdings]) -> tuple[tuple[SaveRecord, ...], tuple[str, ...]]:
    """All save records, each once, and what is wrong with the unreadable ones."""
    reported = ((each, data) for each in holdings for data in each.records)
    return _read_each("a save record", reported, decode_save_record, lambda record: record.id)


def _read_each(
    what: str,
    reported: Iterable[tuple[Holdings, bytes]],
    decode: Callable[[bytes], _Record],
    identity: Callable[[_Record], object],
) -> tuple[tuple[_Record, ...], tuple[str, ...]]:
    records: dict[object, _Record] = {}
    warnings: list[str] = []
    seen: set[tuple[str, bytes]] = set()
    for each, data in reported:
        if (each.namespace, data) in seen:
            continue  # all hosts know the same ones
        seen.add((each.namespace, data))
        try:
            record = decode(data)
        except IntegrityError as error:
            warnings.append(f"{what} on {each.host_id} is unreadable: {error}")
            continue
        if record.namespace == each.namespace:
            records.setdefault(identity(record), record)
        else:
            warnings.append(f"{what} on {each.host_id} is of {record.namespace}")
    return tuple(records.values()), tuple(warnings)


def named_holders(manifests: Iterable[Manifest], records: Iterable[SaveRecord]) -> set[str]:
    """The hosts that hold, or were assigned, segments of some checkpoint in memory."""
    named: set[str] = set()
    for manifest in manifests:
        named.update({ref.host for ref in manifest.segments})
        for each in manifest.replicas:
            named.update(each.holders)
    for record in records:
        if record.kind == "ack":
            named.add(record.host)
        elif record.kind == "order":
            for each in record.placement:
                named.update(each.holders)
    return named


def holders_of(manifest: Manifest, records: Iterable[SaveRecord]) -> Mapping[str, frozenset[str]]:
    """By writing host, the hosts that may hold its segments of this checkpoint."""
    found = {ref.host: {ref.host} for ref in manifest.segments}
    placements = list(manifest.replicas)
    owner_of = {ref.id: ref.host for ref in manifest.segments}
    for record in records:
        if record.save_id != manifest.save_id:
            continue
        if record.kind == "order":
            placements += record.placement
        elif record.kind == "ack":
            for owner in {owner_of[name] for name in record.segments if name in owner_of}:
                found[owner].add(record.host)
    for each in placements:
        if each.host in found:
            found[each.host].update(each.holders)
    return {owner: frozenset(hosts) for owner, hosts in found.items()}


def nearest_first(sources: Sequence[SourceRef], host_id: str) -> tuple[SourceRef, ...]:
    """The copies in the order in which ``host_id`` tries them.

    Intact copies come before damaged ones, then own memory, other hosts' memory, own disk (and
    shared file systems), other hosts' disks, object stores. Equally near hosts come in another
    order for each reader and segment, so that a thousand restarting hosts do not all begin with
    the same one.
    """

    def cost(source: SourceRef) -> tuple[tuple[bool, bool, int, bool], bytes]:
        far = distance(source, host_id)
        turn = digest(f"{host_id} {source.host} {source.segment_id}".encode()) if far[-1] else b""
        return far, turn

    return tuple(sorted(sources, key=cost))


def distance(source: SourceRef, host_id: str) -> tuple[bool, bool, int, bool]:
    """Equal for copies that are equally good for ``host_id``; smaller is better."""
    own = source.shared or source.host == host_id
    return (not source.intact, source.error is not None, KIND_COST[source.kind], not own)
