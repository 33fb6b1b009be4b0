"""What the worker of a tier that several hosts share has beside its queue: turns, and pruning.

The pruner deletes by retention, and sweeps what was left behind. The leader's agent does it; a
second one, or one that wakes up late, does no harm. It never trusts an old listing for long, and no
host's clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tieredckpt import failpoints
from tieredckpt.agent.tiers.host_retention import to_delete
from tieredckpt.agent.tiers.interface import Count, Outcome, SpillHost, Stopping
from tieredckpt.agent.tiers.upload import SharedUploads, attempts_of, check_term, put_pins
from tieredckpt.errors import (
    IntegrityError,
    NamespaceInUseError,
    TieredCkptError,
    TierUnavailableError,
)
from tieredckpt.format.manifest import Manifest, SegmentRef
from tieredckpt.format.records import SAVES_MAX, DeletionIntent, Tombstone
from tieredckpt.policy.history import Chain
from tieredckpt.policy.shared_tier import Aged, Found, Save, SharedTimes, Sweep, TierListing, sweep
from tieredckpt.rpc.messages.agent import TierSpec
from tieredckpt.storage.base import ObjectInfo, Tier, segment_key
from tieredckpt.storage.shared.catalog import SharedCatalog, close
from tieredckpt.storage.shared.once import plan_of_key
from tieredckpt.storage.shared.records import tombstone_of

REST_S_MAX = 30.0
"""A worker looks this often whether it has become its turn to prune."""

log = logging.getLogger(__name__)


def times_of(spec: TierSpec) -> SharedTimes:
    """As configured; what is not, follows from it."""
    return SharedTimes(
        takeover_after_s=spec.takeover_after_s,
        delete_delay_s=spec.delete_delay_s,
        sweep_after_s=spec.sweep_after_s,
        prune_every_s=max(1.0, min(600.0, spec.delete_delay_s)),
        sweep_every_s=max(1.0, min(3600.0, spec.sweep_after_s / 4)),
        unnamed_for_s=min(60.0, spec.sweep_after_s / 8),
    )


class SharedSide:
    """Of one tier of one namespace. For the worker's thread, but for what is said of uploads.

    Args:
        tier: The tier.
        namespace: Name of the namespace.
        spec: Of the tier.
        host: This agent.
        clock: Monotonic seconds.
        catalog: Of the tier; by default a new one.
        times: How long things take; by default as the spec says.

    Raises:
        TierUnavailableError: It does not answer.
    """

    def __init__(
        self,
        tier: Tier,
        namespace: str,
        spec: TierSpec,
        host: SpillHost,
        clock: Callable[[], float],
        *,
        catalog: SharedCatalog | None = None,
        times: SharedTimes | None = None,
    ) -> None:
        times = times or times_of(spec)
        self._clock = clock
        self.catalog = catalog or SharedCatalog(tier)
        self.uploads = SharedUploads(self.catalog, host, times, clock)
        self._pruner = SharedPruner(self.catalog, namespace, spec, host, times, clock)
        self.catalog.refresh_commits()
        # Before a restart looks what there is.
        if count := finish_others(self.catalog, host, times):
            log.info("tier %s of %s: committed %d that were complete", spec.name, namespace, count)

    def put_part(self, job: Manifest, stopping: Stopping, count: Count) -> Outcome | None:
        """See :meth:`SharedUploads.put_part`."""
        outcome = self.uploads.put_part(job, stopping, count)
        if outcome is not None:
            self._pruner.wake()
        return outcome

    def step(self, stopping: Stopping, count: Count) -> list[tuple[Manifest, Outcome]]:
        """Take the turns that are due, then prune if it is time; what is settled.

        Raises:
            NamespaceInUseError: Another run has taken over.
            TierUnavailableError, CapacityError: To be tried again.
        """
        settled = self.uploads.step(stopping, count)
        if settled:
            self._pruner.wake()
            return settled  # whoever waits is told first
        self._pruner.step(stopping)
        return []

    def rest_s(self) -> float:
        """How long there is nothing to do."""
        due = [each for each in (self.uploads.due_s(), self._pruner.due_s()) if each is not None]
        return min(REST_S_MAX, max(0.0, min(due, default=float("inf")) - self._clock()))


class SharedPruner:
    """Of one tier. For one thread.

    Args:
        catalog: Of the tier.
        namespace: Its name.
        spec: What is kept.
        host: This agent.
        times: How long things take.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        catalog: SharedCatalog,
        namespace: str,
        spec: TierSpec,
        host: SpillHost,
        times: SharedTimes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = catalog
        self._namespace = namespace
        self._name = f"tier {spec.name} of {namespace}"
        self._spec = spec
        self._host = host
        self._times = times
        self._clock = clock
        self._emptied: set[Save] = set()
        """Tombstones whose segments were deleted; a sweep looks whether some came back."""
        self._left_behind = True
        """Somebody may have died between a verdict and the tombstones."""
        self._prune_at_s = clock()
        self._sweep_at_s = clock()
        self._acts_until_s = 0.0
        self._orphans: dict[str, float] = {}
        """What nothing named when it was last looked, and since when."""

    def due_s(self) -> float | None:
        """When :meth:`step` has something to do; None: it is not this host's."""
        return min(self._prune_at_s, self._sweep_at_s) if self._is_ours() else None

    def _is_ours(self) -> bool:
        return self._host.ruling.leads() and self._host.ruling.prunes(self._spec)

    def wake(self) -> None:
        """There is a checkpoint more."""
        self._prune_at_s = self._clock()

    def step(self, stopping: Stopping) -> None:
        """Prune and sweep, if it is time and this host's.

        Raises:
            NamespaceInUseError: Another run has taken over: its pruner does it.
            TierUnavailableError, CapacityError: Some is done, some is not.
        """
        if not self._is_ours() or not attempts_of(self._catalog, self._host):
            self._left_behind = True
            return
        if self._clock() >= self._prune_at_s:
            self._prune_at_s = self._clock() + self._times.prune_every_s
            self._prune(stopping)
        if self._clock() >= self._sweep_at_s:
            self._sweep_at_s = self._clock() + self._times.sweep_every_s
            self._sweep(stopping)

    def _may_act(self, stopping: Stopping) -> bool:
        """Whether what was listed may still be acted on; else it is listed anew, soon."""
        if stopping():
            return False
        if self._clock() < self._acts_until_s:
            return True
        self._prune_at_s = self._clock()
        return False

    # --- retention --------------------------------------------------------------------------------

    def _prune(self, stopping: Stopping) -> None:
        self._acts_until_s = self._clock() + self._times.listing_limit_s
        now_s = self._catalog.tier.now_s()
        if self._left_behind:
            check_term(self._catalog, self._host)  # the first time it stops all notices
        # What speaks against a deletion is looked for after its notice.
        self._catalog.refresh_commits()
        if self._left_behind:
            self._catalog.load_records()
            self._catalog.carry_out(self._catalog.notices.left())
            self._left_behind = False
        for stream in sorted({manifest.stream for manifest in self._catalog.manifests()}):
            going = to_delete(self._catalog, self._spec, stream, self._host, now_s)
            for at in range(0, len(going), SAVES_MAX):
                if not self._delete(stream, going[at : at + SAVES_MAX], now_s, stopping):
                    return
        self._empty(now_s, stopping)

    def _delete(
        self,
        stream: str,
        going: Sequence[Manifest],
        now_s: float,
        stopping: Stopping,
    ) -> bool:
        """Put tombstones in their places; False: something speaks against one of them.

        Whoever objects after the look here sees the notice; see ``storage/shared/once.py``.
        """
        if not self._may_act(stopping):
            return False
        notices, heads = self._catalog.notices, self._catalog.commits.heads()
        saves = tuple((each.stream, each.save_id) for each in going)
        # Who carries it out late must not bury what was taken back since.
        before = tuple(heads[save].deletions for save in saves)
        notice = DeletionIntent(
            saves=saves, host=self._host.host_id, deletions=before if any(before) else ()
        )
        nonce = notices.give(notice)
        try:
            agreed = self._is_agreed(stream, going, now_s) and self._may_act(stopping)
        except NamespaceInUseError:
            notices.withdraw(nonce)
            raise
        failpoints.reach("agent.shared.before_verdict")
        self._left_behind = True
        if not agreed:
            self._prune_at_s = self._clock()  # with what is known now
        if not (agreed and notices.decide(nonce)):
            notices.withdraw(nonce)
            return False
        # From here on they go, whatever happens to this process.
        for manifest, deletions in zip(going, before, strict=True):
            self._catalog.bury(tombstone_of(manifest, "retention", self._host.host_id), deletions)
            log.info("%s: step %d of stream %s is deleted", self._name, manifest.step, stream)
        notices.end(nonce)
        self._left_behind = False
        self._prune_at_s = min(self._prune_at_s, self._clock() + self._times.delete_delay_s + 1.0)
        return True

    def _is_agreed(self, stream: str, going: Sequence[Manifest], now_s: float) -> bool:
        """Whether all of them are still to go: others pin, and begin attempts, at any time."""
        check_term(self._catalog, self._host)
        self._catalog.load_records()
        still = to_delete(self._catalog, self._spec, stream, self._host, now_s)
        ids = {each.save_id for each in still}
        return all(each.save_id in ids for each in going)

    def _empty(self, now_s: float, stopping: Stopping) -> None:
        """Delete what tombstones name that are old enough: whoever reads has opened it by now."""
        commits, times = self._catalog.commits, self._times
        tombstones = commits.tombstones()
        self._emptied &= tombstones.keys()
        for save, (head, tombstone) in tombstones.items():
            age_s = _age(head.info, now_s)
            undecided = tombstone.cause == "retention"
            # What is older was emptied, or its segments are old enough to be swept.
            if save in self._emptied or (age_s > times.sweep_after_s and not undecided):
                continue
            if age_s <= times.delete_delay_s and tombstone.cause != "emptied":
                continue
            try:
                manifest = commits.buried(*save, head)
            except IntegrityError as error:
                log.warning("tier %s: tombstone of %s: %s", self._spec.name, save[1], error)
                continue
            if undecided and not (
                self._may_act(stopping)
                and close(self._catalog, tombstone, head.deletions, self._host.host_id)
            ):
                continue  # it was taken back, or the listing is too old
            names = self._unless_alive(manifest.segments if manifest else ())
            for name in names:
                if not self._may_act(stopping):
                    return
                self._catalog.tier.delete(segment_key(name))
            self._host.forget(self._spec.name, names)
            self._emptied.add(save)

    def _unless_alive(self, refs: Sequence[SegmentRef]) -> list[str]:
        """A segment belongs to one checkpoint; a tombstone that says otherwise is wrong."""
        wanted = {ref.id for ref in refs}
        for manifest in self._catalog.manifests():
            wanted -= {ref.id for ref in manifest.segments if ref.id in wanted}
        return sorted(wanted)

    # --- sweeping ---------------------------------------------------------------------------------

    def _sweep(self, stopping: Stopping) -> None:
        self._acts_until_s = self._clock() + self._times.listing_limit_s
        check_term(self._catalog, self._host)
        listing = self._list()
        found = self._confirmed(sweep(listing, self._times))
        for save in found.blocked_by:
            log.warning(
                "%s: manifests/%s/%s or its pending object cannot be read: orphans are not deleted",
                self._name, *save,
            )  # fmt: skip
        if self._do(found, listing, stopping):
            self._catalog.notices.sweep(self._times.tombstone_keep_s)
            self._catalog.drop_old_claims(self._times.sweep_after_s, self._namespace)
            self._left_behind = True
            self._end_unfinished()
            return
        self._sweep_at_s = self._clock()

    def _confirmed(self, found: Sweep) -> Sweep:
        """``found`` less what is unnamed only since now.

        One list that lacks a manifest (of a store that is late, of a folder that others change)
        would be enough to delete all that it names, and its pins.
        """
        now_s, before = self._clock(), self._orphans
        unnamed = [*found.segments, *found.plans, *found.records]
        since = self._orphans = {each: before.get(each, now_s) for each in unnamed}

        def old(ids: Sequence[str]) -> tuple[str, ...]:
            return tuple(i for i in ids if now_s - since[i] >= self._times.unnamed_for_s)

        segments, plans, records = old(found.segments), old(found.plans), old(found.records)
        return replace(found, segments=segments, plans=plans, records=records)

    def _end_unfinished(self) -> None:
        """What no listing shows takes room, too; a store that does not let us look keeps it."""
        try:
            ended = self._catalog.tier.sweep_unfinished(self._times.sweep_after_s)
        except TierUnavailableError as error:
            log.warning("%s: %s", self._name, error)
        else:
            if ended:
                log.info("%s: ended %d old uploads", self._name, ended)

    def _list(self) -> TierListing:
        """See :class:`TierListing` for the order."""
        tier = self._catalog.tier
        # Before the lists: what is written meanwhile is younger than nothing.
        now_s = tier.now_s()
        # What lives needs no entry: there may be a million of them.
        alive = {ref.id for manifest in self._catalog.manifests() for ref in manifest.segments}
        segments = {
            name: Aged(_age(info, now_s), info.size)
            for info in tier.list("segments/")
            if (name := info.key.rpartition("/")[2]) not in alive
        }
        del alive
        plans = {
            info.key: (plan_id, Aged(_age(info, now_s)))
            for info in tier.list("plans/")
            if (plan_id := plan_of_key(info.key)) is not None
        }
        records = {
            info.key: (info.key.split("/")[1], Aged(_age(info, now_s)))
            for info in tier.list("records/")
        }
        pending = {
            save: Found(_age(info, now_s), each.manifest)
            for save, (info, each) in self._catalog.refresh_pending().items()
        }
        self._catalog.refresh_commits()
        unreadable = self._catalog.unreadable()
        tombstones = {}
        for save, (head, tombstone) in self._catalog.commits.tombstones().items():
            found, age_s = None, _age(head.info, now_s)
            # Its segments are still read, or it may be taken back.
            if age_s <= self._times.delete_delay_s or tombstone.cause == "retention":
                try:
                    found = self._catalog.commits.buried(*save, head)
                except IntegrityError:
                    unreadable.append(save)
            tombstones[save] = Found(age_s, found)
        return TierListing(
            segments=segments, plans=plans, records=records, pending=pending,
            manifests={(m.stream, m.save_id): m for m in self._catalog.manifests()},
            tombstones=tombstones, unreadable=unreadable,
        )  # fmt: skip

    def _do(self, found: Sweep, listing: TierListing, stopping: Stopping) -> bool:
        """Carry it out; False: the listing became too old in between."""
        catalog, tier = self._catalog, self._catalog.tier
        for save in (*found.finish, *found.bury):
            if not self._may_act(stopping):
                return False
            manifest = listing.pending[save].manifest
            if save in found.finish and manifest is not None:
                finish(catalog, self._host, manifest, self._times.fresh_s)
            elif self._give_up(save, manifest):
                catalog.drop_pending(*save)
        deletions: Sequence[tuple[Callable[..., None], Sequence[tuple[str, ...]]]] = (
            (catalog.drop_pending, found.drop_pending),
            (tier.delete, [(segment_key(each),) for each in found.segments]),
            (tier.delete, [(each,) for each in (*found.plans, *found.records)]),
            (catalog.commits.drop, found.tombstones),
        )
        for delete, names in deletions:
            for name in names:
                if not self._may_act(stopping):
                    return False
                delete(*name)
        if found.segments:
            self._host.forget(self._spec.name, found.segments)
            log.info("%s: swept %d segments", self._name, len(found.segments))
        return True

    def _give_up(self, save: Save, manifest: Manifest | None) -> bool:
        stream, save_id = save
        tombstone = Tombstone(
            namespace=self._namespace, stream=stream, save_id=save_id, cause="unfinished",
            host=self._host.host_id,
        )  # fmt: skip
        if manifest is not None:
            tombstone = tombstone_of(manifest, "unfinished", self._host.host_id)
        log.warning(
            "%s: checkpoint %s of stream %s was never finished and is abandoned",
            self._name, save_id, stream,
        )  # fmt: skip
        return self._catalog.bury(tombstone)


