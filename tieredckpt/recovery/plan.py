"""Which checkpoint a restart restores, and from which copies: facts in, a frozen plan out.

Pure: the trainer, the command line and the tests get the same answer from the same holdings.
The plan chooses the newest checkpoint on the timeline whose every segment can be read. A segment
can be read if one of its copies is complete (its footer ends in the root digest that the manifest
names) and no block is known to be bad in all copies. These are the copies' own reports. If one is
wrong, :mod:`tieredckpt.recovery.fetch` reads the next copy, and if no copy is left, the caller
plans again without this checkpoint. Several streams of one job are restored together: the newest
step that all of them have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tieredckpt.errors import NoRecoverableCheckpointError
from tieredckpt.format.manifest import AttemptId, Followed, Manifest, SegmentRef
from tieredckpt.policy import history
from tieredckpt.policy.retention import let_go, standing_marks
from tieredckpt.recovery.evidence import (
    NAMED_ONLY,
    Place,
    SegmentCopy,
    SourceRef,
    decode_manifests,
    holders_of,
    manifest_of,
    missing_of,
    named_holders,
    places_of,
    read_attempts,
    read_records,
)
from tieredckpt.storage.holdings import Holdings, SegmentFact

__all__ = ["Candidate", "RecoveryPlan", "Refusal", "SourceRef", "plan_common", "plan_recovery"]

REASONS_MAX = 8
"""Segments that a refusal names: people read it, and a lost host has many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint that can be restored.

    ``sources`` has, for each segment of the manifest, its copies in the order to try: intact ones
    before damaged ones, memory before file. ``plan_sources`` are the (host, tier) that hold its
    plan. If there are none, the plan has to be rebuilt from the segments.
    """

    manifest: Manifest
    plan_sources: tuple[tuple[str, str], ...]
    sources: tuple[tuple[SourceRef, ...], ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A checkpoint that is not restored, and why; ``step`` is None if its manifest is unreadable.

    ``final``: no host that answers later can change it.
    """

    save_id: str
    step: int | None
    reason: str
    final: bool = False


def naming(step: int | None, save_id: str) -> str:
    """A checkpoint, for a message."""
    return f"{'unknown step' if step is None else f'step {step}'} ({save_id})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of several timelines that did not know of each other, by its newest checkpoint."""

    attempt: AttemptId
    save_id: str
    step: int
    saves: int
    """Checkpoints that only this side has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """What a restart would do."""

    stream: str
    chosen: Candidate | None
    candidates: tuple[Candidate, ...]
    """The requested checkpoints that can be restored, newest first; ``chosen`` is the first."""
    refused: tuple[Refusal, ...]
    """The requested checkpoints that cannot: those with unreadable manifests, then newest first."""
    incomplete: tuple[str, ...]
    """Tiers and hosts that did not answer, and why. Copies that only they hold are not in the plan.
    """
    abandoned: tuple[Refusal, ...] = ()
    """Checkpoints off the timeline, newest first; they load only by their save ids."""
    warnings: tuple[str, ...] = ()
    """Damaged records."""
    newest: Manifest | None = None
    """The newest checkpoint on the timeline, whether it can be restored or not."""
    newer: tuple[Manifest, ...] = ()
    """Checkpoints on the timeline newer than the one that was requested by its step or id."""
    regained: tuple[Manifest, ...] = ()
    """Of ``newer`` the checkpoints that were saved after a roll-back to the requested one."""
    followed: tuple[Followed, ...] = ()
    """Parents of an attempt that continues here: the timeline's attempt, then concurrent ones."""
    sides: tuple[Side, ...] = ()
    """At a fork, the sides to choose from; then only a save id chooses a checkpoint."""

    @property
    def is_denied(self) -> bool:
        """Whether this user may not read a tier, which therefore most likely holds something."""
        return any("Permission denied" in each for each in self.incomplete)

    @property
    def passes_over(self) -> bool:
        """Whether a newer checkpoint, or any, might be restored if the missing hosts answered."""
        if self.chosen is None:
            return True
        step = self.chosen.manifest.step
        return any(
            not each.final and (each.step is None or each.step > step) for each in self.refused
        )

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
            "sides": [asdict(each) | {"attempt": each.attempt.id} for each in self.sides],
        }


