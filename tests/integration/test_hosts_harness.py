"""The hosts and the proxy that other tests rely on do what they say."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.agent import ROOT, wait_until
from tests.support.faults import Died
from tests.support.hosts import DATA, JOB, Cluster, Host, needs_links
from tests.support.proxy import Proxy
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


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host, Echo]]:
    needs_links()
    with Cluster(tmp_path_factory.mktemp("hosts"), 2) as cluster:
        one, other = cluster.hosts
        with closing(Echo(other, DATA)) as echo:
            yield one, other, echo


@pytest.mark.parametrize("noticed", [False, True])
def test_a_cut_link_loses_what_is_sent_and_a_healed_one_delivers_it(
    pair: tuple[Host, Host, Echo], noticed: bool
):
    one, other, echo = pair
    with call(one, echo.address) as line:
        assert heard(line, patience_s=PATIENCE_S)
        other.cut(DATA, noticed=noticed)
        try:
            assert not heard(line, patience_s=0.3)
        finally:
            other.heal(DATA)
        line.settimeout(PATIENCE_S)
        assert line.recv(100) == b"hello"


def test_two_hosts_are_parted_while_others_hear_both(pair: tuple[Host, Host, Echo]):
    one, other, echo = pair
    one.part(other)
    try:
        with pytest.raises(OSError):
            call(one, echo.address, patience_s=0.3)
    finally:
        one.part(other, parted=False)
    with call(one, echo.address, patience_s=PATIENCE_S) as line:
        assert heard(line, patience_s=PATIENCE_S)


def test_a_host_is_a_place_for_ranks_and_an_agent(tmp_path: Path):
    with Cluster(tmp_path, 2) as cluster, cluster.job(ranks=2) as job:
        assert job.world == 4
        cluster.start_agents()
        for host in cluster.hosts:
            with closing(host.client()) as client:
                assert client.health().host_id == host.name


def test_loopback_is_the_fallback(tmp_path: Path):
    with Cluster(tmp_path, 2, links=False) as cluster, cluster.job() as job:
        assert [host.namespace for host in cluster.hosts] == [None, None]
        assert job.world == 2
        host = cluster.hosts[0]
        host.start_agent()
        with closing(host.client()) as client:
            assert client.health().host_id == "h1"
        host.kill()
        with pytest.raises(Died):
            job.trainers[0].result(deadline_s=PATIENCE_S)


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


def test_racks_are_dealt_out(tmp_path: Path):
    with Cluster(tmp_path, 3, racks=2) as cluster:
        assert [host.labels["rack"] for host in cluster.hosts] == ["r1", "r2", "r1"]
        cluster.hosts[1].kill()
        assert cluster.replace(cluster.hosts[1]).labels == {"rack": "r2"}


LEAVE = """
import os, signal, sys
from pathlib import Path
from tests.support.hosts import Cluster
cluster = Cluster(Path(sys.argv[1]), 1)
agent = cluster.hosts[0].start_agent()
print(cluster.network.namespace("h1"), cluster.memory, agent.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_has_left_is_swept(tmp_path: Path):
    needs_links()
    done = subprocess.run(
        [sys.executable, "-c", LEAVE, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    name, memory, pid = done.stdout.split()
    assert name in netns.sweep() or not Path("/run/netns", name).exists()
    assert not Path("/run/netns", name).exists()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    with Cluster(tmp_path, 1):
        from tests.support import hosts

        hosts.sweep.cache_clear()
        hosts.sweep()
        assert not Path(memory).exists()


# --- the proxy ------------------------------------------------------------------------------------


@pytest.fixture
def loop_echo() -> Iterator[str]:
    """An echo server on loopback."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(line,), daemon=True).start()

    def answer(line: socket.socket) -> None:
        with line:
            try:
                while data := line.recv(1 << 16):
                    line.sendall(data)
            except OSError:
                pass

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def dial(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def receive(line: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size and (data := line.recv(size - len(found))):
        found += data
    return bytes(found)


def echo_for_ever(line: socket.socket) -> None:
    while True:
        line.sendall(bytes(100))
        receive(line, 100)


def test_a_proxy_forwards_and_passes_the_end_on(loop_echo: str):
    sent = os.urandom(3 << 20)
    with Proxy() as proxy, dial(proxy.forward(loop_echo)) as line:
        threading.Thread(target=line.sendall, args=(sent,)).start()
        assert receive(line, len(sent)) == sent
        line.shutdown(socket.SHUT_WR)
        assert line.recv(1) == b""
        wait_until(lambda: proxy.open_lines == 0)
        assert proxy.forwarded_bytes == 2 * len(sent)
        assert proxy.opened == 1


def test_a_proxy_is_late_and_slow(loop_echo: str):
    with Proxy() as proxy, dial(proxy.forward(loop_echo)) as line:
        proxy.latency_s = 0.2
        began_s = time.monotonic()
        assert heard(line, patience_s=PATIENCE_S)
        assert time.monotonic() - began_s >= 0.4
        proxy.latency_s, proxy.bytes_per_s = 0.0, 100_000
        began_s = time.monotonic()
        line.sendall(bytes(20_000))
        assert receive(line, 20_000) == bytes(20_000)
        assert time.monotonic() - began_s >= 0.35  # both directions share the rate
        proxy.heal()
        assert heard(line, patience_s=PATIENCE_S)


def test_a_proxy_cuts_and_refuses(loop_echo: str):
    with Proxy() as proxy:
        address = proxy.forward(loop_echo)
        with dial(address) as line:
            assert heard(line, patience_s=PATIENCE_S)
            assert proxy.cut() == 1
            with pytest.raises(ConnectionResetError):
                line.recv(1)
        proxy.refusing = True
        # It may come as early as in connect(), when the kernel has not finished that by itself.
        with pytest.raises(ConnectionResetError), dial(address) as line:
            line.recv(1)
        proxy.refusing = False
        proxy.cut_after_bytes = (1000, 2000)
        with dial(address) as line, pytest.raises(ConnectionError):
            echo_for_ever(line)
        assert 1000 <= proxy.forwarded_bytes < 5000


def test_a_proxy_stalls_and_half_opens(loop_echo: str):
    with Proxy() as proxy:
        address = proxy.forward(loop_echo)
        with dial(address) as line:
            assert heard(line, patience_s=PATIENCE_S)
            proxy.stall()
            assert not heard(line, patience_s=0.2)
            proxy.heal()
            line.settimeout(PATIENCE_S)
            assert line.recv(100) == b"hello"
            assert proxy.half_open() == 1
            assert not heard(line, patience_s=0.2)
            line.sendall(b"and again")


def test_a_proxy_on_a_link_is_not_seen(tmp_path: Path):
    needs_links()
    with Cluster(tmp_path, 2) as cluster:
        near, far = cluster.hosts
        proxy = far.behind_proxy()
        with closing(Echo(far, DATA)) as there, closing(Echo(near, DATA)) as here:
            with call(near, there.address) as line:
                assert heard(line, patience_s=PATIENCE_S)
            with call(far, here.address) as line:
                assert heard(line, patience_s=PATIENCE_S)
                assert (proxy.opened, there.seen_from, here.seen_from) == (
                    2, ["10.77.1.1"], ["10.77.1.2"],
                )  # fmt: skip
                proxy.cut()
                with pytest.raises(ConnectionResetError):
                    line.recv(1)
        far.kill()
        assert not Path("/run/netns", f"{far.namespace}-via1").exists()
