"""What retention in a tier leaves alone: pins, and what is being read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.agent import FakeTrainer, spec_of, wait_until
from tests.unit.agent.test_node import Host, steps
from tieredckpt.agent.leader import holds
from tieredckpt.agent.tiers import worker as worker_module
from tieredckpt.errors import NotFoundError, TierUnavailableError, UsageError
from tieredckpt.format.manifest import Manifest
from tieredckpt.rpc.messages import agent as m
from tieredckpt.storage.backends.file import FileTier
from tieredckpt.storage.base import Scope
from tieredckpt.storage.shared.catalog import SharedCatalog
from tieredckpt.storage.shared.records import tombstone_of


@pytest.fixture
def host(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(worker_module, "BACKOFF_S_MAX", 0.05)
    monkeypatch.setattr(worker_module, "BACKOFF_S", 0.05)
    host = Host(runtime_dir)
    yield host
    host.close()


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def saved(host: Host, trainer: FakeTrainer, step: int) -> Manifest:
    """A checkpoint that is on disk, with retention done."""
    manifest = trainer.save(step, tiers=("disk",))
    worker = host.node._registry.namespace("run").workers["disk"]
    wait_until(lambda: trainer.client.progress(manifest.save_id).levels["disk"] == "done")
    wait_until(worker.is_idle)
    return manifest


def say(
    host: Host, manifest: Manifest, kind: str, text: str = "", wait_s: float = 60.0
) -> m.Pinned:
    request = m.AddRecord(
        stream="default", save_id=manifest.save_id, kind=kind, text=text, wait_s=wait_s
    )
    found = host.node.add_record("run", request)
    assert found is not None
    return found


def test_a_pin_outlives_memory_and_agent_until_it_ends(host: Host, disk: Path):
    spec = spec_of(tiers={"disk": disk}, keep_last=1, tier_keep_last=1)
    trainer = host.trainer(spec)
    first = saved(host, trainer, 1)
    say(host, first, "pin", "for the paper")
    assert len(list((disk / "run" / "records" / first.save_id).iterdir())) == 1
    saved(host, trainer, 2)
    saved(host, trainer, 3)
    assert (steps(trainer), steps(trainer, "disk")) == ([3], [1, 3]), "memory's slots are few"
    host.restart()
    trainer = host.trainer(spec)
    saved(host, trainer, 4)
    assert steps(trainer, "disk") == [1, 4], "it was read back from the disk"
    say(host, first, "pin", "again")
    say(host, first, "unpin")
    saved(host, trainer, 5)
    assert steps(trainer, "disk") == [5], "all pins that were known have ended"
    assert not list((disk / "run" / "records").glob("*/*"))


def test_a_pin_goes_along_with_a_spill(host: Host, disk: Path):
    trainer = host.trainer(spec_of(tiers={"disk": disk}, keep_last=1, tier_keep_last=1))
    saved(host, trainer, 1)
    (disk / "run").rename(disk / "away")  # the tier does not answer any more
    (disk / "run").write_text("in its place")
    worker = host.node._registry.namespace("run").workers["disk"]
    waiting = trainer.save(2, tiers=("disk",))
    wait_until(lambda: worker.error is not None)
    say(host, waiting, "pin", "before it is there")
    (disk / "run").unlink()
    (disk / "away").rename(disk / "run")
    wait_until(lambda: trainer.client.progress(waiting.save_id).levels["disk"] == "done")
    saved(host, trainer, 3)
    assert steps(trainer, "disk") == [2, 3]


def test_what_was_left_behind_stays_while_it_is_pinned(host: Host, disk: Path):
    """The ring has room for one of two, and the tier that is to have the pinned one is away."""
    spec = spec_of(tiers={"disk": disk}, keep_last=3, capacity_bytes=6 << 20)
    trainer = host.trainer(spec)
    trainer.open_attempt()
    base, pinned, _ = (trainer.save(step) for step in (20, 30, 40))
    (disk / "run").rename(disk / "away")
    (disk / "run").write_text("in its place")
    say(host, pinned, "pin", "for the paper", wait_s=0.0)
    trainer.close()
    trainer = host.trainer(spec)
    trainer.open_attempt({"default": base.save_id}, in_silence=True)
    for step in (21, 22, 23, 24):
        trainer.save(step)
    assert steps(trainer) == [22, 23, 24, 30]


def test_what_cannot_be_pinned(host: Host, disk: Path):
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    there = saved(host, trainer, 2)
    with pytest.raises(NotFoundError, match="is not pinned"):
        say(host, there, "unpin")
    request = m.AddRecord(stream="default", save_id="0" * 32, kind="pin")
    with pytest.raises(NotFoundError, match="no tier of this host"):
        host.node.add_record("run", request)


def test_a_pin_needs_a_tier_that_keeps_it(host: Host):
    trainer = host.trainer(spec_of())
    with pytest.raises(UsageError, match="none is configured"):
        say(host, trainer.save(1), "pin")
    assert host.node.status().namespaces[0].pins == ()


def test_what_is_in_memory_only_is_brought_to_a_tier(host: Host, disk: Path):
    trainer = host.trainer(spec_of(tiers={"disk": disk}, keep_last=1, tier_keep_last=1))
    saved(host, trainer, 1)
    here_only = trainer.save(2)
    found = say(host, here_only, "pin", "it went so well")
    assert found.brought == "disk"
    wait_until(lambda: trainer.client.progress(here_only.save_id).levels["disk"] == "done")
    saved(host, trainer, 3)
    saved(host, trainer, 4)
    assert steps(trainer, "disk") == [2, 4]
    (pin,) = host.node.status().namespaces[0].pins
    assert (pin.step, pin.reason, pin.tiers, pin.owed) == (2, "it went so well", ("disk",), ())
    say(host, here_only, "unpin")
    assert host.node.status().namespaces[0].pins == ()


class Records:
    """Puts of records wait, or fail, as long as it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.error: Exception | None = None
        put = FileTier.put

        def held(tier: FileTier, key: str, data: bytes) -> None:
            if key.startswith("records/"):
                if self.error is not None:
                    raise self.error
                assert self.go_on.wait(60)
            put(tier, key, data)

        monkeypatch.setattr(FileTier, "put", held)


