"""Other hosts reach this one at a fixed port, also after its certificates or TLS have changed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.support.peer_server import TOKEN, Peer
from tests.unit.rpc.test_peer_tls import write
from tieredckpt.agent.host.addresses import pid_on_port
from tieredckpt.agent.host.listeners import Listeners
from tieredckpt.agent.host.runtime import RuntimeDir
from tieredckpt.errors import AgentError
from tieredckpt.rpc.auth import Secret
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.peer_client import PeerClient

ADDRESS = "127.88.0.1"


class Host(Peer):
    """An agent as far as other hosts reach it. A session's name begins with its namespace."""

    def __init__(self, runtime_dir: Path) -> None:
        super().__init__(runtime_dir, Secret(TOKEN))
        self.live: set[str] = set()
        with socket.create_server((ADDRESS, 0)) as listener:
            self.port = listener.getsockname()[1]
        self.restart()

    def restart(self) -> None:
        self.listeners = Listeners(
            RuntimeDir(self.folder), "here", self, is_live=lambda name: name in self.live,
            in_use=lambda namespace: any(name.startswith(namespace) for name in self.live),
        )  # fmt: skip

    def peer_served(self, namespace: str) -> tuple[m.HostEntry, Secret]:
        return self.listeners.served(namespace)

    def listen(self, session: str, tls: m.TlsSpec | None) -> None:
        request = m.Listen(
            session_id=session, token=TOKEN, tls=tls, interfaces=(), cidrs=(f"{ADDRESS}/32",),
            port=self.port, labels={},
        )  # fmt: skip
        self.listeners.listen(session.partition(":")[0], request)

    def is_reached(self, namespace: str, tls: m.TlsSpec | None) -> bool:
        entry = m.HostEntry(
            host_id="here", incarnation="1" * 32, addresses=(f"{ADDRESS}:{self.port}",)
        )
        with PeerClient(entry, namespace, Secret(TOKEN, tls)) as client:
            return client.identify().host_id == "here"


@pytest.fixture
def host(runtime_dir: Path) -> Iterator[Host]:
    host = Host(runtime_dir)
    yield host
    host.listeners.stop()


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.mark.parametrize("restarts", [False, True])
def test_every_start_listens_after_a_change_of_tls(
    host: Host, tmp_path: Path, ca: trustme.CA, restarts: bool
):
    """Other paths of the same certificates, no TLS, TLS again: by the agent that served before,
    or by one that serves again as its record says, beside the namespace of an earlier job.
    """
    one, other = (write(tmp_path / name, ca, ADDRESS) for name in ("one", "other"))
    host.listen("earlier:0", one)
    for number, tls in enumerate([one, other, None, one]):
        if restarts:
            host.listeners.stop()
            host.restart()
            for namespace in ("earlier", "job"):
                host.listeners.restore(namespace)
        host.live = {f"job:{number}"}
        host.listen(f"job:{number}", tls)
        assert host.is_reached("job", tls)


def test_what_cannot_be_opened_leaves_what_is_served(host: Host, tmp_path: Path, ca: trustme.CA):
    tls = write(tmp_path / "one", ca, ADDRESS)
    host.listen("job:0", tls)
    for session in ("job:1", "another:0"):  # also to an ended job's namespace beside it
        with pytest.raises(AgentError, match="cannot"):
            host.listen(session, m.TlsSpec(cert="/none", key="/none", ca="/none"))
        assert host.is_reached("job", tls)


def test_a_taken_port_is_refused_with_the_one_that_has_it(
    host: Host, tmp_path: Path, ca: trustme.CA
):
    serve = f"import socket; s = socket.create_server(('{ADDRESS}', {host.port})); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-IS", "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as foreign:
        assert foreign.stdout is not None
        foreign.stdout.read(1)
        with pytest.raises(AgentError, match=f"in use.*; process {foreign.pid} listens there"):
            host.listen("job:0", None)
        foreign.communicate(b"\n")
    host.live = {"other:0"}
    host.listen("other:0", None)
    with pytest.raises(AgentError, match=r"this agent, for another job .* listens there"):
        host.listen("job:0", write(tmp_path / "one", ca, ADDRESS))
    assert host.is_reached("other", None)
    assert pid_on_port(host.port) == os.getpid()
    host.listeners.stop()
    assert pid_on_port(host.port) is None
