"""A tier that several hosts share: its catalog over a real folder, and what a sweep decides."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.format.samples import hex_id, save_record, small_attempt, small_manifest
from tieredckpt.errors import (
    IntegrityError,
    NamespaceInUseError,
    NotFoundError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import (
    AttemptRecord,
    Followed,
    Manifest,
    decode_manifest,
    encode_attempt,
    encode_manifest,
)
from tieredckpt.format.plan_record import encoded_plan_id, seal_plan
from tieredckpt.format.records import encode_save_record, encode_tombstone
from tieredckpt.policy.history import NUMBER_MAX, next_attempt
from tieredckpt.policy.shared_tier import (
    Aged,
    Found,
    SharedTimes,
    TierListing,
    look_after_s,
    position,
    sweep,
)
from tieredckpt.storage.backends.file import FileTier
from tieredckpt.storage.base import READERS, ObjectInfo, Scope, Tier, manifest_key, segment_key
from tieredckpt.storage.shared.catalog import SharedCatalog, close, take_back
from tieredckpt.storage.shared.records import tombstone_of

PLAN = seal_plan(b"a plan")
GONE = small_manifest()
SAVE = (GONE.stream, GONE.save_id)
TIMES = SharedTimes()
OLD_S, YOUNG_S = TIMES.sweep_after_s + 1, TIMES.sweep_after_s - 1


@pytest.fixture
def catalog(tmp_path: Path) -> SharedCatalog:
    found = SharedCatalog(FileTier("bucket", tmp_path, "gpt-run-7", scope=Scope.SHARED))
    found.load()
    return found


def another(catalog: SharedCatalog) -> SharedCatalog:
    """The same tier, as another host sees it."""
    found = SharedCatalog(catalog.tier)
    found.load()
    return found


# --- commits and tombstones -----------------------------------------------------------------------


def test_a_commit_is_seen_by_others_and_is_idempotent(catalog: SharedCatalog):
    data = encode_manifest(GONE)
    other = another(catalog)
    assert catalog.state_of(GONE) == "absent"
    catalog.put_pending(data)
    catalog.put_pending(data)
    assert [catalog.put_manifest(data), other.put_manifest(data)] == ["committed", "committed"]
    other.refresh_commits()
    assert other.manifests() == (GONE,)
    assert other.read_manifest(*SAVE) == data


def test_who_is_late_meets_the_tombstone(catalog: SharedCatalog):
    other = another(catalog)
    assert catalog.bury(tombstone_of(GONE, "unfinished", "h0"))
    assert other.put_manifest(encode_manifest(GONE)) == "buried"
    assert other.state_of(GONE) == "buried"
    assert other.manifests() == ()
    with pytest.raises(NotFoundError):
        other.read_manifest(*SAVE)
    assert other.load().manifests == ()


def test_giving_up_loses_against_a_commit_and_retention_does_not(catalog: SharedCatalog):
    catalog.put_manifest(encode_manifest(GONE))
    pruner = another(catalog)
    assert not pruner.bury(tombstone_of(GONE, "unfinished", "h1"))
    assert catalog.state_of(GONE) == "committed"
    assert pruner.bury(tombstone_of(GONE, "retention", "h1"))
    catalog.refresh_commits()
    assert catalog.manifests() == ()
    head, tombstone = catalog.commits.tombstones()[SAVE]
    assert tombstone.manifest == b"", "there may be thousands of them"
    assert catalog.commits.buried(*SAVE, head) == GONE
    catalog.commits.drop(*SAVE)
    assert catalog.commits.tombstones() == {}
    assert catalog.state_of(GONE) == "absent"


def test_a_tombstone_is_as_old_as_itself_and_not_as_the_manifest_that_was_listed(
    tmp_path: Path,
):
    class Slow(FileTier):
        """Another pruner replaces the manifest between the listing and the read of it."""

        def get(self, key: str, *, limit: int) -> bytes:
            if key == manifest_key(*SAVE):
                self.replace(key, encode_tombstone(tombstone_of(GONE, "retention", "h1")))
            return super().get(key, limit=limit)

    tier = Slow("bucket", tmp_path, "gpt-run-7", scope=Scope.SHARED)
    tier.put(manifest_key(*SAVE), encode_manifest(GONE))
    (path,) = [each for each in tmp_path.rglob(GONE.save_id) if each.is_file()]
    os.utime(path, (path.stat().st_mtime - 1000.0,) * 2)
    catalog = SharedCatalog(tier)
    before_s = tier.now_s()
    catalog.refresh_commits()
    when_s = catalog.commits.tombstones()[SAVE][0].info.modified_s
    assert when_s is not None
    assert when_s > before_s - 500.0


def test_another_manifest_in_its_place_is_damage(catalog: SharedCatalog):
    other = msgspec.structs.replace(GONE, step=GONE.step + 1)
    catalog.tier.put(manifest_key(*SAVE), encode_manifest(other))
    with pytest.raises(IntegrityError):
        catalog.put_manifest(encode_manifest(GONE))


def test_one_that_was_archived_hides_no_others(
    catalog: SharedCatalog, monkeypatch: pytest.MonkeyPatch
):
    other = msgspec.structs.replace(GONE, save_id=hex_id(4))
    for each in (GONE, other):
        catalog.tier.put(manifest_key(each.stream, each.save_id), encode_manifest(each))
    get, code = FileTier.get, ["InvalidObjectState"]

    def archived(self: FileTier, key: str, *, limit: int) -> bytes:
        if key == manifest_key(*SAVE) and code:
            raise TierUnavailableError("403", status=403, code=code[0])
        return get(self, key, limit=limit)

    monkeypatch.setattr(FileTier, "get", archived)
    catalog.refresh_commits()
    assert (catalog.manifests(), catalog.unreadable()) == ((other,), [SAVE])
    code[0] = "AccessDenied"
    with pytest.raises(TierUnavailableError):
        another(catalog)
    code.clear()
    catalog.refresh_commits()
    assert len(catalog.manifests()) == 2, "it was brought back"


# --- plans ----------------------------------------------------------------------------------------


def test_a_plan_that_is_old_is_written_again_under_another_key(catalog: SharedCatalog):
    plan_id = encoded_plan_id(seal_plan(b"a plan"))
    asked: list[int] = []

    def read() -> bytes:
        asked.append(1)
        return PLAN

    catalog.plan_copies.ensure(plan_id, read, 1000.0)
    catalog.plan_copies.ensure(plan_id, read, 1000.0)
    assert len(asked) == 1
    catalog.plan_copies.ensure(plan_id, read, -1.0)
    assert len(asked) == 2
    keys = [info.key for info in catalog.tier.list("plans/")]
    assert len(keys) == 2
    for key in keys:
        catalog.tier.replace(key, b"damaged")
        if key == keys[0]:
            assert another(catalog).read_plan(plan_id) == PLAN
    with pytest.raises(IntegrityError):
        another(catalog).read_plan(plan_id)
    with pytest.raises(IntegrityError):
        catalog.plan_copies.ensure(hex_id(1), lambda: PLAN, 1000.0)


# --- claims ---------------------------------------------------------------------------------------


def attempt(number: int, name: int, run: int) -> AttemptRecord:
    return msgspec.structs.replace(
        small_attempt(), number=number, id=hex_id(name), run=hex_id(run), bases=()
    )


def test_a_number_has_one_owner(catalog: SharedCatalog):
    mine, same_run, stranger = attempt(1, 1, 1), attempt(2, 2, 1), attempt(1, 3, 3)
    catalog.claim(mine, [mine.id])
    catalog.claim(mine, [mine.id])
    with pytest.raises(NamespaceInUseError, match="attempt 1 of another run"):
        another(catalog).claim(stranger, [stranger.id])
    other = another(catalog)
    assert [each.id for each in other.attempts()] == [mine.id]
    other.claim(same_run, [same_run.id])
    catalog.claim(mine, [mine.id])  # it was opened by ranks of the same run
    newer = attempt(9, 5, 5)
    with pytest.raises(NamespaceInUseError, match="attempt 1 of another run"):
        other.claim(newer, [newer.id])  # a higher number alone wins nothing
    other.claim(newer, [mine.id, same_run.id, newer.id])  # it followed both
    with pytest.raises(NamespaceInUseError, match="attempt 9 of another run"):
        catalog.claim(mine, [mine.id])


@pytest.mark.parametrize("kind", ["cut", "empty", "another number's", "another namespace's"])
def test_a_claim_of_nobody_ends_nobody(catalog: SharedCatalog, kind: str):
    """Whoever holds one goes on, and whoever comes takes the next number."""
    first, run = attempt(1, 1, 1), small_attempt().namespace
    catalog.claim(first, [first.id])
    odd = {
        "cut": encode_attempt(attempt(2, 2, 2))[:-40],
        "empty": b"",
        "another number's": encode_attempt(attempt(1, 1, 1)),
        "another namespace's": encode_attempt(
            msgspec.structs.replace(attempt(2, 2, 2), namespace="another")
        ),
    }
    other = another(catalog)
    catalog.tier.put("claims/00000002", odd[kind])
    catalog.claim(first, [first.id])
    assert other.claims_of_nobody(run) == []
    with pytest.raises(NamespaceInUseError, match="start this job again"):
        other.claim(attempt(2, 3, 3), [first.id])
    assert other.claims_of_nobody(run) == [2]
    record = next_attempt(
        [first], [], hex_id(3), {}, (Followed(first.number, first.id),), 0.0, namespace=run,
        run=hex_id(3), taken=[*other.claims_of_nobody(run), 2**63 - 1],
    )  # fmt: skip
    assert record.number == 3
    other.claim(record, [first.id])
    with pytest.raises(NamespaceInUseError, match="attempt 3 of another run"):
        catalog.claim(first, [first.id])


def test_a_claim_with_a_number_that_no_run_makes_ends_nobody(
    catalog: SharedCatalog, caplog: pytest.LogCaptureFixture
):
    """It is reported and ignored; the highest one that a run makes counts."""
    first, run = attempt(1, 1, 1), small_attempt().namespace
    catalog.claim(first, [first.id])
    forged = attempt(2**63 - 1, 2, 2)
    catalog.tier.put(f"claims/{forged.number}", encode_attempt(forged))
    catalog.claim(first, [first.id])
    assert f"claims/{forged.number} is ignored" in caplog.text
    other = another(catalog)
    assert [each.id for each in other.attempts()] == [first.id]
    followed = (Followed(NUMBER_MAX - 1, first.id), Followed(forged.number, forged.id))
    taken = other.claims_of_nobody(run)
    assert taken == [forged.number]
    highest = next_attempt(
        [first], [], hex_id(3), {}, followed, 0.0, namespace=run, run=hex_id(3), taken=taken
    )
    other.claim(highest, [first.id])
    with pytest.raises(NamespaceInUseError, match=f"attempt {NUMBER_MAX} of another run"):
        catalog.claim(first, [first.id])


@pytest.mark.parametrize("kind", ["damaged", "another namespace's"])
def test_a_claim_of_nobody_makes_none_superfluous(catalog: SharedCatalog, kind: str):
    """Else the lease of whoever saves would go with age, and its number were free for another."""
    first, second = attempt(1, 1, 1), attempt(2, 2, 2)
    catalog.claim(first, [first.id])
    catalog.claim(second, [first.id, second.id])
    odd = msgspec.structs.replace(attempt(9, 3, 3), namespace="another")
    catalog.tier.put("claims/00000009", b"" if kind == "damaged" else encode_attempt(odd))
    other = another(catalog)
    other.drop_old_claims(-60.0, first.namespace)
    assert {each.key for each in catalog.tier.list("claims/")} == {
        "claims/00000002", "claims/00000009"
    }  # fmt: skip
    with pytest.raises(NamespaceInUseError, match="attempt 2 of another run"):
        another(catalog).claim(attempt(2, 4, 4), [first.id])


def test_who_knows_an_attempt_knows_the_earlier_ones_of_its_run(catalog: SharedCatalog):
    """Also if one in between was never claimed, and its record is lost: else nobody could begin."""
    for number in (1, 2):
        catalog.claim(attempt(number, number, 1), [hex_id(1), hex_id(2)])
    other = another(catalog)
    with pytest.raises(NamespaceInUseError, match="attempt 2 of another run"):
        other.claim(attempt(3, 5, 5), [hex_id(1)])  # it does not know what that run did later
    other.claim(attempt(3, 5, 5), [hex_id(2)])


def test_a_claim_that_comes_a_day_late_ends_nobody(
    catalog: SharedCatalog, monkeypatch: pytest.MonkeyPatch
):
    """Its host slept between looking and putting, and meanwhile its number was swept."""
    first, live = attempt(1, 1, 1), attempt(3, 4, 4)
    catalog.claim(first, [first.id])
    sleeper, waker = another(catalog), another(catalog)
    put = sleeper.tier.put

    def late(key: str, data: bytes) -> None:
        monkeypatch.undo()
        waker.claim(attempt(2, 3, 3), [first.id])
        waker.claim(live, [first.id, hex_id(3)])
        another(catalog).drop_old_claims(-60.0, first.namespace)
        assert [each.key for each in catalog.tier.list("claims/")] == ["claims/00000003"]
        put(key, data)

    monkeypatch.setattr(sleeper.tier, "put", late)
    with pytest.raises(NamespaceInUseError, match="attempt 3 of another run"):
        sleeper.claim(attempt(2, 2, 2), [first.id])
    assert len(list(catalog.tier.list("claims/"))) == 2
    waker.claim(live, [first.id, hex_id(3)])
    with pytest.raises(NamespaceInUseError, match="of another run"):
        another(catalog).claim(attempt(4, 5, 5), [first.id, live.id])


# --- turns ----------------------------------------------------------------------------------------


def test_every_host_has_a_place_of_its_own():
    hosts = [f"h{number}" for number in range(50)]
    for save in (hex_id(1), hex_id(2)):
        assert sorted(position(save, host, hosts) for host in hosts) == list(range(50))
    first = {min(hosts, key=lambda h: position(hex_id(n), h, hosts)) for n in range(40)}
    assert len(first) > 10
    assert look_after_s(0, 0, 2.0) == 0.0
    assert look_after_s(1000, 0, 2.0) == 60.0 == look_after_s(1000, 5, 2.0)


# --- sweeping -------------------------------------------------------------------------------------


def listing(
    age_s: float,
    *,
    pending: dict[tuple[str, str], Found] | None = None,
    manifests: dict[tuple[str, str], Manifest] | None = None,
    tombstones: dict[tuple[str, str], Found] | None = None,
    parts: int | None = None,
    plan_age_s: float = 0.0,
) -> TierListing:
    """All segments of the sample manifest, or the first few, and what names them."""
    return TierListing(
        segments={ref.id: Aged(age_s, ref.size) for ref in GONE.segments[:parts]},
        plans={f"plans/{GONE.plan}.1": (GONE.plan, Aged(plan_age_s))},
        records={}, pending=pending or {}, manifests=manifests or {},
        tombstones=tombstones or {},
    )  # fmt: skip


def test_orphans_go_when_they_are_old():
    ids = tuple(ref.id for ref in GONE.segments)
    assert sweep(listing(OLD_S, plan_age_s=OLD_S), TIMES).segments == ids
    assert sweep(listing(OLD_S, plan_age_s=OLD_S), TIMES).plans == (f"plans/{GONE.plan}.1",)
    assert sweep(listing(YOUNG_S, plan_age_s=YOUNG_S), TIMES) == sweep(listing(0.0), TIMES)
    for named in (
        listing(OLD_S, manifests={SAVE: GONE}, plan_age_s=OLD_S),
        listing(OLD_S, pending={SAVE: Found(0.0, GONE)}, plan_age_s=OLD_S),
        listing(OLD_S, tombstones={SAVE: Found(0.0, GONE)}, plan_age_s=OLD_S),
    ):
        assert (sweep(named, TIMES).segments, sweep(named, TIMES).plans) == ((), ())
    blind = replace(listing(OLD_S, plan_age_s=OLD_S), unreadable=[("default", hex_id(77))])
    assert (sweep(blind, TIMES).segments, sweep(blind, TIMES).plans) == ((), ())
    assert sweep(blind, TIMES).blocked_by == (("default", hex_id(77)),)


def test_half_uploaded_ones_are_given_up_and_complete_ones_finished():
    half = sweep(listing(OLD_S, pending={SAVE: Found(OLD_S, GONE)}, parts=1), TIMES)
    assert (half.bury, half.finish, half.segments) == ((SAVE,), (), ())
    young = sweep(listing(YOUNG_S, pending={SAVE: Found(YOUNG_S, GONE)}, parts=1), TIMES)
    assert (young.bury, young.finish) == ((), ())
    whole = sweep(listing(OLD_S, pending={SAVE: Found(OLD_S, GONE)}), TIMES)
    assert (whole.bury, whole.finish) == ((), (SAVE,))
    without_plan = replace(listing(OLD_S, pending={SAVE: Found(OLD_S, GONE)}), plans={})
    assert sweep(without_plan, TIMES).bury == (SAVE,)
    decided = sweep(listing(0.0, pending={SAVE: Found(OLD_S, GONE)}, manifests={SAVE: GONE}), TIMES)
    assert (decided.bury, decided.finish, decided.drop_pending) == ((), (), (SAVE,))


def test_what_may_be_taken_back_is_named_and_its_tombstone_stays():
    """However old it is: somebody has to decide that its segments go, which a sweep does not."""
    ids, keep_s = tuple(ref.id for ref in GONE.segments), TIMES.tombstone_keep_s
    pin = {f"records/{GONE.save_id}/1": (GONE.save_id, Aged(OLD_S))}
    undecided = listing(OLD_S, tombstones={SAVE: Found(keep_s + 1, GONE)}, plan_age_s=OLD_S)
    found = sweep(replace(undecided, records=pin), TIMES)
    assert (found.segments, found.plans, found.records, found.tombstones) == ((), (), (), ())
    given_up = listing(OLD_S, tombstones={SAVE: Found(keep_s - 1, None)}, plan_age_s=OLD_S)
    found = sweep(replace(given_up, records=pin), TIMES)
    assert (found.segments, found.tombstones, found.records) == (ids, (), tuple(pin))
    assert sweep(listing(YOUNG_S, tombstones={SAVE: Found(1.0, None)}), TIMES).segments == ()
    over = listing(0.0, tombstones={SAVE: Found(keep_s + 1, None)}, parts=0)
    assert sweep(over, TIMES).tombstones == (SAVE,)


# --- taking back ----------------------------------------------------------------------------------


PIN = encode_save_record(
    msgspec.structs.replace(save_record("pin"), stream=GONE.stream, save_id=GONE.save_id)
)


@pytest.fixture
def deleted(catalog: SharedCatalog) -> SharedCatalog:
    """Of one checkpoint, whose segments and plan are still there."""
    plan_id = encoded_plan_id(seal_plan(b"a plan"))
    gone = msgspec.structs.replace(GONE, plan=plan_id, segments=GONE.segments[:1])
    (ref,) = gone.segments
    catalog.tier.put(segment_key(ref.id), bytes(ref.size))
    catalog.put_plan(plan_id, PLAN)
    catalog.put_manifest(encode_manifest(gone))
    assert catalog.bury(tombstone_of(gone, "retention", "h0"))
    return catalog


def closed(catalog: SharedCatalog) -> bool:
    catalog.refresh_commits()
    head, tombstone = catalog.commits.tombstones()[SAVE]
    return close(catalog, tombstone, head.deletions, "h0")


def test_what_was_deleted_is_taken_back_once_and_again(deleted: SharedCatalog):
    pruner, anybody = another(deleted), another(deleted)
    for deletions in range(3):
        manifest = take_back(another(deleted), SAVE, PIN)
        assert take_back_fails(another(deleted)) == "UsageError"
        anybody.refresh_commits()
        assert anybody.manifests() == (manifest,)
        assert decode_manifest(anybody.read_manifest(*SAVE)) == manifest
        assert anybody.state_of(manifest) == "committed"
        assert anybody.put_manifest(encode_manifest(manifest)) == "committed"
        pruner.refresh_commits()
        pruner.load_records()
        assert [each.kind for each in pruner.records(GONE.save_id)] == ["pin"]
        # An earlier deletion that is carried out late changes nothing any more.
        pruner.bury(tombstone_of(manifest, "retention", "h1"), deletions)
        assert another(deleted).manifests() == (manifest,)
        pruner.bury(tombstone_of(manifest, "retention", "h1"), deletions + 1)
        assert another(deleted).manifests() == ()
        assert another(deleted).state_of(manifest) == "buried"
    assert closed(pruner)
    assert take_back_fails(another(deleted)) == "NotFoundError"
    assert closed(another(deleted)), "whoever comes later goes on with it"
    another(deleted).commits.drop(*SAVE)
    assert list(deleted.tier.list("manifests/")) == []


def take_back_fails(catalog: SharedCatalog) -> str:
    with pytest.raises((UsageError, NotFoundError)) as caught:
        take_back(catalog, SAVE, PIN)
    return type(caught.value).__name__


def test_whoever_decides_first_decides(deleted: SharedCatalog):
    pruner = another(deleted)
    head, tombstone = pruner.commits.tombstones()[SAVE]
    take_back(another(deleted), SAVE, PIN)
    assert not close(pruner, tombstone, head.deletions, "h0"), "it had slept since it listed"
    assert len(pruner.manifests()) == 1
    manifest = pruner.manifests()[0]
    pruner.bury(tombstone_of(manifest, "retention", "h0"), 1)
    assert not close(pruner, tombstone, head.deletions, "h0"), "that was another deletion"
    assert closed(pruner)
    assert not another(deleted).manifests()


def test_what_is_not_whole_is_not_taken_back(deleted: SharedCatalog):
    (info,) = deleted.tier.list("segments/")
    deleted.tier.delete(info.key)
    with pytest.raises(NotFoundError, match="too late"):
        take_back(another(deleted), SAVE, PIN)
    assert not another(deleted).manifests()
    assert list(deleted.tier.list("records/")) == []


def test_what_never_was_whole_is_not_taken_back(catalog: SharedCatalog):
    with pytest.raises(NotFoundError):
        take_back(catalog, SAVE, PIN)
    catalog.bury(tombstone_of(GONE, "unfinished", "h0"))
    with pytest.raises(NotFoundError, match="never whole"):
        take_back(another(catalog), SAVE, PIN)


def test_lost_answers_are_resolved(deleted: SharedCatalog, monkeypatch: pytest.MonkeyPatch):
    put = FileTier.put

    def lost(self: FileTier, key: str, data: bytes) -> None:
        put(self, key, data)
        if key.endswith(".1"):
            raise TierUnavailableError("no answer", tier="bucket", outcome="unknown")

    def failed(self: FileTier, key: str, data: bytes) -> None:
        if key.endswith(".1"):
            raise TierUnavailableError("no answer", tier="bucket", outcome="unknown")
        put(self, key, data)

    monkeypatch.setattr(FileTier, "put", failed)
    with pytest.raises(TierUnavailableError):
        take_back(another(deleted), SAVE, PIN)
    with pytest.raises(TierUnavailableError):
        closed(another(deleted))
    monkeypatch.setattr(FileTier, "put", lost)
    take_back(another(deleted), SAVE, PIN)
    assert len(another(deleted).manifests()) == 1


def test_of_a_plan_in_use_two_copies_stay():
    copies = {f"plans/{GONE.plan}.{n}": (GONE.plan, Aged(OLD_S + n)) for n in range(4)}
    found = sweep(replace(listing(0.0, manifests={SAVE: GONE}), plans=copies), TIMES)
    assert found.plans == (f"plans/{GONE.plan}.2", f"plans/{GONE.plan}.3")


def test_what_was_read_before_a_failure_is_not_read_again(
    catalog: SharedCatalog, monkeypatch: pytest.MonkeyPatch
):
    for number in range(10):
        each = msgspec.structs.replace(GONE, save_id=hex_id(number))
        catalog.tier.put(manifest_key(each.stream, each.save_id), encode_manifest(each))
    reads = 0

    def five_of_them(
        tier: Tier, call: Callable[[ObjectInfo], Any], items: Sequence[ObjectInfo]
    ) -> Iterator[Any]:
        nonlocal reads
        for number, each in enumerate(items):
            if number == 5 and len(items) == 10:
                raise TierUnavailableError("503 SlowDown", status=503)
            reads += 1
            yield call(each)

    monkeypatch.setattr(FileTier, "each", five_of_them)
    other = SharedCatalog(catalog.tier)
    with pytest.raises(TierUnavailableError):
        other.refresh_commits()
    assert other.manifests() == ()
    other.refresh_commits()
    assert (len(other.manifests()), reads) == (10, 10)


def test_records_are_read_a_few_at_a_time(catalog: SharedCatalog, monkeypatch: pytest.MonkeyPatch):
    for number in range(100):
        pin = msgspec.structs.replace(save_record("pin"), id=hex_id(number))
        catalog.put_record(encode_save_record(pin))
    get, now, most, lock = FileTier.get, [0], [0], threading.Lock()
    several = threading.Event()

    def counted(self: FileTier, key: str, *, limit: int) -> bytes:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            if now[0] > 1:
                several.set()
        several.wait(60.0)  # the first one waits for a second one
        try:
            return get(self, key, limit=limit)
        finally:
            with lock:
                now[0] -= 1

    monkeypatch.setattr(FileTier, "get", counted)
    other = SharedCatalog(catalog.tier)
    other.load_records()
    assert len(other.record_ids()) == 100
    assert 1 < most[0] <= READERS
