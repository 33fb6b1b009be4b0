"""Retention after an agent's start: what the one before it did not come to delete, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.agent import FakeTrainer, spec_of, wait_until
from tests.unit.agent.test_node import Host, flip, slot_file, steps
from tieredckpt import failpoints
from tieredckpt.agent.cluster.authority import RULES
from tieredckpt.agent.host.sessions import LEASES
from tieredckpt.agent.tiers import worker
from tieredckpt.format.manifest import Manifest
from tieredckpt.rpc.messages import agent as m
from tieredckpt.storage.base import manifest_key


@pytest.fixture
def host(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(worker, "BACKOFF_S_MAX", 0.05)
    monkeypatch.setattr(worker, "BACKOFF_S", 0.05)
    host = Host(runtime_dir)
    yield host
    host.close()
    failpoints.arm("")


def save_and_die(trainer: FakeTrainer, step: int) -> Manifest:
    """A save whose retention is not reached: then the agent has to be ended."""
    made = trainer.manifest(step, (trainer.write_segment(step),))
    failpoints.arm("agent.commit.after_manifest=eio")
    with pytest.raises(OSError, match="failpoint"):
        trainer.commit(made)
    failpoints.arm("")
    return made


def test_what_retention_did_not_come_to_goes_after_the_start(host: Host):
    trainer = host.trainer(spec_of(keep_last=1))
    trainer.prepare()
    trainer.save(1)
    saved = save_and_die(trainer, 2)
    assert steps(trainer) == [1, 2]
    host.restart()
    host.node.reap()
    assert steps(trainer) == [2]
    assert host.slots()["sealed"] == 1
    trainer.check(saved)


def test_what_retention_keeps_stays_and_it_is_done_once(host: Host):
    trainer = host.trainer(spec_of(keep_last=3))
    for step in (1, 2, 3):
        trainer.save(step)
    host.restart()
    host.node.reap()
    assert steps(trainer) == [1, 2, 3]
    assert not host.node._registry.namespace("run").retention.is_due


def test_nothing_goes_for_an_ended_run_while_another_one_may_have_saved(host: Host):
    """Its ranks are gone, and the new ones' first save may be known at other hosts alone."""
    trainer = host.trainer(spec_of(keep_last=1))
    trainer.prepare()
    trainer.save(1)
    save_and_die(trainer, 2)
    trainer.close()
    wait_until(lambda: host.node._registry.num_sessions() == 0 or host.node.reap())
    looks = host.trainer(spec_of(keep_last=1))
    host.restart()
    for _ in range(3):
        host.node.reap()
    namespace = host.node._registry.namespace("run")
    assert namespace.retention.is_due
    namespace.free_memory()  # as after a spill
    assert steps(looks) == [1, 2]
    looks.close()
    wait_until(lambda: host.node.reap() or not namespace.retention.is_due)
    assert [each.step for each in namespace.catalog.manifests()] == [2]


def test_room_that_a_save_needs_is_made_all_the_same(host: Host, tmp_path: Path):
    """Of what waits for a tier, by the rules of the run that ended: or no first save had room."""
    disk = tmp_path / "disk"
    disk.write_text("in the way")
    trainer = host.trainer(spec_of(tiers={"disk": disk}, keep_last=1))
    trainer.prepare()
    trainer.save(1, tiers=("disk",))
    trainer.save(2, tiers=("disk",))
    trainer.close()
    wait_until(lambda: host.node.reap() or host.node._registry.num_sessions() == 0)
    looks = host.trainer(spec_of(tiers={"disk": disk}, keep_last=1))
    namespace = host.node._registry.namespace("run")
    namespace.free_memory()
    assert steps(looks) == [1, 2]
    with host.node._lock:
        assert namespace.retention.relieve()
    assert steps(looks) == [2]


