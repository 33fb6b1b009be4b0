"""The order of commits and deletions, on any tier; facts; quarantine marks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt import failpoints
from tieredckpt.errors import (
    CapacityError,
    IntegrityError,
    NotFoundError,
    RemoteProtocolError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import (
    AttemptId,
    AttemptRecord,
    Manifest,
    SegmentRef,
    encode_attempt,
    encode_manifest,
)
from tieredckpt.format.plan_record import encoded_plan_id, seal_plan
from tieredckpt.storage import quarantine
from tieredckpt.storage.backends.file import FileTier
from tieredckpt.storage.base import Tier, attempt_key, manifest_key, plan_key, segment_key
from tieredckpt.storage.catalog import Catalog
from tieredckpt.storage.holdings import Holdings, decode_holdings, encode_holdings, gather
from tieredckpt.storage.memory.pool import SlotPool
from tieredckpt.storage.memory.tier import MemoryTier
from tieredckpt.storage.quarantine import QuarantineMarks
from tieredckpt.testing.tier_suite import SampleSource, sample_segment, segment_name

PLANS = [seal_plan(f"plan {number}".encode() * 100) for number in range(3)]
PLAN_IDS = [encoded_plan_id(plan) for plan in PLANS]


@dataclass
class Place:
    """A tier, and where its files lie, to be damaged."""

    tier: Tier
    again: Callable[[], Tier]
    root: Path
    segment_path: Callable[[str], Path]

    def damage(self, key: str, *, size: int | None = None) -> None:
        path = self.root / key
        if key.startswith("segments/"):
            path = self.segment_path(key.partition("/")[2])
        if size is not None:
            os.truncate(path, size)
            return
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@pytest.fixture(params=["memory", "file"])
def place(request: pytest.FixtureRequest, runtime_dir: Path, tmp_path: Path) -> Iterator[Place]:
    tiers: list[Tier] = []

    def memory() -> Tier:
        pool = SlotPool(runtime_dir / "slots")
        pool.scan()
        tiers.append(MemoryTier(pool, runtime_dir / "ns" / "run", "run"))
        return tiers[-1]

    def file() -> Tier:
        for tier in tiers:
            tier.close()
        tiers.append(FileTier("disk", tmp_path, "run"))
        return tiers[-1]

    def slot_path(segment_id: str) -> Path:
        return runtime_dir / "slots" / tiers[-1].pool.find(segment_id).slot_id

    if request.param == "memory":
        yield Place(memory(), memory, runtime_dir / "ns" / "run", slot_path)
    else:
        yield Place(file(), file, tmp_path / "run", lambda i: tmp_path / "run" / "segments" / i)
    for tier in tiers:
        tier.close()


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    failpoints.arm("")


def make(step: int, *, segments: int = 2, plan: int = 0, stream: str = "default") -> Manifest:
    refs = []
    for number in range(segments):
        name = segment_name(step * 10 + number)
        data = sample_segment(name, 9000)
        refs.append(SegmentRef(name, len(data), data[-16:].hex(), "host"))
    return Manifest(
        save_id=segment_name(step + 1000), namespace="run", stream=stream, step=step,
        attempt=AttemptId(1, "aa" * 16), seq=step, parent=None, lineage=(), plan=PLAN_IDS[plan],
        tiers=("disk",), segments=tuple(refs), world_size=segments, tags={}, created_at_s=0.0,
    )  # fmt: skip


def put_segments(tier: Tier, manifest: Manifest) -> None:
    for ref in manifest.segments:
        tier.put_from(segment_key(ref.id), SampleSource(sample_segment(ref.id, 9000)))


def commit(catalog: Catalog, step: int, *, plan: int = 0, stream: str = "default") -> Manifest:
    manifest = make(step, plan=plan, stream=stream)
    put_segments(catalog.tier, manifest)
    catalog.commit(encode_manifest(manifest), PLANS[plan])
    return manifest


def keys(tier: Tier) -> set[str]:
    folders = ("manifests/", "plans/", "segments/", "attempts/")
    return {info.key for folder in folders for info in tier.list(folder)}


def keys_of(*manifests: Manifest) -> set[str]:
    found = set()
    for m in manifests:
        found |= {manifest_key(m.stream, m.save_id), plan_key(m.plan)}
        found |= {segment_key(ref.id) for ref in m.segments}
    return found


def test_keys():
    assert manifest_key("actor", "ab" * 16) == "manifests/actor/" + "ab" * 16
    assert attempt_key(7, "ab" * 16) == "attempts/00000007-" + "ab" * 16
    for bad in (
        lambda: manifest_key("..", "ab" * 16),
        lambda: manifest_key("a/b", "ab" * 16),
        lambda: manifest_key("a", "AB" * 16),
        lambda: plan_key("x"),
        lambda: segment_key("../" + "a" * 29),
        lambda: attempt_key(-1, "ab" * 16),
    ):
        with pytest.raises(ValueError):
            bad()


# --- commit ---------------------------------------------------------------------------------------


def test_commit_is_idempotent(place: Place):
    catalog = Catalog(place.tier)
    first = commit(catalog, 1)
    catalog.commit(encode_manifest(first))
    Catalog(place.tier).commit(encode_manifest(first), PLANS[0])
    other = msgspec.structs.replace(first, tags={"a": "b"})
    with pytest.raises(UsageError):
        catalog.commit(encode_manifest(other))
    assert catalog.read_manifest("default", first.save_id) == encode_manifest(first)


def test_nothing_is_visible_without_plan_and_segments(place: Place):
    catalog = Catalog(place.tier)
    manifest = make(1)
    data = encode_manifest(manifest)
    with pytest.raises(NotFoundError):
        catalog.commit(data)
    with pytest.raises(IntegrityError):
        catalog.commit(data, PLANS[1])
    with pytest.raises(NotFoundError):
        catalog.commit(data, PLANS[0])
    put_segments(place.tier, manifest)
    assert list(place.tier.list("manifests/")) == []
    assert catalog.manifests() == ()
    catalog.commit(data, PLANS[0])
    place.damage(segment_key(manifest.segments[0].id), size=4096)
    assert catalog.manifests() == (manifest,)


def test_segment_of_another_size_is_not_there(place: Place):
    catalog = Catalog(place.tier)
    manifest = make(1)
    put_segments(place.tier, manifest)
    longer = msgspec.structs.replace(manifest.segments[0], size=manifest.segments[0].size + 4096)
    wrong = msgspec.structs.replace(manifest, segments=(longer, manifest.segments[1]))
    with pytest.raises(NotFoundError):
        catalog.commit(encode_manifest(wrong), PLANS[0])


def test_hostile_bytes_are_not_committed(place: Place):
    catalog = Catalog(place.tier)
    for data in (b"", b"x" * 100, encode_manifest(make(1))[:-1]):
        with pytest.raises(IntegrityError):
            catalog.commit(data)
        with pytest.raises(IntegrityError):
            catalog.put_attempt(data)
    with pytest.raises(IntegrityError):
        catalog.put_plan(PLAN_IDS[0], b"noise")
    assert keys(place.tier) == set()


@pytest.mark.parametrize("damaged", ["manifest", "plan", "attempt"])
def test_damage_is_reported_and_can_be_written_over(place: Place, damaged: str):
    catalog = Catalog(place.tier)
    first, second = commit(catalog, 1), commit(catalog, 2, plan=1)
    record = AttemptRecord("run", 1, "aa" * 16, "bb" * 16, (), 0.0)
    catalog.put_attempt(encode_attempt(record))
    key = {
        "manifest": manifest_key("default", first.save_id),
        "plan": plan_key(first.plan),
        "attempt": attempt_key(1, record.id),
    }[damaged]
    place.damage(key)
    catalog = Catalog(place.again())
    found = catalog.load()
    assert second in catalog.manifests()
    if damaged == "manifest":
        bad = next(m for m in found.manifests if m.manifest is None)
        assert (bad.stream, bad.save_id) == ("default", first.save_id)
        assert "damaged" in bad.error
        assert first not in catalog.manifests()
    elif damaged == "plan":
        assert found.plans == {PLAN_IDS[1]}
        assert not catalog.has_plan(PLAN_IDS[0])
    else:
        assert catalog.bad_attempts().keys() == {key}
        assert catalog.attempts() == ()
    catalog.put_plan(PLAN_IDS[0], PLANS[0])
    catalog.commit(encode_manifest(first))
    catalog.put_attempt(encode_attempt(record))
    catalog = Catalog(place.again())
    found = catalog.load()
    assert all(m.manifest for m in found.manifests)
    assert found.plans == set(PLAN_IDS[:2])
    assert catalog.attempts() == (record,)


def test_truncated_emptied_and_misplaced_manifests(place: Place):
    catalog = Catalog(place.tier)
    first, second = commit(catalog, 1), commit(catalog, 2)
    place.damage(manifest_key("default", first.save_id), size=0)
    misplaced = manifest_key("actor", "ab" * 16)
    place.tier.put(misplaced, encode_manifest(second))
    place.tier.put("manifests/not-a-folder", b"x")
    place.tier.put("manifests/default/short", b"x")
    found = catalog.load()
    errors = {m.save_id: m.error for m in found.manifests if m.error}
    assert set(errors) == {first.save_id, "ab" * 16}
    assert "another checkpoint" in errors["ab" * 16]
    assert catalog.manifests() == (second,)


def test_oversized_manifest_is_not_read(place: Place):
    catalog = Catalog(place.tier)
    place.tier.put(manifest_key("default", "ab" * 16), b"x")
    place.damage(manifest_key("default", "ab" * 16), size=64 << 20)
    (found,) = catalog.load().manifests
    assert found.data is None
    assert "at most" in found.error


# --- deleting -------------------------------------------------------------------------------------


def test_remove_takes_what_nobody_else_needs(place: Place):
    catalog = Catalog(place.tier)
    first, second, third = commit(catalog, 1), commit(catalog, 2), commit(catalog, 3, plan=1)
    swept = catalog.remove(first)
    assert set(swept.segments) == {ref.id for ref in first.segments}
    assert swept.plans == ()
    assert keys(place.tier) == keys_of(second, third)
    assert catalog.remove(second, keep=[msgspec.structs.replace(make(9))]).plans == ()
    assert catalog.remove(third).plans == (PLAN_IDS[1],)
    assert keys(place.tier) == {plan_key(PLAN_IDS[0])}
    catalog.remove(third)
    assert catalog.sweep_orphans().plans == (PLAN_IDS[0],)


@pytest.mark.parametrize("stop", ["manifest", "segment"])
def test_a_crash_while_removing_leaves_orphans_only(
    place: Place, stop: str, monkeypatch: pytest.MonkeyPatch
):
    catalog = Catalog(place.tier)
    first, second = commit(catalog, 1), commit(catalog, 2, plan=1)
    if stop == "manifest":
        failpoints.arm("agent.retention.after_manifest_delete=eio")
        with pytest.raises(OSError):
            catalog.remove(first)
    else:
        delete = place.tier.delete

        def fail(key: str) -> None:
            if key == segment_key(first.segments[1].id):
                raise TierUnavailableError("down", tier=place.tier.name, outcome="unknown")
            delete(key)

        monkeypatch.setattr(place.tier, "delete", fail)
        with pytest.raises(TierUnavailableError):
            catalog.remove(first)
        monkeypatch.undo()
    again = Catalog(place.again())
    again.load()
    assert again.manifests() == (second,)
    swept = again.sweep_orphans()
    assert set(swept.segments) <= {ref.id for ref in first.segments}
    assert keys(again.tier) == keys_of(second)


def test_a_failed_delete_of_a_manifest_protects_what_it_needs(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    catalog = Catalog(place.tier)
    first = commit(catalog, 1)

    def fail(key: str) -> None:
        raise TierUnavailableError("down", tier=place.tier.name, outcome="unknown")

    monkeypatch.setattr(place.tier, "delete", fail)
    with pytest.raises(TierUnavailableError):
        catalog.remove(first)
    monkeypatch.undo()
    assert catalog.manifests() == (), "nobody counts on it"
    assert catalog.sweep_orphans().blocked_by == (manifest_key("default", first.save_id),)
    assert keys(place.tier) == keys_of(first), "it may still be visible: it must not dangle"
    catalog.load()
    assert catalog.manifests() == (first,)


def test_sweep_orphans(place: Place):
    catalog = Catalog(place.tier)
    first = commit(catalog, 1)
    coming, orphan, granted = make(2, plan=1), make(3, plan=2), make(4, segments=1)
    for manifest in (coming, orphan, granted):
        put_segments(place.tier, manifest)
    catalog.put_plan(PLAN_IDS[1], PLANS[1])
    catalog.put_plan(PLAN_IDS[2], PLANS[2])
    swept = catalog.sweep_orphans(keep=[coming], keep_segments=[granted.segments[0].id])
    assert set(swept.segments) == {ref.id for ref in orphan.segments}
    assert swept.plans == (PLAN_IDS[2],)
    assert not catalog.has_plan(PLAN_IDS[2])
    catalog.commit(encode_manifest(coming))
    assert sorted(m.step for m in catalog.manifests()) == [1, 2]
    assert keys_of(first) <= keys(place.tier)


def test_an_unreadable_manifest_stops_sweeping(place: Place):
    catalog = Catalog(place.tier)
    first, second = commit(catalog, 1), commit(catalog, 2)
    place.damage(manifest_key("default", first.save_id))
    catalog.load()
    blocked = catalog.sweep_orphans()
    assert blocked.blocked_by == (manifest_key("default", first.save_id),)
    assert keys(place.tier) == keys_of(first, second)
    assert catalog.remove(second).plans == (), "the unreadable one may need it"
    assert catalog.sweep_orphans(keep=[first]) == type(blocked)(), "known from elsewhere"
    catalog.discard("default", first.save_id)
    swept = catalog.sweep_orphans()
    assert set(swept.segments) == {ref.id for ref in first.segments}
    assert keys(place.tier) == set()


def test_a_plan_that_was_swept_meanwhile_is_noticed(place: Place):
    catalog = Catalog(place.tier)
    manifest = make(1)
    put_segments(place.tier, manifest)
    catalog.put_plan(PLAN_IDS[0], PLANS[0])
    place.tier.delete(plan_key(PLAN_IDS[0]))
    with pytest.raises(NotFoundError):
        catalog.commit(encode_manifest(manifest))
    assert list(place.tier.list("manifests/")) == []


# --- facts ----------------------------------------------------------------------------------------


def test_gather(place: Place):
    kind = "memory" if place.tier.name == "memory" else "file"
    catalog = Catalog(place.tier)
    first, second = commit(catalog, 1), commit(catalog, 2)
    truncated, quarantined, partly, gone = (r.id for m in (first, second) for r in m.segments)
    marks = QuarantineMarks(place.tier)
    marks.add(place.tier.name, quarantined, [], "its footer is bad")
    marks.add(place.tier.name, partly, [3, 1, 3], "digest")
    marks.add("another", gone, [], "not here")
    place.damage(segment_key(truncated), size=4096)
    place.damage(manifest_key("default", second.save_id))
    facts = gather(catalog, kind=kind, marks=marks)
    assert (facts.tier, facts.scope, facts.kind, facts.available) == (
        place.tier.name, "host", kind, True,
    )  # fmt: skip
    by_id = {fact.id: fact for fact in facts.segments}
    assert by_id[truncated].size == 4096
    assert by_id[truncated].root is None
    assert by_id[truncated].error
    assert by_id[quarantined].root == first.segments[1].root
    assert "its footer is bad" in by_id[quarantined].error
    assert by_id[partly].error is None
    assert by_id[partly].bad_blocks == (1, 3)
    assert by_id[gone].bad_blocks == ()
    assert by_id[gone].size == second.segments[1].size
    manifests = {fact.save_id: fact for fact in facts.manifests}
    assert manifests[first.save_id].manifest == encode_manifest(first)
    assert manifests[second.save_id].manifest is None
    assert manifests[second.save_id].error
    assert facts.plans == (PLAN_IDS[0],)
    holdings = Holdings(host_id="h", namespace="run", attempts=(b"x",), tiers=(facts,))
    assert decode_holdings(encode_holdings(holdings)) == holdings


def test_gather_from_a_tier_that_is_down(place: Place, monkeypatch: pytest.MonkeyPatch):
    catalog = Catalog(place.tier)
    commit(catalog, 1)

    def fail(prefix: str) -> Iterator[object]:
        raise TierUnavailableError("no answer", tier="x", outcome="not_applied")

    monkeypatch.setattr(place.tier, "list", fail)
    facts = gather(catalog, kind="file")
    assert not facts.available
    assert facts.error == "no answer"


@given(st.binary(max_size=300))
def test_holdings_from_a_hostile_agent(data: bytes):
    with pytest.raises(RemoteProtocolError):
        decode_holdings(data)


# --- quarantine -----------------------------------------------------------------------------------


def test_marks_merge_and_survive(place: Place):
    marks = QuarantineMarks(place.tier)
    name = segment_name(1)
    assert marks.get("disk", name) is None
    marks.add("disk", name, [5, 2], "first")
    mark = marks.add("disk", name, [7], "second")
    assert (mark.blocks, mark.whole, mark.reason) == ((2, 5, 7), False, "first")
    marks.add("memory", name, [1], "there too")
    for each in (marks, QuarantineMarks(place.again())):
        assert each.get("disk", name) == mark
        assert each.get("memory", name).blocks == (1,)
        assert each.count("disk") == 1
    assert len(list(place.tier.list("quarantine/"))) == 2, "old revisions are deleted"
    whole = marks.add("disk", name, [], "footer")
    assert whole.whole
    assert whole.blocks == ()
    assert marks.add("disk", name, [9], "again") == whole
    assert QuarantineMarks(place.again()).get("disk", name) == whole
    for _ in range(2):
        marks.forget("disk", name)
    assert marks.get("disk", name) is None
    assert QuarantineMarks(place.again()).get("disk", name) is None


def test_a_mark_is_lifted_by_a_look_that_began_after_it(place: Place):
    marks = QuarantineMarks(place.tier)
    name, before_ns = segment_name(1), time.monotonic_ns()
    marks.lift("disk", name, before_ns)  # there is none
    marks.add("disk", name, [1], "damaged")
    marks.lift("disk", name, before_ns)
    between_ns = time.monotonic_ns()
    assert marks.add("disk", name, [1], "the same again").blocks == (1,)
    marks.lift("disk", name, between_ns)
    assert marks.count("disk") == 1
    again = QuarantineMarks(place.again())
    again.lift("disk", name, time.monotonic_ns() - 10**12)  # of another start of the agent
    assert again.count("disk") == 1
    marks.lift("disk", name, time.monotonic_ns() + 1)
    assert marks.get("disk", name) is None
    assert QuarantineMarks(place.again()).get("disk", name) is None


def test_marks_are_bounded(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quarantine, "MAX_MARKED_COPIES", 3)
    marks = QuarantineMarks(place.tier)
    for number in range(5):
        marks.add("disk", segment_name(number), [1], "x" * 10_000)
    assert marks.count("disk") == 3
    assert marks.get("disk", segment_name(1)) is None
    assert len(list(place.tier.list("quarantine/"))) == 3
    assert len(marks.get("disk", segment_name(4)).reason) == quarantine.MAX_REASON_CHARS
    many = marks.add("disk", segment_name(4), range(quarantine.MAX_MARKED_BLOCKS + 1), "")
    assert many.whole


def test_damaged_marks_are_left_out(place: Place):
    marks = QuarantineMarks(place.tier)
    for number in range(2):
        marks.add("disk", segment_name(number), [1], "x")
    (key, _) = sorted(info.key for info in place.tier.list("quarantine/"))
    place.damage(key)
    again = QuarantineMarks(place.again())
    assert again.get("disk", segment_name(0)) is None
    assert again.get("disk", segment_name(1)).blocks == (1,)
    again.add("disk", segment_name(0), [2], "y")
    again.add("disk", segment_name(0), [3], "y")
    assert again.get("disk", segment_name(0)).blocks == (2, 3)
    assert QuarantineMarks(place.again()).get("disk", segment_name(0)).blocks == (2, 3)


def test_marks_of_earlier_releases_are_merged_and_forgotten(place: Place):
    marks = QuarantineMarks(place.tier)
    marks.add("disk", segment_name(1), [1], "x")
    (first,) = place.tier.list("quarantine/")
    place.tier.put(first.key.removesuffix("-1") + "-3", place.tier.get(first.key, limit=1 << 16))
    marks.add("disk", segment_name(1), [2], "y")
    marks.add("disk", segment_name(2), [4], "z")
    again = QuarantineMarks(place.again())
    assert again.get("disk", segment_name(1)).blocks == (1, 2)
    again.forget("disk", segment_name(1))
    last = QuarantineMarks(place.again())
    assert last.get("disk", segment_name(1)) is None
    assert last.get("disk", segment_name(2)).blocks == (4,)
    assert len(list(place.tier.list("quarantine/"))) == 1


def test_a_mark_holds_even_if_it_cannot_be_stored(place: Place, monkeypatch: pytest.MonkeyPatch):
    marks = QuarantineMarks(place.tier)

    def full(key: str, data: bytes) -> None:
        raise CapacityError("full")

    monkeypatch.setattr(place.tier, "replace", full)
    marks.add("disk", segment_name(1), [1], "x")
    assert marks.get("disk", segment_name(1)).blocks == (1,)


def test_hostile_marks(place: Place):
    marks = QuarantineMarks(place.tier)
    for tier, segment, blocks in (
        ("../x", segment_name(1), [1]),
        ("disk", "short", [1]),
        ("disk", segment_name(1), [-1]),
        ("disk", segment_name(1), [1 << 40]),
    ):
        with pytest.raises(ValueError):
            marks.add(tier, segment, blocks, "x")
    assert list(place.tier.list("quarantine/")) == []
