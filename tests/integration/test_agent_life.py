"""Real agents from start to stop: election, launching, versions, idle time, the log."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent import ROOT, AgentProcess, FakeTrainer, spec_of, wait_until
from tests.support.preloaded import context
from tieredckpt.agent.host import launch, runtime
from tieredckpt.agent.host.attach import attach
from tieredckpt.agent.host.launch import find_or_start
from tieredckpt.agent.host.runtime import default_runtime_dir, host_id, what_it_survives
from tieredckpt.config.schema import load_config
from tieredckpt.dcp.slots.slot_ring import SlotRing
from tieredckpt.errors import AgentError
from tieredckpt.rpc import agent_client
from tieredckpt.rpc.agent_client import AgentClient
from tieredckpt.rpc.messages import agent as messages

RSS_BYTES_MAX = 80 << 20


def agent_pid(runtime_dir: Path) -> int:
    with AgentClient(runtime_dir, deadline_s=10) as client:
        return client.health().pid


def starts(runtime_dir: Path, answer: Any) -> None:
    path = find_or_start(runtime_dir, start_timeout_s=60)
    answer.send(agent_pid(path))


def test_eight_processes_get_one_agent_that_outlives_them(runtime_dir: Path):
    answers, theirs = context.Pipe(duplex=False)
    starters = [context.Process(target=starts, args=(runtime_dir, theirs)) for _ in range(8)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join(120)
    assert [starter.exitcode for starter in starters] == [0] * 8
    (pid,) = {answers.recv() for _ in starters}
    assert (runtime_dir / "agent.lock").read_text().strip() == str(pid)
    assert (runtime_dir / "agent.log").read_text().count(" serves ") == 1
    assert agent_pid(runtime_dir) == pid
    assert os.getsid(pid) != os.getsid(0)


def test_a_runtime_folder_on_a_disk_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """By the process that wants an agent there, and in the agent's log."""
    if runtime.file_system_of(tmp_path) in runtime.MEMORY_FILE_SYSTEMS:
        pytest.skip("the folder of tests is on a tmpfs")
    folder = find_or_start(tmp_path / "run", start_timeout_s=60)
    with AgentClient(folder, deadline_s=10) as client:
        client.shutdown()
    for text in (caplog.text, (folder / "agent.log").read_text()):
        assert text.count("not on a tmpfs") == 1


@pytest.mark.full
def test_it_is_small(runtime_dir: Path, tmp_path: Path):
    with AgentProcess(runtime_dir, new=True):
        spec = spec_of(tiers={"disk": tmp_path / "disk"})
        with FakeTrainer(runtime_dir, spec, size=9 << 20) as trainer:
            for step in range(10):
                saved = trainer.save(step, tiers=("disk",))
            wait_until(lambda: trainer.client.progress(saved.save_id).levels["disk"] == "done")
            trainer.holdings()
            status = trainer.client.status()
        assert status.rss_bytes < RSS_BYTES_MAX, status.rss_bytes / 2**20
        maps = Path(f"/proc/{status.health.pid}/maps").read_text()
        assert "libtorch" not in maps


