"""Tags, the best checkpoints and pins, through an engine, a real agent and the command line."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml

from tests.support.agent import spec_of, wait_until
from tests.support.faults import ForkedAgent
from tests.support.peers import Job
from tests.support.states import config, manifest_of
from tieredckpt.cli.main import main
from tieredckpt.engine import Engine
from tieredckpt.errors import NotFoundError, UsageError
from tieredckpt.format.manifest import Manifest
from tieredckpt.rpc.messages import agent as m

served = pytest.mark.usefixtures("served")


def save(engine: Engine, step: int, loss: str) -> None:
    """On disk, with retention done."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        state = {"w": torch.full((100,), float(step))}
        dcp.save(state, storage_writer=engine.writer(step, tags={"loss": loss}))
    engine.wait(step, "disk", 60)
    # The next spill begins with what this one's retention may have left.


def read_in(engine: Engine, tier: str, segment_id: str) -> None:
    """As a restart does that reads from this tier."""
    _, descriptor = engine._session.client.open_segment(tier, segment_id)
    os.close(descriptor)


@served
def test_the_best_and_the_pinned_stay(
    runtime_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    best = {"metric": "loss", "mode": "min"}
    tier = {"name": "disk", "url": f"file://{tmp_path}/disk", "keep": {"last": 1, "best": best}}
    settings = config(runtime_dir, tiers=[tier], memory={"keep": {"last": 1}})
    file = tmp_path / "tieredckpt.yaml"
    file.write_text(yaml.safe_dump(settings))

    def run(*arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["tieredckpt", *arguments, "--config", str(file)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert left.value.code in (0, None), err
        return json.loads(out) if "--json" in arguments else out

    def planned() -> dict[int, tuple[bool, str]]:
        found = run("retention", "plan", "--json")["checkpoints"]
        return {e["step"]: (e["stays"], e["reason"]) for e in found if e["tier"] == "disk"}

    with Engine.open(settings) as engine:
        save(engine, 1, "0.9")
        save_id = engine.pin(1, "figures of the paper")
        for step, loss in [(2, "0.1"), (3, "0.5"), (4, "0.7"), (5, "0.6")]:
            save(engine, step, loss)
        (pinned,) = (e for e in run("ls", "--json")["checkpoints"] if e["save_id"] == save_id)
        assert (pinned["step"], pinned["pinned"]) == (1, "figures of the paper")
        found = planned()
        assert found[1] == (True, "pinned: figures of the paper")
        assert found[2] == (True, "one of the 1 with the least loss")
        assert found[5] == (True, "the newest; one of the newest 1")
        row = next(line for line in run("ls").splitlines() if save_id[:8] in line)
        assert "loss=0.9" in row
        assert "loss=0.9" in run("retention", "plan")
        assert "tag loss: 0.9" in run("show", save_id[:8])
        (shown,) = run("status", "--json")["namespaces"][0]["pins"]
        assert (shown["step"], shown["reason"]) == (1, "figures of the paper")
        assert shown["tiers"] == ["disk"]
        row = next(line for line in run("status").splitlines() if "figures" in line)
        assert row.split()[1:5] == ["default", "1", save_id[:8], "disk"]
        assert "0 deletions of 0 B in all" in run("retention", "plan")
        assert 3 not in found, "neither new, nor good, nor pinned"
        with pytest.raises(NotFoundError, match="no checkpoint of step 3"):
            engine.pin(3, "too late")
        with pytest.raises(UsageError, match="strings by name"):
            engine.writer(6, tags={"loss": 0.3})  # type: ignore[dict-item]
        assert "is pinned no more" in run("unpin", "1")
        assert planned()[1] == (False, "no rule keeps it")
        segment = manifest_of(engine, 2).segments[0]
        assert planned()[2] == (True, "one of the 1 with the least loss")
        read_in(engine, "disk", segment.id)
        assert planned()[2] == (True, "one of the 1 with the least loss; it is being read")
        assert "is pinned in disk" in run("pin", "2", "--reason", "a good one")
        told = run("pin", "2", "--reason", "again", "--timeout", "1 min", "--json")
        assert (told["tiers"], told["owed"], told["coming"]) == (["disk"], {}, [])
        with pytest.raises(NotFoundError, match="is not pinned"):
            engine.unpin(1)
        assert engine.unpin(2)


def test_a_mark_outlives_memory(
    runtime_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Also one of a checkpoint that memory does not hold; until it is taken back."""
    tier = {"name": "disk", "url": f"file://{tmp_path}/disk", "keep": {"last": 9}}
    settings = config(runtime_dir, tiers=[tier], memory={"keep": {"last": 1}})
    file = tmp_path / "tieredckpt.yaml"
    file.write_text(yaml.safe_dump(settings))

    def run(*arguments: str) -> Any:
        line = ["tieredckpt", *arguments, "--json", "--config", str(file)]
        monkeypatch.setattr(sys, "argv", line)
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert left.value.code in (0, None), err
        return json.loads(out)

    @contextmanager
    def host() -> Iterator[Engine]:
        """One that was just switched on: nothing is in memory."""
        shutil.rmtree(runtime_dir)
        runtime_dir.mkdir(mode=0o700)
        agent = ForkedAgent(runtime_dir)
        try:
            with Engine.open(settings) as engine:
                yield engine
        finally:
            agent.kill()

    state = {"w": torch.zeros(100)}
    with host() as engine:
        for step in (1, 2, 3):
            save(engine, step, "0.5")
        ids = {each["step"]: each["save_id"] for each in run("ls")["checkpoints"]}
        for step in (2, 3):
            assert run("mark", "bad", ids[step], "--reason", "NaN")["tiers"] == ["disk"]
    with host() as engine:
        assert engine.load(state) == 1
        assert {each["step"] for each in run("mark", "list")["marks"]} == {2, 3}
        assert run("mark", "good", ids[2])["tiers"] == ["disk"]
    with host() as engine:
        assert engine.load(state) == 2
        ((refused, step, why),) = engine.last_restore.refused
        assert (refused, step) == (ids[3], 3)
        assert why.endswith(": NaN")


@pytest.mark.full
@served
@pytest.mark.parametrize("how", ["async", "without collectives"])
def test_tags_of_other_saves(runtime_dir: Path, how: str):
    with Engine.open(config(runtime_dir)) as engine, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        state = {"w": torch.ones(100)}
        if how == "async":
            engine.async_save(state, 1, tags={"loss": "0.3"}).result(60)
        else:
            writer = engine.writer(1, tags={"loss": "0.3"})
            dcp.save(state, storage_writer=writer, use_collectives=False)
        assert manifest_of(engine, 1).tags == {"loss": "0.3"}


@pytest.mark.full
def test_a_pin_reaches_the_disks_of_other_hosts_though_memory_has_let_go(
    runtime_dir: Path, tmp_path: Path
):
    disks = [tmp_path / f"disk{number}" for number in range(2)]
    job = Job.__new__(Job)
    job.__init__(runtime_dir, 0)  # type: ignore[misc]
    with job:
        for number, disk in enumerate(disks):
            job.spec = spec_of(tiers={"disk": disk}, keep_last=1, tier_keep_last=1)
            job.add(number)
        job.gather()

        def saved(step: int) -> Manifest:
            manifest = job.save(step, tiers=("disk",))
            for disk in disks:
                name = disk / "run" / "manifests" / "default" / manifest.save_id
                wait_until(name.exists, deadline_s=60)
            return manifest

        first = saved(1)
        request = m.AddRecord(stream="default", save_id=first.save_id, kind="pin", text="why not")
        job.hosts[0].client.call(request)
        for disk in disks:
            folder = disk / "run" / "records" / first.save_id
            wait_until(lambda f=folder: f.is_dir() and len(list(f.iterdir())) == 1, deadline_s=60)
        saved(2)
        saved(3)
        for disk in disks:
            manifests = disk / "run" / "manifests" / "default"
            assert (manifests / first.save_id).exists()
