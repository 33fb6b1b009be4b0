"""Ranks on several hosts, disks of their own and a bucket of a real server that outlives them all.

What a load must bring is computed from step and seed; what the bucket holds is looked at past every
client. Hosts are loopback addresses: the server is one, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import Loaded, eventually
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
    """Two ranks on two hosts, then three on one: nothing is left of the first but the bucket."""
    with Hosts(tmp_path, 2, s3_server.endpoint, bucket) as cluster:
        with cluster.job(mib=2.0) as job:
            job.open()
            on_all(job, "load")
            saved(job, 1)
            saved(job, 2)
        cluster.instead(1)
        with cluster.job(ranks=3, mib=2.0, saved_by=2) as job:
            job.open()
            for each in loaded(job, 2):
                assert set(each.bytes_by_tier) == {"s3"}
            saved(job, 3)
        found = bucket.manifests()
        assert {step: len(each.segments) for step, each in found.items()} == {1: 2, 2: 2, 3: 3}
        for each in found.values():
            is_whole(bucket, each)


@pytest.mark.full
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


@pytest.mark.full
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
