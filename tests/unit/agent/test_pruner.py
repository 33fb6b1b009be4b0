"""The worker of a shared tier, called as its thread would: turns come also when others wait."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.format.samples import hex_id, save_record, small_attempt, small_manifest
from tests.simulation.shared_world import PLANS, SPEC, Bytes, Job, SimHost, World, segment_bytes
from tieredckpt.agent.tiers import pruner as pruner_module
from tieredckpt.agent.tiers.pruner import SharedPruner
from tieredckpt.agent.tiers.source import VerifiedSource
from tieredckpt.agent.tiers.worker import TierWorker
from tieredckpt.config.schema import load_config
from tieredckpt.errors import TierUnavailableError
from tieredckpt.format.manifest import AttemptId, Followed, Manifest, SegmentRef, encode_manifest
from tieredckpt.format.records import encode_save_record
from tieredckpt.policy.shared_tier import SharedTimes, position
from tieredckpt.storage.backends.file import FileTier
from tieredckpt.storage.base import Scope, segment_key
from tieredckpt.storage.shared.catalog import SharedCatalog


@pytest.fixture
def job() -> Job:
    """Two hosts, which have nothing in memory."""
    found = Job(0)
    found.attempts = [msgspec.structs.replace(small_attempt(), bases=())]
    found.known = list(found.attempts)
    found.hosts = [SimHost(f"h{number}", found, False, World(0)) for number in range(2)]
    return found


def save(job: Job, number: int, first: int) -> Manifest:
    """A checkpoint in the memory of both hosts, at which host ``first`` has to look first."""
    attempt, names = job.attempts[0], [host.host_id for host in job.hosts]
    save_id = next(
        found
        for each in itertools.count(number * 100)
        if position(found := hex_id(each), f"h{first}", names) == 0
    )
    refs, pieces = [], {}
    for at, host in enumerate(job.hosts):
        name, root, data = segment_bytes(number * 2 + at)
        refs.append(SegmentRef(name, len(data), root, host.host_id))
        pieces[name] = data
        host.memory[name] = data
    manifest = msgspec.structs.replace(
        small_manifest(), save_id=save_id, step=number, seq=number, plan=next(iter(PLANS)),
        segments=tuple(refs), attempt=AttemptId(attempt.number, attempt.id),
    )  # fmt: skip
    for host in job.hosts:
        host.manifests[save_id] = (manifest, encode_manifest(manifest))
    return manifest


def test_a_queue_that_never_empties_starves_no_commit(job: Job, tmp_path: Path):
    ticks = itertools.count()
    spec = msgspec.structs.replace(SPEC, url=f"file://{tmp_path}")
    worker = TierWorker(spec, "gpt-run-7", job.hosts[0], clock=lambda: float(next(ticks)))
    other = FileTier("bucket", tmp_path, "gpt-run-7", scope=Scope.SHARED)
    worker.step()
    for number in range(1, 8):
        manifest = save(job, number, first=1)
        theirs = manifest.segments[1]
        worker.enqueue(manifest)
        worker.step()
        # The other host has uploaded its part, and died.
        opened = Bytes(job.hosts[1].memory[theirs.id])
        other.put_from(segment_key(theirs.id), VerifiedSource(opened, theirs, lambda: False))
    assert worker.error is None
    assert worker.catalog is not None
    assert worker.catalog.manifests(), "nobody looked whether any of them is complete"


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pin_counts_until_the_last_moment(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: bool
):
    tier = FileTier("bucket", tmp_path, "gpt-run-7", scope=Scope.SHARED)
    catalog, elsewhere = SharedCatalog(tier), SharedCatalog(tier)
    oldest = save(job, 1, first=0)
    for manifest in (oldest, save(job, 2, first=0), save(job, 3, first=0)):
        catalog.put_manifest(encode_manifest(manifest))
    pin = msgspec.structs.replace(save_record("pin"), save_id=oldest.save_id)
    calls = itertools.count()
    check_term = pruner_module.check_term

    def slow(*args: object) -> None:
        if next(calls) == 1 and pinned:  # what to delete is decided
            elsewhere.put_record(encode_save_record(pin))
        check_term(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(pruner_module, "check_term", slow)
    host = job.hosts[0]
    host.leader = True
    pruner = SharedPruner(catalog, "gpt-run-7", SPEC, host, SharedTimes(), clock=lambda: 0.0)
    pruner.step(lambda: False)
    assert next(calls) > 1
    assert (oldest in catalog.manifests()) is pinned


@pytest.mark.parametrize(
    ("keep", "left"),
    [(None, 5), ({}, 5), ("all", 5), ({"last": 2}, 2), ({"every": "2 steps"}, 4)],
    ids=str,
)
def test_what_hosts_share_is_pruned_by_rules_that_were_written_for_it(
    job: Job, tmp_path: Path, keep: object, left: int
):
    """Without any nothing goes, ever; the defaults are those of a tier of one host."""
    written = {"name": "bucket", "url": f"file://{tmp_path}", "scope": "shared", "keep": keep}
    config = load_config({"namespace": "gpt-run-7", "tiers": [written]}, {})
    tier = FileTier("bucket", tmp_path, "gpt-run-7", scope=Scope.SHARED)
    catalog, host = SharedCatalog(tier), job.hosts[0]
    for number in range(1, 6):
        catalog.put_manifest(encode_manifest(save(job, number, first=0)))
    host.leader = True
    spec = config.tiers[0]
    pruner = SharedPruner(catalog, "gpt-run-7", spec, host, SharedTimes(), clock=lambda: 0.0)
    pruner.step(lambda: False)
    pruner.wake()
    pruner.step(lambda: False)
    assert len(catalog.manifests()) == left


def test_the_third_start_of_a_job_goes_on_pruning(job: Job, tmp_path: Path):
    """The claims of both before it are still there."""
    tier = FileTier("bucket", tmp_path, "gpt-run-7", scope=Scope.SHARED)
    catalog, host = SharedCatalog(tier), job.hosts[0]
    records, before = [], ()
    for number in range(1, 4):
        record = msgspec.structs.replace(
            small_attempt(), number=number, id=hex_id(70 + number), run=hex_id(80 + number),
            bases=(), followed=before,
        )  # fmt: skip
        before = (Followed(number, record.id),)
        records.append(record)
        catalog.claim(record, [each.id for each in records])
    job.attempts = job.known = records[::-1]
    for number in range(1, 6):
        catalog.put_manifest(encode_manifest(save(job, number, first=0)))
    host.leader = True
    pruner = SharedPruner(catalog, "gpt-run-7", SPEC, host, SharedTimes(), clock=lambda: 0.0)
    pruner.step(lambda: False)
    assert len(catalog.manifests()) == 2


def test_one_list_that_lacks_a_manifest_deletes_nothing(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tier = FileTier("bucket", tmp_path, "gpt-run-7", scope=Scope.SHARED)
    catalog, manifest = SharedCatalog(tier), save(job, 1, first=0)
    pin = msgspec.structs.replace(save_record("pin"), save_id=manifest.save_id)
    for ref, host in zip(manifest.segments, job.hosts, strict=True):
        opened = Bytes(host.memory[ref.id])
        tier.put_from(segment_key(ref.id), VerifiedSource(opened, ref, lambda: False))
    catalog.put_manifest(encode_manifest(manifest))
    catalog.put_record(encode_save_record(pin))
    for each in (*tier.list("segments/"), *tier.list("records/")):
        os.utime(tmp_path / "gpt-run-7" / each.key, (0, 0))
    now_s, missing = [0.0], [True]
    listed = FileTier.list

    def late(self: FileTier, prefix: str) -> object:
        return iter(()) if prefix == "manifests/" and missing[0] else listed(self, prefix)

    monkeypatch.setattr(FileTier, "list", late)
    host, times = job.hosts[0], SharedTimes()
    host.leader = True
    pruner = SharedPruner(catalog, "gpt-run-7", SPEC, host, times, clock=lambda: now_s[0])

    def there() -> int:
        return len([*listed(tier, "segments/"), *listed(tier, "records/")])

    for missing[0] in (True, False, True):
        pruner.step(lambda: False)
        now_s[0] += times.sweep_every_s
        assert there() == 3
    pruner.step(lambda: False)
    assert there() == 0, "nothing has named them for an hour"


def test_an_agent_that_restarts_into_a_storm_comes_through(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two of three requests are answered 503 while it attaches, finishes, uploads and prunes."""
    rng, storm = random.Random(5), [0.0]

    def storming(real: Callable[..., Any]) -> Callable[..., Any]:
        def request(*args: Any, **named: Any) -> Any:
            if rng.random() < storm[0]:
                raise TierUnavailableError("503 SlowDown", status=503, outcome="not_applied")
            return real(*args, **named)

        return request

    for name in ("put", "replace", "put_from", "get", "info", "list", "now_s", "delete"):
        monkeypatch.setattr(FileTier, name, storming(getattr(FileTier, name)))
    spec = msgspec.structs.replace(SPEC, url=f"file://{tmp_path}", delete_delay_s=0.0)
    host, ticks = job.hosts[0], itertools.count()
    host.leader = True
    left = save(job, 1, first=0)
    worker = TierWorker(spec, "gpt-run-7", host, clock=lambda: float(next(ticks)))
    worker.step()
    assert worker.catalog is not None
    worker.enqueue(left)
    worker.step()
    theirs = left.segments[1]
    opened = Bytes(job.hosts[1].memory[theirs.id])
    worker.catalog.tier.put_from(
        segment_key(theirs.id), VerifiedSource(opened, theirs, lambda: False)
    )
    pending = next((tmp_path / "gpt-run-7" / "pending").rglob(left.save_id))
    os.utime(pending, (pending.stat().st_mtime - 100.0,) * 2)
    # The agent is killed. The next one has nothing in memory but what it is given.
    host.memory.clear()
    host.manifests.clear()
    storm[0] = 2 / 3
    after = TierWorker(spec, "gpt-run-7", host, clock=lambda: float(next(ticks)))
    for number in range(2, 5):
        both = save(job, number, first=0)
        mine = msgspec.structs.replace(both, segments=both.segments[:1])
        host.manifests[mine.save_id] = (mine, encode_manifest(mine))
        after.enqueue(mine)
    for _ in range(3000):
        after.step()
    storm[0] = 0.0
    for _ in range(50):
        after.step()
    assert after.catalog is not None
    there = {each.step for each in after.catalog.manifests()}
    assert there == {3, 4}, "what was complete is committed, and the two newest are kept"
    names = {each.key.rpartition("/")[2] for each in after.catalog.tier.list("segments/")}
    assert names == {ref.id for each in after.catalog.manifests() for ref in each.segments}


