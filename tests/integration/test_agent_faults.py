"""SIGKILL of real agents and trainers at every stage: what was committed stays, the rest goes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent import (
    AgentProcess,
    FakeTrainer,
    TrainerProcess,
    spec_of,
    wait_until,
)
from tieredckpt.errors import AgentError, NamespaceInUseError
from tieredckpt.format.manifest import decode_manifest
from tieredckpt.storage.holdings import decode_holdings
from tieredckpt.storage.memory.slot import read_label, slot_capacity_of

SAVES = 6


class Agents:
    """The agent of a runtime folder, started again whenever a client finds it dead."""

    def __init__(self, runtime_dir: Path, failpoints: str) -> None:
        self._runtime_dir = runtime_dir
        self.starts = 1
        self.current = AgentProcess(runtime_dir, failpoints=failpoints)

    def revive(self) -> None:
        if self.current.wait_end() == -9:
            self.starts += 1
            self.current = AgentProcess(self._runtime_dir)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def labels(runtime_dir: Path) -> Iterator[tuple[str, str]]:
    """State and segment of each slot file."""
    for path in (runtime_dir / "slots").iterdir():
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # the agent has just given it up
            continue
        try:
            label = read_label(fd, slot_capacity_of(fd))
        finally:
            os.close(fd)
        yield label.state, label.segment_id


def steps(client_holdings: bytes, tier: str = "memory") -> list[int]:
    facts = next(t for t in decode_holdings(client_holdings).tiers if t.tier == tier)
    return sorted(decode_manifest(f.manifest).step for f in facts.manifests if f.manifest)


full = pytest.mark.full
AGENT_POINTS = [
    "agent.commit.after_manifest@4",
    pytest.param("agent.seal.after_label@4", marks=full),
    pytest.param("agent.spill.segment@3", marks=full),
    pytest.param("agent.retention.after_manifest_delete@3", marks=full),
]
"""Where the ring is in steady use. All points, at the first time: test_fault_matrix.py."""


@pytest.mark.parametrize("point", AGENT_POINTS)
def test_agent_killed(runtime_dir: Path, disk: Path, point: str):
    """A training run goes on through the death of its agent at any point, and loses nothing."""
    name, _, nth = point.partition("@")
    agents = Agents(runtime_dir, f"{name}=kill@{nth or 1}")
    spec = spec_of(tiers={"disk": disk}, wait_s=5.0)
    try:
        with FakeTrainer(runtime_dir, spec, revive=agents.revive, size=5 << 20) as trainer:
            trainer.prepare()
            saved = []
            for step in range(1, SAVES + 1):
                saved.append(trainer.save(step, tiers=("disk",)))
                # Each spill ends before the next save, so that every point is reached.
                trainer.spilled(saved[-1].save_id)
            assert agents.starts == 2, "the point was never reached"
            assert steps(trainer.client.holdings()) == [SAVES - 1, SAVES]
            assert steps(trainer.client.holdings(), "disk") == [SAVES - 1, SAVES]
            for tier in ("memory", "disk"):
                for manifest in saved[-2:]:
                    trainer.check(manifest, tier)
            kept = {ref.id for manifest in saved[-2:] for ref in manifest.segments}
            wait_until(lambda: {s for state, s in labels(runtime_dir) if state == "sealed"} == kept)
            # The ring is what it was, and all but the provisional grant is free.
            assert len(list(labels(runtime_dir))) == 4
            files = {path.name for path in disk.rglob("*") if path.is_file()}
            assert {name for name in files if name in kept} == kept
            assert len(list((disk / "run" / "segments").iterdir())) == 2
    finally:
        with agents.current:
            pass


TRAINER_STAGES = {
    # stage of save 3: steps that must be there afterwards
    "writing 3": [1, 2],
    "sealed 3": [1, 2],
    "committing 3": [1, 2],
    "committed 3": [2, 3],
}
TRAINER_CASES = [
    ("writing 3", False),
    ("committed 3", True),
    *(pytest.param(stage, True, marks=full) for stage in ("sealed 3", "committing 3")),
]


@pytest.mark.parametrize(("stage", "agent_dies"), TRAINER_CASES)
def test_trainer_killed(runtime_dir: Path, stage: str, agent_dies: bool):
    """The last committed checkpoint is intact, and every slot of the dead comes back."""
    agent = AgentProcess(runtime_dir)
    with TrainerProcess(runtime_dir, spec_of(), saves=5, stop_at=stage) as dead:
        dead.wait_for(stage)
        if agent_dies:
            agent.kill()
        dead.kill()
    if agent_dies:
        agent = AgentProcess(runtime_dir)
    with agent, FakeTrainer(runtime_dir, spec_of()) as trainer:
        assert steps(trainer.client.holdings()) == TRAINER_STAGES[stage]
        wait_until(lambda: sum(state == "sealed" for state, _ in labels(runtime_dir)) == 2)
        assert trainer.prepare() == 3
        for manifest in trainer.tier().manifests:
            trainer.check(decode_manifest(manifest.manifest or b""))
        newest = max(
            (decode_manifest(f.manifest or b"") for f in trainer.tier().manifests),
            key=lambda each: each.step,
        )
        trainer.open_attempt({"default": newest.save_id})
        for step in range(10, 14):
            trainer.save(step)
        assert steps(trainer.client.holdings()) == [12, 13]
        assert len(list(labels(runtime_dir))) == 3


@full
def test_a_session_without_revive_gets_a_clear_error(runtime_dir: Path):
    with AgentProcess(runtime_dir) as agent, FakeTrainer(runtime_dir, spec_of()) as trainer:
        trainer.save(1)
        agent.kill()
        with pytest.raises(AgentError, match="tieredckpt agent run") as caught:
            trainer.save(2)
        assert caught.value.outcome == "unknown"


def test_spills_resume_without_a_trainer(runtime_dir: Path, disk: Path):
    """The agent remembers the tiers: a killed agent's successor finishes what was promised."""
    agent = AgentProcess(runtime_dir, failpoints="agent.spill.before_manifest=kill")
    spec = spec_of(tiers={"disk": disk})
    with TrainerProcess(runtime_dir, spec, saves=1, tiers=("disk",)) as dead:
        assert agent.wait_end() == -9
        dead.kill()
    with AgentProcess(runtime_dir) as agent, agent.client() as client:
        wait_until(lambda: client.status().namespaces[0].tiers[0].checkpoints == 1)
        assert steps(client.holdings("run"), "disk") == [1]


