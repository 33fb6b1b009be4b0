"""``tieredckpt doctor``: each line says what is wrong and what to do, and nothing is disturbed."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.agent import AgentProcess, FakeTrainer, spec_of, wait_until
from tests.unit.cli.test_cli import run
from tieredckpt.cli import doctor
from tieredckpt.config.tiers import Keep
from tieredckpt.config.units import Every
from tieredckpt.rpc.messages import agent as m
from tieredckpt.storage.backends.file import FileTier
from tieredckpt.storage.base import Scope
from tieredckpt.testing.s3_server import ACCESS_KEY, SECRET_KEY, S3Server


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "RETRY_S", 0.1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


def written(folder: Path, runtime_dir: Path, *tiers: dict[str, Any], **more: Any) -> Path:
    file = folder / "tieredckpt.yaml"
    settings = {
        "namespace": "run", "tiers": list(tiers), "agent": {"runtime_dir": str(runtime_dir)},
        "memory": {"capacity": "16MiB"}, **more,
    }  # fmt: skip
    file.write_text(json.dumps(settings))  # which is YAML, too
    return file


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """By check, its line; and the exit code is 1 exactly if one fails."""

    def found(file: Path) -> dict[str, dict[str, str]]:
        capsys.readouterr()
        code = run(monkeypatch, "doctor", "--config", str(file), "--json")
        answer = json.loads(capsys.readouterr().out)
        failed = [each for each in answer["checks"] if each["state"] == "fail"]
        assert (code, answer["ok"]) == (int(bool(failed)), not failed)
        for each in answer["checks"]:
            assert bool(each["fix"]) == (each["state"] != "ok"), each
        return {each["check"]: each for each in answer["checks"]}

    return found


def test_a_folder_and_a_store(
    lines: Any,
    tmp_path: Path,
    runtime_dir: Path,
    s3_server: S3Server,
    s3_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
):
    store = {"endpoint": s3_server.endpoint, "allow_http": True}
    good = {"name": "s3", "url": f"s3://{s3_prefix}", **store}
    wrong = good | {"name": "wrong", "url": "s3://no-such-bucket/x"}
    disk = {"name": "disk", "url": f"file://{tmp_path}/disk"}
    found = lines(written(tmp_path, runtime_dir, disk, good))
    every = "list, create, listed, read, condition, replace, segment, uploads, clock, delete"
    assert found["tier s3"]["found"] == every
    assert found["tier s3: clock"]["state"] == "ok"
    assert found["tier disk"]["state"] == "ok"
    assert "tier disk: direct I/O" in found
    for check in ("configuration", "tmpfs", "size of files"):
        assert found[check]["state"] == "ok"
    assert found["agent"]["state"] == "warn"  # a job starts one
    assert not list((tmp_path / "disk" / "run" / "segments").glob("*"))
    now_s = doctor.time.time
    monkeypatch.setattr(doctor.time, "time", lambda: now_s() - 1000)
    assert lines(written(tmp_path, runtime_dir, good))["tier s3: clock"]["state"] == "fail"
    monkeypatch.setattr(doctor.time, "time", now_s)
    found = lines(written(tmp_path, runtime_dir, disk, good, wrong))
    assert found["tier s3"]["state"] == "ok"
    assert "create it, or correct the tier's url" in found["tier wrong: open"]["fix"]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not this one")
    found = lines(written(tmp_path, runtime_dir, good))
    assert "check the credentials (AWS_SECRET_ACCESS_KEY" in found["tier s3: open"]["fix"]


def test_what_cannot_be_opened(
    lines: Any, tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    file = written(
        tmp_path,
        runtime_dir,
        {"name": "none", "url": f"file://{tmp_path}/file"},
        {"name": "far", "url": "s3://bucket/x", "endpoint": "https://127.0.0.1:9"},
    )
    found = lines(file)
    assert found["tier none: open"]["state"] == "fail"
    assert "check the tier's url and endpoint" in found["tier far: open"]["fix"]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    found = lines(file)
    assert found["tier far: open"]["fix"].startswith("set AWS_ACCESS_KEY_ID")


def test_the_folder_of_an_agent_that_does_not_answer_is_not_locked(
    lines: Any, tmp_path: Path, runtime_dir: Path
):
    used = FileTier("used", tmp_path / "used", "run", scope=Scope.HOST)
    found = lines(
        written(tmp_path, runtime_dir, {"name": "used", "url": f"file://{tmp_path}/used"})
    )
    assert not [name for name, row in found.items() if "used" in name and row["state"] == "fail"]
    used.close()


def test_a_list_that_is_late_is_found(
    lines: Any, tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FileTier, "list", lambda self, prefix: iter(()))
    tier = {"name": "nfs", "url": f"file://{tmp_path}/nfs", "scope": "shared"}
    found = lines(written(tmp_path, runtime_dir, tier))
    assert "misses an object that was just created" in found["tier nfs: listed"]["found"]
    assert "strongly consistent" in found["tier nfs: listed"]["fix"]


def test_the_machine(
    lines: Any, tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    limits = {resource.RLIMIT_NOFILE: 1000, resource.RLIMIT_FSIZE: 1 << 20}
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limits[what], limits[what]))
    file = written(
        tmp_path, runtime_dir, memory={"capacity": "1EiB"}, network={"interface": "none0"}
    )
    found = lines(file)
    assert (found["open files"]["state"], found["open files"]["fix"]) == (
        "warn", "ulimit -n 65536",
    )  # fmt: skip
    assert found["size of files"]["state"] == "fail"
    assert "can be had" in found["tmpfs"]["found"]
    assert found["network.interface"]["state"] == "fail"


def test_a_live_job_is_looked_at_and_not_disturbed(
    lines: Any, tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "far").write_text("in the way")
    spec = spec_of(tiers={"disk": tmp_path / "disk"})
    far = m.TierSpec(
        name="far", url=f"file://{tmp_path / 'far'}", scope="host", keep=Keep(last=2),
        lag_alarm=Every(steps=1),
    )  # fmt: skip
    spec = msgspec.structs.replace(spec, tiers=(*spec.tiers, far))
    tiers = [{"name": each.name, "url": each.url} for each in spec.tiers]
    file = written(tmp_path, runtime_dir, *tiers)
    with AgentProcess(runtime_dir), FakeTrainer(runtime_dir, spec) as trainer:
        saved = trainer.save(1, tiers=("disk", "far"))
        trainer.spilled(saved.save_id)
        wait_until(lambda: any(each.error for each in trainer._tiers()))
        found = lines(file)
        assert found["agent's version"]["state"] == "ok"
        # The agent has the disk's lock: it is tried beside it.
        assert found["tier disk"]["state"] == found["tier disk: copies"]["state"] == "ok"
        assert str(tmp_path / "far") in found["tier far: copies"]["found"]
        assert found["tier disk: damage"]["state"] == found["saves"]["state"] == "ok"
        after = trainer.save(2, tiers=("disk",))
        trainer.spilled(after.save_id)
        trainer.check(after, "disk")
        trainer.client.report_damage("disk", after.segments[0].id, (0,), "a test says so")
        found = lines(file)
        assert found["tier disk: damage"]["fix"].startswith("tieredckpt verify")
        # It is not slow: what keeps it from being filled is to be mended.
        assert found["tier far: lag"]["fix"] == "as for its copies"
        monkeypatch.setattr(doctor, "package_version", lambda: "9.9")
        found = lines(file)
        assert "tieredckpt agent stop" in found["agent's version"]["fix"]


def test_it_needs_a_namespace_for_tiers(lines: Any, tmp_path: Path, runtime_dir: Path):
    file = tmp_path / "tieredckpt.yaml"
    tier = {"name": "disk", "url": f"file://{tmp_path}/disk"}
    file.write_text(json.dumps({"tiers": [tier], "agent": {"runtime_dir": str(runtime_dir)}}))
    found = lines(file)
    assert "name one with --namespace" in found["namespace"]["fix"]
    assert not (tmp_path / "disk").exists()


def test_it_leaves_nothing_behind(lines: Any, tmp_path: Path, runtime_dir: Path):
    """As root it would shut out the user whose job comes later."""
    (tmp_path / "there" / "run" / "segments").mkdir(parents=True)
    tiers = [{"name": name, "url": f"file://{tmp_path}/{name}"} for name in ("there", "a/b")]
    tiers[1]["name"] = "new"
    file = written(tmp_path, runtime_dir / "none", *tiers, agent={
        "runtime_dir": str(runtime_dir / "none"), "start": "never",
    })  # fmt: skip
    before = sorted(tmp_path.rglob("*"))
    found = lines(file)
    assert found["tier there"]["state"] == found["tier new"]["state"] == "ok"
    assert sorted(tmp_path.rglob("*")) == before
    assert not (runtime_dir / "none").exists()
    assert found["agent"]["fix"] == "start it"
