"""A tier that several hosts share: whose turn it is, and what may be swept. Facts in, decision out.

All ages are differences of the store's own timestamps. docs/design/004-durable-tiers.md says why
each of the rules is needed; tests/simulation/test_shared_tier.py breaks them one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import Manifest

TURNS_MAX = 30
"""Whoever comes later in the order than this looks as if it came here."""
LOOK_S_MAX = 60.0
PLAN_COPIES = 2
"""Of a plan that is in use, the newest so many copies stay."""

Save = tuple[str, str]
"""Stream and save id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTimes:
    """How long things take in a shared tier, in seconds."""

    turn_s: float = 2.0
    """Between the looks of two hosts at whether a checkpoint is complete."""
    takeover_after_s: float = 60.0
    """How long others' segments are waited for before copies of them are uploaded."""
    delete_delay_s: float = 600.0
    """Between a tombstone and the deletion of what its manifest names."""
    sweep_after_s: float = 86400.0
    """A checkpoint that was begun so long ago and not committed is given up."""
    tombstone_keep_s: float = 7 * 86400.0
    """Longer than any upload may take."""
    listing_limit_s: float = 60.0
    """A pruner acts on what it has listed for so long."""
    unnamed_for_s: float = 60.0
    """What nothing names goes only when it was unnamed so long before, too: one list may err."""
    prune_every_s: float = 600.0
    """At least; also when there is a checkpoint more, and when a tombstone is old enough."""
    sweep_every_s: float = 3600.0

    @property
    def fresh_s(self) -> float:
        """A plan that is older is written again before a manifest refers to it; and what an
        uploader has seen longer ago, it looks at again.
        """
        return self.sweep_after_s / 2


def position(save_id: str, host: str, hosts: Iterable[str]) -> int:
    """The place of ``host`` in the order in which hosts look at a checkpoint, from 0.

    Spread by the save id, so that not always the same one does all of the looking.
    """
    mine = _rank(save_id, host)
    return sum(_rank(save_id, each) < mine for each in set(hosts) - {host})


def _rank(save_id: str, host: str) -> tuple[bytes, str]:
    return digest(f"{save_id} {host}".encode()), host


def look_after_s(place: int, looks: int, turn_s: float) -> float:
    """How long the host at ``place`` waits for its next look, after ``looks`` of them."""
    if looks == 0:
        return min(place, TURNS_MAX) * turn_s
    return min((place + 1) * turn_s, LOOK_S_MAX)


def takeover_s(place: int, times: SharedTimes) -> float:
    """After how long the host at ``place`` uploads what others have not: in turn, too, since
    several may hold copies of the same.
    """
    return times.takeover_after_s + min(place, TURNS_MAX) * times.turn_s


# --- sweeping -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Aged:
    """One listed object."""

    age_s: float
    size: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """A pending manifest, or a tombstone."""

    age_s: float
    manifest: Manifest | None
    """None: it cannot be read, or the tombstone has none, or its segments are given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierListing:
    """What a pruner has listed. The order counts: what names a segment is older than the segment,
    and goes only after its manifest or its tombstone exists. So whatever was named when its listing
    began is named in the listings that began later.
    """

    segments: Mapping[str, Aged]
    """By id; listed first."""
    plans: Mapping[str, tuple[str, Aged]]
    """By key: the plan's id, and the copy; listed with the segments."""
    records: Mapping[str, tuple[str, Aged]]
    """By key: the save id it is about; listed with the segments."""
    pending: Mapping[Save, Found]
    """Listed next."""
    manifests: Mapping[Save, Manifest]
    """Listed last."""
    tombstones: Mapping[Save, Found]
    """Listed with the manifests."""
    unreadable: Collection[Save] = ()
    """Manifests and tombstones that cannot be read: they may name anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What to do about a listing, in this order."""

    finish: tuple[Save, ...] = ()
    """Pending ones of which everything is there: to be committed."""
    bury: tuple[Save, ...] = ()
    """Pending ones to be given up: a tombstone is created where the manifest would be."""
    drop_pending: tuple[Save, ...] = ()
    segments: tuple[str, ...] = ()
    plans: tuple[str, ...] = ()
    """Keys."""
    records: tuple[str, ...] = ()
    """Keys."""
    tombstones: tuple[Save, ...] = ()
    blocked_by: tuple[Save, ...] = field(default=())
    """Why orphans were left alone: these cannot be read."""


