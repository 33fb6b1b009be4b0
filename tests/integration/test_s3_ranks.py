"""Ranks on several hosts, disks of their own and a bucket of a real server that outlives them all.

What a load must bring is computed from step and seed; what the bucket holds is looked at past every
client. Hosts are loopback addresses: the server is one, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import MIB, Loaded, eventually
from tests.support.hosts import Cluster, Host, HostJob
from tests.support.http_proxy import HttpProxy, slow_down
from tests.support.s3_bench import DEADLINE_S, Bucket, credentials
from tests.support.states import flip, slot_of
from tieredckpt.format.manifest import Manifest, decode_manifest
from tieredckpt.format.segment import BLOCK_BYTES
from tieredckpt.testing.s3_server import S3Server

MIB_SAVED = 12.0
"""Of the whole state: on two ranks two blocks in each segment."""


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[HttpProxy]:
    """Between all hosts and the store."""
    with HttpProxy(s3_server.address) as proxy:
        yield proxy


@pytest.fixture
def bucket(s3_server: S3Server, s3_prefix: str) -> Bucket:
    return Bucket(s3_server, s3_prefix)


class Hosts(Cluster):
    """Each has memory, a disk, and the bucket, which is filled from the disk.

    Args:
        folder, count: As Cluster.
        endpoint: Of the store, or of what is before it.
        bucket: Where in it.
        disk: False: the bucket is filled from memory.
        more: Keys of the bucket's tier.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        endpoint: str,
        bucket: Bucket,
        *,
        disk: bool = True,
        **more: Any,
    ) -> None:
        super().__init__(folder, 0, links=False, environ=credentials())
        self.tier = {
            "name": "s3", "url": f"s3://{bucket.prefix}", "endpoint": endpoint, "allow_http": True,
            "part_size": "5MiB", "concurrency": 2, "retry_for": "2 s", "timeout": "10 s", **more,
        }  # fmt: skip
        self.has_disk = disk
        try:
            self.instead(count)
        except BaseException:
            self.close()
            raise

    def instead(self, count: int, *, left: tuple[Host, ...] = ()) -> None:
        """All are lost but those that are ``left``; so many fresh ones come, with agents."""
        for host in self.hosts:
            if host not in left:
                host.kill()
        self.hosts = list(left)
        for host in [self.add() for _ in range(count)]:
            tiers = [self.tier]
            if self.has_disk:
                disk = {"name": "disk", "url": f"file://{host.disk}", "keep": {"last": 3}}
                tiers = [disk, self.tier | {"from": "disk"}]
            host.settings = {"tiers": tiers}
        self.start_agents()


def on_all(job: HostJob, command: str, *args: Any) -> list[Any]:
    """What all ranks answer."""
    job.start(command, *args)
    found = job.outcomes(2 * DEADLINE_S)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def saved(job: HostJob, step: int, level: str = "s3") -> None:
    """All ranks save, and all of it reaches ``level``."""
    on_all(job, "save", step)
    on_all(job, "wait", step, level, DEADLINE_S)


def loaded(job: HostJob, step: int) -> list[Loaded]:
    """All ranks load ``step``, bit for bit."""
    found: list[Loaded] = on_all(job, "load")
    for each in found:
        assert isinstance(each, Loaded), each
        assert (each.step, each.wrong) == (step, [])
    return found


def is_whole(bucket: Bucket, manifest: Manifest) -> None:
    """All that it names is there."""
    for ref in manifest.segments:
        assert len(bucket.get(f"segments/{ref.id}")) == ref.size


def test_all_hosts_are_lost_and_others_go_on_with_other_ranks(
    tmp_path: Path, s3_server: S3Server, bucket: Bucket
):
    """Four ranks on two hosts, then three on three: nothing is left of the first but the bucket."""
    with Hosts(tmp_path, 2, s3_server.endpoint, bucket) as cluster:
        with cluster.job(ranks=2, mib=MIB_SAVED) as job:
            job.open()
            on_all(job, "load")
            saved(job, 1)
            saved(job, 2)
        cluster.instead(3)
        with cluster.job(mib=MIB_SAVED, saved_by=4) as job:
            job.open()
            for each in loaded(job, 2):
                assert set(each.bytes_by_tier) == {"s3"}
            saved(job, 3)
        found = bucket.manifests()
        assert {step: len(each.segments) for step, each in found.items()} == {1: 4, 2: 4, 3: 3}
        for each in found.values():
            is_whole(bucket, each)


