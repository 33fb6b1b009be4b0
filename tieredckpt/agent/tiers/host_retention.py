"""What a tier below memory keeps of one stream: carried out by its spill thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from tieredckpt.agent.tiers.interface import Needs, SpillHost
from tieredckpt.format.manifest import Manifest
from tieredckpt.policy.completeness import UNKNOWN, Whole, spared
from tieredckpt.policy.history import abandoned as abandoned_of
from tieredckpt.policy.history import candidates as candidates_of
from tieredckpt.policy.history import left_behind
from tieredckpt.policy.retention import RetentionPlan, given_up, pin_reason, protections, retain
from tieredckpt.rpc.messages.agent import TierSpec
from tieredckpt.storage.base import Scope
from tieredckpt.storage.catalog import Catalog

PAUSE_S = 1.0
PAUSE_S_MAX = 8.0
"""Between two questions what other hosts have meanwhile; the first and the longest one."""
NEWEST_HERE = "it is kept until the newest is complete: a tier needs space for two"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What is known of one stream in one tier."""

    candidates: tuple[Manifest, ...]
    abandoned: tuple[Manifest, ...]
    left_behind: tuple[Manifest, ...]
    pinned: Mapping[str, str]
    needs: Needs

    @property
    def line(self) -> tuple[Manifest, ...]:
        """What is there, undamaged, in the order in which a restart would want it."""
        found = (*self.candidates, *self.abandoned)
        return tuple(each for each in found if each.save_id not in self.needs.bad)


def _facts(catalog: Catalog, spec: TierSpec, stream: str, host: SpillHost, now_s: float) -> _Facts:
    manifests = catalog.manifests()
    mine = [each for each in manifests if each.stream == stream]
    said = {
        m.save_id: (*catalog.records(m.save_id), *host.keeping.records_of(m.save_id)) for m in mine
    }
    attempts = {(each.number, each.id): each for each in catalog.attempts()}
    if catalog.tier.scope is Scope.HOST:
        # Also those that no checkpoint here is of yet: hosts must agree on what was abandoned.
        attempts |= {(each.number, each.id): each for each in host.known_attempts()}
    line = candidates_of(manifests, attempts.values(), stream)
    records = (record for each in said.values() for record in each)
    gone = given_up(mine, records, spec.keep, next(iter(line), None), now_s)
    return _Facts(
        candidates=line,
        abandoned=abandoned_of(manifests, attempts.values(), stream, gone),
        left_behind=left_behind(manifests, attempts.values(), stream),
        pinned={i: why for i, about in said.items() if (why := pin_reason(about)) is not None},
        needs=host.keeping.needs_of(spec.name, mine),
    )


def _plan(
    facts: _Facts,
    spec: TierSpec,
    now_s: float,
    more: Mapping[str, str],
    *,
    coming: Manifest | None = None,
    feeds: bool = True,
) -> RetentionPlan:
    """What stays; ``more``: what stays besides. ``feeds``: other tiers are filled from here."""
    held = protections(
        pinned=facts.pinned,
        wanted_by=facts.needs.wanted_by if feeds else {},
        in_use=facts.needs.in_use,
    )
    first = (coming,) if coming is not None else ()
    return retain(
        (*first, *facts.candidates),
        facts.abandoned,
        spec.keep,
        {**more, **held},
        unrecoverable=facts.needs.bad,
        now_s=now_s,
    )


def to_delete(
    catalog: Catalog, spec: TierSpec, stream: str, host: SpillHost, now_s: float
) -> list[Manifest]:
    """The checkpoints of ``stream`` that a tier which hosts share need not keep, the least useful
    first.

    Args:
        catalog: Of the tier.
        spec: Of the tier.
        stream: The sequence of checkpoints.
        host: Knows who reads, what other tiers lack, and which copies are bad.
        now_s: Seconds since 1970.
    """
    plan = _plan(_facts(catalog, spec, stream, host, now_s), spec, now_s, {})
    return _manifests(catalog, plan.delete)


def _manifests(catalog: Catalog, save_ids: Sequence[str]) -> list[Manifest]:
    by_id = {manifest.save_id: manifest for manifest in catalog.manifests()}
    return [by_id[save_id] for save_id in save_ids if save_id in by_id]


def lacking(
    catalog: Catalog, spec: TierSpec, wanted: Sequence[Manifest], host: SpillHost
) -> list[Manifest]:
    """Of what is destined for the tier and is not there, what its retention would keep.

    The others were there and have been deleted, or are too old to be brought there now.
    """
    found = []
    # An unreadable one is no copy: it is written again.
    held = {each.save_id for each in catalog.manifests()}
    wanted = [each for each in wanted if each.save_id not in held]
    known = {(each.number, each.id): each for each in (*host.known_attempts(), *catalog.attempts())}
    attempts, everything = tuple(known.values()), (*catalog.manifests(), *wanted)
    for stream in sorted({each.stream for each in wanted}):
        line = candidates_of(everything, attempts, stream)
        off = abandoned_of(everything, attempts, stream)
        plan = retain(line, off, spec.keep, now_s=time.time())
        found += [m for m in wanted if m.stream == stream and m.save_id in plan.keep]
    return found


def _given_up(facts: _Facts, spec: TierSpec, host: SpillHost, stay: Collection[str]) -> list[str]:
    """What this host had copied when it was given up for all: other hosts' parts never come.

    What is to ``stay`` does, whatever was said of it.
    """
    return [
        each.save_id
        for each in (*facts.candidates, *facts.abandoned)
        if each.save_id not in stay
        and not host.is_destined(each, spec.name)
        and each.save_id not in facts.pinned
        and each.save_id not in facts.needs.in_use
        and not facts.needs.wanted_by.get(each.save_id)
        and spec.name in each.tiers
    ]