def test_a_pin_counts_before_a_tier_has_noted_it(
    host: Host, disk: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = host.trainer(spec_of(tiers={"disk": disk}, keep_last=1, tier_keep_last=1))
    first = saved(host, trainer, 1)
    records = Records(monkeypatch)
    found = say(host, first, "pin", "soon", wait_s=0.05)
    assert (found.tiers, found.owed) == ((), {"disk": "it has not answered yet"})
    assert host.node.status().namespaces[0].pins[0].owed == ("disk",)
    saved(host, trainer, 2)
    assert steps(trainer, "disk") == [1, 2], "the tier waits to note it, retention knows it"
    records.go_on.set()
    wait_until(lambda: host.node.status().namespaces[0].pins[0].tiers == ("disk",))
    assert len(list((disk / "run" / "records" / first.save_id).iterdir())) == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TierUnavailableError("no", tier="disk", outcome="not_applied"), "no"),
        (RuntimeError("a bug"), "RuntimeError: a bug"),
    ],
)
def test_a_tier_that_could_not_note_a_pin_gets_it_when_it_can(
    host: Host,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    told: str,
):
    monkeypatch.setattr(holds, "PAUSE_S_MAX", 0.05)
    trainer = host.trainer(spec_of(tiers={"disk": disk}, tier_keep_last=1))
    first = saved(host, trainer, 1)
    records = Records(monkeypatch)
    records.go_on.set()
    records.error = error
    found = say(host, first, "pin", "later", wait_s=2.0)
    assert (found.tiers, found.owed) == ((), {"disk": told})
    bugs = [record for record in caplog.records if record.exc_info]
    assert len(bugs) == isinstance(error, RuntimeError), "once, however often it is tried"
    assert host.node.status().namespaces[0].pins[0].tiers == ("memory",)
    records.error = None
    wait_until(lambda: "disk" in host.node.status().namespaces[0].pins[0].tiers)
    assert say(host, first, "unpin").owed == {}


def test_what_is_being_read_stays(host: Host, disk: Path):
    trainer = host.trainer(spec_of(tiers={"disk": disk}, keep_last=1, tier_keep_last=1))
    first = saved(host, trainer, 1)
    second = saved(host, trainer, 2)
    assert steps(trainer, "disk") == [2]
    _, opened = host.node.read_segment("run", second.segments[0].id, "disk")
    opened.close()
    assert host.node.protections("run").tiers["disk"] == {second.save_id: "it is being read"}
    saved(host, trainer, 3)
    assert steps(trainer, "disk") == [2, 3], "a reader opens one segment after the other"
    with pytest.raises(NotFoundError):
        host.node.read_segment("run", first.segments[0].id, "disk")
    now_s = host.node._registry.namespace("run").keeping._clock() + holds.READING_S + 1
    host.node._registry.namespace("run").keeping._clock = lambda: now_s
    saved(host, trainer, 4)
    assert steps(trainer, "disk") == [4]


def test_what_waits_for_a_tier_is_needed_in_memory(host: Host, disk: Path):
    disk.write_text("in the way")
    trainer = host.trainer(spec_of(tiers={"disk": disk}, keep_last=1))
    waiting = trainer.save(1, tiers=("disk",))
    trainer.save(2)
    found = host.node.protections("run").tiers
    assert found == {"memory": {waiting.save_id: "it is being spilled"}, "disk": {}}


def test_what_another_host_has_deleted_is_not_pinned(host: Host, disk: Path):
    spec = spec_of(tiers={"disk": disk}, keep_last=1)
    tier = msgspec.structs.replace(spec.tiers[0], scope="shared")
    trainer = host.trainer(msgspec.structs.replace(spec, tiers=(tier,)))
    first, second = saved(host, trainer, 1), saved(host, trainer, 2)
    elsewhere = SharedCatalog(FileTier("disk", disk, "run", scope=Scope.SHARED))
    elsewhere.load()
    assert elsewhere.bury(tombstone_of(first, "retention", "host-b"))
    with pytest.raises(NotFoundError, match="was deleted"):
        say(host, first, "pin", "too late")
    say(host, second, "pin", "in time")
    elsewhere.load_records()
    assert elsewhere.records(second.save_id)[0].text == "in time"