def test_what_no_host_has_any_more_comes_from_the_bucket_block_by_block(
    tmp_path: Path, s3_server: S3Server, bucket: Bucket
):
    """Two of three hosts are lost: one segment with its copy. Of another one a block is damaged."""
    with Hosts(tmp_path, 3, s3_server.endpoint, bucket, disk=False) as cluster:
        with cluster.job(mib=2 * MIB_SAVED) as job:
            job.open()
            on_all(job, "load")
            saved(job, 1)
            on_all(job, "wait", 1, "replicated", DEADLINE_S)
            copies = dict(on_all(job, "placed", 1)[0])
        left = cluster.hosts[0]
        manifest = bucket.manifests()[1]
        kept = {owner for owner, holders in copies.items() if left.name in (owner, *holders)}
        assert len(kept) == 2
        of = {ref.host: ref.id for ref in manifest.segments}
        flip(slot_of(left.runtime_dir, of[left.name]), BLOCK_BYTES + 5)
        cluster.instead(2, left=(left,))
        with cluster.job(mib=2 * MIB_SAVED) as job:
            job.open()
            found = loaded(job, 1)
        from_bucket = dict.fromkeys(of.values(), 0)
        for each in found:
            for segment, places in each.segments.items():
                assert all(place == "s3" or place.startswith("memory on") for place in places)
                from_bucket[segment] += places.get("s3", 0)
        for ref in manifest.segments:
            if ref.host not in kept:
                assert from_bucket[ref.id] > 2 * BLOCK_BYTES
            elif ref.host == left.name:
                assert 0 < from_bucket[ref.id] <= BLOCK_BYTES
            else:
                assert from_bucket[ref.id] == 0
        assert sum(each.repaired_blocks for each in found) == 1


def test_memory_is_free_once_the_disk_has_it_and_wrong_bytes_go_nowhere(
    tmp_path: Path, s3_server: S3Server, bucket: Bucket, proxy: HttpProxy
):
    """The bucket is full meanwhile; then one disk's copy is bad, of what memory has let go."""
    with Hosts(tmp_path, 2, proxy.endpoint, bucket, takeover_after="2 s") as cluster:
        with cluster.job(mib=MIB_SAVED) as job:
            job.open(memory={"keep": {"last": 1}})
            on_all(job, "load")
            saved(job, 1)
            proxy.rules.append(slow_down("PUT .*segments", times=None, status=507))
            for step in (2, 3, 4):
                saved(job, step, "disk")
            trainer, host = job.trainers[0], job.hosts[0]
            # (Each host keeps its own segment of the newest one, and a copy of the other's.)
            eventually(lambda: len(trainer.copies(4)[1]) == 2, deadline_s=DEADLINE_S)
            on_disk = manifests_on(host)
            bad = next(ref for ref in on_disk[3].segments if ref.host == host.name)
            flip(host.disk / "run" / "segments" / bad.id, BLOCK_BYTES + 5)
            proxy.heal()
            on_all(job, "wait", 2, "s3", DEADLINE_S)
            on_all(job, "wait", 4, "s3", DEADLINE_S)
            eventually(lambda: "disk copy" in failure_of(host, on_disk[3]), deadline_s=DEADLINE_S)
        found = bucket.manifests()
        assert set(found) == {1, 2, 4}
        assert f"segments/{bad.id}" not in bucket.keys("segments/")
        for each in found.values():
            is_whole(bucket, each)


def test_a_replica_is_uploaded_if_neither_disk_nor_memory_of_the_owner_is_good(
    tmp_path: Path, s3_server: S3Server, bucket: Bucket, proxy: HttpProxy
):
    with Hosts(tmp_path, 2, proxy.endpoint, bucket, takeover_after="2 s") as cluster:
        with cluster.job(mib=MIB_SAVED) as job:
            job.open()
            on_all(job, "load")
            proxy.rules.append(slow_down("PUT .*segments", times=None, status=507))
            saved(job, 1, "disk")
            on_all(job, "wait", 1, "replicated", DEADLINE_S)
            host = job.hosts[1]
            manifest = manifests_on(host)[1]
            bad = next(ref for ref in manifest.segments if ref.host == host.name)
            flip(host.disk / "run" / "segments" / bad.id, 5)
            flip(slot_of(host.runtime_dir, bad.id), 5)
            proxy.heal()
            for trainer in job.trainers:  # the owner, too, learns that it is there
                trainer.wait(1, "s3", DEADLINE_S, deadline_s=2 * DEADLINE_S)
        assert bucket.manifests() == {1: manifest}
        cluster.instead(2)
        with cluster.job(mib=MIB_SAVED) as job:
            job.open()
            loaded(job, 1)