def test_only_one_agent_runs_in_a_folder(runtime_dir: Path):
    with AgentProcess(runtime_dir, new=True) as first:
        done = subprocess.run(
            [sys.executable, "-m", "tieredckpt.agent.daemon", "--runtime-dir", str(runtime_dir)],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 1
        assert f"process {first.pid}" in done.stderr
        assert "tieredckpt agent stop" in done.stderr


def test_sigterm_is_a_clean_stop_and_keeps_checkpoints(runtime_dir: Path):
    with AgentProcess(runtime_dir) as agent, FakeTrainer(runtime_dir, spec_of()) as trainer:
        saved = trainer.save(1)
        assert agent.stop() == 0
        assert not (runtime_dir / "agent.sock").exists()
        with AgentProcess(runtime_dir):
            trainer.check(saved)


def test_a_stale_socket_of_a_killed_agent_is_no_obstacle(runtime_dir: Path):
    agent = AgentProcess(runtime_dir)
    agent.kill()
    assert (runtime_dir / "agent.sock").exists()
    with pytest.raises(AgentError, match=r"agent\.start: auto"):
        find_or_start(runtime_dir, start="never")
    find_or_start(runtime_dir, start_timeout_s=60)
    assert agent_pid(runtime_dir) != agent.pid


def test_a_save_waits_for_a_service_that_starts_again_and_is_then_told_of_skipped_ones(
    runtime_dir: Path,
):
    settings = {
        "namespace": "run", "memory": {"capacity": "256MiB", "wait": "60s"},
        "agent": {"start": "never", "runtime_dir": str(runtime_dir)},
    }  # fmt: skip
    config = load_config(settings, {})
    with pytest.raises(AgentError, match=r"after 0 s and agent.start is never"):  # no save
        attach(config, "run", runtime_dir)
    service = AgentProcess(runtime_dir)
    client, _ = attach(config, "run", runtime_dir)
    with client, ThreadPoolExecutor(1) as pool:
        client.save_failed((), 2)
        client.report_skipped(6)  # four more, for which no agent answered
        service.kill()
        asked = pool.submit(client.reserve, 1 << 20)
        with AgentProcess(runtime_dir) as service:
            assert asked.result(60).ticket
            assert client.status().namespaces[0].skipped_saves == 6
            client.report_skipped(7)  # by the same agent, which hung
            client.peers()
            assert client.status().namespaces[0].skipped_saves == 7
            service.kill()
            with pytest.raises(AgentError):  # what only looks does not wait
                client.call(messages.AskTroubles(), within_s=5.0, revive=False)


@pytest.mark.full
def test_an_agent_that_dies_while_it_is_asked(runtime_dir: Path):
    """It took the connection and said nothing: the starter waits for its end, and starts one."""
    runtime_dir.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as dying:
        dying.bind(str(runtime_dir / "agent.sock"))
        dying.listen()

        def die() -> None:
            dying.accept()[0].close()
            dying.close()

        thread = threading.Thread(target=die, daemon=True)
        thread.start()
        find_or_start(runtime_dir, start_timeout_s=60)
        thread.join(60)
        assert not thread.is_alive(), "nobody asked it"
    assert agent_pid(runtime_dir) != os.getpid()


@pytest.mark.full
def test_an_agent_that_dies_between_a_grant_and_its_slot(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    """The next one knows nothing of the ticket: the trainer asks it for a slot of its own."""

    def revive() -> None:
        find_or_start(runtime_dir, start_timeout_s=60)

    revive()
    with AgentClient(runtime_dir, revive=revive) as client:
        client.open_session("run", spec_of())
        ring = SlotRing(client, 1)
        asked, real = [], client.reserve

        def reserve(size: int) -> messages.Grant:
            grant = real(size)
            if not asked:
                dying = os.pidfd_open(agent_pid(runtime_dir))
                signal.pidfd_send_signal(dying, signal.SIGKILL)
                assert select.select([dying], [], [], 60)[0]  # and its sockets are closed
                os.close(dying)
                revive()
            asked.append(grant)
            return grant

        monkeypatch.setattr(client, "reserve", reserve)
        slot = ring.acquire(1 << 20)
        assert [each.segment_id for each in asked][1:] == [slot.segment_id]
        ring.abandon(slot)
        ring.close()
        client.shutdown()


def test_a_forked_child_does_not_prolong_a_session(runtime_dir: Path):
    with AgentProcess(runtime_dir) as agent, agent.client() as watcher:
        trainer = FakeTrainer(runtime_dir, spec_of())
        ready_r, ready_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(ready_w, b"x")
            signal.pause()
        try:
            os.read(ready_r, 1)
            trainer.close()
            wait_until(lambda: watcher.status().namespaces[0].sessions == 0)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(ready_r)
            os.close(ready_w)


@pytest.mark.full
def test_idle_timeout(runtime_dir: Path):
    with AgentProcess(runtime_dir, idle_timeout_s=0.6) as agent:
        with FakeTrainer(runtime_dir, spec_of()) as trainer:
            trainer.save(1)
            with pytest.raises(subprocess.TimeoutExpired):
                agent.wait_end(deadline_s=2.0)  # a session is open
        assert agent.wait_end() == 0
        assert "idle for" in agent.log()
    assert len(list((runtime_dir / "slots").iterdir())) >= 1


@pytest.mark.full
def test_a_start_that_fails_shows_the_end_of_the_log(runtime_dir: Path):
    (runtime_dir / "slots").write_text("in the way")
    with pytest.raises(AgentError, match="ended while starting") as caught:
        find_or_start(runtime_dir, start_timeout_s=60)
    assert "slots" in str(caught.value)
    assert "The end of its log" in str(caught.value)


def test_an_agent_that_hangs_is_given_up(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "HEALTH_WAIT_S", 0.2)
    with AgentProcess(runtime_dir) as agent:
        os.kill(agent.pid, signal.SIGSTOP)
        with pytest.raises(AgentError, match="stopped or overloaded"):
            find_or_start(runtime_dir)
        os.kill(agent.pid, signal.SIGCONT)


def test_an_agent_of_another_version(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch):
    with AgentProcess(runtime_dir) as agent:
        spoken = messages.API_VERSION
        monkeypatch.setattr(messages, "API_VERSION", 99)
        monkeypatch.setattr(launch, "API_VERSION", 99)
        with pytest.raises(AgentError, match="another version") as caught:
            find_or_start(runtime_dir)
        assert "tieredckpt agent stop" in str(caught.value)
        with agent.client() as client:
            with pytest.raises(AgentError, match=f"speaks API {spoken}, the caller 99") as caught:
                client.status()
            assert f"send the header X-Tieredckpt-Api: {spoken}, or" in str(caught.value)
            client.shutdown()  # an old agent can always be stopped
        assert agent.wait_end() == 0
    assert agent_client.m.API_VERSION == 99


# --- the runtime folder ---------------------------------------------------------------------------


def test_another_users_folder(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runtime.os, "geteuid", lambda: 4242)
    with pytest.raises(AgentError, match="belongs to user") as caught:
        find_or_start(runtime_dir)
    assert "TIEREDCKPT_RUNTIME_DIR" in str(caught.value)


def test_a_folder_that_is_open_to_others(runtime_dir: Path):
    runtime_dir.chmod(0o755)
    with pytest.raises(AgentError, match="chmod 700"):
        find_or_start(runtime_dir)


def test_a_folder_that_cannot_be(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AgentError, match=r"agent\.runtime_dir"):
        find_or_start(tmp_path / "file" / "x")
    with pytest.raises(AgentError, match="107"):
        find_or_start(tmp_path / ("x" * 120))


OTHER_USER = "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"


@contextlib.contextmanager
def other_user(does: str, *arguments: Path) -> Iterator[subprocess.Popen[str]]:
    """Another user of this host (65534), and the Python that it runs."""
    if os.geteuid() != 0:
        pytest.skip("only root can be several users")
    command = [sys.executable, "-c", OTHER_USER + does, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.wait(30) == 0


@pytest.fixture
def open_folder(runtime_dir: Path) -> Path:
    """Where everybody makes folders, as in /dev/shm; the runtime folder beside it is private."""
    folder = runtime_dir / "everybody"
    folder.mkdir()
    folder.chmod(0o1777)
    runtime_dir.chmod(0o711)
    return folder


@pytest.mark.parametrize("below", ["", "x/y"])
def test_a_link_that_another_user_has_planted(open_folder: Path, below: str):
    """It leads into a folder of ours, in which nothing is to be made; or later into one of his."""
    private = open_folder.parent / "private"
    private.mkdir(mode=0o700)
    planted = open_folder / "tieredckpt-0"
    with other_user("os.symlink(*sys.argv[1:])", private, planted):
        pass
    with pytest.raises(AgentError, match="of user 65534") as caught:
        find_or_start(planted / below)
    assert "agent.runtime_dir" in str(caught.value)
    assert list(private.iterdir()) == []
    with pytest.raises(AgentError, match="of user 65534"):
        runtime.prepare_runtime_dir(planted / below, make=False)


def test_links_of_our_own_and_of_the_system(open_folder: Path):
    """On the way they may be, as /var/run is; where they lead is looked at as they do."""
    real = open_folder / "real"
    real.mkdir(mode=0o700)
    (open_folder / "to").symlink_to("loop/./real")
    (open_folder / "loop").symlink_to(open_folder)
    found = runtime.prepare_runtime_dir(open_folder / "to" / "a" / "b")
    assert found.path == open_folder / "to" / "a" / "b"
    assert (real / "a" / "b").stat().st_mode & 0o777 == 0o700
    with pytest.raises(AgentError, match=r"reached by a link.*name the folder itself"):
        runtime.prepare_runtime_dir(open_folder / "to")
    (open_folder / "round").symlink_to("round")
    with pytest.raises(AgentError, match="reached by a link"):
        runtime.prepare_runtime_dir(open_folder / "round" / "a")
    assert not runtime.prepare_runtime_dir(open_folder / "new", make=False).path.exists()


LISTENS = """
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
os.chmod(sys.argv[1], 0o666)
print("ready", flush=True)
server.settimeout(20)
connection, _ = server.accept()
connection.settimeout(20)
print(len(connection.recv(1000)), flush=True)
"""


@pytest.mark.parametrize("name", ["agent.sock", "fds.sock"])
def test_a_server_of_another_user_is_told_nothing(open_folder: Path, name: str):
    with other_user(LISTENS, open_folder / name) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with AgentClient(open_folder, deadline_s=10) as client:
            call = client.health if name == "agent.sock" else lambda: client.redeem("ab" * 16)
            with pytest.raises(AgentError, match=r"user 65534 listens on .* runs as 0") as caught:
                call()
        assert "run this process as that user" in str(caught.value)
        assert process.stdout.readline() == "0\n"


def test_where_it_is_by_default():
    assert default_runtime_dir({}) == Path(f"/dev/shm/tieredckpt-{os.geteuid()}")
    assert default_runtime_dir({"TIEREDCKPT_RUNTIME_DIR": "/x"}) == Path("/x")


def test_a_host_is_its_boot_or_its_given_name():
    assert host_id({"TIEREDCKPT_NODE_NAME": "node-3"}) == "node-3"
    assert re.fullmatch(r"[0-9a-f-]{36}", host_id({}))


def test_what_it_survives(monkeypatch: pytest.MonkeyPatch):
    for namespace, detached, environ, want in [
        ("pid:[4026531836]", True, {}, "host user session"),
        ("pid:[4026531836]", True, {"SLURM_STEP_ID": "1"}, "process"),
        ("pid:[4026531836]", False, {}, "host user session"),
        ("pid:[1]", True, {}, "process"),
        ("pid:[1]", False, {}, "container"),
    ]:
        monkeypatch.setattr(runtime, "_pid_namespace", lambda value=namespace: value)
        monkeypatch.setattr(runtime.Path, "exists", lambda self: False)
        assert what_it_survives(detached=detached, environ=environ) == want
