"""An engine that only looks, beside live jobs and without them, and what it leaves as it was."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tieredckpt
from tests.conftest import processes_naming
from tests.support.faults import Site, Trainer, eventually, on_all, ranks
from tests.support.http_proxy import HttpProxy, Rule
from tieredckpt.dcp.load import choose
from tieredckpt.errors import (
    NotFoundError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import decode_manifest
from tieredckpt.recovery import folders
from tieredckpt.recovery.other_hosts import read_everywhere
from tieredckpt.testing.s3_server import ACCESS_KEY, SECRET_KEY, S3Server

STEPS = (1, 2, 3)
full = pytest.mark.full


def seen(*folders: Path) -> dict[str, Any]:
    """Everything below these folders: what it is, whose inode, when it was changed, its bytes."""
    found: dict[str, Any] = {}
    for folder in folders:
        for path in (folder, *sorted(folder.rglob("*"))):
            stat = path.lstat()
            data = path.read_bytes() if path.is_file() else b""
            digest = hashlib.blake2b(data).hexdigest()
            found[str(path)] = (stat.st_mode, stat.st_ino, stat.st_size, stat.st_mtime_ns, digest)
    return found


@contextmanager
def unchanged(*folders: Path) -> Iterator[None]:
    before = seen(*folders)
    yield
    after = seen(*folders)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed == set()


@contextmanager
def idle(site: Site) -> Iterator[Trainer]:
    """A job that has saved, whose agent has nothing left to do."""
    with site.opened() as job:
        for step in STEPS:
            job.save(step)
        if site.disk is not None:
            job.wait(STEPS[-1], "disk")
        yield job


@pytest.fixture
def site(runtime_dir: Path, tmp_path: Path) -> Iterator[Site]:
    site = Site(runtime_dir, tmp_path / "disk")
    with site.forked_agent():
        yield site


def only_disk(site: Site) -> dict[str, Any]:
    """What somebody writes who wants to look at the weights: no ``keep``, nothing of memory."""
    return {
        "namespace": site.namespace,
        "tiers": [{"name": "disk", "url": f"file://{site.disk}"}],
        "agent": {"runtime_dir": str(site.runtime_dir / "none")},
        "recovery": {"wait": "0s"},
    }


def test_a_file_that_cannot_be_read_is_not_passed_over(site: Site):
    """A medium that fails is no damage, neither at a segment's trailer nor at its blocks."""
    with idle(site), Trainer() as reader:
        reader.look(only_disk(site))
        assert site.disk is not None
        (newest, *_) = (save_id for _, save_id, _ in reader.checkpoints())
        folder = site.disk / site.namespace
        manifest = decode_manifest((folder / "manifests/default" / newest).read_bytes())
        broken = [str(folder / "segments" / manifest.segments[0].id)]
        reader.call("break_os", broken, "eio", 1, True)
        with pytest.raises(TierUnavailableError, match=r"(?s)step 3 .* disk on .*Input/output"):
            reader.load()
        reader.call("break_os", broken, "eio", 1, False)
        assert reader.load().step == 3
        reader.call("mend_os")


# --- beside a live job ---------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["same", pytest.param("disk", marks=full)])
def test_beside_a_job_it_changes_nothing(site: Site, which: str):
    """Neither a file nor what the job saves next and restores after its restart."""
    settings = site.config if which == "same" else only_disk(site)
    assert site.disk is not None
    with idle(site) as job:
        with unchanged(site.runtime_dir, site.disk), Trainer() as reader:
            reader.look(settings)
            for wanted, step in ((None, 3), (2, 2), (1, 1)):
                loaded = reader.load(step=wanted)
                assert (loaded.step, loaded.wrong, loaded.refused) == (step, [], ())
                tier = "memory" if which != "disk" and step > 1 else "disk"
                assert loaded.bytes_by_tier.keys() == {tier}
            assert [step for step, _, _ in reader.checkpoints()] == [3, 2, 1]
            save_id = next(each for step, each, _ in reader.checkpoints() if step == 2)
            assert reader.load_save(save_id, 2).wrong == []
            reader.close()
        assert len(site.agents()) == 1
        status = job.status()
        assert (status.sessions, status.attempt) == (1, 1)
        job.save(4)
        job.wait(4, "disk")
    with site.opened() as restarted:
        assert [step for step, _, _ in restarted.checkpoints()] == [4, 3, 2]
        loaded = restarted.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (4, [], ())
        restarted.save(5)


@full
def test_a_job_that_saves_all_the_time_does_not_notice(site: Site):
    """What it reads goes on to be evicted and pruned under its hands."""
    over = threading.Event()
    saved: list[int] = []

    def save() -> None:
        for step in range(4, 1000):
            job.save(step)
            saved.append(step)
            if over.is_set():
                return

    with idle(site) as job, Trainer() as reader, Trainer() as other:
        saving = threading.Thread(target=save)
        saving.start()
        try:
            reader.look(site.config)
            other.look(only_disk(site))
            eventually(lambda: len(saved) > 1)
            for _ in range(8):
                loaded = reader.load()
                assert (loaded.step > 3, loaded.wrong) == (True, [])
                assert other.load().wrong == []
        finally:
            over.set()
            saving.join()
        assert job.status().attempt == 1
        job.wait(saved[-1], "disk")
    with site.opened() as restarted:
        loaded = restarted.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (saved[-1], [], ())