def plan_recovery(
    holdings: Sequence[Holdings],
    *,
    stream: str = "default",
    step: int | None = None,
    save_id: str | None = None,
    exclude: frozenset[str] = frozenset(),
    unreachable: Mapping[str, str] | None = None,
    own: str = "",
) -> RecoveryPlan:
    """Choose the checkpoint to restore. Takes time linear in the size of ``holdings``.

    Args:
        holdings: What each host holds of one namespace; the host that will read comes first.
            Manifests may be digests alone if one host has the bytes.
        stream: The sequence of checkpoints.
        step: Only checkpoints of this step, on the timeline.
        save_id: Only this checkpoint, on the timeline or off it, marked as bad or not.
        exclude: Save ids that were tried and failed.
        unreachable: By host id, why hosts did not answer; then hosts that manifests and records
            name, but ``holdings`` does not, count as unreachable, too. None: plan for one host.
        own: The attempt of the run that asks, if it has saved; at a fork its side is chosen.

    Returns:
        The plan. Without any checkpoint ``chosen`` is None and ``refused`` is empty. There
        certainly is none if ``incomplete`` is empty, too.
    """
    facts = _Facts(holdings, stream, unreachable, exclude)
    timeline, sides = facts.choose_timeline(stream, step, save_id, own)
    on_it = history.on_line(timeline, facts.manifests) if timeline is not None else ()
    known = {manifest.save_id for manifest in on_it}
    off_it = [m for m in facts.manifests if m.stream == stream and m.save_id not in known]
    off_it.sort(key=history.age, reverse=True)
    abandoned = tuple(Refusal(m.save_id, m.step, _off_timeline_reason(timeline)) for m in off_it)
    damaged = facts.damaged
    wanted = list(on_it)
    refused: list[Refusal] = []
    if save_id is not None:
        wanted = [m for m in (*on_it, *off_it) if m.save_id == save_id]
        damaged = [refusal for refusal in damaged if refusal.save_id == save_id]
    if step is not None:
        wanted = [m for m in wanted if m.step == step]
        if save_id is None:
            refused = [refusal for refusal in abandoned if refusal.step == step]
    candidates = []
    found: list[Refusal] = []
    for manifest in wanted:
        judged = facts.judge(manifest, by_name=save_id is not None)
        if isinstance(judged, Refusal):
            found.append(judged)
        else:
            candidates.append(judged)
    asked = wanted[0] if wanted and (step is not None or save_id is not None) else None
    if asked is not None and candidates:
        asked = candidates[0].manifest
    newer = _newer(asked, on_it) if asked is not None else ()
    return RecoveryPlan(
        stream=stream,
        chosen=candidates[0] if candidates else None,
        candidates=tuple(candidates),
        refused=(*damaged, *found, *refused),
        incomplete=facts.incomplete,
        abandoned=abandoned,
        warnings=(
            *facts.warnings,
            *_restorable_off(facts, timeline, candidates if asked is None else (), off_it),
        ),
        newest=on_it[0] if on_it else None,
        newer=newer,
        regained=_regained(asked, newer, facts) if asked is not None else (),
        followed=facts.parents(timeline),
        sides=sides,
    )


def fork_error(plan: RecoveryPlan) -> NoRecoverableCheckpointError:
    """The error of a load whose ``plan`` has sides: it names them, and how a person chooses."""
    sides = [
        f"attempt {each.attempt.number} ({each.attempt.id}) ends in step {each.step}, save id "
        f"{each.save_id}; {each.saves} of its checkpoints are its own"
        for each in plan.sides
    ]
    return NoRecoverableCheckpointError(
        f"stream {plan.stream!r} was continued on {len(plan.sides)} sides that did not know of "
        "each other, as after a cut between hosts, and no record decides between them:\n  "
        + "\n  ".join(sides)
        + "\nNothing was loaded, and nothing is lost. Choose: engine.load(state, save_id=...), or "
        "`tieredckpt mark bad SAVE_ID` for the last checkpoint of each side that is to end",
        refused=[(each.save_id, each.step, "the other side of a fork") for each in plan.sides],
    )


def _restorable_off(
    facts: _Facts,
    timeline: history.Line | None,
    candidates: Sequence[Candidate],
    off_timeline: Sequence[Manifest],
) -> tuple[str, ...]:
    """Warnings of restorable checkpoints off the timeline that have a later step, or that no run
    on it knew of. Each warning names the last one.
    """
    if not candidates:
        return ()
    unknown = {each.save_id for saves in facts.lived_on(timeline).values() for each in saves}
    by_why: dict[str, list[Manifest]] = {}
    for each in off_timeline:
        if each.save_id in unknown:
            why = "no later run knew of them"
        elif each.step >= candidates[0].manifest.step:
            why = "another run resumed before them"
        else:
            continue
        if facts.restorable(each):
            by_why.setdefault(why, []).append(each)
    last = {why: max(found, key=lambda each: each.step) for why, found in by_why.items()}
    return tuple(
        f"{len(found)} checkpoint(s) up to step {last[why].step} can be restored and are not on "
        f"the timeline that training resumes: {why}. To have one, load it by its save id: "
        f"{last[why].save_id}"
        for why, found in by_why.items()
    )


