"""Real agents that share one folder as a tier: commits, take-over, restarts, zombies, deleting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.support.agent import spec_of, wait_until
from tests.support.peers import Job, PeerHost
from tieredckpt.config.tiers import Keep
from tieredckpt.format.manifest import Manifest, decode_manifest
from tieredckpt.format.records import is_tombstone
from tieredckpt.rpc.messages import agent as m

LONG_S = 120.0
"""For a loaded machine; nothing here takes more than a few seconds."""


def spec(folder: Path, **times: float) -> m.NamespaceSpec:
    """Memory, and one folder that all hosts share."""
    tier = m.TierSpec(name="bucket", url=f"file://{folder}", scope="shared", keep=Keep(last=2))
    return msgspec.structs.replace(spec_of(), tiers=(msgspec.structs.replace(tier, **times),))


def level(host: PeerHost, saved: Manifest) -> str | None:
    if saved.save_id not in host.save_ids():
        return None
    return host.client.progress(saved.save_id).levels["bucket"]


def wait_done(saved: Manifest, *hosts: PeerHost) -> None:
    for host in hosts:
        wait_until(lambda h=host: level(h, saved) == "done", deadline_s=LONG_S)


def names(folder: Path, kind: str) -> set[str]:
    return {path.name for path in (folder / "run" / kind).rglob("*") if path.is_file()}


def committed(folder: Path) -> dict[str, bool]:
    """By save id, whether what lies there last is a manifest and not a tombstone."""
    found = sorted((folder / "run" / "manifests").rglob("*"))
    return {path.stem: not is_tombstone(path.read_bytes()) for path in found if path.is_file()}


def save(job: Job, step: int) -> Manifest:
    return job.save(step, tiers=("bucket",))


def closing(job: Job, hosts: list[PeerHost]) -> Callable[[], None]:
    def close() -> None:
        for host in hosts:
            host.close()
            job.hosts.remove(host)

    return close


@pytest.mark.full
def test_two_hosts_commit_prune_and_are_restored_elsewhere(runtime_dir: Path, tmp_path: Path):
    bucket = tmp_path / "bucket"
    settings = spec(bucket, delete_delay_s=1.0)
    with Job(runtime_dir, 2, spec=settings) as job:
        saves = []
        for step in (1, 2, 3):
            saves.append(save(job, step))
            wait_done(saves[-1], *job.hosts)
        first, second, third = saves
        # The pruner keeps two: a tombstone first, and what it names a second later.
        wait_until(lambda: committed(bucket).get(first.save_id) is False, deadline_s=LONG_S)
        kept = {ref.id for each in (second, third) for ref in each.segments}
        wait_until(lambda: names(bucket, "segments") == kept, deadline_s=LONG_S)
        assert committed(bucket) == {
            first.save_id: False, second.save_id: True, third.save_id: True,
        }  # fmt: skip
        wait_until(lambda: names(bucket, "pending") == set(), deadline_s=LONG_S)
        # Two hosts see to the plan; both may find none in the same moment.
        assert len(names(bucket, "plans")) in (1, 2)
        assert names(bucket, "claims") == {"00000001"}
        closing(job, list(job.hosts))()
        # The cluster is given back; nobody of the new one has seen the old one.
        for number in (5, 6):
            job.add(number)
        job.gather()
        for host in job.hosts:
            facts = host.trainer.tier("bucket")
            steps = {decode_manifest(each.manifest).step for each in facts.manifests}  # type: ignore[arg-type]
            assert steps == {2, 3}
            assert (len(facts.plans), {each.id for each in facts.segments}) == (1, kept)
            for ref in third.segments:
                stored = (bucket / "run" / "segments" / ref.id).read_bytes()
                assert host.trainer.read(ref, "bucket") == stored
        assert job.hosts[0].trainer.open_attempt().number == 2


def test_a_holder_takes_over_for_a_host_that_died(runtime_dir: Path, tmp_path: Path):
    bucket, blocked = tmp_path / "bucket", tmp_path / "blocked"
    blocked.write_text("not a folder: this host cannot reach the tier")
    with Job(runtime_dir, 0) as job:
        for number, folder in enumerate((bucket, blocked)):
            job.spec = spec(folder, takeover_after_s=1.0)
            job.add(number)
        job.gather()
        saved = save(job, 1)
        alive, dead = job.hosts
        wait_until(
            lambda: (
                saved.save_id in alive.save_ids()
                and alive.client.progress(saved.save_id).levels["replicated"] == "done"
            ),
            deadline_s=LONG_S,
        )
        dead.agent.kill()
        wait_done(saved, alive)
        assert committed(bucket) == {saved.save_id: True}
        assert names(bucket, "segments") == {ref.id for ref in saved.segments}


def test_a_job_that_another_one_took_over_from_uploads_nothing(runtime_dir: Path, tmp_path: Path):
    bucket = tmp_path / "bucket"
    settings = spec(bucket)
    with Job(runtime_dir, 1, spec=settings) as zombie:
        old = save(zombie, 1)
        wait_done(old, zombie.hosts[0])
        (folder := runtime_dir / "new").mkdir(mode=0o700)
        with Job(folder, 0, spec=settings) as job:
            job.add(7)
            job.gather()
            (host,) = job.hosts
            assert [each.save_id for each in host.trainer.tier("bucket").manifests] == [old.save_id]
            record = host.trainer.open_attempt({"default": old.save_id})
            assert record.number == 2
            new = save(job, 2)
            wait_done(new, host)
            late, client = save(zombie, 2), zombie.hosts[0].client

            def refused() -> bool:
                """Between two tries; during one it is active."""
                found = client.progress(late.save_id)
                said = "attempt 2 of another run" in found.errors.get("bucket", "")
                return said and found.levels["bucket"] == "waiting"

            wait_until(refused, deadline_s=LONG_S)
            assert committed(bucket) == {old.save_id: True, new.save_id: True}
            wait_until(lambda: not client.status().namespaces[0].tiers[0].available)
