"""Whose rules hold: those of the run that saved last; who only looks, or whose run ended, has none.

Real agents, and one folder that all hosts share as a tier.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.integration.test_shared_tier import LONG_S, committed, level, wait_done
from tests.support.agent import AgentProcess, FakeTrainer, spec_of, wait_until
from tests.support.peers import Job, PeerHost
from tieredckpt.config.tiers import Keep
from tieredckpt.errors import NamespaceInUseError
from tieredckpt.format.manifest import Manifest
from tieredckpt.rpc.messages import agent as m


def spec(
    folder: Path, keep: int, *, name: str = "bucket", memory: int = 2, on_pressure: str = "keep"
) -> m.NamespaceSpec:
    """Memory, and a folder that hosts share, pruned once a second."""
    tier = m.TierSpec(
        name=name, url=f"file://{folder}", scope="shared", keep=Keep(last=keep), delete_delay_s=1.0,
        on_pressure=on_pressure,  # type: ignore[arg-type]
    )  # fmt: skip
    return msgspec.structs.replace(spec_of(keep_last=memory), tiers=(tier,))


def steps(trainer: FakeTrainer, *numbers: int, tier: str = "bucket") -> list[Manifest]:
    """Save them, each until it is in the tier."""
    saved = []
    for number in numbers:
        saved.append(trainer.save(number, tiers=(tier,)))
        wait_in(trainer, saved[-1], tier)
    return saved


def wait_in(trainer: FakeTrainer, saved: Manifest, tier: str = "bucket") -> None:
    wait_until(
        lambda: trainer.client.progress(saved.save_id).levels[tier] == "done", deadline_s=LONG_S
    )


def alive(folder: Path) -> set[str]:
    return {save_id for save_id, lives in committed(folder).items() if lives}


def prunes_meanwhile(runtime: Path, folder: Path) -> None:
    """Another namespace of the same agent is pruned and, a second later, emptied of what went: so
    others had their chance.
    """
    segments = folder / "clock" / "segments"
    with FakeTrainer(runtime, spec(folder, 1), namespace="clock") as trainer:
        steps(trainer, 1, 2, 3)
        wait_until(lambda: len(list(segments.iterdir())) == 1, deadline_s=LONG_S)


# --- looking --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bucket", "other"])
def test_who_only_looks_with_another_keep_deletes_nothing(
    runtime_dir: Path, tmp_path: Path, name: str
):
    bucket = tmp_path / "bucket"
    with AgentProcess(runtime_dir):
        with FakeTrainer(runtime_dir, spec(bucket, 9)) as job:
            saves = steps(job, *range(1, 6))
        kept = {each.save_id for each in saves}
        with FakeTrainer(runtime_dir, spec(bucket, 1, name=name, memory=1)) as looker:
            found = looker.tier(name)  # he sees what is there
            assert {each.save_id for each in found.manifests} == kept
            prunes_meanwhile(runtime_dir, tmp_path / "clock")
            assert alive(bucket) == kept
            assert len(looker.tier("memory").manifests) == 2
            # Who saves rules: from now on his configuration is what is kept by.
            looker.open_attempt({"default": saves[-1].save_id})
            (sixth,) = steps(looker, 6, tier=name)
            wait_until(lambda: alive(bucket) == {sixth.save_id}, deadline_s=LONG_S)
            wait_until(lambda: len(looker.tier("memory").manifests) == 1, deadline_s=LONG_S)


def test_the_rules_of_the_last_run_that_saved_outlive_the_agent_and_who_looks(
    runtime_dir: Path, tmp_path: Path
):
    bucket = tmp_path / "bucket"
    with AgentProcess(runtime_dir) as agent:
        with FakeTrainer(runtime_dir, spec(bucket, 3)) as job:
            steps(job, *range(1, 4))
        with FakeTrainer(runtime_dir, spec(bucket, 1)) as looker:
            looker.tier("bucket")
        agent.kill()
    bucket.rename(aside := tmp_path / "aside")
    bucket.write_text("in the way")
    with AgentProcess(runtime_dir):
        with FakeTrainer(runtime_dir, spec(bucket, 3)) as job:
            job.open_attempt()
            last = job.save(4, tiers=("bucket",))
        with FakeTrainer(runtime_dir, spec(tmp_path / "elsewhere", 1)) as looker:
            assert looker.tier("bucket").manifests == ()
        bucket.unlink()
        aside.rename(bucket)
        # Nobody is there any more: what waits goes where the run that saved it has said.
        wait_until(lambda: last.save_id in alive(bucket), deadline_s=LONG_S)
        assert not (tmp_path / "elsewhere" / "run" / "manifests").exists()


def test_beside_the_run_that_rules_another_configuration_is_refused_and_beside_others_not(
    runtime_dir: Path, tmp_path: Path
):
    bucket = tmp_path / "bucket"
    with AgentProcess(runtime_dir):
        with FakeTrainer(runtime_dir, spec(bucket, 9)) as job:
            saves = steps(job, 1)
            with pytest.raises(NamespaceInUseError, match=r"keep\.last is 9 in the running job"):
                FakeTrainer(runtime_dir, spec(bucket, 1))
        with (
            FakeTrainer(runtime_dir, spec(bucket, 1)) as looker,
            # He is still there when the job comes back; it is not for him to say how.
            FakeTrainer(runtime_dir, spec(bucket, 8)) as job,
        ):
            job.open_attempt({"default": saves[-1].save_id})
            kept = {each.save_id for each in (*saves, *steps(job, 2, 3))}
            assert looker.tier("bucket").available
            prunes_meanwhile(runtime_dir, tmp_path / "clock")
            assert alive(bucket) == kept


def test_who_only_looks_beside_a_job_changes_no_membership_until_he_saves(
    runtime_dir: Path, tmp_path: Path
):
    with Job(runtime_dir, 2, spec=spec(tmp_path / "bucket", 9), replicas=0) as job:
        first, second = job.hosts
        saved = job.save(1)
        wait_until(lambda: saved.save_id in second.save_ids(), deadline_s=LONG_S)
        entry = second.client.peers().host
        assert entry is not None
        with FakeTrainer(second.runtime, job.spec) as looker:
            alone = m.SetPeers(
                session_id=looker.client.session_id, run=looker.client.run_id, leader="h1",
                hosts=(entry,),
            )  # fmt: skip
            looker.client.call(alone)
            assert second.client.peers().leader == "h0"
            # Both hosts are still of the job, whichever of them coordinates.
            saved = job.save(2, coordinator=second)
            wait_until(lambda: saved.save_id in first.save_ids(), deadline_s=LONG_S)
            second.restart()  # what he has said is not forgotten
            looker.open_attempt({"default": saved.save_id})
            looker.save(3)
            wait_until(lambda: second.client.peers().leader == "h1", deadline_s=LONG_S)


# --- a run that ended -----------------------------------------------------------------------------


def begin_anew(job: Job, settings: m.NamespaceSpec) -> list[PeerHost]:
    """The job is started again without its former leader, whose agent lives on."""
    for host in job.hosts:
        host.trainer.close()
    job.spec = settings
    for host in job.hosts[1:]:
        host.spec = settings
        host.trainer = host._trainer()
    return job.hosts[1:]


def test_the_agent_of_a_former_leader_prunes_nothing(runtime_dir: Path, tmp_path: Path):
    bucket = tmp_path / "bucket"
    with Job(runtime_dir, 3, spec=spec(bucket, 1), replicas=0) as job:
        old = job.hosts[0]
        first = job.save(1, tiers=("bucket",))
        wait_done(first, *job.hosts)
        now = begin_anew(job, spec(bucket, 9))
        job.gather(now)
        now[0].trainer.open_attempt({"default": first.save_id})
        saves = [first]
        for step in range(2, 6):
            saves.append(job.save(step, now, tiers=("bucket",)))
            wait_done(saves[-1], *now)
        prunes_meanwhile(old.runtime, tmp_path / "clock")
        assert alive(bucket) == {each.save_id for each in saves}


def test_the_agent_of_a_former_leader_gives_up_nothing(runtime_dir: Path, tmp_path: Path):
    bucket = tmp_path / "bucket"
    settings = spec(bucket, 9, memory=1, on_pressure="drop_oldest_queued")
    with Job(runtime_dir, 3, spec=settings, replicas=0) as job:
        old = job.hosts[0]
        first = job.save(1, tiers=("bucket",))
        wait_done(first, *job.hosts)
        bucket.rename(aside := tmp_path / "aside")
        bucket.write_text("in the way")
        now = begin_anew(job, spec(bucket, 9, memory=9))
        job.gather(now)
        begun = now[0].trainer.open_attempt({"default": first.save_id})
        saves = [job.save(step, now, tiers=("bucket",)) for step in range(2, 7)]
        for host in now:
            wait_until(lambda h=host: saves[-1].save_id in h.save_ids(), deadline_s=LONG_S)
        # The former leader compares itself with them, and hears what waits.
        told = f"attempt {begun.number} ({begun.id}) of another host"
        wait_until(lambda: told in old.agent.log(), deadline_s=LONG_S)
        saves.append(job.save(7, now, tiers=("bucket",)))
        wait_until(lambda: saves[-1].save_id in now[1].save_ids(), deadline_s=LONG_S)
        assert {level(now[1], each) for each in saves} <= {"queued", "active", "waiting"}
        bucket.unlink()
        aside.rename(bucket)
        wait_done(saves[-1], *now)
        assert alive(bucket) == {each.save_id for each in (first, *saves)}
