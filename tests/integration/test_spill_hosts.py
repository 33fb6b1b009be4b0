"""Real agents of two hosts, one of them slow: they fill a tier with the same checkpoints."""

from __future__ import annotations

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


def spec(folder: Path, scope: str) -> m.NamespaceSpec:
    tier = m.TierSpec(
        name="disk", url=f"file://{folder}", scope=scope, keep=Keep(last=9), takeover_after_s=600.0
    )
    return msgspec.structs.replace(spec_of(keep_last=1), tiers=(tier,))


def held(folder: Path) -> set[int]:
    found = [path.read_bytes() for path in (folder / "run" / "manifests").rglob("*/*")]
    return {decode_manifest(data).step for data in found if not is_tombstone(data)}


def level(host: PeerHost, saved: Manifest) -> str:
    return host.client.progress(saved.save_id).levels["disk"]


@pytest.mark.full
@pytest.mark.parametrize("scope", ["host", "shared"])
def test_a_slow_host_and_a_fast_one_end_with_the_same_checkpoints(
    runtime_dir: Path, tmp_path: Path, scope: str
):
    fast, slow, blocked = tmp_path / "fast", tmp_path / "slow", tmp_path / "blocked"
    blocked.write_text("in the way: this host cannot reach its tier")
    with Job(runtime_dir, 0, replicas=0) as job:
        for number, folder in enumerate((fast, blocked)):
            job.spec = spec(folder, scope)
            job.add(number)
        job.gather()
        quick, late = job.hosts
        saves = []
        for step in range(1, 7):
            saves.append(job.save(step, tiers=("disk",)))
            wait_until(lambda s=saves[-1]: s.save_id in late.save_ids(), deadline_s=LONG_S)
        # The leader is told by the host without room; memory there is free again.
        wait_until(lambda: len(late.save_ids()) <= 2)
        assert level(late, saves[0]) == "superseded"
        assert level(late, saves[-1]) in ("waiting", "queued")
        blocked.unlink()
        if scope == "shared":
            blocked.symlink_to(fast)
        else:
            blocked.symlink_to(slow)
            slow.mkdir()
        assert late.trainer.tier("disk").available  # who asks cuts the pause short
        for host in (quick, late):
            wait_until(lambda h=host: level(h, saves[-1]) == "done", deadline_s=LONG_S)
        after = job.save(7, tiers=("disk",))
        for host in (quick, late):
            wait_until(lambda h=host: level(h, after) == "done", deadline_s=LONG_S)
        if scope == "host":
            wait_until(lambda: held(fast) == held(slow), deadline_s=LONG_S)
        assert {6, 7} <= held(fast) < {1, 2, 3, 4, 5, 6, 7}
        for host in (quick, late):
            (status,) = host.client.status().namespaces[0].tiers
            assert (status.queued, status.awaited) == (0, 0)


def test_a_fast_host_keeps_what_is_whole_until_the_slow_one_has_a_newer(
    runtime_dir: Path, tmp_path: Path
):
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    with Job(runtime_dir, 0, replicas=0) as job:
        for number, folder in enumerate((slow, fast)):
            tier = msgspec.structs.replace(spec(folder, "host").tiers[0], keep=Keep(last=1))
            job.spec = msgspec.structs.replace(spec_of(keep_last=1), tiers=(tier,))
            job.add(number)
        job.gather()
        late, quick = job.hosts
        first = job.save(1, tiers=("disk",))
        wait_until(lambda: first.save_id in quick.save_ids(), deadline_s=LONG_S)
        for host in job.hosts:
            wait_until(lambda h=host: level(h, first) == "done", deadline_s=LONG_S)
        room = slow / "run" / "segments"  # the slow one's disk takes no more
        room.rename(slow / "aside")
        room.write_text("in the way")
        second = job.save(2, tiers=("disk",))
        wait_until(lambda: second.save_id in quick.save_ids(), deadline_s=LONG_S)
        wait_until(lambda: level(quick, second) == "done", deadline_s=LONG_S)
        wait_until(lambda: not quick.client.status().namespaces[0].tiers[0].retaining)
        assert held(fast) == {1, 2}, "only of step 1 all hosts have their part"
        room.unlink()
        (slow / "aside").rename(room)
        wait_until(lambda: level(late, second) == "done", deadline_s=LONG_S)
        for folder in (fast, slow):
            wait_until(lambda f=folder: held(f) == {2}, deadline_s=LONG_S)