def manifests_on(host: Host) -> dict[int, Manifest]:
    """By step, what its disk holds."""
    found = [path.read_bytes() for path in (host.disk / "run" / "manifests").rglob("*/*")]
    return {each.step: each for each in map(decode_manifest, found)}


def failure_of(host: Host, manifest: Manifest) -> str:
    """What its agent says of a checkpoint that did not reach the bucket."""
    with host.client() as client:
        return client.progress(manifest.save_id, namespace="run").errors.get("s3", "")


def test_flush_and_the_command_bring_what_was_not_to_go(
    tmp_path: Path, s3_server: S3Server, bucket: Bucket, proxy: HttpProxy
):
    """Too little time: it is said how far it came. Then from outside, when no rank is left."""
    seldom = {"every": "100000 steps"}
    with Hosts(tmp_path, 2, proxy.endpoint, bucket, disk=False, **seldom) as cluster:
        with cluster.job(mib=MIB_SAVED) as job:
            job.open()
            on_all(job, "load")
            saved(job, 1)
            on_all(job, "save", 2)
            proxy.bytes_per_s = 0.5e6
            for report in on_all(job, "flush", "s3", 3.0):
                assert report.tier == "s3"
                assert (report.done, report.steps) == (False, {"default": 2})
                assert report.levels["default"] in ("queued", "active", "waiting")
                assert report.copied_bytes < report.total_bytes
                assert report.total_bytes > 4 * MIB
            assert 2 not in bucket.manifests()
            proxy.heal()
            for report in on_all(job, "flush", None, DEADLINE_S):
                assert (report.tier, report.done, report.errors) == ("s3", True, {})
            is_whole(bucket, bucket.manifests()[2])
            on_all(job, "save", 3)
        host = cluster.hosts[1]
        answer = spill_now(host, tmp_path / "spill.yaml", "--tier", "s3", "--deadline", "120 s")
        assert answer["done"]
        assert answer["steps"] == {"default": 3}
        is_whole(bucket, bucket.manifests()[3])


def spill_now(host: Host, file: Path, *more: str) -> Any:
    """The command's answer, on this host."""
    file.write_text(json.dumps(host.config()))
    done = subprocess.run(
        [sys.executable, "-m", "tieredckpt", "spill", "--now", "--json", "--config", str(file),
         *more],
        capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False,
        env={**os.environ, **host.environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_sigterm_on_one_of_two_hosts(tmp_path: Path, s3_server: S3Server, bucket: Bucket):
    """Both ranks leave at one step; what was committed then is in the bucket, for other hosts."""
    seldom = {"every": "100000 steps"}
    with Hosts(tmp_path, 2, s3_server.endpoint, bucket, disk=False, **seldom) as cluster:
        with cluster.job() as job:
            job.open()
            on_all(job, "load")
            saved(job, 1)
            job.start("train_until_told", 2, 3, 600.0)
            with job.hosts[0].client() as client:
                eventually(lambda: newest_step(client) >= 5, deadline_s=DEADLINE_S)
            os.kill(job.trainers[1].pid, signal.SIGTERM)
            first, second = job.outcomes(deadline_s=DEADLINE_S)
        assert first[0] == second[0]
        assert (first[1], second[1]) == (False, True)
        for _, _, report in (first, second):
            assert (report.tier, report.done) == ("s3", True)
            assert report.steps == {"default": first[0] // 3 * 3}
        cluster.instead(1)
        with cluster.job(saved_by=2) as job:
            job.open()
            loaded(job, first[0] // 3 * 3)


def newest_step(client: Any) -> int:
    (namespace,) = client.status().namespaces
    return int(namespace.newest_step or 0)
