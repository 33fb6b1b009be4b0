"""Which checkpoint a restart restores, and from which copies: facts in, a frozen plan out.

Pure: the trainer, the command line and the tests get the same answer from the same holdings.
The chosen checkpoint is the newest one on the time line whose every segment can be had. A segment
can be had if some copy vouches for it (its own footer ends in the root digest that the manifest
names) and every block is claimed good by some copy. What a copy claims may turn out wrong when it
is read: then :mod:`tieredckpt.recovery.fetch` goes on to the next copy, and who restores plans
anew without this checkpoint. Several streams of one job are restored together: the newest step
that all of them have.
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
    intact_source,
    is_intact,
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
"""Segments that a refusal names: it is read by people, and a lost host has many."""


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
    """A checkpoint that is not restored, and why; ``step`` is None if nobody can read it.

    ``final``: whoever else answers later, it stays so.
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
    """One of several lines that did not know of each other, by its newest checkpoint."""

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
    """All that was asked for and can be restored, newest first; ``chosen`` is the first."""
    refused: tuple[Refusal, ...]
    """What was asked for and cannot be restored: unreadable manifests, then newest first."""
    incomplete: tuple[str, ...]
    """Tiers and hosts that could not answer, and why: what only they hold is not in this plan."""
    abandoned: tuple[Refusal, ...] = ()
    """Checkpoints off the time line, newest first; such a one loads only by its save id."""
    warnings: tuple[str, ...] = ()
    """Damaged records."""
    newest: Manifest | None = None
    """The newest checkpoint on the time line, whether it can be restored or not."""
    newer: tuple[Manifest, ...] = ()
    """What is newer on the line than the one that was asked for by its step or id."""
    followed: tuple[Followed, ...] = ()
    """What an attempt follows that goes on from here: the line's head, then what is beside it."""
    sides: tuple[Side, ...] = ()
    """At a fork, what there is to choose from; nothing is chosen then but by a save id."""

    @property
    def passes_over(self) -> bool:
        """Whether a newer checkpoint, or any, might be restored if whoever is away answered."""
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
        stream: Which sequence of checkpoints.
        step: Only checkpoints of this step, on the time line.
        save_id: Only this checkpoint, on the time line or not, marked as bad or not.
        exclude: Save ids that were tried and failed.
        unreachable: By host id, hosts that were asked and did not answer, and why: then all holders
            that are named are expected to have been asked. None: this is about one host.
        own: The attempt of the run that asks, if it has saved: at a fork its side is meant.

    Returns:
        The plan. Without any checkpoint ``chosen`` is None and ``refused`` is empty; if moreover
        ``incomplete`` is empty, there certainly is none.
    """
    facts = _Facts(holdings, stream, unreachable, exclude)
    line, sides = facts.choose_line(stream, step, save_id, own)
    on_line = history.on_line(line, facts.manifests) if line is not None else ()
    known = {manifest.save_id for manifest in on_line}
    off_line = [m for m in facts.manifests if m.stream == stream and m.save_id not in known]
    off_line.sort(key=history.age, reverse=True)
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
        judged = facts.judge(manifest, by_name=save_id is not None)
        if isinstance(judged, Refusal):
            found.append(judged)
        else:
            candidates.append(judged)
    asked = wanted[0] if wanted and (step is not None or save_id is not None) else None
    if asked is not None and candidates:
        asked = candidates[0].manifest
    return RecoveryPlan(
        stream=stream,
        chosen=candidates[0] if candidates else None,
        candidates=tuple(candidates),
        refused=(*damaged, *found, *refused),
        incomplete=facts.incomplete,
        abandoned=abandoned,
        warnings=(
            *facts.warnings,
            *_beyond(facts, line, candidates if asked is None else (), off_line),
        ),
        newest=on_line[0] if on_line else None,
        newer=_newer(asked, on_line) if asked is not None else (),
        followed=facts.followed(line),
        sides=sides,
    )


def fork_error(plan: RecoveryPlan) -> NoRecoverableCheckpointError:
    """What a load raises where ``plan`` has sides: it names them, and how a person chooses."""
    lines = [
        f"attempt {each.attempt.number} ({each.attempt.id}) ends in step {each.step}, save id "
        f"{each.save_id}; {each.saves} of its checkpoints are its own"
        for each in plan.sides
    ]
    return NoRecoverableCheckpointError(
        f"stream {plan.stream!r} was gone on with on {len(plan.sides)} sides that did not know of "
        "each other, as after a cut between hosts, and nothing tells which one goes on:\n  "
        + "\n  ".join(lines)
        + "\nNothing was loaded, and nothing is lost. Choose: engine.load(state, save_id=...), or "
        "`tieredckpt mark bad SAVE_ID` for the last checkpoint of each side that is not to go on",
        refused=[(each.save_id, each.step, "the other side of a fork") for each in plan.sides],
    )


def _beyond(
    facts: _Facts,
    line: history.Line | None,
    candidates: Sequence[Candidate],
    off_line: Sequence[Manifest],
) -> tuple[str, ...]:
    """What could be restored, but lies off the line: if it has a later step, or none of those that
    went on knew of it, that is never silent; the last one of either kind is named.
    """
    if not candidates:
        return ()
    unknown = {each.save_id for saves in facts.lived_on(line).values() for each in saves}
    by_why: dict[str, list[Manifest]] = {}
    for each in off_line:
        if each.save_id in unknown:
            why = "no run that went on knew of them"
        elif each.step >= candidates[0].manifest.step:
            why = "another run went back behind them"
        else:
            continue
        if facts.restorable(each):
            by_why.setdefault(why, []).append(each)
    last = {why: max(found, key=lambda each: each.step) for why, found in by_why.items()}
    return tuple(
        f"{len(found)} checkpoint(s) up to step {last[why].step} can be restored and are not on "
        f"the line that training goes on from: {why}. To have one, load it by its save id: "
        f"{last[why].save_id}"
        for why, found in by_why.items()
    )


def _newer(asked: Manifest, on_line: Sequence[Manifest]) -> tuple[Manifest, ...]:
    """All of the line that what was asked for does not go on from."""
    before = history.Line(
        stream=asked.stream, head=None, attempt=None, lineage=history.ancestry_of(asked)
    ).positions(on_line)
    return tuple(each for each in on_line if each.save_id not in before)


def _off_line_reason(line: history.Line | None) -> str:
    if line is None:
        return "nothing tells which side of the fork goes on"
    newest = f"attempt {line.head.number}" if line.head is not None else "the newest attempt"
    return f"off the line: {newest} did not go on from it; it loads only by its save id"


class _Facts:
    """The holdings of all hosts, indexed. Everything here is looked at once, whatever is asked."""

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
        self._saved = history.saved_by(self.manifests).union(*(each.saved for each in holdings))
        counted = history.with_saves(self.attempts, self._saved)
        self._chain = history.Chain(self.manifests, counted)
        self.records, more = read_records(holdings)
        self.warnings = (*warnings, *more)
        self._marks = {mark.save_id: mark for mark in standing_marks(self.records)}
        self._unreachable = dict(unreachable or {})
        if unreachable is not None:
            known = {each.host_id for each in holdings} | self._unreachable.keys()
            for host in sorted(self._named() - known):
                self._unreachable[host] = NAMED_ONLY
        away = [place for place in self.places if not place.facts.available]
        self.incomplete = (
            *(f"{place.name}: {place.facts.error or 'does not answer'}" for place in away),
            *(_silence(host, why) for host, why in self._unreachable.items()),
        )
        # Nearest first, as the places are.
        self._segments: dict[str, list[tuple[Place, SegmentFact]]] = {}
        self._plans: dict[str, list[tuple[str, str]]] = {}
        for place in self.places:
            for fact in place.facts.segments if place.facts.available else ():
                self._segments.setdefault(fact.id, []).append((place, fact))
            for plan in place.facts.plans:
                self._plans.setdefault(plan, []).append((place.host, place.facts.tier))

    def _named(self) -> set[str]:
        """The hosts that may hold something. Those of what was left behind were silent then, and
        what a lost one held is not waited for by every load after that.
        """
        attempts = history.with_saves(self.attempts, self._saved)
        behind = {
            manifest.save_id
            for stream in {each.stream for each in self.manifests}
            for manifest in history.left_behind(self.manifests, attempts, stream)
        }
        return named_holders(
            [each for each in self.manifests if each.save_id not in behind],
            [each for each in self.records if each.save_id not in behind],
        )

    def choose_line(
        self, stream: str, step: int | None, save_id: str | None, own: str
    ) -> tuple[history.Line | None, tuple[Side, ...]]:
        """The line to restore from; at a fork None, and the sides.

        A person chooses a side by a save id that only it has, or by marking the newest checkpoint
        of each other one as bad.
        """
        lines = self._chain.sides(self.manifests, stream)
        if len(lines) == 1 and step is None:
            further = self._further(lines[0])
            if save_id is not None:
                named = [each for each, saves in further.items() if save_id in saves]
                return (*named, lines[0])[0], ()
            lines = (lines[0], *further)
        if len(lines) == 1:
            return lines[0], ()
        on = {line: history.on_line(line, self.manifests) for line in lines}
        left = [line for line in lines if save_id in {each.save_id for each in on[line]}]
        if save_id is None:
            left = [line for line in lines if line.head is not None and line.head.id == own]
        if len(left) != 1:
            left = [
                line for line in lines if not on[line] or on[line][0].save_id not in self._marks
            ]
        if len(left) == 1:
            return left[0], ()
        times = Counter(manifest.save_id for each in on.values() for manifest in each)
        return None, tuple(
            Side(
                attempt=line.head,
                save_id=on[line][0].save_id,
                step=on[line][0].step,
                saves=sum(times[manifest.save_id] == 1 for manifest in on[line]),
            )
            for line in lines
            if line.head is not None and on[line]
        )

    def lived_on(self, line: history.Line | None) -> dict[AttemptId, tuple[Manifest, ...]]:
        """See :meth:`history.Chain.lived_on`; without what a person let go of."""
        found = self._chain.lived_on(line, self.manifests) if line is not None else {}
        gone = let_go(self.records)
        return {of: tuple(m for m in saves if m.save_id not in gone) for of, saves in found.items()}

    def _further(self, line: history.Line) -> dict[history.Line, set[str]]:
        """The lines of attempts that saved without knowing that they were followed, and got further
        than the line can be restored; with the save ids that only they have.
        """
        on = history.on_line(line, self.manifests)
        reached = next((m.step for m in on if self.restorable(m)), -1)
        found = {}
        for attempt, saves in self.lived_on(line).items():
            if any(each.step > reached and self.restorable(each) for each in saves):
                side = self._chain.line(attempt, line.stream)
                found[side] = {each.save_id for each in saves}
        return found

    def restorable(self, manifest: Manifest) -> bool:
        return isinstance(self.judge(manifest, by_name=False), Candidate)

    def followed(self, line: history.Line | None) -> tuple[Followed, ...]:
        """See :attr:`RecoveryPlan.followed`; with what was opened and has saved nothing yet."""
        first = (line.head,) if line is not None and line.head is not None else ()
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
            # Nothing tells which one is true, and a wrong one would load other tensors.
            first = good.pop(save_id)
            if stream in (first.stream, manifest.stream):
                reason = "there are two different manifests with this save id"
                refused.append(Refusal(save_id, first.step, reason, final=True))
        return tuple(good.values()), refused

    def judge(self, manifest: Manifest, *, by_name: bool) -> Candidate | Refusal:
        """The checkpoint with its copies, or why it cannot be restored.

        ``by_name``: it was asked for by its save id, so that a mark does not stand against it.
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
        """The copies of a segment in the order to try, and what none of them has."""
        found = self._segments.get(ref.id, ())
        intact = tuple(intact_source(place, fact) for place, fact in found if is_intact(fact, ref))
        if len(intact) == len(found) and found:  # nearly always, and a large job has 100,000
            return intact, None
        copies = [SegmentCopy(place, fact, ref) for place, fact in found]
        usable = sorted(
            (copy for copy in copies if copy.usable),
            key=lambda copy: (not copy.intact, not copy.vouches, copy.place.cost),
        )
        missing = None if usable and usable[0].intact else missing_of(usable)
        return tuple(copy.source() for copy in usable), missing

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
                f"not asked: {_silence(host, self._unreachable[host])}"
                for host in sorted(holders[ref.host] & self._unreachable.keys())
            ]
            where = _shortened(found) or "there is no copy"
            reasons.append(f"segment {ordinal} ({ref.id}) has {missing}: {where}")
        if len(lost) > REASONS_MAX:
            reasons.append(f"and {len(lost) - REASONS_MAX} more segments")
        away = [place for place in self.places if not place.facts.available]
        if away:
            text = (f"{each.name}: {each.facts.error or 'does not answer'}" for each in away)
            reasons.append("not asked: " + _shortened(list(text)))
        return reasons


