"""Which checkpoint a restart restores, and from which copies: facts in, a frozen plan out.

Pure: the trainer, the command line and the tests get the same answer from the same holdings.
The chosen checkpoint is the newest one on the time line whose every segment can be had. A segment
can be had if some copy vouches for it (its own footer ends in the root digest that the manifest
names) and every block is claimed good by some copy. What a copy claims may turn out wrong when it
is read: then :mod:`tieredckpt.recovery.fetch` goes on to the next copy, and who restores plans
anew without this checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tieredckpt.format.manifest import Manifest, SegmentRef
from tieredckpt.policy import timeline
from tieredckpt.recovery.evidence import (
    Place,
    SegmentCopy,
    SourceRef,
    manifest_of,
    missing_of,
    places_of,
    read_attempts,
)
from tieredckpt.tiers.facts import Holdings, SegmentFact

__all__ = ["Candidate", "RecoveryPlan", "Refusal", "SourceRef", "plan_recovery"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint that can be restored.

    ``sources`` has, for each segment of the manifest, its copies in the order to try: whole ones
    before damaged ones, memory before file. ``plan_sources`` are the (host, tier) that hold its
    plan; if it is empty, the plan has to be rebuilt from the segments.
    """

    manifest: Manifest
    plan_sources: tuple[tuple[str, str], ...]
    sources: tuple[tuple[SourceRef, ...], ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A checkpoint that is not restored, and why; ``step`` is None if nobody can read it."""

    save_id: str
    step: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """What a restart would do."""

    stream: str
    chosen: Candidate | None
    candidates: tuple[Candidate, ...]
    """All that was asked for and can be restored, newest first; ``chosen`` is the first."""
    refused: tuple[Refusal, ...]
    """What was asked for and cannot be restored: unreadable manifests, then newest first."""
    incomplete: tuple[str, ...]
    """Tiers that could not answer, and why: what only they hold is not in this plan."""
    abandoned: tuple[Refusal, ...] = ()
    """Checkpoints off the time line, newest first; such a one loads only by its save id."""
    warnings: tuple[str, ...] = ()
    """Damaged attempt records, and whether the time line is a guess because of a lost one."""

    def to_json(self) -> dict[str, Any]:
        """Plain data, for ``tieredckpt recovery plan --json``."""
        return {
            "stream": self.stream,
            "chosen": _candidate_json(self.chosen) if self.chosen is not None else None,
            "candidates": [
                {"save_id": each.manifest.save_id, "step": each.manifest.step}
                for each in self.candidates
            ],
            "refused": [_refusal_json(each) for each in self.refused],
            "abandoned": [_refusal_json(each) for each in self.abandoned],
            "incomplete": list(self.incomplete),
            "warnings": list(self.warnings),
        }


def plan_recovery(
    holdings: Sequence[Holdings],
    *,
    stream: str = "default",
    step: int | None = None,
    save_id: str | None = None,
    exclude: frozenset[str] = frozenset(),
) -> RecoveryPlan:
    """Choose the checkpoint to restore.

    Args:
        holdings: What each host holds of one namespace; the host that will read comes first.
        stream: Which sequence of checkpoints.
        step: Only checkpoints of this step, on the time line.
        save_id: Only this checkpoint, on the time line or not.
        exclude: Save ids that were tried and failed.

    Returns:
        The plan. Without any checkpoint ``chosen`` is None and ``refused`` is empty; if moreover
        ``incomplete`` is empty, there certainly is none.
    """
    facts = _Facts(holdings, stream)
    line = timeline.line(facts.manifests, facts.attempts, stream)
    on_line = timeline.candidates(facts.manifests, facts.attempts, stream)
    known = {manifest.save_id for manifest in on_line}
    of_stream = {m.save_id: m for m in facts.manifests if m.stream == stream}.values()
    # Newest first; the attempt's number before its id, as the time line counts.
    off_line = sorted(
        (m for m in of_stream if m.save_id not in known),
        key=lambda m: (m.attempt.number, m.attempt.id, m.seq, m.save_id),
        reverse=True,
    )
    abandoned = tuple(Refusal(m.save_id, m.step, _off_line_reason(line)) for m in off_line)
    damaged = facts.damaged
    wanted = list(on_line)
    refused: list[Refusal] = []
    if save_id is not None:
        wanted = [m for m in (*on_line, *off_line) if m.save_id == save_id]
        damaged = [refusal for refusal in damaged if refusal.save_id == save_id]
    if step is not None:
        wanted = [m for m in wanted if m.step == step]
        if save_id is None:
            refused = [refusal for refusal in abandoned if refusal.step == step]
    candidates = []
    found: list[Refusal] = []
    for manifest in wanted:
        reasons = facts.why_not(manifest)
        if manifest.save_id in exclude:
            reasons = ["it was tried, and failed"]
        if reasons:
            found.append(Refusal(manifest.save_id, manifest.step, "; ".join(reasons)))
        else:
            candidates.append(facts.candidate(manifest))
    return RecoveryPlan(
        stream=stream,
        chosen=candidates[0] if candidates else None,
        candidates=tuple(candidates),
        refused=(*damaged, *found, *refused),
        incomplete=facts.incomplete,
        abandoned=abandoned,
        warnings=(*facts.warnings, *_line_warnings(line)),
    )


def _off_line_reason(line: timeline.Line) -> str:
    newest = f"attempt {line.attempt.number}" if line.attempt is not None else "the newest attempt"
    return f"abandoned: {newest} did not go on from it; it loads only by its save id"


def _line_warnings(line: timeline.Line) -> tuple[str, ...]:
    if line.certain:
        return ()
    return ("the newest attempt's record is lost: where it went on from is a guess",)


class _Facts:
    """The holdings of all hosts, indexed."""

    def __init__(self, holdings: Sequence[Holdings], stream: str) -> None:
        self.places = tuple(places_of(holdings))
        unavailable = [place for place in self.places if not place.facts.available]
        self.incomplete = tuple(
            f"{place.name}: {place.facts.error or 'does not answer'}" for place in unavailable
        )
        self.manifests, self.damaged = self._read_manifests(holdings, stream)
        self.attempts, self.warnings = read_attempts(holdings)
        self._segments: dict[str, list[tuple[Place, SegmentFact]]] = {}
        for place in self.places:
            for fact in place.facts.segments if place.facts.available else ():
                self._segments.setdefault(fact.id, []).append((place, fact))

    def _read_manifests(
        self, holdings: Sequence[Holdings], stream: str
    ) -> tuple[tuple[Manifest, ...], list[Refusal]]:
        namespaces = {each.namespace for each in holdings}
        good: dict[str, Manifest] = {}
        bad: dict[str, list[str]] = {}
        contradicted: dict[str, Manifest] = {}
        for place in self.places:
            for fact in place.facts.manifests:
                manifest = manifest_of(fact, namespaces)
                if isinstance(manifest, str):
                    if fact.stream == stream:
                        bad.setdefault(fact.save_id, []).append(f"{place.name}: {manifest}")
                elif good.setdefault(fact.save_id, manifest) != manifest:
                    contradicted[fact.save_id] = manifest
        refused = [
            Refusal(save_id, None, "its manifest is unreadable: " + "; ".join(reasons))
            for save_id, reasons in sorted(bad.items())
            if save_id not in good
        ]
        for save_id, manifest in sorted(contradicted.items()):
            # Nothing tells which one is true, and a wrong one would load other tensors.
            first = good.pop(save_id)
            if stream in (first.stream, manifest.stream):
                reason = "there are two different manifests with this save id"
                refused.append(Refusal(save_id, first.step, reason))
        return tuple(good.values()), refused

    def _copies(self, ref: SegmentRef) -> list[SegmentCopy]:
        copies = [SegmentCopy(place, fact, ref) for place, fact in self._segments.get(ref.id, ())]
        return sorted(
            (copy for copy in copies if copy.usable),
            key=lambda copy: (not copy.intact, not copy.vouches, copy.place.cost),
        )

    def why_not(self, manifest: Manifest) -> list[str]:
        """Why a checkpoint cannot be restored; empty if it can."""
        reasons = []
        for ordinal, ref in enumerate(manifest.segments):
            copies = self._copies(ref)
            if copies and copies[0].intact:
                continue
            missing = missing_of(copies)
            if missing is None:
                continue
            found = [
                SegmentCopy(place, fact, ref).problem()
                for place, fact in self._segments.get(ref.id, ())
            ]
            found += [f"not asked: {name}" for name in self.incomplete]
            where = "; ".join(found) or "there is no copy"
            reasons.append(f"segment {ordinal} ({ref.id}) has {missing}: {where}")
        return reasons

    def candidate(self, manifest: Manifest) -> Candidate:
        holders = [place for place in self.places if manifest.plan in place.facts.plans]
        return Candidate(
            manifest=manifest,
            plan_sources=tuple((place.host, place.facts.tier) for place in holders),
            sources=tuple(
                tuple(copy.source() for copy in self._copies(ref)) for ref in manifest.segments
            ),
        )


def _refusal_json(refusal: Refusal) -> dict[str, Any]:
    return {"save_id": refusal.save_id, "step": refusal.step, "reason": refusal.reason}


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    manifest = candidate.manifest
    return {
        "save_id": manifest.save_id,
        "step": manifest.step,
        "attempt": manifest.attempt.number,
        "plan": manifest.plan,
        "plan_sources": [{"host": host, "tier": tier} for host, tier in candidate.plan_sources],
        "segments": [
            {
                "id": ref.id,
                "bytes": ref.size,
                "sources": [
                    {
                        "host": source.host,
                        "tier": source.tier,
                        "intact": source.intact,
                        "bad_blocks": list(source.bad_blocks),
                        "error": source.error,
                    }
                    for source in sources
                ],
            }
            for ref, sources in zip(manifest.segments, candidate.sources, strict=True)
        ],
    }
