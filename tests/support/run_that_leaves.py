"""Tests for a run of its own, which is stopped while they leave all sorts of things behind.

Run by tests/test_run_ends.py; ``TEST_REPORT`` names a file for the list of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from tests.support.agent import AgentProcess
from tests.support.hosts import Cluster
from tests.support.leftovers import shm
from tieredckpt.testing import s3_server

kept: list[str] = []


def test_fails_and_keeps_its_folder(tmp_path: Path):
    (tmp_path / "kept").touch()
    kept.append(str(tmp_path / "kept"))
    raise AssertionError("on purpose")


def test_cannot_be_interrupted(tmp_path: Path):
    """It has agents, a host, a server, a process of its own session, a mount, and goes on."""
    runtime_dir = shm() / f"leaves-{os.getpid()}"
    runtime_dir.mkdir(mode=0o700)
    waits = "import threading; threading.Event().wait()"
    pids = [
        os.getpid(),
        AgentProcess(runtime_dir).pid,
        subprocess.Popen([sys.executable, "-c", waits], start_new_session=True).pid,
    ]
    cluster = Cluster(tmp_path, 1)
    pids.append(cluster.hosts[0].start_agent().pid)
    paths = [runtime_dir, cluster.memory, Path(tempfile.gettempdir()), tmp_path]
    if cluster.network is not None:
        paths.append(Path("/run/netns", cluster.network.namespace("h1")))
    if s3_server.missing() is None:
        server = s3_server.S3Server(Path(tempfile.mkdtemp(prefix="server-")))
        process = server.start()._process
        assert process is not None
        pids.append(process.pid)
    mount = tmp_path / "mount"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(mount)], check=False)
    report = Path(os.environ["TEST_REPORT"])
    left = {"pids": pids, "paths": [str(each) for each in paths], "kept": kept[0]}
    report.with_suffix(".new").write_text(json.dumps(left))
    report.with_suffix(".new").rename(report)
    while True:
        with contextlib.suppress(BaseException):
            threading.Event().wait()
