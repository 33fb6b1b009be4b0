"""What the holdings say of each tier, copy, manifest and attempt record. Pure.

Everything in holdings was read from files that anyone may have damaged, so nothing is taken at its
word: manifests are decoded again, copies are held against the root that the manifest names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tieredckpt.errors import IntegrityError
from tieredckpt.format.manifest import (
    AttemptRecord,
    Manifest,
    SegmentRef,
    decode_attempt,
    decode_manifest,
)
from tieredckpt.format.segment import BLOCK_BYTES
from tieredckpt.tiers.facts import Holdings, ManifestFact, SegmentFact, TierFacts

_KIND_COST = {"memory": 0, "file": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRef:
    """One copy of one segment, as it was when the facts were gathered.

    ``size`` is what can be read of it; ``intact`` says that nothing bad is known of it, else
    ``bad_blocks`` and ``error`` say what is.
    """

    host: str
    tier: str
    segment_id: str
    size: int
    intact: bool
    bad_blocks: tuple[int, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """One tier as one host sees it; ``cost`` orders places by how near they are."""

    host: str
    facts: TierFacts
    cost: tuple[int, int, int]

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.facts.tier} on {self.host}"


@dataclass(frozen=True, slots=True)
class SegmentCopy:
    """One copy of one segment, held against what the manifest says of it."""

    place: Place
    fact: SegmentFact
    ref: SegmentRef

    @property
    def usable(self) -> bool:
        """Not another segment under this name: single blocks may be worth reading."""
        return self.fact.root in (None, self.ref.root) and self.fact.size > 0

    @property
    def vouches(self) -> bool:
        """Its footer is whole and is the right one."""
        fact, ref = self.fact, self.ref
        return fact.error is None and fact.root == ref.root and fact.size >= ref.size

    @property
    def intact(self) -> bool:
        """It vouches, and nothing bad is known of any block."""
        return self.vouches and not self.fact.bad_blocks

    def claims(self, block: int) -> bool:
        """Whether it may hold this block. (The size of blocks is in footers only; nearly all have
        the default one, and a wrong guess costs one more attempt to read.)
        """
        readable = self.fact.size >= min((block + 1) * BLOCK_BYTES, self.ref.size)
        return self.usable and readable and block not in self.fact.bad_blocks

    def problem(self) -> str:
        """Why it is not intact."""
        fact, ref = self.fact, self.ref
        if fact.root is not None and fact.root != ref.root:
            what = f"holds another segment (root {fact.root}, the manifest says {ref.root})"
        elif fact.size < ref.size:
            what = f"truncated to {fact.size} of {ref.size} bytes"
        elif fact.error is not None:
            what = fact.error
        elif fact.bad_blocks:
            what = "bad blocks " + ", ".join(map(str, fact.bad_blocks[:8]))
        else:
            what = "its trailer is damaged"
        return f"{self.place.name}: {what}"

    def source(self) -> SourceRef:
        """What a reader is told of it."""
        return SourceRef(
            host=self.place.host,
            tier=self.place.facts.tier,
            segment_id=self.fact.id,
            size=self.fact.size,
            intact=self.intact,
            bad_blocks=self.fact.bad_blocks,
            error=None if self.vouches else self.problem(),
        )


def missing_of(copies: list[SegmentCopy]) -> str | None:
    """What no copy has; None if the copies together have everything."""
    vouching = [copy for copy in copies if copy.vouches]
    if not vouching:
        return "no copy that vouches for it"
    # A copy that vouches claims all blocks but its bad ones, so only these can be lost.
    lost = [
        block
        for block in sorted(set(vouching[0].fact.bad_blocks))
        if not any(copy.claims(block) for copy in copies)
    ]
    return f"no good copy of blocks {', '.join(map(str, lost[:8]))}" if lost else None


def places_of(holdings: Sequence[Holdings]) -> Iterator[Place]:
    """All tiers, nearest first. A shared tier is one place, seen through a host that reaches it."""
    places = [
        Place(each.host_id, facts, (_KIND_COST.get(facts.kind, len(_KIND_COST)), host, tier))
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


def manifest_of(fact: ManifestFact, namespaces: set[str]) -> Manifest | str:
    """The manifest, or why it cannot be used."""
    if fact.error is not None or fact.manifest is None:
        return fact.error or "it was not delivered"
    try:
        manifest = decode_manifest(fact.manifest)
    except IntegrityError as error:
        return str(error)
    if (manifest.save_id, manifest.stream) != (fact.save_id, fact.stream):
        return f"it is that of {manifest.save_id} in stream {manifest.stream}"
    if manifest.namespace not in namespaces:
        return f"it belongs to namespace {manifest.namespace}"
    return manifest


def read_attempts(
    holdings: Iterable[Holdings],
) -> tuple[tuple[AttemptRecord, ...], tuple[str, ...]]:
    """All attempt records, each once, and what is wrong with the unreadable ones."""
    records: list[AttemptRecord] = []
    warnings: list[str] = []
    for each in holdings:
        for data in each.attempts:
            try:
                record = decode_attempt(data)
            except IntegrityError as error:
                warnings.append(f"an attempt record on {each.host_id} is unreadable: {error}")
                continue
            if record.namespace == each.namespace:
                records.append(record)
            else:
                warnings.append(f"an attempt record on {each.host_id} is of {record.namespace}")
    return tuple(dict.fromkeys(records)), tuple(warnings)
