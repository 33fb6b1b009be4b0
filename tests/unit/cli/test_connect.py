"""``config check --connect``: what each tier does, tried on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.test_cli import run
from tieredckpt.cli import config as config_command
from tieredckpt.storage.backends.file import FileTier
from tieredckpt.storage.backends.probe import STEPS
from tieredckpt.storage.base import Scope
from tieredckpt.testing.s3_server import ACCESS_KEY, SECRET_KEY, S3Server


def written(folder: Path, runtime_dir: Path, *tiers: dict[str, Any]) -> Path:
    file = folder / "tieredckpt.yaml"
    settings = {
        "namespace": "run", "tiers": list(tiers), "agent": {"runtime_dir": str(runtime_dir)},
    }  # fmt: skip
    file.write_text(json.dumps(settings))  # which is YAML, too
    return file


def test_a_folder_and_a_store(
    tmp_path: Path,
    runtime_dir: Path,
    s3_server: S3Server,
    s3_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    store = {"endpoint": s3_server.endpoint, "allow_http": True}
    good = {"name": "s3", "url": f"s3://{s3_prefix}", **store}
    disk = {"name": "disk", "url": f"file://{tmp_path}/disk"}
    file = written(tmp_path, runtime_dir, disk, good)
    check = ("config", "check", str(file), "--connect")
    assert run(monkeypatch, *check) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(x for x in lines if x.startswith("tier ")).split() == ["tier", "open", *STEPS]
    assert next(x for x in lines if x.startswith("s3 ")).split() == ["s3"] + ["ok"] * (
        1 + len(STEPS)
    )
    assert next(x for x in lines if x.startswith("disk ")).split()[-2:] == ["-", "ok"]

    wrong = good | {"name": "wrong", "url": "s3://no-such-bucket/x"}
    written(tmp_path, runtime_dir, disk, good, wrong)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not this one")
    assert run(monkeypatch, *check) == 1
    found = capsys.readouterr()
    assert "check the credentials (AWS_SECRET_ACCESS_KEY" in found.err
    assert "2 tiers of 3 cannot be used as configured (s3, wrong)" in found.err
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    assert run(monkeypatch, *check, "--json") == 1
    answers = json.loads(capsys.readouterr().out)["connect"]
    assert [(each["tier"], each["works"]) for each in answers] == [
        ("disk", True), ("s3", True), ("wrong", False),
    ]  # fmt: skip
    assert "there is no such bucket" in answers[2]["errors"]["open"]


def test_what_cannot_be_opened(
    tmp_path: Path,
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(config_command, "RETRY_S", 0.1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    taken = FileTier("taken", tmp_path / "taken", "run", scope=Scope.HOST)
    file = written(
        tmp_path,
        runtime_dir,
        {"name": "taken", "url": f"file://{tmp_path}/taken"},
        {"name": "far", "url": "s3://bucket/x", "endpoint": "https://127.0.0.1:9"},
    )
    assert run(monkeypatch, "config", "check", str(file), "--connect") == 1
    said = capsys.readouterr().err
    assert "tier taken: open: another agent uses" in said
    assert "tier far: open: " in said
    assert "check the tier's url and endpoint" in said
    taken.close()


def test_it_needs_a_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "tieredckpt.yaml"
    file.write_text(json.dumps({"tiers": [{"name": "disk", "url": f"file://{tmp_path}/disk"}]}))
    assert run(monkeypatch, "config", "check", str(file), "--connect") == 2
    assert "namespace: missing" in capsys.readouterr().err
    assert not (tmp_path / "disk").exists()
