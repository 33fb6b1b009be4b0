"""Processes that send segments: they work, are replaced when they die, and end with the agent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.peer_server import HERE, NAMESPACE, SEGMENT, TOKEN, serving
from tieredckpt.errors import TierUnavailableError
from tieredckpt.transport import peer_workers
from tieredckpt.transport.auth import Secret
from tieredckpt.transport.peer_client import PeerClient

SECRET = Secret(TOKEN)
ROOT = Path(__file__).parents[3]


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def read(client: PeerClient, size: int) -> bytes:
    data = bytearray(size)
    with client.open_range(SEGMENT, "memory", 0, size) as stream:
        stream.read_into(memoryview(data))
    return bytes(data)


def test_several_streams_over_two_processes():
    data = os.urandom(8 << 20)
    with (
        serving(workers=2) as (peer, entry, server),
        PeerClient(entry, NAMESPACE, SECRET) as client,
    ):
        peer.add(SEGMENT, data)
        peer.add(SEGMENT, data[:5000], "nvme")
        assert server.workers is not None
        until(lambda: len(server.workers.pids) == 2)
        right: list[bool] = []

        def work() -> None:
            for _ in range(5):
                right.append(read(client, len(data)) == data)
                right.append(client.identify() == HERE)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(100)
        assert len(right) == 40
        assert all(right)
        small = bytearray(5000)
        with client.open_range(SEGMENT, "nvme", 0, 5000) as stream:
            stream.read_into(memoryview(small))
        assert small == data[:5000]
        pids = server.workers.pids
        until(lambda: peer.open_segments == 0)
    assert all(is_gone(pid) for pid in pids)


def test_a_process_that_is_killed_while_it_sends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peer_workers, "RESTART_S", 0.05)
    size = 64 << 20
    with (
        serving(workers=2) as (peer, entry, server),
        PeerClient(entry, NAMESPACE, SECRET) as client,
    ):
        peer.add(SEGMENT, bytes(size))
        assert server.workers is not None
        before = server.workers.pids
        stream = client.open_range(SEGMENT, "memory", 0, size)
        stream.read_into(memoryview(bytearray(1000)))
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(TierUnavailableError, match="missing"):
            stream.read_into(memoryview(bytearray(size - 1000)))
        until(lambda: peer.open_segments == 0)
        # (A process that is dying, and not yet known to be dead, would be given the next one.)
        until(lambda: not set(server.workers.pids) & set(before))
        # Whether by threads of the agent or by new processes: it goes on.
        assert read(client, size) == bytes(size)
        until(lambda: len(set(server.workers.pids) - set(before)) == 2)
        assert read(client, size) == bytes(size)
        assert all(is_gone(pid) for pid in before)


def test_one_that_died_just_before_the_stop_is_reaped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peer_workers, "RESTART_S", 600.0)
    with serving(workers=2) as (_, _, server):
        assert server.workers is not None
        victim = server.workers.pids[0]
        os.kill(victim, signal.SIGKILL)
        until(lambda: victim not in server.workers.pids)
    assert not Path(f"/proc/{victim}").exists()  # not even as a zombie


def test_a_process_that_is_stopped_while_it_sends_is_replaced(monkeypatch: pytest.MonkeyPatch):
    for name in ("RESTART_S", "LOOK_S"):
        monkeypatch.setattr(peer_workers, name, 0.1)
    size = 64 << 20
    with (
        serving(workers=2) as (peer, entry, server),
        PeerClient(entry, NAMESPACE, SECRET) as client,
    ):
        peer.add(SEGMENT, bytes(size))
        assert server.workers is not None
        before = server.workers.pids
        stream = client.open_range(SEGMENT, "memory", 0, size)
        stream.read_into(memoryview(bytearray(1000)))
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        # Not for longer than these are meant: on a busy machine one that starts is silent, too.
        with monkeypatch.context() as patch:
            patch.setattr(peer_workers, "SILENCE_S", 0.5)
            with pytest.raises(TierUnavailableError):
                stream.read_into(memoryview(bytearray(size - 1000)))
            until(lambda: set(server.workers.pids) - set(before))
            # The other one is found out when it has something to do.
            while set(server.workers.pids) & set(before):
                with contextlib.suppress(TierUnavailableError):
                    read(client, size)
        assert read(client, size) == bytes(size)
        for pid in before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


SERVE = """
import sys, time
from tests.support.peer_server import serving
with serving(workers=2) as (_, _, server):
    print(*server.workers.pids, flush=True)
    time.sleep(600)
"""


def test_they_end_when_the_agent_is_killed():
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    with process.stdout:
        pids = [int(each) for each in process.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(is_gone(pid) for pid in pids)
        process.kill()
        process.wait(30)
        until(lambda: all(is_gone(pid) for pid in pids))
