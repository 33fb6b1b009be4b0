"""`tieredckpt undelete` against a real S3 server and a shared folder, with an agent that prunes and
without one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tieredckpt
from tests.support import commands
from tests.support.agent import wait_until
from tieredckpt.testing.s3_server import ACCESS_KEY, SECRET_KEY, S3Server

pytestmark = pytest.mark.usefixtures("starts_agent")

DEADLINE_S = 120.0
"""For a loaded machine; nothing here takes more than a few seconds."""


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.full)])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The settings of a tier that hosts share, called "s3" either way."""
    if request.param == "folder":
        return {"url": f"file://{tmp_path}/shared", "scope": "shared"}
    server: S3Server = request.getfixturevalue("s3_server")
    prefix: str = request.getfixturevalue("s3_prefix")
    return {"url": f"s3://{prefix}", "endpoint": server.endpoint, "allow_http": True}


class Bucket:
    """A job with one tier, and the commands of an operator beside it."""

    def __init__(self, folder: Path, where: dict[str, Any], delete_delay: str) -> None:
        self.settings: dict[str, Any] = {
            "namespace": "run",
            "memory": {"capacity": "64MiB"},
            "agent": {"runtime_dir": str(folder), "idle_timeout": "60 s"},
            "tiers": [{
                "name": "s3", "keep": {"last": 1}, "delete_delay": delete_delay, **where,
            }],
        }  # fmt: skip
        self.file = folder / "tieredckpt.yaml"
        self.file.write_text(json.dumps(self.settings))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return commands.tieredckpt(*words, "--config", str(self.file))

    def ask(self, *words: str) -> Any:
        done = self.run(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def deleted(self) -> set[int]:
        return {each["step"] for each in self.ask("undelete")["deleted"]}

    def held(self) -> set[int]:
        return {e["step"] for e in self.ask("ls")["checkpoints"] if e["tiers"].get("s3") == "whole"}

    def intact(self) -> set[int]:
        copies = self.ask("verify", "--tier", "s3")["copies"]
        return {each["step"] for each in copies if each["intact"]}


def save(engine: tieredckpt.Engine, step: int) -> None:
    state = {"w": torch.full((1000,), float(step))}
    dcp.save(state, storage_writer=engine.writer(step))
    engine.wait(step, "s3", timeout=DEADLINE_S)


def test_what_was_deleted_is_back_until_it_is_deleted_anew(
    runtime_dir: Path, where: dict[str, Any]
):
    bucket = Bucket(runtime_dir, where, "1 h")
    with tieredckpt.Engine.open(bucket.settings) as engine:
        assert engine.load({"w": torch.zeros(1000)}) is None
        for step in (1, 2, 3):
            save(engine, step)
        wait_until(lambda: bucket.deleted() == {1, 2}, deadline_s=DEADLINE_S)
        answer = bucket.ask("undelete", "1", "--tier", "s3", "--reason", "the rules were wrong")
        assert (answer["step"], answer["tier"]) == (1, "s3")
        assert (bucket.deleted(), bucket.held()) == ({2}, {1, 3})
        save(engine, 4)  # the pruner looks again
        wait_until(lambda: bucket.deleted() == {2, 3}, deadline_s=DEADLINE_S)
        assert bucket.held() == {1, 4}
        if "endpoint" in where:  # the agent reads a folder, and what is read stays for a while
            assert bucket.intact() == {1, 4}
        refused = bucket.run("undelete", "4")
        assert refused.returncode == 2
        assert "is in tier s3: it was not deleted" in refused.stderr
        # The pin is like any other, also for the agent, which was not asked.
        assert bucket.run("unpin", "1").returncode == 0
        save(engine, 5)
        wait_until(lambda: bucket.deleted() == {1, 2, 3, 4}, deadline_s=DEADLINE_S)
        agent = engine.status().health.pid
    os.kill(agent, signal.SIGKILL)
    # Nothing runs any more.
    two = next(e for e in bucket.ask("undelete")["deleted"] if e["step"] == 2)
    said = bucket.run("undelete", two["save_id"][:8])
    assert said.returncode == 0, said.stderr
    assert f"step 2 ({two['save_id'][:8]}) is in s3 again, and pinned: taken back" in said.stdout
    bucket.ask("undelete", "1")
    assert bucket.intact() == {1, 2, 5}
    with tieredckpt.Engine.open(bucket.settings) as engine:
        state = {"w": torch.zeros(1000)}
        dcp.load(state, storage_reader=engine.reader(save_id=two["save_id"]))
        assert torch.equal(state["w"], torch.full((1000,), 2.0))


@pytest.mark.full
def test_it_is_too_late_when_the_segments_go(runtime_dir: Path, where: dict[str, Any]):
    bucket = Bucket(runtime_dir, where, "0 s")
    with tieredckpt.Engine.open(bucket.settings) as engine:
        assert engine.load({"w": torch.zeros(1000)}) is None
        for step in (1, 2):
            save(engine, step)
        # In this order: it is held, then can be taken back, then neither.
        gone = lambda: 1 not in bucket.held() and 1 not in bucket.deleted()  # noqa: E731
        wait_until(gone, deadline_s=DEADLINE_S)
    late = bucket.run("undelete", "1")
    assert late.returncode == 1
    assert "cannot be restored: its segments were deleted from tier s3" in late.stderr
    assert bucket.intact() == {2}
    unknown = bucket.run("undelete", "77")
    assert (unknown.returncode, "no deleted checkpoint 77" in unknown.stderr) == (1, True)
    other = bucket.run("undelete", "1", "--tier", "nvme")
    assert (other.returncode, "nvme is none of them" in other.stderr) == (2, True)