def test_what_a_tier_has_yet_to_take_up_stays(host: Host, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.write_text("in the way")
    trainer = host.trainer(spec_of(tiers={"disk": disk}, keep_last=1))
    trainer.prepare()
    waiting = trainer.save(1, tiers=("disk",))
    trainer.save(2)
    host.restart()
    host.node.reap()
    assert steps(trainer) == [1, 2]
    trainer.save(3)  # nor does a commit take it away before the tier was attached
    assert steps(trainer) == [1, 3]
    disk.unlink()
    wait_until(lambda: trainer.client.progress(waiting.save_id).levels["disk"] == "done")
    wait_until(lambda: steps(trainer) == [3])
    assert steps(trainer, "disk") == [1]


@pytest.mark.parametrize(
    ("folder", "harmed"),
    [("specs", b"/disk"), ("specs", b"keep_last"), ("sessions", b"run"), ("sessions", b"TCKLEASE")],
)
def test_a_flipped_bit_in_a_file_of_the_agent_before_moves_no_save_and_deletes_nothing(
    host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture, folder: str, harmed: bytes
):
    """The trainer lives on, and its configuration holds from its next request on."""
    trainer = host.trainer(
        spec_of(tiers={"disk": tmp_path / "disk"}, keep_last=3, tier_keep_last=3)
    )
    saves = [trainer.save(step, tiers=("disk",)) for step in (1, 2, 3)]
    wait_until(lambda: trainer.client.progress(saves[-1].save_id).levels["disk"] == "done")
    (path,) = (host.runtime.path / folder).iterdir()
    at = path.read_bytes().index(harmed) + len(harmed)
    flip(path, at)  # of keep_last: 3 becomes 2; of /disk: another folder
    host.restart()
    host.node.reap()
    assert str(path) in caplog.text or path.name in caplog.text
    assert steps(trainer) == [1, 2, 3]
    saves.append(trainer.save(4, tiers=("disk",)))
    wait_until(lambda: trainer.client.progress(saves[-1].save_id).levels["disk"] == "done")
    wait_until(lambda: steps(trainer, "disk") == [2, 3, 4])
    assert steps(trainer) == [2, 3, 4]
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("dis")] == ["disk"]
    host.restart()
    namespace = host.node._registry.namespace("run")
    assert namespace.ruling.keep_last() == 3, "written anew"
    assert host.node._registry.num_sessions() == 1
    assert steps(trainer, "disk") == [2, 3, 4]


@pytest.mark.parametrize("folder", ["specs", "sessions"])
def test_the_former_form_is_read_once_and_a_living_trainer_wins_over_it(
    host: Host, tmp_path: Path, folder: str
):
    """It has no digest: here a bit of the URL and of the namespace were flipped."""
    spec = spec_of(tiers={"disk": tmp_path / "disk"}, keep_last=3)
    trainer = host.trainer(spec)
    other = host.trainer(spec, run=trainer.client.run_id, rank=1)
    saved = trainer.save(1, tiers=("disk",))
    wait_until(lambda: trainer.client.progress(saved.save_id).levels["disk"] == "done")
    host.node.stop()
    for path in (host.runtime.path / folder).iterdir():
        codec = RULES if folder == "specs" else LEASES
        old = msgspec.json.encode(codec.decode(path.read_bytes()))
        path.write_bytes(old.replace(b"/disk", b"/disj"))
    host.restart()
    saved = trainer.save(2, tiers=("disk",))
    wait_until(lambda: trainer.client.progress(saved.save_id).levels["disk"] == "done")
    assert steps(other, "disk") == [1, 2]
    other.prepare()
    for path in (host.runtime.path / folder).iterdir():
        assert path.read_bytes().startswith(b"TCK")
    assert host.node._registry.namespace("run").ruling.spec == spec
    assert host.node._registry.num_sessions() == 2


@pytest.mark.parametrize("lost", ["slot", "manifest", "other manifest", "attempt"])
def test_nothing_goes_while_something_is_lost(host: Host, lost: str):
    trainer = host.trainer(spec_of(keep_last=1))
    trainer.prepare()
    other = trainer.save(1, stream="critic")
    older = trainer.save(1)
    newest = save_and_die(trainer, 2)
    paths = host.runtime.namespaces / "run"
    host.node.stop()
    if lost == "slot":
        slot_file(host, newest).unlink()
    elif lost == "attempt":
        flip(next((paths / "attempts").iterdir()), -1)
    else:
        harmed = newest if lost == "manifest" else other
        flip(paths / manifest_key(harmed.stream, harmed.save_id), -1)
    host.restart()
    host.node.reap()
    held = {each.save_id for each in host.node._registry.namespace("run").catalog.manifests()}
    harmed_id = {"manifest": newest.save_id, "other manifest": other.save_id}.get(lost)
    assert held == {other.save_id, older.save_id, newest.save_id} - {harmed_id}
    if lost != "slot":
        assert host.slots()["sealed"] == 3


def test_it_waits_for_the_host_that_opens_attempts(host: Host):
    trainer = host.trainer(spec_of(keep_last=1))
    trainer.prepare()
    trainer.save(1)
    join(host, trainer, "host-a", "host-b")
    save_and_die(trainer, 2)
    host.restart()
    host.node.reap()
    assert steps(trainer) == [1, 2], "the leader may have gone on from step 1"
    join(host, trainer, "host-a")
    host.node.reap()
    assert steps(trainer) == [2]


def join(host: Host, trainer: FakeTrainer, *names: str) -> None:
    """A job of these hosts; the last one is the leader."""
    entries = [
        m.HostEntry(host_id=name, incarnation="ab" * 16, addresses=("127.0.9.9:9",))
        for name in names
    ]
    request = m.SetPeers(
        session_id=trainer.client.session_id, run=trainer.client.run_id, leader=names[-1],
        hosts=tuple(entries), replicas=0,
    )  # fmt: skip
    trainer.client.request(request)