def _newer(asked: Manifest, on_timeline: Sequence[Manifest]) -> tuple[Manifest, ...]:
    """The checkpoints on the timeline that are neither ``asked`` nor its ancestors."""
    before = history.Line(
        stream=asked.stream, head=None, attempt=None, lineage=history.ancestry_of(asked)
    ).positions(on_timeline)
    return tuple(each for each in on_timeline if each.save_id not in before)


def _regained(asked: Manifest, newer: Sequence[Manifest], facts: _Facts) -> tuple[Manifest, ...]:
    """Of ``newer`` those after an attempt that resumed at ``asked`` and abandoned what it knew."""
    agreed = [each for each in facts.attempts if asked.stream not in each.in_silence]
    stated = ((each.id, history.stated_base(each, asked.stream)) for each in agreed)
    back = {at for at, its in stated if its and its.abandons and its.parent == asked.save_id}
    return tuple(m for m in newer if back & {m.attempt.id, *(each.id for each in m.lineage)})


def _off_timeline_reason(timeline: history.Line | None) -> str:
    if timeline is None:
        return "no record decides which side of the fork continues"
    tip = timeline.head
    newest = f"attempt {tip.number}" if tip is not None else "the newest attempt"
    return f"off the timeline: {newest} did not continue it; it loads only by its save id"