def sweep(listing: TierListing, times: SharedTimes) -> Sweep:
    """What of a shared tier is finished, given up or deleted now."""
    decided = listing.manifests.keys() | listing.tombstones.keys() | set(listing.unreadable)
    open_ones = {save: each for save, each in listing.pending.items() if save not in decided}
    complete = {
        save
        for save, each in open_ones.items()
        # One that stays unfinished in spite of it has a damaged plan.
        if times.takeover_after_s < each.age_s <= 2 * times.sweep_after_s
        and _is_complete(each.manifest, listing)
    }
    bury = {
        save
        for save, each in open_ones.items()
        if save not in complete and each.age_s > times.sweep_after_s
    }
    blocked = {
        *listing.unreadable,
        *(save for save, each in open_ones.items() if each.manifest is None),
    }
    named = {ref.id for manifest in _naming(listing) for ref in manifest.segments}
    orphans = (
        segment_id
        for segment_id, each in listing.segments.items()
        if segment_id not in named and each.age_s > times.sweep_after_s
    )
    return Sweep(
        finish=tuple(sorted(complete)),
        bury=tuple(sorted(bury)),
        drop_pending=tuple(sorted(listing.pending.keys() & decided - set(listing.unreadable))),
        segments=() if blocked else tuple(orphans),
        plans=() if blocked else _old_plans(listing, times),
        records=_old_records(listing, times),
        tombstones=_old_tombstones(listing, times),
        blocked_by=tuple(sorted(blocked)),
    )


def _is_complete(manifest: Manifest | None, listing: TierListing) -> bool:
    if manifest is None or all(plan != manifest.plan for plan, _ in listing.plans.values()):
        return False
    return all(
        ref.id in listing.segments and listing.segments[ref.id].size == ref.size
        for ref in manifest.segments
    )


def _naming(listing: TierListing) -> list[Manifest]:
    """All that names something, also tombstones whose checkpoint may be taken back."""
    found = [*listing.pending.values(), *listing.tombstones.values()]
    return [*listing.manifests.values(), *(each.manifest for each in found if each.manifest)]


def _old_plans(listing: TierListing, times: SharedTimes) -> tuple[str, ...]:
    """Copies of plans that nothing names, and of the others what newer copies make superfluous.

    A key is written once: who commits relies on copies that are young, and writes another one
    otherwise. So what is old here nobody relies on who was not listed.
    """
    named = {manifest.plan for manifest in _naming(listing)}
    copies: dict[str, list[tuple[float, str]]] = {}
    for key, (plan_id, each) in listing.plans.items():
        copies.setdefault(plan_id, []).append((each.age_s, key))
    return tuple(
        key
        for plan_id, found in copies.items()
        for age_s, key in sorted(found)[PLAN_COPIES if plan_id in named else 0 :]
        if age_s > times.sweep_after_s
    )


def _old_records(listing: TierListing, times: SharedTimes) -> tuple[str, ...]:
    alive = {save_id for _, save_id in (*listing.manifests, *listing.pending, *listing.unreadable)}
    alive |= {save_id for (_, save_id), each in listing.tombstones.items() if each.manifest}
    return tuple(
        key
        for key, (save_id, each) in listing.records.items()
        if save_id not in alive and each.age_s > times.sweep_after_s
    )


def _old_tombstones(listing: TierListing, times: SharedTimes) -> tuple[Save, ...]:
    """Those that nobody can be late for any more, and that have nothing left to delete."""
    return tuple(
        save
        for save, each in listing.tombstones.items()
        if each.age_s > times.tombstone_keep_s
        and save not in listing.pending
        and each.manifest is None
    )
