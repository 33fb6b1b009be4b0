"""The command line beside a running job whose bucket fails: pins, status, config check."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.agent import wait_until
from tests.support.http_proxy import HttpProxy, Rule
from tieredckpt.cli.main import main
from tieredckpt.engine import Engine
from tieredckpt.testing.s3_server import ACCESS_KEY, SECRET_KEY, S3Server

DEADLINE_S = 120.0


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@pytest.mark.full
@pytest.mark.usefixtures("_credentials", "starts_agent")  # with these credentials
def test_a_pin_that_the_bucket_refuses_and_takes_later(
    runtime_dir: Path,
    tmp_path: Path,
    s3_server: S3Server,
    s3_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    with HttpProxy(s3_server.endpoint.partition("://")[2]) as proxy:
        store = {"endpoint": proxy.endpoint, "allow_http": True, "retry_for": "1 s"}
        settings = {
            "namespace": "run",
            "memory": {"capacity": "64MiB"},
            "agent": {"runtime_dir": str(runtime_dir)},
            "tiers": [
                {"name": "disk", "url": f"file://{tmp_path}/disk"},
                {"name": "s3", "url": f"s3://{s3_prefix}", **store},
            ],
        }
        file = tmp_path / "tieredckpt.yaml"
        file.write_text(json.dumps(settings))  # which is YAML, too

        def run(*arguments: str) -> tuple[int, Any, str]:
            command = ["tieredckpt", *arguments]
            monkeypatch.setattr(sys, "argv", command)
            capsys.readouterr()
            with pytest.raises(SystemExit) as left:
                main()
            out, err = capsys.readouterr()
            code = int(left.value.code or 0)
            return code, json.loads(out) if "--json" in arguments else out, err

        where = ("--config", str(file))
        with Engine.open(settings) as engine, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            dcp.save({"w": torch.ones(100)}, storage_writer=engine.writer(1))
            for tier in ("disk", "s3"):
                engine.wait(1, tier, DEADLINE_S)
            # The agent has the disk's lock, and the check goes beside it.
            code, told, err = run("doctor", "--json", *where)
            states = {each["check"]: each["state"] for each in told["checks"]}
            assert (code, states["tier disk"], states["tier s3"]) == (0, "ok", "ok"), told
            denied = Rule("answer", "^PUT .*/records/", None, status=403)
            proxy.rules.append(denied)
            pin = ("pin", "1", "--reason", "kept", "--timeout", "2 s", *where)
            code, told, err = run(*pin)
            assert (code, "is pinned in disk" in told) == (1, True)
            assert "s3 has not recorded it" in err
            assert "these credentials may not do that" in err, "the next step"
            (shown,) = run("status", "--json", *where)[1]["namespaces"][0]["pins"]
            assert (shown["tiers"], shown["owed"]) == (["memory", "disk"], ["s3"])
            assert "s3 (not recorded yet)" in run("status", *where)[1]
            proxy.heal()
            wait_until(
                lambda: not engine.status().namespaces[0].pins[0].owed, deadline_s=DEADLINE_S
            )
            assert run("verify", *where)[0] == 0
            proxy.rules.append(Rule("answer", "", None, status=403))
            code, told, err = run("verify", "--json", *where)
            assert (code, list(told["unavailable"])) == (1, ["s3"])
            assert {each["tier"] for each in told["copies"]} == {"memory", "disk"}
            assert "nothing is known of tier s3" in err
            proxy.heal()
            assert run("unpin", "1", *where)[0] == 0
            assert run("unpin", "1", *where)[0] == 1, "it is not pinned"