def test_what_a_crash_left_in_a_shared_folder_is_swept(job: Job, tmp_path: Path):
    tier = FileTier("bucket", tmp_path, "gpt-run-7", scope=Scope.SHARED)
    old, young = (tmp_path / "gpt-run-7" / "tmp" / name for name in ("old", "young"))
    for each in (old, young):
        each.write_bytes(b"x")
    os.utime(old, (0, 0))
    host = job.hosts[0]
    host.leader = True
    catalog = SharedCatalog(tier)
    SharedPruner(catalog, "gpt-run-7", SPEC, host, SharedTimes(), clock=lambda: 0.0).step(
        lambda: False
    )
    assert (old.exists(), young.exists()) == (False, True)


def test_a_pin_is_there_before_the_checkpoint_is(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else a pruner could find the checkpoint, and no pin, in between."""
    host, manifest = job.hosts[0], save(job, 1, first=0)
    mine = msgspec.structs.replace(manifest, segments=manifest.segments[:1])
    host.manifests[mine.save_id] = (mine, encode_manifest(mine))
    pin = msgspec.structs.replace(save_record("pin"), save_id=mine.save_id)
    later = msgspec.structs.replace(pin, id=hex_id(501))
    said = [encode_save_record(pin)]
    monkeypatch.setattr(type(host.keeping), "pins_of", lambda self, save_id: tuple(said))
    put, seen = SharedCatalog.put_manifest, []

    def looking(self: SharedCatalog, data: bytes) -> str:
        found = SharedCatalog(self.tier)
        found.load_records()
        seen.extend(record.id for record in found.records(mine.save_id))
        said.append(encode_save_record(later))
        return put(self, data)

    monkeypatch.setattr(SharedCatalog, "put_manifest", looking)
    spec = msgspec.structs.replace(SPEC, url=f"file://{tmp_path}")
    worker = TierWorker(spec, "gpt-run-7", host)
    worker.step()
    worker.enqueue(mine)
    worker.step()
    assert seen == [pin.id]
    assert worker.catalog is not None
    assert {each.id for each in worker.catalog.records(mine.save_id)} == {pin.id, later.id}