@full
def test_it_never_runs_after_a_job_that_is_faster(runtime_dir: Path, tmp_path: Path):
    """What is only in memory may be gone each time: then it reads what is older, and stays."""
    site = Site(runtime_dir, tmp_path / "disk", keep=1, every="100 steps")
    with site.forked_agent(), ranks(2) as job, Trainer(saved_by=2) as reader:
        on_all(job, lambda rank: ("open", site.config))
        on_all(job, lambda rank: ("save", 100))
        on_all(job, lambda rank: ("wait", 100, "disk"))
        on_all(job, lambda rank: ("save", 101))
        reader.look(site.config, "load.read.after=stop")
        reader.start("load")
        eventually(lambda: _is_stopped(reader.pid))
        for step in (102, 103, 104):
            on_all(job, lambda rank, step=step: ("save", step))
        os.kill(reader.pid, signal.SIGCONT)
        loaded = reader.result()
        assert (loaded.step, loaded.wrong) == (100, [])
        assert [step for _, step, _ in loaded.refused] == [101]


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_an_agent_that_stands_still_is_not_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folders, "AGENT_S", 0.5)
    with idle(site):
        pid = site.agent()
        os.kill(pid, signal.SIGSTOP)
        try:
            with tieredckpt.Engine.open(site.config, read_only=True) as engine:
                assert [each.step for each in engine.checkpoints()] == [3, 2, 1]
                assert engine.checkpoints()[0].tiers == ("memory", "disk")
        finally:
            os.kill(pid, signal.SIGCONT)


@full
def test_ranks_read_together(runtime_dir: Path, tmp_path: Path):
    site = Site(runtime_dir, tmp_path / "disk")
    with site.forked_agent(), ranks(2) as job, ranks(2) as readers:
        on_all(job, lambda rank: ("open", site.config))
        for step in STEPS:
            on_all(job, lambda rank, step=step: ("save", step))
        on_all(job, lambda rank: ("wait", 3, "disk"))
        assert site.disk is not None
        with unchanged(runtime_dir, site.disk):
            on_all(readers, lambda rank: ("look", site.config))
            for wanted, step in ((None, 3), (1, 1)):
                for each in readers:
                    each.start("load", step=wanted)
                for each in readers:
                    loaded = each.result()
                    assert (loaded.step, loaded.wrong) == (step, [])
            on_all(readers, lambda rank: ("close",))
        for each, command in zip(readers, ("look", "open"), strict=True):
            each.start(command, site.config)
        for each in readers:
            with pytest.raises(UsageError, match="some ranks open their engine with read_only"):
                each.result()
        for rank, each in enumerate(readers):
            each.start("look", {**site.config, "namespace": f"run{rank}"})
        for each in readers:
            with pytest.raises(UsageError, match="different namespaces: 'run0', 'run1'"):
                each.result()


# --- without an agent ----------------------------------------------------------------------------


def test_without_an_agent_or_its_folder(site: Site):
    with idle(site):
        pass
    site.kill_agent()
    assert site.disk is not None
    with unchanged(site.runtime_dir, site.disk), Trainer() as reader:
        reader.look(site.config)
        loaded = reader.load()
        assert (loaded.step, loaded.wrong, loaded.bytes_by_tier.keys()) == (3, [], {"memory"})
        reader.close()
    shutil.rmtree(site.runtime_dir)
    with unchanged(site.disk), Trainer() as reader:
        reader.look(site.config)
        for wanted, step in ((None, 3), (1, 1)):
            loaded = reader.load(step=wanted)
            assert (loaded.step, loaded.wrong, loaded.bytes_by_tier.keys()) == (step, [], {"disk"})
        with pytest.raises(NotFoundError, match="there is no checkpoint for step 7"):
            reader.load(step=7)
    assert not site.runtime_dir.exists()
    assert processes_naming(site.runtime_dir) == []


def test_where_nothing_is_it_says_so_and_makes_nothing(runtime_dir: Path, tmp_path: Path):
    site = Site(runtime_dir / "none", tmp_path / "none")
    with tieredckpt.Engine.open(site.config, read_only=True) as engine:
        assert engine.load({"w": torch.zeros(3)}) is None
        assert engine.latest() is None
        with pytest.raises(NotFoundError):
            engine.load({"w": torch.zeros(3)}, step=1)
    assert (list(runtime_dir.iterdir()), list(tmp_path.iterdir())) == ([], [])


