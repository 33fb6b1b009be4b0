"""Several hosts and a bucket: who uploads what, who takes over, and what is restored elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.agent import spec_of, wait_until
from tests.support.http_proxy import HttpProxy, Rule
from tests.support.peers import Job, PeerHost
from tests.support.s3_bench import DEADLINE_S, Bucket, credentials
from tieredckpt.config.tiers import Keep
from tieredckpt.format.manifest import Manifest, decode_manifest
from tieredckpt.rpc.messages import agent as m
from tieredckpt.testing.s3_server import S3Server

SIZE = 17 << 20
"""Three parts of 8 MiB."""


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in credentials().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def proxies(s3_server: S3Server) -> Iterator[list[HttpProxy]]:
    """One between each host and the store."""
    with HttpProxy(s3_server.address) as one, HttpProxy(s3_server.address) as other:
        yield [one, other]


def spec(endpoint: str, prefix: str, **more: float) -> m.NamespaceSpec:
    """Memory, and a bucket that all hosts share."""
    store = m.TierSpec(name="s3", url=f"s3://{prefix}", scope="shared", keep=Keep(last=2)).object
    store = msgspec.structs.replace(
        store, endpoint=endpoint, allow_http=True, part_bytes=8 << 20, concurrency=1,
        retry_for_s=2.0, timeout_s=20.0,
    )  # fmt: skip
    tier = m.TierSpec(
        name="s3", url=f"s3://{prefix}", scope="shared", keep=Keep(last=2), object=store, **more
    )
    return msgspec.structs.replace(spec_of(), tiers=(tier,))


def job_over(folder: Path, proxies: list[HttpProxy], prefix: str, **more: float) -> Job:
    """Two hosts, each with a way to the store of its own."""
    job = Job(folder, 0, size=SIZE)
    try:
        for number, proxy in enumerate(proxies):
            job.spec = spec(proxy.endpoint, prefix, **more)
            job.add(number)
        job.gather()
    except BaseException:
        job.close()
        raise
    return job


def level(host: PeerHost, saved: Manifest, name: str = "s3") -> str | None:
    if saved.save_id not in host.save_ids():
        return None
    return host.client.progress(saved.save_id).levels[name]


def done(saved: Manifest, *hosts: PeerHost, name: str = "s3") -> None:
    for host in hosts:
        wait_until(lambda h=host: level(h, saved, name) == "done", deadline_s=DEADLINE_S)


def is_whole(bucket: Bucket, saved: Manifest, host: PeerHost) -> None:
    """The manifest is there once, and of each segment exactly what memory has."""
    assert bucket.manifests()[saved.step] == saved
    for ref in saved.segments:
        assert len(stored := bucket.get(f"segments/{ref.id}")) == ref.size
        assert host.trainer.read(ref) == stored


def segments_sent(proxy: HttpProxy) -> set[str]:
    """Ids of segments of which something was sent on this way."""
    return {
        each.target.partition("?")[0].rpartition("/")[2]
        for each in proxy.seen
        if each.method == "PUT" and "/segments/" in each.target
    }


def test_each_uploads_its_own_and_racing_writers_commit_once(
    runtime_dir: Path, proxies: list[HttpProxy], s3_server: S3Server, s3_prefix: str
):
    """Both put the manifest, one after an answer that was lost: it is there once, and right."""
    bucket = Bucket(s3_server, s3_prefix)
    with job_over(runtime_dir, proxies, s3_prefix) as job:
        for proxy in proxies:  # neither learns that it has won
            proxy.rules.append(Rule("lose_response", "PUT .*/manifests/", times=None))
        saved = job.save(1, tiers=("s3",))
        wait_until(lambda: saved.step in bucket.manifests(), deadline_s=DEADLINE_S)
        done(saved, *job.hosts)
        for host in job.hosts:
            done(saved, host, name="replicated")
        own = {ref.host: ref.id for ref in saved.segments}
        for host, proxy in zip(job.hosts, proxies, strict=True):
            assert segments_sent(proxy) == {own[host.name]}
        is_whole(bucket, saved, job.hosts[0])
        assert bucket.keys("claims/") == ["claims/00000001"]


def test_an_owner_that_dies_after_half_an_upload(
    runtime_dir: Path, proxies: list[HttpProxy], s3_server: S3Server, s3_prefix: str
):
    """Who holds the copy brings the rest; then both die, and fresh hosts find the checkpoint."""
    bucket = Bucket(s3_server, s3_prefix)
    half = Rule("stall", "PUT .*partNumber=2", times=None)
    with job_over(runtime_dir, proxies, s3_prefix, takeover_after_s=2.0) as job:
        alive, dying = job.hosts
        proxies[1].rules.append(half)
        saved = job.save(1, tiers=("s3",))
        done(saved, alive, name="replicated")
        wait_until(lambda: half.met > 0, deadline_s=DEADLINE_S)
        dying.agent.kill()
        proxies[1].heal()
        done(saved, alive)
        is_whole(bucket, saved, alive)
        assert segments_sent(proxies[0]) == {ref.id for ref in saved.segments}
        for host in list(job.hosts):
            host.close()
            job.hosts.remove(host)
        for number, proxy in enumerate(proxies):
            job.spec = spec(proxy.endpoint, s3_prefix)
            job.add(5 + number)
        job.gather()
        for host in job.hosts:
            (found,) = host.trainer.tier("s3").manifests
            assert decode_manifest(found.manifest or b"") == saved
        assert job.hosts[0].trainer.open_attempt({"default": saved.save_id}).number == 2


def test_a_zombie_of_an_older_attempt_is_refused(
    runtime_dir: Path, proxies: list[HttpProxy], s3_server: S3Server, s3_prefix: str
):
    """A job that another one took over from puts nothing more into the bucket."""
    bucket = Bucket(s3_server, s3_prefix)
    with Job(runtime_dir, 1, spec=spec(proxies[0].endpoint, s3_prefix)) as zombie:
        old = zombie.save(1, tiers=("s3",))
        done(old, zombie.hosts[0])
        (folder := runtime_dir / "new").mkdir(mode=0o700)
        with Job(folder, 0, spec=spec(proxies[1].endpoint, s3_prefix)) as job:
            host = job.add(7)
            job.gather()
            assert [each.save_id for each in host.trainer.tier("s3").manifests] == [old.save_id]
            assert host.trainer.open_attempt({"default": old.save_id}).number == 2
            new = job.save(2, tiers=("s3",))
            done(new, host)
            late = zombie.save(3, tiers=("s3",))
            wait_until(
                lambda: (
                    "attempt 2 of another run"
                    in zombie.hosts[0].client.progress(late.save_id).errors.get("s3", "")
                ),
                deadline_s=DEADLINE_S,
            )
            assert bucket.manifests() == {1: old, 2: new}
            assert not {f"segments/{ref.id}" for ref in late.segments} & set(bucket.keys())