@full
def test_sigterm_during_a_spill_abandons_it_and_the_next_agent_takes_it_up(
    runtime_dir: Path, disk: Path
):
    spec = spec_of(tiers={"disk": disk}, capacity_bytes=1 << 30)
    agent = AgentProcess(runtime_dir)
    with FakeTrainer(runtime_dir, spec, size=128 << 20) as trainer:
        manifest = trainer.save(1, tiers=("disk",))
        assert agent.stop() == 0
        assert not list(disk.glob("run/tmp/*"))
        assert sum(state == "sealed" for state, _ in labels(runtime_dir)) == 1
        with AgentProcess(runtime_dir):
            trainer.client.open_session  # noqa: B018  (the session goes on by itself)
            trainer.spilled(manifest.save_id)
            trainer.check(manifest, "disk")


def test_two_ranks_and_a_differing_configuration(runtime_dir: Path):
    with AgentProcess(runtime_dir) as agent, FakeTrainer(runtime_dir, spec_of()) as first:
        with FakeTrainer(runtime_dir, spec_of(), rank=1) as second:
            first.save(1)
            second.attempt = first.attempt
            ref = second.write_segment(1)
            assert ref.host == first.opened.host_id
        with pytest.raises(NamespaceInUseError, match=r"memory\.keep\.last is 2") as caught:
            FakeTrainer(runtime_dir, spec_of(keep_last=7))
        assert caught.value.differences == ["memory.keep.last is 2 in the running job, 7 here"]
        agent.kill()
        with AgentProcess(runtime_dir):  # it knows its sessions from their lease files
            with pytest.raises(NamespaceInUseError):
                FakeTrainer(runtime_dir, spec_of(keep_last=7))
            first.close()
            FakeTrainer(runtime_dir, spec_of(keep_last=7)).close()