def test_the_memory_of_a_folder_that_others_can_write_is_not_read(
    site: Site, caplog: pytest.LogCaptureFixture
):
    with idle(site):
        pass
    site.kill_agent()
    site.runtime_dir.chmod(0o777)
    with (
        caplog.at_level(logging.WARNING),
        tieredckpt.Engine.open(site.config, read_only=True) as engine,
    ):
        assert "the memory of this host is not read: the runtime folder" in caplog.text
        assert [each.tiers for each in engine.checkpoints()] == [("disk",)] * 3


# --- other places --------------------------------------------------------------------------------


def _with_keys() -> None:
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY)


@full
def test_a_bucket_sees_nothing_but_reads(runtime_dir: Path, s3_server: S3Server, s3_prefix: str):
    bucket = {"name": "s3", "url": f"s3://{s3_prefix}", "allow_http": True}
    kept = {**bucket, "endpoint": s3_server.endpoint, "keep": {"last": 5}}
    job = Site(runtime_dir, None, more={"tiers": [kept]})
    with job.opened(first=_with_keys) as trainer:
        for step in STEPS:
            trainer.save(step)
            trainer.wait(step, "s3")
    with HttpProxy(s3_server.address) as proxy, Trainer(first=_with_keys) as reader:
        settings = {
            **only_disk(Site(runtime_dir, None)),
            "tiers": [{**bucket, "endpoint": proxy.endpoint}],
        }
        reader.look(settings)
        for wanted, step in ((None, 3), (1, 1)):
            loaded = reader.load(step=wanted)
            assert (loaded.step, loaded.wrong, loaded.bytes_by_tier.keys()) == (step, [], {"s3"})
        assert [step for step, _, _ in reader.checkpoints()] == [3, 2, 1]
        reader.close()
        assert {each.method for each in proxy.seen} <= {"GET", "HEAD"}
        assert len(proxy.seen) > 5
    with job.opened(first=_with_keys) as restarted:
        loaded = restarted.load()
        assert (loaded.step, loaded.wrong, loaded.refused) == (3, [], ())


@full
def test_a_bucket_that_never_answers_is_not_waited_for(
    runtime_dir: Path,
    tmp_path: Path,
    s3_server: S3Server,
    s3_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setattr(folders, "SCAN_S", 0.5)
    site = Site(runtime_dir, tmp_path / "disk")
    with site.forked_agent(), idle(site), HttpProxy(s3_server.address) as proxy:
        proxy.rules.append(Rule("stall", "", times=None))
        s3 = {
            "name": "s3", "url": f"s3://{s3_prefix}", "endpoint": proxy.endpoint,
            "allow_http": True,
        }  # fmt: skip
        settings = {**only_disk(site), "tiers": [s3, *only_disk(site)["tiers"]]}
        with (
            tieredckpt.Engine.open(settings, read_only=True) as engine,
            pytest.warns(UserWarning, match="not loaded: 14 key"),
        ):
            assert engine.load(state := {"meta": {"step": 0}}, strict=False) == 3
        assert state == {"meta": {"step": 3}}
        assert "s3 on" in caplog.text
        assert "no answer within 0.5 s may hold a newer checkpoint" in caplog.text
        # A bucket that does not exist is not asked again, and named all the same.
        asked: list[None] = []
        monkeypatch.setattr(
            choose, "read_everywhere", lambda *args: asked.append(None) or read_everywhere(*args)
        )
        wrong = {**s3, "url": "s3://no-such-bucket/x", "endpoint": s3_server.endpoint}
        settings["tiers"][0], settings["recovery"] = wrong, {"wait": "2 s"}
        with (
            tieredckpt.Engine.open(settings, read_only=True) as engine,
            pytest.warns(UserWarning, match="not loaded: 14 key"),
        ):
            assert engine.load({"meta": {"step": 0}}, strict=False) == 3
        assert len(asked) == 1
        assert "s3://no-such-bucket/x: cannot " in caplog.text
        assert "create it, or correct the tier's url may hold a newer checkpoint" in caplog.text


# --- what it refuses -----------------------------------------------------------------------------


def test_what_would_change_something_is_refused(site: Site):
    state = {"w": torch.ones(3)}
    with idle(site), tieredckpt.Engine.open(site.config, read_only=True) as engine:
        client = engine._session.client
        calls = (
            lambda: engine.writer(4),
            lambda: engine.async_save(state, 4),
            engine.background_group,
            lambda: engine.wait(3, "disk"),
            engine.flush,
            lambda: engine.leave_on(signal.SIGUSR1),
            engine.should_leave,
            lambda: engine.pin(3, "why not"),
            lambda: engine.unpin(3),
            # Nor by another way than these.
            lambda: client.report_damage("disk", "0" * 32, (), "none", namespace="run"),
            lambda: client.purge("run"),
        )
        for call in calls:
            with pytest.raises(UsageError, match=r"read_only=True .* tieredckpt.Engine.open\("):
                call()
        assert engine.status().namespaces[0].name == "run"