class _Facts:
    """The holdings of all hosts, indexed: each fact is read once, for all checkpoints."""

    def __init__(
        self,
        holdings: Sequence[Holdings],
        stream: str,
        unreachable: Mapping[str, str] | None,
        exclude: frozenset[str],
    ) -> None:
        self._exclude = exclude
        self.places = tuple(places_of(holdings))
        self.manifests, self.damaged = self._read_manifests(holdings, stream)
        self.attempts, warnings = read_attempts(holdings)
        saved = history.saved_by(self.manifests).union(*(each.saved for each in holdings))
        self._attempts_with_saves = history.with_saves(self.attempts, saved)
        self._chain = history.Chain(self.manifests, self._attempts_with_saves)
        self.records, more = read_records(holdings)
        self.warnings = (*warnings, *more)
        self._marks = {mark.save_id: mark for mark in standing_marks(self.records)}
        self._unreachable = dict(unreachable or {})
        if unreachable is not None:
            known = {each.host_id for each in holdings} | self._unreachable.keys()
            for host in sorted(self._named() - known):
                self._unreachable[host] = NAMED_ONLY
        self._away = [
            f"{place.name}: {place.facts.error or 'does not answer'}"
            for place in self.places
            if not place.facts.available
        ]
        self.incomplete = (
            *self._away,
            *(_unreachable_reason(host, why) for host, why in self._unreachable.items()),
        )
        # Nearest first, like the places.
        self._segments: dict[str, list[tuple[Place, SegmentFact]]] = {}
        self._plans: dict[str, list[tuple[str, str]]] = {}
        for place in self.places:
            for fact in place.facts.segments if place.facts.available else ():
                self._segments.setdefault(fact.id, []).append((place, fact))
            for plan in place.facts.plans:
                self._plans.setdefault(plan, []).append((place.host, place.facts.tier))

    def _named(self) -> set[str]:
        """The hosts that may hold segments, but for those of skipped checkpoints: they were
        unreachable at that load, and later loads are not to wait for a lost host.
        """
        skipped = {
            manifest.save_id
            for stream in {each.stream for each in self.manifests}
            for manifest in history.left_behind(self.manifests, self._attempts_with_saves, stream)
        }
        return named_holders(
            [each for each in self.manifests if each.save_id not in skipped],
            [each for each in self.records if each.save_id not in skipped],
        )

    def choose_timeline(
        self, stream: str, step: int | None, save_id: str | None, own: str
    ) -> tuple[history.Line | None, tuple[Side, ...]]:
        """The timeline to restore from; at a fork None, and the sides.

        A person chooses a side by a save id that only it has, or by marking the newest checkpoint
        of each other side as bad.
        """
        sides = self._chain.sides(self.manifests, stream)
        if len(sides) == 1 and step is None:
            further = self._further(sides[0])
            if save_id is not None:
                named = [each for each, saves in further.items() if save_id in saves]
                return (*named, sides[0])[0], ()
            sides = (sides[0], *further)
        if len(sides) == 1:
            return sides[0], ()
        on = {side: history.on_line(side, self.manifests) for side in sides}
        left = [side for side in sides if save_id in {each.save_id for each in on[side]}]
        if save_id is None:
            left = [side for side in sides if side.head is not None and side.head.id == own]
        if len(left) != 1:
            left = [
                side for side in sides if not on[side] or on[side][0].save_id not in self._marks
            ]
        if len(left) == 1:
            return left[0], ()
        times = Counter(manifest.save_id for each in on.values() for manifest in each)
        return None, tuple(
            Side(
                attempt=side.head,
                save_id=on[side][0].save_id,
                step=on[side][0].step,
                saves=sum(times[manifest.save_id] == 1 for manifest in on[side]),
            )
            for side in sides
            if side.head is not None and on[side]
        )

    def lived_on(self, timeline: history.Line | None) -> dict[AttemptId, tuple[Manifest, ...]]:
        """See :meth:`history.Chain.lived_on`; without checkpoints that a person let go of."""
        found = self._chain.lived_on(timeline, self.manifests) if timeline is not None else {}
        gone = let_go(self.records)
        return {of: tuple(m for m in saves if m.save_id not in gone) for of, saves in found.items()}

    def _further(self, timeline: history.Line) -> dict[history.Line, set[str]]:
        """The timelines of attempts that saved without knowing of the attempt that continued them,
        and that can be restored to a later step; with the save ids that only they have.
        """
        on = history.on_line(timeline, self.manifests)
        reached = next((m.step for m in on if self.restorable(m)), -1)
        found = {}
        for attempt, saves in self.lived_on(timeline).items():
            if any(each.step > reached and self.restorable(each) for each in saves):
                side = self._chain.line(attempt, timeline.stream)
                found[side] = {each.save_id for each in saves}
        return found

    def restorable(self, manifest: Manifest) -> bool:
        return isinstance(self.judge(manifest, by_name=False), Candidate)

    def parents(self, timeline: history.Line | None) -> tuple[Followed, ...]:
        """See :attr:`RecoveryPlan.followed`; includes attempts that have saved nothing yet."""
        first = (timeline.head,) if timeline is not None and timeline.head is not None else ()
        chain = history.Chain(self.manifests, self.attempts)
        saved = history.saved_by(self.manifests)
        found = (*first, *chain.beside(each.id for each in first))
        return tuple(Followed(each.number, each.id, each.id in saved) for each in found)

    def _read_manifests(
        self, holdings: Sequence[Holdings], stream: str
    ) -> tuple[tuple[Manifest, ...], list[Refusal]]:
        namespaces = {each.namespace for each in holdings}
        decoded = decode_manifests(fact for place in self.places for fact in place.facts.manifests)
        good: dict[str, Manifest] = {}
        bad: dict[str, list[str]] = {}
        contradicted: dict[str, Manifest] = {}
        for place in self.places:
            for fact in place.facts.manifests:
                manifest = manifest_of(fact, namespaces, decoded)
                if isinstance(manifest, str):
                    if fact.stream == stream:
                        bad.setdefault(fact.save_id, []).append(f"{place.name}: {manifest}")
                    continue
                first = good.setdefault(fact.save_id, manifest)
                if first is not manifest and first != manifest:
                    contradicted[fact.save_id] = manifest
        refused = [
            Refusal(save_id, None, "its manifest is unreadable: " + _shortened(reasons))
            for save_id, reasons in sorted(bad.items())
            if save_id not in good
        ]
        for save_id, manifest in sorted(contradicted.items()):
            # Either may be the true one, and a wrong one would load other tensors.
            first = good.pop(save_id)
            if stream in (first.stream, manifest.stream):
                reason = "there are two different manifests with this save id"
                refused.append(Refusal(save_id, first.step, reason, final=True))
        return tuple(good.values()), refused

    def judge(self, manifest: Manifest, *, by_name: bool) -> Candidate | Refusal:
        """The checkpoint with its copies, or why it cannot be restored.

        ``by_name``: it was requested by its save id, so a mark does not refuse it.
        """
        reasons: list[str] = []
        mark = None if by_name else self._marks.get(manifest.save_id)
        if mark is not None:
            reasons.append(f"marked bad by {mark.host}: {mark.text or 'no reason given'}")
        lost: list[tuple[int, SegmentRef, str]] = []
        sources = []
        for ordinal, ref in enumerate(manifest.segments):
            copies, missing = self._copies(ref)
            sources.append(copies)
            if missing is not None:
                lost.append((ordinal, ref, missing))
        if lost:
            reasons += self._why_lost(manifest, lost)
        if manifest.save_id in self._exclude:
            reasons = ["it was tried, and failed"]
        if reasons:
            final = mark is not None or manifest.save_id in self._exclude
            return Refusal(manifest.save_id, manifest.step, "; ".join(reasons), final)
        return Candidate(
            manifest=manifest,
            plan_sources=tuple(self._plans.get(manifest.plan, ())),
            sources=tuple(sources),
        )

    def _copies(self, ref: SegmentRef) -> tuple[tuple[SourceRef, ...], str | None]:
        """The copies of a segment in the order to try, and the blocks that none of them has."""
        copies = [SegmentCopy(*each, ref) for each in self._segments.get(ref.id, ())]
        sources = [copy.source() for copy in copies if copy.is_complete]
        if sources and len(sources) == len(copies) and all(each.intact for each in sources):
            return tuple(sources), None  # nearly always, and a large job has 100,000 copies
        usable = [copy for copy in copies if copy.usable]
        sources = [copy.source() for copy in usable]
        missing = None if any(source.intact for source in sources) else missing_of(usable)
        # The sort is stable: they are nearest first.
        return tuple(sorted(sources, key=lambda s: (not s.intact, s.error is not None))), missing

    def _why_lost(
        self, manifest: Manifest, lost: Sequence[tuple[int, SegmentRef, str]]
    ) -> list[str]:
        reasons = []
        holders = holders_of(manifest, self.records)
        for ordinal, ref, missing in lost[:REASONS_MAX]:
            found = [
                SegmentCopy(place, fact, ref).problem()
                for place, fact in self._segments.get(ref.id, ())
            ]
            found += [
                f"not asked: {_unreachable_reason(host, self._unreachable[host])}"
                for host in sorted(holders[ref.host] & self._unreachable.keys())
            ]
            where = _shortened(found) or "there is no copy"
            reasons.append(f"segment {ordinal} ({ref.id}) has {missing}: {where}")
        if len(lost) > REASONS_MAX:
            reasons.append(f"and {len(lost) - REASONS_MAX} more segments")
        if self._away:
            reasons.append("not asked: " + _shortened(self._away))
        return reasons


