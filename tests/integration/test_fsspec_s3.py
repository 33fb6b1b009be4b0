"""A bucket as a tier through s3fs: a job over it, and what status and doctor say when it fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support import commands
from tests.support.agent import wait_until
from tests.support.http_proxy import HttpProxy, Rule
from tieredckpt.engine import Engine
from tieredckpt.testing.s3_server import ACCESS_KEY, REGION, SECRET_KEY, S3Server

DEADLINE_S = 120.0
NO_BUCKET = b"<Error><Code>NoSuchBucket</Code><Message>The bucket does not exist</Message></Error>"
CAUSE = "there is no such bucket: create it"

pytestmark = pytest.mark.usefixtures("starts_agent")  # with these variables


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpProxy]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    with HttpProxy(s3_server.address) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def settings(runtime_dir: Path, prefix: str) -> dict[str, Any]:
    return {
        "namespace": "run",
        "memory": {"capacity": "64MiB"},
        "agent": {"runtime_dir": str(runtime_dir), "idle_timeout": "60 s"},
        "tiers": [{"name": "bucket", "url": f"fsspec+s3://{prefix}"}],
    }


def state_of(step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    return {"w": torch.randn(300_000), "step": step}


def test_a_job_over_s3fs_and_what_stops_it(proxy: HttpProxy, runtime_dir: Path, s3_prefix: str):
    first, second = runtime_dir / "a", runtime_dir / "b"
    for folder in (first, second):
        folder.mkdir(mode=0o700)
    config = settings(first, s3_prefix)
    file = runtime_dir / "tieredckpt.yaml"
    file.write_text(json.dumps(config))  # which is YAML, too

    with Engine.open(config) as engine:

        def error() -> str:
            return engine.status().namespaces[0].tiers[0].error or ""

        def doctor() -> str:
            done = commands.tieredckpt("doctor", "--json", "--config", str(file))
            checks = json.loads(done.stdout)["checks"]
            return " ".join(json.dumps(each) for each in checks if "bucket" in each["check"])

        dcp.save(state_of(1), storage_writer=engine.writer(1))
        engine.wait(1, "bucket", DEADLINE_S)
        proxy.rules.append(Rule("answer", "", None, status=404, body=NO_BUCKET))
        dcp.save(state_of(2), storage_writer=engine.writer(2))
        wait_until(lambda: CAUSE in error(), deadline_s=DEADLINE_S)
        assert CAUSE in doctor()
        proxy.heal()
        engine.wait(2, "bucket", DEADLINE_S)
        agent = engine.status().health.pid
    os.kill(agent, signal.SIGKILL)
    shutil.rmtree(first)

    with Engine.open(settings(second, s3_prefix)) as engine:
        state = {"w": torch.zeros(300_000), "step": 0}
        assert engine.load(state) == 2
        assert torch.equal(state["w"], state_of(2)["w"])
        report = engine.last_restore
        assert report is not None
        assert report.bytes_by_source.keys() == {"bucket"}


def test_doctor_names_a_store_that_does_not_answer(
    proxy: HttpProxy, runtime_dir: Path, s3_prefix: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    file = runtime_dir / "tieredckpt.yaml"
    file.write_text(json.dumps(settings(runtime_dir, s3_prefix)))
    done = commands.tieredckpt("doctor", "--json", "--config", str(file))
    (found,) = [each for each in json.loads(done.stdout)["checks"] if "bucket" in each["check"]]
    assert "ConnectionRefusedError" in json.dumps(found)
    assert "nothing answered" in json.dumps(found)
