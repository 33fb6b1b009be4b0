"""Training's own log says that a tier gets nothing: the agent's is read when it is too late."""

from __future__ import annotations

import logging
import shutil
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.agent import FakeTrainer, spec_of, wait_until
from tests.unit.agent.test_node import Host
from tieredckpt.agent.namespace import Namespace
from tieredckpt.agent.tiers import worker as worker_module
from tieredckpt.agent.tiers.place import TierPlace
from tieredckpt.agent.tiers.worker import TOLD_AFTER_S, UNREAD_AFTER_S, TierWorker
from tieredckpt.dcp.job.tier_alerts import AGAIN_S, NEXT_S, QUIET_S, TierAlerts
from tieredckpt.engine import Engine
from tieredckpt.errors import TierUnavailableError
from tieredckpt.rpc.messages.agent import AskTroubles, TierTrouble
from tieredckpt.storage.backends.file import FileTier

LOGGER = "tieredckpt.dcp.troubles"


@pytest.fixture
def host(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(worker_module, "BACKOFF_S_MAX", 0.05)
    monkeypatch.setattr(worker_module, "BACKOFF_S", 0.05)
    host = Host(runtime_dir)
    yield host
    host.close()


def of(kind: Any, text: str) -> dict[str, TierTrouble]:
    return {"s3": TierTrouble(kind=kind, text=text)}


def test_it_is_told_once_and_then_now_and_then_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
):
    now_s = 1000.0
    alerts = TierAlerts(lambda: now_s)

    def told(found: dict[str, TierTrouble]) -> list[str]:
        caplog.clear()
        alerts.log(found)
        return [record.getMessage() for record in caplog.records if record.name == LOGGER]

    assert told({}) == []
    assert told(of("failing", "no key")) == ["tier s3: no key"]
    now_s += AGAIN_S - 1
    assert told(of("failing", "no key, again")) == []
    now_s += 1
    assert told(of("failing", "no key at all")) == ["tier s3: no key at all"]
    assert told(of("full", "too slow")) == ["tier s3: too slow"]
    now_s += QUIET_S
    assert told({}) == ["tier s3: it keeps up again"]
    assert told({}) == []
    assert told(of("failing", "no key")) == ["tier s3: no key"]
    now_s += QUIET_S
    assert told({}) == ["tier s3: it works again"]


def test_what_is_there_at_every_other_save_is_told_once(caplog: pytest.LogCaptureFixture):
    now_s = 1000.0
    alerts = TierAlerts(lambda: now_s)
    for _ in range(10):
        alerts.log(of("full", "too slow"))
        now_s += 1
        alerts.log({})
        now_s += QUIET_S - 2
    found = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert found == ["tier s3: too slow"] * 2  # and once more after AGAIN_S


def test_each_outage_is_told_and_not_only_the_first(caplog: pytest.LogCaptureFixture):
    now_s = 1000.0
    alerts = TierAlerts(lambda: now_s)
    for began_s in (1000.0, 1060.0, 1080.0, 1100.0):  # the later two within a minute of one told
        now_s = began_s
        for _ in range(10):
            alerts.log({"s3": TierTrouble(kind="failing", text=f"{began_s}", since_s=began_s)})
            now_s += 1
        alerts.log({})  # it has healed
    found = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert found == ["tier s3: 1000.0", "tier s3: 1060.0"]
    now_s = 1060.0 + NEXT_S
    alerts.log({"s3": TierTrouble(kind="failing", text="it lasts", since_s=1100.0)})
    assert caplog.records[-1].getMessage() == "tier s3: it lasts"


def namespace_of(host: Host) -> Namespace:
    return host.node._registry.namespace("run")


def told(host: Host, trainer: FakeTrainer, step: int) -> dict[str, TierTrouble]:
    """What the agent says after one more save."""
    trainer.save(step, tiers=("disk",))
    return dict(host.node.ask_troubles("run", AskTroubles()).tiers)


