"""Bringing the newest checkpoint to a tier now, with a real agent."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support import commands
from tests.support.agent import AgentProcess, FakeTrainer, spec_of, wait_until
from tests.support.faults import ForkedAgent
from tieredckpt.config.tiers import Keep
from tieredckpt.errors import NotFoundError, TierUnavailableError
from tieredckpt.policy import schedule
from tieredckpt.recovery.flush import FlushReport, flush_and_wait
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.messages import agent as m


def spec(tmp_path: Path) -> m.NamespaceSpec:
    """A disk that gets every save, and a shared folder that no save goes to."""
    found = spec_of(tiers={"disk": tmp_path / "disk"})
    bucket = m.TierSpec(
        name="bucket", url=f"file://{tmp_path / 'bucket'}", scope="shared", keep=Keep(last=3)
    )
    return msgspec.structs.replace(found, tiers=(*found.tiers, bucket))


@pytest.fixture
def trainer(runtime_dir: Path, tmp_path: Path) -> Iterator[FakeTrainer]:
    with AgentProcess(runtime_dir), FakeTrainer(runtime_dir, spec(tmp_path)) as trainer:
        yield trainer


def test_the_newest_goes_to_a_tier_that_it_was_not_destined_for(trainer: FakeTrainer):
    client = trainer.client
    with pytest.raises(NotFoundError, match="no checkpoint in memory"):
        flush_and_wait(client, None, 20)
    with pytest.raises(NotFoundError, match="no tier 'tape'"):
        flush_and_wait(client, "tape", 20)
    trainer.save(1, tiers=("disk",))
    with pytest.raises(NotFoundError, match="no tier 'tape'"):
        flush_and_wait(client, "tape", 20)
    trainer.spilled(trainer.save(2, tiers=("disk",)).save_id)
    wait_until(lambda: trainer.tier("bucket").available)
    looks: list[FlushReport] = []
    report = flush_and_wait(client, None, None, on_report=looks.append)
    # Of those that hold it, the one that outlives the host.
    assert (report.tier, report.steps, report.done) == ("bucket", {"default": 2}, True)
    assert (report.tiers, report.errors) == (("disk", "bucket"), {})
    assert looks[-1] == report
    assert report.copied_bytes == report.total_bytes == trainer.segment_bytes
    assert len(trainer.tier("bucket").manifests) == 1
    again = flush_and_wait(client, "bucket", 20)
    assert (again.done, again.total_bytes) == (True, 0)


def test_without_time_it_says_how_far_it_came(runtime_dir: Path, tmp_path: Path):
    (tmp_path / "disk").write_text("in the way")
    settings = spec_of(tiers={"disk": tmp_path / "disk"})
    with AgentProcess(runtime_dir), FakeTrainer(runtime_dir, settings) as trainer:
        saved = trainer.save(1)
        with pytest.raises(TierUnavailableError, match="no tier answers"):
            flush_and_wait(trainer.client, None, 0.1)
        (tmp_path / "disk").unlink()
        # The tier is asked again at once, whenever it would have been tried next.
        report = flush_and_wait(trainer.client, "disk", 30)
        assert report.done
        assert trainer.client.progress(saved.save_id).levels["disk"] == "done"


def test_what_fails_at_this_moment_is_tried_again(trainer: FakeTrainer, tmp_path: Path):
    trainer.spilled(trainer.save(1, tiers=("disk",)).save_id)
    segments = next((tmp_path / "disk").rglob("segments"))
    away = segments.rename(segments.with_name("away"))
    segments.write_text("in the way")
    trainer.save(2, tiers=("disk",))
    client = trainer.client
    wait_until(lambda: disk_status(client).error is not None)
    asked = client.call(m.Flush(tier="disk", left_s=60.0))
    assert asked.tiers == ("disk",)
    segments.unlink()
    away.rename(segments)
    report = flush_and_wait(client, "disk", 60)
    assert (report.done, report.steps) == (True, {"default": 2})
    segments.rename(away)
    segments.write_text("in the way")
    trainer.save(3, tiers=("disk",))
    wait_until(lambda: disk_status(client).error is not None)
    # It is due in the one that fails; the other one does not wait for that.
    assert client.call(m.Flush()).tiers == ("disk", "bucket")
    assert flush_and_wait(client, "bucket", 60).done


def test_a_tier_that_fails_leaves_none_unused(
    trainer: FakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The deepest tier is away: the disk gets the newest, and the report names what fails."""
    trainer.spilled(trainer.save(1, tiers=("disk", "bucket")).save_id)
    wait_until(lambda: len(trainer.tier("bucket").manifests) == 1)
    folder = next((tmp_path / "bucket").rglob("segments"))
    folder.rename(folder.with_name("away"))
    folder.write_text("in the way")
    monkeypatch.setattr(schedule, "SHARE_MAX_S", 0.1)
    trainer.save(2, tiers=())
    report = flush_and_wait(trainer.client, None, 3600)  # ends long before
    assert (report.tiers, report.tier) == (("disk", "bucket"), "disk")
    assert (report.steps, report.levels) == ({"default": 2}, {"default": "done"})
    assert report.errors.keys() == {"bucket"}
    assert str(folder) in report.errors["bucket"]
    assert not report.done
    assert len(trainer.tier("disk").manifests) == 2


