"""A bucket of a real server as a tier: what is saved there outlives every host."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tieredckpt
from tests.support import commands
from tests.support.agent import wait_until
from tests.support.http_proxy import HttpProxy, Rule
from tieredckpt.agent.tiers.scanner import LOOK_WAIT_S
from tieredckpt.errors import WaitError
from tieredckpt.testing.s3_server import ACCESS_KEY, SECRET_KEY, S3Server

DEADLINE_S = 120.0


pytestmark = pytest.mark.usefixtures("starts_agent")


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


def config(runtime_dir: Path, server: S3Server, prefix: str, **more: Any) -> dict[str, Any]:
    return {
        "namespace": "run",
        "memory": {"capacity": "256MiB"},
        "agent": {"runtime_dir": str(runtime_dir), "idle_timeout": "60 s"},
        "tiers": [
            {
                "name": "s3",
                "url": f"s3://{prefix}",
                "endpoint": server.endpoint,
                "allow_http": True,
                "part_size": "5MiB",
                **more,
            }
        ],
    }


def state_of(step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    return {"w": torch.randn(300_000), "m": {"v": torch.randn(70, 9)}, "step": step}


def zeros() -> dict[str, Any]:
    return {"w": torch.zeros(300_000), "m": {"v": torch.zeros(70, 9)}, "step": 0}


def test_another_host_restores_from_the_bucket(
    runtime_dir: Path, s3_server: S3Server, s3_prefix: str
):
    """Nothing of the first host is left; the second one has never heard of it."""
    first, second = runtime_dir / "a", runtime_dir / "b"
    for folder in (first, second):
        folder.mkdir(mode=0o700)
    with tieredckpt.Engine.open(config(first, s3_server, s3_prefix)) as engine:
        for step in (1, 2):
            dcp.save(state_of(step), storage_writer=engine.writer(step))
            engine.wait(step, "s3", timeout=DEADLINE_S)
        agent = engine.status().health.pid
    os.kill(agent, signal.SIGKILL)
    shutil.rmtree(first)
    with tieredckpt.Engine.open(config(second, s3_server, s3_prefix)) as engine:
        state = zeros()
        assert engine.load(state) == 2
        wanted = state_of(2)
        assert torch.equal(state["w"], wanted["w"])
        assert torch.equal(state["m"]["v"], wanted["m"]["v"])
        assert state["step"] == 2
        report = engine.last_restore
        assert report is not None
        assert report.bytes_by_source.keys() == {"s3"}
        _commands_see_it(runtime_dir, second, config(second, s3_server, s3_prefix), "agent")
        agent = engine.status().health.pid
    os.kill(agent, signal.SIGKILL)
    _commands_see_it(runtime_dir, runtime_dir / "none", config(second, s3_server, s3_prefix), "no")


def _commands_see_it(folder: Path, runtime: Path, settings: dict[str, Any], who: str) -> None:
    """With an agent, and with nothing but the configuration and the credentials."""
    file = folder / f"{who}.yaml"
    file.write_text(json.dumps(settings))
    where = ["--config", str(file), "--runtime-dir", str(runtime), "--json"]
    listed = run("ls", *where)["checkpoints"]
    assert {each["step"]: each["tiers"] for each in listed} == {n: {"s3": "whole"} for n in (1, 2)}
    copies = run("verify", "--tier", "s3", *where)["copies"]
    assert {each["step"] for each in copies} == {1, 2}
    assert all(each["intact"] for each in copies)


def run(*words: str) -> Any:
    """A command's answer."""
    done = commands.tieredckpt(*words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_store_that_never_answers_holds_up_nobody_beyond_his_deadline(
    runtime_dir: Path, s3_server: S3Server, s3_prefix: str
):
    """It accepts connections. What is asked of memory has nothing to do with it."""
    with HttpProxy(s3_server.address) as proxy:
        settings = config(runtime_dir, s3_server, s3_prefix, endpoint=proxy.endpoint)
        state = state_of(1)
        with tieredckpt.Engine.open(settings) as engine:
            assert engine.load(state) is None
            dcp.save(state, storage_writer=engine.writer(1))
            engine.wait(1, "s3", DEADLINE_S)
            proxy.rules.append(Rule("stall", "", times=None))
            dcp.save(state, storage_writer=engine.writer(2))
            begun_s = time.monotonic()
            engine.wait(2, "memory", 0.0)
            with pytest.raises(WaitError, match=r"not reached 's3' after \d+(\.\d+)? s") as caught:
                engine.wait(2, "s3", 0.5)
            assert caught.value.fields["reason"] == "timeout"
            with pytest.raises(WaitError, match=r"there is no step 7 .*s3: no answer within 1 s"):
                engine.wait(7, "s3", 0.5)
            engine.pin(2, "for a while", timeout=1.0)
            # (Far below what the agent gives a tier, and far above what the above takes.)
            assert time.monotonic() - begun_s < LOOK_WAIT_S / 2
            proxy.heal()
            engine.wait(2, "s3", DEADLINE_S)


@pytest.mark.full
def test_what_arrives_in_memory_is_seen_while_a_store_is_mute(
    runtime_dir: Path, s3_server: S3Server, s3_prefix: str
):
    """As on a host that did not commit the save: its manifest may come after somebody waits."""
    with HttpProxy(s3_server.address) as proxy, futures.ThreadPoolExecutor(1) as waiting:
        settings = config(runtime_dir, s3_server, s3_prefix, endpoint=proxy.endpoint)
        state = state_of(1)
        with tieredckpt.Engine.open(settings) as engine:
            assert engine.load(state) is None
            engine._session.peers = engine._session.client.peers()  # as if there were others
            dcp.save(state, storage_writer=engine.writer(1))
            engine.wait(1, "s3", DEADLINE_S)
            proxy.rules.append(Rule("stall", "", times=None))
            num_seen = len(proxy.seen)
            waits = waiting.submit(engine.wait, 2, "memory", DEADLINE_S)
            wait_until(lambda: len(proxy.seen) > num_seen)  # it looks at what the store holds
            dcp.save(state, storage_writer=engine.writer(2))
            waits.result(DEADLINE_S)
            proxy.heal()