class HostRetention:
    """Of a tier that this host has for itself; for the tier's thread.

    Args:
        spec: Of the tier.
        host: Knows what speaks against deleting.
        clock: Monotonic seconds.
    """

    def __init__(
        self, spec: TierSpec, host: SpillHost, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spec = spec
        self._host = host
        self._clock = clock
        self._crowded: set[str] = set()
        self._again_s = 0.0
        self._pause_s = PAUSE_S
        self.why_full = ""
        """What the last :meth:`make_room` that failed would add to an error."""

    def note(self, stream: str) -> None:
        """``stream`` got a checkpoint, and may hold more than it should."""
        self._crowded.add(stream)
        self._again_s, self._pause_s = 0.0, PAUSE_S

    def rest_s(self) -> float | None:
        """How long :meth:`apply` may rest; None: there is nothing to delete.

        It failed, or other hosts or tiers may still need what is to go.
        """
        return max(0.0, self._again_s - self._clock()) if self._crowded else None

    def apply(self, catalog: Catalog) -> bool:
        """Delete what need not stay in streams that got a checkpoint since this last succeeded, and
        no other host may need. Whether something went.

        Raises:
            TierUnavailableError: Some are deleted, some are not.
        """
        self._again_s = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        if not (self._host.ruling.prunes(self._spec) and self._host.ruling.tidies()):
            return False
        # What an earlier attempt has left of checkpoints whose manifest is gone.
        swept = catalog.finish_removals()
        self._host.forget(self._spec.name, swept.segments)
        gone = bool(swept.segments or swept.plans)
        for stream in sorted(self._crowded):
            now_s = time.time()
            facts = _facts(catalog, self._spec, stream, self._host, now_s)
            others = spared(facts.line, self._whole(facts))
            plan = _plan(facts, self._spec, now_s, others)
            newest = max(facts.line, key=lambda m: (m.attempt.number, m.seq), default=None)
            stay = {*others, newest.save_id} if newest is not None else others
            given_up = _given_up(facts, self._spec, self._host, stay)
            gone |= self._delete(catalog, tuple(dict.fromkeys((*given_up, *plan.delete))))
            # It goes when other hosts, or the tiers below, have caught up: it is asked again.
            if set(_plan(facts, self._spec, now_s, {}, feeds=False).delete) <= set(plan.delete):
                self._crowded.discard(stream)
        return gone

    def make_room(self, catalog: Catalog, job: Manifest) -> bool:
        """``job`` has no room: delete what would go anyway once it is there, or give up what
        another tier is still to be given. Whether something went.

        The newest one here stays, also if it would go then: so a tier needs room for two.

        Raises TierUnavailableError.
        """
        self.note(job.stream)
        if self.apply(catalog):
            return True
        if not self._host.ruling.prunes(self._spec):
            return False
        now_s = time.time()
        facts = _facts(catalog, self._spec, job.stream, self._host, now_s)
        if any(each.save_id == job.save_id for each in facts.line):
            return False
        whole = self._whole(facts)
        # Where none is known to be whole, the newest here that may become so.
        first = [m.save_id for m in facts.line if m.save_id not in whole.never][:1]
        best = [whole.newest] if whole.newest is not None else first
        stay = spared(facts.line, whole, full=True) | dict.fromkeys(best, NEWEST_HERE)
        plan = _plan(facts, self._spec, now_s, stay, coming=job)
        given_up = _given_up(facts, self._spec, self._host, stay)
        if self._delete(catalog, tuple(dict.fromkeys((*given_up, *plan.delete)))):
            log.info(
                "tier %s is full: checkpoints that step %d replaces are deleted before its copy",
                self._spec.name, job.step,
            )  # fmt: skip
            return True
        for passed_over in reversed(facts.left_behind):
            copied = passed_over.save_id in facts.needs.copied
            if not copied and self._delete(catalog, (passed_over.save_id,)):
                log.warning(
                    "tier %s is full: step %d (%s), skipped while hosts or tiers did not answer, "
                    "is deleted", self._spec.name, passed_over.step, passed_over.save_id,
                )  # fmt: skip
                return True
        self.why_full = why_full(plan, job)
        beyond = _plan(facts, self._spec, now_s, stay, coming=job, feeds=False).delete
        if not beyond or not self._host.make_room_in(self._spec.name, beyond):
            return False
        facts = _facts(catalog, self._spec, job.stream, self._host, now_s)
        return self._delete(catalog, _plan(facts, self._spec, now_s, stay, coming=job).delete)

    def _whole(self, facts: _Facts) -> Whole:
        return self._host.whole_in(self._spec.name, facts.line) if facts.line else UNKNOWN

    def _delete(self, catalog: Catalog, save_ids: Sequence[str]) -> bool:
        gone, keeping = False, self._host.keeping
        for manifest in _manifests(catalog, save_ids):
            said = (*catalog.records(manifest.save_id), *keeping.records_of(manifest.save_id))
            in_use = keeping.needs_of(self._spec.name, [manifest]).in_use
            # Nobody has begun to read it, or pinned it, since it was decided that it goes.
            if pin_reason(said) is None and not in_use:
                swept = catalog.remove(manifest)
                self._host.forget(self._spec.name, swept.segments)
                gone = True
        return gone


def why_full(plan: RetentionPlan, job: Manifest) -> str:
    """Why ``plan`` keeps what it keeps beside ``job``, to be added to an error; "": nothing."""
    kept = [save_id for save_id in plan.keep if save_id != job.save_id]
    reasons = "; ".join(plan.reasons[save_id] for save_id in kept).split("; ")
    why = "; ".join(dict.fromkeys(reasons))
    return f" (of its stream it keeps {len(kept)}: {why})" if kept else ""