def _unreachable_reason(host: str, why: str) -> str:
    # A client's error names its host already.
    return why if why.startswith(f"host {host} ") else f"host {host}: {why}"


def _shortened(reasons: Sequence[str]) -> str:
    more = f"; and {len(reasons) - REASONS_MAX} more" if len(reasons) > REASONS_MAX else ""
    return "; ".join(reasons[:REASONS_MAX]) + more


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


def plan_common(
    holdings: Sequence[Holdings],
    streams: Sequence[str],
    *,
    step: int | None = None,
    save_id: str | None = None,
    exclude: frozenset[str] = frozenset(),
    unreachable: Mapping[str, str] | None = None,
    up_to: float = math.inf,
    own: str = "",
) -> tuple[RecoveryPlan, ...]:
    """One plan per stream. All of them choose the same step, or none chooses anything.

    Of a step that a stream has saved more than once, the newest checkpoint counts. For a single
    stream this is :func:`plan_recovery`.

    Args:
        holdings: What each host holds of one namespace; the host that will read comes first.
        streams: At least one, each once.
        step: Only this step.
        save_id: Only this checkpoint; of a single stream.
        exclude: Save ids that were tried and failed.
        unreachable: Hosts that did not answer, and why; see :func:`plan_recovery`.
        up_to: Choose no later step.
        own: The asking run's attempt; see :func:`plan_recovery`.
    """
    plans = [
        plan_recovery(
            holdings,
            stream=stream,
            step=step,
            save_id=save_id,
            exclude=exclude,
            unreachable=unreachable,
            own=own,
        )
        for stream in streams
    ]
    common = newest_common(
        [[c.manifest.step for c in plan.candidates if c.manifest.step <= up_to] for plan in plans]
    )
    return tuple(
        replace(
            plan,
            chosen=next((c for c in plan.candidates if c.manifest.step == common), None),
        )
        for plan in plans
    )


def newest_common(timelines: Sequence[Sequence[int]]) -> int | None:
    """The newest step that occurs in all ``timelines``, each newest first; None if there is none.

    Their order decides, and not the numbers: after a run that began to count anew, higher steps
    are older. If the timelines order two steps differently, the step wins whose position is less
    far back in the timeline where it is farthest back.
    """
    places = [{step: -back for back, step in reversed(list(enumerate(each)))} for each in timelines]
    shared = set.intersection(*map(set, places))
    return max(
        shared, key=lambda step: (min(p[step] for p in places), sum(p[step] for p in places), step),
        default=None,
    )  # fmt: skip