def test_only_a_failure_that_lasts_is_told_and_until_something_was_copied(
    host: Host, tmp_path: Path
):
    disk = tmp_path / "disk"
    disk.write_text("in the way")
    trainer = host.trainer(spec_of(tiers={"disk": disk}, keep_last=4))
    worker = namespace_of(host).workers["disk"]
    now_s = time.monotonic()
    worker._clock = lambda: now_s  # however slow this machine is
    assert told(host, trainer, 1) == {}
    wait_until(lambda: worker.error is not None)
    assert told(host, trainer, 2) == {}
    late(worker, 2 * TOLD_AFTER_S)
    failures = worker._failures
    wait_until(lambda: worker._failures > failures)
    (trouble,) = told(host, trainer, 3).values()
    assert trouble.kind == "failing"
    assert str(disk) in trouble.text
    assert 0 < trouble.since_s <= now_s
    disk.unlink()
    wait_until(lambda: worker.is_idle())
    assert told(host, trainer, 4) == {}


def late(worker: TierWorker, by_s: float) -> None:
    worker._clock = lambda: time.monotonic() + by_s


def test_what_failed_once_and_is_copied_for_long_is_not_told(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    again, go_on = threading.Event(), threading.Event()
    tries = iter((False, True))
    put_from = FileTier.put_from

    def slow(self: FileTier, key: str, source: Any) -> None:
        if not next(tries, True):
            raise TierUnavailableError("slow down", tier="disk", outcome="not_applied")
        again.set()
        assert go_on.wait(60)
        put_from(self, key, source)

    monkeypatch.setattr(FileTier, "put_from", slow)
    trainer = host.trainer(spec_of(tiers={"disk": tmp_path / "disk"}))
    try:
        trainer.save(1, tiers=("disk",))
        assert again.wait(60)
        worker = namespace_of(host).workers["disk"]
        late(worker, 10 * TOLD_AFTER_S)
        assert worker.trouble() is None
    finally:
        go_on.set()


def test_a_try_that_is_long_in_vain_is_told(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A store that does not answer is asked for minutes before its first failure."""
    worker: TierWorker | None = None

    def mute(self: FileTier, key: str, source: Any) -> None:
        assert worker is not None
        late(worker, TOLD_AFTER_S)
        raise TierUnavailableError("no answer", tier="disk", outcome="not_applied")

    monkeypatch.setattr(FileTier, "put_from", mute)
    monkeypatch.setattr(worker_module, "NUDGE_S", 600.0)  # not tried again
    monkeypatch.setattr(worker_module, "BACKOFF_S", 600.0)
    trainer = host.trainer(spec_of(tiers={"disk": tmp_path / "disk"}))
    worker = namespace_of(host).workers["disk"]
    trainer.save(1, tiers=("disk",))
    wait_until(lambda: worker.error is not None)
    assert worker._failures == 1
    trouble = worker.trouble()
    assert trouble is not None
    assert "no answer" in trouble.text


def test_a_tier_that_does_not_answer_at_all_is_told(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A file system that hangs raises nothing; a new agent does not know that its tier failed."""
    go_on = threading.Event()
    opening = TierPlace.open

    def hangs(self: TierPlace) -> Any:
        assert go_on.wait(60)
        return opening(self)

    monkeypatch.setattr(TierPlace, "open", hangs)
    host.trainer(spec_of(tiers={"disk": tmp_path / "disk"}))
    worker = namespace_of(host).workers["disk"]
    try:
        assert worker.trouble() is None
        late(worker, UNREAD_AFTER_S)
        trouble = worker.trouble()
        assert trouble is not None
        assert "could not be read" in trouble.text
    finally:
        go_on.set()
    wait_until(lambda: worker.catalog is not None)
    assert worker.trouble() is None


def lasts(worker: TierWorker) -> None:
    """It has failed for so long that it is told."""
    wait_until(lambda: worker.error is not None)
    late(worker, TOLD_AFTER_S)
    wait_until(lambda: worker.trouble() is not None)


def test_a_tier_that_lacks_nothing_when_it_is_back_is_not_told(host: Host, tmp_path: Path):
    """A new agent does not know what the tier holds: all of it waits until it was read."""
    disk, aside = tmp_path / "disk", tmp_path / "aside"
    trainer = host.trainer(spec_of(tiers={"disk": disk}))
    trainer.spilled(trainer.save(1, tiers=("disk",)).save_id)
    disk.rename(aside)
    disk.write_text("in the way")
    host.restart()
    worker = namespace_of(host).workers["disk"]
    lasts(worker)
    disk.unlink()
    aside.rename(disk)
    wait_until(lambda: worker.is_idle() and worker.error is None)
    assert worker.trouble() is None


def test_what_waits_for_the_tier_above_is_no_trouble_of_this_one(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    go_on = threading.Event()
    put_from = FileTier.put_from

    def slow(self: FileTier, key: str, source: Any) -> None:
        assert self.name == "far" or go_on.wait(60)
        put_from(self, key, source)

    monkeypatch.setattr(FileTier, "put_from", slow)
    far = tmp_path / "far"
    far.write_text("in the way")
    spec = spec_of(tiers={"disk": tmp_path / "disk", "far": far})
    below = msgspec.structs.replace(spec.tiers[1], source="disk")
    trainer = host.trainer(msgspec.structs.replace(spec, tiers=(spec.tiers[0], below)))
    try:
        saved = trainer.save(1, tiers=("disk", "far"))
        worker = namespace_of(host).workers["far"]
        lasts(worker)
        far.unlink()
        wait_until(lambda: worker.catalog is not None)
        assert worker.trouble() is None
        assert [each.save_id for each in worker.queued()[0]] == [saved.save_id]
    finally:
        go_on.set()


def test_what_is_being_copied_counts_as_waiting(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begun, go_on = threading.Event(), threading.Event()
    put_from = FileTier.put_from

    def slow(self: FileTier, key: str, source: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        put_from(self, key, source)

    monkeypatch.setattr(FileTier, "put_from", slow)
    trainer = host.trainer(spec_of(tiers={"disk": tmp_path / "disk"}))
    worker = namespace_of(host).workers["disk"]
    try:
        trainer.save(1, tiers=("disk",))
        assert begun.wait(60)
        worker.note_pressure()
        trouble = worker.trouble()
        assert trouble is not None
        assert "1 wait" in trouble.text
    finally:
        go_on.set()
    wait_until(worker.is_idle)
    worker.note_pressure()  # a moment too late: nothing waits any more
    assert worker.trouble() is None


def test_a_tier_that_fails_is_not_called_slow(host: Host, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.write_text("in the way")
    spec = spec_of(tiers={"disk": disk}, keep_last=1)
    trainer = host.trainer(spec)
    worker = namespace_of(host).workers["disk"]
    now_s = time.monotonic()
    worker._clock = lambda: now_s
    found = [told(host, trainer, 1)]
    wait_until(lambda: worker.error is not None)
    found += [told(host, trainer, step) for step in (2, 3, 4)]
    assert found[0] == {}
    assert found[-1]["disk"].kind == "full"
    assert "are shed" in found[-1]["disk"].text
    assert str(disk) in found[-1]["disk"].text


@pytest.mark.usefixtures("starts_agent")
def test_the_log_of_training_has_it(
    runtime_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    disk = tmp_path / "disk"
    settings = {
        "namespace": "run",
        "memory": {"capacity": "256MiB", "keep": {"last": 1}},
        "agent": {"runtime_dir": str(runtime_dir)},
        "tiers": [{"name": "disk", "url": f"file://{disk}"}],
    }
    state = {"w": torch.zeros(1000)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        with Engine.open(settings) as engine, caplog.at_level(logging.WARNING, logger=LOGGER):
            assert engine.load(state) is None
            shutil.rmtree(disk)
            disk.write_text("in the way")
            dcp.save(state, storage_writer=engine.writer(1))

            def logged() -> list[str]:
                return [each.getMessage() for each in caplog.records if each.name == LOGGER]

            # No further save: the next one may be an hour away.
            wait_until(lambda: bool(logged()), deadline_s=60)
            assert logged()[0].startswith("tier disk: it has failed for ")
            assert str(disk) in logged()[0]
            (tier,) = engine.status().namespaces[0].tiers
            assert str(disk) in (tier.error or "")