def _silence(host: str, why: str) -> str:
    # What a line to a host says of it begins with the host already.
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
    """One plan per stream; what they choose is of one step, or none of them chooses anything.

    Of a step that a stream has saved more than once, the newest checkpoint counts. For a single
    stream this is :func:`tieredckpt.recovery.plan.plan_recovery`.

    Args:
        holdings: What each host holds of one namespace; the host that will read comes first.
        streams: At least one, each once.
        step: Only this step.
        save_id: Only this checkpoint; of a single stream.
        exclude: Save ids that were tried and failed.
        unreachable: Hosts that did not answer, and why; see :func:`plan_recovery`.
        up_to: Choose no later step.
        own: The asking run's attempt, as in :func:`~tieredckpt.recovery.plan.plan_recovery`.
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
    lines = [[c.manifest.step for c in plan.candidates] for plan in plans]
    common = newest_common([[each for each in line if each <= up_to] for line in lines])
    return tuple(
        replace(
            plan,
            chosen=next((c for c in plan.candidates if c.manifest.step == common), None),
        )
        for plan in plans
    )


def newest_common(lines: Sequence[Sequence[int]]) -> int | None:
    """The newest step that occurs in all ``lines``, each newest first; None if there is none.

    "Newest" is the order of the lines, as everywhere: a run that began to count anew has higher
    steps that are older. Where the lines disagree about two steps, the one counts that is not so
    far back in the line where it is farthest back.
    """
    places = [{step: -back for back, step in reversed(list(enumerate(line)))} for line in lines]
    shared = set.intersection(*map(set, places))
    return max(
        shared, key=lambda step: (min(p[step] for p in places), sum(p[step] for p in places), step),
        default=None,
    )  # fmt: skip
