"""Whose rules hold: those of the run that saved last; who only looks, or whose run ended, has none.

Real agents, and one folder that all hosts share as a tier.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.integration.test_shared_tier import LONG_S, committed, wait_done
from tests.support.agent import AgentProcess, FakeTrainer, spec_of, wait_until
from tests.support.peers import Job, PeerHost
from tieredckpt.config.tiers import Keep
from tieredckpt.format.manifest import Manifest
from tieredckpt.rpc.messages import agent as m


def spec(folder: Path, keep: int, *, name: str = "bucket", memory: int = 2) -> m.NamespaceSpec:
    """Memory, and a folder that hosts share, pruned once a second."""
    tier = m.TierSpec(
        name=name, url=f"file://{folder}", scope="shared", keep=Keep(last=keep), delete_delay_s=1.0
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


@pytest.mark.parametrize("name", ["bucket", pytest.param("other", marks=pytest.mark.full)])
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


def begin_anew(job: Job, settings: m.NamespaceSpec) -> list[PeerHost]:
    """The job is started again without its former leader, whose agent lives on."""
    for host in job.hosts:
        host.trainer.close()
    job.spec = settings
    for host in job.hosts[1:]:
        host.spec = settings
        host.trainer = host._trainer()
    return job.hosts[1:]


@pytest.mark.full
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
