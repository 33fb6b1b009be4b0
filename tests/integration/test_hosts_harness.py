"""A host that a test kills is gone, as the tests of lost hosts rely on."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from pathlib import Path

from tests.support.hosts import JOB, Cluster, Host, needs_links
from tieredckpt.testing import netns

PATIENCE_S = 20.0


class Echo:
    """A server that sends back what it gets, on a host's address."""

    def __init__(self, host: Host, subnet: int, port: int = 7411) -> None:
        with netns.inside(host.namespace or ""):
            self._listener = socket.create_server((host.address(subnet), port))
        self.address = (host.address(subnet), port)
        self.seen_from: list[str] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                line, peer = self._listener.accept()
            except OSError:
                return
            self.seen_from.append(peer[0])
            threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        with line:
            try:
                while data := line.recv(1 << 16):
                    line.sendall(data)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def call(host: Host, address: tuple[str, int], *, patience_s: float = 5.0) -> socket.socket:
    with netns.inside(host.namespace or ""):
        line = socket.socket()
    line.settimeout(patience_s)
    try:
        line.connect(address)
    except OSError:
        line.close()
        raise
    return line


def heard(line: socket.socket, *, patience_s: float) -> bool:
    line.settimeout(patience_s)
    try:
        line.sendall(b"hello")
        return line.recv(100) == b"hello"
    except TimeoutError:
        return False


def test_a_killed_host_leaves_nothing_and_tells_nobody(tmp_path: Path):
    needs_links()
    with Cluster(tmp_path, 3) as cluster, cluster.job() as job:
        lost, near, _ = cluster.hosts
        lost.start_agent()
        pids = [job.trainers[0].pid, lost.agent.pid if lost.agent else 0]
        with closing(Echo(lost, JOB)) as echo, call(near, echo.address) as line:
            assert heard(line, patience_s=PATIENCE_S)
            lost.kill()
            for pid in pids:
                assert not Path(f"/proc/{pid}").exists()
            assert not lost.runtime_dir.exists()
            assert not lost.disk.exists()
            assert not heard(line, patience_s=0.3)
        fresh = cluster.replace(lost)
        assert (fresh.name, fresh.address()) == ("h4", "10.77.0.4")
        assert cluster.hosts[0] is fresh
        lost.boot()
        assert list(lost.runtime_dir.iterdir()) == []
        with closing(Echo(lost, JOB)) as echo, call(fresh, echo.address) as line:
            assert heard(line, patience_s=PATIENCE_S)