def finish(catalog: SharedCatalog, host: SpillHost, manifest: Manifest, fresh_s: float) -> bool:
    """Commit what others left complete, with what was said of it; one that is deleted stays so.

    False: it was given up, or it cannot be done, since no copy of its plan is there, say.

    Raises TierUnavailableError.
    """
    save, plans = (manifest.stream, manifest.save_id), catalog.plan_copies
    try:
        put_pins(catalog, host, manifest.save_id)
        plans.ensure(manifest.plan, lambda: plans.read(manifest.plan), fresh_s)
        pending = catalog.pending_bytes(manifest)
        if pending is None or catalog.put_manifest(pending) == "buried":
            return False
        catalog.drop_pending(*save)
    except TierUnavailableError:
        raise
    except TieredCkptError as error:
        log.warning("tier %s: %s/%s is not finished: %s", catalog.tier.name, *save, error)
        return False
    return True


def is_superseded(catalog: SharedCatalog, manifest: Manifest) -> bool:
    """Whether, as of the last refresh, another run has claimed what followed its attempt."""
    records = catalog.attempts()
    mine = {each.run for each in records if each.id == manifest.attempt.id}
    chain = Chain((), records)
    return any(
        each.run not in mine
        and each.id != manifest.attempt.id
        and manifest.attempt.id in chain.ancestors([each.id])
        for each in catalog.claimed()
    )


