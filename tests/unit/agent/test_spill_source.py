"""A tier filled from the tier above it: memory is free early, and bytes are still proven."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.agent import FakeTrainer, spec_of, wait_until
from tests.unit.agent.test_node import Host, steps
from tieredckpt.agent.peering import attempts
from tieredckpt.agent.tiers import worker
from tieredckpt.config.tiers import Keep
from tieredckpt.format.manifest import Manifest
from tieredckpt.rpc.messages import agent as m
from tieredckpt.storage.backends.file import FileTier


@pytest.fixture
def host(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(worker, "BACKOFF_S_MAX", 0.05)
    monkeypatch.setattr(worker, "BACKOFF_S", 0.05)
    host = Host(runtime_dir)
    yield host
    host.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The tier "far" takes nothing before it is set."""
    go_on = threading.Event()
    put_from = FileTier.put_from

    def slow(self: FileTier, key: str, source: object) -> None:
        if self.name == "far":
            assert go_on.wait(60)
        put_from(self, key, source)  # type: ignore[arg-type]

    monkeypatch.setattr(FileTier, "put_from", slow)
    yield go_on
    go_on.set()


def spec(tmp_path: Path, scope: str = "host") -> m.NamespaceSpec:
    """Keeps one in memory, and one on the disk above."""
    found = spec_of(tiers={"disk": tmp_path / "disk"}, keep_last=1, tier_keep_last=1)
    far = m.TierSpec(
        name="far", url=f"file://{tmp_path / 'far'}", scope=scope, keep=Keep(last=9), source="disk"
    )
    return msgspec.structs.replace(found, tiers=(*found.tiers, far))


def level(trainer: FakeTrainer, saved: Manifest, tier: str = "far") -> str:
    return trainer.client.progress(saved.save_id).levels[tier]


def save(trainer: FakeTrainer, step: int) -> Manifest:
    return trainer.save(step, tiers=("disk", "far"))


@pytest.mark.parametrize("scope", ["host", "shared"])
def test_memory_is_free_while_the_upload_still_runs(
    host: Host, tmp_path: Path, held: threading.Event, scope: str
):
    trainer = host.trainer(spec(tmp_path, scope), size=5 << 20)
    saves = []
    for step in range(1, 6):
        saves.append(save(trainer, step))
        wait_until(lambda: level(trainer, saves[-1], "disk") == "done")
    wait_until(lambda: steps(trainer) == [5])  # nothing there is kept for the slow tier
    # (The slow tier's thread may not have begun yet.)
    wait_until(lambda: [level(trainer, e) for e in saves] == ["active"] + ["queued"] * 4)
    # The tier above would keep one; it keeps what is still to go on from there.
    assert steps(trainer, "disk") == [1, 2, 3, 4, 5]
    held.set()
    for each in saves:
        wait_until(lambda s=each: level(trainer, s) == "done")
        trainer.check(each, "far")
    save(trainer, 6)
    wait_until(lambda: steps(trainer, "disk") == [6])


def test_a_damaged_copy_on_disk_is_replaced_by_memorys(
    host: Host, tmp_path: Path, held: threading.Event
):
    trainer = host.trainer(spec(tmp_path), size=9 << 20)
    saved = save(trainer, 1)
    wait_until(lambda: level(trainer, saved, "disk") == "done")
    _damage(tmp_path, saved)
    held.set()
    wait_until(lambda: level(trainer, saved) == "done")
    trainer.check(saved, "far")
    (fact,) = trainer.tier("disk").segments
    assert fact.bad_blocks == (1,)


def test_without_a_good_copy_nothing_is_uploaded(host: Host, tmp_path: Path, held: threading.Event):
    trainer = host.trainer(spec(tmp_path), size=9 << 20)
    saved = save(trainer, 1)
    wait_until(lambda: level(trainer, saved, "disk") == "done")
    trainer.save(2)
    assert steps(trainer) == [2]
    _damage(tmp_path, saved)
    held.set()
    wait_until(lambda: level(trainer, saved) == "failed")
    assert "disk copy" in trainer.client.progress(saved.save_id).errors["far"]
    assert steps(trainer, "far") == []
    assert not list(tmp_path.glob("far/run/segments/*"))


def test_what_the_disk_holds_goes_on_after_memory_was_lost(
    host: Host, tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker, "STOP_WAIT_S", 0.01)
    trainer = host.trainer(spec(tmp_path))
    saved = save(trainer, 1)
    wait_until(lambda: level(trainer, saved, "disk") == "done")
    trainer.save(2)
    assert steps(trainer) == [2]
    host.node.stop()
    held.set()
    host.restart()
    wait_until(lambda: steps(trainer, "far") == [1])
    trainer.check(saved, "far")


def _damage(tmp_path: Path, saved: Manifest) -> None:
    path = tmp_path / "disk" / "run" / "segments" / saved.segments[0].id
    with path.open("r+b") as file:
        file.seek(5 << 20)
        file.write(b"flip")


def test_who_waits_for_a_tier_waits_for_the_one_above_too(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker, "BACKOFF_S_MAX", 600.0)
    monkeypatch.setattr(worker, "BACKOFF_S", 600.0)
    monkeypatch.setattr(attempts, "ATTACH_WAIT_S", 0.1)
    (tmp_path / "disk").write_text("in the way")
    trainer = host.trainer(spec(tmp_path))
    saved = save(trainer, 1)
    disk = host.node._registry.namespace("run").workers["disk"]
    wait_until(lambda: disk._failures >= 2)  # by itself, and for this save
    (tmp_path / "disk").unlink()
    wait_until(lambda: host.node.progress("run", saved.save_id, "far").levels["far"] == "done")