def disk_status(client: AgentClient) -> m.TierStatus:
    (namespace,) = client.status().namespaces
    return next(each for each in namespace.tiers if each.name == "disk")


class PrunedMeanwhile(AgentClient):
    """The real client of an agent where others save: before each look, two more checkpoints."""

    trainer: FakeTrainer

    def progress(self, save_id: str, **options: Any) -> m.Progress:
        for step in (101, 102, 103):
            self.trainer.spilled(self.trainer.save(step, tiers=("disk",)).save_id)
        return super().progress(save_id, **options)


def test_what_is_pruned_meanwhile_is_not_waited_for(trainer: FakeTrainer, runtime_dir: Path):
    saved = trainer.save(1, tiers=("disk",))
    trainer.spilled(saved.save_id)
    with contextlib.closing(PrunedMeanwhile(runtime_dir, deadline_s=60)) as client:
        client.trainer = trainer
        report = flush_and_wait(client, "disk", None, namespace="run")
    assert not report.done
    assert report.levels == {"default": "superseded"}
    assert "disk" in report.errors["disk"] or "everywhere" in report.errors["disk"]


def test_an_agent_that_is_started_again_meanwhile(runtime_dir: Path, tmp_path: Path):
    settings = spec_of(tiers={"disk": tmp_path / "disk"})
    agents = [ForkedAgent(runtime_dir)]

    def restart() -> None:
        agents[-1].kill()
        agents.append(ForkedAgent(runtime_dir))

    try:
        with FakeTrainer(runtime_dir, settings, revive=lambda: None) as trainer:
            trainer.spilled(trainer.save(1, tiers=("disk",)).save_id)  # counted by this agent
            trainer.save(2)
            looks: list[FlushReport] = []

            def told(report: FlushReport) -> None:
                looks.append(report)
                if len(looks) == 1:
                    restart()

            report = flush_and_wait(trainer.client, "disk", 60, on_report=told)
            assert report.done
            assert all(each.copied_bytes >= 0 for each in looks)
    finally:
        agents[-1].kill()


def test_the_command(trainer: FakeTrainer, runtime_dir: Path):
    trainer.save(3)
    trainer.tier("disk")
    line = ["spill", "--now", "--runtime-dir", str(runtime_dir), "--tier", "disk"]
    ran = commands.tieredckpt(*line, "--deadline", "60 s", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["tier"], found["done"], found["steps"]) == ("disk", True, {"default": 3})
    ran = commands.tieredckpt(*line, "--deadline", "soon")
    assert (ran.returncode, "--deadline" in ran.stderr) == (2, True)