def finish_others(catalog: SharedCatalog, host: SpillHost, times: SharedTimes) -> int:
    """Commit what hosts that are gone left complete, before a restart looks; how many.

    Raises TierUnavailableError.
    """
    count = 0
    now_s = catalog.tier.now_s()
    committed = {(m.stream, m.save_id) for m in catalog.manifests()}
    committed |= catalog.commits.tombstones().keys()
    open_ones = [
        each.manifest
        for save, (info, each) in catalog.refresh_pending().items()
        if save not in committed
        and each.manifest is not None
        and _age(info, now_s) > times.turn_s
        and not is_superseded(catalog, each.manifest)  # it is left to who has taken over
    ]
    wanted = {ref.id for manifest in open_ones for ref in manifest.segments}
    # To ask for each would take a large job's restart longer than it waits for the tier.
    listed = catalog.listed_segments() if wanted else ()
    sizes = {name: size for name, size in listed if name in wanted}
    for manifest in open_ones:
        if all(sizes.get(ref.id) == ref.size for ref in manifest.segments):
            count += finish(catalog, host, manifest, times.fresh_s)
    return count


def _age(info: ObjectInfo, now_s: float) -> float:
    """Seconds; what has no time never becomes old."""
    return now_s - info.modified_s if info.modified_s is not None else 0.0
