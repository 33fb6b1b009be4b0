"""Which checkpoints of one stream stay in one tier.

Decided in two steps. What is *wanted* follows from manifests and rules alone, so that all hosts
which hold the same parts decide the same: the rules ``last``, ``every`` and ``best`` are reasons to
stay, any of them suffices, and the limits ``max_age`` and ``max_bytes`` take from what the rules
keep, the least useful first. Then what must not go is taken out of the rest: the newest recoverable
one, and whatever is *protected* (pinned, source of another tier, being read). Protected ones take
no room, and no other one goes in their place.

Laws: tests/property/policy/test_retention.py. The page for users is docs/operate/retention.md.

Pins and marks are decisions of people: retention keeps a pinned checkpoint, a restart skips one
that is marked bad, each until the decision is revoked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tieredckpt.config.tiers import Keep
from tieredckpt.config.units import Every, approximate_size, format_duration
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import SaveRecord

PINNING = ("pin", "unpin")
MARKING = ("bad", "good")
SAID = (*PINNING, *MARKING)
"""Kinds of records of what a person said; they lie in every tier that holds the checkpoint, so they
outlive hosts."""
DESTINING = ("dropped", "spill")
"""Kinds of records that say where a checkpoint goes. They lie there, too: a tier below may be
filled from there after memory was lost."""
LASTING = (*SAID, *DESTINING)


def open_pins(records: Iterable[SaveRecord]) -> tuple[SaveRecord, ...]:
    """The pins of one checkpoint that no ``unpin`` has ended, in the order of their ids.

    Depends on the set of records only. An ``unpin`` ends the pins that it names, which are those
    that were known to who said it: of two people who pin at the same time on two hosts that cannot
    reach each other, one cannot end what the other one said.
    """
    about = {record.id: record for record in records if record.kind in PINNING}
    ended = {old for each in about.values() if each.kind == "unpin" for old in each.segments}
    left = [about[i] for i in sorted(about) if about[i].kind == "pin" and i not in ended]
    return tuple(left)


def pin_reason(records: Iterable[SaveRecord]) -> str | None:
    """Why a checkpoint is pinned; None: it is not."""
    pins = open_pins(records)
    if not pins:
        return None
    return "; ".join(dict.fromkeys(pin.text or "no reason given" for pin in pins))


def let_go(records: Iterable[SaveRecord]) -> frozenset[str]:
    """Save ids of the checkpoints on a branch of which somebody said that nobody needs them: an
    ``unpin`` that ends no pin. Whoever ended a pin did not say so, and a pin that is open holds.
    """
    about: dict[str, list[SaveRecord]] = {}
    for record in records:
        if record.kind in PINNING:
            about.setdefault(record.save_id, []).append(record)
    return frozenset(
        save_id
        for save_id, said in about.items()
        if any(each.kind == "unpin" and not each.segments for each in said) and not open_pins(said)
    )


def standing_marks(records: Iterable[SaveRecord]) -> tuple[SaveRecord, ...]:
    """The ``bad`` records that no ``good`` one has taken back, in the order of their ids.

    Depends on the set of records only, which hosts merge by union, so all of them come to the same
    marks in whatever order they hear of them. There is no clock that could say which of two records
    is newer; a ``good`` one takes back those that it names, which are those that were known to who
    said it. Whoever marks a checkpoint meanwhile, or again, is not overruled: the doubt stands.
    """
    about = {record.id: record for record in records if record.kind in MARKING}
    # Of its own checkpoint only: no record speaks of another one.
    taken_back = {
        (each.namespace, each.stream, each.save_id, mark)
        for each in about.values()
        if each.kind == "good"
        for mark in each.segments
    }
    return tuple(
        about[i]
        for i in sorted(about)
        if about[i].kind == "bad"
        and (about[i].namespace, about[i].stream, about[i].save_id, i) not in taken_back
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPlan:
    """What to do, for the agent to carry out and the command line to print."""

    keep: tuple[str, ...]
    """Save ids that stay, candidates before abandoned ones, newest first."""
    delete: tuple[str, ...]
    """Save ids to delete, in this order: whoever stops in between has deleted the least useful."""
    reasons: Mapping[str, str]
    """By save id, all reasons why it stays, or the one why it goes."""


NOTHING: Mapping[str, str] = {}
EVERYTHING = "everything is kept"
"""Why a checkpoint stays where nothing goes."""


def size_of(manifest: Manifest) -> int:
    """Bytes of all its segments, of all hosts."""
    return sum(ref.size for ref in manifest.segments)


def retain(
    candidates: Sequence[Manifest],
    abandoned: Sequence[Manifest],
    keep: Keep,
    protected: Mapping[str, str] = NOTHING,
    *,
    unrecoverable: AbstractSet[str] = frozenset(),
    now_s: float = math.inf,
) -> RetentionPlan:
    """Decide about the checkpoints of one stream that one tier holds.

    Abandoned ones stay only in the room that candidates leave in ``keep.last``: they are evicted
    first, but not before they have to, so that who rolled back by mistake can still load them by
    save id. The newest candidate always stays, and the newest that is recoverable; without a
    candidate, the newest abandoned one.

    Args:
        candidates: In this tier, newest first (:func:`~tieredckpt.policy.history.candidates`).
        abandoned: In this tier, newest first.
        keep: The rules.
        protected: By save id, why it must stay whatever the rules say (a sentence's end, as "it is
            being restored"); see :func:`protections`.
        unrecoverable: Save ids of which parts are known to be damaged or missing. They go like
            others, but are not counted on: the newest of the rest stays.
        now_s: Seconds since 1970. A checkpoint from the future counts as made now.
    """
    assert keep.last >= 1
    if keep.everything:
        keep = Keep(last=keep.last, everything=True)  # a limit would take from it
    reasons, refused = _settled(candidates, abandoned, keep, now_s)
    never = _never(candidates, abandoned, unrecoverable, reasons)
    for manifest in (*candidates, *abandoned):
        save_id = manifest.save_id
        why = [each[save_id] for each in (never, reasons, protected) if save_id in each]
        if why:
            reasons[save_id] = "; ".join(why)
    return RetentionPlan(
        keep=tuple(m.save_id for m in (*candidates, *abandoned) if m.save_id in reasons),
        delete=tuple(save_id for save_id in refused if save_id not in reasons),
        reasons=refused | reasons,
    )


def given_up(
    manifests: Iterable[Manifest],
    records: Iterable[SaveRecord],
    keep: Keep,
    newest: Manifest | None,
    now_s: float,
) -> frozenset[str]:
    """Save ids of what may go also if it is on a branch, which no other rule deletes.

    A person has unpinned it, or ``max_age`` takes it: it is so much older than ``newest``, of the
    time line (a time of the future counts as ``now_s``, seconds since 1970).
    """
    found = let_go(records)
    if newest is None or keep.max_age_s is None:
        return found
    newest_s = min(newest.created_at_s, now_s)
    return found | {m.save_id for m in manifests if newest_s - m.created_at_s > keep.max_age_s}


def protections(
    *,
    pinned: Mapping[str, str] = NOTHING,
    wanted_by: Mapping[str, Iterable[str]] | None = None,
    in_use: Mapping[str, str] = NOTHING,
) -> dict[str, str]:
    """By save id, why it must stay: the ``protected`` of :func:`retain`.

    Args:
        pinned: By save id, the pin's reason.
        wanted_by: By save id, tiers that are still to be filled from here.
        in_use: By save id, who reads it ("it is being restored").
    """
    found = {save_id: f"pinned: {why}" for save_id, why in pinned.items()}
    for save_id, tiers in (wanted_by or {}).items():
        if names := ", ".join(sorted(tiers)):
            found.setdefault(save_id, f"tier {names} is still to be filled from it")
    for save_id, why in in_use.items():
        found.setdefault(save_id, why)
    return found


def _never(
    candidates: Sequence[Manifest],
    abandoned: Sequence[Manifest],
    bad: AbstractSet[str],
    wanted: Mapping[str, str],
) -> dict[str, str]:
    """What no rule and no limit may take: the newest, and the newest that can be restored."""
    found = {m.save_id: "the newest" for m in (candidates or abandoned)[:1]}
    good = [m.save_id for m in (*candidates, *abandoned) if m.save_id not in bad][:1]
    return found | {
        save_id: "the newest that can be restored"
        for save_id in good
        if save_id not in found and save_id not in wanted
    }


def _settled(
    candidates: Sequence[Manifest], abandoned: Sequence[Manifest], keep: Keep, now_s: float
) -> tuple[dict[str, str], dict[str, str]]:
    """:func:`_wanted` until asking again changes nothing.

    What goes may have made a newer one look younger, if clocks were set back.
    """
    off = {m.save_id for m in abandoned}
    reasons, refused = _wanted(candidates, abandoned, keep, now_s)
    more = refused if keep.max_age_s is not None else {}
    while more:
        candidates = [m for m in candidates if m.save_id in reasons]
        abandoned = [m for m in abandoned if m.save_id in reasons]
        again, more = _wanted(candidates, abandoned, keep, now_s)
        reasons = {save_id: why for save_id, why in reasons.items() if save_id in again}
        refused |= more
    # Abandoned ones go first, also if that was found later.
    return reasons, {i: refused[i] for i in sorted(refused, key=lambda i: i not in off)}


def _wanted(
    candidates: Sequence[Manifest], abandoned: Sequence[Manifest], keep: Keep, now_s: float
) -> tuple[dict[str, str], dict[str, str]]:
    """By save id, why the rules keep it; and why the others go, the first to go first."""
    times = _running_max(m.created_at_s for m in candidates)
    time_of = {m.save_id: at_s for m, at_s in zip(candidates, times, strict=True)}
    reasons: dict[str, str] = {}
    # From the most useful reason to the least: the first one that fits decides the order.
    order: list[Manifest] = []
    for why, found in _rules(candidates, abandoned, keep, times):
        for manifest in found:
            if manifest.save_id in reasons:
                reasons[manifest.save_id] += f"; {why}"
                continue
            reasons[manifest.save_id] = why
            order.append(manifest)
    limited = _limits(order, keep, time_of, now_s)
    several = keep.every is not None or keep.best is not None
    unkept = "no rule keeps it" if several else f"older than the newest {keep.last}"
    refused = {m.save_id: "abandoned" for m in reversed(abandoned) if m.save_id not in reasons}
    refused |= {m.save_id: unkept for m in reversed(candidates) if m.save_id not in reasons}
    refused |= {m.save_id: limited[m.save_id] for m in reversed(order) if m.save_id in limited}
    return {i: why for i, why in reasons.items() if i not in limited}, refused


def _rules(
    candidates: Sequence[Manifest],
    abandoned: Sequence[Manifest],
    keep: Keep,
    times: Sequence[float],
) -> Iterable[tuple[str, Sequence[Manifest]]]:
    """What each rule keeps, the most useful first, with the reason."""
    if keep.everything:
        yield EVERYTHING, (*candidates, *abandoned)
        return
    yield f"one of the newest {keep.last}", candidates[: keep.last]
    if (best := keep.best) is not None:
        found = [(v, m) for m in candidates if (v := metric_of(m, best.metric)) is not None]
        # Sorting is stable and candidates are newest first: of equals the newer ones are better.
        found.sort(key=lambda pair: pair[0] if best.mode == "min" else -pair[0])
        which = {"min": "least", "max": "greatest"}[best.mode]
        yield f"one of the {best.n} with the {which} {best.metric}", [m for _, m in found[: best.n]]
    if keep.every is not None:
        yield f"the first in its {keep.every}", _first_of_each(candidates, keep.every, times)
    room = max(0, keep.last - len(candidates))
    yield f"abandoned, within the newest {keep.last}", abandoned[:room]


def _first_of_each(
    candidates: Sequence[Manifest], every: Every, times: Sequence[float]
) -> list[Manifest]:
    """The oldest candidate in each period, newest first.

    Of steps: the first one that has reached a multiple. A checkpoint whose step or time is below
    an older one's belongs to that one's period, so going back begins no period again; and whether
    one is the first does not depend on checkpoints that are not.
    """
    if every.steps is not None:
        periods = [int(step) // every.steps for step in _running_max(m.step for m in candidates)]
    else:
        assert every.seconds is not None
        periods = [math.floor(at_s / every.seconds) for at_s in times]
    found = [
        manifest
        for manifest, period, before in itertools.zip_longest(candidates, periods, periods[1:])
        if period != before
    ]
    if every.steps is not None and found and periods[-1] == 0 and found[-1].step != 0:
        found.pop()  # nothing but step 0 is a multiple there
    return found


def _limits(
    order: Sequence[Manifest], keep: Keep, time_of: Mapping[str, float], now_s: float
) -> dict[str, str]:
    """Of what the rules keep (the most useful first), what the limits take, and why."""
    found: dict[str, str] = {}
    if keep.max_age_s is not None:
        # The newest's time counts only up to now_s, and now_s only up to the newest's time: to
        # make all look old, the clock of a trainer and the one of who asks must both be wrong.
        newest_s = min(max(time_of.values(), default=math.inf), now_s)
        why = f"over {format_duration(keep.max_age_s)} older than the newest"
        for manifest in order:
            at_s = time_of.get(manifest.save_id, manifest.created_at_s)
            if newest_s - at_s > keep.max_age_s and newest_s < math.inf:
                found[manifest.save_id] = why
    if keep.max_bytes is not None:
        total = 0
        for manifest in (m for m in order if m.save_id not in found):
            total += size_of(manifest)
            if total > keep.max_bytes:
                found[manifest.save_id] = f"beyond {approximate_size(keep.max_bytes)}"
    return found


def metric_of(manifest: Manifest, metric: str) -> float | None:
    """The number that a save was tagged with; None if there is none, or no finite one."""
    try:
        value = float(manifest.tags[metric])
    except (KeyError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _running_max(newest_first: Iterable[float]) -> list[float]:
    """Each value or the greatest of an older one, whichever is greater; newest first again."""
    return list(itertools.accumulate(reversed(list(newest_first)), max))[::-1]
