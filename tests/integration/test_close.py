"""The last checkpoint of a training is in the tiers once its engine is closed."""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.agent import FakeTrainer, spec_of, wait_until
from tests.support.faults import ForkedAgent, state_of
from tests.support.preloaded import context
from tests.unit.agent.test_node import Host
from tieredckpt.dcp.preemption import _AfterNotice
from tieredckpt.engine import Engine
from tieredckpt.format.manifest import decode_manifest
from tieredckpt.recovery import flush
from tieredckpt.recovery.flush import Terminated, flush_and_wait, raises_on_sigterm
from tieredckpt.rpc.messages import agent as m
from tieredckpt.storage.backends.file import FileTier

pytestmark = [
    pytest.mark.usefixtures("served"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]
LOGGER = "tieredckpt.dcp.job.session"


def settings(runtime_dir: Path, tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "namespace": "run",
        "memory": {"capacity": "256MiB", "keep": {"last": 1}},
        "agent": {"runtime_dir": str(runtime_dir)},
        "tiers": [
            {"name": name, "url": f"file://{tmp_path / name}", "every": "1000 steps"}
            for name in ("disk", "other")
        ],
        **more,
    }


def saved(engine: Engine, step: int) -> None:
    if step > 1:
        engine.load({"w": torch.zeros(1000)})
    dcp.save({"w": torch.full((1000,), float(step))}, storage_writer=engine.writer(step))


def held(folder: Path) -> list[int]:
    """Steps in a tier; the first one that is saved is due there."""
    found = folder.glob("run/manifests/default/*")
    return sorted(decode_manifest(each.read_bytes()).step for each in found)


def test_close_brings_the_newest_to_all_tiers(runtime_dir: Path, tmp_path: Path):
    with Engine.open(settings(runtime_dir, tmp_path)) as engine:
        for step in (1, 2, 3):
            saved(engine, step)
        assert 3 not in held(tmp_path / "disk")
    for tier in ("disk", "other"):
        assert held(tmp_path / tier) == [1, 3]


def test_where_it_is_not_the_end_nothing_is_brought(runtime_dir: Path, tmp_path: Path):
    config = settings(runtime_dir, tmp_path)
    with Engine.open(config) as engine:
        saved(engine, 1)
        engine.wait(1, "disk", 60)
        engine.wait(1, "other", 60)
    with contextlib.suppress(ZeroDivisionError), Engine.open(config) as engine:
        saved(engine, 2)
        _ = 1 / 0
    engine = Engine.open(config)
    try:
        saved(engine, 3)
        raise ValueError
    except ValueError:
        engine.close()
    engine = Engine.open(config)
    saved(engine, 4)
    engine.close(flush=False)  # as live recovery does
    with Engine.open(config) as engine:  # it saves nothing
        assert engine.latest() is not None
    with Engine.open({**config, "close": {"flush": "0 s"}}) as engine:
        saved(engine, 5)
    assert held(tmp_path / "disk") == held(tmp_path / "other") == [1]


def test_a_tier_that_fails_is_warned_of_by_step_and_place(
    runtime_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        with Engine.open(settings(runtime_dir, tmp_path, close={"flush": "10 min"})) as engine:
            saved(engine, 1)
            engine.wait(1, "other", 60)
            shutil.rmtree(tmp_path / "other")
            (tmp_path / "other").write_text("in the way")
            dcp.save({"w": torch.zeros(1000)}, storage_writer=engine.writer(2))
        (record,) = [each for each in caplog.records if each.name == LOGGER]
    message = record.getMessage()
    assert "(last saved: step 2) is in the memory of host " in message
    assert "tier other" in message
    assert str(tmp_path / "other") in message
    assert "tier disk:" not in message
    assert held(tmp_path / "disk")[-1] == 2


def test_once_a_notices_deadline_is_over_it_is_warned_of_at_once(
    runtime_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        with Engine.open(settings(runtime_dir, tmp_path, close={"flush": "10 min"})) as engine:
            saved(engine, 1)
            engine.wait(1, "other", 60)
            shutil.rmtree(tmp_path / "other")
            (tmp_path / "other").write_text("in the way")
            dcp.save({"w": torch.zeros(1000)}, storage_writer=engine.writer(2))
            assert engine.flush("disk").done
            engine.leave_on().ask(0.0)
        (record,) = [each for each in caplog.records if each.name == LOGGER]
    message = record.getMessage()
    assert " and in tier disk, but not in every tier: tier other: " in message


@pytest.mark.full
@pytest.mark.usefixtures("starts_agent")
def test_an_agent_that_is_gone_is_named(
    runtime_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    agent = ForkedAgent(runtime_dir)
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        config = settings(runtime_dir, tmp_path)
        config["agent"]["start"] = "never"
        with Engine.open(config) as engine:
            saved(engine, 1)
            agent.kill()
        (record,) = [each for each in caplog.records if each.name == LOGGER]
    assert "no agent answers" in record.getMessage()


class ToPipe(logging.Handler):
    """Sends each message."""

    def __init__(self, pipe: Any) -> None:
        super().__init__(logging.WARNING)
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        self._pipe.send(record.getMessage())


def close_when_told(pipe: Any, config: dict[str, Any]) -> None:
    logging.getLogger(LOGGER).addHandler(ToPipe(pipe))
    with Engine.open(config) as engine:
        saved(engine, 1)
        engine.wait(1, "disk", 60)
        saved(engine, 2)
        pipe.send("saved")
        assert pipe.recv() == "close"
    pipe.send("closed")


@pytest.mark.usefixtures("starts_agent")
def test_sigterm_ends_the_wait_and_then_the_process(runtime_dir: Path, tmp_path: Path):
    """The agent stands still in the copy, and answers nobody."""
    agent = ForkedAgent(runtime_dir)
    pipe, theirs = context.Pipe()
    config = settings(runtime_dir, tmp_path, close={"flush": "10 min"})
    config["tiers"] = config["tiers"][:1]
    process = context.Process(target=close_when_told, args=(theirs, config), daemon=True)
    process.start()
    theirs.close()
    try:
        assert pipe.poll(60)
        assert pipe.recv() == "saved"
        agent.arm("agent.spill.segment=stop")
        pipe.send("close")
        wait_until(lambda: state_of(agent.pid) == "T", deadline_s=60)
        process.terminate()
        assert pipe.poll(60), "the wait goes on"
        message = pipe.recv()
        assert "(last saved: step 2) is in the memory of host " in message
        assert "SIGTERM ended the wait" in message
        process.join(60)
        assert process.exitcode == -signal.SIGTERM
        agent.signal(signal.SIGCONT)
        wait_until(lambda: held(tmp_path / "disk") == [1, 2], deadline_s=60)
    finally:
        process.kill()
        agent.kill()


def test_only_a_sigterm_that_would_end_the_process_raises():
    def raised() -> bool:
        try:
            with raises_on_sigterm():
                signal.raise_signal(signal.SIGTERM)
        except Terminated:
            return True
        return False

    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        assert not raised()
        assert came == [signal.SIGTERM]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert raised()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(Terminated), raises_on_sigterm(), contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)  # not lost where something suppresses it
        with raises_on_sigterm():
            pass
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        # The handler of an engine that was closed within 5 s of a notice, under a launcher.
        kept = _AfterNotice(signal.SIG_DFL, time.monotonic())
        signal.signal(signal.SIGTERM, kept)
        assert not raised()
        assert signal.getsignal(signal.SIGTERM) is kept
        signal.signal(signal.SIGTERM, _AfterNotice(signal.SIG_DFL, time.monotonic() - 60))
        assert raised()
    finally:
        signal.signal(signal.SIGTERM, before)


class Direct:
    """What a flush needs of a client, calling a node in this process."""

    namespace = "run"

    def __init__(self, host: Host) -> None:
        self._node = host.node

    def call(self, request: Any, namespace: Any = None, **limits: Any) -> m.Flushed | None:
        return self._node.flush("run", request) if isinstance(request, m.Flush) else None

    def progress(self, save_id: str, **more: Any) -> m.Progress:
        return self._node.progress("run", save_id, more["awaited"])

    def status(self, **limits: Any) -> m.Status:
        return self._node.status()


@pytest.fixture
def host(runtime_dir: Path) -> Iterator[Host]:
    host = Host(runtime_dir / "own")
    yield host
    host.close()


def test_bytes_that_move_are_waited_for_and_others_are_not(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A tier takes a run of bytes between any two looks, and after some of them no more."""
    now_s, steps = 1000.0, threading.Semaphore(0)
    over, ended = threading.Event(), threading.Event()

    def slow(self: FileTier, key: str, source: Any) -> None:
        while not over.is_set():
            steps.acquire()
            source.read_into(0, memoryview(bytearray(source.size)))
        ended.wait(60)

    monkeypatch.setattr(FileTier, "put_from", slow)
    monkeypatch.setattr(flush, "QUIET_S", 0.05)
    monkeypatch.setattr(flush, "WRITE_OUT_S", 0.05)
    trainer: FakeTrainer = host.trainer(spec_of(tiers={"disk": tmp_path / "disk"}))
    report_id = trainer.save(1).save_id
    worker = host.node._registry.namespace("run").workers["disk"]
    worker._clock = lambda: now_s
    looks = 0
    began_s = time.monotonic()

    def looked(report: Any) -> None:
        nonlocal now_s, looks
        looks += 1
        wait_until(lambda: worker.outcome(report_id).level == "active")
        if time.monotonic() - began_s < 0.2:
            now_s += 0.04  # less than QUIET_S
            steps.release()
            wait_until(lambda: worker._moved_at_s == now_s)
        else:
            over.set()
            now_s += 1.0

    client: Any = Direct(host)
    report = flush_and_wait(client, "disk", 600.0, on_report=looked, while_moving=True)
    assert looks > 2
    assert report.levels == {"default": "active"}
    assert not report.done
    ended.set()
    steps.release()
